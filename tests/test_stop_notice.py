"""Calls hear some time ahead that their node stops them: at the end of a budget or lifetime, and without a client."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skypool.agent.lease import Lease
from skypool.agent.notice import Herald
from skypool.agent.shared_page import SharedPage
from skypool.agent.stop_notice import StopNotice
from skypool.errors import LifetimeExceeded
from skypool.pool.limits import Limits, SteadyReserve
from skypool.runs.saver import Saver
from skypool.runtime import Attended, Interruption
from tests.conftest import eventually, nodes
from tests.lab.work import wait_for_end
from tests.test_linger import Moment
from tests.test_save import pool, run

RESERVE = 30.0


@pytest.fixture
def moment(monkeypatch: pytest.MonkeyPatch) -> Moment:
    monkeypatch.setattr(time, "time", lambda: 1e9)
    return Moment(monkeypatch)


def test_the_end_of_a_lease_is_told_half_a_minute_ahead_and_taken_back_when_the_client_returns(moment: Moment) -> None:
    page, lease = SharedPage(1), Lease(600.0, None, "")
    notice = StopNotice(page, 600.0)

    def look(heard: float, after: float) -> float:
        moment.now = heard + after
        notice.look(lease.renew(heard, RESERVE) - RESERVE, RESERVE, lease.why)
        return page.announced(0)

    assert look(1000.0, 539.0) == 0.0
    assert look(1000.0, 541.0) == 1e9 + 29
    assert page.reason(0) == "lease"
    assert look(1500.0, 41.0) == 0.0


def test_a_limit_is_told_as_the_client_keeps_it_and_follows_its_changes(moment: Moment) -> None:
    page, lease = SharedPage(1), Lease(600.0, None, "")
    notice = StopNotice(page, 600.0)

    def look(left: float) -> float:
        lease.allow(left + 5.0)  # as `Limits` does
        notice.look(lease.renew(moment.now, RESERVE) - RESERVE, RESERVE, lease.why)
        return page.announced(0)

    assert look(90.0) == 0.0
    assert look(55.0) == 1e9 + 25
    assert page.reason(0) == "limit"
    assert look(54.5) == 1e9 + 25, "no news"
    assert look(40.0) == 1e9 + 10
    assert look(63.0) == 1e9 + 33
    assert look(66.0) == 0.0


def test_what_is_written_after_the_notice_moves_the_stop_no_further_ahead(
    moment: Moment, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, lease = SharedPage(1), Lease(600.0, None, "")
    notice = StopNotice(page, 600.0)

    def look(after: float, needed: float) -> tuple[float, float]:
        """Return when calls are stopped, and what they were told, in seconds after the last sign of life."""
        moment.now = 1000.0 + after
        now = 1e9 + after
        monkeypatch.setattr(time, "time", lambda: now)
        reserve = notice.steady(needed)
        deadline = lease.renew(1000.0, reserve) - reserve
        notice.look(deadline, reserve, lease.why)
        return deadline - 1000.0, page.announced(0) - 1e9 if page.announced(0) else 0.0

    assert look(500.0, 40.0) == (560.0, 0.0)
    assert look(535.0, 40.0) == (560.0, 560.0)
    assert look(540.0, 90.0) == (560.0, 560.0), "the last checkpoint is being written"
    assert look(545.0, 20.0) == (580.0, 580.0), "less is left"
    assert look(550.0, 40.0) == (580.0, 580.0), "they were told another time since"
    lease.stay(600.0)
    assert look(555.0, 90.0) == (1150.0, 0.0)
    assert notice.steady(90.0) == 90.0


def test_a_limit_is_told_as_the_client_has_said_when_it_stops_calls(moment: Moment) -> None:
    page, lease = SharedPage(1), Lease(600.0, None, "")
    notice = StopNotice(page, 600.0)
    lease.allow(50.0 + 5.0)

    def look(stop: float | None) -> float:
        notice.client_stops(stop)
        notice.look(lease.renew(moment.now, 10.0) - 10.0, 10.0, lease.why)
        return page.announced(0) - 1e9 if page.announced(0) else 0.0

    assert look(None) == 0.0, "its own reserve is small"
    assert look(20.0) == 20.0, "another node needs longer"
    assert look(90.0) == 0.0


def test_the_reserve_of_a_pool_stays_once_its_stop_is_near() -> None:
    needed = [10.0]
    reserve = SteadyReserve(lambda: needed[0], 600.0)
    assert not reserve.note(20.0, 0.0), "nothing is saved yet"
    assert not reserve.note(60.0, reserve())
    assert reserve.note(44.0, reserve())
    needed[0] = 35.0
    assert reserve() == 10.0
    assert not reserve.note(20.0, reserve())
    assert reserve() == 10.0
    assert not reserve.note(54.0, reserve())
    assert reserve() == 10.0, "it has not moved far away"
    assert not reserve.note(56.0, reserve())
    assert reserve() == 35.0
    brief = SteadyReserve(lambda: needed[0], 20.0)
    assert not brief.note(46.0, brief())
    assert brief.note(44.0, brief())


def test_a_program_is_interrupted_when_nodes_were_told_though_it_writes_its_last_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, needed, allowed = [1000.0], [5.0], list[tuple[float, float]]()
    monkeypatch.setattr("skypool.pool.limits.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("skypool.pool.limits.clock", SimpleNamespace(elapsed=lambda: now[0]))
    link: Any = SimpleNamespace(is_up=True, silence=0.0, allow=lambda left, stop: allowed.append((left, now[0] + stop)))
    rental: Any = SimpleNamespace(limits=SimpleNamespace(check=lambda early: 1100.0 - now[0]), check_owner=lambda: None)
    terms: Any = SimpleNamespace(lease=600.0, name="p")
    none: Any = None
    limits = Limits(terms, rental, none, {0: link}, lambda: needed[0])
    limits.for_programs = 10.0
    for now[0] in (1000.0, 1055.0, 1060.0, 1065.0, 1084.0):
        asyncio.run(limits.check())
        needed[0] = 5.0 if now[0] < 1055.0 else 60.0
        assert now[0] + limits.until_stop() == 1085.0
    assert {stop for _, stop in allowed} == {1085.0}


def test_a_program_is_interrupted_when_its_time_has_come() -> None:
    said: list[float] = [20.0, 6.0, 0.0, -1.0]  # seconds until it ends, at each look
    ended: list[float] = []
    made: Any = SimpleNamespace(
        buckets=True, seconds_left=lambda: 14.0, until_end=lambda: said.pop(0), end_by_limit=lambda: ended.append(0.0)
    )
    errors: list[str] = []
    tell: Any = SimpleNamespace(error=errors.append)
    saver = Saver(made, "", Path(), tell)
    wake: Any = SimpleNamespace(wait=lambda _: True, clear=lambda: None)  # do not wait between looks
    saver._wake = wake
    saver._work()
    assert (said, ended) == ([-1.0], [0.0])
    assert errors[0].startswith("the machines end in 14 s")


def test_nothing_is_told_where_nothing_is_saved_and_of_a_node_without_work(moment: Moment) -> None:
    page, lease = SharedPage(1), Lease(600.0, None, "")
    notice = StopNotice(page, 600.0)
    lease.allow(1.0)
    notice.look(lease.renew(1000.0), 0.0, lease.why)
    assert page.announced(0) == 0.0
    lease.allow(1e6)
    lease.linger(1.0, 1.0)
    for _ in range(2):
        notice.look(lease.renew(1000.0, RESERVE) - RESERVE, RESERVE, lease.why)
        assert page.announced(0) == 0.0
        lease.stay(1.0)


def test_a_call_is_told_again_after_a_false_alarm_and_when_the_provider_takes_the_machine() -> None:
    page = SharedPage(1)
    read_end, write_end = os.pipe()
    herald = Herald(read_end, page)
    told: list[Interruption] = []
    herald.attend(Attended(len, told.append))
    page.announce_stop(5e9, "lease")
    eventually(lambda: told, what="the notice")
    page.announce_stop(0.0, "lease")
    eventually(lambda: herald._told is None, what="the look at the withdrawal")
    page.announce_stop(6e9, "lease")
    eventually(lambda: len(told) == 2, what="the notice after a false alarm")
    page.announce_stop(7e9, "limit")
    page.interruption = 4e9
    os.close(write_end)
    eventually(lambda: len(told) == 3, what="the notice of the provider")
    time.sleep(0.6)
    assert told == [Interruption(5e9, "lease"), Interruption(6e9, "lease"), Interruption(4e9)]
    herald.leave()
    herald.attend(Attended(len, told.append))
    eventually(lambda: len(told) == 4, what="the notice for the next call")
    assert told[3] == Interruption(4e9)
    herald.leave()


# --- whole pools -------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "kept").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "kept"


@pytest.mark.slow
def test_a_call_is_told_before_the_lifetime_is_over_and_what_it_saves_then_is_kept(place: Path) -> None:
    made = pool(place, max_lifetime=45, drain=4, lease=20)
    with pytest.raises(LifetimeExceeded), made:
        wait_for_end() >> made
    reason, left = (place / "told").read_text().split()
    assert reason == "limit"
    assert 0 < float(left) < 5.5


PROGRAM = """
import signal, sys, time
import skypool

def end(*_):
    print("interrupted", time.time() - skypool.interruption().at, flush=True)
    sys.exit()

signal.signal(signal.SIGINT, end)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("home", [(), ("--save", "home")])
def test_a_program_is_interrupted_at_the_time_that_it_was_told(place: Path, home: tuple[str, ...]) -> None:
    Path("train.py").write_text(PROGRAM)
    done = run("--local", "--max-lifetime", "100", "--save", f"out=file://{place}", *home, "train.py")
    assert "interrupted" in done.stdout, done.stderr
    assert abs(float(done.stdout.split()[-1])) < 3.0


CLIENT = """
import sys, time
from tests.lab.work import wait_for_end
from tests.test_save import pool
made = pool(sys.argv[1], lease=16, name="told-orphan").start()
going = made.submit(wait_for_end)
print("at work", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_call_whose_client_is_killed_is_told_before_the_lease_is_over(place: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", CLIENT, str(place)], stdout=subprocess.PIPE, env=env) as client:
        assert client.stdout is not None
        client.stdout.readline()
        eventually(lambda: Path("out/begun").exists(), 60, "the call")
        client.send_signal(signal.SIGKILL)
    eventually(lambda: not nodes("told-orphan"), 60, "the end of the node")
    reason, left = (place / "told").read_text().split()
    assert reason == "lease"
    assert 0 < float(left) < 4.5
