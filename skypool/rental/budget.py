"""The costs of a pool: `Line` for one machine, `Receipt` for all of them, and `Budget`, which limits them.

No function here does I/O.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from skypool.errors import BudgetExceeded, UsageError
from skypool.model import Offer

_HOUR = 3600.0
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
            usd += max(0.0, min(until, end) - start) * usd_per_hour / _HOUR
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
        """The end of the time that may be idle: `until`, or the end of the charged time if the instance has ended."""
        if self.billed_from is None:
            return self.until
        return self.begins + self.seconds if self.ended else self.until

    def idled(self, span: IdleSpan) -> Line:
        """Return a copy of this line in which the idle time until the end of a span is recorded."""
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


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit of what a pool may cost in all. When the budget is spent, every machine of the pool is terminated.

    Args:
        max_usd: the limit in US dollars, above 0.
        warn: share of the limit at which the pool warns the user, above 0 and at most 1. Default 0.8.
        best_effort: if False (the default), machines that cost something and cannot end themselves are not rented. If
            True, they may be rented, too. If the client is then killed or loses its network, such machines are billed
            beyond the budget until `skypool gc` ends them.

    Raises:
        UsageError: a value is out of range or of another type.
    """

    max_usd: float
    warn: float = 0.8
    best_effort: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.best_effort, bool):
            raise UsageError(f"Budget(best_effort=) must be True or False, not {self.best_effort!r}")
        for name, value, most in (("max_usd", self.max_usd, math.inf), ("warn", self.warn, 1.0)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
                span = "above 0 and at most 1" if name == "warn" else "above 0"
                raise UsageError(f"Budget({name}=) must be a number {span}, not {value!r}")
        if self.max_usd == math.inf:
            raise UsageError("Budget(max_usd=inf) is endless; for a pool without a limit, leave budget= out")

    def left(self, spent: float) -> float:
        """Return the US dollars that are left of the budget after `spent` US dollars; never below 0."""
        return max(0.0, self.max_usd - spent)

    def warns(self, spent: float) -> bool:
        """Return True if `spent` US dollars reach the share `warn` of the budget. The pool then warns the user."""
        return spent >= self.warn * self.max_usd

    def lasts(self, lines: Iterable[Line], now: float, more: Iterable[Offer] = ()) -> float:
        """Return the seconds until these instances, and new machines on the offers in `more`, have spent the budget.

        The minimum billed time of each machine counts as spent at once. Prices are assumed to stay as they are.

        Args:
            lines: the instances and their costs.
            now: the time from which the seconds count, in seconds since 1970.
            more: offers on each of which one more machine, or one more slice, is rented now.

        Returns:
            The seconds: 0 if the budget is spent and a machine goes on to cost money, `math.inf` if no machine costs
            anything.
        """
        open_lines = []
        spent = 0.0
        for line in lines:
            spent += line.at(now).usd
            if not line.ended and line.billed_from is None:  # its billing may begin at any moment
                spent += line.usd_per_hour * line.least_billed / _HOUR + line.start_usd
                open_lines.append((line.usd_per_hour, now + line.least_billed))
            elif not line.ended:
                open_lines.append((line.usd_per_hour, line.begins + line.least_billed))
        for offer in more:
            spent += offer.usd_per_hour * offer.least_billed / _HOUR + offer.start_usd
            open_lines.append((offer.usd_per_hour, now + offer.least_billed))
        return _spent_at(self.left(spent), now, open_lines) - now

    def check_first_hour(self, offers: Sequence[Offer], spent: float = 0.0, lifetime: float | None = None) -> None:
        """Raise BudgetExceeded if renting one machine (or slice) on each offer for an hour costs more than is left.

        If the minimum billed time of an offer is longer than an hour, it counts instead of the hour.

        Args:
            offers: the offers. An offer may be given several times, for several machines.
            spent: US dollars that are spent already.
            lifetime: seconds after which the machines end anyway; None if there is no such limit. A lifetime of less
                than an hour counts instead of the hour.

        Raises:
            BudgetExceeded: its message has the cost and the budget.
        """
        first = min(_HOUR, lifetime or _HOUR)
        cost = sum(each.usd_per_hour * max(first, each.least_billed) / _HOUR + each.start_usd for each in offers)
        if cost > self.left(spent):
            word = "slice" if any(each.hosts > 1 for each in offers) else "node"
            nodes = f"1 {word} costs" if len(offers) == 1 else f"{len(offers)} {word}s cost"
            before = f", of which {spent:.2f} are spent" if spent else ""
            raise BudgetExceeded(
                f"the first hour of {nodes} {cost:.2f} USD, and the budget is {self.max_usd:.2f} USD{before}: "
                f"ask for fewer or cheaper {word}s, or raise the budget: "
                f"budget=Budget({math.ceil((cost + spent) * 100) / 100:.2f})"
            )


def _spent_at(left: float, now: float, costs: list[tuple[float, float]]) -> float:
    """Return the time when `left` US dollars are spent, in seconds since 1970; `math.inf` if this never happens.

    `costs` has a pair for each machine, in any order: US dollars per hour, and the time from which it is charged.
    """
    rate = 0.0
    at = now
    for usd_per_hour, begins in sorted(costs, key=lambda each: each[1]):
        if begins > at:
            until_spent = left * _HOUR / rate if rate else math.inf
            if at + until_spent <= begins:
                return at + until_spent
            left -= (begins - at) * rate / _HOUR
            at = begins
        rate += usd_per_hour
    return at + left * _HOUR / rate if rate else math.inf


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
