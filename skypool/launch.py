"""From offers to instances: ask every provider, rank, and rent the best that is in stock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from skypool import pricebook
from skypool.driver import Driver
from skypool.errors import (
    AccessError,
    CapacityError,
    CredentialsError,
    FundsError,
    LaunchError,
    NoOffers,
    OfferGone,
    ProviderError,
    QuotaError,
)
from skypool.model import Instance, Need, Offer, Order
from skypool.pricebook import Answer
from skypool.ranking import Plan, Rank, plan

_OFFERS_TIMEOUT = 30.0
_UNREACHABLE = (ProviderError, OSError)
_REFUSALS = (AccessError, CredentialsError, FundsError, QuotaError)
Attempts = list[tuple[Offer, ProviderError]]


async def look_around(
    drivers: Sequence[Driver],
    need: Need,
    *,
    rank: Rank = "cheapest",
    nodes: tuple[int, int] = (1, 1),
    refresh: bool = False,
    offline: bool = False,
) -> Plan:
    """Ask every provider at once, each with its own time limit; one that fails does not stop the others.

    Args:
        refresh: ask those, too, whose last answer still holds.
        offline: where a provider cannot be reached, plan with its last answer, and say how old that is.

    Raises:
        NoOffers: with the plan. The provider's own error, where it is the only one.
    """
    answers = await asyncio.gather(*(_asked(each, need, refresh) for each in drivers), return_exceptions=True)
    offers: list[Offer] = []
    failures: dict[str, BaseException] = {}
    notes: list[str] = []
    for driver, answer in zip(drivers, answers, strict=True):
        if isinstance(answer, _UNREACHABLE) and not isinstance(answer, _REFUSALS) and offline:
            kept = await asyncio.to_thread(pricebook.read, driver, need)
            if kept is not None:
                notes.append(f"{driver.name} cannot be asked ({answer}); its offers here are {_ago(kept.age)} old")
                answer = kept
        if isinstance(answer, BaseException):
            failures[driver.name] = answer
        else:
            offers += answer.offers
    made = plan(offers, need, rank=rank, nodes=nodes, failures=failures, notes=notes)
    if not made.offers:
        if len(failures) == len(drivers) == 1:
            raise next(iter(failures.values()))
        raise NoOffers(f"no provider sells what the pool needs:\n{made.explain()}", made)
    return made


async def _asked(driver: Driver, need: Need, refresh: bool) -> Answer:
    """What a provider sells: its last answer while that holds, a new one otherwise.

    Raises:
        ProviderError: it did not answer in time. Whatever the driver raises.
    """
    again = refresh or pricebook.keeps(driver) <= 0
    kept = None if again else await asyncio.to_thread(pricebook.read, driver, need)
    if kept is not None and kept.age < pricebook.holds(driver, need, kept.offers):
        return kept
    limit = asyncio.timeout(_OFFERS_TIMEOUT)
    try:
        async with limit:
            return await asyncio.to_thread(_ask, driver, need)
    except TimeoutError as e:
        if not limit.expired():
            raise  # the driver's own
        raise ProviderError(
            f"{driver.name} did not say within {_OFFERS_TIMEOUT:g} s what it sells; try again, or leave it out",
            provider=driver.name,
        ) from e


def _ask(driver: Driver, need: Need) -> Answer:
    offers = tuple(driver.offers(pricebook.question(need)))
    pricebook.write(driver, need, offers)
    return Answer(offers)


def _ago(age: float) -> str:
    """An age as people say it: "3 h"."""
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if age >= 2 * seconds:
            return f"{age / seconds:.0f} {unit}"
    return f"{age:.0f} s"


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
