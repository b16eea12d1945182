"""What still lives when the interpreter ends is ended then: at its exit, and on SIGTERM, too."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from typing import Protocol

from skypool.errors import together


class Living(Protocol):
    """Something that can end itself from the thread that asks, with no help of others."""

    def end_now(self) -> None: ...


_living: set[Living] = set()
_elsewhere: set[Living] = set()
_at_exit = threading.Event()


def watch(each: Living) -> None:
    """End it when the interpreter ends, unless it is forgotten before."""
    _living.add(each)
    if _at_exit.is_set():
        return
    _at_exit.set()
    atexit.register(_end_all)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def forget(each: Living) -> None:
    """It has ended, or is somebody else's."""
    _living.discard(each)


def is_elsewhere(each: Living) -> bool:
    """Whether this process was forked from the one that it lives in: who ends here ends nothing of it."""
    return each in _elsewhere


def _forked() -> None:
    _elsewhere.update(_living)
    _living.clear()


os.register_at_fork(after_in_child=_forked)


def _end_all() -> None:
    errors: list[Exception] = []
    for each in list(_living):
        try:
            each.end_now()
        except Exception as e:  # noqa: BLE001 - the others are ended, too, before it is raised
            errors.append(e)
    if errors:
        raise together("at the interpreter's exit some machines could not be proved ended", errors)
