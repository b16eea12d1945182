"""What is odd about Vast.ai, against the lab's Vast.ai; and the contract."""

from __future__ import annotations

import base64
import gzip
import itertools
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from skypool.accelerators import parse
from skypool.drivers import blocklist, tags
from skypool.drivers.userdata import GUARD
from skypool.errors import (
    BootstrapError,
    CapacityError,
    ConnectionLost,
    CredentialsError,
    FundsError,
    HostKeyMismatch,
    NoAnswer,
    NodeInterrupted,
    OfferGone,
    ProviderError,
    QuotaError,
    RateLimitError,
    StillRunning,
    UsageError,
)
from skypool.event_loop import Loop
from skypool.model import Instance, Need, Offer, Order
from skypool.offers.ranking import rank_offers
from skypool.offers.search import look_around
from skypool.rental.launch import Launcher
from skypool.testing import DriverContract
from skypool_vastai import VastAI, _api, _catalog, _instances
from tests.lab import prices
from tests.lab.vastai import KEY, OCI
from tests.lab.vastai import VastAI as World
from tests.providers.on_machines import OnMachines
from tests.providers.strings import PagedStrings

pytestmark = pytest.mark.needs("openssh")

CREATE = "PUT /api/v0/asks/{id}/"
DESTROY = "DELETE /api/v0/instances/{id}/"
RTX_4090 = Need(accelerators=(parse("RTX_4090"),))
REFUSALS: dict[type[ProviderError], tuple[int, str, str]] = {
    CredentialsError: (401, "auth_error", "Invalid user key"),
    OfferGone: (404, "no_such_ask", "error 404/3603: no_such_ask Instance type by id 123 is not available."),
    RateLimitError: (429, "rate_limit", "API requests too frequent endpoint threshold=4.5"),
    FundsError: (400, "insufficient_credit", "Your account lacks credit; see the billing page."),
    CapacityError: (400, "invalid_price", "Bid of 0.1 is below the minimum bid of 0.2"),
}


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own state and cache, and no waiting between calls: a test of that says so."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(_api, "PACE", {})


class Strings(PagedStrings):
    """The contract's control of the lab's Vast.ai."""

    create, boot = CREATE, "loading"
    refusals = REFUSALS

    def stock_out(self, offer: Offer, left: int) -> None:
        self.world.capacity(left, str(offer.detail["ask"]))

    def kill(self, instance: Instance) -> None:
        super().kill(instance)
        self.world.wait(lambda: not self.world.rentals[instance.id].living)


class TestVastAICalls(DriverContract):
    """All of the contract for which no command need run on a machine."""

    real = False
    several = False

    @pytest.fixture
    def driver(self, vastai_api: World, monkeypatch: pytest.MonkeyPatch) -> VastAI:
        monkeypatch.setattr(VastAI, "ending", 3.0)
        return VastAI()

    @pytest.fixture
    def control(self, vastai_api: World) -> Strings:
        return Strings(vastai_api)

    @pytest.fixture
    def need(self) -> Need:
        return RTX_4090

    @pytest.fixture
    def secrets(self) -> Sequence[str]:
        return [KEY]


class TestVastAIMachines(OnMachines):
    """What of the contract a machine is needed for."""

    several = False

    @pytest.fixture
    def driver(self, vastai: World) -> VastAI:
        return VastAI()

    @pytest.fixture
    def control(self, vastai: World) -> Strings:
        return Strings(vastai)


# --- what is sold --------------------------------------------------------------------------------------------


def sold(need: Need = RTX_4090, **settings: Any) -> list[Offer]:
    return list(VastAI(**settings).offers(need))


def test_a_wrong_key_is_told_as_such_whatever_its_status(vastai_api: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VAST_API_KEY", "wrong")
    for vastai_api.wrong_key in (401, 404):
        for ask in (VastAI().instances, lambda: list(VastAI().offers(Need()))):
            with pytest.raises(CredentialsError, match="the API key is wrong"):
                ask()
        lost = Instance("vastai", "7", "train", 0)
        with pytest.raises(StillRunning):
            VastAI().terminate([lost])  # an end is not proved by 404


def test_traffic_both_ways_is_in_the_ranking_the_budget_and_the_receipt(vastai_api: World) -> None:
    """https://vast.ai/docs/billing/billing (read 2026-11-26 in a stored copy)."""
    for ask in vastai_api.asks.values():
        ask.update(inet_down_cost=0.001, inet_up_cost=0.002)
    need = Need(accelerators=(parse("RTX_4090"),))
    plan = rank_offers(list(VastAI().offers(need)), need)
    cheapest = plan.offers[0]
    assert cheapest.start_usd == pytest.approx(10 * 0.001 + 1 * 0.002)
    assert "+ about 0.0120 USD for 10 GB of traffic in and 1 GB out" in plan.explain()
    vastai_api.asks[cheapest.detail["ask"]]["inet_down_cost"] = 5.0
    plan = rank_offers(list(VastAI().offers(need)), need)
    assert plan.offers[-1].detail["ask"] == cheapest.detail["ask"], "50 USD for the image: it is the dearest now"
    plan = rank_offers(list(VastAI(download_gb=0, upload_gb=0).offers(need)), need)
    assert (plan.offers[0].detail["ask"], plan.offers[0].start_usd) == (cheapest.detail["ask"], 0.0)
    values: list[Any] = [-1, math.inf, "10"]
    for value in values:
        with pytest.raises(UsageError, match="download_gb"):
            VastAI(download_gb=value)
    vastai_api.asks[cheapest.detail["ask"]].update(inet_down_cost=None)
    vastai_api.asks[cheapest.detail["ask"]].pop("inet_up_cost")
    [unknown] = [each for each in VastAI().offers(need) if each.detail["ask"] == cheapest.detail["ask"]]
    assert unknown.start_usd == 0.0


def test_every_offer_of_the_snapshot_costs_what_it_cost_for_the_whole_machine(vastai_api: World) -> None:
    was = prices.snapshot("vastai")
    found = sold(Need(market="cheapest", disk_gib=4.6), bid=1.0)
    assert len(found) == len(was)
    for market in ("on-demand", "spot"):
        now = sorted((each for each in found if each.market == market), key=lambda o: str(o.detail["machine"]))
        then = [each for each in was if each.market == market]
        for new, old in zip(now, then, strict=True):
            storage = 0.0 if market == "on-demand" else 0.2 * 5 / 720
            assert new.usd_per_hour == pytest.approx(old.usd_per_hour + storage, abs=2e-6), (new, old)
            assert (new.region, new.vcpus) == (old.region, old.vcpus)
            assert new.memory_gib == pytest.approx(old.memory_gib, rel=0.01)
            assert old.accelerator is not None
            assert new.accelerator is not None
            assert old.accelerator.accepts(new.accelerator), (new.accelerator, old.accelerator)
            assert (new.trust, new.quota) == ("data", "")


def test_a_price_is_for_the_disk_that_is_asked_for_and_not_for_each_gpu(vastai_api: World) -> None:
    vastai_api.asks = {1: vastai_api.asks[9_000_001] | {"id": 1, "num_gpus": 4, "dph_base": 4.0, "min_bid": 1.0}}
    for disk, gb in ((0, 32), (99.5, 107), (465, 500)):  # GiB, and GB that are so much at least
        on_demand, spot = sold(Need(market="cheapest", disk_gib=disk), bid=1.5)
        assert on_demand.usd_per_hour == pytest.approx(4.0 + 0.2 * gb / 720)
        assert spot.usd_per_hour == pytest.approx(1.5 + 0.2 * gb / 720)
        assert spot.detail["price"] == 1.5
    assert sold(Need(disk_gib=466)) == []


def test_cores_and_memory_are_those_of_the_share_that_is_rented(vastai_api: World) -> None:
    one = vastai_api.asks[9_000_002]
    assert (one["gpu_frac"], one["cpu_cores"], one["cpu_cores_effective"]) == (0.5, 256, 128.0)
    [offer] = [each for each in sold(Need()) if each.detail["ask"] == one["id"]]
    assert offer.vcpus == 128
    assert offer.memory_gib == pytest.approx(377.9, abs=0.1)


def test_a_search_that_may_lack_machines_says_so(vastai_api: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        everything = sold(replace(RTX_4090, regions=("*, SE",)))
        monkeypatch.setattr("skypool_vastai._requests.MOST_OFFERS", len(everything) - 1)
        assert len(sold()) == len(everything) - 1, "the cheapest are enough where any will do"
    with pytest.warns(RuntimeWarning, match="cheapest machines only; dearer ones in the regions"):
        assert len(sold(replace(RTX_4090, regions=("*, SE",)))) == len(everything) - 1


def test_what_cannot_serve_is_not_searched_for(vastai_api: World) -> None:
    assert sold(Need(accelerators=(parse("v5e-8"),))) == []
    assert vastai_api.journal == []
    sold(replace(RTX_4090, vcpus=8, memory_gib=16), min_reliability=0.9, verified=False)
    [search] = vastai_api.calls("POST /api/v0/bundles/")
    asked = search.body
    assert asked["gpu_name"] == {"in": ["RTX 4090"]}
    assert asked["num_gpus"] == {"in": [1]}
    assert (asked["cpu_cores"], asked["cpu_ram"]) == ({"gte": 8}, {"gte": 16384})
    assert asked["reliability"] == {"gte": 0.9}
    assert asked["rentable"] == {"eq": True}
    assert asked["type"] == "on-demand"
    assert "verified" not in asked


@pytest.mark.parametrize(
    ("field", "value"),
    [("verification", "unverified"), ("reliability", 0.9), ("direct_port_count", 0), ("driver_version", "390.1"),
     ("rentable", False), ("min_bid", None), ("external", True)],
)  # fmt: skip
def test_machines_that_would_not_do_are_left_out(vastai_api: World, field: str, value: object) -> None:
    market: Any = "spot" if field == "min_bid" else "on-demand"
    first, *rest = sold(replace(RTX_4090, market=market))
    vastai_api.asks[first.detail["ask"]][field] = value
    assert sold(replace(RTX_4090, market=market), ssh="direct") == rest


@pytest.mark.parametrize(("ssh", "of_its_own"), [("any", True), ("direct", True), ("proxy", False)])
def test_a_machine_without_a_port_is_reached_by_the_proxy_and_others_as_the_setting_says(
    vastai_api: World, ssh: str, of_its_own: bool
) -> None:
    first, second, *_ = sold()
    vastai_api.asks[first.detail["ask"]]["direct_port_count"] = 0
    found = {each.detail["ask"]: each for each in sold(ssh=ssh)}
    assert found[second.detail["ask"]].detail["proxy"] is not of_its_own
    assert (first.detail["ask"] in found) == (ssh != "direct")
    if ssh != "direct":
        assert found[first.detail["ask"]].detail["proxy"]
        assert found[first.detail["ask"]].zone == f"machine {first.detail['machine']} by proxy"


@pytest.mark.parametrize(
    ("name", "mib", "means"),
    [("A100 SXM4", 40960, "A100-40GB-SXM"), ("A100 SXM4", 81920, "A100-80GB-SXM"),
     ("A100 PCIE", 40536, "A100-40GB-PCIe"),
     ("Tesla V100", 32768, "V100-32GB"), ("Tesla V100", 16384, "V100-16GB"), ("RTX 4060 Ti", 8188, "RTX_4060_Ti-8GB"),
     ("RTX PRO 6000 S", 97887, "RTX_PRO_6000-Server"), ("H100 NVL", 95830, "H100-94GB-NVL"), ("RTX 9999", 1, "None")],
)  # fmt: skip
def test_a_gpu_is_what_its_name_and_its_memory_say(name: str, mib: int, means: str) -> None:
    assert str(_catalog.accelerator(name, mib, 1)) == means


def test_a_gpu_that_nobody_knows_serves_whoever_needs_none(vastai_api: World) -> None:
    vastai_api.asks[9_000_001]["gpu_name"] = "RTX 9999"
    assert [each.accelerator for each in sold(Need()) if each.detail["ask"] == 9_000_001] == [None]


def test_searches_are_counted_by_the_day_and_not_repeated(vastai_api: World) -> None:
    vastai_api.quota = 1
    sold()
    with pytest.raises(QuotaError, match="midnight") as refused:
        sold()
    assert refused.value.code == "search_quota_exceeded"
    assert len(vastai_api.calls("POST*")) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_reliability": 98},
        {"min_reliability": "0.98"},
        {"bid": 0.5},
        {"bid": float("inf")},
        {"disk_gb": 0},
        {"disk_gb": "64"},
        {"ssh": "prxy"},
        {"verified": "false"},
        {"verified": None},
        {"image": 7},
    ],
)
def test_settings_that_mean_nothing_are_refused_where_they_are_written(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        VastAI(**wrong)


def test_a_key_that_is_none_is_refused_without_being_shown() -> None:
    with pytest.raises(UsageError, match="api_key must be a non-empty string, not a value of type bytes") as refused:
        VastAI(api_key=b"secret-key")  # type: ignore[arg-type]  # that is what is tested
    assert "secret" not in str(refused.value)


# --- who asks ------------------------------------------------------------------------------------------------


def test_the_key_is_that_of_vast_ais_own_tools(vastai_api: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VAST_API_KEY")
    with pytest.raises(CredentialsError, match=r"manage-keys.*set api-key"):
        sold()
    file = Path(os.environ["XDG_CONFIG_HOME"]) / "vastai" / "vast_api_key"
    file.parent.mkdir(parents=True)
    file.write_text(f"{KEY}-file\n")
    for key, driver in (("file", VastAI()), ("own", VastAI(api_key=f"{KEY}-own"))):
        assert driver.instances() == []
        assert vastai_api.journal[-1].headers["authorization"] == f"Bearer {KEY}-{key}"
    with pytest.raises(CredentialsError, match="wrong or was removed"):
        VastAI(api_key="another").instances()


def test_doctor_says_whose_account_it_is_and_what_is_left_out(vastai_api: World) -> None:
    blocklist.note("vastai", 40_001, "OCI runtime create failed")
    said = {each.what: each for each in VastAI().check()}
    assert said["credentials and credit"].text.startswith("lab")
    assert "100.00" in said["credentials and credit"].text
    assert "40001: OCI runtime" in said["machines left out"].text
    assert [each.action for each in vastai_api.calls("POST*")] == ["POST /api/v0/bundles/"], "one search"


# --- what it refuses -----------------------------------------------------------------------------------------

TABLE: list[tuple[int, str, str, type[ProviderError], str]] = [
    (404, "no_such_ask", "error 404/3603: no_such_ask Instance type by id 123 is not available.", OfferGone, "another"),
    (410, "no_such_ask", "error 404/3603: no_such_ask Instance type by id 123 is not available.", OfferGone, "another"),
    (400, "invalid_price", "Bid of 0.1 is below the minimum bid of 0.2", CapacityError, "bid="),
    (402, "", "Payment required", FundsError, "credit"),
    (400, "insufficient_credit", "Your account has insufficient credit.", FundsError, "credit"),
    (401, "auth_error", "Invalid user key", CredentialsError, "manage-keys"),
    (404, "auth_error", "Invalid user key", CredentialsError, "manage-keys"),
    (403, "auth_error", "This action requires a login.", CredentialsError, "restricted"),
    (429, "", "API requests too frequent endpoint threshold=4.5", RateLimitError, "wait"),
    (429, "search_quota_exceeded", "Daily search quota exceeded.", QuotaError, "midnight"),
    (400, "invalid_args", "disk must be a number", ProviderError, "report"),
    (400, "no_ssh_key_for_vm", "no ssh key", ProviderError, "report"),
    (502, "", "Bad Gateway", NoAnswer, "status.vast.ai"),
    (500, "server_error", "Internal error", NoAnswer, "status.vast.ai"),
    (400, "something_quite_new", "something quite new", ProviderError, "something_quite_new"),
]


def order(pool: str = "train", token: str = "0123456789abcdef-1", nodes: tuple[int, ...] = (0,), **more: Any) -> Order:
    until = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    return Order(pool, token, nodes, RTX_4090, until=until, **more)


PAGE = Path(__file__).parents[2] / "docs" / "vastai-errors.md"
INTRODUCTION = """# What Vast.ai refuses, and what you read then

Every message here is one that was really raised: `tests/providers/test_vastai.py` lets a Vast.ai refuse to rent with
each of these, or lets a machine fail so, and compares. `OfferGone` and `CapacityError` go on to the next machine;
`FundsError` and `CredentialsError` past Vast.ai; `RateLimitError` and `NoAnswer` are asked again with the same token;
any other `ProviderError` ends the launch. The error's `provider`, `code` and `text` have the parts for programs.

| status and error | is raised as | and says |
|---|---|---|
"""


def test_every_refusal_of_a_launch_has_its_kind_its_code_and_its_advice(
    vastai_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skypool_vastai._LAG", 0.0)
    monkeypatch.setattr("skypool_vastai._SHARED", 0.0)
    monkeypatch.setattr("skypool_vastai._MAPPING", 0.0)
    offer, rows = sold()[0], list[str]()
    for number, (status, error, words, kind, says) in enumerate(TABLE):
        body = {"success": False, "error": error, "msg": words} if error else {"msg": words}
        vastai_api.fail(CREATE, status, body)
        with pytest.raises(ProviderError) as refused:
            VastAI().launch(offer, order("table", f"abcdef-{number}"))
        raised = refused.value
        assert type(raised) is kind, (status, error, raised)
        assert (raised.provider, raised.text) == ("vastai", words)
        assert says in str(raised)
        assert len(vastai_api.calls(CREATE)) == number + 1
        rows.append(f"| {status} `{error}` | `{kind.__name__}` | {raised} |")
    assert vastai_api.left() == {}
    page = INTRODUCTION + "\n".join([*rows[:-1], *_failures(vastai_api)]) + "\n"
    if os.environ.get("SKYPOOL_WRITE_DOCS") == "1":
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "write it anew: SKYPOOL_WRITE_DOCS=1 pytest tests/providers/test_vastai.py"


def _failures(world: World) -> Iterator[str]:
    """What is read of instances that will not run."""
    spoilt = {"broken": ("created", OCI), "offline": ("offline", ""), "exited": ("exited", "container exited"),
              "unmapped": ("running", "success, running")}  # fmt: skip
    driver = VastAI()
    [instance] = driver.launch(sold()[0], order("failing"))
    contract = world.rentals[instance.id]
    world.wait(lambda: contract.status == "running")
    contract.ask["direct_port_count"] = 0
    for code, (contract.status, contract.said) in spoilt.items():
        with pytest.raises(ProviderError) as raised:
            driver.access(instance)
        assert raised.value.code == code
        yield f"| {contract.status} | `{type(raised.value).__name__}` | {_plain(raised.value, instance)} |"
    world.outbid(instance.id)
    with pytest.raises(CapacityError, match="bids more") as outbid:
        driver.access(instance)
    yield f"| stopped | `CapacityError` | {_plain(outbid.value, instance)} |"
    driver.terminate([instance])
    gone = replace(instance, created_at=0.0)  # a young one is looked for a minute
    with pytest.raises(CapacityError, match="ended itself") as raised_last:
        driver.access(gone)
    yield f"| (no such instance) | `CapacityError` | {_plain(raised_last.value, instance)} |"


def _plain(error: Exception, instance: Instance) -> str:
    return str(error).replace(instance.id, "20000001")


def test_the_table_of_refusals_has_no_row_that_another_one_hides() -> None:
    assert [each for each in _api.REFUSALS.meanings if not each.text and "*" in each.codes] == []
    for meaning in _api.REFUSALS.meanings:
        for code in meaning.codes if not meaning.text else ():
            plain = code.replace("?", "3")
            assert _api.REFUSALS._meaning(plain) is meaning, code


def test_what_asks_too_often_waits_and_a_day_s_end_is_not_waited_for(vastai_api: World) -> None:
    words = {"success": False, "msg": "API requests too frequent endpoint threshold=2.0"}
    vastai_api.fail("GET /api/v1/instances/", 429, words, times=2, headers={"Retry-After": "0.1"})
    assert VastAI().instances() == []
    assert len(vastai_api.calls("GET /api/v1/instances/")) == 3


def test_calls_of_a_kind_keep_the_distance_that_vast_ai_asks_for(
    vastai_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {pattern.split()[0] for pattern in _api.PACE} <= {"PUT", "DELETE", "GET"}
    monkeypatch.setattr(_api, "PACE", {"DELETE /api/v0/instances/*": 1.5})
    _api._account.cache_clear()
    driver, offers = VastAI(), sold()
    made = [each for n in range(3) for each in driver.launch(offers[n], order(token=f"abc-{n}"))]
    driver.terminate(made)
    at = [each.at for each in vastai_api.calls(DESTROY)]
    assert [later - sooner >= 0.7 for sooner, later in itertools.pairwise(at)] == [True, True]
    _api._account.cache_clear()


# --- renting -------------------------------------------------------------------------------------------------


def test_a_launch_says_all_that_a_machine_needs_and_keeps_vast_ais_limits(vastai_api: World) -> None:
    placed = order("p" * 40, "f" * 64, nodes=(1234, 1235), lifetime=3600.0)
    [instance] = VastAI().launch(sold()[0], placed)
    asked = vastai_api.calls(CREATE)[-1].body
    assert (instance.node, instance.token, instance.pool) == (1234, "f" * 64, "p" * 40)
    assert instance.until is None or instance.until == placed.until
    assert len(asked["label"]) <= 256
    assert sum(map(len, asked["args"])) + len(asked["onstart"]) < 200 < 4096
    assert len(str(asked["env"])) < 12_000 < 32_768
    assert "-p 22:22" in asked["env"]
    assert (asked["runtype"], asked["cancel_unavail"], asked["disk"]) == ("args", True, 32)
    assert asked["image"] == f"python:3.{sys.version_info.minor}-slim"
    assert "price" not in asked
    assert KEY not in str(asked)


def test_a_machine_behind_the_proxy_is_told_the_same_once_vast_ais_own_sshd_is_there(vastai_api: World) -> None:
    driver, placed = VastAI(ssh="proxy"), order("p" * 40, "f" * 64, nodes=(1234,), lifetime=3600.0)
    offer = sold(ssh="proxy")[0]
    [instance] = driver.launch(offer, placed)
    asked = vastai_api.calls(CREATE)[-1].body
    assert (asked["runtype"], asked["cancel_unavail"]) == ("ssh_proxy", True)
    assert "args" not in asked
    assert len(asked["onstart"]) < 200 < 4096
    assert set(asked["env"]) == {"SKYPOOL_START"}
    assert len(str(asked["env"])) < 12_000 < 32_768
    script = gzip.decompress(base64.b64decode(asked["env"]["SKYPOOL_START"])).decode()
    assert placed.keys is not None
    for part in (*placed.keys.host(placed.token), placed.keys.public, GUARD):
        assert part.strip() in script
    assert script.index("skypool-guard") < script.index("ssh_host_ed25519_key"), "its end is armed first"
    assert KEY not in script
    assert subprocess.run(["bash", "-n"], input=f"{asked['onstart']}\n{script}", text=True).returncode == 0
    vastai_api.wait(lambda: vastai_api.rentals[instance.id].status == "running")
    for each in (instance, *driver.instances()):  # also as another process finds it
        assert each.region == offer.region
        access = driver.access(each)
        words = " ".join(access.transport.argv(["true"]))
        assert "ssh5.vast.ai" in words
        assert "10122" in words
        assert access.keying > 0
        assert "StrictHostKeyChecking=yes" in words


def test_the_proxys_port_is_nobodys_until_the_machine_runs(vastai_api: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VastAI, "loading", 0.2)
    monkeypatch.setattr("skypool_vastai._SHARED", 0.0)
    vastai_api.delays.loading = 1e9
    driver = VastAI(ssh="proxy")
    [instance] = driver.launch(sold(ssh="proxy")[0], order())
    with pytest.raises(CapacityError, match="too slow"):
        driver.access(instance)


def test_a_machine_that_runs_and_gets_no_port_is_left_out_and_another_one_is_taken(
    vastai_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skypool_vastai._MAPPING", 0.2)
    monkeypatch.setattr("skypool_vastai._SHARED", 0.0)
    driver, (offer, *rest) = VastAI(), sold()
    [instance] = driver.launch(offer, order())
    vastai_api.rentals[instance.id].ask["direct_port_count"] = 0  # somebody else has the last one
    vastai_api.wait(lambda: vastai_api.rentals[instance.id].status == "running")
    with pytest.raises(CapacityError, match=r'ssh="proxy"') as none:
        driver.access(instance)
    assert none.value.code == "unmapped"
    driver.rejected(instance, none.value)
    driver.terminate([instance])
    assert sold() == rest


def test_a_bid_is_what_was_offered_times_the_setting(vastai_api: World) -> None:
    offer = sold(replace(RTX_4090, market="spot"), bid=2.0)[0]
    [instance] = VastAI().launch(offer, order())
    asked = vastai_api.calls(CREATE)[-1].body
    assert asked["price"] == pytest.approx(2 * vastai_api.asks[offer.detail["ask"]]["min_bid"], abs=2e-6)
    assert vastai_api.rentals[instance.id].market == "spot"


@pytest.mark.parametrize("base", ["image", "need"])
def test_the_image_is_the_users_own_where_there_is_one(vastai_api: World, base: str) -> None:
    driver, placed = VastAI(image="pytorch/pytorch:latest" if base == "image" else None), order()
    if base == "need":
        placed = replace(placed, need=replace(RTX_4090, bases={"vastai": "pytorch/pytorch:latest", "aws": "x"}))
    driver.launch(sold()[0], placed)
    assert vastai_api.calls(CREATE)[-1].body["image"] == "pytorch/pytorch:latest"


def test_what_a_refused_bid_left_behind_is_destroyed_before_the_error(vastai_api: World) -> None:
    offer = sold(replace(RTX_4090, market="spot"), bid=1.0)[0]
    vastai_api.asks[offer.detail["ask"]]["min_bid"] *= 2
    with pytest.raises(CapacityError, match="bid=") as refused:
        VastAI().launch(offer, order())
    assert refused.value.code == "invalid_price"
    assert len(vastai_api.calls(DESTROY)) == 1
    vastai_api.wait(lambda: vastai_api.left() == {})


def test_what_a_refused_bid_left_behind_and_cannot_be_destroyed_is_named(vastai_api: World) -> None:
    offer = sold(replace(RTX_4090, market="spot"), bid=1.0)[0]
    vastai_api.asks[offer.detail["ask"]]["min_bid"] *= 2
    vastai_api.fail(DESTROY, 403, {"error": "auth_error", "msg": "no"}, times=None)
    with pytest.raises(StillRunning, match=r"20000001.*restricted"):
        VastAI().launch(offer, order())


def test_a_refusal_with_the_status_of_success_is_one(vastai_api: World) -> None:
    offer = sold()[0]
    vastai_api.fail(CREATE, 200, {"success": False, "error": "no_such_ask", "msg": "it is gone"})
    with pytest.raises(OfferGone):
        VastAI().launch(offer, order())


def test_an_instance_that_the_list_does_not_know_yet_is_no_reason_for_another_one(vastai_api: World) -> None:
    vastai_api.delays.unseen = 2
    vastai_api.drop(CREATE)
    driver, offer = VastAI(), sold()[0]
    [instance] = driver.launch(offer, order())
    assert vastai_api.count() == {"instances": 1}
    assert [each.id for each in driver.launch(offer, order())] == [instance.id]
    assert len(vastai_api.calls(CREATE)) == 1


def test_a_reply_that_is_lost_beyond_all_patience_still_is_no_second_machine(
    vastai_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ask cannot be taken twice."""
    monkeypatch.setattr("skypool_vastai._LAG", 0.1)
    vastai_api.delays.unseen = 4
    vastai_api.drop(CREATE)
    offer = sold()[0]
    with pytest.raises(NoAnswer):
        VastAI().launch(offer, order())
    vastai_api.rentals["20000001"].unseen = 1
    [instance] = VastAI().launch(offer, order())
    assert instance.id == "20000001"
    assert len(vastai_api.calls(CREATE)) == 2
    assert vastai_api.count() == {"instances": 1}


def test_what_its_order_made_and_was_stopped_is_destroyed_when_it_is_ordered_again(vastai_api: World) -> None:
    driver, offer = VastAI(), sold(replace(RTX_4090, market="spot"))[0]
    [first] = driver.launch(offer, order())
    vastai_api.stop(first.id)
    vastai_api.delays.ending = 3.0  # until then nobody can rent it
    with pytest.raises(OfferGone):
        driver.launch(offer, order())
    vastai_api.wait(lambda: vastai_api.left() == {})


class Book:
    """Where creates are written down; nobody reads it."""

    def intend(self, order: Order, offer: Offer) -> None: ...
    def rented(self, order: Order, instances: Sequence[Instance]) -> None: ...
    def refused(self, order: Order, error: Exception) -> None: ...
    def failed(self, order: Order) -> None: ...


def test_many_nodes_are_a_create_each_and_stale_offers_are_passed_over(vastai_api: World) -> None:
    plan = Loop.shared().run(look_around([VastAI()], RTX_4090)).offers
    for each in plan[1:3]:
        vastai_api.capacity(0, str(each.detail["ask"]))
    numbers = itertools.count()
    at = Launcher([VastAI()], lambda offer, nodes: order("train", f"abc-{next(numbers)}", nodes), Book())
    assert len(at.launch(plan, range(5)).instances) == 5
    assert [type(error) for _, error in at.attempts] == [OfferGone, OfferGone]
    assert len(vastai_api.calls(CREATE)) == 7
    assert len(vastai_api.calls("GET*")) <= 9
    assert sorted(each.node for each in VastAI().instances()) == [0, 1, 2, 3, 4]


# --- what there is -------------------------------------------------------------------------------------------


def test_all_pages_are_read_and_what_is_not_ours_is_not_taken_for_it(vastai_api: World) -> None:
    driver = VastAI()
    labels = [None, "", "skypool", "skypool-train", "skypool pool=train", "train", f"owner={tags.owner()} pool=train"]
    for number in range(60):
        ask = [*vastai_api.asks.values()][number]
        body = {"image": "x", "disk": 10.0, "env": {}, "runtype": "ssh", "label": labels[number % len(labels)]}
        vastai_api._contract(ask, body, {"dph_base": 1.0, "dph_total": 1.0})
    driver.launch(sold()[-1], order("train"))
    assert len(driver.instances()) == 1
    assert driver.instances(pool="trai") == []
    assert len(vastai_api.calls("GET /api/v1/instances/")) >= 6


def test_another_hosts_pool_of_the_same_name_is_seen_and_never_taken_for_ones_own(
    vastai_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    me = tags.owner().partition("@")[0]
    monkeypatch.setattr(tags, "owner", lambda: f"{me}@elsewhere")
    VastAI().launch(sold()[0], order("train"))
    monkeypatch.undo()
    for name, value in vastai_api.environment.items():
        monkeypatch.setenv(name, value)
    assert VastAI().instances(pool="train") == []
    assert [each.pool for each in VastAI().instances()] == ["train"]


@pytest.mark.parametrize(
    ("actual", "intended", "means"),
    [(None, "running", "starting"), ("created", "running", "starting"), ("loading", "running", "starting"),
     ("rebooting", "running", "starting"), ("running", "running", "running"), ("running", "stopped", "ending"),
     ("exited", "stopped", "ending"), ("exited", "running", "ending"), ("offline", "running", "ending"),
     ("frozen", "running", "ending")],
)  # fmt: skip
def test_states_mean_what_they_cost_and_serve(actual: str | None, intended: str, means: str) -> None:
    assert _instances.state({"actual_status": actual, "intended_status": intended}) == means


@pytest.mark.parametrize(
    ("record", "proxied", "where"),
    [({"ports": {"22/tcp": [{"HostPort": "40123"}]}, "public_ipaddr": "203.0.113.5\n"}, False, ("203.0.113.5", 40123)),
     ({"ports": {}, "public_ipaddr": "203.0.113.5", "ssh_host": "ssh5.vast.ai", "ssh_port": 10122}, False, None),
     ({"ports": None, "ssh_host": "ssh5.vast.ai", "ssh_port": 10122}, True, ("ssh5.vast.ai", 10122)),
     ({"ports": {}, "ssh_host": "ssh5.vast.ai", "ssh_port": None}, True, None),
     ({"actual_status": "loading", "ssh_host": "ssh5.vast.ai", "ssh_port": 10122}, True, None),
     ({"intended_status": "stopped", "ssh_host": "ssh5.vast.ai", "ssh_port": 10122}, True, None)],
)  # fmt: skip
def test_an_address_is_one_of_what_runs(record: dict[str, Any], proxied: bool, where: tuple[str, int] | None) -> None:
    assert _instances.address({"actual_status": "running", "intended_status": "running", **record}, proxied) == where


def test_an_instance_that_is_outbid_is_no_longer_running_and_is_billed_until_it_is_destroyed(vastai_api: World) -> None:
    driver = VastAI()
    [instance] = driver.launch(sold(replace(RTX_4090, market="spot"))[0], order())
    vastai_api.wait(lambda: driver.instances()[0].state == "running")
    vastai_api.outbid(instance.id)
    assert [each.state for each in driver.instances()] == ["ending"]
    assert vastai_api.count() == {"instances": 1}
    driver.terminate([instance])
    assert vastai_api.left() == {}


def test_an_end_that_is_refused_says_why_and_names_what_costs(vastai_api: World) -> None:
    driver, offers = VastAI(), sold()
    [one], [two] = (driver.launch(offers[n], order(token=f"abc-{n}")) for n in range(2))
    vastai_api.fail(DESTROY, 403, {"error": "auth_error", "msg": "no"}, times=None, when=lambda r: r.by["id"] == one.id)
    with pytest.raises(StillRunning, match="restricted") as still:
        driver.terminate([one, two])
    assert still.value.instances == (one,)
    assert isinstance(still.value.__cause__, CredentialsError)
    vastai_api.heal()
    driver.terminate([one, two])


# --- what goes wrong between here and there ------------------------------------------------------------------

REFUSED = {"success": False, "error": "server_busy", "msg": "The instance could not be changed, please retry."}
PAGE_OF_A_PROXY = "<html><head><title>Welcome to the hotel</title></head><body>Log in to go on</body></html>"


def test_a_key_that_was_copied_with_the_end_of_its_line_is_the_same_key(
    vastai_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VAST_API_KEY", f"{KEY}\n")
    assert sold()
    assert sold(api_key=f"{KEY}\r\n")


@pytest.mark.parametrize("call", ["PUT /api/v0/instances/{id}/", DESTROY])
def test_a_change_that_is_refused_with_the_status_of_success_is_told_of(vastai_api: World, call: str) -> None:
    driver = VastAI()
    [one] = driver.launch(sold()[0], order())
    vastai_api.fail(call, 200, REFUSED, times=None)
    with pytest.raises((ProviderError, StillRunning), match="could not be changed"):
        if call == DESTROY:
            driver.terminate([one])
        else:
            driver.renew("train", datetime(2031, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize(
    ("status", "word", "kind"),
    [
        (401, "quite_new", CredentialsError),
        (402, "quite_new", FundsError),
        (403, "quite_new", CredentialsError),
        (429, "quite_new", RateLimitError),
        (429, "search_quota_exceeded", QuotaError),
    ],
)
def test_what_a_status_says_is_not_lost_for_a_word_that_is_new(
    vastai_api: World, status: int, word: str, kind: type[ProviderError]
) -> None:
    offer = sold()[0]
    vastai_api.fail(CREATE, status, {"success": False, "error": word, "msg": "no"})
    with pytest.raises(kind):
        VastAI().launch(offer, order())


@pytest.mark.parametrize("field", ["gpu_name", "gpu_ram", "num_gpus", "cpu_ram", "geolocation", "direct_port_count"])
def test_one_machine_of_which_something_is_not_known_hides_no_other(vastai_api: World, field: str) -> None:
    every = Need(market="on-demand")
    told = len(sold(every))
    vastai_api.asks[9_000_010][field] = None
    assert len(sold(every)) >= told - 1


def test_a_web_page_in_the_place_of_an_answer_is_none(vastai_api: World, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, offer = VastAI(), sold()[0]
    vastai_api.fail("GET /api/v1/instances/", 200, PAGE_OF_A_PROXY, headers={"Content-Type": "text/html"})
    assert driver.instances() == []
    monkeypatch.setattr("skypool_vastai._LAG", 0.1)
    vastai_api.fail(CREATE, 200, PAGE_OF_A_PROXY, headers={"Content-Type": "text/html"})
    with pytest.raises(NoAnswer, match=r"Welcome to the hotel.*proxy"):
        driver.launch(offer, order())


def test_a_young_instance_whose_end_was_refused_has_not_ended_because_a_list_lacks_it(vastai_api: World) -> None:
    vastai_api.delays.unseen = 1000
    driver = VastAI()
    [one] = driver.launch(sold()[0], order())
    vastai_api.fail(DESTROY, 403, {"error": "auth_error", "msg": "no"}, times=None)
    with pytest.raises(StillRunning, match="restricted"):
        driver.terminate([one])
    vastai_api.heal()
    driver.terminate([one])
    vastai_api.wait(lambda: vastai_api.left() == {})


# --- machines that failed ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("why", "is_its_fault"),
    [
        (ConnectionLost("nobody answered"), True),
        (BootstrapError("H100 was bought, and it has no device at all", step="health"), True),
        (BootstrapError("its driver is too old", step="nvidia"), True),
        (CapacityError("OCI", provider="vastai", code="broken"), True),
        (CapacityError("offline", provider="vastai", code="offline"), True),
        (CapacityError("slow", provider="vastai", code="pending"), True),
        (ProviderError("manifest unknown", provider="vastai", code="broken"), False),
        (CapacityError("outbid", provider="vastai", code="outbid"), False),
        (NodeInterrupted("taken"), False),
        (BootstrapError("no such package", step="pip"), False),
    ],
)
def test_a_machine_is_left_out_for_what_is_its_fault_alone(
    vastai_api: World, why: Exception, is_its_fault: bool
) -> None:
    driver, offers = VastAI(), sold()
    [instance] = driver.launch(offers[0], order())
    driver.terminate([instance])
    driver.rejected(instance, why)
    assert (sold() == offers[1:]) == is_its_fault
    if is_its_fault:
        with pytest.raises(OfferGone, match="failed_lately"):
            driver.launch(offers[0], order())
        assert vastai_api.left() == {}


@pytest.mark.parametrize("ssh", ["direct", "proxy"])
def test_another_host_key_is_a_machines_fault_where_its_sshd_was_to_get_ours(vastai_api: World, ssh: str) -> None:
    driver, offers = VastAI(ssh=ssh), sold(ssh=ssh)
    [instance] = driver.launch(offers[0], order())
    driver.terminate([instance])
    driver.rejected(instance, HostKeyMismatch("it is another one"))
    assert (sold(ssh=ssh) == offers) == (ssh == "direct")


def test_an_image_that_nobody_has_is_no_machines_fault(vastai_api: World) -> None:
    driver = VastAI(image="no-such-image:1")
    [instance] = driver.launch(sold()[0], order())
    vastai_api.wait(lambda: vastai_api.rentals[instance.id].said)
    with pytest.raises(ProviderError, match=r"manifest unknown.*image's name") as refused:
        driver.access(instance)
    driver.rejected(instance, refused.value)
    assert blocklist.known("vastai") == {}


def test_who_waits_for_an_address_shares_one_list_with_everybody(vastai_api: World) -> None:
    driver, offers = VastAI(), sold()
    made = [each for n in range(4) for each in driver.launch(offers[n], order(token=f"abc-{n}"))]
    vastai_api.wait(lambda: all(each.status == "running" for each in vastai_api.rentals.values()))
    vastai_api.journal.clear()
    _api._account.cache_clear()
    for each in made:
        access = driver.access(each)
        assert "203.0.113.5" in access.transport.argv(["true"])
        assert "40123" in " ".join(access.transport.argv(["true"]))
    assert len(vastai_api.calls("GET*")) < 4
