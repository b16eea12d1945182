"""Parses and checks all messages that the agent of a node sends to its client.

`message_of` turns a frame into an object of one of the classes below, or raises ProtocolError. No other code looks at
the header of a frame from a node. If a field is missing, has another type or is out of range, the client gives up that
node only.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

from skypool.devices.device import Device
from skypool.devices.sample import NodeSample, node_sample
from skypool.errors import ProtocolError, protocol_violation
from skypool.gangs.agreement import MOST_STEP, Answer
from skypool.head import messages
from skypool.head.states import Status
from skypool.runtime import LEASE, LIMIT, PROVIDER, Reason
from skypool.text import one_line, printable
from skypool.wire.agent_config import NodeHealth
from skypool.wire.frames import CHUNK, INLINE, End, Frame, Kind, ends_in, header_of, total_length
from skypool.wire.save_orders import MOST_DRAIN, PHASES, FolderState

_LARGEST_ID = 1 << 63
"""The limit that ids, counts and sizes in messages must stay below."""
_MOST_SLOTS = 1 << 14
"""The limit that the numbers of slots and of devices of one node must stay below."""
_MOST_ARGUMENTS = 1 << 16
"""The limit that the index of an iterator argument of a call must stay below."""
_MOST_BUFFERS = 1 << 16
"""The most buffers of one value. Each large array in a value is one buffer."""
_MOST_RUNNING = 64
"""The most names of running calls that one status report may have."""
_SHOWN_RUNNING = 8
"""The number of names of running calls that are kept, which is as many as an agent sends."""
_LONGEST_SHOWN = 200
"""The most characters of the name of a call's function that are kept."""
_MOST_KEYS = 20_000
"""The most keys of functions, and of values, that are kept for a node. The client sends all others again."""
_LONGEST_KEY = 128
"""The most characters of a key that is kept. Those of skypool are shorter."""
_MOST_DEVICES = 1 << 10
"""The most devices that a health report may have."""
_LONGEST_FACT = 256
"""The most characters of a text about a machine or a device."""
_MOST_FOLDERS = 64
"""The most folders that a node saves."""
_MOST_NAMES = 20
"""The most files of a folder that are named."""
_LONGEST_TOLD = 300
"""The most characters of a path or a reason."""
_LONGEST_NAME = 1 << 12
"""The most characters of a name or a key."""
_LATEST = 2.5e11
"""The limit that times in seconds since 1970 must stay below, as a later one has no date in Python: the year 9892."""
_LARGEST_VALUE = 1 << 48
"""The limit that the size of one value in bytes must stay below."""
_MOST_RANKS = 1 << 20
"""The limit that the rank of a process in its gang must stay below."""
_LABEL = re.compile(r"[a-z]{0,7}[0-9]{0,5}(-[0-9]{1,5})?")
"""A label that tells processes of a gang on one node apart in the console, such as "gpu1", "gpu4-7" or "3"."""
_MACHINE = re.compile(r"[a-z0-9_]{1,32}")
"""A kind of processor, such as "x86_64", which becomes part of a path."""
_PART_KEY = re.compile(r"(\d{1,19}):(\d{1,19})")
"""The key of a piece of a generator's items, "call:number": the id of the call, and the number of the last item."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """The first line that the loader sends to the client.

    Attributes:
        python: the version of Python on the node, such as (3, 11, 4).
        have: True if the node has this version of skypool's code already.
        gone: True if no agent can be reached: the node lacks the code, and the client did not ask for a new agent.
        other: True if it has the code of another version instead.
    """

    python: tuple[int, ...]
    have: bool
    gone: bool
    other: bool = False


@dataclass(frozen=True, slots=True)
class Welcome:
    """The first message of an agent that accepts this client. It describes the node and the calls there.

    Attributes:
        slots: the number of places that run one call at a time, without CPU slots; at least 1.
        calls: the ids of the calls that the agent knows.
        names: the names of the functions of calls, by the calls' ids.
        streams: the ids of the calls that are generators.
        functions, objects: the keys of the functions and of the values of `pool.put` that the node has.
        cpu_slots: the number of additional slots for calls without a device; 0 if the node has none.
        devices: the number of accelerators, which are divided among the slots.
        cpu_calls: the ids of the calls that run on CPU slots.
        health: the state of the machine, such as its devices and free disk space.
        trust: "full" if the node pickles results, "data" if it writes them in a format that cannot run code.
        services: the ids of the calls that are services, which take no slot.
        quiet: the ids of the services that do not count as work.
        epoch: how many clients have owned the node so far. The agent refuses a client with a lower epoch.
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
    services: tuple[int, ...] = ()
    epoch: int = 0
    quiet: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Taken:
    """The first message of an agent that refuses this client, because it serves another one, or for the reason `why`.

    Attributes:
        silent: the seconds since the other client last sent something to the agent.
        former: True if this client owned the node before, and the other client has taken it over since.
        why: another reason, such as that the node is about to end itself; "" if another client is the reason.
        handover: the state of the run that was handed over to the machine; None if none was.
    """

    silent: float
    former: bool = False
    why: str = ""
    handover: Status | None = None


class Outcome(NamedTuple):
    """The result of one call.

    Attributes:
        id: the id of the call.
        ok: True if the function returned, False if it raised.
        seconds: how long the call ran.
        lens: the lengths of the buffers of the call's value or exception, in bytes.
        large: True if these buffers were sent before, in pieces.
    """

    id: int
    ok: bool
    seconds: float
    lens: Sequence[int] = ()
    large: bool = False


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The results of several calls that were sent in one frame.

    `ends` has for each call: (id, True if the call returned, seconds that it ran, pickled value or exception).
    """

    ends: Sequence[End]


@dataclass(frozen=True, slots=True)
class Yielded:
    """One or several items that a generator on the node yielded.

    Attributes:
        id: the id of the call.
        seq: the number of the last item, counted from 1 for each call.
        single: True if the value is one item, False if it is a list of items.
        lens: the lengths of the buffers of the value, in bytes.
        large: True if these buffers were sent before, in pieces.
    """

    id: int
    seq: int
    single: bool = False
    lens: Sequence[int] = ()
    large: bool = False


@dataclass(frozen=True, slots=True)
class ItemWanted:
    """A request of a running call for an item of an iterator that the client passed to it as an argument.

    Attributes:
        id: the id of the call.
        arg: the index of the iterator among the call's iterator arguments, from 0.
        n: the number of the item, from 1.
    """

    id: int
    arg: int
    n: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The header of one piece of a large value. The bytes are in the body of the same frame.

    Attributes:
        call: the id of the call whose value it is.
        seq: 0 for a piece of the call's result; for a piece of a generator's items, the number of the last item.
        at: the position of the piece in the value, in bytes from 0.
        size: the size of the whole value, in bytes.
    """

    call: int
    seq: int
    at: int
    size: int


@dataclass(frozen=True, slots=True)
class Recalled:
    """Calls that the node has not begun and gives back, because the client asked for some of its waiting calls.

    `calls` has the ids; () if the node gives none back. `on_cpu` is True if the client asked for calls of CPU slots.
    """

    calls: Sequence[int]
    on_cpu: bool = False


@dataclass(frozen=True, slots=True)
class Printed:
    """The header of a piece of output that a call on the node printed. The bytes are in the body of the same frame.

    Attributes:
        id: the id of the call; 0 if the call is not known.
        slot: the number of the slot that ran the call, from 0.
        fd: 1 for stdout, 2 for stderr.
        seq: the number of this piece of the node's output, from 1.
        rank: the number of the process in its gang (a call that runs as several processes); None for other calls.
        label: a text that tells the process from the gang's other processes on the node, such as "gpu1"; "" for none.
    """

    id: int
    slot: int
    fd: int
    seq: int
    rank: int | None = None
    label: str = ""

    def goes_on(self, before: object) -> bool:
        """Return True if this piece of output comes directly after the piece `before`, from the same process."""
        return (
            isinstance(before, Printed)
            and self.seq == before.seq + 1
            and (self.id, self.slot, self.fd, self.rank) == (before.id, before.slot, before.fd, before.rank)
            and self.label == before.label
        )


@dataclass(frozen=True, slots=True)
class ModuleAsked:
    """A request for a module or package of the user's own, or for one of its files, which the node does not have.

    Attributes:
        name: the name of the module or package.
        version: a hash of all its files, or "" for any version.
        file: the path of the file; "" for the whole package.
        has: the versions of the package that the node has.
    """

    name: str
    version: str
    file: str
    has: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pong:
    """A status report of a node.

    The node sends it in answer to a ping, and when the provider announces that it takes the machine back.

    Attributes:
        busy, waiting, done: the numbers of calls that run, that wait on the node for a slot, and that have ended.
        running: the names of a few functions that run.
        interruption: when the provider takes the machine back, in seconds since 1970; None if not announced.
        cpu_busy: the number of running calls on CPU slots.
        samples: measurements of the node, the oldest first. Their `node` is 0 and their `claimed` is False.
        stalled: the ids of generator calls that wait until the client takes items.
    """

    busy: int
    waiting: int
    done: int
    running: tuple[str, ...]
    interruption: float | None
    cpu_busy: int = 0
    samples: tuple[NodeSample, ...] = ()
    stalled: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Saved:
    """The state of all folders that a node saves."""

    folders: tuple[FolderState, ...]


@dataclass(frozen=True, slots=True)
class Steps:
    """The report of a node on how far its ranks of a gang are, when there is a notice for one of the gang's machines.

    Attributes:
        calls: the ids of these ranks.
        answer: what the node answers to the client's last proposal.
        at: when a machine of the gang ends, in seconds since 1970; 0.0 if this node does not know. `reason` says why.
    """

    calls: tuple[int, ...]
    answer: Answer
    at: float
    reason: Reason


@dataclass(frozen=True, slots=True)
class Handed:
    """The state of the hand-over of a run to its machine."""

    status: Status


@dataclass(frozen=True, slots=True)
class Bye:
    """The announcement of an agent that it is about to end."""


Said = (
    Welcome
    | Taken
    | Outcome
    | Outcomes
    | Yielded
    | ItemWanted
    | Piece
    | Recalled
    | Printed
    | ModuleAsked
    | Pong
    | Saved
    | Steps
    | Handed
    | Bye
)


def message_of(f: Frame) -> Said:
    """Return the message in a frame from an agent, as an object of the class for the frame's kind, such as `Outcome`.

    The object does not keep the frame's body in memory. Raises ProtocolError for an invalid frame.
    """
    read = _PARSERS.get(f.kind)
    if read is None:
        raise protocol_violation(f"the node sent a {f.kind.name} message, which a node must not send")
    return read(f)


def greeting(said: object) -> Greeting:
    """Return the greeting in `said`, the JSON value of the loader's first line. Raises ProtocolError if invalid."""
    if type(said) is not dict:
        raise ProtocolError(
            "the node's first line is not skypool's greeting; check that shell start files on the node (~/.bashrc, "
            "~/.profile) print nothing"
        )
    python = said.get("python")
    if (
        type(python) is not list
        or not 2 <= len(python) <= 5
        or not all(type(n) is int and 0 <= n < 1000 for n in python)
    ):
        _refuse("the greeting", "python", python)
    have, gone = (_flag("the greeting", said, name) for name in ("have", "gone"))
    return Greeting(tuple(python), have, gone, said.get("other") is True)


# --- fields --------------------------------------------------------------------------------------------------
# Each function raises ProtocolError if the field is missing or not valid. `what` names the message.


def _refuse(what: str, name: str, value: object) -> NoReturn:
    """Raise the ProtocolError for an invalid field. `what` names the message, such as "the result of a call"."""
    raise protocol_violation(f"the node sent {what} with an invalid field {name!r}: {_short(value)}")


def _short(value: object) -> str:
    """Return a text about an invalid value: its type, with the beginning of a string, or the value if it is short."""
    kind = type(value).__name__
    if type(value) is str:
        return f"{kind} {printable(value[:40])!r}"
    return f"{kind} {value!r}" if type(value) in (bool, float) or value is None else f"a value of type {kind}"


def _number(what: str, h: Mapping[str, Any], name: str, least: int = 0, most: int = _LARGEST_ID) -> int:
    """Return the field `name` of a header: an integer from `least` to below `most` (default: 2^63), and no boolean."""
    value = h.get(name)
    if type(value) is int and least <= value < most:
        return value
    _refuse(what, name, value)


def _seconds(what: str, h: Mapping[str, Any], name: str, most: float = 1e12) -> float:
    """Return the field `name` of a header as a float. It must be a number of seconds, 0 to below `most`."""
    value = h.get(name)
    if (type(value) is float or type(value) is int) and 0 <= value < most:  # this excludes NaN too
        return float(value)
    _refuse(what, name, value)


def _flag(what: str, h: Mapping[str, Any], name: str) -> bool:
    """Return the field `name` of a header, which must be True or False."""
    value = h.get(name)
    if type(value) is bool:
        return value
    _refuse(what, name, value)


def _text(what: str, h: Mapping[str, Any], name: str, most: int = _LONGEST_NAME) -> str:
    """Return the field `name` of a header: a string of at most `most` characters, which may be empty."""
    value = h.get(name)
    if type(value) is str and len(value) <= most:
        return value
    _refuse(what, name, value)


def _numbers(what: str, h: Mapping[str, Any], name: str) -> list[int]:
    """Return the field `name` of a header: a list of integers from 0 to below 2^63, which may be empty."""
    value = h.get(name)
    if type(value) is not list:
        _refuse(what, name, value)
    if len(value) == 1:  # the usual case, which takes less time this way
        if type(value[0]) is not int or not 0 <= value[0] < _LARGEST_ID:
            _refuse(what, name, value)
    elif value and not (set(map(type, value)) == {int} and min(value) >= 0 and max(value) < _LARGEST_ID):
        _refuse(what, name, value)
    numbers: list[int] = value
    return numbers


def _texts(what: str, h: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the field `name` of a header as a tuple: a list, maybe empty, of strings of at most 4096 characters."""
    value = h.get(name)
    if type(value) is not list or not all(type(each) is str and len(each) <= _LONGEST_NAME for each in value):
        _refuse(what, name, value)
    return tuple(value)


def _keys(what: str, h: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the first 20,000 strings of the list in field `name`, without those of more than 128 characters."""
    return tuple(key for key in _texts(what, h, name)[:_MOST_KEYS] if len(key) <= _LONGEST_KEY)


def _buffers(what: str, f: Frame) -> tuple[list[int], bool]:
    """Return the lengths in bytes of the buffers of a frame's value, and True if it was sent before, in pieces."""
    h = f.header
    lens = _numbers(what, h, "lens")
    large = "blob" in h
    if not 0 < len(lens) <= _MOST_BUFFERS:
        _refuse(what, "lens", lens)
    size = lens[0] if len(lens) == 1 else total_length(lens)
    if large and (size != _number(what, h, "blob", 1, _LARGEST_VALUE) or f.body):
        _refuse(what, "blob", h["blob"])
    if not large and size != len(f.body):
        raise protocol_violation(f"the node sent {what} of {len(f.body)} bytes, but the header announces {size} bytes")
    return lens, large


# --- frames --------------------------------------------------------------------------------------------------
# Each function raises ProtocolError if a field that must be there is missing, or a field is not valid.


_make_outcome = partial(tuple.__new__, Outcome)


def _outcome(f: Frame) -> Outcome:
    """Return the result of one call in an OUTCOME frame."""
    h = f.header
    what = "the result of a call"
    lens, large = _buffers(what, f)
    return _make_outcome((_number(what, h, "id"), _flag(what, h, "ok"), _seconds(what, h, "seconds"), lens, large))


def _outcomes(f: Frame) -> Outcomes:
    """Return the results of several calls in an OUTCOMES frame, copied out of the frame."""
    ends = list(ends_in(bytes(f.body)))
    if not all(0 <= seconds < 1e12 for _, _, seconds, _ in ends):
        raise protocol_violation("the node sent the result of a call whose duration is not from 0 to 10^12 seconds")
    return Outcomes(ends)


def _yielded(f: Frame) -> Yielded:
    """Return the items of a generator in a YIELD frame. Without the field "single", the value is a list of items."""
    h = f.header
    what = "an item of a stream"
    lens, large = _buffers(what, f)
    return Yielded(_number(what, h, "id"), _number(what, h, "seq", 1), bool(h.get("single")), lens, large)


def _wanted(f: Frame) -> ItemWanted:
    h = f.header
    what = "a request for an item"
    return ItemWanted(_number(what, h, "id"), _number(what, h, "arg", 0, _MOST_ARGUMENTS), _number(what, h, "n", 1))


def _piece(f: Frame) -> Piece:
    """Return the header of a piece of a large value in a BLOB frame."""
    h = f.header
    what = "a piece of a value"
    # for a result, the id of the call; for items of a generator, "id:number of the last item"
    key = h.get("key")
    if type(key) is int and 0 <= key < _LARGEST_ID:
        call = key
        seq = 0
    elif type(key) is str and (parts := _PART_KEY.fullmatch(key)):
        call = int(parts[1])
        seq = int(parts[2])
    else:
        _refuse(what, "key", key)
    size = _number(what, h, "size", INLINE + 1, _LARGEST_VALUE)  # smaller values are not sent in pieces
    at = _number(what, h, "at", 0, size)
    if len(f.body) != min(CHUNK, size - at):
        raise protocol_violation(
            f"the node sent {what} of {size} bytes: the piece at byte {at} has {len(f.body)} bytes instead of "
            f"{min(CHUNK, size - at)}"
        )
    return Piece(call, seq, at, size)


def _recalled(f: Frame) -> Recalled:
    """Return the calls that the node gives back in a RECALLED frame. The list may be empty."""
    h = f.header
    what = "a list of returned calls"
    return Recalled(_numbers(what, h, "calls"), _flag(what, h, "cpu"))


def _printed(f: Frame) -> Printed:
    """Return the header of printed output in an OUTPUT frame. Only "rank" and "label" may be missing, both together."""
    h = f.header
    what = "output"
    slot = _number(what, h, "slot", 0, _MOST_SLOTS)
    fd = _number(what, h, "fd", 1, 3)
    if "rank" not in h:
        return Printed(_number(what, h, "id"), slot, fd, _number(what, h, "seq", 1))
    label = h.get("label")
    if type(label) is not str or not _LABEL.fullmatch(label):
        _refuse(what, "label", label)
    rank = _number(what, h, "rank", 0, _MOST_RANKS)
    return Printed(_number(what, h, "id"), slot, fd, _number(what, h, "seq", 1), rank, label)


def _module(f: Frame) -> ModuleAsked:
    what = "a request for a module"
    return ModuleAsked(
        _text(what, f.header, "name", 1 << 20),
        _text(what, f.header, "version", 64),
        _text(what, f.header, "file", 1 << 20),
        _keys(what, f.header, "has") if "has" in f.header else (),
    )


def _pong(f: Frame) -> Pong:
    """Return the status report in a PONG frame, without control characters in the names of functions."""
    h = f.header
    what = "a status report"
    running = _texts(what, h, "running")
    if len(running) > _MOST_RUNNING:
        _refuse(what, "running", running)
    return Pong(
        _number(what, h, "busy"),
        _number(what, h, "waiting"),
        _number(what, h, "done"),
        tuple(one_line(name, _LONGEST_SHOWN) for name in running[:_SHOWN_RUNNING]),
        None if h.get("interruption") is None else _seconds(what, h, "interruption", _LATEST),
        _number(what, h, "cpu_busy"),
        _samples(h["samples"]) if "samples" in h else (),
        tuple(_numbers(what, h, "stalled")) if "stalled" in h else (),
    )


def _samples(said: object) -> tuple[NodeSample, ...]:
    if type(said) is not list or len(said) > _MOST_RUNNING:
        _refuse("a status report", "samples", said)
    try:
        return tuple(replace(node_sample(each, printable), node=0, claimed=False) for each in said)
    except ValueError as e:
        raise protocol_violation(f"the node sent a measurement that is not valid: {printable(str(e))[:200]}") from None


def _saved(f: Frame) -> Saved:
    """Return the state of all folders in a SAVED frame, without control characters in names and texts."""
    folders = f.header.get("folders")
    if type(folders) is not list or len(folders) > _MOST_FOLDERS or not all(type(each) is dict for each in folders):
        _refuse("the state of folders", "folders", folders)
    return Saved(tuple(map(_folder, folders)))


def _folder(said: dict[str, Any]) -> FolderState:
    what = "the state of a folder"
    counts = ("files", "bytes", "unsaved", "unsaved_bytes", "kept", "oldest", "rate", "place", "credentials")
    h = {**dict.fromkeys(counts, 0), "nodes": 1, **said}
    back = h.get("back", {})
    if type(back) is not dict:
        _refuse(what, "back", back)
    of_back = ("files", "bytes", "received", "wanted", "wanted_bytes", "checked", "moved")
    back = {**dict.fromkeys(of_back, 0), "aside": "", "unfinished": [], **back}
    names, unfinished = (
        _texts(what, part, name) for part, name in (({"names": [], **h}, "names"), (back, "unfinished"))
    )

    def number(name: str) -> int:
        return _number(what, h, name)

    def told(text: str) -> str:
        return one_line(text, _LONGEST_TOLD)

    def reasons(said: dict[str, Any]) -> tuple[tuple[str, str], ...]:
        found = said.get("refused", {})
        if type(found) is not dict:
            _refuse(what, "refused", found)
        return tuple((told(path), told(_text(what, found, path))) for path in [*found][:_MOST_NAMES])

    phase = _text(what, h, "phase")
    if phase not in PHASES:
        _refuse(what, "phase", phase)
    return FolderState(
        id=one_line(_text(what, h, "id"), _LONGEST_NAME),
        url=one_line(_text(what, h, "url"), _LONGEST_NAME),
        serial=one_line(_text(what, h, "serial"), _LONGEST_KEY),
        drain=_seconds(what, h, "drain", MOST_DRAIN + 1),
        place=number("place"),
        nodes=number("nodes"),
        credentials=number("credentials"),
        is_data=h.get("is_data") is True,
        phase=phase,
        whole=h.get("whole") is True,
        trouble=told(_text(what, {"trouble": "", **h}, "trouble")),
        files=number("files"),
        bytes=number("bytes"),
        unsaved=number("unsaved"),
        unsaved_bytes=number("unsaved_bytes"),
        oldest=_seconds(what, h, "oldest"),
        rate=_seconds(what, h, "rate"),
        names=tuple(map(told, names[:_MOST_NAMES])),
        refused=reasons(h),
        kept=number("kept"),
        restored=_number(what, back, "files"),
        restored_bytes=_number(what, back, "bytes"),
        received=_number(what, back, "received"),
        not_restored=reasons(back),
        wanted=_number(what, back, "wanted"),
        wanted_bytes=_number(what, back, "wanted_bytes"),
        checked=_number(what, back, "checked"),
        aside=one_line(_text(what, back, "aside"), _LONGEST_NAME),
        moved=_number(what, back, "moved"),
        unfinished=tuple(map(told, unfinished[:_MOST_NAMES])),
        noted=tuple(map(told, _texts(what, {"noted": [], **h}, "noted")[:_MOST_NAMES])),
    )


def _steps(f: Frame) -> Steps:
    h = f.header
    what = "the steps of a gang"
    most = MOST_STEP + 1
    answer = Answer(
        _number(what, h, "round"),
        _number(what, h, "highest", -1, most),
        _seconds(what, h, "rate"),
        _flag(what, h, "ok"),
        _number(what, h, "decided", -1, most),
    )
    reason: Reason | None = next((each for each in _REASONS if each == h.get("reason")), None)
    if reason is None:
        _refuse(what, "reason", h.get("reason"))
    return Steps(tuple(_numbers(what, h, "calls")), answer, _seconds(what, h, "at", _LATEST), reason)


def _bye(_: Frame) -> Bye:
    """Return the message in a BYE frame. It has no fields, and the frame is not checked."""
    return Bye()


def _taken(f: Frame) -> Taken:
    h, what = f.header, "the refusal of a client"
    why = printable(_text(what, h, "why", 1000)) if "why" in h else ""
    handover = _status(h["handover"]) if "handover" in h else None
    return Taken(_seconds(what, h, "silent"), h.get("former") is True, why, handover)


def _handed(f: Frame) -> Handed:
    return Handed(_status(f.header))


def _status(said: object) -> Status:
    """Return the state of a hand-over, without control characters in its reason."""
    found = messages.status(said)
    return replace(found, why=one_line(found.why, _LONGEST_TOLD))


def _welcome(f: Frame) -> Welcome:
    """Return the description of the node in a WELCOME frame, without control characters in names and texts."""
    h = header_of(f)
    what = "the WELCOME"
    named = h.get("names")
    if type(named) is not dict:
        _refuse(what, "names", named)
    names: dict[int, str] = {}
    for name in named:
        names |= dict.fromkeys(_numbers(what, named, name), one_line(name, _LONGEST_SHOWN))
    health = h.get("health")
    if type(health) is not dict:
        _refuse(what, "health", health)
    return Welcome(
        _number(what, h, "slots", 1, _MOST_SLOTS),
        tuple(_numbers(what, h, "calls")),
        names,
        tuple(_numbers(what, h, "streams")),
        _keys(what, h, "functions"),
        _keys(what, h, "objects"),
        _number(what, h, "cpu_slots", 0, _MOST_SLOTS),
        _number(what, h, "devices", 0, _MOST_SLOTS),
        tuple(_numbers(what, h, "cpu_calls")),
        _health(health),
        "data" if h.get("trust") == "data" else "full",
        tuple(_numbers(what, h, "services")) if "services" in h else (),
        _number(what, h, "epoch") if "epoch" in h else 0,
        tuple(_numbers(what, h, "quiet")) if "quiet" in h else (),
    )


def _health(said: Mapping[str, Any]) -> NodeHealth:
    what = "the health report"
    devices = said.get("devices")
    if type(devices) is not list or len(devices) > _MOST_DEVICES or not all(type(each) is dict for each in devices):
        _refuse(what, "devices", devices)
    return NodeHealth(
        devices=tuple(_device(each) for each in devices),
        driver=one_line(_text(what, said, "driver"), _LONGEST_FACT),
        disk_free=_number(what, said, "disk_free"),
        time=_seconds(what, said, "time", _LATEST),
        address=address(printable(_text(what, said, "address"))) if "address" in said else "",
        monitored=said.get("monitored") is True,
        host=host_name(_text(what, said, "host")) if "host" in said else "",
        machine=_machine(_text(what, said, "machine")) if "machine" in said else "",
    )


def _machine(said: str) -> str:
    return said if _MACHINE.fullmatch(said) else ""


def _device(said: Mapping[str, Any]) -> Device:
    what = "a device in the health report"
    numbers = {"index", "memory_mib"}
    for name, value in said.items():
        if name == "memory_mib" and value is None:
            continue
        if name in numbers:
            _number(what, said, name)
        else:
            _text(what, said, name)
    clean: dict[str, Any] = {
        name: one_line(value, _LONGEST_FACT) if type(value) is str else value for name, value in said.items()
    }
    try:
        return Device(**clean)
    except TypeError as e:
        raise protocol_violation(f"the node sent {what} that is not valid: {printable(str(e))[:200]}") from None


_HOST_NAME = re.compile(
    # not a name of this machine itself or of a number that is taken for an address, such as 0x7f000001
    r"(?!localhost|ip6-|\d+$|0x[0-9a-f]*$)[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?",
    re.ASCII | re.IGNORECASE,
)
_REASONS: tuple[Reason, ...] = (PROVIDER, LIMIT, LEASE)
_EVERYBODY = ipaddress.ip_address("255.255.255.255")
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
    Kind.SAVED: _saved,
    Kind.STEPS: _steps,
    Kind.HANDED: _handed,
    Kind.BYE: _bye,
}


def host_name(said: str) -> str:
    """Return the host name that a node reports, or "" if other nodes should not put it into their hosts files.

    This is so for names of the machine itself, such as "localhost", for names that look like an address, and for names
    with a dot. These are left to DNS, because such a name could be that of any server.
    """
    return said if _HOST_NAME.fullmatch(said) else ""


def address(said: str) -> str:
    """Return, in its usual form, an IP address that a node reports, or "" if other nodes should not use it.

    Other nodes cannot use loopback, multicast and broadcast addresses, nor 0.0.0.0. An address with a zone, as in
    "fe80::1%eth0", gives "", because a zone may be any text.
    """
    with contextlib.suppress(ValueError):
        found = ipaddress.ip_address(said)
        plain = getattr(found, "ipv4_mapped", None) or found
        elsewhere = plain.is_loopback or plain.is_unspecified or plain.is_multicast or plain == _EVERYBODY
        return "" if elsewhere or "%" in said else str(found)
    return ""
