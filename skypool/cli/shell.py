"""`skypool shell`: open a terminal on a node of a running pool, or run one command there.

The process that runs the pool knows how the nodes are reached. If it cannot be asked, the providers are asked. On the
machine of a run that belongs to it, the shell begins where its program does, also after the run.
"""

from __future__ import annotations

import os
import shlex
import sys
from importlib.resources import files
from typing import Annotated

import typer

from skypool.cli import output
from skypool.cli.owner import Name, access_to_run, own_run
from skypool.drivers.contract import admitted
from skypool.errors import SkypoolError, UsageError
from skypool.link.reach import local_command
from skypool.model import Access, Instance
from skypool.observers import client
from skypool.rental.ledger import Ledger

_A_SHELL = 'exec "${SHELL:-$(command -v bash || command -v sh)}"'


def add_to(app: typer.Typer) -> None:
    """Add the command `skypool shell` to the program."""
    app.command("shell")(shell)


def shell(
    pool: Name,
    command: Annotated[
        list[str] | None, typer.Argument(help="Command to run there, after `--`. Default: an interactive shell.")
    ] = None,
    node: Annotated[int, typer.Option("--node", "-n", help="Number of the node.")] = 0,
    forward: Annotated[
        list[str] | None,
        typer.Option(
            "--forward",
            "-L",
            help="PORT or HERE:THERE: forward port HERE of this computer to the node's port THERE (repeatable).",
        ),
    ] = None,
) -> None:
    """Open a shell on a node of a running pool, or run a command there, in the environment of its calls."""
    ports = _ports(forward or [])
    terminal = sys.stdin.isatty()
    where = (files("skypool.observers") / "where_calls_run.sh").read_text("utf-8")
    run = _text(command) if command else f"{_A_SHELL}{' -i' if terminal else ''}"
    try:
        argv = client.command(pool, node, where + run, terminal, ports)
    except client.NoOwner:  # its process is gone, stopped, or on another computer
        access = _access(pool, node) if (own := own_run(pool)) is None else access_to_run(own, node)
        argv = local_command(access, access.python or "", where + run, terminal, ports)
    try:
        os.execvp(argv[0], argv)  # replaces this process, so signals and the exit status are the program's own
    except FileNotFoundError as e:
        raise UsageError(
            f"cannot reach node {node} of {pool!r}: the program {argv[0]!r} is not installed on this computer; "
            "install it first"
        ) from e


def _text(command: list[str]) -> str:
    """Return a command line for the remote shell: a single argument unchanged, several arguments quoted and joined."""
    return command[0] if len(command) == 1 else shlex.join(command)


def _ports(said: list[str]) -> list[tuple[int, str, int]]:
    """Return (port here, host, port of the node) for each text: "8888:80" (here:node), or "8888" for the same port."""
    pairs = [each.partition(":") for each in said]
    ports = [(here, there or here) for here, _, there in pairs]
    if bad := [each for pair in ports for each in pair if not (each.isdecimal() and 0 < int(each) < 65536)]:
        raise UsageError(
            "--forward takes a port such as 8888, or two such as 8888:80 (that of this computer, then that of the "
            f"node), each from 1 to 65535, not {bad[0]!r}"
        )
    return [(int(here), "localhost", int(there)) for here, there in ports]


def _access(pool: str, node: int) -> Access:
    """Return how to reach a running node of a pool, by asking the pool's providers."""
    found: list[Instance] = []
    for driver in Ledger.here(output.warn).drivers_of(pool):
        running = [each for each in driver.instances(pool=pool) if each.state == "running"]
        for each in running:
            if each.node == node:
                return admitted(driver, each)
        found += running
    if not found:
        raise SkypoolError(f"pool {pool!r} has no running machine; `skypool ps` lists the running pools")
    there = ", ".join(str(number) for number in sorted(each.node for each in found))
    raise UsageError(f"pool {pool!r} has no running node {node}; its running nodes are {there}: choose one with --node")
