"""The command line: `skypool …`. Each group of commands has a module, and `build` puts them together."""

from __future__ import annotations

import sys

from skypool.errors import SkypoolError
from skypool.supported import check_client

try:
    check_client()  # what is imported next needs modules that Windows lacks
except SkypoolError as error:
    sys.exit(f"error: {error}")

import typer

from skypool.cli import accelerators, doctor, ending, money, offers, shell
from skypool.cli.output import complain


def build() -> typer.Typer:
    """The whole program."""
    app = typer.Typer(
        name="skypool",
        help="A provider, an accelerator and an image become machines that run your functions.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def _program() -> None:
        """Keeps `skypool` a program with commands even while it has only one."""

    accelerators.add_to(app)
    offers.add_to(app)
    money.add_to(app)
    ending.add_to(app)
    shell.add_to(app)
    doctor.add_to(app)
    return app


def main() -> None:
    """The entry point. What skypool refuses is one line on standard error and exit status 2, no traceback."""
    try:
        build()(args=accelerators.in_full(sys.argv[1:]))
    except SkypoolError as error:
        complain(str(error))
        sys.exit(2)
