"""Offers in words: their names, prices, and the days of the prices."""

from __future__ import annotations

from skypool.model import Offer


def named(offer: Offer) -> str:
    """Return an offer's name: provider, instance type, region and zone, as far as it has them."""
    return " ".join(filter(None, (offer.provider, offer.instance_type, offer.region, offer.zone)))


def described(offer: Offer) -> str:
    """Return an offer on one line: its name, market, price, number of hosts if several, and the day of its price.

    If the start of a machine has a cost of its own, that cost and its assumptions follow the price. The day is left out
    for a price that the provider itself stated without a day.
    """
    hosts = f" for {offer.hosts} hosts" if offer.hosts > 1 else ""
    start = f" + about {offer.start_usd:.4f} USD for {offer.start_note or 'its start'}" if offer.start_usd else ""
    return f"{named(offer)} {offer.market} {offer.usd_per_hour:.4f} USD/h{hosts}{start}{day_of_price(offer)}"


def day_of_price(offer: Offer) -> str:
    """Return the day of an offer's price, such as ", price as of 2026-03-02"; "" if the provider stated no day."""
    return f", {offer.price_source}" if str(offer.price_source) else ""
