"""Identity of processes and of this machine, as the ledger stores it: host name, pid and start time.

A pid alone is not enough because the system uses it again, and the host name of a Mac changes.
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
    """A process on some host.

    Attributes:
        birth: when it began, as its system says it; "" where that says nothing.
    """

    host: str
    pid: int
    birth: str

    @classmethod
    def of(cls, pid: int) -> Process:
        """One on this host."""
        return cls(host_name(), pid, _birth(pid) or "")

    @classmethod
    def this(cls) -> Process:
        """This very one."""
        return cls.of(os.getpid())

    def lives(self) -> bool | None:
        """Whether it still runs; None where that cannot be seen, as it is on another host."""
        if self.host != host_name():
            return None
        birth = _birth(self.pid)
        return birth is not None and birth == self.birth

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def host_name() -> str:
    """Return the name of this machine, which stays the same while this process lives.

    macOS calls itself what its network does, and so changes its name with the network. Machines are tagged with it and
    found again by it, so the name that the user gave the Mac is taken there.
    """
    return (_name_of_mac() if sys.platform == "darwin" else "") or socket.gethostname()


@cache
def _name_of_mac() -> str:
    try:
        told = subprocess.run(["scutil", "--get", "LocalHostName"], capture_output=True, text=True).stdout.strip()
    except OSError:
        told = ""
    return told or socket.gethostname()


def _birth(pid: int) -> str | None:
    """When a process began; None where there is none."""
    if Path("/proc/self/stat").exists():
        return _linux_birth(pid)
    # BSD's ps takes all after the first "=" for a heading; the time is in the user's language and time zone
    argv = ["ps", "-o", "lstart=", "-o", "state=", "-p", str(pid)]
    told = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C", "TZ": "UTC"}).stdout
    began, _, state = told.strip().rpartition(" ")
    return None if not began or state.startswith("Z") else began.strip()


def _linux_birth(pid: int) -> str | None:
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    boot = Path("/proc/sys/kernel/random/boot_id")
    return None if state == "Z" else f"{boot.read_text().strip() if boot.exists() else ''}:{rest[18]}"


def is_stopped(pid: int) -> bool:
    """Return True if a process of this host stands still because of a signal such as SIGSTOP."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return False
        state = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return state[:1] in ("T", "t")
