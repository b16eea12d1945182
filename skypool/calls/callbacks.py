"""`Callbacks`: threads that call the functions that users add to futures with `add_done_callback`.

Such a function may block, for example because it waits for another call. The threads that read connections must not
block, so they never call it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

_MOST = 32
"""The most threads of one pool. If all of their functions block, further functions wait."""
_IDLE = 5.0
"""Seconds after which a thread without work ends."""


class Callbacks:
    """The threads that call the done-callbacks of one pool. Any thread may use this object.

    The threads start when they are needed, and do not keep Python alive.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards all below
        self._jobs: deque[Callable[[], None]] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._left = 0

    def call(self, job: Callable[[], None]) -> None:
        """Have one of the threads call `job`, which must not raise. Do not wait for it."""
        with self._changed:
            self._jobs.append(job)
            self._left += 1
            if self._idle >= len(self._jobs) or len(self._threads) >= _MOST:
                self._changed.notify()
                return
            thread = threading.Thread(target=self._work, name="skypool-callbacks", daemon=True)
            self._threads.add(thread)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is about to exit, or no further thread can be started
                self._threads.discard(thread)
                if self._threads:
                    return
                self._jobs.pop()
                self._left -= 1
        if not self._threads:
            job()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._jobs, _IDLE)
                self._idle -= 1
                if not self._jobs:
                    self._threads.discard(threading.current_thread())
                    return
                job = self._jobs.popleft()
            try:
                job()
            finally:
                with self._changed:
                    self._left -= 1
                    self._changed.notify_all()

    def wait(self) -> None:
        """Wait until all functions have returned. Do nothing if one of these functions calls this method."""
        with self._changed:
            if threading.current_thread() not in self._threads:
                self._changed.wait_for(lambda: not self._left)
