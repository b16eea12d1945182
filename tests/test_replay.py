"""A lab that is started from a recording answers reads as the recorded cloud did, and makes itself what is ordered."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.accelerators import parse
from skypool.drivers import recording
from skypool.model import Finding, Need, Offer, Wanted
from tests.lab.billing import Billing

LABS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "aws": ("AWS", "AWS", ("AWS_",)),
    "gce": ("GCE", "GCP", ("CLOUDSDK_", "GOOGLE_")),
    "tpu": ("TPU", "GCP", ("CLOUDSDK_", "GOOGLE_")),
    "runpod": ("RunPod", "RunPod", ("RUNPOD_",)),
    "vastai": ("VastAI", "VastAI", ("VAST_",)),
    "verda": ("Verda", "Verda", ("VERDA_",)),
}
"""Of each lab: its class, the driver, and the beginnings of the variables that are taken from the environment."""
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
def lab(cloud: str, monkeypatch: pytest.MonkeyPatch, folder: Path, told: Path | None = None) -> Iterator[Any]:
    """The lab of a cloud, where the environment leads to; with caches of its own."""
    name, _, prefixes = LABS[cloud]
    with ExitStack() as stack:
        world = stack.enter_context(getattr(importlib.import_module(f"tests.lab.{cloud}"), name)(recording=told))
        environment = dict(world.environment)
        if cloud in ("gce", "tpu") and told is None:
            prices = stack.enter_context(Billing())
            prices.dearer = 1.5
            environment |= prices.environment
        for each in [each for each in os.environ if each.startswith(prefixes)]:
            monkeypatch.delenv(each)
        for variable, value in environment.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / f"cache-{id(world)}"))
        monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
        yield world


def driver(cloud: str) -> Any:
    return sky.RunPod(graphql=True) if cloud == "runpod" else getattr(sky, LABS[cloud][1])()


def needs(cloud: str) -> Iterator[Need]:
    markets: tuple[Wanted, ...] = ("on-demand", "spot", "cheapest")
    for wanted in WANTED[cloud]:
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


def offers(cloud: str) -> list[list[Offer]]:
    asked = driver(cloud)
    found = [list(asked.offers(need)) for need in needs(cloud)]
    if cloud == "runpod":  # without GraphQL
        found += [list(sky.RunPod().offers(need)) for need in needs(cloud) if need.market == "on-demand"]
    return found


def findings(cloud: str) -> list[Finding]:
    return list(driver(cloud).check())


@pytest.mark.parametrize("cloud", LABS)
def test_offers_and_checks_of_a_lab_from_a_recording_are_the_recorded_ones(
    cloud: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "recorded"
    with lab(cloud, monkeypatch, tmp_path) as world:
        changed(cloud, world)
        with recording.to(told):
            recorded, checked = offers(cloud), findings(cloud)
    assert sum(map(len, recorded)) > 3
    with lab(cloud, monkeypatch, tmp_path, told) as world:
        replayed, again = offers(cloud), findings(cloud)
        asked = len(world.journal)
    assert replayed == recorded
    assert asked > 3
    assert [(each.what, each.good) for each in again] == [(each.what, each.good) for each in checked]
