"""From offers to instances: which is tried, and what is told of those that were not to be had."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from skypool.errors import (
    AccessError,
    CapacityError,
    CredentialsError,
    LaunchError,
    NoOffers,
    OfferGone,
    ProviderError,
    QuotaError,
)
from skypool.launch import Attempts, launch_best, look_around
from skypool.model import Access, Instance, Need, Offer, Order


class Cloud:
    """A driver that does what it is told to: `says` has an error, or None, for each instance type."""

    def __init__(self, name: str, says: dict[str, Exception | None], shift: int = 0) -> None:
        self.name, self.says, self.shift = name, says, shift
        self.tried: list[str] = []
        self.running: list[Instance] = []

    def offers(self, need: Need) -> Iterable[Offer]:
        if "offers" in self.says and (error := self.says["offers"]):
            raise error
        return [Offer(provider=self.name, instance_type=each, usd_per_hour=i) for i, each in enumerate(self.says)]

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        self.tried.append(offer.instance_type)
        if error := self.says[offer.instance_type]:
            raise error
        self.running = [Instance(self.name, f"i{r}", order.pool, r + self.shift) for r in order.ranks]
        return self.running

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        return self.running

    def access(self, instance: Instance) -> Access:
        raise NotImplementedError

    def terminate(self, instances: Sequence[Instance]) -> None:
        self.running = [each for each in self.running if each not in instances]


ORDER = Order(pool="p", token="t", ranks=(0, 1), need=Need())


def launched(*clouds: Cloud) -> tuple[list[Instance], Attempts]:
    attempts: Attempts = []
    drivers: Any = clouds
    offers = asyncio.run(look_around(drivers, Need())).offers
    return launch_best(drivers, offers, ORDER, attempts), attempts


def test_the_next_offer_is_taken_when_one_is_out_of_stock() -> None:
    cloud = Cloud("a", {"small": CapacityError("none left"), "gone": OfferGone("taken"), "large": None})
    instances, attempts = launched(cloud)
    assert [each.rank for each in instances] == [0, 1]
    assert cloud.tried == ["small", "gone", "large"]
    assert [(offer.instance_type, str(error)) for offer, error in attempts] == [
        ("small", "none left"),
        ("gone", "taken"),
    ]


@pytest.mark.parametrize("error", [QuotaError("8 vCPUs"), CredentialsError("expired")])
def test_what_covers_a_whole_provider_spares_its_other_offers(error: ProviderError) -> None:
    first, second = Cloud("a", {"small": error, "large": None}), Cloud("b", {"small": None})
    instances, _ = launched(first, second)
    assert instances[0].provider == "b"
    assert first.tried == ["small"]


def test_any_other_error_ends_it_at_once() -> None:
    cloud = Cloud("a", {"small": AccessError("you may not"), "large": None})
    with pytest.raises(AccessError):
        launched(cloud)
    assert cloud.tried == ["small"]


def test_when_nothing_is_to_be_had_every_attempt_is_told() -> None:
    cloud = Cloud("a", {"small": CapacityError("none left"), "large": CapacityError("nor here")})
    with pytest.raises(LaunchError, match=r"none of 2 offers[\s\S]*a small *: none left[\s\S]*a large *: nor here"):
        launched(cloud)


def test_a_driver_that_launches_other_nodes_than_were_ordered_leaves_none() -> None:
    cloud = Cloud("a", {"small": None}, shift=5)
    with pytest.raises(LaunchError, match=r"a launched nodes \[5, 6\] for \[0, 1\]"):
        launched(cloud)
    assert cloud.running == []


def test_a_provider_that_cannot_be_asked_stops_nobody_but_itself() -> None:
    silent, other = Cloud("a", {"offers": CredentialsError("who are you")}), Cloud("b", {"small": None})
    drivers: Any = [silent, other]
    made = asyncio.run(look_around(drivers, Need()))
    assert [offer.provider for offer in made.offers] == ["b"]
    assert "who are you" in made.explain()
    with pytest.raises(CredentialsError):
        asyncio.run(look_around(drivers[:1], Need()))
    with pytest.raises(NoOffers):
        asyncio.run(look_around([Cloud("c", {})], Need()))  # type: ignore[list-item]  # a Cloud's name is its own
