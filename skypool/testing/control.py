"""Controls for tests of a fake cloud: make requests fail, change prices, move the clock, and read what the cloud did.

`Control` is the protocol that the tests in `DriverContract` use. `FakeCloudControl` implements it for the fake cloud.
`Clock` is the fake cloud's clock.
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
from skypool.testing.cloud_state import Flaw, Machine, Rule, When, World
from skypool.testing.state_store import State

CALLS = ("account", "stock", "prices", "create", "describe", "delete", "tag", "make", "things", "remove", "bill")
"""The names of the calls of the fake cloud's API."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock of a fake cloud: this computer's clock plus an offset, which tests increase."""

    state: State

    def now(self) -> datetime:
        """Return the time on the cloud's clock, in UTC."""
        with self.state.open() as world:
            return datetime.fromtimestamp(world.now, UTC)

    def advance(self, seconds: float) -> None:
        """Move the clock forward by `seconds` at once, and apply everything that is due by the new time.

        Machines whose lease, lifetime or notice is over by the new time have ended when this method returns. Renewals
        that clients wrote before this call count. No client can renew a lease while the clock moves. A negative number
        moves the clock back.
        """
        with self.state.open() as world:
            world.offset += seconds
            world.settle()


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One API call that a fake cloud received, as read from the cloud's journal.

    Attributes:
        number: counts the calls of one cloud, from 1.
        call: the name of the call, one of `CALLS`.
        pid: the id of the process that made the call.
        about: the call's arguments by name, such as "pool".
    """

    number: int
    call: str
    pid: int
    about: dict[str, Any]


class Control(Protocol):
    """Methods with which the tests in `DriverContract` change the cloud behind a driver.

    The object that the fixture `control` returns may have any of these methods. A test that needs a missing method is
    skipped, with a reason that names it. `FakeCloud.control` and `HttpCloud.control` have all methods.
    """

    def count(self) -> int:
        """Return how many machines are alive in the whole cloud, whatever tags they have."""
        ...

    def leftovers(self) -> int:
        """Return how many resources other than machines, such as key pairs, exist in the whole cloud.

        Tags do not matter.
        """
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
            False if the cloud has no error of this class; the test is then skipped. Any other value, also None, means
            that the failure is prepared.
        """
        ...

    def lose_reply(self) -> None:
        """Make the next request that creates a machine take effect, but drop its connection before the answer."""
        ...

    def never_boot(self) -> None:
        """Make the next new machine boot forever, so that no command can ever run on the machine."""
        ...

    def interrupt(self, instance: Instance, /) -> None:
        """Make the provider announce that it takes a machine back soon, as providers do with spot machines.

        The announcement appears on the machine.
        """
        ...

    def undying(self, instance: Instance, times: int | None, /) -> None:
        """Make a machine ignore the next `times` requests to end it. None means all requests, 0 means none."""
        ...

    def kill(self, instance: Instance, /) -> None:
        """End a machine without telling the driver, as if it had crashed."""
        ...

    def paged(self, size: int, /) -> None:
        """Limit the answers to requests for lists: from now on, one answer has at most `size` machines.

        The answer says how to ask for the next machines.
        """
        ...

    def cut_short(self, on: bool, /) -> None:
        """Make answers to requests for lists of machines incomplete if `on` is True, complete again if it is False.

        An incomplete answer lacks machines. It says that there are more, but the client cannot request them.
        """
        ...

    def advance(self, seconds: float, /) -> None:
        """Let the machines read their lease files, and then move the cloud's clock forward by `seconds`.

        No client renews a lease while the clock moves, so machines whose lease ends in that time end themselves.
        """
        ...


@dataclass(frozen=True, slots=True)
class FakeCloudControl(Control):
    """The control of a `FakeCloud`: it prepares failures, and reads the calls that the cloud received.

    Every method works on the stored state, and so affects all processes that use the same cloud. Methods that prepare
    failures have two parameters in common: `call` is the name of the affected calls, one of `CALLS`, or "" for any.
    `times` is how many of them are affected, at least 1; None for all until `relent`.

    UsageError is raised for an unknown call, accelerator or instance. It is also raised for a price, limit, delay, page
    size, call number or number of times that is not valid.
    """

    state: State

    # --- requests that fail ----------------------------------------------------------------------------------

    def stock_out(self, offer: Offer, left: int = 0) -> None:
        """Limit the stock of an offer: from now on at most `left` of its machines (or slices) can be alive at once.

        A request beyond the limit fails with CapacityError. Machines that are alive already count, but are not ended.
        The limit applies to the offer's instance type, zone (its region, if it has no zone) and market. It stays until
        a test sets another one; `relent` does not remove it.

        Args:
            offer: the offer. An offer that the cloud does not sell is accepted, without effect.
            left: the maximum number of live machines (or slices); 0 means out of stock.
        """
        with self.state.open() as world:
            world.capacity[offer.instance_type, offer.zone or offer.region, offer.market] = left

    def spot_price(self, instance_type: str, usd_per_hour: float) -> None:
        """Set the spot price of an instance type in all zones, also for live spot machines of the type.

        Args:
            instance_type: the cloud's name of the type. A type that is not sold on the spot market is ignored.
            usd_per_hour: the price in USD per hour of one machine or whole slice, at least 0.
        """
        with self.state.open() as world:
            moved = [each for each in world.stock if (each.instance_type, each.market) == (instance_type, "spot")]
            now = {each.place: replace(each, usd_per_hour=usd_per_hour) for each in moved}
            world.stock = tuple(now.get(each.place, each) for each in world.stock)
            for each in world.alive():
                if each.stock.place in now:
                    each.stock = now[each.stock.place]
                    world.log("price", each, world.now, usd_per_hour=usd_per_hour / each.stock.size)

    def reprice(self, instance_type: str, usd_per_hour: float) -> None:
        """Set the on-demand price of an instance type in all zones.

        Live machines and the published price list keep their prices.

        Args:
            instance_type: the cloud's name of the type. A type that is not sold on demand is ignored.
            usd_per_hour: the price in USD per hour of one machine or whole slice, at least 0.
        """
        with self.state.open() as world:
            world.stock = tuple(
                replace(each, usd_per_hour=usd_per_hour)
                if (each.instance_type, each.market) == (instance_type, "on-demand")
                else each
                for each in world.stock
            )

    def overbill(self, factor: float) -> None:
        """Multiply the cloud's bill by a factor, so that it no longer agrees with the prices."""
        with self.state.open() as world:
            world.surcharge = factor

    def make_anything(self) -> None:
        """Let the cloud also make machines of types that it does not sell. By default, it refuses these requests."""
        with self.state.open() as world:
            world.lenient = True

    def limit(self, quota: str, most: int) -> None:
        """Set a limit of the account: at most `most` machines that count toward a quota may be alive at once.

        A request beyond the limit fails with QuotaError. Machines that are alive already are not ended. `quota` is
        the name in `Stock.quota`. A quota that no stock names is accepted, without effect.
        """
        whole("most", most, "how many machines may be alive at once", least=0)
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
            call: the name of the calls that fail, one of `CALLS`; "" for any.
            times: how many of these calls fail; None for all until `relent`.
            instance_type, zone, market: only calls that create machines of this type, zone and market fail; "" matches
                any. The zone of stock without zones is its region. Calls other than "create" fail only if all three are
                "".
        """
        self._rule(Rule(call, error, times=times, place=(instance_type, zone, market)))

    def paged(self, size: int) -> None:
        """Limit the answers to the call "describe": from now on, one answer has at most `size` machines.

        The answer says after which machine the next answer begins.
        """
        whole("size", size, "how many machines an answer has", least=1)
        with self.state.open() as world:
            world.page = size

    def cut_short(self, on: bool = True) -> None:
        """Make answers to the call "describe" incomplete if `on` is True, complete again if it is False.

        An incomplete answer has no machines. It says that there are more, but the next answer is the same.
        """
        with self.state.open() as world:
            world.cut = on

    def throttle(self, times: int = 1, retry_after: float | None = 0.1, call: str = "") -> None:
        """Make the next `times` calls named `call` fail with RateLimitError, before they take effect.

        `call` is a call of the cloud's API, such as "create"; "" for any. `retry_after` is the seconds that the error
        tells the client to wait; None: the error names no time.
        """
        words = "the fake cloud received too many requests; wait, and repeat the request"
        error = RateLimitError(words, provider="fake", code="SlowDown", text="too many", retry_after=retry_after)
        self._rule(Rule(call, error, times=times))

    def lose_reply(self, call: str = "create", times: int | None = 1) -> None:
        """Make the next `times` calls named `call` ("" for any) take effect, but fail with NoAnswer.

        This is what a client sees if its connection drops before the reply.
        """
        self._rule(Rule(call, ConnectionResetError("connection reset by peer"), "after", times))

    def delay(self, seconds: float, call: str = "", times: int | None = 1) -> None:
        """Make the next `times` calls named `call` ("" for any) wait for `seconds` before they take effect.

        The seconds are real time, not time of the cloud's clock. Several delays of a call add up.
        """
        self._rule(Rule(call, times=times, delay=seconds))

    def relent(self) -> None:
        """Remove everything that tests prepared for later: failed calls, delays, defects of machines, kills of clients.

        Stock limits, account limits, prices, and defects of machines that exist already stay as they are.
        """
        with self.state.open() as world:
            world.rules.clear()
            world.flaws.clear()
            world.kills.clear()

    def _rule(self, rule: Rule) -> None:
        """Add a rule to the cloud's rules. Raise UsageError if it is not valid."""
        if rule.call and rule.call not in CALLS:
            close = nearest(rule.call, CALLS, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(f"the fake cloud has no call {rule.call!r}{hint} (its calls are {', '.join(CALLS)})")
        kind = rule.error if isinstance(rule.error, type) else type(rule.error)
        if rule.error is not None and not issubclass(kind, Exception):
            raise UsageError(
                "refuse() takes an exception, or a class of exceptions such as skypool.errors.CapacityError, not "
                f"{rule.error!r}"
            )
        number_asked("seconds", rule.delay, "how much longer a call takes", least=0)
        if rule.times is not None:
            whole("times", rule.times, "how many calls are affected", least=1)
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
            count: how many machines get the defect. Each host of a slice counts.
            boots: seconds that the boot of each machine takes on the cloud's clock; None for a boot that never ends.
            deaf: True if the machines run but accept no connections.
            undying: how many requests to end each machine have no effect; None for all.
            has: the accelerator that each machine really has; None for no accelerator. "" means the one that was
                bought.
        """
        really = None if not has else accelerators.parse(has)
        flaw = Flaw(boots, deaf, undying, really, swapped=has != "")
        with self.state.open() as world:
            world.flaws += [replace(flaw) for _ in range(count)]

    def never_boot(self) -> None:
        """Make the next new machine boot forever, so that no command can ever run on the machine."""
        self.next_machines(boots=None)

    def undying(self, instance: Instance, times: int | None = None) -> None:
        """Make a machine ignore the next `times` requests to end it. None means all requests, 0 means none.

        The first request after these ends the machine. If one host of a slice ignores a request, the whole slice stays
        alive.
        """
        with self.state.open() as world:
            _of(world, instance).undying = times

    def interrupt(self, instance: Instance, notice: float = 120.0) -> None:
        """Announce that the cloud takes a machine back, and let the machine end when the notice time is over.

        All live machines of a slice are taken back together, even if the given machine has ended. The announcement
        appears on the machines at once. This method does not wait for their end.

        Args:
            instance: the machine.
            notice: seconds between the announcement and the end of the machine, on the cloud's clock.
        """
        with self.state.open() as world:
            for each in world.together(_of(world, instance)):
                each.taken_at = world.now + notice
                machine.interrupt(each.folder, each.taken_at - world.offset)
            world.settle()

    def kill(self, instance: Instance) -> None:
        """End a machine at once, without telling the driver. Other machines of its slice stay alive."""
        with self.state.open() as world:
            world.end(_of(world, instance))

    def advance(self, seconds: float) -> None:
        """Move the cloud's clock forward by `seconds`. Machines whose lease, lifetime or notice is over by then end."""
        Clock(self.state).advance(seconds)

    def partition(self, instance: Instance) -> None:
        """Make a running machine accept no new connections, for good. Existing connections continue.

        Has no effect on a machine that still boots.
        """
        with self.state.open() as world:
            machine.hush(_of(world, instance).folder)

    # --- a client that dies ----------------------------------------------------------------------------------

    def kill_client(self, number: int, when: When) -> None:
        """Make the API call with a given number kill the process that makes the call, with SIGKILL.

        Args:
            number: the number of the call. The cloud counts its calls from 1. The number of a past call has no effect.
            when: "before" or "after" the call takes effect.
        """
        whole("number", number, "the number of a call, from 1", least=1)
        one_of("when", when, ("before", "after"))
        with self.state.open() as world:
            world.kills[number, when] = None

    # --- what happened in the cloud --------------------------------------------------------------------------

    def calls(self, call: str = "") -> list[RecordedCall]:
        """Return the calls that the cloud has received so far, from any process, oldest first.

        Refused calls are included. `call` selects calls of one name; "" returns all.
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
        """Return how many machines of the whole cloud have not ended, whatever their tags, booting ones included."""
        return len(self.alive("machine"))

    def leftovers(self) -> int:
        """Return how many key pairs and security groups exist in the whole cloud, whether machines use them or not."""
        return len(self.alive()) - self.count()

    def alive(self, kind: str = "") -> list[str]:
        """Return a line for each live machine, key pair and security group: "machine i-0001 of pool p, running".

        `kind` is "machine", "key-pair" or "security-group" for one kind only; "" for all.
        """
        with self.state.open() as world:
            found = [f"machine {m.id} of pool {m.pool}, {m.state}" for m in world.alive()]
            found += [f"{each.kind} {each.id} of pool {each.pool}" for each in world.things.values()]
        return [each for each in found if each.startswith(f"{kind} " if kind else "")]

    def usd(self, pool: str | None = None) -> float:
        """Return the cost in USD of all machines of a pool (None: of all pools) so far, on the cloud's clock.

        A machine is charged from its creation to its end, or until now, at the price that applies now or applied at its
        end. The settings `billing` and `least_billed` are not considered.
        """
        with self.state.open() as world:
            return sum(
                ((each.ended_at or world.now) - each.born) / 3600 * each.stock.usd_per_hour / each.stock.size
                for each in world.machines.values()
                if pool in (None, each.pool)
            )


def _of(world: World, instance: Instance) -> Machine:
    """Return the cloud's own record of an instance, also of one that has ended."""
    found = world.machines.get(instance.id)
    if found is None:
        known = ", ".join(world.machines) or "no machine"
        raise UsageError(
            f"the fake cloud never made a machine {instance.id!r}; it has made {known}: pass an instance of this cloud"
        )
    return found
