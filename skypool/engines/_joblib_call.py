"""The function that a pool calls for each batch of joblib's tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def run_tasks(tasks: bytes, arrays: Sequence[Any], threads: int | None, slots: int) -> list[Any]:
    """Run a batch of tasks, and return their results. See `run_batch` in `_joblib_node`.

    The function uses no name of its module. So a pool need not pickle it again for each call.
    """
    from skypool.engines import _joblib_node

    return _joblib_node.run_batch(tasks, arrays, threads, slots)
