"""Names processes, counts the CPUs that they may use, and finds, adopts or kills the descendants of a process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from skypool.clock import RunningClock
from skypool.safety import peers

_PR_SET_CHILD_SUBREAPER = 36
"""The option of prctl(2) that makes a process the parent of orphaned descendants."""
CLEAN = 'exec "$@" 3>&1 1>&2'
"""The command of a shell that runs a program, whose file 3 gets what the agent reads.

What a `sitecustomize` prints goes to stderr.
"""
TRACKER = b"resource_tracker import main"
"""What the command lines of resource trackers contain, of Python's `multiprocessing` and of loky."""
_KEPT = {
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "XDG_CACHE_HOME",
}
_PROXIES = {"http_proxy", "https_proxy", "no_proxy", "all_proxy"}
"""The variables of `plain_environment`."""
_TO_VANISH = 2.0
"""Seconds after which a killed process counts as one that cannot be killed."""
_TO_CLEAN = 1.0
"""Seconds in which a resource tracker may remove semaphores and shared memory that other processes have left."""


def call_it(what: str) -> None:
    """Name this process "skypool-" and `what` in `top` and `ps`. Linux keeps 15 characters. Does not raise."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as name:
        name.write(f"skypool-{what}")


def plain_environment() -> dict[str, str]:
    """Return the environment of a process of skypool beside the agent. Other variables may have keys, or change it."""
    return {name: value for name, value in os.environ.items() if name in _KEPT or name.lower() in _PROXIES}


def mib_of(pid: int) -> float:
    """Return the memory of a process in MiB; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except (OSError, ValueError, IndexError):
        return 0.0


def is_keeper(pid: int, began: int, folder: str) -> bool:
    """Return True if a process of this user is the keeper of the node in a folder.

    It must have been started at `began`, in clock ticks since boot, have the name of a keeper, and have this folder as
    its current one. A keeper leaves the folder just before it removes it.
    """
    try:
        with open(f"/proc/{pid}/comm") as name:
            is_named = name.read() == "skypool-keeper\n"
        is_there = os.readlink(f"/proc/{pid}/cwd") in (os.path.realpath(folder), "/")
        return is_named and is_there and os.stat(f"/proc/{pid}").st_uid == os.geteuid() and started(pid) == began
    except OSError:
        return False


def is_own(connection: socket.socket) -> bool:
    """Return True if the process at the other end of a Unix socket belongs to this user."""
    return peers.user(connection) == os.geteuid()


def usable_cpus() -> int:
    """Return the number of CPUs on which this process may run. A control group's limit of CPU time does not count."""
    return len(os.sched_getaffinity(0))


def started(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot. Together with the pid it identifies a process.

    A process that has ended has a start time until its parent waits for it. Raises OSError if there is no such process.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[19])


@dataclass(frozen=True, slots=True)
class _Process:
    """Running process, as /proc/PID/stat describes it: its pid, the pid of its parent, and its process group."""

    pid: int
    parent: int
    group: int


def _running(zombies: bool = False) -> Iterator[_Process]:
    """Yield all visible processes that run; with `zombies`, also those that have ended but were not waited for."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            # without its main thread, a process whose other threads run looks like one that has ended
            if zombies or fields[0] != b"Z" or int(fields[17]) > 1:
                yield _Process(int(name), int(fields[1]), int(fields[2]))


def wait_for_writer(seconds: float) -> None:
    """Wait so long, but only while another process may write to stdin, a pipe."""
    poll = select.poll()
    poll.register(0, 0)
    poll.poll(1000 * seconds)


def children(pid: int) -> list[int]:
    """Return the pids of a process's children, also of those that have ended and were not waited for.

    A child may be missing if another child ends meanwhile. Returns [] if there is no such process.
    """
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(ProcessLookupError):  # the thread has ended
                try:
                    with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                        found += map(int, file.read().split())
                except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN, or the thread has ended
                    if os.path.exists(f"/proc/{pid}/task/{thread}"):
                        return [each.pid for each in _running(zombies=True) if each.parent == pid]
    return found


def is_live(pid: int) -> bool:
    """Return True if a process runs or is stopped, and False if it has ended, even if nobody has waited for it yet."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return False
    return fields[0] != b"Z" or int(fields[17]) > 1


def descendants(root: int) -> list[int]:
    """Return the pids of all live descendants of `root`, in no particular order, without `root` itself.

    Processes that have ended but were not waited for (zombies) are left out.
    """
    below: dict[int, list[int]] = {}
    for each in _running():
        below.setdefault(each.parent, []).append(each.pid)
    found = []
    todo = [root]
    while todo:
        for pid in below.get(todo.pop(), []):
            found.append(pid)
            todo.append(pid)
    return found


def tracer_of(pid: int) -> int:
    """Return the pid of the process that traces a process, as a debugger does; 0 if there is none."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        return int((file.read().partition(b"TracerPid:")[2].split() or [b"0"])[0])
    return 0


def is_tracker(pid: int) -> bool:
    """Return True if a process is a resource tracker, of Python's `multiprocessing` or of loky, which joblib uses.

    When all processes that use the tracker have ended, it removes their semaphores and shared memory from /dev/shm, and
    ends. If it is killed, these stay. True is also returned for a process that was just started and has no command line
    yet, because it may be a tracker.
    """
    command = command_of(pid)
    return not command or TRACKER in command


def command_of(pid: int) -> bytes:
    """Return the command line of a process, with a null byte after each word; b"" if it cannot be read."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def kill(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to processes. Processes that have ended, or belong to other users, are ignored."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_group(group: int) -> None:
    """Kill a process group, except for resource trackers, which end by themselves. Does not wait.

    A process that a member of the group starts meanwhile may be left. Does nothing if there is no such group.
    """
    members = [each.pid for each in _running() if each.group == group]
    others = [pid for pid in members if not is_tracker(pid)]
    if len(others) < len(members):
        kill(others)
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)  # all at once, so that none can start another one meanwhile


def adopt_orphans() -> bool:
    """Make this process the parent of each of its descendants whose own parent dies, so that it can reap them.

    Returns False if the system refuses. Processes that it forks later do not inherit this.
    """
    import ctypes

    return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


class Orphans:
    """Processes that dead workers have left. They are now children of this process, the agent, which adopts them.

    Processes in sessions of their own, or in the background, are among them. Children that the agent itself started
    are not.
    """

    def __init__(self) -> None:
        self._session = os.getsid(0)
        self._seen: dict[int, float] = {}

    def end(self, workers: Collection[int]) -> bool:
        """Kill and reap the orphans. Return True if none is left. Does not wait. `workers` has the pids of the workers.

        Two kinds of orphans are ignored for the result. Resource trackers get a second to end by themselves before they
        are killed. Processes that are still there two seconds after they were first seen cannot be killed: they wait
        for a device, or belong to another user.
        """
        is_clean = True
        seen: dict[int, float] = {}
        now = time.monotonic()
        for root in self._found(workers):
            for pid in [root, *descendants(root)]:
                since = seen[pid] = self._seen.get(pid, now)
                took = now - since
                command = command_of(pid)  # empty if it has just been started, or is about to vanish
                if took > _TO_CLEAN or (command and TRACKER not in command):
                    kill([pid])
                is_clean = is_clean and (TRACKER in command or took > _TO_VANISH)
        self._seen = seen
        return is_clean

    @property
    def are_some(self) -> bool:
        """True if the last call of `end` found orphans."""
        return bool(self._seen)

    def _found(self, workers: Collection[int]) -> Iterator[int]:
        """Reap the orphans that have ended, and yield the others. `workers` has the pids of the workers."""
        for pid in children(os.getpid()):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                if pid not in workers and os.getsid(pid) != self._session and not os.waitpid(pid, os.WNOHANG)[0]:
                    yield pid


def kill_descendants(patience: float = 10.0, spared: int = 0) -> bool:
    """Kill all descendants of this process by SIGKILL, including adopted orphans, and wait until they have ended.

    Returns False if some are left after `patience` seconds. Resource trackers have a second to end by themselves. All
    children of this process are reaped, so that `os.waitpid` no longer finds them. The process `spared` may go on.
    """
    clock = RunningClock()
    began = clock()
    while (took := clock() - began) < patience:
        below = [pid for pid in descendants(os.getpid()) if pid != spared]
        kill(pid for pid in below if took > _TO_CLEAN or not is_tracker(pid))
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        if not below and set(children(os.getpid())) <= {spared}:
            return True
        time.sleep(0.005)
    return False
