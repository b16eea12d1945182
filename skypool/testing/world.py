"""State of a fake cloud: its stock, its machines, and the failures it was told to show."""

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
    """One kind of machine that a fake cloud sells in one place.

    Args:
        instance_type: what the cloud calls it.
        usd_per_hour: what one costs. accelerator: what is in it, such as "H100:8".
        hosts: how many machines come of one, as a slice; None is what its accelerator says: "v5p-16" has 2.
        capacity: how many can be had at once; None for any number.
        quota: the account's limit that it counts toward (see `Control.limit`).
        least_billed: seconds that one is billed for at least.
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
            raise UsageError(f"usd_per_hour is at least 0, not {self.usd_per_hour!r}")
        if self.accelerator is not None:
            object.__setattr__(self, "accelerator", accelerators.parse(self.accelerator))
        if self.hosts is None:
            object.__setattr__(self, "hosts", self.has.hosts if self.has else 1)

    @property
    def size(self) -> int:
        """How many machines come of one."""
        return self.hosts or 1

    @property
    def place(self) -> tuple[str, str, Market]:
        """What tells it from the rest of the stock."""
        return self.instance_type, self.zone, self.market

    @property
    def has(self) -> Accelerator | None:
        """Its accelerator as the catalogue has it."""
        return self.accelerator if isinstance(self.accelerator, Accelerator) else None


def _usual() -> tuple[Stock, ...]:
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
"""What a fake cloud sells that was told nothing else: three types in three zones and two markets."""


@dataclass(slots=True)
class Machine:
    """One machine as the cloud knows it. Times are seconds on the cloud's clock.

    Attributes:
        ran_at: when it began to run, None for not yet.
        boots_at: when its boot is through, None for never; deaf: it runs and nobody answers there.
        granted: when it ends itself; said: what was last read in its guard.
        taken_at: when it is taken back.
        undying: how many more times it survives its end, None for always.
        slice: what it is a host of, by name; "" for nothing.
        tags: what a client of `HttpCloud` wrote on it.
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
        return self.state != "ended"


@dataclass(slots=True)
class Thing:
    """A key pair or a security group: what a pool leaves behind if nobody tidies."""

    kind: str
    id: str
    pool: str
    until: datetime | None
    owner: str = field(default_factory=lambda: tags.owner())


@dataclass(slots=True)
class Rule:
    """What the cloud does wrong when it is called.

    Attributes:
        call: which one of its calls, "" for any; place: only there, by what begins (type, zone, market) not being "".
        error: what is raised, None for nothing; when: before it takes effect, or after.
        times: how often, None for always; delay: seconds that the call takes longer.
    """

    call: str
    error: Exception | type[Exception] | None = None
    when: When = "before"
    times: int | None = 1
    delay: float = 0.0
    place: tuple[str, str, str] = ("", "", "")


@dataclass(slots=True)
class Flaw:
    """What is wrong with the next machine that is made."""

    boots: float | None = 0.0
    deaf: bool = False
    undying: int | None = 0
    has: Accelerator | None = None
    swapped: bool = False


@dataclass(slots=True)
class World:
    """All of it. `offset`: how far its clock was moved; `billing`: from which moment it bills a machine."""

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
        """Seconds since 1970 on its own clock."""
        return time.time() + self.offset

    def alive(self) -> list[Machine]:
        return [each for each in self.machines.values() if each.lives]

    def together(self, one: Machine) -> list[Machine]:
        """What ends with a machine: all hosts of its slice that live."""
        if not one.slice:
            return [one] if one.lives else []
        return [each for each in self.alive() if each.slice == one.slice]

    def settle(self, machines: Iterable[Machine] | None = None) -> None:
        """Let happen what was to happen until now, to these machines or to all that live.

        These are boots, the ends of leases and lifetimes, and interruptions.
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
        """Power off: nothing of it is left. It happened at `at`, or now."""
        if self.real:
            machine.terminate(each.folder)
        else:
            machine.remove(each.folder)
        each.state = "ended"
        each.ended_at = self.now if at is None else at
        self.log("ended", each, each.ended_at)

    def log(self, event: str, each: Machine, at: float, **more: object) -> None:
        """Write down what a bill is made of: one JSON object a line, in the file `events`."""
        line = {"event": event, "at": at, "machine": each.id, "pool": each.pool, **more}
        with open(Path(self.folder) / "events", "a") as events:
            events.write(f"{json.dumps(line)}\n")

    def _hear(self, each: Machine) -> None:
        """Whoever changed the machine's guard granted it so many seconds from then on, a lease at most."""
        said = machine.heard(each.folder)
        if said is None or said.text == each.said:
            return
        each.said = said.text
        latest = float("inf") if each.lifetime is None else each.born + each.lifetime
        each.granted = min(said.at + self.offset + min(said.seconds, each.lease), latest)
