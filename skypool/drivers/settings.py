"""Checks of a driver's settings, and the data tables of drivers' packages."""

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

# A page that answers with the public address of the machine that asks, and nothing else.
_ADDRESS = "https://checkip.amazonaws.com"


def settings_named(kind: type[T]) -> type[T]:
    """Decorate a driver's dataclass so that settings which it does not have are a `UsageError` with the nearest."""
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
            raise UsageError(f"{kind.__name__}: {e} (its settings are {', '.join(known)})") from None
        init(self, *args, **settings)

    kind.__init__ = checked  # type: ignore[method-assign,assignment]  # what a dataclass has is made in the same way
    return kind


def words(name: str, value: object, shape: str, like: str, known: Iterable[str] = ()) -> tuple[str, ...] | None:
    """A setting that is a word or several of them, each of this shape (a regular expression); None stays None.

    Args:
        like: what one looks like; known: those there are, as far as they are known, for the nearest spelling.

    Raises:
        UsageError: it is something else.
    """
    if value is None:
        return None
    several: list[object] = [*value] if isinstance(value, (list, tuple)) else [value]
    if not several:
        raise UsageError(f"{name} is an empty list; leave it out, or name {like}")
    for each in several:
        if not isinstance(each, str) or not re.fullmatch(shape, each):
            close = nearest(each, known, 2) if isinstance(each, str) else []
            hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"it is like {like}"
            raise UsageError(f"{each!r} is no {name}: {hint}")
    return tuple(map(str, several))


Shape = tuple[str, str, bool]
"""The regular expression of a setting's word, an example of it, and whether it may be several words."""


def settle(driver: object, shapes: Mapping[str, Shape], known: Mapping[str, Iterable[str]]) -> None:
    """Check a driver's settings, and make tuples of those that may be several.

    Args:
        shapes: name -> (shape, like, whether it may be several), as `words` has them; known: as there, by name.

    Raises:
        UsageError: one of them cannot mean anything.
    """
    for name, (shape, like, several) in shapes.items():
        value = getattr(driver, name)
        checked = words(name, value, shape, like, known.get(name, ()))
        if several:
            object.__setattr__(driver, name, checked)
        elif isinstance(value, (list, tuple)):
            raise UsageError(f"{name} is one word like {like}, not {value!r}")


_PLAIN: Mapping[Any, tuple[str, Any]] = {
    bool: ("True or False", bool),
    int: ("a whole number", int),
    float: ("a number", (int, float)),
    str: ("a text", str),
    Path: ("a path", (str, os.PathLike)),
}


def plain(driver: DataclassInstance, **kinds: type) -> None:
    """Check settings that are no more than `strict=bool`, `bid=float` or `config=Path`; paths become text.

    Raises:
        UsageError: one is something else, or empty; None will do where it is the default.
    """
    for name, kind in kinds.items():
        value = getattr(driver, name)
        about = driver.__dataclass_fields__[name]
        said, right = _PLAIN[kind]
        if value is None and about.default is None:
            continue
        endless = isinstance(value, float) and not math.isfinite(value)
        if not isinstance(value, right) or (isinstance(value, bool) and kind is not bool) or value == "" or endless:
            raise UsageError(f"{name} is {said}, not {repr(value) if about.repr else f'of {type(value)}'}")
        if isinstance(value, os.PathLike):
            object.__setattr__(driver, name, os.fspath(value))


def table(package: str, file: str) -> Any:
    """What a JSON file of a driver's package says."""
    return json.loads((files(package) / file).read_text("utf-8"))


def surroundings(start: str | tuple[str, ...], files: Mapping[str, str]) -> Hashable:
    """What a client is made from, which is made anew when it changes: of the environment what begins so, and files.

    Args:
        files: the path of each, by the variable that may name another one. Renewed credentials are written there.
    """
    paths = [Path(os.environ.get(name) or usual).expanduser() for name, usual in files.items()]
    written = [each.stat().st_mtime_ns for each in paths if each.is_file()]
    return frozenset(each for each in os.environ.items() if each[0].startswith(start)), *written


def filled(shape: Any, values: Mapping[str, Any]) -> Any:
    """A question's shape with "$name" and "$name.part" replaced by that value, and left out where that is None."""
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
    """From where machines may be logged in to: those given, or this machine's own public address alone."""
    return [each if "/" in each else f"{each}/32" for each in given or [public_network()]]


def public_network() -> str:
    """This machine's own address as the world sees it, as a network: "203.0.113.7/32".

    Raises:
        ProviderError: it cannot be found.
    """
    import urllib.request  # slow to import, and only launches need it

    try:
        with urllib.request.urlopen(_ADDRESS, timeout=10) as answer:
            return str(ipaddress.IPv4Network(answer.read(64).decode().strip()))
    except (OSError, ValueError) as e:
        raise ProviderError(
            f"port 22 of the machines is opened to this machine's public address alone, and {_ADDRESS} does not say "
            f"what that is ({e}); say it yourself: ssh_from='203.0.113.7'"
        ) from e
