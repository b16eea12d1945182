"""`skypool shell`: open a terminal on a node of a running pool, or run one command there."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from importlib.resources import files
from typing import Annotated

import typer

from skypool.cli import output
from skypool.errors import SkypoolError, UsageError
from skypool.model import Access, Instance
from skypool.rental.ledger import Ledger
from skypool.shipping.bundle import shell_path
from skypool.wire.transport import SSH, Transport

_A_SHELL = 'exec "${SHELL:-$(command -v bash || command -v sh)}"'


def add_to(app: typer.Typer) -> None:
    """Add this command to the program."""
    app.command("shell")(shell)


def shell(
    pool: Annotated[str, typer.Argument(help="Name of a pool, as `skypool ps` has it.")],
    command: Annotated[
        list[str] | None, typer.Argument(help="What to run there, behind `--`; a shell if nothing is said.")
    ] = None,
    node: Annotated[int, typer.Option("--node", "-n", help="Rank of the node.")] = 0,
    forward: Annotated[
        list[str] | None,
        typer.Option(
            "--forward", "-L", help="PORT, or HERE:THERE: a port there is to be found here; may be said again."
        ),
    ] = None,
) -> None:
    """Open a shell on a node of a pool that lives, or run a command there: where its calls run."""
    access = _access(pool, node)
    terminal = sys.stdin.isatty()
    told = f"folder={shell_path(access.folder)}\ncwd={shell_path(access.cwd or access.folder)}\n"
    where = told + (files("skypool.cli") / "where_calls_run.sh").read_text("utf-8")
    run = _text(command) if command else f"{_A_SHELL}{' -i' if terminal else ''}"
    transport = _forwarding(access.transport, forward or [])
    argv = transport.argv(["sh", "-c", where + run], terminal=terminal)
    try:
        os.execvp(argv[0], argv)  # the terminal, its signals and the exit status are that program's from here on
    except FileNotFoundError as e:
        raise UsageError(f"there is no program {argv[0]!r} here, by which node {node} of {pool!r} is reached") from e


def _text(command: list[str]) -> str:
    """As the shell there takes it: one word is a line for the shell, several are a program and its arguments."""
    return command[0] if len(command) == 1 else shlex.join(command)


def _forwarding(transport: Transport, said: list[str]) -> Transport:
    """The same with ports of the node that are found here.

    Raises:
        UsageError: something else than ports was said, or the node is not reached by ssh.
    """
    pairs = [each.partition(":") for each in said]
    ports = [(here, there or here) for here, _, there in pairs]
    if bad := [each for pair in ports for each in pair if not (each.isdecimal() and 0 < int(each) < 65536)]:
        raise UsageError(f"--forward takes a port such as 8888, or two such as 8888:80, not {bad[0]!r}")
    if not ports:
        return transport
    if not isinstance(transport, SSH):
        raise UsageError("ports are forwarded by ssh alone, and this node is reached without it")
    return replace(transport, forwards=tuple((int(here), int(there)) for here, there in ports))


def _access(pool: str, node: int) -> Access:
    """How to reach that node.

    Raises:
        UsageError: the ledger knows no such pool, or that has no such node now. SkypoolError: nothing of it runs.
    """
    found: list[Instance] = []
    for driver in Ledger.here(output.warn).drivers_of(pool):
        running = [each for each in driver.instances(pool=pool) if each.state == "running"]
        for each in running:
            if each.node == node:
                return driver.access(each)
        found += running
    if not found:
        raise SkypoolError(f"no machine of pool {pool!r} runs; `skypool ps` says which pools live")
    there = ", ".join(str(number) for number in sorted(each.node for each in found))
    raise UsageError(f"pool {pool!r} has no node {node}: its nodes are {there}")
