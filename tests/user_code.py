"""Finds code of the user that runs where it may not: in a thread that holds a lock of skypool, or on its event loop.

`watch` replaces the locks of skypool, and the functions that run code of the user, by ones that look. Only tests do so,
and in production nothing of this is there. What runs in the wrong place fails, and is noted in `found`, because much of
skypool survives an error of the user's code.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import threading
from collections.abc import Callable
from typing import Any

import pytest

from skypool.event_loop import Loop

LOCKED = """
    events calls.broadcast calls.callbacks calls.dispatch calls.gangs calls.groups calls.upstream
    link.outbox link.reports pool.engine pool.health pool.idle_accounting pool.new_samples pool.open_forwards
    pool.service pool.service_supervisor pool.watch
""".split()  # noqa: SIM905 - as a list it is 20 lines and says no more
"""Modules of skypool whose locks are watched."""

RUNS = {
    "skypool.calls.futures.CallFuture._tell": "a done-callback",
    "skypool.calls.call_messages._failure": "an exception's class, its text or `retry_on`",
    "skypool.calls.futures.Items._read": "the unpickling of an item",
    "skypool.calls.call.payload_of": "the pickling of arguments",
    "skypool.calls.map.payload_of": "the pickling of arguments",
}
"""The functions of skypool that run code of the user, and what that code is."""

WITHOUT_LOCK = {
    "skypool.events.EventStream.emit": "a listener of events",
    "skypool.calls.futures._opened": "the unpickling of a value",
}
"""Functions that the thread of the event loop may call, as the docs say, or because the values are skypool's own."""


class UserCodeError(AssertionError):
    """Code of the user runs where it may not."""


_held = threading.local()
found: list[str] = []
"""What was found since it was cleared last."""


def _locks() -> list[WatchedLock]:
    if not hasattr(_held, "locks"):
        _held.locks = []
    locks: list[WatchedLock] = _held.locks
    return locks


class WatchedLock:
    """A lock that knows which thread holds it."""

    def __init__(self, lock: Any, where: str) -> None:
        self._lock = lock
        self.where = where

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        is_acquired: bool = self._lock.acquire(blocking, timeout)
        if is_acquired:
            _locks().append(self)
        return is_acquired

    def release(self) -> None:
        self._lock.release()
        if self in _locks():  # otherwise another thread has acquired it
            _locks().remove(self)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def locked(self) -> bool:
        return bool(self._lock.locked())

    def _is_owned(self) -> bool:
        return self in _locks()

    def _release_save(self) -> Any:
        """Release the lock for a condition that waits, however often this thread has acquired it."""
        mine = [each for each in _locks() if each is self]
        for each in mine:
            each.release()
        return len(mine)

    def _acquire_restore(self, times: Any) -> None:
        for _ in range(times):
            self.acquire()


class WatchedThreading:
    """The module `threading` as one module of skypool sees it, with locks that are watched."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)

    def Lock(self) -> WatchedLock:
        return WatchedLock(threading.Lock(), self._where)

    def RLock(self) -> WatchedLock:
        return WatchedLock(threading.RLock(), self._where)

    def Condition(self, lock: Any = None) -> threading.Condition:
        return threading.Condition(self.RLock() if lock is None else lock)  # type: ignore[arg-type]  # it acts as one


def check(what: str, on_loop: bool = False) -> None:
    """Raise UserCodeError if this thread holds a watched lock, or runs skypool's event loop. `on_loop` permits that.

    `what` is the code of the user that is about to run here.
    """
    here = ""
    if locks := _locks():
        here = f"while its thread holds a lock of {', '.join({each.where for each in locks})}"
    elif not on_loop and Loop._shared is not None and threading.current_thread() is Loop._shared._thread:
        here = "on the thread of skypool's event loop"
    if here:
        text = f"{what} would run {here}: code of the user may block there, and then the pool hangs"
        found.append(text)
        raise UserCodeError(text)


def _watched(function: Callable[..., Any], what: str, on_loop: bool) -> Callable[..., Any]:
    """Return a function that calls `check` first."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        check(what, on_loop)
        return function(*args, **kwargs)

    return run


def watch(patch: pytest.MonkeyPatch) -> None:
    """Watch all locks that skypool makes from now on, and all places where it runs code of the user."""
    for name in LOCKED:
        module = importlib.import_module(f"skypool.{name}")
        patch.setattr(module, "threading", WatchedThreading(module.__name__))
    for path, what in {**RUNS, **WITHOUT_LOCK}.items():
        owner, name = resolve(path)
        patch.setattr(owner, name, _watched(getattr(owner, name), what, path in WITHOUT_LOCK))


def resolve(path: str) -> tuple[Any, str]:
    """Return the module or class that has a function, and the name of the function there."""
    owner_path, _, name = path.rpartition(".")
    return pkgutil.resolve_name(owner_path), name
