"""Ray on machines of the lab that are killed, taken back and lost: one run of `python -m tests.soak.ray`."""

from __future__ import annotations

import random

import pytest

from tests.lab.machines import Lab
from tests.soak import _clusters, ray

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(900)]


def test_nodes_and_the_head_that_are_lost_come_back_and_nothing_is_left(lab: Lab) -> None:
    machines = [ray.machine(lab) for _ in range(_clusters.MACHINES)]
    done = ray.run(0, random.Random("1/0"), lab, machines)
    for each in machines:
        each.destroy()
    print(done.seconds, done.steps, done.said)
    assert done.troubles == []
    assert done.steps.keys() == {*ray.STEPS, ray.LAST, "end"}
