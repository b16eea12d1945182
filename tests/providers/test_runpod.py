"""What is odd about RunPod, against the lab's RunPod; and the contract."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.accelerators import parse
from skypool.accelerators.spelling import meanings
from skypool.drivers import rest, retry, tags
from skypool.drivers.userdata import GUARD, UNPACK
from skypool.errors import (
    AccessError,
    CapacityError,
    CredentialsError,
    FundsError,
    NoAnswer,
    ProviderError,
    QuotaError,
    RateLimitError,
    StillRunning,
    UsageError,
)
from skypool.model import Access, Instance, Market, Need, Offer, Order
from skypool.testing import DriverContract
from skypool.wire.transport import SSH
from skypool_runpod import RunPod, _api
from tests.lab.cloud import Request
from tests.lab.prices import snapshot
from tests.lab.runpod import GONE, TROUBLE
from tests.lab.runpod import RunPod as World
from tests.providers.on_machines import OnMachines
from tests.providers.strings import PagedStrings

pytestmark = pytest.mark.needs("openssh")

CREATE = "POST /v2/pods"
RENT, BID = "podFindAndDeployOnDemand", "podRentInterruptable"
"""The creations of the GraphQL API."""
A40 = Need(accelerators=(parse("A40"),))
SAYS: dict[type[ProviderError], tuple[str, str]] = {
    CapacityError: (GONE[0], "400"),
    QuotaError: ("This would exceed the spend limit of your account.", "400"),
    FundsError: ("You do not have enough money to deploy this pod.", "402"),
}


class Strings(PagedStrings):
    """The contract's control of the lab's RunPod."""

    create, boot = CREATE, "starting"
    refusals = SAYS

    def stock_out(self, offer: Offer, left: int) -> None:
        kind = offer.detail["gpu"] or offer.instance_type
        self.world.capacity(0, kind, "*", offer.market)
        self.world.capacity(left, kind, "EU-RO-1", offer.market)

    def refuse(self, kind: type[ProviderError]) -> bool:
        if kind is CredentialsError:
            self.world.refuse(self.create, "Invalid or missing API key.", "401")
        elif kind is RateLimitError:
            problem = {"title": "Too Many Requests", "status": 429, "detail": "slow"}
            self.world.fail(self.create, 429, problem, headers={"Retry-After": "0"})
        else:
            return super().refuse(kind)
        return True


class TestRunPodCalls(DriverContract):
    """All of the contract for which no command need run on a machine."""

    real = False

    @pytest.fixture
    def driver(self, runpod_api: World, monkeypatch: pytest.MonkeyPatch) -> RunPod:
        monkeypatch.setattr(RunPod, "ending", 3.0)
        monkeypatch.setattr("skypool_runpod._LAG", 1.0)
        return RunPod()

    @pytest.fixture
    def control(self, runpod_api: World) -> Strings:
        return Strings(runpod_api)

    @pytest.fixture
    def need(self) -> Need:
        return A40

    @pytest.fixture
    def secrets(self, runpod_api: World) -> list[str]:
        return [runpod_api.key]


def order(pool: str = "train", token: str = "0123456789abcdef-1", nodes: tuple[int, ...] = (0,), **more: Any) -> Order:
    until = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    return Order(pool, token, nodes, more.pop("need", A40), until=until, **more)


# --- what is sold --------------------------------------------------------------------------------------------

PARTITIONS = {
    "1g.24gb": "NVIDIA RTX PRO 6000 Blackwell Server Edition MIG 1g.24gb",
    "2g.48gb": "NVIDIA RTX PRO 6000 Blackwell Server Edition MIG 2g.48gb",
}
"""GPU types that public programs rent (read 2026-11-24). Prices here are made up."""


@pytest.mark.parametrize("graphql", [False, True])
def test_a_partition_is_sold_as_one_and_never_as_a_whole_card(runpod_api: World, graphql: bool) -> None:
    for kind in (*PARTITIONS.values(), "NVIDIA RTX PRO 6000 Blackwell Server Edition"):
        runpod_api.price(kind, 0.5, 0.25)
    market: Market = "spot" if graphql else "on-demand"
    for profile, kind in PARTITIONS.items():
        has = parse(f"RTX_PRO_6000-Server/{profile}")
        offers = [
            each
            for each in sold(Need(accelerators=(has,), market=market), graphql=graphql)
            if each.accelerator and has.accepts(each.accelerator)
        ]
        assert [(each.instance_type, each.accelerator) for each in offers] == [(f"1x {kind}", has)]
    whole = parse("RTX_PRO_6000-Server")
    fitting = [
        each.instance_type
        for each in sold(Need(accelerators=(whole,), market=market), graphql=graphql)
        if each.accelerator and whole.accepts(each.accelerator)
    ]
    assert fitting == ["1x NVIDIA RTX PRO 6000 Blackwell Server Edition"]


def test_several_partitions_in_one_pod_are_not_sold(runpod_api: World) -> None:
    runpod_api.price(PARTITIONS["1g.24gb"], 0.5, None)
    two = Need(accelerators=(parse("RTX_PRO_6000-Server/1g.24gb:2"),))
    assert [each for each in sold(two) if each.accelerator and each.accelerator.profile] == []


def sold(need: Need, **settings: Any) -> list[Offer]:
    return list(RunPod(**settings).offers(need))


def test_every_offer_of_the_snapshot_costs_what_it_costs_there_for_each_gpu_and_its_disk(runpod_api: World) -> None:
    rows = snapshot("runpod")
    assert len(rows) > 50
    for row in rows:
        has = parse(row.instance_type, dialect="runpod")
        for count in (1, 8):
            need = Need(accelerators=(has.with_count(count),), market=row.market)
            offers = sold(need, graphql=row.market == "spot")
            [offer] = [each for each in offers if each.instance_type == f"{count}x {row.instance_type}"]
            assert offer.usd_per_hour == pytest.approx(count * row.usd_per_hour + 50 * 0.1 / 730), row
            assert offer.accelerator == has.with_count(count)
            assert (offer.market, offer.zone, offer.trust, offer.available) == (row.market, "secure", "full", True)


def test_a_larger_disk_costs_more(runpod_api: World) -> None:
    small, large = (sold(replace(A40, disk_gib=gib))[0] for gib in (0, 1000))
    assert large.usd_per_hour - small.usd_per_hour == pytest.approx((1074 - 50) * 0.1 / 730)


def test_what_is_out_of_stock_is_told_with_its_usual_price(runpod_api: World) -> None:
    runpod_api.capacity(0, "NVIDIA A40", "*", "spot")
    both = {each.market: each for each in sold(replace(A40, market="cheapest"), graphql=True)}
    assert (both["on-demand"].available, both["spot"].available) == (True, False)
    assert both["spot"].usd_per_hour == pytest.approx(0.24 + 50 * 0.1 / 730)
    runpod_api.capacity(0)
    with pytest.raises(sky.NoOffers, match="it is out of stock"):
        sky.plan(RunPod(), accelerator="A40")


def test_machines_of_strangers_are_trusted_as_data_and_have_a_public_address(runpod_api: World) -> None:
    runpod_api.price("NVIDIA A40", 0.2, 0.1, "COMMUNITY")
    assert {(each.zone, each.trust) for each in sold(A40, cloud="any", graphql=True)} == {
        ("secure", "full"),
        ("community", "data"),
    }
    [offer] = sold(A40, cloud="community", graphql=True)
    assert offer.usd_per_hour == pytest.approx(0.2 + 50 * 0.1 / 730)
    _, asked = rent(runpod_api, order(), cloud="community", graphql=True)
    assert (asked["cloudType"], asked["supportPublicIp"]) == ("COMMUNITY", True)


def test_a_gpu_that_one_cloud_does_not_have_is_not_offered_there(runpod_api: World) -> None:
    del runpod_api.prices["NVIDIA A40", "COMMUNITY"]
    assert sold(A40, cloud="community", graphql=True) == []
    assert [each.zone for each in sold(A40, cloud="any", graphql=True)] == ["secure"]


def test_places_are_data_centres_in_the_one_cloud_and_countries_in_the_other(runpod_api: World) -> None:
    assert {each.region for each in sold(A40)} == {""}
    assert {each.region for each in sold(A40, region=["CA-MTL-1", "US-TX-3"])} == {"CA-MTL-1", "US-TX-3"}
    assert {each.region for each in sold(replace(A40, regions=("eu-*",)))} == {"EU-RO-1"}
    assert {each.region for each in sold(A40, region="SE", cloud="community", graphql=True)} == {"SE"}
    assert {(o.region, o.zone) for o in sold(replace(A40, regions=("ca*",)), cloud="any", graphql=True)} == {
        ("CA-MTL-1", "secure"),
        ("CA", "community"),
    }
    runpod_api.capacity(0, "NVIDIA A40", "CA-MTL-1")
    assert [each.available for each in sold(A40, region="CA-MTL-1")] == [False]
    _, asked = rent(runpod_api, order(), region="US-TX-3")
    assert asked["dataCenterIds"] == ["US-TX-3"]
    _, asked = rent(runpod_api, order(token="b-1"), region="SE", cloud="community", graphql=True)
    assert (asked["countryCode"], "dataCenterId" in asked) == ("SE", False)
    with pytest.raises(UsageError, match=r"XX-ABC-9 is not a region.*CA-MTL-1"):
        sold(A40, region="XX-ABC-9")


def test_pods_are_where_their_network_volume_is(runpod_api: World) -> None:
    assert {each.region for each in sold(A40, volume="vol0ro")} == {"EU-RO-1"}
    _, asked = rent(runpod_api, order(), volume="vol0ro")
    assert asked["mounts"] == {"network": [{"volumeId": "vol0ro", "path": "/workspace"}]}
    assert asked["dataCenterIds"] == ["EU-RO-1"]
    with pytest.raises(UsageError, match="no network volume 'vol1'; pass one of its volumes as volume=: vol0ro"):
        sold(A40, volume="vol1")
    with pytest.raises(UsageError, match="cloud='secure'"):
        RunPod(volume="vol0ro", cloud="any", graphql=True)


def test_a_gpu_that_nobody_knows_yet_is_left_out_and_one_that_is_new_there_is_found(runpod_api: World) -> None:
    runpod_api.prices["NVIDIA X9000", "SECURE"] = 1.0, 0.5
    runpod_api.prices["NVIDIA GB200", "SECURE"] = 9.0, None
    assert "NVIDIA GB200" not in meanings("runpod")
    assert [each.instance_type for each in sold(Need(accelerators=(parse("GB200"),)))] == ["1x NVIDIA GB200"]
    assert sold(Need(accelerators=(parse("TPU v5e-8"),))) == []


def test_the_driver_of_the_host_must_do_the_cuda_that_the_image_needs(runpod_api: World) -> None:
    _, asked = rent(runpod_api, order())
    assert asked["gpu"] == {"id": "NVIDIA A40", "count": 1, "minCudaVersion": "12.8"}
    _, asked = rent(runpod_api, order(token="b-1"), image="ubuntu:24.04")
    assert "minCudaVersion" not in asked["gpu"]
    runpod_api.most_cuda = (12, 6)
    assert [each.available for each in sold(A40)] == [False]
    assert [each.available for each in sold(A40, min_cuda="12.4")] == [True]


def test_cuda_is_no_matter_where_the_accelerators_are_amds(runpod_api: World) -> None:
    runpod_api.prices["AMD Instinct MI300X OAM", "SECURE"] = 2.5, None
    runpod_api.most_cuda = (0, 0)
    both = Need(accelerators=(parse("MI300X"), parse("A40")))
    assert {each.instance_type: each.available for each in sold(both)} == {
        "1x AMD Instinct MI300X OAM": True,
        "1x NVIDIA A40": False,
    }
    _, asked = rent(runpod_api, order(need=Need(accelerators=(parse("MI300X"),))))
    assert "rocm" in asked["image"]
    assert "minCudaVersion" not in asked["gpu"]
    amd = order(need=Need(accelerators=(parse("MI300X"),)), token="c-1")
    _, asked = rent(runpod_api, amd, min_cuda="12.4")
    assert "minCudaVersion" not in asked["gpu"]


def test_without_an_accelerator_the_smallest_cpu_instance_of_each_flavor_that_is_enough_is_offered(
    runpod_api: World,
) -> None:
    offers = {each.instance_type: each for each in sold(Need(vcpus=3, memory_gib=10))}
    assert set(offers) == {"cpu3c-8-16", "cpu3g-4-16", "cpu5c-8-16"}
    assert offers["cpu3g-4-16"].usd_per_hour == pytest.approx(4 * 0.04 + 20 * 0.1 / 730)
    assert (offers["cpu3g-4-16"].vcpus, offers["cpu3g-4-16"].memory_gib) == (4, 16)
    large = {each.instance_type for each in sold(Need(disk_gib=70))}
    assert large == {"cpu3c-8-16", "cpu3g-8-32", "cpu5c-8-16"}
    assert "cpu5c-2-4" in {each.instance_type for each in sold(Need(disk_gib=25))}
    assert sold(Need(), cloud="community", graphql=True) == sold(Need(market="spot")) == []
    assert sold(Need(vcpus=64)) == []


# --- settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"cloud": "secured"}, "did you mean 'secure'"),
        ({"region": "ca-mtl-1"}, "such as 'CA-MTL-1'"),
        ({"region": []}, "empty list"),
        ({"image": "two words"}, "such as 'runpod/pytorch"),
        ({"min_cuda": "12"}, "such as '12.8'"),
        ({"volume": "my volume"}, "such as 'agv6w2qcg7'"),
        ({"graphql": "yes"}, "graphql must be True or False"),
        ({"cloud": "community"}, "cloud='community' needs graphql=True"),
        ({"cloud": "any"}, "cloud='any' needs graphql=True"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_where_they_are_written(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        RunPod(**settings)


@pytest.mark.parametrize("text", ['[default]\napi_key = "rpa_THEIRS"\n', 'apikey = "rpa_THEIRS"\n'])
def test_the_key_may_be_that_of_runpods_own_tools(
    runpod_api: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    monkeypatch.delenv("RUNPOD_API_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(CredentialsError, match=r"console\.runpod\.io/user/settings"):
        sold(A40)
    (tmp_path / ".runpod").mkdir()
    (tmp_path / ".runpod" / "config.toml").write_text(text)
    assert sold(A40)
    sold(A40, api_key="rpa_MINE")
    keys = [call.headers["authorization"] for call in runpod_api.journal]
    assert keys == ["Bearer rpa_THEIRS", "Bearer rpa_MINE"]


def test_the_address_is_the_one_that_runpods_own_tools_are_told(
    runpod_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNPOD_API_BASE_URL", f"{runpod_api.url}/")
    [pod], asked = rent(runpod_api, order())
    RunPod().renew("train", datetime(2050, 1, 1, tzinfo=UTC))
    assert {call.path for call in runpod_api.journal} == {"/v2/catalog/gpus", "/v2/pods", f"/v2/pods/{pod.id}"}
    script = gzip.decompress(base64.b64decode(asked["env"]["SKYPOOL_START"])).decode()
    assert f"url={runpod_api.url}\n" in script.replace("'", "").replace('"', "")
    for given in (f"{runpod_api.url}/v2", f"{runpod_api.url}/v2/"):
        monkeypatch.setenv("RUNPOD_API_BASE_URL", given)
        assert _api.base() == runpod_api.url
    monkeypatch.setenv("RUNPOD_API_BASE_URL", "")
    assert _api.base() == "https://api.runpod.io"
    monkeypatch.delenv("RUNPOD_API_BASE_URL")
    assert _api.base() == "https://api.runpod.io"


# --- errors --------------------------------------------------------------------------------------------------

Refuse = Callable[[World], object]


def says(text: str, code: str = "400") -> Refuse:
    return lambda world: world.refuse(CREATE, text, code)


def graphql(text: str, code: str = "") -> Refuse:
    """As the GraphQL API says it, to a launch of a spot pod."""
    return lambda world: world.refuse(BID, text, code)


def wrong(world: World) -> None:
    problem = {"title": "Unprocessable Entity", "status": 422, "detail": "Request validation failed."}
    world.fail(CREATE, 422, problem | {"errors": ["$: additional properties 'bogus' not allowed"]})


SPECS = "There are no longer any instances available with the request specifications. Please try again later."
TABLE: list[tuple[str, Refuse, type[ProviderError], str]] = [
    ("no stock", says(GONE[0]), CapacityError, "another type"),
    ("no stock, in other words", says(SPECS), CapacityError, "another type"),
    (
        "no stock with such a disk",
        says("There are no longer any instances available with enough disk space."),
        CapacityError,
        "another type",
    ),
    ("400 (no stock, or a rule is broken)", says("request could not be processed"), CapacityError, "another type"),
    ("402", says("Insufficient balance.", "402"), FundsError, "user/billing"),
    ("spend limit", says("This would exceed the spend limit of your account."), QuotaError, "higher limit"),
    ("401", says("Invalid or missing API key.", "401"), CredentialsError, "RUNPOD_API_KEY"),
    ("403", says("Your account cannot access the requested pool.", "403"), CapacityError, "another type"),
    ("404", says("The network volume does not exist.", "404"), ProviderError, "check the settings of RunPod"),
    ("429", says("rate limit exceeded for the minute window", "429"), RateLimitError, "wait"),
    ("500", says("An unexpected error occurred.", "500"), NoAnswer, "uptime.runpod.io"),
    (
        "502",
        lambda world: world.fail(CREATE, 502, "<html>Bad gateway</html>"),
        NoAnswer,
        "uptime.runpod.io",
    ),
    ("422", wrong, ProviderError, "report"),
    ("GraphQL: no stock", graphql(*GONE), CapacityError, "another type"),
    ("GraphQL: SUPPLY_CONSTRAINT", graphql("…", "SUPPLY_CONSTRAINT"), CapacityError, "another type"),
    (
        "GraphQL: too low a bid",
        graphql("The bid is below the current minimum bid price."),
        CapacityError,
        "current prices",
    ),
    ("GraphQL: no money", graphql("You do not have enough money to deploy this pod."), FundsError, "user/billing"),
    (
        "GraphQL: FORBIDDEN",
        graphql("Not authorized to perform this operation", "FORBIDDEN"),
        AccessError,
        "permission",
    ),
    ("GraphQL: INTERNAL_SERVER_ERROR", graphql(*TROUBLE), NoAnswer, "uptime.runpod.io"),
    (
        "GraphQL: GRAPHQL_VALIDATION_FAILED",
        lambda world: world.fail(
            BID, 400, {"errors": [{"message": "…", "extensions": {"code": "GRAPHQL_VALIDATION_FAILED"}}]}
        ),
        ProviderError,
        "report",
    ),
    ("something quite new", graphql("A text that nobody has seen yet."), ProviderError, "nobody has seen"),
]


def refused(world: World, what: str, refuse: Refuse, number: int) -> ProviderError:
    """What a launch says of it, which is asked once."""
    spot = what.startswith(("GraphQL", "something"))
    driver, need = RunPod(graphql=spot), replace(A40, market="spot" if spot else "on-demand")
    offer = next(iter(driver.offers(need)))
    refuse(world)
    create = BID if spot else CREATE
    asked = len(world.calls(create))
    with pytest.raises(ProviderError) as error:
        driver.launch(offer, order(token=f"abcdef-{number}", need=need))
    assert len(world.calls(create)) == asked + 1
    assert world.left() == {}
    return error.value


def test_who_does_not_answer_is_asked_as_long_as_any_other_cloud(
    runpod_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rest, "PATIENCE", 0.3)
    runpod_api.dark = True
    began = time.monotonic()
    with pytest.raises(NoAnswer):
        RunPod().instances()
    assert time.monotonic() - began < 10


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skypool_runpod._LAG", 0.1)
    monkeypatch.setattr("skypool_runpod._PULLING", 0.0)


@pytest.mark.usefixtures("impatient")
def test_every_refusal_of_a_launch_has_its_kind_its_text_and_its_advice(runpod_api: World) -> None:
    for number, (what, refuse, kind, advice) in enumerate(TABLE):
        error = refused(runpod_api, what, refuse, number)
        assert type(error) is kind, what
        assert error.provider == "runpod"
        assert error.code, what
        assert error.text in str(error)
        assert advice in str(error), str(error)


PAGE = Path(__file__).parents[2] / "docs" / "runpod-errors.md"
INTRODUCTION = """# What RunPod refuses, and what you read then

Every message here is one that was really raised: `tests/providers/test_runpod.py` lets RunPod refuse a launch in each
of these ways, in RunPod's own words where they are known, and compares; the words of too low a bid, of the spend limit
and of 402 and 403 are guessed. REST v2 says 400 both where there is no stock and where a rule is broken, so its words
decide. GraphQL refuses with HTTP 200, often without a code, so its words decide, too. `CapacityError` goes on to
the next offer; `QuotaError`, `FundsError` and `CredentialsError` past RunPod; `RateLimitError` and `NoAnswer` are asked
again with the same token, then passed by; any other `ProviderError` ends the launch. The last ones are what becomes of
a pod that was rented: `CapacityError` has it replaced, the other one ends the pool at the second time. The error's
`provider`, `code` and `text` have the parts for programs.

| refused for | is raised as | and says |
|---|---|---|
"""


def _ends(world: World) -> Iterator[str]:
    """What is read of pods that will not run."""
    world.delays.starting = 1e9
    driver = RunPod()
    [one] = driver.launch(next(iter(driver.offers(A40))), order())

    def said(what: str) -> str:
        with pytest.raises(ProviderError) as error:
            driver.access(one)
        return f"| {what} | `{type(error.value).__name__}` | {str(error.value).replace(one.id, '…')} |"

    yield said("(its image never comes)")
    world.interrupt(one.id)
    yield said("(it has EXITED)")
    driver.terminate([one])
    yield said("(it is gone)")


@pytest.mark.usefixtures("impatient")
def test_the_page_of_refusals_says_what_a_user_reads(runpod_api: World) -> None:
    rows = []
    for number, (what, refuse, kind, _) in enumerate(TABLE[:-1]):
        error = refused(runpod_api, what, refuse, number)
        rows.append(f"| {what} | `{kind.__name__}` | {error} |")
    rows += _ends(runpod_api)
    page = INTRODUCTION + "\n".join(rows) + "\n"
    if os.environ.get("SKYPOOL_WRITE_DOCS") == "1":
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "write it anew: SKYPOOL_WRITE_DOCS=1 pytest tests/providers/test_runpod.py"


def test_a_pod_that_slips_from_page_to_page_is_asked_for_by_its_id(
    runpod_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that ends while pages are read moves the ones behind it: where cursors count, one of them is on no page."""
    monkeypatch.setattr(RunPod, "ending", 1.0)
    runpod_api.pages.size = 1
    oldest, newest = rent(runpod_api, order(nodes=(0, 1)))[0]
    runpod_api.undying(oldest.id, None)
    lists = 0

    def slip(request: Request, moment: str) -> None:
        nonlocal lists
        if (request.action, moment) == ("GET /v2/pods", "after") and newest.id in runpod_api.rentals:
            lists += 1
            runpod_api.vanish(newest.id)  # after the first page

    runpod_api.on_call = slip
    with pytest.raises(StillRunning) as left:
        RunPod().terminate([oldest])
    assert left.value.instances == (oldest,)
    assert lists == 1


def test_retry_after_is_heard(runpod_api: World) -> None:
    runpod_api.fail(CREATE, 429, {"title": "x", "status": 429, "detail": "…"}, headers={"Retry-After": "7"})
    with pytest.raises(RateLimitError) as error:
        RunPod().launch(sold(A40)[0], order())
    assert error.value.retry_after == 7


def test_what_is_asked_is_asked_again_where_it_passes(runpod_api: World) -> None:
    runpod_api.refuse("GET /v2/pods", TROUBLE[0], "500", times=2)
    assert RunPod().instances() == []
    assert len(runpod_api.calls("GET /v2/pods")) == 3
    runpod_api.refuse("countryCodes", *TROUBLE, times=2)
    assert sold(A40, region="SE", cloud="community", graphql=True)
    assert len(runpod_api.calls("countryCodes")) == 3


# --- launching -----------------------------------------------------------------------------------------------


def rent(world: World, placed: Order, **settings: Any) -> tuple[list[Instance], dict[str, Any]]:
    """The instances, and what the last create was told."""
    driver = RunPod(**settings)
    launched = driver.launch(next(iter(driver.offers(placed.need))), placed)
    created = [each for each in world.journal if each.action in (CREATE, RENT, BID)][-1].body
    return launched, created if "variables" not in created else created["variables"]["input"]


def test_a_launch_says_what_the_pod_is_and_whose(runpod_api: World) -> None:
    launched, asked = rent(runpod_api, order(nodes=(3, 5)))
    assert [each.node for each in launched] == [3, 5]
    names = sorted(each.name for each in runpod_api.rentals.values())
    assert names == [f"skypool/train/{tags.owner()}/0123456789abcdef-1/{n}/2030-01-02T03:04:05Z" for n in (3, 5)]
    assert (asked["gpu"]["id"], asked["gpu"]["count"], asked["cloud"]) == ("NVIDIA A40", 1, "SECURE")
    assert (asked["ports"], asked["disk"], asked["startSsh"]) == (["22/tcp"], 50, False)
    assert asked["image"] == "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404"
    assert {"cpu", "mounts", "dataCenterIds"}.isdisjoint(asked)


def test_vcpus_and_memory_are_asked_for_where_that_can_be_asked(runpod_api: World) -> None:
    large = replace(A40, vcpus=7.5, memory_gib=30)
    with pytest.raises(UsageError, match=r"vcpus= and memory= out, or use RunPod\(graphql=True\)"):
        sold(large)
    _, asked = rent(runpod_api, order(need=large), graphql=True)
    assert (asked["minVcpuCount"], asked["minMemoryInGb"]) == (8, 30)
    assert (asked["ports"], asked["containerDiskInGb"], asked["volumeInGb"]) == ("22/tcp", 50, 0)
    assert {"terminateAfter", "bidPerGpu", "dataCenterId"}.isdisjoint(asked)
    assert runpod_api.calls("POST /v2/pods") == []


def test_spot_pods_need_the_setting_and_other_markets_do_not(runpod_api: World) -> None:
    with pytest.raises(UsageError, match=r"no spot pods; use market='on-demand', or RunPod\(graphql=True\).*2027"):
        sold(replace(A40, market="spot"))
    assert [each.market for each in sold(replace(A40, market="cheapest"))] == ["on-demand"]
    assert {each.market for each in sold(replace(A40, market="cheapest"), graphql=True)} == {"on-demand", "spot"}
    assert sorted(each.path for each in runpod_api.journal) == ["/graphql", "/v2/catalog/gpus", "/v2/catalog/gpus"]


def test_without_the_setting_nothing_asks_graphql(runpod_api: World) -> None:
    driver = RunPod()
    for token, need in (("gpu-1", A40), ("cpu-1", Need())):
        launched = driver.launch(next(iter(driver.offers(need))), order(need=need, token=token))
        driver.access(launched[0])
        driver.renew("train", datetime(2031, 1, 1, tzinfo=UTC))
        driver.terminate(launched)
    assert all(each.good for each in driver.check())
    assert {each.path for each in runpod_api.journal if each.path == "/graphql"} == set()


def test_the_start_command_replaces_the_entry_point_of_the_image_and_runs_as_root(runpod_api: World) -> None:
    for more in ({}, {"graphql": True}):
        need = replace(A40, market="spot" if more else "on-demand")
        _, asked = rent(runpod_api, order(token=f"t-{len(more)}", need=need), **more)
        told = json.loads(asked["dockerArgs"] if more else asked["args"])
        assert told == {"entrypoint": ["sh", "-c"], "cmd": [UNPACK]}
        env = {each["key"]: each["value"] for each in asked["env"]} if more else asked["env"]
        assert set(env) == {"SKYPOOL_START", "RUNPOD_POD_USER"}
        assert env["RUNPOD_POD_USER"] == "0"


def test_where_runpod_does_not_know_the_field_of_the_start_command_the_other_one_is_tried_once(
    runpod_api: World,
) -> None:
    """https://docs.runpod.io/api-reference-v2/pods/create-a-pod had `args`; programs of autumn 2026 send `cmd`."""
    runpod_api.takes = "cmd"
    launched, asked = rent(runpod_api, order(nodes=(0, 1)))
    assert [each.node for each in launched] == [0, 1]
    assert asked["cmd"] == ["sh", "-c", UNPACK]
    sent = [set(each.body) & {"args", "cmd"} for each in runpod_api.calls(CREATE)]
    assert sent == [{"args"}, {"cmd"}, {"cmd"}], "what it took is what it is sent next"
    runpod_api.takes = "args"
    rent(runpod_api, order(token="b-1"))
    sent = [set(each.body) & {"args", "cmd"} for each in runpod_api.calls(CREATE)]
    assert sent[3:] == [{"cmd"}, {"args"}]
    assert runpod_api.count()["instances"] == 3


@pytest.mark.parametrize("status", [400, 422])
@pytest.mark.parametrize(
    "body",
    [
        {"title": "Unprocessable Entity", "errors": [{"message": "unexpected property", "location": "body.args"}]},
        {"detail": "validation failed", "errors": [{"path": ["args"], "message": "not allowed"}]},
        {"detail": [{"type": "extra_forbidden", "loc": ["body", "args"], "msg": "Extra inputs are not permitted"}]},
        {"message": 'unknown field "args"'},
    ],
)
def test_the_start_field_is_found_wherever_a_refusal_names_it(
    runpod_api: World, body: dict[str, Any], status: int
) -> None:
    runpod_api.fail(CREATE, status, {"status": status, **body})
    runpod_api.takes = "cmd"
    [launched], _ = rent(runpod_api, order())
    assert [set(each.body) & {"args", "cmd"} for each in runpod_api.calls(CREATE)] == [{"args"}, {"cmd"}]
    RunPod().terminate([launched])


@pytest.mark.parametrize("name", ["errors", "detail"])
def test_a_refusal_that_repeats_what_was_sent_proves_nothing(runpod_api: World, name: str) -> None:
    """The value names the GPU that does not exist, but what is wrong is another field."""
    sent = {"gpu": {"id": "NVIDIA NoSuchGPU 0GB"}, "dataCenterIds": ["XX-NONE-1"]}
    wrong = {"loc": ["body", "disk"], "msg": "too small", "value": sent, "input": sent}
    runpod_api.fail(CREATE, 422, {"title": "Unprocessable Entity", "status": 422, name: [wrong]}, times=None)
    found = list(RunPod().prove_creates())
    assert len(found) == 2
    assert [each.good for each in found] == [False, False]
    assert all("disk" in each.text and "NoSuchGPU" not in each.text for each in found)


def test_another_invalid_field_is_not_taken_for_the_start_command(runpod_api: World) -> None:
    wrong(runpod_api)
    with pytest.raises(ProviderError, match="422"):
        rent(runpod_api, order())
    assert len(runpod_api.calls(CREATE)) == 1


def test_the_start_command_holds_the_host_key_and_no_key_of_the_account(runpod_api: World) -> None:
    placed = order()
    _, asked = rent(runpod_api, placed)
    packed = asked["env"]["SKYPOOL_START"]
    assert len(packed) < 10_000
    script = gzip.decompress(base64.b64decode(packed)).decode()
    assert placed.keys is not None
    private, public = placed.keys.host(placed.token)
    assert private.strip() in script
    assert public in script
    assert script.count("BEGIN OPENSSH PRIVATE KEY") == 1
    assert runpod_api.key not in script + asked["args"]
    assert f"url={runpod_api.url}\n" in script.replace("'", "").replace('"', "")


def test_runpod_itself_ends_a_spot_pod_whose_lifetime_is_over(runpod_api: World) -> None:
    """Its image never came, so it has no guard."""
    runpod_api.delays.starting = 1e9
    spot = replace(A40, market="spot")
    launched, asked = rent(runpod_api, order(lifetime=3600.0, need=spot), graphql=True)
    until = datetime.strptime(asked["terminateAfter"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    assert abs((until - datetime.now(UTC)).total_seconds() - 4200) < 60
    runpod_api.clock.advance(4100)
    assert runpod_api.count()["instances"] == 1
    runpod_api.clock.advance(110)
    runpod_api.wait(lambda: not runpod_api.count()["instances"])
    RunPod().terminate(launched)


def test_a_spot_pod_is_bid_for_by_gpu_at_the_price_that_was_offered(runpod_api: World) -> None:
    need = Need(accelerators=(parse("H100-SXM:8"),), market="spot")
    launched, asked = rent(runpod_api, order(need=need), graphql=True)
    assert (asked["gpuCount"], asked["bidPerGpu"]) == (8, 1.5)
    assert launched[0].detail["price"] == pytest.approx(12.0)
    driver = RunPod(graphql=True)
    offer = next(iter(driver.offers(need)))
    runpod_api.price("NVIDIA H100 80GB HBM3", 2.69, 1.8)
    assert [each.state for each in driver.instances()] == ["ending"]  # outbid, and its disk is billed on
    with pytest.raises(CapacityError, match="minimum bid"):
        driver.launch(offer, order(token="b-1"))
    driver.terminate(driver.instances())
    assert runpod_api.left() == {}


def test_a_pod_that_costs_more_than_was_offered_is_ended_again(runpod_api: World) -> None:
    offer = sold(A40)[0]
    runpod_api.price("NVIDIA A40", 0.5, None)
    with pytest.raises(CapacityError, match=r"costs 0\.5000 USD per hour, but 0\.3568 was offered.*ended again"):
        RunPod().launch(offer, order())
    assert runpod_api.left() == {}


def test_a_pod_whose_reply_was_lost_is_looked_at_as_closely(runpod_api: World) -> None:
    offer = sold(A40)[0]
    one, dear = RunPod().launch(offer, order(nodes=(0, 1)))
    runpod_api.rentals[dear.id].usd = 9.0
    runpod_api.refuse(CREATE, GONE[0])  # so that node 1 is not had again
    assert [each.id for each in RunPod().launch(offer, order(nodes=(0, 1)))] == [one.id]
    assert [*runpod_api.rentals] == [one.id]
    [_, again] = RunPod().launch(offer, order(nodes=(0, 1)))
    assert again.id != dear.id
    assert runpod_api.count()["instances"] == 2


def test_a_pod_in_another_data_centre_than_was_asked_for_is_ended_again(runpod_api: World) -> None:
    runpod_api.odd = {"dataCenterId": "US-TX-3"}
    with pytest.raises(CapacityError, match="is in US-TX-3, but EU-RO-1 was asked for"):
        rent(runpod_api, order(), region="EU-RO-1")
    assert runpod_api.left() == {}
    assert rent(runpod_api, order())[0]


@pytest.mark.parametrize("lag", [0.0, 2.0])
def test_a_pod_that_runpod_names_otherwise_is_ended_as_nobody_would_find_it(runpod_api: World, lag: float) -> None:
    runpod_api.odd = {"name": "my pod"}
    runpod_api.delays.listing = lag
    with pytest.raises(ProviderError, match=r"RunPod named the new pod .* 'my pod'.*ended again"):
        rent(runpod_api, order())
    assert runpod_api.left() == {}


def test_a_new_pod_that_runpod_does_not_know_yet_is_ended_once_it_does(runpod_api: World) -> None:
    runpod_api.delays.listing = 2.0
    launched, _ = rent(runpod_api, order())
    RunPod().terminate(launched)
    assert runpod_api.left() == {}
    RunPod().terminate(launched)  # and quiet once it has ended


@pytest.mark.usefixtures("impatient")
def test_a_creation_that_is_answered_with_no_pod_is_no_answer(runpod_api: World) -> None:
    spot = replace(A40, market="spot")
    offer = sold(spot, graphql=True)[0]
    runpod_api.fail(BID, 200, {"data": {"pod": None}})
    with pytest.raises(NoAnswer, match="the answer has no pod"):
        RunPod(graphql=True).launch(offer, order(need=spot))
    assert runpod_api.left() == {}


def test_too_many_requests_in_the_middle_of_a_launch_are_no_lack_of_stock(runpod_api: World) -> None:
    offer = sold(A40)[0]
    runpod_api.refuse(CREATE, "rate limit exceeded for the minute window", "429")
    runpod_api.faults[0].when = lambda request: "/1/" in request.body["name"]
    with pytest.raises(RateLimitError):
        RunPod().launch(offer, order(nodes=(0, 1)))
    assert [each.node for each in RunPod().launch(offer, order(nodes=(0, 1)))] == [0, 1]
    assert runpod_api.count()["instances"] == 2


def test_a_create_without_a_reply_is_found_by_its_name_though_lists_lag(runpod_api: World) -> None:
    runpod_api.delays.listing = 1.5
    runpod_api.drop(CREATE)
    [launched], _ = rent(runpod_api, order())
    assert [*runpod_api.rentals] == [launched.id]
    assert len(runpod_api.calls(CREATE)) == 1


@pytest.mark.usefixtures("impatient")
def test_what_turned_up_twice_is_ended_but_for_one(runpod_api: World) -> None:
    """A list that lags for longer than anybody waits."""
    runpod_api.delays.listing = 3.0
    runpod_api.drop(CREATE)
    with pytest.raises(NoAnswer):
        rent(runpod_api, order(nodes=(0, 1)))
    rent(runpod_api, order(nodes=(0, 1)))
    assert runpod_api.count()["instances"] == 3
    runpod_api.clock.advance(4)
    again, _ = rent(runpod_api, order(nodes=(0, 1)))
    assert sorted(runpod_api.rentals) == sorted(each.id for each in again)
    assert [each.node for each in again] == [0, 1]


def test_with_less_stock_than_asked_for_the_first_ranks_are_rented_and_later_ones_ended(runpod_api: World) -> None:
    runpod_api.refuse(CREATE, GONE[0])
    first = runpod_api.faults[0]
    first.when = lambda request: "/5/" in request.body["name"]  # scripts have that, too, at times
    launched, _ = rent(runpod_api, order(nodes=(4, 5, 6)))
    assert [each.node for each in launched] == [4]
    assert [*runpod_api.rentals] == [launched[0].id]


# --- names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "",
        "my pod",
        "skypool",
        "skypool/train",
        "skypool/train/{me}/0123-1/0",
        "skypool/train/{me}/0123-1/0/",
        "skypool/train/{me}/0123-1/x/2030-01-02T03:04:05Z",
        "my skypool/train/{me}/0123-1/0/2030-01-02T03:04:05Z",
        "skypool/train/{me}/0123-1/0/2030-01-02T03:04:05Z copy",
        "skypool/train/bob@elsewhere/0123-1/0/2030-01-02T03:04:05Z",
    ],
)
def test_a_pod_that_is_called_otherwise_is_never_taken_for_ours(runpod_api: World, name: str) -> None:
    rent(runpod_api, order())
    [pod] = runpod_api.rentals.values()
    pod.name = name.format(me=tags.owner())
    driver = RunPod()
    ours = name.endswith("/0/")  # without a time it is ours all the same
    assert len(driver.instances()) == len(driver.instances(pool="train")) == ours


def test_another_hosts_pool_of_the_same_name_is_not_touched(runpod_api: World, monkeypatch: pytest.MonkeyPatch) -> None:
    me = tags.owner()
    for owner, token in ((me, "a-1"), (f"{me.partition('@')[0]}@elsewhere", "b-1"), ("ann@laptop", "c-1")):
        monkeypatch.setattr(tags, "owner", lambda owner=owner: owner)
        rent(runpod_api, order(token=token))
    monkeypatch.setattr(tags, "owner", lambda: me)
    assert [each.token for each in RunPod().instances(pool="train")] == ["a-1"]
    assert sorted(each.token for each in RunPod().instances()) == ["a-1", "b-1"]


def test_a_name_that_runpod_would_cut_off_is_refused_before_anything_is_rented(
    runpod_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tags, "owner", lambda: f"{'u' * 100}@host")
    with pytest.raises(UsageError, match="shorter name="):
        rent(runpod_api, order(pool="p" * 40))
    assert runpod_api.calls(CREATE) == []


def test_a_name_is_written_anew_when_half_of_the_lease_in_it_is_over(
    runpod_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skypool_runpod._RENEWING", 0.0)
    now = datetime.now(UTC).replace(microsecond=0)
    rent(runpod_api, replace(order(nodes=(0, 1)), until=now + timedelta(seconds=400)))
    driver, until = RunPod(), now + timedelta(seconds=600)
    driver.renew("train", until)
    assert runpod_api.calls("PATCH*") == []
    for seconds, renames in ((900, 2), (901, 2), (1000, 2), (500, 4)):
        until = now + timedelta(seconds=seconds)
        driver.renew("train", until)
        assert len(runpod_api.calls("PATCH*")) == renames
    assert {each.until for each in driver.instances()} == {until}


def test_the_name_of_a_single_pod_has_the_time_that_was_written_last(
    runpod_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is handed over to its machine may end soon after its lease would have."""
    monkeypatch.setattr("skypool_runpod._RENEWING", 0.0)
    now = datetime.now(UTC).replace(microsecond=0)
    rent(runpod_api, replace(order(nodes=(0,)), until=now + timedelta(seconds=600)))
    for seconds in (900, 700):
        RunPod().renew("train", until := now + timedelta(seconds=seconds))
        assert [each.until for each in RunPod().instances()] == [until]


def test_pools_that_are_renewed_and_nodes_that_start_share_one_list_of_pods(runpod_api: World) -> None:
    """RunPod allows about 60 requests a minute."""
    runpod_api.delays.starting = 6.0
    launched, _ = rent(runpod_api, order(nodes=tuple(range(5))))
    driver, asked, began = RunPod(), len(runpod_api.journal), time.monotonic()
    for each in retry.at_once(driver.access, launched):
        assert isinstance(each, Access), each
    for _ in range(5):
        driver.renew("train", datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC))
    told = [(each.method, each.path) for each in runpod_api.journal[asked:]]
    assert set(told) == {("GET", "/v2/pods")}
    assert len(told) <= 2 + (time.monotonic() - began) / 4


# --- what is there -------------------------------------------------------------------------------------------


def test_a_pod_starts_until_its_port_is_mapped_and_what_access_waits_for_is_that(runpod_api: World) -> None:
    runpod_api.delays.starting = 0.8
    [one], _ = rent(runpod_api, order())
    assert one.state == "starting"
    access = RunPod().access(one)
    ssh = access.transport
    assert isinstance(ssh, SSH)
    assert (ssh.host, ssh.user, ssh.port) == ("203.0.113.9", "root", 10022)
    assert access.guard == GUARD
    assert [each.state for each in RunPod().instances()] == ["running"]


def test_why_a_pod_is_no_more_is_what_access_says(runpod_api: World) -> None:
    [one], _ = rent(runpod_api, order())
    runpod_api.interrupt(one.id)
    with pytest.raises(CapacityError, match=r"EXITED.*stopped, or was outbid"):
        RunPod().access(one)
    RunPod().terminate([one])
    with pytest.raises(CapacityError, match=r"gone.*start another one"):
        RunPod().access(one)


def test_a_pod_whose_image_never_comes_is_told_of_with_what_to_do(
    runpod_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skypool_runpod._PULLING", 0.0)
    runpod_api.delays.starting = 1e9
    [one], _ = rent(runpod_api, order())
    with pytest.raises(ProviderError, match=r"image=.*login"):
        RunPod().access(one)


def test_an_end_that_is_refused_is_still_running_by_name(runpod_api: World) -> None:
    launched, _ = rent(runpod_api, order(nodes=(0, 1)))
    runpod_api.refuse("DELETE /v2/pods/{id}", "this key may not do that", "403", times=None)
    with pytest.raises(StillRunning, match="permission") as left:
        RunPod().terminate(launched)
    assert {getattr(each, "id", None) for each in left.value.instances} == {each.id for each in launched}
    runpod_api.heal()
    RunPod().terminate(launched)
    assert runpod_api.left() == {}


# --- what goes wrong between here and there ------------------------------------------------------------------


@pytest.mark.parametrize("end", ["\n", "\r\n", "  \n"])
def test_a_key_that_was_copied_with_the_end_of_its_line_is_the_same_key(
    runpod_api: World, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", f"{runpod_api.key}{end}")
    assert sold(A40)
    assert sold(A40, api_key=f" {runpod_api.key}{end}")


@pytest.mark.parametrize("key", ["rpa_5ECRET\nrpa_0THER", "rpa_5ECRET\u2013"])
def test_a_key_that_no_header_can_hold_is_refused_at_once_and_not_shown(runpod_api: World, key: str) -> None:
    began = time.monotonic()
    with pytest.raises(CredentialsError, match="RUNPOD_API_KEY") as error:
        RunPod(api_key=key).instances()
    assert time.monotonic() - began < 10
    assert "5ECRET" not in "".join(traceback.format_exception(error.value))


def test_the_netrc_of_other_programs_is_no_key(
    runpod_api: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "netrc").write_text("default login ann password 5ecret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert sold(A40)
    assert {call.headers["authorization"] for call in runpod_api.journal} == {f"Bearer {runpod_api.key}"}


def test_a_web_page_is_told_of_in_a_few_words(runpod_api: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skypool_runpod._LAG", 0.1)
    page = (
        f"<!DOCTYPE html><html><head><title>502 Bad gateway</title><style>{'.a{color:red}' * 500}</style></head></html>"
    )
    with pytest.raises(NoAnswer, match="502 Bad gateway") as error:
        offer = sold(A40)[0]
        runpod_api.fail(CREATE, 502, page, headers={"Content-Type": "text/html"})
        RunPod().launch(offer, order())
    assert len(str(error.value)) < 600


def test_a_pod_that_is_made_and_told_of_with_an_error_is_rented(runpod_api: World) -> None:
    """As GraphQL does where one field of an answer fails."""
    spot = replace(A40, market="spot")
    offer = sold(spot, graphql=True)[0]
    runpod_api.spoilt.append(("costPerHr", "Cannot read properties of undefined (reading 'costPerHr')"))
    [one] = RunPod(graphql=True).launch(offer, order(need=spot))
    assert [*runpod_api.rentals] == [one.id]
    assert len(runpod_api.calls(BID)) == 1


def test_a_pod_whose_end_was_refused_has_not_ended_because_a_list_lacks_it(
    runpod_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunPod, "ending", 1.0)
    one, two = rent(runpod_api, order(nodes=(0, 1)))[0]
    runpod_api.odd = {"name": "another", "id": "another"}  # what the list says
    refused = runpod_api.refuse("DELETE /v2/pods/{id}", "this key may not do that", "403", times=None)
    refused.when = lambda request: request.by["id"] == one.id
    with pytest.raises(StillRunning, match="permission") as left:
        RunPod().terminate([one, two])
    assert left.value.instances == (one,)
    assert [*runpod_api.rentals] == [one.id]


def test_a_pod_that_ends_while_names_are_written_hinders_no_other(runpod_api: World) -> None:
    one, two = rent(runpod_api, order(nodes=(0, 1)))[0]
    until = datetime(2050, 1, 1, tzinfo=UTC)

    def look(call: Any, moment: str) -> None:
        if call.method == "PATCH" and moment == "before" and one.id in runpod_api.rentals:
            runpod_api.vanish(one.id)

    runpod_api.on_call = look
    RunPod().renew("train", until)
    assert [(each.id, each.until) for each in RunPod().instances()] == [(two.id, until)]


@pytest.mark.parametrize("status", ["TERMINATED", "ERROR", "EXITED"])
def test_a_pod_that_somebody_ended_is_replaced(runpod_api: World, status: str) -> None:
    [one], _ = rent(runpod_api, order())
    runpod_api.rentals[one.id].state = status
    with pytest.raises(CapacityError, match="start another one"):
        RunPod().access(one)


# --- beforehand ----------------------------------------------------------------------------------------------


def test_a_check_tells_of_the_account_and_of_what_is_wrong_with_it(runpod_api: World) -> None:
    rent(runpod_api, order())
    found = {each.what: each for each in RunPod().check()}
    assert "the pods of the account (1) cost 0.35 USD per hour" in found["account"].text
    found = {each.what: each for each in RunPod(graphql=True).check()}
    assert "user_lab has 1000.00 USD left" in found["account"].text
    assert all(each.good for each in found.values())
    runpod_api.spend_limit = None
    assert "(no limit)" in next(each.text for each in RunPod(graphql=True).check() if each.what == "account")
    runpod_api.balance = 0.0
    [wrong] = [each for each in RunPod(graphql=True).check() if not each.good]
    assert "user/billing" in wrong.advice
    runpod_api.bad_keys.add(runpod_api.key)
    for driver in (RunPod(), RunPod(graphql=True)):
        [wrong] = [each for each in driver.check() if not each.good]
        assert "RUNPOD_API_KEY" in wrong.advice


# --- on machines ---------------------------------------------------------------------------------------------


class TestRunPodMachines(OnMachines):
    """What of the contract runs commands, each on machines of its own: CPU pods."""

    @pytest.fixture
    def driver(self, runpod: World) -> RunPod:
        return RunPod()

    @pytest.fixture
    def control(self, runpod: World) -> Strings:
        return Strings(runpod)


WAYS = ("DELETE /v2/pods/{id}", "POST /v2/pods/{id}/action", "podTerminate")
"""In which a pod may end itself, in the order in which they are tried."""


@pytest.mark.parametrize("without", ["", "/usr/bin/curl"])
@pytest.mark.parametrize("way", range(3), ids=["by DELETE", "by an action", "by GraphQL"])
def test_a_pod_ends_itself_with_its_own_key_by_curl_or_by_python(runpod: World, without: str, way: int) -> None:
    driver = RunPod()
    [launched] = driver.launch(next(iter(driver.offers(Need()))), order(need=Need(), lease=4.0))
    for closed in WAYS[:way]:
        runpod.refuse(closed, "this key may not do that", "403", times=None)
    runpod.wait(lambda: runpod.rentals[launched.id].machine is not None)
    machine = runpod.rentals[launched.id].machine
    assert machine is not None
    if without:
        machine.path(without).unlink()
    runpod.wait(lambda: not runpod.count()["instances"], 40)
    assert [bool(runpod.calls(each)) for each in WAYS] == [number <= way for number in range(3)]
    ended = runpod.calls(WAYS[way])[-1]
    assert ended.headers["authorization"] == f"Bearer rpp_{launched.id}"
    assert ended.headers["user-agent"] == "skypool"
    assert ("accept-encoding" in ended.headers) == bool(without)  # as Python's urllib says
    runpod.heal()
    driver.terminate([launched])
