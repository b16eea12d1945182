"""The fixtures `lab`, `machine`, and the clouds: `aws`, `verda`, and with `_api` at its end one without machines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.lab.machines import Lab, Machine, unavailable

if TYPE_CHECKING:
    from tests.lab.aws import AWS
    from tests.lab.runpod import RunPod
    from tests.lab.vastai import VastAI
    from tests.lab.verda import Verda


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """One lab for the whole run, or its process; each test makes machines of its own in it."""
    if reason := unavailable():
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason}, and CI must not skip what needs it")
        pytest.skip(reason)
    with Lab() as made:
        yield made


@pytest.fixture
def machine(lab: Lab) -> Iterator[Machine]:
    """A fresh machine that lets `lab.client_key` in as root."""
    made = lab.machine(keys=[lab.public_key])
    yield made
    made.destroy()


@pytest.fixture
def aws(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[AWS]:
    """An empty AWS whose instances are machines; the environment of this test points at it."""
    yield from _aws(lab, monkeypatch)


@pytest.fixture
def aws_api(monkeypatch: pytest.MonkeyPatch) -> Iterator[AWS]:
    """The same without machines: it needs neither root nor a lab."""
    yield from _aws(None, monkeypatch)


def _aws(lab: Lab | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[AWS]:
    from tests.lab.aws import AWS  # moto takes two seconds, which only tests that need it pay

    with AWS(lab) as world:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in world.environment.items():
            monkeypatch.setenv(name, value)
        yield world


@pytest.fixture
def verda(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[Verda]:
    """An empty account at Verda whose instances are machines; the environment of this test points at it."""
    yield from _verda(lab, monkeypatch)


@pytest.fixture
def verda_api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Verda]:
    """The same without machines."""
    yield from _verda(None, monkeypatch)


def _verda(lab: Lab | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Verda]:
    from tests.lab.cloud import pointed
    from tests.lab.verda import Verda

    with Verda(lab) as world:
        pointed(world, monkeypatch, "VERDA_")
        yield world


@pytest.fixture
def runpod(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunPod]:
    """An empty RunPod whose pods are machines; the environment of this test points at it."""
    yield from _runpod(lab, monkeypatch)


@pytest.fixture
def runpod_api(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunPod]:
    """The same without machines: it needs neither root nor a lab."""
    yield from _runpod(None, monkeypatch)


def _runpod(lab: Lab | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunPod]:
    from tests.lab.cloud import pointed
    from tests.lab.runpod import RunPod

    with RunPod(lab) as world:
        pointed(world, monkeypatch, "RUNPOD_")
        yield world


@pytest.fixture
def vastai(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Iterator[VastAI]:
    """A Vast.ai whose instances are machines; the environment of this test points at it."""
    yield from _vastai(lab, monkeypatch)


@pytest.fixture
def vastai_api(monkeypatch: pytest.MonkeyPatch) -> Iterator[VastAI]:
    """The same without machines."""
    yield from _vastai(None, monkeypatch)


def _vastai(lab: Lab | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[VastAI]:
    from tests.lab.cloud import pointed
    from tests.lab.vastai import VastAI

    with VastAI(lab) as world:
        pointed(world, monkeypatch, "VAST_")
        yield world


def mark(items: list[pytest.Item]) -> None:
    """Whatever asks for a lab is marked so."""
    for item in items:
        if "lab" in getattr(item, "fixturenames", ()):
            item.add_marker("lab")
