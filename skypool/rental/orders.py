"""`Orders`: records the orders of one pool, from the request for each machine until the machine is rented or ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Literal

from skypool import clock
from skypool.drivers import retry
from skypool.drivers.contract import Driver
from skypool.model import Instance, Offer, Order
from skypool.rental.machine_ends import LISTING, Endings, driver_of, ends_itself, waits_of
from skypool.rental.pool_account import Rental

LATE = 120.0
"""Seconds for which machines of an order without an answer are looked for while the pool runs."""

_Key = tuple[str, str]
"""The provider and the id of a machine."""
Outcome = Literal["rented", "refused", "unanswered"]
"""The result of an order. After "unanswered", machines may have been made; they are looked for and terminated."""
OrderKey = tuple[str, str, Outcome]
"""The provider and the machine type of an order, and its outcome."""


def _key(instance: Instance) -> _Key:
    return instance.provider, instance.id


class Orders:
    """The orders of one pool. The pool's launcher and the drivers report to this object what becomes of each order.

    Any thread may call the methods, which may block. After an order was sent, they raise no error if the ledger cannot
    be written.

    Attributes:
        tried: names of the providers to which an order was sent, so that they may have machines of the pool.
        counts: the number of orders that were answered or given up, by (provider, machine type, outcome). An order that
            is sent again, as after a reply that was lost, counts once.
    """

    def __init__(self, drivers: Sequence[Driver], rental: Rental, endings: Endings) -> None:
        self._drivers = drivers
        self._rental = rental
        self._endings = endings
        self.tried: set[str] = set()
        self.counts: dict[OrderKey, int] = {}
        self._offers: dict[str, Offer] = {}  # of orders that are under way, by token
        self._open: dict[str, str] = {}  # providers of orders without an answer, by token
        self._asked: dict[str, dict[int, float]] = {}  # when the create of each node was sent, by token
        self._made: dict[str, dict[_Key, Instance]] = {}  # machines of orders that are under way, by token
        self._lost: dict[str, tuple[str, float]] = {}  # providers of orders given up without an answer, and when

    @property
    def unclear(self) -> set[str]:
        """Names of the providers that may have machines of open orders."""
        return set(self._open.values())

    @property
    def has_lost(self) -> bool:
        """True while machines of orders without an answer are looked for."""
        return bool(self._lost)

    def intend(self, order: Order, offer: Offer) -> None:
        """Record that an order is about to be sent. Tell the user if machines of this offer cannot end themselves.

        Raises LedgerError if the ledger cannot be written, or PoolClosed if the pool ends. Do not send the order then.
        """
        self.tried.add(offer.provider)
        if not ends_itself(self._drivers, offer):
            what = "a machine" if offer.ends_itself is None else offer.instance_type
            self._rental.tell(
                f"{what} at {offer.provider} cannot end its own cost: if this client is killed, it is billed until "
                f"`skypool gc --yes` runs after its lease"
            )
        self._open[order.token] = offer.provider
        self._offers[order.token] = offer
        if self._rental.ledger is not None:
            self._rental.ledger.intend(self._rental.session, order.token, offer, order.nodes)

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
        if self._rental.ledger is not None:
            self._rental.ledger.made(
                self._rental.session,
                order.token,
                instances,
                asked=self._asked.get(order.token),
                waits=waits_of(self._drivers, instances),
            )

    def undone(self, order: Order, instances: Sequence[Instance]) -> None:
        """Record that machines which an open order had made were terminated again. The order stays open."""
        for each in instances:
            self._made.get(order.token, {}).pop(_key(each), None)
        self._rental.ended(instances)

    def rented(self, order: Order, instances: Sequence[Instance]) -> None:
        """Record that an order succeeded with these instances. Other machines of the order are recorded as ended."""
        self._rental.has(instances)
        self._count(order, "rented")
        self._open.pop(order.token, None)
        asked = self._asked.pop(order.token, None)
        made = self._made.pop(order.token, {})
        if self._rental.ledger is not None:
            self._rental.ledger.rented(
                self._rental.session,
                order.token,
                instances,
                asked=asked,
                waits=waits_of(self._drivers, instances),
            )
        kept = {_key(each) for each in instances}
        self._rental.ended([each for key, each in made.items() if key not in kept])

    def refused(self, order: Order, error: Exception) -> None:
        """Record that the provider refused an order, and why.

        For nodes without a machine, the time that `asking` noted is deleted, so that a later attempt sets a new one.
        """
        made = {each.node for each in self._made.get(order.token, {}).values()}
        for node in self._asked.get(order.token, {}).keys() - made:
            del self._asked[order.token][node]
        self._open.pop(order.token, None)
        if self._rental.ledger is not None:
            self._rental.ledger.refused(self._rental.session, order.token, str(error))

    def failed(self, order: Order) -> None:
        """Terminate the machines of an order that is given up.

        If the order got no answer, its machines are looked for now, and again by later calls of `terminate_lost`. If
        the end of a machine is not proved, nothing is raised. The machine is then added to those of the pool, and the
        attribute `unclear` names its provider.
        """
        self._count(order, "unanswered" if order.token in self._open else "refused")
        asked = self._asked.pop(order.token, {})
        if order.token in self._open:
            self._lost[order.token] = self._open[order.token], time.monotonic()
            known = {each.node for each in self._made.get(order.token, {}).values()}
            rest = asked.keys() - known
            if self._rental.ledger is not None and rest:
                self._rental.ledger.sent(self._rental.session, order.token, min(asked[node] for node in rest))
            self.terminate_lost()
        made = self._made.pop(order.token, {})
        unproved = self._endings.terminate([*made.values()]) if made else {}
        for each in made.values():
            if each.node in unproved:
                self._rental.has([each])
                self._open[order.token] = each.provider

    def _count(self, order: Order, outcome: Outcome) -> None:
        """Count an order that is over. Do nothing if it was never sent."""
        offer = self._offers.pop(order.token, None)
        if offer is not None:
            key = (offer.provider, offer.instance_type, outcome)
            self.counts[key] = self.counts.get(key, 0) + 1

    def terminate_lost(self) -> None:
        """Look for machines of orders that were given up without an answer, and terminate them. Does not raise.

        Call this repeatedly, as a provider may list new machines late or fail to answer. Each order is looked for until
        its machines have ended, or 120 s have passed.
        """
        for token, (provider, at) in list(self._lost.items()):
            driver = driver_of(self._drivers, provider)
            try:
                found = retry.patiently(partial(driver.instances, pool=self._rental.pool), LISTING)
                there = [each for each in found if each.token == token]
            except Exception as e:  # noqa: BLE001 - the next call, or the pool's end, looks again
                self._rental.tell(
                    f"{provider} did not list the machines of an order without an answer; tried again later: {e}"
                )
                continue
            if there and self._rental.ledger is not None:
                waits = {provider} if waits_of(self._drivers, there) else set[str]()
                self._rental.ledger.found(self._rental.session, there, waits, since_request=False)
            if (there and not self._endings.terminate(there)) or time.monotonic() - at > LATE:
                self._lost.pop(token, None)  # another thread may have looked, too
