"""The command `skypool forward`: a port of this computer leads to a port of a running pool's node."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from skypool.cli import output
from skypool.cli.owner import Name, explained
from skypool.errors import SkypoolError, UsageError
from skypool.observers import client


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
    socket: Annotated[
        Path | None,
        typer.Option(help="Path of a Unix socket to make in place of a port. Only you can connect to it."),
    ] = None,
) -> None:
    """Forward a port of this computer, on 127.0.0.1, to a port of a running pool's node, until Ctrl-C.

    Every user of this computer can connect to the port of 127.0.0.1. With --socket, only you can connect.
    """
    if here and socket is not None:
        raise UsageError("pass either --here or --socket, not both")
    try:
        with _forward(pool, port, node, host, here, socket) as made:
            address = made.answer["address"]
            target = f"port {port} of {f'node {node}' if host == 'localhost' else f'{host}, by node {node},'}"
            where = f"http://{address}" if socket is None else f"the socket {address}"
            who = "every user of this computer can connect (--socket PATH is for you alone)"
            if socket is not None:
                who = f"only you can connect, as by `curl --unix-socket {shlex.quote(address)} http://localhost/`"
            output.say(f"{where} leads to {target} of pool {pool!r}; {who}; Ctrl-C ends this")
            sys.stdout.flush()
            closed = next((said["closed"] for said in made.lines() if "closed" in said), "")
    except KeyboardInterrupt:
        return
    except client.NoOwner as e:
        raise explained(pool, e) from e
    why = closed or f"the process that runs pool {pool!r} is gone"
    raise SkypoolError(f"the forward of {address} has ended: {why}; `skypool ps` lists the running pools")


def _forward(pool: str, port: int, node: int, host: str, here: int | None, socket: Path | None) -> client.Observation:
    """Forward a port. If `here` is None, use `port` on this computer, too, or a free port if that one is taken."""
    if socket is not None:
        return client.forward(pool, port, node, host, socket=os.path.abspath(socket.expanduser()))
    if here is None:
        try:
            return client.forward(pool, port, node, host, port)
        except UsageError as e:
            if f"port {port} of this computer" not in str(e):
                raise
    return client.forward(pool, port, node, host, here or 0)
