"""Data that client and agent exchange when they connect: configuration of a node, and state of its machine.

The client sends the configuration as JSON in the prelude, the first bytes that it sends to the loader. The agent sends
the state as JSON in each WELCOME frame, its first one on a connection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NoReturn

from skypool.devices.device import Device
from skypool.errors import protocol_violation

_WHAT = "the configuration of a node"


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Configuration of one slot of a node.

    With the variables `env`, the slot's process sees only its own devices. `devices` are their names, such as "cuda 0".
    """

    env: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SlicePlace:
    """Position of a node in its slice. A machine that is rented by itself counts as a slice of one host.

    `host` is the number of this node's host among the `hosts` of the slice, from 0. `chips` and `slice_chips` count the
    TPU chips of this node and of the whole slice; 0 if there are none.
    """

    host: int = 0
    hosts: int = 1
    chips: int = 0
    slice_chips: int = 0


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Configuration of an agent, which the client sends when it starts one.

    Paths may begin with "~" until the loader has expanded them. Durations are in seconds.

    Attributes:
        folder: the agent's own folder.
        spool: the folder for values that are too large for memory.
        cwd: the working folder of calls.
        pool: the name of the pool.
        node: the node's number among the `nodes` of the pool, from 0.
        slice: the node's position among the machines of its TPU slice.
        slots: a plan for each slot, or the number of slots, among which the devices are split. "per-device" means one
            slot for each device. None means one slot with all devices; on a node without devices, one for each CPU.
        lease: how long the node lives after each sign of life from its client.
        lifetime: how long the node lives at most; None for no such limit.
        liveness: how long a client may be silent before another client may take the node.
        grace: how long a call may go on after its timeout, before its worker is killed.
        guard: the path of a file that the agent writes to postpone the time at which the machine ends itself; or "".
        rented: True if only this pool uses the machine, so that the machine's hosts file may be changed.
        watch: the source of a Python program that waits for a spot notice; "" for none.
        spool_memory: the size in bytes of the largest value kept in memory; None for half of the free memory.
        trust: "full" if workers pickle results. "data" if they write results in a format that cannot run code.
        allow: names of classes that results in that format may contain.
        env: environment variables of the agent and its workers, including secrets.
        keep: file descriptors that stay open in the keeper.
    """

    folder: str
    spool: str
    cwd: str
    pool: str = ""
    node: int = 0
    nodes: int = 1
    slice: SlicePlace = SlicePlace()
    slots: int | Literal["per-device"] | tuple[SlotPlan, ...] | None = None
    lease: float = 60.0
    lifetime: float | None = None
    liveness: float = 60.0
    grace: float = 10.0
    guard: str = ""
    rented: bool = False
    watch: str = ""
    spool_memory: int | None = None
    trust: Literal["full", "data"] = "full"
    allow: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    keep: tuple[int, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return the configuration as a dict for JSON, which `from_json` reads. Secrets in `env` are part of it."""
        return asdict(self)

    @classmethod
    def from_json(cls, said: object) -> AgentConfig:
        """Return the configuration that a client sent as JSON. Only `folder`, `spool` and `cwd` are required.

        Raises ProtocolError if `said` is not a JSON object, or has a missing, unknown or invalid field, which it names.
        """
        given = _table(_WHAT, said, _CONFIG)
        given["slice"] = SlicePlace(**_table("the place of a node in its slice", given.get("slice", {}), _PLACE))
        slots = given.get("slots")
        if isinstance(slots, list):
            given["slots"] = tuple(_slot(each) for each in slots)
        for name in ("allow", "keep"):
            given[name] = tuple(given.get(name, ()))
        missing = [name for name in ("folder", "spool", "cwd") if name not in given]
        if missing:
            raise protocol_violation(f"{_WHAT} has no field {missing[0]!r}")
        return cls(**given)


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """State of a machine, as its agent found it.

    Attributes:
        devices: the accelerators that the agent sees.
        driver: the version of the accelerators' driver software; "" if unknown.
        disk_free: free bytes on the disk with the folder that calls run in.
        time: the machine's clock, in seconds since 1970.
        address: the machine's own address in its network; "" if unknown.
        monitored: True if the agent measures the devices, and reports their state as soon as it has measured them.
        host: the machine's own name; "" if that is not a valid host name.
        machine: the kind of its processor, such as "x86_64".
    """

    devices: tuple[Device, ...] = ()
    driver: str = ""
    disk_free: int = 0
    time: float = 0.0
    address: str = ""
    monitored: bool = False
    host: str = ""
    machine: str = ""

    def to_json(self) -> dict[str, object]:
        """Return the state as a dict for JSON, which is part of a WELCOME frame."""
        return asdict(self)


# --- checks --------------------------------------------------------------------------------------------------

_Check = Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and value >= 0


def _is_env(value: Any) -> bool:
    return type(value) is dict and all(map(_is_text, value.values()))


def _is_texts(value: Any) -> bool:
    return type(value) is list and all(map(_is_text, value))


def _is_counts(value: Any) -> bool:
    return type(value) is list and all(map(_is_count, value))


def _is_slots(value: Any) -> bool:
    return value in (None, "per-device") or type(value) is list or (_is_count(value) and value > 0)


def _or_none(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


_CONFIG: dict[str, _Check] = {
    "folder": _is_text,
    "spool": _is_text,
    "cwd": _is_text,
    "pool": _is_text,
    "node": _is_count,
    "nodes": _is_count,
    "slice": lambda value: type(value) is dict,
    "slots": _is_slots,
    "lease": _is_seconds,
    "lifetime": _or_none(_is_seconds),
    "liveness": _is_seconds,
    "grace": _is_seconds,
    "guard": _is_text,
    "rented": _is_flag,
    "watch": _is_text,
    "spool_memory": _or_none(_is_count),
    "trust": lambda value: value in ("full", "data"),
    "allow": _is_texts,
    "env": _is_env,
    "keep": _is_counts,
}
_PLACE: dict[str, _Check] = dict.fromkeys(("host", "hosts", "chips", "slice_chips"), _is_count)
_SLOT: dict[str, _Check] = {"env": _is_env, "devices": _is_texts}


def _slot(said: object) -> SlotPlan:
    given = _table("a slot of a node", said, _SLOT)
    return SlotPlan(given.get("env", {}), tuple(given.get("devices", ())))


def _table(what: str, said: object, checks: Mapping[str, _Check]) -> dict[str, Any]:
    """Check the fields of a JSON object, and return a copy. Raises ProtocolError, which names `what`, for bad ones."""
    if type(said) is not dict:
        raise protocol_violation(f"{what} must be a JSON object, not {type(said).__name__}")
    for name, value in said.items():
        check = checks.get(name)
        if check is None:
            raise protocol_violation(f"{what} has an unknown field {name!r}")
        if not check(value):
            _refuse(what, name, value)
    return dict(said)


def _refuse(what: str, name: str, value: object) -> NoReturn:
    shown = type(value).__name__ if name == "env" else f"{value!r:.80}"  # the environment contains secrets
    raise protocol_violation(f"{what} has an invalid field {name!r}: {shown}")
