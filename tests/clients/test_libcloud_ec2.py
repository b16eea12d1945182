"""Apache Libcloud's driver for EC2 against the lab's AWS, and its lists beside boto3's."""

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
    "Apache Libcloud (EC2)", "apache-libcloud", "libcloud", "AWS",
    "Led to the lab by its driver's arguments `host`, `port` and `secure`.",
)  # fmt: skip


@pytest.fixture(scope="module")
def world(lab: Lab) -> Iterator[AWS]:
    with worlds.aws(lab) as world:
        yield world


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    """What boto3 reads at the moment when libcloud reads its lists."""
    return {}


@pytest.fixture(scope="module")
def report(world: AWS, ours: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Report:
    ec2 = world.client()

    def beside(call: Any, moment: str) -> None:
        """Read by boto3 what the lab holds while the console is asked for, when all is there."""
        if call.action == "DescribeVolumes" and moment == "after" and not ours:
            ours["asking"] = True
            ours["volumes"] = ec2.describe_volumes()["Volumes"]
            (reservation,) = ec2.describe_instances()["Reservations"]
            ours["instances"] = reservation["Instances"]
            ours["keys"] = ec2.describe_key_pairs()["KeyPairs"]
            ours["groups"] = ec2.describe_security_groups()["SecurityGroups"]

    world.on_call = beside
    client = Client("libcloud", tmp_path_factory.mktemp("home"), world.environment)
    return client.script("libcloud_ec2.py", worlds.ubuntu(world), SOLD_OUT, WRONG_KEY)


def test_its_lists_of_what_there_is_are_those_of_boto3(world: AWS, report: Report) -> None:
    ec2, shown = world.client(), report.shown
    assert shown["zones"] == [each["ZoneName"] for each in ec2.describe_availability_zones()["AvailabilityZones"]] != []
    assert shown["images"] == {each["ImageId"]: each["Name"] for each in ec2.describe_images()["Images"]} != {}
    assert shown["networks"] == {each["VpcId"]: each["CidrBlock"] for each in ec2.describe_vpcs()["Vpcs"]} != {}
    subnets = {each["SubnetId"]: each["AvailabilityZone"] for each in ec2.describe_subnets()["Subnets"]}
    assert shown["subnets"] == subnets != {}


def test_its_list_of_nodes_is_that_of_boto3(report: Report, ours: dict[str, Any]) -> None:
    (node,), (instance,) = report.shown["nodes"], ours["instances"]
    assert node == {
        "id": instance["InstanceId"], "name": "first", "state": instance["State"]["Name"],
        "public": [instance["PublicIpAddress"]], "private": [instance["PrivateIpAddress"]],
        "type": instance["InstanceType"], "zone": instance["Placement"]["AvailabilityZone"],
        "image": instance["ImageId"], "key": instance["KeyName"],
        "tags": {each["Key"]: each["Value"] for each in instance["Tags"]},
        "groups": sorted(each["GroupId"] for each in instance["SecurityGroups"]),
    }  # fmt: skip
    assert node["tags"] == report.shown["tags"] == {"Name": "first", "owner": "somebody"}


def test_its_other_lists_are_those_of_boto3(report: Report, ours: dict[str, Any]) -> None:
    shown = report.shown
    assert shown["keys"] == {each["KeyName"]: each["KeyFingerprint"] for each in ours["keys"]}
    assert shown["keys"] == {"mine": shown["made_key"]}
    assert shown["groups"] == {each["GroupName"]: each["GroupId"] for each in ours["groups"]}
    assert sorted(shown["group_names"]) == sorted(shown["groups"]) == ["default", "mine"]
    volumes = [[each["VolumeId"], each["Size"], each["Attachments"][0]["InstanceId"]] for each in ours["volumes"]]
    assert shown["volumes"] == volumes != []


def test_the_console_says_what_the_machine_said(report: Report) -> None:
    assert "hello" in report.shown["log"]


def test_what_it_made_ends(report: Report, world: AWS) -> None:
    assert [report.shown[each] for each in ("destroyed", "group_gone", "key_gone")] == [True, True, True]
    assert world.left() == {}


def test_errors_have_the_codes_of_ec2(report: Report) -> None:
    assert "InsufficientInstanceCapacity" in report.refusals["no stock"][0]
    assert "InvalidInstanceID.NotFound" in report.refusals["bad id"][0]
    assert "InvalidCredsError" in report.refusals["bad key"][0]


def test_the_readme_says_what_ran(report: Report) -> None:
    table.check(ABOUT, report)
