"""The function that a pool calls for each batch of joblib's tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def run_tasks(tasks: bytes, arrays: Sequence[Any], threads: int | None, slots: int) -> list[Any]:
    """Run a batch of tasks on a node, and return the list of their results.

    This function uses no name of its module, so that a pool need not pickle it again for each call.

    Args:
        tasks: the pickle of a list of tuples (function, args, kwargs).
        arrays: the large arrays among the arguments of the tasks.
        threads: the threads that libraries such as BLAS may use. None: one slot's share of the CPUs.
        slots: the number of batches that run on this node at once.
    """
    from skypool.engines import _joblib_node

    return _joblib_node.run_batch(tasks, arrays, threads, slots)
