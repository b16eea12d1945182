"""`Journal`: keeps what happened in a pool, in the SQLite file of the pool's samples. `read` reads such a file.

A journal has events, ended calls, the times in which nodes worked, and facts such as the plan. The number of each is
limited, so the file stays small. It can be read while the pool runs, after the pool's end, and after a kill.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from skypool.calls.tally import MOST_SLOWEST, EndedCall
from skypool.safety.received_data_limit import Quota, Share
from skypool.samples import session_file

_KEPT = Share(
    "events", 4 << 20, "the oldest of its events are removed, so that they take at most 4 MiB", strangers=True
)
"""The limit for the events of an untrusted node in the file."""
_ROW = 100
"""About how many bytes a row of the file takes, without its text."""
_MOST_EVENTS = 50_000
"""The most events that are kept. Beyond it, the oldest ones are removed, and events about phases only after others."""
MOST_FAILED = 500
"""The number of failed and cancelled calls that are kept: the newest ones."""
_MOST_SPANS = 20_000
"""The most spans of working time that are kept. Beyond it, spans of a node that follow each other are joined."""


class JournalEvent(NamedTuple):
    """Something that happened to a pool or a node. `time` is in seconds since 1970.

    Attributes:
        kind: the name of the event's class, such as "NodePhase".
        node: the number of the node; -1 if the event concerns the pool.
        data: the other fields of the event.
    """

    time: float
    kind: str
    node: int
    data: Mapping[str, Any]


class WorkSpan(NamedTuple):
    """A span of time, from `since` to `until` (seconds since 1970), in which a node worked for `busy` seconds.

    A node has at most one span for each `since`.
    """

    node: int
    since: float
    until: float
    busy: float


@dataclass(frozen=True, slots=True)
class JournalContent:
    """The content of a journal, in time order.

    Attributes:
        events: what happened to the pool and its nodes.
        calls: only the slowest calls that succeeded, and the newest calls that did not succeed.
        work: the spans of time in which nodes worked.
        facts: JSON values by name, such as the plan.
    """

    events: tuple[JournalEvent, ...] = ()
    calls: tuple[EndedCall, ...] = ()
    work: tuple[WorkSpan, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


class Journal:
    """The journal of one run of a pool. Any thread may use it.

    Args:
        file: returns the path of the file of the pool's samples. Called when the file is first needed.
        quota: limits what is kept of each node. None: every node is trusted.
    """

    def __init__(self, file: Callable[[], Path], quota: Quota | None = None) -> None:
        self._file_of = file
        self._quota = quota or Quota(lambda node: False)
        self._is_measured = False  # True once the quotas know what the file had

    @cached_property
    def file(self) -> Path:
        """The path of the file. It need not exist."""
        return self._file_of()

    def write(
        self,
        events: Sequence[JournalEvent] = (),
        calls: Sequence[EndedCall] = (),
        work: Sequence[WorkSpan] = (),
        facts: Mapping[str, object] | None = None,
    ) -> None:
        """Add events, ended calls, spans of working time, and facts.

        A span replaces the span with the same node and `since`. A fact replaces the fact with the same name.

        Raises OSError if the folder cannot be made, and sqlite3.Error if the file cannot be written.
        """
        with session_file.writing(self.file) as book, book:
            if events:
                if not self._is_measured:
                    for node, size in _sizes(book).items():
                        self._quota.set(node, _KEPT, size)
                    self._is_measured = True
                rows = [(each.time, each.kind, each.node, json.dumps(each.data)) for each in events]
                book.executemany("insert into event (time, kind, node, data) values (?, ?, ?, ?)", rows)
                _keep_events(book)
                for node in {row[2] for row in rows if not self._quota.take(row[2], _KEPT, _ROW + len(row[3]))}:
                    self._quota.set(node, _KEPT, _make_room(book, node))
            if calls:
                sql = "insert into call (name, node, ended, seconds, outcome, error) values (?, ?, ?, ?, ?, ?)"
                book.executemany(sql, calls)
                _keep_calls(book)
            if work:
                book.executemany("insert or replace into work values (?, ?, ?, ?)", work)
                _join_spans(book)
            values = [(name, json.dumps(value)) for name, value in (facts or {}).items()]
            book.executemany("insert or replace into fact values (?, ?)", values)


def _keep_events(book: sqlite3.Connection) -> None:
    count = book.execute("select count(*) from event").fetchone()[0]
    if count > _MOST_EVENTS:
        book.execute(
            "delete from event where id in "
            "(select id from event order by kind in ('NodePhase', 'PoolPhase'), id limit ?)",
            (count - int(0.9 * _MOST_EVENTS),),
        )


def _sizes(book: sqlite3.Connection) -> dict[int, int]:
    """Return the bytes of the events of each node, by the node's number."""
    return dict(book.execute("select node, sum(? + length(data)) from event group by node", (_ROW,)))


def _make_room(book: sqlite3.Connection, node: int) -> int:
    """Remove a node's oldest events (phases last) until at most half of its limit is left. Return the bytes left."""
    while (size := _sizes(book).get(node, 0)) > _KEPT.most // 2:
        count = book.execute("select count(*) from event where node = ?", (node,)).fetchone()[0]
        book.execute(
            "delete from event where id in "
            "(select id from event where node = ? order by kind in ('NodePhase', 'PoolPhase'), id limit ?)",
            (node, (count + 1) // 2),
        )
    return size


def _keep_calls(book: sqlite3.Connection) -> None:
    for kind, order, most in (("=", "seconds desc", MOST_SLOWEST), ("!=", "ended desc", MOST_FAILED)):
        book.execute(
            f"delete from call where outcome {kind} 'ok' and id not in "
            f"(select id from call where outcome {kind} 'ok' order by {order} limit ?)",
            (most,),
        )


def _join_spans(book: sqlite3.Connection) -> None:
    """If there are too many spans, join those of a node that begin in the same time step, and add up their `busy`."""
    count, nodes, first, last = book.execute(
        "select count(*), count(distinct node), min(since), max(until) from work"
    ).fetchone()
    if count <= _MOST_SPANS:
        return
    step = max(1.0, (last - first) * nodes * 2 / _MOST_SPANS)
    joined = book.execute(
        "select node, min(since), max(until), sum(busy) from work group by node, cast((since - ?) / ? as integer)",
        (first, step),
    ).fetchall()
    book.execute("delete from work")
    book.executemany("insert into work values (?, ?, ?, ?)", joined)


def read(file: Path) -> JournalContent:
    """Return a file's content; empty if it is missing or has only samples. Raise sqlite3.Error for a damaged file."""
    with session_file.reading(file) as book:
        tables = "" if book is None else book.execute("select group_concat(name) from sqlite_master").fetchone()[0]
        if book is None or "fact" not in (tables or "").split(","):
            return JournalContent()
        book.execute("begin")  # one state of all tables
        return JournalContent(
            tuple(
                JournalEvent(at, kind, node, json.loads(data))
                for at, kind, node, data in book.execute("select time, kind, node, data from event order by time, id")
            ),
            tuple(
                map(
                    EndedCall._make,
                    book.execute("select name, node, ended, seconds, outcome, error from call order by ended, id"),
                )
            ),
            tuple(map(WorkSpan._make, book.execute("select node, since, until, busy from work order by since, node"))),
            {name: json.loads(data) for name, data in book.execute("select name, data from fact")},
        )
