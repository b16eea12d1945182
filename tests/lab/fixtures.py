"""The fixtures `lab` and `machine`, for every test folder; tests/conftest.py imports them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.lab.machines import Lab, Machine, unavailable


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """One lab for the whole run; each test makes machines of its own in it."""
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


def mark(items: list[pytest.Item]) -> None:
    """Whatever asks for a lab is marked so."""
    for item in items:
        if "lab" in getattr(item, "fixturenames", ()):
            item.add_marker("lab")
