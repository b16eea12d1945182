"""What of the standard library a stranger may send: values, each made by its constructor of checked arguments."""

from __future__ import annotations

import array
import datetime
import decimal
import enum
import fractions
import ipaddress
import pathlib
import re
import types
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

from skypool.trust.classes import locate, member
from skypool.trust.machine import Machine, Maker, Name, Refused, check_chain

_LONGEST_NUMBER = 100_000
_FACTORIES: dict[tuple[str, str], Callable[[], Any]] = {
    ("builtins", kind.__name__): kind for kind in (int, float, str, bytes, bool, list, dict, set, tuple)
}
_INT_ARRAYS = "bBhHiIlLqQfd"


def _arguments(args: tuple[Any, ...], *kinds: type | tuple[type, ...], optional: int = 0) -> None:
    """That these are exactly of these kinds, with as many missing at the end as may."""
    if not len(kinds) - optional <= len(args) <= len(kinds):
        raise Refused(f"it calls something with {len(args)} arguments that takes {len(kinds)}")
    for arg, kind in zip(args, kinds, strict=False):
        if type(arg) is not kind and not (isinstance(kind, tuple) and type(arg) in kind):
            raise Refused(f"it calls something with a {type(arg).__name__} that takes none")


def plainly(make: Callable[..., Any], *kinds: type | tuple[type, ...], optional: int = 0) -> Maker:
    """Calls `make` with arguments of exactly these kinds."""

    def made(m: Machine, args: tuple[Any, ...]) -> Any:
        _arguments(args, *kinds, optional=optional)
        m.charge(sum(len(each) for each in args if isinstance(each, (str, bytes, bytearray))))
        return make(*args)

    return made


# --- containers ----------------------------------------------------------------------------------------------


def _set(m: Machine, args: tuple[Any, ...]) -> set[Any]:
    _arguments(args, list, optional=1)
    items = args[0] if args else []
    m.charge(len(items))
    m.check_keys((), items)
    return set(items)


def _counter(m: Machine, args: tuple[Any, ...]) -> Counter[Any]:
    _arguments(args, dict, optional=1)
    made: Counter[Any] = Counter()
    m.charge(len(args[0]) if args else 0)
    dict.update(made, *args)
    return made


def _deque(m: Machine, args: tuple[Any, ...]) -> deque[Any]:
    _arguments(args, (tuple, list), (int, type(None)), optional=2)
    items = args[0] if args else ()
    m.charge(len(items))
    check_chain(items)
    return deque(items, *args[1:])


def _defaultdict(m: Machine, args: tuple[Any, ...]) -> defaultdict[Any, Any]:
    _arguments(args, (Name, type(None)), optional=1)
    if not args or args[0] is None:
        return defaultdict(None)
    name = args[0]
    factory = _FACTORIES.get((name.module, name.name))
    if factory is None:
        raise Refused(f"the factory of a defaultdict is {name}, which would be called for each missing key", str(name))
    return defaultdict(factory)


def set_metadata(made: OrderedDict[Any, Any], state: Any) -> None:
    """The state of an OrderedDict: torch's state_dict() has its `_metadata` there."""
    if type(state) is not dict or set(state) - {"_metadata"}:
        raise Refused("it sets attributes of an OrderedDict")
    made.__dict__.update(state)


def set_namespace(made: types.SimpleNamespace, state: Any) -> None:
    """The state of a SimpleNamespace: what is in it."""
    if type(state) is not dict or not all(type(key) is str and not key.startswith("__") for key in state):
        raise Refused("it sets odd attributes of a SimpleNamespace")
    made.__dict__.update(state)


# --- numbers, times, places ----------------------------------------------------------------------------------


def _decimal(m: Machine, args: tuple[Any, ...]) -> decimal.Decimal:
    _arguments(args, str)
    if len(args[0]) > _LONGEST_NUMBER:
        raise Refused("a Decimal of it is too long")
    m.charge(len(args[0]))
    return decimal.Decimal(args[0])


def _fraction(_: Machine, args: tuple[Any, ...]) -> fractions.Fraction:
    if len(args) == 1 and type(args[0]) is str and re.fullmatch(r"-?\d{1,4000}(/\d{1,4000})?", args[0]):
        return fractions.Fraction(args[0])
    _arguments(args, int, int)
    if max(map(int.bit_length, args)) > _LONGEST_NUMBER:
        raise Refused("a Fraction of it is too long")
    return fractions.Fraction(*args)


def _zone(zone: Any) -> Any:
    if zone is not None and type(zone) not in (datetime.timezone, zoneinfo.ZoneInfo):
        raise Refused(f"a {type(zone).__name__} stands for a time zone")
    return zone


def _packed(args: tuple[Any, ...], size: int) -> tuple[bytes, Any]:
    data, zone = args if len(args) == 2 else (*args, None)
    if type(data) is not bytes or len(data) != size:
        raise Refused("a date or time of it is not what one is")
    return data, _zone(zone)


def _date(m: Machine, args: tuple[Any, ...]) -> datetime.date:
    data, _ = _packed(args, 4)
    return datetime.date(data[0] << 8 | data[1], data[2], data[3])


def _time(_: Machine, args: tuple[Any, ...]) -> datetime.time:
    data, zone = _packed(args, 6)
    micro = int.from_bytes(data[3:6])
    return datetime.time(data[0] & 127, data[1], data[2], micro, zone, fold=data[0] >> 7)


def _datetime(_: Machine, args: tuple[Any, ...]) -> datetime.datetime:
    data, zone = _packed(args, 10)
    day = datetime.date(data[0] << 8 | data[1], data[2] & 127, data[3])
    micro = int.from_bytes(data[7:10])
    time = datetime.time(data[4], data[5], data[6], micro, zone, fold=data[2] >> 7)
    return datetime.datetime.combine(day, time)


def _zoneinfo(key: str, _: int) -> zoneinfo.ZoneInfo:
    if not re.fullmatch(r"[A-Za-z0-9_+\-]{1,40}(/[A-Za-z0-9_+\-]{1,40}){0,3}", key):
        raise Refused("a time zone of it has no name of one")
    return zoneinfo.ZoneInfo(key)


def _getattr(m: Machine, args: tuple[Any, ...]) -> Any:
    """What pickle writes for a method and for a member of an enumeration: no attribute is ever asked for."""
    _arguments(args, Name, str)
    kind = locate(args[0].module, args[0].name)
    if kind is not None and issubclass(kind, enum.Enum):
        return member(kind, args[1])
    return m.named(str(args[0]), args[1])


def _path(kind: type[pathlib.PurePath]) -> Maker:
    def made(m: Machine, args: tuple[Any, ...]) -> pathlib.PurePath:
        if len(args) > 1000 or not all(type(each) is str for each in args):
            raise Refused("a path of it has parts that are none")
        m.charge(sum(map(len, args)))
        return kind(*args)

    return made


def new_uuid(m: Machine, args: tuple[Any, ...]) -> Any:
    """A UUID without its number yet."""
    _arguments(args)
    return m.pending("UUID", _uuid)


def _uuid(state: Any) -> uuid.UUID:
    if type(state) is not dict or set(state) - {"int", "is_safe"} or type(state.get("int")) is not int:
        raise Refused("a UUID of it is none")
    return uuid.UUID(int=state["int"], is_safe=uuid.SafeUUID(state.get("is_safe")))


def _array(m: Machine, args: tuple[Any, ...]) -> array.array[Any]:
    _arguments(args, Name, str, int, bytes)
    kind, code, form, data = args
    if str(kind) != "array.array" or len(code) != 1 or code not in _INT_ARRAYS or not 0 <= form <= 17:
        raise Refused("an array of it is none")
    m.charge(len(data))
    return array._array_reconstructor(array.array, code, form, data)  # type: ignore[attr-defined,no-any-return]


def _addresses() -> dict[tuple[str, str], Maker]:
    found = [f"IPv{n}{what}" for n in (4, 6) for what in ("Address", "Network", "Interface")]
    return {("ipaddress", name): plainly(getattr(ipaddress, name), str) for name in found}


def _paths() -> dict[tuple[str, str], Maker]:
    own = type(pathlib.Path())
    kinds = (pathlib.PurePosixPath, pathlib.PureWindowsPath, own)
    return {(place, kind.__name__): _path(kind) for place in ("pathlib", "pathlib._local") for kind in kinds}


_NUMBER = (int, type(None))
MAKERS: dict[tuple[str, str], Maker] = {
    ("builtins", "set"): _set,
    ("builtins", "range"): plainly(range, int, int, int),
    ("builtins", "slice"): plainly(slice, _NUMBER, _NUMBER, _NUMBER),
    ("builtins", "complex"): plainly(complex, float, float),
    ("builtins", "bytearray"): plainly(bytearray, bytes, optional=1),
    ("builtins", "getattr"): _getattr,
    ("collections", "OrderedDict"): plainly(OrderedDict),
    ("collections", "Counter"): _counter,
    ("collections", "deque"): _deque,
    ("collections", "defaultdict"): _defaultdict,
    ("types", "SimpleNamespace"): plainly(types.SimpleNamespace),
    ("decimal", "Decimal"): _decimal,
    ("fractions", "Fraction"): _fraction,
    ("datetime", "date"): _date,
    ("datetime", "time"): _time,
    ("datetime", "datetime"): _datetime,
    ("datetime", "timedelta"): plainly(datetime.timedelta, int, int, int),
    ("datetime", "timezone"): plainly(datetime.timezone, datetime.timedelta, str, optional=1),
    ("zoneinfo.ZoneInfo", "_unpickle"): plainly(_zoneinfo, str, (int, bool)),
    ("array", "_array_reconstructor"): _array,
    **_addresses(),
    **_paths(),
}
"""What makes a value of these when it is called."""

NEW: dict[tuple[str, str], Maker] = {("uuid", "UUID"): new_uuid}
"""What makes one without its state."""

SETTERS: dict[type, Callable[[Any, Any], None]] = {
    OrderedDict: set_metadata,
    types.SimpleNamespace: set_namespace,
}
KEYS: frozenset[type] = frozenset(
    {
        *(datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone, zoneinfo.ZoneInfo),
        *(decimal.Decimal, fractions.Fraction, uuid.UUID, range),
        *(pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path())),
        *(getattr(ipaddress, name) for _, name in _addresses()),
    }
)
"""Whose instances may be keys."""
