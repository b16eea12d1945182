"""CPython's own tests of executors, run against a pool.

They come with the interpreter, or with Debian's package libpython3.11-testsuite, which tests/lab/setup installs. Left
out are those that test what a pool is not:

- the initializer's, the deadlock's, `ProcessPoolExecutor`'s and `ThreadPoolExecutor`'s own cases: they look at threads,
  processes and pickling inside those two classes, and a pool has no `initializer` and no `max_tasks_per_child`;
- `test_interpreter_shutdown`, `test_submit_after_interpreter_shutdown` and `test_hang_gh83386`: they run a script that
  imports an executor from `concurrent.futures` by name;
- `test_cancel_futures`: `shutdown(cancel_futures=True)` of a pool ends calls that run, too, and none of them ends well;
- `test_max_workers_negative`: a pool has `slots` instead, and says UsageError;
- `FutureTests`: they set the private state of `concurrent.futures.Future`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import unittest
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest

import skypool as sky
from tests.needs import skip_or_fail

pytestmark = pytest.mark.usefixtures("frozen")  # one collects garbage hundreds of times

PLACES = [Path(folder) / "test" / "test_concurrent_futures.py" for folder in (os.path.dirname(os.__file__),)]
PLACES.append(Path(f"/usr/lib/python3.{sys.version_info[1]}/test/test_concurrent_futures.py"))
NAME = "cpython_test_concurrent_futures"


def _theirs() -> ModuleType | None:
    """Load the module of CPython's tests; None where it is not installed."""
    for place in PLACES:
        if place.exists():
            spec = importlib.util.spec_from_file_location(NAME, place)
            assert spec is not None
            assert spec.loader is not None
            module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            cloudpickle.register_pickle_by_value(module)  # no node has it by this name
            return module
    return None


theirs: Any = _theirs() if sys.version_info < (3, 12) else None  # later ones are a package of other parts


if theirs is None and sys.version_info < (3, 12):
    skip_or_fail(f"libpython3.{sys.version_info[1]}-testsuite is not installed", whole_module=True)

if theirs is not None:

    class OnAPool(theirs.ExecutorMixin):  # type: ignore[misc]  # a class of a module that is loaded by its path
        """Gives each test a pool as its executor."""

        @staticmethod
        def executor_type(max_workers: int) -> sky.ComputePool:
            return sky.ComputePool(slots=max_workers, console="off")

        worker_count = 3

    class TestExecutor(OnAPool, theirs.ExecutorTest, unittest.TestCase):  # type: ignore[misc]
        test_max_workers_negative = None

    class TestWait(OnAPool, theirs.WaitTests, unittest.TestCase):  # type: ignore[misc]
        pass

    class TestAsCompleted(OnAPool, theirs.AsCompletedTests, unittest.TestCase):  # type: ignore[misc]
        pass

    class TestShutdown(OnAPool, theirs.ExecutorShutdownTest, unittest.TestCase):  # type: ignore[misc]
        test_interpreter_shutdown = None
        test_submit_after_interpreter_shutdown = None
        test_hang_gh83386 = None
        test_cancel_futures = None
