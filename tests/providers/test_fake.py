"""The fake cloud keeps the contract."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from skypool.accelerators import TPU
from skypool.model import Need
from skypool.testing import DriverContract, FakeCloud, Stock
from skypool.testing.cloud_state import USUAL
from skypool.testing.control import FakeCloudControl


class TestFakeCloud(DriverContract):
    patience = 10.0

    @pytest.fixture
    def driver(self, tmp_path: Path) -> Iterator[FakeCloud]:
        stock = (*USUAL, Stock("tpu-16", 8.0, "v5p-16"))
        with FakeCloud(tmp_path / "cloud", stock, key="sesame", patience=0.2) as cloud:
            yield cloud
            assert cloud.count() == 0, cloud.control.alive()

    @pytest.fixture
    def control(self, driver: FakeCloud) -> FakeCloudControl:
        return driver.control

    @pytest.fixture
    def slice_need(self) -> Need:
        return Need((TPU("v5p-16"),))

    @pytest.fixture
    def secrets(self) -> Sequence[str]:
        return ["sesame"]
