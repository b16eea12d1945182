"""Managed instance groups of the lab's Compute Engine that are slices of TPUs, their templates and workload policies.

As https://docs.cloud.google.com/compute/docs/instance-groups/about-bulk-mode and those who use them tell (read
2026-11-22): all machines come at once, or the group waits and says why; Compute Engine writes into the metadata of each
which host of the slice it is. Here they are numbered from the last name to the first, as names need not say it.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skypool.accelerators import tables
from tests.lab.cloud import Request, Route
from tests.lab.gce_records import HERE, made, operation
from tests.lab.gce_things import Instance, check_labels, moment, refused
from tests.lab.gce_wire import absent

if TYPE_CHECKING:
    from tests.lab.gce import GCE

NO_BULK = "MIGs with TPU accelerator topology require BULK mode in target size policy"
WAITING = "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"


@dataclass
class Group:
    """One group. `hosts`: ids of its machines, by their numbers; `error`: why it has none yet, a code and a text."""

    name: str
    zone: str
    told: dict[str, Any]
    created: float
    kind: str
    market: str
    hosts: list[str] = field(default_factory=list[str])
    error: tuple[str, str] | None = None
    making: bool = True
    ending: bool = False


class Groups:
    """Those of one project, and their templates, by name."""

    def __init__(self, world: GCE) -> None:
        self.world = world
        self.templates: dict[str, dict[str, Any]] = {}
        self.there: dict[str, Group] = {}

    def table(self) -> Iterable[tuple[str, str, str, Route]]:
        world, make = self.world, "/zones/{zone}/instanceGroupManagers"
        yield "GET", "/global/instanceTemplates", "templates", self._templates
        make_template = lambda r: world._make(r, self.templates, "instanceTemplate")  # noqa: E731
        yield "POST", "/global/instanceTemplates", "templates", make_template
        one = "/global/instanceTemplates/{id}"
        yield "GET", one, "template", lambda r: world._found(r, self.templates.values())
        yield "DELETE", one, "template", lambda r: world._remove(r, self.templates, "instanceTemplate")
        yield "GET", "/aggregated/instanceGroupManagers", "groups", self._list
        yield "POST", make, "groups", self._insert
        yield "GET", f"{make}/{{id}}", "group", lambda r: self._shown(self._known(r))
        yield "DELETE", f"{make}/{{id}}", "group", self._delete

    def count(self) -> dict[str, int]:
        return {"templates": len(self.templates), "groups": len(self.there)}

    def users(self, name: str) -> list[str]:
        """The groups that have this template or policy."""
        return [each.name for each in self.there.values() if name in map(_last, _needs(each.told))]

    def machine(self, host: str) -> str:
        """The machine of a host as the driver calls it, "SLICE-w-0"."""
        name, _, number = host.rpartition("-w-")
        return self.there[name].hosts[int(number)] if name in self.there else host

    # --- what makes sense ------------------------------------------------------------------------------------

    def check_template(self, told: dict[str, Any]) -> None:
        properties = told["properties"]
        disks = [each["initializeParams"] for each in properties["disks"]]
        if "/" in properties["machineType"] or any("/" in each["diskType"] for each in disks):
            raise refused(400, "invalid", "Invalid value for field 'resource.properties': must be a name, not a URL")
        if any("diskName" in each for each in disks):
            raise refused(400, "invalid", "a disk's name in a template would be that of several disks")
        for nic in properties["networkInterfaces"]:
            if not re.match("projects/[^/]+/regions/", nic.get("subnetwork", "projects/p/regions/r")):
                raise refused(400, "invalid", "Invalid value for field 'subnetwork': The URL is malformed.")

    def check_policy(self, told: dict[str, Any]) -> None:
        policy = told["workloadPolicy"]
        if "groupPlacementPolicy" in told or policy.get("type") != "HIGH_THROUGHPUT":
            raise refused(400, "invalid", "Accelerator topology can be set only when the type is HIGH_THROUGHPUT.")
        if not self._slices(policy.get("acceleratorTopology", "")):
            raise refused(400, "invalid", f"Accelerator topology {policy.get('acceleratorTopology')} is not supported.")

    def _slices(self, topology: str) -> list[str]:
        known = [each for each in tables.slices().values() if each.generation == "tpu7x" and each.vms > 1]
        return [each.type for each in known if each.topology == topology]

    def _kind(self, told: dict[str, Any], properties: dict[str, Any], zone: str) -> str:
        """The slice that a group becomes; refuses one that becomes none."""
        policy = told.get("resourcePolicies", {}).get("workloadPolicy", "")
        if not re.match("(https://|projects/)", policy):
            raise refused(400, "invalid", "Invalid value for field 'workloadPolicy': The URL is malformed.")
        if _last(policy) not in self.world.placements:
            raise absent(policy)
        held = self.world.placements[_last(policy)]
        if _last(held["region"]) != zone.rpartition("-")[0]:
            raise refused(400, "invalid", f"The policy {policy} is not in the region of {zone}.")
        if told.get("targetSizePolicy", {}).get("mode") != "BULK":
            raise refused(400, "invalid", NO_BULK)
        if told.get("instanceLifecyclePolicy", {}).get("defaultActionOnFailure") != "DO_NOTHING":
            raise refused(400, "invalid", "MIGs with TPU accelerator topology require DO_NOTHING on failure.")
        [type] = self._slices(held["workloadPolicy"]["acceleratorTopology"])
        each = tables.slices()[type]
        if properties["machineType"] != each.machine_type or told["targetSize"] != each.vms:
            chips = math.prod(map(int, each.topology.split("x")))
            text = f"The topology {each.topology} of {chips} chips needs {each.vms} {each.machine_type}."
            raise refused(400, "invalid", text)
        return type

    # --- making, ending --------------------------------------------------------------------------------------

    def _insert(self, request: Request) -> Any:
        world, told, zone = self.world, request.body, request.by["zone"]
        check_labels(told)
        if told["name"] in self.there:
            raise refused(409, "alreadyExists", f"The resource '{zone}/instanceGroupManagers/{told['name']}' exists")
        if _last(told["instanceTemplate"]) not in self.templates:
            raise absent(told["instanceTemplate"])
        properties = self.templates[_last(told["instanceTemplate"])]["properties"]
        world.machine_type(properties, zone)
        if len(re.sub(r"\[\d+\]$", "", told["baseInstanceName"])) > 63:
            raise refused(400, "invalid", "Invalid value for field 'resource.baseInstanceName': too long.")
        kind = self._kind(told, properties, zone)
        market = "spot" if properties["scheduling"]["provisioningModel"] == "SPOT" else "on-demand"
        group = Group(told["name"], zone, told, world.clock.now(), kind, market)
        if world._doomed:
            failure = world._doomed.pop(0)
            group.error, group.making = (failure.code, failure.message), False
        target = f"zones/{zone}/instanceGroupManagers/{group.name}"

        def finish() -> None:
            self.there[group.name] = group
            self._fill(group, properties)

        return operation(world._begun("insert", f"zones/{zone}", target, world.delays.other, finish))

    def _fill(self, group: Group, properties: dict[str, Any]) -> None:
        """Make all its machines, or wait until there is room for them."""
        from tests.lab.gce import NO_ROOM

        if group.ending or not group.making:
            return
        place = group.kind, group.zone, group.market
        taken = sum((each.kind, each.zone, each.market) == place and bool(each.hosts) for each in self.there.values())
        if self.world.room(*place) - taken < 1:
            group.error = WAITING, NO_ROOM.format(zone=group.zone)
            self.world.later(0.2, lambda: self._fill(group, properties))
            return
        group.error, group.making = None, False
        width, first = re.fullmatch(r".*-(#+)\[(\d+)\]", group.told["baseInstanceName"]).groups()  # type: ignore[union-attr]  # what the driver sends
        base = group.told["baseInstanceName"].partition("#")[0]
        names = [f"{base}{int(first) + n:0{len(width)}}" for n in range(group.told["targetSize"])]
        group.hosts = [*reversed(names)]
        for number, name in enumerate(group.hosts):
            self._add(group, properties, name, number)

    def _add(self, group: Group, properties: dict[str, Any], name: str, number: int) -> None:
        told = {**copy.deepcopy(properties), "name": name}
        topology = tables.slices()[group.kind].topology
        more = {
            "accelerator-type": group.kind, "worker-network-endpoints": ",".join(group.hosts),
            "tpu-env": f"TOPOLOGY: '{topology}'\nTPU_ACCELERATOR_TYPE: '{group.kind}'\nTPU_WORKER_ID: '{number}'\n",
        }  # fmt: skip
        told["metadata"]["items"] += [{"key": key, "value": value} for key, value in more.items()]
        kind = self.world.machine_type(properties, group.zone)
        rental = Instance(name, kind.name, group.zone, group.market, self.world.clock.now(), "PROVISIONING", told=told)
        self.world.add(rental, kind)
        self.world.later(self.world.delays.insert, lambda: self.world._run(rental))

    def _delete(self, request: Request) -> Any:
        group = self._known(request)
        target = f"zones/{group.zone}/instanceGroupManagers/{group.name}"

        def gone() -> None:
            if any(each in self.world.rentals for each in group.hosts):
                self.world.later(self.world.delays.delete, gone)
            else:
                self.there.pop(group.name, None)

        def finish() -> None:
            group.ending = True
            for each in group.hosts:
                rental = self.world.rentals.get(each)
                if rental is not None and rental.state != "STOPPING":
                    self.world._gone(rental)
            gone()

        if group.ending:
            raise refused(400, "resourceNotReady", f"The resource '{target}' is not ready")
        return operation(self.world._begun("delete", f"zones/{group.zone}", target, self.world.delays.delete, finish))

    # --- what there is ---------------------------------------------------------------------------------------

    def _known(self, request: Request) -> Group:
        group = self.there.get(request.by["id"])
        if group is None or group.zone != request.by["zone"]:
            raise refused(404, "notFound", f"The resource 'instanceGroupManagers/{request.by['id']}' was not found")
        return group

    def _templates(self, request: Request) -> Any:
        return self.world._listed(request, "instanceTemplate", self.templates.values())

    def _list(self, request: Request) -> Any:
        return self.world._scoped(request, "instanceGroupManagers", map(self._shown, self.there.values()))

    def _shown(self, group: Group) -> dict[str, Any]:
        here = [self.world.rentals[each] for each in group.hosts if each in self.world.rentals]
        bulk: dict[str, Any] = {"inProgress": group.making or group.error is not None}
        if group.error is not None:
            code, text = group.error
            error = {"errors": [{"code": code, "message": text}]}
            bulk["lastProgressCheck"] = {"error": error, "timestamp": moment(self.world.clock.now())}
        running = all(each.state == "RUNNING" for each in here) and not bulk["inProgress"]
        at = f"zones/{group.zone}"
        return {
            **group.told, **made("instanceGroupManager", f"{at}/instanceGroupManagers/{group.name}"),
            "zone": f"{HERE}/{at}", "instanceGroup": f"{HERE}/{at}/instanceGroups/{group.name}",
            "creationTimestamp": moment(group.created),
            "currentActions": {"deleting" if group.ending else "none": len(here)},
            "status": {"isStable": running, "bulkInstanceOperation": bulk},
        }  # fmt: skip


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _needs(told: dict[str, Any]) -> list[str]:
    """What a group must not lose: its template and its policy."""
    return [told["instanceTemplate"], told.get("resourcePolicies", {}).get("workloadPolicy", "")]
