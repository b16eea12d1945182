"""Ends of a pool that its user has planned: `max_lifetime`, and others that are no loss of a node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import skypool as sky
from skypool import clock, events
from skypool.errors import LifetimeExceeded, PoolClosed
from skypool.event_loop import _THREADS, Loop
from skypool.rental.ledger import Ledger
from skypool.rental.reaper import terminate_all
from skypool.testing import FakeCloud, Stock
from tests.bill import Item, bill
from tests.conftest import eventually
from tests.test_bills import rent
from tests.test_bills import rented as rented_by
from tests.watched import Watched
from tests.work import add, nap, outlast

BOUND = 30.0


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[FakeCloud]:
    with FakeCloud(tmp_path / "cloud", [Stock(usd_per_hour=36.0)]) as made:
        yield made


def rented(cloud: FakeCloud) -> list[Item]:
    """What the cloud bills, in the order in which it was made."""
    return [*bill(Path(str(cloud.state)) / "events", time.time()).values()]


@pytest.fixture
def skip(cloud: FakeCloud, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the clocks of cloud and client on by seconds. So a lifetime may be longer than any start of a pool."""

    def skip(seconds: float) -> None:
        monkeypatch.setattr(clock, "_BEGAN", clock._BEGAN + seconds)
        cloud.control.advance(seconds)

    return skip


def test_a_pool_ends_with_its_lifetime_and_rents_nothing_more(
    cloud: FakeCloud, tmp_path: Path, skip: Callable[[float], None]
) -> None:
    """Calls fail at once, although `liveness` is 90 s, and are not sent again."""
    with Watched(cloud, name="p", max_lifetime=600.0, lease=3600) as pool:
        runs = pool.send(outlast.with_options(retries=3)(str(tmp_path / "never"), str(tmp_path / "log")))
        waits = pool.send(add.with_options(retries=3)(1))
        eventually((tmp_path / "log").exists, BOUND, "the begin of the call")
        [item] = rented(cloud)
        skip(597.0 - (time.time() - item.made))
        for each in (runs, waits):
            with pytest.raises(LifetimeExceeded, match=r"pool 'p' ends .* max_lifetime of 10:00 min is over.*longer m"):
                each.result(BOUND)
        eventually(lambda: cloud.count() == 0, BOUND, "the end of key pair and security group")
        time.sleep(1.0)  # not for luck: a pool that would rent again has begun to
        [item] = rented(cloud)
        assert item.seconds >= 600.0
        with pytest.raises(LifetimeExceeded):
            pool.send(add(1))
    assert (tmp_path / "log").read_text() == "0\n"
    assert not pool.heard(events.CallRetried)
    assert not pool.heard(events.LinkDown)
    [end] = [each for each in pool.heard(events.PoolPhase) if each.phase == "draining"]
    assert Ledger.here().pools("p")[0].error == end.detail


@pytest.mark.slow
def test_an_idle_pool_ends_with_its_lifetime(cloud: FakeCloud) -> None:
    with Watched(cloud, name="p", max_lifetime=6.0, liveness=5) as pool:
        assert add(1) >> pool == 2
        eventually(lambda: pool.phase == "ended", BOUND, "the end of the pool")
        time.sleep(5.0)  # not for luck: longer than `liveness`
        assert len(rented(cloud)) == 1


def test_a_machine_that_ends_just_before_its_pool_is_no_loss(cloud: FakeCloud, skip: Callable[[float], None]) -> None:
    """Its clock may differ a little, and the client may be busy."""
    with Watched(cloud, name="p", max_lifetime=600.0, lease=3600) as pool:
        call = pool.send(nap.with_options(retries=3)(600))
        pool.until_busy(0)
        [item] = rented(cloud)
        skip(598.5 - (time.time() - item.made))
        time.sleep(1.0)  # not for luck: the pool looks at its lifetime
        with suppress(KeyError):  # on a busy machine, it has ended
            pool.take(0)
        with pytest.raises(LifetimeExceeded):
            call.result(BOUND)
    assert not pool.heard(events.LinkDown)
    assert not pool.heard(events.CallRetried)
    assert len(rented(cloud)) == 1


def test_a_machine_in_place_of_a_lost_one_lives_no_longer_than_the_rest_of_the_lifetime(cloud: FakeCloud) -> None:
    with Watched(cloud, name="p", max_lifetime=300.0, liveness=5.0) as pool:
        time.sleep(1.0)  # not for luck: this much of the lifetime is over
        pool.take(0)
        pool.until_ready(1)
        with cloud.control.state.open() as world:
            first, last = [each.lifetime for each in world.machines.values()]
    assert first == pytest.approx(300.0, abs=0.01)
    assert last is not None
    assert 200.0 < last < 299.0


@pytest.mark.slow
def test_a_pool_that_is_taken_over_keeps_its_lifetime(cloud: FakeCloud) -> None:
    with sky.ComputePool(cloud, name="p", slots=1, lease=20, linger=60, max_lifetime=8.0, console="off"):
        pass
    with sky.ComputePool.attach("p", cloud, linger=60, max_lifetime=100.0, console="off") as pool:
        eventually(lambda: pool.phase == "ended", BOUND, "the end of the pool")
        with pytest.raises(LifetimeExceeded, match="max_lifetime of 8 s"):
            pool.send(add(1))
    [item] = rented(cloud)
    assert 8.0 <= item.seconds < 10.0


def test_a_start_that_takes_longer_than_the_lifetime_fails_and_says_why(cloud: FakeCloud) -> None:
    cloud.control.delay(4.0, "describe")
    with pytest.raises(LifetimeExceeded, match="max_lifetime of 1 s"):
        sky.ComputePool(cloud, name="p", max_lifetime=1.0, console="off").start()
    assert cloud.count() == 0


def test_the_lifetime_begins_when_the_machine_is_billed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that waits in a queue costs nothing where billing begins with its run."""
    cloud = FakeCloud(tmp_path / "queue", [Stock()], machines=False, ends_itself=False, billing="running")
    supply = rented_by(cloud, monkeypatch, max_lifetime=100.0)
    cloud.control.next_machines(boots=600.0)
    rent(supply, 0)
    cloud.control.advance(599.0)
    assert supply.rental.limits.check() == 100.0
    cloud.control.advance(1.5)
    supply.runs(cloud.instances(pool="p")[0])
    cloud.control.advance(60.0)
    assert supply.rental.limits.check() == pytest.approx(39.5, abs=0.5)
    assert supply.rental.limits.node_lifetime() == pytest.approx(44.5, abs=0.5)
    cloud.control.advance(39.0)
    with pytest.raises(LifetimeExceeded, match="max_lifetime of 01:40 min"):
        supply.rental.limits.check(early=2.0)


def test_a_pool_ends_while_every_thread_of_the_drivers_waits_for_a_provider(
    cloud: FakeCloud, skip: Callable[[float], None]
) -> None:
    answers = threading.Event()
    loop = Loop.shared().loop
    with Watched(cloud, name="p", max_lifetime=600.0, lease=3600) as pool:
        for _ in range(_THREADS + 8):
            loop.call_soon_threadsafe(loop.run_in_executor, None, answers.wait, 60.0)
        try:
            skip(599.0)
            eventually(lambda: cloud.count() == 0, BOUND, "the end of machine, key pair and security group")
            with pytest.raises(LifetimeExceeded):
                pool.send(add(1))
        finally:
            answers.set()


# --- a process that is away ----------------------------------------------------------------------------------

AWAY = """
    import sys
    import skypool as sky
    from skypool import events
    from skypool.link.link import Link
    from skypool.testing import FakeCloud
    from tests.work import nap
    if late := float(sys.argv[3]):
        real = Link._break
        Link._break = lambda link, *told: link._loop.call_later(late, real, link, *told)
    pool = sky.ComputePool(FakeCloud(sys.argv[1]), name="p", slots=1, liveness=20, console="off", **eval(sys.argv[2]))
    again = []
    pool.events.listen(lambda event: isinstance(event, events.CallRetried) and again.append(event))
    with pool:
        call = pool.send(nap.with_options(retries=2)(600))
        print("ready", flush=True)
        try:
            call.result()
        except sky.SkypoolError as e:
            print(f"{type(e).__name__}: {e}", flush=True)
    print("retried", len(again), flush=True)
"""


@pytest.mark.parametrize(
    ("options", "late", "said"),
    [
        ({"max_lifetime": 8.0}, 0.0, "LifetimeExceeded: pool 'p' ends with its machines, as its max_lifetime of 8 s"),
        ({"lease": 8.0}, 0.0, "longer than lease=8 s, so its machines have ended themselves"),
        ({"lease": 8.0}, 1.5, "longer than lease=8 s, so its machines have ended themselves"),
    ],
    ids=["lifetime", "lease", "lease, and the connection breaks only when what was sent before has been read"],
)
@pytest.mark.slow
def test_a_process_that_was_paused_past_a_planned_end_names_it_and_rents_nothing(
    cloud: FakeCloud, options: dict[str, float], late: float, said: str
) -> None:
    argv = [sys.executable, "-c", textwrap.dedent(AWAY), str(cloud.state), json.dumps(options), str(late)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            os.kill(process.pid, signal.SIGSTOP)
            eventually(lambda: cloud.count("machine") == 0, BOUND, "the end of the machine")
            time.sleep(1.0)  # not for luck: what is paused has nothing to wait for
            os.kill(process.pid, signal.SIGCONT)
            began = time.monotonic()
            assert said in process.stdout.readline()
            assert process.stdout.readline() == "retried 0\n"
            assert time.monotonic() - began < 15.0
        finally:
            process.kill()
    assert len(rented(cloud)) == 1


# --- `skypool down` of another process -----------------------------------------------------------------------


def test_a_call_whose_pool_another_process_ends_says_so_at_once(cloud: FakeCloud) -> None:
    with Watched(cloud, name="p") as pool:  # `liveness` is 90 s
        call = pool.send(nap.with_options(retries=1)(600))
        pool.until_busy(0)
        down = threading.Thread(target=lambda: terminate_all([cloud], "p", Ledger.here()))
        ledger = Ledger.here()
        ledger.ending("p")
        down.start()
        began = time.monotonic()
        with pytest.raises(PoolClosed, match=r"pool 'p' was ended by another process, as `skypool down p` does"):
            call.result(BOUND)
        assert time.monotonic() - began < 15.0
        down.join()
    assert not pool.heard(events.CallRetried)
    assert len(rented(cloud)) == 1


def test_a_call_whose_machine_was_ended_from_another_computer_blames_no_network(cloud: FakeCloud) -> None:
    with Watched(cloud, name="p", liveness=5.0) as pool:
        call = pool.send(nap(600))
        pool.until_busy(0)
        cloud.terminate(cloud.instances(pool="p"))  # its ledger is not this one
        with pytest.raises(sky.ConnectionLost, match=r"machine i-0001 has ended, as fake says: .*`skypool down p`"):
            call.result(BOUND)
