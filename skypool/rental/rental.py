"""Rents and terminates the machines of one pool, and keeps their tags and the ledger current."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from skypool import clock, events
from skypool.drivers.contract import Driver, Learns, Renews, Tidies, abilities
from skypool.errors import (
    CapacityError,
    LedgerError,
    PoolClosed,
    SkypoolError,
    StillRunning,
    TakenOver,
)
from skypool.model import Instance, Offer, Order
from skypool.offers.ranking import Plan
from skypool.rental import reaper, reaper_process
from skypool.rental.budget import Enforcement
from skypool.rental.holdings import Holdings, OrderKey
from skypool.rental.launch import Attempts, Launcher, Rented, place
from skypool.rental.ledger import Ledger
from skypool.rental.planning import Pause, Planning
from skypool.rental.receipt import IdleSpan, Receipt
from skypool.rental.records import Record
from skypool.rental.request import Terms
from skypool.wire.blame import cut
from skypool.wire.keys import Keys

_BOOT = 120.0
"""Seconds that are added to the lease for the expiry time in a machine's tag, as a new machine must boot first."""
REPRICE = 600.0
"""Seconds after which the prices of spot machines are read again."""


class Rental:
    """The rented instances of one pool, and their cost.

    Any thread may call the methods. Methods that are not `async` may block. When the event `stopping` is set, nothing
    more is rented.

    Attributes:
        before_prices: called before new prices are recorded. It records the idle time until then at the old prices.
        attempts: offers that were refused, each with its error.
        limits: holds the pool to its budget and lifetime.
    """

    def __init__(
        self, terms: Terms, emit: Callable[[events.Event], None], stopping: threading.Event | None = None
    ) -> None:
        self._terms = terms
        self._emit = emit
        self.stopping = stopping or threading.Event()
        self.attempts: Attempts = []
        self.before_prices: Callable[[], None] = lambda: None
        self._numbers = itertools.count()
        self._priced = time.monotonic()
        self._adopted: Record | None = None  # the record of a pool before this process took it over
        self._told: set[str] = set()
        self._holdings = Holdings(terms, self.tell)
        self.limits = Enforcement(terms.name, terms.budget, terms.lifetime, lambda: self._holdings.receipt, self.tell)
        self._planning = Planning(terms, self.limits, self.tell, self.stopping)
        self._series = self._holdings.session
        self._launcher = Launcher(
            drivers=terms.drivers,
            order=self._order,
            book=self._holdings,
            attempts=self.attempts,
            stopping=self.stopping,
            lacking=self._planning.lacking,
            together=terms.need.private_network,
        )

    # --- the current state -----------------------------------------------------------------------------------

    @property
    def session(self) -> str:
        """The id of this run of the pool in the ledger."""
        return self._holdings.session

    @property
    def plan(self) -> Plan | None:
        """The last plan; None before the first, and after machines were out of stock, until a new one is made."""
        return self._planning.plan

    @property
    def there(self) -> list[Instance]:
        """The instances that the pool rented or took over, except those proved to have ended. The list is a copy."""
        return self._holdings.there

    @property
    def receipt(self) -> Receipt:
        """The cost of each instance, until its end or until now. It has no lines without a record in the ledger."""
        return self._holdings.receipt

    @property
    def known_receipt(self) -> Receipt | None:
        """The receipt; None if the ledger cannot be read."""
        try:
            return self.receipt
        except LedgerError:
            return None

    @property
    def orders(self) -> dict[OrderKey, int]:
        """The number of orders by provider, machine type and outcome. The dict is a copy."""
        return self._holdings.orders.copy()

    def driver_of(self, instance: Instance) -> Driver:
        """Return the driver of the provider that an instance is rented from. Raises StopIteration if there is none."""
        return self._holdings.driver_of(instance)

    # --- before anything is rented ---------------------------------------------------------------------------

    async def look(self) -> Plan:
        """Return the plan: the offers on which machines would be rented now, in the order in which they are tried.

        A plan that is at most 5 minutes old is returned again. Raises as `Planning.look`.
        """
        return await self._planning.look()

    async def look_out(self, pause: Pause) -> Plan:
        """Return the plan as `look` does. While machines are out of stock, try again for the pool's `wait` time.

        `pause` sleeps between two attempts; it gets the seconds. Raises as `Planning.look`. NoOffers is raised at once
        if waiting cannot help. ProviderError is raised at once, unless the pool has begun to wait and the error may
        pass by itself.
        """
        plan: Plan = await self._planning.waiting(pause)(self.look)
        return plan

    def begin(self, minimum: int | None = None) -> None:
        """Record the pool in the ledger. Call this after a plan was made.

        `minimum` is the number of nodes (or slices) with which the pool starts; None for that of its arguments.

        Raises:
            UsageError: a pool of this name is running, or its machines may still run.
            BudgetExceeded: the nodes with which the pool starts cost more in their first hour than the budget.
            LedgerError: the ledger cannot be written.
        """
        terms = self._terms
        self.check_budget(terms.minimum if minimum is None else minimum)
        ledger = Ledger.here(self.tell)
        ledger.begin(
            terms.name,
            self.session,
            lease=terms.lease,
            budget=terms.budget,
            lifetime=terms.lifetime,
            drivers=terms.drivers,
        )
        self._holdings.record_in(ledger, self.session)

    def check_budget(self, more: int) -> None:
        """Raise BudgetExceeded if there is a budget, and the first hour of `more` machines costs more than is left."""
        if more > 0 and self.plan is not None and self.plan.best is not None:
            self.limits.check_first_hour([self.plan.best] * more)

    def adopt(self) -> list[Instance]:
        """Take over the instances of the pool of this name that another process left, and return them.

        If this pool was made without a budget, it gets the budget that the ledger has for it. If the ledger has a
        shorter lifetime for it, that lifetime counts. If the ledger on this computer does not have the pool, the pool
        is taken over all the same, but its costs are not recorded.

        Raises:
            SkypoolError: no provider has instances of the pool, or a provider could not be asked.
            UsageError: another process still runs the pool or is ending it.
            LedgerError: the ledger cannot be written.
        """
        name = self._terms.name
        found = [i for d in self._terms.drivers for i in d.instances(pool=name)]
        if not found:
            raise SkypoolError(
                f"no machines of a pool called {name!r} run at "
                f"{', '.join(d.name for d in self._terms.drivers)}; `skypool ps` lists the running pools"
            )
        self._holdings.take_over(found)
        self._priced = -math.inf
        ledger = Ledger.here(self.tell)
        known = self._adopted = ledger.adopt(name, lease=self._terms.lease)
        if known is not None:  # None if the pool is in the ledger of another machine
            self._holdings.record_in(ledger, known.session)
            lifetime = min(self.limits.lifetime or math.inf, known.lifetime or math.inf)
            self.limits.lifetime = None if lifetime == math.inf else lifetime
            self.limits.budget = self.limits.budget or known.budget
            waits = {d.name for d in self._terms.drivers if abilities(d).billed_from == "running"}
            ledger.found(self.session, found, waits)
        else:
            self.limits.billed_since = min(clock.now(), *(each.billed_from or math.inf for each in found))
        return found

    def give_back(self) -> float | None:
        """Undo `adopt`: the machines end when they would have ended without it. Return the seconds until then.

        Returns None if the ledger does not have the pool. Raises SkypoolError if the machines stay after a `with`
        block, and the process that ends them after that could not be started again.
        """
        record, ledger = self._adopted, self._holdings.ledger
        if record is None or ledger is None:
            return None
        ledger.give_back(record)
        if record.is_staying:
            reaper_process.terminate_in_background(self._terms.drivers, record.pool, record.session, staying=True)
        return max(0.0, record.lasts - time.time())

    # --- renting ---------------------------------------------------------------------------------------------

    async def rent(
        self, nodes: Sequence[int], hosts: int | None, pause: Pause, wanted: Callable[[int], bool] = lambda _: True
    ) -> Rented:
        """Rent a machine for each of these nodes, on the best offers of the plan that are in stock.

        If too few machines are in stock, another attempt is made, until the pool's `wait` time is over. The machines of
        the earlier attempt are terminated first, so that they cost nothing during the wait. If the end of a machine is
        not proved, that machine is returned, and there is no other attempt. The machines of the last attempt are kept,
        even if they are too few. Raises as `Planning.look`.

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
        terms = self._terms
        lifetime = self.limits.life_of([offer] * (len(nodes) // offer.hosts), terms.lease)
        caps = [terms.need.max_usd_per_hour or None, self.limits.highest_price(offer)]
        return Order(
            pool=terms.name,
            token=f"{self._series}-{next(self._numbers)}",
            nodes=nodes,
            need=terms.need,
            lease=terms.lease,
            lifetime=lifetime,
            until=_from_now(terms.lease + _BOOT),
            max_usd_per_hour=min((each for each in caps if each is not None), default=None),
            progress=self._holdings,
        )

    def rejected(self, instance: Instance, why: Exception) -> None:
        """Note that an instance was given up before it was ready, so that its driver may avoid such machines.

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
                self.tell(
                    f"the driver {driver.name} could not record that a machine failed, and may rent it again: {e}"
                )

    # --- while the pool runs ---------------------------------------------------------------------------------

    @property
    def pulse(self) -> float:
        """Recommended seconds between two calls of `tend`: a third of the lease, but at most 60."""
        return min(self._terms.lease / 3, 60.0)

    def tend(self) -> None:
        """Renew the pool's lease in the ledger and in its machines' tags, and update prices. Blocks.

        Errors of a provider are shown to the user, and not raised.

        Raises:
            PoolClosed: another process has begun to end the pool.
            TakenOver: another process has taken the pool over.
        """
        name = self._terms.name
        if self._holdings.ledger is not None:
            self._holdings.ledger.beat(self.session)
        self.check_owner()
        for driver in self._terms.drivers:
            if driver.name in self._holdings.tried and isinstance(driver, Renews):
                try:
                    driver.renew(name, _from_now(self._terms.lease + _BOOT))
                except Exception as e:  # noqa: BLE001 - the user is told, and it is tried again
                    self.tell(
                        f"the lease in the tags of the machines of {driver.name} could not be renewed; this is tried "
                        f"again soon: {e}"
                    )
        self._reprice()
        self._holdings.terminate_lost()

    def check_owner(self) -> None:
        """Raise an error if the pool is no longer this process's. Do nothing if the ledger cannot tell. Blocks.

        Raises:
            PoolClosed: another process has begun to end the pool.
            TakenOver: another process has taken the pool over.
        """
        name, ledger = self._terms.name, self._holdings.ledger
        is_ending, owner = ledger.standing(self.session) if ledger is not None else (False, None)
        if is_ending:
            raise PoolClosed(
                f"pool {name!r} was ended by another process, as `skypool down {name}` does; make a new ComputePool"
            )
        if owner is not None:
            raise TakenOver(
                f"pool {self._terms.name!r} was taken over by {owner} with ComputePool.attach; go on there, and end "
                "this process"
            )

    def _reprice(self) -> None:
        """Record current spot prices, at most once in 600 s. If a provider cannot be asked, old prices stay valid."""
        ledger = self._holdings.ledger
        if ledger is None or time.monotonic() - self._priced < REPRICE:
            return
        self._priced = time.monotonic()
        for driver in self._terms.drivers:
            theirs = [each for each in self.receipt.lines if each.provider == driver.name and not each.ended]
            spot = [each for each in theirs if each.market == "spot"]
            if not spot:
                continue
            try:
                offers = list(driver.offers(replace(self._terms.need, market="spot", max_usd_per_hour=None)))
            except Exception as e:  # noqa: BLE001 - the prices read last stay valid, and the user is told
                self.tell(f"new spot prices of {driver.name} could not be read; the last known prices are used", str(e))
                continue
            now = {
                (each.instance_type, each.zone or each.region): each.usd_per_hour / each.hosts
                for each in offers
                if each.market == "spot" and each.usd_per_hour > 0
            }
            moved = {
                (each.provider, each.id): now[each.type, each.place] for each in spot if (each.type, each.place) in now
            }
            self.before_prices()
            ledger.repriced(self.session, moved)

    def idle(self, spans: Mapping[tuple[str, str], IdleSpan]) -> None:
        """Record in the ledger, if there is one, how long instances were idle, by (provider, id). Does not raise."""
        if self._holdings.ledger is not None:
            self._holdings.ledger.idle(self.session, spans)

    def runs(self, instance: Instance) -> None:
        """Record that an instance runs. See `Holdings.runs`."""
        self._holdings.runs(instance)

    # --- the end ---------------------------------------------------------------------------------------------

    def terminate(
        self, instances: Sequence[Instance], silent: Mapping[int, float] | None = None
    ) -> Mapping[int, StillRunning]:
        """Terminate instances and prove that they ended. Blocks. See `Holdings.terminate`."""
        return self._holdings.terminate(instances, silent)

    def note_ended(self, instance: Instance) -> None:
        """Record that an instance has ended. See `Holdings.note_ended`."""
        self._holdings.note_ended(instance)

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
        ledger = self._holdings.ledger
        unclear = self._holdings.unclear
        tried = self._holdings.tried
        asked = [
            driver
            for driver in self._terms.drivers
            if driver.name in unclear or (driver.name in tried and isinstance(driver, Tidies))
        ]
        if asked:
            reaper.terminate_all(asked, self._terms.name, ledger, self.session)
        if ledger is not None:
            ledger.end(self.session, "" if error is None else cut(str(error)))
        Keys.of(self._terms.name).forget()

    def terminate_in_background(self) -> str:
        """Start a process that terminates everything of this pool, and return a notice for the user with its pid.

        The new process has begun its work then, and goes on if this one ends. Raises SkypoolError if it could not be
        started.
        """
        name = self._terms.name
        pid = reaper_process.terminate_in_background(self._terms.drivers, name, self.session)
        return f"process {pid} goes on ending the machines of pool {name!r}; `skypool ps` shows when it has finished"

    def leave(self, seconds: float) -> tuple[float, str]:
        """Record that this process leaves the pool, whose machines stay. Start a process that ends them afterwards.

        Blocks. The nodes are not told. The machines stay for `seconds`, or less if budget or lifetime end before.
        Returns that time in seconds, and a notice for the user. Raises SkypoolError if the process could not be
        started, or the ledger does not have the pool.
        """
        name, ledger = self._terms.name, self._holdings.ledger
        if ledger is None:
            raise SkypoolError(f"the ledger does not have pool {name!r}, so its machines cannot stay: they end now")
        receipt = self.receipt
        lines = [each for each in receipt.lines if not each.ended]
        seconds = max(0.0, min(seconds, self.limits.left(), self.limits.lifetime_left))
        for driver in self._terms.drivers:
            if driver.name in self._holdings.tried and isinstance(driver, Renews):
                try:
                    driver.renew(name, _from_now(seconds + _BOOT))
                except Exception as e:  # noqa: BLE001 - the machines stay all the same, and `gc` may end them earlier
                    self.tell(f"the tags of the machines of {driver.name} could not be renewed: {e}")
        until = time.time() + seconds
        ledger.leave(self.session, until)
        reaper_process.terminate_in_background(self._terms.drivers, name, self.session, staying=True)
        clock_time = time.strftime("%H:%M:%S", time.localtime(until))
        rate = f", at {receipt.usd_per_hour:.4f} USD/h" if receipt.usd_per_hour else ""
        machines = "1 machine stays" if len(lines) == 1 else f"{len(lines)} machines stay"
        return seconds, (
            f"{machines} until {clock_time} (linger){rate}: ComputePool.attach({name!r}) takes over what is there, and "
            f"`skypool down {name}` ends it earlier"
        )

    # --- notices for the user --------------------------------------------------------------------------------

    def tell(self, text: str, detail: str = "") -> None:
        """Show the user a notice. Do nothing if the same `text` was shown before, even with another `detail`."""
        if text not in self._told:
            self._told.add(text)
            self._emit(events.Notice(pool=self._terms.name, text=f"{text} ({detail})" if detail else text))


def _from_now(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)
