"""Machines of the lab's Compute Engine with a service account, which save to a bucket with the account's own token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import skypool as sky
from skypool.buckets.bucket import Bucket
from skypool.buckets.downscoped import ROLE
from skypool.buckets.policies import condition
from tests.lab import gcs, stores
from tests.lab.gce import GCE, PROJECT
from tests.lab.machines import Machine
from tests.lab.work import saved_content, write_saved

pytestmark = [pytest.mark.usefixtures("own_state"), pytest.mark.slow, pytest.mark.timeout(300)]
ROBOT = f"robot@{PROJECT}.iam.gserviceaccount.com"


@pytest.fixture
def cloud(gce: GCE, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[gcs.CloudStorage]:
    """Cloud Storage that the machines reach, and that knows the tokens of their metadata service."""
    if why := stores.missing_s3():
        pytest.skip(why)

    def account_of(token: str) -> str:
        return next((each.account for each in gce.rentals.values() if each.account and each.token == token), "")

    boot = gce.boot

    def boot_near(rental: Any, **told: Any) -> None:
        def prepare(machine: Machine) -> None:
            machine.show_port(urlsplit(made.endpoint).port or 0)  # as no token goes elsewhere without TLS
            told["prepare"](machine)

        boot(rental, **{**told, "prepare": prepare})

    monkeypatch.setattr(gce, "boot", boot_near)
    (tmp_path / "store").mkdir()
    with (
        stores.seaweedfs(tmp_path / "store") as weed,
        gcs.cloud_storage(weed) as made,
    ):
        made.account_of = account_of
        made.log_in(monkeypatch, tmp_path)
        monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", PROJECT)
        yield made


def test_a_machine_with_a_service_account_saves_and_the_next_one_goes_on(gce: GCE, cloud: gcs.CloudStorage) -> None:
    bucket = Bucket("gs://models/runs/x", cloud.endpoint, identity=True)
    expression = {"title": "skypool", "expression": condition(bucket)}
    binding = {"role": ROLE, "members": [f"serviceAccount:{ROBOT}"], "condition": expression}
    cloud.policies["models"] = {"version": 3, "bindings": [binding], "etag": "1"}

    def pool() -> sky.ComputePool:
        provider = sky.GCP(ssh_from="203.0.113.7", service_account=ROBOT)
        return sky.ComputePool(provider, slots=1, console="off", save={"out": bucket})

    with pool() as first:
        write_saved("step-1/model", 20 << 20) >> first
        content = saved_content("step-1/model") >> first
    assert cloud.has("models", "runs/x/step-1/model")
    with pool() as second:
        assert saved_content("step-1/model") >> second == content
    assert (cloud.exchanged, gce.left()) == ([], {})
