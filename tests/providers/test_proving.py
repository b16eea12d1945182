"""What the drivers of Verda, Vast.ai and RunPod do for `skypool doctor` and `skypool prove`, against their labs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from skypool.accelerators import parse
from skypool.drivers import preflight
from skypool.drivers.contract import Bills, Checks, Driver, Proves
from skypool.errors import CapacityError, NoAnswer, ProviderError, QuotaError, StillRunning
from skypool.model import Finding, Instance, Need, Offer, Order
from skypool_runpod import RunPod
from skypool_vastai import VastAI
from skypool_vastai import _api as vastai_calls
from skypool_verda import Verda
from skypool_verda import _api as verda_calls
from tests.lab import vastai as vastai_world
from tests.lab import verda_wares as wares
from tests.lab.cloud import Cloud
from tests.lab.runpod import RunPod as RunPodWorld
from tests.lab.vastai import VastAI as VastAIWorld
from tests.lab.verda import Verda as VerdaWorld

pytestmark = pytest.mark.needs("openssh")

NEEDS = {
    "verda": Need(accelerators=(parse("V100"),)),
    "vastai": Need(accelerators=(parse("RTX 4090"),)),
    "runpod": Need(accelerators=(parse("A40"),)),
}
DRIVERS: dict[str, Callable[..., Any]] = {"verda": Verda, "vastai": VastAI, "runpod": RunPod}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, own_state: None) -> None:
    """Addresses are those of this test's labs, and nobody counts how often they are asked."""
    monkeypatch.setattr("skypool_vastai._api.PACE", {})
    vastai_calls._account.cache_clear()
    verda_calls._account.cache_clear()


@pytest.fixture(params=DRIVERS)
def cloud(request: pytest.FixtureRequest) -> tuple[str, Cloud[Any]]:
    """Each of the three clouds, without machines."""
    return request.param, request.getfixturevalue(f"{request.param}_api")


def bad(findings: Sequence[Finding]) -> list[Finding]:
    return [each for each in findings if not each.good]


# --- level "read" --------------------------------------------------------------------------------------------


def test_a_check_of_a_sound_account_finds_nothing_bad_and_only_reads(cloud: tuple[str, Cloud[Any]]) -> None:
    name, world = cloud
    driver = DRIVERS[name]()
    assert isinstance(driver, Checks)
    found = list(driver.check())
    assert bad(found) == []
    titles = [each.what for each in found]
    assert len({*titles}) == len(titles)
    assert {"ssh on this machine", "clock", "GPUs"} <= {*titles}
    assert {call.action for call in world.journal if call.method != "GET"} <= {
        "POST /oauth2/token",
        vastai_world.SEARCHES[0],
    }
    assert world.left() == {}


WRONG_KEYS: dict[str, dict[str, Any]] = {
    "verda": {"client_secret": "wrong"},
    "vastai": {"api_key": "wrong"},
    "runpod": {"api_key": "wrong"},
}
WHERE = {"verda": "console.verda.com/account/api-keys", "vastai": "cloud.vast.ai/manage-keys",
         "runpod": "console.runpod.io/user/settings"}  # fmt: skip


def test_wrong_credentials_are_told_once_with_where_to_get_others(cloud: tuple[str, Cloud[Any]]) -> None:
    name, _ = cloud
    [wrong] = bad(list(DRIVERS[name](**WRONG_KEYS[name]).check()))
    assert WHERE[name] in wrong.advice


def empty(world: Cloud[Any]) -> None:
    if isinstance(world, VastAIWorld):
        world.credit = 0.0
    elif isinstance(world, (VerdaWorld, RunPodWorld)):
        world.balance = 0.0


@pytest.mark.parametrize(("name", "settings", "says"), [
    ("verda", {}, "console.verda.com/billing"), ("vastai", {}, "cloud.vast.ai/billing"),
    ("runpod", {"graphql": True}, "console.runpod.io/user/billing"),
])  # fmt: skip
def test_an_account_without_money_is_told_once_with_where_to_add_some(
    request: pytest.FixtureRequest, name: str, settings: dict[str, Any], says: str
) -> None:
    empty(request.getfixturevalue(f"{name}_api"))
    [wrong] = bad(list(DRIVERS[name](**settings).check()))
    assert says in wrong.advice


def test_a_wrong_clock_is_told_once(cloud: tuple[str, Cloud[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    name, _ = cloud
    monkeypatch.setattr("skypool.drivers.preflight.time", SimpleNamespace(time=lambda: time.time() - 500))
    [wrong] = bad(list(DRIVERS[name]().check()))
    assert (wrong.what, wrong.advice) == ("clock", "set the clock")
    assert re.search(r"-\d{3} s off", wrong.text)


def sell_the_unknown(world: Cloud[Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """Let it sell GPUs that are in no table, and return their name."""
    if isinstance(world, VastAIWorld):
        world.asks[1] = {**world.asks[9_000_010], "id": 1, "gpu_name": "QX 9000"}
        return "QX 9000"
    if isinstance(world, RunPodWorld):
        world.price("NVIDIA QX 9000", 1.0, None)
        return "NVIDIA QX 9000"
    known = wares.types()["1V100.6V"]
    more = {
        "instance_type": "1QX.6V",
        "model": "QX 9000",
        "gpu": {"description": "1x QX 9000 1GB", "number_of_gpus": 1},
    }
    monkeypatch.setitem(wares.types(), "1QX.6V", {**known, **more})
    return "QX 9000 1GB"


def test_gpus_that_skypool_does_not_know_are_told_in_one_line_with_what_to_do(
    cloud: tuple[str, Cloud[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, world = cloud
    unknown = sell_the_unknown(world, monkeypatch)
    told = [each for each in DRIVERS[name]().check() if unknown in each.text]
    [drift] = told
    assert (drift.what, drift.good) == ("GPUs", True)
    assert "pip install --upgrade skypool" in drift.advice


def test_verda_tells_which_images_machines_get_and_for_which_types_there_is_none(
    verda_api: VerdaWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = {each.what: each for each in Verda().check()}["images"]
    assert f"{wares.CLOSED} (" in images.text
    [wrong] = bad(list(Verda(image="ubuntu-18.04").check()))
    assert (wrong.what, "ubuntu-24.04" in wrong.advice) == ("images", True)
    monkeypatch.setitem(wares.types()["1V100.6V"], "supported_os", ["fedora-42"])
    [wrong] = bad(list(Verda().check()))
    assert ("1V100.6V" in wrong.text, "image=" in wrong.advice) == (True, True)


def test_runpod_tells_of_a_region_or_volume_that_is_not_there(runpod_api: RunPodWorld) -> None:
    for driver, says in ((RunPod(region="XX-1"), "XX-1"), (RunPod(volume="nobody"), "vol0ro")):
        [wrong] = bad(list(driver.check()))
        assert (wrong.what, says in f"{wrong.text} {wrong.advice}") == ("places", True)


# --- level "write" -------------------------------------------------------------------------------------------

CREATES = {"verda": "POST /instances", "vastai": "PUT /api/v0/asks/{id}/", "runpod": "POST /v2/pods"}


def test_creates_that_cannot_be_are_refused_for_the_expected_reason_and_leave_nothing(
    cloud: tuple[str, Cloud[Any]],
) -> None:
    name, world = cloud
    driver = DRIVERS[name]()
    assert isinstance(driver, Proves)
    found = list(driver.prove_creates())
    assert bad(found) == []
    assert len(found) == len(world.calls(CREATES[name])) == (2 if name == "runpod" else 3)
    assert all(each.what.endswith(" is refused") for each in found)
    world.wait(lambda: world.left() == {})


def test_a_refusal_of_a_field_that_runpod_does_not_know_is_no_proof(runpod_api: RunPodWorld) -> None:
    """As it was when RunPod no longer took the field with the start command: 422 for every create."""
    text = "Request validation failed."
    body = {"title": "Unprocessable Entity", "status": 422, "detail": text, "errors": ["additional properties 'x'"]}
    runpod_api.fail("POST /v2/pods", 422, body, times=None)
    found = list(RunPod().prove_creates())
    assert [each.good for each in found] == [False, False]
    assert all("does not name an unknown" in each.text for each in found)


def test_a_refusal_without_a_reason_is_open(runpod_api: RunPodWorld) -> None:
    found = list(RunPod().prove_creates())
    assert [each.open for each in found] == [True, True], "RunPod says only that none is in stock"


def test_runpods_graphql_is_asked_too_where_the_settings_allow_it(runpod_api: RunPodWorld) -> None:
    found = list(RunPod(graphql=True).prove_creates())
    assert (len(found), bad(found)) == (3, [])
    assert len(runpod_api.calls("podFindAndDeployOnDemand")) == 1


def make_possible(world: Cloud[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it sell the first of what should be impossible."""
    if isinstance(world, VastAIWorld):
        world.asks[1] = {**world.asks[9_000_010], "id": 1}
    elif isinstance(world, RunPodWorld):
        world.price("NVIDIA NoSuchGPU 0GB", 0.1, None)
    elif isinstance(world, VerdaWorld):
        monkeypatch.setitem(wares.types(), "1NOSUCHGPU.1V", wares.types()["1V100.6V"])
        monkeypatch.setattr(wares, "LOCATIONS", [*wares.LOCATIONS])
        world.capacity(1, "1NOSUCHGPU.1V")


def test_a_machine_that_is_made_all_the_same_is_named_and_ended(
    cloud: tuple[str, Cloud[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, world = cloud
    make_possible(world, monkeypatch)
    wrong, *_ = bad(list(DRIVERS[name]().prove_creates()))
    assert "was made, and was ended again" in wrong.text
    assert "report" in wrong.advice
    world.wait(lambda: world.left() == {})


def test_a_key_that_may_only_read_is_told_once_with_where_to_change_it(
    vastai_api: VastAIWorld, runpod_api: RunPodWorld
) -> None:
    vastai_api.read_only.add(vastai_world.KEY)
    runpod_api.read_only.add(runpod_api.key)
    for driver, where in ((VastAI(), WHERE["vastai"]), (RunPod(), WHERE["runpod"])):
        assert bad(list(driver.check())) == [], "reading is allowed"
        wrong = bad(list(driver.prove_creates()))
        assert {each.advice for each in wrong} == {wrong[0].advice}, "one fact"
        assert where in wrong[0].advice


def test_verdas_credentials_without_the_right_to_order_are_told(verda_api: VerdaWorld) -> None:
    verda_api.refuse("POST *", "forbidden_action", "You do not have permission to perform this action", None,
                     when=lambda call: "oauth2" not in call.path)  # fmt: skip
    [wrong] = bad(list(Verda().prove_creates()))
    assert "role" in wrong.advice


def attempt(outcome: Instance | Exception, end: Callable[[Sequence[Instance]], None]) -> Finding:
    """The finding about a create request with this outcome, where a CapacityError that names "T9" is expected."""

    def create() -> Instance:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return preflight.refusal("a thing", create, (CapacityError,), end, names="T9", vague=("400",))


def test_a_refusal_for_another_reason_is_bad_and_a_machine_that_cannot_be_ended_is_named() -> None:
    def stuck(instances: Sequence[Instance]) -> None:
        raise StillRunning("one still runs", instances=instances)

    def nobody(instances: Sequence[Instance]) -> None:
        raise AssertionError("nothing was made")

    good = attempt(CapacityError("x", provider="p", code="none", text="no t9 here"), nobody)
    assert (good.good, good.open, good.text) == (True, False, "no t9 here (none), raised as CapacityError")
    vague = attempt(CapacityError("x", provider="p", code="400", text="no stock"), nobody)
    assert (vague.good, vague.open, "does not name a thing" in vague.text) == (True, True, True)
    unnamed = attempt(CapacityError("p refused it: no field 'args' (422); write", provider="p", code="422"), nobody)
    assert (unnamed.good, unnamed.advice) == (False, "write")
    assert unnamed.text == "p refused it: no field 'args' (422), which does not name a thing"
    other = attempt(ProviderError("x", provider="p", code="odd", text="what?"), nobody)
    assert (other.good, "skypool expects CapacityError" in other.text) == (False, True)
    quota = attempt(QuotaError("p refused it: too many (q); ask for more", provider="p"), nobody)
    assert (quota.good, quota.advice) == (False, "ask for more")
    lost = attempt(NoAnswer("no answer; look later", provider="p"), nobody)
    assert (lost.good, lost.advice) == (False, "look later")
    made = Instance("p", "i-1", "pool", 0, "running")
    assert "`skypool gc --yes`" in attempt(made, stuck).advice
    assert attempt(made, lambda instances: None).text == "the machine i-1 was made, and was ended again"


# --- the bill ------------------------------------------------------------------------------------------------


def rented_for(
    name: str, world: Cloud[Any], seconds: float
) -> tuple[Driver, Offer, list[Instance], datetime, datetime]:
    """Rent a machine, let that much time pass in the lab, and end it."""
    driver: Driver = DRIVERS[name]()
    since = datetime.fromtimestamp(world.clock.now(), UTC)
    until = datetime.now(UTC) + timedelta(hours=9)
    order = Order("train", "0123456789abcdef-1", (0,), NEEDS[name], until=until)
    offer = next(each for each in driver.offers(NEEDS[name]) if each.available and each.accelerator)
    made = driver.launch(offer, order)
    world.clock.advance(seconds)
    driver.terminate(made)
    return driver, offer, made, since, datetime.fromtimestamp(world.clock.now(), UTC) + timedelta(seconds=1)


@pytest.mark.parametrize("name", ["vastai", "runpod"])
def test_the_bill_is_the_price_of_the_offer_for_the_time_that_the_machine_lived(
    request: pytest.FixtureRequest, name: str
) -> None:
    world = request.getfixturevalue(f"{name}_api")
    driver, offer, made, since, until = rented_for(name, world, 5400)
    assert isinstance(driver, Bills)
    bill = driver.billed([each.id for each in made], since, until)
    hours = (until - since).total_seconds() / 3600
    assert bill.usd == pytest.approx(offer.usd_per_hour * hours + offer.start_usd, rel=0.01, abs=0.001)
    unknown = driver.billed([*(each.id for each in made), "nobody"], since, until)
    assert (unknown.usd, "nobody" in unknown.text, "in an hour" in unknown.text) == (None, True, True)


def test_verdas_bill_is_not_told_but_the_balance_is_and_falls_by_what_the_receipt_says(verda_api: VerdaWorld) -> None:
    driver, offer, made, since, until = rented_for("verda", verda_api, 1800)
    assert isinstance(driver, Bills)
    bill = driver.billed([each.id for each in made], since, until)
    assert bill.usd is None
    assert "console.verda.com/billing" in bill.text
    verda_api.clock.advance(600)
    hours = (until - since).total_seconds() / 3600
    disk = offer.detail["gb"] * wares.NVME / 730
    assert 100 - verda_api.left_usd() == pytest.approx((offer.usd_per_hour - disk) * hours, rel=0.01)


def test_vast_ais_charges_are_read_page_by_page(vastai_api: VastAIWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skypool_vastai._api._CHARGES_PAGE", 1)
    body = {"image": "x", "disk": 10.0, "env": {}, "runtype": "ssh", "label": None}
    for number in (9_000_010, 9_000_011, 9_000_012):
        ask = vastai_api.asks[number]
        vastai_api._contract(ask, body, {"dph_base": 1.0, "dph_total": 1.1})
    now = datetime.now(UTC)
    assert len(vastai_calls.account(None).charges(now - timedelta(hours=1), now)) == 3
    assert len(vastai_api.calls("GET /api/v0/charges/")) == 3


def test_an_order_that_must_be_refused_is_of_a_pool_of_its_own_that_is_soon_over() -> None:
    one, two = (preflight.impossible_order(Need()) for _ in range(2))
    assert one.pool != two.pool
    assert one.token.startswith(one.pool.removeprefix("prove-"))
    assert one.until is not None
    assert timedelta(minutes=8) < one.until - datetime.now(UTC) < timedelta(minutes=11)
    assert replace(one, pool=two.pool) != two
