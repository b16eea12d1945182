"""From offers to instances: ask every provider, rank, and rent the best that is in stock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from skypool.driver import Driver
from skypool.errors import CapacityError, CredentialsError, LaunchError, NoOffers, OfferGone, ProviderError, QuotaError
from skypool.model import Instance, Need, Offer, Order
from skypool.plan import Plan, plan

_OFFERS_TIMEOUT = 30.0
Attempts = list[tuple[Offer, ProviderError]]


async def look_around(drivers: Sequence[Driver], need: Need) -> Plan:
    """Ask every provider at once, each with its own time limit; one that fails does not stop the others.

    Raises:
        NoOffers: with the plan. The provider's own error, where it is the only one.
    """

    async def ask(driver: Driver) -> list[Offer]:
        async with asyncio.timeout(_OFFERS_TIMEOUT):
            return list(await asyncio.to_thread(driver.offers, need))

    answers = await asyncio.gather(*map(ask, drivers), return_exceptions=True)
    offers: list[Offer] = []
    failures: dict[str, BaseException] = {}
    for driver, answer in zip(drivers, answers, strict=True):
        if isinstance(answer, BaseException):
            failures[driver.name] = answer
        else:
            offers += answer
    made = plan(offers, need, failures=failures)
    if not made.offers:
        if len(failures) == len(drivers) == 1:
            raise next(iter(failures.values()))
        raise NoOffers(f"no provider sells what the pool needs:\n{made.explain()}", made)
    return made


def launch_best(drivers: Sequence[Driver], offers: Sequence[Offer], order: Order, attempts: Attempts) -> list[Instance]:
    """The best offer first; the next when it is out of stock. Blocks.

    Args:
        attempts: what failed is added to it.

    Raises:
        LaunchError: every offer was tried. Any other error of a provider ends it at once.
    """
    by_name = {driver.name: driver for driver in drivers}
    without: set[str] = set()
    for offer in offers:
        if offer.provider in without:
            continue
        driver = by_name[offer.provider]
        try:
            return _as_ordered(driver, driver.launch(offer, order), order)
        except (CapacityError, OfferGone) as e:
            attempts.append((offer, e))
        except (QuotaError, CredentialsError) as e:
            attempts.append((offer, e))
            without.add(offer.provider)
    tried = "\n".join(f"  {' '.join(filter(None, (o.provider, o.instance_type, o.region)))}: {e}" for o, e in attempts)
    raise LaunchError(f"none of {len(offers)} offers could be launched:\n{tried}")


def _as_ordered(driver: Driver, instances: list[Instance], order: Order) -> list[Instance]:
    ranks = sorted(instance.rank for instance in instances)
    if ranks != sorted(order.ranks):
        driver.terminate(instances)
        asked = sorted(order.ranks)
        raise LaunchError(f"{driver.name} launched nodes {ranks} for {asked}; they are ended; report it to its author")
    return instances
