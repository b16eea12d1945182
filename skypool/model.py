"""Data types that drivers (one for each cloud) and the rest of skypool share.

These are Need, Offer, Order, Instance, Access, Bill, Finding and Leftover, and the types of their fields. A node is one
machine of a pool. A slice is several machines that are rented, billed and ended together. A slot is the part of a node
that runs one call at a time. The agent is the process on a node that manages its workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any, Literal, Protocol, TypedDict

from skypool.accelerators import Accelerator
from skypool.wire.keys import Keys
from skypool.wire.transport import Transport

__all__ = [
    "Access",
    "Arch",
    "Bill",
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
"""The split of a node's devices into slots. An int is the number of slots, "per-device" makes one slot for each device,
and None makes one slot with all devices."""


@dataclass(frozen=True, slots=True)
class Need:
    """Requirements that each node of a pool must meet.

    Attributes:
        accelerators: accepted accelerators; any one of them will do. Empty means that no accelerator is needed.
        slots: number of calls that a node runs at once; its devices are divided among them. "per-device" means one call
            for each device. None means one call that has all devices. On a node without devices, "per-device" and None
            mean one call for each CPU.
        bases: the image that the machines of each provider boot, by the provider's name. Default: the provider's own.
        vcpus: minimum number of virtual CPUs; 0 for no minimum.
        memory_gib: minimum memory in GiB; 0 for no minimum.
        disk_gib: minimum disk in GiB; 0 for no minimum.
        arch: required processor architecture; None accepts any.
        regions: accepted regions, named as the provider names them. "eu-*" accepts all names that begin with "eu-".
            Empty accepts any region.
        market: "on-demand" or "spot" accepts only such offers. "spot-if-available" accepts both and prefers spot.
            "cheapest" accepts both and prefers the lower price.
        max_usd_per_hour: maximum price of one node, or of a whole slice, in US dollars per hour, all costs included.
            None for no maximum.
        private_network: True if the nodes must reach each other. Then all nodes are launched in one place, or none is.
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
        """The markets whose offers are accepted: one if `market` is "on-demand" or "spot", otherwise both."""
        return (self.market,) if self.market in ("on-demand", "spot") else ("on-demand", "spot")

    @property
    def disk_gb(self) -> int:
        """`disk_gib` in GB of 10**9 bytes, rounded up to a whole number, for providers that sell disks in GB."""
        return math.ceil(self.disk_gib * 2**30 / 1e9)


@dataclass(frozen=True, slots=True)
class PriceSource:
    """The source of an offer's price and the date of that price.

    Attributes:
        kind: "provider" if the provider's API reported the price, "table" if it is from a table shipped with the
            driver.
        as_of: day on which the source stated the price. None means the time of the request for a provider's price, and
            an unknown day for a table's.
        origin: publisher of the table; "" for a provider's price.
        why: the reason why the table was used instead of the provider's price, and what to do about it; "" if unknown.
    """

    kind: Literal["provider", "table"] = "provider"
    as_of: date | None = None
    origin: str = ""
    why: str = ""

    def __str__(self) -> str:
        """Return `day` after "price as of ", such as "price as of 2026-03-02 (table)"; "" if `day` is ""."""
        if self.kind == "provider" and self.as_of is None:
            return ""
        return f"price as of {self.day}"

    @property
    def day(self) -> str:
        """The day of the price as text: "2026-03-02" for a provider's price, "2026-03-02 (table)" for a table's.

        If the day is unknown, it is "" for a provider's price, and "an unknown day (table)" for a table's.
        """
        if self.kind == "provider":
            return "" if self.as_of is None else self.as_of.isoformat()
        return f"{self.as_of or 'an unknown day'} (table)"

    def is_outdated(self, today: date, days: int) -> bool:
        """Return True if the price is from a table whose day is unknown, or more than `days` days before `today`.

        A price that the provider reported is never outdated.
        """
        return self.kind == "table" and (self.as_of is None or (today - self.as_of).days > days)


@dataclass(frozen=True, slots=True)
class Offer:
    """An offer of a provider: one machine, or one slice, and its price.

    Attributes:
        provider: name of the driver that made the offer.
        instance_type: the provider's name of the machine type.
        region: the provider's name of the region; "" if it has none.
        zone: the provider's name of the zone; "" if it has none.
        market: "on-demand", or "spot" if the provider may take the machine back.
        usd_per_hour: full price of the machine or the whole slice in US dollars per hour, including disks and public
            addresses.
        accelerator: accelerator of the machine or the whole slice; None if there is none.
        detail: data that only the driver that made the offer understands.
        vcpus: virtual CPUs of each machine. None if any number can be asked for, or the provider does not say.
        memory_gib: memory of each machine in GiB. None if any amount can be asked for, or the provider does not say.
        disk_gib: disk of each machine in GiB. None if any amount can be asked for, or the provider does not say.
        arch: processor architecture; None if unknown.
        available: True if the offer is in stock now; None if the provider does not say.
        quota: name of the account's quota (limit) that applies, with place and market. After a quota error, a launch
            skips other offers with the same value; for "", it skips all offers of the provider.
        least_billed: minimum time that is charged for, in seconds.
        trust: "full", or "data" for a machine that a stranger owns: its answers must not run code on the client. A pool
            that sets its own `trust` overrides this value.
        hosts: number of machines that are rented together: the hosts of a slice, otherwise 1. Each becomes a node.
        ends_itself: True if the machine ends itself when its lease is over, and then costs nothing more. If None,
            `Abilities.ends_itself` of the driver applies.
        price_source: source and date of `usd_per_hour`.
        on_demand_usd_per_hour: on-demand price of the same machine, for a spot offer whose price is from a table.
            Ranking uses it if the table is old. None if unknown.
        start_usd: estimated cost in US dollars of the start, which the provider charges beside the time: for example,
            traffic for the image and packages.
        start_note: what `start_usd` is for and what it assumes, such as "10 GB of traffic in and 1 GB out".
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
    start_usd: float = 0.0
    start_note: str = ""


class Progress(Protocol):
    """A listener to which a launch reports each machine that it creates or terminates.

    So the costs of all machines are counted. The methods of `Order` with the same names call those of the listener.
    """

    def asking(self, order: Order, nodes: Sequence[int]) -> None:
        """Record that a create request for these nodes is about to be sent. They may be billed from now on."""
        ...

    def made(self, order: Order, instances: Sequence[Instance]) -> None:
        """Record that the provider has created these instances."""
        ...

    def undone(self, order: Order, instances: Sequence[Instance]) -> None:
        """Record that the launch terminated these instances again, and that the provider confirmed their end."""
        ...


@dataclass(frozen=True, slots=True)
class Order:
    """A request to rent machines on one offer.

    Attributes:
        pool: name of the pool. It becomes a tag of the machines.
        token: idempotency token: a repeated create with the same token makes no further machines. At most 64 characters
            of [a-z0-9-]. It becomes a tag, too.
        nodes: node numbers that the machines get in the pool. If the offer is a slice of several hosts: all hosts of
            the first slice in order, then those of the next one.
        need: requirements of the pool.
        lease: seconds that a machine lives on without hearing from its client, at first counted from its boot. Default
            600.
        lifetime: seconds after its boot at which a machine ends itself in any case; None for no such limit. It is the
            time that is left of the pool's `max_lifetime`, or for which the pool's budget lasts, if that is shorter.
        until: time after which the machines are no longer needed, unless the pool sets a later one. It becomes a tag.
            Time zone aware, in UTC. None for no such tag.
        max_usd_per_hour: maximum price of one machine or slice in US dollars per hour, also when the price changes
            later; None for no limit. The driver sends it with the order if the provider accepts one for spot machines.
        progress: listener to which the launch reports each machine that it creates or terminates; None for none. A
            driver that creates machines one by one, or terminates some when a launch fails, must call `asking`, `made`
            and `undone` of the order.
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
        """The number of machines to rent: one for each node."""
        return len(self.nodes)

    @property
    def keys(self) -> Keys:
        """The SSH keys of the pool: the key with which the client logs in, and the host keys of the machines."""
        return Keys.of(self.pool)

    def asking(self, *nodes: int) -> None:
        """Tell `progress`, if any, that a create request for these nodes is about to be sent.

        The machines may be billed from now on.
        """
        if self.progress is not None:
            self.progress.asking(self, nodes)

    def made(self, *instances: Instance) -> None:
        """Tell `progress`, if any, that these instances exist. A driver calls this before its launch returns."""
        if self.progress is not None:
            self.progress.made(self, instances)

    def undone(self, *instances: Instance) -> None:
        """Tell `progress`, if any, that the provider confirmed the end of instances that the launch terminated."""
        if self.progress is not None:
            self.progress.undone(self, instances)


@dataclass(frozen=True, slots=True)
class Instance:
    """A rented machine as its provider reports it.

    Attributes:
        provider: name of the driver that rented the machine.
        id: the provider's identifier of the machine.
        pool: name of the pool that the machine belongs to.
        node: number of the pool's node that runs on the machine.
        state: "starting", "running", "ending" or "ended".
        offer: offer that the machine was rented on; None if the machine was found by its tags.
        detail: data that only the driver understands.
        token: idempotency token of the order that made the machine; "" if no tag has it.
        until: time in the machine's tag after which it is no longer needed; None if no tag has it.
        slice: the provider's name of the slice that the machine is a host of; "" for a single machine.
        billed_from: time since when the provider bills the machine, in seconds since 1970. None if the provider does
            not say, or does not bill it yet.
        region: region, or zone, in which the driver asks about the machine. "" if the provider has only one place, or
            does not say.
        instance_type: the provider's name of the machine type; "" if the provider does not say, or the driver does not
            need it.
        created_at: when the machine was created, in seconds since 1970. None if the provider does not say, or the
            driver does not need it.
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


@dataclass(frozen=True, slots=True)
class Leftover:
    """A resource other than an instance that a pool made at a provider: a security group, a key pair, a disk.

    Such a resource may outlive the pool and then has to be deleted.

    Attributes:
        provider: name of the driver that made the resource.
        kind: the provider's word for such a resource.
        id: the provider's identifier of the resource.
        pool: name of the pool that the resource belongs to.
        region: region that the resource is in; "" if the provider has only one place.
        until: time in the resource's tag after which it is no longer needed; None if no tag has it.
        detail: data that only the driver understands.
        tagged_as: name under which the provider tags the resource, if that is not `id`; otherwise "".
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
    """The result of one check of a driver, as `skypool doctor` and `skypool prove` show it.

    Attributes:
        what: title of the check, such as "Python".
        good: True if the check passed.
        text: what was found.
        advice: what to do about a failure; "" if there is nothing to do.
        open: True if the check did not fail, but also does not show that all is well: for example, a limit of zero for
            machines that nobody asked for. `good` is then True.
    """

    what: str
    good: bool
    text: str
    advice: str = ""
    open: bool = False


@dataclass(frozen=True, slots=True)
class Bill:
    """The sum that a provider bills for some machines, as the provider's API tells it.

    Attributes:
        usd: the sum in US dollars; None if the provider does not tell it, or does not tell it yet.
        text: where the sum is from, and what it contains. If `usd` is None: why, and where to look later.
    """

    usd: float | None
    text: str


class SlotEnv(TypedDict):
    """A dict about one slot: "env" has its environment variables by name, and "devices" the names of its devices."""

    env: Mapping[str, str]
    devices: Sequence[str]


@dataclass(frozen=True, slots=True)
class Access:
    """Connection details of an instance, and the paths and settings that the agent uses there.

    Paths are on the node and may begin with "~". `booting`, `settling` and `keying` are seconds, counted from the first
    attempt to connect.

    Attributes:
        transport: runs commands on the node.
        python: path of the Python interpreter. If None, the setup of the node finds or installs one.
        folder: folder of the agent.
        spool: folder for values that are too large for memory.
        cwd: working directory of calls; None means the agent's folder.
        programs: folder of programs that shells find before all others; "" for none.
        spool_memory: largest value that is kept in memory, in bytes. None means half of the free memory.
        env: environment variables of the agent and its workers.
        slots: environment variables and device names of each slot. Or the number of slots among which the devices are
            divided, or "per-device" for one slot for each device. If None, `Need.slots` of the pool applies.
        home: folder where the image's software is installed. It is kept for the next pool.
        booting: time in which the machine may not answer because it still boots.
        settling: time in which a refused login, or unexpected output in place of an answer, may mean that the boot has
            not finished.
        keying: time in which a wrong host key may mean that the boot has not finished. Nothing is ever sent to a
            machine with a wrong key.
        exclusive: True if the machine serves one pool at a time.
        owned: True if the machine is the user's own. Its system packages are then not changed.
        simulated: True if the accelerators are simulated. Drivers are then neither installed nor checked.
        notice: text that the user should read about this access; "" for none.
        guard: path of a file on a machine that ends itself. Each write to it postpones that end. "" if the machine does
            not end itself in this way. If a file "end" is beside it, writes to that bring the end nearer.
        watch: Python source of a program that the agent runs beside the calls, with only the standard library. When the
            provider announces that it takes the machine back, the program prints the time of that as one line, in
            seconds since 1970. "" for none.
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
    simulated: bool = False
    programs: str = ""
