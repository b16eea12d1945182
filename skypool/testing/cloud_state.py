"""The classes of a fake cloud's stored state: its stock, its machines, and the failures that tests prepared.

`World` is the whole state. It contains objects of the types `Stock`, `Machine`, `Thing`, `Rule` (a failure of calls)
and `Flaw` (a defect of a machine). `USUAL` is the default stock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal

from skypool import accelerators
from skypool.accelerators import Accelerator
from skypool.drivers import tags
from skypool.errors import UsageError
from skypool.model import Arch, Market
from skypool.testing import machine

When = Literal["before", "after"]
Billing = Literal["create", "running"]


@dataclass(frozen=True, slots=True)
class Stock:
    """One kind of machine that a fake cloud sells in one zone on one market.

    Args:
        instance_type: the cloud's name for this kind of machine.
        usd_per_hour: the price in USD per hour of one machine, or of one whole slice (several hosts that are sold
            together).
        accelerator: the accelerators of one machine or slice, such as "H100:8"; None for none.
        region: the region in which the machines are sold.
        zone: the zone in which the machines are sold; "" if the cloud sells by regions and has no zones.
        market: "on-demand" or "spot".
        capacity: how many machines (or slices) can be alive at once; None for any number.
        quota: the name of the account's limit toward which the machines count; "" for none.
        vcpus: the number of virtual processors of each machine.
        memory_gib: memory of each machine in GiB.
        disk_gib: disk of each machine in GiB.
        arch: the processor architecture: "x86_64" or "arm64".
        hosts: how many machines one purchase yields. More than 1 form a slice. None: the number follows from the
            accelerator, such as 2 for "v5p-16".
        least_billed: the shortest time that is billed, in seconds.

    Raises:
        UsageError: the price is negative, or the accelerator is unknown.
    """

    instance_type: str = "small"
    usd_per_hour: float = 1.0
    accelerator: str | Accelerator | None = None
    region: str = "north"
    zone: str = "north-a"
    market: Market = "on-demand"
    capacity: int | None = None
    quota: str = ""
    vcpus: float = 4.0
    memory_gib: float = 16.0
    disk_gib: float = 100.0
    arch: Arch = "x86_64"
    hosts: int | None = None
    least_billed: float = 0.0

    def __post_init__(self) -> None:
        if self.usd_per_hour < 0:
            raise UsageError(f"usd_per_hour of Stock must be at least 0, not {self.usd_per_hour!r}")
        if self.accelerator is not None:
            object.__setattr__(self, "accelerator", accelerators.parse(self.accelerator))
        if self.hosts is None:
            object.__setattr__(self, "hosts", self.has.hosts if self.has else 1)

    @property
    def size(self) -> int:
        """Return how many machines one purchase yields: 1, or several for a slice."""
        return self.hosts or 1

    @property
    def place(self) -> tuple[str, str, Market]:
        """Return the tuple (instance type, zone, market), which identifies this stock in a fake cloud.

        If the stock has no zone, the tuple has the region in its place.
        """
        return self.instance_type, self.where, self.market

    @property
    def where(self) -> str:
        """Return the name of the zone; that of the region if the stock has no zone."""
        return self.zone or self.region

    @property
    def has(self) -> Accelerator | None:
        """Return the accelerators of one machine or slice; None if there are none."""
        return self.accelerator if isinstance(self.accelerator, Accelerator) else None


def _usual() -> tuple[Stock, ...]:
    """Return the default stock: three types, each in three zones and on both markets. Spot is 40 % of on-demand."""
    sold = (("small", 0.1, None, 4.0, 16.0), ("gpu", 2.5, "H100", 16.0, 128.0), ("gpu-8", 20.0, "H100:8", 96.0, 1024.0))
    places = (("north", "north-a", 1.0), ("north", "north-b", 1.0), ("south", "south-a", 1.1))
    markets: tuple[tuple[Market, float], ...] = (("on-demand", 1.0), ("spot", 0.4))
    return tuple(
        Stock(name, round(usd * dearer * share, 4), has, region, zone, market, vcpus=vcpus, memory_gib=memory)
        for name, usd, has, vcpus, memory in sold
        for region, zone, dearer in places
        for market, share in markets
    )


USUAL = _usual()
"""The default stock of a fake cloud: three types in three zones and on two markets."""


@dataclass(slots=True)
class Machine:
    """One machine of a fake cloud, as the cloud records it. Times are in seconds since 1970 on the cloud's clock.

    Attributes:
        node: the number of the pool's node that the machine is.
        token: the idempotency token of the request that made the machine.
        until: the time until which the pool needs the machine, from the machine's tag; None for no such tag.
        born: when the machine was created.
        lease: seconds without a sign of life from the client after which the machine ends itself.
        lifetime: seconds after `born` at which the machine ends in any case; None for never.
        folder: the folder on this computer that stands for the machine.
        boots_at: when the machine's boot is to end; None for never.
        deaf: True if the machine never accepts connections, although it runs.
        has: the accelerator that is really in the machine; None for none.
        granted: when the machine's lease ends, unless the client renews it.
        said: the last text that the cloud read from the lease file; "" if nothing was read yet.
        ends_at: the earliest end that was written on the machine; infinite for none. No renewal goes beyond it.
        heir: digest of the heir that came with the first written end; "-" for none.
        end_asked: serial number of the last request for an earlier end; "" for none.
        taken_at: when the cloud takes the machine back; infinite if that is not announced.
        undying: how many more requests to end the machine have no effect; None for all.
        ended_at: None while the machine is alive.
        tagged: False if the machine has no tags, so that clients cannot find it.
        slice: the name of the machine's slice; "" if the machine was sold alone.
        owner: the owner tag of the client that made the machine: "user@host".
        ran_at: when the machine's boot ended; None if the machine still boots, or ended during its boot.
        tags: the tags that a client of `HttpCloud` wrote on the machine.
    """

    id: str
    pool: str
    node: int
    token: str
    stock: Stock
    until: datetime | None
    born: float
    lease: float
    lifetime: float | None
    folder: str
    boots_at: float | None
    state: Literal["starting", "running", "ending", "ended"] = "starting"
    deaf: bool = False
    has: Accelerator | None = None
    granted: float = float("inf")
    said: str = ""
    ends_at: float = float("inf")
    heir: str = "-"
    end_asked: str = ""
    taken_at: float = float("inf")
    undying: int | None = 0
    ended_at: float | None = None
    tagged: bool = True
    slice: str = ""
    owner: str = field(default_factory=lambda: tags.owner())
    ran_at: float | None = None
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def lives(self) -> bool:
        """Return True if the machine has not ended. One that still boots, or is about to end, is alive."""
        return self.state != "ended"


@dataclass(slots=True)
class Thing:
    """A key pair or a security group of a pool. It exists until a driver removes it, even if all machines have ended.

    Attributes:
        kind: "key-pair" or "security-group".
        until: the time until which the pool needs the thing, from the thing's tag; None for no such tag.
        owner: the owner tag of the client that made the thing: "user@host".
    """

    kind: str
    id: str
    pool: str
    until: datetime | None
    owner: str = field(default_factory=lambda: tags.owner())


@dataclass(slots=True)
class Rule:
    """A failure or delay that a test has prepared for the next matching calls of a fake cloud.

    Attributes:
        call: the name of the calls that the rule affects, one of `control.CALLS`; "" for any call.
        error: the exception to raise, or a class of exceptions; None for no error.
        when: the error is raised "before" or "after" the call takes effect.
        times: how many more calls are affected; None for all.
        delay: seconds by which each call takes longer.
        place: the tuple (instance type, zone, market) to which the rule is limited, with "" for any. If one of them is
            not "", only calls that create machines match.
    """

    call: str
    error: Exception | type[Exception] | None = None
    when: When = "before"
    times: int | None = 1
    delay: float = 0.0
    place: tuple[str, str, str] = ("", "", "")


@dataclass(slots=True)
class Flaw:
    """A defect that a test has prepared for the next machine of a fake cloud.

    Attributes:
        boots: seconds that the machine's boot takes; None for a boot that never ends.
        deaf: True if the machine never accepts connections, although it runs.
        undying: how many requests to end the machine have no effect; None for all.
        has: the accelerator that is really in the machine, if `swapped` is True; None for none.
        swapped: True if the machine contains `has` instead of the accelerator that was bought.
    """

    boots: float | None = 0.0
    deaf: bool = False
    undying: int | None = 0
    has: Accelerator | None = None
    swapped: bool = False


@dataclass(slots=True)
class World:
    """The whole state of a fake cloud.

    Attributes:
        key: the API key that clients must send; "" accepts any key.
        real: True if machines are processes on this computer; False if they are mere records, which run nothing.
        ends_itself: True if machines end when their lease is over.
        billing: the moment from which a machine is billed: "create" (its creation) or "running" (the end of its boot).
        offset: seconds by which the cloud's clock is ahead of this computer's clock.
        machines: all machines by id, also those that have ended.
        things: key pairs and security groups by (kind, name).
        rules: failures and delays of the next calls, oldest first.
        flaws: defects of the next machines, the first for the next machine.
        capacity: how many machines (or slices) of a `Stock.place` can be alive at once; None for any number. An entry
            here overrides `Stock.capacity`.
        limits: the maximum number of live machines by quota.
        kills: the calls during which the calling process is killed, each as (number of the call, "before" or "after"
            the call takes effect).
        calls: how many calls the cloud has received.
        made: how many machines the cloud has made.
        listed: the cloud's published price list. It has the stock and prices of the time when the cloud was made.
        lenient: True if the cloud also makes machines of types that it does not sell.
        surcharge: factor by which the cloud's bill is higher than the sum that follows from the prices. Default 1.
        page: largest number of machines in one answer of the call "describe"; None for no limit.
        cut: True if answers of the call "describe" are incomplete: they have no machines, but say that there are more.
    """

    folder: str
    stock: tuple[Stock, ...] = USUAL
    key: str = ""
    real: bool = True
    ends_itself: bool = True
    billing: Billing = "create"
    offset: float = 0.0
    machines: dict[str, Machine] = field(default_factory=dict)
    things: dict[tuple[str, str], Thing] = field(default_factory=dict)
    rules: list[Rule] = field(default_factory=list)
    flaws: list[Flaw] = field(default_factory=list)
    capacity: dict[tuple[str, str, str], int | None] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    kills: dict[tuple[int, When], None] = field(default_factory=dict)
    calls: int = 0
    made: int = 0
    listed: tuple[Stock, ...] = ()
    lenient: bool = False
    surcharge: float = 1.0
    page: int | None = None
    cut: bool = False

    def __post_init__(self) -> None:
        self.listed = self.listed or self.stock

    @property
    def now(self) -> float:
        """Return the time on the cloud's clock in seconds since 1970."""
        return time.time() + self.offset

    def alive(self) -> list[Machine]:
        """Return the machines that have not ended (starting, running or ending), in the order of their creation."""
        return [each for each in self.machines.values() if each.lives]

    def together(self, one: Machine) -> list[Machine]:
        """Return the live machines that end together with a given machine: those of its slice, or the machine alone."""
        if not one.slice:
            return [one] if one.lives else []
        return [each for each in self.alive() if each.slice == one.slice]

    def settle(self, machines: Iterable[Machine] | None = None) -> None:
        """Bring machines up to date: apply boots, ends of leases and lifetimes, and interruptions that are due by now.

        Lease files are read first, so that renewals count. A lease or lifetime that is over ends a machine only if
        `ends_itself` is True. The end is recorded with the time at which it was due. If `machines` is None, all live
        ones are updated.
        """
        for each in self.alive() if machines is None else machines:
            self._hear(each)
            self._hear_end(each)
            over = min(each.granted if self.ends_itself else float("inf"), each.taken_at)
            if each.state == "starting" and each.boots_at is not None and each.boots_at <= min(self.now, over):
                each.state = "running"
                each.ran_at = each.boots_at
                self.log("running", each, each.boots_at)
                if self.real and not each.deaf:
                    machine.answer(each.folder)
            if over <= self.now:
                self.end(each, over)

    def end(self, each: Machine, at: float | None = None) -> None:
        """End a machine: kill its processes, remove its folder, and record the end. Its state becomes "ended".

        Other machines of its slice stay alive. `at` is the time of the end, in seconds since 1970 on the cloud's clock;
        None means now. RuntimeError is raised, and nothing recorded, if processes survived SIGKILL for 10 seconds.
        """
        if self.real:
            machine.terminate(each.folder)
        else:
            machine.remove(each.folder)
        each.state = "ended"
        each.ended_at = self.now if at is None else at
        self.log("ended", each, each.ended_at)

    def log(self, event: str, each: Machine, at: float, **more: object) -> None:
        """Append an event of a machine to the file `events` in the cloud's folder, from which the bill is computed.

        An event is "made", "running", "ended" or "price". `at` is in seconds since 1970 on the cloud's clock. `more`
        has further entries of the event, such as a price.
        """
        line = {"event": event, "at": at, "machine": each.id, "pool": each.pool, **more}
        with open(Path(self.folder) / "events", "a") as events:
            events.write(f"{json.dumps(line)}\n")

    def _hear(self, each: Machine) -> None:
        """Compute the new end of a machine's lease from its lease file, if the text of the file has changed."""
        said = machine.heard(each.folder)
        if said is None or said.text == each.said:
            return
        each.said = said.text
        latest = float("inf") if each.lifetime is None else each.born + each.lifetime
        each.granted = min(said.at + self.offset + min(said.seconds, each.lease), latest, each.ends_at)

    def _hear_end(self, each: Machine) -> None:
        """Bring the end of a machine nearer if that was asked for there, and answer. The first heir counts."""
        asked = machine.asked_end(each.folder)
        if asked is None or asked.serial == each.end_asked:
            return
        each.end_asked = asked.serial
        each.heir = asked.heir if each.heir == "-" else each.heir
        each.ends_at = min(each.ends_at, asked.at + self.offset + asked.seconds)
        each.granted = min(each.granted, each.ends_at)
        machine.answer_end(each.folder, asked, each.ends_at - self.now, each.heir)
