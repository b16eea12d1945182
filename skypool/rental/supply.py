"""`Supply`: the part of a pool that needs an account of a provider: it plans, rents, renews and terminates machines.

A pool without it only records its machines in `Rental`. It can neither rent machines nor prove that they have ended.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import cast

from skypool.drivers.contract import Driver, Learns, Renews, Tidies, abilities
from skypool.errors import CapacityError, ProviderError, SkypoolError, together
from skypool.model import Instance, Offer, Order
from skypool.offers.ranking import Plan
from skypool.rental import reaper, reaper_process
from skypool.rental.launch import Attempts, Launcher, Rented, place
from skypool.rental.machine_ends import Endings, driver_of, ends_itself, waits_of
from skypool.rental.orders import LATE, Orders
from skypool.rental.planning import Pause, Planning
from skypool.rental.pool_account import Rental
from skypool.rental.pool_terms import Terms
from skypool.rental.records import Record
from skypool.wire.keys import Keys

_BOOT = 120.0
"""Seconds that are added to the lease for the expiry time in a machine's tag, as a new machine must boot first."""
REPRICE = 600.0
"""Seconds after which the prices of spot machines are read again."""
_TO_SHOW = 30.0
"""Seconds within which a provider must list tags as they were written."""
_LOOK = 5.0
"""Seconds between two looks for machines of orders without an answer."""


class Supply:
    """The providers of one pool, with the credentials of their drivers. It reports to `rental` what they did.

    Any thread may call the methods. Methods that are not `async` may block. When the event `stopping` is set, nothing
    more is rented.

    Attributes:
        rental: the account of the pool.
        drivers: the drivers of the providers.
        attempts: offers that were refused, each with its error.
        orders: the orders of the pool.
        terminate: `Endings.terminate`: terminates instances, proves that they ended, and returns the errors of others.
        terminate_lost: `Orders.terminate_lost`: looks for machines of orders without an answer, and terminates them.
    """

    def __init__(
        self, drivers: Sequence[Driver], terms: Terms, rental: Rental, stopping: threading.Event | None = None
    ) -> None:
        self.drivers = drivers
        self._terms = terms
        self.rental = rental
        self.stopping = stopping or threading.Event()
        self.attempts: Attempts = []
        self._numbers = itertools.count()
        self._series = rental.session
        self._priced = time.monotonic()
        self._renewing = threading.Lock()
        self._needed_until: datetime | None = None  # the end of a run that is handed over
        endings = Endings(drivers, rental)
        self.orders = Orders(drivers, rental, endings)
        self.terminate = endings.terminate
        self.terminate_lost = self.orders.terminate_lost
        self._planning = Planning(drivers, terms, rental.limits, rental.tell, self.stopping)
        self._launcher = Launcher(
            drivers=drivers,
            order=self._order,
            book=self.orders,
            attempts=self.attempts,
            stopping=self.stopping,
            lacking=self._planning.lacking,
            together=terms.need.private_network,
        )

    def driver_of(self, instance: Instance) -> Driver:
        """Return the driver of the provider that an instance is rented from. Raises StopIteration if there is none."""
        return driver_of(self.drivers, instance.provider)

    # --- before anything is rented ---------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The last plan; None before the first, and after machines were out of stock, until a new one is made."""
        return self._planning.plan

    async def look(self) -> Plan:
        """Return the plan: the offers on which machines would be rented now, in the order in which they are tried.

        A plan that is at most 5 minutes old is returned again.

        Raises:
            NoOffers: no offer meets the requirements.
            PoolClosed: the pool is stopped.
            UsageError: offers meet the requirements, but none of them can keep the budget.
            ProviderError: the pool's only provider could not be asked.
        """
        return await self._planning.look()

    async def look_out(self, pause: Pause) -> Plan:
        """Return the plan: the offers on which machines would be rented now, in the order in which they are tried.

        While machines are out of stock, try again until the pool's `wait` time is over.
        `pause` is called with the seconds to sleep between two attempts.

        Raises:
            NoOffers: no offer meets the requirements. Raised at once if waiting cannot help.
            PoolClosed: the pool is stopped.
            UsageError: offers meet the requirements, but none of them can keep the budget.
            ProviderError: the pool's only provider could not be asked. Raised at once, unless the pool has begun to
                wait and the error may pass by itself.
        """
        plan: Plan = await self._planning.waiting(pause)(self.look)
        return plan

    def begin(self, minimum: int | None = None) -> None:
        """Record the pool in the ledger. Call this after a plan was made.

        `minimum` is the number of nodes (or slices) with which the pool starts; None for that of its arguments.

        Raises:
            UsageError: a pool of this name is running, or its machines may still run.
            BudgetExceeded: the first 20 minutes of the nodes cost more than the budget, or than the ceiling leaves.
            LedgerError: the ledger cannot be written.
        """
        costs = self.plan is None or any(each.usd_per_hour for each in self.plan.offers)
        check = partial(self.check_budget, self._terms.minimum if minimum is None else minimum)
        self.rental.begin(self.drivers, costs, check)

    def check_budget(self, more: int) -> None:
        """Raise BudgetExceeded if there is a budget, and starting `more` machines costs more than is left."""
        if more > 0 and self.plan is not None and self.plan.best is not None:
            self.rental.limits.check_start([self.plan.best] * more)

    def adopt(self) -> list[Instance]:
        """Take over the instances of the pool of this name that another process left, and return them.

        If this pool was made without a budget, it gets the budget that the ledger has for it. If the ledger has a
        shorter lifetime for it, that lifetime counts.

        Raises:
            SkypoolError: no provider has instances of the pool, or a provider could not be asked.
            UsageError: another process still runs the pool or is ending it.
            LedgerError: the ledger cannot be written.
        """
        name, rental = self._terms.name, self.rental
        found = [i for d in self.drivers for i in d.instances(pool=name)]
        if not found:
            raise SkypoolError(
                f"no machines of a pool called {name!r} run at "
                f"{', '.join(d.name for d in self.drivers)}; `skypool ps` lists the running pools"
            )
        self.orders.tried |= {each.provider for each in found}
        self._priced = -math.inf
        rental.adopt(found)
        if rental.ledger is not None:
            waits = {d.name for d in self.drivers if abilities(d).billed_from == "running"}
            rental.ledger.found(rental.session, found, waits)
        return found

    def give_back(self) -> Record | None:
        """Undo `adopt`: the machines end when they would have ended without it. Return the pool's record before that.

        Returns None if the ledger does not have the pool. Raises SkypoolError if the machines stay after a `with`
        block, and the process that ends them after that could not be started again.
        """
        record = self.rental.give_back()
        if record is not None and record.is_staying:
            reaper_process.terminate_in_background(self.drivers, record.pool, record.session, staying=True)
        return record

    # --- renting ---------------------------------------------------------------------------------------------

    async def rent(
        self, nodes: Sequence[int], hosts: int | None, pause: Pause, wanted: Callable[[int], bool] = lambda _: True
    ) -> Rented:
        """Rent a machine for each of these nodes, on the best offers of the plan that are in stock.

        If too few machines are in stock, another attempt is made, until the pool's `wait` time is over. The machines of
        the earlier attempt are terminated first, so that they cost nothing during the wait. If the end of a machine is
        not proved, that machine is returned, and there is no other attempt. The machines of the last attempt are kept,
        even if they are too few. Raises NoOffers, PoolClosed, UsageError or ProviderError if there is no plan.

        Args:
            nodes: node numbers; for a slice, the node number of its first host.
            hosts: use only offers with this many hosts (1, or the size of a slice); None for any.
            pause: function that sleeps between two attempts. It is called with the number of seconds.
            wanted: called with a node number before each attempt. If it returns False, no machine is rented for that
                node any more.

        Returns:
            The instances, and an error if fewer were rented than asked for.
        """
        until = time.monotonic() + self._terms.wait

        async def once() -> Rented:
            left = [node for node in nodes if wanted(node)]
            if not left:
                return Rented(())
            plan = await self.look()
            offers = [each for each in plan.offers if hosts in (None, each.hosts)]
            rented = await asyncio.to_thread(self._launcher.launch, offers, left)
            if not rented.instances or not self._planning.is_short(rented.error) or time.monotonic() >= until:
                return rented
            unproved = await asyncio.to_thread(self.terminate, rented.instances)
            return Rented(tuple(each for each in rented.instances if each.node in unproved), rented.error)

        rented: Rented = await self._planning.waiting(pause)(once)
        return rented

    def _order(self, offer: Offer, nodes: tuple[int, ...]) -> Order:
        terms, rental = self._terms, self.rental
        lifetime = rental.limits.life_of([offer] * (len(nodes) // offer.hosts), terms.lease)
        return Order(
            pool=terms.name,
            token=f"{self._series}-{next(self._numbers)}",
            nodes=nodes,
            need=terms.need,
            lease=terms.lease,
            lifetime=lifetime,
            until=_from_now(terms.lease + _BOOT),
            max_usd_per_hour=rental.highest_price(offer),
            progress=self.orders,
        )

    def runs(self, instance: Instance) -> None:
        """Record that an instance runs. If its provider bills machines from the moment they run, its cost begins now.

        Only the first call for an instance has an effect.
        """
        if waits_of(self.drivers, [instance]):
            self.rental.billed([instance])

    def rejected(self, instance: Instance, why: Exception) -> None:
        """Note that an instance was given up before it was a ready node, so that its driver may avoid such machines.

        After a CapacityError, such machines in the same place are skipped until the next plan. The instance is not
        terminated. A failure of the driver is told to the user, and not raised.
        """
        if isinstance(why, CapacityError) and instance.offer is not None:
            self._planning.lacking[place(instance.offer)] = why
        driver = self.driver_of(instance)
        if isinstance(driver, Learns):
            try:
                driver.rejected(instance, why)
            except Exception as e:  # noqa: BLE001 - a failed note must not stop the rest
                self.rental.tell(
                    f"the driver {driver.name} could not record that a machine failed, and may rent it again: {e}"
                )

    # --- while the pool runs ---------------------------------------------------------------------------------

    def renew(self) -> None:
        """Renew the pool's lease in the tags of its machines. Errors of a provider are told to the user."""
        for name, error in self._renewed(self._terms.lease):
            self.rental.tell(
                f"the lease in the tags of the machines of {name} could not be renewed; this is tried again soon: "
                f"{error}"
            )

    def renew_to(self, until: float) -> None:
        """Write into the tags of the machines that they are needed until this time, in seconds since 1970.

        Later renewals of the lease by this process write the same time. Blocks until the providers list it, for 30 s at
        most.

        Raises:
            SkypoolError, ErrorGroup: a provider did not take it, or does not list it for each machine.
        """
        with self._renewing:
            self._needed_until = datetime.fromtimestamp(math.ceil(until), UTC)
        errors = [error for _, error in self._renewed(0.0)]
        if not errors:
            errors = [each for each in map(self._too_short, self._renewers) if each is not None]
        if errors:
            raise together(
                f"the tags of the machines of pool {self._terms.name!r} could not be renewed to the end of its run",
                errors,
            )

    @property
    def _renewers(self) -> list[Driver]:
        """The drivers that may have machines of the pool, and can renew their tags."""
        return [each for each in self.drivers if each.name in self.orders.tried and isinstance(each, Renews)]

    def _too_short(self, driver: Driver) -> Exception | None:
        """Wait until a provider lists each machine with the end of the run. Return the error if it does not."""
        assert self._needed_until is not None
        tried_until = time.monotonic() + _TO_SHOW
        while True:
            try:
                found = driver.instances(pool=self._terms.name)
            except Exception as e:  # noqa: BLE001 - the caller raises it
                return e
            long = {each.id for each in found if each.until is not None and each.until >= self._needed_until}
            short = [each.id for each in self.rental.there if each.provider == driver.name and each.id not in long]
            if not short:
                return None
            if time.monotonic() >= tried_until:
                return ProviderError(
                    f"{driver.name} does not list {', '.join(short)} as needed until "
                    f"{self._needed_until:%H:%M:%S} UTC, which was written into their tags",
                    provider=driver.name,
                )
            time.sleep(0.5)

    def _renewed(self, seconds: float) -> Iterator[tuple[str, Exception]]:
        """Renew the tags: the machines are needed for `seconds` more. Yield (provider, error) for each that failed.

        Machines of a run that is handed over are needed until its end.
        """
        for driver in self._renewers:
            try:
                with self._renewing:
                    cast(Renews, driver).renew(self._terms.name, self._needed_until or _from_now(seconds + _BOOT))
            except Exception as e:  # noqa: BLE001 - the caller tells the user
                yield driver.name, e

    def new_prices(self) -> Mapping[tuple[str, str], float]:
        """Return the current prices of spot machines by (provider, id), in US dollars per hour.

        Providers are asked at most once in 600 s; the result is empty in between. If one cannot be asked, the user is
        told, and its prices are missing.
        """
        if self.rental.ledger is None or time.monotonic() - self._priced < REPRICE:
            return {}
        self._priced = time.monotonic()
        lines = [each for each in self.rental.receipt.lines if each.market == "spot" and not each.ended]
        prices: dict[tuple[str, str], float] = {}
        for driver in self.drivers:
            spot = [each for each in lines if each.provider == driver.name]
            if not spot:
                continue
            try:
                offers = list(driver.offers(replace(self._terms.need, market="spot", max_usd_per_hour=None)))
            except Exception as e:  # noqa: BLE001 - the prices read last stay valid, and the user is told
                self.rental.tell(
                    f"new spot prices of {driver.name} could not be read; the last known prices are used", str(e)
                )
                continue
            now = {
                (each.instance_type, each.zone or each.region): each.usd_per_hour / each.hosts
                for each in offers
                if each.market == "spot" and each.usd_per_hour > 0
            }
            prices |= {
                (each.provider, each.id): now[each.type, each.place] for each in spot if (each.type, each.place) in now
            }
        return prices

    def ends_itself(self, instance: Instance) -> bool:
        """Return True if an instance ends itself, and is no longer billed, when its lease is over."""
        if instance.offer is not None:
            return ends_itself(self.drivers, instance.offer)
        return abilities(self.driver_of(instance)).ends_itself

    def is_gone(self, instance: Instance) -> bool:
        """Return True if the provider says that an instance is ending or has ended, or does not list it.

        Raises what the driver raises.
        """
        found = self.driver_of(instance).instances(pool=instance.pool)
        return {each.id: each.state for each in found}.get(instance.id, "ended") in ("ending", "ended")

    def end_lost(self) -> None:
        """Look for machines of orders without an answer until none may come any more, and terminate them.

        Blocks until 120 s after the last such order. Raises ProviderError if the provider did not list its machines.
        """
        until = time.monotonic() + LATE
        while self.orders.has_lost:
            self.terminate_lost()
            if not self.orders.has_lost:
                return
            if time.monotonic() >= until + _LOOK:
                raise ProviderError(
                    f"{', '.join(sorted(self.orders.unclear))} did not answer an order, and does not say if there is a "
                    f"machine of it, which nobody would end; `skypool gc` shows it later"
                )
            time.sleep(_LOOK)

    # --- the end ---------------------------------------------------------------------------------------------

    def close(self, error: BaseException | None, *, proved: bool) -> None:
        """Remove resources that the pool still has at its providers, and close the pool's record in the ledger.

        Call this after all known instances were terminated. This removes machines that open orders may have made,
        leftovers such as key pairs, and the pool's local ssh keys. `proved` is True if the end of each known instance
        is proved; if it is False, nothing is done.

        Raises:
            StillRunning, ErrorGroup: a machine or another resource is left. The record in the ledger then stays open.
        """
        if not proved:
            return
        unclear, tried = self.orders.unclear, self.orders.tried
        asked = [
            driver
            for driver in self.drivers
            if driver.name in unclear or (driver.name in tried and isinstance(driver, Tidies))
        ]
        if asked:
            reaper.terminate_all(asked, self._terms.name, self.rental.ledger, self.rental.session)
        self.rental.end(error)
        Keys.of(self._terms.name).forget()

    def terminate_in_background(self) -> str:
        """Start a process that terminates everything of this pool, and return a notice for the user with its pid.

        The new process has begun its work then, and goes on if this one ends. Raises SkypoolError if it could not be
        started.
        """
        name = self._terms.name
        pid = reaper_process.terminate_in_background(self.drivers, name, self.rental.session)
        return f"process {pid} goes on ending the machines of pool {name!r}; `skypool ps` shows when it has finished"

    def leave(self, seconds: float) -> tuple[float, str]:
        """Record that this process leaves the pool, whose machines stay. Start a process that ends them afterwards.

        Blocks. The nodes are not told. The machines stay for `seconds`, or less if the budget or the lifetime ends
        before.

        Returns:
            (the seconds for which they stay, a notice for the user).

        Raises:
            SkypoolError: the process could not be started, or the ledger does not have the pool.
        """
        name, rental = self._terms.name, self.rental
        if rental.ledger is None:
            raise SkypoolError(f"the ledger does not have pool {name!r}, so its machines cannot stay: they end now")
        receipt = rental.receipt
        lines = [each for each in receipt.lines if not each.ended]
        seconds = max(0.0, min(seconds, rental.limits.left(), rental.limits.lifetime_left))
        for provider, error in self._renewed(seconds):  # the machines stay all the same, and `gc` may end them earlier
            rental.tell(f"the tags of the machines of {provider} could not be renewed: {error}")
        until = time.time() + seconds
        rental.ledger.leave(rental.session, until)
        reaper_process.terminate_in_background(self.drivers, name, rental.session, staying=True)
        clock_time = time.strftime("%H:%M:%S", time.localtime(until))
        rate = f", at {receipt.usd_per_hour:.4f} USD/h" if receipt.usd_per_hour else ""
        machines = "1 machine stays" if len(lines) == 1 else f"{len(lines)} machines stay"
        return seconds, (
            f"{machines} until {clock_time} (linger){rate}: ComputePool.attach({name!r}) takes over what is there, and "
            f"`skypool down {name}` ends it earlier"
        )


def _from_now(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)
