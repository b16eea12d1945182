"""The command `skypool forward`: a port of this computer leads to a port of a running pool's node."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from skypool.cli import output
from skypool.cli.owner import Name, looked_at
from skypool.errors import ConnectionLost, ProviderError, SkypoolError, UsageError
from skypool.observers import client
from skypool.rental.records import Record

_LOOK = 10.0
"""Seconds between two looks whether the machine of a run is there, after a forward has broken."""


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
            _say(address, f"{target} of pool {pool!r}", socket is not None)
            closed = next((said["closed"] for said in made.lines() if "closed" in said), "")
    except KeyboardInterrupt:
        return
    except client.NoOwner as e:
        _forward_of_run(looked_at(pool, node, e), port, host, here, socket)
        return
    why = closed or f"the process that runs pool {pool!r} is gone"
    raise SkypoolError(f"the forward of {address} has ended: {why}; `skypool ps` lists the running pools")


def _say(address: str, target: str, is_socket: bool) -> None:
    """Say where a forward begins, where it leads, and who can use it."""
    where = f"the socket {address}" if is_socket else f"http://{address}"
    who = "every user of this computer can connect (--socket PATH is for you alone)"
    if is_socket:
        who = f"only you can connect, as by `curl --unix-socket {shlex.quote(address)} http://localhost/`"
    output.say(f"{where} leads to {target}; {who}; Ctrl-C ends this")
    sys.stdout.flush()


def _forward_of_run(record: Record, port: int, host: str, here: int | None, socket: Path | None) -> None:
    """Forward a port to the machine of a run, until Ctrl-C or until its provider does not list the machine any more."""
    from skypool.runs import looking, observing  # imported here, as most pools are reached in another way
    from skypool.runs.reaching import NotListed

    access = looking.reached(record, time.monotonic() + observing.PATIENCE)
    trouble = threading.Event()

    def notice(text: str) -> None:
        output.warn(text)
        trouble.set()

    make = partial(observing.forward, access, host, port, notice=notice)
    way: int | str = here or 0 if socket is None else os.path.abspath(socket.expanduser())
    try:
        made = make(port) if here is None and socket is None else make(way)
    except UsageError:
        if here is not None or socket is not None:
            raise
        made = make(0)
    try:
        with made:
            machine = f"the machine of run {record.pool!r}"
            where = machine if host == "localhost" else f"{host}, by {machine}"
            _say(made.address, f"port {port} of {where}", socket is not None)
            while True:
                while not trouble.wait(_LOOK):
                    pass
                with contextlib.suppress(ConnectionLost, ProviderError):  # the forward is made again
                    looking.reached(record, time.monotonic() + observing.PATIENCE)
                time.sleep(_LOOK)
    except KeyboardInterrupt:
        return
    except NotListed as e:
        raise SkypoolError(
            f"the forward of {made.address} has ended with the machine of run {record.pool!r}: {e}"
        ) from e


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
