"""Tells which requirement to drop or to change if no offer meets a need. No provider is asked here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from skypool.errors import nearest
from skypool.model import Need, Offer
from skypool.offers.offer_text import described

_MOST_REGIONS = 8
"""The most regions that a line names."""


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

Ranked = Callable[[Need], Sequence[Offer]]
"""Returns the offers that meet another need, the best first."""


def lines(considered: Sequence[Offer], need: Need, ranked: Ranked) -> list[str]:
    """Return a line for each single requirement without which offers would meet the need, with their number."""
    found = [*_other_regions(considered, need), *_other_counts(considered, need, ranked)]
    for name, called in _ARGUMENTS.items():
        if getattr(need, name) == getattr(_ANY, name):
            continue
        without = ranked(replace(need, **{name: getattr(_ANY, name)}))
        if without:
            found.append(f"+  without {called}=, {len(without):,} would do; the best: {described(without[0])}")
    return found


def _other_regions(considered: Sequence[Offer], need: Need) -> Iterator[str]:
    """Yield a line for each region that is asked for and has no offer, with the names of similar ones."""
    regions = sorted({offer.region for offer in considered if offer.region})
    for asked in need.regions if regions else ():
        if not any(fnmatchcase(each.casefold(), asked.casefold()) for each in regions):
            close = nearest(asked, regions)
            others = ", ".join(regions[:_MOST_REGIONS]) + (" …" if len(regions) > _MOST_REGIONS else "")
            hint = f"did you mean {' or '.join(close)}?" if close else f"there are offers in {others}"
            yield f"+  no offer is in region {asked!r}; {hint}"


def _other_counts(considered: Sequence[Offer], need: Need, ranked: Ranked) -> Iterator[str]:
    """Yield a line for each wanted accelerator for which there is an offer with another number of it."""
    for wanted in need.accelerators:
        if wanted.kind == "cpu" or wanted.slice is not None:
            continue
        there = {o.accelerator.count for o in considered if o.accelerator and o.accelerator.could_be(wanted)}
        others = tuple(wanted.with_count(count) for count in sorted(there - {wanted.count}))
        if not others:
            continue  # an empty tuple would ask for any accelerator
        best = next(iter(ranked(replace(need, accelerators=others))), None)
        if best is not None and best.accelerator is not None:
            spelt = str(wanted.with_count(best.accelerator.count))
            yield f"+  with accelerator={spelt!r}, this would do: {described(best)}"
