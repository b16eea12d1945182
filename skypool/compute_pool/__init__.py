"""`ComputePool`, the user's object for a pool.

- `compute_pool`: `ComputePool`. The parts that handle nodes and calls are in `skypool.pool`.
- `shown`: its base class, which shows the pool's nodes, costs and report.
- `watch_list`: makes the watches of a pool: objects that observe it, such as its logs.

Words that this package uses:

- node: a machine of a pool, which runs calls. Call: a function with its arguments.
- engine: the object that runs a pool, `skypool.pool.engine.PoolEngine`.
- stream: the items of a generator that runs on a node.
- offer: a machine type that a provider sells, with its price. Plan: the offers that a pool tries, in this order.
- slice: several machines (hosts) that are rented together, such as a TPU slice. Each host is a node.
- gang: a call that runs as several processes. Service: a long-lived call beside all others.
"""

__all__ = ["compute_pool", "shown", "watch_list"]
