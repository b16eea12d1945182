"""Ends open pools when the interpreter exits, on SIGTERM, and when the terminal closes."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from typing import NoReturn, Protocol

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
    if not _at_exit.is_set():
        _at_exit.set()
        atexit.register(_end_all)
    if threading.current_thread() is threading.main_thread():
        _exit_on_signals()


def _exit_on_signals() -> None:
    """Let SIGTERM and SIGHUP exit the interpreter instead of killing it. Call it in the main thread.

    A program's own handler stays, and so does SIG_IGN: `nohup` ignores SIGHUP so that the program goes on without its
    terminal.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _exit)


def _exit(number: int, _frame: object) -> NoReturn:
    if number == signal.SIGHUP:  # it often comes twice, from the shell and from the kernel, and nobody is impatient
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.exit(128 + number)


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
