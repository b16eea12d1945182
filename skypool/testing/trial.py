"""Helpers of the contract's tests: a driver, control of its cloud, and pools that are ended afterwards."""

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
    "leftovers": "() -> int: how many other things it knows, such as key pairs",
    "stock_out": "(offer, left): so many machines, or slices, can be had on this offer from now on",
    "refuse": "(kind): the next machine is refused so, kind being of skypool.errors; False if there is no such error",
    "lose_reply": "(): the next machine is made, and the connection drops before the answer",
    "never_boot": "(): the next machine's boot is never through",
    "interrupt": "(instance): give notice that it is taken back",
    "undying": "(instance, times): it survives being ended so often, None is always",
    "kill": "(instance): it is gone, and the driver was not told",
    "advance": "(seconds): its machines hear their guards, and then so much time passes without a word from a client",
}
"""What each method of `control.Control` does, as a test says it that is skipped for want of it."""


class OrderTerms(TypedDict, total=False):
    """What a test may ask of an order beside its nodes."""

    pool: str
    need: Need
    lease: float
    lifetime: float | None


@dataclass
class Trial:
    """One test's share of a cloud.

    Args:
        control: see `ABILITIES`; need: what is asked of a machine there.
        patience: seconds in which a machine boots or ends there.
        several: whether one offer may be several machines.
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
        """Skip the test if the control lacks one of these."""
        for each in abilities:
            if not hasattr(self.control, each):
                pytest.skip(f"this cloud's control has no {each}{ABILITIES[each]}")

    def pull(self, ability: str, *arguments: object) -> object:
        """Do what the control can do; without it the test is skipped."""
        self.can(ability)
        done: object = getattr(self.control, ability)(*arguments)
        return done

    def pull_count(self, ability: str) -> int:
        """Return a number that the control can tell; without it the test is skipped."""
        said = self.pull(ability)
        assert isinstance(said, int), f"the control's {ability}() returns a number, not {said!r}"
        return said

    def count(self) -> int:
        """How many machines are alive: of all the cloud if that is known, otherwise of this trial's pools."""
        if hasattr(self.control, "count"):
            return self.pull_count("count")
        return len(self.instances())

    # --- ordering --------------------------------------------------------------------------------------------

    @cached_property
    def pool(self) -> str:
        """A pool's name that nobody else has."""
        return self.another_pool()

    def another_pool(self) -> str:
        self.pools.append(f"trial-{secrets.token_hex(4)}")
        return self.pools[-1]

    @property
    def offer(self) -> Offer:
        """The best offer there is."""
        return self.offers[0]

    @cached_property
    def offers(self) -> tuple[Offer, ...]:
        """All that serve, asked for once, best first."""
        return self.plan(self.need)

    def plan(self, need: Need) -> tuple[Offer, ...]:
        """What serves this need, best first."""
        made = rank_offers(list(self.driver.offers(need)), need)
        assert made.offers, f"{self.driver.name} sells nothing that serves the contract's need:\n{made.explain()}"
        return made.offers

    def order(self, *nodes: int, **more: Unpack[OrderTerms]) -> Order:
        """For one machine of each node; what is not said is as a pool would have it."""
        order = Order(
            pool=more.get("pool") or self.pool,
            token=f"{secrets.token_hex(8)}-1",
            nodes=nodes or (0,),
            need=self.need,
            until=datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=600),
        )
        return replace(order, **more)

    def launch(self, order: Order) -> list[Instance]:
        """On the best offer; what that has no machines for on the next ones, as a pool does."""
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
        """All that lives of this trial's pools, as the driver finds it."""
        return [each for pool in self.pools for each in self.driver.instances(pool=pool)]

    # --- waiting ---------------------------------------------------------------------------------------------

    def eventually(self, check: Callable[[], object], what: str) -> None:
        """Wait until that is true.

        Raises:
            AssertionError: it did not happen within `patience`.
        """
        until = time.monotonic() + self.patience
        while not check():
            assert time.monotonic() < until, f"{what} did not happen within {self.patience:g} s"
            time.sleep(0.05)

    def reach(self, instance: Instance) -> Access:
        """Wait until a command runs there; how that is done."""
        until = time.monotonic() + self.patience
        while True:
            with contextlib.suppress(ProviderError, OSError):  # it may still boot
                access = self.driver.access(instance)
                if (done := self.run(access, ["true"])).returncode == 0:
                    return access
                assert time.monotonic() < until, f"no command runs on {instance.id}: {done.stderr}"
            assert time.monotonic() < until, f"there is no way to {instance.id} within {self.patience:g} s"
            time.sleep(0.05)

    def run(self, access: Access, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command there."""
        argv = access.transport.argv(command)
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=self.patience)

    def at_once(self, *works: Callable[[], T]) -> list[T]:
        """Do all of these in threads of their own; what each gave."""
        with ThreadPoolExecutor(len(works)) as threads:
            return [future.result() for future in [threads.submit(work) for work in works]]

    # --- the end ---------------------------------------------------------------------------------------------

    def leftovers(self) -> list[Leftover]:
        """What else there is of this trial's pools."""
        driver = self.driver
        return (
            [each for pool in self.pools for each in driver.leftovers(pool=pool)] if isinstance(driver, Tidies) else []
        )

    def close(self) -> None:
        """End all that this trial began.

        Raises:
            AssertionError: that could not be done.
        """
        for each in self.stubborn:
            self.pull("undying", each, 0)
        until = time.monotonic() + self.patience
        while left := self.instances():
            with contextlib.suppress(StillRunning):
                self.driver.terminate(left)
            assert time.monotonic() < until, f"{self.driver.name} did not end what the test began: {left}"
        if isinstance(self.driver, Tidies):
            self.driver.tidy(self.leftovers())
        for pool in self.pools:
            Keys.of(pool).forget()
