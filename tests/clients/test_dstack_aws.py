"""dstack's backend for AWS against the lab, and its offers and instance beside boto3's."""

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
    "dstack", "dstack", "dstack", "AWS",
    "Led to the lab by `AWS_ENDPOINT_URL`, and to its catalogue by `GPUHUNT_CATALOG_URL`.",
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
    """What boto3 reads at the moment before dstack ends its instance."""
    return {}


@pytest.fixture(scope="module")
def report(world: AWS, ours: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Report:
    ec2 = world.client()

    def beside(call: Any, moment: str) -> None:
        """Read by boto3 what there is, before the first instance ends."""
        if call.action == "TerminateInstances" and moment == "before" and not ours:
            ours["asking"] = True
            ((instance,),) = (each["Instances"] for each in ec2.describe_instances()["Reservations"])
            ours["instance"] = instance

    world.on_call = beside
    client = Client("dstack", tmp_path_factory.mktemp("home"), world.environment)
    return client.script("dstack_aws.py", worlds.ubuntu(world), SOLD_OUT, WRONG_KEY)


def test_the_zones_of_its_offers_are_those_of_boto3(report: Report, world: AWS) -> None:
    zones = [each["ZoneName"] for each in world.client().describe_availability_zones()["AvailabilityZones"]]
    assert set(report.shown["offers"]) == {"t3.small", "g5.xlarge", SOLD_OUT}
    for price, places, availability in report.shown["offers"].values():
        assert price > 0
        assert places == sorted(zones) != []
        assert availability == "unknown"


def test_its_instance_is_that_of_boto3(report: Report, ours: dict[str, Any]) -> None:
    shown, instance = report.shown, ours["instance"]
    assert (shown["id"], shown["hostname"], shown["private"]) == (
        instance["InstanceId"], instance["PublicIpAddress"], instance["PrivateIpAddress"],
    )  # fmt: skip
    tags = {each["Key"]: each["Value"] for each in instance["Tags"]}
    assert (tags["dstack_name"], tags["dstack_project"], tags["dstack_user"]) == ("first", "mine", "me")
    assert instance["InstanceType"] == "t3.small"


def test_what_it_made_ends(world: AWS, report: Report) -> None:
    assert report.shown["again"] is None, "an instance that has ended can be ended again"
    world.wait(lambda: "instances" not in world.left(), 60)


def test_refusals_of_ec2_are_errors_of_dstack(report: Report) -> None:
    assert report.refusals["no stock"][0].startswith("NoCapacityError")
    assert "InvalidInstanceID.Malformed" in report.refusals["bad id"][0]
    assert "AuthFailure" in report.refusals["bad key"][0]


def test_the_readme_says_what_ran(report: Report) -> None:
    table.check(ABOUT, report)
