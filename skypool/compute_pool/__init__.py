"""`ComputePool`, the object that a user holds: a pool with what watches it.

- `compute_pool`: `ComputePool`. What it does with nodes and calls is in `skypool.pool`.
- `watches`: says which watches a pool has.
"""

__all__ = ["compute_pool", "watches"]
