"""`open_for_writing`: finds the files that processes of this machine write.

A node gets the text of this module, so it uses the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

_WRITES = os.O_WRONLY | os.O_RDWR


def open_for_writing() -> Iterator[tuple[int, int]]:
    """Yield (device, inode) of each file that a process of this user has open for writing."""
    for pid in filter(str.isdecimal, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            for number in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError, ValueError):  # it is closed again
                    about = os.stat(f"/proc/{pid}/fd/{number}")
                    if stat.S_ISREG(about.st_mode) and writes(pid, number):
                        yield about.st_dev, about.st_ino


def writes(pid: str, number: str) -> bool:
    """Return True if a process has opened a file, by its number, for writing. Raises OSError if it is closed."""
    with open(f"/proc/{pid}/fdinfo/{number}") as file:
        flags = next((line.split()[1] for line in file if line.startswith("flags:")), "0")
    return bool(int(flags, 8) & _WRITES)
