"""Launches on the lab's AWS: what is rented next after a refusal, and what a lost reply or a killed client leaves."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import accelerators
from skypool.errors import LaunchError
from skypool.event_loop import Loop
from skypool.model import Need, Offer, Order
from skypool.offers.search import look_around
from skypool.rental.launch import Launcher
from skypool.testing import FakeCloud, Stock
from tests.lab.aws import AWS
from tests.lab.launches import Matrix, losses
from tests.test_aws_pools import CLIENT, HERE, provider

pytestmark = [
    pytest.mark.needs("openssh"),
    pytest.mark.usefixtures("own_state"),
]

_numbers = itertools.count()


class Book:
    """The tokens of creates."""

    def __init__(self) -> None:
        self.tokens: list[str] = []

    def intend(self, order: Order, offer: Offer) -> None:
        self.tokens.append(order.token)

    def rented(self, order: Order, instances: Any) -> None:
        assert order.token in self.tokens

    def refused(self, order: Order, error: Exception) -> None:
        assert order.token in self.tokens

    def failed(self, order: Order) -> None:
        assert order.token in self.tokens


def launched(drivers: list[Any], need: Need, nodes: tuple[int, ...] = (0,)) -> tuple[Launcher, Offer]:
    """What is rented for a need, cheapest first, and what was tried before it."""

    def order(offer: Offer, nodes: tuple[int, ...]) -> Order:
        return Order(pool="train", token=f"{'0' * 16}-{next(_numbers)}", nodes=nodes, need=need)

    at = Launcher(drivers, order, Book())
    rented = at.launch(Loop.shared().run(look_around(drivers, need)).offers, nodes)
    if rented.error is not None:
        raise rented.error
    offer = rented.instances[0].offer
    assert offer is not None
    return at, offer


def gpus(*wanted: str, market: Any = "spot-if-available") -> Need:
    return Need(accelerators=tuple(map(accelerators.parse, wanted)), market=market)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_zone_after_zone_then_region_then_market_then_accelerator_then_provider(aws_api: AWS, tmp_path: Path) -> None:
    driver = sky.AWS(region=["us-east-1", "us-west-2"], ssh_from=HERE)
    need = replace(gpus("Trainium1", "Inferentia2"), max_usd_per_hour=1.5)
    offers = Loop.shared().run(look_around([driver], need)).offers
    sold_out = 0
    for many in (1, len(offers) // 2, len(offers) - 1):
        for each in offers[sold_out:many]:
            aws_api.capacity(0, each.instance_type, each.zone, each.market)
        sold_out = many
        at, offer = launched([driver], need)
        assert tuple(tried for tried, _ in at.attempts) == offers[:many]
        assert offer == offers[many]
        assert all(tried.usd_per_hour <= offer.usd_per_hour or tried.market == "spot" for tried, _ in at.attempts)
    aws_api.capacity(0, offer.instance_type, offer.zone, offer.market)
    with pytest.raises(LaunchError, match="could be launched"):
        launched([driver], need)
    seen = [(each.market, each.instance_type, each.zone) for each in offers]
    markets = [market for market, *_ in seen]
    assert markets == sorted(markets, reverse=True)  # every spot offer comes first
    assert len(set(seen)) == len(seen)
    for market in {*markets}:
        prices = [each.usd_per_hour for each in offers if each.market == market]
        assert prices == sorted(prices)
    assert {zone[:-1] for *_, zone in seen} == {"us-east-1", "us-west-2"}
    assert {kind.partition(".")[0] for _, kind, _ in seen} >= {"trn1", "inf2"}
    with FakeCloud(tmp_path / "cloud", [Stock("other", usd_per_hour=1.4, accelerator="Trainium1")]) as other:
        _, offer = launched([driver, other], need)
        assert offer.provider == "fake"


@pytest.mark.parametrize(
    ("code", "next_is_in"),
    [
        ("InsufficientInstanceCapacity", "another zone"),
        pytest.param("InsufficientHostCapacity", "another zone", marks=pytest.mark.slow),
        pytest.param("Unsupported", "another zone", marks=pytest.mark.slow),
        pytest.param("SpotMaxPriceTooLow", "another zone", marks=pytest.mark.slow),
        ("MaxSpotInstanceCountExceeded", "another quota"),
        pytest.param("VcpuLimitExceeded", "another quota", marks=pytest.mark.slow),
        ("OptInRequired", "another region"),
        pytest.param("PendingVerification", "another region", marks=pytest.mark.slow),
    ],
)
def test_each_refusal_leads_to_what_it_does_not_cover(aws_api: AWS, code: str, next_is_in: str) -> None:
    driver = sky.AWS(region=["us-east-1", "us-west-2"], ssh_from=HERE)
    need = gpus("Trainium1", "Inferentia2")
    best = Loop.shared().run(look_around([driver], need)).offers[0]
    aws_api.fail("RunInstances", code, times=1, region=best.region)
    _, offer = launched([driver], need)
    assert (offer.region, offer.zone, offer.instance_type, offer.market) != (
        best.region,
        best.zone,
        best.instance_type,
        best.market,
    )
    if next_is_in == "another region":
        assert offer.region != best.region
    if next_is_in == "another quota":
        assert offer.quota != best.quota
    assert aws_api.count()["instances"] == 1


@pytest.mark.parametrize(
    "code",
    [
        "RequestLimitExceeded",
        pytest.param("InternalError", marks=pytest.mark.slow),
        pytest.param("ServiceUnavailable", marks=pytest.mark.slow),
    ],
)
def test_what_passes_by_itself_is_asked_again_with_the_same_token(aws_api: AWS, code: str) -> None:
    aws_api.fail("RunInstances", code, times=2)
    at, _ = launched([provider()], gpus("L4"))
    assert at.attempts == []
    assert len({call.params["ClientToken"] for call in aws_api.calls("RunInstances")}) == 1
    assert aws_api.count()["instances"] == 1


@pytest.mark.filterwarnings("ignore:offers may be missing")
def test_an_answer_that_lacks_a_region_is_not_kept(aws_api: AWS) -> None:
    driver, need = sky.AWS(region=["us-east-1", "us-west-2"], ssh_from=HERE), gpus("H100:8", market="on-demand")

    def regions() -> set[str]:
        return {each.region for each in Loop.shared().run(look_around([driver], need)).offers}

    aws_api.fail("DescribeInstanceTypes", "Unavailable", times=None, region="us-west-2")
    assert regions() == {"us-east-1"}
    aws_api.heal()
    assert regions() == {"us-east-1", "us-west-2"}
    asked = len(aws_api.journal)
    assert regions() == {"us-east-1", "us-west-2"}
    assert len(aws_api.journal) == asked


def test_what_was_made_for_a_launch_may_not_be_known_everywhere_at_first(aws_api: AWS) -> None:
    aws_api.delays.unknown = 1
    need = replace(gpus("H100:8", market="on-demand"), private_network=True)
    at, _ = launched([provider()], need, (0, 1))
    assert at.attempts == []
    counts = aws_api.count()
    assert (counts["instances"], counts["security_groups"], counts["placement_groups"], counts["key_pairs"]) == (
        2,
        1,
        1,
        1,
    )


def test_a_pool_without_a_budget_or_a_price_cap_sends_no_maximum_price(aws_api: AWS) -> None:
    launched([provider()], Need(vcpus=2, market="spot"))
    (call,) = aws_api.calls("RunInstances")
    assert "MaxPrice" not in call.params["InstanceMarketOptions"]["SpotOptions"]


def test_a_lost_reply_of_a_launch_is_not_a_second_machine(aws_api: AWS) -> None:
    aws_api.drop("RunInstances")
    launched([provider()], gpus("L4"))
    assert aws_api.count()["instances"] == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@losses
def test_a_client_killed_at_any_call_leaves_nothing(aws: AWS, tmp_path: Path, ledger: bool, lose_reply: bool) -> None:
    Matrix(CLIENT, aws, tmp_path).leaves_nothing(ledger=ledger, lose_reply=lose_reply)
