"""Observes a run on its machine, as `observers.client` does with a pool of this computer: node, stacks and history."""

from __future__ import annotations

import json
import secrets
import shlex
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from skypool.errors import ConnectionLost, ProtocolError, SkypoolError
from skypool.link.forward import RELAY, Forward
from skypool.link.reach import local_command
from skypool.model import Access
from skypool.observers import stacks
from skypool.observers.protocol import ANY, LONGEST_ANSWER, line_of, read_line
from skypool.rental.records import Record
from skypool.runs import stored
from skypool.runs.looking import SILENT, reached, run_of, started
from skypool.samples import session_file
from skypool.shipping import package_zip
from skypool.shipping.package_zip import shell_path
from skypool.wire.frames import check_json

PATIENCE = 30.0
"""Seconds in which the machine must answer."""
_MOST_HISTORY = 256 << 20
"""The most bytes of a history that are read."""
_MOST_LINE = 4 << 20
"""The most bytes of one row of it."""
_READ = 1 << 16
_COLUMNS = {
    "fact": ("name", "data"),
    "event": ("time", "kind", "node", "data"),
    "call": ("name", "node", "ended", "seconds", "outcome", "error"),
    "work": ("node", "since", "until", "busy"),
    "sample": ("node", "time", "error", "data"),
}
"""The columns of each table that are kept. Numbers of rows are made anew."""


class IsOver(SkypoolError):
    """The error for a run that is over, so that none of its processes can be observed."""


def info(record: Record, patience: float = PATIENCE) -> dict[str, Any]:
    """Return the state of a run's pool and its node, as its runner knows it.

    Raises:
        IsOver: the run is over.
        NotListed: the provider does not list its machine any more.
        ConnectionLost: the machine cannot be reached, or its runner does not answer.
    """
    return next(infos(record, "", patience))


def infos(record: Record, every: float | str = 1.0, patience: float = PATIENCE) -> Iterator[dict[str, Any]]:
    """Yield the state of a run's pool and its node every some seconds, over one connection. Raises as `info`.

    Args:
        every: the seconds between two answers; "" for one answer.
        patience: seconds in which the machine must give the first answer.
    """
    until = time.monotonic() + patience
    access = reached(record, until)
    request = line_of({"skypool": ANY, "ask": "info"}).decode().strip()
    place = shell_path(stored.place_of(access, run_of(record).claim))
    words = f"{place} {shlex.join([record.pool, request, str(every)])}"
    rest = b""
    with started(access, ("runs.follow_end", "runs.ask_end"), words) as stream:
        while True:
            line, rest = read_line(stream.socket, LONGEST_ANSWER, until, rest)
            yield _checked(record, line)
            until = time.monotonic() + SILENT


def _checked(record: Record, line: bytes) -> dict[str, Any]:
    """Return what a runner has answered. Raises what it says that is wrong."""
    try:
        check_json(line)
        said = json.loads(line)
    except ValueError as e:
        raise ProtocolError(f"the machine of run {record.pool} sent what makes no sense: {e}") from e
    if not isinstance(said, dict):
        raise ProtocolError(f"the machine of run {record.pool} sent {said!r:.80} in place of a JSON object")
    if said.get("ok"):
        return {name: value for name, value in said.items() if name != "ok"}
    if said.get("kind") == "IsOver":
        raise IsOver(
            f"run {record.pool!r} is over, so none of its processes can be observed; `skypool wait {record.pool}` says "
            f"how it has ended, and `skypool logs {record.pool}` prints what it has printed"
        )
    raise ConnectionLost(f"run {record.pool!r}: {said.get('error')}")


def stacks_of(record: Record, native: bool) -> stacks.Stacks:
    """Return what the processes of a run are doing. Raises as `info`, but for IsOver."""
    access = reached(record, time.monotonic() + PATIENCE)
    return stacks.ask(record.pool, [0], native, lambda node, script: local_command(access, access.python or "", script))


def forward(access: Access, host: str, port: int, here: int | str, notice: Callable[[str], None]) -> Forward:
    """Forward a port of this computer, or a socket, to a port that the machine of a run reaches.

    Raises what `Forward` raises.
    """
    relay = ["sh", "-c", package_zip.program(RELAY, access.python or "", access.home), "relay"]
    return Forward(access.transport, relay, 0, host, port, here, notice)


# --- the history -----------------------------------------------------------------------------------------------


def history_file(record: Record) -> Path:
    """Return the path of the file on this computer with what was last fetched of a run's history."""
    return session_file.path_of(record.session).with_suffix(session_file.FETCHED)


def fetch_history(record: Record) -> None:
    """Fetch what the machine of a run has measured and noted of it until now, also after the run.

    Raises:
        NotListed: the provider does not list its machine any more.
        ConnectionLost: the machine cannot be reached.
        ProtocolError: what it sent is not valid.
        OSError, sqlite3.Error: the file cannot be written.
    """
    access = reached(record, time.monotonic() + PATIENCE)
    place = shell_path(stored.place_of(access, run_of(record).claim))
    file = history_file(record)
    part = file.with_name(f"{record.session}-{secrets.token_hex(4)}{session_file.FETCHING}")
    with started(access, ("runs.follow_end", "runs.history_end"), f"{place} {shlex.quote(record.session)}") as stream:
        stream.socket.settimeout(SILENT)
        with session_file.writing(part) as book, book:
            for table, row in _rows(partial(stream.socket.recv, _READ)):
                _insert(book, table, row)
    with closing(sqlite3.connect(part)) as book:
        book.execute("pragma journal_mode = delete")  # one file, which can be renamed
    part.replace(file)


def _rows(read: Callable[[], bytes]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the rows that a machine sends, as (table, row). Raises ProtocolError, or EOFError if some are missing."""
    unpacker, waiting, total = zlib.decompressobj(), b"", 0
    while data := read():
        while data:
            try:
                part = unpacker.decompress(data, _MOST_LINE)
            except zlib.error as e:
                raise ProtocolError(f"the machine of the run sent what makes no sense: {e}") from e
            data, total = unpacker.unconsumed_tail, total + len(part)
            *lines, waiting = (waiting + part).split(b"\n")
            if total > _MOST_HISTORY or len(waiting) > _MOST_LINE:
                raise ProtocolError("the machine of the run sent too much history")
            for line in lines:
                if line == b"null":
                    return
                yield _row(line)
    raise EOFError("the connection was closed before all of the history was there")


def _row(line: bytes) -> tuple[str, Mapping[str, Any]]:
    try:
        check_json(line)
        table, row = json.loads(line)
        values = {name: row.get(name) for name in _COLUMNS[table]}
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise ProtocolError(f"the machine of the run sent a row of its history that makes no sense: {e}") from e
    if not all(each is None or isinstance(each, (int, float, str)) for each in values.values()):
        raise ProtocolError("the machine of the run sent a row of its history that makes no sense")
    return table, values


def _insert(book: sqlite3.Connection, table: str, row: Mapping[str, Any]) -> None:
    columns, places = ", ".join(row), ", ".join("?" * len(row))
    book.execute(f"insert or ignore into {table} ({columns}) values ({places})", [*row.values()])


@contextmanager
def whole_history(record: Record, folder: Path) -> Iterator[Path]:
    """Yield a file with the history of a run: that of this computer, and what was fetched from its machine.

    `folder` is for that file. Raises sqlite3.Error if one of the two is damaged.
    """
    made = folder / f"{record.session}.sqlite3"
    with session_file.writing(made) as book:
        for source in (session_file.path_of(record.session), history_file(record)):
            with session_file.reading(source) as read:
                if read is None:
                    continue
                read.row_factory = sqlite3.Row
                there = {name for (name,) in read.execute("select name from sqlite_master where type = 'table'")}
                with book:
                    for table, columns in _COLUMNS.items():
                        for row in read.execute(f"select {', '.join(columns)} from {table}") if table in there else ():
                            _insert(book, table, dict(row))
    yield made
