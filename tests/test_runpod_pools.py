"""Whole pools on the lab's RunPod: containers with the start command that the driver sent, reached by mapped ports."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import events
from tests.conftest import eventually
from tests.lab import examples, work
from tests.lab.launches import Client, Matrix
from tests.lab.runpod import RunPod
from tests.lab.taken import where_two_calls_ended

pytestmark = pytest.mark.usefixtures("own_state")
CLIENT = Client("runpod", "sky.RunPod()", create="POST /v2/pods")
SPOT = dataclasses.replace(CLIENT, driver="sky.RunPod(graphql=True)")


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("accelerator", "type_"),
    [
        ("RTX_4090", "1x NVIDIA GeForce RTX 4090"),
        pytest.param("H100-SXM:8", "8x NVIDIA H100 80GB HBM3", marks=pytest.mark.slow),
    ],
)
def test_the_gpus_that_were_bought_are_there(runpod: RunPod, accelerator: str, type_: str) -> None:
    seen: list[events.Event] = []
    pool = sky.ComputePool(sky.RunPod(), accelerator=accelerator, slots=1, console="off")
    pool.events.listen(seen.append)
    with pool:
        info = work.about() >> pool
    assert "CUDA_VISIBLE_DEVICES" in info["env"]
    (line,) = pool.receipt.lines
    assert (line.type, line.ended is not None) == (type_, True)
    assert line.usd_per_hour == pytest.approx(sky.plan(sky.RunPod(), accelerator=accelerator).usd_per_hour)
    assert runpod.left() == {}


@pytest.mark.timeout(240)
def test_a_partition_of_a_card_is_rented_as_one_and_left_as_it_is(runpod: RunPod) -> None:
    """What `nvidia-smi -L` shows in such a pod: one card with the partition below it."""
    kind = "NVIDIA RTX PRO 6000 Blackwell Server Edition MIG 1g.24gb"
    runpod.price(kind, 0.5, None)
    with sky.ComputePool(sky.RunPod(), accelerator="RTX_PRO_6000/1g.24gb", slots=1, console="off") as pool:
        info = work.about() >> pool
        [machine] = [each.machine for each in runpod.rentals.values()]
        assert machine is not None
        assert machine.path("/var/lib/stub/mig/0.parts").read_text() == "1g.24gb\n"
    assert "MIG-" in str(info)
    assert [line.type for line in pool.receipt.lines] == [f"1x {kind}"]
    assert runpod.left() == {}


RUNS = [
    *examples.runs({}),
    ("01_hello", {"accelerator": "A40"}),
    ("03_stream", {"accelerator": "A40", "market": "spot"}),
]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("example", "terms"), RUNS)
def test_the_examples_run_unchanged(example: str, terms: dict[str, Any], runpod: RunPod) -> None:
    examples.run(example, (SPOT if "market" in terms else CLIENT).driver, terms)
    assert runpod.left() == {}


# --- nobody is left to end it -----------------------------------------------------------------------------------


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "terms",
    [
        "{'lease': '15s'}",
        pytest.param("{'lease': '20m', 'max_lifetime': '25s'}", marks=pytest.mark.slow),
        pytest.param("{'lease': '20m', 'accelerator': 'A40', 'budget': 0.8}", marks=pytest.mark.slow),
    ],
    ids=["its client is silent", "its lifetime is over", "its budget is spent"],
)
@pytest.mark.slow
def test_a_pod_whose_client_was_killed_ends_itself(runpod: RunPod, terms: str) -> None:
    runpod.price("NVIDIA A40", 120.0, None)  # of 0.8 USD nothing is left after 24 s
    CLIENT.killed(terms)
    assert runpod.count()["instances"] == 1
    eventually(lambda: not runpod.count()["instances"], 90)
    CLIENT.gc()
    assert runpod.left() == {}


# --- spot ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_pod_that_is_outbid_is_replaced_and_its_disk_is_paid_for_no_longer(runpod: RunPod, tmp_path: Path) -> None:
    seen: list[events.Event] = []
    driver = sky.RunPod(graphql=True)
    with sky.ComputePool(
        driver, accelerator="A40", nodes=2, slots=1, market="spot", liveness="6s", console="off"
    ) as pool:
        pool.events.listen(seen.append)
        first = sorted(each.id for each in driver.instances(pool=pool.name))

        def take() -> None:
            runpod.interrupt(first[0])
            assert [each.state for each in driver.instances(pool=pool.name) if each.id == first[0]] == ["ending"]

        assert len(where_two_calls_ended(pool, seen, tmp_path, take)) == 2
        eventually(lambda: sum(each.state == "running" for each in driver.instances(pool=pool.name)) == 2, 30)
        eventually(lambda: first[0] not in runpod.rentals, 20)
    assert any(isinstance(each, events.NodeInterruption) for each in seen)
    assert [each.attempt for each in seen if isinstance(each, events.CallRetried)] == [2]
    assert runpod.left() == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_client_killed_at_any_call_leaves_nothing_though_its_ledger_and_replies_are_lost(
    runpod: RunPod, tmp_path: Path
) -> None:
    Matrix(CLIENT, runpod, tmp_path).leaves_nothing(ledger=False, lose_reply=True)
