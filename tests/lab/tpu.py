"""Cloud TPU as its clients see it: queued resources, nodes of several hosts, operations that are polled.

    with TPU(lab) as tpu:  # or the fixtures `tpu`, and `tpu_api` without machines
        driver = sky.GCP()

What it does and how it refuses is what the API's reference, its client and public threads tell of the real one (read
2026-11-21). Each host of a slice is a machine of the lab, booted with the startup script of its node, which runs once
sshd is up. What is switched off is billed on; a queued resource that failed or was suspended stays until it is deleted.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar

import google.cloud.tpu_v2 as api
from google.protobuf import json_format

from skypool.accelerators import tables
from tests.lab import tpu_wares as wares
from tests.lab.cloud import Cloud, Mortal, Refused, Rental, Request
from tests.lab.google_metadata import handler
from tests.lab.machines import Lab, Machine

PROJECT = "lab-project"
TYPE = "type.googleapis.com/google.cloud.tpu.v2"
CODES = {
    "INVALID_ARGUMENT": (400, 3), "FAILED_PRECONDITION": (400, 9), "UNAUTHENTICATED": (401, 16),
    "PERMISSION_DENIED": (403, 7), "NOT_FOUND": (404, 5), "ALREADY_EXISTS": (409, 6), "ABORTED": (409, 10),
    "RESOURCE_EXHAUSTED": (429, 8), "INTERNAL": (500, 13), "UNAVAILABLE": (503, 14),
}  # fmt: skip
"""Statuses: of HTTP, and of gRPC."""
NO_CAPACITY = (
    'There is no more capacity in the zone "{zone}"; you can try in another zone where Cloud TPU Nodes are offered '
    "(see https://cloud.google.com/tpu/docs/regions) [EID: 0x5ca1ab1e]"
)
NO_QUOTA = "Quota 'TPUV5sPreemptibleLitepodPerProjectPerRegionForTPUAPI' exhausted. Limit 0 in region us-central1."
DISABLED = "Compute Engine API has not been used in project 1234 before or it is disabled."
EMPTY = {"@type": "type.googleapis.com/google.protobuf.Empty", "value": {}}
ALIVE = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE", "DELETING", "SUSPENDING")
_LABEL = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_VALUE = re.compile(r"[a-z0-9_-]{0,63}")
_ID = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_HERE = "/v2/projects/{project}/locations/{zone}"


def refused(status: str, message: str, *details: Any) -> Refused:
    return Refused(CODES[status][0], error(status, message, *details))


def error(status: str, message: str, *details: Any) -> dict[str, Any]:
    about = {"code": CODES[status][0], "message": message, "status": status, "details": [*details]}
    return {"error": about}


@dataclass
class Delays:
    """Seconds of the lab's clock: until a queued resource is looked at, in which its node is made, in which it is
    deleted; between the notice that a spot slice is taken and its end.

    Attributes:
        unseen: not seconds: so many lists do not have a new queued resource yet.
    """

    accepted: float = 0.05
    provisioning: float = 0.1
    deleting: float = 0.05
    notice: float = 30.0
    unseen: int = 0


@dataclass
class Host(Rental):
    """One host of a slice; `number` is its place among them."""

    slice: str = ""
    number: int = 0
    ip: str = ""


@dataclass
class Queued(Mortal):
    """A queued resource, with its node once it has one. `state` and `node_state` are as the API calls them."""

    zone: str
    id: str
    told: dict[str, Any]
    created: float
    state: str = "CREATING"
    failure: dict[str, Any] | None = None
    hosts: list[Host] = field(default_factory=list)
    node_state: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    there: bool = True
    unseen: int = 0
    preempted: bool = False
    token: str = field(default_factory=lambda: f"ya29.vm-{secrets.token_hex(12)}")

    @property
    def node(self) -> dict[str, Any]:
        told: dict[str, Any] = self.told["tpu"]["nodeSpec"][0]["node"]
        return told

    @property
    def kind(self) -> str:
        return str(self.node["acceleratorType"])

    @property
    def market(self) -> str:
        return "spot" if "spot" in self.told else "on-demand"

    @property
    def until(self) -> float | None:
        """When it is no longer wanted, if it still waits."""
        text = self.told.get("queueingPolicy", {}).get("validUntilTime")
        return datetime.fromisoformat(text).timestamp() if text else None


class TPU(Cloud[Host]):
    """One project. See `Cloud`; actions are "POST queuedResources", "GET queuedResource", "PATCH node", …

    Attributes:
        waits: whether what there is no room for waits for it, instead of failing.
        ready: whether nodes become so at all.
        unreachable: zones that lists lack, as they say.
    """

    name: ClassVar[str] = "tpu"

    def __init__(self, lab: Lab | None = None) -> None:
        super().__init__(lab)
        self.delays, self.waits, self.ready = Delays(), False, True
        self.queued: dict[tuple[str, str], Queued] = {}
        self.operations: dict[str, dict[str, Any]] = {}
        self.unreachable: list[str] = []
        self._requests: dict[str, str] = {}
        self._doomed: list[tuple[str, str, str]] = []
        self._numbers = itertools.count(1)
        table = self._table()
        self.routes = {route: do for route, _, do in table}
        self._names = {route: name for route, name, _ in table}

    def _table(self) -> list[tuple[str, str, Callable[[Request], Any]]]:
        queued, nodes = f"{_HERE}/queuedResources", f"{_HERE}/nodes"
        return [
            ("GET /v2/projects/{project}/locations", "GET locations", self._locations),
            (f"GET {_HERE}/acceleratorTypes", "GET acceleratorTypes", self._types),
            (f"GET {_HERE}/runtimeVersions", "GET runtimeVersions", self._runtimes),
            (f"GET {_HERE}/operations/{{id}}", "GET operation", self._operation),
            (f"POST {queued}", "POST queuedResources", self._queue),
            (f"GET {queued}", "GET queuedResources", self._list_queued),
            (f"GET {queued}/{{id}}", "GET queuedResource", lambda r: self._shown(self._known(r))),
            (f"DELETE {queued}/{{id}}", "DELETE queuedResource", self._delete),
            (f"GET {nodes}", "GET nodes", self._list_nodes),
            (f"GET {nodes}/{{id}}", "GET node", lambda r: self._shown_node(self._known_node(r))),
            (f"PATCH {nodes}/{{id}}", "PATCH node", self._update),
            (f"DELETE {nodes}/{{id}}", "DELETE node", self._delete_node),
        ]

    @property
    def environment(self) -> dict[str, str]:
        """Compute Engine is asked here, too, and is not enabled."""
        return {
            "GOOGLE_CLOUD_PROJECT": PROJECT,
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": f"{self.url}/",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{self.url}/compute/v1/",
        }

    def named(self, request: Request) -> str:
        return self._names.get(request.action, request.action)

    def check(self, request: Request) -> None:
        """Who shows no token is a client of the lab; the token of a machine is good as long as its slice is there."""
        if request.path.startswith("/compute/"):
            info = {
                "@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "SERVICE_DISABLED",
                "domain": "googleapis.com", "metadata": {"service": "compute.googleapis.com"},
            }  # fmt: skip
            body = error("PERMISSION_DENIED", DISABLED, info)
            body["error"]["errors"] = [{"reason": "accessNotConfigured", "message": DISABLED, "domain": "usageLimits"}]
            raise Refused(403, body)
        shown = request.headers.get("authorization", "").removeprefix("Bearer ")
        if shown and shown not in {each.token for each in self.queued.values() if _account(each)}:
            raise refused("UNAUTHENTICATED", "Request had invalid authentication credentials.")

    def throttled(self, request: Request) -> Refused:
        return refused("RESOURCE_EXHAUSTED", "Quota exceeded for quota metric 'Create requests' and limit 'per minute'")

    # --- what there is ---------------------------------------------------------------------------------------

    def count(self) -> dict[str, int]:
        """Hosts that are billed or will be, and queued resources, which hold quota."""
        with self.lock:
            self.tick()
            hosts = sum(len(each.hosts) for each in self.queued.values() if each.state in ALIVE)
            return {"instances": hosts, "queued resources": len(self.queued)}

    def room(self, kind: str, place: str, market: str) -> float:
        """How many more slices there can be."""
        left = super().room(kind, place, market)
        taken = [each for each in self.queued.values() if each.state in ("PROVISIONING", "ACTIVE", "DELETING")]
        return left - sum((each.kind, each.zone, each.market) == (kind, place, market) for each in taken)

    def slice_of(self, id: str) -> Queued | None:
        """Of a host, or by its own name."""
        name = re.sub(r"-w-\d+$", "", id)
        return next((each for each in self.queued.values() if each.id == name), None)

    # --- what happens to it ----------------------------------------------------------------------------------

    def refuse(self, action: str, status: str, message: str, times: int | None = 1, **when: Any) -> None:
        """Refuse the next calls in its own words."""
        self.fail(action, CODES[status][0], error(status, message), times=times, **when)

    def doom(self, how: str, status: str = "RESOURCE_EXHAUSTED", message: str = NO_CAPACITY) -> None:
        """The next queued resource is accepted, and then: "failed" it is in that state, with this error; "operation"
        its operation ends with the error, and there is none."""
        with self.lock:
            self._doomed.append((how, status, message))

    def preempt(self, id: str) -> None:
        """Give the notice, and then take a spot slice back."""
        with self.lock:
            if (queued := self.slice_of(id)) is not None:
                queued.preempted = True
                self.later(self.delays.notice, lambda: self._taken(queued))

    def take(self, id: str) -> None:
        """Take a slice back at once."""
        with self.lock:
            if (queued := self.slice_of(id)) is not None:
                self._taken(queued)

    def _taken(self, queued: Queued) -> None:
        if queued.state != "ACTIVE":
            return
        queued.preempted, queued.node_state, queued.state = True, "PREEMPTED", "SUSPENDING"
        self._switch_off(queued)

        def suspended() -> None:
            if queued.state == "SUSPENDING":
                queued.state = "SUSPENDED"

        self.later(self.delays.deleting, suspended)

    def vanish(self, id: str) -> None:
        """Somebody else deletes all of it."""
        with self.lock:
            if (queued := self.slice_of(id)) is not None:
                self._switch_off(queued)
                self._gone(queued)

    def undying(self, id: str, times: int | None) -> None:
        """It survives being deleted so often; None: always. Quiet if it is gone."""
        with self.lock:
            if (queued := self.slice_of(id)) is not None:
                queued.undying = times

    def off(self, rental: Host) -> None:
        """It is billed on: nobody at Google looks at what is inside."""
        rental.state = "off"

    # --- queued resources ------------------------------------------------------------------------------------

    def _queue(self, request: Request) -> Any:
        zone, id = request.by["zone"], request.query.get("queuedResourceId", "")
        if (known := self._requests.get(request.query.get("requestId", ""))) is not None:
            return self.operations[known]
        told = _parsed(api.QueuedResource, request.body)
        self._check(zone, id, told)
        if (zone, id) in self.queued:
            raise refused(
                "ALREADY_EXISTS", f"Resource 'projects/{PROJECT}/locations/{zone}/queuedResources/{id}' exists"
            )
        doom = self._doomed.pop(0) if self._doomed else ("", "", "")
        made = Queued(zone, id, told, self.clock.now(), unseen=self.delays.unseen)
        made.labels = dict(made.node.get("labels", {}))
        if doom[0] != "operation":
            self.queued[zone, id] = made
            self._hosts(made)
            self.later(self.delays.accepted, lambda: self._looked_at(made, doom))
        operation = self._begun(zone, f"queuedResources/{id}", "create")
        if doom[0] == "operation":
            fault = {"code": CODES[doom[1]][1], "message": doom[2].format(zone=zone)}
            self.later(self.delays.accepted, lambda: operation.update(done=True, error=fault))
        else:
            about = {"@type": f"{TYPE}.QueuedResource", "name": self._path(zone, "queuedResources", id)}
            self.later(self.delays.accepted, lambda: operation.update(done=True, response=about))
        if asked := request.query.get("requestId"):
            uuid.UUID(asked)
            self._requests[asked] = operation["name"]
        return operation

    def _check(self, zone: str, id: str, told: dict[str, Any]) -> None:
        specs = told.get("tpu", {}).get("nodeSpec", [])
        if not _ID.fullmatch(id) or len(specs) != 1 or specs[0].get("parent") != f"projects/{PROJECT}/locations/{zone}":
            raise refused("INVALID_ARGUMENT", f"Invalid queued resource {id!r}: one node in its own location is needed")
        node, asked = specs[0].get("node", {}), specs[0]
        if not _ID.fullmatch(asked.get("nodeId", "")):
            raise refused("INVALID_ARGUMENT", "Invalid node id")
        kind = next((each for each in wares.types(zone) if each.type == node.get("acceleratorType")), None)
        if kind is None:
            raise refused(
                "INVALID_ARGUMENT", f"The accelerator {node.get('acceleratorType')} was not found in zone {zone}."
            )
        if node.get("runtimeVersion") != wares.RUNTIMES[kind.generation]:
            raise refused("INVALID_ARGUMENT", f"Runtime version {node.get('runtimeVersion')} is not for {kind.type}.")
        labels = node.get("labels", {})
        if len(labels) > 64 or any(not _LABEL.fullmatch(k) or not _VALUE.fullmatch(v) for k, v in labels.items()):
            raise refused("INVALID_ARGUMENT", f"Invalid labels {labels}")
        if sum(map(len, node.get("metadata", {}).values())) > 512 * 1024:
            raise refused("INVALID_ARGUMENT", "Metadata is larger than 512 KiB")
        if "guaranteed" in told and "spot" in told:
            raise refused("INVALID_ARGUMENT", "A queued resource is guaranteed or spot")

    def _hosts(self, queued: Queued) -> None:
        for number in range(tables.slices()[queued.kind].vms):
            host = Host(
                f"{queued.id}-w-{number}", "host", queued.zone, queued.market, queued.created,
                slice=queued.id, number=number,
            )  # fmt: skip
            queued.hosts.append(host)

    def _looked_at(self, queued: Queued, doom: tuple[str, str, str] = ("", "", "")) -> None:
        if queued.state not in ("CREATING", "WAITING_FOR_RESOURCES") or not queued.there:
            return
        late = queued.until is not None and self.clock.now() > queued.until
        if doom[0] == "failed" or late:
            text = doom[2].format(zone=queued.zone) or "The valid until time of the queued resource has passed."
            self._failed(queued, doom[1] or "RESOURCE_EXHAUSTED", text)
        elif self.room(queued.kind, queued.zone, queued.market) > 0:
            queued.state, queued.node_state = "PROVISIONING", "CREATING"
            self._boot(queued)
        elif self.waits:
            queued.state = "WAITING_FOR_RESOURCES"
            self.later(self.delays.accepted, lambda: self._looked_at(queued))
        else:
            self._failed(queued, "RESOURCE_EXHAUSTED", NO_CAPACITY.format(zone=queued.zone))

    def _failed(self, queued: Queued, status: str, text: str) -> None:
        queued.state, queued.failure = "FAILED", {"code": CODES[status][1], "message": text}

    def _boot(self, queued: Queued) -> None:
        """All of its hosts, beside everything else."""
        metadata = queued.node.get("metadata", {})
        users = dict(line.split(":", 1) for line in metadata.get("ssh-keys", "").splitlines() if line)
        user, key = next(iter(users.items()), ("root", ""))

        account = str(queued.node.get("serviceAccount", {}).get("email", ""))

        def one(host: Host) -> None:
            def says() -> dict[str, str]:
                return {
                    "preempted": "TRUE" if queued.preempted else "FALSE",
                    "maintenance-event": "NONE",
                    "attributes/accelerator-type": queued.kind,
                    "attributes/agent-worker-number": str(host.number),
                }

            def prepare(machine: Machine) -> None:
                host.machine = machine
                machine.serve_metadata(lambda _: handler(says, account and queued.token))
                wares.dress(machine)

            script = metadata.get("startup-script", "")
            self.boot(host, user_data=script, keys=[key] if key else [], user=user, prepare=prepare)
            if host.machine is not None:
                wares.plug(host.machine, queued.kind)

        def work() -> None:
            try:
                for host in queued.hosts:
                    if queued.there and queued.state == "PROVISIONING":
                        self.rentals[host.id] = host
                        one(host)
            except Exception as e:  # `close` raises it; until then the client must not wait for ever
                with self.lock:
                    self._failed(queued, "INTERNAL", f"the lab could not boot a host: {e}")
                raise
            with self.lock:
                if not queued.there:  # it was ended meanwhile
                    self._switch_off(queued)
                self.later(self.delays.provisioning, lambda: self._active(queued))

        if self.lab is None:
            self.rentals.update({host.id: host for host in queued.hosts})
            self.later(self.delays.provisioning, lambda: self._active(queued))
        else:
            self._work.submit(self.watched, work)

    def _active(self, queued: Queued) -> None:
        if queued.state != "PROVISIONING" or not self.ready:
            return
        queued.state, queued.node_state = "ACTIVE", "READY"
        for host in queued.hosts:
            host.state = "READY"
            host.ip = host.machine.address if host.machine else f"203.0.113.{next(self._numbers) % 250 + 1}"

    def _delete(self, request: Request) -> Any:
        queued = self._known(request)
        if queued.node_state and request.query.get("force") != "true":
            raise refused("FAILED_PRECONDITION", f"{queued.id} has a node; delete that first, or use force")
        if queued.state == "DELETING":
            raise refused("FAILED_PRECONDITION", f"{queued.id} is being deleted already")
        return self._end_of(queued, f"queuedResources/{queued.id}")

    def _end_of(self, queued: Queued, what: str) -> dict[str, Any]:
        operation = self._begun(queued.zone, what, "delete")
        if queued.survives():
            operation.update(done=True, response=EMPTY)
            return operation
        queued.state, queued.node_state = "DELETING", "DELETING" if queued.node_state else ""
        queued.there = False
        self._switch_off(queued)

        def gone() -> None:
            self._gone(queued)
            operation.update(done=True, response=EMPTY)

        self.later(self.delays.deleting, gone)
        return operation

    def _switch_off(self, queued: Queued) -> None:
        """Its machines end, beside everything else."""
        queued.there = False
        for host in queued.hosts:
            host.living = False
            self.end(host, lambda: None)

    def _gone(self, queued: Queued) -> None:
        queued.there = False
        self.queued.pop((queued.zone, queued.id), None)
        for host in queued.hosts:
            host.living = False

    def _shown(self, queued: Queued) -> dict[str, Any]:
        state: dict[str, Any] = {"state": api.QueuedResourceState.State[queued.state].value}
        if queued.failure is not None:
            state["failedData"] = {"error": queued.failure}
        node = {key: each for key, each in queued.node.items() if key != "metadata"}
        spec = {**queued.told["tpu"]["nodeSpec"][0], "node": {**node, "labels": queued.labels}}
        return {
            **queued.told, "name": self._path(queued.zone, "queuedResources", queued.id), "tpu": {"nodeSpec": [spec]},
            "state": state, "createTime": _time(queued.created),
        }  # fmt: skip

    # --- nodes -----------------------------------------------------------------------------------------------

    def _shown_node(self, queued: Queued) -> dict[str, Any]:
        ends = [
            {"ipAddress": host.ip, "port": 8470, "accessConfig": {"externalIp": host.ip}}
            for host in queued.hosts
            if host.ip
        ]
        return {
            **queued.node, "name": self._path(queued.zone, "nodes", self._node_id(queued)), "labels": queued.labels,
            "state": api.Node.State[queued.node_state].value, "health": 1, "createTime": _time(queued.created),
            "networkEndpoints": ends, "queuedResource": self._path(queued.zone, "queuedResources", queued.id),
        }  # fmt: skip

    @staticmethod
    def _node_id(queued: Queued) -> str:
        return str(queued.told["tpu"]["nodeSpec"][0]["nodeId"])

    def _update(self, request: Request) -> Any:
        queued = self._known_node(request)
        told = _parsed(api.Node, request.body)
        if request.query.get("updateMask") != "labels":
            raise refused("INVALID_ARGUMENT", f"the lab does not update {request.query.get('updateMask')}")
        if queued.node_state != "READY":
            raise refused("FAILED_PRECONDITION", f"node {queued.id} is in state {queued.node_state}")
        queued.labels = dict(told.get("labels", {}))
        operation = self._begun(queued.zone, f"nodes/{queued.id}", "update")
        return operation | {"done": True, "response": {"@type": f"{TYPE}.Node", **self._shown_node(queued)}}

    def _delete_node(self, request: Request) -> Any:
        """The queued resource stays, suspended."""
        queued = self._known_node(request)
        operation = self._begun(queued.zone, f"nodes/{queued.id}", "delete")
        queued.node_state, queued.state = "DELETING", "SUSPENDING"
        self._switch_off(queued)

        def gone() -> None:
            queued.node_state, queued.state = "", "SUSPENDED"
            operation.update(done=True, response=EMPTY)

        self.later(self.delays.deleting, gone)
        return operation

    def _known(self, request: Request) -> Queued:
        found = self.queued.get((request.by["zone"], request.by["id"]))
        if found is None:
            path = self._path(request.by["zone"], "queuedResources", request.by["id"])
            raise refused("NOT_FOUND", f"Resource '{path}' was not found")
        return found

    def _known_node(self, request: Request) -> Queued:
        for each in self.queued.values():
            if each.zone == request.by["zone"] and self._node_id(each) == request.by["id"] and each.node_state:
                return each
        path = self._path(request.by["zone"], "nodes", request.by["id"])
        raise refused("NOT_FOUND", f"Resource '{path}' was not found")

    # --- lists, operations -----------------------------------------------------------------------------------

    def _list_queued(self, request: Request) -> Any:
        shown = []
        for each in self._in(request.by["zone"]):
            each.unseen -= each.unseen > 0
            if not each.unseen:
                shown.append(self._shown(each))
        return self._paged(request, "queuedResources", shown)

    def _list_nodes(self, request: Request) -> Any:
        shown = [self._shown_node(each) for each in self._in(request.by["zone"]) if each.node_state]
        return self._paged(request, "nodes", shown)

    def _in(self, zone: str) -> list[Queued]:
        there = [each for each in self.queued.values() if zone in ("-", each.zone)]
        return [each for each in there if each.zone not in self.unreachable]

    def _paged(self, request: Request, name: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        first, size = int(request.query.get("pageToken") or 0), int(request.query.get("pageSize") or 50)
        page: dict[str, Any] = {name: items[first : first + size]}
        page |= {"unreachable": self.unreachable} if name != "locations" else {}
        return page | ({"nextPageToken": str(first + size)} if first + size < len(items) else {})

    def _locations(self, request: Request) -> Any:
        there = [{"name": f"projects/{PROJECT}/locations/{zone}", "locationId": zone} for zone in wares.zones()]
        return self._paged(request, "locations", there)

    def _types(self, request: Request) -> Any:
        zone = self._zone(request)
        listed = [
            {
                "name": self._path(zone, "acceleratorTypes", each.type), "type": each.type,
                "acceleratorConfigs": [{"topology": each.topology}] if each.topology else [],
            }
            for each in wares.types(zone)
        ]  # fmt: skip
        return self._paged(request, "acceleratorTypes", listed)

    def _runtimes(self, request: Request) -> Any:
        zone = self._zone(request)
        listed = [{"name": self._path(zone, "runtimeVersions", each), "version": each} for each in wares.runtimes(zone)]
        return self._paged(request, "runtimeVersions", listed)

    def _zone(self, request: Request) -> str:
        """Unknown ones are told of as those that the project may not use."""
        if (zone := request.by["zone"]) not in wares.zones():
            raise refused("PERMISSION_DENIED", f"Permission denied on 'locations/{zone}' (or it may not exist).")
        return zone

    def _begun(self, zone: str, target: str, verb: str) -> dict[str, Any]:
        name = f"projects/{PROJECT}/locations/{zone}/operations/operation-{next(self._numbers)}-{secrets.token_hex(6)}"
        about = {"@type": f"{TYPE}.OperationMetadata", "createTime": _time(self.clock.now()), "verb": verb}
        operation = {"name": name, "metadata": about | {"target": f"projects/{PROJECT}/locations/{zone}/{target}"}}
        self.operations[name] = operation
        return operation

    def _operation(self, request: Request) -> Any:
        name = self._path(request.by["zone"], "operations", request.by["id"])
        if name not in self.operations:
            raise refused("NOT_FOUND", f"Operation '{name}' was not found")
        return self.operations[name]

    @staticmethod
    def _path(zone: str, kind: str, id: str) -> str:
        return f"projects/{PROJECT}/locations/{zone}/{kind}/{id}"


def _account(queued: Queued) -> str:
    """The service account whose tokens its hosts are given; "" for none."""
    return str(queued.node.get("serviceAccount", {}).get("email", ""))


def _parsed(kind: Any, body: Any) -> dict[str, Any]:
    """A message as JSON, in the API's own spelling, with names for enums; what it does not know is refused."""
    try:
        message = json_format.Parse(json.dumps(body or {}), kind.pb()())
    except json_format.ParseError as e:
        raise refused("INVALID_ARGUMENT", f"Invalid JSON payload received. {e}") from e
    made: dict[str, Any] = json_format.MessageToDict(message)
    return made


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
