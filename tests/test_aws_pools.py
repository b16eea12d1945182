"""Whole pools on the lab's AWS: real machines, booted with the user data that the driver sent, reached by ssh."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import clock, events
from skypool.accelerators import H100
from skypool.errors import BudgetExceeded
from skypool.model import Need
from skypool.rental import supply as supply_module
from skypool.rental.ledger import Ledger
from skypool_images import recipes
from tests.conftest import eventually
from tests.lab import examples, repository, work
from tests.lab.aws import AWS
from tests.lab.aws_wire import Call
from tests.lab.launches import Client
from tests.lab.taken import where_two_calls_ended
from tests.supplies import supply_of, tend

HERE = "0.0.0.0/0"
"""Port 22 of lab machines is open to whoever is in the lab: nobody tells this host its public address."""
CLIENT = Client(
    "aws",
    f'sky.AWS(region="us-east-1", ssh_from="{HERE}")',
    create="RunInstances",
    terms={"vcpus": 2},
    variable="AWS_ACCESS_KEY_ID",
    value=lambda name: f"AKIA{name.upper().replace('-', 'X'):X<16}",
    who=lambda call: call.key,
    shares_prices=True,
)
pytestmark = [
    pytest.mark.needs("openssh"),
    pytest.mark.usefixtures("own_state"),
]


def provider(region: str = "us-east-1") -> sky.AWS:
    return sky.AWS(region=region, ssh_from=HERE)


@dataclass(frozen=True)
class Ran:
    """What a pool of one node did."""

    type: str
    steps: tuple[str, ...]
    info: dict[str, Any]
    usd_per_hour: float


def ran(aws: AWS, **terms: Any) -> Ran:
    """One node, one call, and nothing left."""
    seen: list[events.Event] = []
    pool = sky.ComputePool(provider(), console="off", slots=1, **terms)
    pool.events.listen(seen.append)
    with pool:
        info = work.about() >> pool
        (record,) = Ledger.here().pools(pool.name)
        usd_per_hour = record.receipt(0).lines[0].usd_per_hour
    assert aws.left() == {}
    assert json.dumps(str(pool.receipt))
    done = [each.step for each in seen if isinstance(each, events.BootstrapStep) and each.state in ("done", "skipped")]
    (line,) = pool.receipt.lines
    assert line.ended
    return Ran(line.type, tuple(done), info, usd_per_hour)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("accelerator", "type_", "step", "variable"),
    [
        ("A10G", "g5.xlarge", "nvidia", "CUDA_VISIBLE_DEVICES"),
        pytest.param("Trainium1", "trn1.2xlarge", "neuron", "NEURON_RT_VISIBLE_CORES", marks=pytest.mark.slow),
        pytest.param("H100:8", "p5.48xlarge", "nvidia", "CUDA_VISIBLE_DEVICES", marks=pytest.mark.slow),
        pytest.param("Inferentia2", "inf2.xlarge", "neuron", "NEURON_RT_VISIBLE_CORES", marks=pytest.mark.slow),
    ],
)
def test_the_accelerator_that_was_bought_is_there(
    aws: AWS,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    accelerator: str,
    type_: str,
    step: str,
    variable: str,
) -> None:
    assert aws.lab is not None
    (empty := tmp_path / "index").mkdir()
    with repository.serve(empty, aws.lab.gateway) as index:  # Neuron's own cannot be reached from every place
        monkeypatch.setattr(recipes, "NEURON_INDEX", index.url)
        _bought(aws, accelerator, type_, step, variable)


def _bought(aws: AWS, accelerator: str, type_: str, step: str, variable: str) -> None:
    done = ran(aws, accelerator=accelerator, image=sky.Image(pip=["numpy"]))
    assert done.type == type_
    assert step in done.steps
    assert done.info["numpy"]
    assert variable in done.info["env"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_call_sees_all_eight_devices_of_its_machine_and_one_that_needs_none_sees_none(aws: AWS) -> None:
    with sky.ComputePool(provider=provider(), accelerator=H100(count=8), console="off") as pool:
        assert work.seen() >> pool == ("device", 1, 8, "0,1,2,3,4,5,6,7")
        kind, slots, count, shown = work.seen().with_options(devices=0) >> pool
        assert (kind, count, shown) == ("cpu", 0, "")
        assert slots == len(os.sched_getaffinity(0)), "a lab machine has the CPUs of its host"
    assert aws.left() == {}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_nodes_with_32_adapters_are_reached_at_elastic_addresses_and_leave_none(aws: AWS, tmp_path: Path) -> None:
    """A spot machine that is taken back is replaced by one with an address of its own."""
    terms: dict[str, Any] = {"accelerator": "H100:8", "nodes": 2, "private_network": True, "slots": 1, "market": "spot"}

    def of_rentals() -> bool:
        owned = aws.client().describe_addresses()["Addresses"]
        return {each.get("InstanceId") for each in owned} == {each.id for each in aws.rentals}

    with sky.ComputePool(provider(), console="off", **terms) as pool:
        assert aws.count()["network_interfaces"] == 66
        assert of_rentals()
        seen: list[events.Event] = []
        pool.events.listen(seen.append)
        taken = aws.rentals[0].id
        names = where_two_calls_ended(pool, seen, tmp_path, lambda: aws.interrupt(taken, notice=8.0))
        assert len(names) == 2
        assert taken not in {each.id for each in aws.rentals}
        assert of_rentals()
    assert aws.left() == {}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_machine_whose_elastic_address_somebody_released_is_replaced(
    aws: AWS, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skypool_aws._elastic_ips._NEW", 0.5)
    aws.delays.pending = 3.0
    released: list[str] = []

    def release(call: Call, moment: str) -> None:
        if (call.action, moment) == ("RunInstances", "after") and not released:
            ec2 = aws.client()
            released.append(ec2.describe_addresses()["Addresses"][0]["AllocationId"])
            ec2.release_address(AllocationId=released[0])

    aws.on_call = release
    terms: dict[str, Any] = {"accelerator": "H100:8", "private_network": True, "slots": 1}
    with sky.ComputePool(provider(), console="off", **terms) as pool:
        assert pool.submit(work.long, 0.1).result()
        owned = aws.client().describe_addresses()["Addresses"]
        assert [each.get("InstanceId") for each in owned] == [each.id for each in aws.rentals]
        assert [line.ended for line in pool.receipt.lines] == [True, False]
    assert len(aws.calls("AllocateAddress")) == 2
    assert aws.left() == {}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("arch", ["x86_64", "arm64"])
@pytest.mark.slow
def test_machines_without_an_accelerator_are_the_cheapest_of_their_arch(aws: AWS, arch: str) -> None:
    done = ran(aws, vcpus=2, arch=arch, image=sky.Image(pip=["numpy"]))
    (offer, *_) = sky.plan(provider(), vcpus=2, arch=arch).offers
    assert (done.type, offer.arch) == (offer.instance_type, arch)
    assert done.usd_per_hour == pytest.approx(offer.usd_per_hour), "what is charged is in the receipt"
    assert done.info["numpy"]


KINDS: list[dict[str, Any]] = [
    {"accelerator": "A10G"},
    {"accelerator": "Trainium1"},
    {"accelerator": "Inferentia2"},
    {"vcpus": 2, "arch": "arm64"},
]
RUNS = examples.runs({"vcpus": 2, "arch": "x86_64"}, KINDS)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("example", "terms"), RUNS)
def test_the_examples_run_unchanged(example: str, terms: dict[str, Any], aws: AWS) -> None:
    examples.run(example, CLIENT.driver, terms)
    assert aws.left() == {}


# --- nobody is left to end it -----------------------------------------------------------------------------------


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("terms", "why"),
    [
        ("{'lease': '15s'}", "its client is silent"),
        ("{'lease': '20m', 'max_lifetime': '25s'}", "it has lived for so long as it may"),
        ("{'lease': '20m', 'market': 'spot', 'budget': 30.0}", "its budget is spent"),
    ],
)
@pytest.mark.slow
def test_a_machine_whose_client_was_killed_ends_itself(aws: AWS, terms: str, why: str) -> None:
    for offer in provider().offers(Need(vcpus=2, market="spot")):
        aws.spot_price(offer.zone, offer.instance_type, 3600.0)
    CLIENT.killed(terms)
    assert aws.count()["instances"] == 1
    eventually(lambda: not aws.count()["instances"], 90)
    CLIENT.gc()
    assert aws.left() == {}


# --- spot ----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_only_the_machine_that_is_taken_back_is_replaced_and_its_call_runs_again(aws: AWS, tmp_path: Path) -> None:
    seen: list[events.Event] = []
    with sky.ComputePool(provider(), nodes=2, slots=1, vcpus=2, market="spot", console="off") as pool:
        pool.events.listen(seen.append)
        first = {each.id for each in pool_instances(pool)}
        taken = min(first)
        names = where_two_calls_ended(pool, seen, tmp_path, lambda: aws.interrupt(taken, notice=8.0))
        now = {each.id for each in pool_instances(pool)}
    assert len(names) == 2
    assert len(first & now) == 1
    assert taken not in now
    assert any(isinstance(each, events.NodeInterruption) for each in seen)
    assert [each.attempt for each in seen if isinstance(each, events.CallRetried)] == [2]
    assert aws.left() == {}


def pool_instances(pool: sky.ComputePool) -> list[Any]:
    return [each for each in provider().instances(pool=pool.name) if each.state == "running"]


@pytest.mark.timeout(240)
@pytest.mark.slow
def test_a_pool_with_a_budget_on_spot_sends_a_maximum_price_and_follows_the_price(
    aws: AWS, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supply_module, "REPRICE", 1.0)
    with sky.ComputePool(provider(), slots=1, vcpus=2, market="spot", budget=20, lease=15, console="off") as pool:
        (call,) = aws.calls("RunInstances")
        (rental,) = aws.rentals
        bare = aws.stock.spot_price(rental.zone, rental.type)
        (line,) = pool.receipt.lines
        assert bare is not None
        extras = line.usd_per_hour - bare
        assert extras > 0, "the disk and the public address are in the price"
        market = call.params["InstanceMarketOptions"]
        assert market["MarketType"] == "spot"
        most = float(market["SpotOptions"]["MaxPrice"])
        assert most == pytest.approx(1.25 * line.usd_per_hour - extras, abs=1e-4)
        prices = [line.usd_per_hour]
        for factor in (1.2, 0.5):
            prices.append(bare * factor + extras)
            aws.spot_price(rental.zone, rental.type, bare * factor)
            eventually(lambda: pool.receipt.lines[0].usd_per_hour == pytest.approx(prices[-1]), 60)
            (record,) = Ledger.here().pools(pool.name)
            assert record.receipt(clock.now()).lines[0].usd_per_hour == pytest.approx(prices[-1])
        assert pool.submit(abs, -1).result() == 1
    (line,) = pool.receipt.lines
    assert [usd_per_hour for _, usd_per_hour in line.earlier] == pytest.approx(prices[:-1])
    assert aws.left() == {}


def test_a_spot_price_that_rises_shortens_what_a_budget_lasts_for(
    aws_api: AWS, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours, real = 0.0, clock.now
    monkeypatch.setattr(clock, "now", lambda: real() + hours * 3600)
    monkeypatch.setattr(supply_module, "REPRICE", 0.0)
    best = sky.plan(provider(), vcpus=2, market="spot").best
    assert best is not None
    before, bare = best.usd_per_hour, aws_api.stock.spot_price(best.zone, best.instance_type)
    assert bare is not None
    after = before + 0.2 * bare
    pool = sky.ComputePool(provider(), vcpus=2, market="spot", budget=2.5 * before, name="p", console="off")
    supply = supply_of(pool)
    asyncio.run(supply.look())
    supply.begin()

    async def pause(seconds: float) -> None: ...

    there = asyncio.run(supply.rent((0,), None, pause)).instances
    eventually(lambda: [each.state for each in pool_instances(pool)] == ["running"], 30)
    supply.runs(pool_instances(pool)[0])
    hours = 1.0
    tend(supply)
    assert supply.rental.limits.check() == pytest.approx(1.5 * 3600, abs=60)
    aws_api.spot_price(best.zone, best.instance_type, 1.2 * bare)
    tend(supply)
    assert supply.rental.limits.check() == pytest.approx(1.5 * before / after * 3600, abs=60), "its nodes are told so"
    assert supply.rental.receipt.usd == pytest.approx(before, rel=0.02), (
        "what ran until now is charged at the old price"
    )
    hours = 2.0
    assert supply.rental.receipt.usd == pytest.approx(before + after, rel=0.02)
    assert Ledger.here().pools("p")[0].receipt(clock.now()).usd == pytest.approx(before + after, rel=0.02)
    hours = 2.45
    with pytest.raises(BudgetExceeded, match="has spent"):
        supply.rental.limits.check()
    assert not supply.terminate(there)
