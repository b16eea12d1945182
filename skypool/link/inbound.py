"""Parser and checks for all messages that an agent sends to its client.

`message_of` turns a frame into one of the frozen values below, or raises ProtocolError. Nothing past it looks at the
header of a frame that came from a node: a field that is missing, of another type or out of range gives up that node
alone.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

from skypool.devices.device import Device
from skypool.errors import ProtocolError
from skypool.trust.text import printable
from skypool.wire.frames import CHUNK, INLINE, End, Frame, Kind, ends_in, header_of, total_length
from skypool.wire.handshake import NodeHealth

_LARGEST_ID = 1 << 63
"""Ids, counts and sizes are below it: they are 64-bit integers on the wire."""
_MOST_SLOTS = 1 << 14
"""Slots of one node. What is kept for each slot of a node is bounded by it."""
_MOST_ARGUMENTS = 1 << 16
"""Iterator arguments of one call."""
_MOST_BUFFERS = 1 << 16
"""Buffers of one value. Each large array of it is one."""
_MOST_RUNNING = 64
"""Names of running calls in one sign of life. An agent sends a few, for the console."""
_LONGEST_NAME = 1 << 12
"""Characters of a name: of a function, an object, a key of a value."""
_LARGEST_VALUE = 1 << 48
"""Bytes of one value. The memory of this machine limits it further: see `chunks`."""
_PART_KEY = re.compile(r"(\d{1,19}):(\d{1,19})")
"""The key of a piece of a stream's item: the call, and the number of the item."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """The first line of the loader: its Python's version, and whether it has skypool and an agent already."""

    python: tuple[int, ...]
    have: bool
    gone: bool


@dataclass(frozen=True, slots=True)
class Welcome:
    """The agent let this client in.

    Attributes:
        slots: how many calls run there at a time; devices: how many the node deals out among these slots.
        cpu_slots: how many calls that need no device run beside them, 0 where these have no slots of their own.
        calls: ids of the calls that it knows; streams: those of them that are generators; cpu_calls: those of them that
            run on CPU slots.
        names: of calls, by id.
        functions, objects: keys of what it has.
        trust: "data" if its workers write values in the format that is read as data, "full" if they pickle them.
        health: what it found out about its machine; see `health_check.faults`.
    """

    slots: int
    calls: tuple[int, ...] = ()
    names: Mapping[int, str] = field(default_factory=dict)
    streams: tuple[int, ...] = ()
    functions: tuple[str, ...] = ()
    objects: tuple[str, ...] = ()
    cpu_slots: int = 0
    devices: int = 0
    cpu_calls: tuple[int, ...] = ()
    health: NodeHealth = field(default_factory=NodeHealth)
    trust: str = "full"


@dataclass(frozen=True, slots=True)
class Taken:
    """Another client holds the node; it was heard so many seconds ago."""

    silent: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one call ended. `lens` are the lengths of the buffers; a `large` value came in pieces before."""

    id: int
    ok: bool
    seconds: float
    lens: Sequence[int] = ()
    large: bool = False


@dataclass(frozen=True, slots=True)
class Outcomes:
    """How calls ended that travelled together."""

    ends: Sequence[End]


@dataclass(frozen=True, slots=True)
class Yielded:
    """Items of a stream, up to number `seq`."""

    id: int
    seq: int
    single: bool = False
    lens: Sequence[int] = ()
    large: bool = False


@dataclass(frozen=True, slots=True)
class ItemWanted:
    """A call wants item `n`, from 1, of its iterator argument `arg`."""

    id: int
    arg: int
    n: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a large value of a call: of its result if `seq` is 0, else of the items up to that number."""

    call: int
    seq: int
    at: int
    size: int


@dataclass(frozen=True, slots=True)
class Recalled:
    """Calls that are given back; `on_cpu` says of which kind of slot."""

    calls: Sequence[int]
    on_cpu: bool = False


@dataclass(frozen=True, slots=True)
class Printed:
    """A call, 0 for none, wrote to file descriptor `fd`."""

    id: int
    slot: int
    fd: int
    seq: int


@dataclass(frozen=True, slots=True)
class ModuleAsked:
    """A worker imports a module that the node lacks."""

    name: str


@dataclass(frozen=True, slots=True)
class Pong:
    """A sign of life. `interruption` is when the machine is taken back, in seconds since 1970, None if it is not."""

    busy: int
    waiting: int
    done: int
    running: tuple[str, ...]
    interruption: float | None
    cpu_busy: int = 0


@dataclass(frozen=True, slots=True)
class Bye:
    """The agent ends."""


Said = (
    Welcome | Taken | Outcome | Outcomes | Yielded | ItemWanted | Piece | Recalled | Printed | ModuleAsked | Pong | Bye
)


def message_of(f: Frame) -> Said:
    """Return what a frame from an agent says.

    Raises:
        ProtocolError: an agent does not say this, or not so.
    """
    read = _PARSERS.get(f.kind)
    if read is None:
        raise ProtocolError(f"a node does not send {f.kind.name}")
    return read(f)


def greeting(said: object) -> Greeting:
    """Return what the loader's first line says, out of its JSON.

    Raises:
        ProtocolError: it is no such line.
    """
    if type(said) is not dict:
        raise ProtocolError("its first line is not a greeting")
    python = said.get("python")
    if type(python) is not list or not 2 <= len(python) <= 5 or not all(type(n) is int for n in python):
        _refuse("its greeting", "python", python)
    return Greeting(tuple(python), _flag("its greeting", said, "have"), _flag("its greeting", said, "gone"))


# --- fields --------------------------------------------------------------------------------------------------


def _refuse(what: str, name: str, value: object) -> NoReturn:
    raise ProtocolError(f"{what} has {_short(value)} as its {name!r}")


def _short(value: object) -> str:
    """The type of a value, and the value where showing it costs nothing."""
    kind = type(value).__name__
    if type(value) is str:
        return f"{kind} {printable(value[:40])!r}"
    return f"{kind} {value!r}" if type(value) in (bool, float) or value is None else f"this {kind}"


def _number(what: str, h: Mapping[str, Any], name: str, least: int = 0, most: int = _LARGEST_ID) -> int:
    value = h.get(name)
    if type(value) is int and least <= value < most:
        return value
    _refuse(what, name, value)


def _seconds(what: str, h: Mapping[str, Any], name: str) -> float:
    value = h.get(name)
    if (type(value) is float or type(value) is int) and 0 <= value < 1e12:  # which no NaN is
        return float(value)
    _refuse(what, name, value)


def _flag(what: str, h: Mapping[str, Any], name: str) -> bool:
    value = h.get(name)
    if type(value) is bool:
        return value
    _refuse(what, name, value)


def _text(what: str, h: Mapping[str, Any], name: str, most: int = _LONGEST_NAME) -> str:
    value = h.get(name)
    if type(value) is str and len(value) <= most:
        return value
    _refuse(what, name, value)


def _numbers(what: str, h: Mapping[str, Any], name: str) -> list[int]:
    value = h.get(name)
    if type(value) is not list:
        _refuse(what, name, value)
    if value and not (set(map(type, value)) == {int} and min(value) >= 0 and max(value) < _LARGEST_ID):
        _refuse(what, name, value)
    return cast(list[int], value)


def _texts(what: str, h: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = h.get(name)
    if type(value) is not list or not all(type(each) is str and len(each) <= _LONGEST_NAME for each in value):
        _refuse(what, name, value)
    return tuple(value)


def _buffers(what: str, f: Frame) -> tuple[list[int], bool]:
    """The lengths of a value's buffers, and whether they came in pieces before."""
    h = f.header
    lens = _numbers(what, h, "lens")
    large = "blob" in h
    if not 0 < len(lens) <= _MOST_BUFFERS:
        _refuse(what, "lens", lens)
    size = total_length(lens)
    if large and (size != _number(what, h, "blob", 1, _LARGEST_VALUE) or f.body):
        _refuse(what, "blob", h["blob"])
    if not large and size != len(f.body):
        raise ProtocolError(f"{what} has {len(f.body)} bytes where its buffers have {size}")
    return lens, large


# --- frames --------------------------------------------------------------------------------------------------


def _outcome(f: Frame) -> Outcome:
    h = f.header
    what = "an outcome"
    lens, large = _buffers(what, f)
    return Outcome(_number(what, h, "id"), _flag(what, h, "ok"), _seconds(what, h, "seconds"), lens, large)


def _outcomes(f: Frame) -> Outcomes:
    ends = list(ends_in(bytes(f.body)))
    if not all(0 <= seconds < 1e12 for _, _, seconds, _ in ends):
        raise ProtocolError("the end of a call took no time that there is")
    return Outcomes(ends)


def _yielded(f: Frame) -> Yielded:
    h = f.header
    what = "an item of a stream"
    lens, large = _buffers(what, f)
    return Yielded(_number(what, h, "id"), _number(what, h, "seq", 1), bool(h.get("single")), lens, large)


def _wanted(f: Frame) -> ItemWanted:
    h = f.header
    what = "the wish for an item"
    return ItemWanted(_number(what, h, "id"), _number(what, h, "arg", 0, _MOST_ARGUMENTS), _number(what, h, "n", 1))


def _piece(f: Frame) -> Piece:
    h = f.header
    what = "a piece of a value"
    key = h.get("key")
    if type(key) is int and 0 <= key < _LARGEST_ID:
        call = key
        seq = 0
    elif type(key) is str and (parts := _PART_KEY.fullmatch(key)):
        call = int(parts[1])
        seq = int(parts[2])
    else:
        _refuse(what, "key", key)
    size = _number(what, h, "size", INLINE + 1, _LARGEST_VALUE)  # a smaller one comes in one frame
    at = _number(what, h, "at", 0, size)
    if len(f.body) != min(CHUNK, size - at):
        raise ProtocolError(f"{what} of {size} bytes has {len(f.body)} bytes at {at}")
    return Piece(call, seq, at, size)


def _recalled(f: Frame) -> Recalled:
    h = f.header
    what = "a list of calls that are given back"
    return Recalled(_numbers(what, h, "calls"), _flag(what, h, "cpu"))


def _printed(f: Frame) -> Printed:
    h = f.header
    what = "output"
    slot = _number(what, h, "slot", 0, _MOST_SLOTS)
    fd = _number(what, h, "fd", 1, 3)
    return Printed(_number(what, h, "id"), slot, fd, _number(what, h, "seq", 1))


def _module(f: Frame) -> ModuleAsked:
    return ModuleAsked(_text("the wish for a module", f.header, "name", 1 << 20))


def _pong(f: Frame) -> Pong:
    h = f.header
    what = "a sign of life"
    running = _texts(what, h, "running")
    if len(running) > _MOST_RUNNING:
        _refuse(what, "running", running)
    return Pong(
        _number(what, h, "busy"),
        _number(what, h, "waiting"),
        _number(what, h, "done"),
        tuple(map(printable, running)),
        None if h.get("interruption") is None else _seconds(what, h, "interruption"),
        _number(what, h, "cpu_busy"),
    )


def _bye(_: Frame) -> Bye:
    return Bye()


def _taken(f: Frame) -> Taken:
    return Taken(_seconds("the word that another client is there", f.header, "silent"))


def _welcome(f: Frame) -> Welcome:
    h = header_of(f)
    what = "its WELCOME"
    named = h.get("names")
    if type(named) is not dict:
        _refuse(what, "names", named)
    names = {id_: printable(name) for name in named for id_ in _numbers(what, named, name)}
    health = h.get("health")
    if type(health) is not dict:
        _refuse(what, "health", health)
    return Welcome(
        _number(what, h, "slots", 1, _MOST_SLOTS),
        tuple(_numbers(what, h, "calls")),
        names,
        tuple(_numbers(what, h, "streams")),
        _texts(what, h, "functions"),
        _texts(what, h, "objects"),
        _number(what, h, "cpu_slots", 0, _MOST_SLOTS),
        _number(what, h, "devices", 0, _MOST_SLOTS),
        tuple(_numbers(what, h, "cpu_calls")),
        _health(health),
        "data" if h.get("trust") == "data" else "full",
    )


def _health(said: Mapping[str, Any]) -> NodeHealth:
    what = "what it says of its machine"
    devices = said.get("devices")
    if type(devices) is not list or not all(type(each) is dict for each in devices):
        _refuse(what, "devices", devices)
    return NodeHealth(
        devices=tuple(_device(each) for each in devices),
        driver=printable(_text(what, said, "driver")),
        disk_free=_number(what, said, "disk_free"),
        time=_seconds(what, said, "time"),
        address=address(printable(_text(what, said, "address"))) if "address" in said else "",
    )


def _device(said: Mapping[str, Any]) -> Device:
    what = "a device of its machine"
    numbers = {"index", "memory_mib"}
    for name, value in said.items():
        if name == "memory_mib" and value is None:
            continue
        if name in numbers:
            _number(what, said, name)
        else:
            _text(what, said, name)
    clean: dict[str, Any] = {name: printable(value) if type(value) is str else value for name, value in said.items()}
    try:
        return Device(**clean)
    except TypeError as e:
        raise ProtocolError(f"{what} is none: {printable(str(e))[:200]}") from None


_PARSERS: dict[Kind, Callable[[Frame], Said]] = {
    Kind.WELCOME: _welcome,
    Kind.TAKEN: _taken,
    Kind.OUTCOME: _outcome,
    Kind.OUTCOMES: _outcomes,
    Kind.YIELD: _yielded,
    Kind.CREDIT: _wanted,
    Kind.BLOB: _piece,
    Kind.RECALLED: _recalled,
    Kind.OUTPUT: _printed,
    Kind.MODULE: _module,
    Kind.PONG: _pong,
    Kind.BYE: _bye,
}


def address(said: str) -> str:
    """Return where a node says that it is reached by the others, "" if that is no address."""
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(said))
    return ""
