"""What it costs to rent a thousand instances, prove them ended and tidy up, beside a bare boto3 that does the same.

python -m tests.benchmarks.launch

Both do so on the lab's AWS, whose limits on requests are on; no machine boots.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from typing import Any

from skypool import events
from skypool.event_loop import Loop
from skypool.model import Need
from skypool.rental.pool_account import Rental
from skypool.rental.pool_terms import Terms
from skypool.rental.supply import Supply
from skypool_aws import AWS
from skypool_images import Image
from tests.lab.aws import AWS as Lab

MANY = 1000


def rows() -> list[tuple[str, str, str, str]]:
    """(what, figure, baseline, ratio)."""
    bare = min(timed(by_hand) for _ in range(2))
    ours = min(timed(by_skypool) for _ in range(2))
    return [
        (
            f"{MANY} instances rented and proved ended",
            f"{ours:.1f} s",
            f"{bare:.1f} s by boto3",
            f"{ours / bare:.2f} (≤ 1.2)",
        )
    ]


def timed(work: Any) -> float:
    with Lab() as aws, tempfile.TemporaryDirectory() as home:
        aws.throttle.requests = True
        os.environ.update(aws.environment, XDG_STATE_HOME=home, XDG_CACHE_HOME=home)
        work(aws, prepare=True)
        begun = time.perf_counter()
        work(aws)
        spent = time.perf_counter() - begun
        assert aws.left() == {}, aws.left()
        return spent


def by_hand(aws: Lab, prepare: bool = False) -> None:
    """What the limits allow: one create with as many tags, one end, and looks until all are gone."""
    if prepare:
        return
    ec2 = aws.client()
    image = aws.client("ssm").get_parameter(
        Name="/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
    )["Parameter"]["Value"]
    tags = [{"Key": f"bare-{n}", "Value": "of the same number and length"} for n in range(7)]
    tagged = [{"ResourceType": each, "Tags": tags} for each in ("instance", "volume", "network-interface")]
    made = ec2.run_instances(
        ImageId=image, InstanceType="c5.large", MinCount=MANY, MaxCount=MANY, TagSpecifications=tagged
    )
    ids = [each["InstanceId"] for each in made["Instances"]]
    left = set(ids)
    ec2.terminate_instances(InstanceIds=ids)
    while left:
        pages = ec2.get_paginator("describe_instances").paginate(InstanceIds=sorted(left))
        seen = [each for page in pages for some in page["Reservations"] for each in some["Instances"]]
        left = {each["InstanceId"] for each in seen if each["State"]["Name"] != "terminated"}
        time.sleep(0.5 if left else 0)


def by_skypool(aws: Lab, prepare: bool = False) -> None:
    """With the ledger, keys, tags, a security group, and the proof that nothing is left."""
    driver = AWS(region="us-east-1", ssh_from="203.0.113.7")
    terms = Terms("thousand", Need(vcpus=2), MANY, MANY, 600.0, None, 90.0, 5.0, Image())
    supply = Supply([driver], terms, Rental(terms, _hear))
    Loop.shared().run(supply.look())
    if prepare:
        return  # prices are known from here on
    supply.begin()
    rented = Loop.shared().run(supply.rent(range(MANY), None, asyncio.sleep))
    assert len(rented.instances) == MANY, rented.error
    left = list(rented.instances)
    while left:
        failed = supply.terminate(left)
        left = [each for each in left if each.node in failed]
    supply.close(None, proved=True)


def _hear(event: events.Event) -> None:
    raise AssertionError(event)


if __name__ == "__main__":
    for row in rows():
        print(*row, sep="  |  ")
