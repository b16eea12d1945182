"""Rejects offers that do not meet a need, each with a reason. All functions are pure.

A large provider has 100,000 offers, and a handful of them meet a need. So each check sees only the offers that passed
the checks before it. The text of a reason is made only when somebody reads it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from skypool.model import Need, Offer


@dataclass(frozen=True, slots=True)
class Check:
    """One requirement that an offer must meet, and the texts about offers that do not meet it.

    Attributes:
        title: the reason for a group of rejected offers, such as "have fewer vCPUs".
        serves: returns True if an offer meets the requirement.
        why: returns the reason for one rejected offer, such as "it has 4 vCPUs, and 8 are asked for".
    """

    title: str
    serves: Callable[[Offer], bool]
    why: Callable[[Offer], str]


def rejected(offers: Sequence[Offer], need: Need) -> Iterator[tuple[Check, Offer]]:
    """Yield (check, offer) for each offer that does not meet the need. `check` is the first check that it fails.

    The pairs are grouped by their check.
    """
    left = list(offers)
    for check in checks_of(offers, need):
        served = []
        for offer in left:
            if check.serves(offer):
                served.append(offer)
            else:
                yield check, offer
        left = served


def checks_of(offers: Sequence[Offer], need: Need) -> list[Check]:
    """Return the checks that a need asks for, in the order in which to apply them.

    Checks that reject the most offers come first, for speed. Two of the checks apply to every need: an offer must have
    a finite price that is not negative, and must not be out of stock. The other checks depend on the accelerators,
    regions and slices among all `offers`.
    """
    found = [*_hardware(offers, need), *_place_and_market(offers, need), *_sizes(need)]
    found.append(
        Check(
            "have no valid price",
            lambda o: 0 <= o.usd_per_hour < math.inf,
            lambda o: f"its price of {o.usd_per_hour} USD/h is not valid",
        )
    )
    cap = need.max_usd_per_hour
    if cap is not None:
        found.append(
            Check(
                "cost more than max_usd_per_hour allows",
                lambda o: o.usd_per_hour <= cap,
                lambda o: f"{o.usd_per_hour:.4f} USD/h is above max_usd_per_hour={cap:.4f}",
            )
        )
    return found


def _hardware(offers: Sequence[Offer], need: Need) -> Iterator[Check]:
    """Yield the checks of accelerator and processor architecture. An offer of unknown architecture passes."""
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
    elif any(offer.hosts > 1 for offer in offers):  # machines without accelerator are accepted, too
        yield Check(
            "are slices (groups of machines that are rented together)",
            lambda o: o.hosts == 1 or any(each.accepts(o.accelerator) for each in asked if o.accelerator),
            lambda o: f"it is a slice (a group) of {o.hosts} machines, and no such slice is asked for",
        )
    if need.arch is not None:
        yield Check(
            "have another processor",
            lambda o: o.arch is None or o.arch == need.arch,
            lambda o: f"its processor is {o.arch}, and {need.arch} is asked for",
        )


def _place_and_market(offers: Sequence[Offer], need: Need) -> Iterator[Check]:
    """Yield the checks of region, market and stock. An offer that does not say whether it is in stock passes."""
    if need.regions:
        patterns = [each.casefold() for each in need.regions]
        regions = {offer.region for offer in offers}
        inside = {each for each in regions if any(fnmatchcase(each.casefold(), pattern) for pattern in patterns)}
        asked = " or ".join(need.regions)
        yield Check(
            "are in other regions",
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
    return "as spot" if market == "spot" else "on demand"


def _sizes(need: Need) -> Iterator[Check]:
    """Yield the checks of vCPUs, memory and disk. An offer that does not state a size passes."""
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
