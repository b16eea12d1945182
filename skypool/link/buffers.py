"""Reusable memory for large values that arrive.

When a value is freed, its memory is used again for the next value of a similar size. Filling new memory takes several
times as long, because the operating system must first clear and map each page. If memory runs short, the system may
take back the memory that is kept here.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from weakref import finalize

_SMALLEST = 1 << 20
"""The least bytes of a piece of memory that is kept. Smaller pieces are quick to allocate."""
_LARGEST = 256 << 20
"""The most bytes of a piece of memory that is kept. Larger pieces are freed at once."""
_HUGE = 4 << 20
"""The least bytes of a piece of memory for which huge pages (usually of 2 MiB instead of 4 KiB) are requested."""
_kept: deque[mmap.mmap] = deque(maxlen=4)  # a deque, whose operations are atomic: any thread may free a value


def room(size: int) -> memoryview:
    """Return writable memory of exactly `size` bytes (at least 1) with undefined content. Any thread may call this.

    When nothing refers to the result any more, its memory is freed. Pieces of 1 to 256 MiB are kept for reuse instead,
    at most four at a time, if the system supports this. Raises OSError if there is not enough memory.
    """
    import ctypes  # imported late, because only a process that receives large values needs it

    memory = _used_before(size) or _fresh(size)
    lent = (ctypes.c_char * size).from_buffer(memory)
    if _SMALLEST <= len(memory) <= _LARGEST:
        finalize(lent, _keep, memory).atexit = False
    return memoryview(lent).cast("B")


def _fresh(size: int) -> mmap.mmap:
    """Return new memory of `size` bytes that other processes do not share. Raises OSError if there is not enough."""
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # private memory is quicker than shared
    if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _used_before(size: int) -> mmap.mmap | None:
    """Return a kept piece of memory of `size` to `2 * size` bytes, and keep it no longer; None if no piece fits."""
    for _ in range(len(_kept)):
        try:
            memory = _kept.popleft()
        except IndexError:  # taken by another thread
            return None
        if size <= len(memory) <= 2 * size:
            return memory
        _kept.append(memory)
    return None


def _keep(memory: mmap.mmap) -> None:
    """Keep, for reuse, a piece of memory that nothing refers to any more, unless the system cannot take it back."""
    if not hasattr(mmap, "MADV_FREE"):
        return
    try:
        memory.madvise(mmap.MADV_FREE)  # lets the system take the pages if it needs memory
    except OSError:
        return  # the kernel does not support this, so the memory is freed
    _kept.append(memory)
