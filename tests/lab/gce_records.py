"""Records of the lab's Compute Engine as the API shows them: instances, disks, types, images, networks, operations."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from tests.lab import gce_wares as wares
from tests.lab.gce_rules import Network
from tests.lab.gce_things import Instance, Operation, fingerprint, moment

PROJECT, NUMBER = "lab-project", "1234567890"
ROOT = "https://www.googleapis.com/compute/v1"
"""What the links in records begin with, whatever address was asked."""
HERE = f"{ROOT}/projects/{PROJECT}"
BORN = "2026-01-02T03:04:05.678-08:00"


def id_of(text: str) -> str:
    """The number of a resource, the same for the same path."""
    return str(10**18 + zlib.crc32(text.encode()))


def mark(text: str) -> str:
    """A fingerprint, which is bytes in base64."""
    return f"{zlib.crc32(text.encode()):08x}="[:8]


def made(kind: str, path: str, **about: Any) -> dict[str, Any]:
    """A record of a resource at a path such as "zones/z/disks/d", with what all resources have."""
    name = path.rpartition("/")[2]
    return {
        "kind": f"compute#{kind}", "id": id_of(path), "creationTimestamp": BORN, "name": name,
        "selfLink": f"{HERE}/{path}", **about,
    }  # fmt: skip


# --- what there is to choose from ----------------------------------------------------------------------------


def zone(name: str) -> dict[str, Any]:
    region = name.rpartition("-")[0]
    more = {"description": name, "availableCpuPlatforms": ["Intel Cascade Lake"], "supportsPzs": False}
    return made("zone", f"zones/{name}", status="UP", region=f"{HERE}/regions/{region}", **more)


def region(name: str, quotas: Mapping[str, float] | None) -> dict[str, Any]:
    zones = [f"{HERE}/zones/{each}" for each in sorted(wares.sold()) if each.rpartition("-")[0] == name]
    more: dict[str, Any] = {"description": name, "supportsPzs": False}
    if quotas is None:
        unknown = {"code": "QUOTA_INFO_UNAVAILABLE", "message": "Quota information is not available."}
        more |= {"quotas": [], "quotaStatusWarning": unknown}
    else:
        more |= {"quotas": listed(quotas)}
    return made("region", f"regions/{name}", status="UP", zones=zones, **more)


def listed(quotas: Mapping[str, float]) -> list[dict[str, Any]]:
    return [{"metric": metric, "limit": limit, "usage": 0.0} for metric, limit in quotas.items()]


def machine_type(place: str, kind: wares.Kind) -> dict[str, Any]:
    has = {"guestAcceleratorType": kind.model, "guestAcceleratorCount": len(kind.cards)}
    return made(
        "machineType",
        f"zones/{place}/machineTypes/{kind.name}",
        zone=place,
        guestCpus=kind.vcpus,
        memoryMb=int(kind.memory_gib * 1024),
        architecture=kind.arch,
        isSharedCpu=False,
        imageSpaceGb=0,
        maximumPersistentDisks=128,
        maximumPersistentDisksSizeGb="263168",
        description=f"{kind.vcpus} vCPUs, {kind.memory_gib:g} GB RAM",
        **({"accelerators": [has]} if kind.cards else {}),
    )


def accelerator_type(place: str, model: str) -> dict[str, Any]:
    path = f"zones/{place}/acceleratorTypes/{model}"
    return made("acceleratorType", path, zone=f"{HERE}/zones/{place}", maximumCardsPerInstance=8, description=model)


def disk_type(place: str, name: str) -> dict[str, Any]:
    more = {"description": name, "defaultDiskSizeGb": "500", "validDiskSize": "10GB-65536GB"}
    return made("diskType", f"zones/{place}/diskTypes/{name}", zone=f"{HERE}/zones/{place}", **more)


def image(project: str, family: str) -> dict[str, Any]:
    name, arch, gb = wares.FAMILIES[project, family]
    told = made("image", f"global/images/{name}", family=family, architecture=arch, diskSizeGb=str(gb))
    link = f"{ROOT}/projects/{project}/global/images/{name}"
    return {**told, "selfLink": link, "status": "READY", "sourceType": "RAW", "description": family}


def network(told: Network, regions: Iterable[str]) -> dict[str, Any]:
    subnetworks = [each["selfLink"] for each in subnetworks_of(told, regions)]
    profile = f"{HERE}/global/networkProfiles/{told.zone}-vpc-roce"
    return made(
        "network",
        f"global/networks/{told.name}",
        autoCreateSubnetworks=told.auto,
        subnetworks=subnetworks,
        mtu=8896 if told.zone else 1460,
        routingConfig={"routingMode": "REGIONAL"},
        **({"networkProfile": profile} if told.zone else {}),
    )


def subnetworks_of(told: Network, regions: Iterable[str]) -> list[dict[str, Any]]:
    own = {(each, told.name) for each in regions} if told.auto else set()
    return [subnetwork(told, *each, number) for number, each in enumerate(sorted(own | told.subnetworks))]


def subnetwork(of: Network, place: str, name: str, number: int) -> dict[str, Any]:
    return made(
        "subnetwork",
        f"regions/{place}/subnetworks/{name}",
        network=f"{HERE}/global/networks/{of.name}",
        region=f"{HERE}/regions/{place}",
        ipCidrRange=f"10.{128 + number // 16 % 64}.{number % 16 * 16}.0/20",
        gatewayAddress=f"10.{128 + number // 16 % 64}.{number % 16 * 16}.1",
        fingerprint=mark(f"{place}/{name}"),
        privateIpGoogleAccess=False,
        purpose="PRIVATE",
        stackType="IPV4_ONLY",
    )


def project(quotas: Mapping[str, float]) -> dict[str, Any]:
    return {
        "kind": "compute#project", "id": NUMBER, "creationTimestamp": BORN, "name": PROJECT, "quotas": listed(quotas),
        "commonInstanceMetadata": {"kind": "compute#metadata", "fingerprint": mark("")}, "selfLink": HERE,
        "defaultServiceAccount": f"{NUMBER}-compute@developer.gserviceaccount.com", "defaultNetworkTier": "PREMIUM",
        "xpnProjectStatus": "UNSPECIFIED_XPN_PROJECT_STATUS",
    }  # fmt: skip


# --- what the project has ------------------------------------------------------------------------------------


def instance(rental: Instance) -> dict[str, Any]:
    """An instance, with what Google adds to what was told of it."""
    told, at = rental.told, f"{HERE}/zones/{rental.place}"
    kept = (
        "canIpForward", "description", "guestAccelerators", "reservationAffinity", "resourcePolicies",
        "deletionProtection", "hostname", "minCpuPlatform", "shieldedInstanceConfig", "advancedMachineFeatures",
    )  # fmt: skip
    times = {"lastStartTimestamp": rental.began, "lastStopTimestamp": rental.stopped}
    plan = {
        "onHostMaintenance": "MIGRATE",
        "automaticRestart": True,
        "preemptible": False,
        **told.get("scheduling", {}),
    }
    return {
        "kind": "compute#instance", "id": str(int(rental.created * 1e6)), "name": rental.id, "zone": at,
        "status": rental.state, "machineType": f"{at}/machineTypes/{rental.kind}", "labels": rental.labels,
        "labelFingerprint": fingerprint(rental), "creationTimestamp": moment(rental.created),
        **{key: moment(at) for key, at in times.items() if at}, "cpuPlatform": "Intel Cascade Lake",
        "selfLink": f"{at}/instances/{rental.id}", "startRestricted": False, "fingerprint": fingerprint(rental),
        "scheduling": plan, "tags": {**told.get("tags", {}), "fingerprint": mark(str(told.get("tags")))},
        "metadata": {**told.get("metadata", {}), "kind": "compute#metadata", "fingerprint": mark(str(rental.metadata))},
        "networkInterfaces": [_interface(rental, *each) for each in enumerate(told["networkInterfaces"])],
        "serviceAccounts": told.get("serviceAccounts", []),
        "disks": [_attached(rental, *each) for each in enumerate(told["disks"])],
        **{key: told[key] for key in kept if key in told},
    }  # fmt: skip


def _interface(rental: Instance, number: int, told: Mapping[str, Any]) -> dict[str, Any]:
    inside = rental.machine.address if rental.machine and not number else f"10.{128 + number}.0.2"
    region, name = rental.place.rpartition("-")[0], told.get("network", "default").rpartition("/")[2]
    access = [
        {
            **each,
            "kind": "compute#accessConfig",
            "networkTier": "PREMIUM",
            **({"natIP": rental.ip} if rental.ip else {}),
        }
        for each in told.get("accessConfigs", ())
    ]
    return {
        "kind": "compute#networkInterface", "name": f"nic{number}", "networkIP": inside, "stackType": "IPV4_ONLY",
        "fingerprint": mark(f"{rental.id}/{number}"), "network": f"{HERE}/global/networks/{name}",
        "subnetwork": f"{HERE}/regions/{region}/subnetworks/{told.get('subnetwork', name).rpartition('/')[2]}",
        **({"accessConfigs": access} if access else {}),
        **({"nicType": told["nicType"]} if "nicType" in told else {}),
    }  # fmt: skip


def _attached(rental: Instance, number: int, told: Mapping[str, Any]) -> dict[str, Any]:
    scratch = told.get("type") == "SCRATCH"
    return {
        "kind": "compute#attachedDisk", "type": told.get("type", "PERSISTENT"), "mode": "READ_WRITE", "index": number,
        "boot": told.get("boot", False), "autoDelete": told.get("autoDelete", False),
        "deviceName": told.get("deviceName", f"persistent-disk-{number}"), "interface": told.get("interface", "SCSI"),
        **({} if scratch else {"source": f"{HERE}/zones/{rental.place}/disks/{rental.disk}"}),
    }  # fmt: skip


def disk(rental: Instance, image: str, type: str, gb: int) -> dict[str, Any]:
    """The boot disk of a new instance."""
    about = rental.told["disks"][0].get("initializeParams", {})
    at, labels = f"zones/{rental.place}", about.get("labels", {})
    owner = next(whose for (whose, _), (name, _, _) in wares.FAMILIES.items() if name == image)
    return made(
        "disk",
        f"{at}/disks/{rental.disk}",
        zone=f"{HERE}/{at}",
        sizeGb=str(gb),
        type=f"{HERE}/{at}/diskTypes/{type}",
        status="READY",
        users=[f"{HERE}/{at}/instances/{rental.id}"],
        sourceImage=f"{ROOT}/projects/{owner}/global/images/{image}",
        labels=labels,
        labelFingerprint=mark(str(labels)),
        physicalBlockSizeBytes="4096",
    )


def operation(told: Operation) -> dict[str, Any]:
    scope, _, place = told.scope.partition("/")
    over = told.status == "DONE"
    return {
        "kind": "compute#operation", "id": id_of(told.name), "name": told.name, "operationType": told.kind,
        "status": told.status, "targetLink": f"{HERE}/{told.target}", "targetId": id_of(told.target),
        "user": "you@example.com", "progress": 100 if over else 0, "insertTime": moment(told.at),
        "startTime": moment(told.at), **({"endTime": moment(told.at)} if over else {}),
        "selfLink": f"{HERE}/{told.scope}/operations/{told.name}",
        **({scope.removesuffix("s"): f"{HERE}/{told.scope}"} if place else {}),
        **(_failure(told) if told.failure is not None else {}),
    }  # fmt: skip


def _failure(told: Operation) -> dict[str, Any]:
    assert told.failure is not None
    status, code, text = told.failure.status, told.failure.code, told.failure.message
    words = {503: "SERVICE UNAVAILABLE", 403: "FORBIDDEN", 400: "BAD REQUEST"}.get(status, "INTERNAL SERVER ERROR")
    return {
        "httpErrorStatusCode": status,
        "httpErrorMessage": words,
        "error": {"errors": [{"code": code, "message": text}]},
    }
