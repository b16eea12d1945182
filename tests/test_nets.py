"""The machine's own end, from the client's side: while it is there nothing ends, once it is gone everything does."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool.agent.lease import Lease
from skypool.drivers import userdata
from skypool.event_loop import Loop
from skypool.model import Need, Order
from skypool.pool.idle_shutdown import SLACK
from tests.lab.booted import Booted
from tests.lab.machines import Lab, Machine
from tests.lab.work import long

ROOT = Path(__file__).parent.parent
LEASE = 6.0
LATE = 10.0
"""Seconds that an end may be late: both guard and agent of so short a lease look each second."""


class Site:
    """A machine, and the provider that gives it to a pool. The machine boots when it is first needed.

    From then on it waits for its client for one lease, so a client that starts slowly must be there before.
    """

    def __init__(self, lab: Lab, lease: float = LEASE, lifetime: float | None = None) -> None:
        self._lab = lab
        self._order = Order("train", "abc-1-0", (0,), Need(), lease=lease, lifetime=lifetime)
        self.lease = lease

    @cached_property
    def machine(self) -> Machine:
        return self._lab.machine(user_data=userdata.cloud_config(self._order, user="ubuntu"), user="ubuntu")

    @cached_property
    def provider(self) -> Booted:
        return Booted((self.machine.address,), str(self._order.keys.folder), self._order.token)

    def pool(self, **asked: Any) -> sky.ComputePool:
        return sky.ComputePool(self.provider, lease=self.lease, console="off", slots=1, **asked)

    def client(self, work: str = "pass", image: str = "None", until: str = "ready\n") -> subprocess.Popen[str]:
        """Another process with a pool on the machine, once it has said this line."""
        script = f"""
        import time
        import skypool as sky
        from skypool.compute_pool.compute_pool import ComputePool
        from tests.lab.booted import Booted
        from tests.lab.work import long
        print("imported", flush=True)
        def step(event):
            if isinstance(event, sky.events.BootstrapOutput):
                print(event.text, flush=True)
        pool = ComputePool(eval(input()), lease={self.lease}, slots=1, image={image}, console="off")
        pool.events.listen(step)
        with pool:
            print("ready", flush=True)
            {work}
        """
        argv = [sys.executable, "-c", textwrap.dedent(script)]
        client = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert client.stdin is not None
        assert client.stdout is not None
        for line in client.stdout:
            if line == "imported\n":
                with client.stdin:
                    client.stdin.write(f"{self.provider!r}\n")
            elif line == until:
                return client
        raise AssertionError(f"the client ended with {client.wait()} before it said {until!r}")

    def until_off(self, within: float = 120.0) -> float:
        began = time.monotonic()
        assert self.machine.wait_off(within) == "shutdown -P now"
        return time.monotonic() - began


@pytest.fixture
def site(lab: Lab) -> Iterator[Site]:
    site = Site(lab)
    yield site
    site.machine.destroy()


def struck(client: subprocess.Popen[str]) -> None:
    client.kill()
    client.wait()
    assert client.stdout is not None
    client.stdout.close()


# --- on machines ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pool_at_work_outlives_its_lease_and_leaves_no_machine_that_does(site: Site) -> None:
    with site.pool() as pool:
        assert long(2 * LEASE) >> pool == site.machine.hostname
        assert site.machine.is_running
    assert site.until_off() < LEASE + LATE  # the agent was told to end, and nobody asks any more


@pytest.mark.slow
def test_a_client_killed_under_its_call_takes_the_machine_along(site: Site) -> None:
    client = site.client("long(100) >> pool")
    time.sleep(1.5 * LEASE)  # not for luck: the machine was kept alive until now
    struck(client)
    assert site.until_off() < LEASE + LATE


def test_a_machine_whose_network_is_cut_ends_itself(site: Site) -> None:
    with site.pool(liveness=3) as pool:
        call = long(100) > pool
        time.sleep(LEASE)  # not for luck: the machine was kept alive until now
        site.machine.cut()
        assert site.until_off() < LEASE + LATE
        with pytest.raises(sky.SkypoolError):
            call.result(60)


@pytest.mark.parametrize("victim", ["skypool-agent", "everything"])
def test_a_machine_without_an_agent_ends_itself_though_its_client_is_there(site: Site, victim: str) -> None:
    with site.pool() as pool:
        call = long(100) > pool
        time.sleep(1)  # not for luck: the call runs
        kill = "pkill -9 -u ubuntu" if victim == "everything" else f"pkill -9 -x {victim}"
        site.machine.run(kill)
        assert site.until_off() < LEASE + LATE
        with pytest.raises(sky.ConnectionLost):
            call.result(60)


@pytest.mark.slow
def test_a_client_killed_during_the_bootstrap_takes_the_machine_along(site: Site) -> None:
    client = site.client(image="sky.Image(run=['echo begun; sleep 100'])", until="begun\n")
    time.sleep(1.5 * LEASE)  # not for luck: the machine was kept alive until now
    assert site.machine.is_running
    struck(client)
    assert site.until_off() < LEASE + LATE


@pytest.mark.slow
def test_a_network_cut_during_the_bootstrap_takes_the_machine_along(site: Site) -> None:
    client = site.client(image="sky.Image(run=['echo begun; sleep 100'])", until="begun\n")
    time.sleep(LEASE)  # not for luck: the machine was kept alive until now
    site.machine.cut()
    assert site.until_off() < LEASE + LATE
    struck(client)


@pytest.mark.slow
def test_a_machine_stays_for_its_linger_beyond_its_lease_and_then_ends_itself(site: Site) -> None:
    """Its node asks the guard for more, a lease at most each time, although no client is there."""
    with site.pool(linger=3 * LEASE) as pool:
        assert long(1) >> pool == site.machine.hostname
    time.sleep(2 * LEASE)  # not for luck: the machine lives on
    assert site.machine.is_running
    assert site.until_off() < LEASE + SLACK + LATE


@pytest.mark.slow
def test_what_the_client_allows_ends_machine_and_work_and_may_be_raised_again(site: Site) -> None:
    with site.pool(liveness=3) as pool:
        call = long(100) > pool
        allow(pool, 2)
        time.sleep(1)  # not for luck: the first word held for a while
        allow(pool, 2 * LEASE)
        assert 2 * LEASE - 2 < site.until_off() < 2 * LEASE + LATE
        with pytest.raises(sky.SkypoolError):
            call.result(60)


def allow(pool: sky.ComputePool, seconds: float) -> None:
    engine: Any = pool._engine
    Loop.shared().loop.call_soon_threadsafe(engine.connections.links[0].allow, seconds)


# --- what the agent asks for ---------------------------------------------------------------------------------


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    file = tmp_path / "lease"
    file.write_text(f"{'nobody has asked':<31}\n")
    return file


def lease(file: Path | str, seconds: float = 10.0, lifetime: float | None = None) -> Lease:
    return Lease(seconds, lifetime, str(file))


def seconds_in(file: Path) -> int:
    text = file.read_text()
    assert len(text) == 32
    assert text.endswith("\n")
    serial, seconds = text.split()
    assert serial.isdigit()
    return int(seconds)


def test_a_sign_of_life_asks_for_what_is_left_of_the_lease(asked: Path) -> None:
    now = time.monotonic()
    assert lease(asked).renew(now - 4) == pytest.approx(now + 6, abs=0.1)
    assert seconds_in(asked) == 6


def test_it_asks_once_for_a_sign_of_life_and_not_at_every_one(asked: Path) -> None:
    mine, now = lease(asked, 2.0), time.monotonic()
    mine.renew(now)
    first = asked.read_text()
    mine.renew(now)
    mine.renew(now + 0.001)
    assert asked.read_text() == first
    time.sleep(0.11)  # a twentieth of the lease
    mine.renew(now)
    assert asked.read_text() == first, "nothing was heard"
    mine.renew(now + 0.001)
    assert asked.read_text() != first


def test_neither_lifetime_nor_what_is_allowed_is_exceeded_and_the_latter_may_be_raised(asked: Path) -> None:
    mine, now = lease(asked, 0.1, lifetime=50), time.monotonic()
    for n, (allowed, left) in enumerate(((3, 3), (20, 20), (1000, 50), (0, 0))):
        mine.allow(allowed)
        heard = now + 1000 + n  # as if the lease were no limit
        assert mine.renew(heard) == pytest.approx(now + left, abs=0.5)
        assert math.isclose(seconds_in(asked), left, abs_tol=1)
        time.sleep(0.01)


def test_what_is_taken_away_is_told_at_once(asked: Path) -> None:
    mine, now = lease(asked, 100.0), time.monotonic()
    mine.renew(now)
    mine.allow(7)
    mine.renew(now + 0.001)
    assert seconds_in(asked) == 7
    mine.allow(50)
    mine.renew(now + 0.002)
    assert seconds_in(asked) == 7  # more can wait


def test_without_a_guard_it_asks_nobody_and_a_missing_one_is_told_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    now = time.monotonic()
    assert lease("").renew(now) == pytest.approx(now + 10, abs=0.1)
    mine = lease(tmp_path / "none", 0.01)
    for n in range(3):
        mine.renew(now + n)
        time.sleep(0.001)
    assert capfd.readouterr().err.count("its lease cannot be extended") == 1
    assert not (tmp_path / "none").exists()
