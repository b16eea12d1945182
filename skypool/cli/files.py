"""`skypool push` and `skypool pull`: files to the nodes of a running pool, and back, from any terminal."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Annotated

import typer
from rich.filesize import decimal

from skypool.cli import output
from skypool.cli.owner import Name, access_to_run, explained, own_run, say_source
from skypool.console.event_text import span
from skypool.errors import UsageError
from skypool.files import transfer
from skypool.files.progress import Progress
from skypool.files.transfer import NodeEnd, Transferred
from skypool.observers import client
from skypool.text import plain
from skypool.wire.transport import SSH, Subprocess

_PATIENCE = 90.0
"""Seconds without progress after which a node is given up, as the default `liveness` of a pool."""

Delete = Annotated[bool, typer.Option("--delete", help="Also delete what the other side does not have.")]
Checksum = Annotated[bool, typer.Option("--checksum", help="Compare the contents of all files of equal size.")]


def add_to(app: typer.Typer) -> None:
    """Add the commands `skypool push` and `skypool pull` to the program."""
    app.command("push")(push)
    app.command("pull")(pull)


def push(
    pool: Name,
    local: Annotated[str, typer.Argument(help="File or folder of this computer.")],
    remote: Annotated[
        str, typer.Argument(help="Folder on the nodes, or path of the file. Default: the same name, where calls run.")
    ] = "",
    node: Annotated[
        list[int] | None, typer.Option("--node", "-n", min=0, help="Number of a node (repeatable). Default: all.")
    ] = None,
    delete: Delete = False,
    checksum: Checksum = False,
) -> None:
    """Send a file or a folder to the nodes of a running pool. What is there is not sent again.

    What .gitignore and .skypoolignore leave out is not sent.
    """
    try:
        ready = [each["node"] for each in client.info(pool)["nodes"] if each["state"] == "ready"]
        ends = [_end(pool, each) for each in dict.fromkeys(node or ready)]
    except client.NoOwner as e:
        ends = [_end_of_run(pool, each, e) for each in dict.fromkeys(node or [0])]
    if not ends:
        raise UsageError(f"pool {pool!r} has no node that is ready; see `skypool ps`")
    _say(
        transfer.push(
            ends,
            local,
            remote or transfer.name_of(os.path.abspath(os.path.expanduser(local))),
            patience=_PATIENCE,
            delete=delete,
            checksum=checksum,
            progress=_shown(),
        )
    )


def pull(
    pool: Name,
    remote: Annotated[str, typer.Argument(help="File or folder on the node.")],
    local: Annotated[
        str, typer.Argument(help="Folder of this computer, or path of the file. Default: the same name, here.")
    ] = "",
    node: Annotated[int, typer.Option("--node", "-n", min=0, help="Number of the node.")] = 0,
    delete: Delete = False,
    checksum: Checksum = False,
) -> None:
    """Fetch a file or a folder from a node of a running pool. What is here is not fetched again.

    From the machine of a run that belongs to it, also after the run, while the machine is there.
    """
    try:
        end = _end(pool, node)
    except client.NoOwner as e:
        end = _end_of_run(pool, node, e)
    here = local or transfer.name_of(remote)
    _say(transfer.pull(end, remote, here, patience=_PATIENCE, delete=delete, checksum=checksum, progress=_shown()))


def _end(pool: str, node: int) -> NodeEnd:
    command = partial(client.command, pool, node)
    is_ssh = command("true")[0] == "ssh"
    return NodeEnd(node, SSH("") if is_ssh else Subprocess(), command)


def _end_of_run(name: str, node: int, error: client.NoOwner) -> NodeEnd:
    """Return the way to the machine of a run that belongs to it. Raises what explains `error` if there is none."""
    record = own_run(name)
    if record is None:
        raise explained(name, error) from error
    say_source(record)
    access = access_to_run(record, node)
    return transfer.end_of(node, access, access.python or "")


def _shown() -> Progress:
    """Return the state of a transfer, which is shown on a terminal."""
    return Progress(_show if sys.stderr.isatty() else None)


def _show(progress: Progress) -> None:
    left = progress.left
    parts = [
        f"{decimal(progress.bytes)} of {decimal(progress.total)}",
        f"{decimal(int(progress.rate))}/s",
        *([f"{span(left)} left"] if left is not None else []),
        plain(progress.file),
    ]
    sys.stderr.write(f"\r\x1b[K{', '.join(parts)[:100]}")
    sys.stderr.flush()


def _say(done: Transferred) -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    deleted = f", {done.deleted} deleted" if done.deleted else ""
    output.say(f"{done.files} file{'s' * (done.files != 1)}, {decimal(done.bytes)} in {done.seconds:.1f} s{deleted}")
