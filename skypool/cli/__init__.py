"""The command line `skypool`. Each group of commands has a module, and `build` puts them together.

- `offers`: `skypool offers`, `skypool plan`; `accelerators`: `skypool accelerators`, `compare`, `suggest`.
- `ps` (from the ledger and from running pools), `cost`, each for its command; `ending`: `skypool down`, `gc`;
  `unfinished_uploads`: what gc does about buckets.
- `doctor`: `skypool doctor`; `prove`: `skypool prove`; `setup`: `skypool setup`.
- `run`: `skypool run`; `run_messages`: what it tells. `shell`, `forward`, `health`, `logs`, `report`: as named.
- `run_end`: `skypool wait`, `cancel`, for a run that belongs to its machine; `run_logs`: what `logs` prints of one.
- `files`: `skypool push`, `pull`.
- `owner`: how commands name a running pool, and what they say if its owner cannot be asked.
- `top`: `skypool top`, with `top_survey` (asks the pools), `top_lines` (lays them out) and `top_app` (full screen).
- `stack`: `skypool stack`; `new_driver`: `skypool new-driver`.
- `output`: prints the tables, errors and JSON of the commands.

The ledger is a file of this user that records pools and their costs. A pool's owner is the process that made it or took
it over. A session is the id of one run of a pool. Docstrings of commands are their help texts.
"""

from __future__ import annotations

import errno
import importlib
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

from skypool.cli.output import complain, say, warn

__all__ = ["build", "main"]

_COMMANDS = {
    "accelerators": ("accelerators", "suggest"),
    "offers": ("offers", "plan"),
    "ps": ("ps",),
    "cost": ("cost",),
    "ending": ("down", "gc"),
    "run": ("run",),
    "shell": ("shell",),
    "forward": ("forward",),
    "health": ("health",),
    "files": ("push", "pull"),
    "logs": ("logs",),
    "run_end": ("wait", "cancel"),
    "report": ("report",),
    "stack": ("stack",),
    "top": ("top",),
    "doctor": ("doctor",),
    "prove": ("prove",),
    "setup": ("setup",),
    "new_driver": ("new-driver",),
}
"""The commands of each module of this package, in the order of `--help`."""


def build(command: str = "") -> typer.Typer:
    """Return the whole program as a `typer.Typer` object. Nothing is run.

    If `command` is one of its commands, the program may lack the others, whose modules are then not imported.
    """
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

    named = [module for module, commands in _COMMANDS.items() if command in commands]
    for module in named or _COMMANDS:
        importlib.import_module(f"skypool.cli.{module}").add_to(app)
    return app


def _tell_version(asked: bool) -> None:
    if asked:
        say(f"skypool {metadata.version('skypool')}")
        raise typer.Exit


def main() -> None:
    """Run the program with the arguments of the process, and exit. Called by `skypool.__main__`.

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
            args = _in_full(sys.argv[1:])
            build(args[0] if args else "")(args=args, prog_name="skypool")
        finally:
            if sys.stdout is not None:  # it may be closed
                sys.stdout.flush()
    except SkypoolError as error:
        complain(str(error))
        sys.exit(2)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE, errno.EIO):
            raise
        _leave_unwritten(error)


def _in_full(args: list[str]) -> list[str]:
    """Return the program's arguments, with `list` inserted: `accelerators H100` means `accelerators list H100`."""
    if args[:1] == ["accelerators"] and (len(args) == 1 or args[1] not in ("list", "compare", "--help")):
        return ["accelerators", "list", *args[1:]]
    return args


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
