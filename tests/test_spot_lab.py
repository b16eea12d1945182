"""An interruption on a machine that hears of it as on AWS: from a metadata service."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import pytest

import skypool as sky
from skypool import events
from skypool.model import Access, Instance
from skypool_aws import _WATCH as WATCH
from tests.conftest import eventually
from tests.lab.machines import Lab
from tests.lab.spot_metadata import Metadata
from tests.lab.work import hostname, train_until_told


@dataclass(frozen=True)
class SpotHosts(sky.SSH):
    """Hosts that are taken back as that cloud's machines are."""

    def access(self, instance: Instance) -> Access:
        return replace(super().access(instance), watch=WATCH)


@pytest.mark.slow
def test_a_machine_whose_metadata_says_that_it_goes_is_left(lab: Lab) -> None:
    machines = [lab.machine(keys=[lab.public_key], metadata=Metadata.of) for _ in range(2)]
    hosts = [sky.Host(machine.address, host_key=machine.host_key) for machine in machines]
    told: list[events.Event] = []
    pool = sky.ComputePool(SpotHosts(hosts=hosts, user="root", identity=str(lab.client_key)), slots=1, console="off")
    pool.events.listen(told.append)
    with pool:
        running = train_until_told() > pool
        eventually(lambda: any(isinstance(e, events.NodeStatus) and e.busy for e in told), 30, "the call's begin")
        at = int(time.time()) + 120
        for machine in machines:
            Metadata.taken[machine.name] = at
        name, told_at = running.result(30)
        assert told_at == at
        del Metadata.taken[next(machine.name for machine in machines if machine.name != name)]
        eventually(lambda: pool.nodes.get(1) == "ready", 30, "its replacement")
        assert (hostname() >> pool) != name
        eventually(lambda: pool.nodes[0] == "ended", 30, "the end of a node without calls")
    assert [(e.node, e.at) for e in told if isinstance(e, events.NodeInterruption)] == [(0, at)]
    for machine in machines:
        assert not [line for line in machine.processes().values() if "skypool" in line or "instance-action" in line]
        machine.destroy()
