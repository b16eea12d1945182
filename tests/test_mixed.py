"""One pool over several clouds, each the lab's own: the cheapest there is; one that goes dark costs its own nodes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import skypool as sky
from skypool import events
from skypool.rental import launch
from skypool_vastai import _api
from tests.conftest import eventually
from tests.lab import work
from tests.lab.aws import AWS
from tests.lab.runpod import RunPod
from tests.lab.vastai import VastAI
from tests.lab.verda import Verda

ANY = ["RTX_4090", "V100-16GB", "A10G"]
pytestmark = pytest.mark.usefixtures("own_state")


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_api, "PACE", {})


@pytest.fixture
def clouds(aws: AWS, runpod: RunPod, vastai: VastAI, verda: Verda) -> dict[str, Any]:
    """Four of them, each with one machine that would do; AWS alone has more."""
    [*cheap] = [each for each in vastai.asks.values() if (each["gpu_name"], each["num_gpus"]) == ("RTX 4090", 1)]
    vastai.asks = {each["id"]: each for each in sorted(cheap, key=lambda each: each["dph_base"])[:1]}
    for each in vastai.asks.values():
        each.update(inet_down_cost=0.0, inet_up_cost=0.0)  # so that the price alone ranks it
    runpod.capacity(0)
    runpod.capacity(1, "NVIDIA GeForce RTX 4090", "CA-MTL-1", "on-demand")
    verda.capacity(0)
    verda.capacity(1, "1V100.6V", "FIN-01", "on-demand")
    return {"aws": aws, "runpod": runpod, "vastai": vastai, "verda": verda}


def drivers() -> list[Any]:
    return [
        sky.AWS(region="us-east-1", ssh_from="0.0.0.0/0"),
        sky.VastAI(min_reliability=0.0),
        sky.RunPod(),
        sky.Verda(),
    ]


def pool_of_four(seen: list[events.Event]) -> sky.ComputePool:
    pool = sky.ComputePool(drivers(), accelerator=ANY, nodes=4, slots=1, liveness=5.0, console="off")
    pool.events.listen(seen.append)
    return pool


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_pool_takes_the_cheapest_of_four_clouds_and_believes_each_as_far_as_its_own(clouds: dict[str, Any]) -> None:
    seen: list[events.Event] = []
    with pool_of_four(seen) as pool:
        assert Counter(line.provider for line in pool.receipt.lines) == Counter([*clouds]), pool.explain()
        prices = [line.usd_per_hour for line in pool.receipt.lines]
        assert sorted(prices) == pytest.approx(prices), "the cheapest had the first nodes"
        told = [each.text for each in seen if isinstance(each, events.Notice) and "data only" in each.text]
        assert len(told) == 1
        assert "vastai" in told[0]
        assert len(work.turn("/tmp/turns", 0.1) @ pool) == 4
    for cloud in clouds.values():
        assert cloud.left() == {}
    assert all(line.ended for line in pool.receipt.lines)


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_cloud_that_goes_dark_costs_its_own_nodes_alone(
    clouds: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_PATIENCE", 5.0)
    seen: list[events.Event] = []
    with pool_of_four(seen) as pool:
        [contract] = clouds["vastai"].rentals.values()
        [there] = [line.node for line in pool.receipt.lines if line.provider == "vastai"]
        calls = [work.turn("/tmp/turns", 6.0) > pool for _ in range(8)]
        eventually(lambda: contract.machine.path("/tmp/turns").exists(), 60, "the call there")
        clouds["vastai"].dark = True
        contract.machine.cut()
        assert len([each.result() for each in calls]) == 8
        eventually(lambda: len(pool.receipt.lines) == 5, 150, "another machine for it")
        assert pool.receipt.lines[-1].provider == "aws"
        gone = {e.node for e in seen if isinstance(e, events.NodePhase) and e.phase in ("draining", "ended")}
        assert gone == {there}
        clouds["vastai"].dark = False
    for cloud in clouds.values():
        assert cloud.left() == {}
    assert all(line.ended for line in pool.receipt.lines)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_nodes_that_must_reach_each_other_are_of_one_cloud(clouds: dict[str, Any]) -> None:
    terms: dict[str, Any] = {"accelerator": ANY, "nodes": 2, "slots": 1, "private_network": True, "console": "off"}
    with sky.ComputePool(drivers(), **terms) as pool:
        assert [line.provider for line in pool.receipt.lines] == ["aws", "aws"]
        assert clouds["vastai"].calls("PUT /api/v0/asks/*") == []
    assert clouds["aws"].left() == {}
