"""Names processes, counts the CPUs that they may use, and finds or kills the descendants of a process."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from skypool.clock import RunningClock


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


def descendants(root: int) -> list[int]:
    """Return the pids of all live children of `root`, their children and so on, in no particular order.

    `root` itself is not among them. Processes that have ended but were not waited for (zombies) are left out. Returns
    an empty list if there are none.
    """
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


def kill_marked(root: int, variable: str, value: str, patience: float = 2.0) -> None:
    """Kill all descendants of `root` that were started with a variable in their environment. Wait until they are gone.

    A process that clears its environment is not found. Does nothing if there are none.

    Args:
        root: the pid of a process. The process itself is not killed.
        variable: the name of the variable.
        value: its value.
        patience: seconds after which not to wait any longer.
    """
    mark = f"\0{variable}={value}\0".encode()
    until = time.monotonic() + patience
    while True:
        marked: list[int] = []
        for pid in descendants(root):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
                if mark in b"\0" + file.read():
                    marked.append(pid)
        for pid in marked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not marked or time.monotonic() > until:
            return
        time.sleep(0.002)


def kill_descendants(patience: float = 10.0) -> bool:
    """Kill all descendants of this process by SIGKILL, including orphans that it has adopted, until none is left.

    Waits until they have ended. All children of this process are reaped, so that `os.waitpid` no longer finds them.

    Args:
        patience: seconds after which to give up.

    Returns:
        True if no process is left, False if some were left after `patience` seconds.
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
