"""Names processes, counts the CPUs that they may use, and finds or kills the descendants of a process."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from skypool.clock import RunningClock

_PASSES = 50
"""The number of times that `kill_group` looks for processes of a group that are left."""
_TO_CLEAN = 1.0
"""Seconds in which a resource tracker of `multiprocessing` may remove what the others have left."""


def call_it(what: str) -> None:
    """Set the name of this process in `top` and `ps` to "skypool-" followed by `what`. Does not raise.

    Linux keeps only the first 15 characters.
    """
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as name:
        name.write(f"skypool-{what}")


def usable_cpus() -> int:
    """Return how many CPUs this process and its children may use: the size of its CPU affinity mask.

    A limit of CPU time by a control group does not count.
    """
    return len(os.sched_getaffinity(0))


def started(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot. Together with the pid it identifies a process.

    A process that has ended still has a start time until its parent waits for it.

    Raises:
        OSError: there is no such process.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


@dataclass(frozen=True, slots=True)
class _Process:
    """A process that runs, as /proc/PID/stat describes it."""

    pid: int
    parent: int
    group: int


def _running() -> Iterator[_Process]:
    """Yield all processes that can be seen. Those that have ended but were not waited for (zombies) are left out."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields[0] != b"Z":
                yield _Process(int(name), int(fields[1]), int(fields[2]))


def descendants(root: int) -> list[int]:
    """Return the pids of all live children of `root`, their children and so on, in no particular order.

    `root` itself is not among them. Processes that have ended but were not waited for (zombies) are left out. Returns
    an empty list if there are none.
    """
    children: dict[int, list[int]] = {}
    for each in _running():
        children.setdefault(each.parent, []).append(each.pid)
    found = []
    todo = [root]
    while todo:
        for pid in children.get(todo.pop(), []):
            found.append(pid)
            todo.append(pid)
    return found


def _is_tracker(pid: int) -> bool:
    """Return True if a process is the resource tracker of Python's `multiprocessing`.

    It removes the semaphores and the shared memory of the processes that use it from /dev/shm, once all of them have
    ended, and then ends by itself. If it is killed, they stay.
    """
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


def _kill(pids: Iterable[int]) -> None:
    """Send SIGKILL to processes. Those that have ended, or belong to other users, are left out."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def kill_group(group: int) -> None:
    """Kill all processes of a process group, except for resource trackers of `multiprocessing`.

    These end by themselves when the others have ended. If the group cannot be killed without them, they are killed,
    too. Does not wait for the end of the processes.

    Args:
        group: the id of the process group.

    Raises:
        ProcessLookupError: there is no such process group.
    """
    for _ in range(_PASSES):
        members = [each.pid for each in _running() if each.group == group]
        others = [pid for pid in members if not _is_tracker(pid)]
        if len(others) == len(members):
            break  # all at once, so that none can start another one meanwhile
        if not others:
            return
        _kill(others)
        time.sleep(0.002)
    os.killpg(group, signal.SIGKILL)


def kill_marked(root: int, variable: str, value: str, patience: float = 2.0) -> None:
    """Kill all descendants of `root` that were started with a variable in their environment. Wait until they are gone.

    A process that clears its environment is not found. Resource trackers of `multiprocessing` have a second to end by
    themselves. Does nothing if there are none.

    Args:
        root: the pid of a process. The process itself is not killed.
        variable: the name of the variable.
        value: its value.
        patience: seconds after which not to wait any longer.
    """
    mark = f"\0{variable}={value}\0".encode()
    began = time.monotonic()
    while True:
        marked: list[int] = []
        for pid in descendants(root):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
                if mark in b"\0" + file.read():
                    marked.append(pid)
        took = time.monotonic() - began
        _kill(pid for pid in marked if took > _TO_CLEAN or not _is_tracker(pid))
        if not marked or took > patience:
            return
        time.sleep(0.002)


def kill_descendants(patience: float = 10.0) -> bool:
    """Kill all descendants of this process by SIGKILL, including orphans that it has adopted, until none is left.

    Waits until they have ended. Resource trackers of `multiprocessing` have a second to end by themselves. All children
    of this process are reaped, so that `os.waitpid` no longer finds them.

    Args:
        patience: seconds after which to give up.

    Returns:
        True if no process is left, False if some were left after `patience` seconds.
    """
    clock = RunningClock()
    began = clock()
    while (took := clock() - began) < patience:
        below = descendants(os.getpid())
        _kill(pid for pid in below if took > _TO_CLEAN or not _is_tracker(pid))
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            if not below:
                return True
        time.sleep(0.005)
    return False
