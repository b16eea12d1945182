"""Interruptions: machines whose provider takes them back, with notice and without, under calls that run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import runpy
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

import skypool as sky
from skypool import events
from skypool.errors import ConnectionLost, ErrorGroup, NoAnswer, NodeInterrupted
from skypool.event_loop import Loop
from skypool.model import Access, Instance, Offer
from skypool.pool import states as life
from skypool.pool.departures import Departures
from skypool.testing import FakeCloud
from skypool.wire import codec
from tests.conftest import eventually, processes_of
from tests.supplies import supply_of
from tests.test_link import cut, link_of
from tests.watched import OnSpot
from tests.work import count, note, poll, total, where


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[FakeCloud]:
    with FakeCloud(tmp_path / "cloud") as made:
        yield made
    eventually(lambda: not processes_of(str(tmp_path)), 30, "the end of all processes of the cloud")
    assert made.control.count() == 0


def ran(log: Path) -> Counter[int]:
    return Counter(int(line) for line in log.read_text().split())


# --- with notice ---------------------------------------------------------------------------------------------


def test_a_node_with_notice_ends_its_calls_and_gets_no_new_ones(cloud: FakeCloud, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with OnSpot(cloud, nodes=2) as pool:
        running = [pool.send(where(str(go)), node=node) for node in (0, 1)]
        pool.until_busy(0, 1)  # else the notice may come before they begin
        waiting = pool.send(where(), node=0)
        at = pool.notify(0)
        with pytest.raises(
            NodeInterrupted, match="where was lost: the provider took node 0 back, and the call was sent to"
        ):
            waiting.result(60)
        with pytest.raises(NodeInterrupted, match="to node 0 only"):
            pool.send(where(), node=0).result(60)
        eventually(lambda: pool.nodes.get(2) == "ready", what="its replacement")
        assert dict(pool.nodes) == {0: "leaving", 1: "ready", 2: "ready"}
        assert {where() >> pool for _ in range(3)} == {2}
        assert not any(future.done() for future in running)
        go.touch()
        assert [future.result(60) for future in running] == [0, 1]
        eventually(lambda: pool.nodes[0] == "ended", what="the end of a node without calls")
        assert where() @ pool == [0, 1]  # nodes in the broadcast
        assert sorted(pool.nodes) == [0, 1, 2]
    assert [(e.node, e.at) for e in pool.heard(events.NodeInterruption)] == [(0, pytest.approx(at, abs=1))]
    assert not pool.heard(events.CallRetried)


def test_calls_that_wait_on_a_node_with_notice_move_and_each_runs_once(cloud: FakeCloud, tmp_path: Path) -> None:
    log = tmp_path / "ran"
    with OnSpot(cloud, nodes=2) as pool:
        results = pool.map(note, range(300), [str(log)] * 300)
        first = [next(results) for _ in range(30)]
        pool.notify(1)
        assert [*first, *results] == [n * n for n in range(300)]
        eventually(lambda: pool.nodes[1] == "ended", what="the end of a node without calls")
    assert ran(log) == Counter(range(300))
    assert not pool.heard(events.CallRetried)
    assert not pool.heard(events.CallFailed)


def test_calls_on_a_machine_that_goes_after_its_notice_run_again_if_they_can(cloud: FakeCloud, tmp_path: Path) -> None:
    go, feeding = tmp_path / "go", threading.Event()

    def numbers() -> Iterator[int]:
        yield 1
        feeding.set()
        eventually(go.exists, 30)
        yield 2

    with OnSpot(cloud, nodes=1, slots=4) as pool:
        free = pool.send(where(str(go)))
        bound = pool.send(where(str(go)), node=0)
        fed = total(numbers()) > pool
        stream = count(5000, 0.01) >> pool
        assert next(stream) == 0
        assert feeding.wait(10)
        pool.notify(0)
        eventually(lambda: pool.nodes.get(1) == "ready", what="its replacement")
        pool.take(0)
        go.touch()
        assert free.result(20) == 1
        with pytest.raises(
            NodeInterrupted, match="where was lost: the provider took node 0 back, and the call was sent to"
        ):
            bound.result(60)
        with pytest.raises(NodeInterrupted, match=r"had yielded \d+ items, which cannot be taken back"):
            list(stream)
        with pytest.raises(
            NodeInterrupted, match="the call may have read items of an iterator argument, which cannot be read again"
        ):
            fed.result(60)
    (again,) = pool.heard(events.CallRetried)
    assert (again.call, again.node, again.attempt) == ("where", 0, 2)
    assert again.reason == "the provider took node 0 back"


@pytest.mark.slow
def test_every_call_gives_one_result_while_machines_come_and_go(cloud: FakeCloud, tmp_path: Path) -> None:
    log = tmp_path / "ran"
    with OnSpot(cloud, nodes=2, slots=2) as pool:
        results = pool.map(note, range(600), [str(log)] * 600)
        got = [next(results) for _ in range(50)]
        for node in (0, 1):
            pool.notify(node)
            eventually(lambda node=node: pool.nodes.get(node + 2) == "ready", what="its replacement")  # type: ignore[misc]
            if pool.nodes[node] == "leaving":
                pool.take(node)
        assert [*got, *results] == [n * n for n in range(600)]
        assert sorted(pool.nodes) == [0, 1, 2, 3]
    again = len(pool.heard(events.CallRetried))
    counts = ran(log)
    assert set(counts) == set(range(600))
    assert sum(counts.values()) <= 600 + again
    assert len(pool.heard(events.NodeInterruption)) == 2


def test_a_part_of_a_broadcast_is_lost_with_its_node_however_often_it_may_run_again(
    cloud: FakeCloud, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    with OnSpot(cloud, nodes=2) as pool:

        def take_back() -> None:
            pool.until_busy()
            pool.notify(1)
            eventually(lambda: pool.nodes.get(2) == "ready", 60, "a replacement")
            pool.take(1)
            eventually(lambda: pool.nodes.get(1) == "ended", 60, "the end of node 1")
            go.touch()

        with ThreadPoolExecutor(1) as provider:
            taken = provider.submit(take_back)
            with pytest.raises(NodeInterrupted, match="the provider took node 1 back"):
                where.with_options(retries=1)(str(go)) @ pool
            taken.result(60)
    assert pool.heard(events.CallRetried) == []


def test_a_notice_outlives_the_connection_that_was_to_carry_it(cloud: FakeCloud, tmp_path: Path) -> None:
    with OnSpot(cloud) as pool:
        running = pool.send(where(str(tmp_path / "go")))
        pool.until_busy()
        cut(link_of(pool))
        pool.notify(0)
        eventually(lambda: pool.heard(events.NodeInterruption), what="the notice")
        assert pool.heard(events.LinkDown)
        (tmp_path / "go").touch()
        assert running.result(60) == 0
    assert len(pool.heard(events.NodeInterruption)) == 1


@dataclass(frozen=True)
class OddWatch(FakeCloud):
    """A cloud whose watch is this program."""

    source: str = ""

    def access(self, instance: Instance) -> Access:
        return replace(super().access(instance), watch=self.source)


def test_a_watch_that_fails_is_started_again(tmp_path: Path) -> None:
    failing = f"""
import os, sys, time
with open({str(tmp_path / "starts")!r}, "a") as file:
    file.write("x")
starts = os.path.getsize({str(tmp_path / "starts")!r})
if starts < 3:
    print("nonsense" if starts < 2 else "inf")
    sys.exit(1)
if starts > 3:  # on the machine that replaces this one
    time.sleep(99)
print({time.time() + 99})
"""
    with OddWatch(tmp_path / "cloud", source=failing) as cloud, OnSpot(cloud) as pool:
        eventually(lambda: pool.heard(events.NodeInterruption), what="the notice")
        eventually(lambda: pool.nodes.get(1) == "ready", 30, what="its replacement")
        eventually(lambda: (tmp_path / "starts").read_text() == "xxxx", what="its watch")


# --- without notice ------------------------------------------------------------------------------------------


def test_a_spot_machine_that_its_provider_no_longer_has_was_taken_back(cloud: FakeCloud, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with OnSpot(cloud, liveness=5) as pool:
        running = pool.send(where(str(go)))
        pool.until_busy()
        pool.take(0)
        go.touch()
        assert running.result(20) == 1
    assert [e.reason for e in pool.heard(events.CallRetried)] == ["the provider took node 0 back"]
    assert [e.node for e in pool.heard(events.NodeInterruption)] == [0]


def test_a_machine_on_demand_that_goes_loses_its_calls(cloud: FakeCloud, tmp_path: Path) -> None:
    with OnSpot(cloud, market="on-demand", liveness=5) as pool:
        running = pool.send(where(str(tmp_path / "go")))
        pool.until_busy()
        pool.take(0)
        with pytest.raises(sky.ConnectionLost, match="where was lost with node 0"):
            running.result(20)
    assert not pool.heard(events.NodeInterruption)


class Silent(FakeCloud):
    """It does not say what it has."""

    why: ClassVar[Exception]

    def instances(self, *, pool: str | None = None) -> list[Instance]:
        raise self.why


@pytest.mark.parametrize(
    "why",
    [
        ErrorGroup("2 regions or zones could not be queried", [NoAnswer("here"), NoAnswer("there")]),
        KeyError("no such field now"),
    ],
    ids=["this machine is offline", "its driver has a mistake"],
)
def test_a_lost_node_is_given_up_also_while_its_provider_says_nothing(cloud: FakeCloud, why: Exception) -> None:
    Silent.why = why
    heard: list[life.Event] = []
    offer, error = Offer("fake", "small", market="spot"), ConnectionLost("nothing is heard of it", 0)
    node = life.Node(0, life.Phase.READY, Instance("fake", "m-1", "train", 0, offer=offer))
    home: Any = SimpleNamespace(state=life.Pool(1, 1, nodes={0: node}), apply=heard.append)
    supply = supply_of(sky.ComputePool(Silent(cloud.state), name="train", console="off"))
    others: list[Any] = [supply, None, None, None, None]
    asyncio.run(Departures(home, *others).lost(0, error))
    assert heard == [life.Failed(0, error)]


# --- what a function may do about it -------------------------------------------------------------------------

goes: list[float] = []


def save(interruption: sky.Interruption) -> None:
    print(f"saving in process {os.getpid()}, {interruption.left > 50}")
    time.sleep(0.2)
    goes.append(interruption.at)


def forget(interruption: sky.Interruption) -> None:
    """Nothing is worth keeping."""


@sky.compute(on_interruption=save)
def train() -> tuple[int, float]:
    while not goes:  # the same global there: both functions travel together
        time.sleep(0.01)
    return os.getpid(), goes[0]


@pytest.mark.slow
def test_on_interruption_runs_once_beside_each_running_call_and_a_call_waits_for_it(cloud: FakeCloud) -> None:
    with OnSpot(cloud, slots=2) as pool:
        for _ in range(2):
            assert (where() >> pool) == 0
        running = [train() > pool for _ in range(2)]
        pool.until_busy(calls=2)
        at = pool.notify(0)
        results = [future.result(60) for future in running]
    assert [got for _, got in results] == pytest.approx([at, at], abs=1)
    assert len({pid for pid, _ in results}) == 2
    for pid, _ in results:
        assert pool.printed.count(f"saving in process {pid}, True") == 1


def test_what_on_interruption_raises_is_told_and_the_call_goes_on(cloud: FakeCloud, tmp_path: Path) -> None:
    def fail(interruption: sky.Interruption) -> None:
        raise OSError("no bucket")

    function = sky.compute(on_interruption=fail)(where.function)
    with OnSpot(cloud) as pool:
        running = pool.send(function(str(tmp_path / "go")))
        pool.until_busy()
        pool.notify(0)
        eventually(lambda: "OSError: no bucket" in pool.printed, what="what it raised")
        assert "on_interruption=" in pool.printed
        assert "in fail" in pool.printed
        (tmp_path / "go").touch()
        assert running.result(60) == 0
    assert not pool.heard(events.CallFailed)


def test_a_loop_may_ask_whether_its_machine_goes(cloud: FakeCloud) -> None:
    assert sky.interruption() is None
    with OnSpot(cloud) as pool:
        running = poll() > pool
        pool.until_busy()
        at = pool.notify(0)
        assert running.result(60) == pytest.approx(at, abs=1)


def test_on_interruption_is_an_option_of_a_call_and_its_code_travels_with_it() -> None:
    plain, attended = where(), where().with_options(on_interruption=save)
    plain.sent = attended.sent = True
    assert plain.function.code().key != attended.function.code().key
    constant = where.with_options(on_interruption=forget)
    assert constant.code() is constant.code()
    assert codec.loads(constant.code().buffers[:-1]).on_interruption.__name__ == "forget"


@contextlib.contextmanager
def standing() -> Iterator[None]:
    """The engine's thread decides nothing meanwhile; a thread that waits for its call reads what the nodes say."""
    stands, go_on = threading.Event(), threading.Event()

    def stand() -> None:
        stands.set()
        go_on.wait(60)

    Loop.shared().loop.call_soon_threadsafe(stand)
    assert stands.wait(30)
    try:
        yield
    finally:
        go_on.set()


def test_a_call_sent_after_one_that_ended_for_the_notice_goes_to_another_node(cloud: FakeCloud) -> None:
    is_sent = threading.Event()
    with OnSpot(cloud) as pool:

        def take_back() -> None:
            pool.until_busy()
            with standing():
                pool.notify(0)
                is_sent.wait(30)

        provider = threading.Thread(target=take_back)
        provider.start()
        try:
            assert poll() >> pool
            after = where() > pool
        finally:
            is_sent.set()
            provider.join()
        assert after.result(60) == 1
        eventually(lambda: pool.nodes[0] == "ended", what="the end of a node without calls")
    assert [e.node for e in pool.heard(events.NodeInterruption)] == [0]


def test_a_notice_that_came_while_the_link_was_down_is_heard_before_the_outcomes(
    cloud: FakeCloud, tmp_path: Path
) -> None:
    ended = tmp_path / "ended"

    @sky.compute
    def leave(path: str) -> None:
        while sky.interruption() is None:
            time.sleep(0.01)
        Path(path).touch()

    with OnSpot(cloud) as pool:
        leaving = leave(str(ended)) > pool
        pool.until_busy()
        cut(link_of(pool))
        with standing():  # so that it does not connect again
            pool.notify(0)
            eventually(ended.exists, what="the end of the call")
        leaving.result(60)
        assert where() >> pool == 1
    assert pool.heard(events.LinkDown)


@pytest.mark.parametrize("wrong", [3, "save", lambda: None, lambda a, b: None])
def test_an_on_interruption_that_cannot_be_called_so_is_refused(wrong: Any) -> None:
    with pytest.raises(
        sky.UsageError, match="on_interruption must be a function that takes one argument, an Interruption, not"
    ):
        sky.compute(on_interruption=wrong)


def test_the_example_loses_no_step_when_its_machine_is_taken_back(cloud: FakeCloud) -> None:
    root = Path(__file__).parent.parent
    text = (root / "examples" / "06_spot.py").read_text()
    (shown,) = re.findall(r"```python\n(import time\n.*?)```", (root / "docs" / "spot.md").read_text(), re.DOTALL)
    assert text.endswith(shown)
    example = runpy.run_path(str(root / "examples" / "06_spot.py"))
    train, steps = example["train"], example["STEPS"]
    with OnSpot(cloud) as pool:
        first = train(0.0, 0) > pool
        pool.until_busy()
        pool.notify(0)
        weight, step = first.result(60)
        assert 0 < step < steps
        assert train(weight, step) >> pool == train.local(0.0, 0)
    assert [e.node for e in pool.heard(events.NodeInterruption)] == [0]
