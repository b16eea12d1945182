"""Local keeps the contract, as far as it is one: there is no cloud behind it that could be moved."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.errors import UsageError
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


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"python": 3}, "python must be a path, not 3"),
        ({"python": ""}, "python must be a path, not ''"),
        ({"spool": 7}, "spool must be a path, not 7"),
        ({"spool_memory": "1g"}, "spool_memory must be a whole number, not '1g'"),
    ],
)
def test_settings_that_mean_nothing_are_refused_where_they_are_written(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Local(**wrong)


def test_a_folder_may_be_a_path(tmp_path: Path) -> None:
    local = Local(spool=tmp_path)  # type: ignore[arg-type]  # what people write
    with sky.ComputePool(local, slots=1, console="off") as pool:
        assert pool.submit(abs, -3).result(60) == 3
