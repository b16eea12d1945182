"""Whole pools on the lab's Cloud TPU: each host of a slice is a machine, booted with the script that was sent."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import events
from skypool.accelerators import TPUv5p_64
from skypool.errors import LaunchError, SkypoolError
from skypool_gcp.tpu import Tpu
from tests.conftest import eventually
from tests.lab import examples, work
from tests.lab.launches import Client, Matrix
from tests.lab.tpu import TPU

pytestmark = [
    pytest.mark.usefixtures("own_state"),
    pytest.mark.filterwarnings("ignore:who may log in to the hosts of TPUs"),  # Compute Engine is not enabled there
]
HERE = "ssh_from='203.0.113.7'"
ONE: dict[str, Any] = {"accelerator": "v5litepod-8", "slots": 1}
TWO: dict[str, Any] = {"accelerator": "v5p-16"}
RUNS = examples.runs(ONE, [TWO], installing=False)
"""Without the one that installs a package: the page that TPUs' packages may come from is not to be had in the lab."""
CLIENT = Client("gcp", f"sky.GCP({HERE})", create="POST queuedResources", terms=ONE, shares_prices=True)


def gcp(**settings: Any) -> sky.GCP:
    """A provider that need not ask the internet for its own address."""
    return sky.GCP(ssh_from="203.0.113.7", **settings)


def test_every_host_of_a_slice_is_a_node_and_one_call_sees_them_all_in_the_order_of_its_workers(tpu: TPU) -> None:
    seen: list[events.Event] = []
    pool = sky.ComputePool(gcp(), console="off", **TWO)
    pool.events.listen(seen.append)
    with pool:
        told = work.about() @ pool
        (queued,) = tpu.queued.values()
    ends = [each.ip for each in queued.hosts]
    for node, each in enumerate(told):
        env = each["env"]
        assert env["TPU_WORKER_ID"] == str(node)
        assert env["TPU_WORKER_HOSTNAMES"] == ",".join(ends)
        assert (env["TPU_ACCELERATOR_TYPE"], env["TPU_TOPOLOGY"]) == ("v5p-16", "2x2x2")
    notices = [each.text for each in seen if isinstance(each, events.Notice)]
    assert any("v5p-16 at gcp cannot end its own cost" in each for each in notices), notices
    assert tpu.left() == {}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_pool_of_eight_hosts_has_its_ranks_in_the_order_of_its_workers(tpu: TPU) -> None:
    with sky.ComputePool(provider=gcp(), accelerator=TPUv5p_64(), console="off") as pool:
        told = work.about() @ pool
        infos = [work.place() >> pool for _ in range(2)]
        assert pool.receipt.usd_per_hour == pytest.approx(32 * 4.2 + 8 * 0.005)
        (queued,) = tpu.queued.values()
    assert [int(each["env"]["TPU_WORKER_ID"]) for each in told] == [*range(8)]
    assert {each["env"]["TPU_WORKER_HOSTNAMES"] for each in told} == {",".join(each.ip for each in queued.hosts)}
    assert {each["env"]["TPU_TOPOLOGY"] for each in told} == {"2x4x4"}
    assert {(hosts, chips) for hosts, chips in infos} == {(8, 32)}
    assert tpu.left() == {}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("accelerator", ["v2-8", pytest.param("v6e-4", marks=pytest.mark.slow)])
def test_the_chips_that_were_bought_are_there(tpu: TPU, accelerator: str) -> None:
    with sky.ComputePool(gcp(), accelerator=accelerator, slots=1, console="off") as pool:
        assert (work.about() >> pool)["env"]["TPU_VISIBLE_CHIPS"] == "0,1,2,3"
    assert tpu.left() == {}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("example", "terms"), RUNS)
def test_the_examples_run_unchanged(example: str, terms: dict[str, Any], tpu: TPU) -> None:
    examples.run(example, CLIENT.driver, terms)
    assert tpu.left() == {}


# --- waiting for chips ---------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "waits",
    [pytest.param(False, id="it fails"), pytest.param(True, id="it waits in vain", marks=pytest.mark.slow)],
)
def test_a_slice_that_does_not_come_is_had_in_another_zone(tpu: TPU, waits: bool) -> None:
    tpu.waits = waits
    driver = gcp(queue=20)
    first, second, *_ = sky.plan(driver, accelerator="v5litepod-8").offers
    tpu.capacity(0, "v5litepod-8", first.zone)
    with sky.ComputePool(driver, console="off", **ONE) as pool:
        assert pool.submit(abs, -3).result() == 3
        assert {each.zone for each in tpu.queued.values()} == {second.zone}, "the one that waited is deleted"
    asked = [each.by["zone"] for each in tpu.calls("POST queuedResources")]
    assert asked == [first.zone, second.zone]
    assert tpu.left() == {}


@pytest.mark.needs("openssh")
@pytest.mark.timeout(120)
def test_where_no_zone_has_chips_it_says_what_each_said_and_nothing_is_left(tpu_api: TPU) -> None:
    tpu_api.capacity(0)
    tpu_api.delays.accepted = 0.01
    with pytest.raises(LaunchError, match=r"(?s)v5litepod-8 in .*us-west4-a.*no more capacity.*another zone, TPU type"):
        sky.ComputePool(gcp(), console="off", **ONE).start()
    assert tpu_api.left() == {}


@pytest.mark.needs("openssh")
@pytest.mark.timeout(120)
def test_one_thread_waits_for_a_slice_however_many_hosts_it_has(tpu_api: TPU, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, most, ready = list[str](), list[int](), Tpu._ready

    def counted(self: Tpu, zone: str, slice: str) -> Any:
        waiting.append(slice)
        most.append(len(waiting))
        try:
            return ready(self, zone, slice)
        finally:
            waiting.remove(slice)

    monkeypatch.setattr(Tpu, "_ready", counted)
    tpu_api.waits = True
    tpu_api.capacity(0)
    pool = sky.ComputePool(gcp(), accelerator=TPUv5p_64(), nodes=2, console="off")
    starter = threading.Thread(target=lambda: failing(pool.start))
    starter.start()
    eventually(lambda: len(waiting) == 2, 60, "two slices that are waited for")
    asked = len(tpu_api.calls("GET node"))
    eventually(lambda: len(tpu_api.calls("GET node")) >= asked + 2, 60, "some more questions")
    assert max(most) == len(set(waiting)) == 2
    tpu_api.waits = False
    starter.join(60)
    assert not starter.is_alive()
    eventually(lambda: not waiting, 30, "the end of the waiting")
    assert tpu_api.left() == {}


def failing(do: Callable[[], object]) -> None:
    with contextlib.suppress(SkypoolError):
        do()


# --- slices that go ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_spot_slice_that_is_taken_back_is_replaced_and_what_is_left_of_it_is_deleted(tpu: TPU) -> None:
    seen: list[events.Event] = []
    tpu.delays.notice = 6.0
    with sky.ComputePool(gcp(), market="spot", slots=1, liveness=8.0, console="off", **TWO) as pool:
        pool.events.listen(seen.append)
        (first,) = tpu.queued.values()
        running = pool.submit(work.long, 20.0)
        eventually(lambda: any(isinstance(e, events.NodeStatus) and e.busy == 1 for e in seen), 30)
        tpu.preempt(first.id)
        running.result()
        now = {each.id for each in tpu.queued.values()}
        assert len(now) == 1
        assert first.id not in now, "a queued resource that is suspended holds quota"
    assert [each for each in seen if isinstance(each, events.NodeInterruption)]
    assert tpu.left() == {}


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_a_host_that_is_lost_costs_its_slice_which_is_replaced_as_a_whole(tpu: TPU) -> None:
    with sky.ComputePool(gcp(), slots=1, liveness=10.0, console="off", **TWO) as pool:
        (first,) = tpu.queued.values()
        machine = first.hosts[1].machine
        assert machine is not None
        machine.kill()
        eventually(lambda: [node for node, phase in pool.nodes.items() if phase == "ready"] == [2, 3], 90)
        assert [each["env"]["TPU_WORKER_ID"] for each in work.about() @ pool] == ["0", "1"]
        assert first.id not in {each.id for each in tpu.queued.values()}
    assert tpu.left() == {}


# --- nobody is left to end it --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_slice_whose_client_was_killed_does_no_more_and_gc_ends_its_cost(tpu: TPU, tmp_path: Path) -> None:
    CLIENT.killed("{'lease': '15s', 'accelerator': 'v5p-16'}")
    *_, queued = tpu.queued.values()
    eventually(lambda: {each.state for each in queued.hosts} == {"off"}, 90)
    assert tpu.count()["instances"] == 2, "it is billed on"
    CLIENT.gc(0, XDG_STATE_HOME=str(tmp_path / "elsewhere"))
    assert tpu.count()["instances"] == 2
    CLIENT.gc(XDG_STATE_HOME=str(tmp_path / "elsewhere"))
    assert tpu.left() == {}


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_a_slice_that_may_delete_itself_ends_its_own_cost(tpu: TPU) -> None:
    account = "runner@lab-project.iam.gserviceaccount.com"
    own = dataclasses.replace(CLIENT, driver=f"sky.GCP({HERE}, service_account={account!r})")
    own.killed("{'lease': '15s'}")
    eventually(lambda: tpu.left() == {}, 90, "the end of the slice, by its own hand")
    last = tpu.calls("DELETE queuedResource")[-1]
    assert last.headers["authorization"].startswith("Bearer ya29.vm-")
    assert last.query == {"force": "true"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_client_killed_at_any_call_leaves_nothing_though_its_ledger_and_replies_are_lost(
    tpu: TPU, tmp_path: Path
) -> None:
    Matrix(CLIENT, tpu, tmp_path).leaves_nothing(ledger=False, lose_reply=True)
