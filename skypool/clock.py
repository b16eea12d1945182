"""Clocks that survive wall-clock corrections and pauses of this process; used for money and for timeouts.

Wall clocks are set while pools run, by hand and by their own correction; nobody pays more or less for that. What other
machines compare with their own clocks, as a lease's end on a tag, is told by the wall clock.
"""

from __future__ import annotations

import threading
import time
from datetime import UTC, date, datetime

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # Linux's other one stands still while a laptop sleeps
_BEGAN = time.time() - time.clock_gettime(_CLOCK)
_PAUSE = 3.0
"""Seconds between two readings of a `RunningClock` after which the process must have been stopped."""


def now() -> float:
    """Return the seconds since 1970, not moved by corrections of the wall clock."""
    return _BEGAN + time.clock_gettime(_CLOCK)


def today() -> date:
    """Return the day by the wall clock, in UTC, which the age of a price is told by."""
    return datetime.now(UTC).date()


class RunningClock:
    """A monotonic clock that leaves out pauses of this process: SIGSTOP, a frozen control group, a paused VM.

    A process that was stopped has heard nobody, so silence must not be counted by a clock that went on meanwhile.
    Call the clock at least once a second while it is in use: a gap of more than three seconds counts as a pause.
    Threads may share one.

    Attributes:
        paused: seconds left out so far. `time.monotonic()` is this clock's reading plus `paused`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = time.monotonic()
        self.paused = 0.0

    def __call__(self) -> float:
        """Return the seconds that have passed, pauses left out."""
        with self._lock:
            reading = time.monotonic()
            gap, self._last = reading - self._last, reading
            if gap > _PAUSE:
                self.paused += gap
            return reading - self.paused
