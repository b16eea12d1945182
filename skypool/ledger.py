"""What we have rented, written down before it is rented: one SQLite file for all processes of this user.

A crash at any moment leaves here what was asked for, where, under which token; and the price, so what it cost is known.
Every method is a short transaction of its own, from any thread or process. What must come before renting raises
`LedgerError` where it cannot be written; what comes after only tells of it, as nothing may keep a machine from being
ended, and is written with the next line that can be.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from skypool import clock, registry
from skypool.budget import Budget, Receipt
from skypool.driver import Driver
from skypool.errors import LedgerError, PoolClosed, UsageError, nearest
from skypool.model import Instance, Offer
from skypool.processes import Process
from skypool.records import Intent, Record, newest, read

SHAPE = 1
"""Of the tables; a file with a higher one was written by a newer skypool."""
KEEP = 366 * 86400.0
"""Seconds for which a pool that has ended is kept, for `skypool cost`."""
_PATIENCE = 10.0
_TABLES = """
CREATE TABLE IF NOT EXISTS pools (
    session TEXT PRIMARY KEY, pool TEXT NOT NULL, host TEXT NOT NULL, pid INTEGER NOT NULL, birth TEXT NOT NULL,
    started REAL NOT NULL, beat REAL NOT NULL, lease REAL NOT NULL, max_usd REAL, warn REAL, drivers TEXT NOT NULL,
    ending REAL, ended REAL, error TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS pools_by_name ON pools (pool);
CREATE TABLE IF NOT EXISTS orders (
    session TEXT NOT NULL, token TEXT NOT NULL, at REAL NOT NULL, ranks TEXT NOT NULL, state TEXT NOT NULL,
    error TEXT NOT NULL DEFAULT '', provider TEXT NOT NULL, type TEXT NOT NULL, region TEXT NOT NULL,
    zone TEXT NOT NULL, market TEXT NOT NULL, usd_per_hour REAL NOT NULL, least_billed REAL NOT NULL,
    PRIMARY KEY (session, token)
);
CREATE TABLE IF NOT EXISTS instances (
    session TEXT NOT NULL, provider TEXT NOT NULL, id TEXT NOT NULL, rank INTEGER NOT NULL, token TEXT NOT NULL,
    type TEXT NOT NULL, region TEXT NOT NULL, zone TEXT NOT NULL, market TEXT NOT NULL, usd_per_hour REAL NOT NULL,
    least_billed REAL NOT NULL, launched REAL NOT NULL, ended REAL,
    PRIMARY KEY (session, provider, id)
);
"""
_FACTS = ("type", "region", "zone", "market", "usd_per_hour", "least_billed")
_OF_POOL = "session IN (SELECT session FROM pools WHERE pool = ?) AND provider = ?"
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
        self._lock = threading.RLock()
        self._owed: list[Statement] = []
        self._last: dict[str, Record | None] = {}

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
        now, me = time.time(), Process.this()
        limits = (budget.max_usd, budget.warn) if budget else (None, None)
        notes = json.dumps([registry.noted(each) for each in drivers])
        with self._writing(thoroughly=True) as book:
            for record in read(book, now, "p.pool = ? AND p.ended IS NULL", pool):
                _refuse_taken(record, now)
            _prune(book, now - KEEP)
            row = (session, pool, me.host, me.pid, me.birth, now, now, lease, *limits, notes, None, None, "")
            book.execute(f"INSERT INTO pools VALUES ({', '.join('?' * len(row))})", row)

    def adopt(self, pool: str, *, lease: float | None = None) -> Record | None:
        """The pool is this process's from now on; what was known of it, None where nothing is.

        Args:
            lease: seconds that its machines live on without this process; None leaves it as it is.

        Raises:
            LedgerError: it cannot be written. UsageError: another process holds it.
        """
        now, me = time.time(), Process.this()
        with self._writing() as book:
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

    def intend(self, session: str, token: str, offer: Offer, ranks: Sequence[int]) -> None:
        """An order is about to go out.

        Raises:
            LedgerError: it cannot be written; do not send it. PoolClosed: somebody ends the pool.
        """
        with self._writing() as book:
            found = book.execute("SELECT pool, ending, ended FROM pools WHERE session = ?", (session,)).fetchone()
            if found is None:
                raise LedgerError(f"the ledger {self.file} has no session {session} any more; nothing was rented")
            if found[1] is not None or found[2] is not None:
                raise PoolClosed(f"pool {found[0]!r} is being ended by another process; nothing more is rented for it")
            row = (session, token, clock.now(), json.dumps(list(ranks)), "intended", "", offer.provider, *_facts(offer))
            book.execute(f"INSERT OR REPLACE INTO orders VALUES ({', '.join('?' * len(row))})", row)

    # --- after it: never raises ------------------------------------------------------------------------------

    def rented(self, session: str, token: str, instances: Sequence[Instance]) -> None:
        """The order was carried out: these are its machines."""
        now = clock.now()
        todo: list[Statement] = [_answered(session, token, "rented", "")]
        told = ", ".join(f"COALESCE(?, {fact})" for fact in _FACTS)
        told = told.replace("usd_per_hour)", "usd_per_hour) / ?")  # the price is a slice's, and each host has its share
        hosts = Counter(each.slice for each in instances if each.slice)
        for each in instances:
            type_, region, zone, market, price, least = _facts(each.offer) if each.offer else (None,) * len(_FACTS)
            share = max(1, hosts[each.slice])
            sql = f"INSERT OR IGNORE INTO instances SELECT session, ?, ?, ?, token, {told}, ?, NULL FROM orders"
            facts = type_, region, zone, market, price, share, least
            values = (each.provider, each.id, each.rank, *facts, now, session, token)
            todo.append((f"{sql} WHERE session = ? AND token = ?", values))
        self._note(*todo)

    def refused(self, session: str, token: str, error: str) -> None:
        """The provider said no: there is no machine of this order."""
        self._note(_answered(session, token, "refused", error))

    def ended(self, session: str, provider: str, *ids: str) -> None:
        """These instances have ended, as their provider says."""
        now, marks = clock.now(), ", ".join("?" * len(ids))
        sql = f"UPDATE instances SET ended = ? WHERE session = ? AND provider = ? AND ended IS NULL AND id IN ({marks})"
        self._note((sql, (now, session, provider, *ids)))

    def cleared(self, pool: str, provider: str, seen: Sequence[str] = ()) -> None:
        """The provider has nothing of the pool any more, whoever held it.

        Args:
            seen: instances that were there just now. Others have ended themselves, at the end of their lease at last.
        """
        now, marks = clock.now(), ", ".join("?" * len(seen))
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
            with self._reading() as book:
                found = book.execute("SELECT ending FROM pools WHERE session = ?", (session,)).fetchone()
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

    def _note(self, *todo: Statement) -> None:
        """Write, with what could not be written before; tell if it cannot be, once until it can."""
        with self._lock:
            owed = [*self._owed, *todo]
            try:
                with self._writing(patience=1.0 if self._owed else None) as book:
                    for sql, values in owed:
                        book.execute(sql, values)
            except LedgerError as e:
                if not self._owed:
                    self._tell(f"{e}. Machines are ended all the same; `skypool gc` finds them without the ledger")
                self._owed = owed[-1000:]
            else:
                self._owed = []

    # --- reading ---------------------------------------------------------------------------------------------

    def pools(self, name: str | None = None) -> list[Record]:
        """Every pool of the last year, or those of this name, the oldest first."""
        with self._reading() as book:
            now = clock.now()
            return read(book, now) if name is None else read(book, now, "p.pool = ?", name)

    def record(self, session: str) -> Record | None:
        """One pool, None where it is not known."""
        with self._reading() as book:
            return newest(read(book, clock.now(), "p.session = ?", session))

    def receipt(self, session: str, now: float | None = None) -> Receipt:
        """What the pool's instances cost, until now. Empty where it is not known.

        Where the ledger cannot be read any more, by what it said last: a budget is kept without it, too.
        """
        at = clock.now() if now is None else now
        try:
            self._last[session] = self.record(session)
        except LedgerError:
            if session not in self._last:
                raise
        found = self._last[session]
        return found.receipt(at) if found else Receipt("", (), at)

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
        with self._writing(thoroughly=True) as book:
            book.execute("DELETE FROM pools WHERE session = ''")

    # --- the file --------------------------------------------------------------------------------------------

    @contextmanager
    def _writing(self, patience: float | None = None, thoroughly: bool = False) -> Iterator[sqlite3.Connection]:
        """A transaction; all of it or nothing is written."""
        with self._opened(_PATIENCE if patience is None else patience) as book:
            book.execute("BEGIN IMMEDIATE")
            try:
                if thoroughly and (found := book.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                    raise LedgerError(_damaged(self.file, " ".join(found.split())))
                yield book
                book.execute("COMMIT")
            except BaseException:
                if book.in_transaction:
                    book.execute("ROLLBACK")
                raise

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._opened(_PATIENCE) as book:
            book.execute("BEGIN")
            yield book

    @contextmanager
    def _opened(self, patience: float) -> Iterator[sqlite3.Connection]:
        try:
            if not self.file.exists():
                self.file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                os.close(os.open(self.file, os.O_CREAT | os.O_RDWR, 0o600))
            with closing(sqlite3.connect(self.file, timeout=patience, isolation_level=None)) as book:
                book.execute("PRAGMA synchronous = FULL")
                shape = book.execute("PRAGMA user_version").fetchone()[0]
                if shape > SHAPE:
                    raise LedgerError(f"the ledger {self.file} was written by a newer skypool: update this one")
                if shape < SHAPE:
                    self._make(book)
                yield book
        except (sqlite3.Error, OSError) as e:
            raise LedgerError(_trouble(self.file, e)) from e

    def _make(self, book: sqlite3.Connection) -> None:
        """The tables, once; another process may just be at it."""
        with open(self.file.with_name(self.file.name + ".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if book.execute("PRAGMA user_version").fetchone()[0] < SHAPE:
                book.execute("PRAGMA journal_mode = WAL")
                book.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {SHAPE}; COMMIT")


def _facts(offer: Offer) -> tuple[object, ...]:
    """In the order of `_FACTS`."""
    price, least = float(offer.usd_per_hour), float(offer.least_billed)
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
    for table in ("instances", "orders", "pools"):
        book.execute(
            f"DELETE FROM {table} WHERE session IN (SELECT session FROM pools p WHERE COALESCE(ended, beat) < ? "
            "AND NOT EXISTS (SELECT 1 FROM instances i WHERE i.session = p.session AND i.ended IS NULL))",
            (before,),
        )


def _damaged(file: Path, why: object) -> str:
    return (
        f"the ledger {file} is damaged ({why}), and without one nothing is rented: see what runs with `skypool gc`, "
        f"which needs none, then move its folder away: mv {file.parent} {file.parent}.damaged"
    )


def _trouble(file: Path, error: sqlite3.Error | OSError) -> str:
    """What is the matter with the file, and what to do."""
    code = getattr(error, "sqlite_errorname", "")
    if code.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return _damaged(file, error)
    if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return f"the ledger {file} is locked by another process: see which with `fuser {file}`, and try again"
    if code.startswith("SQLITE_FULL"):
        return f"the ledger {file} cannot be written, its disk is full: make room there"
    return (
        f"the ledger {file} cannot be written ({error}), and without it nothing is rented: make it and its folder "
        f"writable, or set XDG_STATE_HOME to a folder that is"
    )
