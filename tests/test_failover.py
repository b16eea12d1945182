"""Failover over whole clouds: whatever is out of stock, used up or refused, the cheapest that can be had is rented."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skypool.accelerators import TPU
from skypool.errors import (
    AccessError,
    CapacityError,
    CredentialsError,
    FundsError,
    LaunchError,
    OfferGone,
    ProviderError,
    QuotaError,
)
from skypool.model import Access, Instance, Need, Offer, Order
from skypool.offers.ranking import rank_offers
from skypool.rental.launch import Launcher

SLICE = TPU("v5p-16")
CLOUDS, REGIONS, ZONES, KINDS = ("a", "b", "c"), ("r1", "r2"), ("z1", "z2"), ("p", "g")


@dataclass
class World:
    """Some clouds and what they have: of each offer so many; places, limits and whole clouds that refuse.

    Of each that is had so many hosts come.
    """

    stock: dict[tuple[str, str, str, str, str], int]
    prices: dict[tuple[str, str, str, str, str], float]
    gone: set[tuple[str, str, str, str, str]]
    used_up: set[tuple[str, str]]
    closed: set[tuple[str, str]]
    strangers: dict[str, type[ProviderError]]
    hosts: int = 1
    creates: list[tuple[str, Offer]] = field(default_factory=list)

    def offers(self) -> list[Offer]:
        return [
            Offer(
                provider=cloud,
                instance_type=kind,
                region=region,
                zone=f"{region}-{zone}",
                market="spot" if market == "spot" else "on-demand",
                usd_per_hour=price,
                quota=f"{region} {market} {kind}",
                accelerator=SLICE,
                hosts=self.hosts,
            )
            for (cloud, region, zone, kind, market), price in self.prices.items()
        ]

    def refusal(self, offer: Offer) -> ProviderError | None:
        """Why this offer cannot be had now; None if it can."""
        key = offer.provider, offer.region, offer.zone.split("-")[1], offer.instance_type, offer.market
        if offer.provider in self.strangers:
            return self.strangers[offer.provider]("who are you")
        if (offer.provider, offer.region) in self.closed:
            return AccessError("not opted in")
        if (offer.provider, offer.quota) in self.used_up:
            return QuotaError("your limit is 0")
        if key in self.gone:
            return OfferGone("somebody was faster")
        return None if self.stock[key] else CapacityError("none left")

    def take(self, offer: Offer, order: Order) -> list[Instance]:
        self.creates.append((order.token, offer))
        if error := self.refusal(offer):
            raise error
        key = offer.provider, offer.region, offer.zone.split("-")[1], offer.instance_type, offer.market
        nodes = order.nodes[: self.stock[key] * self.hosts]
        self.stock[key] -= len(nodes) // self.hosts
        name = f"{offer.provider}-{order.token}" if self.hosts > 1 else ""
        return [
            Instance(offer.provider, f"{order.token}-{r}", order.pool, r, offer=offer, slice=name and f"{name}-{n}")
            for n, r in ((n // self.hosts, r) for n, r in enumerate(nodes))
        ]


@dataclass(frozen=True)
class Cloud:
    name: str
    world: World

    def offers(self, need: Need) -> Iterable[Offer]:
        return [each for each in self.world.offers() if each.provider == self.name]

    def launch(self, offer: Offer, order: Order) -> list[Instance]:
        return self.world.take(offer, order)

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        return []

    def access(self, instance: Instance) -> Access:
        raise AssertionError("nobody connects here")

    def terminate(self, instances: Sequence[Instance]) -> None:
        raise AssertionError("nothing was rented that was not asked for")


class Book:
    def __init__(self) -> None:
        self.open: set[str] = set()

    def intend(self, order: Order, offer: Offer) -> None:
        assert order.token not in self.open
        self.open.add(order.token)

    def rented(self, order: Order, instances: Sequence[Instance]) -> None:
        self.open.remove(order.token)

    def refused(self, order: Order, error: Exception) -> None:
        self.open.remove(order.token)

    def failed(self, order: Order) -> None:
        """Nothing was made."""


@st.composite
def worlds(draw: st.DrawFn) -> World:
    places = list(itertools.product(CLOUDS, REGIONS, ZONES, KINDS, ("spot", "on-demand")))
    sold = draw(st.lists(st.sampled_from(places), unique=True, min_size=1, max_size=24))
    few = st.integers(0, 3)
    limits = list(
        itertools.product(CLOUDS, [f"{r} {m} {k}" for r in REGIONS for m in ("spot", "on-demand") for k in KINDS])
    )
    return World(
        stock={each: draw(few) for each in sold},
        prices={each: draw(st.integers(1, 400)) / 4 for each in sold},
        gone=set(draw(st.lists(st.sampled_from(sold), max_size=3))),
        used_up=set(draw(st.lists(st.sampled_from(limits), max_size=8))),
        closed=set(draw(st.lists(st.sampled_from(list(itertools.product(CLOUDS, REGIONS))), max_size=2))),
        strangers=draw(
            st.dictionaries(st.sampled_from(CLOUDS), st.sampled_from([CredentialsError, FundsError]), max_size=1)
        ),
        hosts=draw(st.integers(1, 3)),
    )


def launched(world: World, nodes: Sequence[int], *, together: bool = False) -> tuple[Launcher, Any]:
    need = Need((SLICE,), market="cheapest", private_network=together)
    numbers = itertools.count()

    def order(offer: Offer, nodes: tuple[int, ...]) -> Order:
        return Order(pool="p", token=f"t-{next(numbers)}", nodes=nodes, need=need)

    clouds: Any = [Cloud(name, world) for name in CLOUDS]
    at = Launcher(clouds, order, Book())
    return at, at.launch(rank_offers(world.offers(), need).offers, nodes)


@settings(max_examples=1000, deadline=None)
@given(worlds())
@pytest.mark.slow
def test_what_is_launched_is_the_cheapest_that_had_capacity_and_no_create_is_repeated(world: World) -> None:
    possible = [each.usd_per_hour for each in world.offers() if world.refusal(each) is None]
    at, rented = launched(world, (0,))
    if possible:
        assert rented.instances[0].offer.usd_per_hour == min(possible)
    else:
        assert isinstance(rented.error, LaunchError)
    assert len({token for token, _ in world.creates}) == len(world.creates)
    tried = [(each.provider, each.instance_type, each.zone, each.market) for _, each in world.creates]
    assert len(set(tried)) == len(tried)
    assert at.book.open == set()  # type: ignore[attr-defined]  # a Book of this file


@settings(max_examples=200, deadline=None)
@given(worlds(), st.integers(2, 6))
def test_several_nodes_cost_as_little_as_any_choice_of_them(world: World, nodes: int) -> None:
    left = replace(world, stock=dict(world.stock))
    cheapest = sorted(
        each.usd_per_hour
        for each in left.offers()
        if left.refusal(each) is None
        for _ in range(left.stock[each.provider, each.region, each.zone.split("-")[1], each.instance_type, each.market])
    )
    _, rented = launched(world, range(0, nodes * world.hosts, world.hosts))
    assert sorted(hosts[0].offer.usd_per_hour for hosts in rented.slices if hosts[0].offer) == cheapest[:nodes]
    assert (rented.error is None) == (len(cheapest) >= nodes)
    assert sorted(each.node for each in rented.instances) == list(range(min(nodes, len(cheapest)) * world.hosts))
    assert {len(hosts) for hosts in rented.slices} <= {world.hosts}
