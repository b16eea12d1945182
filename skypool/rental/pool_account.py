"""`Rental`: the account of one pool. It knows which machines the pool has and what they cost, and asks no provider."""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from skypool import clock, events
from skypool.drivers.contract import Driver
from skypool.errors import BudgetExceeded, LedgerError, PoolClosed, TakenOver
from skypool.model import Instance, Offer
from skypool.rental.budget import CEILING, Budget, Enforcement, ceiling, highest_price, lowered, repriced, worst_bill
from skypool.rental.handover import Handover
from skypool.rental.ledger import Ledger
from skypool.rental.pool_terms import Terms
from skypool.rental.receipt import IdleSpan, Line, Receipt
from skypool.rental.records import Record
from skypool.wire.error_text import cut

_Key = tuple[str, str]
"""The provider and the id of a machine."""


def _key(instance: Instance) -> _Key:
    return instance.provider, instance.id


class Rental:
    """The machines of one pool, its record in the ledger, and its limits. Any thread may call the methods, which block.

    Before the pool begins, there is no ledger, and nothing is written to disk. When machines exist, no error is
    raised if the ledger cannot be written.

    Attributes:
        pool: the name of the pool.
        session: the id of this run of the pool in the ledger.
        ledger: None before the pool begins, and for a pool that was taken over and is not in the ledger.
        limits: holds the pool to its budget and lifetime.
    """

    def __init__(self, terms: Terms, emit: Callable[[events.Event], None]) -> None:
        self._terms = terms
        self._emit = emit
        self._told: set[str] = set()
        self._later = threading.local()  # `notices`: those of a thread that are shown after its block
        self._there: dict[_Key, Instance] = {}  # machines whose end is not proved
        self._end_themselves: set[_Key] = set()  # machines that were handed over, and end when their lease is over
        self._adopted: Record | None = None  # the record of a pool before this process took it over
        self._billed: set[_Key] = set()  # machines that are known to run at a provider that bills them from then on
        self.pool = terms.name
        self.session = secrets.token_hex(8)
        self.ledger: Ledger | None = None
        # `begin` may lower it again; a pool that is taken over has its budget in the ledger
        budget = terms.budget if terms.attach else lowered(terms.budget, ceiling())
        self.limits = Enforcement(terms.name, budget, terms.lifetime, lambda: self.receipt, self.tell)

    @property
    def there(self) -> list[Instance]:
        """The instances that the pool rented or took over, except those proved to have ended. The list is a copy."""
        return list(self._there.values())

    @property
    def receipt(self) -> Receipt:
        """The cost of each instance, until its end or until now. It has no lines without a record in the ledger."""
        if self.ledger is None:
            return Receipt(self.pool, (), time.time())
        return self.ledger.receipt(self.session)

    @property
    def known_receipt(self) -> Receipt | None:
        """The receipt; None if the ledger cannot be read."""
        try:
            return self.receipt
        except LedgerError:
            return None

    # --- begin and end ---------------------------------------------------------------------------------------

    def begin(self, drivers: Sequence[Driver], costs: bool = True, check: Callable[[], None] = lambda: None) -> None:
        """Record the pool in the ledger, with the settings of these drivers. Call this before anything is rented.

        If the pool costs money, its budget is lowered to what the ceiling leaves of what other pools may still cost.

        Args:
            costs: False if all machines of the pool are free.
            check: called when the budget is known, while no other pool can begin. What it raises is raised here, and
                nothing is recorded.

        Raises:
            LedgerError: the ledger cannot be written.
            UsageError: a pool of this name is running, or its machines may still run.
            BudgetExceeded: nothing is left of the ceiling.
        """
        terms, most = self._terms, ceiling() if costs else None

        def budget(others: Sequence[Record]) -> Budget | None:
            left = most
            if most is not None:
                left = most - sum(each.worst for each in others)
                if left <= 0:
                    raise BudgetExceeded(_over_ceiling(most, others))
            self.limits.budget = lowered(terms.budget, left)
            check()
            return self.limits.budget

        ledger = Ledger.here(self.tell)
        ledger.begin(
            terms.name,
            self.session,
            lease=terms.lease,
            budget=budget,
            lifetime=terms.lifetime,
            drivers=drivers,
        )
        self.ledger = ledger

    def adopt(self, instances: Sequence[Instance]) -> Record | None:
        """Take over the pool with these instances, which another process has left.

        If this pool was made without a budget, it gets the budget that the ledger has for it. If the ledger has a
        shorter lifetime for it, that lifetime counts.

        Returns:
            The pool's record before the takeover. None if the ledger does not have the pool; its costs are not recorded
            then.

        Raises:
            LedgerError: the ledger cannot be written.
            UsageError: another process runs the pool or is ending it.
        """
        self.has(instances)
        ledger = Ledger.here(self.tell)
        known = self._adopted = ledger.adopt(self.pool, lease=self._terms.lease)
        if known is not None:
            self._go_on_as(ledger, known)
        else:
            self.limits.billed_since = min(clock.now(), *(each.billed_from or math.inf for each in instances))
        return known

    def hold(self, handover: Handover) -> None:
        """Take over the pool that another process has handed over. Its prices stay the last known ones.

        Raises:
            LedgerError: the ledger cannot be written.
            UsageError: a process runs the pool or is ending it here, or another pool of its name may still run.
            PoolClosed: the pool has ended, according to the ledger.
        """
        record = handover.record
        self.has(each.instance for each in handover.nodes)
        self._end_themselves = {_key(each.instance) for each in handover.nodes if each.ends_itself}
        ledger = Ledger.here(self.tell)
        known = ledger.record(record.session)
        if known is not None and known.ended is not None:
            raise PoolClosed(f"pool {self.pool!r} has ended, so it cannot be taken over; make a new ComputePool")
        if known is not None:
            self._adopted = ledger.adopt(self.pool, lease=self._terms.lease)
        else:
            tokens = {_key(each.instance): each.instance.token for each in handover.nodes}
            ledger.receive(record, tokens)
        self._go_on_as(ledger, record)

    def _go_on_as(self, ledger: Ledger, record: Record) -> None:
        self.ledger, self.session = ledger, record.session
        self.limits.inherit(record.budget, record.lifetime)

    def give_back(self) -> Record | None:
        """Undo `adopt` or `hold` in the ledger. Return the record before it; None if the ledger did not have the pool.

        If `hold` has added the pool to the ledger, it counts as ended there: its former owner has it again.
        """
        if self._adopted is not None and self.ledger is not None:
            self.ledger.give_back(self._adopted)
        elif self.ledger is not None:
            self.ledger.end(self.session)
        return self._adopted

    def end(self, error: BaseException | None) -> None:
        """Close the pool's record in the ledger: all its machines have ended. `error` is why the pool ended."""
        if self.ledger is not None:
            self.ledger.end(self.session, "" if error is None else cut(str(error)))

    # --- while the pool runs ---------------------------------------------------------------------------------

    @property
    def pulse(self) -> float:
        """Recommended seconds between two calls of `beat`: a third of the lease, but at most 60."""
        return min(self._terms.lease / 3, 60.0)

    def beat(self) -> None:
        """Renew the pool's lease in the ledger. Blocks.

        Raises:
            PoolClosed: another process has begun to end the pool.
            TakenOver: another process has taken the pool over.
        """
        if self.ledger is not None:
            self.ledger.beat(self.session)
        self.check_owner()

    def check_owner(self) -> None:
        """Raise an error if another process ends the pool or owns it. Do nothing if the ledger cannot tell. Blocks.

        Raises:
            PoolClosed: another process has begun to end the pool.
            TakenOver: another process has taken the pool over.
        """
        is_ending, owner = self.ledger.standing(self.session) if self.ledger is not None else (False, None)
        if is_ending:
            raise PoolClosed(
                f"pool {self.pool!r} was ended by another process, as `skypool down {self.pool}` does; make a new "
                "ComputePool"
            )
        if owner is not None:
            raise TakenOver(
                f"pool {self.pool!r} was taken over by {owner} with ComputePool.attach; go on there, and end this "
                "process"
            )

    def idle(self, spans: Mapping[tuple[str, str], IdleSpan]) -> None:
        """Record in the ledger how long instances were idle, by (provider, id). Do nothing without a ledger.

        Does not raise.
        """
        if self.ledger is not None:
            self.ledger.idle(self.session, spans)

    def repriced(self, prices: Mapping[tuple[str, str], float]) -> None:
        """Record new prices in US dollars per hour, valid from now on, by (provider, id). Does not raise."""
        if self.ledger is not None:
            self.ledger.repriced(self.session, prices)

    # --- machines --------------------------------------------------------------------------------------------

    def has(self, instances: Iterable[Instance]) -> None:
        """Add instances to those of the pool. Nothing is written to the ledger."""
        self._there |= {_key(each): each for each in instances}

    def billed(self, instances: Iterable[Instance]) -> None:
        """Record that the cost of these instances begins now. Only the first call for an instance has an effect."""
        new = [each for each in instances if not self.is_billed(each)]
        self._billed |= {_key(each) for each in new}
        if new and self.ledger is not None:
            self.ledger.billed(self.session, new)

    def is_billed(self, instance: Instance) -> bool:
        """Return True if `billed` was called for an instance."""
        return _key(instance) in self._billed

    def ends_itself(self, instance: Instance) -> bool:
        """Return True if an instance that another process has handed over ends itself when its lease is over."""
        return _key(instance) in self._end_themselves

    def is_free(self, instance: Instance) -> bool:
        """Return True if an instance costs nothing, according to the ledger. Return False if that is not known."""
        receipt = self.known_receipt
        lines = () if receipt is None else receipt.lines
        prices = [each.usd_per_hour for each in lines if (each.provider, each.id) == _key(instance)]
        return prices == [0.0]

    def highest_price(self, offer: Offer) -> float | None:
        """Return the US dollars per hour above which a machine on this offer must end; None for no such price."""
        return highest_price(offer, self._terms.need.max_usd_per_hour, self.limits.budget is not None)

    def worst_until(self, time: float) -> float:
        """Return the most that the pool may cost in all, in US dollars, if its machines end at this time.

        `time` is one of `skypool.clock.now`. Prices of spot machines may rise to those at which they must end. It is
        `math.inf` if there is no such price. Raises LedgerError if the costs cannot be read from the ledger or from
        memory.
        """
        now = clock.now()
        return worst_bill(self._dearest(now), now, time)

    def surely_until(self) -> float:
        """Return the time until which the budget lasts in any case, even if prices of spot machines rise at once.

        It is one of `skypool.clock.now`, and `math.inf` without a budget, or if no machine costs anything. Raises
        LedgerError if the costs cannot be read from the ledger or from memory.
        """
        now, budget = clock.now(), self.limits.budget
        return math.inf if budget is None else now + budget.lasts(self._dearest(now), now)

    def _dearest(self, now: float) -> list[Line]:
        """Return the receipt's lines with the highest prices that machines may have from `now` on."""
        return [each if each.ended else repriced(each, now, self._dearest_price(each)) for each in self.receipt.lines]

    def _dearest_price(self, line: Line) -> float:
        if line.market != "spot" or not line.usd_per_hour:
            return line.usd_per_hour
        machine = self._there.get((line.provider, line.id))
        offer = None if machine is None else machine.offer
        most = None if offer is None else self.highest_price(offer)
        if offer is None or most is None:
            return math.inf
        return max(line.usd_per_hour, most / offer.hosts)  # not each provider holds to the highest price

    def ended(self, instances: Iterable[Instance]) -> None:
        """Record that these instances have ended, in one transaction for each provider.

        Call this only if their end is proved, or if they are free but cannot be reached.
        """
        ids: dict[str, list[str]] = {}
        for each in instances:
            self._there.pop(_key(each), None)
            ids.setdefault(each.provider, []).append(each.id)
        if self.ledger is not None:
            for provider, some in ids.items():
                self.ledger.ended(self.session, provider, *some)

    # --- notices for the user --------------------------------------------------------------------------------

    def tell(self, text: str, detail: str = "") -> None:
        """Show the user a notice. Do nothing if the same `text` was shown before, even with another `detail`."""
        if text not in self._told:
            self._told.add(text)
            notice = events.Notice(pool=self.pool, text=f"{text} ({detail})" if detail else text)
            later: list[events.Notice] | None = getattr(self._later, "notices", None)
            if later is None:
                self._emit(notice)
            else:
                later.append(notice)

    @contextmanager
    def telling_later(self) -> Iterator[None]:
        """Delay notices to the user from this thread until the end of the `with` block.

        The block may hold a lock that listeners of notices need.
        """
        notices: list[events.Notice] = []
        self._later.notices = notices
        try:
            yield
        finally:
            self._later.notices = None
            for each in notices:
                self._emit(each)


def _over_ceiling(most: float, others: Sequence[Record]) -> str:
    """Return why nothing is left of the ceiling `most`: the pools that may still cost most of it."""
    first = sorted((each for each in others if each.worst), key=lambda each: -each.worst)[:3]
    named = ", ".join(
        f"{each.pool} ({f'{each.worst:.2f} USD' if each.worst < math.inf else 'it has no budget'})" for each in first
    )
    return (
        f"{CEILING}={most:g} is the most that all pools may cost together, and other pools may still cost all of it: "
        f"{named}; end one, as by `skypool down {first[0].pool}`, give it a smaller budget, or raise {CEILING}"
    )
