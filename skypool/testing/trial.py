"""Helpers for the tests of `DriverContract`. A `Trial` rents the machines of one test, and ends them after the test."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import TypedDict, TypeVar, Unpack

import pytest

from skypool.drivers.contract import Driver, Tidies
from skypool.errors import CapacityError, OfferGone, ProviderError, StillRunning
from skypool.model import Access, Instance, Leftover, Need, Offer, Order
from skypool.offers.ranking import rank_offers
from skypool.wire.keys import Keys

T = TypeVar("T")
ABILITIES = {
    "count": "() -> int: return how many machines are alive in the whole cloud, whatever tags they have",
    "leftovers": "() -> int: return how many other resources, such as key pairs, exist in the whole cloud",
    "stock_out": "(offer, left): from now on at most `left` machines (or slices) of this offer can be alive at once",
    "refuse": "(kind): the next create fails with this class of skypool.errors; return False if there is no such error",
    "lose_reply": "(): the next machine is made, and the connection drops before the answer",
    "never_boot": "(): the next machine's boot never ends",
    "interrupt": "(instance): announce on this machine that the provider takes the machine back",
    "undying": "(instance, times): the next `times` requests to end this machine have no effect; None means all",
    "kill": "(instance): end this machine without telling the driver",
    "paged": "(size): from now on, an answer lists at most `size` machines, and says how to ask for the next ones",
    "cut_short": "(on): from now on (or no longer), lists of machines break off: they say that there are more, not how",
    "advance": "(seconds): machines read their lease files, and then the cloud's clock moves on by so many seconds",
}
"""The signature and effect of each method of `control.Control`, as the reason of a skipped test shows them."""


class OrderTerms(TypedDict, total=False):
    """The keyword arguments of `Trial.order`. Each replaces the default of the field of the same name of the order."""

    pool: str
    need: Need
    lease: float
    lifetime: float | None


@dataclass
class Trial:
    """The driver under test with the pools that one test uses, and helpers to rent and end machines.

    Args:
        driver: the driver under test.
        control: an object with some or all of the methods in `ABILITIES`. None: tests that need one are skipped.
        need: the requirements of a machine.
        patience: seconds within which a machine must boot or end. AssertionError is raised after them.
        several: True if several machines can be rented on one offer; False if each offer is a single machine.
        pools: the names of the pools that the test uses.
        stubborn: machines that the test has made ignore requests to end them. `close` undoes this.
        cut: True if the test has made lists of machines incomplete. `close` undoes this.
    """

    driver: Driver
    control: object = None
    need: Need = field(default_factory=Need)
    patience: float = 60.0
    several: bool = True
    pools: list[str] = field(default_factory=list)
    stubborn: list[Instance] = field(default_factory=list)
    cut: bool = False

    # --- methods of the control ------------------------------------------------------------------------------

    def can(self, *abilities: str) -> None:
        """Skip the running test if the control lacks one of the given methods, which are keys of `ABILITIES`."""
        for each in abilities:
            if not hasattr(self.control, each):
                pytest.skip(f"the fixture control has no method {each}{ABILITIES[each]}")

    def pull(self, ability: str, *arguments: object) -> object:
        """Call a method of the control, and return its result. Skip the test if the control lacks the method.

        `ability` is the name of the method, a key of `ABILITIES`.
        """
        self.can(ability)
        done: object = getattr(self.control, ability)(*arguments)
        return done

    def pull_count(self, ability: str) -> int:
        """Return the result of the control's method "count" or "leftovers". Skip the test if the method is missing."""
        said = self.pull(ability)
        assert isinstance(said, int), f"{ability}() of the fixture control must return an int, not {said!r}"
        return said

    def count(self) -> int:
        """Return how many machines are alive.

        If the control has the method `count`, this is the number of the whole cloud. Otherwise only the machines that
        the driver lists for this trial's pools are counted.
        """
        if hasattr(self.control, "count"):
            return self.pull_count("count")
        return len(self.instances())

    # --- ordering --------------------------------------------------------------------------------------------

    @cached_property
    def pool(self) -> str:
        """Return the name of this trial's main pool: a random name that is made on first use and stays the same."""
        return self.another_pool()

    def another_pool(self) -> str:
        """Return a new random name for a pool, which `close` will clean up. No pool is started."""
        self.pools.append(f"trial-{secrets.token_hex(4)}")
        return self.pools[-1]

    @property
    def offer(self) -> Offer:
        """Return skypool's preferred offer: the first of `offers`."""
        return self.offers[0]

    @cached_property
    def offers(self) -> tuple[Offer, ...]:
        """Return all offers that meet the trial's need, in skypool's order of preference.

        The driver is asked only once.
        """
        return self.plan(self.need)

    def plan(self, need: Need) -> tuple[Offer, ...]:
        """Return the driver's offers that meet a need, in skypool's order of preference. Fail if there is none."""
        made = rank_offers(list(self.driver.offers(need)), need)
        assert made.offers, f"the driver {self.driver.name!r} has no offer for the need of this test:\n{made.explain()}"
        return made.offers

    def order(self, *nodes: int, **more: Unpack[OrderTerms]) -> Order:
        """Return an order for one machine for each of the given nodes; for node 0 without arguments. Nothing is rented.

        By default the order is for this trial's main pool and need, and its machines are needed for 600 seconds from
        now. Each order gets a new random token, so a launch of the order makes new machines.
        """
        order = Order(
            pool=more.get("pool") or self.pool,
            token=f"{secrets.token_hex(8)}-1",
            nodes=nodes or (0,),
            need=self.need,
            until=datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=600),
        )
        return replace(order, **more)

    def launch(self, order: Order) -> list[Instance]:
        """Launch an order on this trial's offers, and return the machines. They may still be booting.

        If `several` is True, only the first offer is used, and fewer machines than nodes may be returned. Otherwise the
        offers are used one after the other, until there is a machine for each node.

        Raises:
            CapacityError, OfferGone: with `several`, the first offer is out of stock. Without, all offers were tried,
                and some nodes have no machine. The machines that were launched stay alive.
        """
        launched = list[Instance]()
        left = order.nodes
        for number, offer in enumerate(self.offers):
            try:
                launched += self.driver.launch(offer, replace(order, nodes=left))
            except (CapacityError, OfferGone):
                if self.several or number + 1 == len(self.offers):
                    raise
            left = tuple(node for node in left if node not in {each.node for each in launched})
            if self.several or not left:
                break
        return launched

    def instances(self) -> list[Instance]:
        """Return the machines that the driver lists for this trial's pools."""
        return [each for pool in self.pools for each in self.driver.instances(pool=pool)]

    # --- waiting ---------------------------------------------------------------------------------------------

    def eventually(self, check: Callable[[], object], what: str) -> None:
        """Wait until a function returns a true value. It is called at once, and then about every 0.05 seconds.

        `what` is a noun phrase for the error message. AssertionError is raised after `patience` seconds.
        """
        until = time.monotonic() + self.patience
        while not check():
            assert time.monotonic() < until, f"{what} did not happen within {self.patience:g} s"
            time.sleep(0.05)

    def reach(self, instance: Instance) -> Access:
        """Wait until commands can be run on a machine, and return the machine's `Access`.

        Errors of the driver or of the connection are retried, because the machine may still boot. AssertionError is
        raised after `patience` seconds, or subprocess.TimeoutExpired if one attempt took as long.
        """
        until = time.monotonic() + self.patience
        while True:
            with contextlib.suppress(ProviderError, OSError):  # the machine may still be booting
                access = self.driver.access(instance)
                if (done := self.run(access, ["true"])).returncode == 0:
                    return access
                assert time.monotonic() < until, (
                    f"no command ran on the machine {instance.id} within {self.patience:g} s: {done.stderr}"
                )
            assert time.monotonic() < until, (
                f"the machine {instance.id} could not be reached within {self.patience:g} s"
            )
            time.sleep(0.05)

    def run(self, access: Access, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command with empty stdin on a machine, and wait for its end, `patience` seconds at most.

        A failure of the command is not raised: look at `returncode`.
        """
        argv = access.transport.argv(command)
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=self.patience)

    def at_once(self, *works: Callable[[], T]) -> list[T]:
        """Call all functions (at least one) at the same time, each in its own thread. Return their results in order.

        Waits until all functions have ended. Then the first error, in the given order, is raised.
        """
        with ThreadPoolExecutor(len(works)) as threads:
            return [future.result() for future in [threads.submit(work) for work in works]]

    # --- the end of a test -----------------------------------------------------------------------------------

    def leftovers(self) -> list[Leftover]:
        """Return the resources other than machines, such as key pairs, that the driver lists for this trial's pools."""
        driver = self.driver
        return (
            [each for pool in self.pools for each in driver.leftovers(pool=pool)] if isinstance(driver, Tidies) else []
        )

    def close(self) -> None:
        """End all machines of this trial's pools, and remove the pools' other resources and local keys.

        First undoes `cut`, and lets machines in `stubborn` accept requests to end. Waits until the machines have ended,
        or raises AssertionError after `patience` seconds.
        """
        if self.cut:
            self.pull("cut_short", False)
        for each in self.stubborn:
            self.pull("undying", each, 0)
        until = time.monotonic() + self.patience
        while left := self.instances():
            with contextlib.suppress(StillRunning):
                self.driver.terminate(left)
            assert time.monotonic() < until, (
                f"the driver {self.driver.name!r} did not end these machines within {self.patience:g} s: {left}"
            )
        if isinstance(self.driver, Tidies):
            self.driver.tidy(self.leftovers())
        for pool in self.pools:
            Keys.of(pool).forget()
