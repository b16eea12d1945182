"""`ComputePool` and its life: nodes are started, replaced when they are lost, and ended.

- `pool`: `ComputePool`, the object that a user holds.
- `lifecycle`: a pure state machine that decides when to launch, drain and end nodes, and when a node that is lost or
  has a spot notice is replaced.
- `states`: its states, events and actions, as values; `replacement`: decides if a lost node is replaced.
- `engine`: does what `lifecycle` decides: rents and ends machines, and gives nodes calls.
- `connector`: turns rented machines into nodes; `node_listener`: passes the messages of a node on.
- `spot`: watches a node after its spot notice, until its machine is gone.
- `trust_levels`: decides for each node if its results may be unpickled.
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
