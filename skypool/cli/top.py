"""`skypool top`: all pools of this user in a full-screen view, with the nodes of one pool."""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated

import typer

from skypool.cli import output
from skypool.cli.owner import explained
from skypool.cli.top_lines import details, pool_lines
from skypool.cli.top_survey import Survey
from skypool.console import drawable
from skypool.errors import SkypoolError, UsageError
from skypool.observers import client
from skypool.rental.pool_terms import spelt

_WIDE = 200
"""Number of columns in which tables are laid out if they are printed once."""
_PATIENCE_ONCE = 2.0
"""Seconds in which the owners of pools must answer if the tables are printed once."""


def add_to(app: typer.Typer) -> None:
    """Add the command `skypool top` to the program."""
    app.command("top")(top)


def top(
    pool: Annotated[
        str | None,
        typer.Argument(help="Name of a pool. Default: all pools.", callback=lambda name: name and spelt(name)),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the pools and their nodes once, and end.")] = False,
) -> None:
    """Watch all pools of this user: cost, calls, and the utilisation, memory and power of their nodes.

    Without a terminal, as in a pipe, the pools are printed once, as by --once. The full-screen view needs the package
    textual, which the extra `top` of skypool installs.
    """
    once = once or not (sys.stdin.isatty() and drawable(sys.stdout, os.environ, asked=True))
    survey = Survey(pool, _PATIENCE_ONCE) if once else Survey(pool)
    survey.refresh()
    if survey.trouble and not survey.views():
        raise SkypoolError(survey.trouble)
    if pool is not None and not survey.views():
        raise explained(pool, client.NoOwner(f"no process on this computer owns a pool called {pool!r}"))
    if once:
        _print(survey)
    else:
        _watch(survey, pool is not None)


def _watch(survey: Survey, alone: bool) -> None:
    try:
        from skypool.cli.top_app import Top
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] != "textual":
            raise
        raise UsageError(
            "the full-screen view needs the package textual, which is not installed: pip install 'skypool[top]'. "
            "`skypool top --once` works without it"
        ) from e
    Top(survey, alone).run()


def _print(survey: Survey) -> None:
    survey.wait()
    views = survey.views()
    if not views:
        output.say("no pool of this computer is running; `skypool gc` asks the providers for machines of other pools")
        return
    now = time.time()
    headings, lines = pool_lines(views, now, _WIDE)
    for each in (headings, *lines):
        output.say(each.plain)
    for view in views:
        output.say("")
        for line in details(view, now, _WIDE):
            output.say(line.plain.rstrip())
