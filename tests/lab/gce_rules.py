"""What Compute Engine refuses of machines and firewall rules beyond its schema: values that do not fit each other.

Each rule names its source. Pages of Google and threads on GitHub were read 2026-11-24 in stored copies. Where no source
has Google's own words, the words are made up, and the comment says so.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.lab import gce_wares as wares
from tests.lab.gce_things import refused
from tests.lab.gce_wire import invalid

LONGEST_VALUE, MOST_METADATA = 262144, 512 * 1024
"""Bytes of one value, and of all keys and values: schemas.Metadata of the discovery document compute:v1."""
PROTOCOLS = ("ah", "all", "esp", "icmp", "ipip", "sctp", "tcp", "udp")
PLACED = ("a2", "a3", "a4", "a4x", "g2", "g4", "c2", "c2d", "c3", "c3d", "c4", "c4d", "h3", "h4d", "n2", "n2d")
"""Families that a compact placement policy may hold.
https://docs.cloud.google.com/ai-hypercomputer/docs/placement-policy-and-workload-policy for those with GPUs; the others
are of https://docs.cloud.google.com/compute/docs/instances/placement-policies-overview, from memory."""
HYPERDISK = ("g4-", "a3-ultragpu-", "a4-", "a4x-", "tpu7x-")


@dataclass
class Network:
    """A network of the project.

    Attributes:
        auto: whether it has a subnetwork of its own name in every region.
        zone: the zone to which its RoCE network profile binds it; "" for a network without a profile.
        subnetworks: (region, name) of further ones.
    """

    name: str
    auto: bool = True
    zone: str = ""
    subnetworks: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])

    def has(self, region: str, name: str) -> bool:
        return (region, name) in self.subnetworks or (self.auto and name == self.name)


# --- network interfaces --------------------------------------------------------------------------------------


def check_interfaces(told: Sequence[Mapping[str, Any]], zone: str, kind: wares.Kind, known: Iterable[Network]) -> None:
    """Refuse network interfaces that do not fit the machine type, the zone, the networks, or each other."""
    most = wares.nics(kind)
    if len(told) > most.all:
        # GoogleCloudPlatform/pubsec-declarative-toolkit/issues/625 has the first sentence
        why = "The maximum number of network interfaces allowed for this machine type is"
        raise invalid("networkInterfaces", "", f"Too many network interfaces. {why} {most.all}.")
    networks = {each.name: each for each in known}
    taken: set[str] = set()
    for number, nic in enumerate(told):
        where = f"networkInterfaces[{number}]"
        network, subnetwork = _places(where, nic, zone.rpartition("-")[0], networks)
        _check_type(where, nic.get("nicType", ""), zone, kind, network)
        # each interface has another network; those of an RDMA network have another subnetwork:
        # https://docs.cloud.google.com/vpc/docs/create-use-multiple-interfaces
        place = f"{network.name}/{subnetwork}" if network.zone else network.name
        if place in taken:  # hashicorp/terraform-provider-google/issues/8269
            raise refused(400, "badRequest", "Networks must be distinct for NICs attached to a VM.")
        taken.add(place)
        if len(nic.get("accessConfigs", ())) > 1:  # googleapis/google-cloud-java/issues/916
            raise invalid(where, "", "Multiple access configs are not supported.")
    rdma = sum(each.get("nicType") == "MRDMA" for each in told)
    if rdma > most.rdma or len(told) - rdma > most.ethernet:  # the numbers: see wares.nics; the words are made up
        why = f"{kind.name} takes {most.ethernet} interfaces of GVNIC and {most.rdma} of MRDMA at most."
        raise invalid("networkInterfaces", "", why)


def _places(where: str, nic: Mapping[str, Any], region: str, known: Mapping[str, Network]) -> tuple[Network, str]:
    """The network and the subnetwork of an interface; each may be told by the other."""
    path = nic.get("subnetwork", "")
    if path and (found := _region(path)) and found != region:
        raise invalid(f"{where}.subnetwork", path, "The referenced subnetwork resource cannot be found.")
    name = path.rpartition("/")[2]
    if "network" in nic or not path:
        wanted = nic.get("network", "global/networks/default")
        network = known.get(wanted.rpartition("/")[2])
        if network is None:  # google/anthos-microk8s/issues/1
            raise invalid(f"{where}.network", wanted, "The referenced network resource cannot be found.")
    else:
        network = next((each for each in known.values() if each.has(region, name)), None)
    if path and (network is None or not any(each.has(region, name) for each in known.values())):
        # hashicorp/terraform-provider-google/issues/2140
        raise invalid(f"{where}.subnetwork", path, "The referenced subnetwork resource cannot be found.")
    assert network is not None
    if path and not network.has(region, name):  # hashicorp/terraform-provider-google/issues/7895
        text = f'Subnetwork "{path}" is not valid for Network "{network.name}".'
        raise refused(400, "badRequest", text)
    if not path and not network.auto:  # hashicorp/terraform-provider-google/issues/175
        raise invalid(where, "", "Subnetwork should be specified for custom subnetmode network")
    return network, name or network.name


def _region(path: str) -> str:
    """The region in the path of a subnetwork, "" if it names none."""
    return path.partition("regions/")[2].partition("/")[0]


def _check_type(where: str, type: str, zone: str, kind: wares.Kind, network: Network) -> None:
    """Refuse an interface whose type fits neither the machine type nor the network. The words are made up.

    Only MRDMA goes into an RoCE network, and only there, and only in the zone of its profile:
    https://docs.cloud.google.com/vpc/docs/rdma-network-profiles. A machine type with MRDMA is asked for with the type
    of each interface: https://docs.cloud.google.com/ai-hypercomputer/docs/create/create-vm.
    """
    if wares.nics(kind).rdma and type not in ("GVNIC", "MRDMA"):
        raise invalid(f"{where}.nicType", type, f"{kind.name} requires GVNIC or MRDMA.")
    if not wares.nics(kind).rdma and type in ("MRDMA", "IRDMA"):
        raise invalid(f"{where}.nicType", type, f"{kind.name} does not support this type.")
    if kind.cards and type == "VIRTIO_NET" and not kind.name.startswith("n1-"):
        raise invalid(f"{where}.nicType", type, f"{kind.name} requires GVNIC.")
    if bool(network.zone) != (type == "MRDMA"):
        only = "only MRDMA" if network.zone else "no MRDMA"
        raise invalid(f"{where}.nicType", type, f"The network {network.name} supports {only} interfaces.")
    if network.zone not in ("", zone):
        raise invalid(f"{where}.network", network.name, f"The network profile is of the zone {network.zone}.")


# --- scheduling, metadata, disks, placement ------------------------------------------------------------------


def check_scheduling(plan: Mapping[str, Any], kind: wares.Kind) -> None:
    """Refuse options of scheduling that do not fit each other or the machine type."""
    spot = plan.get("provisioningModel") == "SPOT" or plan.get("preemptible", False)
    maintenance = plan.get("onHostMaintenance", "TERMINATE" if spot else "MIGRATE")
    if spot and maintenance != "TERMINATE":  # travis-ci/worker/pull/487
        why = "Scheduling must have preemptible be false when OnHostMaintenance isn't TERMINATE."
        raise invalid("scheduling.preemptible", "true", why)
    if spot and plan.get("automaticRestart"):  # gc3-uzh-ch/elasticluster/issues/568
        why = "Scheduling must have preemptible be false when AutomaticRestart is true."
        raise invalid("scheduling.preemptible", "true", why)
    if kind.name.startswith("e2-") and maintenance == "TERMINATE" and not spot:
        # chainguard-dev/terraform-infra-common/pull/935
        text = "e2 instances do not support onHostMaintenance=TERMINATE unless they are preemptible."
        raise refused(400, "badRequest", text)
    if (kind.cards or kind.slice) and maintenance != "TERMINATE":
        # GoogleCloudPlatform/python-docs-samples/pull/10272
        raise refused(400, "invalid", "Instances with guest accelerators do not support live migration.")
    limited = plan.get("maxRunDuration")
    ends = spot or plan.get("provisioningModel") == "RESERVATION_BOUND"
    if plan.get("instanceTerminationAction") and not (limited or ends):
        raise refused(400, "invalid", "You cannot specify a termination action for a standard VM with no limit.")
    if limited and not (plan.get("instanceTerminationAction") and 30 <= int(limited["seconds"]) <= 10368000):
        raise refused(400, "invalid", "Max run duration must be between 30 seconds and 120 days, with an action.")


def check_metadata(items: Sequence[Mapping[str, str]]) -> None:
    """Refuse metadata that is too large."""
    for number, each in enumerate(items):
        if (size := len(each["value"].encode())) > LONGEST_VALUE:  # kubernetes/kubernetes/issues/37180
            text = f"maximum size {LONGEST_VALUE} character(s); actual size {size}."
            raise refused(
                400, "invalid", f"Value for field 'resource.metadata.items[{number}].value' is too large: {text}"
            )
    size = sum(len(text.encode()) for each in items for text in (each["key"], each["value"]))
    if size > MOST_METADATA:  # the words are made up
        raise invalid("metadata", "", f"The metadata has {size} bytes; the maximum is {MOST_METADATA}.")
    if len({each["key"] for each in items}) != len(items):  # the words are made up
        raise invalid("metadata", "", "A metadata key occurs twice.")


def boot_disk(told: Sequence[Mapping[str, Any]], kind: wares.Kind) -> tuple[str, str, int]:
    """The image, the disk type and the size in GB of a machine's boot disk; refuses disks that cannot be.

    Without a type it is pd-standard, or Hyperdisk where the machine type takes nothing else. Without a size it has that
    of its image. Schema of AttachedDiskInitializeParams.
    """
    if not told or not told[0].get("boot"):  # the words are made up
        raise invalid("disks", "", "The instance has no boot disk.")
    disk, *more = told
    if any(each.get("type") != "SCRATCH" for each in more):
        raise refused(400, "invalid", "this lab has no other disks than boot disks and local SSDs")
    about = disk.get("initializeParams", {})
    name, gb = _image(about.get("sourceImage", ""))
    newer = kind.name.startswith(HYPERDISK)
    type = about.get("diskType", "hyperdisk-balanced" if newer else "pd-standard").rpartition("/")[2]
    if type not in wares.DISKS:
        path = about.get("diskType", "")
        raise invalid("disks[0].initializeParams.diskType", path, "The referenced diskType resource cannot be found.")
    if newer != type.startswith("hyperdisk"):
        raise refused(400, "badRequest", f"[{type}] features are not compatible for creating instance.")
    size = int(about.get("diskSizeGb", gb))
    if size < gb:
        text = f"Requested disk size {size} GB cannot be smaller than the image size ({gb} GB)"
        raise invalid("disks[0].initializeParams.diskSizeGb", size, text)
    return name, type, size


def _image(path: str) -> tuple[str, int]:
    """The name and the size of the image that a path names, of an image or of a family."""
    project, found, name = path.partition("projects/")[2].partition("/global/images/")
    where = "disks[0].initializeParams.sourceImage"
    if not found:  # GoogleCloudPlatform/cloud-foundation-toolkit/issues/95
        raise invalid(where, path, "The URL is malformed.")
    for (whose, family), (image, _, gb) in wares.FAMILIES.items():
        if whose == project and name in (image, f"family/{family}"):
            return image, gb
    # docker-archive/infrakit.gcp/issues/1
    raise invalid(where, path, "The referenced image resource cannot be found.")


def check_placement(kind: wares.Kind, policies: Iterable[Mapping[str, Any]]) -> None:
    """Refuse a compact placement policy for a machine type that does not know it."""
    for policy in policies:
        compact = policy.get("groupPlacementPolicy", {}).get("collocation") == "COLLOCATED"
        if compact and kind.name.partition("-")[0] not in PLACED:  # dstackai/dstack/issues/2591
            raise refused(400, "badRequest", f"Placement policy is not applicable to machine type {kind.name}")


# --- firewall rules ------------------------------------------------------------------------------------------


def check_firewall(told: Mapping[str, Any]) -> None:
    """Refuse a firewall rule that allows and denies, or whose sources are no networks or of both IPv4 and IPv6."""
    if ("allowed" in told) == ("denied" in told):
        raise refused(400, "invalid", "Exactly one of allowed and denied must be specified.")
    if told.get("direction", "INGRESS") != "INGRESS":
        raise refused(400, "invalid", "this lab has no other firewall rules than those for ingress")
    versions = set()
    for number, text in enumerate(told.get("sourceRanges", ())):
        try:
            versions.add(ipaddress.ip_network(text).version)
        except ValueError:  # cloudflare/terraform-provider-cloudflare/pull/86
            raise invalid(f"sourceRanges[{number}]", text, "Must be a valid CIDR address range.") from None
    if len(versions) > 1:  # kubernetes/kops/pull/12170; the words are made up
        raise invalid("sourceRanges", "", "IPv4 and IPv6 ranges cannot be in the same rule.")
    for key in ("allowed", "denied"):
        for number, each in enumerate(told.get(key, ())):
            protocol = each.get("IPProtocol", "")
            if protocol not in PROTOCOLS and not (protocol.isdigit() and int(protocol) < 256):
                # terraform-google-modules/terraform-google-network/issues/535
                known = ", ".join(f'"{one}"' for one in PROTOCOLS)
                why = f"Must be one of [{known}] or an IP protocol number between 0 and 255."
                raise invalid(f"{key}[{number}].IPProtocol", protocol, why)
