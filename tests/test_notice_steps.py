"""All ranks of a gang hear of a notice at one step: real agents, and machines of a fake cloud."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.agent import own_notices
from skypool.agent.own_notices import OwnNotices
from skypool.agent.shared_page import SharedPage
from skypool.gangs import agreement
from skypool.gangs.agreement import MOST_STEP, PATIENCE, Offer
from skypool.testing import FakeCloud
from tests.conftest import eventually, processes_of
from tests.gang_work import count
from tests.watched import OnSpot


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[FakeCloud]:
    with FakeCloud(tmp_path / "cloud") as made:
        yield made
    eventually(lambda: not processes_of(str(tmp_path)), 30, "the end of all processes of the cloud")


def test_all_ranks_on_one_node_hear_of_it_at_one_step(cloud: FakeCloud) -> None:
    with OnSpot(cloud) as pool:
        running = pool.send(count(5, 0.002).with_options(procs=3, node="all"))
        pool.until_busy()
        time.sleep(0.3)
        pool.notify(0)
        heard = running.result(60)
    assert len({step for step, _, _ in heard}) == 1
    assert {reason for _, reason, _ in heard} == {"provider"}
    assert max(longest for _, _, longest in heard) < PATIENCE + 1


def test_ranks_on_several_nodes_hear_of_the_notice_for_one_of_them_at_one_step(cloud: FakeCloud) -> None:
    with OnSpot(cloud, nodes=2) as pool:
        running = pool.send(count(0, 0.002).with_options(procs=2, node="all"))
        pool.until_busy(0, 1)
        time.sleep(0.3)
        pool.notify(1)
        heard = running.result(60)
    assert len({step for step, _, _ in heard}) == 1
    assert len(heard) == 4


def test_a_process_without_a_gang_hears_of_it_at_once(cloud: FakeCloud) -> None:
    assert sky.interruption(3) is None
    with OnSpot(cloud) as pool:
        running = pool.send(count(7, 0.01))
        pool.until_busy()
        pool.notify(0)
        step, reason, _ = running.result(60)
    assert step >= 7
    assert reason == "provider"


# --- one process -------------------------------------------------------------------------------------------------


@pytest.fixture
def page() -> SharedPage:
    return SharedPage(2)


def test_a_rank_waits_for_a_decision_and_then_goes_on_for_good(page: SharedPage) -> None:
    mine = OwnNotices(page, 0, 2)
    page.interruption = 4e9
    assert mine.at_step(1) is None, "nothing is offered"
    page.offer(0, Offer(3).word)
    assert mine.at_step(2) is None
    began = time.monotonic()
    assert mine.at_step(3) is None
    assert PATIENCE <= time.monotonic() - began < PATIENCE + 1
    assert page.told_step(0) == 3
    page.offer(0, Offer(3, decided=True).word)
    assert mine.at_step(4) is None, "the others may have acted without it"


def test_a_rank_acts_at_the_decided_step_and_from_then_on(page: SharedPage) -> None:
    mine = OwnNotices(page, 1, 2)
    page.interruption = 4e9
    page.offer(1, Offer(8, decided=True).word)
    assert [mine.at_step(step) for step in (6, 7)] == [None, None]
    for step in (8, 9):
        assert mine.at_step(step) == sky.Interruption(4e9)


def test_a_rank_that_gives_up_tells_its_step_and_looks_once_more(
    page: SharedPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, sleep = OwnNotices(page, 0, 2), time.sleep
    page.interruption = 4e9
    monkeypatch.setattr(own_notices, "PATIENCE", 0.1)
    monkeypatch.setattr(agreement, "PATIENCE", 0.1)

    def decides_late(seconds: float) -> None:
        sleep(seconds)
        if page.told_step(0) == 3:  # an agent that has looked just before
            page.offer(0, Offer(3, decided=True).word)

    monkeypatch.setattr(time, "sleep", decides_late)
    page.offer(0, Offer(3).word)
    assert mine.at_step(3) == sky.Interruption(4e9)
    assert page.told_step(0) == -1, "it has not gone past that step"


def test_a_pause_of_the_node_uses_up_no_patience(page: SharedPage, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, real = OwnNotices(page, 0, 2), time.monotonic
    page.interruption = 4e9
    page.offer(0, Offer(3).word)
    paused = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + paused[0])

    def pause() -> None:
        paused[0] = 60.0
        threading.Timer(0.2, page.offer, (0, Offer(3, decided=True).word)).start()

    threading.Timer(0.2, pause).start()
    assert mine.at_step(3) == sky.Interruption(4e9)


def test_a_stop_that_is_withdrawn_before_the_agreed_step_keeps_its_reason(page: SharedPage) -> None:
    mine = OwnNotices(page, 0, 2)
    page.announce_stop(5e9, "lease")
    page.offer(0, Offer(3, decided=True).word)
    page.announce_stop(0.0, "lease")
    said = mine.at_step(3)
    assert said is not None
    assert said.reason == "lease"


def test_no_other_file_is_taken_for_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_notices, "_own", None)
    page = SharedPage(1)
    page.interruption = 4e9
    whole = os.pread(page.file, 1 << 12, 0)
    (tmp_path / "other").write_bytes(whole)
    with (tmp_path / "other").open("r+b") as other:
        for file, found in ((other.fileno(), None), (page.file, sky.Interruption(4e9))):
            monkeypatch.setattr(own_notices, "_is_sought", False)
            monkeypatch.setenv(own_notices.VARIABLE, f"1 0 1 /proc/{os.getpid()}/fd/{file}")
            assert sky.interruption() == found


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "3", MOST_STEP + 1])
def test_a_step_that_is_none_is_refused(page: SharedPage, wrong: Any) -> None:
    with pytest.raises(sky.UsageError, match="step of interruption"):
        OwnNotices(page, 0, 2).at_step(wrong)


def test_processes_of_another_launcher_are_refused(page: SharedPage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(sky.UsageError, match="WORLD_SIZE is 8, not 1"):
        OwnNotices(page, 0).at_step(0)


def test_a_program_finds_the_page_of_the_worker_that_has_started_it(page: SharedPage) -> None:
    page.interruption = 4e9
    page.announce_stop(5e9, "lease")
    asks = "import skypool; found = skypool.interruption(1); print(found.at, found.reason)"
    env = {
        **os.environ,
        own_notices.VARIABLE: OwnNotices(page, 0).place(os.getpid()),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    said = subprocess.run([sys.executable, "-c", asks], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.split() == ["4000000000.0", "provider"]


def test_a_step_without_a_notice_takes_less_than_two_microseconds(page: SharedPage) -> None:
    mine = OwnNotices(page, 0, 2)
    mine.at_step(0)
    best = 1.0
    for part in range(20):
        began = time.perf_counter()
        for step in range(1 + 1000 * part, 1 + 1000 * (part + 1)):
            mine.at_step(step)
        best = min(best, (time.perf_counter() - began) / 1000)
    print(f"{1e9 * best:.0f} ns a step")
    assert best < 2e-6
