"""What `skypool doctor` and `skypool prove` tell of Google Cloud: Cloud TPU, prices, and faults of an account."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from skypool.accelerators import parse
from skypool.drivers import preflight
from skypool.drivers.contract import Bills, Proves
from skypool.errors import QuotaError
from skypool.model import Bill, Finding, Need, Order
from skypool.offers import price_cache
from skypool.proof import free_checks
from skypool_gcp import GCP, list_prices
from skypool_gcp.compute import Compute
from skypool_gcp.list_prices._drift import Comparison, compare
from skypool_gcp.tpu import Tpu, _api, _proof
from tests.lab import tpu_wares as wares
from tests.lab.billing import Billing
from tests.lab.gce import GCE
from tests.lab.gcp_iam import Role
from tests.lab.tpu import TPU
from tests.lab.tpu_grpc import grpc_of

ADDRESS = "CLOUDSDK_API_ENDPOINT_OVERRIDES_"
UPDATE = "pip install --upgrade 'skypool[gcp]'"


@pytest.fixture(autouse=True)
def _apart(own_state: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address may be one at which another test's world was."""
    _api._client.cache_clear()
    monkeypatch.setattr(Tpu, "ending", 3.0)
    monkeypatch.setattr(Compute, "ending", 3.0)


@pytest.fixture
def prices(gce_api: GCE, monkeypatch: pytest.MonkeyPatch) -> Iterator[Billing]:
    """Google's catalogue of prices, beside Compute Engine."""
    with Billing() as world:
        world.page = 5000
        for name, value in world.environment.items():
            monkeypatch.setenv(name, value)
        yield world


@pytest.fixture(params=["rest", "grpc"])
def either(tpu_api: TPU, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[TPU]:
    """Cloud TPU, asked over REST and over gRPC."""
    with contextlib.ExitStack() as stack:
        if request.param == "grpc":
            monkeypatch.setenv(f"{ADDRESS}TPU", stack.enter_context(grpc_of(tpu_api)))
        yield tpu_api


def gcp(**settings: Any) -> GCP:
    return GCP(**{"ssh_from": "203.0.113.7", **settings})


def slices(**settings: Any) -> Tpu:
    """The part of the driver that rents slices of Cloud TPU."""
    return gcp(**settings)._listing[0]


def told(found: Iterator[Finding] | Any) -> dict[str, Finding]:
    return {each.what: each for each in found}


def bad(found: Iterator[Finding] | Any) -> list[Finding]:
    return [each for each in found if not each.good]


# --- Cloud TPU, by reading -----------------------------------------------------------------------------------


def test_each_fact_of_cloud_tpu_is_told_once(either: TPU) -> None:
    found = told(slices().check())
    assert not bad(found.values())
    assert found["Cloud TPU: zones"].text == str(len(wares.zones()))
    kinds = found["Cloud TPU: types of slices"].text
    assert kinds.startswith("137 of 137 that skypool knows are in"), kinds
    assert found["Cloud TPU: runtime versions"].text == ", ".join(sorted(set(wares.RUNTIMES.values())))
    assert "https://console.cloud.google.com/iam-admin/quotas?project=lab-project" in found["Cloud TPU: quotas"].text
    assert len(found) == 5
    for action in ("GET acceleratorTypes", "GET runtimeVersions"):
        assert {each.by["zone"] for each in either.calls(action)} == {*wares.zones()}


def test_types_of_slices_that_google_has_no_more_or_has_anew_are_told_with_what_to_do(tpu_api: TPU) -> None:
    tpu_api.retired, tpu_api.newer = {"v2-8", "v2-32"}, ["v9-8"]
    found = told(slices().check())
    assert not bad(found.values())
    said = found["Cloud TPU: types of slices"].text
    assert "135 of 137" in said
    assert f"skypool does not know v9-8: update skypool: `{UPDATE}`" in said
    assert "no zone has v2-32, v2-8 any more" in said
    assert "\n" not in said


def test_only_zones_of_the_settings_are_read(tpu_api: TPU) -> None:
    found = told(slices(zones=["us-east5-a", "us-central1-f"]).check())
    assert "are in us-east5-a" in found["Cloud TPU: types of slices"].text
    assert "any more" not in found["Cloud TPU: types of slices"].text, "other zones may have them"
    assert {each.by["zone"] for each in tpu_api.calls("GET acceleratorTypes")} == {"us-east5-a"}


def test_a_zone_without_any_known_slice_is_told_with_what_to_do(tpu_api: TPU) -> None:
    (finding,) = bad(slices(zones=["us-north9-x"]).check())
    assert finding.what == "Cloud TPU: types of slices"
    assert "is in us-north9-x" in finding.text
    assert "choose other zones with GCP(zones=…)" in finding.advice


def test_a_runtime_version_that_google_has_no_more_is_a_fault(either: TPU) -> None:
    """Each create would be refused."""
    either.retired = {"v2-alpha-tpuv5"}
    (finding,) = bad(slices().check())
    assert finding.what == "Cloud TPU: runtime versions"
    assert "v2-alpha-tpuv5 in europe-west4-b, us-central1-a, us-east5-a" in finding.text
    assert UPDATE in finding.advice


def test_a_zone_that_does_not_answer_is_named(tpu_api: TPU) -> None:
    tpu_api.refuse("GET acceleratorTypes", "UNAVAILABLE", "The service is currently unavailable.")
    found = bad(slices(zones="us-east5-a").check())
    assert [each.what for each in found] == ["Cloud TPU: types of slices", "Cloud TPU: runtime versions"]
    assert len(free_checks.once(found)) == 1, "it is one fact"
    assert "us-east5-a" in found[0].text


def test_an_api_that_is_not_enabled_is_one_fact(gce_api: GCE) -> None:
    found = told(slices().check())
    assert [*found] == ["Cloud TPU: zones", "Cloud TPU: end of slices"]
    assert "gcloud services enable tpu.googleapis.com" in found["Cloud TPU: zones"].text
    (finding,) = slices().prove_creates()
    assert (finding.good, finding.text) == (True, "not sent, as the API of Cloud TPU is not enabled")


# --- Cloud TPU, by creates that must be refused --------------------------------------------------------------


@pytest.mark.needs("openssh")
@pytest.mark.parametrize("late", [False, True], ids=["at once", "after it was accepted"])
def test_slices_that_cannot_be_are_refused_as_the_driver_expects_and_nothing_is_left(either: TPU, late: bool) -> None:
    either.late = late
    found = told(slices().prove_creates())
    assert not bad(found.values())
    unknown = found["Cloud TPU: a slice of an unknown type is refused"].text
    assert "The accelerator skypool-does-not-exist was not found in zone" in unknown
    runtime = found["Cloud TPU: a slice with an unknown runtime version is refused"].text
    assert "Runtime version skypool-does-not-exist is not for" in runtime
    assert either.left() == {}
    first, second = (each.body for each in either.calls("POST queuedResources"))
    names = [{key for key, _ in _leaves(each)} for each in (first, second)]
    assert names[0] == names[1], "both are the driver's own request"
    assert "tpu.nodeSpec.node.metadata.startup-script" in names[0]


def _leaves(told: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(told, dict):
        for key, each in told.items():
            yield from _leaves(each, f"{at}.{key}".lstrip("."))
    elif isinstance(told, list):
        for each in told:
            yield from _leaves(each, at)
    else:
        yield at, told


@pytest.mark.needs("openssh")
def test_a_slice_that_google_makes_all_the_same_is_ended_and_named(
    tpu_api: TPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_proof, "_UNKNOWN", wares.RUNTIMES["v5e"])
    (finding,) = bad(slices().prove_creates())
    assert "accepted a slice with an unknown runtime version, which should be impossible" in finding.text
    assert "skypool gc" in finding.advice
    assert tpu_api.left() == {}


@pytest.mark.needs("openssh")
def test_another_refusal_than_the_expected_one_is_a_fault(tpu_api: TPU) -> None:
    tpu_api.refuse("POST queuedResources", "PERMISSION_DENIED", "Permission 'tpu.nodes.create' denied on '…'", None)
    found = bad(slices().prove_creates())
    assert len(found) == 2
    (one,) = free_checks.once(found)
    assert "Permission 'tpu.nodes.create' denied" in one.text
    assert "skypool doctor --policy gcp" in one.advice


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_create_without_an_answer_leaves_nothing(tpu_api: TPU, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    monkeypatch.setattr(_proof, "_UNKNOWN", wares.RUNTIMES["v5e"])
    tpu_api.drop("POST queuedResources", moment=moment, times=None)
    found = bad(slices().prove_creates())
    assert len(found) == 2
    assert tpu_api.left() == {}


@pytest.mark.needs("openssh")
def test_what_a_killed_proof_leaves_is_found_by_gc(tpu_api: TPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tags say who made it, and that it is needed for some minutes at most."""
    monkeypatch.setattr(_proof, "_UNKNOWN", wares.RUNTIMES["v5e"])

    with monkeypatch.context() as killed:
        killed.setattr(Tpu, "terminate", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            list(slices().prove_creates())
    (found,) = slices().instances()
    assert found.pool == "prove"
    assert found.until is not None
    assert found.until < datetime.now(UTC) + timedelta(minutes=20)
    slices().terminate([found])
    assert tpu_api.left() == {}


@pytest.mark.needs("openssh")
def test_the_whole_driver_proves_both_apis(
    gce_api: GCE, tpu_api: TPU, prices: Billing, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = gcp()
    assert isinstance(driver, Proves)
    monkeypatch.setenv(f"{ADDRESS}COMPUTE", gce_api.environment[f"{ADDRESS}COMPUTE"])
    found = [*driver.prove_creates()]
    assert not bad(found)
    assert {each.what.partition(":")[0] for each in found} == {"Compute Engine", "Cloud TPU"}
    assert (gce_api.left(), tpu_api.left()) == ({}, {})


# --- prices --------------------------------------------------------------------------------------------------

PRICES = "Compute Engine: prices"


def drift() -> Comparison:
    settings = gcp()._apis[0].settings
    return list_prices.drift(list_prices.rates(settings), Compute(settings)._shapes())


def test_each_price_of_the_tables_that_the_catalogue_has_is_compared(prices: Billing) -> None:
    """The lab's catalogue was made from the table of machines; its chips are of another day than the table of chips."""
    found = drift()
    assert found.compared > 600
    assert {each.name for each in found.differences} <= {*list_prices.chips()}
    same = compare(list_prices.machines(), lambda name, place: list_prices.machines()[name][place])
    assert str(same) == f"all {same.compared:,} prices of the tables that the catalogue has agree with it"


def test_prices_that_have_drifted_are_told_in_one_line_with_the_largest_and_what_to_do(prices: Billing) -> None:
    prices.changed = {"Nvidia L4 GPU": 1.5, "A2 Instance Core": 1.04}
    said = told(gcp().check())[PRICES]
    assert said.good, "the catalogue counts, so offers are right"
    found = drift()
    most = found.differences[0]
    assert most.name.startswith("g2-standard-")
    assert f"{len(found.differences)} of {found.compared:,} prices of the tables differ from the catalogue" in said.text
    assert f"{most.ours:.4f} USD/h in the table, {most.theirs:.4f} in the catalogue" in said.text
    assert UPDATE in said.text
    assert "\n" not in said.text
    assert {each.name.partition("-")[0] for each in found.differences} >= {"g2"}
    assert all(each.share > 0.01 for each in found.differences)


def test_a_catalogue_that_cannot_be_read_is_compared_with_nothing(prices: Billing) -> None:
    prices.disable()
    said = told(gcp().check())[PRICES]
    assert said.good
    assert "could not be read now" in said.text
    assert "gcloud services enable cloudbilling.googleapis.com" in said.text
    assert "of the tables" not in said.text


def test_what_machines_have_cost_is_not_told_but_where_to_look(gce_api: GCE) -> None:
    driver = gcp()
    assert isinstance(driver, Bills)
    since = datetime(2026, 11, 23, 22, tzinfo=UTC)
    bill = driver.billed(["skypool-a"], since, since + timedelta(hours=3))
    assert isinstance(bill, Bill)
    assert bill.usd is None
    assert "2026-11-23 to 2026-11-24" in bill.text
    assert "https://console.cloud.google.com/billing/reports" in bill.text
    assert gce_api.journal == []


# --- faults of an account, as the level "read" tells them ----------------------------------------------------


@pytest.fixture
def both(gce_api: GCE, tpu_api: TPU, prices: Billing, monkeypatch: pytest.MonkeyPatch) -> tuple[GCE, TPU]:
    """A project with both APIs."""
    monkeypatch.setenv(f"{ADDRESS}COMPUTE", gce_api.environment[f"{ADDRESS}COMPUTE"])
    return gce_api, tpu_api


def test_expired_credentials_are_told_in_one_line(both: tuple[GCE, TPU]) -> None:
    gce, tpu = both
    gce.refuse("*", 401, "authError", "Invalid Credentials", None)
    tpu.refuse("*", "UNAUTHENTICATED", "Request had invalid authentication credentials.", None)
    seen = free_checks.read(gcp())
    assert not seen.known
    (finding,) = bad(seen.findings)
    assert finding.what == "credentials"
    assert "gcloud auth application-default login" in finding.advice
    assert "\n" not in finding.text


def test_a_missing_permission_is_told_in_one_line(both: tuple[GCE, TPU], prices: Billing) -> None:
    gce, tpu = both
    role = yaml.safe_load(gcp().policy())["includedPermissions"]
    gce.caller = tpu.caller = prices.caller = Role([each for each in role if each != "tpu.locations.list"])
    (finding,) = bad(free_checks.read(gcp()).findings)
    assert "Permission 'tpu.locations.list' denied on 'projects/lab-project/locations'" in finding.text
    assert "skypool doctor --policy gcp" in finding.advice
    assert "\n" not in finding.text


def test_a_wrong_clock_is_told_in_one_line(both: tuple[GCE, TPU], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "time", SimpleNamespace(time=lambda: time.time() + 600))
    found = bad(gcp().check())
    (finding,) = [each for each in found if "clock" in each.what]
    assert re.search(r"\+60\d s off", finding.text)
    assert "set the clock" in finding.advice


@pytest.mark.needs("openssh")
def test_a_quota_of_zero_is_told_in_one_line_when_a_slice_is_asked_for(both: tuple[GCE, TPU]) -> None:
    """Cloud TPU does not tell it before."""
    _, tpu = both
    tpu.quotas["v5p", "on-demand"] = 0
    need = Need(accelerators=(parse("v5p-16"),))
    driver = gcp(zones="us-east5-a")
    (offer,) = driver.offers(need)
    with pytest.raises(QuotaError) as refused:
        driver.launch(offer, Order("train", "0123456789abcdef-1", (0, 1), need))
    text = str(refused.value)
    assert "exhausted. Limit 0" in text
    assert "ask for a higher quota at https://console.cloud.google.com/iam-admin/quotas" in text
    assert "\n" not in text
    assert tpu.left() == {}


def test_drift_of_prices_is_one_line_of_the_report(both: tuple[GCE, TPU], prices: Billing) -> None:
    prices.changed = {"Nvidia L4 GPU": 1.5}
    price_cache.path().unlink(missing_ok=True)
    seen = free_checks.read(gcp())
    lines = [f"{each.text}; {each.advice}" for each in seen.findings if "differ from the catalogue" in each.text]
    assert len(lines) == 1
    assert UPDATE in lines[0]
