"""Functions that user code calls on a node: `instance_info`, `shard`, `is_head`, `interruption`."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, TypeVar, overload

from skypool import devices
from skypool.devices import Device
from skypool.devices.device import cores
from skypool.errors import UsageError

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """Where a call runs.

    Attributes:
        pool: the pool's name, "" outside of one.
        node: number of this node, from 0; nodes: how many take part.
        host: which host of its slice this node is, from 0; hosts: how many it has. 0 of 1 for a machine by itself.
        chips: TPU chips of this node; slice_chips: of its whole slice. 0 where a node has none.
        slot: which of the node's slots of this kind; slots: how many of them it has.
        call: the id of the running call, 0 outside of one.
        accelerators: the devices this process may use, as `skypool.devices` finds them.
        address: of this node in its own network, "" where nobody knows; addresses: of all nodes that a call sent with
            `@` runs on, by node; empty for another call. They reach each other there if the pool was made with
            `private_network=True`, or its nodes are of one network anyway.
        slot_kind: "device" for a slot that has devices of the node, "cpu" for one that has none.
    """

    pool: str = ""
    node: int = 0
    nodes: int = 1
    slot: int = 0
    slots: int = 1
    call: int = 0
    hostname: str = field(default_factory=socket.gethostname)
    vcpus: int = field(default_factory=cores)
    accelerators: tuple[Device, ...] = ()
    host: int = 0
    hosts: int = 1
    chips: int = 0
    slice_chips: int = 0
    address: str = ""
    addresses: tuple[str, ...] = ()
    slot_kind: Literal["device", "cpu"] = "cpu"

    @property
    def slice(self) -> int:
        """Which of the pool's slices this node is a host of, from 0; where each is a machine by itself, the node."""
        return (self.node - self.host) // self.hosts

    @property
    def is_head(self) -> bool:
        """Whether this is node 0."""
        return self.node == 0

    @property
    def head_address(self) -> str:
        """The address of node 0: where the nodes of a call sent with `@` meet.

        Raises:
            UsageError: the call was sent to one node, or node 0 does not know its own address.
        """
        if not self.addresses:
            raise UsageError("only nodes that run one call together know each other: send it with `call @ pool`")
        if not self.addresses[0]:
            raise UsageError("node 0 does not know its own address: it has no network but its own")
        return self.addresses[0]

    @property
    def accelerator(self) -> Device | None:
        """The first device this slot may use, None without one."""
        return self.accelerators[0] if self.accelerators else None


_process: InstanceInfo | None = None
_call = 0
_world: tuple[int, Sequence[str]] | None = None


def instance_info() -> InstanceInfo:
    """Where the running call runs; outside of a pool: node 0 of 1."""
    info = _process or InstanceInfo()
    if _world is not None:
        info = replace(info, node=_world[0], nodes=len(_world[1]), addresses=tuple(_world[1]))
    return replace(info, call=_call, accelerators=_devices())


@cache
def _devices() -> tuple[Device, ...]:
    """Looked for once a process, when somebody asks."""
    return devices.detect()


def is_head() -> bool:
    """Whether this call runs on node 0: the place for what only one node should do."""
    return instance_info().is_head


def enter(info: InstanceInfo) -> None:
    """The worker says where it is, for every thread of the process."""
    global _process
    _process = info


def begin(call: int, world: tuple[int, Sequence[str]] | None) -> None:
    """The worker says which call begins, and its rank among those of the same broadcast, with all their addresses."""
    global _call, _world
    _call = call
    _world = world


@overload
def shard(data: T, /, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False) -> T: ...
@overload
def shard(data: T, other: U, /, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False) -> tuple[T, U]: ...
@overload
def shard(
    data: Any, other: Any, /, *more: Any, shuffle: bool = False, seed: int = 0, drop_last: bool = False
) -> tuple[Any, ...]: ...
def shard(*data: Any, shuffle: bool = False, seed: int = 0, drop_last: bool = False) -> Any:
    """This node's part of `data`: contiguous, and as even as it gets.

    Args:
        data: lists, tuples, numpy arrays, torch tensors, ranges, strings or any sequence. Several are cut alike, so
            that rows that belong together stay together.
        shuffle: deal the rows out in an order that `seed` determines, the same on every node.
        drop_last: leave out the rows that would make some parts longer than others.

    Returns:
        A value of the kind given (a list for sequences of no known kind); a tuple of them for several.

    Raises:
        UsageError: nothing was given, the lengths differ, or something is no sequence.
    """
    if not data:
        raise UsageError("shard() needs at least one sequence to cut")
    for each in data:
        if not hasattr(each, "__len__") or isinstance(each, (Mapping, Set)):
            raise UsageError(f"shard() cuts sequences, and {type(each).__name__} is none: make a list of it")
    lengths = [len(each) for each in data]
    if len(set(lengths)) > 1:
        raise UsageError(f"shard() cuts sequences of one length together, these have {lengths}")
    info = instance_info()
    rows = part(lengths[0], info.node, info.nodes, drop_last)
    order = _shuffled(lengths[0], seed)[rows] if shuffle else None
    parts = tuple(_cut(each, rows) if order is None else _take(each, order) for each in data)
    return parts[0] if len(parts) == 1 else parts


def part(length: int, index: int, parts: int, drop_last: bool = False) -> slice:
    """The rows of part `index` of `parts`; the first parts are one longer when it does not come out even."""
    each, left = divmod(length, parts)
    if drop_last:
        left = 0
    start = index * each + min(index, left)
    return slice(start, start + each + (index < left))


def _shuffled(length: int, seed: int) -> list[int]:
    order = list(range(length))
    random.Random(seed).shuffle(order)
    return order


def _cut(data: Any, rows: slice) -> Any:
    try:
        return data[rows]
    except TypeError:  # a sequence that knows no slices
        return [data[index] for index in range(rows.start, rows.stop)]


def _take(data: Any, order: list[int]) -> Any:
    if hasattr(data, "iloc"):  # pandas, whose data[…] means columns
        return data.iloc[order]
    if hasattr(data, "__array__") or hasattr(data, "index_select"):  # numpy, jax, torch
        return data[order]
    picked = [data[index] for index in order]
    if isinstance(data, tuple):
        return tuple(picked)
    if isinstance(data, (bytes, bytearray)):
        return type(data)(picked)
    return "".join(picked) if isinstance(data, str) else picked


@dataclass(frozen=True, slots=True)
class Interruption:
    """The provider takes this machine back.

    Attributes:
        at: when, in seconds since 1970.
    """

    at: float

    @property
    def left(self) -> float:
        """Seconds until then, 0.0 when it is past."""
        return max(0.0, self.at - time.time())


@dataclass(frozen=True, slots=True)
class Attended:
    """A function as it travels that wants something done when its machine is taken back."""

    function: Callable[..., Any]
    on_interruption: Callable[[Interruption], Any]


def interruption() -> Interruption | None:
    """When the provider takes this machine back; None as long as it does not say so, and outside of a pool.

    It reads a number in memory: a loop may ask in each turn.
    """
    at = 0.0 if taken is None else taken()
    return Interruption(at) if at else None


taken: Callable[[], float] | None = None
"""Set by the worker: when the machine goes, in seconds since 1970, 0.0 if nobody says so."""


class Upstream(Iterator[Any]):
    """An iterator argument as the function sees it: each `next()` pulls from the iterator on the client."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __next__(self) -> Any:
        if pull is None:
            raise UsageError("an iterator argument can only be read where its call runs")
        return pull(self.number)


pull: Callable[[int], Any] | None = None
"""Set by the worker: brings the next item of the running call's iterator argument of that number."""
