"""Ends open pools when the interpreter exits, also after SIGTERM or when the terminal closes.

A child process that was forked does not end the pools of its parent.

Python runs the handler of a signal between any two steps of the main thread, also within `__del__` or a callback of a
weak reference, as while garbage is collected. Python prints and ignores what the handler raises there. The program
would go on as if nothing had happened, so the signal is sent once more.
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
    """A protocol for objects that must be ended before the interpreter exits, such as the engine of a pool."""

    def end_now(self) -> None:
        """End everything of this object that costs money, in the calling thread, without starting other threads.

        If this raises an error, the other objects are ended all the same.
        """
        ...

    def hand_over_now(self) -> None:
        """Let a process in the background end everything that costs money. Called when `end_now` was interrupted."""
        ...

    def close_now(self) -> None:
        """Close all that is left of this object. This is called when `end_now` of all objects is through."""
        ...


_living: set[Living] = set()
_elsewhere: set[Living] = set()
_at_exit = threading.Event()
_is_over = False
_PAUSE = 0.01
"""Seconds until a signal whose exception was lost is sent once more, so that the callback which lost it is over."""
_ENDING = (signal.SIGTERM, signal.SIGHUP)
"""The signals that exit the interpreter in the usual way."""


def watch(each: Living) -> None:
    """Call `each.end_now` and `each.close_now` when the interpreter exits, unless `forget(each)` is called before.

    In the main thread, also make SIGTERM and SIGHUP exit the interpreter in the usual way, so that `end_now` is called
    then, too. From the first call on, neither they nor Ctrl-C are lost.
    """
    _living.add(each)
    if not _at_exit.is_set():
        _at_exit.set()
        atexit.register(_end_all)
        _lose_no_signals()
    if threading.current_thread() is threading.main_thread():
        _exit_on_signals()


def _exit_on_signals() -> None:
    """Let SIGTERM and SIGHUP exit the interpreter in the usual way, instead of killing it at once.

    Call this in the main thread. A signal that the program handles or ignores already is left alone. For example,
    `nohup` makes a program ignore SIGHUP.
    """
    for number in _ENDING:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _exit)


def _exit(number: int, _frame: object) -> NoReturn:
    """Handle a signal: raise SystemExit with the status 128 + the number of the signal.

    After SIGHUP, further SIGHUPs are ignored.
    """
    if number == signal.SIGHUP:  # it often comes twice, from the shell and from the kernel
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    sys.exit(128 + number)


def _lose_no_signals() -> None:
    """Let `sys.unraisablehook` send a signal once more if the exception of its handler is ignored.

    All other exceptions go to the hook that was there before.
    """
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
    """Send a signal to a thread, so that it wakes if it waits."""
    time.sleep(_PAUSE)
    signal.pthread_kill(thread, number)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore Ctrl-C, SIGTERM and SIGHUP in the block, so that one more of them does not undo what another has begun.

    Do nothing in threads but the main one, where no signal is handled.
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
    """Undo `watch`: do not end this object when the interpreter exits. Do nothing if the object is not watched."""
    _living.discard(each)


def is_over() -> bool:
    """Return True if the interpreter exits, and has ended all watched objects or is about to."""
    return _is_over


def is_elsewhere(each: Living) -> bool:
    """Return True if an object was watched in the parent process, from which this process was forked; otherwise False.

    Such an object must not be ended in this process.
    """
    return each in _elsewhere


def _forked() -> None:
    """Mark all watched objects as those of the parent process, so that this process does not end them.

    Each forked child process runs this.
    """
    _elsewhere.update(_living)
    _living.clear()


os.register_at_fork(after_in_child=_forked)


def _end_all() -> None:
    """End all watched objects one after the other. The interpreter calls this when it exits.

    After an error, the other objects are ended all the same. A single error is then raised unchanged; several errors
    are raised as an ErrorGroup.
    """
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
