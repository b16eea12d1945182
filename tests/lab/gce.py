"""Compute Engine as its clients see it: JSON over HTTP, operations that are polled, labels, disks that outlive a stop.

    with GCE(lab) as gce:  # or the fixtures `gce`, and `gce_api` without machines
        driver = sky.GCP()

What it does and how it refuses is what the API's reference, its client and public threads tell of the real one (read
2026-11-22). Instances are machines of the lab, booted with the user data of their metadata. What switches itself off is
TERMINATED, which there means stopped: its disk stays, and is billed. Cloud TPU is asked here, too, and is not enabled.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from skypool.drivers.recording import Exchange
from tests.lab import aws_images, tpu_wares
from tests.lab import gce_wares as wares
from tests.lab.cloud import Answer, Cloud, Refused, Request, Route
from tests.lab.gce_groups import Groups
from tests.lab.gce_things import Delays, Failed, Instance, Operation, checked, error, fingerprint, moment, refused
from tests.lab.gcp_iam import Role, acting, permit
from tests.lab.google_metadata import handler
from tests.lab.google_replies import THINGS, told, unrecorded
from tests.lab.machines import Lab, Machine

PROJECT = "lab-project"
_HERE = "/compute/v1/projects/{project}"
_FILTER = re.compile(r'labels\.(?P<label>[a-z0-9_-]+)(=(?P<value>[a-z0-9_-]+)|:\*)|name eq "(?P<name>[^"]+)"')
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
        quotas: by metric; one of 0 refuses all that it counts.
        caller: what who shows no token may do; None: everything.
        ready: whether instances become RUNNING at all.
        unreachable: zones that lists lack, as they say.
    """

    name: ClassVar[str] = "gce"
    things: ClassVar[tuple[str, ...]] = THINGS

    def __init__(self, lab: Lab | None = None, recording: Path | str | None = None) -> None:
        super().__init__(lab, recording)
        self.delays, self.ready = Delays(), True
        self.unreachable: list[str] = []
        self.disks: dict[str, dict[str, Any]] = {}
        self.firewalls: dict[str, dict[str, Any]] = {}
        self.placements: dict[str, dict[str, Any]] = {}
        self.reservations: dict[str, dict[str, Any]] = {}
        self.groups = Groups(self)
        self.operations: dict[str, Operation] = {}
        self.quotas = {"GPUS_ALL_REGIONS": 16.0, "CPUS_ALL_REGIONS": 256.0}
        self.caller: Role | None = None
        self._requests: dict[str, Operation] = {}
        self._doomed: list[Failed] = []
        self._numbers = itertools.count(1)
        table = list(self._table())
        self.routes = {f"{verb} {_HERE}{path}": do for verb, path, _, do in table}
        self.routes["HEAD /"] = lambda _: {}
        self._names = {f"{verb} {_HERE}{path}": f"{verb} {name}" for verb, path, name, _ in table}

    def _table(self) -> Iterable[tuple[str, str, str, Route]]:
        zone, region = "/zones/{zone}", "/regions/{region}"
        yield "GET", "", "project", lambda _: self._project()
        yield "GET", "/zones", "zones", lambda r: self._listed(r, map(self._zone, wares.sold()))
        yield "GET", region, "region", lambda r: {"name": r.by["region"], "quotas": []}
        yield "GET", "/aggregated/machineTypes", "machineTypes", self._types
        yield "GET", "/aggregated/acceleratorTypes", "acceleratorTypes", self._models
        yield "GET", "/aggregated/reservations", "reservations", self._aggregated("reservations", self.reservations)
        yield "GET", "/global/images/family/{id}", "family", self._family
        yield "GET", "/global/images/{id}", "image", self._image
        yield "GET", "/global/networks/{id}", "network", self._network
        yield "GET", "/aggregated/instances", "instances", self._instances
        yield "POST", f"{zone}/instances", "instances", self._insert
        yield "GET", f"{zone}/instances/{{id}}", "instance", lambda r: self._shown(self._known(r))
        yield "DELETE", f"{zone}/instances/{{id}}", "instance", self._delete
        yield "POST", f"{zone}/instances/{{id}}/setLabels", "labels", self._label
        yield "GET", "/aggregated/disks", "disks", self._aggregated("disks", self.disks)
        yield "DELETE", f"{zone}/disks/{{id}}", "disk", lambda r: self._remove(r, self.disks, "disk")
        yield "GET", "/global/firewalls", "firewalls", lambda r: self._listed(r, self.firewalls.values())
        yield "POST", "/global/firewalls", "firewalls", lambda r: self._make(r, self.firewalls, "firewall")
        yield "DELETE", "/global/firewalls/{id}", "firewall", lambda r: self._remove(r, self.firewalls, "firewall")
        policies = self._aggregated("resourcePolicies", self.placements)
        yield "GET", "/aggregated/resourcePolicies", "resourcePolicies", policies
        make = f"{region}/resourcePolicies"
        yield "POST", make, "resourcePolicies", lambda r: self._make(r, self.placements, "policy")
        yield "DELETE", f"{make}/{{id}}", "resourcePolicy", lambda r: self._remove(r, self.placements, "policy")
        yield from self.groups.table()
        for scope in (zone, region, "/global"):
            yield "GET", f"{scope}/operations/{{id}}", "operation", self._operation

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
        """Who shows no token is a client of the lab; a machine's is good as long as it is there."""
        if request.path.startswith("/v2/"):
            text = DISABLED.format(project=PROJECT)
            info = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": "SERVICE_DISABLED"}
            about = {"code": 403, "message": text, "status": "PERMISSION_DENIED", "details": [info]}
            raise Refused(403, {"error": about})
        if request.by.get("project", PROJECT) != PROJECT and "/global/images/" not in request.path:
            raise refused(404, "notFound", f"The resource 'projects/{request.by['project']}' was not found")
        shown = request.headers.get("authorization", "").removeprefix("Bearer ")
        if shown and shown not in {each.token for each in self.rentals.values() if each.account}:
            raise refused(401, "authError", "Invalid Credentials")
        if not shown and self.caller is not None:
            permit(self.caller, request)

    def throttled(self, request: Request) -> Refused:
        return refused(403, "rateLimitExceeded", "Quota exceeded for quota metric 'Queries' and limit 'per minute'.")

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
        if rental.state in ("STAGING", "RUNNING"):
            rental.state, rental.living, rental.ip = "TERMINATED", False, ""

    # --- instances -------------------------------------------------------------------------------------------

    def _insert(self, request: Request) -> Any:
        told, zone = request.body, request.by["zone"]
        if (id_ := request.query.get("requestId", "")) in self._requests and id_:
            return self._told(self._requests[id_])
        kind = self._asked(told, zone)
        market = "spot" if told.get("scheduling", {}).get("provisioningModel") == "SPOT" else "on-demand"
        if kind.cards and self.quotas["GPUS_ALL_REGIONS"] < len(kind.cards):
            limit = self.quotas["GPUS_ALL_REGIONS"]
            raise refused(403, "quotaExceeded", f"Quota 'GPUS_ALL_REGIONS' exceeded.  Limit: {limit} globally.")
        failure = self._doomed.pop(0) if self._doomed else acting(self.caller, told)
        if failure is None and self.room(kind.name, zone, market) < 1:
            failure = Failed(503, "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", NO_ROOM.format(zone=zone))
        target = f"zones/{zone}/instances/{told['name']}"
        rental = Instance(told["name"], kind.name, zone, market, self.clock.now(), "PROVISIONING", told=told)
        if failure is not None:
            operation = self._begun("insert", f"zones/{zone}", target, self.delays.insert, lambda: self._fail(failure))
        else:
            operation = self._begun("insert", f"zones/{zone}", target, self.delays.insert, lambda: self._run(rental))
            self.add(rental, kind)
        if id_:
            self._requests[id_] = operation
        return self._told(operation)

    def add(self, rental: Instance, kind: wares.Kind) -> None:
        """It is there, with its disk, and boots."""
        rental.labels = dict(rental.told.get("labels", {}))
        self.rentals[rental.id] = rental
        self._add_disk(rental)
        self._boot(rental, kind)

    def _asked(self, told: dict[str, Any], zone: str) -> wares.Kind:
        """The machine type of an insert that makes sense; refuses any other in the API's words."""
        kind = self.machine_type(told, zone)
        self._reserve(told, zone)
        for policy in told.get("resourcePolicies", ()):
            self._exists(policy, "resourcePolicies", self.placements)
            if "workloadPolicy" in self.placements[policy.rpartition("/")[2]]:
                kinds = "[VmMaintenancePolicy, GroupPlacementPolicy, InstanceSchedulePolicy]"
                raise refused(400, "invalid", f"Resource policy must have one of {kinds}")
        if told["name"] in self.rentals:
            raise refused(409, "alreadyExists", f"The resource '{zone}/instances/{told['name']}' already exists")
        return kind

    def machine_type(self, told: dict[str, Any], zone: str) -> wares.Kind:
        """Of properties of machines that make sense; refuses any other."""
        kind = wares.sold().get(zone, {}).get(told["machineType"].rpartition("/")[2])
        if kind is None:
            raise refused(404, "notFound", f"The resource 'projects/{PROJECT}/{told['machineType']}' was not found")
        checked(told)
        kind = wares.equipped(kind, zone, told.get("guestAccelerators", ()))
        plan = told.get("scheduling", {})
        if (kind.cards or kind.slice) and plan.get("onHostMaintenance") != "TERMINATE":
            raise refused(400, "invalid", "Instances with guest accelerators do not support live migration.")
        limited, spot = plan.get("maxRunDuration"), plan.get("provisioningModel") in ("SPOT", "RESERVATION_BOUND")
        if plan.get("instanceTerminationAction") and not (limited or spot):
            raise refused(400, "invalid", "You cannot specify a termination action for a standard VM with no limit.")
        if limited and not (plan.get("instanceTerminationAction") and 30 <= int(limited["seconds"]) <= 10368000):
            raise refused(400, "invalid", "Max run duration must be between 30 seconds and 120 days, with an action.")
        self._boot_disk(told, kind)
        for nic in told["networkInterfaces"]:
            self._exists(nic["network"], "networks", ["default", "lab-net"])
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
                raise refused(404, "notFound", f"The resource 'zones/{zone}/reservations/{name}' was not found")
            if bound != (held.get("deploymentType") == "DENSE"):
                raise refused(400, "invalid", f"The provisioning model does not fit the reservation {name}.")
            if sorted(told.get("resourcePolicies", [])) != sorted(held.get("resourcePolicies", {}).values()):
                raise refused(400, "invalid", f"The resource policies do not match those of the reservation {name}.")
            has = held["specificReservation"]["instanceProperties"].get("localSsds", [])
            scratch = [each for each in told["disks"] if each.get("type") == "SCRATCH"]
            asked = [(each["interface"], str(each["initializeParams"]["diskSizeGb"])) for each in scratch]
            if asked != [(each.get("interface", "SCSI"), str(each["diskSizeGb"])) for each in has]:
                raise refused(400, "invalid", f"The local SSDs do not match those of the reservation {name}.")

    def _boot_disk(self, told: dict[str, Any], kind: wares.Kind) -> None:
        disk, *more = told["disks"]
        if any(each.get("type") != "SCRATCH" for each in more):
            raise refused(400, "invalid", "this lab has no other disks than boot disks and local SSDs")
        about = disk["initializeParams"]
        images = {name: gb for name, _, gb in wares.FAMILIES.values()}
        if (name := about["sourceImage"].rpartition("/")[2]) not in images:
            raise refused(404, "notFound", f"The resource '{about['sourceImage']}' was not found")
        if int(about["diskSizeGb"]) < images[name]:
            least = f"cannot be smaller than the image size {images[name]} GB"
            raise refused(400, "invalid", f"Requested disk size {about['diskSizeGb']} GB {least}")
        newer = kind.name.startswith(("g4-", "a3-ultragpu-", "a4-", "tpu7x-"))
        if newer != ("hyperdisk" in about["diskType"]):
            raise refused(400, "invalid", f"[{about['diskType']}] features are not compatible for creating instance.")
        if not (disk.get("boot") and disk.get("autoDelete")):
            raise refused(400, "invalid", "this lab has no other disks than boot disks that go with their instances")

    def _exists(self, path: str, kind: str, known: Iterable[str]) -> None:
        if path.rpartition("/")[2] not in known:
            raise refused(404, "notFound", f"The resource 'projects/{PROJECT}/global/{kind}/{path}' was not found")

    def _add_disk(self, rental: Instance) -> None:
        about = rental.told["disks"][0]["initializeParams"]
        at = f"{self.url}{_HERE.format(project=PROJECT)}/zones/{rental.place}"
        self.disks[rental.id] = {
            "name": rental.id, "zone": at, "labels": about.get("labels", {}), "sizeGb": str(about["diskSizeGb"]),
            "users": [f"{at}/instances/{rental.id}"], "status": "READY",
        }  # fmt: skip

    def _boot(self, rental: Instance, kind: wares.Kind) -> None:
        image = rental.told["disks"][0]["initializeParams"]["sourceImage"]
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
        rental.state = "RUNNING"
        rental.ip = rental.machine.address if rental.machine else f"203.0.113.{next(self._numbers) % 250 + 1}"
        if limit := rental.told.get("scheduling", {}).get("maxRunDuration"):
            self.later(float(limit["seconds"]), lambda: self._over(rental))

    def _over(self, rental: Instance) -> None:
        """Its time is up: time in which it is stopped does not count."""
        if self.rentals.get(rental.id) is rental and rental.state == "RUNNING":
            self._gone(rental)

    def _gone(self, rental: Instance) -> None:
        rental.state, rental.living = "STOPPING", False

        def then() -> None:
            if self.rentals.get(rental.id) is rental:
                del self.rentals[rental.id]
                self.disks.pop(rental.id, None)

        self.end(rental, then)

    def _delete(self, request: Request) -> Any:
        rental = self._known(request)

        def finish() -> None:
            if not rental.survives() and rental.state != "STOPPING":
                self._gone(rental)

        target = f"zones/{rental.place}/instances/{rental.id}"
        return self._told(self._begun("delete", f"zones/{rental.place}", target, self.delays.delete, finish))

    def _label(self, request: Request) -> Any:
        rental, told = self._known(request), request.body
        if told.get("labelFingerprint") != fingerprint(rental):
            raise refused(412, "conditionNotMet", "Labels fingerprint either invalid or resource labels have changed")
        checked(told)
        rental.labels, rental.changes = dict(told["labels"]), rental.changes + 1
        target = f"zones/{rental.place}/instances/{rental.id}"
        return self._told(self._begun("setLabels", f"zones/{rental.place}", target, 0.0, lambda: None))

    def _known(self, request: Request) -> Instance:
        rental = self.rentals.get(request.by["id"])
        if rental is None or rental.place != request.by["zone"]:
            path = f"projects/{PROJECT}/zones/{request.by['zone']}/instances/{request.by['id']}"
            raise refused(404, "notFound", f"The resource '{path}' was not found")
        return rental

    def _instances(self, request: Request) -> Any:
        shown = [self._shown(each) for each in self.rentals.values()]
        return self._scoped(request, "instances", shown)

    def _shown(self, rental: Instance) -> dict[str, Any]:
        at = f"{self.url}{_HERE.format(project=PROJECT)}/zones/{rental.place}"
        access = [{"name": "External NAT", "type": "ONE_TO_ONE_NAT", **({"natIP": rental.ip} if rental.ip else {})}]
        inside = rental.machine.address if rental.machine else "10.128.0.2"
        return {
            "kind": "compute#instance", "id": str(int(rental.created * 1e6)), "name": rental.id, "zone": at,
            "status": rental.state, "machineType": f"{at}/machineTypes/{rental.kind}", "labels": rental.labels,
            "labelFingerprint": fingerprint(rental), "creationTimestamp": moment(rental.created),
            "scheduling": rental.told.get("scheduling", {}), "tags": rental.told.get("tags", {}),
            "metadata": rental.told.get("metadata", {}),
            "networkInterfaces": [{"network": "default", "networkIP": inside, "accessConfigs": access}],
        }  # fmt: skip

    # --- what else there is ----------------------------------------------------------------------------------

    def _project(self) -> dict[str, Any]:
        quotas = [{"metric": metric, "limit": limit, "usage": 0.0} for metric, limit in self.quotas.items()]
        return {"name": PROJECT, "id": "1234567890", "quotas": quotas}

    def _zone(self, name: str) -> dict[str, Any]:
        return {"name": name, "status": "UP", "region": f"regions/{name.rpartition('-')[0]}"}

    def _network(self, request: Request) -> Any:
        self._exists(request.by["id"], "networks", ["default", "lab-net"])
        return {"name": request.by["id"]}

    def _types(self, request: Request) -> Any:
        at = f"{self.url}{_HERE.format(project=PROJECT)}/zones"
        shown = [
            {
                "name": kind.name, "zone": zone, "guestCpus": kind.vcpus, "memoryMb": int(kind.memory_gib * 1024),
                "architecture": "X86_64", "selfLink": f"{at}/{zone}/machineTypes/{kind.name}",
                "accelerators": [{"guestAcceleratorType": kind.model, "guestAcceleratorCount": len(kind.cards)}]
                if kind.cards else [],
            }
            for zone, kinds in wares.sold().items() for kind in kinds.values()
        ]  # fmt: skip
        return self._scoped(request, "machineTypes", shown)

    def _models(self, request: Request) -> Any:
        at = f"{self.url}{_HERE.format(project=PROJECT)}/zones"
        had = {(zone, model) for model, (_, _, zones) in wares.ATTACHED.items() for zone in zones}
        had |= {(zone, kind.model) for zone, kinds in wares.sold().items() for kind in kinds.values() if kind.model}
        shown = [{"name": model, "zone": f"{at}/{zone}", "maximumCardsPerInstance": 4} for zone, model in sorted(had)]
        return self._scoped(request, "acceleratorTypes", shown)

    def _family(self, request: Request) -> Any:
        return self._image_of(request, (request.by["project"], request.by["id"]))

    def _image(self, request: Request) -> Any:
        known = {(whose, about[0]): (whose, family) for (whose, family), about in wares.FAMILIES.items()}
        return self._image_of(request, known.get((request.by["project"], request.by["id"]), ("", "")))

    def _image_of(self, request: Request, key: tuple[str, str]) -> Any:
        if key not in wares.FAMILIES:
            path = f"projects/{request.by['project']}/global/images/{request.by['id']}"
            raise refused(404, "notFound", f"The resource '{path}' was not found")
        name, arch, gb = wares.FAMILIES[key]
        link = f"https://www.googleapis.com/compute/v1/projects/{key[0]}/global/images/{name}"
        return {"name": name, "family": key[1], "architecture": arch, "diskSizeGb": str(gb), "selfLink": link}

    def _make(self, request: Request, things: dict[str, dict[str, Any]], what: str) -> Any:
        told, region = request.body, request.by.get("region", "")
        checked(told)
        if told["name"] in things:
            raise refused(409, "alreadyExists", f"The resource '{what}/{told['name']}' already exists")
        if what == "template":
            self.groups.check_template(told)
        if "workloadPolicy" in told:
            self.groups.check_policy(told)
        if what == "firewall":
            self._exists(told["network"], "networks", ["default", "lab-net"])
            if ("allowed" in told) == ("denied" in told) or told["direction"] != "INGRESS":
                raise refused(400, "invalid", "Exactly one of allowed and denied must be specified.")
        scope = f"regions/{region}" if region else "global"

        def finish() -> None:
            things[told["name"]] = {**told, **({"region": f"{self.url}/regions/{region}"} if region else {})}

        return self._told(self._begun("insert", scope, f"{scope}/{what}/{told['name']}", self.delays.other, finish))

    def _remove(self, request: Request, things: dict[str, dict[str, Any]], what: str) -> Any:
        name = request.by["id"]
        if name not in things:
            raise refused(404, "notFound", f"The resource '{what}/{name}' was not found")
        used = self.groups.users(name)
        used += [each.id for each in self.rentals.values() if any(name in p for p in _policies(each))]
        if used or things[name].get("users"):
            text = f"The {what} resource '{name}' is already being used by '{[*used, '']}'"
            raise refused(400, "resourceInUseByAnotherResource", text)
        scope = next((f"{each}s/{request.by[each]}" for each in ("zone", "region") if each in request.by), "global")
        finish: Callable[[], object] = lambda: things.pop(name, None)  # noqa: E731
        return self._told(self._begun("delete", scope, f"{scope}/{what}/{name}", self.delays.other, finish))

    # --- lists and operations --------------------------------------------------------------------------------

    def _aggregated(self, kind: str, things: Mapping[str, dict[str, Any]]) -> Route:
        return lambda request: self._scoped(request, kind, things.values())

    def _scoped(self, request: Request, kind: str, things: Iterable[Mapping[str, Any]]) -> Any:
        """By zone or region, with a warning where there is nothing, as the API lists them."""
        scopes: dict[str, Any] = {"zones/me-west1-c": {"warning": {"code": "NO_RESULTS_ON_PAGE", "message": "nothing"}}}
        for each in self._filtered(request, things):
            place = str(each.get("zone") or each.get("region", "")).rpartition("/")[2]
            scope = f"{'zones' if 'zone' in each else 'regions'}/{place}"
            if place not in self.unreachable:
                scopes.setdefault(scope, {kind: []})[kind].append(each)
        lost = {"warning": {"code": "UNREACHABLE", "message": "The scope could not be reached."}}
        scopes |= {f"zones/{zone}": lost for zone in self.unreachable}
        return {"kind": f"compute#{kind}AggregatedList", "items": scopes}

    def _listed(self, request: Request, things: Iterable[Mapping[str, Any]]) -> Any:
        return {"items": self._filtered(request, things)}

    def _filtered(self, request: Request, things: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        if not (text := request.query.get("filter")):
            return list(things)
        if not (found := _FILTER.fullmatch(text)):
            raise refused(400, "invalid", f"Invalid value for field 'filter': '{text}'.")
        label, value, name = found["label"], found["value"], found["name"]
        if name is not None:
            return [each for each in things if re.fullmatch(name, each["name"])]
        has = [each for each in things if label in each.get("labels", {})]
        return [each for each in has if value in (None, each["labels"][label])]

    def _begun(self, kind: str, scope: str, target: str, seconds: float, finish: Callable[[], object]) -> Operation:
        made = Operation(f"operation-{next(self._numbers)}-{secrets.token_hex(6)}", kind, scope, target)
        self.operations[made.name] = made

        def over() -> None:
            try:
                finish()
            except Failed as e:
                made.failure = e
            made.status = "DONE"

        self.later(seconds, over)
        return made

    def _fail(self, failure: Failed) -> None:
        raise failure

    def _operation(self, request: Request) -> Any:
        made = self.operations.get(request.by["id"])
        scope = request.path.partition(f"/{PROJECT}/")[2].partition("/operations")[0]
        if made is None or made.scope != scope:
            raise refused(404, "notFound", f"The resource '{request.path}' was not found")
        return self._told(made)

    def _told(self, made: Operation) -> dict[str, Any]:
        at = f"{self.url}{_HERE.format(project=PROJECT)}"
        told: dict[str, Any] = {
            "kind": "compute#operation", "name": made.name, "operationType": made.kind, "status": made.status,
            "targetLink": f"{at}/{made.target}", "progress": 100 if made.status == "DONE" else 0,
            "selfLink": f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/{made.scope}/operations/{made.name}",
        }  # fmt: skip
        scope, _, place = made.scope.partition("/")
        if place:
            told[scope.removesuffix("s")] = f"{at}/{made.scope}"
        if made.failure is not None:
            told |= {"httpErrorStatusCode": made.failure.status, "httpErrorMessage": "SERVICE UNAVAILABLE"}
            told["error"] = {"errors": [{"code": made.failure.code, "message": made.failure.message}]}
        return told


def _policies(rental: Instance) -> list[str]:
    return list(rental.told.get("resourcePolicies", ()))
