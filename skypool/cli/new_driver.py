"""`skypool new-driver`: writes the first version of a driver, as a Python package whose tests pass at once."""

from __future__ import annotations

import re
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import typer

from skypool.cli import output
from skypool.drivers import registry
from skypool.errors import UsageError

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_KEPT = (".py", ".toml", ".md", ".csv", ".typed")
"""File name endings of the template's files. Files with other endings, such as bytecode, are not copied."""


def add_to(app: typer.Typer) -> None:
    """Add the command `skypool new-driver` to the program."""
    app.command("new-driver")(new_driver)


def new_driver(
    name: Annotated[str, typer.Argument(help="The name of the provider, such as acme or big-cloud.")],
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Folder to write to. Default: ./skypool-NAME.")
    ] = None,
) -> None:
    """Write a driver for a new provider: a small distribution that passes skypool's tests for drivers at once.

    The new driver rents from a fake cloud on this computer. Replace the fake cloud by your provider step by step, while
    the tests stay green: docs/driver-tutorial.md of skypool shows how.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a valid name of a driver: use a-z, 0-9 and single hyphens, as in acme or big-cloud"
        )
    if point := registry.providers().get(name):
        raise UsageError(
            f"a provider called {name!r} is already installed ({point.value}); choose another name for the new driver"
        )
    place = folder or Path(f"skypool-{name}")
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise UsageError(f"{place} already exists and is not an empty folder; choose another one with --folder")
    for path, text in written(name).items():
        file = place / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    output.say(
        f"wrote a driver called {name} to {place}; it rents from a fake cloud until you make it call your provider"
    )
    output.say(f"next: cd {place} && pip install -e '.[dev]' && python -m pytest")


def written(name: str) -> dict[str, str]:
    """Return the files of a new driver by path, for the provider `name`, such as "big-cloud". Write nothing to disk."""
    template = resources.files("skypool") / "testing" / "template"
    return {_named(path, name): _named(text, name) for path, text in _files(template).items()}


def _files(folder: Traversable, above: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for each in sorted(folder.iterdir(), key=lambda each: each.name):
        if each.is_dir():
            found |= _files(each, f"{above}{each.name}/")
        elif each.name.endswith(_KEPT):
            found[above + each.name] = each.read_text("utf-8")
    return found


def _named(text: str, name: str) -> str:
    """Return a text or path of the template with `name` in place of Acme, the template's provider, in all spellings."""
    module = name.replace("-", "_")
    called = "".join(part.capitalize() for part in name.split("-"))
    text = re.sub(r"_acme\b", f"_{module}", text)
    text = re.sub(r"ACME(?!_METADATA)", module.upper(), text)  # the fake cloud sets $ACME_METADATA on its machines
    return text.replace("Acme", called).replace("acme", name)
