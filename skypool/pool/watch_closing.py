"""Closes the watches of a pool, such as its history or its metrics, once its machines have ended.

Closing a watch may raise or hang, or fail because the disk is full. So each is closed in a thread of its own,
and the pool waits for it only up to a limit of time. Python does not wait at its exit for these threads, which are
daemons.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence

from skypool.wire import error_text

Part = tuple[str, Callable[[], object]]
"""(what, close) of a part that is closed: words for the user, and the function that closes it."""
_standby: queue.SimpleQueue[Callable[[], None]] | None = None
"""The tasks of a thread that is started early, because none can be started when the interpreter exits."""


def prepare() -> None:
    """Start a thread that can close parts at the interpreter's exit, when no thread can be started any more.

    Do nothing if it runs already.
    """
    global _standby
    if _standby is None:
        _standby = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(_standby,), name="skypool closing", daemon=True).start()


def _serve(tasks: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        tasks.get()()


def _forked() -> None:
    global _standby
    _standby = None


os.register_at_fork(after_in_child=_forked)


def close_all(parts: Sequence[Part], within: float) -> list[str]:
    """Close all parts at the same time, for at most `within` seconds in all. A failure of one does not stop the others.

    A part that takes longer goes on in its thread. Returns a sentence for each part that failed, or that was not closed
    in time.
    """
    until = time.monotonic() + within
    ends = [(what, _begin(what, close)) for what, close in parts]
    told = []
    for what, end in ends:
        try:
            error = end.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            told.append(f"{what} did not end within {within:g} s, and was left")
        else:
            if error is not None:
                told.append(f"{what} could not be closed: {type(error).__name__}: {error_text.text_of(error)}")
    return told


def _begin(what: str, close: Callable[[], object]) -> queue.SimpleQueue[BaseException | None]:
    """Call `close` in another thread. Return a queue that then gets one item: the exception that it raised, or None."""
    end: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            close()
        except BaseException as e:  # noqa: BLE001 - the user is told
            end.put(e)
        else:
            end.put(None)

    try:
        threading.Thread(target=work, name=f"skypool closing {what}", daemon=True).start()
    except RuntimeError:  # the interpreter exits, or there are too many threads
        if _standby is not None:
            _standby.put(work)
        else:
            work()
    return end
