"""Identifies processes and this machine, for the ledger.

A process is identified by host name, pid and start time. A pid alone is not enough, because the system gives the pid of
an ended process to a new one.
"""

from __future__ import annotations

import getpass
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
        host: the name of the host, as `host_name` returns it there.
        pid: the id of the process.
        birth: a text for the start time of the process; "" if there was no such process.
    """

    host: str
    pid: int
    birth: str

    @classmethod
    def of(cls, pid: int) -> Process:
        """Return the identity of this host's process with an id. If there is none, or only a zombie, `birth` is ""."""
        return cls(host_name(), pid, _birth(pid) or "")

    @classmethod
    def this(cls) -> Process:
        """Return the identity of the current process."""
        return cls.of(os.getpid())

    def lives(self) -> bool | None:
        """Return True if this process still runs, False if it has ended, and None if it is on another host.

        A zombie has ended, and so has a process whose pid now belongs to another one.
        """
        if self.host != host_name():
            return None
        birth = _birth(self.pid)
        return birth is not None and birth == self.birth

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def host_name() -> str:
    """Return the name of this machine, with which the machines that it rents are tagged.

    On Linux, it is the host name. On macOS, where the host name changes with the network, it is the name that the user
    gave the Mac. The result stays the same while this process lives.
    """
    return (_name_of_mac() if sys.platform == "darwin" else "") or socket.gethostname()


def user_name() -> str:
    """Return the login name of this user, with which the machines that it rents are tagged.

    It is the number of the user if the machine knows no name, as in a container that runs as any user.
    """
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # from Python 3.13 on, an OSError
        return str(os.getuid())


@cache
def _name_of_mac() -> str:
    """Return the name that the user gave this Mac, or the host name if it is not known. The first result is kept."""
    try:
        told = subprocess.run(["scutil", "--get", "LocalHostName"], capture_output=True, text=True).stdout.strip()
    except OSError:
        told = ""
    return told or socket.gethostname()


def _birth(pid: int) -> str | None:
    """Return a text for the start time of a process on this host; None if there is none, or only a zombie."""
    if Path("/proc/self/stat").exists():
        return _linux_birth(pid)
    # BSD's ps takes everything after the first "=" as a heading. The settings make its time the same in any language
    # and zone.
    argv = ["ps", "-o", "lstart=", "-o", "state=", "-p", str(pid)]
    told = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C", "TZ": "UTC"}).stdout
    began, _, state = told.strip().rpartition(" ")
    return None if not began or state.startswith("Z") else began.strip()


def _linux_birth(pid: int) -> str | None:
    """Return the start of a process as "boot id:clock ticks"; None if there is none, or only a zombie."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    boot = Path("/proc/sys/kernel/random/boot_id")
    return None if state == "Z" else f"{boot.read_text().strip() if boot.exists() else ''}:{rest[18]}"


def is_stopped(pid: int) -> bool:
    """Return True if a process of this host is stopped by a signal such as SIGSTOP, or by a debugger."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return False
        state = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return state[:1] in ("T", "t")
