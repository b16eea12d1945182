"""`Progress`: how far a transfer of files is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_PAUSE = 0.2
"""Seconds between two calls of the function that shows the progress."""
_RECENT = 5.0
"""Seconds of which the rate is the mean."""


class Stopped(Exception):
    """The error that ends a transfer whose progress could not be shown. `__cause__` is that of the user's function."""


class Progress:
    """The state of one transfer. Any thread may change and read it.

    Attributes:
        file: the file that is sent or received now.
        files: the number of files that began.
        wanted: the number of files that are known to be missing at the other end. It grows while files are compared.
        bytes: the bytes that were read, or that came.
        total: the bytes of all files in `wanted`.
    """

    def __init__(self, show: Callable[[Progress], None] | None = None) -> None:
        self.file = ""
        self.files = self.wanted = self.bytes = self.total = 0
        self._show = show
        self._lock = threading.Lock()
        self._recent = [(time.monotonic(), 0)]
        self._shown = 0.0

    @property
    def rate(self) -> float:
        """Bytes per second in the last 5 s."""
        with self._lock:
            (began, before), (now, count) = self._recent[0], self._recent[-1]
        return (count - before) / (now - began) if now > began else 0.0

    @property
    def left(self) -> float | None:
        """Seconds until all files known so far are there, at the present rate; None without one."""
        rate = self.rate
        return (self.total - self.bytes) / rate if rate else None

    def want(self, size: int) -> None:
        """Count one more file that is missing, of so many bytes."""
        with self._lock:
            self.wanted += 1
            self.total += size

    def begin(self, path: str) -> None:
        """Note the file that comes next."""
        with self._lock:
            self.file = path
            self.files += 1
        self._tell()

    def same(self, path: str) -> None:
        """Note a file that is here already."""

    def move(self, size: int) -> None:
        """Count bytes that were read or have come."""
        with self._lock:
            self.bytes += size
            now = time.monotonic()
            if now - self._recent[-1][0] > _PAUSE:
                self._recent.append((now, self.bytes))
                while now - self._recent[0][0] > _RECENT and len(self._recent) > 2:
                    del self._recent[0]
        self._tell()

    def _tell(self) -> None:
        now = time.monotonic()
        if self._show is not None and now - self._shown >= _PAUSE:
            self._shown = now
            try:
                self._show(self)
            except Exception as e:
                raise Stopped from e
