"""Names processes, counts the CPUs that they may use, and finds or kills the descendants of a process."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from skypool.clock import RunningClock


def call_it(what: str) -> None:
    """Set the name of this process that `top` and `ps` show, to "skypool-" and `what`."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as name:
        name.write(f"skypool-{what}")


def usable_cpus() -> int:
    """Return how many CPUs this node's processes may use."""
    return len(os.sched_getaffinity(0))


def started(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot. Together with the pid it identifies a process.

    Raises:
        OSError: there is no such process.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


def descendants(root: int) -> list[int]:
    """Return the pids of all live processes below `root`, in any generation."""
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
    """Kill all processes below this one, including orphans that it has adopted, until none is left.

    Args:
        patience: seconds after which to give up.

    Returns:
        True if none is left.
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
