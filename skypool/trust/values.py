"""Defines how values of the standard library, such as dates, paths and deques, are written in skypool's data format.

A value is written as the name of its type and the arguments to build the value from. This module takes values apart for
writing, and builds them in reading.
"""

from __future__ import annotations

import array
import datetime
import decimal
import fractions
import ipaddress
import pathlib
import re
import types
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

from skypool.trust.bounded_reader import FAULTY, NotData
from skypool.trust.decoding import Maker, Reading

_LONGEST_NUMBER = 100_000
"""The greatest length of a Decimal in characters, and of a Fraction's numerator and denominator in bits.

Arithmetic with longer numbers is slow.
"""
_FACTORIES = {kind.__name__: kind for kind in (int, float, str, bytes, bool, list, dict, set, tuple)}
"""The types that may be the `default_factory` of a defaultdict, by name."""
CHAINS = (deque, defaultdict, slice)
"""Types whose deallocation is recursive in CPython. Freeing a long chain, each object in the next, crashes Python."""
_INT_ARRAYS = "bBhHiIlLqQfd"
_NUMBER = (int, type(None))
_KINDS_OF_ADDRESS = ("Address", "Network", "Interface")


def _arguments(args: tuple[Any, ...], *kinds: type | tuple[type, ...], optional: int = 0) -> None:
    """Raise NotData unless a value's arguments have these exact types. The last `optional` ones may be missing."""
    if not len(kinds) - optional <= len(args) <= len(kinds):
        raise NotData(
            f"it contains {len(args)} arguments for one of its parts, which takes {len(kinds)}", advice=FAULTY
        )
    for arg, kind in zip(args, kinds, strict=False):
        if kind is not object and type(arg) is not kind and not (isinstance(kind, tuple) and type(arg) in kind):
            raise NotData(
                f"it contains an argument of the wrong type {type(arg).__name__} for one of its parts",
                advice=FAULTY,
            )


def plainly(make: Callable[..., Any], *kinds: type | tuple[type, ...], optional: int = 0) -> Maker:
    """Return a function that checks the number and exact types of arguments, and then calls `make` with them.

    The function takes a decoder, which it does not use, and a tuple of arguments. It raises NotData if the arguments
    are wrong, and does not catch exceptions of `make`.

    Args:
        make: the function or class that builds the value.
        kinds: the type of each argument; a tuple of types allows each of them.
        optional: how many arguments may be missing at the end.
    """

    def made(_: Reading, args: tuple[Any, ...]) -> Any:
        _arguments(args, *kinds, optional=optional)
        return make(*args)

    return made


def check_chain(parts: Iterable[Any]) -> None:
    """Raise NotData if one of these items is a deque, defaultdict, slice or numpy array of objects, or of a subclass.

    Call this with the items that are directly inside such a container. CPython frees these containers recursively, so
    freeing a long chain of them, each inside the next, would crash Python.
    """
    for part in parts:
        if isinstance(part, CHAINS) or (type(part).__name__ == "ndarray" and part.dtype.hasobject):
            raise NotData(
                f"it contains an object of the type {type(part).__name__} directly in a deque, defaultdict or array of "
                "objects, and freeing a long chain of these crashes Python",
                advice="Return nested lists or dictionaries instead",
            )


# --- containers ----------------------------------------------------------------------------------------------


def _counter(_: Reading, args: tuple[Any, ...]) -> Counter[Any]:
    _arguments(args, dict)
    made: Counter[Any] = Counter()
    dict.update(made, *args)
    return made


def _ordered(_: Reading, args: tuple[Any, ...]) -> OrderedDict[Any, Any]:
    """Return an OrderedDict, built from two dictionaries: one of its items, and one of its attributes."""
    # the OrderedDict of torch's `state_dict()` has the attribute `_metadata`
    _arguments(args, dict, dict)
    if set(args[1]) - {"_metadata"}:
        raise NotData(
            "it contains an OrderedDict with an attribute other than _metadata", advice="Return a dict instead"
        )
    made = OrderedDict(args[0])
    made.__dict__.update(args[1])
    return made


def _deque(_: Reading, args: tuple[Any, ...]) -> deque[Any]:
    _arguments(args, list, (int, type(None)))
    check_chain(args[0])
    return deque(*args)


def _defaultdict(_: Reading, args: tuple[Any, ...]) -> defaultdict[Any, Any]:
    _arguments(args, (str, type(None)), dict)
    name, items = args
    if name is not None and name not in _FACTORIES:
        raise NotData(
            f"it contains a defaultdict with the default_factory {name!r:.40}, a function that Python would call for "
            "each missing key",
            name,
            advice="Return a dict instead, or a defaultdict of a built-in type such as list",
        )
    check_chain(items.values())
    made: defaultdict[Any, Any] = defaultdict(None if name is None else _FACTORIES[name])
    dict.update(made, items)
    return made


def _namespace(_: Reading, args: tuple[Any, ...]) -> types.SimpleNamespace:
    _arguments(args, dict)
    if not all(type(key) is str and not key.startswith("__") for key in args[0]):
        raise NotData(
            "it contains a SimpleNamespace with an attribute whose name begins with '__' or is not a string",
            advice="Return a dict instead",
        )
    return types.SimpleNamespace(**args[0])


def _slice(_: Reading, args: tuple[Any, ...]) -> slice:
    _arguments(args, _NUMBER, _NUMBER, _NUMBER)
    return slice(*args)


# --- numbers, times, places ----------------------------------------------------------------------------------


def _decimal(r: Reading, args: tuple[Any, ...]) -> decimal.Decimal:
    _arguments(args, str)
    if len(args[0]) > _LONGEST_NUMBER:
        raise NotData(
            f"it contains a Decimal of {len(args[0])} characters, and the limit is {_LONGEST_NUMBER}",
            advice="Return this Decimal as a string",
        )
    return decimal.Decimal(args[0])


def _fraction(_: Reading, args: tuple[Any, ...]) -> fractions.Fraction:
    _arguments(args, int, int)
    if max(map(int.bit_length, args)) > _LONGEST_NUMBER:
        raise NotData(
            f"it contains a Fraction whose numerator or denominator has more than {_LONGEST_NUMBER} bits",
            advice="Return numerator and denominator as strings",
        )
    return fractions.Fraction(*args)


def _zone(zone: Any) -> Any:
    if zone is not None and type(zone) not in (datetime.timezone, zoneinfo.ZoneInfo):
        raise NotData(
            f"it contains a time or datetime with a time zone of the type {type(zone).__name__}",
            advice="Use time zones of the type datetime.timezone or zoneinfo.ZoneInfo",
        )
    return zone


def _time(_: Reading, args: tuple[Any, ...]) -> datetime.time:
    _arguments(args, *[int] * 4, object, int)
    hour, minute, second, micro, zone, fold = args
    return datetime.time(hour, minute, second, micro, _zone(zone), fold=fold)


def _datetime(_: Reading, args: tuple[Any, ...]) -> datetime.datetime:
    _arguments(args, *[int] * 7, object, int)
    year, month, day, hour, minute, second, micro, zone, fold = args
    return datetime.datetime(year, month, day, hour, minute, second, micro, _zone(zone), fold=fold)


def _zoneinfo(_: Reading, args: tuple[Any, ...]) -> zoneinfo.ZoneInfo:
    _arguments(args, str)
    (key,) = args
    if not re.fullmatch(r"[A-Za-z0-9_+\-]{1,40}(/[A-Za-z0-9_+\-]{1,40}){0,3}", key):
        raise NotData(
            f"it contains a ZoneInfo with the invalid name {key[:40]!r}",
            advice="Use time zones with a name such as 'Europe/Berlin'",
        )
    return zoneinfo.ZoneInfo(key)


_PATHS: dict[str, Callable[..., pathlib.PurePath]] = {
    "path": pathlib.Path,
    "posix": pathlib.PurePosixPath,
    "windows": pathlib.PureWindowsPath,
}
_ADDRESSES = {f"IPv{n}{what}": getattr(ipaddress, f"IPv{n}{what}") for n in (4, 6) for what in _KINDS_OF_ADDRESS}


def _path(_: Reading, args: tuple[Any, ...]) -> pathlib.PurePath:
    _arguments(args, str, str)
    if args[0] not in _PATHS or args[1].count("/") + args[1].count("\\") > 1000:
        raise NotData(
            "it contains a path with more than 1000 separators"
            if args[0] in _PATHS
            else f"it contains a path of the unknown kind {args[0][:40]!r}",
            advice="Return this path as a string",
        )
    return _PATHS[args[0]](args[1])


def _address(_: Reading, args: tuple[Any, ...]) -> Any:
    _arguments(args, str, str)
    if args[0] not in _ADDRESSES or len(args[1]) > 200:
        raise NotData(
            "it contains an IP address or network of more than 200 characters"
            if args[0] in _ADDRESSES
            else f"it contains an IP address or network of the unknown kind {args[0][:40]!r}",
            advice=FAULTY,
        )
    return _ADDRESSES[args[0]](args[1])


def _uuid(_: Reading, args: tuple[Any, ...]) -> uuid.UUID:
    _arguments(args, int, (int, type(None)))
    return uuid.UUID(int=args[0], is_safe=uuid.SafeUUID(args[1]))


def _array(_: Reading, args: tuple[Any, ...]) -> array.array[Any]:
    _arguments(args, str, int, bytes)
    code, size, data = args
    if len(code) != 1 or code not in _INT_ARRAYS or array.array(code).itemsize != size:
        raise NotData(
            f"it contains an array.array with items of {size} bytes and the type code {code[:40]!r}, which is unknown "
            "or means another size on your machine",
            advice="Return a list or a numpy array instead",
        )
    made: array.array[Any] = array.array(code)
    made.frombytes(data)
    return made


MAKERS: dict[str, Maker] = {
    "complex": plainly(complex, float, float),
    "bytearray": plainly(bytearray, bytes),
    "range": plainly(range, int, int, int),
    "slice": _slice,
    "date": plainly(datetime.date, int, int, int),
    "time": _time,
    "datetime": _datetime,
    "timedelta": plainly(datetime.timedelta, int, int, int),
    "timezone": plainly(datetime.timezone, datetime.timedelta, str, optional=1),
    "zone": _zoneinfo,
    "decimal": _decimal,
    "fraction": _fraction,
    "uuid": _uuid,
    "path": _path,
    "address": _address,
    "array": _array,
    "counter": _counter,
    "ordered": _ordered,
    "deque": _deque,
    "defaultdict": _defaultdict,
    "namespace": _namespace,
}
"""The functions that build values, by the name of the value's type in the data format.

Each takes the decoder and a tuple of arguments, and raises NotData if an argument is not allowed.
"""

KEYS: frozenset[type] = frozenset(
    {
        *(datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone, zoneinfo.ZoneInfo),
        *(decimal.Decimal, fractions.Fraction, uuid.UUID, range),
        *(pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path())),
        *_ADDRESSES.values(),
    }
)
"""Types of this module whose instances may be keys of dictionaries and members of sets."""

Parts = tuple[str, tuple[Any, ...]]
_PARTS: dict[type, Callable[[Any], Parts]] = {
    complex: lambda v: ("complex", (v.real, v.imag)),
    bytearray: lambda v: ("bytearray", (bytes(v),)),
    range: lambda v: ("range", (v.start, v.stop, v.step)),
    slice: lambda v: ("slice", (v.start, v.stop, v.step)),
    datetime.date: lambda v: ("date", (v.year, v.month, v.day)),
    datetime.time: lambda v: ("time", (v.hour, v.minute, v.second, v.microsecond, v.tzinfo, v.fold)),
    datetime.datetime: lambda v: (
        "datetime",
        (v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, v.tzinfo, v.fold),
    ),
    datetime.timedelta: lambda v: ("timedelta", (v.days, v.seconds, v.microseconds)),
    datetime.timezone: lambda v: ("timezone", v.__getinitargs__()),
    zoneinfo.ZoneInfo: lambda v: ("zone", (v.key,)),
    decimal.Decimal: lambda v: ("decimal", (str(v),)),
    fractions.Fraction: lambda v: ("fraction", (v.numerator, v.denominator)),
    uuid.UUID: lambda v: ("uuid", (v.int, v.is_safe.value)),
    pathlib.PurePosixPath: lambda v: ("path", ("posix", str(v))),
    pathlib.PureWindowsPath: lambda v: ("path", ("windows", str(v))),
    type(pathlib.Path()): lambda v: ("path", ("path", str(v))),
    **{kind: lambda v: ("address", (type(v).__name__, str(v))) for kind in _ADDRESSES.values()},
    array.array: lambda v: ("array", (v.typecode, v.itemsize, v.tobytes())),
    Counter: lambda v: ("counter", (dict(v),)),
    OrderedDict: lambda v: ("ordered", (dict(v), dict(vars(v)))),
    deque: lambda v: ("deque", (list(v), v.maxlen)),
    defaultdict: lambda v: ("defaultdict", (getattr(v.default_factory, "__name__", None), dict(v))),
    types.SimpleNamespace: lambda v: ("namespace", (dict(vars(v)),)),
}


def parts_of(value: Any) -> Parts | None:
    """Return the name of a value's type in skypool's data format, and the arguments to build the value from.

    Returns None if this module does not support exactly the value's type; subclasses are not supported. Also returns
    None for a defaultdict whose `default_factory` is neither None nor a built-in type such as list.
    """
    parts = _PARTS.get(type(value))
    if parts is None:
        return None
    if type(value) is defaultdict and value.default_factory not in (None, *_FACTORIES.values()):
        return None
    return parts(value)
