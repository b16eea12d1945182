"""RunPod's SDK against the lab's RunPod."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients import table
from tests.clients.runs import Client, Report
from tests.lab.runpod import RunPod

ABOUT = table.About(
    "RunPod SDK", "runpod", "runpod", "RunPod",
    "Led to the lab by `RUNPOD_API_BASE_URL`. This version speaks GraphQL only. A pod has no tags; the SDK sets the "
    "account's public key instead.",
    {"log": "RunPod's API has no logs of pods, and the SDK no function for them"},
)  # fmt: skip


@pytest.fixture(scope="module")
def world() -> Iterator[RunPod]:
    with RunPod() as world:
        world.capacity(0, "NVIDIA L4")
        yield world


@pytest.fixture(scope="module")
def report(world: RunPod, tmp_path_factory: pytest.TempPathFactory) -> Report:
    client = Client("runpod", tmp_path_factory.mktemp("home"), world.environment)
    world.bad_keys.add("rpa_wrong")
    return client.script("runpod_sdk.py")


def test_its_list_of_gpus_is_that_of_the_catalogue(report: Report) -> None:
    gpus = {each["id"]: each for each in report.shown["gpus"]}
    assert len(gpus) > 10
    assert gpus["NVIDIA A40"]["memoryInGb"] == report.shown["gpu"]["memoryInGb"] == 48
    assert report.shown["gpu"]["lowestPrice"]["uninterruptablePrice"] > 0


def test_pods_are_made_listed_and_found(report: Report) -> None:
    made, cpu, pod = (report.shown[name] for name in ("made", "cpu", "pod"))
    assert [each["id"] for each in report.shown["pods"]] == [made["id"], cpu["id"]]
    assert (pod["name"], pod["gpuCount"], pod["imageName"]) == ("first", 1, "runpod/pytorch")
    assert "NAME=value" in made["env"]


def test_a_stopped_pod_starts_again_and_ended_pods_are_gone(report: Report, world: RunPod) -> None:
    assert report.shown["stopped"]["desiredStatus"] == "EXITED"
    assert report.shown["resumed"]["desiredStatus"] == "RUNNING"
    assert report.shown["left"] == []
    assert world.left() == {}


def test_errors_are_those_of_the_service(report: Report) -> None:
    assert "no longer any instances available" in report.refusals["no stock"][0]
    assert report.refusals["bad id"][0].startswith("ValueError: No GPU found with the specified ID")
    assert report.refusals["bad id"][1].startswith("QueryError")
    assert report.shown["nobody"] is None
    assert report.refusals["bad key"][0].startswith("AuthenticationError")


def test_the_readme_says_what_ran(report: Report) -> None:
    table.check(ABOUT, report)
