"""Stores large values on a node: in memory while there is enough of it, otherwise in unnamed files."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from skypool.errors import SpoolFull

_SMALL = 16 << 20
"""The size in bytes up to which a value is kept in memory without checking how much is free."""
WORTH_KEEPING = 4 << 20
"""The size in bytes from which the memory of a value is kept for the next value."""
_KEPT = 256 << 20
"""The size in bytes up to which it is kept."""
_IDLE = 5.0
"""Seconds after which memory that is kept is given back to the system."""


class Blob(NamedTuple):
    """A large value: a file descriptor of the file or memory that contains it, and its length in bytes."""

    fd: int
    size: int


class SpareMemory:
    """The memory of a large value that is no longer needed, kept for the next large value.

    Filling it costs less than half of filling fresh memory. One such memory of `WORTH_KEEPING` to `_KEPT` bytes is
    kept, for about `_IDLE` seconds.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        self._since = 0.0

    def give(self, blob: Blob) -> None:
        """Take over the memory of a value that is no longer needed, instead of what is kept already.

        It is closed at once if it is a file on a disk, or too small or too large to be kept.
        """
        size = os.fstat(blob.fd).st_size
        if not (WORTH_KEEPING <= size <= _KEPT and _in_memory(blob.fd)):
            os.close(blob.fd)
            return
        self.let_go()
        self._fd = blob.fd
        self._since = time.monotonic()

    def take(self, size: int) -> int | None:
        """Return a file descriptor with memory for a value of `size` bytes, to be written from its beginning.

        Returns None if no memory is kept, or if it is more than twice as large.
        """
        if self._fd is None or os.fstat(self._fd).st_size > 2 * size:
            return None
        fd = self._fd
        self._fd = None
        return fd

    def let_go(self, now: float = math.inf) -> None:
        """Give the memory back to the system if it has not been used for `_IDLE` seconds.

        Args:
            now: the time by `time.monotonic()`. By default the memory is given back in any case.
        """
        if self._fd is not None and now - self._since > _IDLE:
            os.close(self._fd)
            self._fd = None


def _in_memory(fd: int) -> bool:
    """Return True if a file descriptor is memory (a memfd), and not a file on a disk."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


def create_storage(
    size: int, folder: str, memory: int | None = None, kept: Callable[[int], int | None] = lambda size: None
) -> int:
    """Return a file descriptor with room for `size` bytes. Its contents are gone when it is closed.

    Args:
        size: the number of bytes.
        folder: the folder of the file that is made if memory is short.
        memory: the size in bytes of the largest value kept in memory; None for half of the free memory.
        kept: returns memory of about this size that was used before, or None.

    Raises:
        SpoolFull: neither memory nor the folder's disk has room.
    """
    if size <= (_memory_room(size) if memory is None else memory):
        used = kept(size)
        if used is None:
            return os.memfd_create("skypool", os.MFD_CLOEXEC)
        os.lseek(used, 0, os.SEEK_SET)
        return used
    try:
        fd = _unnamed_file(folder)
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError:
            os.close(fd)
            raise
    except OSError as e:
        raise full(size, folder, e) from e
    return fd


def _memory_room(size: int) -> int:
    """Return the greatest size in bytes of a value that may be kept in memory.

    It is half of the free memory. For a value of at most `_SMALL` bytes, `_SMALL` is returned without checking.
    """
    if size <= _SMALL:
        return _SMALL
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 // 2
    return _SMALL


def _unnamed_file(folder: str) -> int:
    """Return a file descriptor of a new file without a name in this folder."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as e:
        if e.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    fd, path = tempfile.mkstemp(dir=folder)
    os.unlink(path)
    return fd


def full(size: int, folder: str, cause: OSError) -> SpoolFull:
    """Return the error for a value that found no room.

    Args:
        size: the value's size in bytes.
        folder: the folder without room.
        cause: the error of the operating system.
    """
    return SpoolFull(
        cause.errno,
        f"no room for a value of {size / 2**20:,.1f} MiB: {os.strerror(cause.errno or 0)}; "
        f"free some of the disk or give the node a larger one",
        folder,
    )


def write_all(fd: int, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
    """Write all of `buffers` to a file descriptor, with as many system calls as it takes."""
    views = [memoryview(b).cast("B") for b in buffers if len(b)]
    while views:
        written = os.writev(fd, views[:512])
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]
