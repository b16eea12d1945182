"""Pools whose client has a full disk: nothing more is rented, what runs goes on, and its cost is known."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import skypool as sky
from skypool import events
from skypool.testing import FakeCloud
from tests.conftest import eventually
from tests.lab.machines import Lab


class Disk:
    """A file system of its own that holds 4 MiB."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        with self._filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"x" * 512)

    def free(self) -> None:
        self._filler.unlink()


@pytest.fixture
def disk(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """The disk that the client keeps its state on; `lab` stands for root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "skypool-test", str(folder)], check=True)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    yield Disk(folder)
    subprocess.run(["umount", "-l", str(folder)], check=True)


@sky.compute
def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def test_a_pool_that_cannot_grow_for_a_full_disk_says_so_and_does_not_try_on_and_on(disk: Disk, tmp_path: Path) -> None:
    said: list[events.Event] = []
    with FakeCloud(tmp_path / "cloud") as cloud, sky.ComputePool(cloud, nodes=(1, 3), console="off") as pool:
        pool.events.listen(said.append)
        disk.fill()
        futures = [nap(1.0) > pool for _ in range(12)]
        assert [each.result(timeout=120) for each in futures] == [1.0] * 12
        attempts = {each.node for each in said if isinstance(each, events.NodePhase)} - {0}
        assert 1 <= len(attempts) <= 3
        notices = [each.text for each in said if isinstance(each, events.Notice) and "cannot grow" in each.text]
        assert len(notices) == 1, notices
        assert f"the ledger {disk.folder}" in notices[0]
        assert "disk is full" in notices[0]
    receipt = pool.receipt
    assert [each.ended for each in receipt.lines] == [True]
    assert receipt.usd > 0
    assert pool.receipt.lines == receipt.lines


def test_a_pool_grows_again_once_the_disk_has_room(disk: Disk, tmp_path: Path) -> None:
    said: list[events.Event] = []
    with FakeCloud(tmp_path / "cloud") as cloud, sky.ComputePool(cloud, nodes=(1, 2), console="off") as pool:
        pool.events.listen(said.append)
        disk.fill()
        futures = [nap(0.5) > pool for _ in range(200)]
        eventually(lambda: any(isinstance(each, events.Notice) and "cannot grow" in each.text for each in said), 30)
        disk.free()
        eventually(lambda: list(pool.nodes.values()).count("ready") == 2, 60)
        for each in futures:
            each.cancel()
    assert [each.ended for each in pool.receipt.lines] == [True, True]
