"""One pool over clouds with GPUs and with TPUs: the cheapest of either, and the next where that is out of stock."""

from __future__ import annotations

from typing import Any

import pytest

import skypool as sky
from skypool.accelerators import TPUv5p_8
from tests.lab import work
from tests.lab.aws import AWS
from tests.lab.gce import GCE
from tests.lab.runpod import RunPod
from tests.lab.tpu import TPU

pytestmark = pytest.mark.usefixtures("own_state")
COMPUTE = "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE"
ORDER = [("gcp", "v5p-8"), ("runpod", "NVIDIA H100 80GB HBM3"), ("aws", "p5.48xlarge"), ("gcp", "a3-highgpu-8g")]
"""From the cheapest to the dearest."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("gone", range(len(ORDER)), ids=[kind.replace(" ", "-") for _, kind in ORDER])
def test_eight_gpus_or_a_slice_are_had_where_they_are_cheapest_and_in_stock(
    aws: AWS, runpod: RunPod, gce: GCE, tpu: TPU, monkeypatch: pytest.MonkeyPatch, gone: int
) -> None:
    monkeypatch.setenv(COMPUTE, gce.environment[COMPUTE])
    aws.quota(384, "P")
    clouds: dict[str, Any] = {"v5p-8": tpu, "NVIDIA H100 80GB HBM3": runpod, "p5.48xlarge": aws, "a3-highgpu-8g": gce}
    for _, kind in ORDER[:gone]:
        clouds[kind].capacity(0)
    drivers: list[Any] = [
        sky.GCP(ssh_from="203.0.113.7"),
        sky.AWS(region="us-east-1", ssh_from="0.0.0.0/0"),
        sky.RunPod(),
    ]
    with sky.ComputePool(provider=drivers, accelerator=["H100:8", TPUv5p_8()], slots=1, console="off") as pool:
        assert (work.place() >> pool)[0] == 1
        (line,) = [each for each in pool.receipt.lines if each.billed_from is not None]  # a slice that waited is free
        assert line.provider == ORDER[gone][0], pool.explain()
        assert ORDER[gone][1] in line.type
    assert [each.left() for each in clouds.values()] == [{}] * 4
