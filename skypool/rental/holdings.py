"""The machines that one pool holds, from the order to the proof of their end, and their lines in the ledger."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from skypool import clock
from skypool.drivers import retry
from skypool.drivers.contract import Driver, abilities, terminate
from skypool.errors import StillRunning
from skypool.model import Instance, Offer, Order
from skypool.rental.budget import Receipt
from skypool.rental.ledger import Ledger
from skypool.rental.request import Tell, Terms

_LISTING = 10.0
"""Seconds for which a provider that is too busy to list machines is asked again before they are ended all the same."""
_LATE = 120.0
"""Seconds for which machines of an order without an answer are looked for while the pool lives."""
_QUIET = 5.0
"""Seconds of silence after which a machine that is ended is looked for first: it may have died then."""

_Key = tuple[str, str]
"""A machine's provider and id."""


def _key(instance: Instance) -> _Key:
    return instance.provider, instance.id


class Holdings:
    """The machines of one pool. Methods block, and any thread may call them.

    It is the launcher's `Book`, and hears the `Progress` of each order. Without a ledger, as before a pool's begin,
    nothing is written down.

    Args:
        tell: hears what the user should know.

    Attributes:
        session: the pool's in the ledger.
        tried: providers that may have machines of the pool.
    """

    def __init__(self, terms: Terms, tell: Tell) -> None:
        self._terms = terms
        self._tell = tell
        self.session = secrets.token_hex(8)
        self.ledger: Ledger | None = None
        self.tried: set[str] = set()
        self._open: dict[str, str] = {}  # providers of orders without an answer, by token
        self._asked: dict[str, dict[int, float]] = {}  # when the create of each node was sent, by token
        self._made: dict[str, dict[_Key, Instance]] = {}  # machines of orders that are under way, by token
        self._lost: dict[str, tuple[str, float]] = {}  # providers of orders given up without an answer, and when
        self._billed: set[_Key] = set()  # machines that are known to run at a provider that bills them from then on
        self._there: dict[_Key, Instance] = {}  # those whose end is not proved

    @property
    def there(self) -> list[Instance]:
        """What was rented, or taken over, and is not proved to have ended."""
        return list(self._there.values())

    @property
    def unclear(self) -> set[str]:
        """Providers that may have machines of orders without an answer."""
        return set(self._open.values())

    @property
    def receipt(self) -> Receipt:
        """What each instance cost, up to its end or to now."""
        if self.ledger is None:
            return Receipt(self._terms.name, (), time.time())
        return self.ledger.receipt(self.session)

    def driver_of(self, instance: Instance) -> Driver:
        """Return the driver that made an instance."""
        return next(each for each in self._terms.drivers if each.name == instance.provider)

    def take_over(self, instances: Sequence[Instance]) -> None:
        """Hold instances that another process left."""
        self.tried |= {each.provider for each in instances}
        self._there |= {_key(each): each for each in instances}

    def record_in(self, ledger: Ledger, session: str) -> None:
        """Write into a ledger from now on, under this session."""
        self.ledger = ledger
        self.session = session

    # --- orders: what a launch does --------------------------------------------------------------------------

    def intend(self, order: Order, offer: Offer) -> None:
        """Write down that a create is about to go out. If that fails, it does not go out."""
        self.tried.add(offer.provider)
        if not self._terms.ends_itself(offer):
            what = "a machine" if offer.ends_itself is None else offer.instance_type
            self._tell(
                f"{what} at {offer.provider} cannot end its own cost: if this client is killed, it is billed until "
                f"`skypool gc --yes` runs after its lease"
            )
        self._open[order.token] = offer.provider
        if self.ledger is not None:
            self.ledger.intend(self.session, order.token, offer, order.nodes)

    def asking(self, order: Order, nodes: Sequence[int]) -> None:
        """Note when the create of each node was sent first: some providers bill it from then on."""
        asked = self._asked.setdefault(order.token, {})
        now = clock.now()
        for node in nodes:
            asked.setdefault(node, now)

    def made(self, order: Order, instances: Sequence[Instance]) -> None:
        """Write down machines of an order that is still under way: they cost something even if it comes to nothing."""
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
        """Write down that machines of an order that is under way have ended."""
        for each in instances:
            self._made.get(order.token, {}).pop(_key(each), None)
            self._write_end(each)

    def rented(self, order: Order, instances: Sequence[Instance]) -> None:
        """Write down that an order took effect. What it made and does not give back has ended."""
        self._there |= {_key(each): each for each in instances}
        self._open.pop(order.token, None)
        asked = self._asked.pop(order.token, None)
        made = self._made.pop(order.token, {})
        if self.ledger is not None:
            self.ledger.rented(self.session, order.token, instances, asked=asked, waits=self._waits_of(instances))
        kept = {_key(each) for each in instances}
        for key, each in made.items():
            if key not in kept:
                self._write_end(each)

    def refused(self, order: Order, error: Exception) -> None:
        """Write down that an order took no effect. What was asked for by it, and not made, was not asked for."""
        made = {each.node for each in self._made.get(order.token, {}).values()}
        for node in self._asked.get(order.token, {}).keys() - made:
            del self._asked[order.token][node]
        self._open.pop(order.token, None)
        if self.ledger is not None:
            self.ledger.refused(self.session, order.token, str(error))

    def failed(self, order: Order) -> None:
        """Terminate what is left of an order that is given up: its machines serve nobody, and they cost something."""
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

    # --- while they run --------------------------------------------------------------------------------------

    def runs(self, instance: Instance) -> None:
        """Note that an instance runs: some providers bill it from then on."""
        key = _key(instance)
        if key not in self._billed and self._waits_of([instance]):
            self._billed.add(key)
            if self.ledger is not None:
                self.ledger.billed(self.session, [instance])

    def _waits_of(self, instances: Iterable[Instance]) -> bool:
        """Return True if the provider of these bills them only once they run."""
        return any(abilities(self.driver_of(each)).billed_from == "running" for each in instances)

    # --- their end -------------------------------------------------------------------------------------------

    def terminate(
        self, instances: Sequence[Instance], silent: Mapping[int, float] | None = None
    ) -> Mapping[int, StillRunning]:
        """Terminate these instances and prove it.

        Args:
            silent: seconds since the last sign of life of each node that gave one. What was silent, and is not there
                any more, died then: its provider billed it no longer.

        Returns:
            What could not be proved, by node.
        """
        errors: dict[int, StillRunning] = {}
        for driver in self._terms.drivers:
            ours = [each for each in instances if each.provider == driver.name]
            if not ours:
                continue
            self._settle(driver, ours, silent or {})
            try:
                terminate(driver, ours)
            except StillRunning as e:  # it is raised at the pool's end, with the instances still running
                left = {getattr(each, "id", "") for each in e.instances} or {each.id for each in ours}
                errors |= {each.node: e for each in ours if each.id in left}
            for each in ours:
                if each.node not in errors:
                    self.note_ended(each)
        return errors

    def terminate_lost(self) -> None:
        """Look for machines of orders that were given up without an answer, and terminate them.

        Lists may lag, so they are looked for again for a while.
        """
        for token, (provider, at) in list(self._lost.items()):
            driver = next(each for each in self._terms.drivers if each.name == provider)
            try:
                found = retry.patiently(partial(driver.instances, pool=self._terms.name), _LISTING)
                there = [each for each in found if each.token == token]
            except Exception as e:  # noqa: BLE001 - it is looked for again, and at the pool's end at last
                self._tell(f"{provider} could not be asked for what an order without an answer made: {e}")
                continue
            if there and self.ledger is not None:
                waits = {provider} if self._waits_of(there) else set[str]()
                self.ledger.found(self.session, there, waits, since_request=False)
            if (there and not self.terminate(there)) or time.monotonic() - at > _LATE:
                del self._lost[token]

    def note_ended(self, instance: Instance) -> None:
        """Count an instance as ended: that is proved, or it costs nothing and cannot be asked."""
        self._there.pop(_key(instance), None)
        self._write_end(instance)

    def _write_end(self, instance: Instance) -> None:
        if self.ledger is not None:
            self.ledger.ended(self.session, instance.provider, instance.id)

    def _settle(self, driver: Driver, instances: Sequence[Instance], silent: Mapping[int, float]) -> None:
        """Note which instances died before they are ended, and which run of those that were not billed yet."""
        now = clock.now()
        quiet = {each.id: silent[each.node] for each in instances if silent.get(each.node, 0.0) > _QUIET}
        unbilled = [each for each in instances if _key(each) not in self._billed]
        if self.ledger is None or not (quiet or self._waits_of(unbilled)):
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
                self.ledger.ended(self.session, driver.name, id_, at=now - seconds)
