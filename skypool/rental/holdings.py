"""Records the machines of one pool in the ledger, from the order of each machine to the proof of its end."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Literal

from skypool import clock
from skypool.drivers import retry
from skypool.drivers.contract import Driver, abilities, terminate
from skypool.errors import StillRunning, together
from skypool.model import Instance, Offer, Order
from skypool.rental.ledger import Ledger
from skypool.rental.receipt import Receipt
from skypool.rental.request import Tell, Terms

_LISTING = 10.0
"""Seconds for which a provider that is busy is asked again for the list of its machines."""
_LATE = 120.0
"""Seconds for which machines of an order without an answer are looked for while the pool runs."""
_QUIET = 5.0
"""Seconds of silence of a node after which its machine may have died. Before skypool terminates such a machine, it asks
the provider whether the machine still exists."""

_Key = tuple[str, str]
"""The provider and the id of a machine."""
Outcome = Literal["rented", "refused", "unanswered"]
"""The result of an order. After "unanswered", machines may have been made; they are looked for and terminated."""
OrderKey = tuple[str, str, Outcome]
"""The provider and the machine type of an order, and its outcome."""


def _key(instance: Instance) -> _Key:
    return instance.provider, instance.id


class Holdings:
    """The record of the machines that one pool has rented. Any thread may call the methods, which may block.

    The pool's launcher and the drivers report to this object what becomes of each order. Before the pool begins, there
    is no ledger, and nothing is written to disk. Once an order was sent, it is no error if the ledger cannot be
    written.

    Attributes:
        ledger: None before the pool begins.
        tried: names of the providers that may have machines of the pool.
        orders: the number of orders that were answered or given up. An order that is sent again, as after a reply that
            was lost, counts once.
    """

    def __init__(self, terms: Terms, tell: Tell) -> None:
        self._terms = terms
        self._tell = tell
        self.session = secrets.token_hex(8)
        self.ledger: Ledger | None = None
        self.tried: set[str] = set()
        self.orders: dict[OrderKey, int] = {}
        self._offers: dict[str, Offer] = {}  # of orders that are under way, by token
        self._open: dict[str, str] = {}  # providers of orders without an answer, by token
        self._asked: dict[str, dict[int, float]] = {}  # when the create of each node was sent, by token
        self._made: dict[str, dict[_Key, Instance]] = {}  # machines of orders that are under way, by token
        self._lost: dict[str, tuple[str, float]] = {}  # providers of orders given up without an answer, and when
        self._billed: set[_Key] = set()  # machines that are known to run at a provider that bills them from then on
        self._there: dict[_Key, Instance] = {}  # machines whose end is not proved

    @property
    def there(self) -> list[Instance]:
        """The instances that the pool rented or took over, except those proved to have ended. The list is a copy."""
        return list(self._there.values())

    @property
    def unclear(self) -> set[str]:
        """Names of the providers that may have machines of open orders."""
        return set(self._open.values())

    @property
    def receipt(self) -> Receipt:
        """The cost of each instance, until its end or until now. The receipt has no lines without a ledger."""
        if self.ledger is None:
            return Receipt(self._terms.name, (), time.time())
        return self.ledger.receipt(self.session)

    def driver_of(self, instance: Instance) -> Driver:
        """Return the driver of the provider that an instance is rented from. Raises StopIteration if there is none."""
        return next(each for each in self._terms.drivers if each.name == instance.provider)

    def take_over(self, instances: Sequence[Instance]) -> None:
        """Add instances that another process left to the machines of this pool. Nothing is written to the ledger."""
        self.tried |= {each.provider for each in instances}
        self._there |= {_key(each): each for each in instances}

    def record_in(self, ledger: Ledger, session: str) -> None:
        """Set the ledger and session to use from now on. What was recorded before is not written to this ledger."""
        self.ledger = ledger
        self.session = session

    # --- orders of a launch ----------------------------------------------------------------------------------

    def intend(self, order: Order, offer: Offer) -> None:
        """Record that an order is about to be sent. Tell the user if machines of this offer cannot end themselves.

        Raises LedgerError if the ledger cannot be written, or PoolClosed if the pool ends. Do not send the order then.
        """
        self.tried.add(offer.provider)
        if not self._terms.ends_itself(offer):
            what = "a machine" if offer.ends_itself is None else offer.instance_type
            self._tell(
                f"{what} at {offer.provider} cannot end its own cost: if this client is killed, it is billed until "
                f"`skypool gc --yes` runs after its lease"
            )
        self._open[order.token] = offer.provider
        self._offers[order.token] = offer
        if self.ledger is not None:
            self.ledger.intend(self.session, order.token, offer, order.nodes)

    def asking(self, order: Order, nodes: Sequence[int]) -> None:
        """Note that the request for each node's machine is sent now, unless that was noted before.

        Some providers bill from that time on.
        """
        asked = self._asked.setdefault(order.token, {})
        now = clock.now()
        for node in nodes:
            asked.setdefault(node, now)

    def made(self, order: Order, instances: Sequence[Instance]) -> None:
        """Record machines of an open order, which cost money even if the launch fails. May be called several times."""
        self._made.setdefault(order.token, {}).update({_key(each): each for each in instances})
        if self.ledger is not None:
            self.ledger.made(
                self.session,
                order.token,
                instances,
                asked=self._asked.get(order.token),
                waits=self._waits_of(instances),
            )

    def undone(self, order: Order, instances: Sequence[Instance]) -> None:
        """Record that an unfinished launch has terminated machines that it had made. The order stays open."""
        for each in instances:
            self._made.get(order.token, {}).pop(_key(each), None)
        self._write_ends(instances)

    def rented(self, order: Order, instances: Sequence[Instance]) -> None:
        """Record that an order succeeded with these instances. Other machines of the order are recorded as ended."""
        self._there |= {_key(each): each for each in instances}
        self._count(order, "rented")
        self._open.pop(order.token, None)
        asked = self._asked.pop(order.token, None)
        made = self._made.pop(order.token, {})
        if self.ledger is not None:
            self.ledger.rented(self.session, order.token, instances, asked=asked, waits=self._waits_of(instances))
        kept = {_key(each) for each in instances}
        self._write_ends([each for key, each in made.items() if key not in kept])

    def refused(self, order: Order, error: Exception) -> None:
        """Record that the provider refused an order, and why.

        For nodes without a machine, the time that `asking` noted is deleted, so that a later attempt sets a new one.
        """
        made = {each.node for each in self._made.get(order.token, {}).values()}
        for node in self._asked.get(order.token, {}).keys() - made:
            del self._asked[order.token][node]
        self._open.pop(order.token, None)
        if self.ledger is not None:
            self.ledger.refused(self.session, order.token, str(error))

    def failed(self, order: Order) -> None:
        """Terminate the machines of an order that is given up.

        If the order got no answer, its machines are looked for now, and again by later calls of `terminate_lost`. If
        the end of a machine is not proved, nothing is raised: the machine is then in `there`, and its provider in
        `unclear`.
        """
        self._count(order, "unanswered" if order.token in self._open else "refused")
        asked = self._asked.pop(order.token, {})
        if order.token in self._open:
            self._lost[order.token] = self._open[order.token], time.monotonic()
            known = {each.node for each in self._made.get(order.token, {}).values()}
            rest = asked.keys() - known
            if self.ledger is not None and rest:
                self.ledger.sent(self.session, order.token, min(asked[node] for node in rest))
            self.terminate_lost()
        made = self._made.pop(order.token, {})
        unproved = self.terminate([*made.values()]) if made else {}
        for key, each in made.items():
            if each.node in unproved:
                self._there[key] = each
                self._open[order.token] = each.provider

    def _count(self, order: Order, outcome: Outcome) -> None:
        """Count an order that is over. Do nothing if it was never sent."""
        offer = self._offers.pop(order.token, None)
        if offer is not None:
            key = (offer.provider, offer.instance_type, outcome)
            self.orders[key] = self.orders.get(key, 0) + 1

    # --- while they run --------------------------------------------------------------------------------------

    def runs(self, instance: Instance) -> None:
        """Record that an instance runs. If its provider bills machines from the moment they run, its cost begins now.

        Only the first call for an instance has an effect.
        """
        self._run([instance])

    def _run(self, instances: Iterable[Instance]) -> None:
        """Record that these instances run; see `runs`."""
        new = [each for each in instances if _key(each) not in self._billed and self._waits_of([each])]
        self._billed |= {_key(each) for each in new}
        if new and self.ledger is not None:
            self.ledger.billed(self.session, new)

    def _waits_of(self, instances: Iterable[Instance]) -> bool:
        """Return True if a provider of these instances bills a machine only once it runs."""
        return any(abilities(self.driver_of(each)).billed_from == "running" for each in instances)

    # --- the end of machines ---------------------------------------------------------------------------------

    def terminate(
        self, instances: Sequence[Instance], silent: Mapping[int, float] | None = None
    ) -> Mapping[int, StillRunning]:
        """Terminate instances and prove that they ended. Blocks until the providers have answered.

        All providers are asked at the same time. Instances of providers that the pool has no driver for are ignored. If
        an end cannot be recorded, that error is raised when all providers were asked.

        Args:
            silent: by node number, the seconds since the node's last sign of life. If the provider no longer lists the
                node's machine, its end is recorded at that time, and it costs nothing after that. Values up to 5 are
                ignored.

        Returns:
            The errors of instances whose end could not be proved, by the numbers of their nodes.
        """
        providers = {each.provider for each in instances}
        drivers = [driver for driver in self._terms.drivers if driver.name in providers]

        def end(driver: Driver) -> dict[int, StillRunning]:
            return self._terminate_at(
                driver, [each for each in instances if each.provider == driver.name], silent or {}
            )

        errors: dict[int, StillRunning] = {}
        failed: list[Exception] = []
        for outcome in retry.at_once(end, drivers):
            if isinstance(outcome, Exception):
                failed.append(outcome)
            else:
                errors |= outcome
        if failed:
            raise together("the ends of machines could not be recorded", failed)
        return errors

    def _terminate_at(
        self, driver: Driver, ours: Sequence[Instance], silent: Mapping[int, float]
    ) -> dict[int, StillRunning]:
        errors: dict[int, StillRunning] = {}
        self._settle(driver, ours, silent)
        try:
            terminate(driver, ours)
        except StillRunning as e:  # it is raised at the pool's end, with the instances still running
            left = {getattr(each, "id", "") for each in e.instances} or {each.id for each in ours}
            errors = {each.node: e for each in ours if each.id in left}
        self._note_ended([each for each in ours if each.node not in errors])
        return errors

    def terminate_lost(self) -> None:
        """Look for machines of orders that were given up without an answer, and terminate them. Does not raise.

        Call this repeatedly, as a provider may list new machines late or fail to answer. Each order is looked for until
        its machines have ended, or 120 s have passed.
        """
        for token, (provider, at) in list(self._lost.items()):
            driver = next(each for each in self._terms.drivers if each.name == provider)
            try:
                found = retry.patiently(partial(driver.instances, pool=self._terms.name), _LISTING)
                there = [each for each in found if each.token == token]
            except Exception as e:  # noqa: BLE001 - the next call, or the pool's end, looks again
                self._tell(
                    f"{provider} did not list the machines of an order without an answer; tried again later: {e}"
                )
                continue
            if there and self.ledger is not None:
                waits = {provider} if self._waits_of(there) else set[str]()
                self.ledger.found(self.session, there, waits, since_request=False)
            if (there and not self.terminate(there)) or time.monotonic() - at > _LATE:
                del self._lost[token]

    def note_ended(self, instance: Instance) -> None:
        """Record that an instance has ended. Call this only if that is proved, or if it is free but not reachable."""
        self._note_ended([instance])

    def _note_ended(self, instances: Sequence[Instance]) -> None:
        """Record that these instances have ended. Do not call this while one may still cost something."""
        for each in instances:
            self._there.pop(_key(each), None)
        self._write_ends(instances)

    def _write_ends(self, instances: Iterable[Instance]) -> None:
        """Record in the ledger that instances have ended now, in one transaction for each provider."""
        if self.ledger is None:
            return
        ids: dict[str, list[str]] = {}
        for each in instances:
            ids.setdefault(each.provider, []).append(each.id)
        for provider, some in ids.items():
            self.ledger.ended(self.session, provider, *some)

    def _settle(self, driver: Driver, instances: Sequence[Instance], silent: Mapping[int, float]) -> None:
        """Record which instances ended earlier (see `silent` of `terminate`), and which are billed by now.

        Call this before instances are terminated.
        """
        now = clock.now()
        quiet = {each.id: silent[each.node] for each in instances if silent.get(each.node, 0.0) > _QUIET}
        unbilled = [each for each in instances if _key(each) not in self._billed]
        if self.ledger is None or not (quiet or self._waits_of(unbilled)):
            return
        try:
            found = retry.patiently(partial(driver.instances, pool=self._terms.name), _LISTING)
            there = {each.id: each for each in found if each.state != "ended"}
        except Exception as e:  # noqa: BLE001 - they are terminated all the same, and billed until then
            self._tell(f"{driver.name} did not list its machines, so their recorded cost may be too high: {e}")
            return
        self._run(there[each.id] for each in unbilled if each.id in there and there[each.id].state != "starting")
        gone = {id_: now - seconds for id_, seconds in quiet.items() if id_ not in there}
        self.ledger.ended_at(self.session, driver.name, gone)
