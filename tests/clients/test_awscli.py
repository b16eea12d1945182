"""The AWS CLI against the lab's AWS."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients import table, worlds
from tests.clients.runs import Client, Commands, Report, without_news
from tests.clients.worlds import SOLD_OUT, WRONG_KEY
from tests.lab.aws import AWS
from tests.lab.aws_facts import CANONICAL
from tests.lab.machines import Lab

ABOUT = table.About("AWS CLI", "awscli", "awscli", "AWS", "Led to the lab by `AWS_ENDPOINT_URL`.")


@pytest.fixture(scope="module")
def world(lab: Lab) -> Iterator[AWS]:
    with worlds.aws(lab) as world:
        yield world


@pytest.fixture(scope="module")
def report(world: AWS, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """All that the CLI does to one instance, from its key pair to its end."""
    home = tmp_path_factory.mktemp("home")
    client = Client("awscli", home, {**world.environment, "AWS_DEFAULT_REGION": "us-east-1", "AWS_PAGER": ""})
    aws = Commands(client, "aws", "--output", "json")
    image, shown = worlds.ubuntu(world), aws.report.shown
    shown["regions"] = aws.call("list", "ec2", "describe-regions")["Regions"]
    shown["zones"] = aws.call("list", "ec2", "describe-availability-zones")["AvailabilityZones"]
    wanted = ["--filters", "Name=instance-type,Values=g5.*"]
    shown["types"] = aws.call("list", "ec2", "describe-instance-types", *wanted)["InstanceTypes"]
    shown["images"] = aws.call("list", "ec2", "describe-images", "--owners", CANONICAL)["Images"]
    parameter = "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
    shown["parameter"] = aws.call("get", "ssm", "get-parameter", "--name", parameter)["Parameter"]
    shown["caller"] = aws.call("get", "sts", "get-caller-identity")

    shown["key"] = aws.call("create", "ec2", "create-key-pair", "--key-name", "mine", "--key-type", "ed25519")
    group = aws.call("create", "ec2", "create-security-group", "--group-name", "mine", "--description", "ssh")[
        "GroupId"
    ]
    rule = ["--group-id", group, "--protocol", "tcp", "--port", "22", "--cidr", "192.0.2.0/24"]
    aws.call("create", "ec2", "authorize-security-group-ingress", *rule)
    tags = "ResourceType=instance,Tags=[{Key=Name,Value=first}]"
    order = ["--image-id", image, "--instance-type", "t3.micro", "--key-name", "mine", "--security-group-ids", group]
    (home / "hello").write_text("#!/bin/sh\necho hello\n")
    more = ["--tag-specifications", tags, "--user-data", "file://hello"]
    made = aws.call("create", "ec2", "run-instances", *order, *more)["Instances"][0]["InstanceId"]
    aws.call("get", "ec2", "wait", "instance-running", "--instance-ids", made)
    aws.call("tag", "ec2", "create-tags", "--resources", made, "--tags", "Key=owner,Value=somebody")
    named = ["--filters", "Name=tag:owner,Values=somebody"]
    shown["instances"] = aws.call("list", "ec2", "describe-instances", *named)["Reservations"]
    shown["status"] = aws.call("get", "ec2", "describe-instance-status", "--instance-ids", made)["InstanceStatuses"]
    shown["tags"] = aws.call("tag", "ec2", "describe-tags", "--filters", f"Name=resource-id,Values={made}")["Tags"]
    shown["groups"] = aws.call("list", "ec2", "describe-security-groups", "--group-ids", group)["SecurityGroups"]
    shown["keys"] = aws.call("list", "ec2", "describe-key-pairs")["KeyPairs"]
    machine = world.rental(made).machine
    assert machine is not None
    machine.wait_booted()
    shown["log"] = aws.call("log", "ec2", "get-console-output", "--instance-id", made, "--latest")
    shown["said"] = machine.console()

    aws.refused("no stock", "ec2", "run-instances", "--image-id", image, "--instance-type", SOLD_OUT)
    aws.refused("bad id", "ec2", "terminate-instances", "--instance-ids", "i-0123456789abcdef0")
    aws.refused("bad id", "ec2", "describe-instances", "--instance-ids", "i-wrong")
    aws.refused("bad key", "ec2", "describe-instances", AWS_ACCESS_KEY_ID=WRONG_KEY)

    shown["ended"] = aws.call("end", "ec2", "terminate-instances", "--instance-ids", made)["TerminatingInstances"]
    aws.call("end", "ec2", "wait", "instance-terminated", "--instance-ids", made)
    shown["gone"] = aws.call("get", "ec2", "describe-instances", "--instance-ids", made)["Reservations"]
    aws.call("end", "ec2", "delete-security-group", "--group-id", group)
    aws.call("end", "ec2", "delete-key-pair", "--key-name", "mine")
    return aws.report


@pytest.mark.parametrize(
    ("shown", "method", "key", "options"),
    [
        ("regions", "describe_regions", "Regions", {}),
        ("zones", "describe_availability_zones", "AvailabilityZones", {}),
        (
            "types",
            "describe_instance_types",
            "InstanceTypes",
            {"Filters": [{"Name": "instance-type", "Values": ["g5.*"]}]},
        ),
        ("images", "describe_images", "Images", {"Owners": [CANONICAL]}),
    ],
)
def test_its_lists_are_those_of_boto3(
    world: AWS, report: Report, shown: str, method: str, key: str, options: dict[str, Any]
) -> None:
    theirs, ours = report.shown[shown], getattr(world.client(), method)(**options)[key]
    assert theirs
    assert without_news(ours, theirs) == theirs


def test_the_instance_has_the_tags_that_it_was_given(report: Report) -> None:
    (reservation,) = report.shown["instances"]
    (instance,) = reservation["Instances"]
    assert instance["State"]["Name"] == "running"
    tags = {each["Key"]: each["Value"] for each in instance["Tags"]}
    assert (
        tags == {each["Key"]: each["Value"] for each in report.shown["tags"]} == {"Name": "first", "owner": "somebody"}
    )
    assert report.shown["status"][0]["InstanceState"]["Name"] == "running"


def test_the_key_pair_and_the_group_are_found_again(report: Report) -> None:
    assert report.shown["key"]["KeyMaterial"].startswith("-----BEGIN OPENSSH PRIVATE KEY-----")
    assert [each["KeyFingerprint"] for each in report.shown["keys"]] == [report.shown["key"]["KeyFingerprint"]]
    (group,) = report.shown["groups"]
    assert [each["CidrIp"] for each in group["IpPermissions"][0]["IpRanges"]] == ["192.0.2.0/24"]


def test_the_console_says_what_the_machine_said(report: Report) -> None:
    assert "hello" in report.shown["log"]["Output"]


def test_the_instance_ends(report: Report, world: AWS) -> None:
    assert report.shown["ended"][0]["CurrentState"]["Name"] == "shutting-down"
    assert report.shown["gone"][0]["Instances"][0]["State"]["Name"] == "terminated"
    assert world.left() == {}


@pytest.mark.parametrize(
    ("operation", "codes"),
    [
        ("no stock", ["InsufficientInstanceCapacity"]),
        ("bad id", ["InvalidInstanceID.NotFound", "InvalidInstanceID.Malformed"]),
        ("bad key", ["AuthFailure"]),
    ],
)
def test_errors_have_the_codes_of_ec2(report: Report, operation: str, codes: list[str]) -> None:
    said = report.refusals[operation]
    assert len(said) == len(codes)
    assert all(code in text for code, text in zip(codes, said, strict=True))


def test_the_readme_says_what_ran(report: Report) -> None:
    table.check(ABOUT, report)
