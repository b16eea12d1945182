"""Finds drivers by name: installed packages with an entry point in the group `skypool.providers`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NotRequired, TypedDict

from skypool.drivers.contract import Driver
from skypool.errors import SkypoolError, UsageError, nearest

GROUP = "skypool.providers"
"""Entry-point group of drivers."""

REHEARSALS = "skypool.rehearsals"
"""Entry-point group of drivers that rent nothing real. They are found by name, and are not listed as installed."""


DriverNote = TypedDict(
    "DriverNote",
    {"provider": str, "class": str, "settings": dict[str, Any], "without": NotRequired[list[str]]},
)
"""A driver as JSON: its name, its class as "package.module:Class", its settings, and the names of those left out."""


def providers(group: str = GROUP) -> dict[str, EntryPoint]:
    """Return the installed drivers by name. None of them is imported.

    Raises:
        UsageError: two distributions claim one name.
    """
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise UsageError(
                f"two installed packages both provide {point.name!r} ({other.value} and {point.value}); uninstall one"
            )
    return found


def driver(name: str) -> Driver:
    """Return a driver by name, with its default settings.

    Raises:
        UsageError: no installed package provides it.
    """
    known = providers()
    if name not in known and name in (rehearsals := providers(REHEARSALS)):
        known = rehearsals
    if name not in known:
        close = nearest(name, known)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise UsageError(f"no provider is called {name!r}; {hint}installed: {', '.join(sorted(known))}")
    return _checked(known[name].load()(), known[name].value)


def _checked(made: object, where: str) -> Driver:
    """Return an object that was made as a driver.

    Raises:
        UsageError: it lacks a verb of a driver.
    """
    if not isinstance(made, Driver):
        raise UsageError(f"{where} is no skypool driver: it lacks a verb of skypool.drivers.contract.Driver")
    return made


def install_command(provider: str, package: str) -> str:
    """Return the command that installs a package which a provider's driver needs.

    It names the extra of the driver's distribution, if that has one of the provider's name: skypool has one for each
    of its drivers. Otherwise it names the package.
    """
    for point in entry_points(group=GROUP, name=provider):
        if point.dist is not None and provider in (point.dist.metadata.get_all("Provides-Extra") or ()):
            return f"pip install '{point.dist.name}[{provider}]'"
    return f"pip install {package}"


def ready(names: Sequence[str] = ()) -> tuple[list[Driver], dict[str, Exception]]:
    """Make every installed driver that needs no settings, or the drivers of these names.

    Returns:
        The drivers, and by name why the others cannot be made.
    """
    drivers: list[Driver] = []
    left_out: dict[str, Exception] = {}
    for name in names or sorted(providers()):
        try:
            drivers.append(driver(name))
        except (SkypoolError, ImportError) as e:
            left_out[name] = e
    return drivers, left_out


# --- a driver on paper ---------------------------------------------------------------------------------------


def noted(driver: Driver) -> DriverNote:
    """Return a driver as JSON from which `made` makes it again: its name and its settings, without its secrets.

    A secret is a field with `repr=False`. "without" has the names of settings that were given and are not written down:
    secrets, and values that are neither plain nor a dataclass of the driver's own.
    """
    without: list[str] = []
    note: DriverNote = {
        "provider": driver.name,
        "class": _path(type(driver)),
        "settings": _settings(driver, without),
    }
    if without:
        note["without"] = without
    return note


def made(note: DriverNote) -> Driver:
    """Return the driver that `noted` wrote down.

    A setting that was left out has its default, so credentials come from the environment.

    Raises:
        UsageError: it is not installed any more, or cannot be made from what was written down.
    """
    name = note["provider"]
    path = note["class"]
    without = note.get("without", ())
    try:
        kind = _found(path)
        settings = {key: _plain(value, path) for key, value in note["settings"].items()}
        return _checked(kind(**settings), path)
    except (ImportError, AttributeError, TypeError, ValueError, SkypoolError) as e:
        lacks = f" without {', '.join(without)}, which is kept nowhere" if without else ""
        raise UsageError(f"the driver {name!r} ({path}) cannot be made again{lacks}: {e}") from e


def _settings(value: Any, without: list[str]) -> dict[str, Any]:
    """Return the fields that differ from their defaults. Names of those that cannot be written are put in `without`."""
    found: dict[str, Any] = {}
    if not is_dataclass(value):
        without.append("its settings")
        return found
    for field in fields(value):
        given = getattr(value, field.name)
        if not field.init or given == _default(field) or not (field.repr or given):
            continue
        try:
            if not field.repr:
                raise TypeError("a secret")
            found[field.name] = _noted(given, without)
        except TypeError:
            without.append(field.name)
    return found


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _noted(value: Any, without: list[str]) -> Any:
    """Return a value as JSON.

    Raises:
        TypeError: it is nothing plain.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_noted(each, without) for each in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _noted(each, without) for key, each in value.items()}}
    if is_dataclass(value) and not isinstance(value, type):
        return {"class": _path(type(value)), "settings": _settings(value, without)}
    raise TypeError(f"{value!r} is nothing plain")


def _plain(value: Any, driver: str) -> Any:
    """Return the value that `_noted` wrote down.

    Raises:
        UsageError: its class is neither the driver's nor skypool's.
    """
    match value:
        case list(items):
            return tuple(_plain(each, driver) for each in items)
        case {"dict": dict(items)}:
            return {key: _plain(each, driver) for key, each in items.items()}
        case {"class": str(path), "settings": dict(settings)}:
            if _top(path) not in ("skypool", _top(driver)):
                raise UsageError(f"{path} is neither the driver's nor skypool's")
            return _found(path)(**{key: _plain(each, driver) for key, each in settings.items()})
    return value


def _path(kind: type) -> str:
    """Return where a class is: "package.module:Class"."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _top(path: str) -> str:
    """Return the top package of a class's path."""
    module, _, _ = path.partition(":")
    return module.partition(".")[0]


def _found(path: str) -> Any:
    """Return the class at a path."""
    module, _, name = path.partition(":")
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))
