"""`Control`: how a test makes a fake cloud fail, change prices or move its clock, and asks what it did."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from skypool import accelerators
from skypool.accelerators import Accelerator
from skypool.checks import number as number_asked
from skypool.checks import one_of, whole
from skypool.errors import ProviderError, RateLimitError, UsageError, nearest
from skypool.model import Instance, Offer
from skypool.testing import machine
from skypool.testing.state import State
from skypool.testing.world import Flaw, Machine, Rule, When, World

CALLS = ("account", "stock", "create", "describe", "delete", "tag", "make", "things", "remove")
"""What a driver of the fake cloud can ask of it."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The cloud's clock: ours, moved forward by tests."""

    state: State

    def now(self) -> datetime:
        """What time it is there."""
        with self.state.open() as world:
            return datetime.fromtimestamp(world.now, UTC)

    def advance(self, seconds: float) -> None:
        """Let so much time pass in which no client says a word: leases, lifetimes and notices run out."""
        with self.state.open() as world:
            world.offset += seconds
            world.settle()


@dataclass(frozen=True, slots=True)
class CloudCall:
    """One call that the cloud got; `about` is what it was asked for."""

    number: int
    call: str
    pid: int
    about: dict[str, Any]


class Control(Protocol):
    """Everything that `DriverContract` may tell the cloud that a driver is tested against.

    The `control` of a test may have any of these methods. A test that needs one that is not there is skipped, and says
    so. `FakeCloud.control` and `HttpCloud.control` have all of them.
    """

    def count(self) -> int:
        """Return how many machines the cloud itself knows to be alive, whatever their tags say."""
        ...

    def leftovers(self) -> int:
        """Return how many other things it knows, such as key pairs."""
        ...

    def stock_out(self, offer: Offer, left: int, /) -> None:
        """Let so many machines, or slices, be had at once on this offer from now on."""
        ...

    def refuse(self, kind: type[ProviderError], /) -> bool | None:
        """Refuse to make the next machine, with what this class of `skypool.errors` stands for.

        Returns False if this cloud has no such error. The test is skipped then.
        """
        ...

    def lose_reply(self) -> None:
        """Make the next machine, and drop the connection before the answer."""
        ...

    def never_boot(self) -> None:
        """Make the next machine one whose boot never ends."""
        ...

    def interrupt(self, instance: Instance, /) -> None:
        """Give notice that this machine is taken back, as on a spot market."""
        ...

    def undying(self, instance: Instance, times: int | None, /) -> None:
        """Let this machine survive so many requests to end it; None is all of them."""
        ...

    def kill(self, instance: Instance, /) -> None:
        """End this machine without a word to the driver."""
        ...

    def advance(self, seconds: float, /) -> None:
        """Let so much time pass in which no client says a word, after machines have heard their guards."""
        ...


@dataclass(frozen=True, slots=True)
class FakeCloudControl(Control):
    """The control of a `FakeCloud`: what it refuses, which machines go wrong, and what it has seen."""

    state: State

    # --- what it refuses -------------------------------------------------------------------------------------

    def stock_out(self, offer: Offer, left: int = 0) -> None:
        """Of this offer so many can be had at once from now on."""
        with self.state.open() as world:
            world.capacity[offer.instance_type, offer.zone, offer.market] = left

    def spot_price(self, instance_type: str, usd_per_hour: float) -> None:
        """What this type costs on the spot market from now on, everywhere, also where it runs already."""
        with self.state.open() as world:
            moved = [each for each in world.stock if (each.instance_type, each.market) == (instance_type, "spot")]
            now = {each.place: replace(each, usd_per_hour=usd_per_hour) for each in moved}
            world.stock = tuple(now.get(each.place, each) for each in world.stock)
            for each in world.alive():
                if each.stock.place in now:
                    each.stock = now[each.stock.place]
                    world.log("price", each, world.now, usd_per_hour=usd_per_hour / each.stock.size)

    def limit(self, quota: str, most: int) -> None:
        """The account may have so many machines that count toward this quota."""
        whole("most", most, "how many machines there may be", least=0)
        with self.state.open() as world:
            world.limits[quota] = most

    def refuse(
        self,
        error: type[ProviderError] | Exception,
        call: str = "create",
        *,
        times: int | None = 1,
        instance_type: str = "",
        zone: str = "",
        market: str = "",
    ) -> None:
        """Refuse the next calls of this kind, before they take effect.

        Args:
            error: a class of `skypool.errors`, of which one is made that fits, or what is to be raised.
            call: one of `CALLS`, "" for any; times: how many, None for all.
            instance_type, zone, market: creates of these alone; "" for any.
        """
        self._rule(Rule(call, error, times=times, place=(instance_type, zone, market)))

    def throttle(self, times: int = 1, retry_after: float | None = 0.1, call: str = "") -> None:
        """Say that there were too many requests, and when to come again."""
        words = "the fake cloud got too many requests; wait, and ask again"
        error = RateLimitError(words, provider="fake", code="SlowDown", text="too many", retry_after=retry_after)
        self._rule(Rule(call, error, times=times))

    def lose_reply(self, call: str = "create", times: int | None = 1) -> None:
        """The next calls of this kind take effect, and the connection drops before the answer: `NoAnswer`."""
        self._rule(Rule(call, ConnectionResetError("connection reset by peer"), "after", times))

    def delay(self, seconds: float, call: str = "", times: int | None = 1) -> None:
        """The next calls of this kind take longer."""
        self._rule(Rule(call, times=times, delay=seconds))

    def relent(self) -> None:
        """Forget every rule: from now on all goes well."""
        with self.state.open() as world:
            world.rules.clear()
            world.flaws.clear()
            world.kills.clear()

    def _rule(self, rule: Rule) -> None:
        if rule.call and rule.call not in CALLS:
            close = nearest(rule.call, CALLS, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(f"the fake cloud has no call {rule.call!r}{hint} (it has {', '.join(CALLS)})")
        kind = rule.error if isinstance(rule.error, type) else type(rule.error)
        if rule.error is not None and not issubclass(kind, Exception):
            raise UsageError(f"refuse() takes an error of skypool.errors such as CapacityError, not {rule.error!r}")
        number_asked("seconds", rule.delay, "how much longer a call takes", least=0)
        if rule.times is not None:
            whole("times", rule.times, "how many calls", least=1)
        with self.state.open() as world:
            world.rules.append(rule)

    # --- machines that go wrong ------------------------------------------------------------------------------

    def next_machines(
        self,
        count: int = 1,
        *,
        boots: float | None = 0.0,
        deaf: bool = False,
        undying: int | None = 0,
        has: str | Accelerator | None = "",
    ) -> None:
        """What is odd about the machines that are made next.

        Args:
            boots: seconds that their boot takes on the cloud's clock, None for ever.
            deaf: they run, and nobody answers there.
            undying: how often they survive being ended, None for always.
            has: the accelerator that is really in them, None for none; "" is the one that was bought.
        """
        really = None if not has else accelerators.parse(has)
        flaw = Flaw(boots, deaf, undying, really, swapped=has != "")
        with self.state.open() as world:
            world.flaws += [replace(flaw) for _ in range(count)]

    def never_boot(self) -> None:
        """The next machine is made, and its boot is never through."""
        self.next_machines(boots=None)

    def undying(self, instance: Instance, times: int | None = None) -> None:
        """This machine survives being ended so many times; None is always."""
        with self.state.open() as world:
            _of(world, instance).undying = times

    def interrupt(self, instance: Instance, notice: float = 120.0) -> None:
        """Give notice that this machine, or its slice, is taken back; and take it when so many seconds are over."""
        with self.state.open() as world:
            for each in world.together(_of(world, instance)):
                each.taken_at = world.now + notice
                machine.interrupt(each.folder, each.taken_at - world.offset)
            world.settle()

    def kill(self, instance: Instance) -> None:
        """This machine dies, and its provider has never heard of it; other hosts of its slice live on."""
        with self.state.open() as world:
            world.end(_of(world, instance))

    def advance(self, seconds: float) -> None:
        """Let so much time pass, as `Clock.advance` does."""
        Clock(self.state).advance(seconds)

    def partition(self, instance: Instance) -> None:
        """Nobody reaches this machine any more; whoever is connected stays so."""
        with self.state.open() as world:
            machine.hush(_of(world, instance).folder)

    # --- a client that dies ----------------------------------------------------------------------------------

    def kill_client(self, number: int, when: When) -> None:
        """Whoever makes call `number` (from 1, see `calls`) is killed by SIGKILL before it takes effect, or after."""
        whole("number", number, "which call, from 1", least=1)
        one_of("when", when, ("before", "after"))
        with self.state.open() as world:
            world.kills[number, when] = None

    # --- what it has seen ------------------------------------------------------------------------------------

    def calls(self, call: str = "") -> list[CloudCall]:
        """Every call so far, of one kind or of all, whoever made it."""
        try:
            lines = (self.state.folder / "journal").read_text().splitlines()
        except FileNotFoundError:
            return []
        found = []
        for about in map(json.loads, lines):
            each = CloudCall(about.pop("number"), about.pop("call"), about.pop("pid"), about)
            found += [each] if call in ("", each.call) else []
        return found

    def count(self) -> int:
        """How many machines are alive, whatever their tags say."""
        return len(self.alive("machine"))

    def leftovers(self) -> int:
        """How many things there are that are no machines."""
        return len(self.alive()) - self.count()

    def alive(self, kind: str = "") -> list[str]:
        """All that is alive there, by name: "machine i-0001 of pool p, running"."""
        with self.state.open() as world:
            found = [f"machine {m.id} of pool {m.pool}, {m.state}" for m in world.alive()]
            found += [f"{each.kind} {each.id} of pool {each.pool}" for each in world.things.values()]
        return [each for each in found if each.startswith(f"{kind} " if kind else "")]

    def usd(self, pool: str | None = None) -> float:
        """What the machines have cost until now on the cloud's clock, of one pool or of all."""
        with self.state.open() as world:
            return sum(
                ((each.ended_at or world.now) - each.born) / 3600 * each.stock.usd_per_hour / each.stock.size
                for each in world.machines.values()
                if pool in (None, each.pool)
            )


def _of(world: World, instance: Instance) -> Machine:
    found = world.machines.get(instance.id)
    if found is None:
        raise UsageError(f"the fake cloud has no machine {instance.id!r}; it has {', '.join(world.machines) or 'none'}")
    return found
