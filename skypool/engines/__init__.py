"""Engines: other libraries' ways to run tasks in parallel, on the nodes (rented machines) of a pool.

They use only what `skypool` offers every program, and import the other library when they are used.

- `joblib`: a backend of joblib, for scikit-learn and programs that use `joblib.Parallel`.
- `_joblib_backend`: the class of that backend.
- `_batch_queue`: sends the batches of one parallel call to the pool.
- `_joblib_call`, `_joblib_node`: the functions that run a batch of tasks on a node.
- `_shared_arrays`: sends a large array that several tasks have to each node once.
- `_versions`: compares the versions of packages on the nodes with those of the client.
"""

__all__ = [
    "_batch_queue",
    "_joblib_backend",
    "_joblib_call",
    "_joblib_node",
    "_shared_arrays",
    "_versions",
    "joblib",
]
