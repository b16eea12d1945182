"""Local keeps the contract, as far as it is one: there is no cloud behind it that could be moved."""

from __future__ import annotations

import shutil

import pytest

from skypool.model import Instance
from skypool.testing import DriverContract
from skypool_local import Local
from tests.conftest import home, nodes


class Here:
    """What is alive on this machine, whatever the driver says."""

    def count(self) -> int:
        return len(nodes("trial-"))

    def kill(self, instance: Instance) -> None:
        shutil.rmtree(home() / instance.id)


class TestLocal(DriverContract):
    patience = 20.0

    @pytest.fixture
    def driver(self) -> Local:
        return Local()

    @pytest.fixture
    def control(self) -> Here:
        return Here()
