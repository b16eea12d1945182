"""The command `skypool cost`: money spent. It reads the ledger on this machine, and asks no provider."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Literal

import typer

from skypool import clock
from skypool.checks import seconds
from skypool.cli import output
from skypool.cli.ps import is_estimated
from skypool.cli.run_end import end_data
from skypool.errors import UsageError
from skypool.rental.ledger import Ledger
from skypool.rental.receipt import Line, Receipt, amount, by_day
from skypool.rental.records import Record
from skypool.rental.run_state import brief, reason, state_of
from skypool.runs.ends_here import note_ends


def add_to(app: typer.Typer) -> None:
    """Add the command `skypool cost` to the program."""
    app.command("cost")(cost)


def cost(
    by: Annotated[Literal["pool", "day"], typer.Option(help="One line for each pool, or for each day (UTC).")] = "pool",
    since: Annotated[str, typer.Option(help="Count only costs since then: 2026-08-20 (UTC), or 7d.")] = "",
    as_json: output.AsJson = False,
) -> None:
    """Show the money spent, at the prices of the time of renting. Running machines are counted until now.

    Pools that cost nothing are left out. The cost of a run that belongs to its machine is estimated until the end of
    the machine is proved, as by `skypool gc`: it is counted until now, or until the latest end.
    """
    start, now = _since(since), clock.now()
    ledger = Ledger.here(output.warn)
    note_ends(ledger)
    records = [each for each in ledger.pools() if any(_part(line, start) and line.usd for line in each.lines)]
    rows = _by_pool(records, start, now) if by == "pool" else _by_day(records, start)
    total = sum(usd for _, usd in rows)
    names = _HEADINGS[by]
    idle = [_idle(each, start) for each in records]
    if as_json:
        lines: list[dict[str, object]] = [dict(zip(names, [*cells, usd], strict=True)) for cells, usd in rows]
        if by == "pool":
            lines = [
                {**line, "idle_usd": usd, "session": each.session, **_estimated(each), **_end(each)}
                for line, usd, each in zip(lines, idle, records, strict=True)
            ]
        all_idle = {"idle_usd": _sum(idle)} if by == "pool" else {}
        output.data({"since": output.utc(start) if start else None, "by": by, "lines": lines, "usd": total, **all_idle})
        return
    if by == "pool":
        words = [_state_words(each, now) for each in records]
        rows = [((*cells[:2], said, *cells[3:]), usd) for (cells, usd), said in zip(rows, words, strict=True)]
    table = [[*map(str, cells), f"{usd:.4f}"] for cells, usd in rows]
    table.append(["total", *[""] * (len(names) - 2), f"{total:.4f}"])
    headings = [each.replace("_", " ").replace("usd", "USD") for each in names]
    if by == "pool":
        headings.append("idle USD")
        table = [[*row, amount(usd)] for row, usd in zip(table, [*idle, _sum(idle)], strict=True)]
    output.table(headings, table, numbers=["instances", "instance hours", "USD", "idle USD"])
    if estimated := [each.pool for each in records if is_estimated(each)]:
        output.say(f"estimated: {', '.join(estimated)}: `skypool gc` asks if the machine has ended")


_HEADINGS = {"pool": ["pool", "started", "state", "instances", "instance_hours", "usd"], "day": ["day", "usd"]}
_Rows = list[tuple[tuple[object, ...], float]]
"""The rows of a table of costs. Each row is (the cells before the cost, the cost in USD)."""


def _estimated(record: Record) -> dict[str, object]:
    return {"estimated": True} if is_estimated(record) else {}


def _end(record: Record) -> dict[str, object]:
    """Return the fields for JSON of a run that has ended, as far as that is known; {} for others."""
    end = None if record.run is None else record.run.end
    return {} if end is None else {**end_data(end), "why": reason(end)}


def _part(line: Line, start: float) -> bool:
    return line.begins + line.seconds > start


def _idle(record: Record, start: float) -> float | None:
    """Return what a pool has paid for idle time since `start`, in USD; None if that is not known."""
    lines = tuple(each for each in record.lines if _part(each, start))
    # idle time is known only for a machine's whole life
    return None if any(each.begins < start for each in lines) else Receipt("", lines, 0.0).idle_usd


def _sum(amounts: Iterable[float | None]) -> float | None:
    known = list(amounts)
    return None if None in known else sum(each for each in known if each is not None)


def _by_pool(records: Iterable[Record], start: float, now: float) -> _Rows:
    rows: _Rows = []
    for record in records:
        lines = [each for each in record.lines if _part(each, start)]
        hours = sum(each.lived for each in lines) / 3600
        state = _state(record, now)
        cells = record.pool, output.utc(record.started), state, len(lines), round(hours, 3)
        rows.append((cells, sum(each.usd_between(start) for each in lines)))
    return rows


def _state(record: Record, now: float) -> str:
    run = state_of(record, now)
    return record.state(now) if run is None else run.word


def _state_words(record: Record, now: float) -> str:
    """Return the state of a pool for a person: for a run that has ended, how."""
    end = None if record.run is None else record.run.end
    return _state(record, now) if end is None else brief(end)


def _by_day(records: Iterable[Record], start: float) -> _Rows:
    days = by_day((line for record in records for line in record.lines), start)
    return [((day,), usd) for day, usd in days.items()]


def _since(text: str) -> float:
    """Return the time of --since in seconds since 1970: a UTC date, or a duration such as "7d" or "7d ago"; "" is 0."""
    if re.fullmatch(r"\d{4}-\d\d-\d\d", text):
        try:
            return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
        except ValueError as e:
            raise UsageError(f"--since {text} is not a date: {e}; write it like --since 2026-10-31") from e
    return clock.now() - seconds("--since", text.removesuffix("ago").rstrip()) if text else 0.0
