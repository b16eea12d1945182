"""Controls for tests of a fake cloud: make requests fail, change prices, move the clock, and read what the cloud did.

`Control` is the protocol that the driver tests in `DriverContract` use. `FakeCloudControl` implements it for the fake
cloud. `Clock` is the fake cloud's clock.
"""

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
"""The names of the calls of the fake cloud's API."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock of a fake cloud: this computer's clock plus an offset, which tests increase.

    Attributes:
        state: the stored state of the cloud.
    """

    state: State

    def now(self) -> datetime:
        """Return the time on the cloud's clock, as a datetime with the time zone UTC."""
        with self.state.open() as world:
            return datetime.fromtimestamp(world.now, UTC)

    def advance(self, seconds: float) -> None:
        """Move the clock forward by a number of seconds, and apply everything that is due by then.

        Machines whose lease, lifetime or interruption notice is over by the new time have ended when this method
        returns. A lease is the time that a machine lives on without hearing from its client. Renewals that clients
        wrote before this call count, but no client can renew a lease while the clock moves. The method does not wait
        for the given time.

        Args:
            seconds: how far to move the clock. It is not checked: a negative number moves the clock back.
        """
        with self.state.open() as world:
            world.offset += seconds
            world.settle()


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One API call that a fake cloud received, from its journal.

    Attributes:
        number: the number of the call, from 1. All calls of one cloud are counted together.
        call: the name of the call, one of `CALLS`.
        pid: the process id of the process that made the call.
        about: the arguments of the call by name, such as "pool". Which there are depends on the call.
    """

    number: int
    call: str
    pid: int
    about: dict[str, Any]


class Control(Protocol):
    """Methods with which the tests in `DriverContract` change the cloud behind a driver.

    The object that the fixture `control` of a test returns may have any of these methods. A test that needs a missing
    method is skipped, with the reason. `FakeCloud.control` and `HttpCloud.control` have all of them.
    """

    def count(self) -> int:
        """Return how many machines are alive according to the cloud itself, whatever their tags say."""
        ...

    def leftovers(self) -> int:
        """Return how many other resources, such as key pairs, exist according to the cloud itself."""
        ...

    def stock_out(self, offer: Offer, left: int, /) -> None:
        """Limit the stock of an offer: from now on at most `left` of its machines (or slices) can be alive at once.

        Machines that are alive already count, too. With `left` = 0 the offer is out of stock.
        """
        ...

    def refuse(self, kind: type[ProviderError], /) -> bool | None:
        """Make the next request that creates a machine fail, so that the driver raises the given class of error.

        Args:
            kind: a class of `skypool.errors`, such as CapacityError.

        Returns:
            False if this cloud has no such error; then the test is skipped. Any other value, also None, means that the
            failure is prepared.
        """
        ...

    def lose_reply(self) -> None:
        """Make the next create take effect, but drop its connection before the cloud answers."""
        ...

    def never_boot(self) -> None:
        """Make the next machine that is created boot forever, so that it never becomes reachable."""
        ...

    def interrupt(self, instance: Instance, /) -> None:
        """Announce that the provider takes this machine back soon, as it happens with spot machines."""
        ...

    def undying(self, instance: Instance, times: int | None, /) -> None:
        """Make a machine ignore requests to end it, for tests of what a driver then reports.

        Args:
            instance: the machine.
            times: how many requests have no effect; None for all, 0 for none.
        """
        ...

    def kill(self, instance: Instance, /) -> None:
        """End this machine behind the driver's back, as if it had crashed."""
        ...

    def advance(self, seconds: float, /) -> None:
        """Let the machines read their lease files, and then move the cloud's clock forward by this many seconds.

        A lease file holds how long a machine lives on without its client. No client renews a lease while the clock
        moves, so machines whose lease ends in that time end themselves.
        """
        ...


@dataclass(frozen=True, slots=True)
class FakeCloudControl(Control):
    """The control of a `FakeCloud`: it prepares failures, and reads the calls that the cloud received.

    Every method works on the stored state, so it also affects other processes that use the same cloud.

    Attributes:
        state: the stored state of the cloud.
    """

    state: State

    # --- what it refuses -------------------------------------------------------------------------------------

    def stock_out(self, offer: Offer, left: int = 0) -> None:
        """Limit the stock of an offer: from now on at most `left` of its machines (or slices) can be alive at once.

        A create beyond the limit raises CapacityError. Machines that are alive already count toward the limit, but are
        not ended. The limit applies to the offer's instance type in its zone and market. It stays until it is set
        again; `relent` does not remove it.

        Args:
            offer: the offer. One that the cloud does not sell is accepted, without effect.
            left: the maximum number; 0 means out of stock.
        """
        with self.state.open() as world:
            world.capacity[offer.instance_type, offer.zone, offer.market] = left

    def spot_price(self, instance_type: str, usd_per_hour: float) -> None:
        """Set the spot price of an instance type in all zones, also for its spot machines that are alive.

        On-demand prices stay as they are. A type that is not sold on the spot market is silently ignored.

        Args:
            instance_type: the cloud's name of the type.
            usd_per_hour: the price in USD per hour of one machine, or of one whole slice (hosts that are sold
                together).

        Raises:
            UsageError: the price is negative.
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
        """Set a limit of the account: at most `most` machines that count toward a quota may be alive at once.

        A create beyond the limit raises QuotaError. Machines that are alive already are not ended.

        Args:
            quota: the name of the quota, as in `Stock.quota`.
            most: the maximum number of machines, at least 0.

        Raises:
            UsageError: `most` is not a whole number, or is negative.
        """
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
        """Make the next calls of one kind fail with an error before they take effect.

        Args:
            error: the error to raise. For a class of `skypool.errors`, an error with fitting texts is made. A
                ConnectionError is raised as NoAnswer.
            call: the calls that fail: one of `CALLS`, or "" for any call.
            times: how many calls fail, at least 1; None for all until `relent`.
            instance_type, zone, market: limit this to creates of such machines; "" matches any. Calls other than
                "create" have none of the three, so they match only if all three are "".

        Raises:
            UsageError: there is no such call, `error` is not an exception, or `times` is less than 1.
        """
        self._rule(Rule(call, error, times=times, place=(instance_type, zone, market)))

    def throttle(self, times: int = 1, retry_after: float | None = 0.1, call: str = "") -> None:
        """Make the next calls of the fake cloud's API fail with RateLimitError, before they take effect.

        Args:
            times: how many calls fail, at least 1.
            retry_after: seconds that the error tells the client to wait; None if the error shall not say.
            call: the calls that fail: one of `CALLS`, or "" for any call.

        Raises:
            UsageError: there is no such call, or `times` is less than 1.
        """
        words = "the fake cloud received too many requests; wait, and ask again"
        error = RateLimitError(words, provider="fake", code="SlowDown", text="too many", retry_after=retry_after)
        self._rule(Rule(call, error, times=times))

    def lose_reply(self, call: str = "create", times: int | None = 1) -> None:
        """Make the next calls take effect and then fail with NoAnswer, as if the connection had dropped.

        Args:
            call: the calls that fail: one of `CALLS`, or "" for any call.
            times: how many calls fail, at least 1; None for all until `relent`.

        Raises:
            UsageError: there is no such call, or `times` is less than 1.
        """
        self._rule(Rule(call, ConnectionResetError("connection reset by peer"), "after", times))

    def delay(self, seconds: float, call: str = "", times: int | None = 1) -> None:
        """Make the next calls take longer. They wait before they take effect. Several delays of the same call add up.

        Args:
            seconds: the additional time, at least 0.
            call: the calls to delay: one of `CALLS`, or "" for any call.
            times: how many calls are delayed, at least 1; None for all until `relent`.

        Raises:
            UsageError: there is no such call, or a number is too small.
        """
        self._rule(Rule(call, times=times, delay=seconds))

    def relent(self) -> None:
        """Remove all prepared failures of calls, delays, defects of future machines, and kills of clients.

        Stock limits, account limits, prices, and defects of machines that exist already stay as they are.
        """
        with self.state.open() as world:
            world.rules.clear()
            world.flaws.clear()
            world.kills.clear()

    def _rule(self, rule: Rule) -> None:
        """Check a rule (a failure or delay of coming calls), and add it to the cloud's rules.

        Raises:
            UsageError: there is no such call, the error is not an exception, the delay is negative, or `times` is less
                than 1.
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
        """Prepare a defect for the next machines that are made. Machines that exist already do not change.

        Args:
            count: how many machines get the defect. Each host of a slice counts as one.
            boots: seconds that their boot takes on the cloud's clock; None for a boot that never ends.
            deaf: True if they run but accept no connections.
            undying: how many requests to end them have no effect; None for all.
            has: the accelerator that is really in them; None for no accelerator. "" means the one that was bought.

        Raises:
            UsageError: the accelerator is unknown.
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

        If one host of a slice ignores a request, all hosts of the slice stay alive.

        Args:
            instance: the machine.
            times: how many requests have no effect; None for all, 0 for none. The request after them ends the machine.

        Raises:
            UsageError: the cloud never made this machine.
        """
        with self.state.open() as world:
            _of(world, instance).undying = times

    def interrupt(self, instance: Instance, notice: float = 120.0) -> None:
        """Announce that the cloud takes this machine back, and end the machine when the notice time is over.

        All other live hosts of its slice are taken back with it. The announcement appears on the machines at once. Does
        nothing for a machine that has ended. The method does not wait for the end of the notice time.

        Args:
            instance: the machine.
            notice: seconds between the announcement and the end of the machine, on the cloud's clock.

        Raises:
            UsageError: the cloud never made this machine.
        """
        with self.state.open() as world:
            for each in world.together(_of(world, instance)):
                each.taken_at = world.now + notice
                machine.interrupt(each.folder, each.taken_at - world.offset)
            world.settle()

    def kill(self, instance: Instance) -> None:
        """End this machine at once, without telling the driver. Other hosts of its slice stay alive.

        Raises:
            UsageError: the cloud never made this machine.
        """
        with self.state.open() as world:
            world.end(_of(world, instance))

    def advance(self, seconds: float) -> None:
        """Move the cloud's clock forward by a number of seconds, and apply everything that is due by then.

        Machines whose lease, lifetime or interruption notice is over by the new time have ended when this method
        returns. A lease is the time that a machine lives on without hearing from its client. Renewals that clients
        wrote before this call count, but no client can renew a lease while the clock moves.
        """
        Clock(self.state).advance(seconds)

    def partition(self, instance: Instance) -> None:
        """Make a running machine accept no new connections. Existing connections continue. This cannot be undone.

        Raises:
            UsageError: the cloud never made this machine.
        """
        with self.state.open() as world:
            machine.hush(_of(world, instance).folder)

    # --- a client that dies ----------------------------------------------------------------------------------

    def kill_client(self, number: int, when: When) -> None:
        """Prepare that the process of a coming call is killed with SIGKILL, before the call takes effect or after.

        The call is given by its number. A number that the cloud has already passed has no effect.

        Args:
            number: the number of the call, from 1 (see `RecordedCall.number`).
            when: "before" or "after".

        Raises:
            UsageError: `number` is not a whole number of at least 1, or `when` is another word.
        """
        whole("number", number, "which call, from 1", least=1)
        one_of("when", when, ("before", "after"))
        with self.state.open() as world:
            world.kills[number, when] = None

    # --- what it has seen ------------------------------------------------------------------------------------

    def calls(self, call: str = "") -> list[RecordedCall]:
        """Return the calls that the cloud has received so far, from any process, oldest first.

        The list is empty if there were none. Refused calls are included.

        Args:
            call: return only the calls of this name, one of `CALLS`; "" for all. An unknown name gives an empty list.
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
        """Return how many machines have not ended, whatever their tags say.

        Machines that still boot, or that are about to end, are included.
        """
        return len(self.alive("machine"))

    def leftovers(self) -> int:
        """Return how many key pairs and security groups exist, whether machines use them or not."""
        return len(self.alive()) - self.count()

    def alive(self, kind: str = "") -> list[str]:
        """Return a line for each live machine, key pair and security group, machines first.

        A line for a machine is such as "machine i-0001 of pool p, running". The list is empty if nothing exists.

        Args:
            kind: "machine", "key-pair" or "security-group" for one kind only; "" for all.
        """
        with self.state.open() as world:
            found = [f"machine {m.id} of pool {m.pool}, {m.state}" for m in world.alive()]
            found += [f"{each.kind} {each.id} of pool {each.pool}" for each in world.things.values()]
        return [each for each in found if each.startswith(f"{kind} " if kind else "")]

    def usd(self, pool: str | None = None) -> float:
        """Return the cost of all machines so far in USD, on the cloud's clock. Machines that have ended are included.

        Each machine is charged from its creation to its end, or until now, at the price that its type has now or had
        when it ended. The settings `billing` and `least_billed` are not considered.

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
    """Return the cloud's own record of an instance, also if the instance has ended.

    Raises:
        UsageError: the cloud never made this instance.
    """
    found = world.machines.get(instance.id)
    if found is None:
        known = ", ".join(world.machines) or "none"
        raise UsageError(f"the fake cloud has no machine {instance.id!r}; its machines are {known}")
    return found
