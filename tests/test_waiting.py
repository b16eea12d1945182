"""A pool that waits for what is out of stock: rents nothing meanwhile, and goes on where it comes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import events
from skypool.errors import CredentialsError, LaunchError, NoOffers, PoolClosed, ProviderError
from skypool.model import Need
from skypool.rental import planning, reaper
from skypool.rental.ledger import Ledger
from skypool.testing import FakeCloud, Stock
from tests.conftest import eventually

SCARCE = Stock("scarce", usd_per_hour=36.0, capacity=2, market="spot")


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCloud]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(reaper, "SETTLING", 0.5)
    monkeypatch.setattr(planning, "FIRST_PAUSE", 0.2)
    monkeypatch.setattr(planning, "LONGEST_PAUSE", 0.5)
    with FakeCloud(tmp_path / "cloud", [SCARCE]) as cloud:
        yield cloud
        assert cloud.count() == 0, cloud.control.alive()


def stocked(cloud: FakeCloud, left: int) -> None:
    cloud.control.stock_out(next(iter(cloud.offers(Need()))), left)


def waiting(cloud: FakeCloud, **more: Any) -> tuple[sky.ComputePool, list[str]]:
    """A pool, and what it notices."""
    terms: dict[str, Any] = {"market": "spot", "wait": "2m", "slots": 1, "console": "off", **more}
    pool = sky.ComputePool(cloud, **terms)
    told: list[str] = []
    pool.events.listen(lambda event: told.append(event.text) if isinstance(event, events.Notice) else None)
    return pool, told


def at_the_notice(then: Callable[[], None]) -> Callable[[events.Event], None]:
    """Does that when a shortage is told of."""

    def hear(event: events.Event) -> None:
        if isinstance(event, events.Notice) and "too few machines are in stock" in event.text:
            then()

    return hear


def test_what_is_out_of_stock_is_rented_when_it_comes(cloud: FakeCloud) -> None:
    stocked(cloud, 0)
    pool, told = waiting(cloud)
    pool.events.listen(at_the_notice(lambda: stocked(cloud, 1)))
    with pool:
        assert pool.submit(abs, -3).result() == 3
    (notice,) = [text for text in told if "too few machines are in stock; skypool keeps asking for 120 s" in text]
    assert "fake scarce north north-a: it is out of stock" in notice
    assert len(pool.receipt.lines) == 1


def test_machines_do_not_wait_for_others_at_the_users_cost(cloud: FakeCloud) -> None:
    stocked(cloud, 1)
    pool, _ = waiting(cloud, nodes=2)
    seen: list[int] = []

    def restock() -> None:
        seen.append(cloud.count("machine"))
        stocked(cloud, 2)

    pool.events.listen(at_the_notice(restock))
    with pool:
        assert sorted(pool.nodes) == [0, 1]
    assert seen == [0]
    assert [line.node for line in pool.receipt.lines] == [0, 0, 1]
    assert all(line.ended for line in pool.receipt.lines)


def test_when_the_wait_is_over_it_says_what_was_missing(cloud: FakeCloud) -> None:
    stocked(cloud, 1)
    pool, _ = waiting(cloud, nodes=2, wait=2)
    began = time.monotonic()
    with pytest.raises(LaunchError, match=r"none of 1 offers could be launched"):
        pool.start()
    assert time.monotonic() - began >= 2
    stocked(cloud, 0)
    with pytest.raises(NoOffers, match=r"a pool can wait for machines that are out of stock: ComputePool\(wait='1h'\)"):
        waiting(cloud, wait=None)[0].start()


def test_what_will_never_serve_is_not_waited_for(cloud: FakeCloud) -> None:
    for left in (2, 0):
        stocked(cloud, left)
        pool, told = waiting(cloud, accelerator="H100")
        with pytest.raises(NoOffers, match="H100"):
            pool.start()
        assert not told


def test_a_node_that_was_taken_back_is_replaced_when_there_is_stock_again(cloud: FakeCloud) -> None:
    pool, told = waiting(cloud, nodes=1)
    with pool:
        (first,) = cloud.instances(pool=pool.name)
        stocked(cloud, 0)
        cloud.control.interrupt(first, notice=0.5)
        eventually(lambda: any("too few machines are in stock" in text for text in told), 60)
        later = pool.submit(abs, -7)
        stocked(cloud, 1)
        assert later.result(60) == 7
    assert [line.ended for line in pool.receipt.lines] == [True, True]


@pytest.mark.parametrize("left", [0, 1], ids=["for the first", "for the rest"])
def test_another_thread_may_stop_a_pool_that_waits(cloud: FakeCloud, left: int) -> None:
    stocked(cloud, left)
    pool, told = waiting(cloud, nodes=2, wait="1h")
    with ThreadPoolExecutor(1) as thread:
        starting = thread.submit(pool.start)
        eventually(lambda: any("too few machines are in stock" in text for text in told), 30)
        pool.stop()
        with pytest.raises(PoolClosed, match="was stopped while it"):
            starting.result(30)
    assert pool.phase == "ended"
    assert {record.state(time.time()) for record in Ledger.here().pools()} <= {"ended"}


def test_a_task_that_is_cancelled_while_its_pool_waits_ends_the_wait(cloud: FakeCloud) -> None:
    stocked(cloud, 1)
    pool, told = waiting(cloud, nodes=2, wait="1h")

    async def work() -> None:
        async with pool:
            raise AssertionError("there is no second machine")

    async def cancelled() -> None:
        task = asyncio.create_task(work())
        while not told:
            await asyncio.sleep(0.05)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    assert pool.phase == "ended"


def test_a_provider_that_fails_for_a_moment_ends_no_wait(cloud: FakeCloud) -> None:
    stocked(cloud, 0)
    pool, _ = waiting(cloud)

    def fail() -> None:
        stocked(cloud, 1)
        cloud.control.refuse(ProviderError, "stock", times=2)

    pool.events.listen(at_the_notice(fail))
    with pool:
        assert pool.submit(abs, -3).result() == 3
    cloud.control.refuse(ProviderError, "stock")
    with pytest.raises(ProviderError, match="InternalError"):
        waiting(cloud)[0].start()


def test_credentials_that_run_out_end_the_wait(cloud: FakeCloud) -> None:
    stocked(cloud, 0)
    pool, _ = waiting(cloud)
    pool.events.listen(at_the_notice(lambda: cloud.control.refuse(CredentialsError, "stock")))
    with pytest.raises(CredentialsError):
        pool.start()


def test_a_pool_that_waits_may_be_ended_by_another_process(cloud: FakeCloud) -> None:
    stocked(cloud, 1)
    pool, _ = waiting(cloud, nodes=2, wait="1h", lease="6s", name="late")
    down = [sys.executable, "-c", "import sys; from skypool.cli import main; sys.exit(main())", "down", "late", "--yes"]
    ends: list[subprocess.Popen[bytes]] = []
    pool.events.listen(at_the_notice(lambda: ends.append(subprocess.Popen(down, stdout=subprocess.PIPE))))
    with pytest.raises(PoolClosed, match="by another process"):
        pool.start()
    for each in ends:
        each.communicate(timeout=60)
        assert each.returncode == 0


def test_ctrl_c_ends_the_wait(cloud: FakeCloud, tmp_path: Path) -> None:
    stocked(cloud, 1)
    program = textwrap.dedent(
        f"""
        import skypool as sky
        from skypool.testing import FakeCloud
        sky.ComputePool(FakeCloud({str(cloud.state)!r}), nodes=2, market="spot", wait="1h", console="plain").start()
        """
    )
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, env=os.environ) as client:
        assert client.stderr is not None
        for line in client.stderr:
            if "too few machines are in stock" in line:
                break
        client.send_signal(signal.SIGINT)
        said = client.stderr.read()
        assert client.wait(30) != 0
    assert "KeyboardInterrupt" in said
    assert cloud.count() == 0
    assert {record.state(time.time()) for record in Ledger.here().pools()} == {"ended"}
