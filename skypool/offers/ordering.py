"""Sorts offers by the price of a node, or by its price per device, TFLOPS or GB of memory. All functions are pure.

A spot price from a table that is too old does not count. Such an offer is ranked by the on-demand price instead.
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
"""Days for which a spot price from a table is ranked as it stands. Google may change its spot prices every 30 days, and
keeps them below its on-demand prices: https://cloud.google.com/skus (read 2026-11-22 in a stored copy)."""
_price = attrgetter("usd_per_hour")  # quicker than a function
_source = attrgetter("price_source")
UNITS = {"per-device": "device", "per-tflop": "dense BF16 TFLOP", "per-gb": "GB of device memory"}
"""What each order divides the price by."""


def sorted_offers(offers: list[Offer], order_by: OrderBy, today: date) -> list[Offer]:
    """Return a new list of the offers, sorted by the figure that `order_by` names, the lowest first.

    Offers without that figure come last. Among equal figures, the order is price, provider, region, zone and instance
    type. Sorting by numbers alone is fast, so names are compared only among offers with equal figures.

    Args:
        offers: the offers. The list is not changed.
        order_by: "cheapest" sorts by the price of the whole offer. The others divide that price; see `divisor`.
        today: the day by which spot prices from tables count as outdated. An outdated one is replaced by `price_bound`.
    """
    bounds = {id(offer): price_bound(offer) for offer in outdated(offers, today)}
    price: Callable[[Offer], float] = (lambda o: bounds.get(id(o), o.usd_per_hour)) if bounds else _price
    if order_by == "cheapest":
        score = price
    else:
        amounts = {id(offer.accelerator): divisor(offer, order_by) for offer in offers}
        score = lambda offer: _share(price(offer), amounts[id(offer.accelerator)])  # noqa: E731
    ranked = sorted(offers, key=score)
    values = list(map(score, ranked))
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
    """Return the sort key for offers with the same figure: price, provider, region, zone and instance type."""
    return offer.usd_per_hour, offer.provider, offer.region, offer.zone, offer.instance_type


def _share(price: float, amount: float) -> float:
    """Return the price divided by the amount; infinity if the amount is 0, so that such an offer is sorted last."""
    return price / amount if amount else math.inf


def divisor(offer: Offer, order_by: OrderBy) -> float:
    """Return by how much an offer's price is divided for this order: devices, GB or TFLOPs. 0 if that is unknown.

    An offer without an accelerator gives 0. A part of a card counts with its share of the TFLOPs of the card.

    Args:
        offer: the offer.
        order_by: "per-device" gives the number of devices, "per-gb" the memory of all devices in GB. Otherwise the
            result is the dense BF16 TFLOPs of all devices.
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
    """Return the price sources of these offers, each object once. Thousands of offers share a few objects."""
    return list({id(source): source for source in map(_source, offers)}.values())


def outdated(offers: Sequence[Offer], today: date) -> list[Offer]:
    """Return the offers with an outdated spot price, as `has_known_price` defines it; [] if there are none."""
    if not any(source.is_outdated(today, SPOT_DAYS) for source in sources_of(offers)):
        return []
    return [offer for offer in offers if not has_known_price(offer, today)]


def has_known_price(offer: Offer, today: date) -> bool:
    """Return False if an offer has an outdated spot price. Return True for every other offer.

    A spot price is outdated if it comes from a table that is older than `SPOT_DAYS` (30 days) or has an unknown day.
    On-demand prices, and spot prices that the provider reported, never are.
    """
    return offer.market != "spot" or not offer.price_source.is_outdated(today, SPOT_DAYS)


def price_bound(offer: Offer) -> float:
    """Return the price in USD per hour that replaces an outdated spot price in the ranking.

    This is the on-demand price, or the spot price if that is higher; infinity if the on-demand price is unknown.
    """
    usual = offer.on_demand_usd_per_hour
    return math.inf if usual is None else max(usual, offer.usd_per_hour)
