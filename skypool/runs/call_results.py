"""Results of calls that belong to their machines: fetched, checked, kept on this computer, and only then unpickled."""

from __future__ import annotations

import hashlib
import pickle
import secrets
from collections.abc import Collection
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

from skypool.errors import (
    BudgetExceeded,
    ConnectionLost,
    CredentialsError,
    HostKeyMismatch,
    LifetimeExceeded,
    LoginRefused,
    SkypoolError,
    TransferError,
)
from skypool.files import transfer
from skypool.head.states import Outcome
from skypool.rental.ledger import Ledger
from skypool.rental.records import Record, RunEnd
from skypool.runs import call_program, stored
from skypool.runs.end_in_bucket import result_in_bucket
from skypool.runs.looking import RunLook, Seen, run_of
from skypool.runs.reaching import NotListed
from skypool.runs.stored import KeptResult
from skypool.safety import private, user_folders
from skypool.wire import codec, exceptions

_PATIENCE = 90.0
"""Seconds without progress after which a transfer is given up, as the default `liveness` of a pool."""


def result_of(record: Record, known: Ledger, end: RunEnd, patience: float) -> Any:
    """Return what the call of a run has returned, or raise what it has raised. Fetch it if it is not here.

    Args:
        end: how the run has ended.
        patience: seconds in which the machine must be reached.

    Raises:
        CancelledError: the run was cancelled.
        BudgetExceeded, LifetimeExceeded: the call was stopped because a limit was reached.
        SkypoolError: there is no result, it cannot be had any more, or it is not what the run has stored.
    """
    place = _folder() / record.session
    try:
        data = private.read(place)
    except FileNotFoundError:
        data = _fetched(record, end, patience)
        _keep(place, data, {each.session for each in known.pools()})
    is_value, buffers = pickle.loads(data)
    if not is_value:
        raise exceptions.load_error(buffers)
    return codec.loads([*map(bytearray, buffers)])


def _folder() -> Path:
    return private.folder(user_folders.state() / "results", private.STATE)


def _keep(place: Path, data: bytes, sessions: Collection[str]) -> None:
    """Keep a result on this computer, and remove those of runs that the ledger has forgotten."""
    part = place.with_name(f".{secrets.token_hex(8)}")
    try:
        part.touch(0o600, exist_ok=False)
        part.write_bytes(data)
        part.replace(place)
    finally:
        part.unlink(missing_ok=True)
    for each in place.parent.iterdir():
        if not each.name.startswith(".") and each.name not in sessions:
            each.unlink(missing_ok=True)


def _fetched(record: Record, end: RunEnd, patience: float) -> bytes:
    """Return the file with the result, from the machine or a bucket. It is as the run has stored it."""
    why = ""
    try:
        return _from_machine(record, end, patience)
    except (ConnectionLost, CredentialsError, HostKeyMismatch, LoginRefused, NotListed) as e:
        why = str(e)
    found = result_in_bucket(record)
    if found is not None:
        kept, data = found
        if kept is None:
            raise _none(record, end)
        if not _is(data, kept):
            raise SkypoolError(
                f"the result of run {record.pool} in its bucket is not the one that the run has stored: somebody has "
                "changed it, and it was not unpickled"
            )
        return data
    if end.outcome is not Outcome.ENDED:
        raise _none(record, end)
    raise SkypoolError(f"the result of run {record.pool} was on its machine: {why}")


def _from_machine(record: Record, end: RunEnd, patience: float) -> bytes:
    run = run_of(record)
    look = RunLook(record, output=False, follow=False, patience=patience)
    seen = next(each for each in look if isinstance(each, Seen))
    access, status = look.access, seen.found.status
    assert access is not None  # it has answered
    if not seen.found.has_row:
        raise ConnectionLost(f"the machine of run {record.pool} has nothing of it any more")
    if status is None or status.result is None:
        raise _none(record, end)
    place = f"{stored.place_of(access, run.claim)}/{stored.OUTPUT}/{status.attempts}/0/{call_program.RESULT}"
    part = _folder() / f".{secrets.token_hex(8)}"
    try:
        transfer.pull(transfer.end_of(0, access, access.python or ""), place, str(part), patience=_PATIENCE)
        data = part.read_bytes()
    except FileNotFoundError as e:
        raise TransferError(f"the result of run {record.pool} did not come from its machine") from e
    finally:
        part.unlink(missing_ok=True)
    if not _is(data, status.result):
        raise SkypoolError(
            f"the result of run {record.pool} on its machine is not the one that the run has stored: the file was "
            "changed or damaged, and it was not unpickled"
        )
    return data


def _is(data: bytes, kept: KeptResult) -> bool:
    return len(data) == kept.bytes and hashlib.sha256(data).hexdigest() == kept.sha256


def _none(record: Record, end: RunEnd) -> Exception:
    """Return the error of a run that has no result."""
    what = f"run {record.pool} has no result"
    if end.limit:
        limited = LifetimeExceeded if end.limit == "lifetime" else BudgetExceeded
        return limited(f"{what}, as it was stopped for its {end.limit}")
    if end.outcome is Outcome.CANCELLED:
        return CancelledError(f"{what}, as it was cancelled")
    why = f": {end.why}" if end.why else ""
    if end.outcome is Outcome.ENDED and end.returncode is not None:
        status = f"the status {end.returncode}" if end.returncode <= 128 else f"signal {end.returncode - 128}"
        return SkypoolError(f"{what}: it is no call, or its process has ended with {status} before it returned{why}")
    return SkypoolError(f"{what}, as it is {end.outcome.value}{why}")
