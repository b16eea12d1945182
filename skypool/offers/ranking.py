"""Filters and ranks offers: rejects those that do not meet the need, with a reason, and sorts the rest by price.

This module is pure: it takes offers and returns a `Plan`.

A cloud's catalogue has 100,000 offers, and a handful of them meet a need. So each check sees only the offers that
passed the checks before it, and only offers that pass all are ranked. Reasons are formatted when somebody reads them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from fnmatch import fnmatchcase
from itertools import groupby
from operator import attrgetter, eq
from typing import Literal, get_args

from skypool import clock
from skypool.checks import warn_renamed
from skypool.model import Need, Offer, PriceSource

OrderBy = Literal["cheapest", "per-device", "per-tflop", "per-gb"]
ORDERS: tuple[OrderBy, ...] = get_args(OrderBy)
SPOT_DAYS = 30
"""Days for which a spot price from a table is ranked as it stands. Google may change its spot prices every 30 days, and
keeps them below its on-demand prices: https://cloud.google.com/skus (read 2026-11-22 in a stored copy)."""
_price = attrgetter("usd_per_hour")


@dataclass(frozen=True, slots=True)
class Rejected:
    """An offer that does not meet the need, and the reason in words."""

    offer: Offer
    reason: str


@dataclass(frozen=True, slots=True)
class Check:
    """One requirement that an offer must meet.

    Attributes:
        title: the reason for many rejected offers together, such as "have fewer vCPUs".
        serves: returns True if an offer meets the requirement.
        why: returns the reason for one rejected offer, such as "it has 4 vCPUs, and 8 are asked for".
    """

    title: str
    serves: Callable[[Offer], bool]
    why: Callable[[Offer], str]


@dataclass(frozen=True, slots=True)
class Plan:
    """The offers that a pool would try, best first, and everything that was known when they were chosen.

    Attributes:
        offers: the offers that meet the need, ranked. Empty if none does.
        considered: all offers of the providers that answered.
        need: the requirements of each node.
        order_by: the figure by which offers are ranked, as `rank_offers` takes it.
        nodes: how many nodes are wanted, as (fewest, most). For offers of slices, how many slices.
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
    def rank(self) -> OrderBy:
        """Return `order_by`. This former name is deprecated and warns."""
        warn_renamed("Plan.rank", "Plan.order_by")
        return self.order_by

    @property
    def best(self) -> Offer | None:
        """Return the offer that is tried first; None if no offer serves."""
        return self.offers[0] if self.offers else None

    @property
    def usd_per_hour(self) -> float | None:
        """Return the price in USD per hour of the fewest nodes (or slices) on the best offer.

        Returns None if no offer serves.
        """
        return self.offers[0].usd_per_hour * self.nodes[0] if self.offers else None

    @property
    def rejected(self) -> list[Rejected]:
        """Return the offers that do not serve, each with its reason. The reasons are formatted on every access."""
        return [Rejected(offer, check.why(offer)) for check, offer in _failed(self.considered, self.need)]

    @property
    def is_short(self) -> bool:
        """Return True if no offer serves now, but waiting may help.

        That is so if an offer would serve if it were in stock, or if the providers had no offers at all.
        """
        missing = [replace(offer, available=None) for offer in self.considered if offer.available is False]
        return not self.offers and (
            not self.considered or bool(rank_offers(missing, self.need, today=self.today).offers)
        )

    def explain(self, most: int = 20) -> str:
        """Return the plan as text: each serving offer with its place and price, and why the others were rejected.

        Warnings and failed providers follow. If more than `most` offers were rejected, each kind of reason is one line
        with an example.

        Args:
            most: how many serving offers, and how many rejected ones, are listed one by one. The rest is counted.
        """
        lines = [self._heading(), *self._places(most), *self._reasons(most), *self.advice()]
        lines += [f"!  {name}: {str(error) or type(error).__name__}" for name, error in self.failures.items()]
        lines += [f"!  {note}" for note in (*self.notes, *_unknown(self.offers, self.order_by))]
        return "\n".join(line for line in lines if line)

    def advice(self) -> list[str]:
        """Return lines that say how to get an offer: for each requirement, how many offers would serve without it.

        Requirements without which no offer would serve either are left out. The list is empty if an offer serves
        already.
        """
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
        price, hosts = self.offers[0].usd_per_hour, self.offers[0].hosts
        word = "node" if hosts == 1 else "slice"
        each = "" if hosts == 1 else f" of {hosts} nodes"
        more = f", {most} {word}s: {most * price:.4f} USD/h" if most > fewest else ""
        return (
            f"{fewest} {word}{'s' if fewest > 1 else ''}{each}: {fewest * price:.4f} USD/h{more}{_day(self.offers[0])}"
        )

    def _places(self, most: int) -> Iterator[str]:
        for place, offer in enumerate(self.offers[:most], 1):
            ranked_by = "" if _is_known(offer, self.today) else _instead(offer)
            yield f"{place}. {described(offer)}{ranked_by}{_per_unit(offer, self.order_by, self.today)}"
        if more := self.offers[most:]:
            prices = [offer.usd_per_hour for offer in more]
            yield f"   and {len(more):,} more, {min(prices):.4f} to {max(prices):.4f} USD/h"

    def _reasons(self, most: int) -> Iterator[str]:
        failed = list(_failed(self.considered, self.need))
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
    """Reject the offers that do not meet the need, and rank the rest. Ties are ordered by provider, place and name.

    A spot price from a table older than `SPOT_DAYS` is outdated. Such an offer is ranked by the on-demand price of the
    same machine, and last if that is unknown.

    Args:
        offers: the offers of all providers.
        need: the requirements of one node. With market "spot-if-available", spot offers come before all others.
        order_by: "cheapest" ranks by the price of a node. The others divide that price by the number of devices, by
            dense BF16 TFLOPs, or by GB of device memory. An offer without that figure comes last.
        nodes: how many nodes or slices are wanted, as (fewest, most); for the plan only.
        failures: errors of providers that could not be asked, by provider name; for the plan only.
        notes: warnings for the plan, which come before those of this function.
        today: the day, in UTC, to which the ages of prices refer; None means the present day.
    """
    considered = tuple(offers)
    serving = list(considered)
    for check in _checks(considered, need):
        serves = check.serves
        serving = [offer for offer in serving if serves(offer)]
    day = today or clock.today()
    ranked = _ranked(serving, order_by, day)
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
    """Return an offer's name: provider, instance type, region and zone, separated by spaces.

    Empty parts are left out.
    """
    return " ".join(filter(None, (offer.provider, offer.instance_type, offer.region, offer.zone)))


def described(offer: Offer) -> str:
    """Return an offer on one line: its name, market, price, number of hosts if several, and the day of its price."""
    hosts = f" for {offer.hosts} hosts" if offer.hosts > 1 else ""
    return f"{named(offer)} {offer.market} {offer.usd_per_hour:.4f} USD/h{hosts}{_day(offer)}"


# --- prices from tables --------------------------------------------------------------------------------------


def _day(offer: Offer) -> str:
    """Return ", price as of 2026-03-02 (table)"; "" if the provider stated the price when it was asked."""
    return f", {offer.price_source}" if str(offer.price_source) else ""


def _is_known(offer: Offer, today: date) -> bool:
    """Return False if an offer has an outdated spot price.

    A spot price is outdated if it comes from a table that is older than `SPOT_DAYS` or has an unknown day.
    """
    return offer.market != "spot" or not offer.price_source.is_outdated(today, SPOT_DAYS)


def _bound(offer: Offer) -> float:
    """Return the price that replaces an outdated spot price in the ranking.

    This is the on-demand price, or the spot price if that is higher; infinity if the on-demand price is unknown.
    """
    usual = offer.on_demand_usd_per_hour
    return math.inf if usual is None else max(usual, offer.usd_per_hour)


def _instead(offer: Offer) -> str:
    """Return a phrase that says how an offer with an outdated spot price is ranked: by another price, or last."""
    bound = _bound(offer)
    return ", ranked last, as its price is too old" if bound == math.inf else f", ranked by {bound:.4f} USD/h on demand"


def _tables(offers: Sequence[Offer], today: date) -> Iterator[str]:
    """Yield a warning for each price table that served, and one for each provider with outdated spot prices."""
    served = Counter((offer.provider, offer.price_source) for offer in offers if offer.price_source.kind == "table")
    every = Counter(offer.provider for offer in offers) if served else Counter[str]()
    for (provider, source), count in sorted(served.items(), key=lambda pair: -pair[1]):
        yield f"{provider}: {count:,} of {every[provider]:,} prices {_from(source)}; what is charged may differ"
    old = Counter(offer.provider for offer in offers if not _is_known(offer, today)) if served else Counter[str]()
    for provider, count in old.items():
        yield (
            f"{provider}: {count:,} spot prices from tables are older than {SPOT_DAYS} days, or of an unknown day: "
            "their offers are ranked by the on-demand price of the same machine, or last if that is unknown"
        )


def _from(source: PriceSource) -> str:
    """Return a phrase that says from which table prices come, and why the provider's own prices were not used."""
    origin, why = (f" ({source.origin})" if source.origin else ""), (f": {source.why}" if source.why else "")
    return f"come from a table of {source.as_of or 'an unknown day'}{origin}, not from the provider{why}"


# --- the order -----------------------------------------------------------------------------------------------


def _ranked(offers: list[Offer], order_by: OrderBy, today: date) -> list[Offer]:
    """Return the offers sorted by the figure that `order_by` names.

    Sorting by numbers alone is fast, so names are compared only among offers with equal figures.
    """
    bounds = {id(offer): _bound(offer) for offer in offers if not _is_known(offer, today)}
    price: Callable[[Offer], float] = (lambda o: bounds.get(id(o), o.usd_per_hour)) if bounds else _price
    if order_by == "cheapest":
        score = price
    else:
        amounts = {id(offer.accelerator): _amount(offer, order_by) for offer in offers}
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
    """Return the sort key for offers with the same figure: price, provider, place, type."""
    return offer.usd_per_hour, offer.provider, offer.region, offer.zone, offer.instance_type


def _share(price: float, amount: float) -> float:
    """Return the price divided by the amount; infinity if the amount is 0."""
    return price / amount if amount else math.inf


_UNITS = {"per-device": "device", "per-tflop": "dense BF16 TFLOP", "per-gb": "GB of device memory"}


def _per_unit(offer: Offer, order_by: OrderBy, today: date) -> str:
    """Return a phrase with the price per unit by which an offer is ranked; "" for the order "cheapest"."""
    if order_by == "cheapest":
        return ""
    amount = _amount(offer, order_by)
    price = offer.usd_per_hour if _is_known(offer, today) else _bound(offer)
    known = amount and price < math.inf
    return f", {price / amount:.3g} USD/h for each {_UNITS[order_by]}" if known else ", per unit: not known"


def _unknown(offers: Sequence[Offer], order_by: OrderBy) -> Iterator[str]:
    """Yield a warning if offers come last because their accelerators lack the figure for this order."""
    if order_by == "cheapest":
        return
    unranked = [offer for offer in offers if not _amount(offer, order_by)]
    if unranked:
        names = sorted({offer.accelerator.name if offer.accelerator else "no accelerator" for offer in unranked})
        unit = _UNITS[order_by]
        yield f"{len(unranked):,} come last, as no figure for a {unit} is known: {', '.join(names)}"


def _amount(offer: Offer, order_by: OrderBy) -> float:
    """Return by how much an offer's price is divided for this order: devices, GB or TFLOPs. 0 if that is unknown."""
    has = offer.accelerator
    if has is None:
        return 0.0
    if order_by == "per-device":
        return has.count
    if order_by == "per-gb":
        return has.total_memory_gb
    tflops = has.metadata.bf16_tflops or 0.0
    return tflops * has.count * (has.part.compute_slices / has.part.compute_slices_of if has.part else 1)


# --- the checks ----------------------------------------------------------------------------------------------


def _failed(offers: Sequence[Offer], need: Need) -> Iterator[tuple[Check, Offer]]:
    """Yield each rejected offer with the first check that it fails, grouped by check."""
    left = list(offers)
    for check in _checks(offers, need):
        served = []
        for offer in left:
            if check.serves(offer):
                served.append(offer)
            else:
                yield check, offer
        left = served


def _checks(offers: Sequence[Offer], need: Need) -> list[Check]:
    """Return the checks that a need requires. Checks that reject the most offers come first, for speed."""
    found = [*_hardware(offers, need), *_place_and_market(offers, need), *_sizes(need)]
    found.append(
        Check("have no price", lambda o: 0 <= o.usd_per_hour < math.inf, lambda o: f"its price is {o.usd_per_hour}")
    )
    cap = need.max_usd_per_hour
    if cap is not None:
        found.append(
            Check(
                "cost more than the cap",
                lambda o: o.usd_per_hour <= cap,
                lambda o: f"{o.usd_per_hour:.4f} USD/h is above the cap of {cap:.4f}",
            )
        )
    return found


def _hardware(offers: Sequence[Offer], need: Need) -> Iterator[Check]:
    """Yield the checks of accelerator and processor architecture that a need requires.

    If only CPUs are wanted, slices of several hosts are rejected.
    """
    asked = [each for each in need.accelerators if each.kind != "cpu"]
    if asked and len(asked) == len(need.accelerators):
        kinds = {id(offer.accelerator): offer.accelerator for offer in offers}
        fit = {key for key, has in kinds.items() if has is not None and any(each.accepts(has) for each in asked)}
        wanted = " or ".join(map(str, asked))
        yield Check(
            "have other accelerators, or none",
            lambda o: id(o.accelerator) in fit,
            lambda o: f"it has {o.accelerator or 'no accelerator'}, and {wanted} is asked for",
        )
    elif any(offer.hosts > 1 for offer in offers):
        yield Check(
            "come as slices of several hosts",
            lambda o: o.hosts == 1 or any(each.accepts(o.accelerator) for each in asked if o.accelerator),
            lambda o: f"it is a slice of {o.hosts} hosts, and no such slice is asked for",
        )
    if need.arch is not None:
        yield Check(
            "have another processor",
            lambda o: o.arch is None or o.arch == need.arch,
            lambda o: f"its processor is {o.arch}, and {need.arch} is asked for",
        )


def _place_and_market(offers: Sequence[Offer], need: Need) -> Iterator[Check]:
    """Yield the checks of region, market and stock that a need requires."""
    if need.regions:
        patterns = [each.casefold() for each in need.regions]
        regions = {offer.region for offer in offers}
        inside = {each for each in regions if any(fnmatchcase(each.casefold(), pattern) for pattern in patterns)}
        asked = " or ".join(need.regions)
        yield Check(
            "are in other places",
            lambda o: o.region in inside,
            lambda o: f"it is in {o.region or 'no region'}, and {asked} is asked for",
        )
    if need.market in ("on-demand", "spot"):
        yield Check(
            "are on the other market",
            lambda o: o.market == need.market,
            lambda o: f"it is sold {_market(o.market)}, and market={need.market!r} is asked for",
        )
    yield Check("are out of stock", lambda o: o.available is not False, lambda o: "it is out of stock")


def _market(market: str) -> str:
    """Return the name of a market in a sentence: "as spot" or "on demand"."""
    return "as spot" if market == "spot" else "on demand"


def _sizes(need: Need) -> Iterator[Check]:
    """Yield the checks of vCPUs, memory and disk that a need requires. An offer that does not state a size passes."""
    if need.vcpus:
        yield Check(
            "have fewer vCPUs",
            lambda o: o.vcpus is None or o.vcpus >= need.vcpus,
            lambda o: f"it has {o.vcpus:g} vCPUs, and {need.vcpus:g} are asked for",
        )
    if need.memory_gib:
        yield Check(
            "have less memory",
            lambda o: o.memory_gib is None or o.memory_gib >= need.memory_gib,
            lambda o: f"it has {o.memory_gib:g} GiB of memory, and {need.memory_gib:g} are asked for",
        )
    if need.disk_gib:
        yield Check(
            "have a smaller disk",
            lambda o: o.disk_gib is None or o.disk_gib >= need.disk_gib,
            lambda o: f"its disk has {o.disk_gib:g} GiB, and {need.disk_gib:g} are asked for",
        )
