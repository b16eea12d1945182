"""Pools that a program has lost without stopping them: garbage collection ends them."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import skypool as sky
from skypool import events
from skypool.rental.ledger import Ledger
from skypool.testing import FakeCloud, Stock
from tests.conftest import eventually
from tests.work import add, count, outlast

BOUND = 30.0
WARNING = "was never stopped, and nothing refers to it any more"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[FakeCloud]:
    with FakeCloud(tmp_path / "cloud", [Stock()]) as made:
        yield made
        eventually(lambda: cloud_is_empty(made), BOUND, "the end of machines and keys")


def cloud_is_empty(cloud: FakeCloud) -> bool:
    return cloud.count() == 0


def pool_of(cloud: FakeCloud, told: list[str] | None = None) -> sky.ComputePool:
    pool = sky.ComputePool(cloud, name="p", slots=1, console="off")
    if told is not None:
        pool.events.listen(lambda event: told.append(event.text) if isinstance(event, events.Notice) else None)
    return pool.start()


def ended() -> bool:
    return Ledger.here().pools("p")[0].ended is not None


def test_a_pool_that_is_collected_ends_with_a_warning(cloud: FakeCloud) -> None:
    told: list[str] = []
    held = [pool_of(cloud, told)]
    assert add(1) >> held[0] == 2
    with pytest.warns(ResourceWarning, match=f"pool 'p' {WARNING}.*stop"):
        held.clear()
    eventually(ended, BOUND, "the end of the pool")
    assert cloud_is_empty(cloud)
    assert [text for text in told if "never stopped" in text]


def test_its_calls_end_first(cloud: FakeCloud, tmp_path: Path) -> None:
    held = [pool_of(cloud)]
    go = tmp_path / "go"
    future = outlast(str(go), str(tmp_path / "log")) > held[0]
    with pytest.warns(ResourceWarning, match=WARNING):
        held.clear()
    time.sleep(1.0)  # not for luck: it does not end meanwhile
    assert cloud.count("machine") == 1
    go.touch()
    assert future.result(BOUND) == 0
    eventually(ended, BOUND, "the end of the pool")


def test_a_stream_of_a_pool_without_a_name_is_read_to_its_end(cloud: FakeCloud) -> None:
    with pytest.warns(ResourceWarning, match=WARNING):
        assert list(count(20, 0.05) >> pool_of(cloud)) == list(range(20))
    eventually(ended, BOUND, "the end of the pool")


def test_a_pool_in_a_cycle_and_in_another_thread_ends(cloud: FakeCloud) -> None:
    def lose() -> None:
        pool = pool_of(cloud)
        cycle: list[object] = [pool]
        cycle.append(cycle)

    thread = threading.Thread(target=lose)
    thread.start()
    thread.join()
    with pytest.warns(ResourceWarning, match=WARNING):
        gc.collect()
    eventually(ended, BOUND, "the end of the pool")


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_a_pool_that_was_stopped_or_never_started_says_nothing(cloud: FakeCloud) -> None:
    pool = pool_of(cloud)
    pool.stop()
    del pool
    sky.ComputePool(cloud, name="q", console="off")
    with sky.ComputePool(cloud, name="r", console="off"):
        pass
    gc.collect()


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_a_pool_that_has_ended_by_itself_says_nothing(cloud: FakeCloud) -> None:
    held = [sky.ComputePool(cloud, name="p", linger=1.0, console="off").start()]
    eventually(lambda: held[0].phase == "ended", BOUND, "the end of the pool")
    held.clear()
    eventually(ended, BOUND, "the record of the end")
