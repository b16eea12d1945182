"""Messages to the agent, from its client and its workers, as typed tuples. Each is made from a frame here.

The functions raise KeyError, TypeError or ValueError if a field is missing or cannot be converted.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from skypool.agent.call import NodeCall
from skypool.agent.slots import SERVICE
from skypool.gangs.environment import Member
from skypool.wire.frames import Frame


class Ack(NamedTuple):
    """Calls whose outcomes have arrived, and the number of the last output that has arrived."""

    calls: list[int]
    output: int


class Credit(NamedTuple):
    """Number of the last item of a call's stream that the client has taken."""

    id: int
    seq: int


class Item(NamedTuple):
    """Item number `n` of a call's iterator argument `arg`."""

    id: int
    arg: int
    n: int


class Pull(NamedTuple):
    """Request of a worker for the next item of an iterator argument."""

    id: int
    arg: int


class Ping(NamedTuple):
    """Check of the connection. `left` limits the node's life in seconds; `linger` is as for `Lease.linger`."""

    left: float | None
    linger: tuple[float, float] | None


class Cancel(NamedTuple):
    """Request to stop a call, which then has `grace` seconds to end."""

    id: int
    grace: float


class Recall(NamedTuple):
    """Request to give back up to `n` calls. `on_cpu` chooses those that wait for CPU slots."""

    n: int
    on_cpu: bool


class Notice(NamedTuple):
    """Calls of gangs that lose a machine, and the time of its end in seconds since 1970."""

    calls: set[int]
    at: float


class Output(NamedTuple):
    """Output that a call has printed to the file descriptor `fd`."""

    id: int
    fd: int
    data: bytes


class Yielded(NamedTuple):
    """Items of a stream up to number `seq`. `is_large` is True if their value was announced before."""

    id: int
    seq: int
    is_large: bool


class Written(NamedTuple):
    """The first `at` bytes of a large value are written; `size` is its length, and `seq` as for `Unacknowledged`."""

    id: int
    seq: int
    at: int
    size: int


class Wanted(NamedTuple):
    """Request of a worker, as for `Store.fetch`."""

    what: str
    key: str


class Outcome(NamedTuple):
    """Outcome of one call.

    `done` is True if the memory of the arguments is no longer used. `late` is the seconds that the call took, if its
    worker found it late. `printed` and `said` are then the end of its captured output and the exception that it raised.
    """

    id: int
    is_large: bool
    done: bool
    late: float | None
    printed: str
    said: str


def call_in(f: Frame, kind: int) -> NodeCall:
    """Return the record of a call for a slot of this kind, without the name and large arguments."""
    h = f.header
    get = h.get
    return NodeCall(
        h["id"],
        bytes(f.raw),
        None,
        "",
        h["fn"],
        get("timeout"),
        get("output") == "silent",
        "stream" in h,
        kind,
        kind != SERVICE or bool(get("busy")),
        grace=get("grace"),
    )


def is_large(f: Frame) -> bool:
    """Return True if the value of a frame was sent in advance."""
    return "blob" in f.header


def wants_no_devices(f: Frame) -> bool:
    """Return True if a call asks for no devices."""
    return f.header.get("devices") == 0


def member_in(f: Frame) -> Member | None:
    """Return the process of a gang that runs a call; None for a call of another kind."""
    return Member.from_header(f.header) if "gang" in f.header else None


def ack_in(f: Frame) -> Ack:
    return Ack(f.header["calls"], f.header["output"])


def credit_in(f: Frame) -> Credit:
    return Credit(f.header["id"], f.header["seq"])


def item_in(f: Frame) -> Item:
    return Item(f.header["id"], f.header["arg"], f.header["n"])


def pull_in(f: Frame) -> Pull:
    return Pull(f.header["id"], f.header["arg"])


def linger_in(header: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the value of "linger" in the header of a PING or HELLO; None if it is missing."""
    said = header.get("linger")
    if said is None:
        return None
    left, full = said
    return float(left), float(full)


def ping_in(f: Frame) -> Ping:
    return Ping(float(f.header["left"]) if "left" in f.header else None, linger_in(f.header))


def cancel_in(f: Frame) -> Cancel:
    return Cancel(f.header["id"], float(f.header["grace"]))


def dropped_in(f: Frame) -> str:
    """Return the key of the object that a DROP names."""
    key: str = f.header["key"]
    return key


def id_in(f: Frame) -> int:
    """Return the id of the call that a worker gives back with RECALLED."""
    id_: int = f.header["id"]
    return id_


def ids_in(f: Frame) -> list[int]:
    """Return the ids of the calls that a frame with one call, or with several, is about."""
    return list(f.header["ids"]) if "ids" in f.header else [f.header["id"]]


def recall_in(f: Frame) -> Recall:
    return Recall(f.header["n"], bool(f.header["cpu"]))


def notice_in(f: Frame) -> Notice:
    return Notice({*f.header["calls"]}, float(f.header["at"]))


def stay_in(f: Frame) -> float | None:
    """Return for how many seconds a BYE lets the node stay; None if the node must end."""
    return float(f.header["stay"]) if "stay" in f.header else None


def output_in(f: Frame) -> Output:
    return Output(f.header["id"], f.header["fd"], bytes(f.body))


def yielded_in(f: Frame) -> Yielded:
    return Yielded(f.header["id"], f.header["seq"], "blob" in f.header)


def written_in(f: Frame) -> Written:
    return Written(f.header["id"], f.header["seq"], f.header["at"], f.header["size"])


def wanted_in(f: Frame) -> Wanted:
    return Wanted(f.header["what"], f.header["key"])


_make_outcome = partial(tuple.__new__, Outcome)


def outcome_in(f: Frame) -> Outcome:
    h = f.header
    if "late" not in h:
        return _make_outcome((h["id"], "blob" in h, "done" in h, None, "", ""))
    late = float(h["late"])
    return Outcome(h["id"], "blob" in h, "done" in h, late, str(h["printed"]), str(h["said"]))
