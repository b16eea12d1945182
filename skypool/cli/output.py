"""Output of the commands: tables and one-line errors for people, JSON for programs."""

from __future__ import annotations

import errno
import json
import os
import select
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from skypool.text import plain

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
"""The option --json of the commands that print a table."""


def complain(message: str) -> None:
    """Print an error as one red line on stderr, with "error: " before it. The program goes on."""
    Console(stderr=True, soft_wrap=True).print(Text(plain(f"error: {message}"), style="red"))


def warn(message: str) -> None:
    """Print a warning as one yellow line on stderr, with "warning: " before it. The program goes on."""
    Console(stderr=True, soft_wrap=True).print(Text(plain(f"warning: {message}"), style="yellow"))


def say(text: str) -> None:
    """Print a line of text on stdout. Brackets in the text are printed as they are, and long lines are not wrapped."""
    Console(soft_wrap=True, highlight=False).print(Text(plain(text)))


def note(text: str) -> None:
    """Print a line of text on stderr, so that stdout has only results. Long lines are not wrapped."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(Text(plain(text), style="dim"))


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[str] = ()) -> None:
    """Print a table on stdout. Without rows, only the headings are printed.

    Long cells are wrapped on a terminal; elsewhere, lines are printed whole. `numbers` has the headings of columns that
    are aligned to the right.
    """
    made = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        made.add_column(heading, justify="right" if heading in numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(plain(cell)) for cell in row))
    console = Console(highlight=False)
    if not console.is_terminal:  # a pipe has no width: print long lines whole
        console = Console(highlight=False, width=10_000)
    with console.capture() as capture:
        console.print(made)
    sys.stdout.write("".join(line.rstrip() + "\n" for line in capture.get().splitlines()))


def data(value: object) -> None:
    """Print a value as one indented JSON document on stdout. Raise TypeError if JSON cannot have it."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def utc(time: float) -> str:
    """Return a time in seconds since 1970 as JSON documents and tables have it, such as "2026-08-20T09:30:00Z"."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def check_reader() -> None:
    """Raise BrokenPipeError if stdout is a pipe, socket or terminal that nobody reads any more."""
    ready = select.poll()
    ready.register(1, 0)
    if any(events & (select.POLLERR | select.POLLHUP) for _, events in ready.poll(0)):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
