"""`note_ends`: records in the ledger how runs have ended whose own machine is this computer."""

from __future__ import annotations

from pathlib import Path

from skypool.errors import SkypoolError
from skypool.head import messages
from skypool.head.states import Entry, Ledger
from skypool.rental import ledger
from skypool.runs.stored import stored
from skypool.safety import user_folders


def note_ends(known: ledger.Ledger) -> None:
    """Record the ends of runs that have stored them on this computer, which may have ended long after their client.

    A stored end that cannot be read is left out. Raises LedgerError if the ledger cannot be read.
    """
    for record in known.open_pools():
        run = record.run
        if run is None or not run.is_given or run.entry.outcome is not None:
            continue
        try:
            status = stored(Path(messages.folder_of(str(user_folders.state()), run.claim)))
        except (OSError, SkypoolError):  # `skypool ps` then shows what the ledger knows
            continue
        if status is not None and status.claim == run.claim:
            known.mark(record.session, Entry(Ledger.DETACHED, status.outcome), status.ended)
