"""The command line `skypool`. Each group of commands has a module, and `build` puts them together.

- `offers`: `skypool offers`, `skypool plan`; `accelerators`: `skypool accelerators`, `compare`, `suggest`.
- `ps` (from the ledger and from running pools), `cost`, each for its command; `ending`: `skypool down`, `gc`.
- `doctor`: `skypool doctor`; `prove`: `skypool prove`.
- `shell`, `forward`, `health`, `logs`, `report`, each for its command; `files`: `skypool push`, `pull`.
- `owner`: how commands name a running pool, and what they say if its owner cannot be asked.
- `top`: `skypool top`, with `top_survey` (asks the pools), `top_lines` (lays them out) and `top_app` (full screen).
- `stack`: `skypool stack`; `new_driver`: `skypool new-driver`.
- `output`: prints the tables, errors and JSON of the commands.

The ledger is a file of this user that records pools and their costs. A pool's owner is the process that made it or took
it over. A session is the id of one run of a pool. Docstrings of commands are their help texts.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import warnings
from functools import partial
from importlib import metadata
from typing import Annotated

from skypool.errors import SkypoolError
from skypool.supported import check_client

try:
    check_client()  # the next imports need modules that Windows lacks
except SkypoolError as error:
    sys.exit(f"error: {error}")

import typer

from skypool.cli import (
    accelerators,
    cost,
    doctor,
    ending,
    files,
    forward,
    health,
    logs,
    new_driver,
    offers,
    prove,
    ps,
    report,
    shell,
    stack,
    top,
)
from skypool.cli.output import complain, say, warn

__all__ = ["build", "main"]


def build() -> typer.Typer:
    """Return the whole program as a `typer.Typer` object, with all its commands. Nothing is run."""
    app = typer.Typer(
        name="skypool",
        help="Rent machines with accelerators, run Python functions on them, and end them.",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def _program(
        version: Annotated[
            bool, typer.Option("--version", "-V", callback=_tell_version, is_eager=True, help="Print the version.")
        ] = False,
    ) -> None:
        """Rent machines with accelerators, run Python functions on them, and end them."""

    accelerators.add_to(app)
    offers.add_to(app)
    ps.add_to(app)
    cost.add_to(app)
    ending.add_to(app)
    shell.add_to(app)
    forward.add_to(app)
    health.add_to(app)
    files.add_to(app)
    logs.add_to(app)
    report.add_to(app)
    stack.add_to(app)
    top.add_to(app)
    doctor.add_to(app)
    prove.add_to(app)
    new_driver.add_to(app)
    return app


def _tell_version(asked: bool) -> None:
    if asked:
        say(f"skypool {metadata.version('skypool')}")
        raise typer.Exit


def main() -> None:
    """Run the program with the arguments of the process, and exit. The entry point of the command `skypool`.

    A SkypoolError is printed on stderr, and the exit status is 2. If stdout cannot be written, the exit status is 1.
    Other errors are raised.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may support ASCII only
    shown: set[str] = set()
    warnings.showwarning = partial(_show_once, shown)
    try:
        try:
            build()(args=accelerators.in_full(sys.argv[1:]), prog_name="skypool")
        finally:
            sys.stdout.flush()
    except SkypoolError as error:
        complain(str(error))
        sys.exit(2)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE, errno.EIO):
            raise
        _leave_unwritten(error)


def _show_once(shown: set[str], message: Warning | str, *_: object) -> None:
    """Print a warning as one line, without the place in the code that gave it. Do not repeat the same text."""
    if str(message) not in shown:
        shown.add(str(message))
        warn(str(message))


def _leave_unwritten(error: OSError) -> None:
    """Exit with status 1, as stdout cannot be written. Print why, unless the reader closed the pipe (`| head`)."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # so that Python's last flush at exit does not fail again
    os.close(nowhere)
    if error.errno != errno.EPIPE:  # a closed pipe is not an error: the reader has read enough
        complain(f"standard output cannot be written: {error.strerror}; the rest of the output is lost")
    sys.exit(1)
