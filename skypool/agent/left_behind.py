"""Finds what a failed call has left in its worker process: an initialised process group, or child processes.

If there is something, a new process replaces the worker. `skypool.agent.slots` then kills what is left.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

from skypool.agent.processes import descendants, started


def holds_process_group() -> bool:
    """Return True if torch.distributed or jax.distributed is initialised in this process.

    Both can be initialised only once in a process. Nothing is imported: a library that is not loaded is not
    initialised.
    """
    return any(map(_is_initialized, ("torch.distributed", "jax.distributed")))


def _is_initialized(library: str) -> bool:
    asked = getattr(sys.modules.get(library), "is_initialized", None)
    try:
        return asked is not None and asked() is True
    except Exception:  # noqa: BLE001 - it is another module of that name, and says nothing
        return False


def left_processes(since: float) -> bool:
    """Return True if processes run in the process group of this worker that were started after a time.

    A worker leads a process group. Processes that its calls start are in it, unless they leave it. Processes that were
    started before, such as a server of an earlier call, do not count.

    Args:
        since: the time, as `time.monotonic()` has it.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False  # the usual case: this process has no child
    ticks = os.sysconf("SC_CLK_TCK")
    begun = int((time.clock_gettime(time.CLOCK_BOOTTIME) - (time.monotonic() - since)) * ticks)
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if os.getpgid(pid) == os.getpgrp() and started(pid) >= begun:
                return True
    return False
