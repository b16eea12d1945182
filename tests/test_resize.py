"""A running pool gets another size: nodes are added and retired, while calls run, and what was rented is ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import skypool as sky
from skypool import events
from skypool.errors import BudgetExceeded, LaunchError, NodeRetired, PoolClosed, UsageError
from skypool.model import Need
from skypool.testing import FakeCloud, Stock
from tests.conftest import eventually, processes_of
from tests.watched import Watched
from tests.work import add, nap, until, where


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[FakeCloud]:
    with FakeCloud(tmp_path / "cloud", [Stock()]) as made:
        yield made
        assert made.control.count() == 0
    eventually(lambda: not processes_of(str(tmp_path)), 30, "the end of all processes of the cloud")


def until_ended(pool: sky.ComputePool, *nodes: int) -> None:
    eventually(lambda: all(pool.nodes[node] == "ended" for node in nodes), what=f"the end of {nodes}")


def serving(pool: sky.ComputePool) -> list[int]:
    """The nodes that run calls for any node."""
    used = [node for node, word in pool.nodes.items() if word == "ready"]
    assert len(where() @ pool) == len(used)
    assert [pool.send(where(), node=node).result(60) for node in used] == used
    return used


def test_a_pool_grows_and_shrinks_while_it_works(cloud: FakeCloud, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with Watched(cloud) as pool:
        pool.resize(3)
        pool.wait_ready(timeout=60)
        assert dict(pool.nodes) == {0: "ready", 1: "ready", 2: "ready"}
        running = [pool.send(where(str(go)), node=node) for node in (0, 1)]
        pool.until_busy(0, 1)
        pool.resize(1)
        until_ended(pool, 2)
        assert dict(pool.nodes) == {0: "ready", 1: "leaving", 2: "ended"}
        assert cloud.control.count() == 2
        pool.wait_ready(1, timeout=1)
        assert [each.node for each in pool.heard(events.NodeRetirement)] == [2, 1]
        waiting = where() > pool
        go.touch()
        assert waiting.result(60) == 0
        assert [each.result(60) for each in running] == [0, 1]
        until_ended(pool, 1)
        assert cloud.control.count() == 1
        pool.resize((1, 2))
        pool.resize(2)
        pool.wait_ready(2, timeout=60)
        assert serving(pool) == [0, 3]
    lines = {line.node: line for line in pool.receipt.lines}
    assert sorted(lines) == [0, 1, 2, 3]
    assert all(line.ended for line in lines.values())
    assert lines[2].until < lines[1].until < lines[0].until
    assert pool.receipt.usd == pytest.approx(cloud.control.usd(pool.name), rel=0.2)


def test_a_retired_node_ends_its_calls_and_the_calls_that_wait_for_it_move_or_say_why(
    cloud: FakeCloud, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    with Watched(cloud, nodes=2) as pool:
        running = [pool.send(where(str(go)), node=node) for node in (0, 1)]
        free = [where() > pool for _ in range(6)]
        bound = pool.send(where(), node=0)
        pool.until_busy(0, 1)
        pool.retire(0)
        with pytest.raises(
            NodeRetired, match="where was lost: node 0 was retired, and the call was sent to node 0 only"
        ):
            bound.result(60)
        with pytest.raises(NodeRetired):
            pool.send(where(), node=0).result(60)
        pool.retire(0)
        assert dict(pool.nodes) == {0: "leaving", 1: "ready"}
        go.touch()
        assert [each.result(60) for each in running] == [0, 1]
        assert {each.result(60) for each in free} == {1}
        until_ended(pool, 0)
        assert cloud.control.count() == 1
        with pytest.raises(UsageError, match=r"node 0 of pool .* has ended already; its nodes are"):
            pool.retire(0)
        with pytest.raises(UsageError, match=r"node 1 is the last one .* pool\.stop\(\) ends the pool"):
            pool.retire(1)
        with pytest.raises(UsageError, match=r"node 5 of pool .* does not exist"):
            pool.retire(5)
        assert dict(pool.nodes) == {0: "ended", 1: "ready"}
    assert not pool.heard(events.CallRetried)


def test_a_request_counts_as_soon_as_retire_returns(cloud: FakeCloud) -> None:
    with Watched(cloud, nodes=2) as pool:
        pool.retire(1)
        calls = [where() > pool for _ in range(20)]
        with pytest.raises(UsageError, match=r"node 0 is the last one"):
            pool.retire(0)
        assert {call.result(60) for call in calls} == {0}


def test_a_pool_that_cannot_grow_says_so_goes_on_and_tries_again_when_asked(cloud: FakeCloud) -> None:
    with Watched(cloud) as pool:
        (offer,) = cloud.offers(Need())
        cloud.control.stock_out(offer)
        pool.resize(2)
        with pytest.raises(LaunchError, match=r"has 1 of 2 nodes ready and no more are launched; pool\.resize"):
            pool.wait_ready(timeout=60)
        assert add(1) >> pool == 2
        assert [each.text for each in pool.heard(events.Notice) if "no further machine" in each.text]
        cloud.control.stock_out(offer, 9)
        pool.resize(2)
        pool.wait_ready(timeout=60)
        assert len(where() @ pool) == 2
        with pytest.raises(UsageError, match=r"has at most 2 nodes, so 3 are never ready: .* pool\.resize\(3\)"):
            pool.wait_ready(3)
        for wrong in (0, -1, True, "2", (3, 2), (0, 2)):
            with pytest.raises(UsageError):
                pool.resize(wrong)  # type: ignore[arg-type]  # as users may
        with pytest.raises(UsageError):
            pool.wait_ready(0)


def test_a_launch_that_waits_for_stock_ends_when_its_nodes_are_not_wanted_any_more(cloud: FakeCloud) -> None:
    with Watched(cloud, wait="1h") as pool:
        (offer,) = cloud.offers(Need())
        cloud.control.stock_out(offer)
        pool.resize(2)
        eventually(lambda: pool.nodes.get(1) == "launching", what="the launch")
        with pytest.raises(TimeoutError, match=r"has 1 of 2 nodes ready after 0\.5 s \(node 1 is launching\)"):
            pool.wait_ready(timeout=0.5)
        pool.resize(1)
        cloud.control.stock_out(offer, 9)
        until_ended(pool, 1)
    assert len(pool.receipt.lines) == 1


def test_a_size_beyond_the_budget_is_refused_and_nothing_is_rented(tmp_path: Path) -> None:
    with FakeCloud(tmp_path / "cloud", [Stock(usd_per_hour=6.0)]) as cloud, Watched(cloud, budget=5) as pool:
        with pytest.raises(
            BudgetExceeded, match=r"the first 20:00 min of 3 nodes cost 6\.00 USD, and the budget is 5\.00"
        ):
            pool.resize(4)
        assert dict(pool.nodes) == {0: "ready"}
        pool.resize(2)
        pool.wait_ready(timeout=60)


def test_a_size_that_is_set_before_the_start_or_during_it_is_the_size_of_the_start(cloud: FakeCloud) -> None:
    pool = Watched(cloud, nodes=1)
    pool.resize(2)
    with pytest.raises(UsageError, match="was not started, so it has no node 0"):
        pool.retire(0)
    with ThreadPoolExecutor(1) as thread:
        cloud.control.delay(1.0, "create")
        starting = thread.submit(pool.start)
        eventually(lambda: cloud.control.calls("create"), what="the first order")
        pool.resize(3)
        pool.wait_ready(3, timeout=60)
        assert starting.result(60) is pool
        assert sorted(pool.nodes.values()) == ["ready"] * 3
    pool.stop()
    uses: list[Callable[[], object]] = [lambda: pool.resize(2), lambda: pool.retire(0), pool.wait_ready]
    for refused in uses:
        with pytest.raises(PoolClosed, match="has ended"):
            refused()


def test_who_waits_for_nodes_hears_of_the_end_of_the_pool(cloud: FakeCloud) -> None:
    pool = Watched(cloud).start()
    cloud.control.delay(3.0, "create")
    pool.resize(2)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(pool.wait_ready)
        eventually(lambda: pool.nodes.get(1) == "launching", what="the launch")
        pool.stop()
        with pytest.raises(PoolClosed):
            waiting.result(60)


def test_a_pool_whose_size_is_set_from_many_threads_has_the_last_one(cloud: FakeCloud) -> None:
    with Watched(cloud, nodes=2) as pool:
        sizes = [3, 1, 4, 2]
        threads = [threading.Thread(target=pool.resize, args=(n,)) for n in sizes]
        for thread in threads:
            thread.start()
        futures = [nap(0.01) > pool for _ in range(20)]
        for thread in threads:
            thread.join()
        pool.resize(2)
        pool.wait_ready(timeout=60)
        assert [each.result(60) for each in futures] == [0.01] * 20
        eventually(lambda: sum(word == "ready" for word in pool.nodes.values()) == 2, what="two nodes")
        eventually(lambda: cloud.control.count() == 2, what="the end of the others")


def test_nodes_of_this_machine_come_and_go() -> None:
    with sky.ComputePool(slots=1, console="off") as pool:
        pool.resize(2)
        pool.wait_ready(timeout=60)
        assert serving(pool) == [0, 1]
        pool.retire(0)
        until_ended(pool, 0)
        assert serving(pool) == [1]
        pool.resize(2)
        pool.wait_ready(timeout=60)
        assert serving(pool) == [1, 2]


def test_a_slice_is_added_and_retired_as_a_whole(tmp_path: Path) -> None:
    stock = [Stock("v5p-16", 3600.0, "v5p-16")]
    with FakeCloud(tmp_path / "cloud", stock) as cloud, Watched(cloud, accelerator="v5p-16") as pool:
        assert sorted(pool.nodes) == [0, 1]
        pool.resize(2)
        pool.wait_ready(2, timeout=60)
        assert serving(pool) == [0, 1, 2, 3]
        with pytest.raises(UsageError, match=r"node 1 is one of the nodes 0 to 1, .*: pool\.retire\(0\) retires all"):
            pool.retire(1)
        pool.retire(0)
        until_ended(pool, 0, 1)
        assert serving(pool) == [2, 3]


def test_a_pool_of_alternatives_with_different_numbers_of_hosts_stays_at_one(tmp_path: Path) -> None:
    stock = [Stock("v5p-16", 3600.0, "v5p-16"), Stock("gpu-8", 72.0, "H100:8")]
    with (
        FakeCloud(tmp_path / "cloud", stock) as cloud,
        Watched(cloud, accelerator=["v5p-16", "H100:8"]) as pool,
        pytest.raises(UsageError, match="with nodes=2, the size of the pool would depend on which accelerator"),
    ):
        pool.resize(2)


@pytest.mark.slow
def test_a_service_of_a_retired_node_ends_after_the_calls_of_the_node(cloud: FakeCloud, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with Watched(cloud, nodes=2) as pool:
        service = pool.service(sky.cmd("sleep", "1000"), node=0, restart=3)
        running = pool.send(where(str(go)), node=0)
        pool.until_busy(0)
        pool.retire(0)
        eventually(lambda: pool.nodes[0] == "leaving", what="the retirement")
        with pytest.raises(NodeRetired):
            pool.service(sky.cmd("sleep", "1000"), node=0)
        assert service.is_running
        go.touch()
        assert running.result(60) == 0
        until_ended(pool, 0)
        with pytest.raises(NodeRetired):
            service.result(60)
        assert service.restarts == 0


@pytest.mark.slow
def test_a_gang_on_a_retired_node_goes_on_and_no_other_starts_there(cloud: FakeCloud, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with Watched(cloud, nodes=3) as pool:
        running = pool.send(until(str(go)).with_options(procs=1), node=[0, 1])
        pool.until_busy(0, 1)
        pool.retire(1)
        eventually(lambda: pool.nodes[1] == "leaving", what="the retirement")
        for _ in range(2):
            assert add.with_options(procs=1)(1) >> pool == 2
        assert pool.nodes[1] == "leaving"
        go.touch()
        assert running.result(60) == [str(go)] * 2
        until_ended(pool, 1)
        assert add.with_options(procs=1)(1) @ pool == [2, 2]
