"""Whole pools on the lab's AWS: real machines, booted with the user data that the driver sent, reached by ssh."""

from __future__ import annotations

import platform
import socket

import pytest

import skypool as sky
from tests.lab.aws import AWS


def where() -> tuple[str, str]:
    return socket.gethostname(), platform.machine()


def test_a_pool_of_the_cheapest_machines_runs_calls_and_leaves_nothing(aws: AWS) -> None:
    pool = sky.ComputePool(sky.AWS(region="us-east-1", ssh_from=aws.public_address()), nodes=2, vcpus=2, image=sky.Image(pip=["numpy"]), console="plain")
    with pool:
        assert len({pool.submit(where).result() for _ in range(8)}) >= 1
        print(pool.explain())
        print(aws.count())
    print(pool.receipt)
    assert aws.left() == {}
