"""Costs of a pool: what is spent and left, the `Budget`, and the `Receipt`. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from skypool.errors import BudgetExceeded, UsageError
from skypool.model import Offer

_HOUR = 3600.0
"""Seconds of an hour, as prices are per hour."""


@dataclass(frozen=True, slots=True)
class Line:
    """One instance and what it costs: of a slice, one host and its share. Times are seconds since 1970.

    Attributes:
        type: the instance type; place: its zone, or its region; node: which node it was.
        usd_per_hour: its price now, or its last one.
        least_billed: seconds that are charged for at least, once it is charged for at all.
        launched: when it was asked for; until: when it ended, or when this was written down.
        ended: whether its end is proved; until then it costs more with each second.
        billed_from: since when its provider bills it; None while it does not, as for a machine that waits in a queue.
        earlier: the prices that it had before, each as (until when, USD per hour), the oldest first.
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

    @property
    def begins(self) -> float:
        """Since when it is charged for; where it is not yet, when it was written down."""
        return self.until if self.billed_from is None else self.billed_from

    @property
    def lived(self) -> float:
        """Seconds for which it was there and billed."""
        return max(0.0, self.until - self.begins)

    @property
    def seconds(self) -> float:
        """Seconds that are charged for."""
        return 0.0 if self.billed_from is None else max(self.lived, self.least_billed)

    @property
    def usd(self) -> float:
        """What that comes to."""
        return self.usd_between(-math.inf)

    def usd_between(self, start: float, end: float = math.inf) -> float:
        """The part of it that is charged for the time between these."""
        start = max(start, self.begins)
        end = min(end, self.begins + self.seconds)
        usd = 0.0
        for until, usd_per_hour in (*self.earlier, (math.inf, self.usd_per_hour)):
            usd += max(0.0, min(until, end) - start) * usd_per_hour / _HOUR
            start = max(start, until)
        return usd

    def at(self, now: float) -> Line:
        """The same as of another time, if it has not ended by then."""
        return self if self.ended else replace(self, until=now)


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a pool's instances cost, one line each; `str()` of it is a table.

    Attributes:
        at: when it was made, seconds since 1970.
        unanswered: orders of which nobody knows whether they were carried out: their machines, if any, are not in here.
    """

    pool: str
    lines: tuple[Line, ...]
    at: float
    unanswered: int = 0

    @property
    def usd(self) -> float:
        """What it comes to so far."""
        return sum(each.usd for each in self.lines)

    @property
    def usd_per_hour(self) -> float:
        """What those cost now that have not ended and are billed."""
        return sum(each.usd_per_hour for each in self.lines if not each.ended and each.billed_from is not None)

    def __str__(self) -> str:
        rows = [_row(each) for each in self.lines]
        rows.append(["", "total", "", "", "", "", "", "", f"{self.usd:.4f}"])
        told = [f"pool {self.pool}, {_clock(self.at)}", *_aligned([_HEADINGS, *rows])]
        open_lines = [each for each in self.lines if not each.ended]
        if open_lines:
            told.append(f"* not ended: {len(open_lines)} of {len(self.lines)}, {self.usd_per_hour:.4f} USD/h")
        if waiting := sum(each.billed_from is None for each in open_lines):
            told.append(f"  of these {waiting} do not run yet, and their provider does not bill them")
        if self.unanswered:
            told.append(f"orders without an answer: {self.unanswered}; what they cost, if anything, is not in here")
        told.append(LEFT_OUT)
        return "\n".join(told)


LEFT_OUT = "not included: network traffic, storage that outlives its machine, taxes"
"""What no receipt and no budget counts, as no provider tells it while a machine runs."""
_HEADINGS = ["node", "instance", "provider", "type", "place", "market", "time", "USD/h", "USD"]
_NUMBERS = {"node", "time", "USD/h", "USD"}


def _row(line: Line) -> list[str]:
    time = str(timedelta(seconds=round(line.seconds))) + ("" if line.ended else "*")
    names = [line.provider, line.type, line.place, line.market]
    return [str(line.node), line.id, *names, time, f"{line.usd_per_hour:.4f}", f"{line.usd:.4f}"]


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
    """What a pool may cost in all. When it is spent, every machine ends.

    Args:
        max_usd: more than 0.
        warn: the share of it at which the pool warns, above 0 and at most 1.
        best_effort: also rent machines that cannot end themselves. They are billed beyond the budget, if the client is
            killed or loses its network, until `skypool gc` ends them; without it such machines are refused.

    Raises:
        UsageError: a value that cannot be meant.
    """

    max_usd: float
    warn: float = 0.8
    best_effort: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.best_effort, bool):
            raise UsageError(f"Budget takes best_effort as True or False, not {self.best_effort!r}")
        for name, value, most in (("max_usd", self.max_usd, math.inf), ("warn", self.warn, 1.0)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
                span = "above 0 and at most 1" if name == "warn" else "above 0"
                raise UsageError(f"Budget takes {name} as a number {span}, not {value!r}")
        if self.max_usd == math.inf:
            raise UsageError("Budget has max_usd endless; leave the budget out for no limit")

    def left(self, spent: float) -> float:
        """USD that are left; never below 0."""
        return max(0.0, self.max_usd - spent)

    def warns(self, spent: float) -> bool:
        """Whether so much is spent that the user should know."""
        return spent >= self.warn * self.max_usd

    def lasts(self, lines: Iterable[Line], now: float, more: Iterable[Offer] = ()) -> float:
        """Seconds from now until it is spent by these instances, and one more on each of these offers from now on.

        Returns:
            `math.inf` where nothing costs anything.
        """
        open_lines = []
        spent = 0.0
        for line in lines:
            spent += line.at(now).usd
            if not line.ended and line.billed_from is None:  # it may be billed from any moment on
                spent += line.usd_per_hour * line.least_billed / _HOUR
                open_lines.append((line.usd_per_hour, now + line.least_billed))
            elif not line.ended:
                open_lines.append((line.usd_per_hour, line.begins + line.least_billed))
        for offer in more:
            spent += offer.usd_per_hour * offer.least_billed / _HOUR
            open_lines.append((offer.usd_per_hour, now + offer.least_billed))
        return _spent_at(self.left(spent), now, open_lines) - now

    def check_first_hour(self, offers: Sequence[Offer], spent: float = 0.0, lifetime: float | None = None) -> None:
        """Refuse to rent these, one machine or slice on each, where not even their first hour can be paid.

        Args:
            lifetime: seconds after which they end anyway, where that is less.

        Raises:
            BudgetExceeded: with both figures.
        """
        first = min(_HOUR, lifetime or _HOUR)
        cost = sum(each.usd_per_hour * max(first, each.least_billed) / _HOUR for each in offers)
        if cost > self.left(spent):
            word = "slice" if any(each.hosts > 1 for each in offers) else "node"
            nodes = f"1 {word} costs" if len(offers) == 1 else f"{len(offers)} {word}s cost"
            before = f", of which {spent:.2f} are spent" if spent else ""
            raise BudgetExceeded(
                f"the first hour of {nodes} {cost:.2f} USD, and the budget is {self.max_usd:.2f} USD{before}: "
                f"ask for fewer or cheaper {word}s, or raise it: Budget({math.ceil((cost + spent) * 100) / 100:.2f})"
            )


def _spent_at(left: float, now: float, costs: list[tuple[float, float]]) -> float:
    """When so much is gone, where each costs USD per hour from a time on."""
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
    """What was charged for each day (UTC) since `start`, "2026-08-20" first to last."""
    days: dict[str, float] = {}
    for line in lines:
        if line.billed_from is None:
            continue
        first = max(start, line.begins)
        day = datetime.fromtimestamp(first, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        while day.timestamp() < max(first + 1e-6, line.begins + line.seconds):
            end = day + timedelta(days=1)
            name = day.date().isoformat()
            days[name] = days.get(name, 0.0) + line.usd_between(max(first, day.timestamp()), end.timestamp())
            day = end
    return dict(sorted(days.items()))
