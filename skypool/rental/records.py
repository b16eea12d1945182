"""Reads pools, instances and open orders from the ledger, as objects with checked values.

A value that skypool never writes raises `Damaged`.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, TypeVar, cast

from skypool.drivers.registry import DriverNote
from skypool.errors import UsageError
from skypool.head import states
from skypool.model import Instance
from skypool.processes import Process
from skypool.rental.budget import Budget
from skypool.rental.receipt import HOUR, Line, Receipt

T = TypeVar("T")
E = TypeVar("E", bound=Enum)
State = Literal["live", "ending", "detached", "left", "ended"]
Rows = dict[str, list[tuple[object, ...]]]
"""The rows of one session (one run of a pool): a dict from table names to lists of rows."""
_LATEST = 7.3e9
"""Latest time that is accepted in a ledger, in seconds since 1970 (the year 2201)."""
_LONGEST = 3.2e9
"""Longest duration that is accepted in a ledger, in seconds (a hundred years)."""
_NAME = re.compile(r"[\w-]+")
"""Matches the name of a pool or a session, which becomes part of file names."""


class Damaged(Exception):
    """Raised if the ledger contains a value that skypool never writes, so that its file must be damaged."""


@dataclass(frozen=True, slots=True)
class Intent:
    """An open order: one that was sent, and that the provider has not answered.

    Attributes:
        token: identifies the order.
        type: the machine type.
        place: the zone, or the region if no zone is known.
        nodes: the numbers of the nodes that it is for.
        at: when it was last sent, in seconds since 1970.
    """

    token: str
    provider: str
    type: str
    place: str
    nodes: tuple[int, ...]
    at: float


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The end of a run that was handed over to its machine, as far as it is known.

    Attributes:
        outcome: how it has ended.
        returncode: the exit status of its program: 128 + n if signal n ended it; None if that is not known.
        attempts: the number of times that the program was started; None if the run has not stored its end.
        ended: when it has stored that, in seconds since 1970; None if it has not.
        usd: what it had cost by then, at the last known prices, in US dollars; None if that is not known.
        limit: what its program was stopped for: "budget" or "lifetime"; "" if it was not, or that is not known.
        why: why it has failed or was interrupted; "" if it was not, or that is not known.
        unsaved: what of its folders that are kept in buckets is saved nowhere, and why; "" for nothing.
    """

    outcome: states.Outcome
    returncode: int | None = None
    attempts: int | None = None
    ended: float | None = None
    usd: float | None = None
    limit: str = ""
    why: str = ""
    unsaved: str = ""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The hand-over of a run from the client of its pool to a machine of the pool, as it is recorded in the ledger.

    Times are in seconds since 1970, by the wall clock.

    Attributes:
        claim: the run and its generation.
        entry: the state of the hand-over, and how the run has ended.
        at: time since when the run is in this state: of its outcome, if that is known.
        ends: the written end: the time at which the machine's guard ends the machine in any case.
        latest: the latest time at which the machine may still be there. It comes after `ends`, as clocks differ a
            little, and a machine needs some time to end.
        worst_usd: the most that the pool may cost in all, in US dollars.
        heir: the digest of the word by which the runner is known, as from `messages.heir_digest`. On the machine, the
            row of this hand-over has the same. "" if it is not known.
        seal: the key with which the runner signs what it keeps in buckets; "" if it is not known.
        seen: when the machine has last said how the run stands, or has ended; None if nobody has asked it.
        end: how the run has ended; None if that is not known.
    """

    claim: states.Claim
    entry: states.Entry
    at: float
    ends: float
    latest: float
    worst_usd: float
    heir: str = ""
    seal: str = field(default="", repr=False)
    seen: float | None = None
    end: RunEnd | None = None

    @property
    def is_given(self) -> bool:
        """True if the machine belongs to the run, or may do so, and its end is not proved."""
        return self.entry.state in (states.Ledger.DETACHING, states.Ledger.DETACHED)

    def keeps(self, now: float) -> bool:
        """Return True if nothing but its user may end the machine now, because its run goes on or may do so."""
        return self.is_given and now <= self.latest


@dataclass(frozen=True, slots=True)
class Record:
    """A pool as it is recorded in the ledger. Times are in seconds since 1970.

    Attributes:
        client: process that runs or ends the pool, or that did so last.
        started: time when the pool began.
        beat: time of the last sign of life of `client`.
        lease: seconds for which machines live on without `client`.
        ending: time when a process began to end the pool; None before, and again after a process took the pool over.
        ended: time when the pool's end was complete.
        error: the error that ended the pool; "" for none.
        lines: the pool's instances and their costs, ordered by launch.
        intents: the pool's open orders, ordered by time.
        notes: the pool's drivers and their settings, as JSON objects.
        stays: the time until which the pool's machines stay without `client`, because its `with` block was left and it
            has `linger=`; None before that, and again after a process took the pool over.
        lifetime: seconds from the beginning of the pool's costs to its end; None for no such limit.
        run: the hand-over of the pool's run to its machine; None if none has begun.
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
    notes: tuple[DriverNote, ...]
    stays: float | None = None
    lifetime: float | None = None
    run: RunRecord | None = None

    @property
    def running(self) -> tuple[Line, ...]:
        """The receipt lines of the pool's instances whose end is not proved."""
        return tuple(each for each in self.lines if not each.ended)

    @property
    def usd_per_hour(self) -> float:
        """The price of the pool's instances whose end is not proved, in US dollars per hour."""
        return sum(each.usd_per_hour for each in self.running)

    @property
    def worst(self) -> float:
        """The most that the pool may cost in all, in US dollars; 0 if it has ended, `math.inf` if it has no limit."""
        if self.ended is not None:
            return 0.0
        if self.run is not None and self.run.is_given:
            return self.run.worst_usd
        if self.budget is not None:
            return self.budget.max_usd
        spent = sum(each.usd for each in self.lines)
        if not self.usd_per_hour and not self.intents:
            return spent
        return math.inf if self.lifetime is None else spent + self.usd_per_hour * self.lifetime / HOUR

    @property
    def lasts(self) -> float:
        """The time, in seconds since 1970, when the lease is over if the client gives no further sign of life.

        Machines that can end themselves have ended by then. If the machines stay without a client, this is the time
        `stays`. If they belong to their run, or may do so, it is the latest time at which they may still be there.
        """
        if self.run is not None and self.run.is_given:
            return self.run.latest
        return self.beat + self.lease if self.stays is None else self.stays

    @property
    def is_staying(self) -> bool:
        """True if the client has left, and the machines stay until `lasts` for a process that takes them over."""
        return self.stays is not None and self.ending is None and self.ended is None

    @property
    def is_detached(self) -> bool:
        """True if the pool's machine belongs to its run, so that no client runs the pool, and nobody is ending it."""
        is_given = self.run is not None and self.run.entry.state is states.Ledger.DETACHED
        return is_given and self.ending is None and self.ended is None

    def is_kept(self, now: float) -> bool:
        """Return True if nothing but their user may end the machines now: their run goes on on them, or may do so."""
        return self.ended is None and self.run is not None and self.run.keeps(now)

    def client_lives(self, now: float) -> bool:
        """Return True if a process still runs or ends the pool. False if its machines stay, or go on, without one.

        A process on another host cannot be checked. It counts as alive until `lasts`.
        """
        lives = False if self.is_staying or self.is_detached else self.client.lives()
        return self.ended is None and (now < self.lasts if lives is None else lives)

    def has(self, instance: Instance) -> bool:
        """Return True if this pool rented the instance: by its token, or by the provider and id of a receipt line."""
        return (
            instance.token.rpartition("-")[0] == self.session
            or any(instance.token == each.token for each in self.intents)
            or any((instance.provider, instance.id) == (each.provider, each.id) for each in self.lines)
        )

    def since(self, time: float) -> list[tuple[str, str]]:
        """Return open orders and running instances from after `time`. Their provider may not list their machines yet.

        These are pairs (provider, token) for the orders, followed by pairs (provider, id) for the instances.
        """
        orders = [(each.provider, each.token) for each in self.intents if each.at > time]
        return orders + [(each.provider, each.id) for each in self.running if each.launched > time]

    def state(self, now: float) -> State:
        """Return the state of the pool at the time `now`: "live" if its client runs it, "ending" if a process ends it.

        Otherwise it is "ended" if no machine may run, "detached" if the machines belong to their run or may do so, and
        "left" if machines may run that belong to nobody.
        """
        if self.client_lives(now):
            return "live" if self.ending is None else "ending"
        if not self.running and not self.intents:
            return "ended"
        return "detached" if self.is_kept(now) else "left"

    def receipt(self, at: float) -> Receipt:
        """Return the receipt of the pool's costs until the time `at`, in seconds since 1970."""
        until = _charged_until(self.run, at)
        return Receipt(self.pool, tuple(each.at(until) for each in self.lines), at, len(self.intents))


def newest(records: Sequence[Record]) -> Record | None:
    """Return the record of the pool that began last. A pool that has not ended is preferred to all that have ended."""
    return max(records, key=lambda each: (each.ended is None, each.started), default=None)


def read(book: sqlite3.Connection, now: float, where: str = "TRUE", *values: object) -> list[Record]:
    """Return the records of the pools that match an SQL condition, the oldest first.

    Args:
        now: time until which running instances are charged, in seconds since 1970.
        where: the SQL condition, in which `p` is the table of pools. The default selects all pools.
        values: parameters of the condition.

    Raises:
        Damaged: a value is not one that skypool writes.
        sqlite3.Error, UnicodeDecodeError: the ledger cannot be read.
    """
    sql = "SELECT r.* FROM runs r JOIN pools p USING (session) WHERE {}"
    runs = {row[0]: _run(row) for row in book.execute(sql.format(where), values)}
    lines: dict[str, list[Line]] = {}
    sql = "SELECT i.* FROM instances i JOIN pools p USING (session) WHERE {} ORDER BY i.launched, i.rank"
    earlier = _earlier_prices(book, where, values)
    for session, *row in book.execute(sql.format(where), values):
        until = _charged_until(runs.get(session), now)
        lines.setdefault(session, []).append(_line(row, until, earlier.get((session, row[0], row[1]), ())))
    intents: dict[str, list[Intent]] = {}
    sql = "SELECT o.* FROM orders o JOIN pools p USING (session) WHERE o.state = 'intended' AND {} ORDER BY o.at"
    for session, *row in book.execute(sql.format(where), values):
        intents.setdefault(session, []).append(_intent(row))
    found = book.execute(f"SELECT p.* FROM pools p WHERE {where} ORDER BY p.started, p.rowid", values)
    return [
        _record(row, tuple(lines.get(row[0], ())), tuple(intents.get(row[0], ())), runs.get(row[0])) for row in found
    ]


def _charged_until(run: RunRecord | None, now: float) -> float:
    """Return the time until which machines are charged whose end is not proved: none outlives the end of its run."""
    return min(now, run.latest) if run is not None and run.is_given else now


def _earlier_prices(
    book: sqlite3.Connection, where: str, values: Sequence[object]
) -> dict[tuple[object, object, object], list[tuple[float, float]]]:
    """Return earlier prices by (session, provider, id), the oldest first: (time until which it was valid, USD/hour)."""
    found: dict[tuple[object, object, object], list[tuple[float, float]]] = {}
    sql = f"SELECT e.* FROM earlier_prices e JOIN pools p USING (session) WHERE {where} ORDER BY e.until"
    for session, provider, id_, until, price in book.execute(sql, values):
        found.setdefault((session, provider, id_), []).append((_time(until), _number(price)))
    return found


def _line(row: Sequence[Any], now: float, earlier: Sequence[tuple[float, float]]) -> Line:
    provider, id_, node, _, kind, region, zone, market, price, least, launched, ended, billed_from, *idle = row
    idle_at, idle_seconds, idle_usd, is_idle, start_usd = idle
    return Line(
        provider=_text(provider),
        id=_text(id_),
        type=_text(kind),
        place=_text(zone) or _text(region),
        market=_text(market),
        node=_whole(node),
        usd_per_hour=_number(price),
        least_billed=_number(least, _LONGEST),
        launched=_time(launched),
        until=now if ended is None else _time(ended),
        ended=ended is not None,
        billed_from=None if billed_from is None else _time(billed_from),
        earlier=tuple(earlier),
        idle_at=None if idle_at is None else _time(idle_at),
        idle_seconds_then=_number(idle_seconds),
        idle_usd_then=_number(idle_usd),
        is_idle=bool(_whole(is_idle, 2)),
        start_usd=_number(start_usd),
    )


def _intent(row: Sequence[Any]) -> Intent:
    token, _, nodes, _, _, provider, kind, region, zone, *_, sent, _ = row
    several = tuple(_whole(each) for each in _plain(nodes, list))
    return Intent(_text(token), _text(provider), _text(kind), _text(zone) or _text(region), several, _time(sent))


def _run(row: tuple[object, ...]) -> RunRecord:
    _, run, generation, state, outcome, at, ends, latest, worst_usd, heir, seen, *end, seal = row
    how = None if outcome is None else _one_of(states.Outcome, outcome)
    return RunRecord(
        claim=states.Claim(_text(run), _whole(generation)),
        entry=states.Entry(_one_of(states.Ledger, state), how),
        at=_time(at),
        ends=_time(ends),
        latest=_time(latest),
        worst_usd=_number(worst_usd),
        heir=_text(heir),
        seal=_text(seal),
        seen=None if seen is None else _time(seen),
        end=None if how is None else _run_end(how, *end),
    )


def _run_end(
    outcome: states.Outcome,
    unsaved: object,
    returncode: object,
    attempts: object,
    ended: object,
    usd: object,
    limit: object,
    why: object,
) -> RunEnd:
    return RunEnd(
        outcome=outcome,
        returncode=None if returncode is None else _whole(returncode),
        attempts=None if attempts is None else _whole(attempts),
        ended=None if ended is None else _time(ended),
        usd=None if usd is None else _number(usd),
        limit=_text(limit),
        why=_text(why),
        unsaved=_text(unsaved),
    )


def _record(
    row: tuple[Any, ...], lines: tuple[Line, ...], intents: tuple[Intent, ...], run: RunRecord | None
) -> Record:
    session, pool, host, pid, birth, started, beat, lease, max_usd, warn, notes, ending, ended, error, *more = row
    best_effort, stays, lifetime = more
    return Record(
        pool=_name(pool),
        session=_name(session),
        client=Process(_text(host), _whole(pid, 2**31), _text(birth)),
        started=_time(started),
        beat=_time(beat),
        lease=_number(lease, _LONGEST),
        budget=None if max_usd is None else _budget(max_usd, warn, best_effort),
        ending=None if ending is None else _time(ending),
        ended=None if ended is None else _time(ended),
        error=_text(error),
        lines=lines,
        intents=intents,
        notes=tuple(_note(each) for each in _plain(notes, list)),
        stays=None if stays is None else _time(stays),
        lifetime=None if lifetime is None else _number(lifetime, _LONGEST),
        run=run,
    )


def as_rows(record: Record, tokens: Mapping[tuple[str, str], str]) -> Rows:
    """Return the rows of the ledger's tables from which `read` makes a record of a pool that has not ended.

    That record has no `run`, because whoever gets these rows owns the pool. `tokens` has the tokens of the orders that
    made its instances, by (provider, id).
    """
    session, budget, client = record.session, record.budget, record.client
    limits = (None, None, False) if budget is None else (budget.max_usd, budget.warn, budget.best_effort)
    max_usd, warn, best_effort = limits
    owner = (session, record.pool, client.host, client.pid, client.birth)
    times = (record.started, record.beat, record.lease)
    notes = json.dumps(list(record.notes))
    rows: Rows = {
        "pools": [(*owner, *times, max_usd, warn, notes, None, None, "", best_effort, None, record.lifetime)],
        "orders": [],
        "instances": [],
        "earlier_prices": [],
        "runs": [],
    }
    for order in record.intents:
        asked = (session, order.token, order.at, json.dumps(list(order.nodes)), "intended", "")
        rows["orders"].append((*asked, order.provider, order.type, order.place, "", "", 0.0, 0.0, order.at, 0.0))
    for line in record.lines:
        key = (session, line.provider, line.id)
        machine = (line.node, tokens.get((line.provider, line.id), ""), line.type, line.place, "", line.market)
        cost = (line.usd_per_hour, line.least_billed, line.launched, line.until if line.ended else None)
        idle = (line.billed_from, line.idle_at, line.idle_seconds_then, line.idle_usd_then, line.is_idle)
        rows["instances"].append((*key, *machine, *cost, *idle, line.start_usd))
        rows["earlier_prices"] += [(*key, until, usd) for until, usd in line.earlier]
    return rows


# --- checks of single values ---------------------------------------------------------------------------------


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise Damaged(f"the ledger contains {value!r} where a text must be, so the file was damaged or changed")
    return value


def _name(value: object) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise Damaged(f"the ledger contains {value!r} where a name must be, so the file was damaged or changed")
    return value


def _one_of(kind: type[E], value: object) -> E:
    try:
        return kind(value)
    except ValueError as e:
        words = ", ".join(str(each.value) for each in kind)
        raise Damaged(
            f"the ledger contains {value!r} where one of {words} must be, so the file was damaged or changed"
        ) from e


def _whole(value: object, below: int = 2**63) -> int:
    if not isinstance(value, int) or not 0 <= value < below:
        raise Damaged(
            f"the ledger contains {value!r} where a whole number from 0 to {below - 1} must be, so the file "
            "was damaged or changed"
        )
    return value


def _number(value: object, most: float = math.inf) -> float:
    if not isinstance(value, (int, float)) or not math.isfinite(value) or not 0 <= value <= most:
        raise Damaged(
            f"the ledger contains {value!r} where a number from 0 to {most:g} must be, so the file was damaged "
            "or changed"
        )
    return float(value)


def _time(value: object) -> float:
    return _number(value, _LATEST)


def _budget(max_usd: object, warn: object, best_effort: object) -> Budget:
    try:
        return Budget(_number(max_usd), _number(warn), best_effort=bool(_whole(best_effort, 2)))
    except UsageError as e:
        raise Damaged(
            f"the ledger contains max_usd={max_usd!r} and warn={warn!r} where a valid budget must be, so the "
            "file was damaged or changed"
        ) from e


def _plain(value: object, kind: type[T]) -> T:
    try:
        found = json.loads(_text(value))
    except ValueError as e:
        raise Damaged(f"the ledger contains {value!r} where JSON must be, so the file was damaged or changed") from e
    if not isinstance(found, kind):
        raise Damaged(
            f"the ledger contains {value!r} where JSON of type {kind.__name__} must be, so the file was "
            "damaged or changed"
        )
    return found


def _note(value: object) -> DriverNote:
    """Check that a value has the form in which the ledger records a driver, and return it unchanged."""
    if isinstance(value, dict) and _texts(value.get("without", [])):
        match value:
            case {"provider": str(), "class": str(), "settings": dict()}:
                return cast(DriverNote, value)
    raise Damaged(
        f"the ledger contains {value!r} where the settings of a driver must be, so the file was damaged or changed"
    )


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
