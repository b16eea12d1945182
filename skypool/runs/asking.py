"""`ask_machines`: asks machines how their runs stand or have ended, and records that in the ledger."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import wait
from functools import partial

from skypool.errors import SkypoolError
from skypool.head.states import Ledger
from skypool.head.steps import seen_ended
from skypool.rental import gc, ledger
from skypool.rental.records import Record
from skypool.runs.end_in_bucket import end_in_bucket
from skypool.runs.looking import look_once
from skypool.runs.machine_look import Found
from skypool.runs.noting import record_found
from skypool.runs.own_thread import in_thread
from skypool.runs.reaching import NotListed, access_of
from skypool.text import one_line
from skypool.wire.keys import Keys

PATIENCE = 8.0
"""Seconds in which a provider has said where a machine is, and the machine how its run stands."""


def ask_machines(
    known: ledger.Ledger, records: Sequence[Record], found: Sequence[gc.Found] | None = None
) -> dict[str, str]:
    """Ask the machines of runs that belong to them how the runs stand, and record it.

    All are asked at the same time, for 8 s at most. Runs whose end is known are left out. A run whose machine does not
    answer keeps its entry, unless its end is in the bucket of a folder. It is lost if its provider was asked here and
    lists the machine no more. Nothing is raised.

    Args:
        records: the pools in the ledger.
        found: what their providers have just listed; None to ask these where the machines are.

    Returns:
        What is to be told of runs of which the ledger learned nothing, by the session of the pool.
    """
    until = time.monotonic() + PATIENCE
    asked = {
        each.session: (each, in_thread(partial(_look, each, found, until), "skypool-ask"))
        for each in records
        if _is_open(each)
    }
    wait([answer for _, answer in asked.values()], max(0.0, until - time.monotonic()))
    told: dict[str, str] = {}
    for session, (record, answer) in asked.items():
        if not answer.done():
            told[session] = f"its machine could not be asked: there was no answer within {PATIENCE:g} s"
            continue
        error = answer.exception()
        if isinstance(error, NotListed) and error.is_gone and not record.client_lives(time.time()):
            known.mark(session, partial(seen_ended, stored=None))
            Keys.of(record.pool).forget()
        elif error is not None:
            why = one_line(str(error) or type(error).__name__, 500)
            told[session] = f"its machine could not be asked: {why}"
        elif answer.result().has_row:
            record_found(known, session, answer.result())
        else:
            told[session] = _without_row(record, answer.result())
    return told


def _is_open(record: Record) -> bool:
    """Return True if a run is on its machine, or may be, so far as the ledger knows."""
    run = record.run
    is_there = record.ended is None and bool(record.running)
    return is_there and run is not None and run.is_given and run.entry.outcome is None


def _without_row(record: Record, found: Found) -> str:
    assert record.run is not None
    if record.run.entry.state is Ledger.DETACHED:
        return "its machine answers, and has nothing of this run any more"
    if found.has_agent:
        return "its machine answers, and has not taken it over"
    return "its machine answers: its agent has ended without taking it over, so its program was never started"


def _look(record: Record, found: Sequence[gc.Found] | None, until: float) -> Found:
    assert record.run is not None
    try:
        return look_once(record, access_of(record, found), until)
    except (OSError, SkypoolError) as e:
        try:
            status = end_in_bucket(record)
        except (OSError, SkypoolError) as other:
            raise SkypoolError(f"{e}; {other}") from e
        if status is None:
            raise
        return Found(has_agent=False, has_row=True, status=status)
