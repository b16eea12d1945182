"""Fixtures: `lab`, `machine`, `chromium`, `own_state`, and clouds such as `aws`; those with `_api` have no machines."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skypool.rental import reaper
from tests.caches import with_zip
from tests.lab.machines import Lab, Machine
from tests.needs import lacking, skip_or_fail


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """One lab for the whole run, or its process; each test makes machines of its own in it."""
    if reason := lacking("lab"):  # asked for by name, it is no fixture of the test
        skip_or_fail(reason)
    with Lab() as made:
        yield made


@pytest.fixture
def two(lab: Lab) -> Iterator[list[Machine]]:
    """Two machines of the lab, which one key reaches."""
    made = [lab.machine(keys=[lab.public_key]) for _ in range(2)]
    yield made
    for each in made:
        each.destroy()


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of the browser Chromium."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    return found or skip_or_fail("Chromium is not installed (tests/lab/setup installs it)")


@pytest.fixture
def machine(lab: Lab) -> Iterator[Machine]:
    """A fresh machine that lets `lab.client_key` in as root."""
    made = lab.machine(keys=[lab.public_key])
    yield made
    made.destroy()


def cloud(module: str, kind: str, *prefixes: str) -> tuple[Any, Any]:
    """Two fixtures: an empty account whose instances are machines, and one without machines, for calls alone.

    The environment of the test, and of its child processes, points at this world, and at no real one: what begins with
    one of the prefixes is taken out of it.
    """

    def world(lab: Lab | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        is_new = f"tests.lab.{module}" not in sys.modules
        made = getattr(importlib.import_module(f"tests.lab.{module}"), kind)  # moto alone takes two seconds
        if is_new:  # what it has imported need not be looked at for garbage each time
            gc.collect()
            gc.freeze()
        with made(lab) as world:
            for name in [name for name in os.environ if name.startswith(prefixes)]:
                monkeypatch.delenv(name)
            for name, value in world.environment.items():
                monkeypatch.setenv(name, value)
            yield world

    @pytest.fixture
    def machines(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        yield from world(lab, monkeypatch)

    @pytest.fixture
    def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        yield from world(None, monkeypatch)

    return machines, calls


aws, aws_api = cloud("aws", "AWS", "AWS_")
gce, gce_api = cloud("gce", "GCE", "CLOUDSDK_", "GOOGLE_")
runpod, runpod_api = cloud("runpod", "RunPod", "RUNPOD_")
tpu, tpu_api = cloud("tpu", "TPU", "CLOUDSDK_", "GOOGLE_")
vastai, vastai_api = cloud("vastai", "VastAI", "VAST_")
verda, verda_api = cloud("verda", "Verda", "VERDA_")


@pytest.fixture
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger and a cache of its own, and what a launch left unanswered turns up within a second."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(with_zip(tmp_path / "cache")))
    monkeypatch.setattr(reaper, "SETTLING", 1.0)


def mark(items: list[pytest.Item]) -> None:
    """Whatever asks for a lab is marked so."""
    for item in items:
        if "lab" in getattr(item, "fixturenames", ()):
            item.add_marker("lab")
