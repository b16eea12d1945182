"""Output of the commands: tables and one-line errors for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def complain(message: str) -> None:
    """One red line on standard error."""
    Console(stderr=True, soft_wrap=True).print(Text(f"error: {message}", style="red"))


def warn(message: str) -> None:
    """One yellow line on standard error: the command goes on."""
    Console(stderr=True, soft_wrap=True).print(Text(f"warning: {message}", style="yellow"))


def say(text: str) -> None:
    """A line for people, as it is: brackets in it are no markup."""
    Console(soft_wrap=True, highlight=False).print(Text(text))


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[str] = ()) -> None:
    """A table for people; the columns named in `numbers` are set to the right."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        made.add_column(heading, justify="right" if heading in numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    console = Console(highlight=False)
    if not console.is_terminal:  # a pipe has no window to fit, and must not lose what does not fit one
        console = Console(highlight=False, width=10_000)
    with console.capture() as capture:
        console.print(made)
    sys.stdout.write("".join(line.rstrip() + "\n" for line in capture.get().splitlines()))


def data(value: object) -> None:
    """One JSON document."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
