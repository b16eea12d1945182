"""Registry of drivers, the classes that talk to cloud providers: finds them by name, and turns them into JSON and back.

A driver's package makes the driver known by an entry point in the group `skypool.providers`.
"""

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
"""Entry-point group of drivers that rent nothing real. They are found by name, but are not listed as installed."""


DriverNote = TypedDict(
    "DriverNote",
    {"provider": str, "class": str, "settings": dict[str, Any], "without": NotRequired[list[str]]},
)
"""A driver as JSON.

The JSON object has the driver's name, its class as "package.module:Class", and its settings. "without" has the names of
settings that were left out.
"""


def providers(group: str = GROUP) -> dict[str, EntryPoint]:
    """Return the entry points of the installed drivers by name. No driver is imported. Empty if none is installed.

    Args:
        group: entry-point group to read.

    Raises:
        UsageError: two packages provide different drivers of the same name.
    """
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise UsageError(
                f"two installed packages both provide {point.name!r} ({other.value} and {point.value}); "
                f"uninstall one of them"
            )
    return found


def driver(name: str) -> Driver:
    """Import the driver of this name, and return an object of it with default settings.

    Drivers that only rehearse, and rent nothing real, are found, too. Other errors of the driver's constructor are
    raised as they are.

    Raises:
        UsageError: no installed package provides the name; the message suggests similar ones. Also if the class lacks a
            method of `Driver`. skypool's own drivers raise UsageError, too, if they need settings.
        ImportError: the driver's package cannot be imported.
    """
    known = providers()
    if name not in known and name in (rehearsals := providers(REHEARSALS)):
        known = rehearsals
    if name not in known:
        close = nearest(name, known)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise UsageError(f"no provider is called {name!r}; {hint}the installed ones are: {', '.join(sorted(known))}")
    return _checked(known[name].load()(), known[name].value)


def _checked(made: object, where: str) -> Driver:
    """Return `made` unchanged, after a check that it has all methods of `Driver`.

    Args:
        made: an object that was made as a driver.
        where: location of its class, for the error message.

    Raises:
        UsageError: it lacks a method of `Driver`.
    """
    if not isinstance(made, Driver):
        raise UsageError(
            f"{where} is not a skypool driver: it lacks a method of skypool.drivers.contract.Driver; implement "
            "all of its methods"
        )
    return made


def install_command(provider: str, package: str) -> str:
    """Return the pip command that installs a package which a provider's driver needs, as text to show to the user.

    If the driver's distribution has an extra named like the provider, the command names that extra: "pip install
    'skypool[aws]'". Otherwise, also for an unknown provider, the command names the package. Nothing is installed.

    Args:
        provider: name of the driver.
        package: name of the missing package.
    """
    for point in entry_points(group=GROUP, name=provider):
        if point.dist is not None and provider in (point.dist.metadata.get_all("Provides-Extra") or ()):
            return f"pip install '{point.dist.name}[{provider}]'"
    return f"pip install {package}"


def ready(names: Sequence[str] = ()) -> tuple[list[Driver], dict[str, Exception]]:
    """Make the drivers of these names, or all installed drivers if `names` is empty, with their default settings.

    A driver that raises a SkypoolError or an ImportError, for example because it needs settings, is left out. Other
    errors of a driver's constructor are raised.

    Returns:
        The drivers, and a dict from each name that was left out to its error. The drivers are in the order of `names`,
        or in alphabetic order if that is empty.

    Raises:
        UsageError: `names` is empty, and two packages provide different drivers of the same name.
    """
    drivers: list[Driver] = []
    left_out: dict[str, Exception] = {}
    for name in names or sorted(providers()):
        try:
            drivers.append(driver(name))
        except (SkypoolError, ImportError) as e:
            left_out[name] = e
    return drivers, left_out


# --- a driver as JSON ----------------------------------------------------------------------------------------


def noted(driver: Driver) -> DriverNote:
    """Return a driver as a JSON object: its name, its class and its settings, without its secrets.

    Only settings that differ from their defaults are included. `made` makes the driver again from that object. A secret
    is a field with `repr=False`. "without" names the settings that were given but are left out. These are secrets, and
    values that are neither plain JSON nor a dataclass. The key is missing if nothing was left out.
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
    """Make a driver from the JSON object that `noted` returned. Lists in its settings become tuples.

    A setting that was left out gets its default, so the driver reads its credentials from the environment.

    Raises:
        UsageError: the driver is not installed any more, or cannot be made from its JSON, for example because a secret
            setting has no default.
    """
    name = note["provider"]
    path = note["class"]
    without = note.get("without", ())
    try:
        kind = _found(path)
        settings = {key: _plain(value, path) for key, value in note["settings"].items()}
        return _checked(kind(**settings), path)
    except (ImportError, AttributeError, TypeError, ValueError, SkypoolError) as e:
        lacks = f" without {', '.join(without)}, which the ledger does not store" if without else ""
        raise UsageError(
            f"the driver {name!r} ({path}) cannot be created from the settings in skypool's ledger{lacks}: "
            f"{e}; install its package or set its credentials"
        ) from e


def _settings(value: Any, without: list[str]) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults, as JSON by field name.

    Names of fields that cannot be written as JSON, and of secrets (`repr=False`) that are set, are appended to
    `without`. If `value` is no dataclass, the result is empty and "its settings" is appended.
    """
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
    """Return the default of a dataclass field, made by the field's factory if there is one.

    Returns `dataclasses.MISSING` for a field without a default.
    """
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _noted(value: Any, without: list[str]) -> Any:
    """Return a value as JSON.

    None, numbers, booleans and strings stay as they are. Lists and tuples become lists. A dict becomes {"dict": …}. A
    dataclass becomes {"class": …, "settings": …}; names of its fields that cannot be written are appended to `without`.

    Raises:
        TypeError: the value is of another type, or is a dict with keys other than strings.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_noted(each, without) for each in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _noted(each, without) for key, each in value.items()}}
    if is_dataclass(value) and not isinstance(value, type):
        return {"class": _path(type(value)), "settings": _settings(value, without)}
    raise TypeError(
        f"the setting {value!r} of a driver cannot be stored as JSON; use plain values, lists, dataclasses or "
        "dictionaries with text keys"
    )


def _plain(value: Any, driver: str) -> Any:
    """Return the value that `_noted` turned into JSON. Lists become tuples, so a list does not come back as a list.

    Args:
        value: the JSON.
        driver: the driver's class, as "package.module:Class". Only classes of its top-level package and of skypool are
            made.

    Raises:
        UsageError: the JSON names a class of another package.
    """
    match value:
        case list(items):
            return tuple(_plain(each, driver) for each in items)
        case {"dict": dict(items)}:
            return {key: _plain(each, driver) for key, each in items.items()}
        case {"class": str(path), "settings": dict(settings)}:
            if _top(path) not in ("skypool", _top(driver)):
                raise UsageError(
                    f"the ledger's settings of the driver name the class {path}, which is neither from the "
                    "driver's package nor from skypool, so it is not imported"
                )
            return _found(path)(**{key: _plain(each, driver) for key, each in settings.items()})
    return value


def _path(kind: type) -> str:
    """Return the location of a class as "package.module:Class". A nested class is "package.module:Outer.Inner"."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _top(path: str) -> str:
    """Return the top-level package of a class location: "package" of "package.module:Class". It is not imported."""
    module, _, _ = path.partition(":")
    return module.partition(".")[0]


def _found(path: str) -> Any:
    """Import and return the class at a location "package.module:Class".

    Raises:
        ImportError: the module cannot be imported.
        AttributeError: the module has no such class.
    """
    module, _, name = path.partition(":")
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))
