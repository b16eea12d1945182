"""Filters and ranks offers: what does not meet the need is rejected with a reason, the rest is sorted by price.

It is pure: it takes offers and returns a `Plan`.
`filters` has the checks, and `ordering` the order of what passes them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import groupby

from skypool import clock
from skypool.checks import warn_renamed
from skypool.model import Need, Offer, PriceSource
from skypool.offers.filters import checks_of, rejected
from skypool.offers.ordering import SPOT_DAYS, UNITS, OrderBy, divisor, has_known_price, price_bound, sorted_offers


@dataclass(frozen=True, slots=True)
class Rejected:
    """An offer that will not be taken, and why."""

    offer: Offer
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What would be rented, best first.

    Attributes:
        offers: those that serve, ranked; considered: all that there were.
        nodes: how many are asked for, (fewest, most): of offers that are slices of several hosts, so many slices.
        failures: providers that could not be asked, and why; notes: what else to know, such as how old offers and
            prices are.
        today: the day by which the age of a price was told, in UTC.
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
    def rank(self) -> OrderBy:
        """The former name of `order_by`."""
        warn_renamed("Plan.rank", "Plan.order_by")
        return self.order_by

    @property
    def best(self) -> Offer | None:
        """The offer that is tried first; None where none serves."""
        return self.offers[0] if self.offers else None

    @property
    def usd_per_hour(self) -> float | None:
        """What the fewest nodes, or slices, cost together on the best offer; None where none serves."""
        return self.offers[0].usd_per_hour * self.nodes[0] if self.offers else None

    @property
    def rejected(self) -> list[Rejected]:
        """Offers that do not serve, and why; put into words now."""
        return [Rejected(offer, check.why(offer)) for check, offer in rejected(self.considered, self.need)]

    @property
    def is_short(self) -> bool:
        """Whether nothing serves only because it is out of stock, or because nothing at all is sold just now."""
        missing = [replace(offer, available=None) for offer in self.considered if offer.available is False]
        return not self.offers and (
            not self.considered or bool(rank_offers(missing, self.need, today=self.today).offers)
        )

    def explain(self, most: int = 20) -> str:
        """Each offer's place in the order, or why it has none; each kind of reason once where there are many.

        Args:
            most: so many lines of each sort; what is beyond them is counted.
        """
        lines = [self._heading(), *self._places(most), *self._reasons(most), *self.advice()]
        lines += [f"!  {name}: {str(error) or type(error).__name__}" for name, error in self.failures.items()]
        lines += [f"!  {note}" for note in (*self.notes, *_unknown(self.offers, self.order_by))]
        return "\n".join(line for line in lines if line)

    def advice(self) -> list[str]:
        """Where nothing serves: what each thing asked for keeps out alone."""
        if self.offers:
            return []
        found = []
        for name, called in _ARGUMENTS.items():
            if getattr(self.need, name) == getattr(_ANY, name):
                continue
            wider = replace(self.need, **{name: getattr(_ANY, name)})
            without = rank_offers(self.considered, wider, today=self.today).offers
            if without:
                found.append(f"+  without {called}= {len(without):,} would serve; the best: {described(without[0])}")
        if self.considered and self.is_short:
            found.append("+  a pool may wait for what is out of stock: ComputePool(wait='1h')")
        return found

    def _heading(self) -> str:
        fewest, most = self.nodes
        if not self.offers or (fewest, most) == (1, 1):
            return ""
        price = self.offers[0].usd_per_hour
        hosts = self.offers[0].hosts
        word = "node" if hosts == 1 else "slice"
        each = "" if hosts == 1 else f" of {hosts} nodes"
        more = f", {most} {word}s: {most * price:.4f} USD/h" if most > fewest else ""
        return (
            f"{fewest} {word}{'s' if fewest > 1 else ''}{each}: {fewest * price:.4f} USD/h{more}{_day(self.offers[0])}"
        )

    def _places(self, most: int) -> Iterator[str]:
        for place, offer in enumerate(self.offers[:most], 1):
            ranked_by = "" if has_known_price(offer, self.today) else _instead(offer)
            yield f"{place}. {described(offer)}{ranked_by}{_per_unit(offer, self.order_by, self.today)}"
        if more := self.offers[most:]:
            prices = [offer.usd_per_hour for offer in more]
            yield f"   and {len(more):,} more, {min(prices):.4f} to {max(prices):.4f} USD/h"

    def _reasons(self, most: int) -> Iterator[str]:
        failed = list(rejected(self.considered, self.need))
        if len(failed) <= most:
            yield from dict.fromkeys(f"-  {named(offer)}: {check.why(offer)}" for check, offer in failed)
            return
        for title, group in groupby(failed, key=lambda pair: pair[0].title):
            members = list(group)
            check, example = members[0]
            yield f"-  {len(members):,} {title}; {named(example)}: {check.why(example)}"


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
    """Leave out what does not serve and rank the rest; ties by provider, place and name.

    A spot price of a table that is older than `SPOT_DAYS` is no longer known. Such an offer is ranked by the price of
    the same on demand, and last where that is not known.

    Args:
        today: the day by which a price is old, in UTC; None is today.
        order_by: the price of a node ("cheapest"), or by that price for each device, each dense BF16 TFLOP or each
            GB of the devices' memory; an offer that has none of these comes last.
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


_ANY = Need(market="cheapest")
_ARGUMENTS = {
    "market": "market",
    "max_usd_per_hour": "max_usd_per_hour",
    "regions": "region",
    "vcpus": "vcpus",
    "memory_gib": "memory",
    "disk_gib": "disk",
    "arch": "arch",
}


def named(offer: Offer) -> str:
    """An offer as it is called: provider, type, place."""
    return " ".join(filter(None, (offer.provider, offer.instance_type, offer.region, offer.zone)))


def described(offer: Offer) -> str:
    """An offer in a line, with its market and price."""
    hosts = f" for {offer.hosts} hosts" if offer.hosts > 1 else ""
    return f"{named(offer)} {offer.market} {offer.usd_per_hour:.4f} USD/h{hosts}{_day(offer)}"


# --- prices from tables --------------------------------------------------------------------------------------


def _day(offer: Offer) -> str:
    """Return ", price as of 2026-03-02 (table)"; "" for what the provider told at the time of the request."""
    return f", {offer.price_source}" if str(offer.price_source) else ""


def _instead(offer: Offer) -> str:
    """Say how an offer with an old spot price is ranked."""
    price = price_bound(offer)
    return ", ranked last, as its price is too old" if price == math.inf else f", ranked by {price:.4f} USD/h on demand"


def _tables(offers: Sequence[Offer], today: date) -> Iterator[str]:
    """Warn of each table that served, and of spot prices that are too old to be ranked by."""
    served = Counter((offer.provider, offer.price_source) for offer in offers if offer.price_source.kind == "table")
    every = Counter(offer.provider for offer in offers) if served else Counter[str]()
    for (provider, source), count in sorted(served.items(), key=lambda pair: -pair[1]):
        yield f"{provider}: {count:,} of {every[provider]:,} prices {_from(source)}; what is charged may differ"
    old = Counter(offer.provider for offer in offers if not has_known_price(offer, today)) if served else Counter[str]()
    for provider, count in old.items():
        yield (
            f"{provider}: {count:,} spot prices from tables are older than {SPOT_DAYS} days, or of an unknown day: "
            "they are ranked by the price of the same on demand, or last where that is not known"
        )


def _from(source: PriceSource) -> str:
    origin = f" ({source.origin})" if source.origin else ""
    why = f": {source.why}" if source.why else ""
    return f"come from a table of {source.as_of or 'an unknown day'}{origin}, not from the provider{why}"


def _per_unit(offer: Offer, order_by: OrderBy, today: date) -> str:
    """What the order goes by, where that is not the price alone."""
    if order_by == "cheapest":
        return ""
    amount = divisor(offer, order_by)
    price = offer.usd_per_hour if has_known_price(offer, today) else price_bound(offer)
    known = amount and price < math.inf
    return f", {price / amount:.3g} USD/h for each {UNITS[order_by]}" if known else ", per unit: not known"


def _unknown(offers: Sequence[Offer], order_by: OrderBy) -> Iterator[str]:
    """What comes last because it has no figure to rank it by."""
    if order_by == "cheapest":
        return
    unranked = [offer for offer in offers if not divisor(offer, order_by)]
    if unranked:
        names = sorted({offer.accelerator.name if offer.accelerator else "no accelerator" for offer in unranked})
        unit = UNITS[order_by]
        yield f"{len(unranked):,} come last, as no figure for a {unit} is known: {', '.join(names)}"
