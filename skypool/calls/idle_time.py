"""`IdleTime`: sums up the time in which a node did no work. It does no I/O and reads no clock.

A node is idle while no call runs on it. It is idle, too, while calls run but all of its devices are below 5 %
utilisation. A reading of the devices counts for 15 s. For a node whose devices are not measured, only calls count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LOW = 5.0
"""The utilisation in percent below which a device counts as not used."""
FRESH = 15.0
"""Seconds for which a reading of devices is valid if no newer one comes. Some tools are read only every 10 s."""


@dataclass(frozen=True, slots=True)
class Idleness:
    """The idle time of a node up to a certain time. Times are in seconds since 1970.

    Attributes:
        seconds: the idle seconds from the time `began` to the time `at`.
        is_idle: True if the node is idle at the time `at`.
        since: the time since which the node has had no work; None while it has work.
    """

    began: float
    at: float
    seconds: float
    is_idle: bool
    since: float | None


class IdleTime:
    """The idle time of one node. Times are in seconds since 1970.

    If a method gets an earlier time than the method before it, as after a correction of the clock, the time of the
    method before is used. The dispatch holds its lock while it uses this object.

    Args:
        now: the time from which idle time is counted. No call runs then.

    Attributes:
        calls: True while a call runs.
        held: True while something other than calls counts as work, such as a service with `busy=True`.
        since: the time since which the node has had no work; None while it has work (`calls` or `held` is True).
        worked: the time at which the last work ended; None if none has ended yet.
    """

    __slots__ = ("_at", "_began", "_low_until", "_seconds", "calls", "held", "since", "worked")

    def __init__(self, now: float) -> None:
        self.since: float | None = now
        self.worked: float | None = None
        self._began = self._at = now
        self._seconds = 0.0
        self.calls = False
        self.held = False
        self._low_until = -math.inf

    def begin(self, now: float) -> None:
        """Note that a call runs from now on. Do nothing if one runs already."""
        self.calls = True
        if self.since is not None:
            self._advance(now)
            self.since = None

    def end(self, now: float) -> None:
        """Note that no call runs from now on. Do nothing if none runs."""
        self.calls = False
        if self.since is None and not self.held:
            self._advance(now)
            self.since = self.worked = self._at

    def gone(self, now: float) -> None:
        """Note that the node gets no more calls and has none left. It is idle from now on, until its machine ends."""
        self.calls = self.held = False
        self._change(now)

    def hold(self, now: float, held: bool) -> None:
        """Note whether other work than calls, such as a service with `busy=True`, occupies the node from now on."""
        self.held = held
        self._change(now)

    def measured(self, now: float, low: bool) -> None:
        """Note a reading of the node's devices at the time `now`.

        `low` is True if all devices of the node are under `LOW` percent; False if one is not, or is not known.
        """
        self._advance(now)
        self._low_until = now + FRESH if low else -math.inf

    def until(self, now: float) -> Idleness:
        """Return how long the node was idle up to the time `now`."""
        self._advance(now)
        is_idle = self.since is not None or self._at < self._low_until
        return Idleness(self._began, self._at, self._seconds, is_idle, self.since)

    def _change(self, now: float) -> None:
        works = self.calls or self.held
        if works is (self.since is None):
            return
        self._advance(now)
        self.since = None if works else self._at
        if not works:
            self.worked = self._at

    def _advance(self, now: float) -> None:
        """Add the idle time between the last change and `now`. The next change counts from `now`."""
        if now <= self._at:
            return
        until = now if self.since is not None else min(now, self._low_until)
        if until > self._at:
            self._seconds += until - self._at
        self._at = now
