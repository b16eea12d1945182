"""What the lab asks of the Linux kernel: mounts, a thread's network namespace, groups of processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

MS_RDONLY, MS_REMOUNT, MS_BIND, MNT_DETACH, CLONE_NEWNET = 1, 32, 4096, 2, 0x40000000

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, what: str) -> None:
    """Raise errno as OSError, with the call that failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str | Path, target: Path, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    arguments = [str(source).encode(), str(target).encode(), kind.encode() or None, flags, options.encode() or None]
    checked(libc.mount(*arguments), f"mount {kind or source} on {target} ({options})")


def bind(source: Path, target: Path) -> None:
    """Show a folder of the host at `target`, read-only."""
    mount(source, target, flags=MS_BIND)
    mount(source, target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY)


def mounts_below(folder: Path) -> list[Path]:
    """Mount points at or below a folder, the youngest first."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        target = Path(line.split()[4].encode().decode("unicode_escape"))
        if target.is_relative_to(folder):
            found.append(target)
    return found[::-1]


def unmount_below(folder: Path) -> None:
    """Unmount everything at or below a folder, also while it is in use."""
    for target in mounts_below(folder):
        if libc.umount2(str(target).encode(), MNT_DETACH) != 0 and target in mounts_below(folder):
            raise OSError(ctypes.get_errno(), f"cannot unmount {target}")


def enter_netns(path: Path) -> None:
    """Move the calling thread into a network namespace. There is no way back: let the thread end."""
    with open(path, "rb") as file:
        checked(libc.setns(file.fileno(), CLONE_NEWNET), f"setns {path}")


def processes_in_netns(path: Path) -> list[int]:
    """Processes whose network namespace is the one at `path`."""
    try:
        inode = path.stat().st_ino
    except FileNotFoundError:
        return []
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it may have ended, or be a zombie
                if (entry / "ns/net").stat().st_ino == inode:
                    found.append(int(entry.name))
    return found


@dataclass(frozen=True)
class Group:
    """The processes of one machine, as control groups: frozen, killed and limited as one.

    The version 2 hierarchy freezes and kills; the memory limit is version 1's where that one has the controller.
    """

    name: str

    @property
    def main(self) -> Path:
        return unified() / self.name

    @property
    def folders(self) -> list[Path]:
        """All folders of this group that there are."""
        return [path for path in (self.main, Path("/sys/fs/cgroup/memory") / self.name) if path.is_dir()]

    def create(self, memory: int | None = None) -> list[Path]:
        self.main.mkdir(exist_ok=True)
        if memory is not None:
            old = Path("/sys/fs/cgroup/memory")
            if (old / "memory.limit_in_bytes").exists():
                (old / self.name).mkdir(exist_ok=True)
                (old / self.name / "memory.limit_in_bytes").write_text(str(memory))
            else:
                (self.main / "memory.max").write_text(str(memory))
        return self.folders

    def processes(self) -> list[int]:
        return [int(line) for line in (self.main / "cgroup.procs").read_text().split()] if self.main.is_dir() else []

    def freeze(self, frozen: bool) -> None:
        (self.main / "cgroup.freeze").write_text("1" if frozen else "0")
        wait_until(lambda: f"frozen {int(frozen)}" in (self.main / "cgroup.events").read_text(), 30, "freezing")

    def kill(self) -> None:
        """All at once, as when the power is cut."""
        if self.main.is_dir():
            (self.main / "cgroup.kill").write_text("1")

    def remove(self) -> None:
        """Kill, wait for the end of every process, and forget the group."""
        self.kill()
        for folder in self.folders:
            wait_until(lambda folder=folder: self._removed(folder), 30, f"the end of {folder}")  # type: ignore[misc]

    def _removed(self, folder: Path) -> bool:
        try:
            folder.rmdir()
        except FileNotFoundError:
            return True
        except OSError:  # busy while its last process ends
            return False
        return True


def groups(prefix: str) -> Iterator[Group]:
    """The groups there are whose name begins so."""
    for path in unified().glob(f"{prefix}*"):
        yield Group(path.name)


def unified() -> Path:
    """Where the version 2 hierarchy is mounted."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, target, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(target)
    raise FileNotFoundError("no cgroup2 file system is mounted: a lab cannot freeze or kill a machine as one")


def most_memory(pid: int | str) -> float:
    """Return the most memory that a process has had since its program began, in MiB."""
    return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def wait_until(check: Callable[[], object], within: float, what: str, pause: float = 0.01) -> None:
    """Poll with a deadline."""
    deadline = time.monotonic() + within
    while not check():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {within} s")
        time.sleep(pause)
