"""`note_ends`: records in the ledger how runs have ended whose own machine is this computer."""

from __future__ import annotations

from pathlib import Path

from skypool.errors import SkypoolError
from skypool.head import messages, rows
from skypool.processes import host_name
from skypool.rental import ledger
from skypool.runs.machine_look import Found
from skypool.runs.noting import record_found
from skypool.runs.stored import stored
from skypool.safety import user_folders


def note_ends(known: ledger.Ledger) -> None:
    """Record the ends of runs that have stored them on this computer, which may have ended long after their client.

    An end counts if the row beside it is of the same hand-over as in the ledger, so not one of an earlier run of that
    name, or of one that belongs to another machine. A run without an end was interrupted if this computer was rebooted
    since. What cannot be read is left out. Raises LedgerError if the ledger cannot be read.
    """
    for record in known.open_pools():
        run = record.run
        if run is None or not run.is_given or run.entry.outcome is not None:
            continue
        if record.client.host != host_name():  # which may have the same home
            continue
        folder = Path(messages.folder_of(str(user_folders.state()), run.claim))
        try:
            row, status = rows.read(str(folder)), stored(folder)
        except (OSError, SkypoolError):  # `skypool ps` then shows what the ledger knows
            continue
        if row is None or (row.claim, row.heir) != (run.claim, run.heir):
            continue
        was_rebooted = "" not in (row.boot, boot := rows.boot_id()) and row.boot != boot
        if status.claim == run.claim if status is not None else was_rebooted:
            record_found(known, record.session, Found(has_agent=False, has_row=True, status=status))
