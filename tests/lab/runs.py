"""Runs of the lab on this host. Each has a folder that says whose it is; what the dead left behind is removed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.lab import kernel, network

TAG = "lab-"


def place() -> Path:
    """Where all labs of this host live."""
    return Path(os.environ.get("SKYPOOL_LAB") or "/var/cache/skypool-lab")


@contextlib.contextmanager
def all_labs() -> Iterator[None]:
    """Held while a lab begins or ends: nets are chosen and the dead are swept by one at a time."""
    with open(place() / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class Run:
    """One lab's folder. The owner holds a lock on it for as long as it lives."""

    folder: Path
    lock: int = -1

    @property
    def tag(self) -> str:
        """What everything of this run is called on the host."""
        return TAG + self.folder.name

    @classmethod
    def claim(cls) -> Run:
        """A new one of this process."""
        folder = place() / "runs" / secrets.token_hex(3)
        folder.mkdir(parents=True, mode=0o755)
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "owner").write_text(json.dumps({"pid": os.getpid(), "started": started(os.getpid())}))
        return cls(folder, lock)

    @property
    def is_dead(self) -> bool:
        """Its owner is gone. A fork may hold the lock on, and a number may be used again: either one tells."""
        try:
            owner = json.loads((self.folder / "owner").read_text())
            if started(owner["pid"]) != owner["started"]:
                return True
            lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, ValueError):  # it ended while it claimed, which happens under all_labs()
            return True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(lock)
        return True

    def remove(self) -> None:
        """End everything that this run started, and forget it. The order matters: processes hold the rest."""
        found = list(kernel.groups(f"{self.tag}-"))
        for group in found:
            group.kill()
        for namespace in network.NETNS.glob(f"{self.tag}-*"):
            for pid in kernel.processes_in_netns(namespace):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for group in found:
            group.remove()
        kernel.unmount_below(self.folder)
        network.remove(self.tag)
        if left := kernel.mounts_below(self.folder):  # never delete through a mount
            raise OSError(f"still mounted: {left}")
        shutil.rmtree(self.folder)
        if self.lock >= 0:
            os.close(self.lock)


def sweep() -> None:
    """Remove the runs whose owner is dead. The caller holds all_labs()."""
    for folder in (place() / "runs").iterdir():
        if (run := Run(folder)).is_dead:
            run.remove()


def started(pid: int) -> str:
    """When a process began, in the kernel's ticks; empty if it has ended."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if after_name[0] in "ZX" else after_name[19]
