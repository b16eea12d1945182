"""`Control`: makes a fake cloud fail, changes its prices, moves its clock, and reads what the cloud did."""

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
"""The calls of the fake cloud's API."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock of a fake cloud: this computer's clock, which tests move forward."""

    state: State

    def now(self) -> datetime:
        """Return the time on the cloud's clock, in UTC."""
        with self.state.open() as world:
            return datetime.fromtimestamp(world.now, UTC)

    def advance(self, seconds: float) -> None:
        """Move the clock forward by a number of seconds.

        Leases, lifetimes and notices that end within that time take effect. No client extends a lease meanwhile.
        """
        with self.state.open() as world:
            world.offset += seconds
            world.settle()


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call that a fake cloud received.

    Attributes:
        number: its number, from 1.
        call: its name, one of `CALLS`.
        pid: the process that made it.
        about: its arguments, such as the pool.
    """

    number: int
    call: str
    pid: int
    about: dict[str, Any]


class Control(Protocol):
    """The methods with which `DriverContract` moves the cloud behind a driver.

    The fixture `control` of a test may have any of these methods. A test that needs a missing one is skipped with a
    reason. `FakeCloud.control` and `HttpCloud.control` have all of them.
    """

    def count(self) -> int:
        """Return how many machines the cloud itself knows to be alive, whatever their tags say."""
        ...

    def leftovers(self) -> int:
        """Return how many other things, such as key pairs, the cloud itself knows."""
        ...

    def stock_out(self, offer: Offer, left: int, /) -> None:
        """Let at most `left` machines, or slices, of this offer be alive at once from now on."""
        ...

    def refuse(self, kind: type[ProviderError], /) -> bool | None:
        """Let the next create fail with the error that this class of `skypool.errors` stands for.

        Returns False if this cloud has no such error; then the test is skipped.
        """
        ...

    def lose_reply(self) -> None:
        """Make the machine of the next create, and drop the connection before the answer."""
        ...

    def never_boot(self) -> None:
        """Make the next machine that is created boot forever, so that it never becomes reachable."""
        ...

    def interrupt(self, instance: Instance, /) -> None:
        """Give notice that the provider takes this machine back, as on a spot market."""
        ...

    def undying(self, instance: Instance, times: int | None, /) -> None:
        """Make a machine ignore requests to end it, for tests of what a driver then reports.

        Args:
            instance: the machine.
            times: how many requests have no effect; None for all.
        """
        ...

    def kill(self, instance: Instance, /) -> None:
        """End this machine without telling the driver."""
        ...

    def advance(self, seconds: float, /) -> None:
        """Let the machines read their lease files, and then move the clock forward by this many seconds.

        No client extends a lease in that time.
        """
        ...


@dataclass(frozen=True, slots=True)
class FakeCloudControl(Control):
    """The control of a `FakeCloud`: it prepares failures, and reads the calls that the cloud received."""

    state: State

    # --- what it refuses -------------------------------------------------------------------------------------

    def stock_out(self, offer: Offer, left: int = 0) -> None:
        """Let at most `left` machines, or slices, of this offer be alive at once from now on."""
        with self.state.open() as world:
            world.capacity[offer.instance_type, offer.zone, offer.market] = left

    def spot_price(self, instance_type: str, usd_per_hour: float) -> None:
        """Set the spot price of a type in all zones, also for its machines that run already.

        Args:
            instance_type: the type.
            usd_per_hour: the price of one machine, or of one whole slice.
        """
        with self.state.open() as world:
            moved = [each for each in world.stock if (each.instance_type, each.market) == (instance_type, "spot")]
            now = {each.place: replace(each, usd_per_hour=usd_per_hour) for each in moved}
            world.stock = tuple(now.get(each.place, each) for each in world.stock)
            for each in world.alive():
                if each.stock.place in now:
                    each.stock = now[each.stock.place]
                    world.log("price", each, world.now, usd_per_hour=usd_per_hour / each.stock.size)

    def limit(self, quota: str, most: int) -> None:
        """Set the account's limit: at most this many machines that count toward the quota may be alive at once."""
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
        """Let the next calls of this kind fail before they take effect.

        Args:
            error: the error to raise. For a class of `skypool.errors`, an error with fitting texts is made.
            call: one of `CALLS`, or "" for any call.
            times: how many calls fail; None for all.
            instance_type, zone, market: limit this to creates of such machines; "" matches any.

        Raises:
            UsageError: there is no such call, or `error` is not an exception.
        """
        self._rule(Rule(call, error, times=times, place=(instance_type, zone, market)))

    def throttle(self, times: int = 1, retry_after: float | None = 0.1, call: str = "") -> None:
        """Make the next calls of the fake cloud's API fail with RateLimitError.

        Args:
            times: how many calls fail.
            retry_after: seconds that the error says to wait; None for no advice.
            call: one of `CALLS`, or "" for any call.
        """
        words = "the fake cloud received too many requests; wait, and ask again"
        error = RateLimitError(words, provider="fake", code="SlowDown", text="too many", retry_after=retry_after)
        self._rule(Rule(call, error, times=times))

    def lose_reply(self, call: str = "create", times: int | None = 1) -> None:
        """Let the next calls take effect and then fail with NoAnswer, as if the connection had dropped.

        Args:
            call: one of `CALLS`, or "" for any call.
            times: how many calls fail; None for all.
        """
        self._rule(Rule(call, ConnectionResetError("connection reset by peer"), "after", times))

    def delay(self, seconds: float, call: str = "", times: int | None = 1) -> None:
        """Let the next calls take longer.

        Args:
            seconds: the additional time.
            call: one of `CALLS`, or "" for any call.
            times: how many calls are delayed; None for all.
        """
        self._rule(Rule(call, times=times, delay=seconds))

    def relent(self) -> None:
        """Remove all prepared failures, defects and kills, so that the next calls succeed."""
        with self.state.open() as world:
            world.rules.clear()
            world.flaws.clear()
            world.kills.clear()

    def _rule(self, rule: Rule) -> None:
        """Check a rule, and add it to the cloud's rules.

        Raises:
            UsageError: there is no such call, the error is not an exception, or a number is out of range.
        """
        if rule.call and rule.call not in CALLS:
            close = nearest(rule.call, CALLS, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(f"the fake cloud has no call {rule.call!r}{hint} (its calls are {', '.join(CALLS)})")
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
        """Give the machines that are made next a defect.

        Args:
            count: how many machines have it.
            boots: seconds that their boot takes on the cloud's clock; None for a boot that never ends.
            deaf: True if they run but accept no connections.
            undying: how many requests to end them have no effect; None for all.
            has: the accelerator that is really in them; None for none; "" for the one that was bought.
        """
        really = None if not has else accelerators.parse(has)
        flaw = Flaw(boots, deaf, undying, really, swapped=has != "")
        with self.state.open() as world:
            world.flaws += [replace(flaw) for _ in range(count)]

    def never_boot(self) -> None:
        """Make the next machine that is created boot forever, so that it never becomes reachable."""
        self.next_machines(boots=None)

    def undying(self, instance: Instance, times: int | None = None) -> None:
        """Make a machine ignore requests to end it, for tests of what a driver then reports.

        Args:
            instance: the machine.
            times: how many requests have no effect; None for all.
        """
        with self.state.open() as world:
            _of(world, instance).undying = times

    def interrupt(self, instance: Instance, notice: float = 120.0) -> None:
        """Give notice that the cloud takes this machine back, and take it when the notice is over.

        The other hosts of its slice are taken back with it.

        Args:
            instance: the machine.
            notice: seconds between the notice and the end of the machine, on the cloud's clock.
        """
        with self.state.open() as world:
            for each in world.together(_of(world, instance)):
                each.taken_at = world.now + notice
                machine.interrupt(each.folder, each.taken_at - world.offset)
            world.settle()

    def kill(self, instance: Instance) -> None:
        """End this machine at once, without telling the driver. Other hosts of its slice stay alive."""
        with self.state.open() as world:
            world.end(_of(world, instance))

    def advance(self, seconds: float) -> None:
        """Move the cloud's clock forward by a number of seconds.

        Leases, lifetimes and notices that end within that time take effect. No client extends a lease meanwhile.
        """
        Clock(self.state).advance(seconds)

    def partition(self, instance: Instance) -> None:
        """Let this machine accept no new connections. Existing connections continue."""
        with self.state.open() as world:
            machine.hush(_of(world, instance).folder)

    # --- a client that dies ----------------------------------------------------------------------------------

    def kill_client(self, number: int, when: When) -> None:
        """Kill the process that makes a call with SIGKILL, before the call takes effect or after.

        Args:
            number: the number of the call, from 1 (see `calls`).
            when: "before" or "after".
        """
        whole("number", number, "which call, from 1", least=1)
        one_of("when", when, ("before", "after"))
        with self.state.open() as world:
            world.kills[number, when] = None

    # --- what it has seen ------------------------------------------------------------------------------------

    def calls(self, call: str = "") -> list[RecordedCall]:
        """Return the calls that the cloud has received so far, from any process, oldest first.

        Args:
            call: one of `CALLS`, or "" for all.
        """
        try:
            lines = (self.state.folder / "journal").read_text().splitlines()
        except FileNotFoundError:
            return []
        found = []
        for about in map(json.loads, lines):
            each = RecordedCall(about.pop("number"), about.pop("call"), about.pop("pid"), about)
            found += [each] if call in ("", each.call) else []
        return found

    def count(self) -> int:
        """Return how many machines are alive, whatever their tags say."""
        return len(self.alive("machine"))

    def leftovers(self) -> int:
        """Return how many key pairs and security groups exist."""
        return len(self.alive()) - self.count()

    def alive(self, kind: str = "") -> list[str]:
        """Return a line for each live machine, key pair and security group, such as "machine i-0001 of pool p,
        running".

        Args:
            kind: "machine", "key-pair" or "security-group" for one kind only; "" for all.
        """
        with self.state.open() as world:
            found = [f"machine {m.id} of pool {m.pool}, {m.state}" for m in world.alive()]
            found += [f"{each.kind} {each.id} of pool {each.pool}" for each in world.things.values()]
        return [each for each in found if each.startswith(f"{kind} " if kind else "")]

    def usd(self, pool: str | None = None) -> float:
        """Return the cost of machines so far in USD, on the cloud's clock.

        Each machine is counted from its creation at its present price. `billing` and `least_billed` are not considered.

        Args:
            pool: count only this pool's machines; None for all.
        """
        with self.state.open() as world:
            return sum(
                ((each.ended_at or world.now) - each.born) / 3600 * each.stock.usd_per_hour / each.stock.size
                for each in world.machines.values()
                if pool in (None, each.pool)
            )


def _of(world: World, instance: Instance) -> Machine:
    """Return the cloud's record of an instance.

    Raises:
        UsageError: the cloud never made this instance.
    """
    found = world.machines.get(instance.id)
    if found is None:
        known = ", ".join(world.machines) or "none"
        raise UsageError(f"the fake cloud has no machine {instance.id!r}; its machines are {known}")
    return found
