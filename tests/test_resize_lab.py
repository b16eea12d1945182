"""Pools of the lab's machines get another size: over ssh and on AWS, with proved ends, and while a line is cut."""

from __future__ import annotations

from pathlib import Path

import pytest

import skypool as sky
from skypool import events
from skypool.errors import LaunchError
from skypool.rental.ledger import Ledger
from tests.conftest import eventually
from tests.lab import work
from tests.lab.aws import AWS
from tests.lab.machines import Lab
from tests.test_aws_pools import provider

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.usefixtures("own_state")]


def until_ended(pool: sky.ComputePool, count: int) -> None:
    eventually(lambda: list(pool.nodes.values()).count("ended") == count, 120, f"the end of {count} nodes")


def test_a_pool_on_aws_goes_from_two_nodes_to_four_and_to_one(aws: AWS) -> None:
    with sky.ComputePool(provider(), nodes=2, slots=1, vcpus=2, budget=50, console="off") as pool:
        first = set(work.hostname() @ pool)
        pool.resize(4)
        pool.wait_ready(4, timeout=200)
        names = work.hostname() @ pool
        assert len(set(names)) == 4
        assert first < set(names)
        seen: list[events.Event] = []
        pool.events.listen(seen.append)
        running = [pool.send(work.long(10.0), node=node) for node in range(4)]
        eventually(lambda: len({e.node for e in seen if isinstance(e, events.NodeStatus) and e.busy}) == 4, 60)
        pool.resize(1)
        assert sorted(each.result(60) for each in running) == sorted(names)  # none was cut off
        until_ended(pool, 3)
        (left,) = [each for each in provider().instances(pool=pool.name) if each.state == "running"]
        assert pool.nodes[left.node] == "ready"
        assert len(work.hostname() @ pool) == 1
    assert aws.left() == {}
    lines = {line.node: line for line in pool.receipt.lines}
    assert sorted(lines) == [0, 1, 2, 3]
    assert all(line.ended for line in lines.values())
    assert all(lines[left.node].until > lines[node].until for node in lines if node != left.node)
    (record,) = Ledger.here().pools(pool.name)
    assert record.receipt(0).usd == pytest.approx(pool.receipt.usd)


def test_hosts_of_the_users_own_are_added_and_retired_and_used_again(lab: Lab) -> None:
    machines = [lab.machine(keys=[lab.public_key]) for _ in range(3)]
    hosts = [sky.Host(each.address, host_key=each.host_key) for each in machines]
    ssh = sky.SSH(hosts=hosts, user="root", identity=str(lab.client_key))
    with sky.ComputePool(ssh, slots=1, console="off") as pool:
        pool.resize(3)
        pool.wait_ready(timeout=120)
        assert set(work.hostname() @ pool) == {each.name for each in machines}
        pool.retire(0)
        pool.resize(1)
        until_ended(pool, 2)
        used = work.hostname() >> pool
        for each in machines:
            agents = [line for line in each.processes().values() if "skypool" in line]
            assert bool(agents) == (each.name == used), agents
        pool.resize(2)
        pool.wait_ready(timeout=120)
        assert len(set(work.hostname() @ pool)) == 2
        pool.resize(4)
        with pytest.raises(LaunchError, match=r"(?s)has 2 of 4 nodes ready and no more are launched.*2 free hosts"):
            pool.wait_ready(timeout=120)
        pool.resize(3)
        pool.wait_ready(timeout=120)
        assert len(set(work.hostname() @ pool)) == 3
    for each in machines:
        each.destroy()


def test_a_node_behind_a_cut_line_is_unreachable_since_its_last_word_and_ready_again_when_it_is_mended(
    lab: Lab, tmp_path: Path
) -> None:
    machines = [lab.machine(keys=[lab.public_key]) for _ in range(2)]
    hosts = [sky.Host(each.address, host_key=each.host_key) for each in machines]
    ssh = sky.SSH(hosts=hosts, user="root", identity=str(lab.client_key))
    with sky.ComputePool(ssh, nodes=2, slots=1, console="off", liveness=60) as pool:
        name = work.hostname() >> pool[0]
        (cut,) = [each for each in machines if each.name == name]
        cut.cut()
        eventually(lambda: pool.nodes[0].startswith("unreachable since "), 60, "the word for a cut line")
        assert pool.nodes[1] == "ready"
        said = pool.nodes[0]
        assert work.hostname() >> pool != name
        cut.mend()
        eventually(lambda: pool.nodes[0] == "ready", 60, f"the line after {said!r}")
        assert work.hostname() >> pool[0] == name
    for each in machines:
        each.destroy()
