"""The asyncio event loop that all pools of this process share, and the thread that runs it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
_NO_THREADS = "cannot schedule new futures after"
"""The beginning of the text of a `ThreadPoolExecutor`'s RuntimeError when the interpreter exits."""
_THREADS = 64
"""The most threads in which drivers run at once. A driver mostly waits for answers of its provider."""


class Loop:
    """An asyncio event loop in a daemon thread, with up to 64 further threads for drivers, whose methods block.

    All pools of a process use the object that `shared` returns. The thread starts when an object is made.
    """

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
        """Return the `Loop` of this process. The first call makes it. Any thread may call this.

        A forked child process gets a `Loop` of its own.
        """
        with cls._making:
            if cls._shared is None:
                cls._shared = cls()
            return cls._shared

    @classmethod
    def running(cls) -> asyncio.AbstractEventLoop | None:
        """Return the asyncio event loop of the shared `Loop`; None if that was not made yet. This takes no lock."""
        return None if cls._shared is None else cls._shared.loop

    @classmethod
    def forget(cls) -> None:
        """Forget the shared `Loop` in a forked child, where its thread does not run. Called after each fork."""
        cls._shared = None
        cls._making = threading.Lock()

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in the loop's thread, wait until it returns, and return its value or raise its exception.

        Any thread may use this, also the loop's own, which calls it directly. The function must not block.
        """
        if threading.current_thread() is self._thread:
            return function()
        done: Future[T] = Future()

        def work() -> None:
            try:
                done.set_result(function())
            except BaseException as e:  # noqa: BLE001 - the waiting thread raises it
                done.set_exception(e)

        self.loop.call_soon_threadsafe(work)
        return done.result()

    def run(self, work: Coroutine[object, None, T]) -> T:
        """Run a coroutine in the loop's thread, wait for it, and return its result or raise its exception.

        There is no time limit. The loop's own thread must not call this: it would wait forever. If the waiting thread
        is interrupted, as by Ctrl-C, the coroutine is cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


async def beside(work: Callable[[], T], name: str) -> T:
    """Run a function in a daemon thread of its own, and return its value or raise its exception.

    Use this instead of `asyncio.to_thread` for work that may hang: it takes none of the 64 threads in which drivers
    run, and Python does not wait for it at exit. Use it also to end machines, and to decide on that, because all of the
    64 threads may be waiting for a provider that does not answer.

    If the waiting task is cancelled, the function goes on. The function does not see the task's `contextvars`.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            value = work()
        except BaseException as e:  # noqa: BLE001 - the waiting task raises it
            _settle(loop, done, partial(done.set_exception, e))
        else:
            _settle(loop, done, partial(done.set_result, value))

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done


def _settle(loop: asyncio.AbstractEventLoop, done: asyncio.Future[Any], settle: Callable[[], None]) -> None:
    """Settle a future in its loop's thread, unless it was cancelled."""
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(lambda: None if done.done() else settle())


def _tell(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Pass an unhandled exception to asyncio's default handler, which logs it, unless the interpreter exits."""
    # Tasks that still run at exit may fail: executors take no more work shortly before the main thread ends.
    error = context.get("exception")
    refused = isinstance(error, RuntimeError) and str(error).startswith(_NO_THREADS)
    if threading.main_thread().is_alive() and not refused:
        loop.default_exception_handler(context)


os.register_at_fork(after_in_child=Loop.forget)
