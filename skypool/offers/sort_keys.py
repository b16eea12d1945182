"""Sorts offers by the price of a node, or by the price per device, TFLOP or GB of memory. All functions are pure.

If a price table is too old, its spot prices are not used. An offer with such a price is ranked by its on-demand price
instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from operator import attrgetter, eq
from typing import Literal, get_args

from skypool.model import Offer, PriceSource

OrderBy = Literal["cheapest", "per-device", "per-tflop", "per-gb"]
ORDERS: tuple[OrderBy, ...] = get_args(OrderBy)
"""The orders that a user may ask for."""
SPOT_DAYS = 30
"""Days for which a spot price from a price table is used in the ranking. Google may change its spot prices every 30
days, and keeps them below its on-demand prices: https://cloud.google.com/skus (read 2026-11-22 in a stored copy)."""
START_HOURS = 1.0
"""Hours of use over which the ranking spreads the cost of a machine's start (`Offer.start_usd`)."""
_price = attrgetter("usd_per_hour")  # quicker than a function
_start = attrgetter("start_usd")
_source = attrgetter("price_source")
UNITS = {"per-device": "device", "per-tflop": "dense BF16 TFLOP", "per-gb": "GB of device memory"}
"""The unit of the price by which each order sorts, such as the price per device. "cheapest" has none."""


def sorted_offers(offers: list[Offer], order_by: OrderBy, today: date) -> list[Offer]:
    """Return a new list of the offers, sorted by price or, as `order_by` says, by price per unit, the lowest first.

    The cost of a machine's start is added to the price of one hour. A spot price from a price table that is older than
    30 days is replaced by the higher of the on-demand and spot price. Offers whose price, or price per unit, is unknown
    come last. Offers with equal values are sorted by price, provider, region, zone and instance type.
    """
    bounds = {id(offer): price_bound(offer) for offer in outdated(offers, today)}
    price: Callable[[Offer], float] = _price
    if bounds or any(map(_start, offers)):
        price = lambda o: bounds.get(id(o), o.usd_per_hour) + o.start_usd / START_HOURS  # noqa: E731
    if order_by == "cheapest":
        score = price
    else:
        amounts = {id(offer.accelerator): divisor(offer, order_by) for offer in offers}
        score = lambda offer: _share(price(offer), amounts[id(offer.accelerator)])  # noqa: E731
    ranked = sorted(offers, key=score)
    values = list(map(score, ranked))  # names are compared only where these are equal, as that is slow
    done = 0
    for number in [number for number, same in enumerate(map(eq, values, values[1:])) if same]:
        if number < done:
            continue  # in the run of equal offers that was just sorted
        end = number
        while end < len(values) and values[end] == values[number]:
            end += 1
        ranked[number:end] = sorted(ranked[number:end], key=_names)
        done = end
    return ranked


def _names(offer: Offer) -> tuple[object, ...]:
    """Return the key that sorts offers of equal price."""
    return offer.usd_per_hour, offer.provider, offer.region, offer.zone, offer.instance_type


def _share(price: float, amount: float) -> float:
    """Return the price divided by the amount; infinity if the amount is 0, so that such an offer is sorted last."""
    return price / amount if amount else math.inf


def divisor(offer: Offer, order_by: OrderBy) -> float:
    """Return the number by which the order divides an offer's price: devices, GB of device memory or dense BF16 TFLOPs.

    Returns 0 if the number is unknown, or without an accelerator. For a part of a card, the TFLOPs are those of the
    part.
    """
    has = offer.accelerator
    if has is None:
        return 0.0
    if order_by == "per-device":
        return has.count
    if order_by == "per-gb":
        return has.total_memory_gb
    tflops = has.metadata.bf16_tflops or 0.0
    return tflops * has.count * (has.part.compute_slices / has.part.compute_slices_of if has.part else 1)


def sources_of(offers: Iterable[Offer]) -> list[PriceSource]:
    """Return the price sources of these offers. A source object that several offers share is returned only once."""
    return list({id(source): source for source in map(_source, offers)}.values())


def outdated(offers: Sequence[Offer], today: date) -> list[Offer]:
    """Return the offers with a spot price from a price table that is older than 30 days or has no day."""
    if not any(source.is_outdated(today, SPOT_DAYS) for source in sources_of(offers)):
        return []
    return [offer for offer in offers if not has_known_price(offer, today)]


def has_known_price(offer: Offer, today: date) -> bool:
    """Return False if an offer has an outdated spot price. Return True for every other offer.

    A spot price is outdated if it comes from a price table that is older than `SPOT_DAYS` (30 days) or has no day.
    On-demand prices are never outdated. Neither are spot prices that the provider itself reported.
    """
    return offer.market != "spot" or not offer.price_source.is_outdated(today, SPOT_DAYS)


def ranked_price(offer: Offer, today: date) -> float:
    """Return the price in USD per hour by which `sorted_offers` ranks an offer; infinity if it is unknown.

    The cost of a machine's start is added, as if it were paid for one hour of use. An outdated spot price is replaced
    by the higher of the on-demand and spot price.
    """
    price = offer.usd_per_hour if has_known_price(offer, today) else price_bound(offer)
    return price + offer.start_usd / START_HOURS


def price_bound(offer: Offer) -> float:
    """Return the price in USD per hour that replaces an offer's outdated spot price in the ranking.

    This is the higher of the on-demand and spot price; infinity if the on-demand price is unknown.
    """
    usual = offer.on_demand_usd_per_hour
    return math.inf if usual is None else max(usual, offer.usd_per_hour)
