"""Whole pools on the lab's Verda: real machines, booted with the startup script that the driver sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import events
from tests.conftest import eventually
from tests.lab import examples, work
from tests.lab.launches import Client, Matrix
from tests.lab.taken import where_two_calls_ended
from tests.lab.verda import Verda

pytestmark = pytest.mark.usefixtures("own_state")
CLIENT = Client("verda", "sky.Verda()", create="POST /instances")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("accelerator", ["V100", pytest.param("A6000", marks=pytest.mark.slow)])
def test_the_gpu_that_was_bought_is_there_with_its_driver(verda: Verda, accelerator: str) -> None:
    seen: list[events.Event] = []
    pool = sky.ComputePool(sky.Verda(), accelerator=accelerator, slots=1, console="off")
    pool.events.listen(seen.append)
    with pool:
        info = work.about() >> pool
    done = [each.step for each in seen if isinstance(each, events.BootstrapStep) and each.state in ("done", "skipped")]
    assert "nvidia" in done
    assert "CUDA_VISIBLE_DEVICES" in info["env"]
    assert any("billed until `skypool gc --yes`" in each.text for each in seen if isinstance(each, events.Notice))
    (line,) = pool.receipt.lines
    assert line.type == {"V100": "1V100.6V", "A6000": "1A6000.10V"}[accelerator]
    assert verda.left() == {}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("example", "terms"), examples.runs({}, [{"accelerator": "V100"}], installing=False))
def test_the_examples_run_unchanged(example: str, terms: dict[str, Any], verda: Verda) -> None:
    examples.run(example, CLIENT.driver, terms)
    assert verda.left() == {}


# --- failover ------------------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_machine_that_was_promised_and_does_not_come_is_had_elsewhere(verda: Verda, late: bool) -> None:
    """Late: only when the launch has been back for long."""
    verda.delays.ordered = 15.0 if late else 0.3
    verda.sell_out()
    offers = [each for each in sky.plan(sky.Verda(), accelerator=["V100", "A6000"]).offers if each.available]
    with sky.ComputePool(sky.Verda(), accelerator=["V100", "A6000"], console="off") as pool:
        if late:
            verda.delays.ordered = 0.1
        assert pool.submit(abs, -3).result() == 3
        (there,) = [each for each in verda.rentals.values() if each.living]
        assert (there.kind, there.place) == (offers[1].instance_type, offers[1].region)
    assert [each.told["instance_type"] for each in verda.rentals.values()] in ([offers[0].instance_type], [])
    assert verda.left() == {}


# --- spot ----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_a_machine_that_is_taken_back_without_a_word_is_replaced_and_its_call_runs_again(
    verda: Verda, tmp_path: Path
) -> None:
    seen: list[events.Event] = []
    terms: dict[str, Any] = {"nodes": 2, "slots": 1, "market": "spot", "liveness": 4.0, "console": "off"}
    with sky.ComputePool(sky.Verda(), **terms) as pool:
        pool.events.listen(seen.append)
        first = {each.id for each in verda.rentals.values()}
        taken = min(first)
        names = where_two_calls_ended(pool, seen, tmp_path, lambda: verda.preempt(taken))
        now = {each.id for each in verda.rentals.values() if each.living}
    assert len(names) == 2
    assert taken not in now
    assert len(first & now) == 1
    assert [each.attempt for each in seen if isinstance(each, events.CallRetried)] == [2]
    assert verda.left() == {}


# --- nobody is left to end it --------------------------------------------------------------------------------


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_a_machine_whose_client_was_killed_does_no_more_and_gc_ends_its_cost(verda: Verda, tmp_path: Path) -> None:
    CLIENT.killed("{'lease': '15s'}")
    *_, rental = verda.rentals.values()
    eventually(lambda: rental.state == "offline", 90)
    assert verda.count()["instances"] == 1, "it is billed on"
    CLIENT.gc(0, XDG_STATE_HOME=str(tmp_path / "elsewhere"))
    assert verda.count()["instances"] == 1
    CLIENT.gc(XDG_STATE_HOME=str(tmp_path / "elsewhere"))
    assert verda.left() == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_client_killed_at_any_call_leaves_nothing_though_its_ledger_and_replies_are_lost(
    verda: Verda, tmp_path: Path
) -> None:
    Matrix(CLIENT, verda, tmp_path).leaves_nothing(ledger=False, lose_reply=True)
