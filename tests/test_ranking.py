"""Which offer is taken and why not the rest: rules on small lists, and the best of real price snapshots."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from datetime import date, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skypool.accelerators import parse
from skypool.accelerators.ranges import catalog
from skypool.model import Market, Need, Offer, PriceSource
from skypool.offers.ranking import Plan, rank_offers
from skypool.offers.sort_keys import ORDERS, OrderBy
from tests.lab.prices import snapshot

H100, A100 = parse("H100:8"), parse("A100-80GB:8")


def offer(name: str, usd: float = 1.0, market: Market = "on-demand", **more: Any) -> Offer:
    return Offer("acme", name, market=market, usd_per_hour=usd, **more)


def names(made: Plan) -> list[str]:
    return [each.instance_type for each in made.offers]


def reasons(made: Plan) -> dict[str, str]:
    return {each.offer.instance_type: each.reason for each in made.rejected}


# --- prices from tables ---------------------------------------------------------------------------------------

TODAY = date(2026, 11, 22)


def table(days: int | None) -> PriceSource:
    return PriceSource("table", None if days is None else TODAY - timedelta(days), "acme's page")


def test_a_spot_price_from_an_old_table_is_ranked_by_the_price_on_demand() -> None:
    old = offer("old", 1, "spot", price_source=table(31), on_demand_usd_per_hour=5.0)
    offers = [old, offer("a", 4, "spot"), offer("b", 6)]
    made = rank_offers(offers, Need(market="cheapest"), today=TODAY)
    assert names(made) == ["a", "old", "b"]
    assert "old spot 1.0000 USD/h, price as of 2026-10-22 (table), ranked by 5.0000 USD/h on demand" in made.explain()
    recent = rank_offers([replace(old, price_source=table(30)), *offers[1:]], Need(market="cheapest"), today=TODAY)
    assert names(recent) == ["old", "a", "b"], "30 days are not too old"
    assert "ranked by" not in recent.explain()


@pytest.mark.parametrize("order_by", ORDERS)
@pytest.mark.parametrize("days", [31, None])
def test_an_old_spot_price_comes_last_where_none_on_demand_is_known(days: int | None, order_by: OrderBy) -> None:
    old = offer("old", 1, "spot", price_source=table(days), accelerator=H100)
    offers = [old, offer("dear", 90, "spot", accelerator=H100)]
    made = rank_offers(offers, Need(market="spot"), order_by=order_by, today=TODAY)
    assert names(made) == ["dear", "old"]
    assert "ranked last, as its price is too old" in made.explain()


def test_old_prices_on_demand_and_spot_prices_that_the_provider_told_are_ranked_as_they_are() -> None:
    told = PriceSource("provider", TODAY - timedelta(60))
    offers = [offer("a", 1, price_source=table(900)), offer("b", 2, "spot", price_source=told), offer("c", 3)]
    made = rank_offers(offers, Need(market="cheapest"), today=TODAY)
    assert names(made) == ["a", "b", "c"]


def test_an_old_spot_price_per_device_is_that_on_demand() -> None:
    old = offer("old", 8, "spot", price_source=table(99), on_demand_usd_per_hour=80.0, accelerator=H100)
    offers = [old, offer("a", 40, "spot", accelerator=H100)]
    made = rank_offers(offers, Need(market="spot"), order_by="per-device", today=TODAY)
    assert names(made) == ["a", "old"]
    assert "10 USD/h for each device" in made.explain()


def test_a_plan_warns_of_each_table_that_served_with_its_day_and_why() -> None:
    undated = PriceSource("table", None, "somebody's list", "the API is off: turn it on")
    offers = [offer("a", 1, price_source=table(40)), offer("b", 2), offer("c", 3, price_source=undated)]
    made = rank_offers(offers, Need(), today=TODAY, notes=["first"])
    first, *warned = made.notes
    assert first == "first"
    assert warned == [
        "acme: 1 of 3 prices come from a table of 2026-10-13 (acme's page), not from the provider; "
        "what is charged may differ",
        "acme: 1 of 3 prices come from a table of an unknown day (somebody's list), not from the provider: "
        "the API is off: turn it on; what is charged may differ",
    ]
    assert rank_offers(offers[1:2], Need(), today=TODAY).notes == ()


# --- markets and caps ----------------------------------------------------------------------------------------

BOTH = [offer("dear", 9), offer("cheap", 3), offer("spot-dear", 4, "spot"), offer("spot-cheap", 1, "spot")]


@pytest.mark.parametrize(
    ("market", "cap", "taken"),
    [
        ("on-demand", None, ["cheap", "dear"]),
        ("spot", None, ["spot-cheap", "spot-dear"]),
        ("spot-if-available", None, ["spot-cheap", "spot-dear", "cheap", "dear"]),
        ("cheapest", None, ["spot-cheap", "cheap", "spot-dear", "dear"]),
        ("on-demand", 3, ["cheap"]),
        ("on-demand", 2.99, []),
        ("spot", 3, ["spot-cheap"]),
        ("spot-if-available", 3, ["spot-cheap", "cheap"]),
        ("cheapest", 0.5, []),
    ],
)
def test_each_market_takes_its_own_and_the_cap_is_for_what_is_really_charged(
    market: Any, cap: float | None, taken: list[str]
) -> None:
    made = rank_offers(BOTH, Need(market=market, max_usd_per_hour=cap))
    assert names(made) == taken
    assert set(reasons(made)) == {each.instance_type for each in BOTH} - set(taken)


def test_an_on_demand_request_is_never_held_against_a_spot_price() -> None:
    made = rank_offers([offer("x", 40.0), offer("x", 10.0, "spot")], Need(max_usd_per_hour=20))
    assert made.offers == ()
    assert [each.reason for each in made.rejected] == [
        "it is sold as spot, and market='on-demand' is asked for",
        "40.0000 USD/h is above max_usd_per_hour=20.0000",
    ]


def test_without_any_spot_offer_spot_if_available_takes_on_demand() -> None:
    assert names(rank_offers(BOTH[:2], Need(market="spot-if-available"))) == ["cheap", "dear"]
    stock = [replace(each, available=each.market == "on-demand") for each in BOTH]
    assert names(rank_offers(stock, Need(market="spot-if-available"))) == ["cheap", "dear"]


def test_spot_may_be_the_dearer_one() -> None:
    upside_down = [offer("on-demand", 1), offer("spot", 2, "spot")]
    assert names(rank_offers(upside_down, Need(market="cheapest"))) == ["on-demand", "spot"]
    assert names(rank_offers(upside_down, Need(market="spot-if-available"))) == ["spot", "on-demand"]


@pytest.mark.parametrize("price", [math.nan, math.inf, -1.0])
def test_an_offer_without_a_price_is_not_taken_as_free(price: float) -> None:
    made = rank_offers([offer("odd", price), offer("even", 5)], Need())
    assert names(made) == ["even"]
    assert reasons(made) == {"odd": f"its price of {price} USD/h is not valid"}


# --- what a node has -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "has", "reason"),
    [
        ({"accelerators": (H100,)}, {"accelerator": A100}, "it has A100-80GB:8, and H100-80GB:8 is asked for"),
        ({"accelerators": (H100, A100)}, {}, "it has no accelerator, and H100-80GB:8 or A100-80GB:8 is asked for"),
        ({"accelerators": (H100,)}, {"accelerator": parse("H100")}, "it has H100-80GB, and"),
        ({"vcpus": 8}, {"vcpus": 4}, "it has 4 vCPUs, and 8 are asked for"),
        ({"memory_gib": 64}, {"memory_gib": 59.6}, "it has 59.6 GiB of memory, and 64 are asked for"),
        ({"disk_gib": 500}, {"disk_gib": 100}, "its disk has 100 GiB, and 500 are asked for"),
        ({"arch": "arm64"}, {"arch": "x86_64"}, "its processor is x86_64, and arm64 is asked for"),
        ({"regions": ("eu-*", "us-1")}, {"region": "us-2"}, "it is in us-2, and eu-* or us-1 is asked for"),
        ({"regions": ("eu-*",)}, {}, "it is in no region, and eu-* is asked for"),
        ({}, {"available": False}, "it is out of stock"),
    ],
)
def test_what_lacks_something_says_what(asked: dict[str, Any], has: dict[str, Any], reason: str) -> None:
    made = rank_offers([offer("x", **has)], Need(**asked))
    assert made.offers == ()
    assert reasons(made)["x"].startswith(reason)


@pytest.mark.parametrize(
    ("asked", "has"),
    [
        ({"accelerators": (H100, A100)}, {"accelerator": A100}),
        ({"accelerators": (H100,)}, {"accelerator": parse("H100-SXM:8")}),
        ({"accelerators": (parse("CPU"),)}, {"accelerator": A100}),
        ({"vcpus": 8, "memory_gib": 64, "disk_gib": 500, "arch": "arm64"}, {}),
        ({"vcpus": 8, "memory_gib": 64}, {"vcpus": 8, "memory_gib": 64}),
        ({"regions": ("EU-*",)}, {"region": "eu-west-1"}),
        ({"regions": ("Iceland, IS",)}, {"region": "Iceland, IS"}),
        ({}, {"available": True}),
    ],
)
def test_what_has_it_or_can_have_any_serves(asked: dict[str, Any], has: dict[str, Any]) -> None:
    assert names(rank_offers([offer("x", **has)], Need(**asked))) == ["x"]


# --- the order -----------------------------------------------------------------------------------------------


def test_equal_prices_are_in_order_of_provider_place_and_name() -> None:
    places = [
        Offer("b", "x", "r1", usd_per_hour=1),
        Offer("a", "z", "r1", "z2", usd_per_hour=1),
        Offer("a", "y", "r1", "z2", usd_per_hour=1),
        Offer("a", "y", "r1", "z1", usd_per_hour=1),
        Offer("a", "y", "r0", "z9", usd_per_hour=1),
        Offer("c", "y", usd_per_hour=0.5),
        Offer("a", "y", usd_per_hour=2),
    ]
    wanted = [places[i] for i in (5, 4, 3, 2, 1, 0, 6)]
    for seed in range(20):
        random.Random(seed).shuffle(places)
        assert list(rank_offers(places, Need()).offers) == wanted


def test_many_of_the_same_price_are_put_in_order_once() -> None:
    many = [offer(f"t{number:05}") for number in range(20_000)]  # a sort for each of them would take an hour
    assert list(rank_offers(many[::-1], Need()).offers) == many


@pytest.mark.parametrize(
    ("order_by", "order"),
    [
        ("cheapest", ["l4", "h100", "h100x8", "h200x8"]),
        ("per-device", ["l4", "h100x8", "h200x8", "h100"]),
        ("per-tflop", ["h100x8", "h200x8", "h100", "l4"]),
        ("per-gb", ["h200x8", "h100x8", "l4", "h100"]),
    ],
)
def test_offers_are_ranked_by_what_is_asked(order_by: OrderBy, order: list[str]) -> None:
    sold = {"l4": ("L4", 0.8), "h100": ("H100", 3.0), "h100x8": ("H100:8", 16.0), "h200x8": ("H200:8", 20.0)}
    offers = [offer(name, usd, accelerator=parse(kind)) for name, (kind, usd) in sold.items()]
    assert names(rank_offers(offers, Need(), order_by=order_by)) == order


def test_a_part_of_a_card_has_a_part_of_its_tflops() -> None:
    part = offer("part", 1.0, accelerator=parse("H100/1g.10gb"))
    card = offer("card", 6.0, accelerator=parse("H100"))
    assert names(rank_offers([part, card], Need(), order_by="per-tflop")) == ["card", "part"]
    assert names(rank_offers([part, replace(card, usd_per_hour=7.5)], Need(), order_by="per-tflop")) == ["part", "card"]


@pytest.mark.parametrize("order_by", ["per-device", "per-tflop", "per-gb"])
def test_what_has_no_such_amount_comes_last_and_the_cheaper_first(order_by: OrderBy) -> None:
    unknown = next(each for each in catalog() if each.metadata.bf16_tflops is None)
    bare = [offer("bare", 3), offer("barer", 2)]
    more = [offer("unknown", 1, accelerator=unknown)] if order_by == "per-tflop" else []
    made = rank_offers([*bare, *more, offer("h100", 50, accelerator=parse("H100"))], Need(), order_by=order_by)
    assert names(made) == ["h100", *(["unknown"] if more else []), "barer", "bare"]


# --- what is said --------------------------------------------------------------------------------------------


def test_a_type_that_does_not_serve_on_either_market_is_explained_once() -> None:
    both = [offer("small", 1.0, market, vcpus=4.0) for market in ("on-demand", "spot")]
    made = rank_offers(both, Need(market="cheapest", vcpus=8))
    assert made.explain().splitlines()[-1] == "-  acme small: it has 4 vCPUs, and 8 are asked for"
    assert made.explain().count("acme small: it has 4 vCPUs") == 1
    assert len(made.rejected) == 2


def test_a_few_offers_are_explained_one_by_one() -> None:
    made = rank_offers(BOTH[:3], Need(max_usd_per_hour=5), nodes=(2, 4), failures={"b": TimeoutError()}, notes=["old"])
    assert made.explain().splitlines() == [
        "2 nodes: 6.0000 USD/h, 4 nodes: 12.0000 USD/h",
        "1. acme cheap on-demand 3.0000 USD/h",
        "-  acme dear: 9.0000 USD/h is above max_usd_per_hour=5.0000",
        "-  acme spot-dear: it is sold as spot, and market='on-demand' is asked for",
        "!  b: TimeoutError",
        "!  old",
    ]
    assert made.usd_per_hour == 6.0
    assert made.best is BOTH[1]


def test_thousands_are_counted_by_reason_with_an_example() -> None:
    many = [offer(f"t{n}", n, accelerator=H100 if n % 2 else A100, available=n % 3 > 0) for n in range(6000)]
    made = rank_offers(many, Need((H100,), max_usd_per_hour=1000))
    lines = made.explain(most=3).splitlines()
    assert lines[0] == "1. acme t1 on-demand 1.0000 USD/h"
    assert lines[3:] == [
        "   and 330 more, 11.0000 to 997.0000 USD/h",
        "-  1,667 cost more than max_usd_per_hour allows; acme t1001: "
        "1001.0000 USD/h is above max_usd_per_hour=1000.0000",
        "-  1,000 are out of stock; acme t3: it is out of stock",
        "-  3,000 have other accelerators, or none; acme t0: it has A100-80GB:8, and H100-80GB:8 is asked for",
    ]
    assert len(made.offers) + len(made.rejected) == 6000


def test_where_nothing_serves_the_telling_reasons_come_first() -> None:
    there = [
        offer("other", 1.0, accelerator=A100, region="us-east-1"),
        offer("right", 9.0, accelerator=H100, region="us-east-1"),
        offer("far", 2.0, accelerator=H100, region="eu-north-1"),
    ]
    need = Need((H100,), max_usd_per_hour=5, regions=("us-eest-1", "us-*", "moon"))
    made = rank_offers(there, need, failures={"b": TimeoutError()})
    assert [line.split(":")[0] for line in made.explain().splitlines()] == [
        "+  no offer is in region 'us-eest-1'; did you mean us-east-1?",
        "+  no offer is in region 'moon'; there are offers in eu-north-1, us-east-1",
        "+  without max_usd_per_hour=, 1 would do; the best",
        "+  without region=, 1 would do; the best",
        "!  b",
        "-  acme right us-east-1",
        "-  acme far eu-north-1",
        "-  acme other us-east-1",
    ]


def test_where_nothing_serves_it_says_what_would_help() -> None:
    made = rank_offers(BOTH, Need(max_usd_per_hour=0.5, regions=("mars",)))
    assert made.best is None
    assert made.usd_per_hour is None
    assert made.advice() == []  # no one of them is to blame alone
    made = rank_offers(BOTH, Need(max_usd_per_hour=2))
    assert made.advice() == [
        "+  without market=, 1 would do; the best: acme spot-cheap spot 1.0000 USD/h",
        "+  without max_usd_per_hour=, 2 would do; the best: acme cheap on-demand 3.0000 USD/h",
    ]


def test_another_number_of_the_same_accelerator_is_named() -> None:
    eight = offer("eight", 40.0, accelerator=parse("H100-80GB-SXM:8"))
    two = offer("two", 10.0, accelerator=parse("H100-80GB-SXM:2"))
    asked = (parse("H100"),)
    assert rank_offers([eight, two], Need(accelerators=asked)).advice() == [
        "+  with accelerator='H100-80GB:2', this would do: acme two on-demand 10.0000 USD/h",
    ]
    assert rank_offers([eight], Need(accelerators=asked, max_usd_per_hour=1)).advice() == [], "not that alone"
    assert rank_offers([eight], Need(accelerators=(parse("A100"),))).advice() == []


def test_a_plan_of_nothing_is_empty() -> None:
    assert rank_offers([], Need()).explain() == ""


# --- the best of what was really sold ------------------------------------------------------------------------

SOLD = snapshot()
KINDS = sorted({each.accelerator for each in SOLD if each.accelerator is not None}, key=str)
REGIONS = sorted({each.region for each in SOLD})


def needs(pick: Any) -> Need:
    """A need made of choices: `pick` takes one of a list."""
    return Need(
        tuple(pick(KINDS) for _ in range(pick([0, 1, 1, 1, 2, 3]))),
        vcpus=pick([0, 0, 0, 4, 16, 96, 190]),
        memory_gib=pick([0, 0, 0, 16, 100, 512, 1500]),
        regions=tuple(pick(REGIONS) for _ in range(pick([0, 0, 0, 1, 4]))),
        market=pick(["on-demand", "spot", "spot-if-available", "cheapest"]),
        max_usd_per_hour=pick([None, None, 0.2, 1.0, 5.0, 30.0]),
    )


def by_hand(need: Need) -> list[Offer]:
    """Everything that serves, found the slow and plain way."""
    found = [
        o
        for o in SOLD
        if (not need.accelerators or any(a.accepts(o.accelerator) for a in need.accelerators if o.accelerator))
        and (o.vcpus is None or o.vcpus >= need.vcpus)
        and (o.memory_gib is None or o.memory_gib >= need.memory_gib)
        and (not need.regions or o.region in need.regions)
        and (need.max_usd_per_hour is None or o.usd_per_hour <= need.max_usd_per_hour)
        and (need.market not in ("on-demand", "spot") or o.market == need.market)
    ]
    spot = [o for o in found if o.market == "spot"]
    return spot if need.market == "spot-if-available" and spot else found


def is_best(need: Need) -> bool:
    """Whether the price chosen is the best there is; False where nothing serves."""
    made, serving = rank_offers(SOLD, need), by_hand(need)
    assert bool(made.offers) == bool(serving), need
    if not serving:
        return False
    best = min(each.usd_per_hour for each in serving)
    assert made.offers[0].usd_per_hour == best, need
    return True


@given(st.data())
def test_what_is_chosen_is_the_cheapest_that_serves(data: st.DataObject) -> None:
    is_best(needs(lambda choices: data.draw(st.sampled_from(choices))))


@pytest.mark.slow
def test_over_ten_thousand_random_needs_what_is_chosen_costs_what_the_best_costs() -> None:
    dice = random.Random(20260820)
    found = sum(is_best(needs(dice.choice)) for _ in range(10_000))
    assert found > 2_000


@pytest.mark.parametrize("order_by", ORDERS)
def test_every_offer_is_taken_or_has_a_reason_and_no_two_are_out_of_order(order_by: OrderBy) -> None:
    dice = random.Random(5)
    for _ in range(50):
        need = needs(dice.choice)
        made = rank_offers(SOLD, need, order_by=order_by)
        taken = {id(each) for each in made.offers}
        left = {id(each.offer) for each in made.rejected}
        assert not taken & left
        assert taken | left == {id(each) for each in SOLD}
        assert all(each.reason for each in made.rejected)
        if order_by == "cheapest" and need.market != "spot-if-available":
            prices = [each.usd_per_hour for each in made.offers]
            assert prices == sorted(prices)


def test_the_order_by_tflops_shows_its_figure_and_tells_what_has_none() -> None:
    offers = [
        Offer("one", "big", usd_per_hour=9.89, accelerator=parse("H100-SXM")),
        Offer("one", "old", usd_per_hour=0.10, accelerator=parse("T4")),
    ]
    told = (
        rank_offers(offers, Need(accelerators=(parse("H100"), parse("T4"))), order_by="per-tflop")
        .explain()
        .splitlines()
    )
    assert told[0].endswith("9.8900 USD/h, 0.01 USD/h for each dense BF16 TFLOP")
    assert told[1].endswith("0.1000 USD/h, price for each dense BF16 TFLOP not known")
    assert "!  ranked last, as the price for each dense BF16 TFLOP is not known: 1 with T4" in told
    assert not any("known" in line for line in rank_offers(offers, Need(), order_by="cheapest").explain().splitlines())


@pytest.mark.parametrize(
    "name",
    ["A10G", "RTX_3090", "RTX_4090", "RTX_5090", "RTX_A6000", "RTX_PRO_6000-Server", "B300", "GB200", "GB300",
     "MI350X", "TPU7x"],
)  # fmt: skip
def test_the_cards_that_clouds_sell_most_have_a_figure(name: str) -> None:
    assert (parse(name).metadata.bf16_tflops or 0) > 50
