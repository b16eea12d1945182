"""SkyPilot's provisioner for AWS against the lab, and its list of instances beside boto3's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients import table, worlds
from tests.clients.runs import Client, Report
from tests.clients.worlds import SOLD_OUT, WRONG_KEY
from tests.lab.aws import AWS
from tests.lab.machines import Lab

ABOUT = table.About(
    "SkyPilot", "skypilot", "skypilot", "AWS", "Led to the lab by `AWS_ENDPOINT_URL`.",
    {
        "tag": "it tags instances while it makes them, which the tests compare",
        "log": "its logs are those of jobs on the machines; it reads no console",
    },
)  # fmt: skip


@pytest.fixture(scope="module")
def world(lab: Lab) -> Iterator[AWS]:
    with worlds.aws(lab) as world:
        yield world


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    """What boto3 reads at the moment before SkyPilot ends its instances."""
    return {}


@pytest.fixture(scope="module")
def report(world: AWS, ours: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Report:
    ec2 = world.client()

    def beside(call: Any, moment: str) -> None:
        """Read by boto3 what there is, before the first instance ends."""
        if call.action == "TerminateInstances" and moment == "before" and not ours:
            ours["asking"] = True
            reservations = ec2.describe_instances()["Reservations"]
            ours["instances"] = [each for reservation in reservations for each in reservation["Instances"]]

    world.on_call = beside
    client = Client("skypilot", tmp_path_factory.mktemp("home"), world.environment)
    report = client.script("skypilot_aws.py", worlds.ubuntu(world), SOLD_OUT, WRONG_KEY)
    refused = client.script("skypilot_aws_key.py", AWS_ACCESS_KEY_ID=WRONG_KEY)
    report.called |= refused.called
    report.refusals |= refused.refusals
    return report


def test_its_list_of_instances_is_that_of_boto3(report: Report, ours: dict[str, Any]) -> None:
    shown, instances = report.shown, ours["instances"]
    assert len(instances) == 2
    assert shown["states"] == {each["InstanceId"]: "UP" for each in instances}
    assert sorted(shown["made"]) == sorted(shown["states"])
    assert shown["nodes"] == {
        each["InstanceId"]: {
            "private": each["PrivateIpAddress"],
            "public": each["PublicIpAddress"],
            "tags": {tag["Key"]: tag["Value"] for tag in each["Tags"]},
        }
        for each in instances
    }
    assert {node["tags"]["owner"] for node in shown["nodes"].values()} == {"somebody"}
    assert {each["Placement"]["AvailabilityZone"] for each in instances} == {shown["zone"]}


def test_the_head_is_the_same_for_all_of_its_functions(report: Report) -> None:
    assert report.shown["head"] == report.shown["head_of_info"]
    assert "head" in report.shown["nodes"][report.shown["head"]]["tags"]["Name"]


def test_what_it_made_ends(report: Report, world: AWS) -> None:
    assert report.shown["left"] == {}
    assert "mine-sg" in report.shown["groups"]
    assert "mine-sg" not in report.shown["groups_left"]
    world.wait(lambda: "instances" not in world.left(), 60)


def test_refusals_of_ec2_are_errors_of_skypilot(report: Report) -> None:
    assert "InsufficientInstanceCapacity" in report.refusals["no stock"][0]
    assert "nobody-4567 not found" in report.refusals["bad id"][0]
    assert "AuthFailure" in report.refusals["bad key"][0]


def test_the_readme_says_what_ran(report: Report) -> None:
    table.check(ABOUT, report)
