"""A lab that is started from a recording answers reads as the recorded cloud did, and makes itself what is ordered."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.accelerators import parse
from skypool.drivers import recording
from skypool.errors import ProviderError
from skypool.model import Finding, Need, Offer, Wanted
from tests.lab.billing import Billing
from tests.lab.replay import Asked, Replay

LABS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "aws": ("AWS", "AWS", ("AWS_",)),
    "gce": ("GCE", "GCP", ("CLOUDSDK_", "GOOGLE_")),
    "tpu": ("TPU", "GCP", ("CLOUDSDK_", "GOOGLE_")),
    "runpod": ("RunPod", "RunPod", ("RUNPOD_",)),
    "vastai": ("VastAI", "VastAI", ("VAST_",)),
    "verda": ("Verda", "Verda", ("VERDA_",)),
}
"""Of each lab: its class, the driver, and the beginnings of the variables that are taken from the environment."""
OTHERS = tuple(each for each in LABS if each != "aws")
WANTED: Mapping[str, tuple[str, ...]] = {
    "aws": ("T4", "A10G:4", ""),
    "gce": ("L4", "A100-40GB:8", ""),
    "tpu": ("v5litepod-8", "v6e-4"),
    "runpod": ("A40", "H100:2", ""),
    "vastai": ("RTX4090", "H100:8"),
    "verda": ("V100:1", "H100:8", ""),
}
"""What is asked for; "" for a machine without an accelerator. Not every cloud has such machines."""


@contextmanager
def lab(
    cloud: str, monkeypatch: pytest.MonkeyPatch, folder: Path, told: Path | None = None, dearer: float = 1.5
) -> Iterator[Any]:
    """The lab of a cloud, where the environment leads to; with caches of its own."""
    name, _, prefixes = LABS[cloud]
    with ExitStack() as stack:
        world = stack.enter_context(getattr(importlib.import_module(f"tests.lab.{cloud}"), name)(recording=told))
        environment = dict(world.environment)
        if cloud in ("gce", "tpu") and told is None:
            prices = stack.enter_context(Billing())
            prices.dearer = dearer
            environment |= prices.environment
        for each in [each for each in os.environ if each.startswith(prefixes)]:
            monkeypatch.delenv(each)
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / f"cache-{id(world)}"))
        monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
        yield world


def driver(cloud: str, plain: bool = False) -> Any:
    return sky.RunPod(graphql=True) if cloud == "runpod" and not plain else getattr(sky, LABS[cloud][1])()


def needs(cloud: str, few: bool) -> Iterator[Need]:
    markets: tuple[Wanted, ...] = ("on-demand", "spot") if few else ("on-demand", "spot", "cheapest")
    for wanted in WANTED[cloud][:1] if few else WANTED[cloud]:
        for market in markets:
            accelerators = (parse(wanted),) if wanted else ()
            yield Need(accelerators=accelerators, market=market, vcpus=0 if wanted else 4)


def changed(cloud: str, world: Any) -> None:
    """What makes the recorded cloud another one than a fresh lab. Google's has other prices, see `lab`."""
    if cloud == "aws":
        world.spot_price("us-east-1a", "g4dn.xlarge", 0.0123)
        world.opt_in("ap-south-2")
    elif cloud == "verda":
        world.capacity(0, "1V100.6V", "*", "on-demand")
    elif cloud == "runpod":
        world.price("NVIDIA A40", 0.123, 0.1)
    elif cloud == "vastai":
        for each in world.asks.values():
            each["geolocation"] = "Atlantis, AT"


def offers(cloud: str, few: bool = False) -> list[list[Offer]]:
    """What the driver offers for all needs; with `few` for one accelerator only, as AWS has many regions."""
    asked = driver(cloud)
    found = [list(asked.offers(need)) for need in needs(cloud, few)]
    if cloud == "runpod":  # without GraphQL
        found += [list(sky.RunPod().offers(need)) for need in needs(cloud, few) if need.market == "on-demand"]
    return found


def offered(cloud: str, need: Need) -> list[Offer] | str:
    """The offers of a driver with no settings, or the error with which it refuses."""
    try:
        return list(driver(cloud, plain=True).offers(need))
    except ProviderError as e:
        return f"{type(e).__name__}: {e.code} {e.text}"


def findings(cloud: str) -> list[Finding]:
    return list(driver(cloud).check())


@pytest.mark.parametrize(
    ("cloud", "few"),
    [("aws", True), pytest.param("aws", False, marks=pytest.mark.slow), *((each, False) for each in OTHERS)],
)
def test_offers_and_checks_of_a_lab_from_a_recording_are_the_recorded_ones(
    cloud: str, few: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "recorded"
    with lab(cloud, monkeypatch, tmp_path) as world:
        changed(cloud, world)
        with recording.to(told):
            recorded, checked = offers(cloud, few), findings(cloud)
    assert sum(map(len, recorded)) > 3
    with lab(cloud, monkeypatch, tmp_path, told) as world:
        replayed, again = offers(cloud, few), findings(cloud)
        asked = len(world.journal)
    assert replayed == recorded
    assert asked > 3
    assert [(each.what, each.good) for each in again] == [(each.what, each.good) for each in checked]


@pytest.mark.slow
@pytest.mark.parametrize("cloud", LABS)
def test_a_fresh_lab_offers_something_else_than_the_recorded_one(
    cloud: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lab(cloud, monkeypatch, tmp_path) as world:
        changed(cloud, world)
        recorded = offers(cloud)
    with lab(cloud, monkeypatch, tmp_path, dearer=1.0):
        assert offers(cloud) != recorded


@pytest.mark.slow
@pytest.mark.parametrize("cloud", LABS)
def test_what_skypool_prove_recorded_gives_the_same_offers_and_the_same_report(
    cloud: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = Need(market="cheapest")
    told = tmp_path / "recorded"
    with lab(cloud, monkeypatch, tmp_path) as world:
        changed(cloud, world)
        recorded = offered(cloud, need)
    with lab(cloud, monkeypatch, tmp_path) as world:  # a new one, so that no price is cached
        changed(cloud, world)
        report = prove(cloud, "--record", str(told))
    manifest = recording.read(told).manifest
    assert (manifest["provider"], manifest["level"]) == (LABS[cloud][1].lower(), "read")
    assert recorded
    with lab(cloud, monkeypatch, tmp_path, told):
        assert offered(cloud, need) == recorded
    with lab(cloud, monkeypatch, tmp_path, told):
        again = prove(cloud)
    assert outcome(again) == outcome(report)


PATIENT = "from skypool import cli; from skypool.offers import search; search._OFFERS_TIMEOUT = 150.0; cli.main()"
"""The command line on a computer with so many processes that a provider may need more than 30 s for its offers."""


def prove(cloud: str, *options: str) -> dict[str, Any]:
    """The report of `skypool prove --level read`, in a process of its own."""
    command = [sys.executable, "-c", PATIENT, "prove", LABS[cloud][1].lower(), "--level", "read", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=200)
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def outcome(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What a report says of the provider. Balances and names of accounts are placeholders in a recording."""
    private = ("credentials", "account", "funds", "balance", "project", "ledger", "clock", "spending")
    return [
        (each["what"], each["result"], "" if any(word in each["what"] for word in private) else each["text"])
        for each in report["steps"]
    ]


def test_the_lab_itself_makes_and_lists_what_is_ordered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "recorded"
    with lab("verda", monkeypatch, tmp_path) as world:
        world.capacity(0, "1V100.6V")
        with recording.to(told):
            api = sky.Verda()._api
            assert api.ask("GET", "/ssh-keys") == []
            types = api.ask("GET", "/instance-types", params={"currency": "usd"})
    with lab("verda", monkeypatch, tmp_path, told) as world:
        api = sky.Verda()._api
        assert api.ask("GET", "/ssh-keys") == []
        made = api.once("POST", "/ssh-keys", json={"name": "mine", "key": "ssh-ed25519 AAAA"})
        assert [each["id"] for each in api.ask("GET", "/ssh-keys")] == [made]
        assert [*world.keys] == [made]
        assert api.ask("GET", "/instance-types", params={"currency": "usd"}) == types


def test_a_read_of_what_is_sold_that_was_not_recorded_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "recorded"
    with lab("verda", monkeypatch, tmp_path), recording.to(told):
        sky.Verda()._api.ask("GET", "/instance-types", params={"currency": "usd"})
    with lab("verda", monkeypatch, tmp_path, told):
        api = sky.Verda()._api
        with pytest.raises(ProviderError, match=r"does not have GET /v1/instance-types with currency=eur.*other param"):
            api.ask("GET", "/instance-types", params={"currency": "eur"})
        with pytest.raises(ProviderError, match=r"does not have GET /v1/locations: .*only GET /v1/instance-types"):
            api.ask("GET", "/locations")


def test_replies_to_the_same_request_come_in_their_order_and_the_last_one_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "recorded"
    with lab("verda", monkeypatch, tmp_path) as world, recording.to(told):
        api = sky.Verda()._api
        for amount in (3.0, 0.0):
            world.balance = amount
            api.ask("GET", "/balance")
        world.fail("GET /balance", 503, {"message": "later"})
        with pytest.raises(ProviderError):
            api.once("GET", "/balance")
    with lab("verda", monkeypatch, tmp_path, told):
        api = sky.Verda()._api
        assert [api.ask("GET", "/balance")["amount"] for _ in range(4)] == [1001.0, 0.0, 0.0, 0.0]


def test_requests_to_cloud_tpu_that_were_recorded_over_grpc_are_answered_over_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.lab.tpu_grpc import grpc_of

    need, told = Need(accelerators=(parse("v5litepod-8"),), market="cheapest"), tmp_path / "recorded"
    with lab("tpu", monkeypatch, tmp_path) as world, grpc_of(world) as address, monkeypatch.context() as patch:
        patch.setenv("CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU", address)
        with recording.to(told):
            recorded = list(sky.GCP().offers(need))
    assert any(each.method == "gRPC" for each in recording.read(told).exchanges)
    with lab("tpu", monkeypatch, tmp_path, told):
        assert list(sky.GCP().offers(need)) == recorded


def test_a_recording_of_another_account_answers_as_accounts_projects_and_dates_do_not_count(tmp_path: Path) -> None:
    told = tmp_path / "recorded"
    with recording.to(told) as recorder:
        for number in (1, 2):
            exchange = recording.Exchange(
                provider="gcp",
                method="GET",
                url=f"/compute/v1/projects/some-project-{number}/zones?filter=a&since=2026-01-0{number}T00:00:00Z",
                status=200,
                reply=f"{number}",
            )
            recorder.add(partial(replace, exchange))
    replay = Replay(told, ())
    asked = [("since", "2030-05-05T10:00:00.123Z"), ("filter", "a"), ("requestId", "4711")]
    answers = [replay.answer(Asked("GET /compute/v1/projects/mine-0/zones", asked)) for _ in range(2)]
    assert [each and each.reply for each in answers] == ["1", "2"]
