"""Messages to the agent, from its client and its workers, as typed tuples. Each is made from a frame here.

The functions raise KeyError, TypeError or ValueError if a field is missing or cannot be converted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from skypool.agent.call import NodeCall
from skypool.agent.worker_processes import SERVICE
from skypool.gangs.agreement import MOST_STEP, Offer
from skypool.gangs.environment import Member
from skypool.runtime import LEASE, LIMIT, PROVIDER, Reason
from skypool.wire.frames import Frame


class Ack(NamedTuple):
    """The client's message about what it has received.

    `calls` has the ids of calls whose outcomes have arrived. `output` is the number of the last OUTPUT frame that has
    arrived; 0 for none.
    """

    calls: list[int]
    output: int


class Credit(NamedTuple):
    """The client's message that it has taken the items of the generator call `id` up to number `seq`, from 1."""

    id: int
    seq: int


class Item(NamedTuple):
    """The client's answer to a `Pull`: item number `n`, from 1, of iterator argument number `arg` of the call `id`."""

    id: int
    arg: int
    n: int


class Pull(NamedTuple):
    """Request of a worker for the next item of iterator argument number `arg` of the call `id`."""

    id: int
    arg: int


class Ping(NamedTuple):
    """The client's regular sign of life, which asks for a status report.

    The node may live for at most `left` seconds from now; None for no new limit. The client then stops its calls after
    `stop` seconds; None if that is not known. `linger` is (seconds left now, all seconds) of the time without work
    after which the node ends itself; None if the client does not say.
    """

    left: float | None
    stop: float | None
    linger: tuple[float, float] | None


class Cancel(NamedTuple):
    """The client's request to stop the call `id`, which then has `grace` seconds to end."""

    id: int
    grace: float


class Recall(NamedTuple):
    """The client's request to give back up to `n` calls that have not begun.

    `on_cpu` is True for calls that wait for CPU slots, and False for those that wait for MAIN slots.
    """

    n: int
    on_cpu: bool


class Notice(NamedTuple):
    """The client's message that gangs lose a machine other than this one.

    `calls` has the ids of the calls of these gangs on this node. `at` is the time at which the provider takes the
    machine back, in seconds since 1970.
    """

    calls: set[int]
    at: float


class Agree(NamedTuple):
    """The client's message about the step at which the ranks of a gang hear of a notice.

    Attributes:
        calls: the ids of the ranks on this node.
        round: the number of its question, from 1.
        offer: the step that it proposes or has decided; None if it asks how far the ranks are.
        at: when a machine of the gang ends, in seconds since 1970, and `reason` why.
    """

    calls: set[int]
    round: int
    offer: Offer | None
    at: float
    reason: Reason


class Output(NamedTuple):
    """Output that the call `id` has printed to the file descriptor `fd`, 1 or 2. The id is 0 if no call was running."""

    id: int
    fd: int
    data: bytes


class Yielded(NamedTuple):
    """Items that the generator call `id` has sent, the last of them with number `seq`, from 1.

    `is_large` is True if they are one item that is a large value, about which a `Written` has come before.
    """

    id: int
    seq: int
    is_large: bool


class Written(NamedTuple):
    """A worker's message that it has written the first `at` of the `size` bytes of a large value of the call `id`.

    `seq` is 0 if the value is the outcome of the call, otherwise the number of the generator's item.
    """

    id: int
    seq: int
    at: int
    size: int


class Wanted(NamedTuple):
    """Request of a worker for something that the agent keeps or can get.

    `what` is "function", "object", "module" or "memory". `key` names the function or object, is "NAME VERSION" for a
    module, or the number of bytes for memory.
    """

    what: str
    key: str


class Outcome(NamedTuple):
    """Outcome of one call, as its worker has sent it.

    Attributes:
        id: the id of the call.
        is_large: True if the outcome is a large value, about which a `Written` has come before.
        done: True if the worker no longer uses the memory of the call's arguments.
        late: the seconds that the call took, if its worker found that it exceeded its timeout; otherwise None.
        printed: if `late` is set, the end of the call's captured output.
        said: if `late` is set, the exception that the call raised, as text.
        ended: the time after which others may have written to its files, in nanoseconds since 1970; 0 if it was not
            asked to stop.
    """

    id: int
    is_large: bool
    done: bool
    late: float | None
    printed: str
    said: str
    ended: int


def call_in(f: Frame, kind: int) -> NodeCall:
    """Return the agent's record of the call in a CALL frame. `kind` is the kind of slot that the call needs.

    The record has no name of the function, and no large arguments yet: the caller sets them.
    """
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
    """Return True if a frame refers to a large value, which was sent in pieces before the frame."""
    return "blob" in f.header


def wants_no_devices(f: Frame) -> bool:
    """Return True if the call in a CALL frame asks for no devices."""
    return f.header.get("devices") == 0


def member_in(f: Frame) -> Member | None:
    """Return which process of a gang the call in a CALL frame is for; None if the call is not of a gang."""
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
    """Return "linger" from the header of a PING or HELLO: seconds without work after which the node ends itself.

    The result is (seconds that are left now, seconds in full); None if "linger" is missing.
    """
    said = header.get("linger")
    if said is None:
        return None
    left, full = said
    return float(left), float(full)


def ping_in(f: Frame) -> Ping:
    left, stop = (float(f.header[each]) if each in f.header else None for each in ("left", "stop"))
    return Ping(left, stop, linger_in(f.header))


def cancel_in(f: Frame) -> Cancel:
    return Cancel(f.header["id"], float(f.header["grace"]))


def dropped_in(f: Frame) -> str:
    """Return the key of the `pool.put()` object that the client no longer needs, from a DROP frame."""
    key: str = f.header["key"]
    return key


def id_in(f: Frame) -> int:
    """Return the id of the call that a worker gives back, unbegun, with a RECALLED packet."""
    id_: int = f.header["id"]
    return id_


def ids_in(f: Frame) -> list[int]:
    """Return the ids of the calls in a CALL frame (one call) or a CALLS frame (a batch)."""
    return list(f.header["ids"]) if "ids" in f.header else [f.header["id"]]


def recall_in(f: Frame) -> Recall:
    return Recall(f.header["n"], bool(f.header["cpu"]))


def notice_in(f: Frame) -> Notice:
    return Notice({*f.header["calls"]}, float(f.header["at"]))


def agree_in(f: Frame) -> Agree:
    h = f.header
    offer = None if h["step"] is None else Offer(min(int(h["step"]), MOST_STEP), bool(h["decided"]))
    reason: Reason = LIMIT if h["reason"] == LIMIT else LEASE if h["reason"] == LEASE else PROVIDER
    return Agree({*h["calls"]}, int(h["round"]), offer, float(h["at"]), reason)


def order_in(f: Frame) -> dict[str, Any]:
    """Return the client's order to save a folder, as the mover reads it. Its keys are in the frame's body."""
    said: dict[str, Any] = json.loads(bytes(f.body))
    return {**said, "do": str(said["do"]), "id": str(said["id"])}


def stay_in(f: Frame) -> float | None:
    """Return for how many seconds the node may live on after the client's BYE; None if the node must end now."""
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
    if "late" not in h and "ended" not in h:
        return _make_outcome((h["id"], "blob" in h, "done" in h, None, "", "", 0))
    late, printed, said = (float(h["late"]), str(h["printed"]), str(h["said"])) if "late" in h else (None, "", "")
    return Outcome(h["id"], "blob" in h, "done" in h, late, printed, said, int(h.get("ended", 0)))
