"""`skypool forward` and `skypool health`: look into a pool that runs in another terminal, by asking its owner.

The package `skypool.observers` has the messages and connections for that.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from skypool.cli import output
from skypool.errors import LedgerError, SkypoolError, UsageError, nearest
from skypool.observers import client, place
from skypool.rental.ledger import Ledger
from skypool.rental.records import newest
from skypool.rental.request import spelt

Name = Annotated[str, typer.Argument(help="Name of a pool, as `skypool ps` shows it.", callback=spelt)]


def add_to(app: typer.Typer) -> None:
    """Add the commands `skypool forward` and `skypool health` to the program."""
    app.command("forward")(forward)
    app.command("health")(health)


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


def health(
    pool: Name, as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False
) -> None:
    """Show the health of a running pool's nodes and devices, with the last measurement of each device.

    "unknown" means that a check could not be made. The exit status is 1 if a node is unhealthy.
    """
    try:
        nodes = [each for each in client.info(pool)["nodes"] if each["state"] != "ended"]
    except client.NoOwner as e:
        raise explained(pool, e) from e
    if as_json:
        keys = ("node", "state", "hardware", "health", "sample")
        output.data([{key: each.get(key) for key in keys} for each in nodes])
    else:
        rows = [row for each in nodes for row in _health_rows(each)]
        output.table(_HEALTH, rows, numbers=_HEALTH[3:7])
    if any((each.get("health") or {}).get("state") == "unhealthy" for each in nodes):
        raise typer.Exit(1)


_HEALTH = ("node", "device", "health", "busy %", "MiB used", "W", "°C", "found")


def _health_rows(node: dict[str, Any]) -> list[list[str]]:
    """Return a row for each device of a node; one row if the node has no devices, or its devices were not read."""
    found = node.get("health")
    name = str(node["node"])
    if not found:
        why = "no measurement of its devices yet" if node.get("hardware") else "no devices"
        return [[name, node.get("hardware") or "-", "unknown" if node.get("hardware") else "-", "", "", "", "", why]]
    sample = node.get("sample") or {}
    read = {(each["kind"], each["index"]): each for each in sample.get("devices", [])}
    rows = []
    for each in found["devices"]:
        seen = read.get((each["kind"], each["index"]), {})
        measured = ("utilization_percent", "memory_used_mib", "power_watts", "temperature_celsius")
        cells = [f"{seen[key]:.0f}" if seen.get(key) is not None else "?" for key in measured]
        claimed = " (claimed)" if found["claimed"] else ""
        device = f"{each['kind']} {each['index']}"
        rows.append([name, device, f"{each['state']}{claimed}", *cells, "; ".join(each["reasons"])])
    return rows


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
    close = nearest(pool, known | set(place.pools()))
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    ended = "has ended" if record is not None else "does not exist"
    return UsageError(f"pool {pool!r} {ended}; `skypool ps` lists the running pools{hint}")
