"""`ComputePool`, and how it lives: nodes are started, replaced when they are lost, and ended.

- `pool`: `ComputePool`, the object that a user holds.
- `lifecycle`: a pure state machine that decides: launch, replace (also after a spot notice), drain, end.
- `states`: its states, events and actions, as values; `replacement`: when a lost slice is replaced.
- `engine`: does what `lifecycle` decides: rents and ends machines, and gives nodes calls.
- `connector`: makes nodes of rented machines; `node_listener`: hands on what a node says.
- `spot`: follows nodes with a spot notice until their machines are gone.
- `trust_levels`: decides for each node whether its results may be unpickled.
- `shutdown`: ends open pools when the interpreter exits.
"""

__all__ = [
    "connector",
    "engine",
    "lifecycle",
    "node_listener",
    "pool",
    "replacement",
    "shutdown",
    "spot",
    "states",
    "trust_levels",
]
