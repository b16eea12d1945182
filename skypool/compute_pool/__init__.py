"""`ComputePool`, the object that a user holds: a pool with what watches it.

- `compute_pool`: `ComputePool`. What it does with nodes and calls is in `skypool.pool`.
- `shown`: the part of it that tells of the pool: its nodes, its costs, its report.
- `watches`: says which watches a pool has.
"""

__all__ = ["compute_pool", "shown", "watches"]
