"""`skypool stack`: print what the processes of a running pool are doing, as stacks of Python calls."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated

import typer

from skypool.cli import output
from skypool.cli.owner import Name, looked_at
from skypool.observers import client, stacks
from skypool.rental.records import Record


def add_to(app: typer.Typer) -> None:
    """Add the command `skypool stack` to the program."""
    app.command("stack")(stack)


def stack(
    pool: Name,
    node: Annotated[int | None, typer.Option("--node", "-n", min=0, help="Only this node.")] = None,
    native: Annotated[
        bool, typer.Option("--native", help="Also show frames of native code, such as NCCL, by py-spy.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each process.")] = False,
) -> None:
    """Print what the calls, gangs and services of a running pool are doing now, the innermost call first."""
    try:
        nodes = [each["node"] for each in client.info(pool)["nodes"] if each["state"] == "ready"]
    except client.NoOwner as e:
        record = looked_at(pool, node, e)
        nodes, found = [0], _of_run(record, native)
    else:
        nodes = nodes if node is None else [node]
        found = stacks.ask(pool, nodes, native, partial(client.command, pool))
    if as_json:
        said = [json.dumps(asdict(process)) for processes in found.nodes.values() for process in processes]
    else:
        said = str(replace(found, errors={})).splitlines()
    sys.stdout.writelines(f"{line}\n" for line in said)
    for error in found.errors.values():
        output.complain(str(error))
    if nodes and not found.nodes:
        raise found.errors[nodes[0]]


def _of_run(record: Record, native: bool) -> stacks.Stacks:
    """Return what the processes of a run are doing on its machine. Raises IsOver if it is over."""
    from skypool.runs import observing  # imported here, as most pools are asked in another way

    found = observing.stacks_of(record, native)
    if not found.nodes:
        observing.info(record)  # says why
    return found
