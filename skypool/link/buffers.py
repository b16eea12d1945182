"""Reusable memory for large values that arrive. Memory of an old value serves the next one of about its size.

Fresh memory costs several times what it costs to fill memory that was used before: the system must find, clear and map
every page of it, and on a virtual machine its host, too. What is kept here stays the system's to take when it is short.
"""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from weakref import finalize

_SMALLEST = 1 << 20
"""Bytes of a piece of memory that is kept, at least: smaller ones are quickly had anew."""
_LARGEST = 256 << 20
"""Bytes of a piece of memory that is kept, at most: several are kept."""
_HUGE = 4 << 20
"""Bytes from which huge pages are asked for: fewer pages are to be mapped."""
_kept: deque[mmap.mmap] = deque(maxlen=4)  # of which every single operation is atomic: values end in any thread


def room(size: int) -> memoryview:
    """Writable memory for `size` bytes, with any content. From any thread.

    Raises:
        OSError: there is not so much memory.
        OverflowError, TypeError: this is no size.
    """
    import ctypes  # only a process that receives large values needs it

    memory = _used_before(size) or _fresh(size)
    lent = (ctypes.c_char * size).from_buffer(memory)
    if _SMALLEST <= len(memory) <= _LARGEST:
        finalize(lent, _keep, memory).atexit = False
    return memoryview(lent).cast("B")


def _fresh(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # quicker than shared
    if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _used_before(size: int) -> mmap.mmap | None:
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
    """Nothing refers to it any more."""
    if not hasattr(mmap, "MADV_FREE"):
        return
    try:
        memory.madvise(mmap.MADV_FREE)  # taken by the system when it needs memory; otherwise there as it was
    except OSError:
        return  # a kernel that knows no such thing: it is let go
    _kept.append(memory)
