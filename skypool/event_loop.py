"""The thread with the asyncio event loop that all pools of this process share."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
_THREADS = 64
"""Threads for drivers, which wait for answers of providers most of the time."""


class Loop:
    """The thread, started when it is first needed. Drivers block in threads of its own, and wait mostly."""

    _shared: Loop | None = None
    _making = threading.Lock()

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(_tell)
        self.loop.set_default_executor(ThreadPoolExecutor(_THREADS, "skypool"))
        self._thread = threading.Thread(target=self.loop.run_forever, name="skypool-engine", daemon=True)
        self._thread.start()

    @classmethod
    def shared(cls) -> Loop:
        """The one of this process."""
        with cls._making:
            if cls._shared is None:
                cls._shared = cls()
            return cls._shared

    @classmethod
    def forget(cls) -> None:
        """A forked child has no such thread: it starts its own when it needs one."""
        cls._shared = None
        cls._making = threading.Lock()

    def run(self, work: Coroutine[object, None, T]) -> T:
        """Run `work` in the loop and wait for it; cancelled if the waiting thread is interrupted."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _tell(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """An exception that nobody waits for, unless the interpreter ends: what still ran then can start no more threads,
    and `pool.shutdown` or a reaper has its work.
    """
    if threading.main_thread().is_alive():
        loop.default_exception_handler(context)


os.register_at_fork(after_in_child=Loop.forget)
