"""Whole pools on the lab's Compute Engine: real machines, booted with the user data of their metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import events
from tests.conftest import eventually
from tests.lab import examples, work
from tests.lab.gce import GCE, NO_ROOM
from tests.lab.launches import Client, Matrix
from tests.lab.taken import where_two_calls_ended

pytestmark = pytest.mark.usefixtures("own_state")
HERE = "ssh_from='203.0.113.7'"
CLIENT = Client("gcp", f"sky.GCP({HERE})", create="POST instances", shares_prices=True)
PRICED = """
from skypool_gcp import list_prices

list_prices.rates = lambda *_, **__: list_prices.Rates({"tpu7x": {("us-central1", "on-demand"): 12.0}}, "2026-11-22")
"""
OF_SLICES = Client(
    "gcp", CLIENT.driver, create="POST groups", terms={"accelerator": "tpu7x-16"}, first=PRICED, shares_prices=True
)
ROBOT = "robot@lab-project.iam.gserviceaccount.com"


def gcp(**settings: Any) -> sky.GCP:
    return sky.GCP(ssh_from="203.0.113.7", **settings)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("accelerator", ["L4", pytest.param("A100-40GB", marks=pytest.mark.slow)])
def test_the_gpu_that_was_bought_is_there_with_its_driver(gce: GCE, accelerator: str) -> None:
    seen: list[events.Event] = []
    pool = sky.ComputePool(gcp(), accelerator=accelerator, slots=1, console="off")
    pool.events.listen(seen.append)
    with pool:
        info = work.about() >> pool
        (rental,) = gce.machines()
    done = [each.step for each in seen if isinstance(each, events.BootstrapStep) and each.state in ("done", "skipped")]
    assert "nvidia" in done
    assert "CUDA_VISIBLE_DEVICES" in info["env"]
    assert rental.kind == {"L4": "g2-standard-4", "A100-40GB": "a2-highgpu-1g"}[accelerator]
    assert gce.left() == {}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("example", "terms"), examples.runs({}, [{"accelerator": "L4"}], installing=False))
def test_the_examples_run_unchanged(example: str, terms: dict[str, Any], gce: GCE) -> None:
    examples.run(example, CLIENT.driver, terms)
    assert gce.left() == {}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_is_out_of_stock_when_the_operation_is_through_is_had_in_another_zone(gce: GCE) -> None:
    offers = sky.plan(gcp(), accelerator="L4").offers
    gce.doom(503, "ZONE_RESOURCE_POOL_EXHAUSTED", NO_ROOM.format(zone=offers[0].zone))
    with sky.ComputePool(gcp(), accelerator="L4", console="off") as pool:
        assert pool.submit(abs, -3).result() == 3
        (there,) = gce.machines()
        assert (there.kind, there.place) == (offers[1].instance_type, offers[1].zone)
    assert len(gce.calls("POST instances")) == 2
    assert gce.left() == {}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_spot_machine_of_which_there_is_notice_is_replaced_and_its_call_runs_again(gce: GCE, tmp_path: Path) -> None:
    seen: list[events.Event] = []
    terms: dict[str, Any] = {"nodes": 2, "slots": 1, "market": "spot", "console": "off"}
    with sky.ComputePool(gcp(), **terms) as pool:
        pool.events.listen(seen.append)
        first = {each.id for each in gce.machines()}
        taken = min(first)
        names = where_two_calls_ended(pool, seen, tmp_path, lambda: gce.preempt(taken, notice=8.0))
        now = {each.id for each in gce.machines()}
    assert len(names) == 2
    assert taken not in now
    assert len(first & now) == 1
    assert gce.left() == {}


# --- nobody is left to end it --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_machine_whose_client_was_killed_stops_and_gc_ends_the_cost_of_its_disk(gce: GCE, tmp_path: Path) -> None:
    CLIENT.killed("{'lease': '15s'}")
    *_, rental = gce.rentals.values()
    eventually(lambda: rental.state == "TERMINATED", 90)
    CLIENT.gc(0, XDG_STATE_HOME=str(tmp_path / "elsewhere"))
    assert gce.count()["instances"] == 1, "until its label says that it is over, it may be another client's"
    CLIENT.gc(XDG_STATE_HOME=str(tmp_path / "elsewhere"))
    assert gce.left() == {}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_with_a_service_account_it_deletes_itself_and_its_disk(gce: GCE) -> None:
    driver = f"sky.GCP({HERE}, service_account={ROBOT!r})"
    Client("gcp", driver, create="POST instances").killed("{'lease': '15s'}")
    assert gce.count()["instances"] == 1
    eventually(lambda: not gce.rentals and not gce.disks, 90)
    assert {each.headers["authorization"].partition("-")[0] for each in gce.calls("DELETE instance")} == {
        "Bearer ya29.vm"
    }


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_machine_is_deleted_when_its_lifetime_is_over_though_nobody_asks(gce: GCE) -> None:
    CLIENT.killed("{'lease': '10m', 'max_lifetime': '10m'}")
    gce.clock.advance(601)
    eventually(lambda: not gce.rentals and not gce.disks, 30)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_client_killed_at_any_call_leaves_nothing_though_its_ledger_and_replies_are_lost(
    gce: GCE, tmp_path: Path
) -> None:
    Matrix(CLIENT, gce, tmp_path).leaves_nothing(ledger=False, lose_reply=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_client_killed_at_any_call_leaves_no_group_and_no_template_of_its_slice(gce: GCE, tmp_path: Path) -> None:
    Matrix(OF_SLICES, gce, tmp_path).leaves_nothing(ledger=False, lose_reply=True)
