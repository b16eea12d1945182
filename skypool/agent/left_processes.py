"""Finds what a call has left in its worker: child processes, or a process group of torch.distributed or JAX.

The child processes are ended here. If a call has left something, a new process replaces the worker. Then
`skypool.agent.worker_processes` kills the processes that are still there.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator

from skypool.agent.processes import TRACKER, children, command_of, descendants, is_live, kill

_TO_END = 1.0
"""Seconds that a process has to end after SIGTERM. Then it is killed."""
_TO_VANISH = 2.0
"""Seconds after which a killed process is no longer waited for."""
_LOOK = 0.002
"""Seconds between two checks if processes have ended."""
_STARTING = 0.05
"""Seconds to wait for the command line of a process that was just started."""
_HELPERS = (TRACKER, b"multiprocessing.forkserver import main", b"torch_shm_manager", b"torch/_inductor/compile_worker")
"""Parts of the command lines of processes that libraries keep for later calls, and that do no work of their own.

They end with the worker: resource trackers, the fork server of multiprocessing, and two of torch: one for the names of
shared memory, and the compilers of `torch.compile`.
"""
_LOKY = ("joblib.externals.loky.reusable_executor", "loky.reusable_executor")
"""The modules that keep an executor of loky for later uses. joblib has a copy of loky."""


def holds_process_group() -> bool:
    """Return True if torch.distributed or jax.distributed is initialised, which is possible once in a process.

    Nothing is imported: a library that is not loaded is not initialised.
    """
    return any(map(_is_initialized, ("torch.distributed", "jax.distributed")))


def _is_initialized(library: str) -> bool:
    asked = getattr(sys.modules.get(library), "is_initialized", None)
    try:
        return asked is not None and asked() is True
    except Exception:  # noqa: BLE001 - it is another module of that name, and says nothing
        return False


def end_processes() -> bool:
    """End all processes that this worker's calls have started and left, also those in sessions of their own.

    They get SIGTERM, and SIGKILL a second later. Returns when they are gone, or 2 s after SIGKILL. Helper processes
    that libraries keep for later calls stay. The executor that loky, a library of joblib, keeps for later calls ends
    too, but makes new processes when it is used again.

    Returns True if other processes than loky's were ended: objects in this process may still refer to them.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False  # the usual case: this process has no child
    left = set(_left())
    if not left:
        return False
    others = left - _loky_processes()
    kill(left, signal.SIGTERM)
    kill(left, signal.SIGCONT)
    began = time.monotonic()
    while left := set(_left()):
        took = time.monotonic() - began
        if took > _TO_END:
            kill(left)
        if took > _TO_END + _TO_VANISH:
            break
        time.sleep(_LOOK)
    return bool(others)


def _left() -> Iterator[int]:
    """Yield the descendants of this process, except helpers that libraries keep for later calls."""
    for child in children(os.getpid()):
        if is_live(child):
            if not _is_helper(child):
                yield child
            yield from descendants(child)


def _is_helper(pid: int) -> bool:
    """Return True if a process is one that libraries keep for later calls."""
    until = time.monotonic() + _STARTING
    while not (command := command_of(pid)) and time.monotonic() < until:
        time.sleep(_LOOK)
    return any(each in command for each in _HELPERS)


def _loky_processes() -> set[int]:
    """Return the processes of loky's reusable executor, and have loky make a new executor at its next use."""
    found: set[int] = set()
    for name in _LOKY:
        module = sys.modules.get(name)
        executor = getattr(module, "_executor", None)
        if executor is not None:
            found.update(getattr(executor, "_processes", None) or ())
            setattr(module, "_executor", None)  # noqa: B010 - the module's type does not have it
    return found
