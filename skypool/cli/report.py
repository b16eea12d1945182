"""`skypool report`: write what a pool did and cost to an HTML file, while it runs and after its end."""

from __future__ import annotations

import sqlite3
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skypool.cli import output
from skypool.cli.owner import source_of
from skypool.errors import SkypoolError, UsageError, nearest
from skypool.rental.ledger import Ledger
from skypool.rental.pool_terms import spelt
from skypool.rental.records import Record, newest

if TYPE_CHECKING:
    from skypool.report.report import Report


def add_to(app: typer.Typer) -> None:
    """Add the command `skypool report` to the program."""
    app.command("report")(report)


def _of_run(record: Record) -> Report:
    """Return the report of a run that was handed over to its machine, with what that knows, or was fetched from it."""
    from skypool.report.report import report_of
    from skypool.runs import observing
    from skypool.runs.reaching import NotListed

    try:
        observing.fetch_history(record)
    except NotListed as e:
        kept = observing.history_file(record)
        if kept.exists():
            output.note(f"from what was fetched at {output.utc(kept.stat().st_mtime)}: {e}")
        else:
            output.warn(f"the report has nothing that only the machine of run {record.pool} knew: {e}")
    except (SkypoolError, OSError) as e:
        output.warn(f"the report has nothing new from the machine of run {record.pool}: {e}")
    else:
        output.note(source_of(record))
    with tempfile.TemporaryDirectory() as folder, observing.whole_history(record, Path(folder)) as file:
        return report_of(record, file)


def report(
    pool: Annotated[str, typer.Argument(help="The name of the pool.", callback=spelt)],
    file: Annotated[
        str, typer.Option("--output", "-o", help="The file to write; - for stdout. Default: POOL-report.html here.")
    ] = "",
    session: Annotated[str, typer.Option("--run", help="The id of an earlier run of the pool.")] = "",
) -> None:
    """Write a report of a pool to an HTML file: time line, devices, calls, money, errors and the plan.

    The file needs no network. The report is of the pool's last run, also after the pool's end.
    """
    from skypool.report.report import report_of  # imported here, as no other command needs it

    ledger = Ledger.here(output.warn)
    runs = ledger.pools(pool)
    record = newest([each for each in runs if session in ("", each.session)])
    if record is None and runs:
        raise UsageError(f"pool {pool!r} has no run {session!r}; its last run is {runs[-1].session}")
    if record is None:
        close = nearest(pool, {each.pool for each in ledger.pools()})
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise UsageError(f"there is no pool called {pool!r} in skypool's ledger {ledger.file}{hint}")
    try:
        made = report_of(record) if record.run is None else _of_run(record)
    except sqlite3.Error as e:
        raise SkypoolError(f"the measurements and the history of pool {pool!r} cannot be read: {e}") from e
    if file == "-":
        sys.stdout.write(made.html)
        return
    try:
        path = made.save(Path(file or f"{pool}-report.html"))
    except OSError as e:
        raise UsageError(f"the report cannot be written to {file}: {e}") from e
    output.say(str(path))
