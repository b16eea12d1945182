"""Registry of drivers: finds drivers by name, and stores them as JSON.

A driver's package makes the driver known by an entry point in the group `skypool.providers`. The ledger stores drivers
as JSON; `noted` and `made` write and read that JSON.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from skypool.drivers.contract import Driver
from skypool.errors import SkypoolError, UsageError, nearest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "skypool.providers"
"""Entry-point group of drivers."""

REHEARSALS = "skypool.rehearsals"
"""Entry-point group of drivers that rent nothing real. `driver` finds these, too; `providers` does so only if asked."""


DriverNote = TypedDict(
    "DriverNote",
    {"provider": str, "class": str, "settings": dict[str, Any], "without": NotRequired[list[str]]},
)
"""A driver as a JSON object.

"provider" is the driver's name, "class" its class as "package.module:Class", and "settings" its settings by name.
"without" has the names of settings that were left out, such as secrets; it is missing if none was left out.
"""


def providers(group: str = GROUP) -> dict[str, EntryPoint]:
    """Return the entry points of the drivers in a group, `GROUP` or `REHEARSALS`, by name. No driver is imported.

    Raises:
        UsageError: two installed packages provide different drivers of the same name.
    """
    from importlib.metadata import entry_points  # imported here because it takes long, and few pools need it

    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise UsageError(
                f"two installed packages both have a driver for the provider {point.name!r} ({other.value} and "
                f"{point.value}); uninstall one of the packages"
            )
    return found


def driver(name: str, **settings: object) -> Driver:
    """Import the driver of this name, and return an object of its class. Settings that are not given have defaults.

    Drivers for rehearsals, which rent nothing real, are found, too.

    Raises:
        UsageError: no installed package has a driver of this name, or two packages have different ones, or the driver
            lacks a method of `Driver`. For an unknown name, the message suggests similar ones.
        ImportError: the driver's package cannot be imported.
        Exception: any error of the driver's constructor, unchanged. skypool's own drivers raise UsageError if they have
            a setting without a default.
    """
    point = _entry_point(name, tuple(sys.path))
    return _checked(point.load()(**settings), point.value)


@functools.cache  # to read about all installed packages takes several milliseconds
def _entry_point(name: str, path: tuple[str, ...]) -> EntryPoint:
    """Return the entry point of the driver of this name. `path` is `sys.path`, by which packages are found."""
    known = providers()
    if name not in known:
        known = {**providers(REHEARSALS), **known}
    if name not in known:
        close = nearest(name, known)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise UsageError(f"no provider is called {name!r}; {hint}the installed ones are: {', '.join(sorted(known))}")
    return known[name]


def _checked(made: object, where: str) -> Driver:
    """Return the driver `made` unchanged. Raise UsageError, which names its class `where`, if it lacks a method."""
    if not isinstance(made, Driver):
        raise UsageError(
            f"the class {where} is not a skypool driver, because it lacks a method or the attribute `name`; give it "
            "everything that skypool.drivers.contract.Driver has"
        )
    return made


def install_command(provider: str, package: str) -> str:
    """Return the pip command that installs a package which a provider's driver needs, as text to show to the user.

    If the driver's distribution has an extra with the provider's name, the command names it, as in "pip install
    'skypool[aws]'". Otherwise, and for an unknown provider, it names the package. Nothing is installed.
    """
    from importlib.metadata import entry_points

    for point in entry_points(group=GROUP, name=provider):
        if point.dist is not None and provider in (point.dist.metadata.get_all("Provides-Extra") or ()):
            return f"pip install '{point.dist.name}[{provider}]'"
    return f"pip install {package}"


def ready(names: Sequence[str] = ()) -> tuple[list[Driver], dict[str, Exception]]:
    """Make the drivers with these names, or all installed drivers if `names` is empty, with their default settings.

    A driver is left out if making it raises a SkypoolError or an ImportError, for example because it needs settings.

    Returns:
        The pair (drivers, errors). The drivers are in the order of `names`, or in alphabetic order if that is empty.
        The errors are by the name of the driver that was left out.

    Raises:
        UsageError: `names` is empty, and two installed packages provide different drivers of the same name.
        Exception: any other error of a driver's constructor.
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
    """Return a driver as a JSON object from which `made` makes it again: its name, its class and its settings.

    The entry "settings" has the settings that differ from their defaults, except two kinds: secrets (fields with
    `repr=False`), and values that cannot be written as JSON. The names of these exceptions are in the entry "without",
    which is missing if there are none.
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
    """Make a driver from the JSON object that `noted` returned.

    Lists in the settings become tuples. A setting that `noted` left out gets its default value; most drivers then read
    their credentials from the environment.

    Raises:
        UsageError: the driver's package is not installed any more, or the constructor refuses the settings, for example
            because a secret was left out and has no default.
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
        cure = "install the version of the driver's package that rented the machines"
        if without and not isinstance(e, (ImportError, AttributeError)):
            cure = "set the driver's credentials in the environment"
        raise UsageError(
            f"the driver {name!r} ({path}) cannot be created from the settings in skypool's ledger{lacks}: {e}; {cure}"
        ) from e


def _settings(value: Any, without: list[str]) -> dict[str, Any]:
    """Return a dict of an object's non-default fields as JSON. Append the names of fields left out to `without`."""
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
    """Return the default value of a dataclass field, or `dataclasses.MISSING` for a field without a default."""
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _noted(value: Any, without: list[str]) -> Any:
    """Return a setting as JSON. Raise TypeError if that is impossible. Append names of fields left out to `without`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_noted(each, without) for each in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _noted(each, without) for key, each in value.items()}}
    if is_dataclass(value) and not isinstance(value, type):
        return {"class": _path(type(value)), "settings": _settings(value, without)}
    raise TypeError(
        f"the driver's setting {value!r} cannot be stored as JSON; use None, a number, a boolean, a string, a list, a "
        "tuple, a dataclass object or a dict with string keys"
    )


def _plain(value: Any, driver: str) -> Any:
    """Return the setting for a JSON value of `_noted`. Lists become tuples. `driver` is the driver's class location."""
    match value:
        case list(items):
            return tuple(_plain(each, driver) for each in items)
        case {"dict": dict(items)}:
            return {key: _plain(each, driver) for key, each in items.items()}
        case {"class": str(path), "settings": dict(settings)}:
            # for security, classes of no other packages are imported
            if _top(path) not in ("skypool", _top(driver)):
                raise UsageError(
                    f"the settings name the class {path}, which is neither from the driver's package nor from skypool, "
                    "so this class is not imported"
                )
            return _found(path)(**{key: _plain(each, driver) for key, each in settings.items()})
    return value


def _path(kind: type) -> str:
    """Return the location of a class as "package.module:Class". For a nested class, "package.module:Outer.Inner"."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _top(path: str) -> str:
    """Return the top-level package in a class location: "package" for "package.module:Class"."""
    module, _, _ = path.partition(":")
    return module.partition(".")[0]


def _found(path: str) -> Any:
    """Import and return the class at a location "package.module:Class"."""
    module, _, name = path.partition(":")
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))
