"""Reads how a run has ended, and the result of a call, from the bucket of a folder, when its machine is gone."""

from __future__ import annotations

from skypool.buckets import store
from skypool.buckets.bucket import Bucket
from skypool.data import left_uploads, objects
from skypool.errors import SkypoolError
from skypool.rental.records import Record
from skypool.runs import stored
from skypool.runs.stored import KeptResult, RunStatus
from skypool.text import one_line
from skypool.wire.save_orders import NOTES

_PATIENCE = 3.0
"""Seconds in which a store has answered."""


def end_in_bucket(record: Record) -> RunStatus | None:
    """Return the end that a run has kept beside its folders; None if there is none. Blocks for some seconds.

    The login of this computer is used. The end is signed with a key that only this computer and the run know, unless an
    older skypool has handed the run over. It is no proof that a machine has ended.

    Raises:
        SkypoolError: there may be one, but a bucket cannot be read, or what is there is not valid.
        OSError: the notes of the buckets cannot be read.
    """
    found = _found(record)
    return None if found is None else found[0]


def result_in_bucket(record: Record) -> tuple[KeptResult | None, bytes] | None:
    """Return what a run has stored of its result, and the file in the bucket that should be it; None for no end.

    Only an end with the signature of the run counts. The file may be anybody's: compare it. Blocks.

    Raises:
        SkypoolError: a bucket cannot be read, or what is there is not valid.
        OSError: the notes of the buckets cannot be read.
    """
    run = record.run
    if run is None or not run.seal or (found := _found(record)) is None:
        return None
    status, bucket = found
    if status.result is None:
        return None, b""
    name = f"{NOTES}/{stored.result_name(run.claim, run.heir)}"
    try:
        opened = store.opened(bucket, patience=_PATIENCE)
        if (size := objects.size(opened, name)) != status.result.bytes:
            raise SkypoolError(f"it has {size:,} bytes in place of {status.result.bytes:,}: somebody has changed it")
        return status.result, objects.read(opened, name)
    except FileNotFoundError as e:
        raise SkypoolError(f"the result of run {record.pool} is not in {bucket}") from e
    except Exception as e:  # whatever a store answers
        why = one_line(str(e), 300) if isinstance(e, SkypoolError) else store.trouble(e).words
        raise SkypoolError(f"the result of run {record.pool} in {bucket} cannot be read: {why}") from e


def _found(record: Record) -> tuple[RunStatus, Bucket] | None:
    """Return the end of a run, and the bucket that has it; None if there is none."""
    run = record.run
    if run is None or not run.heir:
        return None
    name = f"{NOTES}/{stored.note_name(run.claim, run.heir)}"
    failed: SkypoolError | None = None
    noted = (each for each in left_uploads.noted() if each.session == record.session)
    for bucket in [bucket for each in noted for bucket in each.buckets]:
        try:
            opened = store.opened(bucket, patience=_PATIENCE)
            if (size := objects.size(opened, name)) > stored.MOST:
                raise SkypoolError(f"it has {size:,} bytes")
            if (found := stored.from_note(objects.read(opened, name), run.claim, run.heir, run.seal)) is not None:
                return found, bucket
        except FileNotFoundError:
            continue
        except Exception as e:  # noqa: BLE001 - whatever a store answers or has, another bucket may have it
            is_told = isinstance(e, (SkypoolError, ValueError, RecursionError))
            why = one_line(str(e), 300) if is_told else store.trouble(e).words
            failed = SkypoolError(f"its end in {bucket} cannot be read: {why}")
    if failed is not None:
        raise failed
    return None
