"""Sends the batches of one parallel call of joblib to a pool, a limited number at once."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import skypool as sky
from skypool.engines._shared_arrays import PickledTasks, SharedArrays, Task

_HOLD = 0.02
"""The most seconds that a batch with a new large array waits for a second batch that has this array.

If one comes, the array is sent to each node once. Otherwise it goes along with the only call that needs it.
"""

_LOOK = 0.1
"""Seconds between two looks for an interruption of the thread that waits for all batches."""

Ended = Future[list[Any]]
"""The future of a call that has ended."""


@dataclass(slots=True, eq=False)
class _Batch:
    """A submitted batch, with the future of its `call` (None until it is sent).

    `ended` is done when the call has ended. Its result is then the future of that call.
    """

    tasks: PickledTasks
    ended: Future[Ended]
    call: sky.CallFuture[list[Any]] | None = None


@dataclass(eq=False)
class BatchQueue:
    """The batches of one parallel call. Any thread may call the methods.

    The callbacks for ended batches run in a thread of this object, not in the pool's. In them, joblib reads the
    program's next tasks, which may take any time.

    Args:
        call: makes the call of a batch, from the pickle of its tasks and its large arrays.
        arrays: the large arrays of the parallel call.
        limit: the most batches that run at once. None: no limit.
        slots: returns how many calls the pool can run at once now. If that is at most `limit`, up to `limit` further
            batches are sent ahead, so that no slot waits for its next batch.
    """

    pool: sky.ComputePool
    call: Callable[[bytes, Sequence[Any]], sky.Call[list[Any]]]
    arrays: SharedArrays
    limit: int | None
    slots: Callable[[], int]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _held: _Batch | None = None
    _waiting: deque[_Batch] = field(default_factory=deque)
    _underway: set[_Batch] = field(default_factory=set)
    _ends: queue.SimpleQueue[tuple[_Batch, Ended] | bool] = field(default_factory=queue.SimpleQueue)
    _thread: threading.Thread | None = None
    _cancelled: bool = False
    _idle: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._idle.set()

    def submit(self, tasks: Sequence[Task], on_end: Callable[[Future[Ended]], object] | None) -> Future[Ended]:
        """Queue a batch, and return a future that is done when the batch's call has ended.

        The result of this future is the future of the call. Then `on_end` is called with the returned future, in the
        thread of this object. No error is raised here. If the batch cannot be sent, the future of its call has the
        exception.
        """
        ended: Future[Ended] = Future()
        if on_end is not None:
            ended.add_done_callback(on_end)
        self._idle.clear()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._tell_ends, name="skypool-joblib", daemon=True)
                self._thread.start()
        try:
            batch = _Batch(self.arrays.pickled(tasks), ended)
        except sky.PickleError as e:
            self._ends.put((_Batch(PickledTasks(b""), ended), _failed(e)))
            return ended
        with self._lock:
            if self._held is not None:
                self._waiting.append(self._held)
            self._held = batch if batch.tasks.has_new_array else None
            if self._held is None:
                self._waiting.append(batch)
            else:
                self._ends.put(True)  # the thread begins to count the time
        self._send()
        return ended

    def cancel(self) -> None:
        """Stop all calls, and drop the batches that were not sent. The futures of dropped batches never get done."""
        with self._lock:
            self._cancelled = True
            self._held = None
            self._waiting.clear()
            underway = list(self._underway)
        self.wake()
        for batch in underway:
            if batch.call is not None:
                batch.call.cancel()

    def wait(self) -> None:
        """Wait until all batches have ended and their callbacks have returned, or until `wake` is called."""
        while not self._idle.wait(_LOOK):
            pass  # here Python runs signal handlers, and raises what `_thread.interrupt_main` asks for

    def wake(self) -> None:
        """Let a `wait` that is going on return now."""
        self._idle.set()

    def close(self) -> None:
        """Free the large arrays on all nodes, and end the thread. Nothing can be submitted afterwards."""
        self.arrays.free()
        self._ends.put(False)

    def _send(self) -> None:
        """Send as many waiting batches as the limit allows."""
        while True:
            with self._lock:
                if not self._waiting or not self._has_room():
                    return
                batch = self._waiting.popleft()
                self._underway.add(batch)
            try:
                batch.call = call = self.pool.send(self.call(batch.tasks.data, self.arrays.arguments(batch.tasks)))
            except Exception as e:  # noqa: BLE001 - joblib raises it where the results are awaited
                self._ends.put((batch, _failed(e)))
                continue
            batch.tasks = PickledTasks(b"")  # the pool has what it needs
            call.add_done_callback(lambda ended, batch=batch: self._ends.put((batch, ended)))  # type: ignore[misc]
            if self._cancelled:
                call.cancel()

    def _has_room(self) -> bool:
        """Return True if the limit allows to send one more batch."""
        if self.limit is None or len(self._underway) < self.limit:
            return True
        return len(self._underway) < 2 * self.limit and 0 < self.slots() <= self.limit

    def _tell_ends(self) -> None:
        """Complete the future of each batch that ends. Runs in the thread of this object until `close` is called."""
        # a batch with a new large array is held back; it is sent after `_HOLD` seconds
        while True:
            try:
                end = self._ends.get(timeout=None if self._held is None else _HOLD)
            except queue.Empty:
                with self._lock:
                    if self._held is not None:
                        self._waiting.append(self._held)
                        self._held = None
                self._send()
                continue
            if end is False:
                return
            if isinstance(end, tuple):
                batch, call = end
                with self._lock:
                    self._underway.discard(batch)
                self._send()
                batch.ended.set_result(call)
                with self._lock:
                    if not self._underway and not self._waiting and self._held is None and self._ends.empty():
                        self.wake()


def _failed(error: Exception) -> Ended:
    future: Ended = Future()
    future.set_exception(error)
    return future
