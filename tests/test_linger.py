"""Pools that end themselves when they have had no work for a while, with their client and without it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import events
from skypool.agent.lease import Lease
from skypool.cli.ps import explanations
from skypool.pool.idle_shutdown import SLACK
from skypool.rental.ledger import Ledger
from skypool.rental.reaper import SETTLING
from skypool.rental.records import Record
from skypool.testing import FakeCloud, Stock
from tests.conftest import eventually, nodes, processes_of
from tests.test_idle import CENT, Script, cloud, script
from tests.watched import Watched
from tests.work import add, nap, where

__all__ = ["cloud", "script"]
BOUND = 60.0


# --- the node's side -----------------------------------------------------------------------------------------


class Moment:
    """A monotonic clock that stands still until a test moves it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "monotonic_ns", lambda: round(self.now * 1e9))


@pytest.fixture
def moment(monkeypatch: pytest.MonkeyPatch) -> Moment:
    return Moment(monkeypatch)


def test_a_node_ends_after_the_time_that_its_client_says_or_a_while_after_its_own_work(moment: Moment) -> None:
    lease = Lease(600.0, None, "")
    assert not lease.lingers
    assert lease.renew(1000.0) == 1600.0
    lease.linger(100.0, 300.0)
    assert lease.lingers
    assert lease.renew(1000.0) == 1100.0
    moment.now = 1050.0
    lease.worked()
    assert lease.renew(1000.0) == 1350.0
    moment.now = 1400.0
    lease.worked()  # it goes on without its client, but not beyond the lease
    assert lease.renew(1000.0) == 1600.0
    assert lease.take(1400.0) == ""
    assert lease.renew(1400.0) == 2000.0


def test_a_node_that_stays_lives_as_long_as_its_client_said_and_no_limit_is_forgotten(moment: Moment) -> None:
    lease = Lease(600.0, 5000.0, "")
    lease.linger(10.0, 1800.0)
    lease.stay(1800.0)
    assert lease.renew(1000.0) == 2800.0
    lease.allow(700.0)
    assert lease.renew(1000.0) == 1700.0
    lease.allow(9000.0)
    lease.stay(9000.0)
    assert lease.renew(1000.0) == 6000.0
    assert lease.take(1000.0) == ""
    assert lease.renew(1000.0) == 1600.0


def test_a_machine_whose_node_stays_is_asked_for_again_and_again(moment: Moment, tmp_path: Path) -> None:
    """The guard grants one lease at most for each change of its file, so the file must change while the node stays."""
    file = tmp_path / "lease"
    file.write_text(" " * 31 + "\n")
    lease = Lease(60.0, None, str(file))
    lease.renew(1000.0)
    lease.stay(200.0)
    asked = []
    for now in range(1001, 1201):
        moment.now = float(now)
        lease.renew(1000.0)
        asked.append(file.read_text().split())
    serials = [int(serial) for serial, _ in asked]
    assert all(after - before <= 5000 for before, after in pairwise(serials))
    assert len({*serials}) > 30
    for serial, seconds in asked[3:]:
        assert 1200.0 <= int(serial) / 1000 + int(seconds) <= 1201.0


@pytest.mark.parametrize(("lease_s", "least"), [(600.0, 7.0), (25.0, 3.25), (12.0, 3.0)])
def test_a_node_is_taken_over_only_if_its_guard_reads_that_in_time(
    moment: Moment, tmp_path: Path, lease_s: float, least: float
) -> None:
    file = tmp_path / "lease"
    file.write_text(" " * 31 + "\n")
    lease = Lease(lease_s, None, str(file))
    lease.renew(1000.0)
    lease.stay(9.0)
    lease.renew(1000.0)
    moment.now = 1009.0 - least + 0.01
    assert re.fullmatch(r"its machine ends itself in \d s, which is too late to stop", lease.take(moment.now))
    assert lease.renew(1000.0) == 1009.0
    assert int(file.read_text().split()[1]) <= 9
    moment.now = 1009.0 - least
    assert lease.take(moment.now) == ""
    serial, seconds = map(int, file.read_text().split())
    assert (serial, seconds) == (round(moment.now * 1000), round(lease_s)), "the guard is asked at once"


def test_a_node_whose_guard_cannot_be_asked_is_not_taken_over(moment: Moment, tmp_path: Path) -> None:
    file = tmp_path / "lease"
    file.write_text(" " * 31 + "\n")
    lease = Lease(600.0, None, str(file))
    lease.renew(1000.0)
    lease.stay(100.0)
    lease.renew(1000.0)
    file.unlink()
    assert "its lease cannot be extended in the file" in lease.take(1010.0)
    assert lease.renew(1010.0) == 1100.0


def test_a_node_that_works_without_its_client_tells_the_guard(moment: Moment, tmp_path: Path) -> None:
    file = tmp_path / "lease"
    file.write_text(" " * 31 + "\n")
    lease = Lease(600.0, None, str(file))
    lease.linger(20.0, 20.0)
    lease.renew(1000.0)
    for now in range(1001, 1101):
        moment.now = float(now)
        lease.worked()
        lease.renew(1000.0)
    serial, seconds = map(int, file.read_text().split())
    assert 1110.0 <= serial / 1000 + seconds <= 1121.0


# --- scripted worlds -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pool_ends_itself_after_half_an_hour_without_work_and_its_receipt_is_right(
    cloud: FakeCloud, script: Script, tmp_path: Path
) -> None:
    """36 USD/h is a cent a second. A call of 100 s, and then 1800 s without work."""
    with Watched(cloud, name="p", linger="30m") as pool:
        go = tmp_path / "go"
        call = pool.send(where(str(go)), node=0)
        pool.until_busy(0)
        script.pass_(5000.0)  # a call is work, however long it takes
        go.touch()
        assert call.result(60) == 0
        script.pass_(1799.0)
        time.sleep(1.5)  # longer than the pool takes to look again
        assert add(1) >> pool == 2
        script.pass_(1799.0)
        time.sleep(1.5)
        assert pool.phase == "ready"
        script.pass_(1.0)
        eventually(lambda: pool.phase == "ended", BOUND, "the end of the pool")
        with pytest.raises(sky.PoolClosed, match=r"pool 'p' ends itself, as it has had no work for 30:00 min"):
            pool.send(add(1))
    assert pool.receipt.usd == pytest.approx(85.99, abs=CENT)
    assert pool.receipt.idle_usd == pytest.approx(35.99, abs=CENT)
    [end] = [each for each in pool.heard(events.PoolPhase) if each.phase == "draining"]
    assert "that saves 36.0000 USD for each further hour. Of 85.99" in end.detail
    assert re.search(r"USD, 35.99\d\d USD was paid while it was idle", end.detail)
    [record] = Ledger.here().pools("p")
    assert record.state(time.time()) == "ended"
    assert cloud.instances(pool="p") == []


@pytest.mark.slow
def test_a_pool_with_work_on_one_node_keeps_the_others(tmp_path: Path) -> None:
    """The node without work is idle for much longer than `linger`, and than the time that its client adds."""
    with sky.ComputePool(name="both", nodes=2, slots=1, linger=1.0, console="off") as pool:
        go = tmp_path / "go"
        call = pool.send(where(str(go)), node=0)
        time.sleep(SLACK + 4)  # not for luck: the other node is without work
        assert len(nodes("both")) == 2
        go.touch()
        assert call.result(BOUND) == 0
        eventually(lambda: pool.phase == "ended", BOUND, "the end of the pool")
    assert nodes("both") == []


def test_a_budget_and_a_lifetime_end_a_pool_before_its_linger(cloud: FakeCloud, script: Script) -> None:
    with Watched(cloud, name="p", linger="30m", budget=40.0) as pool:
        script.pass_(100.0)
        assert add(1) >> pool == 2
        script.pass_(3950.0)
        eventually(lambda: pool.phase == "ended", BOUND, "the end of the pool")
        ends = [each.detail for each in pool.heard(events.PoolPhase) if each.phase == "draining"]
        assert len(ends) == 1


# --- services ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("busy", [False, True])
def test_a_service_is_work_only_if_it_is_busy(cloud: FakeCloud, script: Script, tmp_path: Path, busy: bool) -> None:
    with Watched(cloud, name="p", linger="30m") as pool:
        script.pass_(100.0)
        service = pool.service(where(str(tmp_path / "go")), busy=busy)
        script.pass_(2000.0)
        if not busy:
            eventually(lambda: pool.phase == "ended", BOUND, "the end of the pool")
            assert pool.receipt.idle_usd == pytest.approx(21.0, abs=CENT)
            return
        assert pool.receipt.idle_usd == pytest.approx(1.0, abs=CENT)
        assert pool._begun is not None
        assert pool._begun.linger.idle == 0.0
        (tmp_path / "go").touch()
        assert service.result(BOUND) == 0
        script.pass_(1500.0)
        assert pool.receipt.idle_usd == pytest.approx(16.0, abs=CENT)
        assert pool.phase == "ready"
        script.pass_(301.0)
        eventually(lambda: pool.phase == "ended", BOUND, "the end of the pool")


def test_busy_is_true_or_false() -> None:
    with pytest.raises(sky.UsageError, match="busy must be True or False, not 1"):
        sky.ComputePool(console="off").service(where(), busy=1)  # type: ignore[call-overload]


@pytest.mark.slow
def test_a_busy_service_of_a_killed_client_is_work_and_stays_so(tmp_path: Path) -> None:
    process = client("serving", "service", str(tmp_path / "go"))
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(3 + SLACK + 4)  # not for luck: the node lives on
    with sky.ComputePool.attach("serving", console="off") as pool:
        assert pool._begun is not None
        assert pool._begun.linger.idle == 0.0
        [service] = pool.services
        service.close()
        eventually(lambda: pool._begun is not None and pool._begun.linger.idle > 0.0, BOUND, "idleness")


# --- without a client ----------------------------------------------------------------------------------------

CLIENT = """
    import os, sys, time
    import skypool as sky
    from tests.work import add, outlast, where
    pool = sky.ComputePool(name=sys.argv[1], slots=1, linger=3, liveness=5, console="off").start()
    assert add(1) >> pool == 2
    if sys.argv[2:3] == ["service"]:
        pool.service(where(sys.argv[3]), busy=True)
        time.sleep(1)
    elif len(sys.argv) > 2:
        call = outlast(*sys.argv[2:]) > pool
        while not os.path.exists(sys.argv[3]):
            time.sleep(0.05)
    print("ready", flush=True)
    time.sleep(600)
"""


def client(*argv: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(CLIENT), *argv]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.stdout.close()
    return process


@pytest.mark.slow
@pytest.mark.serial
def test_a_call_of_a_killed_client_is_work(tmp_path: Path) -> None:
    go = tmp_path / "go"
    process = client("working", str(go), str(tmp_path / "log"))
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(3 + SLACK + 4)  # not for luck: the node lives on
    assert len(nodes("working")) == 1
    go.touch()
    began = time.monotonic()
    eventually(lambda: not nodes("working"), BOUND, "the end of the node")
    assert time.monotonic() - began > 1.0


# --- after the block -----------------------------------------------------------------------------------------


def record(name: str) -> Record:
    return Ledger.here().pools(name)[-1]


def until_over(name: str) -> None:
    """Wait until the nodes are gone, and the process that waits for that has proved and recorded it."""
    eventually(lambda: not nodes(name), BOUND, "the end of the node")
    eventually(lambda: record(name).ended is not None, BOUND, "the record of the end")
    eventually(lambda: not processes_of(f"reaper_process\0{name}"), BOUND, "the end of the process that waits")


def test_machines_stay_after_the_block_and_come_back_at_once() -> None:
    told: list[events.Event] = []
    with sky.ComputePool(name="stays", slots=1, linger="30m", console="off") as pool:
        pool.events.listen(told.append)
        assert add(1) >> pool == 2
        there = nodes("stays")
    assert nodes("stays") == there != []
    assert pool.phase == "ended"
    with pytest.raises(sky.PoolClosed):
        add(1) >> pool
    assert [each.staying for each in told if isinstance(each, events.PoolPhase) and each.phase == "ended"] == [1]
    [said] = [each.text for each in told if isinstance(each, events.Notice)]
    assert re.match(r"1 machine stays until \d\d:\d\d:\d\d \(linger\): ComputePool.attach\('stays'\) takes over", said)
    assert record("stays").state(time.time()) == "left"
    assert "its machines stay until" in explanations(record("stays"), time.time())[0]
    assert 1790 < record("stays").lasts - time.time() <= 1800
    with pytest.raises(sky.UsageError, match=r"take it over with ComputePool.attach\('stays'\)"):
        sky.ComputePool(name="stays", console="off").start()
    with sky.ComputePool.attach("stays", console="off") as again:
        assert again.inherited == []
        assert record("stays").state(time.time()) == "live"
        assert add(2) >> again == 3
        assert nodes("stays") == there
    until_over("stays")


@pytest.mark.slow
def test_machines_that_nobody_takes_over_end_in_time_and_cost_nothing_more(cloud: FakeCloud) -> None:
    with sky.ComputePool(cloud, name="unclaimed", slots=1, linger=3, console="off") as pool:
        began = time.monotonic()
        assert add(1) >> pool == 2
        worked = time.monotonic() - began
    left = time.time()
    assert len(cloud.instances(pool="unclaimed")) == 1
    until_over("unclaimed")
    assert time.time() - left >= 1.5
    assert cloud.instances(pool="unclaimed") == []
    [line] = record("unclaimed").lines
    assert line.ended
    assert 1.5 <= line.until - left < 30
    assert line.idle_usd == pytest.approx(line.usd, abs=CENT + 0.01 * worked)


@pytest.mark.slow
def test_a_process_that_ends_machines_late_still_proves_their_end_at_once(cloud: FakeCloud) -> None:
    """A machine that had ended itself before could not be told from one that its provider lists late."""
    with sky.ComputePool(cloud, name="stopped", slots=1, linger=2, console="off"):
        pass
    [ender] = processes_of("reaper_process\0stopped")
    os.kill(ender, signal.SIGSTOP)
    time.sleep(max(0.0, record("stopped").lasts + 2.0 - time.time()))
    assert len(cloud.instances(pool="stopped")) == 1
    os.kill(ender, signal.SIGCONT)
    eventually(lambda: record("stopped").ended is not None, SETTLING / 2, "the record of the end")
    assert cloud.count() == 0


@pytest.mark.slow
def test_machines_stay_after_an_error_and_end_after_ctrl_c(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), sky.ComputePool(name="err", slots=1, linger=60, console="off") as pool:
        call = pool.send(where(str(tmp_path / "never")))
        raise ZeroDivisionError
    with pytest.raises(sky.PoolClosed):
        call.result(BOUND)
    assert len(nodes("err")) == 1
    with pytest.raises(KeyboardInterrupt), sky.ComputePool.attach("err", linger=60, console="off") as again:
        assert add(1) >> again == 2  # the call of before was stopped, and has left its slot
        raise KeyboardInterrupt
    until_over("err")


@pytest.mark.slow
def test_budget_and_lifetime_end_machines_that_stay(cloud: FakeCloud) -> None:
    """36 USD/h is a cent a second."""
    with sky.ComputePool(cloud, name="poor", slots=1, linger="2h", budget=36.5, console="off") as p:
        assert add(1) >> p == 2
    assert 3500 < record("poor").lasts - time.time() <= 3650
    with sky.ComputePool.attach("poor", cloud, linger="2h", max_lifetime="30m", console="off"):
        pass
    assert 1700 < record("poor").lasts - time.time() <= 1800
    sky.ComputePool.attach("poor", cloud, console="off").stop()
    until_over("poor")


@pytest.mark.slow
def test_an_interrupt_while_machines_that_stay_are_asked_for_leaves_them_as_they_were(cloud: FakeCloud) -> None:
    with sky.ComputePool(cloud, name="asked", slots=1, linger="10m", console="off"):
        pass
    until, asked = record("asked").lasts, len(cloud.control.calls("describe"))
    cloud.control.delay(2.0, "describe")
    words = [sys.executable, "-c", "import skypool as sky; sky.ComputePool.attach('asked', console='off')"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        eventually(lambda: len(cloud.control.calls("describe")) > asked, BOUND)
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=60)[1]
    assert record("asked").is_staying, err
    assert record("asked").lasts == pytest.approx(until, abs=1)
    sky.ComputePool.attach("asked", cloud, console="off").stop()
    until_over("asked")


# --- a pool that is taken over at the last moment ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.serial
def test_who_attaches_just_before_the_end_gets_the_machine_for_a_whole_lease_or_is_refused(tmp_path: Path) -> None:
    """With a lease of 25 s the guard may take 3.25 s until it has read that it must let the machine live."""
    stays, worked, refused = 4.0, [], []

    def late(before: float) -> None:
        name = f"late-{before:04.1f}".replace(".", "-")
        options: dict[str, Any] = {"slots": 1, "lease": 25, "console": "off"}
        with FakeCloud(tmp_path / name, [Stock()]) as cloud:
            with sky.ComputePool(cloud, name=name, linger=stays, **options):
                pass
            [ender] = processes_of(f"reaper_process\0{name}")
            os.kill(ender, signal.SIGSTOP)  # otherwise nobody could attach in the time that the node adds
            until = record(name).lasts + SLACK
            time.sleep(max(0.0, until - before - time.time()))
            try:
                with sky.ComputePool.attach(name, cloud, **options) as pool:
                    assert pool.send(nap(before + 3.0)).result(BOUND) == before + 3.0
                    worked.append(before)
            except sky.SkypoolError as e:
                refused.append((before, str(e)))
                eventually(lambda: cloud.count("machine") == 0, BOUND, "the end of the machine")
                assert time.time() < until + 5.0
            finally:
                os.kill(ender, signal.SIGCONT)
            eventually(lambda: record(name).ended is not None, BOUND, "the record of the end")

    late(12.0)  # what is slow the first time
    times = [0.2, 0.6, 1.0, 1.5, 2.0, 3.0, 4.5, 6.0]
    with ThreadPoolExecutor(len(times)) as threads:
        list(threads.map(late, times))
    assert 12.0 in worked
    assert {0.2, 0.6, 1.0, 1.5} <= {before for before, _ in refused}
    assert any("too late to stop" in why for _, why in refused), refused


@pytest.mark.slow
def test_a_pool_that_cannot_be_taken_over_ends_when_it_would_have_ended(tmp_path: Path) -> None:
    with FakeCloud(tmp_path / "cloud", [Stock()]) as cloud:
        with sky.ComputePool(cloud, name="half", nodes=2, slots=1, linger=20, console="off"):
            pass
        before = record("half")
        [lost] = [each for each in cloud.instances(pool="half") if each.node == 1]
        cloud.control.partition(lost)
        with pytest.raises(sky.SkypoolError, match="node 1"):
            sky.ComputePool.attach("half", cloud, liveness=3, console="off")
        after = record("half")
        assert (after.stays, after.lease, after.client) == (before.stays, before.lease, before.client)
        assert after.is_staying
        assert len(cloud.instances(pool="half")) == 2
        eventually(lambda: cloud.count("machine") == 0, 2 * BOUND, "the end of the machines")
        assert before.stays is not None
        assert time.time() < before.stays + 10.0
        eventually(lambda: record("half").ended is not None, BOUND, "the record of the end")
