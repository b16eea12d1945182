"""Engines: run the parallel tasks of other libraries (joblib, Dask, Ray) on the nodes of a pool.

Engines use only the public names of `skypool`. Each imports its library at its first use.

- `joblib`: a backend of joblib, for scikit-learn and programs that use `joblib.Parallel`.
- `dask`: a cluster of Dask, for `dask.array`, `dask.dataframe` and `distributed.Client`.
- `ray`: a cluster of Ray, for programs with tasks and actors, and for Ray Data, Train and Tune.
- `_dask_cluster`: the class of the cluster of Dask, and those of its scheduler and workers.
- `_dask_node`: the functions that run a scheduler or a worker on a node.
- `_joblib_backend`: the class of the backend of joblib.
- `_batch_queue`: sends the batches of one parallel call to the pool.
- `_joblib_call`, `_joblib_node`: the functions that run a batch of tasks on a node.
- `_pools`: starts the pool of a cluster.
- `_ray_cluster`: the class of the cluster of Ray.
- `_ray_node`: the functions that run Ray's daemons, jobs and drivers on a node.
- `_shared_arrays`: sends a large array that several tasks use to each node once.
- `_trust`: refuses pools whose machines an engine must not run on.
- `_versions`: compares the versions of packages on the nodes with those of the client.

Words of this package:

- node: a rented machine of a pool. It has a number in its pool.
- slot: a place on a node that runs one call at a time.
- service: a long-lived call of a pool, which takes no slot.
- report: the facts of a node that a cluster needs, such as its address and its free ports. The node itself makes it.
- forward: a port of this computer that leads to a port of a node.
- place: room for one Dask worker on a node.
- head: the node with the lowest number, which runs Dask's scheduler or Ray's head.
- batch: a list of tasks that joblib has put together. Each batch is one call of the pool.
- large array: a numpy array among the arguments of joblib's tasks that is sent to each node once.
- stranger: an owner of machines whose results may be plain data only (`trust="data"`).
"""

__all__ = [
    "_batch_queue",
    "_dask_cluster",
    "_dask_node",
    "_joblib_backend",
    "_joblib_call",
    "_joblib_node",
    "_pools",
    "_ray_cluster",
    "_ray_node",
    "_shared_arrays",
    "_trust",
    "_versions",
    "dask",
    "joblib",
    "ray",
]
