"""Room for large values on a node: memory while there is plenty, otherwise files without a name."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

from skypool.errors import SpoolFull

_SMALL = 16 << 20


class Blob(NamedTuple):
    """A large value: a file descriptor that holds it, and its length in bytes."""

    fd: int
    size: int


def create(size: int, folder: str, memory: int | None = None) -> int:
    """A file descriptor with room for `size` bytes, gone when it is closed.

    Args:
        folder: where it goes when memory is short.
        memory: the largest value kept in memory; None means half of what is free.

    Raises:
        SpoolFull: neither memory nor the folder's disk has room.
    """
    if size <= (_memory_room(size) if memory is None else memory):
        return os.memfd_create("skypool", os.MFD_CLOEXEC)
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


def write(fd: int, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
    """Write all of `buffers`, however many calls it takes."""
    views = [memoryview(b).cast("B") for b in buffers if len(b)]
    while views:
        written = os.writev(fd, views[:512])
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]
