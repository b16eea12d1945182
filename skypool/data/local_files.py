"""Looks at the files of a folder: which there are, and whether a program still writes them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from skypool.files.open_files import open_for_writing, writes

OURS = ".skypool-"
"""The beginning of the names of files that skypool itself writes into a folder. They are not saved."""
OWN = ".skypool"
"""Objects of skypool's own are below this name."""
_LONGEST = 800
"""The most bytes of the name of a file. With a prefix and names of skypool's own, stores allow 1024."""
_NAMED_MAP = 6
"""The number of fields of a line of /proc/PID/maps that tells of a file."""


class State(NamedTuple):
    """The state of a file, which tells whether it has changed: inode, size in bytes, and time of the last change.

    The time is in nanoseconds since 1970.
    """

    inode: int
    size: int
    changed: int


class Listing(NamedTuple):
    """The files of a folder.

    Attributes:
        files: the state of each file that can be saved, by its path in the folder.
        refused: why a file cannot be saved, by its path.
    """

    files: dict[str, State]
    refused: dict[str, str]


def listed(folder: str) -> Listing:
    """Return the files in a folder and in those below it. A folder that is not there has none."""
    found = Listing({}, {})
    refused = found.refused
    root = os.path.realpath(folder)
    for path, entry in _walk(root, refused):
        try:
            about = entry.stat()
        except OSError as e:
            if entry.is_symlink():
                refused[path] = "it is a link that leads nowhere"
            elif not isinstance(e, FileNotFoundError):  # else it is gone again
                refused[path] = f"it cannot be read: {e.strerror}"
            continue
        if entry.is_symlink() and not os.path.realpath(entry.path).startswith(f"{root}/"):
            refused[path] = "it is a link that leads out of the folder"
        elif entry.is_symlink() and stat.S_ISDIR(about.st_mode):
            refused[path] = "it is a link to a folder"
        elif not stat.S_ISREG(about.st_mode):
            refused[path] = "it is no file"
        elif why := trouble_with(path):
            refused[path] = why
        else:
            found.files[path] = State(about.st_ino, about.st_size, about.st_mtime_ns)
    return found


def _walk(root: str, refused: dict[str, str]) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield what is in a folder and in those below it, but folders themselves. Note those that cannot be read."""
    folders = [""]
    while folders:
        below = folders.pop()
        try:
            entries = sorted(os.scandir(os.path.join(root, below)), key=lambda each: each.name)
        except (FileNotFoundError, NotADirectoryError):  # it is gone again
            continue
        except OSError as e:
            refused[below.rstrip("/")] = f"it cannot be read: {e.strerror}"
            continue
        for each in entries:
            if each.name.startswith(OURS):
                continue
            if each.is_dir(follow_symlinks=False):
                folders.append(f"{below}{each.name}/")
            else:
                yield f"{below}{each.name}", each


def trouble_with(path: str) -> str:
    """Return why an object cannot have this name in every store; "" if it can."""
    if not path.isprintable():
        return "its name has characters that not every store allows"
    if "\\" in path:
        return "its name has a backslash, which stores read in different ways"
    if path.startswith(f"{OWN}/"):
        return f"names that begin with {OWN}/ are skypool's own"
    if len(path.encode()) > _LONGEST:
        return f"its name is longer than {_LONGEST} bytes"
    return ""


def is_inside(path: str, other: str) -> bool:
    """Return True if a path is another one, or below it."""
    return f"{path}/".startswith(f"{other}/")


def nested(one: str, other: str) -> bool:
    """Return True if one of two paths is the other, or below it."""
    return is_inside(one, other) or is_inside(other, one)


def aside_of(folder: str) -> str:
    """Return a new path for files that are moved out of a folder: beside it, or in it if its disk ends there."""
    name = f"aside-{secrets.token_hex(3)}"
    real = os.path.realpath(folder)
    if os.path.islink(folder) or os.stat(os.path.dirname(real)).st_dev != os.stat(real).st_dev or os.path.ismount(real):
        return os.path.join(folder, f"{OURS}{name}")
    return f"{folder.rstrip('/')}.{name}"


def state_of(file: int) -> State:
    """Return the state of an open file."""
    about = os.fstat(file)
    return State(about.st_ino, about.st_size, about.st_mtime_ns)


class Writers:
    """Tells whether programs have files open for writing. What `/proc` says is read once, and only if it is needed."""

    def __init__(self) -> None:
        self._written: set[tuple[int, int]] | None = None

    def inode_of(self, path: str) -> int | None:
        """Return the inode of a file if a program may write to it, else None.

        Raises OSError if it is gone, or may not be read.
        """
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return os.fstat(file).st_ino if self._write(file) else None
        finally:
            os.close(file)

    def _write(self, file: int) -> bool:
        """Return True if a program may write to a file, which is open here for reading."""
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError as e:
            if e.errno == errno.EAGAIN:
                return True
            # another user's file, or a file system without leases
            if self._written is None:
                self._written = set(open_for_writing())
            about = os.fstat(file)
            return (about.st_dev, about.st_ino) in self._written
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False


def written_by(folder: str, pids: Iterable[int] | None) -> set[tuple[int, int]]:
    """Return (device, inode) of the files below a folder that processes have open for writing, or write through memory.

    Args:
        pids: the processes; None for all others of this user.
    """
    below, found = f"{os.path.realpath(folder)}/", set[tuple[int, int]]()

    def add(name: str) -> None:
        about = os.stat(name)
        if stat.S_ISREG(about.st_mode):
            found.add((about.st_dev, about.st_ino))

    others = (int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid())
    for pid in map(str, others if pids is None else pids):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            for number in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError, ValueError):  # it is closed again
                    name = f"/proc/{pid}/fd/{number}"
                    if os.readlink(name).startswith(below) and writes(pid, number):
                        add(name)
            with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as file:
                mapped = (line.rstrip("\n").split(maxsplit=5) for line in file)
                for each in mapped:
                    if len(each) == _NAMED_MAP and each[1][1::2] == "ws" and each[5].startswith(below):
                        with contextlib.suppress(OSError):  # it is deleted
                            add(each[5])
    return found


def journal_lines(path: str) -> Iterator[object]:
    """Yield the lines of a journal, but one that was not written to its end."""
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                yield json.loads(line)
