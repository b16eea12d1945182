"""Settings of the agent that runs on a node. The client writes them, and `agent.start` reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from skypool.model import SlotEnv, SlotsAsked, Trust


@dataclass(frozen=True, slots=True)
class SlicePlace:
    """The place of a node in its slice. A field is None if it is unknown.

    Attributes:
        host: number of the host in its slice, from 0.
        hosts: number of hosts of the slice.
        chips: accelerator chips of this host.
        slice_chips: accelerator chips of the whole slice.
    """

    host: int | None = None
    hosts: int | None = None
    chips: int | None = None
    slice_chips: int | None = None

    def wire(self) -> dict[str, int]:
        """Return the known fields by name, for JSON. Fields that are None are left out."""
        said = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in said.items() if value is not None}


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """The settings with which the client starts the agent on a node.

    Attributes:
        folder: folder of the agent on the node.
        pool: name of the pool.
        node: number of the node in the pool.
        nodes: number of nodes of the pool.
        place: place of the node in its slice.
        slots: slots of the node, as in `Access.slots`.
        lease: seconds that the agent lives on without hearing from its client.
        lifetime: seconds after which the agent ends itself in any case; None for no such limit.
        guard: path of the file that postpones the machine's own end; "" for none.
        rented: True if the machine is rented.
        liveness: seconds of silence after which a client or a worker is given up.
        grace: seconds that a call has to stop after it was asked to.
        spool: folder for values that are too large for memory.
        watch: source of the program that prints when the provider takes the machine back; "" for none.
        cwd: working directory of calls.
        spool_memory: largest value that is kept in memory, in bytes. None means half of the free memory.
        allow: names of the classes that results may contain beyond plain data, if `trust` is "data".
        trust: how far the client trusts data from this node: "full", or "data" if nothing from it may run code.
        env: environment variables of the agent and its workers, secrets included.
        keep: file descriptors that stay open, such as the machine's lock.
    """

    folder: str
    pool: str
    node: int
    nodes: int
    place: SlicePlace
    slots: SlotsAsked | Sequence[SlotEnv]
    lease: float
    lifetime: float | None
    guard: str
    rented: bool
    liveness: float
    grace: float
    spool: str
    watch: str
    cwd: str
    spool_memory: int | None
    allow: Sequence[str]
    trust: Trust
    env: Mapping[str, str] = field(repr=False)
    keep: Sequence[int] = ()

    def wire(self) -> dict[str, Any]:
        """Return the settings as a dict for JSON, in the form that the agent reads. `place` becomes "slice"."""
        said = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "place"}
        return {**said, "slice": self.place.wire()}
