"""The machines of one pool: rents and ends them, keeps their tags and the ledger current, watches the budget."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from skypool import clock, events
from skypool.drivers import retry
from skypool.drivers.contract import Driver, Learns, Renews, Tidies, abilities, end, ends_itself
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
    UsageError,
)
from skypool.model import Instance, Offer, Order
from skypool.offers.ranking import Plan
from skypool.offers.search import look_around
from skypool.rental import reaper
from skypool.rental.budget import Receipt
from skypool.rental.launch import Attempts, Launcher, Rented, place
from skypool.rental.ledger import Ledger
from skypool.rental.request import Terms
from skypool.wire.keys import Keys

if TYPE_CHECKING:
    from tenacity import AsyncRetrying, RetryCallState

_STALE = 300.0
"""Seconds after which a plan is made anew before more is rented."""
_AGAIN = (2.0, 120.0)
"""Seconds, at first and at most, until what is out of stock is asked for again."""
_BOOT = 120.0
"""Seconds beyond the lease for which a new machine's tag asks: it need not have booted when the tag is written."""
REPRICE = 600.0
"""Seconds after which the prices of spot machines are read again."""
_HEADROOM = 1.25
"""How many times its price a spot machine of a pool with a budget may cost before its provider is to take it back.
Spot prices move gradually; with less a pool would lose machines to every small rise."""
_LISTING = 10.0
"""Seconds for which a provider that is too busy to list machines is asked again before they are ended all the same."""
_LATE = 120.0
"""Seconds for which machines of an order without an answer are looked for while the pool lives."""
_QUIET = 5.0
"""Seconds of silence after which a machine that is ended is looked for first: it may have died then."""


class Rental:
    """The instances of one pool, and what they cost. What is not `async` blocks, and any thread may call it.

    Args:
        emit: hears what the user should know.
    """

    def __init__(self, terms: Terms, emit: Callable[[events.Event], None]) -> None:
        self._terms = terms
        self._emit = emit
        self.session = self._series = secrets.token_hex(8)
        self.plan: Plan | None = None
        self.attempts: Attempts = []
        self.stopping = threading.Event()
        self._planned = 0.0
        self._waits = False
        self._numbers = itertools.count()
        self._ledger: Ledger | None = None
        self._open: dict[str, str] = {}
        self._asked: dict[str, dict[int, float]] = {}
        self._made: dict[str, dict[tuple[str, str], Instance]] = {}
        self._billed: set[tuple[str, str]] = set()
        self._lost: dict[str, tuple[str, float]] = {}
        self._priced = time.monotonic()
        self._there: dict[tuple[str, str], Instance] = {}
        self._tried: set[str] = set()
        self._told: set[str] = set()
        together = terms.need.private_network
        self._launcher = Launcher(terms.drivers, self._order, self, self.attempts, self.stopping, together=together)

    # --- before anything is rented ---------------------------------------------------------------------------

    async def look(self) -> Plan:
        """What would be rented now; asked anew when the last answer is old.

        Raises:
            NoOffers: nothing serves. PoolClosed: the pool is to end. UsageError: no machine that serves can keep the
            budget. Whatever the only provider said.
        """
        if self.stopping.is_set():
            raise PoolClosed(f"pool {self._terms.name!r} was stopped while it waited")
        if self.plan is None or time.monotonic() - self._planned > _STALE:
            plan = await look_around(self._terms.drivers, self._terms.need, order_by=self._terms.order_by)
            self.plan = self._bounded(plan)
            self._planned = time.monotonic()
            self._launcher.lacking.clear()
        return self.plan

    def _bounded(self, plan: Plan) -> Plan:
        """Leave out what cannot keep the budget: machines that cannot end themselves, and cost something."""
        budget = self._terms.budget
        if budget is None or budget.best_effort:
            return plan
        kept = tuple(each for each in plan.offers if each.usd_per_hour <= 0 or self._ends_itself(each))
        if plan.offers and not kept:
            first = plan.offers[0]
            raise UsageError(
                f"budget={budget.max_usd:g} cannot be kept on {first.provider} {first.instance_type}: such a machine "
                f"cannot end itself, so if this client is killed or cut off it is billed until somebody runs "
                f"`skypool gc --yes`. Either take machines that end themselves (docs/nets.md says which), or accept "
                f"that the budget holds only while the client lives: Budget({budget.max_usd:g}, best_effort=True)"
            )
        if len(kept) < len(plan.offers):
            out = sorted({each.provider for each in plan.offers} - {each.provider for each in kept})
            of = f" of {', '.join(out)}" if out else ""
            said = f"offers{of} are left out, as their machines cannot end themselves and keep no budget"
            return replace(plan, offers=kept, notes=(*plan.notes, f"{said}: Budget(…, best_effort=True) takes them"))
        return plan

    def _ends_itself(self, offer: Offer) -> bool:
        return all(ends_itself(each, offer) for each in self._terms.drivers if each.name == offer.provider)

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
        self._priced = -math.inf
        self._there |= {(each.provider, each.id): each for each in found}
        ledger = Ledger.here(self._tell)
        known = ledger.adopt(name, lease=self._terms.lease)
        if known is not None:  # another machine's ledger may have it
            self.session = known.session
            self._ledger = ledger
            self._terms = replace(self._terms, budget=self._terms.budget or known.budget)
            ledger.found(
                self.session, found, {d.name for d in self._terms.drivers if abilities(d).billed_from == "running"}
            )
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
        bounded = terms.budget is not None and offer.market == "spot"
        if (
            bounded and left > terms.lease
        ):  # its price may fall; until then the lease, and what the node is told, bound it
            left = math.inf
        ends = min(left, math.inf if terms.lifetime is None else terms.lifetime)
        caps = [terms.need.max_usd_per_hour or math.inf, offer.usd_per_hour * _HEADROOM if bounded else math.inf]
        return Order(
            pool=terms.name,
            token=f"{self._series}-{next(self._numbers)}",
            ranks=ranks,
            need=terms.need,
            lease=terms.lease,
            lifetime=None if ends == math.inf else ends,
            until=_from_now(terms.lease + _BOOT),
            max_usd_per_hour=None if min(caps) == math.inf else min(caps),
            progress=self,
        )

    def intend(self, order: Order, offer: Offer) -> None:
        """A create is about to go out: if this cannot be written down, it does not."""
        self._tried.add(offer.provider)
        if not self._ends_itself(offer):
            what = "a machine" if offer.ends_itself is None else offer.instance_type
            self._tell(
                f"{what} at {offer.provider} cannot end its own cost: if this client is killed, it is billed until "
                f"`skypool gc --yes` runs after its lease"
            )
        self._open[order.token] = offer.provider
        if self._ledger is not None:
            self._ledger.intend(self.session, order.token, offer, order.ranks)

    def asking(self, order: Order, ranks: Sequence[int]) -> None:
        """Note when the create of each rank was sent first: some providers bill it from then on."""
        asked = self._asked.setdefault(order.token, {})
        now = clock.now()
        for rank in ranks:
            asked.setdefault(rank, now)

    def made(self, order: Order, instances: Sequence[Instance]) -> None:
        """Write down machines of an order that is still under way: they cost something even if it comes to nothing."""
        self._made.setdefault(order.token, {}).update({(each.provider, each.id): each for each in instances})
        if self._ledger is not None:
            self._ledger.made(
                self.session,
                order.token,
                instances,
                asked=self._asked.get(order.token),
                waits=self._waits_of(instances),
            )

    def undone(self, order: Order, instances: Sequence[Instance]) -> None:
        """Write down that machines of an order that is under way have ended."""
        for each in instances:
            self._made.get(order.token, {}).pop((each.provider, each.id), None)
            self._end_line(each)

    def rented(self, order: Order, instances: Sequence[Instance]) -> None:
        """Write down that an order took effect. What it made and does not give back has ended."""
        self._there |= {(each.provider, each.id): each for each in instances}
        self._open.pop(order.token, None)
        asked = self._asked.pop(order.token, None)
        made = self._made.pop(order.token, {})
        if self._ledger is not None:
            self._ledger.rented(self.session, order.token, instances, asked=asked, waits=self._waits_of(instances))
        kept = {(each.provider, each.id) for each in instances}
        for each in (each for key, each in made.items() if key not in kept):
            self._end_line(each)

    def failed(self, order: Order) -> None:
        """End what is left of an order that is given up: its machines serve nobody, and they cost something."""
        asked = self._asked.pop(order.token, {})
        if order.token in self._open:
            self._lost[order.token] = self._open[order.token], time.monotonic()
            known = {each.rank for each in self._made.get(order.token, {}).values()}
            if self._ledger is not None and (rest := asked.keys() - known):
                self._ledger.sent(self.session, order.token, min(asked[rank] for rank in rest))
            self._end_lost()
        made = self._made.pop(order.token, {})
        unproved = self.end([*made.values()]) if made else {}
        for key, each in made.items():
            if each.rank in unproved:
                self._there[key] = each
                self._open[order.token] = each.provider

    def _end_lost(self) -> None:
        """Look for machines of orders that were given up without an answer, and end them; lists may lag for a while."""
        for token, (provider, at) in list(self._lost.items()):
            driver = next(each for each in self._terms.drivers if each.name == provider)
            try:
                found = retry.patiently(partial(driver.instances, pool=self._terms.name), _LISTING)
                there = [each for each in found if each.token == token]
            except Exception as e:  # noqa: BLE001 - it is looked for again, and at the pool's end at last
                self._tell(f"{provider} could not be asked for what an order without an answer made: {e}")
                continue
            if there and self._ledger is not None:
                waits = {provider} if self._waits_of(there) else set[str]()
                self._ledger.found(self.session, there, waits, since_request=False)
            if (there and not self.end(there)) or time.monotonic() - at > _LATE:
                del self._lost[token]

    def _waits_of(self, instances: Iterable[Instance]) -> bool:
        """Return True if the provider of these bills them only once they run."""
        return any(abilities(self.driver_of(each)).billed_from == "running" for each in instances)

    def runs(self, instance: Instance) -> None:
        """Note that an instance runs: some providers bill it from then on."""
        key = instance.provider, instance.id
        if key not in self._billed and self._waits_of([instance]):
            self._billed.add(key)
            if self._ledger is not None:
                self._ledger.billed(self.session, [instance])

    def refused(self, order: Order, error: Exception) -> None:
        """Write down that an order took no effect. What was asked for by it, and not made, was not asked for."""
        made = {each.rank for each in self._made.get(order.token, {}).values()}
        for rank in self._asked.get(order.token, {}).keys() - made:
            del self._asked[order.token][rank]
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
        self._reprice()
        self._end_lost()
        budget = self._terms.budget
        left = self._left()
        if budget is None:
            return left
        if left <= 0:
            raise BudgetExceeded(self._spent_words())
        if budget.warns(spent := self.receipt.usd):
            share = f"{budget.warn:.0%} of the budget of ${budget.max_usd:g}"
            self._tell(f"{share} is spent; all machines end when the rest is", f"${spent:.2f} so far")
        return left

    def _reprice(self) -> None:
        """Read the prices of spot machines again from time to time, as they move while machines run."""
        if self._ledger is None or time.monotonic() - self._priced < REPRICE:
            return
        self._priced = time.monotonic()
        for driver in self._terms.drivers:
            theirs = [each for each in self.receipt.lines if each.provider == driver.name and not each.ended]
            spot = [each for each in theirs if each.market == "spot"]
            if not spot:
                continue
            try:
                offers = list(driver.offers(replace(self._terms.need, market="spot", max_usd_per_hour=None)))
            except Exception as e:  # noqa: BLE001 - the prices are those read last then, and that is told
                self._tell(f"the spot prices of {driver.name} could not be read again; tried again soon", str(e))
                continue
            now = {
                (each.instance_type, each.zone or each.region): each.usd_per_hour / each.hosts
                for each in offers
                if each.market == "spot" and each.usd_per_hour > 0
            }
            moved = {
                (each.provider, each.id): now[each.type, each.place] for each in spot if (each.type, each.place) in now
            }
            self._ledger.repriced(self.session, moved)

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

    def end(
        self, instances: Sequence[Instance], silent: Mapping[int, float] | None = None
    ) -> Mapping[int, StillRunning]:
        """End these instances and prove it.

        Args:
            silent: seconds since the last sign of life of each rank that gave one. What was silent, and is not there
                any more, died then: its provider billed it no longer.

        Returns:
            What could not be proved, by rank.
        """
        errors: dict[int, StillRunning] = {}
        for driver in self._terms.drivers:
            ours = [each for each in instances if each.provider == driver.name]
            if not ours:
                continue
            self._settle(driver, ours, silent or {})
            try:
                end(driver, ours)
            except StillRunning as e:  # it is raised at the pool's end, with the instances still running
                left = {getattr(each, "id", "") for each in e.instances} or {each.id for each in ours}
                errors |= {each.rank: e for each in ours if each.id in left}
            for each in ours:
                if each.rank not in errors:
                    self.let_go(each)
        return errors

    def let_go(self, instance: Instance) -> None:
        """Count an instance as ended: that is proved, or it costs nothing and cannot be asked."""
        self._there.pop((instance.provider, instance.id), None)
        self._end_line(instance)

    def _settle(self, driver: Driver, instances: Sequence[Instance], silent: Mapping[int, float]) -> None:
        """Note which instances died before they are ended, and which run of those that were not billed yet."""
        now = clock.now()
        quiet = {each.id: silent[each.rank] for each in instances if silent.get(each.rank, 0.0) > _QUIET}
        unbilled = [each for each in instances if (each.provider, each.id) not in self._billed]
        if self._ledger is None or not (quiet or self._waits_of(unbilled)):
            return
        try:
            found = retry.patiently(partial(driver.instances, pool=self._terms.name), _LISTING)
            there = {each.id: each for each in found if each.state != "ended"}
        except Exception as e:  # noqa: BLE001 - they are ended all the same, and counted until then
            self._tell(f"{driver.name} could not be asked what of its machines still runs before they end: {e}")
            return
        for each in unbilled:
            if each.id in there and there[each.id].state != "starting":
                self.runs(there[each.id])
        for id_, seconds in quiet.items():
            if id_ not in there:
                self._ledger.ended(self.session, driver.name, id_, at=now - seconds)

    def _end_line(self, instance: Instance) -> None:
        if self._ledger is not None:
            self._ledger.ended(self.session, instance.provider, instance.id)

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
