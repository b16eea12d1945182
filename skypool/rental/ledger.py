"""The ledger: a local SQLite file that records every rented machine, its price, and its end.

Each order is recorded before it is sent. So after a crash at any moment the file still has what was ordered, where,
under which token, and at what price. The machines can then be found, and their cost is known.

Every method of `Ledger` is a short transaction of its own, and may be called from any thread or process. Methods that
are called before renting raise `LedgerError` if the file cannot be written. Methods that are called after renting do
not raise, because nothing may keep a machine from being terminated. If they cannot write a change, they tell the user,
keep it in memory, and write it together with the next one.

`ledger_file` has the file and its transactions, `ledger_schema` its tables, and `records` the objects that are read
from it.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from skypool import clock, tracebacks
from skypool.drivers import registry
from skypool.drivers.contract import Driver
from skypool.errors import LedgerError, PoolClosed, UsageError, nearest
from skypool.head.states import Claim
from skypool.model import Instance, Offer
from skypool.processes import Process, is_stopped
from skypool.rental import ledger_runs
from skypool.rental.budget import Budget
from skypool.rental.ledger_file import LedgerFile
from skypool.rental.ledger_schema import put_back
from skypool.rental.receipt import IdleSpan, Receipt
from skypool.rental.records import Intent, Record, RunEnd, as_rows, newest, read
from skypool.safety import user_folders

KEEP = 366 * 86400.0
"""Seconds for which a pool that has ended is kept, for `skypool cost`."""
_BILLED_FROM = "max({launched}, min(COALESCE(?, {launched}), ?))"
"""SQL for the time since when a machine is billed, as its provider says. Clocks differ, so a time before the request
counts as the time of the request, and a time after the answer counts as the time of the answer. If the provider does
not say, the time of the request is used."""
_FACTS = ("type", "region", "zone", "market", "usd_per_hour", "least_billed")
"""Columns of the ledger's tables that describe the offer of an order or of an instance."""
_OF_POOL = "session IN (SELECT session FROM pools WHERE pool = ?) AND provider = ?"
"""SQL condition for the rows of one provider in all pools of a name."""
_KEPT = 20_000
"""Largest number of changes that are kept in memory while the file cannot be written; older ones are dropped. A pool
makes up to four changes for each machine, and one at each sign of life."""
Statement = tuple[str, Sequence[object]]
"""An SQL statement and its parameters."""
Change = Statement | Callable[[sqlite3.Connection], None]
"""A change of the ledger: a statement, or a function that makes the change within a transaction."""


_OPEN = """(p.ended IS NULL
    OR EXISTS (SELECT 1 FROM instances one WHERE one.session = p.session AND one.ended IS NULL)
    OR EXISTS (SELECT 1 FROM orders one WHERE one.session = p.session AND one.state = 'intended'))"""
"""The SQL condition for pools that run, or of which something may be left."""


class Ledger:
    """The ledger in one file: pools, their orders and their machines.

    The argument `session` of the methods is the id of one run of a pool, and `token` identifies an order. Points in
    time are in seconds since 1970.

    Args:
        file: path of the SQLite file. It is made when it is first used.
        tell: called with a notice for the user, in the thread that wrote, if a change cannot be written or the file was
            damaged. By default it issues a RuntimeWarning.
    """

    def __init__(self, file: Path, tell: Callable[[str], None] = tracebacks.warn) -> None:
        self.file = file
        self._tell = tell
        self._file = LedgerFile(file, tell)
        self._lock = threading.RLock()
        self._owed: list[Change] = []
        self._last: dict[str, Record] = {}

    @classmethod
    def here(cls, tell: Callable[[str], None] = tracebacks.warn) -> Ledger:
        """Return the ledger of this user on this machine, in the user's state folder. Nothing is opened yet."""
        return cls(user_folders.state() / "ledger" / "ledger.sqlite3", tell)

    # --- before renting: methods that raise if nothing can be written ------------------------------------------

    def begin(
        self,
        pool: str,
        session: str,
        *,
        lease: float,
        budget: Budget | Callable[[Sequence[Record]], Budget | None] | None = None,
        lifetime: float | None = None,
        drivers: Sequence[Driver] = (),
    ) -> None:
        """Record that this process begins a pool. Call this before anything is rented.

        Records of pools that ended more than a year ago are deleted. Secrets of drivers are not recorded.

        Args:
            lease: seconds for which the pool's machines live on without this process.
            budget: the budget; or a function that returns it, called with the pools that have not ended, while no other
                process can write. What it raises is raised here, and nothing is recorded.
            lifetime: seconds from the beginning of the pool's costs to its end; None for no limit.

        Raises:
            LedgerError: the ledger cannot be written; rent nothing.
            UsageError: a pool of that name is running, is being ended, or has lost its process while its machines may
                still run.
        """
        now = time.time()
        me = Process.this()
        notes = json.dumps([registry.noted(each) for each in drivers])

        def work(book: sqlite3.Connection) -> None:
            for record in read(book, now, "p.pool = ? AND p.ended IS NULL", pool):
                _refuse_taken(record, now)
            limit = budget(read(book, now, "p.ended IS NULL")) if callable(budget) else budget
            limits = (limit.max_usd, limit.warn) if limit else (None, None)
            best_effort = limit is not None and limit.best_effort
            _prune(book, now - KEEP)
            client = me.host, me.pid, me.birth
            times = now, now, lease
            row = session, pool, *client, *times, *limits, notes, None, None, "", best_effort, None, lifetime
            book.execute(f"INSERT INTO pools VALUES ({', '.join('?' * len(row))})", row)

        self._file.write(work, thoroughly=True, holds=lambda _: session)

    def adopt(self, pool: str, *, lease: float | None = None) -> Record | None:
        """Record that this process takes over the newest pool of this name that has not ended.

        If another process had begun to end the pool and is gone, the pool no longer counts as being ended. The process
        that runs the pool must be gone, or suspended, as by Ctrl-Z. `lease` is a new lease in seconds; None or 0 keeps
        the old one.

        Returns:
            The pool's record before the change; None if there is no such pool.

        Raises:
            LedgerError: the ledger cannot be written.
            UsageError: another process runs the pool or is ending it, or its run was handed over to its machine.
        """
        now = time.time()
        me = Process.this()

        def work(book: sqlite3.Connection) -> Record | None:
            record = newest(read(book, now, "p.pool = ? AND p.ended IS NULL", pool))
            if record is None:
                return None
            if record.is_kept(now):
                raise UsageError(
                    f"run {pool!r} belongs to its machine, or was just given to it, so no process can take it over; "
                    f"`skypool ps` shows it, and `skypool down {pool}` ends it"
                )
            owner = record.client
            # one that is stopped, as by Ctrl-Z, may be replaced: the nodes decide, and refuse it when it goes on
            is_away = owner.host == me.host and record.ending is None and is_stopped(owner.pid)
            if record.client_lives(now) and owner != me and not is_away:
                raise UsageError(
                    f"pool {pool!r} is still run by {owner}; end that process before you take the pool over"
                )
            book.execute(
                "UPDATE pools SET host = ?, pid = ?, birth = ?, beat = ?, lease = ?, ending = NULL, stays = NULL "
                "WHERE session = ?",
                (me.host, me.pid, me.birth, now, lease or record.lease, record.session),
            )
            return record

        return self._file.write(work, holds=lambda record: record.session if record else "")

    def receive(self, record: Record, tokens: Mapping[tuple[str, str], str]) -> None:
        """Record that this process owns a pool from now on, which another process has handed over.

        Args:
            record: the pool's record in the ledger of its former owner.
            tokens: the tokens of the orders that made its instances, by (provider, id of the instance).

        Raises:
            LedgerError: the ledger cannot be written.
            UsageError: a pool of that name is running here, or its machines may still run.
        """
        now = time.time()
        rows = as_rows(replace(record, client=Process.this(), beat=now), tokens)

        def work(book: sqlite3.Connection) -> None:
            for other in read(book, now, "p.pool = ? AND p.ended IS NULL", record.pool):
                _refuse_taken(other, now)
            put_back(book, record.session, rows)

        self._file.write(work, thoroughly=True, holds=lambda _: record.session)

    def give_back(self, record: Record) -> None:
        """Undo `adopt`, because the pool could not be taken over. Does not raise.

        `record` is what `adopt` has returned.
        """
        former = record.client
        values = former.host, former.pid, former.birth, record.beat, record.lease, record.ending, record.stays
        me = Process.this()
        sql = "UPDATE pools SET host = ?, pid = ?, birth = ?, beat = ?, lease = ?, ending = ?, stays = ? "
        sql += "WHERE session = ? AND host = ? AND pid = ? AND birth = ? AND ending IS NULL AND ended IS NULL"
        self._note((sql, (*values, record.session, me.host, me.pid, me.birth)))
        self._file.let_go(record.session)

    def intend(self, session: str, token: str, offer: Offer, nodes: Sequence[int]) -> None:
        """Record that an order is about to be sent. Call this before each attempt to send it.

        An order that is recorded already counts as unanswered again. It keeps the time when it was first sent, unless
        the provider had refused it.

        Raises:
            LedgerError: the ledger cannot be written, or does not have the session; do not send the order.
            PoolClosed: the pool has ended, or another process is ending it; do not send the order.
        """

        def work(book: sqlite3.Connection) -> None:
            found = book.execute("SELECT pool, ending, ended FROM pools WHERE session = ?", (session,)).fetchone()
            if found is None:
                raise LedgerError(
                    f"skypool's ledger {self.file} has no record of this pool any more (session {session}), so "
                    "nothing was rented; start a new pool"
                )
            if found[1] is not None or found[2] is not None:
                raise PoolClosed(
                    f"pool {found[0]!r} is being ended by another process, so no more machines are rented for "
                    "it; make a new ComputePool"
                )
            now = clock.now()
            asked = session, token, now, json.dumps(list(nodes)), "intended", "", offer.provider
            row = *asked, *_facts(offer), now, float(offer.start_usd)
            book.execute(
                f"INSERT INTO orders VALUES ({', '.join('?' * len(row))}) ON CONFLICT (session, token) "
                "DO UPDATE SET state = excluded.state, error = '', sent = excluded.sent, "
                "at = CASE state WHEN 'refused' THEN excluded.at ELSE at END",
                row,
            )

        self._file.write(work)

    def hand_over(
        self,
        session: str,
        claim: Claim,
        *,
        ends: float,
        latest: float,
        worst_usd: float,
        heir: str = "",
        seal: str = "",
    ) -> None:
        """Record that this process, which runs the pool, hands its run over to its machine. Call this before it begins.

        From now on, nothing but its user ends the machine before `latest`. If this is recorded already, the nearer end
        is kept.

        Args:
            claim: the run and its generation.
            ends: the written end: when the machine's guard ends the machine in any case, by the wall clock.
            latest: the latest time at which the machine may still be there, by the wall clock.
            worst_usd: the most that the pool may cost in all, in US dollars.
            heir: the digest of the word by which the runner will be known, as from `messages.heir_digest`. Without it,
                nobody can tell later that a row or a stored end is of this hand-over.
            seal: the key with which the runner signs what it keeps in buckets, as from `messages.seal_key`.

        Raises:
            LedgerError: the ledger cannot be written, does not have the pool, or has another claim for it.
            PoolClosed: the pool has ended, or another process is ending it.
            TakenOver: another process has taken the pool over.
        """
        times = time.time(), ends, latest
        self._file.write(lambda book: ledger_runs.begin(book, session, claim, times, worst_usd, (heir, seal)))

    # --- after renting: methods that never raise -------------------------------------------------------------

    def mark(
        self,
        session: str,
        change: ledger_runs.Mark,
        at: float = math.inf,
        *,
        seen: float | None = None,
        end: RunEnd | None = None,
    ) -> None:
        """Write over the entry of a pool's run that is handed over, by the rule of `steps.merged`. Does not raise.

        The entry only goes forward, whoever writes. If it then says that the machine has ended, the account of the
        machine is closed, and the pool is over. A pool whose run is not handed over is not changed.

        Args:
            change: an entry, or a function that returns one, such as `steps.seen_ended`. It is called with the present
                entry, in the same transaction.
            at: since when it is so, in seconds since 1970; a time in the future, as by default, counts as now.
            seen: when the machine has said it, in seconds since 1970; None if it has not.
            end: what is known of how the run has ended; None for nothing but the outcome of the entry.
        """
        now = min(at, time.time())
        self._note(lambda book: ledger_runs.mark(book, session, change, now, seen, end))

    def rented(
        self,
        session: str,
        token: str,
        instances: Sequence[Instance],
        *,
        asked: Mapping[int, float] | None = None,
        waits: bool = False,
    ) -> None:
        """Record that the provider carried out an order, and the machines that it made. Does not raise.

        Machines that are recorded already keep their records. The price of a slice is divided equally among its
        machines.

        Args:
            asked: the time when the request for each node was sent, by its number. Other nodes get the time when the
                order was first sent.
            waits: True if the provider bills a machine only once it runs.
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
        """Record machines of an order that is not answered yet. Does not raise.

        Machines that are recorded already keep their records. The price of a slice is divided equally among its
        machines.

        Args:
            asked: the time when the request for each node was sent, by its number. Other nodes get the time when the
                order was first sent.
            waits: True if the provider bills a machine only once it runs.
        """
        self._note(*self._made(session, token, instances, asked or {}, waits))

    def _made(
        self, session: str, token: str, instances: Sequence[Instance], asked: Mapping[int, float], waits: bool
    ) -> list[Statement]:
        """Return an SQL statement for each machine of an order, which records the machine unless it is recorded."""
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
            row = f"session, ?, ?, ?, token, {told}, COALESCE(?, at), NULL, {billed}, 0, 0, 0, 1"
            row = f"{row}, COALESCE(?, start_usd) / ?"
            sql = f"INSERT OR IGNORE INTO instances SELECT {row}"
            facts = type_, region, zone, market, price, share, least
            start = float(each.offer.start_usd) if each.offer else None
            values = (each.provider, each.id, each.node, *facts, since, *begins, start, share, session, token)
            todo.append((f"{sql} FROM orders WHERE session = ? AND token = ?", values))
        return todo

    def billed(self, session: str, instances: Sequence[Instance], *, since_request: bool = False) -> None:
        """Record since when these instances are billed: since `billed_from`, or now if it is None. Does not raise.

        Instances that are billed already, or have ended, are not changed. If `since_request` is True, an instance
        without `billed_from` is billed since the time of the request instead of now.
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
        """Correct the time when an open order was sent. Does not raise.

        Machines of the order that are found later get this time as the time of their launch.
        """
        self._note(
            ("UPDATE orders SET at = ? WHERE session = ? AND token = ? AND state = 'intended'", (at, session, token))
        )

    def found(
        self, session: str, instances: Sequence[Instance], waits: Collection[str], *, since_request: bool = True
    ) -> None:
        """Record machines that were found by their tags, and since when the running ones are billed. Does not raise.

        They may belong to orders without an answer.

        Args:
            waits: the providers that bill a machine only once it runs.
            since_request: the time that counts if such a provider does not tell since when it bills a machine: True
                for the time of the request, False for now.
        """
        orders: dict[tuple[str, str], list[Instance]] = {}
        for each in instances:
            orders.setdefault((each.provider, each.token), []).append(each)
        for (provider, token), made in orders.items():
            self._note(*self._made(session, token, made, {}, provider in waits))
        running = [each for each in instances if each.provider in waits and each.state != "starting"]
        self.billed(session, running, since_request=since_request)

    def repriced(self, session: str, prices: Mapping[tuple[str, str], float]) -> None:
        """Record new prices of instances, valid from now on, in US dollars per hour by (provider, id). Does not raise.

        Earlier prices are kept with the time of the change. Instances that have ended are not changed.
        """
        now = clock.now()
        todo = list[Statement]()
        where = "WHERE session = ? AND provider = ? AND id = ? AND ended IS NULL AND usd_per_hour != ?"
        for (provider, id_), usd in prices.items():
            which = session, provider, id_, usd
            old = f"INSERT INTO earlier_prices SELECT session, provider, id, ?, usd_per_hour FROM instances {where}"
            todo += [(old, (now, *which)), (f"UPDATE instances SET usd_per_hour = ? {where}", (usd, *which))]
        self._note(*todo)

    def idle(self, session: str, spans: Mapping[tuple[str, str], IdleSpan]) -> None:
        """Record for how long instances were idle in a span of time, and if they are idle afterwards. Does not raise.

        `spans` has the keys (provider, id of the instance). If the last record of an instance says that it was idle
        afterwards, the time from then to the span counts as idle, too. Instances that are not known, or were recorded
        by an older skypool, are not changed.
        """
        if not spans:
            return
        try:
            lines = self.receipt(session).lines
        except LedgerError:
            return  # the user was told of it already; the next span begins where the last record ends
        sql = "UPDATE instances SET idle_at = ?, idle_seconds = ?, idle_usd = ?, is_idle = ? "
        sql += "WHERE session = ? AND provider = ? AND id = ?"
        todo = list[Statement]()
        for line in lines:
            span = spans.get((line.provider, line.id))
            if span is not None and line.idle_at is not None:
                new = line.idled(span)
                values = new.idle_at, new.idle_seconds_then, new.idle_usd_then, new.is_idle
                todo.append((sql, (*values, session, line.provider, line.id)))
        if todo:
            self._note(*todo)

    def refused(self, session: str, token: str, error: str) -> None:
        """Record that the provider refused an order, so that no machine of it exists. Does not raise."""
        self._note(_answered(session, token, "refused", error))

    def ended(self, session: str, provider: str, *ids: str) -> None:
        """Record that these instances have ended now. Instances on record as ended are not changed. Does not raise."""
        now = clock.now()
        self.ended_at(session, provider, dict.fromkeys(ids, now))

    def ended_at(self, session: str, provider: str, times: Mapping[str, float]) -> None:
        """Record when instances have ended, by their ids. Instances on record as ended are not changed. Does not raise.

        A time in the future counts as now. A time before the beginning of billing counts as that beginning. If billing
        has not begun, a time before the launch counts as the time of the launch.
        """
        now = clock.now()
        sql = "UPDATE instances SET ended = max(COALESCE(billed_from, launched), min(?, ?))"
        sql += " WHERE session = ? AND provider = ? AND ended IS NULL AND id = ?"
        if times:
            self._note(*((sql, (at, now, session, provider, id_)) for id_, at in times.items()))

    def cleared(self, pool: str, provider: str, seen: Sequence[str] = ()) -> None:
        """Record that a provider has no machines of the pools of this name any more, whichever process ran the pools.

        All instances of these pools at this provider count as ended. `seen` has the ids of those that existed just now:
        they ended now. All others ended when their pool's lease was over, or now if it is not over yet; those of a run
        that was handed over, at the latest time at which they may have been there. Open orders count as refused. Does
        not raise.
        """
        now = clock.now()
        marks = ", ".join("?" * len(seen))
        at_last = (
            "max(launched, min(?, COALESCE("
            "(SELECT latest FROM runs WHERE runs.session = instances.session AND outcome IS NOT 'not started'), "
            "(SELECT COALESCE(stays, beat + lease) FROM pools WHERE pools.session = instances.session))))"
        )
        self._note(
            (f"UPDATE instances SET ended = ? WHERE {_OF_POOL} AND ended IS NULL AND id IN ({marks})",
             (now, pool, provider, *seen)),
            (f"UPDATE instances SET ended = {at_last} WHERE {_OF_POOL} AND ended IS NULL", (now, pool, provider)),
            (f"UPDATE orders SET state = 'refused', error = 'no machine of it was found' WHERE {_OF_POOL} "
             "AND state = 'intended'", (pool, provider)),
        )  # fmt: skip

    def beat(self, session: str) -> None:
        """Record that the process that runs the pool is alive. Does not raise."""
        self._note(("UPDATE pools SET beat = ? WHERE session = ?", (time.time(), session)))

    def standing(self, session: str) -> tuple[bool, Process | None]:
        """Return (True if a process has begun to end the pool, the process that has taken the pool over or None).

        If the first is True, the second is None. Returns (False, None) if the ledger cannot be read or does not have
        the pool. Does not raise.
        """
        sql = "SELECT ending, ended, host, pid, birth FROM pools WHERE session = ?"
        try:
            found = self._file.read(lambda book: book.execute(sql, (session,)).fetchone())
        except LedgerError:
            return False, None  # the user was told already; an unreadable file must not end a pool
        if found is None:
            return False, None
        ending, ended, *owner = found
        is_own = owner[1] == os.getpid()  # a host's name may change
        return ending is not None, None if ending is not None or ended is not None or is_own else Process(*owner)

    def ending(self, pool: str) -> None:
        """Record that this process begins to end the pools of this name, so that no process rents more for them.

        From now on, this process is recorded as the process of these pools. If a process has begun to end a pool
        already, the recorded time of that is kept. Pools that have ended are not changed. Does not raise.
        """
        me = Process.this()
        sql = "UPDATE pools SET ending = COALESCE(ending, ?), host = ?, pid = ?, birth = ?"
        self._note((f"{sql} WHERE pool = ? AND ended IS NULL", (time.time(), me.host, me.pid, me.birth, pool)))

    def leave(self, session: str, until: float) -> None:
        """Record that this process leaves a pool, whose machines stay until this time. Does not raise.

        Another process may take the pool over at once.
        """
        sql = "UPDATE pools SET stays = ? WHERE session = ? AND ending IS NULL AND ended IS NULL"
        self._note((sql, (until, session)))

    def end_stay(self, session: str) -> bool:
        """Record that this process begins to end a pool whose machines stayed after its `with` block.

        Return False, and record nothing, if another process has taken the pool over, is ending it or has ended it. May
        raise LedgerError.
        """
        me = Process.this()
        sql = "UPDATE pools SET ending = ?, host = ?, pid = ?, birth = ? WHERE session = ?"
        sql += " AND stays IS NOT NULL AND ending IS NULL AND ended IS NULL"
        values = time.time(), me.host, me.pid, me.birth, session
        return self._file.write(lambda book: book.execute(sql, values).rowcount == 1)

    def end(self, session: str, error: str = "") -> None:
        """Record that a pool is over. Does not raise.

        Instances that were not recorded as ended stay on record as running. If the end of the pool was recorded before,
        its time is kept. `error` is the error that ended the pool; if it is "", an error that was recorded is kept.
        """
        sql = "UPDATE pools SET ended = COALESCE(ended, ?), error = COALESCE(NULLIF(?, ''), error) WHERE session = ?"
        self._note((sql, (clock.now(), error, session)))
        with suppress(LedgerError):
            self.receipt(session)  # keeps it in memory, in case the file is damaged later
        if not self._owed:  # unwritten changes need the rows for a receipt
            self._file.let_go(session)

    def _note(self, *todo: Change) -> None:
        """Make changes of the file, after earlier ones that failed. If this fails, keep them in memory."""
        with self._lock:
            owed = [*self._owed, *todo]

            def work(book: sqlite3.Connection) -> None:
                for each in owed:
                    _make(book, each)

            try:
                self._file.write(work, patience=1.0 if self._owed else None)
            except LedgerError as e:
                if not self._owed:  # the first failure since a write has succeeded
                    self._tell(f"{e}. Machines are ended all the same; `skypool gc` finds them without the ledger")
                self._owed = owed[-_KEPT:]
            else:
                self._owed = []

    # --- reading ---------------------------------------------------------------------------------------------

    def pools(self, name: str | None = None) -> list[Record]:
        """Return the recorded pools of this name, or all pools for None, the oldest first. May raise LedgerError.

        Pools that ended over a year ago may be missing.
        """
        now = clock.now()
        return self._file.read(lambda book: read(book, now) if name is None else read(book, now, "p.pool = ?", name))

    def open_pools(self) -> list[Record]:
        """Return the pools that have not ended, or have machines or open orders left, the oldest first.

        Pools that ended long ago are not read, so this is quick also with a long history. May raise LedgerError.
        """
        return self._file.read(lambda book: read(book, clock.now(), _OPEN))

    def record(self, session: str) -> Record | None:
        """Return the record of a pool by its session; None if the ledger does not have it. May raise LedgerError.

        If the ledger's file was replaced while this process runs the pool, the pool is first written into the new file.
        """
        found = self._file.read(lambda book: newest(read(book, clock.now(), "p.session = ?", session)))
        if found is None and self._file.holds(session):
            self._file.write(lambda book: None)  # the file is a fresh one; any write restores the pool's rows in it
            found = self._file.read(lambda book: newest(read(book, clock.now(), "p.session = ?", session)))
        return found

    def next_generation(self, run: str) -> int:
        """Return the generation of the next machine that gets a run of this name. May raise LedgerError.

        A name that was used before goes on counting, so no machine takes a run for an earlier one of its name.
        """
        sql = "SELECT COALESCE(MAX(generation), 0) + 1 FROM runs WHERE run = ?"
        [generation] = self._file.read(lambda book: book.execute(sql, (run,)).fetchone())
        return int(generation)

    def receipt(self, session: str, now: float | None = None) -> Receipt:
        """Return what a pool's instances cost until the time `now`, or until this moment for None.

        Times are in seconds since 1970. The receipt has no lines if the pool is not known. If the ledger cannot be read
        or written, the copy of the pool in the memory of this process is used, so that budgets work without the file.
        Raises LedgerError if there is no such copy either.
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
        """Return the record of a pool from memory if the file lacks some changes; otherwise None."""
        with self._lock:
            return self._known(session) if self._owed else None

    def _known(self, session: str) -> Record | None:
        """Return the record of a pool that this process runs from memory, with changes that the file lacks."""
        with self._lock, self._file.remembered() as book:
            for each in self._owed:
                _make(book, each)
            return newest(read(book, clock.now(), "p.session = ?", session))

    def spent(self, session: str) -> float:
        """Return what a pool has cost so far, in US dollars; 0 if the pool is not known.

        Raises LedgerError if neither the ledger nor this process's memory can tell.
        """
        return self.receipt(session).usd

    def rate(self, session: str) -> float:
        """Return the current price of a pool in US dollars per hour; 0 if the pool is not known.

        Instances that have ended, or are not billed yet, do not count. Raises LedgerError if neither the ledger nor
        this process's memory can tell.
        """
        return self.receipt(session).usd_per_hour

    def open_orders(self, session: str) -> tuple[Intent, ...]:
        """Return a pool's open orders, sorted by time; () if the pool is not known. May raise LedgerError."""
        found = self.record(session)
        return found.intents if found else ()

    def drivers_of(self, name: str) -> tuple[Driver, ...]:
        """Make the drivers of the newest pool of this name again, without secrets, and return them.

        A pool that has not ended is preferred to one that has. As secrets are never recorded, each driver takes its
        credentials from the environment.

        Raises:
            UsageError: no pool has this name, or a driver cannot be made again. The message suggests similar names.
            LedgerError: the ledger cannot be read.
        """
        found = newest(self.pools(name))
        if found is None:
            close = nearest(name, {each.pool for each in self.pools()})
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise UsageError(
                f"there is no pool called {name!r} in skypool's ledger {self.file}; `skypool ps` lists the "
                f"running pools{hint}"
            )
        return tuple(map(registry.made, found.notes))

    def check(self) -> None:
        """Check the whole ledger file for damage. Raise LedgerError if it cannot be written.

        A damaged file is renamed, a fresh file takes its place, and the user is told.
        """
        self._file.write(lambda book: book.execute("DELETE FROM pools WHERE session = ''"), thoroughly=True)


def _make(book: sqlite3.Connection, change: Change) -> None:
    if callable(change):
        change(book)
    else:
        book.execute(*change)


def _facts(offer: Offer) -> tuple[object, ...]:
    """Return the columns of a ledger row that describe an offer, in the order of `_FACTS`."""
    price = float(offer.usd_per_hour)
    least = float(offer.least_billed)
    return offer.instance_type, offer.region, offer.zone, offer.market, price, least


def _answered(session: str, token: str, state: str, error: str) -> Statement:
    return "UPDATE orders SET state = ?, error = ? WHERE session = ? AND token = ?", (state, error, session, token)


def _refuse_taken(record: Record, now: float) -> None:
    """Raise UsageError if a new pool cannot have this pool's name: a process runs or ends it, or may take it over."""
    if record.client_lives(now):
        doing = "already exists and is run by" if record.ending is None else "is being ended by"
        raise UsageError(
            f"a pool called {record.pool!r} {doing} {record.client}: end it with `skypool down {record.pool}`, "
            "or choose another name"
        )
    if record.is_kept(now) and record.running:
        is_over = record.run is not None and record.run.entry.outcome is not None
        goes_on = "is over, and its machine may still be there" if is_over else "goes on on its machine"
        raise UsageError(
            f"a run called {record.pool!r} {goes_on}: look at it with `skypool ps`, end it with `skypool down "
            f"{record.pool}`, or choose another name"
        )
    if now < record.lasts and (record.running or record.intents):
        raise UsageError(
            f"a pool called {record.pool!r} was left behind by {record.client}, and its machines may still "
            f"run: take it over with ComputePool.attach({record.pool!r}), end it with `skypool down "
            f"{record.pool}`, or choose another name"
        )


def _prune(book: sqlite3.Connection, before: float) -> None:
    """Delete pools that ended before this time, or gave their last sign of life then, unless machines may still run."""
    for table in ("runs", "earlier_prices", "instances", "orders", "pools"):
        book.execute(
            f"DELETE FROM {table} WHERE session IN (SELECT session FROM pools p WHERE COALESCE(ended, beat) < ? "
            "AND NOT EXISTS (SELECT 1 FROM instances i WHERE i.session = p.session AND i.ended IS NULL))",
            (before,),
        )
