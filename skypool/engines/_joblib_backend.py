"""The class of joblib's backend: it tells joblib how many tasks may run at once, and takes batches of tasks from it.

`_batch_queue` sends the batches to the pool.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Literal

from joblib import parallel as joblib_parallel

import skypool as sky
from skypool.engines._batch_queue import BatchQueue, Ended
from skypool.engines._joblib_call import run_tasks
from skypool.engines._shared_arrays import SharedArrays

_BATCH = 0.2
"""Seconds from dispatch to end of a batch below which the next batches get more tasks."""
_BATCH_MOST = 2.0
"""Seconds of a batch above which the next batches get fewer tasks: other slots would wait for a long last batch."""
_GROWTH = 4
"""The factor by which the number of tasks of a batch may grow in one step. The next tasks may take longer."""
_QUICK = 0.02
"""The most seconds of a quick batch."""
_QUICK_GROWTH = 16
"""The factor by which the number of tasks may grow after a quick batch, so that tiny tasks soon share large batches."""


_Base: Any = joblib_parallel.ParallelBackendBase  # joblib has no types, and those that can be inferred are wrong


class SkypoolBackend(_Base):  # type: ignore[misc]  # see `_Base`
    """A backend of joblib whose workers are the slots of a pool's nodes.

    `sky.joblib.backend` makes one for its block. Each `joblib.Parallel` object gets a copy, so that several parallel
    calls may run at once. The methods and attributes are those that joblib documents for `ParallelBackendBase`.
    """

    default_n_jobs = -1
    supports_retrieve_callback = True
    supports_inner_max_num_threads = True

    _pool: sky.ComputePool
    _devices: Literal[0] | None
    _run: sky.ComputeFunction[..., list[Any]]
    _total = 2
    _limit: int | None = None
    _least: int | None = None
    _queue: BatchQueue | None = None
    _is_copy = False
    _size = 1
    _seconds = 0.0

    @classmethod
    def of_pool(cls, pool: sky.ComputePool, *, devices: Literal[0] | None, **options: Any) -> SkypoolBackend:
        """Return a backend that sends tasks to a pool.

        `devices` is 0 for the CPU slots of nodes with accelerators, None for the slots with devices. `options` are
        those of calls, such as `retries`.
        """
        made = cls()
        made._pool = pool
        made._devices = devices
        run: Any = sky.compute(run_tasks)
        made._run = run.with_options(devices=devices, **options)
        made._run.code()  # pickled now, not when the first task waits for it
        return made

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return the number of batches that can run at once, for joblib's argument `n_jobs`, which must not be 0.

        -1 or None means all slots of the ready nodes, but at least 2, because with 1 joblib runs the tasks in this
        process. -2 means one slot less, and so on. Other numbers are returned as they are.
        """
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is not None and n_jobs > 0:
            return n_jobs
        self._total = max(sum(self._slots()), 2) if self._slots() else self._total
        return self._total if n_jobs is None else max(1, self._total + 1 + n_jobs)

    def _slots(self) -> list[int]:
        return list(self._pool.slots(self._devices).values())

    def configure(
        self,
        n_jobs: int | None = 1,
        parallel: Any = None,
        max_nbytes: int | None = None,
        mmap_mode: str | None = "r",
        **_: Any,
    ) -> int:
        """Prepare for the calls of a `Parallel` object, and return the number of batches that can run at once.

        Arrays of `max_nbytes` or more that several batches use are sent once to each node. If `max_nbytes` is None, or
        `mmap_mode` is not "r" (read-only), all arrays are sent with each call instead.
        """
        workers = self.effective_n_jobs(n_jobs)
        if workers == 1:
            raise joblib_parallel.FallbackToBackend(joblib_parallel.SequentialBackend(nesting_level=self.nesting_level))
        if not self._is_copy:
            made = copy.copy(self)
            made._is_copy = True
            raise joblib_parallel.FallbackToBackend(made)  # joblib calls `configure` of the copy
        self.parallel = parallel
        self._limit = None if n_jobs in (None, -1) else workers
        self._least = max_nbytes if mmap_mode == "r" else None
        return workers

    def start_call(self) -> None:
        """Prepare for the batches of one parallel call."""
        slots = min(max(self._slots(), default=1), self._limit or 1 << 30)
        threads = self.inner_max_num_threads
        call = functools.partial(_call, self._run, threads, slots)
        arrays = SharedArrays(self._pool, self._least)
        self._queue = BatchQueue(self._pool, call, arrays, self._limit, lambda: sum(self._slots()))

    def submit(self, func: Any, callback: Callable[[Future[Ended]], object] | None = None) -> Future[Ended]:
        """Send a batch of tasks to the pool without waiting, and return a future that is done when the batch has ended.

        The result of this future is the future of the batch's call. `callback` is called with the returned future.
        """
        assert self._queue is not None
        return self._queue.submit(func.items, callback)

    apply_async = submit
    """The name of `submit` before joblib 1.5."""

    def retrieve_result_callback(self, out: Future[Ended]) -> list[Any]:
        """Return the results of a batch that has ended. Raise the exception of the task that failed."""
        try:
            return out.result().result()
        except BaseException:
            if self._queue is not None:
                self._queue.wake()  # joblib raises the exception in the thread that waits
            raise

    @contextmanager
    def retrieval_context(self) -> Iterator[None]:
        """Wait until all batches have ended or one has failed, then let joblib take the results.

        This replaces joblib's own waiting, which looks for results 100 times a second. If the program takes results one
        by one, or has a time limit for each, joblib waits itself.
        """
        if self._queue is not None and not self.parallel.return_generator and self.parallel.timeout is None:
            self._queue.wait()
        yield

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Stop all batches, also those that run: their processes get SIGTERM, and SIGKILL after 5 seconds."""
        if self._queue is not None:
            self._queue.cancel()

    def stop_call(self) -> None:
        """Free what the batches of a parallel call have left on the nodes."""
        if self._queue is not None:
            self._queue.close()
            self._queue = None

    def terminate(self) -> None:
        """End the use of this object by a `Parallel` object: forget how long batches took. The pool goes on."""
        self._size = 1
        self._seconds = 0.0

    def compute_batch_size(self) -> int:
        """Return the number of tasks that the next batch should have."""
        if self._seconds > _BATCH_MOST or 0 < self._seconds < _BATCH:
            wanted = int(self._size * 2 * _BATCH / self._seconds)
            growth = _QUICK_GROWTH if self._seconds < _QUICK else _GROWTH
            self._size = max(1, min(wanted, self._size * growth))
            self._seconds = 0.0  # until a batch of this size has ended
        return self._size

    def batch_completed(self, batch_size: int, duration: float) -> None:
        """Remember how many seconds a batch took from its dispatch to its end, for `compute_batch_size`."""
        if batch_size == self._size:
            self._seconds = duration

    def get_nested_backend(self) -> tuple[Any, None]:
        """Return the backend of parallel calls inside tasks: they run one task after the other."""
        return joblib_parallel.SequentialBackend(nesting_level=(self.nesting_level or 0) + 1), None


def _call(
    run: sky.ComputeFunction[..., list[Any]], threads: int | None, slots: int, tasks: bytes, arrays: Any
) -> sky.Call[list[Any]]:
    return run(tasks, arrays, threads, slots)
