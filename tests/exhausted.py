"""For tests of a process that has no free descriptor for a while."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator


class Hoard:
    """Descriptors that nobody else can have."""

    def __init__(self) -> None:
        self._held: list[int] = []

    def grow(self) -> None:
        """Take all descriptors that are free now."""
        with contextlib.suppress(OSError):
            while True:
                self._held.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))

    def drop(self) -> None:
        """Give all of them back."""
        while self._held:
            os.close(self._held.pop())


@contextlib.contextmanager
def without_descriptors() -> Iterator[Hoard]:
    """In the block, this process can open nothing until something is closed. `grow` takes that, too."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd")))
    hoard = Hoard()
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 1, before[1]))
    try:
        hoard.grow()
        yield hoard
    finally:
        hoard.drop()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
