"""Compute Engine as its clients see it: JSON over HTTP, operations that are polled, labels, disks that outlive a stop.

    with GCE(lab) as gce:  # or the fixtures `gce`, and `gce_api` without machines
        driver = sky.GCP()

What it does and how it refuses is what the API's reference, its client and public threads tell of the real one (read
2026-11-24). Every request and reply is checked by Google's own schema (`gce_wire`), and `gce_rules` has what is refused
beyond that. Instances are machines of the lab, booted with the user data of their metadata. What switches itself off is
TERMINATED, which there means stopped: its disk stays, and is billed. Cloud TPU is asked here, too, and is not enabled.
"""

from __future__ import annotations

import copy
import itertools
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from skypool.drivers.recording import Exchange
from tests.lab import aws_images, gce_records, gce_rules, tpu_wares
from tests.lab import gce_wares as wares
from tests.lab.cloud import Answer, Cloud, Refused, Request, Route
from tests.lab.gce_groups import Groups
from tests.lab.gce_records import HERE, NUMBER
from tests.lab.gce_records import PROJECT as PROJECT
from tests.lab.gce_rules import Network
from tests.lab.gce_things import Delays, Failed, Instance, Operation, check_labels, error, fingerprint, refused
from tests.lab.gce_wire import Wire, absent, invalid, page
from tests.lab.gcp_iam import Role, acting, permit
from tests.lab.google_metadata import handler
from tests.lab.google_replies import THINGS, told, unrecorded
from tests.lab.machines import Lab, Machine

_HERE = "/compute/v1/projects/{project}"
DISABLED = (
    "Cloud TPU API has not been used in project {project} before or it is disabled. Enable it by visiting "
    "https://console.developers.google.com/apis/api/tpu.googleapis.com/overview then retry."
)
NO_ROOM = (
    "The zone 'projects/lab-project/zones/{zone}' does not have enough resources available to fulfill the request. "
    "'(resource type:compute)'."
)


class GCE(Cloud[Instance]):
    """One project. See `Cloud`; actions are "POST instances", "GET zoneOperation", "DELETE firewall", …

    Attributes:
        disks, firewalls, placements: what there is, by name; a disk's `users` have it.
        groups: managed instance groups, which are slices of TPU7x.
        networks: those of the project, by name; the method `network` adds one.
        quotas: of the project, by metric; one of 0 refuses all that it counts.
        regional: quotas of one region, by (region, metric); those that are missing are 1,000.
        tokens: those of the account's own clients, which may do as much as who shows no token.
        caller: what these clients may do; None: everything.
        ready: whether instances become RUNNING at all.
        unreachable: zones that lists lack, as they say.
        warning: the code of a warning that each list has; "" for none.
        untold: regions whose quotas cannot be told.
        wire: the schema, and how many requests, replies and fields were checked by it.
    """

    name: ClassVar[str] = "gce"
    things: ClassVar[tuple[str, ...]] = THINGS

    def __init__(self, lab: Lab | None = None, recording: Path | str | None = None) -> None:
        super().__init__(lab, recording)
        self.delays, self.ready, self.wire = Delays(), True, Wire()
        self.unreachable: list[str] = []
        self.warning = ""
        self.untold: set[str] = set()
        self.disks: dict[str, dict[str, Any]] = {}
        self.firewalls: dict[str, dict[str, Any]] = {}
        self.placements: dict[str, dict[str, Any]] = {}
        self.reservations: dict[str, dict[str, Any]] = {}
        inner = {(each, "inner") for each in self._regions()}
        self.networks = {"default": Network("default"), "lab-net": Network("lab-net", subnetworks=inner)}
        self.groups = Groups(self)
        self.operations: dict[str, Operation] = {}
        self.quotas = {"GPUS_ALL_REGIONS": 16.0, "CPUS_ALL_REGIONS": 256.0}
        self.regional: dict[tuple[str, str], float] = {}
        self.tokens: set[str] = set()
        self.caller: Role | None = None
        self._requests: dict[str, Operation] = {}
        self._doomed: list[Failed] = []
        self._numbers = itertools.count(1)
        table = [*self._offered(), *self._owned(), *self.groups.table()]
        self.routes = {f"{verb} {_HERE}{path}": do for verb, path, _, do in table}
        self.routes["HEAD /"] = lambda _: {}
        self._names = {f"{verb} {_HERE}{path}": f"{verb} {name}" for verb, path, name, _ in table}

    def _offered(self) -> Iterable[tuple[str, str, str, Route]]:
        """Routes to what there is to choose from."""
        zone, region = "/zones/{zone}", "/regions/{region}"
        yield "GET", "", "project", lambda _: gce_records.project(self.quotas)
        yield "GET", "/zones", "zones", lambda r: self._listed(r, "zone", map(gce_records.zone, wares.sold()))
        yield "GET", zone, "zone", lambda r: gce_records.zone(self._one_of(r, "zone", wares.sold()))
        yield "GET", "/regions", "regions", lambda r: self._listed(r, "region", map(self._region, self._regions()))
        yield "GET", region, "region", lambda r: self._region(self._one_of(r, "region", self._regions()))
        yield from self._scopes("machineTypes", "machineType", self._types)
        yield from self._scopes("acceleratorTypes", "acceleratorType", self._models)
        yield from self._scopes("diskTypes", "diskType", self._disk_types)
        yield from self._scopes("reservations", "reservation", lambda: self.reservations.values())
        yield "GET", "/global/images", "images", self._images
        yield "GET", "/global/images/family/{id}", "family", lambda r: self._image(r, is_family=True)
        yield "GET", "/global/images/{id}", "image", lambda r: self._image(r, is_family=False)
        yield "GET", "/global/networks", "networks", lambda r: self._listed(r, "network", self._networks())
        yield "GET", "/global/networks/{id}", "network", lambda r: self._found(r, self._networks())
        yield from self._scopes("subnetworks", "subnetwork", self._subnetworks, region)
        for kind in ("snapshots", "licenses"):
            yield "GET", f"/global/{kind}", kind, partial(self._nothing, kind)
        for kind in ("addresses", "targetPools", "forwardingRules", "targetInstances"):
            yield "GET", f"/aggregated/{kind}", kind, partial(self._scoped, kind=kind, things=())
        yield "GET", f"{region}/addresses", "addresses", lambda r: self._listed(r, "address", ())

    def _owned(self) -> Iterable[tuple[str, str, str, Route]]:
        """Routes to what the project has."""
        zone, region = "/zones/{zone}", "/regions/{region}"
        one = f"{zone}/instances/{{id}}"
        yield "GET", "/aggregated/instances", "instances", lambda r: self._scoped(r, "instances", self._instances())
        yield "GET", f"{zone}/instances", "zoneInstances", lambda r: self._listed(r, "instance", self._instances())
        yield "POST", f"{zone}/instances", "instances", self._insert
        yield "POST", f"{zone}/instances/bulkInsert", "instances", self._bulk
        yield "GET", one, "instance", lambda r: gce_records.instance(self._known(r))
        yield "DELETE", one, "instance", self._delete
        yield "GET", f"{one}/serialPort", "serialPort", self._serial
        yield "POST", f"{one}/setLabels", "labels", self._label
        yield "POST", f"{one}/setTags", "tags", lambda r: self._set(r, "tags")
        yield "POST", f"{one}/setMetadata", "metadata", lambda r: self._set(r, "metadata")
        yield "POST", f"{one}/stop", "stop", self._stop
        yield "POST", f"{one}/start", "start", self._start
        yield "POST", f"{one}/reset", "reset", self._reset
        yield from self._scopes("disks", "disk", lambda: self.disks.values())
        yield "DELETE", f"{zone}/disks/{{id}}", "disk", lambda r: self._remove(r, self.disks, "disk")
        rules = "/global/firewalls"
        yield "GET", rules, "firewalls", lambda r: self._listed(r, "firewall", self.firewalls.values())
        yield "GET", f"{rules}/{{id}}", "firewall", lambda r: self._found(r, self.firewalls.values())
        yield "POST", rules, "firewalls", lambda r: self._make(r, self.firewalls, "firewall")
        yield "DELETE", f"{rules}/{{id}}", "firewall", lambda r: self._remove(r, self.firewalls, "firewall")
        yield from self._scopes("resourcePolicies", "resourcePolicy", lambda: self.placements.values(), region)
        make = f"{region}/resourcePolicies"
        yield "POST", make, "resourcePolicies", lambda r: self._make(r, self.placements, "resourcePolicy")
        yield "DELETE", f"{make}/{{id}}", "resourcePolicy", lambda r: self._remove(r, self.placements, "resourcePolicy")
        for scope in (zone, region, "/global"):
            yield "GET", f"{scope}/operations", "operations", self._operations
            yield "GET", f"{scope}/operations/{{id}}", "operation", self._operation
            yield "POST", f"{scope}/operations/{{id}}/wait", "operation", self._operation

    def _scopes(
        self, plural: str, kind: str, things: Callable[[], Iterable[Mapping[str, Any]]], scope: str = "/zones/{zone}"
    ) -> Iterable[tuple[str, str, str, Route]]:
        """Routes to all resources of a kind, to those of one zone or region, and to one of them."""
        yield "GET", f"/aggregated/{plural}", plural, lambda r: self._scoped(r, plural, things())
        yield "GET", f"{scope}/{plural}", plural, lambda r: self._listed(r, kind, things())
        yield "GET", f"{scope}/{plural}/{{id}}", kind, lambda r: self._found(r, things())

    @property
    def environment(self) -> dict[str, str]:
        """Cloud TPU is asked here, too, and is not enabled. With a recording, the catalogue of prices is asked here."""
        prices = {"CLOUDSDK_API_ENDPOINT_OVERRIDES_CLOUDBILLING": f"{self.url}/"} if self.replay is not None else {}
        return prices | {
            "GOOGLE_CLOUD_PROJECT": PROJECT,
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{self.url}/compute/v1/",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": f"{self.url}/",
        }

    def told(self, found: Exchange) -> Answer:
        return told(found) if found.method == "gRPC" else super().told(found)

    def unrecorded(self, text: str) -> Refused:
        return unrecorded(text)

    def named(self, request: Request) -> str:
        return self._names.get(request.action, request.action)

    def check(self, request: Request) -> None:
        """Who shows no token, or one of `tokens`, is a client of the account; a machine's is good while it is there."""
        if request.path.startswith("/v2/"):
            text = DISABLED.format(project=PROJECT)
            info = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "SERVICE_DISABLED"}
            about = {"code": 403, "message": text, "status": "PERMISSION_DENIED", "details": [info]}
            raise Refused(403, {"error": about})
        if request.by.get("project", PROJECT) not in (PROJECT, NUMBER) and "/global/images" not in request.path:
            raise absent(f"projects/{request.by['project']}")
        shown = request.headers.get("authorization", "").removeprefix("Bearer ")
        if shown in self.tokens:
            shown = ""
        if shown and shown not in {each.token for each in self.rentals.values() if each.account}:
            raise refused(401, "authError", "Invalid Credentials")
        self.wire.check(request)
        if not shown and self.caller is not None:
            permit(self.caller, request)

    def throttled(self, request: Request) -> Refused:
        return refused(403, "rateLimitExceeded", "Quota exceeded for quota metric 'Queries' and limit 'per minute'.")

    def _route(self, request: Request) -> Route:
        """Refuse a method that Google has and this lab has not, in Google's format."""
        try:
            return super()._route(request)
        except Refused:
            text = f"the lab's Compute Engine does not have {request.method} {request.path}"
            raise refused(501, "notImplemented", text) from None

    def _result(self, request: Request, error: Exception | None) -> Answer:
        answer = super()._result(request, error)
        if self.replay is None and error is None and not request.path.startswith("/v2/") and self.wire.known(request):
            for wrong in self.wire.wrong_answer(request, answer):
                self.errors.append(
                    AssertionError(f"the reply to {request.method} {request.path} is not Google's: {wrong}")
                )
        return answer

    # --- what there is ---------------------------------------------------------------------------------------

    def count(self) -> dict[str, int]:
        """Instances with those that are stopped, and disks that no instance has."""
        with self.lock:
            self.tick()
            loose = sum(not each["users"] for each in self.disks.values())
            told = {"instances": len(self.rentals), "disks": loose, "firewalls": len(self.firewalls)}
            return {**told, "placements": len(self.placements), **self.groups.count()}

    def machines(self) -> list[Instance]:
        """Those that are not stopped."""
        with self.lock:
            self.tick()
            return [each for each in self.rentals.values() if each.living]

    def network(self, name: str, region: str, *subnetworks: str, zone: str = "") -> None:
        """Add a network with these subnetworks in a region. With a zone it is an RDMA network of that zone."""
        own = {(region, each) for each in subnetworks}
        self.networks[name] = Network(name, auto=False, zone=zone, subnetworks=own)

    # --- what happens to it ----------------------------------------------------------------------------------

    def refuse(self, action: str, status: int, reason: str, message: str, times: int | None = 1) -> None:
        """Refuse the next calls in its own words."""
        self.fail(action, status, error(status, reason, message), times=times)

    def doom(self, status: int, code: str, message: str) -> None:
        """The operation of the next insert fails so."""
        with self.lock:
            self._doomed.append(Failed(status, code, message))

    def preempt(self, id: str, notice: float | None = None) -> None:
        """Take a spot instance back, after so many seconds."""
        with self.lock:
            rental = self.rentals[id]
            rental.preempted = True
            seconds = self.delays.notice if notice is None else notice
            self.later(seconds, lambda: self._gone(rental) if rental.id in self.rentals else None)

    def vanish(self, id: str) -> None:
        """It is gone, and nobody was told."""
        with self.lock:
            self._gone(self.rentals[id])

    def off(self, rental: Instance) -> None:
        """Stopped: its disk stays, and is billed."""
        if rental.state in ("STAGING", "RUNNING", "STOPPING"):
            rental.state, rental.living, rental.ip = "TERMINATED", False, ""
            rental.stopped = self.clock.now()

    # --- instances -------------------------------------------------------------------------------------------

    def _insert(self, request: Request) -> Any:
        told, zone = request.body, self._one_of(request, "zone", wares.sold())
        return self._once(request, "insert", f"zones/{zone}/instances/{told['name']}", [told])

    def _bulk(self, request: Request) -> Any:
        """Make several instances of the same properties, all or none.

        https://docs.cloud.google.com/compute/docs/instances/multiple/create-in-bulk (read 2026-11-24 in a stored copy)
        """
        told, zone = request.body, self._one_of(request, "zone", wares.sold())
        properties, pattern = told.get("instanceProperties", {}), told.get("namePattern", "")
        if "/" in properties.get("machineType", ""):  # as SkyPilot met it: sky/provision/gcp/instance_utils.py
            raise refused(503, "backendError", "Internal error. Please try again or contact Google Support.")
        count = int(told.get("count", 0))
        width, base = pattern.count("#"), pattern.replace("#", "")
        names = [*told.get("perInstanceProperties", {})] or [f"{base}{n + 1:0{width}}" for n in range(count)]
        if count < 1 or len(names) != count:  # the words are made up
            raise invalid("count", count, "It must be that of perInstanceProperties, and 1 at least.")
        each = [{**copy.deepcopy(properties), "name": name} for name in names]
        return self._once(request, "bulkInsert", f"zones/{zone}/instances", each)

    def _once(self, request: Request, kind: str, target: str, several: list[dict[str, Any]]) -> Any:
        """Begin to make instances, if a request with this id did not do so before."""
        if (id_ := request.query.get("requestId", "")) in self._requests and id_:
            return gce_records.operation(self._requests[id_])
        zone = request.by["zone"]
        ware, *_ = [self._asked(each, zone) for each in several]
        market = "spot" if several[0].get("scheduling", {}).get("provisioningModel") == "SPOT" else "on-demand"
        if ware.cards and self.quotas["GPUS_ALL_REGIONS"] < len(ware.cards) * len(several):
            limit = self.quotas["GPUS_ALL_REGIONS"]
            raise refused(403, "quotaExceeded", f"Quota 'GPUS_ALL_REGIONS' exceeded.  Limit: {limit} globally.")
        failure = self._doomed.pop(0) if self._doomed else acting(self.caller, several[0])
        if failure is None and self.room(ware.name, zone, market) < len(several):
            failure = Failed(503, "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", NO_ROOM.format(zone=zone))
        made: list[Instance] = []

        def finish() -> None:
            if failure is not None:
                raise failure
            for each in made:
                self._run(each)

        operation = self._begun(kind, f"zones/{zone}", target, self.delays.insert, finish)
        for each in several if failure is None else ():
            made.append(Instance(each["name"], ware.name, zone, market, self.clock.now(), "PROVISIONING", told=each))
            self.add(made[-1], ware)
        if id_:
            self._requests[id_] = operation
        return gce_records.operation(operation)

    def add(self, rental: Instance, kind: wares.Kind) -> None:
        """It is there, with its disk, and boots."""
        rental.labels = dict(rental.told.get("labels", {}))
        self.rentals[rental.id] = rental
        self.disks[rental.disk] = gce_records.disk(rental, *gce_rules.boot_disk(rental.told["disks"], kind))
        self._boot(rental, kind)

    def _asked(self, told: dict[str, Any], zone: str) -> wares.Kind:
        """The machine type of an insert that makes sense; refuses any other in the API's words."""
        kind = self.machine_type(told, zone)
        self._reserve(told, zone)
        policies = [self._policy(path, zone) for path in told.get("resourcePolicies", ())]
        if any("workloadPolicy" in each for each in policies):
            kinds = "[VmMaintenancePolicy, GroupPlacementPolicy, InstanceSchedulePolicy]"
            raise refused(400, "invalid", f"Resource policy must have one of {kinds}")
        gce_rules.check_placement(kind, policies)
        if told["name"] in self.rentals:
            raise refused(409, "alreadyExists", f"The resource '{zone}/instances/{told['name']}' already exists")
        return kind

    def _policy(self, path: str, zone: str) -> dict[str, Any]:
        policy = self.placements.get(path.rpartition("/")[2])
        if policy is None or policy.get("region", zone).rpartition("/")[2] not in (zone, zone.rpartition("-")[0]):
            raise absent(path)
        return policy

    def machine_type(self, told: dict[str, Any], zone: str) -> wares.Kind:
        """Of properties of machines that make sense; refuses any other."""
        path = told.get("machineType", "")
        name = path.rpartition("/")[2]
        kind = wares.sold().get(zone, {}).get(name)
        if kind is None:  # gruntwork-io/terratest/issues/1132
            raise invalid("machineType", path, f"Machine type with name '{name}' does not exist in zone '{zone}'.")
        check_labels(told)
        kind = wares.equipped(kind, zone, told.get("guestAccelerators", ()))
        gce_rules.check_scheduling(told.get("scheduling", {}), kind)
        gce_rules.check_metadata(told.get("metadata", {}).get("items", ()))
        gce_rules.boot_disk(told.get("disks", ()), kind)
        told.setdefault("networkInterfaces", [{}])
        gce_rules.check_interfaces(told["networkInterfaces"], zone, kind, self.networks.values())
        return kind

    def _reserve(self, told: dict[str, Any], zone: str) -> None:
        """Refuse what does not fit the reservation that is named. It must have the same policies and local SSDs.

        A machine of a dense reservation is bound to it (`Scheduling.provisioningModel`), and no other is.
        See the texts of `Reservation.resource_policies` and `Scheduling.provisioning_model` in google-cloud-compute.
        """
        wanted = told.get("reservationAffinity", {}).get("values", [])
        bound = told.get("scheduling", {}).get("provisioningModel") == "RESERVATION_BOUND"
        if bound and not wanted:
            raise refused(400, "invalid", "A RESERVATION_BOUND instance must have a specific reservation.")
        for name in wanted:
            held = self.reservations.get(name, {})
            if not held.get("zone", "").endswith(f"/{zone}"):
                raise absent(f"projects/{PROJECT}/zones/{zone}/reservations/{name}")
            if bound != (held.get("deploymentType") == "DENSE"):
                raise refused(400, "invalid", f"The provisioning model does not fit the reservation {name}.")
            if sorted(told.get("resourcePolicies", [])) != sorted(held.get("resourcePolicies", {}).values()):
                raise refused(400, "invalid", f"The resource policies do not match those of the reservation {name}.")
            properties = held["specificReservation"]["instanceProperties"]
            if properties.get("machineType") != told["machineType"].rpartition("/")[2]:
                raise refused(400, "invalid", f"The machine type is not that of the reservation {name}.")
            scratch = [each for each in told["disks"] if each.get("type") == "SCRATCH"]
            asked = [(each["interface"], str(each["initializeParams"]["diskSizeGb"])) for each in scratch]
            has = properties.get("localSsds", [])
            if asked != [(each.get("interface", "SCSI"), str(each["diskSizeGb"])) for each in has]:
                raise refused(400, "invalid", f"The local SSDs do not match those of the reservation {name}.")

    def _boot(self, rental: Instance, kind: wares.Kind) -> None:
        image, _, _ = gce_rules.boot_disk(rental.told["disks"], kind)
        who, _, key = rental.metadata.get("ssh-keys", "").partition(":")

        def prepare(machine: Machine) -> None:
            rental.machine = machine
            wares.dress(machine, kind, image)

        told: dict[str, Any] = {"user_data": rental.started, "keys": [key] if key else [], "user": who or "ubuntu"}
        metadata = handler(lambda: rental.says, rental.token if rental.account else "")
        self.boot(rental, prepare=prepare, metadata=lambda _: metadata, **told)
        if rental.machine is not None:
            aws_images.insert(rental.machine, list(kind.cards))
            if kind.slice:
                tpu_wares.plug(rental.machine, kind.slice)
        rental.state = "STAGING"

    def _run(self, rental: Instance) -> None:
        if rental.state != "STAGING" or not self.ready:
            return
        rental.state, rental.living, rental.began = "RUNNING", True, self.clock.now()
        rental.ip = rental.machine.address if rental.machine else f"203.0.113.{next(self._numbers) % 250 + 1}"
        if limit := rental.told.get("scheduling", {}).get("maxRunDuration"):
            self.later(float(limit["seconds"]), lambda: self._over(rental))

    def _over(self, rental: Instance) -> None:
        """Its time is up: time in which it is stopped does not count."""
        if self.rentals.get(rental.id) is rental and rental.state == "RUNNING":
            self._gone(rental)

    def _gone(self, rental: Instance) -> None:
        rental.state, rental.living = "STOPPING", False
        (boot,) = [each for each in rental.told["disks"] if each.get("boot")]

        def then() -> None:
            if self.rentals.get(rental.id) is rental:
                del self.rentals[rental.id]
                if boot.get("autoDelete"):
                    self.disks.pop(rental.disk, None)
                else:
                    self.disks[rental.disk]["users"] = []

        self.end(rental, then)

    def _delete(self, request: Request) -> Any:
        rental = self._known(request)

        def finish() -> None:
            if not rental.survives() and rental.state != "STOPPING":
                self._gone(rental)

        return self._changes(rental, "delete", finish, self.delays.delete)

    def _stop(self, request: Request) -> Any:
        rental = self._known(request)

        def finish() -> None:
            if rental.machine is not None and rental.machine.is_running:
                rental.state = "STOPPING"
                self._work.submit(self.watched, rental.machine.kill)  # `off` follows once it is dead
            else:
                self.off(rental)

        return self._changes(rental, "stop", finish)

    def _start(self, request: Request) -> Any:
        rental = self._known(request)
        if rental.state != "TERMINATED":
            return self._changes(rental, "start", lambda: None)

        def finish() -> None:
            if rental.machine is not None:
                rental.machine.boot()
            rental.state = "STAGING"
            self._run(rental)

        return self._changes(rental, "start", finish)

    def _reset(self, request: Request) -> Any:
        rental = self._known(request)
        if rental.state != "RUNNING":
            raise refused(400, "resourceNotReady", f"The resource '{rental.id}' is not ready")

        def finish() -> None:
            if rental.machine is not None:
                rental.machine.kill()
                rental.machine.boot()

        return self._changes(rental, "reset", finish)

    def _serial(self, request: Request) -> Any:
        rental = self._known(request)
        whole = rental.machine.console() if rental.machine is not None else ""
        start = int(request.query.get("start", 0))
        path = f"{HERE}/zones/{rental.place}/instances/{rental.id}/serialPort"
        said = {"kind": "compute#serialPortOutput", "contents": whole[start:], "selfLink": path}
        return {**said, "start": str(start), "next": str(len(whole))}

    def _label(self, request: Request) -> Any:
        rental, told = self._known(request), request.body
        if told.get("labelFingerprint") != fingerprint(rental):
            raise refused(412, "conditionNotMet", "Labels fingerprint either invalid or resource labels have changed")
        check_labels(told)
        rental.labels, rental.changes = dict(told.get("labels", {})), rental.changes + 1
        return self._changes(rental, "setLabels", lambda: None, 0.0)

    def _set(self, request: Request, field: str) -> Any:
        """Replace the tags or the metadata of an instance, if the client knows how they are now."""
        rental, told = self._known(request), request.body
        if told.get("fingerprint") != gce_records.instance(rental)[field]["fingerprint"]:
            raise refused(412, "conditionNotMet", f"Supplied fingerprint does not match current {field} fingerprint.")
        if field == "metadata":
            gce_rules.check_metadata(told.get("items", ()))
        rental.told[field] = {"items": told.get("items", [])}
        return self._changes(rental, f"set{field.capitalize()}", lambda: None)

    def _changes(
        self, rental: Instance, kind: str, finish: Callable[[], object], seconds: float | None = None
    ) -> dict[str, Any]:
        """Begin an operation on an instance, and show it."""
        scope = f"zones/{rental.place}"
        delay = self.delays.other if seconds is None else seconds
        return gce_records.operation(self._begun(kind, scope, f"{scope}/instances/{rental.id}", delay, finish))

    def _known(self, request: Request) -> Instance:
        rental = self.rentals.get(request.by["id"])
        if rental is None or rental.place != request.by["zone"]:
            raise absent(f"projects/{PROJECT}/zones/{request.by['zone']}/instances/{request.by['id']}")
        return rental

    def _instances(self) -> list[dict[str, Any]]:
        return [gce_records.instance(each) for each in self.rentals.values()]

    # --- what else there is ----------------------------------------------------------------------------------

    def _nothing(self, kind: str, request: Request) -> dict[str, Any]:
        """A global list of a kind of resource of which this project has none."""
        return {"id": kind, "items": []}

    def _regions(self) -> list[str]:
        return sorted({each.rpartition("-")[0] for each in wares.sold()})

    def _region(self, name: str) -> dict[str, Any]:
        known = ("CPUS", "N2_CPUS", *wares.QUOTAS)
        if name in self.untold:
            return gce_records.region(name, None)
        return gce_records.region(name, {each: self.regional.get((name, each), 1000.0) for each in known})

    def _networks(self) -> list[dict[str, Any]]:
        return [gce_records.network(each, self._regions()) for each in self.networks.values()]

    def _subnetworks(self) -> list[dict[str, Any]]:
        there = self.networks.values()
        return [record for each in there for record in gce_records.subnetworks_of(each, self._regions())]

    def _types(self) -> list[dict[str, Any]]:
        sold = wares.sold().items()
        return [gce_records.machine_type(zone, kind) for zone, kinds in sold for kind in kinds.values()]

    def _models(self) -> list[dict[str, Any]]:
        had = {(zone, model) for model, (_, _, zones) in wares.ATTACHED.items() for zone in zones}
        had |= {(zone, kind.model) for zone, kinds in wares.sold().items() for kind in kinds.values() if kind.model}
        return [gce_records.accelerator_type(zone, model) for zone, model in sorted(had)]

    def _disk_types(self) -> list[dict[str, Any]]:
        return [gce_records.disk_type(zone, name) for zone in wares.sold() for name in wares.DISKS]

    def _images(self, request: Request) -> Any:
        there = [gce_records.image(*key) for key in wares.FAMILIES if key[0] == request.by["project"]]
        return self._listed(request, "image", there)

    def _image(self, request: Request, *, is_family: bool) -> Any:
        project, name = request.by["project"], request.by["id"]
        for key, about in wares.FAMILIES.items():
            if key == (project, name) if is_family else (key[0], about[0]) == (project, name):
                return gce_records.image(*key)
        raise absent(f"projects/{project}/global/images/{'family/' if is_family else ''}{name}")

    def _make(self, request: Request, things: dict[str, dict[str, Any]], what: str) -> Any:
        told, region = request.body, request.by.get("region", "")
        check_labels(told)
        if told["name"] in things:
            raise refused(409, "alreadyExists", f"The resource '{what}/{told['name']}' already exists")
        if what == "instanceTemplate":
            self.groups.check_template(told)
        if "workloadPolicy" in told:
            self.groups.check_policy(told)
        more: dict[str, Any] = {"region": f"{HERE}/regions/{region}", "status": "READY"} if region else {}
        if what == "firewall":
            network = told.get("network", "global/networks/default").rpartition("/")[2]
            if network not in self.networks:  # skyplane-project/skyplane/issues/683
                raise absent(f"projects/{PROJECT}/global/networks/{network}")
            gce_rules.check_firewall(told)
            more |= {"network": f"{HERE}/global/networks/{network}", "direction": "INGRESS", "disabled": False}
        scope = f"regions/{region}" if region else "global"
        plural = f"{what.removesuffix('y')}ies" if what.endswith("y") else f"{what}s"
        path = f"{scope}/{plural}/{told['name']}"

        def finish() -> None:
            things[told["name"]] = {**told, **gce_records.made(what, path), **more}

        return gce_records.operation(self._begun("insert", scope, path, self.delays.other, finish))

    def _remove(self, request: Request, things: dict[str, dict[str, Any]], what: str) -> Any:
        name = request.by["id"]
        if name not in things:
            raise absent(f"{what}/{name}")
        used = self.groups.users(name)
        used += [each.id for each in self.rentals.values() if any(name in p for p in _policies(each))]
        if used or things[name].get("users"):
            text = f"The {what} resource '{name}' is already being used by '{[*used, '']}'"
            raise refused(400, "resourceInUseByAnotherResource", text)
        scope = next((f"{each}s/{request.by[each]}" for each in ("zone", "region") if each in request.by), "global")
        finish: Callable[[], object] = lambda: things.pop(name, None)  # noqa: E731
        begun = self._begun("delete", scope, f"{scope}/{what}/{name}", self.delays.other, finish)
        return gce_records.operation(begun)

    # --- lists and operations --------------------------------------------------------------------------------

    def _scoped(self, request: Request, kind: str, things: Iterable[Mapping[str, Any]]) -> Any:
        """By zone or region, with a warning where there is nothing, as the API lists them."""
        nothing = {"code": "NO_RESULTS_ON_PAGE", "message": "There are no results for scope on this page."}
        scopes: dict[str, Any] = {"zones/me-west1-c": {"warning": nothing}}
        shown, rest = page(request, list(things), self.pages)
        for each in shown:
            place = str(each.get("zone") or each.get("region", "")).rpartition("/")[2]
            scope = f"{'zones' if 'zone' in each else 'regions'}/{place}"
            if place not in self.unreachable:
                scopes.setdefault(scope, {kind: []})[kind].append(each)
        lost = {"warning": {"code": "UNREACHABLE", "message": "The scope could not be reached."}}
        scopes |= {f"zones/{zone}": lost for zone in self.unreachable}
        self_link = f"{HERE}/aggregated/{kind}"
        told = {"kind": f"compute#{kind}AggregatedList", "id": kind, "items": scopes, "selfLink": self_link}
        return {**told, **self._warned(), **rest}

    def _listed(self, request: Request, kind: str, things: Iterable[Mapping[str, Any]]) -> Any:
        """Those of the request's zone or region, if it has one."""
        wanted = request.by.get("zone") or request.by.get("region") or ""
        here = [each for each in things if not wanted or _place(each) == wanted]
        shown, rest = page(request, here, self.pages)
        path = request.path.removeprefix(_HERE.format(project=request.by["project"]))
        more = {"items": shown} if shown else {}
        return {"kind": f"compute#{kind}List", "id": path.strip("/"), "selfLink": HERE + path, **more,
                **self._warned(), **rest}  # fmt: skip

    def _warned(self) -> dict[str, Any]:
        return {"warning": {"code": self.warning, "message": "Some results may be missing."}} if self.warning else {}

    def _found(self, request: Request, things: Iterable[Mapping[str, Any]]) -> Any:
        """The resource that a path names."""
        wanted = request.by.get("zone") or request.by.get("region") or ""
        for each in things:
            if each["name"] == request.by["id"] and (not wanted or _place(each) == wanted):
                return each
        raise absent(request.path.removeprefix("/compute/v1/"))

    def _one_of(self, request: Request, part: str, known: Iterable[str]) -> str:
        """The zone or the region of a path, if there is such a one."""
        name = request.by[part]
        if name not in known:  # inspec/inspec-gcp/issues/301
            raise refused(400, "invalid", f"Invalid value for field '{part}': '{name}'. Unknown {part}.")
        return name

    def _begun(self, kind: str, scope: str, target: str, seconds: float, finish: Callable[[], object]) -> Operation:
        name = f"operation-{next(self._numbers)}-{secrets.token_hex(6)}"
        made = Operation(name, kind, scope, target, self.clock.now())
        self.operations[made.name] = made

        def over() -> None:
            try:
                finish()
            except Failed as e:
                made.failure = e
            made.status = "DONE"

        self.later(seconds, over)
        return made

    def _scope(self, request: Request) -> str:
        """The scope of a path to operations, such as "zones/us-central1-a" or "global"."""
        return request.path.removeprefix(_HERE.format(project=request.by["project"])).strip("/").partition("/oper")[0]

    def _operation(self, request: Request) -> Any:
        made = self.operations.get(request.by["id"])
        if made is None or made.scope != self._scope(request):
            raise absent(request.path.removeprefix("/compute/v1/"))
        return gce_records.operation(made)

    def _operations(self, request: Request) -> Any:
        scope = self._scope(request)
        there = [gce_records.operation(each) for each in self.operations.values() if each.scope == scope]
        return self._listed(request, "operation", there)


def _place(record: Mapping[str, Any]) -> str:
    """The name of the zone or of the region of a record, "" for a global one."""
    return str(record.get("zone") or record.get("region", "")).rpartition("/")[2]


def _policies(rental: Instance) -> list[str]:
    return list(rental.told.get("resourcePolicies", ()))
