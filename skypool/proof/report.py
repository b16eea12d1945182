"""The report of a proof: its steps, the machines that it rented, and the bill, as JSON and Markdown. No I/O."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from skypool.errors import UsageError
from skypool.model import Finding
from skypool.rental.receipt import LEFT_OUT, Line

Level = Literal["read", "write", "cents"]
"""The levels of a proof. A level includes the levels before it."""
LEVELS: tuple[Level, ...] = get_args(Level)
Result = Literal["good", "bad", "open"]
"""The result of a step: "good" (passed), "bad" (failed) or "open" (could not be checked)."""
FORMAT = 1
"""The version of the JSON. It is raised when reports change so that earlier versions of skypool cannot read them."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a proof and its result.

    Attributes:
        level: the level of the proof; "bill" for the comparison of the bill.
        what: the title of the step.
        result: "good", "bad", or "open" if the step was not possible here, which is no failure.
        text: what was found, on one line.
        advice: what to do next; "" if there is nothing to do.
        seconds: duration of the step; None if it was not measured.
        usd: cost of the step in US dollars, by the receipt; None if it cost nothing.
    """

    level: Level | Literal["bill"]
    what: str
    result: Result
    text: str
    advice: str = ""
    seconds: float | None = None
    usd: float | None = None

    @classmethod
    def of(cls, level: Level | Literal["bill"], finding: Finding, seconds: float | None = None) -> Step:
        """Return a finding as a step of a level. `seconds` is the duration of the check; None if not measured."""
        result: Result = "open" if finding.open else "good" if finding.good else "bad"
        return cls(level, finding.what, result, one_line(finding.text), one_line(finding.advice), seconds)


@dataclass(frozen=True, slots=True)
class RentedMachine:
    """A machine that the proof rented, as in the pool's receipt. Times are in seconds since 1970.

    Attributes:
        place: zone, or region if no zone is known.
        offered_usd_per_hour: price in the plan that was shown before the rental; None if the plan lacks this offer.
        least_billed: minimum time that is charged for, in seconds.
        launched: time of the request.
        billed_from: time since when the provider bills the machine; None if billing did not begin.
        until: time of the machine's end if `ended` is True; otherwise the time at which the receipt was made.
    """

    id: str
    pool: str
    type: str
    place: str
    market: str
    offered_usd_per_hour: float | None
    usd_per_hour: float
    least_billed: float
    launched: float
    billed_from: float | None
    until: float
    ended: bool
    usd: float

    @classmethod
    def of(cls, pool: str, line: Line, offered: float | None) -> RentedMachine:
        """Return a line of a pool's receipt as a machine of the report. `offered` is the price in the plan, or None."""
        return cls(
            id=line.id,
            pool=pool,
            type=line.type,
            place=line.place,
            market=line.market,
            offered_usd_per_hour=offered,
            usd_per_hour=line.usd_per_hour,
            least_billed=line.least_billed,
            launched=line.launched,
            billed_from=line.billed_from,
            until=line.until,
            ended=line.ended,
            usd=line.usd,
        )


@dataclass(frozen=True, slots=True)
class Report:
    """The report of one proof. Times are in seconds since 1970.

    Attributes:
        provider: the name of the driver.
        level: the level up to which the proof went.
        began: when the proof began.
        ended: when the proof reached its end; None if it did not, for example after Ctrl-C.
        versions: the versions of skypool, of Python and of the driver's distribution, by name.
        max_usd: the most that the proof was allowed to cost.
        steps: in the order in which they ended.
        billed_usd: what the provider bills for the machines; None if it does not tell, or was not asked yet.
        format: version of the JSON.
    """

    provider: str
    level: Level
    began: float
    ended: float | None = None
    versions: dict[str, str] = field(default_factory=dict[str, str])
    max_usd: float = 0.0
    steps: tuple[Step, ...] = ()
    machines: tuple[RentedMachine, ...] = ()
    billed_usd: float | None = None
    format: int = FORMAT

    @property
    def good(self) -> bool:
        """True if the proof reached its end and no step failed."""
        return self.ended is not None and all(each.result != "bad" for each in self.steps)

    @property
    def receipt_usd(self) -> float:
        """The cost of all machines by their receipts, in US dollars."""
        return sum(each.usd for each in self.machines)

    def to_json(self) -> dict[str, Any]:
        """Return the report as a dict for JSON. `from_json` makes the report again from that JSON."""
        return {**asdict(self), "good": self.good, "receipt_usd": self.receipt_usd}

    def to_markdown(self) -> str:
        """Return the report as Markdown: a summary, a table of the steps, and a table of the machines."""
        bill = "not told" if self.billed_usd is None else f"{self.billed_usd:.4f} USD"
        ended = "not reached" if self.ended is None else _clock(self.ended)
        lines = [
            f"# Proof of {self.provider}, level {self.level}: {'all is good' if self.good else 'not all is good'}",
            "",
            *_table(
                ("", ""),
                [
                    ("began", _clock(self.began)),
                    ("end", ended),
                    *self.versions.items(),
                    ("most allowed", f"{self.max_usd:.2f} USD" if self.level == "cents" else "0 USD"),
                    ("receipts", f"{self.receipt_usd:.4f} USD"),
                    ("bill", bill),
                ],
            ),
            "",
            "## Steps",
            "",
            *_table(("level", "step", "result", "what was found", "next step", "s", "USD"), map(_row, self.steps)),
        ]
        if self.machines:
            lines += ["", "## Machines", "", *_table(_MACHINE, map(_machine_row, self.machines)), "", LEFT_OUT + "."]
        return "\n".join(lines) + "\n"


def from_json(text: str) -> Report:
    """Return the report in a JSON text of `Report.to_json`. Raise UsageError for other texts and later versions."""
    try:
        found = json.loads(text)
        if found["format"] != FORMAT:
            raise UsageError(
                f"this report has format {found['format']}, but this skypool reads format {FORMAT}; use the version of "
                "skypool that wrote it"
            )
        known = {each.name for each in fields(Report)}
        plain = {name: value for name, value in found.items() if name in known}
        plain["steps"] = tuple(Step(**each) for each in found["steps"])
        plain["machines"] = tuple(RentedMachine(**each) for each in found["machines"])
        return Report(**plain)
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        if isinstance(e, UsageError):
            raise
        raise UsageError(
            f"this is no JSON report of `skypool prove`: {type(e).__name__}: {e}; pass the file whose name ends with "
            ".json"
        ) from e


def one_line(text: str) -> str:
    """Return a text on one line, with single spaces."""
    return " ".join(text.split())


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _table(headings: Sequence[str], rows: Any) -> list[str]:
    told = [headings, ["---"] * len(headings), *rows]
    return [f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |" for row in told]


def _row(step: Step) -> tuple[str, ...]:
    return (
        step.level,
        step.what,
        step.result,
        step.text,
        step.advice,
        "" if step.seconds is None else f"{step.seconds:.1f}",
        "" if step.usd is None else f"{step.usd:.4f}",
    )


_MACHINE = ("machine", "pool", "type", "place", "market", "offered USD/h", "USD/h", "launched", "end", "USD")


def _machine_row(each: RentedMachine) -> tuple[str, ...]:
    offered = "" if each.offered_usd_per_hour is None else f"{each.offered_usd_per_hour:.4f}"
    ended = _clock(each.until) if each.ended else "not proved"
    return (
        *(each.id, each.pool, each.type, each.place, each.market, offered, f"{each.usd_per_hour:.4f}"),
        *(_clock(each.launched), ended, f"{each.usd:.4f}"),
    )
