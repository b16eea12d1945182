"""Storage for large values on a node: memory while there is enough of it, otherwise unnamed files."""

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
"""Bytes that are kept in memory without a look at how much is free."""
WORTH_KEEPING = 4 << 20
"""Bytes from which memory is kept for the next value."""
_KEPT = 256 << 20
"""Bytes up to which it is."""
_IDLE = 5.0
"""Seconds after which it is given back to the system."""


class Blob(NamedTuple):
    """A large value: a file descriptor that holds it, and its length in bytes."""

    fd: int
    size: int


class SpareMemory:
    """Memory of a large value that nobody needs any more, for the next one, whichever way that goes: filling it costs
    less than half of fresh memory.

    One is kept, of `WORTH_KEEPING` to `_KEPT` bytes, for `_IDLE` seconds.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        self._since = 0.0

    def give(self, blob: Blob) -> None:
        """Take over a value that nobody needs any more."""
        size = os.fstat(blob.fd).st_size
        if not (WORTH_KEEPING <= size <= _KEPT and _in_memory(blob.fd)):
            os.close(blob.fd)
            return
        self.let_go()
        self._fd = blob.fd
        self._since = time.monotonic()

    def take(self, size: int) -> int | None:
        """A file descriptor with memory for a value of about that size, to be written from its beginning."""
        if self._fd is None or os.fstat(self._fd).st_size > 2 * size:
            return None
        fd = self._fd
        self._fd = None
        return fd

    def let_go(self, now: float = math.inf) -> None:
        """Give the memory back to the system if it was not needed for a while."""
        if self._fd is not None and now - self._since > _IDLE:
            os.close(self._fd)
            self._fd = None


def _in_memory(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


def create_storage(
    size: int, folder: str, memory: int | None = None, kept: Callable[[int], int | None] = lambda size: None
) -> int:
    """A file descriptor with room for `size` bytes, gone when it is closed.

    Args:
        folder: where it goes when memory is short.
        memory: the largest value kept in memory; None means half of what is free.
        kept: gives memory for so many bytes that was used before, if there is some.

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
    if size <= _SMALL:
        return _SMALL
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 // 2
    return _SMALL


def _unnamed_file(folder: str) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as e:
        if e.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    fd, path = tempfile.mkstemp(dir=folder)
    os.unlink(path)
    return fd


def full(size: int, folder: str, cause: OSError) -> SpoolFull:
    """The error for a value that found no room."""
    return SpoolFull(
        cause.errno,
        f"no room for a value of {size / 2**20:,.1f} MiB: {os.strerror(cause.errno or 0)}; "
        f"free some of its disk or give the node a larger one",
        folder,
    )


def write_all(fd: int, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
    """Write all of `buffers`, however many calls it takes."""
    views = [memoryview(b).cast("B") for b in buffers if len(b)]
    while views:
        written = os.writev(fd, views[:512])
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]
