"""`Endings`: ends machines of one pool at their providers, and proves that they have ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from skypool import clock
from skypool.drivers import retry
from skypool.drivers.contract import Driver, abilities, terminate
from skypool.drivers.contract import ends_itself as ends_itself_at
from skypool.errors import StillRunning, together
from skypool.model import Instance, Offer
from skypool.rental.pool_account import Rental

LISTING = 10.0
"""Seconds for which a provider that is busy is asked again for the list of its machines."""
_QUIET = 5.0
"""Seconds of silence of a node after which its machine may have died. Before skypool terminates such a machine, it asks
the provider whether the machine still exists."""


def driver_of(drivers: Sequence[Driver], provider: str) -> Driver:
    """Return the driver of a provider. Raises StopIteration if there is none."""
    return next(each for each in drivers if each.name == provider)


def ends_itself(drivers: Sequence[Driver], offer: Offer) -> bool:
    """Return True if a machine of this offer ends itself when its lease is over, and is then no longer billed.

    Also return True if none of the drivers is that of the offer's provider.
    """
    return all(ends_itself_at(each, offer) for each in drivers if each.name == offer.provider)


def waits_of(drivers: Sequence[Driver], instances: Sequence[Instance]) -> bool:
    """Return True if at least one provider of these instances bills a machine only from when it runs."""
    return any(abilities(driver_of(drivers, each.provider)).billed_from == "running" for each in instances)


class Endings:
    """Ends one pool's machines. Any thread may call the methods, which block."""

    def __init__(self, drivers: Sequence[Driver], rental: Rental) -> None:
        self._drivers = drivers
        self._rental = rental

    def terminate(
        self, instances: Sequence[Instance], silent: Mapping[int, float] | None = None
    ) -> Mapping[int, StillRunning]:
        """Terminate instances and prove that they ended. Blocks until the providers have answered.

        All providers are asked at the same time. Instances of providers that the pool has no driver for are ignored. If
        an end cannot be recorded, that error is raised when all providers were asked.

        Args:
            silent: the seconds since the last sign of life of each node that is silent, by node number. If the provider
                no longer lists the node's machine, the time of that sign is recorded as the machine's end, after which
                it costs nothing. Values up to 5 are ignored.

        Returns:
            The errors of instances whose end could not be proved, by the numbers of their nodes.
        """
        providers = {each.provider for each in instances}
        drivers = [driver for driver in self._drivers if driver.name in providers]

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
        self._rental.ended([each for each in ours if each.node not in errors])
        return errors

    def _settle(self, driver: Driver, instances: Sequence[Instance], silent: Mapping[int, float]) -> None:
        """Record which instances have ended already, and which are billed by now. Call this before terminating them."""
        now = clock.now()
        rental = self._rental
        quiet = {each.id: silent[each.node] for each in instances if silent.get(each.node, 0.0) > _QUIET}
        waits = waits_of(self._drivers, instances)
        unbilled = [each for each in instances if waits and not rental.is_billed(each)]
        if rental.ledger is None or not (quiet or unbilled):
            return
        try:
            found = retry.patiently(partial(driver.instances, pool=rental.pool), LISTING)
            there = {each.id: each for each in found if each.state != "ended"}
        except Exception as e:  # noqa: BLE001 - they are terminated all the same, and billed until then
            rental.tell(f"{driver.name} did not list its machines, so their recorded cost may be too high: {e}")
            return
        rental.billed(there[each.id] for each in unbilled if each.id in there and there[each.id].state != "starting")
        gone = {id_: now - seconds for id_, seconds in quiet.items() if id_ not in there}
        rental.ledger.ended_at(rental.session, driver.name, gone)
