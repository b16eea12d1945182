"""`Name`: the argument that names a running pool. `explained`: the error if the process that runs it is silent.

`own_run` finds a run that belongs to its machine, which no process here runs, and `access_to_run` the way there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated

import typer

from skypool.cli import output
from skypool.errors import LedgerError, SkypoolError, UsageError, nearest
from skypool.head.states import Ledger as State
from skypool.model import Access
from skypool.observers import client, pool_sockets
from skypool.rental.ledger import Ledger
from skypool.rental.pool_terms import spelt
from skypool.rental.records import Record, newest
from skypool.runs.detached_run import no_run
from skypool.runs.looking import working_access
from skypool.runs.reaching import NotListed

_PATIENCE = 8.0
"""Seconds in which the machine of a run must be reached."""
Name = Annotated[str, typer.Argument(help="Name of a pool, as `skypool ps` shows it.", callback=spelt)]


def explained(pool: str, error: client.NoOwner) -> SkypoolError:
    """Return an error that says why a pool's owner cannot be asked, and what can be done."""
    if error.exists:
        return error
    try:
        ledger = Ledger.here(output.warn)
        record = newest(ledger.pools(pool))
        known = {each.pool for each in ledger.pools()}
    except LedgerError as e:
        return SkypoolError(f"{error}; nor can the ledger be read: {e}")
    now = time.time()
    state = record.state(now) if record else ""
    if record is not None and state == "left":
        return SkypoolError(
            f"the process that ran pool {pool!r} is gone, so its nodes cannot be reached through it; "
            f"`skypool shell {pool}` asks the provider instead, ComputePool.attach({pool!r}) takes the machines over, "
            f"and `skypool down {pool}` ends them"
        )
    if record is not None and state in ("live", "ending"):
        return SkypoolError(
            f"pool {pool!r} is run by {record.client}, which serves no other terminals here: it is on another computer "
            f"or in a container, or its skypool is older; `skypool shell {pool}` asks the provider instead"
        )
    hint = _meant(pool, (known | set(pool_sockets.pools())) - {pool})
    ended = "has ended" if record is not None else "does not exist"
    return UsageError(f"pool {pool!r} {ended}; `skypool ps` lists the running pools{hint}")


def _meant(name: str, known: Iterable[str]) -> str:
    """Return what names like `name` are known, as the end of a sentence; "" if there is none."""
    close = nearest(name, known)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def own_run(name: str) -> Record | None:
    """Return the pool of the newest run of this name if that belongs to its machine, or did so, else None."""
    try:
        record = newest(Ledger.here(output.warn).pools(name))
    except LedgerError as e:
        output.warn(f"it is not known whether run {name!r} belongs to its machine: {e}")
        return None
    if record is None or record.run is None or record.run.entry.state is State.LIVE:
        return None
    return record


def looked_at(name: str, node: int | None, error: client.NoOwner) -> Record:
    """Return the pool of a run that belongs to its machine, and say on stderr that its machine is asked.

    Raises what explains `error` if there is no such run, and UsageError for another node than 0 or None.
    """
    record = own_run(name)
    if record is None:
        raise explained(name, error) from error
    if node:
        raise UsageError(f"run {name!r} has one node, 0, and no node {node}")
    say_source(record)
    return record


def say_source(record: Record) -> None:
    """Say on stderr that what follows is from the machine of a run."""
    output.note(f"{source_of(record)}:")


def source_of(record: Record) -> str:
    """Return where what is read of a run on its machine comes from, as words."""
    line = (record.running or record.lines or (None,))[-1]
    machine = "" if line is None else f", {line.provider} {line.id}"
    return f"from the machine of run {record.pool}{machine}"


def run_named(name: str) -> Record:
    """Return the pool of a run that belongs to its machine, or did so. Raises UsageError if there is none."""
    if (found := own_run(name)) is not None:
        return found
    raise no_run(name, {each.pool for each in Ledger.here().pools()})


def access_to_run(record: Record, node: int) -> Access:
    """Return how the machine of a run is reached, where commands begin where its program does.

    Raises UsageError for another node than 0, and SkypoolError if the machine has ended or cannot be reached.
    """
    if node:
        raise UsageError(f"run {record.pool!r} has one node, 0, and no node {node}")
    try:
        return working_access(record, _PATIENCE)
    except NotListed as e:
        raise SkypoolError(f"what run {record.pool!r} has written was on its machine: {e}") from e
