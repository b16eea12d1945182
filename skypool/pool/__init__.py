"""`ComputePool`, and its life.

`pool` is what the user holds. `lifecycle` decides what happens next (pure), `engine` does it: connects nodes, renews
their leases, replaces the lost. `spot` watches for spot notices, `trust_levels` decides how far each node is
believed, `shutdown` ends open pools when the interpreter exits.
"""

__all__ = ["engine", "lifecycle", "pool", "shutdown", "spot", "trust_levels"]
