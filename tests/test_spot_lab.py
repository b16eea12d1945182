"""An interruption on a machine that hears of it as on AWS: from a metadata service."""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from typing import ClassVar

import skypool as sky
from skypool import events
from skypool.model import Access, Instance
from skypool_aws import _WATCH as WATCH
from tests.conftest import eventually
from tests.lab.machines import Lab, Machine
from tests.lab.work import hostname, train_until_told


class Metadata(BaseHTTPRequestHandler):
    """Version 2 of the service that spot machines of one large cloud ask: no answer without a token."""

    token = secrets.token_urlsafe(40)
    taken: ClassVar[dict[str, int]] = {}
    """When machines are taken back, by their names."""
    name = ""

    @staticmethod
    def of(machine: Machine) -> type[BaseHTTPRequestHandler]:
        return type("MetadataOf", (Metadata,), {"name": machine.name})

    def do_PUT(self) -> None:
        lives = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "").isdecimal()
        self._say(200 if lives and self.path == "/latest/api/token" else 400, self.token)

    def do_GET(self) -> None:
        if self.headers.get("X-aws-ec2-metadata-token") != self.token:
            self._say(401)
        elif self.name in self.taken and self.path == "/latest/meta-data/spot/instance-action":
            when = datetime.fromtimestamp(self.taken[self.name], UTC)
            self._say(200, json.dumps({"action": "terminate", "time": f"{when:%Y-%m-%dT%H:%M:%SZ}"}))
        else:
            self._say(404)

    def _say(self, status: int, text: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@dataclass(frozen=True)
class SpotHosts(sky.SSH):
    """Hosts that are taken back as that cloud's machines are."""

    def access(self, instance: Instance) -> Access:
        return replace(super().access(instance), watch=WATCH)


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
