"""What the ledger knows of a pool, read from its tables."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from skypool.budget import Budget, Line, Receipt
from skypool.model import Instance
from skypool.processes import Process

State = Literal["live", "ending", "left", "ended"]


@dataclass(frozen=True, slots=True)
class Intent:
    """An order of which nobody knows whether it was carried out.

    Attributes:
        at: when it went out, seconds since 1970.
    """

    token: str
    provider: str
    type: str
    place: str
    ranks: tuple[int, ...]
    at: float


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of a pool. Times are seconds since 1970.

    Attributes:
        client: the process that holds it, or ends it.
        beat: when that one was heard of last; lease: seconds that machines live on without it.
        ending: since when somebody ends it; ended: when it was done, None before.
        error: why it ended, "" for no reason to tell.
        lines: its instances; intents: its orders without an answer.
        notes: its drivers, as `registry.noted` writes them down.
    """

    pool: str
    session: str
    client: Process
    started: float
    beat: float
    lease: float
    budget: Budget | None
    ending: float | None
    ended: float | None
    error: str
    lines: tuple[Line, ...]
    intents: tuple[Intent, ...]
    notes: tuple[dict[str, Any], ...]

    @property
    def running(self) -> tuple[Line, ...]:
        """Its instances whose end is not proved."""
        return tuple(each for each in self.lines if not each.ended)

    @property
    def lasts(self) -> float:
        """When the machines of a client that is gone have ended themselves, where they can."""
        return self.beat + self.lease

    def client_lives(self, now: float) -> bool:
        """Whether a process holds the pool; one on another host does while it was heard of within the lease."""
        lives = self.client.lives()
        return self.ended is None and (now < self.lasts if lives is None else lives)

    def has(self, instance: Instance) -> bool:
        """Whether this pool rented it: it says so itself, or the pool was taken over and ordered it after that."""
        return (
            instance.token.rpartition("-")[0] == self.session
            or any(instance.token == each.token for each in self.intents)
            or any((instance.provider, instance.id) == (each.provider, each.id) for each in self.lines)
        )

    def since(self, time: float) -> list[tuple[str, str]]:
        """Providers and tokens of its orders without an answer, and ids of its instances, from this time on."""
        orders = [(each.provider, each.token) for each in self.intents if each.at > time]
        return orders + [(each.provider, each.id) for each in self.running if each.launched > time]

    def state(self, now: float) -> State:
        """ "live": its client holds it; "ending": somebody ends it; "left": nobody does, and something may run yet."""
        if self.client_lives(now):
            return "live" if self.ending is None else "ending"
        return "left" if self.running or self.intents else "ended"

    def receipt(self, at: float) -> Receipt:
        """What its instances cost."""
        return Receipt(self.pool, tuple(each.at(at) for each in self.lines), at, len(self.intents))


def newest(records: Sequence[Record]) -> Record | None:
    """The one that has not ended and began last, or else that began last."""
    return max(records, key=lambda each: (each.ended is None, each.started), default=None)


def read(book: sqlite3.Connection, now: float, where: str = "TRUE", *values: object) -> list[Record]:
    lines: dict[str, list[Line]] = {}
    sql = "SELECT i.* FROM instances i JOIN pools p USING (session) WHERE {} ORDER BY i.launched, i.rank"
    for session, provider, id_, rank, _, kind, region, zone, market, price, least, launched, ended in book.execute(
        sql.format(where), values
    ):
        until = now if ended is None else ended
        made = Line(provider, id_, kind, zone or region, market, rank, price, least, launched, until, ended is not None)
        lines.setdefault(session, []).append(made)
    intents: dict[str, list[Intent]] = {}
    sql = "SELECT o.* FROM orders o JOIN pools p USING (session) WHERE o.state = 'intended' AND {} ORDER BY o.at"
    for session, token, at, ranks, _, _, provider, kind, region, zone, *_ in book.execute(sql.format(where), values):
        intent = Intent(token, provider, kind, zone or region, tuple(json.loads(ranks)), at)
        intents.setdefault(session, []).append(intent)
    found = book.execute(f"SELECT p.* FROM pools p WHERE {where} ORDER BY p.started, p.rowid", values)
    return [_record(row, tuple(lines.get(row[0], ())), tuple(intents.get(row[0], ()))) for row in found]


def _record(row: tuple[Any, ...], lines: tuple[Line, ...], intents: tuple[Intent, ...]) -> Record:
    session, pool, host, pid, birth, started, beat, lease, max_usd, warn, notes, ending, ended, error = row
    budget = None if max_usd is None else Budget(max_usd, warn)
    client, drivers = Process(host, pid, birth), tuple(json.loads(notes))
    return Record(
        pool, session, client, started, beat, lease, budget, ending, ended, error, lines, intents, drivers
    )  # fmt: skip
