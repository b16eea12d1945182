"""Ray on machines of the lab that are killed, taken back and lost, and on spot machines of the lab's AWS."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

import skypool as sky
from tests.conftest import eventually
from tests.engines import ray_work
from tests.lab.aws import AWS
from tests.lab.machines import Lab
from tests.soak import _clusters, ray

pytestmark = [pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(900)]
ZONES = ("us-east-1a", "us-east-1b")


def test_nodes_and_the_head_that_are_lost_come_back_and_nothing_is_left(lab: Lab) -> None:
    """One run of `python -m tests.soak.ray`, with one of each of its steps."""
    machines = [ray.machine(lab) for _ in range(_clusters.MACHINES)]
    done = ray.run(0, random.Random("1/0"), lab, machines)
    for each in machines:
        each.destroy()
    print(done.seconds, done.steps, done.said)
    assert done.troubles == []
    assert done.steps.keys() == {*ray.STEPS, ray.LAST, "end"}


@pytest.mark.usefixtures("own_state")
def test_spot_machines_of_two_zones_on_aws_compute_right_when_one_is_taken_back(aws: AWS) -> None:
    aws.capacity(0)
    for zone in ZONES:
        aws.capacity(1, "*", zone, "spot")
    pool = sky.ComputePool(
        sky.AWS(region="us-east-1", ssh_from="0.0.0.0/0"),
        vcpus=2, nodes=2, market="spot", budget=20, slots=1, console="off",
        image=sky.Image(pip=["ray[default]==2.60.0"]),
    )  # fmt: skip
    with pool, ThreadPoolExecutor() as threads:
        with sky.ray.cluster(pool, cpus=2, object_store=100 << 20) as cluster:
            assert {each.zone for each in aws.rentals} == set(ZONES)
            (other,) = {0, 1} - {cluster.head}
            address = ray_work.own_address().with_options(node=other) >> pool
            (taken,) = [each for each in aws.rentals if each.machine and each.machine.address == address]
            assert taken.machine is not None
            squares = threads.submit(cluster.run, ray_work.slow_squares, 40, 1.0)
            ray.do(taken.machine, {"do": "until task", "task": "ray::slow_square"})
            aws.capacity(1, "*", "us-east-1c", "spot")
            aws.interrupt(taken.id, notice=30.0)
            assert squares.result(200) == [n * n for n in range(40)]
            names = {f"{pool.name}-{cluster.head}": "ALIVE", f"{pool.name}-{other}": "DEAD", f"{pool.name}-2": "ALIVE"}
            eventually(lambda: cluster.nodes() == names, 200, "the next node")
            assert len(cluster.run(ray_work.where)) == 2
        assert pool.services == []
    assert sorted((line.place, line.ended) for line in pool.receipt.lines) == [
        ("us-east-1a", True),
        ("us-east-1b", True),
        ("us-east-1c", True),
    ]
    assert pool.receipt.usd == pytest.approx(sum(line.usd for line in pool.receipt.lines))
    assert pool.receipt.usd > 0
    assert aws.left() == {}
