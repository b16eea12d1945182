"""`ComputePool`, the user's object for a pool.

- `compute_pool`: `ComputePool`. The parts that handle nodes and calls are in `skypool.pool`.
- `shown`: its base class, which shows the pool's nodes, costs and report.
- `watches`: makes the watches of a pool: objects that observe it, such as its logs.
"""

__all__ = ["compute_pool", "shown", "watches"]
