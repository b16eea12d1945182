"""Asks all providers for their offers at once, and ranks the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

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
from skypool.offers.price_cache import Answer
from skypool.offers.ranking import Plan, rank_offers
from skypool.offers.sort_keys import OrderBy

_OFFERS_TIMEOUT = 30.0
"""Seconds that a provider has to return its offers. A provider that takes longer is left out of the plan."""
_MOST_NAMED = 8
"""The most accelerators that are named if none of them is asked for."""
_UNREACHABLE = (ProviderError, ErrorGroup, OSError)
"""Errors of a provider after which its cached offers may be used, except for `_REFUSALS`."""
_REFUSALS = (AccessError, CredentialsError, FundsError, QuotaError)
"""Errors of a provider after which its cached offers are not used, because the user must correct the cause first."""


async def look_around(
    drivers: Sequence[Driver],
    need: Need,
    *,
    order_by: OrderBy = "cheapest",
    nodes: tuple[int, int] = (1, 1),
    refresh: bool = False,
    offline: bool = False,
) -> Plan:
    """Ask all providers for offers at once, each with its own time limit of 30 s, and return the ranked plan.

    A provider that fails does not stop the others; its error is in the plan's `failures`. Cached offers that are still
    valid are used without asking the provider.

    Args:
        order_by: the order in which offers are ranked: "cheapest", "per-device", "per-tflop" or "per-gb".
        nodes: the smallest and the largest number of nodes (or slices) that are wanted.
        refresh: True to ask every provider again, also if its cached offers are still valid.
        offline: True to use a provider's cached offers, up to 7 days old, if the provider cannot be reached. The plan
            notes their age. Cached offers are not used if the provider refuses to answer, as after wrong credentials.

    Raises:
        NoOffers: no offer meets the need. The error carries the plan.
        Exception: there is only one provider, and it failed. This is the provider's own error.
    """
    answers = await asyncio.gather(*(_asked(each, need, refresh) for each in drivers), return_exceptions=True)
    offers: list[Offer] = []
    failures: dict[str, BaseException] = {}
    notes: list[str] = []
    for driver, answer in zip(drivers, answers, strict=True):
        if isinstance(answer, _UNREACHABLE) and not isinstance(answer, _REFUSALS) and offline:
            kept = await asyncio.to_thread(price_cache.read, driver, need)
            if kept is not None:
                notes.append(
                    f"{driver.name} cannot be reached ({answer}); its cached offers are used, {_ago(kept.age)} old"
                )
                answer = kept
        if isinstance(answer, BaseException):
            failures[driver.name] = answer
        else:
            offers += answer.offers
    made = rank_offers(offers, need, order_by=order_by, nodes=nodes, failures=failures, notes=notes)
    if not made.offers:
        if len(failures) == len(drivers) == 1:
            raise next(iter(failures.values()))
        lines = [made.explain()]
        asked = ", ".join(driver.name for driver in drivers if driver.name not in failures)
        if asked and not offers and need.accelerators:
            wanted = " or ".join(map(str, need.accelerators))
            lines.insert(0, f"-  {asked}: no offer has {wanted}; `skypool offers {wanted}` asks all your providers")
        elif need.accelerators and (there := _accelerators(offers)).isdisjoint(each.name for each in need.accelerators):
            lines.append(f"+  accelerators that are offered: {', '.join(sorted(there)[:_MOST_NAMED])}")
        raise NoOffers("\n".join(["no provider sells what the pool needs:", *filter(None, lines)]), made)
    return made


def _accelerators(offers: Iterable[Offer]) -> set[str]:
    return {each.accelerator.name for each in offers if each.accelerator is not None}


async def _asked(driver: Driver, need: Need, refresh: bool) -> Answer:
    """Return a provider's offers: cached ones if they are valid and `refresh` is False. Takes at most 30 s."""
    if need.private_network and not abilities(driver).private_network:
        raise UsageError(
            f"machines of {driver.name} cannot reach each other over a private network: leave out "
            "private_network=True, or choose another provider"
        )
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
            raise  # a TimeoutError of the driver itself
        raise ProviderError(
            f"{driver.name} did not return its offers within {_OFFERS_TIMEOUT:g} s; try again, or leave this provider "
            f"out",
            provider=driver.name,
        ) from e


def _ask(driver: Driver, need: Need) -> Answer:
    """Ask a driver for its offers, and cache them if none is missing. Blocks until the provider has answered."""
    offers = Answers(driver.offers(price_cache.question(need)))  # also those above the need's price cap
    if not offers.lacks:
        price_cache.write(driver, need, tuple(offers))
    return Answer(tuple(offers))


def _ago(age: float) -> str:
    """Return an age in seconds as text, such as "3 d", "3 h", "90 min" or "100 s"."""
    for unit, seconds in (("d", 86400), ("h", 3600), ("min", 60)):
        if age >= 2 * seconds:
            return f"{age / seconds:.0f} {unit}"
    return f"{age:.0f} s"
