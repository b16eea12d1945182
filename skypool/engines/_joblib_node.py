"""The function that runs a batch of joblib's tasks on a node (machine of a pool)."""

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
        tasks: the pickle of a list of tuples (function, args, kwargs). It calls `array` for the large arrays.
        arrays: the large arrays. Each is an array, or a tuple whose last item is an array.
        threads: the threads that libraries such as BLAS may use. None: the share of one slot (place that runs one call
            at a time) of the CPUs, unless OMP_NUM_THREADS is set.
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
    """Return a large array of the batch that is being unpickled. It is read-only, because other tasks have it, too."""
    found = _arrays[index]
    if isinstance(found, tuple):
        found = found[-1]
    found.flags.writeable = False
    return found


def _limited(threads: int | None, slots: int) -> AbstractContextManager[object]:
    """Return a context that limits the threads of BLAS and OpenMP libraries in this process.

    It has no effect without the package threadpoolctl, which scikit-learn brings. See `run_tasks` for the arguments.
    """
    if threads is None:
        if "OMP_NUM_THREADS" in os.environ:
            return nullcontext()
        threads = max(1, len(os.sched_getaffinity(0)) // max(slots, 1))
    controller = _controller(len(sys.modules))
    return nullcontext() if controller is None else controller.limit(limits=threads)


@lru_cache(maxsize=1)
def _controller(modules: int) -> Any:
    """Return threadpoolctl's controller of the libraries that are loaded, or None without that package.

    Finding the libraries takes a millisecond, so it is repeated only when further modules have been imported.

    Args:
        modules: the number of modules that are imported.
    """
    if find_spec("threadpoolctl") is None:
        return None
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
