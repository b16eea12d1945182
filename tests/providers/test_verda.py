"""What is odd about Verda, against the lab's Verda; and the contract."""

from __future__ import annotations

import os
import re
import subprocess
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from skypool.accelerators import parse
from skypool.drivers import tags
from skypool.drivers.userdata import GUARD
from skypool.errors import (
    AccessError,
    CapacityError,
    CredentialsError,
    FundsError,
    NoAnswer,
    ProviderError,
    RateLimitError,
    StillRunning,
    UsageError,
)
from skypool.model import Finding, Instance, Need, Offer, Order
from skypool.testing import DriverContract
from skypool_verda import Verda, _api, _catalog, _names
from tests.lab import prices
from tests.lab import verda_wares as wares
from tests.lab.cloud import Answer, Request
from tests.lab.verda import ID, SECRET
from tests.lab.verda import Verda as World
from tests.providers.on_machines import OnMachines
from tests.providers.strings import LabStrings

pytestmark = pytest.mark.needs("openssh")

NO_ROOM = "Not enough resources to deploy a 1 GPU instance type 1V100.6V in FIN-01"
CODES: dict[type[ProviderError], tuple[str, str, int]] = {
    CredentialsError: ("unauthorized_request", "Access token is missing or invalid", 2),
    AccessError: ("forbidden_action", "You do not have permission to perform this action", 1),
    CapacityError: ("service_unavailable", NO_ROOM, 1),
    RateLimitError: ("too_many_requests", "Too many requests", 1),
    FundsError: ("insufficient_funds", "Not enough funds", 1),
}
"""What is said, and how often: a token that is refused once may just have ended."""


@pytest.fixture(autouse=True)
def _new_accounts() -> None:
    """An address may be one at which another test's world was."""
    _api._account.cache_clear()


class Strings(LabStrings):
    """The contract's control of the lab's Verda."""

    create, boot = "POST /instances", "validating"
    refusals = CODES

    def stock_out(self, offer: Offer, left: int) -> None:
        self.world.capacity(left, offer.instance_type, offer.region, offer.market)

    def kill(self, instance: Instance) -> None:
        self.world.preempt(instance.id)


class TestVerdaCalls(DriverContract):
    """All of the contract for which no command need run on a machine."""

    real = False

    @pytest.fixture
    def driver(self, verda_api: World, monkeypatch: pytest.MonkeyPatch) -> Verda:
        monkeypatch.setattr(Verda, "ending", 3.0)
        return Verda()

    @pytest.fixture
    def control(self, verda_api: World) -> Strings:
        return Strings(verda_api)

    @pytest.fixture
    def secrets(self) -> list[str]:
        return [SECRET]


# --- what is sold --------------------------------------------------------------------------------------------

V100 = Need(accelerators=(parse("V100"),))


def sold(need: Need | None = None, **settings: Any) -> list[Offer]:
    return list(Verda(**settings).offers(need or Need(market="cheapest")))


def best(**need: Any) -> Offer:
    """One V100, which is in one place only."""
    offers = sold(replace(V100, **need))
    return next(each for each in offers if each.instance_type == "1V100.6V" and each.available)


def test_the_price_of_every_offer_of_the_snapshot_is_that_with_its_disk(verda_api: World) -> None:
    offers = {(each.instance_type, each.region, each.market): each for each in sold()}
    for known in prices.snapshot("verda"):
        region = known.region.replace("unknown", "")
        offer = offers[known.instance_type, region, known.market]
        assert offer.usd_per_hour == pytest.approx(known.usd_per_hour + 100 * wares.NVME / 730, abs=5e-5)
        assert (offer.vcpus, offer.memory_gib) == (known.vcpus, known.memory_gib)
        assert offer.available is bool(region)
        assert offer.accelerator is not None
        assert known.accelerator is not None
        assert (offer.accelerator.name, offer.accelerator.count) == (known.accelerator.name, known.accelerator.count)
        assert offer.accelerator.memory_gb == known.accelerator.memory_gb
        assert offer.arch == ("arm64" if "GB300" in known.instance_type else "x86_64")
    assert len(offers) == len(prices.snapshot("verda")) + 2  # and what has no accelerator


def test_a_larger_disk_costs_more_and_is_asked_for(verda_api: World) -> None:
    small, large = (best(disk_gib=gib) for gib in (0, 500.5))
    assert large.usd_per_hour - small.usd_per_hour == pytest.approx((538 - 100) * wares.NVME / 730)
    launched(large, order())
    assert verda_api.calls("POST /instances")[-1].body["os_volume"]["size"] == 538, "500.5 GiB in GB"


def test_what_is_asked_for_is_what_is_asked(verda_api: World) -> None:
    assert {each.market for each in sold(V100)} == {"on-demand"}
    assert {each.market for each in sold(replace(V100, market="spot"))} == {"spot"}
    assert {each.query["is_spot"] for each in verda_api.calls("GET /instance-availability")} == {"true", "false"}
    assert {each.region for each in sold(location="FIN-02")} == {"FIN-02", ""}
    assert {each.region for each in sold(Need(regions=("fin-0[13]",)))} == {"FIN-01", "FIN-03", ""}


def test_what_is_out_of_stock_in_one_market_may_be_there_in_the_other(verda_api: World) -> None:
    verda_api.capacity(0, "1V100.6V", market="spot")
    verda_api.capacity(3, "1V100.6V", "ICE-01", "on-demand")
    found = {(each.market, each.region): each.available for each in sold() if each.instance_type == "1V100.6V"}
    assert found == {("on-demand", "FIN-01"): True, ("on-demand", "ICE-01"): True, ("spot", ""): False}


def test_prices_in_another_currency_are_refused(verda_api: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(wares.types()["1V100.6V"], "currency", "eur")
    with pytest.raises(ProviderError, match="eur"):
        sold()


@pytest.mark.parametrize(
    ("about", "has"),
    [
        ({"instance_type": "1H100.80S.99V", "description": "1x H100 SXM5 80GB", "model": "H100"}, "H100-80GB-SXM"),
        ({"instance_type": "4X.9V", "description": "", "model": "A100 SXM4", "total": 320}, "A100-80GB-SXM:4"),
        ({"instance_type": "2GB300.99V", "description": "2x GB300 SXM6 288GB", "model": "GB300 SXM6"}, "GB300:2"),
        ({"instance_type": "1X1000.9V", "description": "1x X1000 999GB", "model": "X1000"}, "None"),
        ({"instance_type": "CPU.8V.32G", "description": "", "model": "CPU Node"}, "None"),
    ],
)
def test_a_type_that_nobody_knows_yet_has_what_it_says(about: dict[str, Any], has: str) -> None:
    name = about["instance_type"]
    count = int(name[0]) if name[0].isdigit() else 0
    gpus = {"description": about["description"], "number_of_gpus": count}
    record = {"instance_type": name, "gpu": gpus, "model": about["model"]}
    record["gpu_memory"] = {"size_in_gigabytes": about.get("total", 80 * count)}
    assert str(_catalog.accelerator(record)) == has


@pytest.mark.parametrize(
    ("kind", "image"),
    [
        ("1V100.6V", wares.CLOSED),
        ("1H100.80S.30V", "ubuntu-24.04-cuda-12.8-open"),
        ("8B200.240V", "ubuntu-24.04-cuda-12.8-open"),
        ("CPU.4V.16G", "ubuntu-24.04"),
    ],
)
def test_the_image_brings_a_driver_that_fits(verda_api: World, kind: str, image: str) -> None:
    [offer] = {each.detail["image"] for each in sold() if each.instance_type == kind}
    assert offer == image


def test_an_image_that_the_type_does_not_take_leads_to_another_type(verda_api: World) -> None:
    offer = replace(best(), detail=sold(V100, image="ubuntu-18.04")[0].detail)
    with pytest.raises(CapacityError, match="image="):
        launched(offer, order())
    [offer] = {each.detail["image"] for each in sold(replace(V100, bases={"verda": "fedora-42"}))}
    assert offer == "fedora-42"


# --- settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"location": "FIN01"}, "'FIN-01'"),
        ({"location": []}, "empty list"),
        ({"image": "ubuntu 24"}, "ubuntu-24.04"),
        ({"image": ["ubuntu-24.04"]}, "must be one string"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_where_they_are_written(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        Verda(**settings)


def test_a_location_that_is_not_there_is_told_of(verda_api: World) -> None:
    with pytest.raises(UsageError, match=r"FIN-09 is not a region that the account may use.*ICE-01"):
        sold(location="FIN-09")


# --- who asks ------------------------------------------------------------------------------------------------


def tokens(world: World) -> list[str]:
    return [call.body["grant_type"] for call in world.calls("POST /oauth2/token")]


def test_one_token_serves_every_call_until_it_ends(verda_api: World) -> None:
    for _ in range(3):
        Verda().instances()
    assert tokens(verda_api) == ["client_credentials"]


def test_a_token_that_ended_in_the_middle_is_renewed_and_nothing_is_asked_twice_that_took_effect(
    verda_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skypool.drivers.rest._FRESH", 0.0)
    offer = best()
    ended: list[object] = []

    def look(call: Any, moment: str) -> None:
        if call.action == "POST /instances" and moment == "before" and not ended:
            ended.append(call)
            verda_api.expire()

    verda_api.on_call = look
    [one] = launched(offer, order())
    assert tokens(verda_api) == ["client_credentials", "refresh_token"]
    assert [call.status for call in verda_api.calls("POST /instances")] == [401, 202]
    assert verda_api.count()["instances"] == 1
    verda_api.expire(refreshable=False)
    assert [each.id for each in Verda().instances(pool="train")] == [one.id]
    assert tokens(verda_api)[2:] == ["refresh_token", "client_credentials"]


def test_an_old_token_is_renewed_before_it_ends(verda_api: World, monkeypatch: pytest.MonkeyPatch) -> None:
    Verda().instances()
    real, later = time.monotonic, 3590.0
    monkeypatch.setattr("skypool.drivers.rest.time.monotonic", lambda: real() + later)
    Verda().instances()
    assert tokens(verda_api) == ["client_credentials", "refresh_token"]
    assert {call.status for call in verda_api.calls("GET /instances")} == {200}


def test_without_credentials_it_says_where_they_come_from(verda_api: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CredentialsError, match=r"console\.verda\.com/account/api-keys"):
        Verda(client_secret="wrong").instances()
    assert len(tokens(verda_api)) == 1
    monkeypatch.delenv("VERDA_CLIENT_SECRET")
    with pytest.raises(CredentialsError, match="VERDA_CLIENT_SECRET"):
        Verda().instances()


# --- errors --------------------------------------------------------------------------------------------------

SOLD_OUT = "Not enough resources to deploy a 1 GPU instance type 1V100.6V in FIN-03"
TABLE: list[tuple[int, str, str, type[ProviderError], str]] = [
    (503, "service_unavailable", SOLD_OUT, CapacityError, "out of stock"),
    (400, "invalid_request", "Operating system is not valid for this instance type", CapacityError, "image="),
    (402, "insufficient_funds", "Not enough funds", FundsError, "console.verda.com/billing"),
    (401, "unauthorized_request", "Access token is missing or invalid", CredentialsError, "api-keys"),
    (403, "forbidden_action", "…", AccessError, "role"),
    (403, "forbidden_action", "Can't discontinue a provisioning instance", ProviderError, "few minutes"),
    (429, "too_many_requests", "…", RateLimitError, "wait"),
    (404, "not_found", "Invalid instance id", ProviderError, "start the pool again"),
    (400, "invalid_request", "…", ProviderError, "report"),
    (500, "server_error", "Internal server error", NoAnswer, "later"),
    (503, "service_unavailable", "…", NoAnswer, "later"),
]
STATUSES: list[tuple[str, type[ProviderError], str]] = [
    ("no_capacity", CapacityError, "then had no machine"),
    ("discontinued", CapacityError, "took the machine back"),
    ("deleting", CapacityError, "somebody deleted the machine"),
    ("error", ProviderError, "unusable"),
    ("offline", ProviderError, "unusable"),
    ("provisioning", CapacityError, "too long"),
]
PAGE = Path(__file__).parents[2] / "docs" / "verda-errors.md"
INTRODUCTION = """# What Verda refuses, and what you read then

Every message here is one that was really raised: `tests/providers/test_verda.py` lets Verda refuse a launch with each
of these, in Verda's own words where they are known and with `…` where they are not, and compares. The last ones are no
refusals but what becomes of an instance that was accepted. `CapacityError` goes on to the next offer; `AccessError`
past the location; `CredentialsError` and `FundsError` past Verda; `RateLimitError` and `NoAnswer` are asked again, and
what was made is looked for first; any other `ProviderError` ends the launch. The error's `provider`, `code` and `text`
have the parts for programs.

| code | is raised as | and says |
|---|---|---|
"""


def test_every_refusal_of_a_launch_is_what_its_words_say_and_leaves_nothing(
    verda_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page of refusals says what a user reads."""
    monkeypatch.setattr("skypool_verda._LAG", 0.1)
    monkeypatch.setattr("skypool_verda._ADDRESS", 0.0)
    offer = best()
    rows = []
    for number, (status, code, text, kind, says) in enumerate(TABLE):
        times = 2 if kind is CredentialsError else 1
        verda_api.fail("POST /instances", status, {"code": code, "message": text}, times=times)
        with pytest.raises(ProviderError) as refused:
            launched(offer, order(token=f"abcdef-{number}"))
        error = refused.value
        assert type(error) is kind, text
        assert (error.provider, error.code, error.text) == ("verda", code, text)
        assert says in str(error), str(error)
        verda_api.heal()
        rows.append((code, error))
    assert verda_api.count()["instances"] == 0
    verda_api.delays.provisioning = 600.0  # so that what is set here stays
    for number, (code, kind, says) in enumerate(STATUSES):
        [one] = launched(offer, order(token=f"fedcba-{number}"))
        verda_api.rentals[one.id].state = code
        with pytest.raises(ProviderError) as refused:
            Verda().access(one)
        assert type(refused.value) is kind, code
        assert says in str(refused.value)
        rows.append((code, refused.value))
    told = [(code, str(e).replace("|", "/"), type(e).__name__) for code, e in rows]
    page = INTRODUCTION + "".join(
        f"| `{code}` | `{kind}` | {re.sub(r'[0-9a-f-]{36}', '…', text)} |\n" for code, text, kind in told
    )
    if os.environ.get("SKYPOOL_WRITE_DOCS") == "1":
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "write it anew: SKYPOOL_WRITE_DOCS=1 pytest tests/providers/test_verda.py"


def test_the_table_of_refusals_has_no_row_that_another_one_hides() -> None:
    words = {"not enough resources": SOLD_OUT, "operating system is not valid": TABLE[1][2], "can't": TABLE[5][2]}
    for meaning in _api.REFUSALS.meanings:
        for code in meaning.codes:
            assert _api.REFUSALS._meaning(code.replace("?", "3"), words.get(meaning.text, "")) is meaning, code


def test_nobody_at_the_other_end_is_no_answer(verda_api: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERDA_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setattr("skypool.drivers.rest.patiently", lambda do, seconds, *codes: do())
    with pytest.raises(NoAnswer, match="internet connection"):
        Verda().instances()


# --- what goes wrong between here and there ------------------------------------------------------------------


def test_credentials_that_were_copied_with_the_end_of_their_lines_are_the_same(
    verda_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERDA_CLIENT_ID", f"{ID}\n")
    monkeypatch.setenv("VERDA_CLIENT_SECRET", f"{SECRET}\r\n")
    assert Verda().instances() == []


@pytest.mark.parametrize("page", ["<html><title>Welcome to the hotel</title></html>", "try again later", ""])
def test_what_is_no_id_in_the_place_of_one_is_no_answer_and_what_was_made_is_found(
    verda_api: World, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    offer, real = best(), verda_api.routes["POST /v1/instances"]

    def told(request: Request) -> Answer:
        real(request)
        return Answer(page, 200, {"Content-Type": "text/html"}, plain=True)

    verda_api.routes["POST /v1/instances"] = told
    [one] = launched(offer, order())
    assert [*verda_api.rentals] == [one.id]


def test_a_text_that_is_called_a_web_page_may_be_an_id(verda_api: World) -> None:
    """As servers call any text of which they are told nothing."""
    real = verda_api.routes["POST /v1/instances"]

    def told(request: Request) -> Answer:
        answer = real(request)
        return Answer(answer.body, answer.status, {"Content-Type": "text/html; charset=utf-8"}, plain=True)

    verda_api.routes["POST /v1/instances"] = told
    [one] = run(order())
    assert [*verda_api.rentals] == [one.id]


def test_a_web_page_in_the_place_of_a_token_or_a_list_is_none(verda_api: World) -> None:
    for call in ("POST /oauth2/token", "GET /instances"):
        verda_api.fail(call, 200, "<html>Welcome to the hotel</html>", headers={"Content-Type": "text/html"})
    assert Verda().instances() == []


def test_a_machine_of_which_verda_knows_nothing_for_a_moment_is_no_lost_one(verda_api: World) -> None:
    [one] = run(order())
    verda_api.wait(lambda: verda_api.rentals[one.id].state == "running")
    verda_api.rentals[one.id].state = "unknown"
    assert [(each.state, each.region) for each in Verda().instances()] == [("starting", one.region)]
    assert Verda().access(one)


# --- launching -----------------------------------------------------------------------------------------------

UNTIL = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)


def order(pool: str = "train", token: str = "0123456789abcdef-1", nodes: tuple[int, ...] = (0,), **need: Any) -> Order:
    return Order(pool, token, nodes, replace(V100, **need), until=UNTIL)


def launched(offer: Offer, placed: Order) -> list[Instance]:
    return Verda().launch(offer, placed)


def run(placed: Order, **need: Any) -> list[Instance]:
    offer = best(**need)
    return launched(offer, placed)


@pytest.mark.parametrize("quoted", [False, True])
def test_a_launch_says_what_the_machine_is_and_whose_on_everything_it_makes(verda_api: World, quoted: bool) -> None:
    verda_api.quoted = quoted
    got = run(order(nodes=(3, 9)), market="spot")
    assert [each.node for each in got] == [3, 9]
    assert {each.id for each in got} == set(verda_api.rentals)
    for node, call in zip((3, 9), verda_api.calls("POST /instances"), strict=True):
        asked = call.body
        assert (asked["contract"], asked["is_spot"], asked["pricing"]) == ("SPOT", True, "FIXED_PRICE")
        assert asked["hostname"] == f"train-{node}"
        assert asked["os_volume"]["on_spot_discontinue"] == "delete_permanently"
        assert tags.read(asked["tags"], "key", "value") == {
            "skypool-pool": "train",
            "skypool-owner": tags.owner(),
            "skypool-session": "0123456789abcdef",
            "skypool-token": "0123456789abcdef-1",
            "skypool-ranks": str(node),
            "skypool-until": "2030-01-02T03:04:05Z",
        }
    volumes = [each.name for each in verda_api.volumes.values()]
    names = [each["name"] for each in (*verda_api.keys.values(), *verda_api.scripts.values())]
    for name in volumes + names:
        said = _names.label(name, "train")
        assert said is not None
        assert (said.pool, said.until, said.owner) == ("train", UNTIL, tags.owner())
        assert said.token == "0123456789abcdef" + ("" if name == names[0] else "-1")
    assert {each.kind for each in Verda().leftovers(pool="train")} == {"ssh-key", "script"}


def test_the_script_holds_the_host_key_and_no_other_secret(verda_api: World) -> None:
    placed = order()
    run(placed)
    [script] = verda_api.scripts.values()
    text = script["script"]
    assert placed.keys is not None
    private, public = placed.keys.host(placed.token)
    assert private.strip() in text
    assert public in text
    assert placed.keys.public in text
    assert text.count("PRIVATE KEY") == 2
    assert GUARD in text
    client = Path(placed.keys.identity).read_text().splitlines()[3]
    for secret in (SECRET, verda_api.environment["VERDA_CLIENT_ID"], client):
        assert secret not in text
    assert subprocess.run(["sh", "-n"], input=text, text=True).returncode == 0


def test_orders_of_one_session_have_one_key_and_a_refused_one_leaves_no_script(verda_api: World) -> None:
    offer = best()
    verda_api.capacity(0, "1V100.6V")
    for number in range(3):
        with pytest.raises(CapacityError):
            launched(offer, order(token=f"abcdef-{number}"))
    assert verda_api.left() == {"ssh keys": 1}


def test_what_a_lost_reply_made_is_found_though_lists_lag(verda_api: World) -> None:
    verda_api.delays.unseen = 3
    verda_api.drop("POST /instances")
    run(order(nodes=(0, 1)))
    assert len(verda_api.calls("POST /instances")) == 2
    assert verda_api.count()["instances"] == 2


def test_a_server_error_that_made_a_machine_is_one_machine(verda_api: World) -> None:
    """As its API was seen to do for another kind of thing: 500, and it is there."""
    verda_api.drop("POST /instances")
    offer = best()
    first, second = launched(offer, order()), launched(offer, order())
    assert [each.id for each in first] == [each.id for each in second]
    assert verda_api.count()["instances"] == 1


def test_a_new_machine_that_lists_do_not_have_yet_is_ended_all_the_same(verda_api: World) -> None:
    verda_api.delays.unseen = 1000
    verda_api.delays.ordered = 0.0
    offer = best()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skypool_verda._ORDERED", 0.1)
        got = launched(offer, order())
    Verda().terminate(got)
    assert verda_api.count()["instances"] == verda_api.count()["volumes"] == 0


def test_an_order_that_is_accepted_without_a_machine_for_it_is_a_capacity_error(verda_api: World) -> None:
    verda_api.sell_out()
    with pytest.raises(CapacityError, match="no_capacity") as refused:
        run(order())
    assert refused.value.code == "no_capacity"
    assert verda_api.left() == {"ssh keys": 1}
    assert Verda().instances() == []


def test_machines_of_later_ranks_go_where_an_earlier_one_does_not_come(verda_api: World) -> None:
    verda_api.sell_out()
    with pytest.raises(CapacityError):
        run(order(nodes=(0, 1)))
    assert verda_api.count()["instances"] == 0
    verda_api.capacity(2, "1V100.6V")
    assert [each.node for each in run(order(token="b-1", nodes=(4, 5, 6)))] == [4, 5]


# --- what is there -------------------------------------------------------------------------------------------


def test_states_are_told_as_they_are(verda_api: World) -> None:
    verda_api.delays.validating = 60
    [one] = run(order())

    def state() -> str:
        return "".join(each.state for each in Verda().instances(pool="train"))

    verda_api.wait(lambda: verda_api.rentals[one.id].state == "validating")
    assert one.state == state() == "starting"
    verda_api.clock.advance(61)
    assert state() == "running"
    for status, told in [("offline", "ending"), ("error", "ending"), ("discontinued", ""), ("no_capacity", "")]:
        verda_api.rentals[one.id].state = status
        assert state() == told, status


def test_what_is_not_ours_is_never_taken_for_ours(verda_api: World, monkeypatch: pytest.MonkeyPatch) -> None:
    me = tags.owner()
    for owner, token in ((me, "a-1"), (f"{me.partition('@')[0]}@elsewhere", "b-1"), ("ann@laptop", "c-1")):
        monkeypatch.setattr(tags, "owner", lambda owner=owner: owner)
        run(order(token=token))
    monkeypatch.setattr(tags, "owner", lambda: me)
    stamp = "2030-01-02T030405Z"
    ours = f"skypool_train_a-1_{stamp}_{me}"
    odd = ("skypool", "skypool_train", ours.removesuffix(me), f"my {ours}", f"{ours} copy", ours.replace("t", "T"))
    for name in (*odd, f"skypool_train_a-1_9_{me}"):
        verda_api.scripts[name] = {"id": name, "name": name, "script": "mine"}
    [theirs, *_] = [each for each in verda_api.rentals.values() if each.tags["skypool-token"] == "b-1"]
    theirs.tags = {}
    assert [each.token for each in Verda().instances(pool="train")] == ["a-1"]
    assert [each.token for each in Verda().instances()] == ["a-1"]
    assert sorted(each.kind for each in Verda().leftovers(pool="train")) == ["script", "ssh-key"]
    assert len(Verda().leftovers()) == 4
    weird = _names.label(f"skypool_train_a-1_9999-99-99T999999Z_{me}", "train")
    assert weird is not None
    assert weird.until is None


def test_every_disk_goes_with_its_machine_and_what_somebody_attached_stays_and_is_told_of(verda_api: World) -> None:
    verda_api.built_in = 2000
    [one] = run(order())
    disk, local = verda_api.volumes.values()
    verda_api.wait(lambda: verda_api.rentals[one.id].state == "running")
    verda_api.volumes["data"] = replace(disk, id="data", name="my data", size=70, is_os=False)
    verda_api.volumes["ours"] = replace(disk, id="ours", is_os=False)
    with pytest.warns(RuntimeWarning, match=r"'my data' of 70 GB.* is detached and kept, and Verda bills it") as told:
        Verda().terminate([one])
    assert len(told) == 1
    [call] = verda_api.calls("PUT /instances")
    assert sorted(call.body["volume_ids"]) == sorted([disk.id, local.id, "ours"])
    verda_api.wait(lambda: not verda_api.rentals)
    billed = {each.id for each in verda_api.volumes.values() if not each.trashed}
    assert billed == {"data"}
    Verda().tidy(Verda().leftovers(pool="train"))
    left = {each.id: (each.instance, each.trashed) for each in verda_api.volumes.values()}
    assert left == {"data": ("", False), local.id: ("", True)}, "what is built in can be had back from the trash"


def test_a_disk_of_its_own_goes_for_good_beside_what_somebody_attached(verda_api: World) -> None:
    [one] = run(order())
    [disk] = verda_api.volumes.values()
    verda_api.wait(lambda: verda_api.rentals[one.id].state == "running")
    verda_api.volumes["data"] = replace(disk, id="data", name="my data", is_os=False)
    with pytest.warns(RuntimeWarning, match="my data"):
        Verda().terminate([one])
    [call] = verda_api.calls("PUT /instances")
    assert call.body["volume_ids"] == [disk.id]
    assert call.body["delete_permanently"] is True
    assert [(each.id, each.instance, each.trashed) for each in verda_api.volumes.values()] == [("data", "", False)]
    assert "volume" not in {each.kind for each in Verda().leftovers()}


def test_volumes_are_not_asked_for_where_a_machine_has_its_own_disk_alone(verda_api: World) -> None:
    got = run(order(nodes=(0, 1)))
    Verda().terminate(got)
    assert verda_api.calls("GET /volumes") == []
    assert verda_api.left() == {"ssh keys": 1, "scripts": 1}


def test_what_was_made_twice_is_one_machine_when_it_is_ordered_again(
    verda_api: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply that was lost, and lists that lag for longer than anybody waits; a machine cannot end its own cost."""
    monkeypatch.setattr("skypool_verda._LAG", 0.1)
    verda_api.delays.unseen = 1000
    verda_api.drop("POST /instances")
    offer = best()
    with pytest.raises(NoAnswer):
        launched(offer, order())
    verda_api.delays.unseen = 0
    launched(offer, order())
    assert verda_api.count()["instances"] == 2
    for each in verda_api.rentals.values():
        each.unseen = 0
    [one] = launched(offer, order())
    assert [each.id for each in verda_api.rentals.values() if each.living] == [one.id]


@pytest.mark.parametrize("trashed", [False, True])
def test_a_disk_that_outlived_its_machine_is_found_by_its_name(verda_api: World, trashed: bool) -> None:
    [one] = run(order())
    [disk] = verda_api.volumes.values()
    verda_api.rentals[one.id].state, verda_api.rentals[one.id].living = "discontinued", False
    disk.instance, disk.trashed = "" if trashed else one.id, trashed
    found = [each for each in Verda().leftovers(pool="train") if each.kind == "volume"]
    assert [each.id for each in found] == [disk.id]
    disk.instance = ""
    Verda().tidy(found)
    assert verda_api.volumes == {}


def test_one_that_is_provisioned_is_asked_to_end_until_it_can(verda_api: World) -> None:
    verda_api.delays.provisioning = 1.0
    [one] = run(order())
    Verda().terminate([one])
    assert verda_api.calls("PUT /instances")[0].status == 403
    assert verda_api.left() == {"ssh keys": 1, "scripts": 1}


def test_an_end_that_is_refused_is_still_running_by_name(verda_api: World, monkeypatch: pytest.MonkeyPatch) -> None:
    got = run(order(nodes=(0, 1)))
    verda_api.refuse("PUT /instances", "forbidden_action", "You may not", times=None)
    with pytest.raises(StillRunning, match="You may not") as left:
        Verda().terminate(got)
    assert {getattr(each, "id", None) for each in left.value.instances} == {each.id for each in got}
    verda_api.heal()
    Verda().terminate(got)


def test_several_outcomes_in_one_answer_are_each_read(verda_api: World) -> None:
    [one] = run(order())
    gone = {"instanceId": one.id, "status": "error", "error": "Can't discontinue a discontinued instance"}
    done = [{"action": "delete", **gone, "statusCode": 403}]
    verda_api.fail("PUT /instances", 207, done)
    Verda().terminate([one])
    assert len(verda_api.calls("PUT /instances")) == 2
    assert verda_api.count()["instances"] == 0


def test_a_tag_says_until_when_at_every_moment_of_its_renewal(verda_api: World) -> None:
    [one] = run(order())
    seen: list[datetime | None] = []

    def look(call: Any, moment: str) -> None:
        said = verda_api.rentals[one.id].tags
        seen.append(max((tags.when(said.get(key, "")) or UNTIL for key in said if "until" in key), default=None))
        assert len(said) <= 10

    verda_api.on_call = look
    for hours in (1, 2, 3):
        Verda().renew("train", UNTIL + timedelta(hours=hours))
        assert [each.until for each in Verda().instances(pool="train")] == [UNTIL + timedelta(hours=hours)]
    assert None not in seen
    assert sum("until" in key for key in verda_api.rentals[one.id].tags) == 1
    verda_api.drop("POST /instances/{id}/tags")  # what comes again is there already
    Verda().renew("train", UNTIL + timedelta(hours=4))
    verda_api.rentals[one.id].tags["skypool-until-2"] = tags.stamp(UNTIL)  # as a client that was killed leaves it
    Verda().renew("train", UNTIL + timedelta(hours=5))
    assert [each.until for each in Verda().instances(pool="train")] == [UNTIL + timedelta(hours=5)]
    assert sum("until" in key for key in verda_api.rentals[one.id].tags) == 1


# --- beforehand ----------------------------------------------------------------------------------------------


def checked() -> dict[str, Finding]:
    return {each.what: each for each in Verda().check()}


def test_a_check_says_what_is_there_and_who_ends_machines(verda_api: World) -> None:
    found = checked()
    assert [each for each in found.values() if not each.good] == []
    assert found["credentials and funds"].text == "100.00 usd left"
    assert "skypool gc --yes" in found["the end of its machines"].text
    verda_api.balance = -0.5
    verda_api.clock.advance(0)
    assert "console.verda.com/billing" in checked()["credentials and funds"].advice
    assert verda_api.left() == {}


# --- on machines ---------------------------------------------------------------------------------------------


class TestVerdaMachines(OnMachines):
    """What of the contract runs commands, each on machines of its own."""

    @pytest.fixture
    def driver(self, verda: World) -> Verda:
        return Verda()

    @pytest.fixture
    def control(self, verda: World) -> Strings:
        return Strings(verda)
