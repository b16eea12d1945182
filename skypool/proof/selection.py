"""Chooses what the level "cents" rents, and computes what that can cost at most. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from skypool.errors import BudgetExceeded
from skypool.model import Offer

_HOUR = 3600.0
USUAL_SECONDS = 300.0
"""Seconds that a machine of the proof usually lives. The estimated cost is computed with them."""

StageName = Literal["first", "spot", "second", "guard"]


@dataclass(frozen=True, slots=True)
class Stage:
    """A machine that the proof rents, and what it is for.

    Attributes:
        name: "first" is the cheapest machine, "spot" the cheapest spot machine, "second" another machine like the
            first, and "guard" the machine whose client is killed.
        offer: the offer that the machine is expected to be rented on.
        most_usd: the most that the machine can cost, in US dollars.
    """

    name: StageName
    offer: Offer
    most_usd: float

    @property
    def usual_usd(self) -> float:
        """The usual cost of the machine, in US dollars."""
        return min(self.most_usd, cost(self.offer, USUAL_SECONDS))


@dataclass(frozen=True, slots=True)
class Selection:
    """The machines that the level "cents" rents.

    Attributes:
        stages: in the order in which they are rented.
        left_out: a text for each stage that is left out, and why.
        offers: all offers of the plan, to compare prices with.
    """

    stages: tuple[Stage, ...]
    left_out: tuple[str, ...]
    offers: tuple[Offer, ...]

    @property
    def usual_usd(self) -> float:
        """The usual cost of all stages, in US dollars."""
        return sum(each.usual_usd for each in self.stages)

    @property
    def most_usd(self) -> float:
        """The most that all stages can cost, in US dollars, if each machine ends when its lifetime is over."""
        return sum(each.most_usd for each in self.stages)


def cost(offer: Offer, seconds: float) -> float:
    """Return what `seconds` on an offer cost in US dollars, with `start_usd`. At least `least_billed` seconds count."""
    return offer.usd_per_hour * max(seconds, offer.least_billed) / _HOUR + offer.start_usd


def select(offers: Sequence[Offer], *, max_usd: float, lifetime: float, with_guard: bool) -> Selection:
    """Return what to rent for at most `max_usd` US dollars. Raise BudgetExceeded if the first machine costs more.

    The first machine is the cheapest on-demand machine, or the cheapest of all if there is none on demand. If the rest
    of the money suffices, a machine for the stage "guard" is added. If the rest still suffices, so is a spot machine,
    or a second machine like the first.

    Args:
        offers: the offers to choose from, the best first. At least one.
        lifetime: seconds after which each machine ends in any case.
        with_guard: True to add the machine for the stage "guard", which must end itself after its client is killed.
    """
    in_stock = [each for each in offers if each.available is not False] or list(offers)
    best = next((each for each in in_stock if each.market == "on-demand"), in_stock[0])
    spot = next((each for each in in_stock if each.market == "spot" and each is not best), None)
    first = Stage("first", best, cost(best, lifetime))
    if first.most_usd > max_usd:
        raise BudgetExceeded(
            f"the cheapest machine, {best.instance_type} in {best.zone or best.region or best.provider}, can cost "
            f"{first.most_usd:.2f} USD until it ends itself after {lifetime / 60:g} minutes, and --max-usd is "
            f"{max_usd:.2f}; raise --max-usd to {first.most_usd + 0.005:.2f}"
        )
    rest = max_usd - first.most_usd
    another = Stage("second", best, cost(best, lifetime))
    if spot is not None and cost(spot, lifetime) <= rest:
        another = Stage("spot", spot, cost(spot, lifetime))
    wanted = [Stage("guard", best, cost(best, lifetime))] if with_guard else []
    chosen: list[Stage] = []
    left_out: list[str] = []
    for stage in (*wanted, another):
        if stage.most_usd <= rest:
            chosen.append(stage)
            rest -= stage.most_usd
        else:
            left_out.append(f"{stage.name}: {stage.most_usd:.2f} USD are needed, and {rest:.2f} USD are left")
    order: dict[StageName, int] = {"spot": 0, "second": 0, "guard": 1}
    return Selection((first, *sorted(chosen, key=lambda each: order[each.name])), tuple(left_out), tuple(offers))
