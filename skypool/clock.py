"""What time it is for money: as the wall clock had it when this process began, and whatever has passed since.

Wall clocks are set while pools run, by hand and by their own correction; nobody pays more or less for that. What other
machines compare with their own clocks, as a lease's end on a tag, is told by the wall clock.
"""

from __future__ import annotations

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # Linux's other one stands still while a laptop sleeps
_BEGAN = time.time() - time.clock_gettime(_CLOCK)


def now() -> float:
    """Seconds since 1970."""
    return _BEGAN + time.clock_gettime(_CLOCK)
