"""Cloud TPU as its clients see it: queued resources, nodes of several hosts, operations that are polled.

    with TPU(lab) as tpu:  # or the fixtures `tpu`, and `tpu_api` without machines
        driver = sky.GCP()

What it does and how it refuses is what the API's reference, its client and public threads tell of the real one (read
2026-11-24). Each host of a slice is a machine of the lab, booted with the startup script of its node, which runs once
sshd is up. What is switched off is billed on; a queued resource that failed or was suspended stays until it is deleted.
Nodes can be made without a queued resource, too. `tpu_wire` has the schema, the errors and the operations.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from skypool.accelerators import tables
from skypool.accelerators.facts import Slice
from skypool.drivers.recording import Exchange
from tests.lab import gcp_iam
from tests.lab import tpu_wares as wares
from tests.lab.cloud import Answer, Cloud, Refused, Request, Route
from tests.lab.gcp_iam import DEFAULT, Role, permit_tpu
from tests.lab.google_metadata import handler
from tests.lab.google_replies import THINGS, told, unrecorded
from tests.lab.machines import Lab, Machine
from tests.lab.tpu_rules import check_node, check_queued
from tests.lab.tpu_things import Delays, Host, Queued
from tests.lab.tpu_wire import CODES, TYPE, Operations, Wire, error, info, refused, time_of

PROJECT = gcp_iam.PROJECT
NO_CAPACITY = (
    'There is no more capacity in the zone "{zone}"; you can try in another zone where Cloud TPU Nodes are offered '
    "(see https://cloud.google.com/tpu/docs/regions) [EID: 0x5ca1ab1e]"
)
NO_QUOTA = "Quota 'TPUV5sPreemptibleLitepodPerProjectPerRegionForTPUAPI' exhausted. Limit 0 in region us-central1."
DISABLED = "Compute Engine API has not been used in project 1234 before or it is disabled."
BAD_TOKEN = (
    "Request had invalid authentication credentials. Expected OAuth 2 access token, login cookie or other valid "
    "authentication credential. See https://developers.google.com/identity/sign-in/web/devconsole-project."
)
ALIVE = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE", "DELETING", "SUSPENDING")
_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_HERE = "/v2/projects/{project}/locations/{zone}"


class TPU(Cloud[Host]):
    """One project. See `Cloud`; actions are "POST queuedResources", "GET queuedResource", "PATCH node", …

    Attributes:
        caller: what who shows no token may do; None: everything.
        quotas: the most slices that there may be of a generation and a market, such as ("v5p", "spot").
        waits: whether what there is no room for waits for it, instead of failing.
        ready: whether nodes become so at all.
        unreachable: zones that lists lack, as they say.
        late: whether what is wrong with a node is found only after its queued resource was accepted.
        retired, newer: types and runtime versions that no zone has any more; types that all zones have besides.
    """

    name: ClassVar[str] = "tpu"
    things: ClassVar[tuple[str, ...]] = THINGS

    def __init__(self, lab: Lab | None = None, recording: Path | str | None = None) -> None:
        super().__init__(lab, recording)
        self.delays, self.waits, self.ready, self.late = Delays(), False, True, False
        self.caller: Role | None = None
        self.quotas: dict[tuple[str, str], int] = {}
        self.wire = Wire()
        self.queued: dict[tuple[str, str], Queued] = {}
        self.operations = Operations(PROJECT)
        self.unreachable: list[str] = []
        self.retired: set[str] = set()
        self.newer: list[str] = []
        self._requests: dict[str, str] = {}
        self._doomed: list[tuple[str, str, str]] = []
        self._numbers = itertools.count(1)
        table = self._table()
        self.routes = {route: partial(self._checked, do) for route, _, do in table}
        self._names = {route: name for route, name, _ in table}

    def _table(self) -> list[tuple[str, str, Callable[[Request], Any]]]:
        queued, nodes = f"{_HERE}/queuedResources", f"{_HERE}/nodes"
        types, runtimes = f"{_HERE}/acceleratorTypes", f"{_HERE}/runtimeVersions"
        return [
            ("GET /v2/projects/{project}/locations", "GET locations", self._locations),
            (f"GET {_HERE}", "GET location", lambda r: _location(self._zone(r))),
            (f"GET {types}", "GET acceleratorTypes", lambda r: self._paged(r, self._types(self._zone(r)))),
            (f"GET {types}/{{id}}", "GET acceleratorType", lambda r: self._one(r, self._types(self._zone(r)))),
            (f"GET {runtimes}", "GET runtimeVersions", lambda r: self._paged(r, self._runtimes(self._zone(r)))),
            (f"GET {runtimes}/{{id}}", "GET runtimeVersion", lambda r: self._one(r, self._runtimes(self._zone(r)))),
            (f"GET {_HERE}/operations", "GET operations", self._list_operations),
            (f"GET {_HERE}/operations/{{id}}", "GET operation", self._operation),
            (f"POST {queued}", "POST queuedResources", self._queue),
            (f"GET {queued}", "GET queuedResources", self._list_queued),
            (f"GET {queued}/{{id}}", "GET queuedResource", lambda r: self._shown(self._known(r))),
            (f"DELETE {queued}/{{id}}", "DELETE queuedResource", self._delete),
            (f"POST {nodes}", "POST nodes", self._create_node),
            (f"GET {nodes}", "GET nodes", self._list_nodes),
            (f"GET {nodes}/{{id}}", "GET node", lambda r: self._shown_node(self._known_node(r))),
            (f"PATCH {nodes}/{{id}}", "PATCH node", self._update),
            (f"DELETE {nodes}/{{id}}", "DELETE node", self._delete_node),
        ]

    @property
    def environment(self) -> dict[str, str]:
        """Compute Engine is asked here, too, and is not enabled. With a recording, so is the catalogue of prices."""
        prices = {"CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDBILLING": f"{self.url}/"} if self.replay is not None else {}
        return prices | {
            "GOOGLE_CLOUD_PROJECT": PROJECT,
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": f"{self.url}/",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{self.url}/compute/v1/",
        }

    def told(self, found: Exchange) -> Answer:
        return told(found) if found.method == "gRPC" else super().told(found)

    def unrecorded(self, text: str) -> Refused:
        return unrecorded(text)

    def named(self, request: Request) -> str:
        return self._names.get(request.action, request.action)

    def check(self, request: Request) -> None:
        """Who shows no token is a client of the lab; the token of a machine is good as long as its slice is there."""
        if request.path.startswith("/compute/"):
            body = error("PERMISSION_DENIED", DISABLED, info("SERVICE_DISABLED", service="compute.googleapis.com"))
            body["error"]["errors"] = [{"reason": "accessNotConfigured", "message": DISABLED, "domain": "usageLimits"}]
            raise Refused(403, body)
        method = self.wire.method(request)
        shown = request.headers.get("authorization", "").removeprefix("Bearer ")
        if shown and shown not in {each.token for each in self.queued.values() if each.account}:
            raise refused("UNAUTHENTICATED", BAD_TOKEN, info("ACCESS_TOKEN_TYPE_UNSUPPORTED", method=method))
        if not shown and self.caller is not None:
            permit_tpu(self.caller, method, request)

    def _route(self, request: Request) -> Route:
        """The API has more methods than the lab."""
        try:
            return super()._route(request)
        except Refused as e:
            text = f"the lab's Cloud TPU does not do {request.method} {request.path}"
            raise refused("UNIMPLEMENTED", text) from e

    def _checked(self, do: Callable[[Request], Any], request: Request) -> Any:
        """A reply to a request; both are looked at."""
        request.body = self.wire.read(request)
        return self.wire.written(request, do(request))

    def throttled(self, request: Request) -> Refused:
        return refused("RESOURCE_EXHAUSTED", "Quota exceeded for quota metric 'Create requests' and limit 'per minute'")

    # --- what there is ---------------------------------------------------------------------------------------

    def count(self) -> dict[str, int]:
        """Hosts that are billed or will be, and queued resources, which hold quota."""
        with self.lock:
            self.tick()
            hosts = sum(len(each.hosts) for each in self.queued.values() if each.state in ALIVE)
            waiting = sum(not each.alone for each in self.queued.values())
            return {"instances": hosts, "queued resources": waiting}

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
        zone, id = self._zone(request), request.query.get("queuedResourceId", "")
        if (asked := request.query.get("requestId", "")) and not _UUID.fullmatch(asked):
            raise refused("INVALID_ARGUMENT", f"Invalid request id {asked!r}: it must be a UUID")
        if (known := self._requests.get(asked)) is not None:
            return self.operations.there[known]
        told, doom = request.body, ("", "", "")
        try:
            check_queued(zone, id, told)
        except Refused as e:
            if not self.late:
                raise
            doom = "failed", e.body["error"]["status"], e.body["error"]["message"]
        if (zone, id) in self.queued:
            raise refused(
                "ALREADY_EXISTS", f"Resource 'projects/{PROJECT}/locations/{zone}/queuedResources/{id}' exists"
            )
        if not doom[0]:
            doom = self._doomed.pop(0) if self._doomed else self._over_quota(told)
        made = Queued(zone, id, told, self.clock.now(), unseen=self.delays.unseen)
        made.labels = dict(made.node.get("labels", {}))
        operation = self._begun(zone, f"queuedResources/{id}", "create")
        if doom[0] == "operation":
            fault = {"code": CODES[doom[1]][1], "message": doom[2].format(zone=zone)}
            self.later(self.delays.accepted, lambda: self._ended(operation, error=fault))
        else:
            self.queued[zone, id] = made
            self._hosts(made)
            self.later(self.delays.accepted, lambda: self._looked_at(made, doom))
            self.later(self.delays.accepted, lambda: self._ended(operation, response=self._of_queued(made)))
        if asked:
            self._requests[asked] = operation["name"]
        return operation

    def _over_quota(self, told: dict[str, Any]) -> tuple[str, str, str]:
        """How a request fails that exceeds a quota; no words for one that does not."""
        market = "spot" if "spot" in told else "on-demand"
        generation = tables.slices()[told["tpu"]["nodeSpec"][0]["node"]["acceleratorType"]].generation
        there = [tables.slices().get(each.kind) for each in self.queued.values() if each.market == market]
        taken = sum(each is not None and each.generation == generation for each in there)
        full = taken >= self.quotas.get((generation, market), taken + 1)
        return ("failed", "RESOURCE_EXHAUSTED", NO_QUOTA) if full else ("", "", "")

    def _hosts(self, queued: Queued) -> None:
        hosts = tables.slices()[queued.kind].vms if queued.kind in tables.slices() else 0
        for number in range(hosts):
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
                machine.serve_metadata(lambda _: handler(says, queued.account and queued.token))
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
            self._ended(operation)
            return operation
        queued.state, queued.node_state = "DELETING", "DELETING" if queued.node_state else ""
        queued.there = False
        self._switch_off(queued)

        def gone() -> None:
            self._gone(queued)
            self._ended(operation)

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
        state: dict[str, Any] = {"state": queued.state, "stateInitiator": "SERVICE"}
        if queued.failure is not None:
            state["failedData"] = {"error": queued.failure}
        node = {key: each for key, each in queued.node.items() if key != "metadata"}
        spec = {**queued.told["tpu"]["nodeSpec"][0], "node": node}  # with the labels that it was asked for with
        return {
            **queued.told, "name": self._path(queued.zone, "queuedResources", queued.id), "tpu": {"nodeSpec": [spec]},
            "state": state, "createTime": time_of(queued.created),
        }  # fmt: skip

    def _of_queued(self, queued: Queued) -> dict[str, Any]:
        """As the result of an operation."""
        return {"@type": f"{TYPE}.QueuedResource", **self._shown(queued)}

    # --- nodes -----------------------------------------------------------------------------------------------

    def _create_node(self, request: Request) -> Any:
        """A node without a queued resource: it is made at once, or its operation fails."""
        zone, id, node = self._zone(request), request.query.get("nodeId", ""), request.body
        check_node(zone, id, node)
        if any(each.zone == zone and self._node_id(each) == id for each in self.queued.values()):
            raise refused("ALREADY_EXISTS", f"Resource '{self._path(zone, 'nodes', id)}' exists")
        spec = {"parent": f"projects/{PROJECT}/locations/{zone}", "nodeId": id, "node": node}
        plan = node.get("schedulingConfig", {})
        spot: dict[str, Any] = {"spot": {}} if plan.get("spot") or plan.get("preemptible") else {}
        made = Queued(zone, id, {"tpu": {"nodeSpec": [spec]}, **spot}, self.clock.now(), "PROVISIONING", alone=True)
        made.labels, made.node_state = dict(node.get("labels", {})), "CREATING"
        doom = self._doomed.pop(0) if self._doomed else self._over_quota(made.told)
        if not doom[0] and self.room(made.kind, zone, made.market) < 1:
            doom = "failed", "RESOURCE_EXHAUSTED", NO_CAPACITY
        operation = self._begun(zone, f"nodes/{id}", "create")
        if doom[0]:
            fault = {"code": CODES[doom[1]][1], "message": doom[2].format(zone=zone)}
            self.later(self.delays.accepted, lambda: self._ended(operation, error=fault))
            return operation
        self.queued[zone, id] = made
        self._hosts(made)
        self._boot(made)

        def look() -> None:
            if made.state == "PROVISIONING" and made.there:
                self.later(self.delays.accepted, look)
            elif made.node_state == "READY":
                self._ended(operation, response=self._of_node(made))
            else:
                fault = made.failure or {"code": CODES["ABORTED"][1], "message": f"node {id} was deleted"}
                self._ended(operation, error=fault)

        look()
        return operation

    def _shown_node(self, queued: Queued) -> dict[str, Any]:
        is_public = queued.node.get("networkConfig", {}).get("enableExternalIps", False)
        ends = [
            {"ipAddress": host.ip, "port": 8470, **({"accessConfig": {"externalIp": host.ip}} if is_public else {})}
            for host in queued.hosts
            if host.ip
        ]
        health = {"health": "HEALTHY"} if queued.node_state == "READY" else {}
        of = {} if queued.alone else {"queuedResource": self._path(queued.zone, "queuedResources", queued.id)}
        account = queued.node.get("serviceAccount", {})
        email = account.get("email") or DEFAULT
        return {
            **queued.node, "name": self._path(queued.zone, "nodes", self._node_id(queued)), "labels": queued.labels,
            "state": queued.node_state, **health, "createTime": time_of(queued.created),
            "networkEndpoints": ends, "id": str(queued.number), "apiVersion": "V2",
            "serviceAccount": {**account, "email": email}, **of,
        }  # fmt: skip

    def _of_node(self, queued: Queued) -> dict[str, Any]:
        """As the result of an operation."""
        return {"@type": f"{TYPE}.Node", **self._shown_node(queued)}

    @staticmethod
    def _node_id(queued: Queued) -> str:
        return str(queued.told["tpu"]["nodeSpec"][0]["nodeId"])

    def _update(self, request: Request) -> Any:
        queued = self._known_node(request)
        if request.query.get("updateMask") != "labels":
            raise refused("INVALID_ARGUMENT", f"the lab does not update {request.query.get('updateMask')}")
        if queued.node_state != "READY":
            raise refused("FAILED_PRECONDITION", f"node {queued.id} is in state {queued.node_state}")
        queued.labels = dict(request.body.get("labels", {}))
        operation = self._begun(queued.zone, f"nodes/{queued.id}", "update")
        self._ended(operation, response=self._of_node(queued))
        return operation

    def _delete_node(self, request: Request) -> Any:
        """The queued resource stays, suspended."""
        queued = self._known_node(request)
        if queued.alone:
            return self._end_of(queued, f"nodes/{queued.id}")
        operation = self._begun(queued.zone, f"nodes/{queued.id}", "delete")
        queued.node_state, queued.state = "DELETING", "SUSPENDING"
        self._switch_off(queued)

        def gone() -> None:
            queued.node_state, queued.state = "", "SUSPENDED"
            self._ended(operation)

        self.later(self.delays.deleting, gone)
        return operation

    def _known(self, request: Request) -> Queued:
        found = self.queued.get((request.by["zone"], request.by["id"]))
        if found is None or found.alone:
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
        for each in (each for each in self._in(request.by["zone"]) if not each.alone):
            each.unseen -= each.unseen > 0
            if not each.unseen:
                shown.append(self._shown(each))
        return self._paged(request, shown)

    def _list_nodes(self, request: Request) -> Any:
        shown = [self._shown_node(each) for each in self._in(request.by["zone"]) if each.node_state]
        return self._paged(request, shown)

    def _in(self, zone: str) -> list[Queued]:
        there = [each for each in self.queued.values() if zone in ("-", each.zone)]
        return [each for each in there if each.zone not in self.unreachable]

    def _paged(self, request: Request, items: list[dict[str, Any]]) -> dict[str, Any]:
        name = request.path.rpartition("/")[2]
        token, size = request.query.get("pageToken") or "0", int(request.query.get("pageSize") or 50)
        if not token.isdigit():
            raise refused("INVALID_ARGUMENT", f"Invalid page token {token!r}")
        first, size = int(token), min(size, self.pages.size or size)
        if self.pages.cut and name in ("nodes", "queuedResources"):
            return {name: [], "unreachable": [], "nextPageToken": "0"}
        page: dict[str, Any] = {name: items[first : first + size]}
        page |= {"unreachable": self.unreachable} if name not in ("locations", "operations") else {}
        return page | ({"nextPageToken": str(first + size)} if first + size < len(items) else {})

    def _locations(self, request: Request) -> Any:
        return self._paged(request, [_location(zone) for zone in wares.zones()])

    def _types(self, zone: str) -> list[dict[str, Any]]:
        return [
            {
                "name": self._path(zone, "acceleratorTypes", each.type), "type": each.type,
                "acceleratorConfigs": [{"type": _family(each), "topology": each.topology}] if each.topology else [],
            }
            for each in wares.types(zone) if each.type not in self.retired
        ] + [{"name": self._path(zone, "acceleratorTypes", each), "type": each} for each in self.newer]  # fmt: skip

    def _runtimes(self, zone: str) -> list[dict[str, Any]]:
        there = [each for each in wares.runtimes(zone) if each not in self.retired]
        return [{"name": self._path(zone, "runtimeVersions", each), "version": each} for each in there]

    def _one(self, request: Request, listed: list[dict[str, Any]]) -> dict[str, Any]:
        """That of a list which a request names."""
        name = request.path.removeprefix("/v2/")
        for each in listed:
            if each["name"] == name:
                return each
        raise refused("NOT_FOUND", f"Resource '{name}' was not found")

    def _zone(self, request: Request) -> str:
        """Unknown ones are told of as those that the project may not use."""
        if (zone := request.by["zone"]) not in wares.zones():
            raise refused("PERMISSION_DENIED", f"Permission denied on 'locations/{zone}' (or it may not exist).")
        return zone

    def _begun(self, zone: str, target: str, verb: str) -> dict[str, Any]:
        return self.operations.begin(zone, target, verb, self.clock.now())

    def _ended(self, operation: dict[str, Any], **result: Any) -> None:
        """An operation is over, with a `response` or an `error`; without either as one that deletes."""
        self.operations.end(operation, self.clock.now(), **result)

    def _operation(self, request: Request) -> Any:
        name = self._path(request.by["zone"], "operations", request.by["id"])
        if name not in self.operations.there:
            raise refused("NOT_FOUND", f"Operation '{name}' was not found")
        return self.operations.there[name]

    def _list_operations(self, request: Request) -> Any:
        at = self._path(self._zone(request), "operations", "")
        listed = [each for name, each in self.operations.there.items() if name.startswith(at)]
        return self._paged(request, listed)

    @staticmethod
    def _path(zone: str, kind: str, id: str) -> str:
        return f"projects/{PROJECT}/locations/{zone}/{kind}/{id}"


def _family(slice: Slice) -> str:
    """A generation as `AcceleratorConfig.Type` calls it."""
    return {"v5e": "V5LITE_POD"}.get(slice.generation, slice.generation.upper())


def _location(zone: str) -> dict[str, Any]:
    return {"name": f"projects/{PROJECT}/locations/{zone}", "locationId": zone}
