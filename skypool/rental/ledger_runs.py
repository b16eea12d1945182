"""The ledger's rows of runs that are handed over to their machines. The functions here work within a transaction."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from dataclasses import replace

from skypool import clock
from skypool.errors import LedgerError, PoolClosed, TakenOver
from skypool.head.states import Claim, Entry, Ledger, Outcome
from skypool.head.steps import merged
from skypool.rental.records import RunEnd, RunRecord, read

Mark = Entry | Callable[[Entry], Entry]
"""What is written over an entry: another entry, or a function that returns one, called with the present one."""


def begin(
    book: sqlite3.Connection,
    session: str,
    claim: Claim,
    times: tuple[float, float, float],
    usd: float,
    known_by: tuple[str, str],
) -> None:
    """Record that the process that runs a pool hands its run over. The end of a run that is recorded only comes nearer.

    Args:
        times: the present time, the written end, and the latest time at which the machine may still be there.
        usd: the most that the pool may cost in all, in US dollars.
        known_by: the digest of the word by which the runner will be known, and the key with which it signs.

    Raises:
        LedgerError: the ledger does not have the pool, or has another claim for it.
        PoolClosed: the pool has ended, or another process is ending it.
        TakenOver: another process has taken the pool over.
    """
    found = read(book, clock.now(), "p.session = ?", session)
    if not found:
        raise LedgerError(f"the ledger has no record of this pool any more (session {session}); end it here")
    (record,) = found
    if record.ending is not None or record.ended is not None:
        raise PoolClosed(
            f"pool {record.pool!r} is being ended by another process, so its run is not handed over; make a new one"
        )
    if record.client.pid != os.getpid():  # a host's name may change
        raise TakenOver(f"pool {record.pool!r} was taken over by {record.client}; go on there, and end this process")
    now, ends, latest = times
    old = record.run
    entry = Entry(Ledger.DETACHING)
    if old is None:
        new = RunRecord(claim, entry, now, ends, latest, usd, *known_by)
    elif old.claim != claim:
        raise LedgerError(
            f"pool {record.pool!r} is of generation {old.claim.generation} of run {old.claim.run!r}, and not of "
            f"generation {claim.generation} of {claim.run!r}; end it with `skypool down {record.pool}`"
        )
    else:
        nearest = min(ends, old.ends), min(latest, old.latest), min(usd, old.worst_usd)
        new = RunRecord(claim, merged(old.entry, entry), old.at, *nearest, *known_by, old.seen)
    _write(book, session, new)


def mark(
    book: sqlite3.Connection,
    session: str,
    change: Mark,
    now: float,
    seen: float | None = None,
    end: RunEnd | None = None,
) -> None:
    """Write over the entry of a run by the rule of `steps.merged`. Do nothing if the pool's run is not handed over.

    `now` is the time since when it is so; an earlier one than that of the present entry counts as that. `seen` is the
    time at which the machine has said it; None if it has not. `end` is what is known of how the run has ended. It is
    kept if the entry then has its outcome, unless more is known. If the entry then says that the machine has ended, its
    account is closed at `now`, and the pool is over. A run that was not started is an exception: its client closes the
    pool.
    """
    found = read(book, clock.now(), "p.session = ?", session)
    old = found[0].run if found else None
    if old is None:
        return
    entry = merged(old.entry, change if isinstance(change, Entry) else change(old.entry))
    last = max((each for each in (old.seen, seen) if each is not None), default=None)
    end = _known(old, entry.outcome, end)
    if (entry, last, end) == (old.entry, old.seen, old.end):
        return
    now = max(now, old.at)
    is_known = entry == old.entry or (entry.outcome is not None and entry.outcome is old.entry.outcome)
    _write(book, session, replace(old, entry=entry, at=old.at if is_known else now, seen=last, end=end))
    if entry.state is Ledger.ENDED and entry.outcome is not Outcome.NOT_STARTED:
        at = min(now, old.latest)
        sql = "UPDATE instances SET ended = max(COALESCE(billed_from, launched), ?) WHERE session = ? AND ended IS NULL"
        book.execute(sql, (at, session))
        sql = "UPDATE orders SET state = 'refused', error = 'its machine has ended' WHERE session = ?"
        book.execute(f"{sql} AND state = 'intended'", (session,))
        book.execute("UPDATE pools SET ended = COALESCE(ended, ?) WHERE session = ?", (at, session))


def _known(old: RunRecord, outcome: Outcome | None, end: RunEnd | None) -> RunEnd | None:
    """Return what is known of the end of a run that has this outcome now, of what was known and what is said."""
    if outcome is None:
        return None
    known = old.end if old.end is not None and old.end.outcome is outcome else RunEnd(outcome)
    if end is None or end.outcome is not outcome or (end.attempts is None and known.attempts is not None):
        return known
    return replace(end, why=end.why or known.why, unsaved=end.unsaved or known.unsaved)


def _write(book: sqlite3.Connection, session: str, run: RunRecord) -> None:
    outcome = None if run.entry.outcome is None else run.entry.outcome.value
    said = run.claim.run, run.claim.generation, run.entry.state.value, outcome
    row = session, *said, run.at, run.ends, run.latest, run.worst_usd, run.heir, run.seen, *_end_row(run.end), run.seal
    book.execute(f"INSERT OR REPLACE INTO runs VALUES ({', '.join('?' * len(row))})", row)


def _end_row(end: RunEnd | None) -> tuple[object, ...]:
    if end is None:
        return "", None, None, None, None, "", ""
    return end.unsaved, end.returncode, end.attempts, end.ended, end.usd, end.limit, end.why
