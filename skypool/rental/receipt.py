"""The costs of a pool: `Line` for one machine, `Receipt` for all of them, and `by_day`. No function here does I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

HOUR = 3600.0
"""Seconds in an hour. Prices are per hour."""


@dataclass(frozen=True, slots=True)
class IdleSpan:
    """A span of time, and for how long a machine was idle in it. Times are in seconds since 1970.

    Attributes:
        since: the beginning of the span.
        until: the end of the span.
        seconds: the idle seconds in the span. They count as spread evenly over it.
        is_idle: True if the machine is idle from `until` on, as far as is known.
    """

    since: float
    until: float
    seconds: float
    is_idle: bool


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a receipt: one instance and its cost.

    Each machine of a slice has a line with its share of the price. Times are in seconds since 1970.

    Attributes:
        provider: name of the driver.
        id: the provider's identifier of the instance.
        place: zone, or region if no zone is known.
        market: "on-demand" or "spot".
        usd_per_hour: price now, or the last price of an instance that has ended, in US dollars per hour.
        least_billed: minimum time that is charged for as soon as the instance is billed, in seconds.
        launched: time when the instance was requested.
        until: time when the instance ended. If it has not ended, the time until which its cost is counted.
        ended: True if the instance's end is proved. Until then its cost grows.
        billed_from: time since when the provider bills the instance; None if billing has not begun, as for a machine
            that waits in a queue.
        earlier: earlier prices, each as (time until which the price was valid, US dollars per hour), the oldest first.
        idle_at: time until which idle time was recorded; None for an instance of an older skypool without such records.
        idle_seconds_then: idle seconds until `idle_at`.
        idle_usd_then: cost of the idle time until `idle_at`, in US dollars.
        is_idle: True if the instance counts as idle from `idle_at` on.
        start_usd: estimated cost of the instance's start, in US dollars. It is charged when billing begins.
    """

    provider: str
    id: str
    type: str
    place: str
    market: str
    node: int
    usd_per_hour: float
    least_billed: float
    launched: float
    until: float
    ended: bool = False
    billed_from: float | None = None
    earlier: tuple[tuple[float, float], ...] = ()
    idle_at: float | None = None
    idle_seconds_then: float = 0.0
    idle_usd_then: float = 0.0
    is_idle: bool = True
    start_usd: float = 0.0

    @property
    def begins(self) -> float:
        """The time in seconds since 1970 from which the instance is charged; `until` if billing has not begun."""
        return self.until if self.billed_from is None else self.billed_from

    @property
    def lived(self) -> float:
        """Seconds for which the instance was billed, until its end or the time `until`; 0 if billing has not begun."""
        return max(0.0, self.until - self.begins)

    @property
    def seconds(self) -> float:
        """Seconds that are charged for: the billed time, but at least `least_billed`. 0 if billing has not begun."""
        return 0.0 if self.billed_from is None else max(self.lived, self.least_billed)

    @property
    def usd(self) -> float:
        """The cost of the instance in US dollars; 0 if billing has not begun."""
        return self.usd_between(-math.inf)

    def usd_between(self, start: float, end: float = math.inf) -> float:
        """Return the part of the instance's cost, in US dollars, for the time from `start` to `end`.

        Both times are in seconds since 1970. Each moment is charged at the price that was valid then. The minimum
        billed time is charged in full, even if the instance ended earlier. `start_usd` is charged when billing begins.
        """
        starts = self.billed_from is not None and start <= self.begins < end
        return self._usd_of_time(start, end) + (self.start_usd if starts else 0.0)

    def _usd_of_time(self, start: float, end: float) -> float:
        """Return the US dollars that are charged for the time from `start` to `end`, without `start_usd`."""
        start = max(start, self.begins)
        end = min(end, self.begins + self.seconds)
        usd = 0.0
        for until, usd_per_hour in (*self.earlier, (math.inf, self.usd_per_hour)):
            usd += max(0.0, min(until, end) - start) * usd_per_hour / HOUR
            start = max(start, until)
        return usd

    @property
    def idle_seconds(self) -> float | None:
        """The seconds that are charged for and were idle; None if idle time was not recorded.

        An instance is idle while no call runs on it, or while all of its devices are under 5 % utilisation. If it ended
        before the minimum billed time was over, the rest of that time is idle, too.
        """
        if self.idle_at is None:
            return None
        more = max(0.0, self._counted_until - max(self.idle_at, self.begins)) if self.is_idle else 0.0
        return self.idle_seconds_then + more

    @property
    def idle_usd(self) -> float | None:
        """Cost of `idle_seconds` in US dollars, each moment at its price; None if idle time was not recorded."""
        if self.idle_at is None:
            return None
        more = self._usd_of_time(self.idle_at, self._counted_until) if self.is_idle else 0.0
        return self.idle_usd_then + more

    @property
    def _counted_until(self) -> float:
        """The time until which idle time is counted: `until`; for an ended instance, the end of the charged time."""
        if self.billed_from is None:
            return self.until
        return self.begins + self.seconds if self.ended else self.until

    def idled(self, span: IdleSpan) -> Line:
        """Return a copy of this line in which the idle time of the span, and of the time before it, is recorded.

        If idle time was recorded until then already, or is not recorded for this instance, return the line.
        """
        if self.idle_at is None or span.until <= self.idle_at:
            return self
        since = max(self.idle_at, min(span.since, span.until))
        before = replace(self, until=min(since, self._counted_until), ended=False)
        start, end = max(since, self.begins), min(span.until, self._counted_until)
        share = min(1.0, span.seconds / (span.until - span.since)) if span.until > span.since else 0.0
        return replace(
            self,
            idle_at=span.until,
            idle_seconds_then=(before.idle_seconds or 0.0) + share * max(0.0, end - start),
            idle_usd_then=(before.idle_usd or 0.0) + share * self._usd_of_time(start, end),
            is_idle=span.is_idle,
        )

    def at(self, now: float) -> Line:
        """Return a copy of this line with the cost until the time `now`. If the instance has ended, return the line."""
        return self if self.ended else replace(self, until=now)


@dataclass(frozen=True, slots=True)
class Receipt:
    """The cost of a pool's instances, with one line for each. `str(receipt)` is a table.

    Attributes:
        pool: name of the pool.
        lines: the instances and their costs.
        at: time until which costs are counted, in seconds since 1970.
        unanswered: number of requests for machines that the provider did not answer. The cost does not include machines
            that these requests may have made.
    """

    pool: str
    lines: tuple[Line, ...]
    at: float
    unanswered: int = 0

    @property
    def usd(self) -> float:
        """The cost of all instances of the pool so far, in US dollars; 0 without instances."""
        return sum(each.usd for each in self.lines)

    @property
    def idle_usd(self) -> float | None:
        """The part of `usd` that was paid for idle time, in US dollars; None if it is not known for each instance.

        An instance is idle while no call runs on it, or while all of its devices (accelerators) are under 5 %
        utilisation. The time before its first call and after its last call is idle, too, as far as it is billed.
        """
        known = [each.idle_usd for each in self.lines]
        return None if None in known else sum(each for each in known if each is not None)

    @property
    def usd_per_hour(self) -> float:
        """The sum of the current prices, in US dollars per hour, of the instances that are billed now."""
        return sum(each.usd_per_hour for each in self.lines if not each.ended and each.billed_from is not None)

    def __str__(self) -> str:
        rows = [_row(each) for each in self.lines]
        rows.append(["", "total", "", "", "", "", "", "", f"{self.usd:.4f}", amount(self.idle_usd)])
        told = [f"pool {self.pool}, {_clock(self.at)}", *_aligned([_HEADINGS, *rows])]
        open_lines = [each for each in self.lines if not each.ended]
        if open_lines:
            told.append(f"* not ended: {len(open_lines)} of {len(self.lines)}, {self.usd_per_hour:.4f} USD/h")
        if waiting := sum(each.billed_from is None for each in open_lines):
            told.append(f"  of these {waiting} do not run yet, and their provider does not bill them")
        if self.unanswered:
            told.append(f"orders without an answer: {self.unanswered}; their cost, if any, is not included")
        if starts := sum(each.start_usd for each in self.lines if each.billed_from is not None):
            told.append(f"included: {starts:.4f} USD for traffic at the start of machines, which is an estimate")
        told.append(LEFT_OUT.replace("network traffic", "further network traffic") if starts else LEFT_OUT)
        return "\n".join(told)


LEFT_OUT = "not included: network traffic, storage that outlives its machine, taxes"
"""Note on costs that no receipt and no budget includes, as no provider reports them while a machine runs."""
_HEADINGS = ["node", "instance", "provider", "type", "place", "market", "time", "USD/h", "USD", "idle USD"]
_NUMBERS = {"node", "time", "USD/h", "USD", "idle USD"}


def amount(usd: float | None) -> str:
    """Return US dollars as text, such as "1.2100"; "unknown" for None."""
    return "unknown" if usd is None else f"{usd:.4f}"


def _row(line: Line) -> list[str]:
    time = str(timedelta(seconds=round(line.seconds))) + ("" if line.ended else "*")
    names = [line.provider, line.type, line.place, line.market]
    return [str(line.node), line.id, *names, time, f"{line.usd_per_hour:.4f}", f"{line.usd:.4f}", amount(line.idle_usd)]


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[n]) for row in rows) for n in range(len(_HEADINGS))]
    sides = [str.rjust if heading in _NUMBERS else str.ljust for heading in _HEADINGS]
    return [
        "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True)).rstrip()
        for row in rows
    ]


def by_day(lines: Iterable[Line], start: float = 0.0) -> dict[str, float]:
    """Return the US dollars charged on each day (UTC), such as "2026-08-20", the earliest first.

    A day on which nothing was charged is missing, or has 0. Charges before `start`, in seconds since 1970, are left
    out.
    """
    days: dict[str, float] = {}
    for line in lines:
        if line.billed_from is None or line.begins + line.seconds < start:
            continue
        first = max(start, line.begins)
        day = datetime.fromtimestamp(first, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        while day.timestamp() < max(first + 1e-6, line.begins + line.seconds):
            end = day + timedelta(days=1)
            name = day.date().isoformat()
            days[name] = days.get(name, 0.0) + line.usd_between(max(first, day.timestamp()), end.timestamp())
            day = end
    return dict(sorted(days.items()))
