"""Which offer to take: pure. Offers in; a ranked list, and for each one left out the reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from skypool.model import Need, Offer


@dataclass(frozen=True, slots=True)
class Rejected:
    """An offer that will not be taken, and why."""

    offer: Offer
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What would be rented, best first.

    Attributes:
        rejected: offers that do not serve; failures: providers that could not be asked, and why.
    """

    offers: tuple[Offer, ...]
    rejected: tuple[Rejected, ...] = ()
    failures: Mapping[str, BaseException] | None = None

    def explain(self) -> str:
        """One line an offer: its place in the order, or why it has none."""
        lines = [
            f"{place}. {o.provider} {o.instance_type} {o.region} {o.market} {o.usd_per_hour:.4f} USD/h"
            for place, o in enumerate(self.offers, 1)
        ]
        lines += [f"-  {r.offer.provider} {r.offer.instance_type} {r.offer.region}: {r.reason}" for r in self.rejected]
        lines += [f"!  {name}: {error}" for name, error in (self.failures or {}).items()]
        return "\n".join(" ".join(line.split()) for line in lines)


def plan(
    offers: Iterable[Offer],
    need: Need,
    *,
    max_usd_per_hour: float | None = None,
    failures: Mapping[str, BaseException] | None = None,
) -> Plan:
    """Rank offers by the price per hour that will really be charged; ties by provider, place and name."""
    taken: list[Offer] = []
    rejected: list[Rejected] = []
    for offer in offers:
        if reason := _unfit(offer, need):
            rejected.append(Rejected(offer, reason))
        elif max_usd_per_hour is not None and offer.usd_per_hour > max_usd_per_hour:
            reason = f"{offer.usd_per_hour:.4f} USD/h is above the cap of {max_usd_per_hour:.4f}"
            rejected.append(Rejected(offer, reason))
        else:
            taken.append(offer)
    taken.sort(key=lambda o: (o.usd_per_hour, o.provider, o.region, o.zone, o.instance_type))
    return Plan(tuple(taken), tuple(rejected), failures)


def _unfit(offer: Offer, need: Need) -> str:
    """Why an offer does not serve the need, "" if it does."""
    has = offer.accelerator
    asked = [each for each in need.accelerators if each.kind != "cpu"]
    if len(asked) < len(need.accelerators) or not need.accelerators:
        return ""
    if has is not None and any(each.accepts(has) for each in asked):
        return ""
    return f"it has {has or 'no accelerator'}, and {' or '.join(map(str, asked))} is asked for"
