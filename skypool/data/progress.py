"""Measures how fast files are sent and how long others wait, and makes pauses. Any thread may use these classes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager


class Rate:
    """The bytes that are sent in a second, while at least one file is sent."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._bytes, self._seconds = 0, 0.0
        self._senders, self._since = 0, 0.0

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Count the time of a `with` block, in which a file is sent."""
        with self._lock:
            if not self._senders:
                self._since = self._clock()
            self._senders += 1
        try:
            yield
        finally:
            with self._lock:
                self._senders -= 1
                if not self._senders:
                    self._seconds += self._clock() - self._since

    def add(self, count: int) -> None:
        """Count bytes that are sent."""
        with self._lock:
            self._bytes += count

    @property
    def per_second(self) -> float:
        """The bytes of a second; 0 if nothing was sent."""
        with self._lock:
            seconds = self._seconds + (self._clock() - self._since if self._senders else 0.0)
            return self._bytes / seconds if seconds else 0.0


class Waiting:
    """The files that wait to be saved."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}
        self._first: float | None = None

    def note(self, names: Collection[str], saved: Collection[str] = ()) -> None:
        """Note which files wait. Those of them that are saved under another name wait from now on."""
        now = self._clock()
        self._since = {name: now if name in saved else self._since.get(name, now) for name in names}
        self._first = min(self._since.values(), default=None)

    def begin_again(self, name: str) -> None:
        """Note that a file was saved under another name just now."""
        self._since[name] = self._clock()

    def since(self, name: str) -> float:
        """Return the time of the clock since which a file waits."""
        return self._since[name]

    @property
    def oldest(self) -> float:
        """For how many seconds the first of the files has been waiting; 0 if none waits."""
        return 0.0 if self._first is None else self._clock() - self._first


class Pause:
    """The pause after an attempt that has failed. After each further one it is twice as long.

    Args:
        first, longest: the first and the longest pause in seconds.
    """

    def __init__(self, first: float, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._first, self._longest, self._clock = first, longest, clock
        self._next, self._until = first, -math.inf

    @property
    def is_over(self) -> bool:
        """True if the next attempt may be made."""
        return self._clock() >= self._until

    def begin(self) -> None:
        """Begin a pause, as an attempt has failed."""
        self._until = self._clock() + self._next
        self._next = min(self._longest, 2 * self._next)

    def wait(self, hope: threading.Event, longest: float = math.inf) -> None:
        """Begin a pause, and wait until it is over, or for so many seconds. End it when the event is set."""
        self.begin()
        if hope.wait(max(0.0, min(longest, self._until - self._clock()))):
            self.end()

    def end(self) -> None:
        """End the pause, as there is a reason to hope. After an attempt that fails now, the first pause begins."""
        self._next, self._until = self._first, -math.inf
