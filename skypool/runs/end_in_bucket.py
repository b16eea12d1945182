"""`end_in_bucket`: reads how a run has ended from the bucket of one of its folders, when its machine is gone."""

from __future__ import annotations

from skypool.buckets import store
from skypool.data import left_uploads, objects
from skypool.errors import SkypoolError
from skypool.rental.records import Record
from skypool.runs import stored
from skypool.runs.stored import RunStatus
from skypool.wire.save_orders import NOTES

_PATIENCE = 3.0
"""Seconds in which a store has answered."""


def end_in_bucket(record: Record) -> RunStatus | None:
    """Return the end that a run has kept beside its folders, with the login of this computer. Blocks for some seconds.

    Returns None if there is none, or if no bucket can be read. Whoever may write there could have forged it: it is
    no proof that a machine has ended.
    """
    run = record.run
    if run is None or not run.heir:
        return None
    try:
        buckets = [bucket for each in left_uploads.noted() if each.session == record.session for bucket in each.buckets]
    except (OSError, SkypoolError):
        return None
    for bucket in buckets:
        try:
            opened = store.opened(bucket, patience=_PATIENCE)
            name = f"{NOTES}/{stored.note_name(run.claim, run.heir)}"
            if objects.size(opened, name) <= stored.MOST:
                return stored.from_note(objects.read(opened, name), run.claim, run.heir)
        except Exception:  # noqa: BLE001 - whatever a store answers or has, another bucket may have it
            continue
    return None
