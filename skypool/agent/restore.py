"""Puts back what a call has changed in its worker, so that each call finds the state that the first call found.

Modules and their globals stay, and so do environment variables, threads and open files: calls may share them. If
something cannot be put back, a new process replaces the worker.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` is made of: it makes no enums, which takes long
import contextlib
import functools
import itertools
import operator
import os
import posix
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

_SIGNALS = tuple(map(int, (signal.SIGTERM, signal.SIGURG, signal.SIGINT, signal.SIGPIPE, signal.SIGCHLD)))
"""Signals whose handlers a worker or Python itself needs."""
_TERM = int(signal.SIGTERM)
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_LIMITS = tuple(
    getattr(resource, f"RLIMIT_{name}")
    for name in ("AS", "CORE", "CPU", "DATA", "FSIZE", "MEMLOCK", "NOFILE", "NPROC", "STACK")
)
_NOT_NEEDED = ("__main__", "__mp_main__")
"""Modules that may be replaced: they are the user's script."""


class CallState:
    """State that every call must find in its worker: the process's state at the time when this object is made.

    Make the object in the main thread, before the first call. Afterwards, `restore` puts this state back.
    """

    def __init__(self) -> None:
        self._streams = sys.stdin, sys.stdout, sys.stderr
        self._arguments = [*sys.argv]
        self._folder = os.getcwd()
        self._set_folder, self._set_umask = os.chdir, os.umask
        self._umask = os.umask(0)
        os.umask(self._umask)
        self._handlers = {number: _signal.getsignal(number) for number in _SIGNALS}
        self._on_term = self._handlers[_TERM]
        self._mask = _signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._limits = {each: resource.getrlimit(each) for each in _LIMITS}
        self._cpus = os.sched_getaffinity(0)
        self._recursion = sys.getrecursionlimit()
        self._standard = _standard_files()
        self._user = _user()
        needed = {name: module for name, module in sys.modules.items() if name not in _NOT_NEEDED}
        self._is_changed = False
        for name in ("chdir", "fchdir", "umask"):  # to ask the system after each call would take longer
            setattr(posix, name, noting := self._noting(getattr(os, name)))
            setattr(os, name, noting)
        os.supports_fd.add(os.chdir)
        self._needed = needed
        self._known = tuple(sys.modules.values())  # at the last look, in order: to compare them by name takes longer

    def _noting(self, change: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `change`, and notes that something may have to be put back."""

        @functools.wraps(change)
        def noting(*args: Any, **kwargs: Any) -> Any:
            self._is_changed = True
            return change(*args, **kwargs)

        return noting

    def is_touched(self) -> bool:
        """Return True if a call has left something to put back. Takes less than a microsecond.

        May wrongly return False, because this checks only what calls change most often.
        """
        try:
            return (
                sys.stdout is not self._streams[1]
                or sys.stderr is not self._streams[2]
                or sys.argv != self._arguments
                or self._is_changed
                or sys.getrecursionlimit() != self._recursion
                or _signal.getsignal(_TERM) is not self._on_term
            )
        except AttributeError:  # a stream was removed
            return True

    def is_unchanged(self) -> bool:
        """Return True if calls have changed nothing. Takes about half as long as `restore`.

        May wrongly return True if a call has replaced an entry of `sys.modules`, or has left the folder without `os`.
        """
        return (
            not self.is_touched()
            and len(sys.modules) == len(self._known)
            and all(map(operator.is_, map(_signal.getsignal, _SIGNALS), self._handlers.values()))
            and _signal.pthread_sigmask(_signal.SIG_BLOCK, ()) == self._mask
            and not any(map(max, map(_signal.getitimer, _TIMERS)))
            and all(map(operator.eq, map(resource.getrlimit, _LIMITS), self._limits.values()))
            and os.sched_getaffinity(0) == self._cpus
            and socket.getdefaulttimeout() is None
            and sys.stdin is self._streams[0]
            and not sys.stdin.closed
            and not _refuses_event_loop()
            and _standard_files() == self._standard
            and _user() == self._user
        )

    def restore(self) -> bool:
        """Put back what calls have changed. Return True if they had changed anything. Takes about 40 microseconds.

        Raises:
            OSError: something cannot be put back, so that the next call needs a new process: a resource limit, a file
                descriptor below 3, the user or the priority of the process, or the current folder, which may have been
                removed.
        """
        self._is_changed = False
        changes = [
            self._restore_streams(),
            self._restore_signals(),
            self._restore_modules(),
            self._restore_limits(),
            self._set_umask(self._umask) != self._umask,
            _forget_event_loop(),
        ]
        if not os.path.samestat(os.stat("."), os.stat(self._folder)):
            self._set_folder(self._folder)
            changes.append(True)
        if _standard_files() != self._standard or _user() != self._user or self._streams[0].closed:
            raise PermissionError("a call has changed the files, the user or the priority of its process")
        return any(changes)

    def _restore_streams(self) -> bool:
        found = tuple(getattr(sys, name, None) for name in ("stdin", "stdout", "stderr"))
        changed = found != self._streams or sys.argv != self._arguments
        sys.stdin, sys.stdout, sys.stderr = self._streams
        sys.argv = [*self._arguments]
        return changed

    def _restore_signals(self) -> bool:
        changed = False
        for number, handler in self._handlers.items():
            if _signal.getsignal(number) is not handler:
                signal.signal(number, handler)
                changed = True
        for timer in _TIMERS:
            if signal.getitimer(timer)[0]:
                signal.setitimer(timer, 0)
                changed = True
        if _signal.pthread_sigmask(signal.SIG_BLOCK, ()) != self._mask:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            changed = True
        return changed

    def _restore_modules(self) -> bool:
        """Put modules that the worker had at first back into `sys.modules`. Remove entries that are None from it."""
        modules = sys.modules
        changed = False
        if len(modules) < len(self._known) or not all(map(operator.is_, modules.values(), self._known)):
            changed = any(modules.get(name) is not module for name, module in self._needed.items())
            modules.update(self._needed)
            self._known = ()
        new = itertools.islice(modules.values(), len(self._known), None)
        if any(map(operator.is_, new, itertools.repeat(None))):
            for name, module in modules.copy().items():  # a thread may import meanwhile
                if module is None:
                    modules.pop(name, None)  # `sys.modules["numpy"] = None` keeps it from being imported
            changed = True
        if len(modules) != len(self._known):
            self._known = tuple(modules.values())
        return changed

    def _restore_limits(self) -> bool:
        """Put back resource limits, CPUs, recursion limit and socket timeout. Return True if one had changed."""
        changed = False
        for each, limits in self._limits.items():
            if resource.getrlimit(each) != limits:
                try:
                    resource.setrlimit(each, limits)
                except ValueError as e:
                    raise PermissionError(str(e)) from e
                changed = True
        if os.sched_getaffinity(0) != self._cpus:
            os.sched_setaffinity(0, self._cpus)
            changed = True
        if sys.getrecursionlimit() != self._recursion:
            sys.setrecursionlimit(self._recursion)
            changed = True
        if socket.getdefaulttimeout() is not None:
            socket.setdefaulttimeout(None)
            changed = True
        return changed


def _user() -> tuple[tuple[int, int, int], tuple[int, int, int], int]:
    """Return the real, effective and saved user ids of this process, its group ids likewise, and its priority."""
    return os.getresuid(), os.getresgid(), os.getpriority(os.PRIO_PROCESS, 0)


def _standard_files() -> list[tuple[int, int]]:
    """Return the files of the file descriptors 0, 1 and 2, each as (device, inode number)."""
    return [(found.st_dev, found.st_ino) for found in map(os.fstat, (0, 1, 2))]


def _refuses_event_loop() -> bool:
    """Return True if `asyncio.get_event_loop()` raises in this thread, as it does after `asyncio.run`."""
    local = _event_loops()
    return local is not None and getattr(local, "_loop", None) is None and bool(getattr(local, "_set_called", False))


def _forget_event_loop() -> bool:
    """Let `asyncio.get_event_loop()` make a loop again in this thread. Return True if it would have raised."""
    if not _refuses_event_loop():
        return False
    with contextlib.suppress(AttributeError):
        del _event_loops()._set_called  # then that of the class counts, which is False
        return True
    return False


def _event_loops() -> Any:
    """Return what asyncio knows about the event loops of this thread; None if it is not in use."""
    events: Any = sys.modules.get("asyncio.events")
    local = getattr(getattr(events, "_event_loop_policy", None), "_local", None)
    return local if isinstance(local, threading.local) else None
