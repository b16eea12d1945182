"""Ends open pools when the interpreter exits, also after SIGTERM or when the terminal closes.

A child process that was forked does not end the pools of its parent.

Python runs the handler of a signal between any two steps of the main thread. That may be within `__del__` or a callback
of a weak reference, as while garbage is collected. Python prints and ignores an exception that the handler raises
there. The program would go on as if nothing had happened, so the signal is sent once more.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn, Protocol

from skypool.errors import together


class Living(Protocol):
    """An object that must be ended before the interpreter exits, such as the engine of a pool."""

    def end_now(self) -> None:
        """End everything of this object that costs money, in the calling thread, without starting other threads."""
        ...

    def hand_over_now(self) -> None:
        """Let a process in the background end everything that costs money. Called when `end_now` was interrupted."""
        ...

    def close_now(self) -> None:
        """Close all that is left of this object. This is called after `end_now` was called for all objects."""
        ...


_living: set[Living] = set()
_elsewhere: set[Living] = set()
_at_exit = threading.Event()
_is_over = False
_PAUSE = 0.01
"""Seconds until a signal is sent once more whose exception Python has ignored. The callback in which it was raised
has then ended.
"""
_ENDING = (signal.SIGTERM, signal.SIGHUP)
"""The signals that exit the interpreter in the usual way."""


def watch(each: Living) -> None:
    """Call `each.end_now` and `each.close_now` when the interpreter exits, unless `forget(each)` is called before.

    If this is called in the main thread, SIGTERM and SIGHUP also exit the interpreter in the usual way from then on, so
    that `end_now` is called for them, too. If Python ignores the exception that the handler of one of these signals or
    of Ctrl-C has raised, the signal is sent once more.
    """
    _living.add(each)
    if not _at_exit.is_set():
        _at_exit.set()
        atexit.register(_end_all)
        _lose_no_signals()
    if threading.current_thread() is threading.main_thread():
        exit_on_signals()


def exit_on_signals() -> None:
    """Let SIGTERM and SIGHUP exit the interpreter normally, unless the program handles them. Main thread only."""
    for number in _ENDING:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _exit)


def _exit(number: int, _frame: object) -> NoReturn:
    """Handle a signal: raise SystemExit with the status 128 + its number. After SIGHUP, ignore further SIGHUPs."""
    if number == signal.SIGHUP:  # it often comes twice, from the shell and from the kernel
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.exit(128 + number)


def _lose_no_signals() -> None:
    """Let `sys.unraisablehook` send a signal once more if Python ignores the exception of the signal's handler."""
    earlier = sys.unraisablehook

    def on_unraisable(lost: sys.UnraisableHookArgs) -> None:
        number = _signal_of(lost.exc_value)
        here = threading.get_ident()
        if number is None or here != threading.main_thread().ident or sys.is_finalizing():
            earlier(lost)
            return
        if number == signal.SIGHUP:
            signal.signal(signal.SIGHUP, _exit)  # the handler, which is through, has let further ones be ignored
        # not a Thread: `threading` has locks, which this thread may hold right now
        _thread.start_new_thread(_send_again, (here, number))

    sys.unraisablehook = on_unraisable


def _signal_of(error: BaseException | None) -> signal.Signals | None:
    """Return the signal whose handler has raised an exception; None for other exceptions."""
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    if isinstance(error, SystemExit):
        return next((each for each in _ENDING if error.code == 128 + each), None)
    return None


def _send_again(thread: int, number: signal.Signals) -> None:
    """Send a signal to a thread once more. This also wakes the thread if it waits."""
    time.sleep(_PAUSE)
    signal.pthread_kill(thread, number)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore Ctrl-C, SIGTERM and SIGHUP in the `with` block, so that a further signal does not interrupt it.

    Do nothing outside of the main thread, because other threads handle no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *_ENDING)}
    try:
        for number in before:
            signal.signal(number, _ignore)  # unlike SIG_IGN, a new process does not inherit it
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: it was set outside of Python
                signal.signal(number, handler)


def _ignore(_number: int, _frame: object) -> None:
    """Handle a signal by doing nothing."""


def forget(each: Living) -> None:
    """Do not end this object when the interpreter exits. Do nothing if it is not watched."""
    _living.discard(each)


def is_over() -> bool:
    """Return True if the interpreter exits, and has ended all watched objects or is about to."""
    return _is_over


def is_elsewhere(each: Living) -> bool:
    """Return True if an object belongs to the parent process of a fork, so that it must not be ended here."""
    return each in _elsewhere


def _forked() -> None:
    """Mark all watched objects as those of the parent process. Each forked child process runs this."""
    _elsewhere.update(_living)
    _living.clear()


os.register_at_fork(after_in_child=_forked)


def _end_all() -> None:
    """End all watched objects one after the other, at the interpreter's exit. Then raise all their errors together."""
    global _is_over
    _is_over = True
    errors: list[Exception] = []
    for each in list(_living):
        try:
            each.end_now()
        except (KeyboardInterrupt, SystemExit):
            with undisturbed():
                try:
                    each.hand_over_now()
                except Exception as e:  # noqa: BLE001 - it is raised after the other objects are ended
                    errors.append(e)
        except Exception as e:  # noqa: BLE001 - it is raised after the other objects are ended
            errors.append(e)
    for each in list(_living):
        try:
            each.close_now()
        except Exception as e:  # noqa: BLE001 - it is raised after the other objects are closed
            errors.append(e)
    if errors:
        raise together(
            "Python exits, but it is not confirmed that every rented machine has ended; run `skypool gc` to "
            "find those that are left",
            errors,
        )
