"""Memory for values that arrive: used again when nothing refers to it any more, and never before."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from skypool.link import buffers


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    buffers._kept.clear()


def where(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_memory_is_used_again_only_when_the_last_part_of_it_is_gone() -> None:
    first = buffers.room(2 << 20)
    place, part = where(first), first[5:10]
    del first
    other = buffers.room(2 << 20)
    assert where(other) != place
    del part
    again = buffers.room(2 << 20)
    assert where(again) == place
    again[:] = bytes([7]) * (2 << 20)
    assert other[0] == 0


def test_a_smaller_value_uses_it_too_but_no_value_holds_more_than_twice_its_size() -> None:
    place = where(buffers.room(8 << 20))
    assert where(buffers.room(5 << 20)) == place
    small = buffers.room(3 << 20)
    assert where(small) != place
    assert len(buffers.room(5 << 20)) == 5 << 20


def test_little_is_kept_and_neither_small_nor_huge_memory() -> None:
    held = [buffers.room(1 << 20) for _ in range(10)]
    held.append(buffers.room(100))
    held.append(buffers.room(257 << 20))
    held.clear()
    assert [len(each) for each in buffers._kept] == [1 << 20] * 4


@pytest.mark.parametrize(("size", "error"), [(0, OSError), (1 << 62, OSError), (-1, OverflowError), ("5", TypeError)])
def test_a_size_that_is_none_is_refused(size: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        buffers.room(size)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages")
@pytest.mark.skipif(hasattr(sys, "_skypool_as_darwin"), reason="macOS has no huge pages")
def test_memory_for_large_values_is_asked_for_in_huge_pages() -> None:
    large, small = buffers.room(8 << 20), buffers.room(1 << 20)
    assert "hg" in _flags(where(large))
    assert "hg" not in _flags(where(small))


def _flags(address: int) -> list[str]:
    """What the kernel notes about the mapping that holds this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            begin, end = (int(each, 16) for each in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "VmFlags:":
            return rest.split()
    raise AssertionError(f"nothing is mapped at {address:#x}")
