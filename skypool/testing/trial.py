"""Helpers for the tests of `DriverContract`: `Trial` rents machines and starts pools, and ends them after the test."""

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
    """The keyword arguments with which a test can change an order."""

    pool: str
    need: Need
    lease: float
    lifetime: float | None


@dataclass
class Trial:
    """One test's share of a cloud, with a driver and pools of its own.

    Args:
        driver: the driver under test.
        control: an object with any of the methods in `ABILITIES`; None for none.
        need: the requirements of a machine.
        patience: seconds within which a machine boots or ends.
        several: True if one offer may serve for several machines.
        pools: the names of the pools that the test uses.
        stubborn: machines that the test made `undying`. `close` lets them end again.
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
        """Skip the test if the control lacks one of these methods of `ABILITIES`."""
        for each in abilities:
            if not hasattr(self.control, each):
                pytest.skip(f"this cloud's control has no {each}{ABILITIES[each]}")

    def pull(self, ability: str, *arguments: object) -> object:
        """Call a method of the control and return its result. Skip the test if the control lacks the method.

        Args:
            ability: the name of the method.
            arguments: its arguments.
        """
        self.can(ability)
        done: object = getattr(self.control, ability)(*arguments)
        return done

    def pull_count(self, ability: str) -> int:
        """Return a number that the control can tell; without it the test is skipped."""
        said = self.pull(ability)
        assert isinstance(said, int), f"the control's {ability}() returns a number, not {said!r}"
        return said

    def count(self) -> int:
        """Return how many machines are alive.

        If the control has the method `count`, the whole cloud is counted; otherwise only this trial's pools.
        """
        if hasattr(self.control, "count"):
            return self.pull_count("count")
        return len(self.instances())

    # --- ordering --------------------------------------------------------------------------------------------

    @cached_property
    def pool(self) -> str:
        """Return the name of this trial's first pool, which is unique."""
        return self.another_pool()

    def another_pool(self) -> str:
        """Return a new unique pool name, and remember it for `close`."""
        self.pools.append(f"trial-{secrets.token_hex(4)}")
        return self.pools[-1]

    @property
    def offer(self) -> Offer:
        """Return the best offer for the trial's need."""
        return self.offers[0]

    @cached_property
    def offers(self) -> tuple[Offer, ...]:
        """Return all offers that meet the trial's need, best first. The driver is asked once."""
        return self.plan(self.need)

    def plan(self, need: Need) -> tuple[Offer, ...]:
        """Return the offers of the driver that meet a need, best first.

        Raises:
            AssertionError: there is none.
        """
        made = rank_offers(list(self.driver.offers(need)), need)
        assert made.offers, f"{self.driver.name} has no offer that meets the contract's need:\n{made.explain()}"
        return made.offers

    def order(self, *nodes: int, **more: Unpack[OrderTerms]) -> Order:
        """Return an order for one machine of each node; for node 0 if none is given.

        Args:
            nodes: the nodes of the machines.
            more: fields of `Order` that differ from the defaults: a new token, this trial's pool, needed for 600 s.
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
        """Launch an order on the best offer, and return the machines.

        If each offer is a single machine (`several` is False), the next offers supply the remaining nodes, as in a
        pool.

        Raises:
            CapacityError, OfferGone: too few machines are in stock.
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
        """Return the live machines of this trial's pools, as the driver finds them."""
        return [each for pool in self.pools for each in self.driver.instances(pool=pool)]

    # --- waiting ---------------------------------------------------------------------------------------------

    def eventually(self, check: Callable[[], object], what: str) -> None:
        """Wait until a check returns something true.

        Args:
            check: called about every 0.05 s.
            what: a noun phrase for the error message.

        Raises:
            AssertionError: it did not become true within `patience`.
        """
        until = time.monotonic() + self.patience
        while not check():
            assert time.monotonic() < until, f"{what} did not happen within {self.patience:g} s"
            time.sleep(0.05)

    def reach(self, instance: Instance) -> Access:
        """Wait until commands can be run on a machine, and return its `Access`.

        Raises:
            AssertionError: no command ran within `patience`.
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
        """Run a command on a machine, and return its exit status and output.

        Raises:
            subprocess.TimeoutExpired: it takes longer than `patience` seconds.
        """
        argv = access.transport.argv(command)
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=self.patience)

    def at_once(self, *works: Callable[[], T]) -> list[T]:
        """Call all functions at the same time, each in a thread of its own, and return their results in order.

        Raises:
            Exception: the first error of a function.
        """
        with ThreadPoolExecutor(len(works)) as threads:
            return [future.result() for future in [threads.submit(work) for work in works]]

    # --- the end ---------------------------------------------------------------------------------------------

    def leftovers(self) -> list[Leftover]:
        """Return the driver's leftovers, such as key pairs, of this trial's pools.

        The list is empty for a driver that makes no leftovers.
        """
        driver = self.driver
        return (
            [each for pool in self.pools for each in driver.leftovers(pool=pool)] if isinstance(driver, Tidies) else []
        )

    def close(self) -> None:
        """End all machines of this trial, and remove its leftovers and keys.

        Raises:
            AssertionError: machines were still alive after `patience`.
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
