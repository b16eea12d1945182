"""Data types that drivers and the core share: Need, Offer, Order, Instance, Access, Finding, Leftover."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any, Literal, Protocol, TypedDict

from skypool.accelerators import Accelerator
from skypool.checks import warn_renamed
from skypool.wire.keys import Keys
from skypool.wire.transport import Transport

__all__ = [
    "Access",
    "Arch",
    "Finding",
    "Instance",
    "Leftover",
    "Market",
    "Need",
    "Offer",
    "Order",
    "PriceSource",
    "Progress",
    "SlotEnv",
    "SlotsAsked",
    "Trust",
    "Wanted",
]

Market = Literal["on-demand", "spot"]
Wanted = Literal["on-demand", "spot", "spot-if-available", "cheapest"]
Arch = Literal["x86_64", "arm64"]
Trust = Literal["full", "data"]
SlotsAsked = int | Literal["per-device"] | None
"""How a node's devices are split: into so many slots, one for each device, or, None, not at all."""


@dataclass(frozen=True, slots=True)
class Need:
    """Everything asked of one node.

    Attributes:
        accelerators: any of these will do; empty means none is needed.
        slots: how many calls it runs at once, among which its devices are dealt out; "per-device" for one for each
            device; None for one with all devices. Both mean one for each CPU on a node without devices.
        bases: the base image for a provider, by the provider's name, where the image asks for one.
        vcpus, memory_gib, disk_gib: at least so much; 0 asks for nothing.
        arch: of its processor; None takes any.
        regions: any of these, as the provider calls them; "eu-*" is all that begin so. Empty takes any.
        market: which offers may serve: "spot-if-available" takes spot first and then on-demand, "cheapest" whichever.
        max_usd_per_hour: what one node, or one slice, may cost, everything it needs included; None for no such cap.
        private_network: whether the pool's nodes must reach each other: all of them are launched in one place, or none.
    """

    accelerators: tuple[Accelerator, ...] = ()
    slots: SlotsAsked = None
    bases: Mapping[str, str] = field(default_factory=dict)
    vcpus: float = 0.0
    memory_gib: float = 0.0
    disk_gib: float = 0.0
    arch: Arch | None = None
    regions: tuple[str, ...] = ()
    market: Wanted = "on-demand"
    max_usd_per_hour: float | None = None
    private_network: bool = False

    @property
    def markets(self) -> tuple[Market, ...]:
        """Those whose offers may serve."""
        return (self.market,) if self.market in ("on-demand", "spot") else ("on-demand", "spot")

    @property
    def disk_gb(self) -> int:
        """The disk in whole GB of 10**9 bytes, as some providers sell it; never less than `disk_gib`."""
        return math.ceil(self.disk_gib * 2**30 / 1e9)


@dataclass(frozen=True, slots=True)
class PriceSource:
    """Where an offer's price comes from, and of which day it is. Many offers share one.

    Attributes:
        kind: "provider" for a price that the provider told, "table" for one of a table that is shipped with the driver.
        as_of: the day on which the source stated the price. None means the time of the request for a provider's price,
            and an unknown day for a table's.
        origin: who published the table, "" for a provider's price.
        why: why the table served instead of the provider, and what to do about it; "" where that is not known.
    """

    kind: Literal["provider", "table"] = "provider"
    as_of: date | None = None
    origin: str = ""
    why: str = ""

    def __str__(self) -> str:
        """Return "price as of 2026-03-02 (table)"; "" for what the provider told at the time of the request."""
        if self.kind == "provider" and self.as_of is None:
            return ""
        return f"price as of {self.day}"

    @property
    def day(self) -> str:
        """The day, marked where it is a table's: "2026-03-02 (table)"."""
        if self.kind == "provider":
            return "" if self.as_of is None else self.as_of.isoformat()
        return f"{self.as_of or 'an unknown day'} (table)"

    def is_outdated(self, today: date, days: int) -> bool:
        """Return True for a table's price that is older than so many days, or of an unknown day."""
        return self.kind == "table" and (self.as_of is None or (today - self.as_of).days > days)


@dataclass(frozen=True, slots=True)
class Offer:
    """What a provider sells now: one machine, or one slice of several that are only had together.

    Attributes:
        usd_per_hour: what is really charged for all of it, its disks and its public addresses included: for a slice
            the price of the whole slice.
        accelerator: of all of it, too: the slice's where it is one.
        vcpus, memory_gib, disk_gib: of each machine; None where it has whatever is asked for, or does not say.
        arch: of its processor; None where that is not known.
        available: whether it is in stock now; None where the provider does not say.
        quota: what the provider calls the limit that this counts toward, place and market included: when it is
            reached, no other offer with the same one is tried. "" where each offer would be refused.
        least_billed: seconds that are charged for at least.
        trust: how far what its machine sends may be trusted unless the pool says: "data" where the machine is a
            stranger's, whose answers must not be able to run code here.
        detail: what only the driver that made the offer understands.
        hosts: how many machines come of one: the hosts of a slice. Each becomes a node.
        ends_itself: whether it ends, with its cost, when its lease is over; None where the provider's abilities tell.
        price_source: where `usd_per_hour` comes from, and of which day it is.
        on_demand_usd_per_hour: for a spot offer whose price is a table's, what the same costs on demand: it is ranked
            by that when the table is old. None where that is not known.
    """

    provider: str
    instance_type: str
    region: str = ""
    zone: str = ""
    market: Market = "on-demand"
    usd_per_hour: float = 0.0
    accelerator: Accelerator | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    vcpus: float | None = None
    memory_gib: float | None = None
    disk_gib: float | None = None
    arch: Arch | None = None
    available: bool | None = None
    quota: str = ""
    least_billed: float = 0.0
    trust: Trust = "full"
    hosts: int = 1
    ends_itself: bool | None = None
    price_source: PriceSource = PriceSource()
    on_demand_usd_per_hour: float | None = None


class Progress(Protocol):
    """A listener that hears of each create and each end while a launch is under way, so that each is on the bill."""

    def asking(self, order: Order, nodes: Sequence[int]) -> None:
        """Hear that a create request for these nodes is about to be sent."""
        ...

    def made(self, order: Order, instances: Sequence[Instance]) -> None:
        """Hear that these instances exist."""
        ...

    def undone(self, order: Order, instances: Sequence[Instance]) -> None:
        """Hear that these instances were ended again, and that their end is proved."""
        ...


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked on one offer.

    Attributes:
        pool: the pool's name, which becomes a tag.
        token: makes the create idempotent: the same token is the same machines. At most 64 of [a-z0-9-]; a tag, too.
        count: how many machines; nodes: which nodes of the pool they become. On an offer of several hosts these are
            the nodes of whole slices, host after host, one slice after the other.
        lease: seconds that a machine lives on without a word from its client, from its boot on.
        lifetime: seconds after its boot at which a machine ends itself whatever happens, None for no such time.
        until: when nobody needs the machines any more unless it is renewed: what their tag says. Aware, UTC.
        max_usd_per_hour: the most that one machine, or one slice, may cost as prices move; None for no such limit. A
            driver whose provider takes a maximum price for spot machines sends it.
        progress: hears of each create and end during the launch; None where nobody listens. A driver that makes
            machines one by one, or that ends what it made when a launch fails, calls `asking`, `made` and `undone`.
    """

    pool: str
    token: str
    nodes: tuple[int, ...]
    need: Need
    lease: float = 600.0
    lifetime: float | None = None
    until: datetime | None = None
    max_usd_per_hour: float | None = None
    progress: Progress | None = field(default=None, repr=False, compare=False)

    @property
    def count(self) -> int:
        """The number of machines asked for."""
        return len(self.nodes)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The former name of `nodes`; works in this release with a DeprecationWarning."""
        warn_renamed("Order.ranks", "Order.nodes")
        return self.nodes

    @property
    def keys(self) -> Keys:
        """The pool's own, for ssh both ways."""
        return Keys.of(self.pool)

    def asking(self, *nodes: int) -> None:
        """Say that a create request for these nodes is about to be sent: they may be billed from now on."""
        if self.progress is not None:
            self.progress.asking(self, nodes)

    def made(self, *instances: Instance) -> None:
        """Say that these instances exist, before the launch returns."""
        if self.progress is not None:
            self.progress.made(self, instances)

    def undone(self, *instances: Instance) -> None:
        """Say that these instances have ended again, as the provider proved."""
        if self.progress is not None:
            self.progress.undone(self, instances)


@dataclass(frozen=True, slots=True)
class Instance:
    """A rented machine as its provider sees it.

    Attributes:
        id: the provider's own name for it.
        node: which node of its pool it is.
        offer: what it was rented on; None where it was found by its tag.
        token: of the order that made it, "" where no tag tells.
        until: when nobody needs it any more, as its tag says; None where no tag tells.
        detail: what only the driver understands.
        slice: the provider's name for the slice that it is a host of, the same for all of them: they come, cost and
            end together. "" where it is a machine of its own.
        billed_from: since when its provider bills it, in seconds since 1970, as the provider says; None where it does
            not say, or does not bill it yet (see `Abilities.billed_from`).
        region: where the driver asks about it: the provider's region, or a zone where each zone is asked by itself. ""
            for a provider that has one place only, or does not tell.
        instance_type: the provider's name of its type, as `Offer.instance_type`; "" where the provider does not tell,
            or the driver does not need it.
        created_at: when it was created, in seconds since 1970, as the provider says; None where it does not say, or
            the driver does not need it.
    """

    provider: str
    id: str
    pool: str
    node: int
    state: Literal["starting", "running", "ending", "ended"] = "running"
    offer: Offer | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    token: str = ""
    until: datetime | None = None
    slice: str = ""
    billed_from: float | None = None
    region: str = ""
    instance_type: str = ""
    created_at: float | None = None

    @property
    def rank(self) -> int:
        """The former name of `node`; works in this release with a DeprecationWarning."""
        warn_renamed("Instance.rank", "Instance.node")
        return self.node


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something other than an instance that a pool made at a provider: a security group, a key pair, a disk.

    Attributes:
        kind: what the provider calls that; id: the provider's own name for it.
        until: when nobody needs it any more, as its tag says; None where no tag tells.
        detail: what only the driver understands.
        tagged_as: the name by which it is tagged, if that is not its id; "" where it is.
    """

    provider: str
    kind: str
    id: str
    pool: str
    region: str = ""
    until: datetime | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    tagged_as: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a driver found when it was asked whether it could work; `advice` says what to do, "" where all is well."""

    what: str
    good: bool
    text: str
    advice: str = ""


class SlotEnv(TypedDict):
    """The environment of one slot of a node, and the names of the devices that it has. It travels as JSON."""

    env: Mapping[str, str]
    devices: Sequence[str]


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach an instance and what is there. Paths are the node's own and may begin with "~".

    Attributes:
        transport: runs a command there.
        python: the interpreter there; None lets the bootstrap find or install one.
        folder: where the agent lives.
        spool: where values go that are too large for memory.
        cwd: where calls run; None means the agent's folder.
        spool_memory: largest value kept in memory, bytes; None means half of what is free.
        env: environment for the agent and its workers.
        slots: for each slot its environment and the names of its devices; None leaves that to the node, which does what
            `Need.slots` says.
        home: where what the image asks for is installed, kept for the next pool.
        booting: seconds from now in which nobody need answer there yet.
        settling: seconds from now in which a refused login, or words where an answer should be, may only mean that the
            boot is not through.
        keying: seconds from now in which another host key than the declared one may only mean so. Nothing is sent to
            a machine with another key, then as ever.
        exclusive: whether the machine serves one pool at a time.
        owned: whether the machine is the user's own, so that no packages of its system are touched.
        notice: what the user should know of this access, "" for nothing.
        guard: the file by which the machine's own end is put off (see `userdata`), "" where it has no such guard.
        watch: Python source, standard library only, that the agent runs beside the calls: it prints a line, the
            seconds since 1970 at which the provider takes the machine back, and nothing before. "" where none tells.
    """

    transport: Transport
    python: str | None
    folder: str
    spool: str
    cwd: str | None = None
    spool_memory: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    slots: SlotsAsked | Sequence[SlotEnv] = None
    home: str = "~/.skypool"
    booting: float = 0.0
    settling: float = 0.0
    keying: float = 0.0
    exclusive: bool = False
    owned: bool = False
    notice: str = ""
    guard: str = ""
    watch: str = ""
