"""Helpers for drivers: they check the user's settings, and read data tables from the driver's package.

`settings_named`, `settle`, `words` and `plain` check settings, and raise UsageError for invalid settings. `table` reads
a JSON file. `networks` and `public_network` return the networks from which users may log in. `surroundings` tells when
a driver must make a new client object of the provider's SDK.
"""

from __future__ import annotations

import functools
import inspect
import ipaddress
import json
import math
import os
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from skypool import tracebacks
from skypool.errors import ProviderError, UsageError, nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

tracebacks.install()
T = TypeVar("T")

# A web page whose whole text is the public address of the computer that requests the page.
_ADDRESS = "https://checkip.amazonaws.com"


def settings_named(kind: type[T]) -> type[T]:
    """Replace the `__init__` of a driver's dataclass, so that wrong settings raise UsageError instead of TypeError.

    Use it as a class decorator above `dataclass`. It changes the class `kind` in place and returns it. The new
    `__init__` raises UsageError for unknown, missing or repeated settings. For an unknown setting, the message suggests
    the nearest known setting and lists all known settings.
    """
    init: Any = kind.__init__
    signature = inspect.signature(init)
    known = [name for name in signature.parameters if name != "self"]

    @functools.wraps(init)
    def checked(self: T, *args: Any, **settings: Any) -> None:
        for name in settings:
            if name not in known:
                close = nearest(name, known, 1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise UsageError(
                    f"the driver {kind.__name__} has no setting {name!r}{hint} (its settings are: {', '.join(known)})"
                )
        try:
            signature.bind(self, *args, **settings)
        except TypeError as e:
            raise UsageError(
                f"the arguments of {kind.__name__}(…) are wrong: {e}; the settings of this driver are: "
                f"{', '.join(known)}"
            ) from None
        init(self, *args, **settings)

    kind.__init__ = checked  # type: ignore[method-assign,assignment]  # dataclasses set __init__ the same way
    return kind


def words(name: str, value: object, shape: str, like: str, known: Iterable[str] = ()) -> tuple[str, ...] | None:
    """Check a setting that is one string or a list of strings, and return the strings as a tuple. None stays None.

    Args:
        name: name of the setting, for the error message.
        value: value of the setting: a string, a list or tuple of strings, or None.
        shape: regular expression that each string must match as a whole.
        like: an example of a valid string, in quotation marks, for the error message.
        known: known valid strings, from which the error message suggests the most similar. Other strings are accepted,
            too, if they match `shape`.

    Raises:
        UsageError: the list is empty, or an element is not a string or does not match `shape`.
    """
    if value is None:
        return None
    several: list[object] = [*value] if isinstance(value, (list, tuple)) else [value]
    if not several:
        raise UsageError(f"{name} is an empty list; leave this setting out, or give at least one value such as {like}")
    for each in several:
        if not isinstance(each, str) or not re.fullmatch(shape, each):
            close = nearest(each, known, 2) if isinstance(each, str) else []
            hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"use a value such as {like}"
            raise UsageError(f"{each!r} is not a valid {name}; {hint}")
    return tuple(map(str, several))


Shape = tuple[str, str, bool]
"""The required form of a string setting, as three values.

They are a regular expression that each string must match as a whole, an example in quotation marks for error messages,
and True if the setting may be a list of such strings.
"""


def settle(driver: object, shapes: Mapping[str, Shape], known: Mapping[str, Iterable[str]]) -> None:
    """Check string settings of a driver, and replace those that may be lists by tuples. None is accepted and stays.

    Args:
        driver: the driver, whose attributes are replaced. It may be a frozen dataclass.
        shapes: a dict from the name of a setting to its required form: (regular expression for the whole string,
            example for error messages, True if the setting may be a list of such strings).
        known: a dict from the name of a setting to valid strings, from which error messages suggest the most similar.

    Raises:
        UsageError: a string does not match the required form, or a setting is a list although it may not be one.
    """
    for name, (shape, like, several) in shapes.items():
        value = getattr(driver, name)
        checked = words(name, value, shape, like, known.get(name, ()))
        if several:
            object.__setattr__(driver, name, checked)
        elif isinstance(value, (list, tuple)):
            raise UsageError(f"{name} must be one string such as {like}, not the list {value!r}")


_PLAIN: Mapping[Any, tuple[str, Any]] = {
    bool: ("True or False", bool),
    int: ("a whole number", int),
    float: ("a number", (int, float)),
    str: ("a non-empty string", str),
    Path: ("a path", (str, os.PathLike)),
}


def plain(driver: DataclassInstance, **kinds: type) -> None:
    """Check the types of a driver's settings, and replace `Path` objects among the settings by strings.

    None is accepted if it is the default of the setting. An int is accepted for float, and a string for Path. True and
    False are not accepted for int and float.

    Args:
        driver: the driver, whose attributes are replaced. It may be a frozen dataclass.
        kinds: the required type of each setting, such as `strict=bool`: bool, int, float, str or Path.

    Raises:
        UsageError: a setting is of another type, is "", or is an infinite number or NaN. The message does not show the
            value of a secret (a field with `repr=False`).
    """
    for name, kind in kinds.items():
        value = getattr(driver, name)
        about = driver.__dataclass_fields__[name]
        said, right = _PLAIN[kind]
        if value is None and about.default is None:
            continue
        endless = isinstance(value, float) and not math.isfinite(value)
        if not isinstance(value, right) or (isinstance(value, bool) and kind is not bool) or value == "" or endless:
            shown = repr(value) if about.repr or value == "" else f"a value of type {type(value).__name__}"
            raise UsageError(f"{name} must be {said}, not {shown} (in the arguments of {type(driver).__name__})")
        if isinstance(value, os.PathLike):
            object.__setattr__(driver, name, os.fspath(value))


def table(package: str, file: str) -> Any:
    """Return the parsed content of a JSON file in a driver's package, such as "skypool_acme".

    The file is read at each call.
    """
    return json.loads((files(package) / file).read_text("utf-8"))


def surroundings(start: str | tuple[str, ...], files: Mapping[str, str]) -> Hashable:
    """Return a hashable value that changes when environment variables or files of a provider's SDK change.

    A driver compares the value with its former value. If they differ, the driver makes a new client object of the SDK.
    The value contains the environment variables whose names begin with `start`, and the modification times of the files
    that exist.

    Args:
        start: prefix of the names of environment variables, or a tuple of several prefixes, such as "AWS_".
        files: the files that the SDK reads, such as a credentials file: a dict from environment variable to the usual
            path of a file. If the variable is set, its value is the path instead. "~" is expanded.
    """
    paths = [Path(os.environ.get(name) or usual).expanduser() for name, usual in files.items()]
    written = [each.stat().st_mtime_ns for each in paths if each.is_file()]
    return frozenset(each for each in os.environ.items() if each[0].startswith(start)), *written


def networks(given: Sequence[str] | None) -> list[str]:
    """Return the networks from which users may log in to machines, such as ["203.0.113.7/32"].

    `given` are the networks or addresses in the driver's settings. Their order is kept, and they are not checked. An
    address without "/" gets "/32". If `given` is None or empty, the result is this computer's public address, which is
    requested from a public web page.
    """
    return [each if "/" in each else f"{each}/32" for each in given or [public_network()]]


def public_network() -> str:
    """Return the public IPv4 address of this computer as a network, such as "203.0.113.7/32".

    It is requested from a public web page at each call. Each wait for the page is limited to 10 s.

    Raises:
        ProviderError: the page does not answer, or does not answer with an IPv4 address.
    """
    import urllib.request  # slow to import, and only launches need it

    try:
        with urllib.request.urlopen(_ADDRESS, timeout=10) as answer:
            return str(ipaddress.IPv4Network(answer.read(64).decode().strip()))
    except (OSError, ValueError) as e:
        raise ProviderError(
            f"the public address of this computer, to which port 22 of the rented machines is opened, is unknown: "
            f"{_ADDRESS} did not return an address ({e}); pass the address to the driver yourself, as in "
            "ssh_from='203.0.113.7'"
        ) from e
