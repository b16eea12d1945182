"""Filters and ranks offers: rejects those that do not meet the need, with a reason, and sorts the rest by price.

No provider is asked here. `filters` checks the offers, and `sort_keys` sorts those that pass all checks. The
result is a `Plan`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import groupby

from skypool import clock
from skypool.model import Need, Offer, PriceSource
from skypool.offers import advice
from skypool.offers.filters import checks_of, rejected
from skypool.offers.offer_text import day_of_price, described, named
from skypool.offers.sort_keys import (
    SPOT_DAYS,
    UNITS,
    OrderBy,
    divisor,
    has_known_price,
    outdated,
    price_bound,
    ranked_price,
    sorted_offers,
    sources_of,
)


@dataclass(frozen=True, slots=True)
class Rejected:
    """An offer that does not meet the need, and the reason in words: the first requirement that it does not meet."""

    offer: Offer
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The offers that a pool would try, in this order, and everything that was known when they were chosen.

    Attributes:
        offers: the offers that meet the need, ranked. Empty if none does.
        considered: all offers of the providers that answered.
        need: the requirements of each node.
        order_by: the order in which offers are ranked: "cheapest", "per-device", "per-tflop" or "per-gb".
        nodes: the smallest and the largest number of nodes that are wanted. If the offers are for slices (several
            machines that are rented together at one price), the numbers of slices.
        failures: the errors of providers that could not be asked, by provider name.
        notes: warnings, such as how old offers and prices are.
        today: the day, in UTC, to which the ages of prices refer.
    """

    offers: tuple[Offer, ...]
    considered: Sequence[Offer] = field(default=(), repr=False)
    need: Need = field(default_factory=Need)
    order_by: OrderBy = "cheapest"
    nodes: tuple[int, int] = (1, 1)
    failures: Mapping[str, BaseException] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    today: date = field(default_factory=clock.today)

    @property
    def best(self) -> Offer | None:
        """The offer that is tried first; None if no offer meets the need."""
        return self.offers[0] if self.offers else None

    @property
    def usd_per_hour(self) -> float | None:
        """The price in USD per hour of the smallest wanted number of nodes (or slices), on the best offer.

        None if no offer meets the need.
        """
        return self.offers[0].usd_per_hour * self.nodes[0] if self.offers else None

    @property
    def rejected(self) -> list[Rejected]:
        """Return the offers that do not meet the need, each with its reason, as a new list; [] if all meet it.

        The reason names the first requirement that the offer does not meet.
        """
        return [Rejected(offer, check.why(offer)) for check, offer in rejected(self.considered, self.need)]

    @property
    def is_short(self) -> bool:
        """Return True if no offer meets the need now, but waiting may help.

        Waiting may help if an offer would meet the need if it were in stock, or if no provider returned any offer.
        """
        missing = [replace(offer, available=None) for offer in self.considered if offer.available is False]
        return not self.offers and (
            not self.considered or bool(rank_offers(missing, self.need, today=self.today).offers)
        )

    def explain(self, most: int = 20) -> str:
        """Return the plan as text: each offer that meets the need, with its price, and why the others were rejected.

        Of the rejected offers, those that nearly meet the need come first. Errors of providers and warnings follow. If
        no offer meets the need, advice and these errors come before the rejected offers.

        Args:
            most: the largest number of offers that are listed one by one. Further offers that meet the need are only
                counted. If more offers are rejected, each reason has one line with an example. Default 20.
        """
        failed = [f"!  {name}: {str(error) or type(error).__name__}" for name, error in self.failures.items()]
        reasons = list(self._reasons(most))
        lines = [self._heading(), *self._places(most)]
        lines += [*reasons, *failed] if self.offers else [*self.advice(), *failed, *reasons]
        lines += [f"!  {note}" for note in (*self.notes, *_unknown(self.offers, self.order_by))]
        return "\n".join(line for line in lines if line)

    def advice(self) -> list[str]:
        """Return lines that name requirements to drop, each with the number of offers that would then meet the need.

        Each line drops a single requirement. A requirement has no line if dropping it would not help. The accelerator
        is never dropped, but a line says if another number of accelerators would do. If stock is short, a line says
        that a pool may wait. The list is empty if an offer meets the need already.
        """
        if self.offers:
            return []
        lines = advice.lines(
            self.considered, self.need, lambda need: rank_offers(self.considered, need, today=self.today).offers
        )
        if self.considered and self.is_short:
            lines.append("+  a pool can wait for machines that are out of stock: ComputePool(wait='1h')")
        return lines

    def _heading(self) -> str:
        fewest, most = self.nodes
        if not self.offers or (fewest, most) == (1, 1):
            return ""
        price = self.offers[0].usd_per_hour
        hosts = self.offers[0].hosts
        word = "node" if hosts == 1 else "slice"
        each = "" if hosts == 1 else f" of {hosts} nodes"
        more = f", {most} {word}s: {most * price:.4f} USD/h" if most > fewest else ""
        number = f"{fewest} {word}{'s' if fewest > 1 else ''}{each}"
        return f"{number}: {fewest * price:.4f} USD/h{more}{day_of_price(self.offers[0])}"

    def _places(self, most: int) -> Iterator[str]:
        for place, offer in enumerate(self.offers[:most], 1):
            ranked_by = "" if has_known_price(offer, self.today) else _instead(offer)
            yield f"{place}. {described(offer)}{ranked_by}{_per_unit(offer, self.order_by, self.today)}"
        if more := self.offers[most:]:
            prices = [offer.usd_per_hour for offer in more]
            yield f"   and {len(more):,} more, {min(prices):.4f} to {max(prices):.4f} USD/h"

    def _reasons(self, most: int) -> Iterator[str]:
        failed = list(rejected(self.considered, self.need))
        groups = [list(group) for _, group in groupby(failed, key=lambda pair: pair[0].title)]
        groups.reverse()  # those that failed the last check nearly meet the need
        if len(failed) <= most:
            told = (pair for members in groups for pair in members)
            yield from dict.fromkeys(f"-  {named(offer)}: {check.why(offer)}" for check, offer in told)
            return
        for members in groups:
            check, example = members[0]
            yield f"-  {len(members):,} {check.title}; {named(example)}: {check.why(example)}"


def rank_offers(
    offers: Iterable[Offer],
    need: Need,
    *,
    order_by: OrderBy = "cheapest",
    nodes: tuple[int, int] = (1, 1),
    failures: Mapping[str, BaseException] | None = None,
    notes: Sequence[str] = (),
    today: date | None = None,
) -> Plan:
    """Reject the offers that do not meet the need, and return a `Plan` with the rest ranked.

    Offers of equal rank are sorted by price, provider, place and type. A spot price is outdated if it is from a price
    table that is older than `SPOT_DAYS` (30 days) or has no day. An offer with an outdated price is ranked by the
    on-demand price of the same machine, or last if that is unknown. If no offer meets the need, the plan has no offers,
    and nothing is raised. With market "spot-if-available", spot offers come before all others.

    Args:
        order_by: "cheapest" ranks by the price of a node. "per-device" divides this price by the number of devices,
            "per-tflop" by dense BF16 TFLOPs, and "per-gb" by GB of device memory. An offer for which that number is
            unknown comes last.
        nodes, failures: only stored in the plan.
        notes: warnings for the plan. They come before the warnings that this function adds.
        today: the day, in UTC, to which the ages of prices refer; None means the present day.
    """
    considered = tuple(offers)
    serving = list(considered)
    for check in checks_of(considered, need):
        serves = check.serves
        serving = [offer for offer in serving if serves(offer)]
    day = today or clock.today()
    ranked = sorted_offers(serving, order_by, day)
    if need.market == "spot-if-available":
        ranked.sort(key=lambda offer: offer.market != "spot")
    told = (*notes, *_tables(ranked, day))
    return Plan(tuple(ranked), considered, need, order_by, nodes, failures or {}, told, day)


# --- prices from tables --------------------------------------------------------------------------------------


def _instead(offer: Offer) -> str:
    """Return a phrase that says how an offer with an outdated spot price is ranked: by its on-demand price, or last."""
    price = price_bound(offer)
    return ", ranked last, as its price is too old" if price == math.inf else f", ranked by {price:.4f} USD/h on demand"


def _tables(offers: Sequence[Offer], today: date) -> Iterator[str]:
    """Yield warnings: one for each price table of these offers, the most used first; then those on old spot prices."""
    if not any(source.kind == "table" for source in sources_of(offers)):
        return
    served = Counter((offer.provider, offer.price_source) for offer in offers if offer.price_source.kind == "table")
    every = Counter(offer.provider for offer in offers)
    for (provider, source), count in sorted(served.items(), key=lambda pair: -pair[1]):
        yield f"{provider}: {count:,} of {every[provider]:,} prices {_from(source)}; what is charged may differ"
    old = Counter(offer.provider for offer in outdated(offers, today))
    for provider, count in old.items():
        yield (
            f"{provider}: {count:,} spot prices from tables are older than {SPOT_DAYS} days, or of an unknown day: "
            "their offers are ranked by the on-demand price of the same machine, or last if that is unknown"
        )


def _from(source: PriceSource) -> str:
    """Return a phrase that says from which price table prices come, and why the provider's prices were not used."""
    origin = f" ({source.origin})" if source.origin else ""
    why = f": {source.why}" if source.why else ""
    return f"come from a table of {source.as_of or 'an unknown day'}{origin}, not from the provider{why}"


def _per_unit(offer: Offer, order_by: OrderBy, today: date) -> str:
    """Return a phrase with the price per unit, such as a device, by which an offer is ranked; "" for "cheapest"."""
    if order_by == "cheapest":
        return ""
    amount = divisor(offer, order_by)
    price = ranked_price(offer, today)
    known = amount and price < math.inf
    return (
        f", {price / amount:.3g} USD/h for each {UNITS[order_by]}"
        if known
        else f", price for each {UNITS[order_by]} not known"
    )


def _unknown(offers: Sequence[Offer], order_by: OrderBy) -> Iterator[str]:
    """Yield one warning if there are offers that come last because their price per unit is unknown."""
    if order_by == "cheapest":
        return
    unranked = [offer for offer in offers if not divisor(offer, order_by)]
    if unranked:
        names = sorted({offer.accelerator.name if offer.accelerator else "no accelerator" for offer in unranked})
        unit = UNITS[order_by]
        yield f"ranked last, as the price for each {unit} is not known: {len(unranked):,} with {', '.join(names)}"
