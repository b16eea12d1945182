"""The fake cloud keeps the contract."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from skypool.testing import DriverContract, FakeCloud
from skypool.testing.control import Control


class TestFakeCloud(DriverContract):
    patience = 10.0

    @pytest.fixture
    def driver(self, tmp_path: Path) -> Iterator[FakeCloud]:
        with FakeCloud(tmp_path / "cloud", key="sesame", patience=0.2) as cloud:
            yield cloud
            assert cloud.count() == 0, cloud.control.alive()

    @pytest.fixture
    def control(self, driver: FakeCloud) -> Control:
        return driver.control

    @pytest.fixture
    def secrets(self) -> Sequence[str]:
        return ["sesame"]
