"""Helpers for the tests of `DriverContract`. A `Trial` rents machines for one test, and ends them after it."""

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
    "count": "() -> int: how many machines the cloud itself knows to be alive, whatever their tags say",
    "leftovers": "() -> int: how many other things the cloud itself knows, such as key pairs",
    "stock_out": "(offer, left): from now on at most `left` machines, or slices, of this offer can be alive at once",
    "refuse": "(kind): the next create fails with this class of skypool.errors; False if the cloud has no such error",
    "lose_reply": "(): the next machine is made, and the connection drops before the answer",
    "never_boot": "(): the next machine's boot never ends",
    "interrupt": "(instance): give notice that the provider takes this machine back",
    "undying": "(instance, times): so many requests to end this machine have no effect; None means all",
    "kill": "(instance): end this machine without telling the driver",
    "advance": "(seconds): machines read their lease files, and then the clock moves on without a sign of a client",
}
"""The signature and effect of each method of `control.Control`. A test skipped for lack of a method shows this text."""


class OrderTerms(TypedDict, total=False):
    """The keyword arguments with which a test can change an order (see `Trial.order`). All are optional."""

    pool: str
    need: Need
    lease: float
    lifetime: float | None


@dataclass
class Trial:
    """One test's share of a cloud: the driver under test, and the pools (sets of rented machines) that the test uses.

    Args:
        driver: the driver under test.
        control: an object with any of the methods in `ABILITIES`, with which a test changes the cloud; None for none.
        need: the requirements of a machine.
        patience: seconds within which a machine boots or ends.
        several: True if one offer may serve for several machines; False if each offer is a single machine.
        pools: the names of the pools that the test uses.
        stubborn: machines that the test made ignore requests to end them. `close` lets them end again.
    """

    driver: Driver
    control: object = None
    need: Need = field(default_factory=Need)
    patience: float = 60.0
    several: bool = True
    pools: list[str] = field(default_factory=list)
    stubborn: list[Instance] = field(default_factory=list)

    # --- the strings -----------------------------------------------------------------------------------------

    def can(self, *abilities: str) -> None:
        """Skip the running test if the cloud's control lacks one of these methods. Otherwise do nothing.

        Args:
            abilities: names of methods, which are keys of `ABILITIES`.
        """
        for each in abilities:
            if not hasattr(self.control, each):
                pytest.skip(f"this cloud's control has no {each}{ABILITIES[each]}")

    def pull(self, ability: str, *arguments: object) -> object:
        """Call a method of the control and return its result. Skip the test if the control lacks the method.

        Args:
            ability: the name of the method, a key of `ABILITIES`.
            arguments: its arguments.
        """
        self.can(ability)
        done: object = getattr(self.control, ability)(*arguments)
        return done

    def pull_count(self, ability: str) -> int:
        """Call a method of the control that returns a number, and return that number.

        The test is skipped if the control lacks the method.

        Args:
            ability: the name of the method, such as "count".

        Raises:
            AssertionError: the method returned something else than an int.
        """
        said = self.pull(ability)
        assert isinstance(said, int), f"the control's {ability}() returns a number, not {said!r}"
        return said

    def count(self) -> int:
        """Return how many machines are alive.

        If the control has the method `count`, that counts the machines of the whole cloud. Otherwise only the machines
        of this trial's pools are counted, as the driver lists them.
        """
        if hasattr(self.control, "count"):
            return self.pull_count("count")
        return len(self.instances())

    # --- ordering --------------------------------------------------------------------------------------------

    @cached_property
    def pool(self) -> str:
        """Return the name of this trial's main pool. It is made up on first use, is unique, and stays the same."""
        return self.another_pool()

    def another_pool(self) -> str:
        """Return a new unique pool name. No pool is started.

        The name is added to `pools`, so that `close` ends the machines of that pool.
        """
        self.pools.append(f"trial-{secrets.token_hex(4)}")
        return self.pools[-1]

    @property
    def offer(self) -> Offer:
        """Return the best offer that meets the trial's need.

        Raises:
            AssertionError: there is none.
        """
        return self.offers[0]

    @cached_property
    def offers(self) -> tuple[Offer, ...]:
        """Return all offers that meet the trial's need, best first. The driver is asked only on first use.

        Raises:
            AssertionError: there is none.
        """
        return self.plan(self.need)

    def plan(self, need: Need) -> tuple[Offer, ...]:
        """Ask the driver for offers, and return those that meet a need, best first.

        Raises:
            AssertionError: there is none.
        """
        made = rank_offers(list(self.driver.offers(need)), need)
        assert made.offers, f"{self.driver.name} has no offer that meets the contract's need:\n{made.explain()}"
        return made.offers

    def order(self, *nodes: int, **more: Unpack[OrderTerms]) -> Order:
        """Return an order for one machine for each of these nodes. Nothing is rented.

        Each order gets a new random token, so that it makes machines of its own.

        Args:
            nodes: the numbers of the nodes; none means node 0.
            more: fields of `Order` that differ from the defaults. These are this trial's main pool, the trial's need,
                and machines that are needed for 600 seconds.
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
        """Launch an order on the best offer, and return the machines. They may still be booting.

        If each offer is a single machine (`several` is False), the next offers supply the remaining nodes. If `several`
        is True, only the best offer is used, and fewer machines may be returned.

        Raises:
            CapacityError, OfferGone: the best offer is out of stock; without `several`, the last offer is. Machines
                that were launched before are not ended.
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
        """Return the live machines of all of this trial's pools, as the driver lists them. Empty if there are none."""
        return [each for pool in self.pools for each in self.driver.instances(pool=pool)]

    # --- waiting ---------------------------------------------------------------------------------------------

    def eventually(self, check: Callable[[], object], what: str) -> None:
        """Wait until a check returns something true. Blocks.

        Args:
            check: called at once, and then about every 0.05 seconds.
            what: a noun phrase for the error message.

        Raises:
            AssertionError: it did not become true within `patience` seconds.
        """
        until = time.monotonic() + self.patience
        while not check():
            assert time.monotonic() < until, f"{what} did not happen within {self.patience:g} s"
            time.sleep(0.05)

    def reach(self, instance: Instance) -> Access:
        """Wait until commands can be run on a machine, and return the machine's `Access`. Blocks.

        Errors of the driver and of the connection are tried again, because the machine may still be booting.

        Raises:
            AssertionError: no command ran within `patience` seconds.
            subprocess.TimeoutExpired: one attempt to run a command took longer than `patience` seconds.
        """
        until = time.monotonic() + self.patience
        while True:
            with contextlib.suppress(ProviderError, OSError):  # the machine may still be booting
                access = self.driver.access(instance)
                if (done := self.run(access, ["true"])).returncode == 0:
                    return access
                assert time.monotonic() < until, f"no command ran on {instance.id}: {done.stderr}"
            assert time.monotonic() < until, f"{instance.id} could not be reached within {self.patience:g} s"
            time.sleep(0.05)

    def run(self, access: Access, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine, wait for its end, and return its exit status, stdout and stderr as text.

        A command that fails does not raise: look at `returncode`. Its stdin is empty.

        Args:
            access: how to reach the machine.
            command: the program and its arguments.

        Raises:
            subprocess.TimeoutExpired: it takes longer than `patience` seconds.
        """
        argv = access.transport.argv(command)
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=self.patience)

    def at_once(self, *works: Callable[[], T]) -> list[T]:
        """Call all functions at the same time, each in its own thread, and return their results in the given order.

        Blocks until all functions have ended, also if one raises.

        Args:
            works: the functions, at least one.

        Raises:
            Exception: the error of the first function, in the given order, that failed.
        """
        with ThreadPoolExecutor(len(works)) as threads:
            return [future.result() for future in [threads.submit(work) for work in works]]

    # --- the end ---------------------------------------------------------------------------------------------

    def leftovers(self) -> list[Leftover]:
        """Return other resources than machines, such as key pairs, that the driver lists for this trial's pools.

        The list is empty if there are none, or if the driver never makes such resources.
        """
        driver = self.driver
        return (
            [each for pool in self.pools for each in driver.leftovers(pool=pool)] if isinstance(driver, Tidies) else []
        )

    def close(self) -> None:
        """End all machines of this trial's pools, and remove their other resources and their local keys. Blocks.

        Machines in `stubborn`, which ignore requests to end them, are first made to end again.

        Raises:
            AssertionError: machines were still alive after `patience` seconds.
        """
        for each in self.stubborn:
            self.pull("undying", each, 0)
        until = time.monotonic() + self.patience
        while left := self.instances():
            with contextlib.suppress(StillRunning):
                self.driver.terminate(left)
            assert time.monotonic() < until, f"{self.driver.name} did not end machines of the test: {left}"
        if isinstance(self.driver, Tidies):
            self.driver.tidy(self.leftovers())
        for pool in self.pools:
            Keys.of(pool).forget()
