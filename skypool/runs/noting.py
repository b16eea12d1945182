"""`record_found`: records in the ledger what the machine of a run has said of it."""

from __future__ import annotations

import time
from functools import partial

from skypool.head.states import Entry, Ledger
from skypool.head.steps import seen, seen_cut_off
from skypool.rental import ledger
from skypool.runs.machine_look import Found


def record_found(known: ledger.Ledger, session: str, found: Found) -> None:
    """Record what a machine with the row of the run has said. Raises LedgerError if the ledger cannot be written."""
    now = time.time()
    if (end := found.end) is not None:
        at = now if end.ended is None else end.ended
        known.mark(session, Entry(Ledger.DETACHED, end.outcome), at, seen=now, end=end)
    elif found.has_agent:
        known.mark(session, partial(seen, is_committed=True), seen=now)
    else:
        known.mark(session, partial(seen_cut_off, has_row=True, stored=None), seen=now)
