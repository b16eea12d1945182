"""`CallTally`: counts the calls of a pool that have ended, and keeps a record of each call until somebody takes it.

The dispatch (which sends calls to nodes) adds to it, so adding a call costs a fraction of a microsecond: a call is only
appended to a list. The list is counted when somebody reads the counts, or when it is long.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from skypool.calls.pending import PendingCall
from skypool.samples.journal import JournalCall
from skypool.wire import blame

Outcome = Literal["ok", "failed", "cancelled"]

BOUNDS = tuple(round(step * 10.0**power, 6) for power in range(-4, 5) for step in (1, 2.5, 5))
"""The upper bounds of the classes of wall times, in seconds, ascending. A last class has all longer calls."""
_COUNT_AT = 4096
"""The number of calls that are appended before they are counted."""
_MOST_WAITING = 20_000
"""The most records of succeeded calls that are kept for `take`. If there are more, only the slowest ones stay."""
_SLOWEST = 500
"""The number of records that stay then."""
_MOST_FAILED = 2000
"""The most records of failed and cancelled calls that are kept for `take`. Later calls are only counted."""
_LONGEST_ERROR = 1000
"""The most characters of an error in a record."""


@dataclass(frozen=True, slots=True)
class CallCounts:
    """The number of calls that have ended, and how long they ran.

    Attributes:
        ok: the number of calls that succeeded.
        failed: the number of calls that failed.
        cancelled: the number of calls that were cancelled.
        retried: the number of runs that were repeated because they failed or lost their node.
        classes: the number of calls by wall time: one number for each bound of `BOUNDS`, and one for longer calls.
            Calls whose wall time is unknown are in no class.
        seconds: the sum of the wall times.
    """

    ok: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0
    classes: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)
    seconds: float = 0.0


class CallTally:
    """The tally of one pool's calls since its start. Services are not counted.

    `counts` and `take` may be called from any thread. The other methods are called with `lock` held.

    Args:
        lock: the lock of the dispatch.
    """

    def __init__(self, lock: AbstractContextManager[object]) -> None:
        self._lock = lock
        self._new: list[tuple[str, int, float, float]] = []
        self._kept: list[tuple[str, int, float, float]] = []
        self._unhappy: list[JournalCall] = []
        self._classes = [0] * (len(BOUNDS) + 1)
        self._ok = self._failed = self._cancelled = self._retried = 0
        self._seconds = 0.0

    def returned(self, pending: PendingCall, node: int, seconds: float, now: float) -> None:
        """Note a call that succeeded.

        Args:
            pending: the call.
            node: the number of the node that ran it.
            seconds: its wall time.
            now: the time in seconds since 1970.
        """
        if _is_skypools(pending):
            return
        self._new.append((pending.code.name, node, now, seconds))
        if len(self._new) >= _COUNT_AT:
            self._count()

    def failed(self, pending: PendingCall, node: int, seconds: float | None, error: BaseException) -> None:
        """Note a call that failed for good, or that was cancelled.

        Args:
            pending: the call.
            node: the number of the node that ran it; -1 for none.
            seconds: its wall time; None if that is not known.
            error: the error.
        """
        if _is_skypools(pending):
            return
        outcome: Outcome = "cancelled" if pending.stopped else "failed"
        if pending.stopped:
            self._cancelled += 1
        else:
            self._failed += 1
        if seconds is not None:
            self._measure(seconds)
        if len(self._unhappy) < _MOST_FAILED:
            text = "" if pending.stopped else blame.told(error, _LONGEST_ERROR)
            self._unhappy.append(JournalCall(pending.code.name, node, time.time(), seconds, outcome, text))

    def retried(self) -> None:
        """Note that a call will run again, because its run failed or its node was lost."""
        self._retried += 1

    def counts(self) -> CallCounts:
        """Return the counts of all calls that have ended so far."""
        with self._lock:
            self._count()
            return CallCounts(
                self._ok, self._failed, self._cancelled, self._retried, tuple(self._classes), self._seconds
            )

    def take(self) -> list[JournalCall]:
        """Return the records since the last `take`, and forget them. They are not ordered.

        If too many calls have ended, the records of quick calls that succeeded are missing. `counts` counts all calls.
        """
        with self._lock:
            self._count()
            kept, self._kept = self._kept, []
            unhappy, self._unhappy = self._unhappy, []
        return [*unhappy, *(JournalCall(*each) for each in kept)]

    def _count(self) -> None:
        """Count the calls that were appended, and move them to the records that wait."""
        new, self._new = self._new, []
        for _, _, _, seconds in new:
            self._measure(seconds)
        self._ok += len(new)
        self._kept += new
        if len(self._kept) > _MOST_WAITING:
            self._kept = heapq.nlargest(_SLOWEST, self._kept, key=_seconds)

    def _measure(self, seconds: float) -> None:
        self._classes[bisect_left(BOUNDS, seconds)] += 1
        self._seconds += seconds


def _is_skypools(pending: PendingCall) -> bool:
    """Return True for calls that are not counted: services, and calls with which skypool prepares a gang on a node."""
    return pending.service or (pending.gang is not None and pending.member is None)


def _seconds(record: tuple[Any, ...]) -> float:
    seconds: float = record[3]
    return seconds
