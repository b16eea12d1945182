"""Clocks for costs and timeouts, which stay right when the wall clock is corrected or this process is paused.

A correction of the wall clock must not change what a pool costs. Only times that other machines compare with their own
clocks use the wall clock, such as the time in a machine's tag after which it is no longer needed.
"""

from __future__ import annotations

import threading
import time
from datetime import UTC, date, datetime

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # Linux's CLOCK_MONOTONIC stops while a laptop sleeps
_BEGAN = time.time() - time.clock_gettime(_CLOCK)
_OF_FILES = 5
"""Linux's CLOCK_REALTIME_COARSE, for which Python has no name."""
_TICK = 0.001
"""Seconds between two looks at that clock."""
_TICKS = 20
"""The most looks."""
_PAUSE = 3.0
"""The most seconds between two readings of a `RunningClock` while its process runs. A longer gap counts as a pause."""


def now() -> float:
    """Return the time in seconds since 1970. Corrections of the wall clock after this module's import do not count.

    On Linux, time in which the machine was suspended counts.
    """
    return _BEGAN + time.clock_gettime(_CLOCK)


def elapsed() -> float:
    """Return the time of a monotonic clock in seconds. Only differences of two such times have a meaning.

    On Linux, time in which the machine was suspended counts.
    """
    return time.clock_gettime(_CLOCK)


def moment_between_changes() -> int:
    """Return a time in nanoseconds since 1970. The last change of a file is later if it changes after this returns.

    Files that have changed before have an earlier time. The kernel takes these times from a clock that it sets 100 to
    1,000 times a second. So this waits for a few milliseconds, and 20 at most.
    """
    moment = time.time_ns()
    for _ in range(_TICKS):
        if time.clock_gettime_ns(_OF_FILES) > moment:
            break
        time.sleep(_TICK)
    return moment


def today() -> date:
    """Return the current day in UTC by the wall clock. Used to tell how old prices are."""
    return datetime.now(UTC).date()


class RunningClock:
    """A monotonic clock that leaves out pauses of this process, as by SIGSTOP, a frozen control group or a paused VM.

    Call the clock at least once a second while it is in use: if more than three seconds pass between two calls, all of
    that time counts as a pause. Threads may share one clock.

    Attributes:
        paused: seconds left out so far. `time.monotonic()` is this clock's reading plus `paused`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = time.monotonic()
        self.paused = 0.0

    def __call__(self) -> float:
        """Return a monotonic time in seconds that leaves out all pauses so far. Any thread may call this."""
        with self._lock:
            reading = time.monotonic()
            gap, self._last = reading - self._last, reading
            if gap > _PAUSE:
                self.paused += gap
            return reading - self.paused
