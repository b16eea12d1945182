"""Processes of a node: the names they show, the CPUs they may use, and those that live below another one."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from skypool.clock import RunningClock


def call_it(what: str) -> None:
    """Give this process the name that `top` and `ps` show."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as name:
        name.write(f"skypool-{what}")


def usable_cpus() -> int:
    """Return how many CPUs this node's processes may use."""
    return len(os.sched_getaffinity(0))


def started(pid: int) -> int:
    """Return when a process began, in clock ticks since boot. With the pid, it identifies the process for good."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def descendants(root: int) -> list[int]:
    """Every live process below `root`."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields[0] != b"Z":
                children.setdefault(int(fields[1]), []).append(int(name))
    found = []
    todo = [root]
    while todo:
        for pid in children.get(todo.pop(), []):
            found.append(pid)
            todo.append(pid)
    return found


def kill_descendants(patience: float = 10.0) -> bool:
    """Kill every process below this one, those adopted included.

    Returns:
        whether none is left.
    """
    clock = RunningClock()
    until = clock() + patience
    while clock() < until:
        below = descendants(os.getpid())
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            if not below:
                return True
        time.sleep(0.005)
    return False
