"""What is spent, what is left, and the receipt: pure, from what was rented, when and at what price."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from skypool.errors import BudgetExceeded, UsageError
from skypool.model import Offer

_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Line:
    """One instance and what it costs: of a slice, one host and its share. Times are seconds since 1970.

    Attributes:
        type: the instance type; place: its zone, or its region; rank: which node it was.
        least_billed: seconds that are charged for at least.
        launched: when it was rented; until: when it ended, or when this was written down.
        ended: whether its end is proved; until then it costs more with each second.
    """

    provider: str
    id: str
    type: str
    place: str
    market: str
    rank: int
    usd_per_hour: float
    least_billed: float
    launched: float
    until: float
    ended: bool = False

    @property
    def lived(self) -> float:
        """Seconds from its launch."""
        return max(0.0, self.until - self.launched)

    @property
    def seconds(self) -> float:
        """Seconds that are charged for."""
        return max(self.lived, self.least_billed)

    @property
    def usd(self) -> float:
        """What that comes to."""
        return self.seconds * self.usd_per_hour / _HOUR

    def usd_between(self, start: float, end: float = math.inf) -> float:
        """The part of it that is charged for the time between these."""
        charged = min(end, self.launched + self.seconds) - max(start, self.launched)
        return max(0.0, charged) * self.usd_per_hour / _HOUR

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
        """What those cost that have not ended."""
        return sum(each.usd_per_hour for each in self.lines if not each.ended)

    def __str__(self) -> str:
        rows = [_row(each) for each in self.lines]
        rows.append(["", "total", "", "", "", "", "", "", f"{self.usd:.4f}"])
        told = [f"pool {self.pool}, {_clock(self.at)}", *_aligned([_HEADINGS, *rows])]
        if running := sum(not each.ended for each in self.lines):
            told.append(f"* not ended: {running} of {len(self.lines)}, {self.usd_per_hour:.4f} USD/h")
        if self.unanswered:
            told.append(f"orders without an answer: {self.unanswered}; what they cost, if anything, is not in here")
        return "\n".join(told)


_HEADINGS = ["node", "instance", "provider", "type", "place", "market", "time", "USD/h", "USD"]
_NUMBERS = {"node", "time", "USD/h", "USD"}


def _row(line: Line) -> list[str]:
    time = str(timedelta(seconds=round(line.seconds))) + ("" if line.ended else "*")
    names = [line.provider, line.type, line.place, line.market]
    return [str(line.rank), line.id, *names, time, f"{line.usd_per_hour:.4f}", f"{line.usd:.4f}"]


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

    Raises:
        UsageError: a value that cannot be meant.
    """

    max_usd: float
    warn: float = 0.8

    def __post_init__(self) -> None:
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
        open_lines, spent = [], 0.0
        for line in lines:
            spent += line.at(now).usd
            if not line.ended:
                open_lines.append((line.usd_per_hour, line.launched + line.least_billed))
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
    rate, at = 0.0, now
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
        first = max(start, line.launched)
        day = datetime.fromtimestamp(first, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        while day.timestamp() < max(first + 1e-6, line.launched + line.seconds):
            end = day + timedelta(days=1)
            name = day.date().isoformat()
            days[name] = days.get(name, 0.0) + line.usd_between(max(first, day.timestamp()), end.timestamp())
            day = end
    return dict(sorted(days.items()))
