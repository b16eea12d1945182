"""Accelerators that come as slices of several hosts: each host is a node, and a slice is rented and ended whole."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import skypool as sky
from skypool import events
from skypool.accelerators import TPUv5p_8, TPUv5p_16
from skypool.errors import (
    BootstrapError,
    BudgetExceeded,
    CapacityError,
    ConnectionLost,
    LaunchError,
    LifetimeExceeded,
    NodeInterrupted,
    NoOffers,
    UsageError,
)
from skypool.model import Need
from skypool.rental.ledger import Ledger
from skypool.testing import FakeCloud, Stock
from tests.conftest import eventually, processes_of
from tests.watched import Watched
from tests.work import info, outlast

V5P_16 = Stock("v5p-16", 3600.0, "v5p-16")
STOCK = (V5P_16, Stock("v5p-16", 1440.0, "v5p-16", market="spot"), Stock("gpu-8", 7200.0, "H100:8"))
ROOT = Path(__file__).parent.parent


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCloud]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with FakeCloud(tmp_path / "cloud", STOCK) as made:
        yield made
        assert made.count() == 0, made.control.alive()
    eventually(lambda: not processes_of(str(tmp_path)), 30, "the end of all processes of the cloud")


class Rented(Watched):
    """A pool of slices."""

    settings: ClassVar[dict[str, Any]] = {"accelerator": "v5p-16"}


def creates(cloud: FakeCloud) -> int:
    return len(cloud.control.calls("create"))


# --- a pool of slices ----------------------------------------------------------------------------------------


def test_each_host_of_each_slice_is_a_node_and_a_slice_costs_once(cloud: FakeCloud) -> None:
    with Rented(cloud, nodes=2, accelerator=TPUv5p_16(), slots=None, max_usd_per_hour=3600) as pool:
        assert pool.nodes == dict.fromkeys(range(4), "ready")
        infos = info() @ pool
        assert [(each.node, each.nodes, each.slice, each.host, each.hosts) for each in infos] == [
            (0, 4, 0, 0, 2),
            (1, 4, 0, 1, 2),
            (2, 4, 1, 0, 2),
            (3, 4, 1, 1, 2),
        ]
        assert {(each.chips, each.slice_chips) for each in infos} == {(4, 8)}
        assert {(each.slots, len(each.accelerators)) for each in infos} == {(1, 4)}
        there = pool.machines()
        assert there[0].slice == there[1].slice != there[2].slice == there[3].slice
        assert creates(cloud) == 2
        assert pool.receipt.usd_per_hour == pytest.approx(2 * 3600)
    (ends,) = cloud.control.calls("delete")
    assert sorted(ends.about["ids"]) == sorted(each.id for each in there.values()), "all of it at once"
    assert [(each.node, each.ended) for each in pool.receipt.lines] == [(node, True) for node in range(4)]
    assert pool.receipt.usd == pytest.approx(cloud.control.usd(pool.name), rel=0.3)


@sky.compute
def shown() -> str:
    return ",".join(sorted(each for each in os.environ if each.startswith("TPU_")))


@pytest.mark.slow
def test_a_call_sees_its_slice_as_the_machine_does_unless_hosts_are_cut_into_slots(cloud: FakeCloud) -> None:
    with Rented(cloud, slots=None) as pool:
        assert shown() @ pool == ["", ""]
    with Rented(cloud, slots=2) as pool:
        assert shown() @ pool == ["TPU_CHIPS_PER_PROCESS_BOUNDS,TPU_PROCESS_BOUNDS,TPU_VISIBLE_CHIPS"] * 2
        assert {len(each.accelerators) for each in info() @ pool} == {2}


def test_a_call_outside_of_a_slice_is_on_a_slice_of_one(cloud: FakeCloud) -> None:
    with Rented(cloud, accelerator="H100:8", nodes=2) as pool:
        infos = info() @ pool
    assert [(each.slice, each.host, each.hosts, each.chips, each.slice_chips) for each in infos] == [
        (0, 0, 1, 0, 0),
        (1, 0, 1, 0, 0),
    ]
    assert (sky.instance_info().slice, sky.instance_info().hosts) == (0, 1)


def test_a_slice_is_ready_when_all_its_hosts_are(cloud: FakeCloud) -> None:
    cloud.control.next_machines()
    cloud.control.next_machines(boots=3.0)
    with Rented(cloud) as pool:
        ready = [each.time for each in pool.told if isinstance(each, events.NodePhase) and each.phase == "ready"]
        assert len(ready) == 2
        assert ready[1] - ready[0] < 0.5, "both got work at the same time"


def test_only_whole_slices_are_rented_and_the_rest_is_found_elsewhere(cloud: FakeCloud) -> None:
    cloud.control.stock_out(next(each for each in cloud.offers(Need()) if each.instance_type == "v5p-16"), 1)
    with Rented(cloud, nodes=2, market="cheapest", order_by="cheapest") as pool:
        offers = {node: each.slice for node, each in pool.machines().items()}
        assert sorted(offers) == [0, 1, 2, 3]
    with pytest.raises(
        LaunchError, match="none of 1 offers could be launched for all nodes; 2 machines were launched and then ended"
    ):
        Rented(cloud, nodes=2).start()


def test_a_pool_grows_by_a_slice(cloud: FakeCloud, tmp_path: Path) -> None:
    go, log = tmp_path / "go", tmp_path / "log"
    with Rented(cloud, nodes=(1, 2)) as pool:
        calls = [pool.send(outlast(str(go), str(log))) for _ in range(4)]
        pool.until_ready(0, 1, 2, 3)
        go.touch()
        assert sorted(each.result(20) for each in calls) == [0, 1, 2, 3]
        assert creates(cloud) == 2


# --- a slice goes as a whole ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_host_that_is_lost_costs_its_slice_and_no_other(cloud: FakeCloud, tmp_path: Path) -> None:
    go, log = tmp_path / "go", tmp_path / "log"
    with Rented(cloud, nodes=2, liveness=5.0) as pool:
        before = pool.machines()
        again = outlast.with_options(retries=1)
        calls = [pool.send(again(str(go), str(log))) for _ in range(4)]
        bound = pool.send(info(), node=1)
        pool.until_busy(0, 1, 2, 3)
        cloud.control.kill(before[0])
        with pytest.raises(ConnectionLost, match=r"node 1 was ended because node 0 of the same slice .* was lost"):
            bound.result(30)
        pool.until_ready(2, 3, 4, 5)
        go.touch()
        assert sorted(each.result(20) for each in calls) == [2, 3, 4, 5]
        after = pool.machines()
        assert [after[2].id, after[3].id] == [before[2].id, before[3].id]
        assert after[4].slice == after[5].slice not in {each.slice for each in before.values()}
        assert [(each.node, each.slice, each.host) for each in info() @ pool] == [
            (0, 0, 0),
            (1, 0, 1),
            (2, 1, 0),
            (3, 1, 1),
        ]
    assert sorted(log.read_text().split()) == ["0", "1", "2", "3", "4", "5"], "each call ran once more at most"
    assert creates(cloud) == 3


def test_calls_without_retries_end_with_the_slice(cloud: FakeCloud, tmp_path: Path) -> None:
    with Rented(cloud, liveness=5.0) as pool:
        calls = [pool.send(outlast(str(tmp_path / "never"), str(tmp_path / "log"))) for _ in range(2)]
        pool.until_busy(0, 1)
        cloud.control.kill(pool.machines()[1])
        for each in calls:
            with pytest.raises(ConnectionLost):
                each.result(30)
        pool.until_ready(2, 3)


def test_a_host_that_is_not_what_was_bought_costs_its_slice(cloud: FakeCloud) -> None:
    cloud.control.next_machines()
    cloud.control.next_machines(has="H100")
    with Rented(cloud) as pool:
        eventually(lambda: pool.nodes == {0: "ended", 1: "ended", 2: "ready", 3: "ready"}, 30, "the end of the first")
        assert cloud.count("machine") == 2
    assert creates(cloud) == 2


def test_slices_that_fail_alike_end_the_pool_with_one_reason(cloud: FakeCloud) -> None:
    cloud.control.next_machines(4, has="H100")
    with pytest.raises(BootstrapError, match="is not what was asked for: v5p-16 was bought, and it has H100") as failed:
        Rented(cloud).start()
    assert getattr(failed.value, "__notes__", []) == []
    assert creates(cloud) == 2


def test_a_slice_that_is_taken_back_drains_as_a_whole(cloud: FakeCloud, tmp_path: Path) -> None:
    go, log = tmp_path / "go", tmp_path / "log"
    with Rented(cloud, market="spot") as pool:
        running = pool.send(outlast(str(go), str(log)), node=1)
        pool.until_busy(1)
        cloud.control.interrupt(pool.machines()[0])
        eventually(lambda: pool.nodes.get(3) == "ready", what="the next slice")
        assert pool.nodes == {0: "leaving", 1: "leaving", 2: "ready", 3: "ready"}
        with pytest.raises(NodeInterrupted):
            pool.send(info(), node=0).result(60)
        assert [each.host for each in info() @ pool] == [0, 1]
        go.touch()
        assert running.result(20) == 1
        eventually(lambda: cloud.count("machine") == 2, what="the end of the slice that nobody uses any more")
    assert len([each for each in pool.told if isinstance(each, events.NodeInterruption)]) == 2


def test_a_spot_slice_that_vanishes_runs_its_calls_again(cloud: FakeCloud, tmp_path: Path) -> None:
    go, log = tmp_path / "go", tmp_path / "log"
    with Rented(cloud, market="spot", liveness=5.0) as pool:
        calls = [pool.send(outlast(str(go), str(log))) for _ in range(2)]
        pool.until_busy(0, 1)
        for each in pool.machines().values():
            cloud.control.kill(each)
        pool.until_ready(2, 3)
        go.touch()
        assert sorted(each.result(20) for each in calls) == [2, 3]
    assert creates(cloud) == 2


# --- which offers --------------------------------------------------------------------------------------------


def test_accelerators_of_one_host_each_may_be_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with FakeCloud(
        tmp_path / "cloud", [Stock("tpu", 2.0, "v5p-8", capacity=1), Stock("gpu-8", 20.0, "H100:8")]
    ) as cloud:
        with Rented(cloud, accelerator=["H100:8", TPUv5p_8()], nodes=2) as pool:
            assert [(each.host, each.hosts, each.slice_chips) for each in info() @ pool] == [(0, 1, 4), (0, 1, 0)]


def test_one_of_either_has_as_many_nodes_as_come_of_it(cloud: FakeCloud) -> None:
    either = ["H100:8", "v5p-16"]
    with Rented(cloud, accelerator=either) as pool:
        assert pool.ready() == [0, 1]
    cloud.control.refuse(CapacityError, instance_type="v5p-16", times=None)
    with Rented(cloud, accelerator=either) as pool:
        assert pool.ready() == [0]


@pytest.mark.slow
def test_a_lost_machine_may_be_replaced_by_a_slice_and_the_other_way_round(cloud: FakeCloud) -> None:
    with Rented(cloud, accelerator=["H100:8", "v5p-16"], liveness=5.0) as pool:
        cloud.control.refuse(CapacityError, instance_type="v5p-16", times=1)
        cloud.control.kill(pool.machines()[1])
        pool.until_ready(2)
        cloud.control.kill(pool.machines()[2])
        pool.until_ready(3, 4)
        assert [(each.node, each.host) for each in info() @ pool] == [(0, 0), (1, 1)]


def test_pools_whose_size_their_accelerators_would_decide_are_refused() -> None:
    words = r"is rented \(H100-80GB:8 has 1 machine and v5p-16 has 2 machines\): ask for accelerators with the same"
    with pytest.raises(UsageError, match=words):
        sky.ComputePool("local", accelerator=["H100:8", "v5p-16"], nodes=(1, 2))
    with pytest.raises(UsageError, match=words):
        sky.plan("local", accelerator=["H100:8", "v5p-16"], nodes=2)


def test_who_asks_for_no_slice_gets_none(cloud: FakeCloud) -> None:
    with pytest.raises(NoOffers, match="v5p-16 north north-a: it is a slice \\(a group\\) of 2 machines, and no such"):
        sky.plan(cloud, max_usd_per_hour=4000)
    made = sky.plan(cloud, accelerator="v5p-16", nodes=(1, 3))
    assert made.usd_per_hour == 3600
    assert made.explain().startswith(
        "1 slice of 2 nodes: 3600.0000 USD/h, 3 slices: 10800.0000 USD/h\n"
        "1. fake v5p-16 north north-a on-demand 3600.0000 USD/h for 2 hosts"
    )


# --- money, and other processes ------------------------------------------------------------------------------


def test_a_budget_counts_a_slice_once(cloud: FakeCloud) -> None:
    with pytest.raises(BudgetExceeded, match=r"the first 20:00 min of 2 slices cost 2400\.00 USD"):
        Rented(cloud, nodes=2, budget=2300).start()
    began = time.monotonic()
    with pytest.raises((BudgetExceeded, LifetimeExceeded)):  # both end at that time
        with Rented(cloud, budget=5.0, max_lifetime=5.0) as pool:  # a dollar a second
            eventually(lambda: pool.phase == "ended", 30)
            info() >> pool
    assert time.monotonic() - began > 3.5, "its money lasts for five seconds"
    assert pool.receipt.usd == pytest.approx(cloud.control.usd(pool.name), rel=0.3)


LEAVES = """
    import sys
    import skypool as sky
    from skypool.testing import FakeCloud
    pool = sky.ComputePool(FakeCloud(sys.argv[1]), accelerator="v5p-16", nodes=2, slots=1, name="left", console="off")
    pool.start()
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_who_attaches_has_the_slices_as_they_were(cloud: FakeCloud) -> None:
    list(cloud.offers(Need()))  # so that it is there
    argv = [sys.executable, "-c", textwrap.dedent(LEAVES), str(cloud.state)]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout
        assert client.stdout.readline() == "ready\n"
        client.kill()
    (record,) = Ledger.here().pools("left")
    assert record.receipt(time.time()).usd_per_hour == pytest.approx(2 * 3600)
    pool = sky.ComputePool.attach("left", cloud, accelerator="v5p-16", slots=1, console="off", liveness=5.0)
    try:
        assert [(each.slice, each.host) for each in info() @ pool] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        cloud.control.kill(next(each for each in cloud.instances(pool="left") if each.node == 3))
        eventually(lambda: sorted(each.node for each in cloud.instances(pool="left")) == [0, 1, 4, 5])
        eventually(lambda: pool.nodes.get(5) == "ready")
    finally:
        pool.stop()
