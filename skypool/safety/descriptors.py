"""Keeps file descriptors in reserve for the end of machines.

A program that leaks open files, or whose ports have many open connections, may have no descriptor left when its pool
ends. Then no provider could be asked to end a machine, and the ledger could not be opened.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref

_KEPT = 32
"""The number of descriptors in reserve. Requests to providers and the ledger need about ten."""
_lock = threading.Lock()
_kept: list[int] = []
_pools: weakref.WeakSet[object] = weakref.WeakSet()


def keep(pool: object) -> None:
    """Fill the reserve, and keep it until `forget` was called for `pool` and all other pools. Thread-safe."""
    with _lock:
        _pools.add(pool)
        _fill()


def release() -> None:
    """Close the descriptors of the reserve, so that the end of a pool can use them. Any thread may call this."""
    with _lock:
        _free()


def forget(pool: object) -> None:
    """Note that a pool has ended. If other pools are left, fill the reserve again; otherwise close it."""
    with _lock:
        _pools.discard(pool)
        if _pools:
            _fill()
        else:
            _free()


def _free() -> None:
    while _kept:
        fd = _kept.pop()
        with contextlib.suppress(OSError):  # the program has closed it
            if os.path.samestat(os.fstat(fd), os.stat(os.devnull)):  # or has opened another file since, with its number
                os.close(fd)


def _fill() -> None:
    while len(_kept) < _KEPT:
        try:
            _kept.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:  # there are no more
            return
