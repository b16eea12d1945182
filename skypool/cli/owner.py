"""`Name`: the argument that names a running pool. `explained`: the error if the process that runs it is silent."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from skypool.cli import output
from skypool.errors import LedgerError, SkypoolError, UsageError, nearest
from skypool.observers import client, pool_sockets
from skypool.rental.ledger import Ledger
from skypool.rental.pool_terms import spelt
from skypool.rental.records import newest

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
    if record is not None and state == "detached":
        return SkypoolError(
            f"run {pool!r} belongs to its machine, and no process here runs it; `skypool ps` shows it, `skypool shell "
            f"{pool}` reaches its machine, and `skypool down {pool}` ends it"
        )
    if record is not None and state in ("live", "ending"):
        return SkypoolError(
            f"pool {pool!r} is run by {record.client}, which serves no other terminals here: it is on another computer "
            f"or in a container, or its skypool is older; `skypool shell {pool}` asks the provider instead"
        )
    close = nearest(pool, (known | set(pool_sockets.pools())) - {pool})
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    ended = "has ended" if record is not None else "does not exist"
    return UsageError(f"pool {pool!r} {ended}; `skypool ps` lists the running pools{hint}")
