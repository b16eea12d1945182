"""The state of a fake cloud as plain data: its stock, its machines, and the failures that tests prepared."""

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
        instance_type: the cloud's name for the kind.
        usd_per_hour: the price of one machine, or of one whole slice.
        accelerator: the accelerators of one machine or slice, such as "H100:8"; None for none.
        region: the region in which it is sold.
        zone: the zone in which it is sold.
        market: the market on which it is sold.
        capacity: how many can be alive at once; None for any number.
        quota: the account's limit that it counts toward (see `Control.limit`); "" for none.
        vcpus: virtual processors of each machine.
        memory_gib: memory of each machine in GiB.
        disk_gib: disk of each machine in GiB.
        arch: the processor architecture.
        hosts: how many machines one purchase yields, as a slice. None derives it from the accelerator: 2 for "v5p-16".
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
        """Return how many machines one purchase yields: 1, or the number of hosts of a slice."""
        return self.hosts or 1

    @property
    def place(self) -> tuple[str, str, Market]:
        """Return the key of this stock: instance type, zone and market."""
        return self.instance_type, self.zone, self.market

    @property
    def has(self) -> Accelerator | None:
        """Return the accelerator as the catalogue's value; None if there is none."""
        return self.accelerator if isinstance(self.accelerator, Accelerator) else None


def _usual() -> tuple[Stock, ...]:
    """Return the default stock of a fake cloud: three types in three zones and on two markets."""
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
    """One machine of a fake cloud, as the cloud records it. Times are seconds since 1970 on the cloud's clock.

    Attributes:
        id: the machine's name.
        pool: the pool that rented it.
        node: its number in the pool.
        token: the idempotency token of the request that made it.
        stock: what it was bought as.
        until: the time in its tag until which the pool needs it; None for none.
        born: when it was created.
        lease: seconds without a sign of life from its client after which it ends itself.
        lifetime: seconds after `born` at which it ends in any case; None for never.
        folder: the folder on this computer that stands for it.
        boots_at: when its boot ends; None for never.
        state: its state, as the API reports it.
        deaf: True if it never accepts connections, although it runs.
        has: the accelerator that is really in it; None for none.
        granted: when its lease ends.
        said: the last text that was read from its lease file.
        taken_at: when the cloud takes it back; infinite if there is no notice.
        undying: how many more requests to end it have no effect; None for all.
        ended_at: when it ended; None while it is alive.
        tagged: False if it has no tags, so that clients cannot find it.
        slice: the name of the slice that it is a host of; "" for none.
        owner: the owner tag of the client that made it.
        ran_at: when its boot ended; None if it has not yet.
        tags: the tags that a client of `HttpCloud` wrote on it.
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
        """Return True if the machine has not ended."""
        return self.state != "ended"


@dataclass(slots=True)
class Thing:
    """A key pair or a security group. It remains after its pool unless the driver removes it."""

    kind: str
    id: str
    pool: str
    until: datetime | None
    owner: str = field(default_factory=lambda: tags.owner())


@dataclass(slots=True)
class Rule:
    """A failure that a test has prepared for the next matching calls of a fake cloud.

    Attributes:
        call: the call that fails, one of `control.CALLS`; "" for any.
        error: the error to raise, or the class of one; None for no error.
        when: raise the error before the call takes effect, or after.
        times: how many calls are affected; None for all.
        delay: seconds by which the call takes longer.
        place: instance type, zone and market to which the rule is limited. "" matches any.
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
        boots: seconds that its boot takes; None for a boot that never ends.
        deaf: True if it never accepts connections, although it runs.
        undying: how many requests to end it have no effect; None for all.
        has: the accelerator that is really in it, if `swapped`; None for none.
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
        folder: the folder of the cloud.
        stock: what it sells.
        key: the right API key; "" accepts any.
        real: True if machines are processes here; False if they exist by name only.
        ends_itself: True if machines end when their lease is over.
        billing: the moment from which a machine is billed.
        offset: seconds by which its clock is ahead of this computer's.
        machines: all machines by id, ended ones included.
        things: key pairs and security groups, by kind and name.
        rules: failures of the next calls.
        flaws: defects of the next machines, first to last.
        capacity: how many of a stock can be alive at once, by `Stock.place`. It overrides `Stock.capacity`.
        limits: the account's limits, by quota.
        kills: calls, by number, whose client is killed before or after they take effect.
        calls: how many calls the cloud has received.
        made: how many machines it has made.
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

    @property
    def now(self) -> float:
        """Return the time on the cloud's clock in seconds since 1970."""
        return time.time() + self.offset

    def alive(self) -> list[Machine]:
        """Return the machines that have not ended."""
        return [each for each in self.machines.values() if each.lives]

    def together(self, one: Machine) -> list[Machine]:
        """Return the live machines that end together with a machine: all hosts of its slice, or itself alone."""
        if not one.slice:
            return [one] if one.lives else []
        return [each for each in self.alive() if each.slice == one.slice]

    def settle(self, machines: Iterable[Machine] | None = None) -> None:
        """Apply everything that is due: ends of boots, of leases and of lifetimes, and interruptions.

        Args:
            machines: the machines to look at; None means all that are alive.
        """
        for each in self.alive() if machines is None else machines:
            self._hear(each)
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
        """End a machine: kill its processes and remove its folder.

        Args:
            each: the machine.
            at: when it ended, on the cloud's clock; None means now.
        """
        if self.real:
            machine.terminate(each.folder)
        else:
            machine.remove(each.folder)
        each.state = "ended"
        each.ended_at = self.now if at is None else at
        self.log("ended", each, each.ended_at)

    def log(self, event: str, each: Machine, at: float, **more: object) -> None:
        """Append an event to the file `events`, from which bills are computed: one JSON object on a line."""
        line = {"event": event, "at": at, "machine": each.id, "pool": each.pool, **more}
        with open(Path(self.folder) / "events", "a") as events:
            events.write(f"{json.dumps(line)}\n")

    def _hear(self, each: Machine) -> None:
        """Read a machine's lease file and extend its lease, if the text has changed since the last time.

        The text grants seconds from the time at which it was written, at most `lease`, and never beyond `lifetime`.
        """
        said = machine.heard(each.folder)
        if said is None or said.text == each.said:
            return
        each.said = said.text
        latest = float("inf") if each.lifetime is None else each.born + each.lifetime
        each.granted = min(said.at + self.offset + min(said.seconds, each.lease), latest)
