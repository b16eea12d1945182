"""Stores large values on a node: in memory while there is enough of it, otherwise in unnamed files."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from skypool.errors import SpoolFull

_SMALL = 16 << 20
"""The size in bytes up to which a value is kept in memory without checking how much is free."""
WORTH_KEEPING = 4 << 20
"""The least size in bytes of a value whose memory is kept for the next value."""
_KEPT = 256 << 20
"""The greatest size in bytes of a value whose memory is kept for the next value."""
_IDLE = 5.0
"""Seconds after which memory that is kept is given back to the system."""


class Blob(NamedTuple):
    """Large value of `size` bytes in memory or in a file, to which the file descriptor `fd` refers."""

    fd: int
    size: int


class SpareMemory:
    """Memory of a large value that is no longer needed, kept for the next large value.

    Filling used memory takes less than half as long as filling fresh memory. At most one piece of memory is kept, of
    `WORTH_KEEPING` (4 Mi) to `_KEPT` (256 Mi) bytes, for about `_IDLE` (5) seconds.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        self._since = 0.0

    def give(self, blob: Blob) -> None:
        """Take over the memory of a value. The caller must not use its file descriptor any more.

        The memory is kept if it has 4 to 256 MiB, and takes the place of memory that was kept before. Otherwise, and if
        the value is in a file, its file descriptor is closed.
        """
        size = os.fstat(blob.fd).st_size
        if not (WORTH_KEEPING <= size <= _KEPT and _in_memory(blob.fd)):
            os.close(blob.fd)
            return
        self.let_go()
        self._fd = blob.fd
        self._since = time.monotonic()

    def take(self, size: int) -> int | None:
        """Hand out the kept memory for a value of `size` bytes: return its file descriptor, and keep it no longer.

        The memory has its old contents, length and file position. Returns None if no memory is kept, or if it is more
        than twice as large as `size`.
        """
        if self._fd is None or os.fstat(self._fd).st_size > 2 * size:
            return None
        fd = self._fd
        self._fd = None
        return fd

    def let_go(self, now: float = math.inf) -> None:
        """Give the kept memory back to the system, if there is any.

        With `now`, in seconds of `time.monotonic()`, do so only if the memory was kept for more than `_IDLE` (5)
        seconds.
        """
        if self._fd is not None and now - self._since > _IDLE:
            os.close(self._fd)
            self._fd = None


def _in_memory(fd: int) -> bool:
    """Return True if a file descriptor is memory (a memfd), and False for a file on a disk or a closed one."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


def create_storage(
    size: int, folder: str, memory: int | None = None, kept: Callable[[int], int | None] = lambda size: None
) -> int:
    """Return a file descriptor of memory or of an unnamed file in `folder`, with room for `size` bytes.

    Memory is used for sizes up to `memory`, else a file. The file position is 0. Raises SpoolFull if the folder's disk
    has no room.

    Args:
        memory: the largest size in bytes for memory. If None, half of the available memory, but at least 16 MiB.
        kept: called with `size`. Returns used memory of about this size, with its old contents; None for fresh memory.
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
    """Return the size up to which a value is kept in memory: half of what is free, or `_SMALL` for a small value."""
    if size <= _SMALL:
        return _SMALL
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 // 2
    return _SMALL  # the system does not report its memory


def _unnamed_file(folder: str) -> int:
    """Create a file without a name in this folder, and return its file descriptor. Raises OSError if that fails."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as e:
        if e.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    # this file system has no unnamed files: create a temporary file and delete it at once
    import tempfile  # imported here, as it is seldom needed and slow to import

    fd, path = tempfile.mkstemp(dir=folder)
    os.unlink(path)
    return fd


def full(size: int, folder: str, cause: OSError) -> SpoolFull:
    """Return (not raise) the SpoolFull error for a value of `size` bytes that found no room in `folder`.

    The error gets the `errno` of `cause`.
    """
    return SpoolFull(
        cause.errno,
        f"no room for a value of {size / 2**20:,.1f} MiB: {os.strerror(cause.errno or 0)}; free some space in this "
        "folder of the node, or use a node with a larger disk",
        folder,
    )


def write_all(fd: int, buffers: Sequence[bytes | bytearray | memoryview]) -> None:
    """Write all of `buffers` to a file descriptor at its position. An OSError may come after a part was written."""
    views = [memoryview(b).cast("B") for b in buffers if len(b)]
    while views:
        written = os.writev(fd, views[:512])
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]
