"""A call on all nodes of a pool has all of its nodes, also while one of them is being replaced."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import events
from skypool.calls.dispatch import Dispatch
from skypool.calls.pending_calls import PendingCall
from skypool.errors import LaunchError
from skypool.event_loop import Loop
from skypool.model import Need
from skypool.pool.network import NetworkCheck
from skypool.testing import FakeCloud
from tests.conftest import eventually, processes_of
from tests.watched import OnSpot, Watched
from tests.work import where

BOTH, ONE = [0, 1], [0]
"""What functions return that return their number among the nodes of their call."""


@sky.compute(procs=1, output="silent")
def rank() -> int:
    return sky.instance_info().node


def numbers() -> Iterator[int]:
    yield sky.instance_info().node


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[FakeCloud]:
    with FakeCloud(tmp_path / "cloud") as made:
        yield made
    eventually(lambda: not processes_of(str(tmp_path)), 30, "the end of all processes of the cloud")


def told(pool: Watched, words: str) -> list[str]:
    return [each.text for each in pool.heard(events.Notice) if words in each.text]


def test_after_a_notice_a_call_on_all_nodes_waits_for_the_replacement_and_says_for_which(cloud: FakeCloud) -> None:
    with OnSpot(cloud, nodes=2) as pool:
        pool.notify(0)
        eventually(lambda: pool.nodes[0] != "ready", 30, "the notice")
        assert where() @ pool == BOTH
        assert told(pool, "where waits for 1 of 2 nodes: node 2 is ")
        pool.notify(1)
        eventually(lambda: pool.nodes[1] != "ready", 30, "the notice")
        assert rank() @ pool == BOTH


def test_a_notice_is_heard_by_a_call_that_is_sent_at_once(cloud: FakeCloud) -> None:
    with OnSpot(cloud, nodes=2) as pool:
        engine: Any = pool._engine
        at = pool.notify(0)
        engine.departures.on_notice(0, at)  # in the thread that reads it; the engine's own hears of it later
        assert rank() @ pool == BOTH


@sky.compute(procs=1, output="silent", retries=1)
def dies_once(path: str) -> None:
    """Of the first run, rank 1 returns, and rank 0 dies when there is such a file."""
    info = sky.instance_info()
    while info.attempt == 1 and info.rank == 0:
        if os.path.exists(path):
            os._exit(3)
        time.sleep(0.01)


def test_a_gang_that_waits_to_run_again_waits_for_the_replacement_of_a_node_that_is_taken(
    cloud: FakeCloud, tmp_path: Path
) -> None:
    with OnSpot(cloud, nodes=2) as pool:
        engine: Any = pool._engine
        gang: Any = pool.send(dies_once(str(tmp_path / "now")), node="all")
        eventually(lambda: gang.parts and gang.parts[1].done(), 30, "the end of rank 1")
        pool.take(1)
        eventually(lambda: pool.heard(events.LinkDown), 30, "the loss of its connection")
        (tmp_path / "now").touch()
        eventually(lambda: pool.heard(events.GangFailed), 30, "the death of rank 0")
        heard = threading.Event()
        Loop.shared().loop.call_soon_threadsafe(heard.wait, 10)
        engine.departures.on_notice(0, time.time() + 60)  # in the thread that reads it, before the engine's own hears
        heard.set()
        pool.notify(0)
        eventually(lambda: 2 in pool.ready(), 30, "the replacement")
        assert not gang.done(), "it waits until node 1 is back or replaced"
        assert [each.again for each in pool.heard(events.GangFailed)] == [True]
        gang.cancel()


def test_a_call_that_names_nodes_and_a_call_for_one_node_wait_for_no_other(cloud: FakeCloud) -> None:
    with OnSpot(cloud, nodes=2) as pool:
        cloud.control.next_machines(boots=30)
        pool.notify(0)
        eventually(lambda: pool.nodes[0] != "ready", 30, "the notice")
        assert where() @ pool[1] == ONE
        assert where() >> pool == 1
        assert rank() >> pool == 0
        assert rank() @ pool[[1]] == ONE
        assert not told(pool, "waits for")


def test_min_nodes_lets_a_gang_run_on_fewer_when_the_time_to_wait_is_over(cloud: FakeCloud) -> None:
    with OnSpot(cloud, nodes=2) as pool:
        with pytest.raises(sky.UsageError, match="min_nodes=3 is more than the 2 nodes on which rank is to run"):
            rank().with_options(min_nodes=3) @ pool
        pool.notify(0)
        eventually(lambda: pool.nodes[0] != "ready", 30, "the notice")
        assert rank().with_options(min_nodes=1) @ pool == ONE
        assert told(pool, "rank runs on 1 of 2 nodes (min_nodes=1)")
        assert rank().with_options(min_nodes=2) @ pool == BOTH


def test_min_nodes_waits_for_the_time_of_the_pool(cloud: FakeCloud) -> None:
    with OnSpot(cloud, nodes=2, wait=60) as pool:
        pool.notify(0)
        eventually(lambda: pool.nodes[0] != "ready", 30, "the notice")
        assert rank().with_options(min_nodes=1) @ pool == BOTH


def test_without_a_replacement_a_call_on_all_nodes_fails_and_says_what_to_do(cloud: FakeCloud) -> None:
    with OnSpot(cloud, nodes=2) as pool:
        for offer in cloud.offers(Need()):
            cloud.control.stock_out(offer, 0)
        pool.notify(0)
        eventually(lambda: told(pool, "no further machine could be rented"), 30, "the end of the search")
        for function in (where, rank):
            with pytest.raises(LaunchError, match=r"needs 2 nodes and was not run on 1; .*resize\(2\)") as caught:
                function() @ pool
            assert "pool.resize(1) does without the others" in str(caught.value)
        assert rank().with_options(min_nodes=1) @ pool == ONE
        pool.resize(1)
        assert where() @ pool == ONE
        assert rank() @ pool == ONE


def test_a_pool_that_was_made_smaller_or_may_grow_waits_for_nothing() -> None:
    with sky.ComputePool(nodes=2, slots=1, console="off") as pool:
        pool.retire(0)
        assert where() @ pool == ONE
        assert rank() @ pool == ONE
    with sky.ComputePool(nodes=(1, 3), slots=1, console="off") as pool:
        assert where() @ pool == ONE


# --- nodes that leave while a call is on its way to them -----------------------------------------------------


def leaves(pool: sky.ComputePool, node: int) -> Callable[[], None]:
    """Return a function that has a node leave the pool when it is called first."""

    def retire() -> None:
        if pool.nodes[node] == "ready":
            pool.retire(node)
            eventually(lambda: pool.nodes[node] == "ended", 30, "the end of the node")

    return retire


def test_nodes_are_chosen_again_if_one_leaves_before_the_network_check(monkeypatch: pytest.MonkeyPatch) -> None:
    with sky.ComputePool(nodes=3, slots=1, console="off") as pool:
        ensure, leave = NetworkCheck.ensure, leaves(pool, 1)

        def ensure_late(self: NetworkCheck, nodes: Collection[int]) -> Any:
            leave()
            return ensure(self, nodes)

        monkeypatch.setattr(NetworkCheck, "ensure", ensure_late)
        assert rank() @ pool == BOTH


@pytest.mark.parametrize("kind", ["values", "streams", "future"])
def test_nodes_are_chosen_again_if_one_leaves_before_the_parts_are_sent(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with sky.ComputePool(nodes=2, slots=1, console="off") as pool:
        submit, leave = Dispatch.submit_together, leaves(pool, 0)
        sent: list[Sequence[int]] = []

        def submit_late(self: Dispatch, parts: Sequence[PendingCall]) -> bool:
            leave()
            sent.append([part.node for part in parts if isinstance(part.node, int)])
            return submit(self, parts)

        monkeypatch.setattr(Dispatch, "submit_together", submit_late)
        if kind == "values":
            assert where() @ pool == ONE
        elif kind == "streams":
            assert [list(each) for each in sky.compute(numbers)() @ pool] == [[0]]
        else:
            assert pool.send(where(), node="all").result(60) == ONE
        assert sent == [[0, 1], [1]]
