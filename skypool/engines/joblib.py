"""A joblib backend: `joblib.Parallel`, and with it scikit-learn, runs its tasks on the nodes of a pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import skypool as sky
from skypool.engines import _pools, _versions

if TYPE_CHECKING:
    from skypool.engines._joblib_backend import SkypoolBackend

__all__ = ["backend"]

_EQUAL = ("joblib", "cloudpickle", "scikit-learn")
"""The packages whose versions must be equal on the client and on the nodes."""


@contextmanager
def backend(
    pool: sky.ComputePool,
    *,
    retries: int = 0,
    retry_on: type[BaseException] | tuple[type[BaseException], ...] = (),
    devices: Literal[0] | None = None,
    output: Literal["show", "head", "silent"] = "show",
) -> Iterator[SkypoolBackend]:
    """Run joblib's tasks on the nodes of a pool inside this `with` block.

        with sky.ComputePool(sky.AWS(), nodes=4, image=sky.Image(pip=["joblib==1.5.2", "scikit-learn==1.7.2"])) as pool:
            with sky.joblib.backend(pool):
                search = GridSearchCV(SVC(), grid, n_jobs=-1).fit(X, y)

    `joblib.Parallel`, and functions that use it, then send batches of tasks to the pool as calls. `n_jobs=-1` means all
    slots of the nodes that are ready when the parallel call begins, and is the default. `n_jobs=k` runs at most k
    batches at once. With `n_jobs=1`, joblib runs the tasks in this process. On a node, parallel calls inside a task run
    one task after the other.

    A large array that several tasks use is sent once to each node, and freed when the parallel call ends. On the nodes,
    such an array is read-only. Arrays are large if they are contiguous and have at least `max_nbytes` (an argument of
    `joblib.Parallel`, default 1 MB).

    The block applies to the thread that enters it. In other threads, pass the object of the block to joblib:
    `Parallel(backend=…)`. If the pool was not started, this function starts it, and stops it again if it raises an
    error. Leaving the block does not end the pool.

    Args:
        pool: the pool.
        retries: how often a batch may run again when its node or its process is lost. Default 0.
        retry_on: classes of exceptions. A batch of which a task raises one may run again, too. Default (): none.
        devices: 0 runs the tasks on the CPU slots of nodes with accelerators. Default None: each batch gets the devices
            of a slot.
        output: "show" prints what tasks print here, and "silent" drops it. "head" means the same as "show" here.
            Default "show".

    Yields:
        The backend of joblib.

    Raises:
        UsageError: joblib is not installed; the image, or a node, has another version of joblib, cloudpickle or
            scikit-learn than this process; or a machine of the pool belongs to a stranger, so that its results may be
            plain data only.
        SkypoolError: the pool could not become ready.
    """
    if find_spec("joblib") is None:
        raise sky.UsageError('joblib is not installed on this computer: pip install "skypool[joblib]"')
    import joblib

    from skypool.engines._joblib_backend import SkypoolBackend

    with _pools.started(pool, "joblib", _EQUAL):
        _versions.check_nodes(pool, _EQUAL, _pools.ready(pool))
        made = SkypoolBackend.of_pool(pool, retries=retries, retry_on=retry_on, devices=devices, output=output)
    with joblib.parallel_config(backend=made):
        yield made
