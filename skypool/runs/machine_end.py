"""`end_machine`: ends the machine of a run that belongs to it, from another process, and proves the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skypool import clock
from skypool.drivers.contract import Driver
from skypool.head.states import Entry, Outcome
from skypool.head.steps import seen_ended
from skypool.rental.ledger import Ledger
from skypool.rental.reaper import terminate_all
from skypool.rental.receipt import Receipt
from skypool.rental.records import Record
from skypool.runs.asking import ask_machines


def _silently(text: str) -> None:
    """Tell nothing."""


def end_machine(
    record: Record, known: Ledger, drivers: Sequence[Driver] = (), say: Callable[[str], None] = _silently
) -> Receipt:
    """End the machine of a run, with all that is on it, and wait until its provider says that it has ended.

    The machine is asked first how the run stands. If it goes on, it is cancelled by this.

    Args:
        drivers: the drivers of the pool; () for those that the ledger has noted.
        say: called with each line of progress.

    Returns:
        The receipt. It is final.

    Raises:
        StillRunning: the machine may still run.
        ErrorGroup: it has ended, but other resources of the pool are left.
        UsageError, LedgerError: a driver cannot be made again, or the ledger cannot be read.
    """
    drivers = drivers or known.drivers_of(record.pool)
    ask_machines(known, [record])
    there = [each for driver in drivers for each in driver.instances(pool=record.pool)]
    is_there = any(record.has(each) and each.state != "ended" for each in there)
    known.ending(record.pool)
    terminate_all(drivers, record.pool, known, say=say)
    if is_there:
        known.mark(record.session, lambda entry: seen_ended(entry, by_user(entry)))
    after = known.record(record.session) or record
    return after.receipt(after.ended or clock.now())


def by_user(entry: Entry) -> Outcome:
    """Return the outcome of a run whose machine its user has ended. One that is known stays."""
    return Outcome.CANCELLED if entry.outcome in (None, Outcome.LOST) else entry.outcome
