"""Identifies processes and this machine, for the ledger (the local database of rented machines).

A process is identified by host name, pid and start time. A pid alone is not enough, because the system gives the pid of
an ended process to a new one.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Process:
    """The identity of a process on some host.

    Attributes:
        host: the name of its host.
        pid: its process id.
        birth: its start time, in a form that depends on the system; "" if the process did not exist.
    """

    host: str
    pid: int
    birth: str

    @classmethod
    def of(cls, pid: int) -> Process:
        """Return the identity of the process on this host that has this pid now.

        If there is no such process, or only a zombie, `birth` of the result is "".
        """
        return cls(host_name(), pid, _birth(pid) or "")

    @classmethod
    def this(cls) -> Process:
        """Return the identity of the current process."""
        return cls.of(os.getpid())

    def lives(self) -> bool | None:
        """Return True if this process still runs, False if it has ended.

        A zombie has ended, and so has a process whose pid now belongs to another one. Returns None for a process on
        another host.
        """
        if self.host != host_name():
            return None
        birth = _birth(self.pid)
        return birth is not None and birth == self.birth

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def host_name() -> str:
    """Return the name of this machine. Machines that this machine rents are tagged with the name.

    On Linux, the result is the system's host name. On macOS, where the host name changes with the network, the result
    is the name that the user gave the Mac. On macOS, the result stays the same while this process lives.
    """
    return (_name_of_mac() if sys.platform == "darwin" else "") or socket.gethostname()


@cache
def _name_of_mac() -> str:
    """Return the name that the user gave this Mac, or the system's host name if that is not known.

    The result of the first call is kept. Does not raise if the tool that knows the name is missing.
    """
    try:
        told = subprocess.run(["scutil", "--get", "LocalHostName"], capture_output=True, text=True).stdout.strip()
    except OSError:
        told = ""
    return told or socket.gethostname()


def _birth(pid: int) -> str | None:
    """Return a text for the start time of a process on this host. Its form depends on the system.

    Returns None if there is no such process, or only a zombie.
    """
    if Path("/proc/self/stat").exists():
        return _linux_birth(pid)
    # BSD's ps takes everything after the first "=" as a heading. The settings make its time the same in any language
    # and zone.
    argv = ["ps", "-o", "lstart=", "-o", "state=", "-p", str(pid)]
    told = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C", "TZ": "UTC"}).stdout
    began, _, state = told.strip().rpartition(" ")
    return None if not began or state.startswith("Z") else began.strip()


def _linux_birth(pid: int) -> str | None:
    """Return the start of a process on Linux as "id:ticks": the id of the boot, and clock ticks since that boot.

    The id is "" if the system does not tell it. Returns None if there is no such process, or only a zombie.
    """
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    boot = Path("/proc/sys/kernel/random/boot_id")
    return None if state == "Z" else f"{boot.read_text().strip() if boot.exists() else ''}:{rest[18]}"


def is_stopped(pid: int) -> bool:
    """Return True if a process of this host is stopped by a signal such as SIGSTOP, or by a debugger.

    Returns False if the process is not stopped, or does not exist.
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return False
        state = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return state[:1] in ("T", "t")
