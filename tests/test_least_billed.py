"""What a machine that lives for seconds costs on each cloud: receipts count the least that its provider bills."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import skypool as sky
from skypool import clock
from skypool.drivers.contract import Driver
from skypool.rental.supply import Supply
from skypool_vastai import _api
from tests.conftest import eventually
from tests.supplies import supply_of

pytestmark = [
    pytest.mark.needs("openssh"),
    pytest.mark.usefixtures("own_state"),
    pytest.mark.filterwarnings("ignore:who may log in to the hosts of TPUs"),  # Compute Engine is not enabled there
]
HERE = "203.0.113.7"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("world", "driver", "accelerator", "least"),
    [
        pytest.param("aws_api", sky.AWS(region="us-east-1", ssh_from=HERE), "A10G", 60.0, id="aws"),
        pytest.param("gce_api", sky.GCP(ssh_from=HERE), "L4", 60.0, id="gce"),
        pytest.param("tpu_api", sky.GCP(ssh_from=HERE), "v5litepod-8", 0.0, id="tpu"),
        pytest.param("verda_api", sky.Verda(), "V100", 0.0, id="verda"),
        pytest.param("runpod_api", sky.RunPod(), "RTX_4090", 0.0, id="runpod"),
        pytest.param("vastai_api", sky.VastAI(), "RTX_4090", 0.0, id="vastai"),
    ],
)
def test_the_receipt_of_a_short_machine_has_the_least_that_its_provider_bills(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    world: str,
    driver: Driver,
    accelerator: str,
    least: float,
) -> None:
    request.getfixturevalue(world)
    monkeypatch.setattr(_api, "PACE", {})
    now = clock.now()
    monkeypatch.setattr(clock, "now", lambda: now)
    supply = rented(driver, accelerator)

    def runs() -> bool:
        return [each.state for each in driver.instances(pool="p")] == ["running"]

    eventually(runs, 60)
    (machine,) = driver.instances(pool="p")
    supply.runs(machine)
    (line,) = supply.rental.receipt.lines
    now = line.begins + 10
    assert not supply.terminate(supply.rental.there)
    (line,) = supply.rental.receipt.lines
    assert line.lived == pytest.approx(10.0)
    assert line.usd_per_hour > 0
    assert line.start_usd == pytest.approx(0.035 if world == "vastai_api" else 0.0)  # traffic of 10 GB in and 1 GB out
    assert line.usd == pytest.approx(line.usd_per_hour * max(10.0, least) / 3600 + line.start_usd)


def rented(driver: Driver, accelerator: str) -> Supply:
    """The rental of a pool of one node, whose machine was just created."""
    terms: dict[str, Any] = {"accelerator": accelerator, "name": "p", "console": "off"}
    supply = supply_of(sky.ComputePool(driver, **terms))

    async def pause(seconds: float) -> None: ...

    asyncio.run(supply.look())
    supply.begin()
    rented = asyncio.run(supply.rent((0,), None, pause))
    assert len(rented.instances) == 1, rented.error
    return supply
