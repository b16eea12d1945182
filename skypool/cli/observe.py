"""`skypool forward`: reach a port of a node of a running pool from another terminal, through the pool's owner.

The owner is the process that made the pool. It serves other processes of the same user (see `skypool.observers`).
`skypool ps` asks it too, and is in `skypool.cli.money`.
"""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from skypool.cli import output
from skypool.errors import LedgerError, SkypoolError, UsageError, nearest
from skypool.observers import client, place
from skypool.rental.ledger import Ledger
from skypool.rental.records import newest

Name = Annotated[str, typer.Argument(help="Name of a pool, as `skypool ps` shows it.")]


def add_to(app: typer.Typer) -> None:
    """Add the command `skypool forward` to the program."""
    app.command("forward")(forward)


def forward(
    pool: Name,
    port: Annotated[int, typer.Argument(min=1, max=65535, help="Port on the node.")],
    node: Annotated[int, typer.Option("--node", "-n", min=0, help="Number of the node.")] = 0,
    host: Annotated[str, typer.Option(help="Host to connect to, as the node knows it.")] = "localhost",
    here: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port of this computer. Default: PORT if it is free, or another one."),
    ] = None,
) -> None:
    """Bring a port of a node to 127.0.0.1 of this computer, until Ctrl-C. The pool runs in another terminal."""
    try:
        with _forward(pool, port, node, host, here) as made:
            address = made.answer["address"]
            target = f"port {port} of {f'node {node}' if host == 'localhost' else f'{host}, by node {node},'}"
            output.say(f"http://{address} leads to {target} of pool {pool!r}; Ctrl-C ends this")
            sys.stdout.flush()
            closed = next((said["closed"] for said in made.lines() if "closed" in said), "")
    except KeyboardInterrupt:
        return
    except client.NoOwner as e:
        raise explained(pool, e) from e
    why = closed or f"the process that runs pool {pool!r} is gone"
    raise SkypoolError(f"the forward of {address} has ended: {why}; `skypool ps` lists the running pools")


def _forward(pool: str, port: int, node: int, host: str, here: int | None) -> client.Observation:
    """Make a forward. If no port of this computer was named, it gets the same number, or any if that one is taken."""
    if here is None:
        try:
            return client.forward(pool, port, node, host, port)
        except UsageError as e:
            if f"port {port} of this computer" not in str(e):
                raise
    return client.forward(pool, port, node, host, here or 0)


def explained(pool: str, error: client.NoOwner) -> SkypoolError:
    """Return an error that says why a pool's owner cannot be asked, and what can be done.

    Args:
        pool: the name of the pool.
        error: the error of the attempt to ask the owner.
    """
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
    close = nearest(pool, known | set(place.pools()))
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    ended = "has ended" if record is not None else "does not exist"
    return UsageError(f"pool {pool!r} {ended}; `skypool ps` lists the running pools{hint}")
