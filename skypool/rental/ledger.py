"""The ledger: a SQLite file that records every machine before it is rented, its price, and its end.

A crash at any moment leaves here what was asked for, where, under which token; and the price, so what it cost is known.
Every method is a short transaction of its own, from any thread or process. What must come before renting raises
`LedgerError` where it cannot be written; what comes after only tells of it, as nothing may keep a machine from being
ended, and is written with the next line that can be.

`ledger_file` has the file and its transactions, `ledger_schema` its tables, `records` what is read from them.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from skypool import clock
from skypool.drivers import registry
from skypool.drivers.contract import Driver
from skypool.errors import LedgerError, PoolClosed, UsageError, nearest
from skypool.model import Instance, Offer
from skypool.processes import Process
from skypool.rental.budget import Budget, Receipt
from skypool.rental.ledger_file import LedgerFile
from skypool.rental.records import Intent, Record, newest, read

KEEP = 366 * 86400.0
"""Seconds for which a pool that has ended is kept, for `skypool cost`."""
_BILLED_FROM = "max({launched}, min(COALESCE(?, {launched}), ?))"
"""Since when a machine is billed: as its provider says, but not before it was asked for and not after it answered,
as clocks differ; where it does not say, since it was asked for."""
_FACTS = ("type", "region", "zone", "market", "usd_per_hour", "least_billed")
"""Columns that say what an order is for; see `_facts`."""
_OF_POOL = "session IN (SELECT session FROM pools WHERE pool = ?) AND provider = ?"
"""Condition for what one provider has of all pools of a name."""
Statement = tuple[str, Sequence[object]]


def _warned(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)


class Ledger:
    """The ledger in one file.

    Args:
        tell: is called, in the thread that wrote, with what the user should know of a line that cannot be written.
    """

    def __init__(self, file: Path, tell: Callable[[str], None] = _warned) -> None:
        self.file = file
        self._tell = tell
        self._file = LedgerFile(file, tell)
        self._lock = threading.RLock()
        self._owed: list[Statement] = []
        self._last: dict[str, Record] = {}

    @classmethod
    def here(cls, tell: Callable[[str], None] = _warned) -> Ledger:
        """This user's, on this machine."""
        import platformdirs  # not on a node, where modules that import skypool are imported too

        return cls(Path(platformdirs.user_state_dir("skypool")) / "ledger" / "ledger.sqlite3", tell)

    # --- before renting: raises --------------------------------------------------------------------------------

    def begin(
        self, pool: str, session: str, *, lease: float, budget: Budget | None = None, drivers: Sequence[Driver] = ()
    ) -> None:
        """A pool of this process begins.

        Raises:
            LedgerError: it cannot be written; rent nothing. UsageError: a pool of that name is there.
        """
        now = time.time()
        me = Process.this()
        limits = (budget.max_usd, budget.warn) if budget else (None, None)
        best_effort = budget is not None and budget.best_effort
        notes = json.dumps([registry.noted(each) for each in drivers])

        def work(book: sqlite3.Connection) -> None:
            for record in read(book, now, "p.pool = ? AND p.ended IS NULL", pool):
                _refuse_taken(record, now)
            _prune(book, now - KEEP)
            client = me.host, me.pid, me.birth
            times = now, now, lease
            row = session, pool, *client, *times, *limits, notes, None, None, "", best_effort
            book.execute(f"INSERT INTO pools VALUES ({', '.join('?' * len(row))})", row)

        self._file.write(work, thoroughly=True, holds=lambda _: session)

    def adopt(self, pool: str, *, lease: float | None = None) -> Record | None:
        """The pool is this process's from now on; what was known of it, None where nothing is.

        Args:
            lease: seconds that its machines live on without this process; None leaves it as it is.

        Raises:
            LedgerError: it cannot be written. UsageError: another process holds it.
        """
        now = time.time()
        me = Process.this()

        def work(book: sqlite3.Connection) -> Record | None:
            record = newest(read(book, now, "p.pool = ? AND p.ended IS NULL", pool))
            if record is None:
                return None
            if record.client_lives(now) and record.client != me:
                raise UsageError(f"pool {pool!r} is held by {record.client}; end that one first")
            book.execute(
                "UPDATE pools SET host = ?, pid = ?, birth = ?, beat = ?, lease = ?, ending = NULL WHERE session = ?",
                (me.host, me.pid, me.birth, now, lease or record.lease, record.session),
            )
            return record

        return self._file.write(work, holds=lambda record: record.session if record else "")

    def intend(self, session: str, token: str, offer: Offer, nodes: Sequence[int]) -> None:
        """An order is about to go out.

        Raises:
            LedgerError: it cannot be written; do not send it. PoolClosed: somebody ends the pool.
        """

        def work(book: sqlite3.Connection) -> None:
            found = book.execute("SELECT pool, ending, ended FROM pools WHERE session = ?", (session,)).fetchone()
            if found is None:
                raise LedgerError(f"the ledger {self.file} has no session {session} any more; nothing was rented")
            if found[1] is not None or found[2] is not None:
                raise PoolClosed(f"pool {found[0]!r} is being ended by another process; nothing more is rented for it")
            now = clock.now()
            row = session, token, now, json.dumps(list(nodes)), "intended", "", offer.provider, *_facts(offer), now
            book.execute(
                f"INSERT INTO orders VALUES ({', '.join('?' * len(row))}) ON CONFLICT (session, token) "
                "DO UPDATE SET state = excluded.state, error = '', sent = excluded.sent, "
                "at = CASE state WHEN 'refused' THEN excluded.at ELSE at END",
                row,
            )

        self._file.write(work)

    # --- after it: never raises ------------------------------------------------------------------------------

    def rented(
        self,
        session: str,
        token: str,
        instances: Sequence[Instance],
        *,
        asked: Mapping[int, float] | None = None,
        waits: bool = False,
    ) -> None:
        """Write down that an order was carried out, and its machines.

        Args:
            asked: when the create of each node was sent; of others it is when the order was sent first.
            waits: whether their provider bills them only once they run (see `billed`).
        """
        self._note(_answered(session, token, "rented", ""), *self._made(session, token, instances, asked or {}, waits))

    def made(
        self,
        session: str,
        token: str,
        instances: Sequence[Instance],
        *,
        asked: Mapping[int, float] | None = None,
        waits: bool = False,
    ) -> None:
        """Write down machines of an order that is still being carried out, as `rented` does."""
        self._note(*self._made(session, token, instances, asked or {}, waits))

    def _made(
        self, session: str, token: str, instances: Sequence[Instance], asked: Mapping[int, float], waits: bool
    ) -> list[Statement]:
        now = clock.now()
        todo = list[Statement]()
        told = ", ".join(f"COALESCE(?, {fact})" for fact in _FACTS)
        told = told.replace("usd_per_hour)", "usd_per_hour) / ?")  # the price is a slice's, and each host has its share
        hosts = Counter(each.slice for each in instances if each.slice)
        for each in instances:
            type_, region, zone, market, price, least = _facts(each.offer) if each.offer else (None,) * len(_FACTS)
            share = max(1, hosts[each.slice])
            since = asked.get(each.node)
            waiting = waits and each.billed_from is None and each.state == "starting"
            billed = "NULL" if waiting else _BILLED_FROM.format(launched="COALESCE(?, at)")
            begins = () if waiting else (since, each.billed_from, since, now)
            row = f"session, ?, ?, ?, token, {told}, COALESCE(?, at), NULL, {billed}"
            sql = f"INSERT OR IGNORE INTO instances SELECT {row}"
            facts = type_, region, zone, market, price, share, least
            values = (each.provider, each.id, each.node, *facts, since, *begins, session, token)
            todo.append((f"{sql} FROM orders WHERE session = ? AND token = ?", values))
        return todo

    def billed(self, session: str, instances: Sequence[Instance], *, since_request: bool = False) -> None:
        """Write down that these instances are billed from now on, or since when their provider says; once each.

        Args:
            since_request: where the provider says nothing, take when it was asked for, not now: nobody looked.
        """
        now = clock.now()
        unsaid = "launched" if since_request else "?"
        sql = f"UPDATE instances SET billed_from = max(launched, min(COALESCE(?, {unsaid}), ?)) "
        sql += "WHERE session = ? AND provider = ? AND id = ? AND billed_from IS NULL AND ended IS NULL"
        self._note(
            *(
                (sql, (each.billed_from, *(() if since_request else (now,)), now, session, each.provider, each.id))
                for each in instances
            )
        )

    def sent(self, session: str, token: str, at: float) -> None:
        """Correct when an order without an answer was sent: what is not known of it was asked for then."""
        self._note(
            ("UPDATE orders SET at = ? WHERE session = ? AND token = ? AND state = 'intended'", (at, session, token))
        )

    def found(
        self, session: str, instances: Sequence[Instance], waits: Collection[str], *, since_request: bool = True
    ) -> None:
        """Write down machines that were found by their tags: those of orders without an answer, and which of them run.

        Args:
            waits: the names of providers that bill a machine only once it runs.
            since_request: take those that run as billed since they were asked for, where their provider does not say.
        """
        orders: dict[tuple[str, str], list[Instance]] = {}
        for each in instances:
            orders.setdefault((each.provider, each.token), []).append(each)
        for (provider, token), made in orders.items():
            self._note(*self._made(session, token, made, {}, provider in waits))
        running = [each for each in instances if each.provider in waits and each.state != "starting"]
        self.billed(session, running, since_request=since_request)

    def repriced(self, session: str, prices: Mapping[tuple[str, str], float]) -> None:
        """Write down what instances cost per hour from now on, by provider and id."""
        now = clock.now()
        todo = list[Statement]()
        where = "WHERE session = ? AND provider = ? AND id = ? AND ended IS NULL AND usd_per_hour != ?"
        for (provider, id_), usd in prices.items():
            which = session, provider, id_, usd
            old = f"INSERT INTO earlier_prices SELECT session, provider, id, ?, usd_per_hour FROM instances {where}"
            todo += [(old, (now, *which)), (f"UPDATE instances SET usd_per_hour = ? {where}", (usd, *which))]
        self._note(*todo)

    def refused(self, session: str, token: str, error: str) -> None:
        """The provider said no: there is no machine of this order."""
        self._note(_answered(session, token, "refused", error))

    def ended(self, session: str, provider: str, *ids: str, at: float | None = None) -> None:
        """Write down that these instances have ended, as their provider says.

        Args:
            at: when they did, in seconds since 1970; None is now.
        """
        now = clock.now()
        marks = ", ".join("?" * len(ids))
        sql = "UPDATE instances SET ended = max(COALESCE(billed_from, launched), min(?, ?))"
        sql += f" WHERE session = ? AND provider = ? AND ended IS NULL AND id IN ({marks})"
        self._note((sql, (now if at is None else at, now, session, provider, *ids)))

    def cleared(self, pool: str, provider: str, seen: Sequence[str] = ()) -> None:
        """The provider has nothing of the pool any more, whoever held it.

        Args:
            seen: instances that were there just now. Others have ended themselves, at the end of their lease at last.
        """
        now = clock.now()
        marks = ", ".join("?" * len(seen))
        at_last = "max(launched, min(?, (SELECT beat + lease FROM pools WHERE pools.session = instances.session)))"
        self._note(
            (f"UPDATE instances SET ended = ? WHERE {_OF_POOL} AND ended IS NULL AND id IN ({marks})",
             (now, pool, provider, *seen)),
            (f"UPDATE instances SET ended = {at_last} WHERE {_OF_POOL} AND ended IS NULL", (now, pool, provider)),
            (f"UPDATE orders SET state = 'refused', error = 'no machine of it was found' WHERE {_OF_POOL} "
             "AND state = 'intended'", (pool, provider)),
        )  # fmt: skip

    def beat(self, session: str) -> bool:
        """The pool is still held, by whoever says so; whether it is still wanted: False when somebody else ends it."""
        self._note(("UPDATE pools SET beat = ? WHERE session = ?", (time.time(), session)))
        try:
            sql = "SELECT ending FROM pools WHERE session = ?"
            found = self._file.read(lambda book: book.execute(sql, (session,)).fetchone())
        except LedgerError:
            return True  # told already; what cannot be read ends no pool
        return found is None or found[0] is None

    def ending(self, pool: str) -> None:
        """This process ends the pool from now on, whoever held it: nothing more is rented for it."""
        me = Process.this()
        sql = "UPDATE pools SET ending = COALESCE(ending, ?), host = ?, pid = ?, birth = ?"
        self._note((f"{sql} WHERE pool = ? AND ended IS NULL", (time.time(), me.host, me.pid, me.birth, pool)))

    def end(self, session: str, error: str = "") -> None:
        """The pool is done. Instances whose end was not told with `ended` stay on record as running."""
        sql = "UPDATE pools SET ended = COALESCE(ended, ?), error = COALESCE(NULLIF(?, ''), error) WHERE session = ?"
        self._note((sql, (clock.now(), error, session)))
        with suppress(LedgerError):
            self.receipt(session)  # what can still be told if the file is damaged later
        if not self._owed:  # else a receipt needs it until these lines are written
            self._file.let_go(session)

    def _note(self, *todo: Statement) -> None:
        """Write, with what could not be written before; tell if it cannot be, once until it can."""
        with self._lock:
            owed = [*self._owed, *todo]

            def work(book: sqlite3.Connection) -> None:
                for sql, values in owed:
                    book.execute(sql, values)

            try:
                self._file.write(work, patience=1.0 if self._owed else None)
            except LedgerError as e:
                if not self._owed:
                    self._tell(f"{e}. Machines are ended all the same; `skypool gc` finds them without the ledger")
                self._owed = owed[-1000:]
            else:
                self._owed = []

    # --- reading ---------------------------------------------------------------------------------------------

    def pools(self, name: str | None = None) -> list[Record]:
        """Every pool of the last year, or those of this name, the oldest first."""
        now = clock.now()
        return self._file.read(lambda book: read(book, now) if name is None else read(book, now, "p.pool = ?", name))

    def record(self, session: str) -> Record | None:
        """One pool, None where it is not known."""
        found = self._file.read(lambda book: newest(read(book, clock.now(), "p.session = ?", session)))
        if found is None and self._file.holds(session):
            self._file.write(lambda book: None)  # its file is a fresh one: what is known of it is written there first
            found = self._file.read(lambda book: newest(read(book, clock.now(), "p.session = ?", session)))
        return found

    def receipt(self, session: str, now: float | None = None) -> Receipt:
        """What the pool's instances cost, until now. Empty where it is not known.

        Where the file cannot be read or written any more, by what this process knows: a budget is kept without it, too.

        Raises:
            LedgerError: it cannot be read, and this process never held the pool.
        """
        at = clock.now() if now is None else now
        try:
            found = self._unwritten(session) or self.record(session)
        except LedgerError:
            found = self._known(session)
            if found is None and session not in self._last:
                raise
        if found is None:
            found = self._last.get(session)
        else:
            self._last[session] = found
        return found.receipt(at) if found else Receipt("", (), at)

    def _unwritten(self, session: str) -> Record | None:
        """Return the pool with the lines that could not be written yet; None if all lines are written."""
        with self._lock:
            return self._known(session) if self._owed else None

    def _known(self, session: str) -> Record | None:
        """Return what this process knows of a pool that it holds, without the file; None if it holds none such."""
        with self._lock, self._file.remembered() as book:
            for sql, values in self._owed:
                book.execute(sql, values)
            return newest(read(book, clock.now(), "p.session = ?", session))

    def spent(self, session: str) -> float:
        """USD until now."""
        return self.receipt(session).usd

    def rate(self, session: str) -> float:
        """USD per hour, now."""
        return self.receipt(session).usd_per_hour

    def open_orders(self, session: str) -> tuple[Intent, ...]:
        """Orders of which nobody knows whether they were carried out."""
        found = self.record(session)
        return found.intents if found else ()

    def drivers_of(self, name: str) -> tuple[Driver, ...]:
        """The drivers of the newest pool of this name, made again without their secrets.

        Raises:
            UsageError: no pool is called so, or a driver cannot be made again. LedgerError: it cannot be read.
        """
        found = newest(self.pools(name))
        if found is None:
            close = nearest(name, {each.pool for each in self.pools()})
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise UsageError(f"the ledger {self.file} knows no pool called {name!r}{hint}")
        return tuple(map(registry.made, found.notes))

    def check(self) -> None:
        """Write nothing, but as if.

        Raises:
            LedgerError: it could not be written.
        """
        self._file.write(lambda book: book.execute("DELETE FROM pools WHERE session = ''"), thoroughly=True)


def _facts(offer: Offer) -> tuple[object, ...]:
    """In the order of `_FACTS`."""
    price = float(offer.usd_per_hour)
    least = float(offer.least_billed)
    return offer.instance_type, offer.region, offer.zone, offer.market, price, least


def _answered(session: str, token: str, state: str, error: str) -> Statement:
    return "UPDATE orders SET state = ?, error = ? WHERE session = ? AND token = ?", (state, error, session, token)


def _refuse_taken(record: Record, now: float) -> None:
    """A name is taken while somebody holds the pool, and while its machines may still be taken over."""
    ways = f"end it with `skypool down {record.pool}`, or take another name"
    if record.client_lives(now):
        doing = "is there already, held by" if record.ending is None else "is just being ended by"
        raise UsageError(f"a pool called {record.pool!r} {doing} {record.client}: {ways}")
    if now < record.lasts and (record.running or record.intents):
        raise UsageError(
            f"a pool called {record.pool!r} was left by {record.client}, and its machines may still run: take it over "
            f"with ComputePool.attach({record.pool!r}), {ways}"
        )


def _prune(book: sqlite3.Connection, before: float) -> None:
    """Forget what ended long ago; what may still run is never forgotten."""
    for table in ("earlier_prices", "instances", "orders", "pools"):
        book.execute(
            f"DELETE FROM {table} WHERE session IN (SELECT session FROM pools p WHERE COALESCE(ended, beat) < ? "
            "AND NOT EXISTS (SELECT 1 FROM instances i WHERE i.session = p.session AND i.ended IS NULL))",
            (before,),
        )
