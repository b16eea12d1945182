"""Settings of the agent that runs on a node. The client writes them, and `agent.start` reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from skypool.model import SlotEnv, SlotsAsked, Trust


@dataclass(frozen=True, slots=True)
class SlicePlace:
    """Which host of its slice a node is. None for what is not known.

    Attributes:
        host: its number in the slice, from 0; hosts: how many the slice has.
        chips: of this host; slice_chips: of the whole slice.
    """

    host: int | None = None
    hosts: int | None = None
    chips: int | None = None
    slice_chips: int | None = None

    def wire(self) -> dict[str, int]:
        """Return what is known, by name."""
        said = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in said.items() if value is not None}


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """What an agent is started with.

    Attributes:
        folder: where the agent lives; spool: where values go that are too large for memory; cwd: where calls run.
        rank: which node of the pool it is; nodes: how many there are.
        place: which host of a slice.
        slots: see `Access.slots`.
        lease: seconds that it lives on without a word from its client; lifetime: seconds after which it ends itself
            whatever happens, None for no such limit.
        guard: the file by which the machine's own end is put off, "" for none; rented: whether the machine is rented.
        liveness: seconds of silence after which a client or a worker is given up.
        grace: seconds that a call has to stop.
        watch: source of the program that tells when the machine is taken back, "" for none.
        spool_memory: largest value kept in memory, bytes; None means half of what is free.
        trust: how far what it sends is believed; allow: classes beyond, where it is trusted with data only.
        env: environment of the agent and its workers, secrets included.
        keep: file descriptors that stay open, such as the machine's lock.
    """

    folder: str
    pool: str
    rank: int
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
        """Return the settings as the agent reads them, ready for JSON."""
        said = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "place"}
        return {**said, "slice": self.place.wire()}
