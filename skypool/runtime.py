"""Functions that user code calls on a node (a rented machine): `instance_info`, `shard`, `is_head`.

Outside of a pool, they work as in a pool of one node.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any, Final, Literal, TypeVar, overload

from skypool import devices
from skypool.devices import Device
from skypool.devices.device import cores
from skypool.errors import UsageError

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """The place where a call runs: pool, node, slot and devices.

    A node is a rented machine. A slot is a place on a node that runs one call at a time. `call @ pool` runs a call on
    every node at once. A TPU slice is a group of machines that are rented together; a single machine counts as a slice.

    Attributes:
        pool: the pool's name, "" outside of a pool.
        node: number of this node in the pool, from 0. In a call that was sent with `@`, the number among the nodes of
            the call.
        nodes: number of nodes of the pool. In a call that was sent with `@`, the number of nodes of the call.
        slot: index of the slot among the node's slots of the same `slot_kind`, from 0.
        slots: number of the node's slots of the same kind as this slot.
        call: id of the running call, 0 outside of a call.
        hostname: host name of this machine.
        vcpus: number of CPU cores that this process may use.
        accelerators: devices that this process may use, as `skypool.devices` finds them.
        host: index of this node in its TPU slice, from 0.
        hosts: number of machines in the slice.
        chips: number of TPU chips of this node; 0 if it has none.
        slice_chips: number of TPU chips of the whole slice; 0 if it has none.
        address: address of this node in its own network; "" if unknown.
        addresses: addresses of all nodes of a call sent with `@`, by node. Empty for any other call. The nodes can
            connect to these addresses if the pool has `private_network=True`, or if the nodes share a network anyway.
        slot_kind: "device" for a slot that has devices of the node, "cpu" for a slot without devices.
        rank: number of this process among those of the call, from 0. The processes of a call with `procs=` are counted
            over all of its nodes. In any other call that was sent with `@`, the same as `node`; otherwise 0.
        world_size: number of processes of the call; 1 in a call that runs on a single node without `procs=`.
        local_rank: number of this process among the call's processes on this node, from 0.
        local_world_size: number of the call's processes on this node; 1 without `procs=`.
        attempt: number of this run of a call with `procs=`, from 1. Repeats after a machine was taken back count, too.
            1 for other calls.
        world_changed: True if this run of a call with `procs=` has another `world_size` than the previous run.
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
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    attempt: int = 1
    world_changed: bool = False

    @property
    def slice(self) -> int:
        """The index of the pool's slice that this node belongs to, from 0. For a single machine, the node's number."""
        return (self.node - self.host) // self.hosts

    @property
    def is_head(self) -> bool:
        """True if `node` and `local_rank` are 0. Always True outside of a pool."""
        return self.node == 0 and self.local_rank == 0

    @property
    def head_address(self) -> str:
        """The address of node 0, to which the other nodes of a call sent with `@` can connect.

        Raises:
            UsageError: the call was not sent with `@`, or node 0 does not know its own address.
        """
        if not self.addresses:
            raise UsageError(
                "head_address is known only in a call that runs on all nodes, and this call runs on a single node; "
                "send the call with `call @ pool`"
            )
        if not self.addresses[0]:
            raise UsageError(
                "node 0 does not know its own address, because it shares no network with other nodes; make the "
                "pool with private_network=True"
            )
        return self.addresses[0]

    @property
    def accelerator(self) -> Device | None:
        """The first device that this process may use, or None if it has none."""
        return self.accelerators[0] if self.accelerators else None


_process: InstanceInfo | None = None
_call = 0
_begun = 0
_world: tuple[int, Sequence[str]] | None = None
_own: Collection[str] | None = None
"""The names of the devices that this process is to use, such as "cuda 0"; None for all that it sees."""
_folder = ""
_in_gang = False
"""True in a process of a gang, a call with `procs=` that runs as several processes on its nodes."""


def instance_info() -> InstanceInfo:
    """Return the place where the running call runs: pool, node, slot and devices.

    Outside of a pool, the result is node 0 of 1, and the pool's name is "". The first use in a process detects the
    devices.
    """
    info = _process or InstanceInfo()
    if _world is not None:
        info = replace(info, node=_world[0], nodes=len(_world[1]), addresses=tuple(_world[1]))
        if not _in_gang:
            info = replace(info, rank=info.node, world_size=info.nodes)
    return replace(info, call=_call, accelerators=_devices())


@cache
def _devices() -> tuple[Device, ...]:
    """Return the devices that this process should use; it may see others, too. The first call detects them."""
    return tuple(each for each in devices.detect() if _own is None or f"{each.kind} {each.pin}" in _own)


def is_head() -> bool:
    """Return True if this call runs on node 0 of the pool. Use it for work that should be done once.

    In a call that was sent with `@`, node 0 is the first of its nodes. In a call with `procs=`, only the process with
    rank 0 gets True. Always True outside of a pool.
    """
    return instance_info().is_head


def enter(info: InstanceInfo, in_gang: bool = False, own: Collection[str] | None = None, folder: str = "") -> None:
    """Set the place of this worker process, for all threads. The worker calls this once, before its first call.

    Args:
        info: the place, which `instance_info` returns from now on.
        in_gang: True for a process of a call that runs as several processes on its nodes.
        own: the names of the process's own devices, such as "cuda 0", if it sees others, too; otherwise None.
        folder: the folder of skypool's files on this node.
    """
    global _process, _in_gang, _own, _folder
    _folder = folder
    _process = info
    _own = own
    _in_gang = in_gang


def place() -> dict[str, Any]:
    """Return the place of this worker process, for `enter_again` in a process that it starts. JSON can hold it."""
    info = _process or InstanceInfo()
    own = None if _own is None else sorted(_own)
    return {"info": {**asdict(replace(info, accelerators=()))}, "own": own, "folder": _folder, "call": _call}


def enter_again(place: Mapping[str, Any]) -> None:
    """Set the place of this process to that which `place` has returned in the worker that has started it."""
    info = InstanceInfo(**{**place["info"], "accelerators": (), "addresses": tuple(place["info"]["addresses"])})
    enter(info, own=place["own"], folder=place["folder"])
    begin(place["call"], None)


def node_number() -> int:
    """Return the number of this node in its pool; -1 outside of a pool. No device is detected."""
    return -1 if _process is None else _process.node


def node_folder() -> str:
    """Return the folder of skypool's files on this node, which is removed when the node ends; "" outside of a pool."""
    return _folder


def begin(call: int, world: tuple[int, Sequence[str]] | None) -> None:
    """Set which call runs in this worker process from now on, for all its threads.

    `call` is the id of the call. `world` is a tuple for a call that was sent with `@`: the index of this node among the
    nodes of the call, and the addresses of these nodes. It is None for other calls.
    """
    global _call, _begun, _world
    _call = call
    _begun += 1
    _world = world


def calls_begun() -> int:
    """Return how many calls have begun in this process. It tells a call that is repeated from its former run."""
    return _begun


@overload
def shard(data: T, /, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False) -> T: ...
@overload
def shard(data: T, other: U, /, *, shuffle: bool = False, seed: int = 0, drop_last: bool = False) -> tuple[T, U]: ...
@overload
def shard(
    data: Any, other: Any, /, *more: Any, shuffle: bool = False, seed: int = 0, drop_last: bool = False
) -> tuple[Any, ...]: ...
def shard(*data: Any, shuffle: bool = False, seed: int = 0, drop_last: bool = False) -> Any:
    """Return this node's part of `data`: consecutive rows, in parts that are as equal as possible.

    Together, the parts have each row exactly once, unless `drop_last` is set. In a call with `procs=`, each process
    gets a part of its own. Outside of a pool, the part has all rows.

    Args:
        data: lists, tuples, numpy arrays, torch tensors, ranges, strings or other sequences. A row is one element.
            Several sequences are cut in the same way, so that rows with the same index stay together. They are not
            changed.
        shuffle: True distributes the rows in random order. It depends only on `seed` and the number of rows, so it is
            the same on every node. Default False.
        seed: seed of the random order. Default 0.
        drop_last: True leaves out the last rows if they would make some parts longer than others. With False, the
            default, the first parts then have one row more.

    Returns:
        A value of the same type as `data`, or a tuple of such values for several sequences. It is empty if no row is
        left for this node. A shuffled range gives a list, and so does another type of sequence that is shuffled or
        cannot be sliced.

    Raises:
        UsageError: no data was given, the lengths differ, or an argument is not a sequence, such as a dictionary or a
            set.
    """
    if not data:
        raise UsageError("shard() needs at least one sequence to divide among the nodes, such as shard(items)")
    for each in data:
        if not hasattr(each, "__len__") or isinstance(each, (Mapping, Set)):
            raise UsageError(
                f"shard() needs sequences, and {type(each).__name__} is not a sequence; pass a list instead"
            )
    lengths = [len(each) for each in data]
    if len(set(lengths)) > 1:
        raise UsageError(
            f"shard() needs sequences of equal length, but their lengths are {lengths}; make them equally long"
        )
    info = instance_info()
    index, parts_of = (info.rank, info.world_size) if _in_gang else (info.node, info.nodes)
    rows = part(lengths[0], index, parts_of, drop_last)
    order = _shuffled(lengths[0], seed)[rows] if shuffle else None
    parts = tuple(_cut(each, rows) if order is None else _take(each, order) for each in data)
    return parts[0] if len(parts) == 1 else parts


def part(length: int, index: int, parts: int, drop_last: bool = False) -> slice:
    """Return the rows that belong to part `index` of `parts`, as a Python slice of `length` rows.

    The first parts have one row more if the rows cannot be divided evenly. With `drop_last`, all parts are equally
    long, and the rows that are left at the end belong to none.
    """
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
    except TypeError:  # a sequence that does not support slices
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


Reason = Literal["provider", "limit", "lease"]
"""Why a machine ends: its provider takes it back, budget or lifetime are over, or its client is not heard any more."""
PROVIDER: Final = "provider"
LIMIT: Final = "limit"
LEASE: Final = "lease"


@dataclass(frozen=True, slots=True)
class Interruption:
    """A notice that this machine ends soon.

    Attributes:
        at: when the provider takes the machine, or when the call is stopped, in seconds since 1970.
        reason: "provider" if the provider takes the machine back, "limit" if the budget or lifetime is over, "lease" if
            the machine has not heard of its client for long. The last two come only where a folder is saved.
    """

    at: float
    reason: Reason = PROVIDER

    @property
    def left(self) -> float:
        """The seconds until `at`, by the machine's clock; 0.0 if that time has passed."""
        return max(0.0, self.at - time.time())


@dataclass(frozen=True, slots=True)
class Attended:
    """The function of a call, with a second function for the case that its machine ends.

    Both are sent to the node. When it is known that the machine ends soon, `on_interruption` is called there, with the
    notice as its argument.
    """

    function: Callable[..., Any]
    on_interruption: Callable[[Interruption], Any]


class Upstream(Iterator[Any]):
    """An iterator argument of a call, as the function on the node sees it. The iterator itself stays on the client.

    Each `next()` waits for one item from the client. It raises what the iterator there raises, StopIteration at the
    end, and UsageError outside of a worker process.

    `number` is the index of this iterator among the iterator arguments of the call.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def __next__(self) -> Any:
        if pull is None:
            raise UsageError(
                "an iterator argument can be read only on the node, by the call that received the argument; iterate "
                "over the argument inside the function"
            )
        return pull(self.number)


pull: Callable[[int], Any] | None = None
"""A function that the worker process sets; None outside of a worker.

Called with a number, the function returns the next item of the running call's iterator argument with that number.
"""
