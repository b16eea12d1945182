"""`skypool logs`: print what the calls, services and nodes of a pool print, while it runs and after its end.

The process that runs a pool keeps the pool's output in files (see `skypool.logs`). If there are no files, that process
is asked for what is printed from now on.
"""

from __future__ import annotations

import calendar
import json
import math
import re
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from skypool.checks import seconds
from skypool.cli import output, run_logs
from skypool.cli.owner import explained, own_run
from skypool.errors import LedgerError, UsageError
from skypool.logs import files, reader
from skypool.logs.reader import Assembler, LogLine
from skypool.observers import client
from skypool.rental.ledger import Ledger
from skypool.rental.pool_terms import spelt
from skypool.rental.records import Record
from skypool.runs.reaching import NotListed

_MOST_LISTED = 30
"""The most pools in the list for a person."""
_LAST = 20.0
"""Seconds after a pool's end in which its process writes what was printed last. Other watches are closed before."""


def add_to(app: typer.Typer) -> None:
    """Add the command `skypool logs` to the program."""
    app.command("logs")(logs)


def logs(
    pool: Annotated[
        str,
        typer.Argument(
            help="Name of a pool. Default: a list of the pools whose output is kept.",
            callback=lambda name: name and spelt(name),
        ),
    ] = "",
    node: Annotated[int | None, typer.Option("--node", "-n", min=0, help="Only what this node prints.")] = None,
    call: Annotated[
        str | None, typer.Option("--call", help="Only this call: its id, or the name of its function or service.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(help="Only what is newer: 10m, 2h, 1d, or a time such as 14:30 or 2026-05-01T14:30."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the pool ends, or Ctrl-C.")] = False,
    grep: Annotated[str | None, typer.Option(help="Only lines in which this regular expression is found.")] = None,
    tail: Annotated[int | None, typer.Option(min=0, help="Only so many lines at the end.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each line.")] = False,
) -> None:
    """Print what a pool's calls, services and nodes print, from its start to its end, also after it.

    Of pools that have had the same name, only the last one is printed, unless --since is given. A pool that stays for
    the next `skypool run` is one pool.
    """
    if not pool:
        _list(as_json)
        return
    pattern = _pattern(grep)
    begin = 0.0 if since is None else _time(since)
    if (record := own_run(pool)) is not None and _print_run(record, node, call, since, follow, pattern, tail, as_json):
        return
    try:
        runs = files.runs(pool)
        running = _running(pool)
        is_kept = bool(runs) and (not running or runs[-1].name.endswith(f"-{running}"))
        if since is None:
            runs = runs[-1:]
        found = _kept(runs, node, call, begin, follow) if is_kept else _live(pool, node, call, follow)
        for line in _last(_matching(found, pattern), tail):
            _print(line, as_json)
    except KeyboardInterrupt:
        return
    except client.NoOwner as e:
        raise explained(pool, e) from e


def _print_run(
    record: Record,
    node: int | None,
    call: str | None,
    since: str | None,
    follow: bool,
    pattern: re.Pattern[str] | None,
    tail: int | None,
    as_json: bool,
) -> bool:
    """Print what a run prints that belongs to its machine. Return False if nothing is left of it, as that has ended."""
    run_logs.check(node, call, since)
    try:
        for line in _last(_matching(run_logs.lines(record, follow), pattern), tail):
            _print(line, as_json)
    except KeyboardInterrupt:
        return True
    except NotListed as e:
        output.warn(
            f"what run {record.pool} has printed was on its machine: {e}. What its client was told until it handed the "
            "run over is here"
        )
        return False
    return True


def _list(as_json: bool) -> None:
    """Print the pools whose output is kept, the newest first."""
    found = [(each, pool) for pool in files.pools() for each in files.runs(pool)]
    rows = []
    for run, pool in sorted(found, key=lambda each: each[0].name, reverse=True):
        began = calendar.timegm(time.strptime(run.name[:15], "%Y%m%dT%H%M%S"))
        last = max((each.stat().st_mtime for each in files.segments(run).values()), default=began)
        rows.append((pool, began, last))
    if as_json:
        output.data(
            [{"pool": pool, "began": output.utc(began), "last": output.utc(last)} for pool, began, last in rows]
        )
    elif rows:
        times = [[pool, *(time.strftime("%Y-%m-%d %H:%M", time.localtime(at)) for at in both)] for pool, *both in rows]
        output.table(["pool", "began", "last output"], times[:_MOST_LISTED])
    else:
        output.say("nothing is kept of any pool")


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as e:
        raise UsageError(f"--grep takes a regular expression, and {text!r} is none: {e}") from e


def _time(text: str) -> float:
    """Return the time that the text of `--since` means, in seconds since 1970. Raise UsageError if it is no time."""
    if re.fullmatch(r"\d{1,2}:\d{2}(:\d{2})?", text):
        text = f"{time.strftime('%Y-%m-%d')} {text:0>5}"
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        try:
            return time.time() - seconds("--since", text)
        except UsageError as e:
            raise UsageError(
                f"--since takes a duration such as 90s, 10m or 2h, or a time such as 14:30 or 2026-05-01T14:30, not "
                f"{text!r}"
            ) from e


def _kept(runs: list[Path], node: int | None, call: str | None, since: float, follow: bool) -> Iterator[LogLine | None]:
    """Yield the lines in the files of a pool's runs. With `follow`, wait for new ones; None: there is none yet."""
    for run in runs[:-1]:
        yield from reader.lines(reader.records(run), Assembler(node, call, since))
    found = reader.records(runs[-1], follow, _Writer(runs[-1]).may_write)
    yield from reader.lines(found, Assembler(node, call, since))


class _Writer:
    """The process that keeps what a run of a pool prints."""

    def __init__(self, run: Path) -> None:
        self._pool, self._session = run.parent.name, run.name.rpartition("-")[2]
        self._until = math.inf

    def may_write(self) -> bool:
        """Return False if nothing more is written: the process has gone, or the pool has ended long enough ago."""
        found = next((each for each in _records(self._pool) if each.session == self._session), None)
        if found is None:
            return False
        if _is_running(found):
            self._until = math.inf
            return True
        self._until = min(self._until, time.monotonic() + _LAST)
        return found.client.lives() is not False and time.monotonic() < self._until


def _records(pool: str) -> Sequence[Record]:
    """Return what the ledger says about the runs of a pool; nothing if it is unreadable."""
    try:
        return Ledger.here(output.warn).pools(pool)
    except LedgerError as e:
        output.warn(f"it is not known whether pool {pool!r} runs: {e}")
        return ()


def _is_running(record: Record) -> bool:
    return record.state(time.time()) in ("live", "ending")


def _running(pool: str) -> str:
    """Return the session of a pool that a process runs or ends now; "" if there is none."""
    return next((each.session for each in _records(pool) if _is_running(each)), "")


def _live(pool: str, node: int | None, call: str | None, follow: bool) -> Iterator[LogLine | None]:
    """Yield what a running pool without files prints from now on. None means that there is no new line yet."""
    with client.events(pool) as made:  # raises NoOwner if no process on this computer runs the pool
        if not follow:
            raise UsageError(
                f"nothing is kept of pool {pool!r}, as {files.SWITCH}=off was set or its files cannot be written; "
                "--follow prints what comes from now on"
            )
        yield None
        assembler = Assembler(node, call, whole=False)
        for record in made.lines():
            yield from assembler.feed(record)
            yield None
        yield from assembler.finish()


def _matching(found: Iterator[LogLine | None], pattern: re.Pattern[str] | None) -> Iterator[LogLine | None]:
    return found if pattern is None else (each for each in found if each is None or pattern.search(each.text))


def _last(found: Iterator[LogLine | None], tail: int | None) -> Iterator[LogLine]:
    """Yield the last `tail` (None: all) of the old lines, before the first None in `found`, and all lines after it."""
    kept: deque[LogLine] = deque(maxlen=tail)
    is_following = False
    for line in found:
        if line is None:
            is_following = True
            yield from kept
            kept.clear()
            sys.stdout.flush()
        elif is_following or tail is None:
            yield line
        else:
            kept.append(line)
    yield from kept


def _print(line: LogLine, as_json: bool) -> None:
    """Print a line of output, marked with its place, on the stream that it came from, and other lines on stderr."""
    if as_json:
        sys.stdout.write(json.dumps(line.to_json(), ensure_ascii=False) + "\n")
    elif line.place or line.record["event"] == "Output":
        stream = sys.stderr if line.record.get("stream") == 2 else sys.stdout
        stream.write(f"[{line.place}] {line.text}\n" if line.place else f"{line.text}\n")
    else:
        output.note(line.text)
