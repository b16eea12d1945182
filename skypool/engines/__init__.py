"""Engines: other libraries' ways to run tasks in parallel, on the nodes (rented machines) of a pool.

They use only what `skypool` offers every program, and import the other library when they are used.

- `joblib`: a backend of joblib, for scikit-learn and programs that use `joblib.Parallel`.
- `dask`: a cluster of Dask, for `dask.array`, `dask.dataframe` and `distributed.Client`.
- `ray`: a cluster of Ray, for programs with tasks and actors, and for Ray Data, Train and Tune.
- `_dask_cluster`: the class of that cluster, and those of its scheduler and workers.
- `_dask_node`: the functions that run a scheduler or a worker on a node.
- `_joblib_backend`: the class of that backend.
- `_batch_queue`: sends the batches of one parallel call to the pool.
- `_joblib_call`, `_joblib_node`: the functions that run a batch of tasks on a node.
- `_pools`: starts the pool of a cluster.
- `_ray_cluster`: the class of the cluster of Ray.
- `_ray_node`: the functions that run Ray's daemons, jobs and drivers on a node.
- `_shared_arrays`: sends a large array that several tasks have to each node once.
- `_trust`: refuses pools whose machines an engine must not run on.
- `_versions`: compares the versions of packages on the nodes with those of the client.
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
