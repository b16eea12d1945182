"""What one pool has rented: every create is in the ledger before it goes out, every end is proved and written down."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from skypool import clock, events, reaper
from skypool.budget import Receipt
from skypool.driver import Driver, Learns, Renews, Tidies, end, ends_itself
from skypool.errors import (
    BudgetExceeded,
    CapacityError,
    ErrorGroup,
    LaunchError,
    NoOffers,
    PoolClosed,
    ProviderError,
    SkypoolError,
    StillRunning,
)
from skypool.keys import Keys
from skypool.launch import Attempts, Launcher, Rented, look_around, place
from skypool.ledger import Ledger
from skypool.model import Instance, Offer, Order
from skypool.ranking import Plan
from skypool.terms import Terms

if TYPE_CHECKING:
    from tenacity import AsyncRetrying, RetryCallState

_STALE = 300.0
"""Seconds after which a plan is made anew before more is rented."""
_AGAIN = (2.0, 120.0)
"""Seconds, at first and at most, until what is out of stock is asked for again."""
_BOOT = 120.0
"""Seconds beyond the lease for which a new machine's tag asks: it need not have booted when the tag is written."""


class Rental:
    """The instances of one pool, and what they cost. What is not `async` blocks, and any thread may call it.

    Args:
        emit: hears what the user should know.
    """

    def __init__(self, terms: Terms, emit: Callable[[events.Event], None]) -> None:
        self._terms, self._emit = terms, emit
        self.session = self._series = secrets.token_hex(8)
        self.plan: Plan | None = None
        self.attempts: Attempts = []
        self.stopping = threading.Event()
        self._planned, self._waits = 0.0, False
        self._numbers = itertools.count()
        self._ledger: Ledger | None = None
        self._open: dict[str, str] = {}
        self._there: dict[tuple[str, str], Instance] = {}
        self._tried: set[str] = set()
        self._told: set[str] = set()
        self._launcher = Launcher(terms.drivers, self._order, self, self.attempts, self.stopping)

    # --- before anything is rented ---------------------------------------------------------------------------

    async def look(self) -> Plan:
        """What would be rented now; asked anew when the last answer is old.

        Raises:
            NoOffers: nothing serves. PoolClosed: the pool is to end. Whatever the only provider said.
        """
        if self.stopping.is_set():
            raise PoolClosed(f"pool {self._terms.name!r} was stopped while it waited")
        if self.plan is None or time.monotonic() - self._planned > _STALE:
            self.plan = await look_around(self._terms.drivers, self._terms.need, rank=self._terms.rank)
            self._planned = time.monotonic()
            self._launcher.lacking.clear()
        return self.plan

    async def look_out(self, pause: Callable[[float], Awaitable[None]]) -> Plan:
        """`look`; while nothing serves, again and again for as long as the pool waits.

        Args:
            pause: sleeps for so many seconds, or less when the pool is to end.
        """
        plan: Plan = await self._waiting(pause)(self.look)
        return plan

    def begin(self) -> None:
        """Open the ledger for this pool, once its plan is made.

        Raises:
            UsageError: a pool of that name lives. BudgetExceeded: the budget is below the price of the first hour.
        """
        terms = self._terms
        if terms.budget is not None and self.plan is not None and self.plan.best is not None:
            terms.budget.check_first_hour([self.plan.best] * terms.minimum, lifetime=terms.lifetime)
        ledger = Ledger.here(self._tell)
        ledger.begin(terms.name, self.session, lease=terms.lease, budget=terms.budget, drivers=terms.drivers)
        self._ledger = ledger

    def adopt(self) -> list[Instance]:
        """The instances of the pool of this name, which another process left; they are this one's from now on.

        Raises:
            SkypoolError: there are none.
        """
        name = self._terms.name
        found = [i for d in self._terms.drivers for i in d.instances(pool=name)]
        if not found:
            raise SkypoolError(f"no pool called {name!r} runs on {[d.name for d in self._terms.drivers]}")
        self._tried |= {each.provider for each in found}
        self._there |= {(each.provider, each.id): each for each in found}
        ledger = Ledger.here(self._tell)
        known = ledger.adopt(name, lease=self._terms.lease)
        if known is not None:  # another machine's ledger may have it
            self.session, self._ledger = known.session, ledger
            self._terms = replace(self._terms, budget=self._terms.budget or known.budget)
        return found

    # --- renting ---------------------------------------------------------------------------------------------

    async def rent(self, ranks: Sequence[int], hosts: int | None, pause: Callable[[float], Awaitable[None]]) -> Rented:
        """Rent a slice, or a machine, for each of these ranks on the best offers of the plan that are in stock.

        While too little is, again and again for as long as the pool waits: what came meanwhile is ended first, as
        nobody wants to pay for machines that wait for others.

        Args:
            hosts: only on offers of which so many come; None takes any.
            pause: sleeps for so many seconds, or less when the pool is to end.

        Raises:
            NoOffers: nothing serves. Whatever the only provider said.
        """
        until = time.monotonic() + self._terms.wait

        async def once() -> Rented:
            plan = await self.look()
            offers = [each for each in plan.offers if hosts in (None, each.hosts)]
            rented = await asyncio.to_thread(self._launcher.launch, offers, ranks)
            if not rented.instances or not self._is_short(rented.error) or time.monotonic() >= until:
                return rented
            unproved = await asyncio.to_thread(self.end, rented.instances)
            return rented if unproved else Rented((), rented.error)

        rented: Rented = await self._waiting(pause)(once)
        return rented

    def _waiting(self, pause: Callable[[float], Awaitable[None]]) -> AsyncRetrying:
        """What asks again while that may help and the pool waits; gives, or raises, what came last."""
        from tenacity import (
            AsyncRetrying,
            retry_if_exception,
            retry_if_result,
            stop_after_delay,
            wait_exponential,
            wait_random,
        )

        first, most = _AGAIN
        return AsyncRetrying(
            retry=retry_if_exception(self._is_short)
            | retry_if_result(lambda got: isinstance(got, Rented) and not got.instances and self._is_short(got.error)),
            stop=stop_after_delay(self._terms.wait),
            wait=wait_exponential(multiplier=first, max=most) + wait_random(0, first),
            sleep=pause,
            before_sleep=self._tell_shortage,
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
        )

    def _is_short(self, error: BaseException | None) -> bool:
        """Whether what there is too little of may come; who waits already outlives a provider's bad moment, too."""
        if isinstance(error, NoOffers) and isinstance(error.plan, Plan):
            failures = error.plan.failures
            all_failed = len(failures) == len(self._terms.drivers)
            return any(map(self._is_short, failures.values())) if all_failed else error.plan.is_short
        if isinstance(error, (ProviderError, ErrorGroup)):
            return self._waits and reaper.may_pass(error)
        return isinstance(error, LaunchError) and error.is_short

    def _tell_shortage(self, state: RetryCallState) -> None:
        assert state.outcome is not None
        error = state.outcome.exception() or state.outcome.result().error
        self._waits = True
        self._tell(f"too little is in stock; it is asked for again for {self._terms.wait:g} s", str(error))
        self.plan = None

    def _order(self, offer: Offer, ranks: tuple[int, ...]) -> Order:
        terms = self._terms
        left = self._left([offer] * (len(ranks) // offer.hosts))
        if left <= 0:
            raise BudgetExceeded(self._spent_words())
        ends = min(left, math.inf if terms.lifetime is None else terms.lifetime)
        return Order(
            pool=terms.name,
            token=f"{self._series}-{next(self._numbers)}",
            ranks=ranks,
            need=terms.need,
            lease=terms.lease,
            lifetime=None if ends == math.inf else ends,
            until=_from_now(terms.lease + _BOOT),
        )

    def intend(self, order: Order, offer: Offer) -> None:
        """A create is about to go out: if this cannot be written down, it does not."""
        self._tried.add(offer.provider)
        if not all(ends_itself(each, offer) for each in self._terms.drivers if each.name == offer.provider):
            what = "a machine" if offer.ends_itself is None else offer.instance_type
            self._tell(
                f"{what} at {offer.provider} cannot end its own cost: if this client is killed, it is billed until "
                f"`skypool gc --yes` runs after its lease"
            )
        self._open[order.token] = offer.provider
        if self._ledger is not None:
            self._ledger.intend(self.session, order.token, offer, order.ranks)

    def rented(self, order: Order, instances: Sequence[Instance]) -> None:
        """It took effect."""
        self._there |= {(each.provider, each.id): each for each in instances}
        self._open.pop(order.token, None)
        if self._ledger is not None:
            self._ledger.rented(self.session, order.token, instances)

    def refused(self, order: Order, error: Exception) -> None:
        """It took no effect."""
        self._open.pop(order.token, None)
        if self._ledger is not None:
            self._ledger.refused(self.session, order.token, str(error))

    def driver_of(self, instance: Instance) -> Driver:
        """The driver that made it."""
        return next(each for each in self._terms.drivers if each.name == instance.provider)

    def rejected(self, instance: Instance, why: Exception) -> None:
        """It was given up before it was ready: its driver may leave it out from now on.

        Where its provider took the order, and has no machine for it after all, another offer is next.
        """
        if isinstance(why, CapacityError) and instance.offer is not None:
            self._launcher.lacking[place(instance.offer)] = why
        driver = self.driver_of(instance)
        if isinstance(driver, Learns):
            try:
                driver.rejected(instance, why)
            except Exception as e:  # noqa: BLE001 - what else becomes of it must not depend on this
                self._tell(f"{driver.name} could not note that a machine failed: {e}")

    # --- while it lives --------------------------------------------------------------------------------------

    @property
    def pulse(self) -> float:
        """Seconds between two calls of `tend`."""
        return min(self._terms.lease / 3, 60.0 if self._terms.budget is None else 5.0)

    def tend(self) -> float:
        """Say that this pool is alive, in the ledger and on the tags of its machines.

        Returns:
            seconds that its nodes may go on for what is left of the budget; `math.inf` without one.

        Raises:
            BudgetExceeded: nothing is left of it. PoolClosed: another process ends the pool.
        """
        name = self._terms.name
        if self._ledger is not None and not self._ledger.beat(self.session):
            raise PoolClosed(f"pool {name!r} was ended by another process, as `skypool down {name}` does")
        for driver in self._terms.drivers:
            if driver.name in self._tried and isinstance(driver, Renews):
                try:
                    driver.renew(name, _from_now(self._terms.lease + _BOOT))
                except Exception as e:  # noqa: BLE001 - neither the ledger nor the budget must depend on this
                    self._tell(f"the tags of the machines of {driver.name} could not be renewed, tried again soon: {e}")
        budget, left = self._terms.budget, self._left()
        if budget is None:
            return left
        if left <= 0:
            raise BudgetExceeded(self._spent_words())
        if budget.warns(spent := self.receipt.usd):
            share = f"{budget.warn:.0%} of the budget of ${budget.max_usd:g}"
            self._tell(f"{share} is spent; all machines end when the rest is", f"${spent:.2f} so far")
        return left

    @property
    def receipt(self) -> Receipt:
        """What each instance cost, up to its end or to now."""
        if self._ledger is None:
            return Receipt(self._terms.name, (), time.time())
        return self._ledger.receipt(self.session)

    def _left(self, more: Sequence[Offer] = ()) -> float:
        """Seconds until the budget is spent if these are rented, too; `math.inf` without a budget."""
        if self._terms.budget is None:
            return math.inf
        return self._terms.budget.lasts(self.receipt.lines, clock.now(), more)

    def _spent_words(self) -> str:
        most = self._terms.budget.max_usd if self._terms.budget else 0.0
        return (
            f"pool {self._terms.name!r} has spent ${self.receipt.usd:.2f} of its budget of ${most:g}, and its machines "
            f"are ended; for more, raise Budget(max_usd=) (`skypool cost` tells what each one cost)"
        )

    # --- the end ---------------------------------------------------------------------------------------------

    @property
    def there(self) -> list[Instance]:
        """What was rented, or taken over, and is not proved to have ended."""
        return list(self._there.values())

    def end(self, instances: Sequence[Instance]) -> Mapping[int, StillRunning]:
        """End these instances and prove it. What could not be proved comes back, by rank."""
        errors: dict[int, StillRunning] = {}
        for driver in self._terms.drivers:
            ours = [each for each in instances if each.provider == driver.name]
            try:
                if ours:
                    end(driver, ours)
            except StillRunning as e:  # it is raised at the pool's end, with the instances still running
                left = {getattr(each, "id", "") for each in e.instances} or {each.id for each in ours}
                errors |= {each.rank: e for each in ours if each.id in left}
        for each in instances:
            if each.rank not in errors:
                self._there.pop((each.provider, each.id), None)
                if self._ledger is not None:
                    self._ledger.ended(self.session, each.provider, each.id)
        return errors

    def close(self, error: BaseException | None, *, proved: bool) -> None:
        """When all known instances have ended: find what else there may be, remove it, and close the ledger.

        Args:
            error: what ended the pool; proved: whether the end of every known instance was.

        Raises:
            StillRunning, ErrorGroup: something is left. The ledger stays open for it then.
        """
        if not proved:
            return
        unclear = set(self._open.values())
        asked = [
            driver
            for driver in self._terms.drivers
            if driver.name in unclear or (driver.name in self._tried and isinstance(driver, Tidies))
        ]
        if asked:
            reaper.finish(asked, self._terms.name, self._ledger, self.session)
        if self._ledger is not None:
            self._ledger.end(self.session, "" if error is None else str(error))
        Keys.of(self._terms.name).forget()

    def hand_over(self) -> str:
        """Let a process of its own end everything of this pool, whatever becomes of this one; what the user is told."""
        name = self._terms.name
        pid = reaper.hand_over(self._terms.drivers, name, self.session)
        return f"process {pid} goes on ending the machines of pool {name!r}; `skypool ps` tells when it is through"

    # --- what the user should know ---------------------------------------------------------------------------

    def _tell(self, text: str, detail: str = "") -> None:
        """Once, whatever the detail."""
        if text not in self._told:
            self._told.add(text)
            self._emit(events.Notice(pool=self._terms.name, text=f"{text} ({detail})" if detail else text))


def _from_now(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)
