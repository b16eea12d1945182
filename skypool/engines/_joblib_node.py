"""The function that runs a batch of joblib's tasks on a node."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

_arrays: Sequence[Any] = ()
"""The large arrays of the batch that is being unpickled."""


def run_batch(tasks: bytes, arrays: Sequence[Any], threads: int | None, slots: int) -> list[Any]:
    """Run the tasks of a batch one after the other, and return their results.

    Parallel calls of joblib inside a task run in this process, one task after the other.

    Args:
        tasks: the pickle of a list of tuples (function, args, kwargs). In place of each large array, it has its index
            in `arrays`.
        arrays: the large arrays. Each is an array, or a tuple whose last item is an array.
        threads: the threads that libraries such as BLAS may use. None: one slot's share of the CPUs, unless
            OMP_NUM_THREADS is set.
        slots: the number of batches that run on this node at once.
    """
    global _arrays
    import joblib

    _arrays = arrays
    try:
        found = pickle.loads(tasks)
    finally:
        _arrays = ()
    with _limited(threads, slots), joblib.parallel_config(backend="sequential"):
        return [function(*args, **kwargs) for function, args, kwargs in found]


def array(index: int) -> Any:
    """Return the large array with this index in the batch that is being unpickled.

    It is read-only, because other tasks have it, too.
    """
    found = _arrays[index]
    if isinstance(found, tuple):
        found = found[-1]
    found.flags.writeable = False
    return found


def _limited(threads: int | None, slots: int) -> AbstractContextManager[object]:
    """Return a context manager that limits the threads of BLAS and OpenMP; for None, to one slot's share of CPUs."""
    if threads is None:
        if "OMP_NUM_THREADS" in os.environ:
            return nullcontext()
        threads = max(1, len(os.sched_getaffinity(0)) // max(slots, 1))
    controller = _controller(len(sys.modules))
    return nullcontext() if controller is None else controller.limit(limits=threads)


# Cached, as it takes a millisecond, by the number of imported modules: a new module may bring a library to limit.
@lru_cache(maxsize=1)
def _controller(modules: int) -> Any:
    """Return the controller of the package threadpoolctl; None without that package."""
    # `modules` is the number of imported modules, the key of the cache
    if find_spec("threadpoolctl") is None:
        return None
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
