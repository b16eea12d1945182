"""The tests that every driver of skypool must pass, run with this driver and a fake cloud on this computer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from skypool_acme import Acme

from skypool.testing import Control, DriverContract, HttpCloud

KEY = "sesame"


class TestAcme(DriverContract):
    patience = 30.0

    @pytest.fixture
    def cloud(self, tmp_path: Path) -> Iterator[HttpCloud]:
        """Yield a new fake cloud for each test, and check that the test left nothing there."""
        with HttpCloud(tmp_path / "cloud", key=KEY) as cloud:
            yield cloud
            assert cloud.control.alive() == []

    @pytest.fixture
    def driver(self, cloud: HttpCloud, monkeypatch: pytest.MonkeyPatch) -> Acme:
        monkeypatch.setattr(Acme, "ending", 2.0)  # seconds that a test waits for a machine that does not end
        return Acme(url=cloud.url, api_key=KEY)

    @pytest.fixture
    def control(self, cloud: HttpCloud) -> Control:
        return cloud.control

    @pytest.fixture
    def secrets(self) -> Sequence[str]:
        return [KEY]
