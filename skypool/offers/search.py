"""Asks all providers for their offers at once, and ranks the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from skypool.drivers.contract import Answers, Driver, abilities
from skypool.errors import (
    AccessError,
    CredentialsError,
    ErrorGroup,
    FundsError,
    NoOffers,
    ProviderError,
    QuotaError,
    UsageError,
)
from skypool.model import Need, Offer
from skypool.offers import price_cache
from skypool.offers.ordering import OrderBy
from skypool.offers.price_cache import Answer
from skypool.offers.ranking import Plan, rank_offers

_OFFERS_TIMEOUT = 30.0
"""Seconds for a provider's answer, after which the plan goes on without it."""
_UNREACHABLE = (ProviderError, ErrorGroup, OSError)
"""Errors after which a provider's last answer may serve."""
_REFUSALS = (AccessError, CredentialsError, FundsError, QuotaError)
"""Those of them that the user must hear of: no old answer makes up for them."""


async def look_around(
    drivers: Sequence[Driver],
    need: Need,
    *,
    order_by: OrderBy = "cheapest",
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
            kept = await asyncio.to_thread(price_cache.read, driver, need)
            if kept is not None:
                notes.append(f"{driver.name} cannot be asked ({answer}); its offers here are {_ago(kept.age)} old")
                answer = kept
        if isinstance(answer, BaseException):
            failures[driver.name] = answer
        else:
            offers += answer.offers
    made = rank_offers(offers, need, order_by=order_by, nodes=nodes, failures=failures, notes=notes)
    if not made.offers:
        if len(failures) == len(drivers) == 1:
            raise next(iter(failures.values()))
        raise NoOffers(f"no provider sells what the pool needs:\n{made.explain()}", made)
    return made


async def _asked(driver: Driver, need: Need, refresh: bool) -> Answer:
    """What a provider sells: its last answer while that holds, a new one otherwise.

    Raises:
        UsageError: its machines do not reach each other, and have to. ProviderError: it did not answer in time.
            Whatever the driver raises.
    """
    if need.private_network and not abilities(driver).private_network:
        what = f"machines of {driver.name} do not reach each other"
        raise UsageError(f"{what}: private_network=True is for other providers")
    again = refresh or price_cache.keeps(driver) <= 0
    kept = None if again else await asyncio.to_thread(price_cache.read, driver, need)
    if kept is not None and kept.age < price_cache.holds(driver, need, kept.offers):
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
    """Ask a driver, and keep its answer if it is complete."""
    offers = Answers(driver.offers(price_cache.question(need)))
    if not offers.lacks:
        price_cache.write(driver, need, tuple(offers))
    return Answer(tuple(offers))


def _ago(age: float) -> str:
    """An age as people say it: "3 h"."""
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if age >= 2 * seconds:
            return f"{age / seconds:.0f} {unit}"
    return f"{age:.0f} s"
