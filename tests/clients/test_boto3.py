"""Scripts in the manner of boto3's documentation against the lab's AWS."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients import table, worlds
from tests.clients.runs import Client, Report
from tests.clients.worlds import SOLD_OUT, WRONG_KEY
from tests.lab import aws_facts
from tests.lab.aws import AWS
from tests.lab.machines import Lab

ABOUT = table.About("boto3", "boto3", "boto3", "AWS", "Led to the lab by `AWS_ENDPOINT_URL`.")


@pytest.fixture(scope="module")
def world(lab: Lab) -> Iterator[AWS]:
    with worlds.aws(lab) as world:
        yield world


@pytest.fixture(scope="module")
def report(world: AWS, tmp_path_factory: pytest.TempPathFactory) -> Report:
    client = Client("boto3", tmp_path_factory.mktemp("home"), world.environment)
    return client.script("boto3_ec2.py", worlds.ubuntu(world), SOLD_OUT, WRONG_KEY)


def test_paginators_return_every_page(report: Report) -> None:
    assert len(report.shown["types"]) > 100  # a page of DescribeInstanceTypes has at most 100
    assert set(report.shown["types"]) == aws_facts.types_in("us-east-1")
    assert sorted(report.shown["regions"]) == sorted(aws_facts.ENABLED)
    assert report.shown["zones"] == [f"us-east-1{letter}" for letter in "abcdef"]


def test_instances_run_and_are_found_by_their_tags(report: Report) -> None:
    shown = report.shown
    assert (shown["state"], shown["type"]) == ("running", "t3.micro")
    assert len(shown["ids"]) == 3
    assert shown["named"] == shown["ids"][:1]
    assert sorted(shown["listed"]) == sorted(shown["ids"][:2])
    assert shown["ports"] == [22, 80]


def test_a_spot_instance_has_its_request_and_spot_prices_have_zones(report: Report, world: AWS) -> None:
    assert (report.shown["lifecycle"], report.shown["spot"]) == ("spot", True)
    prices = report.shown["prices"]
    assert prices
    assert {zone for zone, _ in prices} <= set(report.shown["zones"])
    assert all(float(price) > 0 for _, price in prices)
    assert world.left() == {}


def test_errors_are_client_errors_with_the_codes_of_ec2(report: Report) -> None:
    known = "An error occurred ({}) when calling the {} operation"
    assert known.format("InsufficientInstanceCapacity", "RunInstances") in report.refusals["no stock"][0]
    assert known.format("InvalidInstanceID.NotFound", "DescribeInstances") in report.refusals["bad id"][0]
    assert known.format("InvalidInstanceID.NotFound", "TerminateInstances") in report.refusals["bad id"][1]
    assert known.format("AuthFailure", "DescribeInstances") in report.refusals["bad key"][0]


def test_the_readme_says_what_ran(report: Report) -> None:
    table.check(ABOUT, report)
