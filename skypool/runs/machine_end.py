"""`end_machine`: ends the machine of a run that belongs to it, from another process, and proves the end."""

from __future__ import annotations

from skypool import clock
from skypool.head.states import Entry, Outcome
from skypool.head.steps import seen_ended
from skypool.rental.ledger import Ledger
from skypool.rental.reaper import terminate_all
from skypool.rental.receipt import Receipt
from skypool.rental.records import Record
from skypool.runs.asking import ask_machines


def end_machine(record: Record, known: Ledger) -> Receipt:
    """End the machine of a run, with all that is on it, and wait until its provider says that it has ended.

    The machine is asked first how the run stands. If it goes on, it is cancelled by this.

    Returns:
        The receipt. It is final.

    Raises:
        StillRunning: the machine may still run.
        ErrorGroup: it has ended, but other resources of the pool are left.
        UsageError, LedgerError: a driver cannot be made again, or the ledger cannot be read.
    """
    drivers = known.drivers_of(record.pool)
    ask_machines(known, [record])
    there = [each for driver in drivers for each in driver.instances(pool=record.pool)]
    is_there = any(record.has(each) and each.state != "ended" for each in there)
    known.ending(record.pool)
    terminate_all(drivers, record.pool, known)
    if is_there:
        known.mark(record.session, by_user)
    after = known.record(record.session) or record
    return after.receipt(after.ended or clock.now())


def by_user(entry: Entry) -> Entry:
    """Return the entry of a run whose machine its user has ended. An outcome that is known stays."""
    return seen_ended(entry, Outcome.CANCELLED if entry.outcome in (None, Outcome.LOST) else entry.outcome)
