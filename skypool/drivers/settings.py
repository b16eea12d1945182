"""Helpers for drivers: they check the user's settings, and read data tables from the driver's package.

`settings_named`, `settle`, `words` and `plain` check settings, and raise UsageError for bad ones. `table` reads a
JSON table, and `filled` fills in a JSON template. `networks` and `public_network` give the networks that may log in.
`surroundings` tells when a client of a provider's SDK must be made again.
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

# A web page that answers with nothing but the public address of the machine that asks.
_ADDRESS = "https://checkip.amazonaws.com"


def settings_named(kind: type[T]) -> type[T]:
    """Replace the `__init__` of a driver's dataclass, so that unknown settings raise UsageError.

    Use this function as a class decorator. It changes the class in place and returns it. The error suggests the nearest
    known setting, and lists all known ones. Missing or repeated settings raise UsageError, too.
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
                raise UsageError(f"{kind.__name__} has no setting {name!r}{hint} (it has {', '.join(known)})")
        try:
            signature.bind(self, *args, **settings)
        except TypeError as e:
            raise UsageError(
                f"the arguments of {kind.__name__}(…) are wrong: {e}; its settings are {', '.join(known)}"
            ) from None
        init(self, *args, **settings)

    kind.__init__ = checked  # type: ignore[method-assign,assignment]  # dataclasses set __init__ the same way
    return kind


def words(name: str, value: object, shape: str, like: str, known: Iterable[str] = ()) -> tuple[str, ...] | None:
    """Check a setting that is one string or a list of strings, and return it as a tuple. Returns None for None.

    A single string becomes a tuple of one string. The strings are not changed.

    Args:
        name: name of the setting, for the error message.
        value: value of the setting.
        shape: regular expression that each string must match as a whole.
        like: an example of a valid string, for the error message.
        known: known valid strings, from which the error message suggests the nearest. A string that is not among them
            is accepted if it matches `shape`.

    Raises:
        UsageError: the list is empty, or an element is not a string of that shape.
    """
    if value is None:
        return None
    several: list[object] = [*value] if isinstance(value, (list, tuple)) else [value]
    if not several:
        raise UsageError(f"{name} is an empty list; leave it out, or name {like}")
    for each in several:
        if not isinstance(each, str) or not re.fullmatch(shape, each):
            close = nearest(each, known, 2) if isinstance(each, str) else []
            hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"expected a value like {like}"
            raise UsageError(f"{each!r} is not a valid {name}: {hint}")
    return tuple(map(str, several))


Shape = tuple[str, str, bool]
"""The required form of a setting: its regular expression, an example of it, and True if it may be a list."""


def settle(driver: object, shapes: Mapping[str, Shape], known: Mapping[str, Iterable[str]]) -> None:
    """Check string settings of a driver, and turn those that may be lists into tuples, in place. None stays None.

    Args:
        driver: the driver, whose attributes are checked. It may be a frozen dataclass.
        shapes: the required form of each setting, by the setting's name: a regular expression, an example, and True if
            the setting may be a list.
        known: known valid strings of each setting, by the setting's name. Error messages suggest the nearest.

    Raises:
        UsageError: a setting has a wrong shape, or is a list although it may not be one.
    """
    for name, (shape, like, several) in shapes.items():
        value = getattr(driver, name)
        checked = words(name, value, shape, like, known.get(name, ()))
        if several:
            object.__setattr__(driver, name, checked)
        elif isinstance(value, (list, tuple)):
            raise UsageError(f"{name} must be one string such as {like}, not {value!r}")


_PLAIN: Mapping[Any, tuple[str, Any]] = {
    bool: ("True or False", bool),
    int: ("a whole number", int),
    float: ("a number", (int, float)),
    str: ("a string", str),
    Path: ("a path", (str, os.PathLike)),
}


def plain(driver: DataclassInstance, **kinds: type) -> None:
    """Check the types of a driver's settings, and turn `Path` objects among them into strings, in place.

    None is accepted if it is the default of the setting. A whole number is accepted as a float. True and False are not
    accepted as numbers.

    Args:
        driver: the driver, whose attributes are checked. It may be a frozen dataclass.
        kinds: the required type of each setting, such as `strict=bool`. One of bool, int, float, str and Path.

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
            raise UsageError(f"{name} must be {said}, not {repr(value) if about.repr else f'of {type(value)}'}")
        if isinstance(value, os.PathLike):
            object.__setattr__(driver, name, os.fspath(value))


def table(package: str, file: str) -> Any:
    """Return the parsed content of a JSON file in a driver's package. The file is read at each call.

    Args:
        package: name of the package, such as "skypool_acme".
        file: name of the JSON file in that package.

    Raises:
        FileNotFoundError: the package has no such file.
    """
    return json.loads((files(package) / file).read_text("utf-8"))


def surroundings(start: str | tuple[str, ...], files: Mapping[str, str]) -> Hashable:
    """Return a hashable value that changes when the environment variables or files of an SDK client change.

    Make a new client when the value has changed. It contains the environment variables whose names begin with `start`,
    and the times at which the files were modified. Files that do not exist are left out.

    Args:
        start: prefix of the variables' names, or several prefixes.
        files: usual path of each file that the client reads, such as a credentials file. Each key is the environment
            variable that can name another path.
    """
    paths = [Path(os.environ.get(name) or usual).expanduser() for name, usual in files.items()]
    written = [each.stat().st_mtime_ns for each in paths if each.is_file()]
    return frozenset(each for each in os.environ.items() if each[0].startswith(start)), *written


def filled(shape: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of a JSON template in which "$name" and "$name.part" are replaced by values.

    "$name.part" reads a key or an attribute of the value. Only whole strings that begin with "$" are replaced. A dict
    entry whose value becomes None is left out. In a list, None stays.

    Args:
        shape: the template: nested dicts and lists, and strings that may begin with "$". It is not changed.
        values: values by name.

    Raises:
        KeyError: `values` has no such name, or a value that is a mapping lacks the part.
        AttributeError: a value that is no mapping lacks the part.
    """
    if isinstance(shape, dict):
        made = {key: filled(each, values) for key, each in shape.items()}
        return {key: each for key, each in made.items() if each is not None}
    if isinstance(shape, list):
        return [filled(each, values) for each in shape]
    if not isinstance(shape, str) or not shape.startswith("$"):
        return shape
    name, *parts = shape[1:].split(".")
    value = values[name]
    for part in parts:
        value = value[part] if isinstance(value, Mapping) else getattr(value, part)
    return value


def networks(given: Sequence[str] | None) -> list[str]:
    """Return the networks that may log in, such as ["203.0.113.7/32"]. An address without "/" gets "/32".

    The order is kept, and the addresses are not checked.

    Args:
        given: addresses or networks. If None or empty, the result is this machine's public address alone, which is
            requested from a web page (see `public_network`).

    Raises:
        ProviderError: `given` is None or empty, and the public address cannot be found.
    """
    return [each if "/" in each else f"{each}/32" for each in given or [public_network()]]


def public_network() -> str:
    """Return this machine's public IPv4 address as a network, such as "203.0.113.7/32".

    The address is requested from a public web page at each call. Each wait for the page is limited to 10 s.

    Raises:
        ProviderError: the page does not answer, or does not answer with an IPv4 address.
    """
    import urllib.request  # slow to import, and only launches need it

    try:
        with urllib.request.urlopen(_ADDRESS, timeout=10) as answer:
            return str(ipaddress.IPv4Network(answer.read(64).decode().strip()))
    except (OSError, ValueError) as e:
        raise ProviderError(
            f"port 22 of the machines is opened only to this machine's public address, but {_ADDRESS} did not return "
            f"that address ({e}); give it yourself as an argument of the provider: ssh_from='203.0.113.7'"
        ) from e
