"""Names the process that holds a lock of the ledger, for messages to the user. Only Linux tells."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from skypool.processes import is_stopped
from skypool.text import one_line

_SHOWN = 60
"""The most characters of a command line that are shown."""


def words_about(file: Path) -> str:
    """Return words for a message that a database is locked: by which process, and what to do about it."""
    for pid in writers([file.with_name(file.name + each) for each in (".lock", "-shm", "")]):
        with suppress(OSError):  # it has just ended
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            named = f"process {pid} ({one_line(command, _SHOWN)})"
            if is_stopped(pid):
                return f"{named}, which is stopped: continue it with `kill -CONT {pid}`, or end it"
            return f"{named}: wait for it, or end it"
    return f"another process: see which with `fuser {file}`"


def writers(files: Iterable[Path]) -> list[int]:
    """Return the ids of other processes that hold exclusive locks of files."""
    wanted = set[tuple[int, int]]()
    for each in files:
        with suppress(OSError):  # there is none
            about = each.stat()
            wanted.add((about.st_dev, about.st_ino))
    found: list[int] = []
    with suppress(OSError):  # another system
        for line in Path("/proc/locks").read_text().splitlines():
            match line.split():
                case [_, _, _, "WRITE", pid, place, *_] if pid != str(os.getpid()):
                    inode = int(place.rpartition(":")[2])
                    if inode in {each for _, each in wanted} and _has_open(int(pid), wanted) and int(pid) not in found:
                        found.append(int(pid))
                case _:
                    continue
    return found


def _has_open(pid: int, files: set[tuple[int, int]]) -> bool:
    """Return True if a process has one of these files open, given as (device, inode)."""
    with suppress(OSError):  # it has ended, or is not this user's
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                about = os.stat(f"/proc/{pid}/fd/{number}")
                if (about.st_dev, about.st_ino) in files:
                    return True
    return False
