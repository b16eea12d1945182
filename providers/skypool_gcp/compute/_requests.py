"""Builds the resources that the driver asks Compute Engine to create, such as machines. This module sends no requests.

- `machine`, `template`, `group`: single machines, and groups of machines that form one TPU slice.
- `scripts`: the programs that a machine runs at boot.
- `firewall_rules`, `placement`, `workload_policy`: resources that several machines share.
"""

from __future__ import annotations

import ipaddress
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from skypool.drivers import tags, userdata
from skypool.errors import UsageError
from skypool.model import Offer, Order
from skypool_gcp import _api
from skypool_gcp._sdk import compute_v1
from skypool_gcp._settings import Settings
from skypool_gcp.catalog import fabric, machine_of
from skypool_gcp.catalog.facts import FACTS

_HEAD_START = 120.0
"""Seconds by which a machine's own shutdown comes after the time at which Google deletes the machine.

Google's deletion comes first, because only the deletion also ends the cost of the disk.
"""

_SHORTEST_RUN = 30.0
"""The shortest `maxRunDuration` in seconds: https://cloud.google.com/compute/docs/instances/limit-vm-runtime."""

_LONGEST_RUN = 120 * 86400.0
"""The longest `maxRunDuration` in seconds: https://cloud.google.com/compute/docs/instances/limit-vm-runtime."""

_LET_SSH_IN = "let-ssh-in"
"""The end of the name of the firewall rule that allows ssh."""
_ALLOW = 500
"""The priority of firewall rules that allow traffic. A lower number has precedence."""

_DENY = 501
"""The priority of the firewall rule that denies all other traffic."""


class Scripts(NamedTuple):
    """The two programs that a machine runs at boot.

    Both programs give the ssh server the host key that the client expects. Both also start the process that ends the
    machine when its lease is over.

    Attributes:
        cloud_config: The configuration for the program cloud-init, which runs first. It also lets the pool's ssh key
            log in.
        boot_script: The shell script for Google's own agent program, which runs last. On images without cloud-init,
            only this script runs.
    """

    cloud_config: str
    boot_script: str


# --- machines ------------------------------------------------------------------------------------------------


def machine(
    settings: Settings,
    offer: Offer,
    order: Order,
    *,
    name: str,
    image: compute_v1.Image,
    labels: Mapping[str, str],
    scripts: Scripts,
    policies: Sequence[str],
) -> compute_v1.Instance:
    """Build the description from which the API creates one machine of an order.

    The machine gets a public address, and a boot disk that is deleted together with the machine.

    Args:
        name: The name of the machine and of its disk.
        image: Google's record of the image that the machine starts from.
        labels: The labels of the machine and of its disk.
        scripts: The programs that the machine runs at boot.
        policies: The paths of the machine's placement policies. Empty for none.
    """
    zone = offer.zone
    return compute_v1.Instance(
        name=name,
        machine_type=f"zones/{zone}/machineTypes/{_machine_type(offer)}",
        description=f"of skypool's pool {order.pool}",
        labels=labels,
        tags=compute_v1.Tags(items=[_api.tag(order)]),
        metadata=_metadata(order, scripts),
        disks=[
            _boot_disk(
                name=name,
                image=image,
                gb=_disk_gb(offer, image),
                disk_type=f"zones/{zone}/diskTypes/{_disk_type(offer)}",
                labels=labels,
            ),
            *_local_ssds(offer),
        ],
        network_interfaces=[
            _network_interface(
                settings,
                offer,
                subnetwork=f"regions/{offer.region}/subnetworks/{settings.subnetwork}",
            ),
            *_fabric(settings, offer, order),
        ],
        scheduling=_scheduling(offer, order),
        guest_accelerators=[
            compute_v1.AcceleratorConfig(
                accelerator_type=f"zones/{zone}/acceleratorTypes/{model}",
                accelerator_count=count,
            )
            for model, count in machine_of(offer).attached
        ],
        service_accounts=_service_accounts(settings),
        resource_policies=policies,
        reservation_affinity=_reservation_affinity(settings),
    )


def template(
    settings: Settings,
    offer: Offer,
    order: Order,
    *,
    name: str,
    image: compute_v1.Image,
    labels: Mapping[str, str],
    scripts: Scripts,
) -> compute_v1.InstanceTemplate:
    """Build the instance template from which Google creates the machines of a TPU slice.

    Args:
        name: The name of the template.
        image: Google's record of the image that the machines start from.
        labels: The labels of the machines and their disks.
        scripts: The programs that each machine runs at boot.

    Raises:
        CredentialsError: The project that pays is not known.
    """
    region = f"projects/{settings.billed()}/regions/{offer.region}"
    properties = compute_v1.InstanceProperties(
        machine_type=_machine_type(offer),
        labels=labels,
        tags=compute_v1.Tags(items=[_api.tag(order)]),
        metadata=_metadata(order, scripts),
        disks=[
            _boot_disk(
                name=None,
                image=image,
                gb=_disk_gb(offer, image),
                disk_type=_disk_type(offer),
                labels=labels,
            )
        ],
        network_interfaces=[
            _network_interface(settings, offer, subnetwork=f"{region}/subnetworks/{settings.subnetwork}")
        ],
        scheduling=_scheduling(offer, order),
        service_accounts=_service_accounts(settings),
        reservation_affinity=_reservation_affinity(settings),
    )
    return compute_v1.InstanceTemplate(name=name, description=_tags_of_session(order), properties=properties)


def group(
    settings: Settings,
    offer: Offer,
    *,
    name: str,
    hosts: int,
    description: str,
) -> compute_v1.InstanceGroupManager:
    """Build the managed instance group of a TPU slice.

    Google creates the machines of the group all at once or not at all, and does not replace a machine that fails.

    Args:
        name: The name of the group. The instance template and the workload policy of the slice must have this name.
        hosts: The number of machines in the group.
        description: The group's description text, which holds the tags as JSON.

    Raises:
        CredentialsError: The project that pays is not known.
    """
    project = settings.billed()
    return compute_v1.InstanceGroupManager(
        name=name,
        description=description,
        base_instance_name=f"{name}-w-###[1]",
        instance_template=f"projects/{project}/global/instanceTemplates/{name}",
        target_size=hosts,
        target_size_policy=compute_v1.InstanceGroupManagerTargetSizePolicy(mode="BULK"),
        instance_lifecycle_policy=compute_v1.InstanceGroupManagerInstanceLifecyclePolicy(
            default_action_on_failure="DO_NOTHING",
        ),
        resource_policies=compute_v1.InstanceGroupManagerResourcePolicies(
            workload_policy=f"projects/{project}/regions/{offer.region}/resourcePolicies/{name}",
        ),
    )


def request_id(zone: str, name: str) -> str:
    """Return the UUID, as text, of the request that creates a machine or a group.

    The same zone and name always give the same id, so that Google recognizes a repeated request.
    """
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{zone}/{name}"))


def check_processor(image: compute_v1.Image, offer: Offer) -> None:
    """Check that an image is for the processor architecture of an offer.

    An image that does not name an architecture counts as x86_64.

    Raises:
        UsageError: The architectures differ.
    """
    arch = (image.architecture or "X86_64").lower()
    if arch != offer.arch:
        raise UsageError(
            f"the image {image.name} is for {arch}, but {offer.instance_type} is {offer.arch}: rent with "
            f"arch={arch!r}, or choose another image"
        )


def scripts(settings: Settings, order: Order, zone: str, path: str) -> Scripts:
    """Return the programs that a machine runs at boot.

    The programs end the machine when its lease or its lifetime is over. If the settings name a service account, the
    machine then deletes the resource at `path`. Otherwise the machine switches itself off. At the end of a lifetime of
    30 s to 120 days, Google deletes the machine. The programs then end the machine 120 s later, if it still exists.

    Args:
        path: The resource in the zone that the machine deletes, such as "instances/NAME".
    """
    end = userdata.OFF
    if settings.service_account:
        base = _api.endpoint("compute") or "https://compute.googleapis.com"
        end = _api.deletes(f"{base}/compute/v1/projects/{settings.billed()}/zones/{zone}/{path}")
    guarded = order
    if order.lifetime is not None and _run_limit(order) is not None:
        guarded = replace(order, lifetime=order.lifetime + _HEAD_START)
    # Google's agent program may replace the ssh host keys after cloud-init has set them, so two programs are needed:
    # https://github.com/GoogleCloudPlatform/guest-agent#instance-setup
    return Scripts(
        cloud_config=userdata.cloud_config(guarded, user=_api.USER, end=end),
        boot_script=userdata.boot_script(guarded, user=_api.USER, end=end),
    )


def _machine_type(offer: Offer) -> str:
    """Return the machine type of an offer; for a TPU slice, that of the slice's machines."""
    return machine_of(offer).machine_type


def _disk_type(offer: Offer) -> str:
    """Return "hyperdisk-balanced" if the machine type of an offer needs this disk type, else "pd-balanced"."""
    takes_hyperdisk = _machine_type(offer).startswith(tuple(FACTS["hyperdisk"]))
    return "hyperdisk-balanced" if takes_hyperdisk else "pd-balanced"


def _disk_gb(offer: Offer, image: compute_v1.Image) -> int:
    """Return the size of the boot disk in GB: the offer's size, or the image's size if that is larger."""
    return max(machine_of(offer).disk_gb, int(image.disk_size_gb))


def _metadata(order: Order, scripts: Scripts) -> compute_v1.Metadata:
    """Return a machine's metadata: its boot programs, and the pool's ssh key as the only way to log in."""
    values = {
        "user-data": scripts.cloud_config,
        "startup-script": scripts.boot_script,
        "ssh-keys": f"{_api.USER}:{order.keys.public}",
        "enable-oslogin": "FALSE",
        "block-project-ssh-keys": "TRUE",
        "serial-port-enable": "FALSE",
    }
    return compute_v1.Metadata(items=[compute_v1.Items(key=key, value=value) for key, value in values.items()])


def _boot_disk(
    *, name: str | None, image: compute_v1.Image, gb: int, disk_type: str, labels: Mapping[str, str]
) -> compute_v1.AttachedDisk:
    """Return the boot disk of a machine, with which Google deletes it. If `name` is None, Google chooses a name."""
    return compute_v1.AttachedDisk(
        boot=True,
        auto_delete=True,
        type_="PERSISTENT",
        mode="READ_WRITE",
        initialize_params=compute_v1.AttachedDiskInitializeParams(
            disk_name=name,
            source_image=image.self_link,
            disk_size_gb=gb,
            disk_type=disk_type,
            labels=labels,
        ),
    )


def _local_ssds(offer: Offer) -> list[compute_v1.AttachedDisk]:
    """Return the local SSDs that a reservation requires. Outside reservations, Google adds them by itself."""
    reserved = machine_of(offer).reserved
    return [
        compute_v1.AttachedDisk(
            type_="SCRATCH",
            auto_delete=True,
            interface=interface,
            initialize_params=compute_v1.AttachedDiskInitializeParams(
                disk_type=f"zones/{offer.zone}/diskTypes/local-ssd",
                disk_size_gb=gb,
            ),
        )
        for interface, gb in (reserved.local_ssds if reserved else ())
    ]


def _network_interface(settings: Settings, offer: Offer, *, subnetwork: str) -> compute_v1.NetworkInterface:
    """Return a network interface with a public address. `subnetwork` is used only if the settings name one."""
    return compute_v1.NetworkInterface(
        network=settings.path(),
        subnetwork=subnetwork if settings.subnetwork else None,
        nic_type="GVNIC" if offer.accelerator else None,
        access_configs=[compute_v1.AccessConfig(name="External NAT", type_="ONE_TO_ONE_NAT")],
    )


def _fabric(settings: Settings, offer: Offer, order: Order) -> list[compute_v1.NetworkInterface]:
    """Return the further network interfaces, without public addresses, that connect GPUs of several machines."""
    if not (order.need.private_network and settings.networks):
        return []
    region = f"projects/{settings.billed()}/regions/{offer.region}"
    interfaces = []
    for type, place in zip(fabric(_machine_type(offer)), settings.networks, strict=False):
        network, _, subnetwork = place.partition("/")
        interfaces.append(
            compute_v1.NetworkInterface(
                network=f"projects/{settings.billed()}/global/networks/{network}",
                subnetwork=f"{region}/subnetworks/{subnetwork}",
                nic_type=type,
            )
        )
    return interfaces


def _scheduling(offer: Offer, order: Order) -> compute_v1.Scheduling:
    """Return the options that say when Google may stop or delete a machine."""
    spot = offer.market == "spot"
    limit = _run_limit(order)
    reserved = machine_of(offer).reserved
    is_bound = reserved is not None and reserved.is_dense
    # For maintenance of the host, Google moves on-demand machines without accelerators, and ends all others. When
    # Google ends a machine without the action DELETE, the machine is only stopped, and its disk is billed.
    return compute_v1.Scheduling(
        provisioning_model="SPOT" if spot else "RESERVATION_BOUND" if is_bound else "STANDARD",
        preemptible=True if spot else None,
        automatic_restart=False,
        on_host_maintenance="TERMINATE" if spot or offer.accelerator else "MIGRATE",
        instance_termination_action="DELETE" if spot or is_bound or limit is not None else None,
        max_run_duration=compute_v1.Duration(seconds=limit) if limit is not None else None,
    )


def _run_limit(order: Order) -> int | None:
    """Return the seconds after which Google itself deletes a machine; None if the order's lifetime cannot be set."""
    lifetime = order.lifetime
    if lifetime is None or not _SHORTEST_RUN <= lifetime <= _LONGEST_RUN:
        return None
    return math.floor(lifetime)


def _service_accounts(settings: Settings) -> list[compute_v1.ServiceAccount]:
    """Return the service account of the settings as a list of one item, or [] if they name none."""
    if not settings.service_account:
        return []
    return [compute_v1.ServiceAccount(email=settings.service_account, scopes=[_api.SCOPE])]


def _reservation_affinity(settings: Settings) -> compute_v1.ReservationAffinity | None:
    """Return the option that makes a machine run in the reservation of the settings; None if they name none."""
    if not settings.reservation:
        return None
    return compute_v1.ReservationAffinity(
        consume_reservation_type="SPECIFIC_RESERVATION",
        key="compute.googleapis.com/reservation-name",
        values=[settings.reservation],
    )


# --- resources that the machines of one run of a pool share --------------------------------------------------


def firewall_rules(settings: Settings, order: Order, networks: Sequence[str]) -> list[compute_v1.Firewall]:
    """Build the firewall rules for the machines of one run of a pool.

    The first rule allows ssh from `networks`. The second rule denies all other incoming traffic. If the order needs a
    private network, a third rule allows all traffic among the machines. The rules apply to machines with the network
    tag of this run of the pool.

    Args:
        networks: The networks that may reach port 22, in CIDR notation such as "203.0.113.0/24".
    """
    tag = _api.tag(order)
    rules = [
        compute_v1.Firewall(
            name=_rule_name(order, _LET_SSH_IN),
            description=_tags_of_session(order),
            network=settings.path(),
            direction="INGRESS",
            priority=_ALLOW,
            source_ranges=networks,
            target_tags=[tag],
            allowed=[compute_v1.Allowed(I_p_protocol="tcp", ports=["22"])],
        ),
        compute_v1.Firewall(
            name=_rule_name(order, "let-nobody-else-in"),
            description=_tags_of_session(order),
            network=settings.path(),
            direction="INGRESS",
            priority=_DENY,
            source_ranges=["0.0.0.0/0"],
            target_tags=[tag],
            denied=[compute_v1.Denied(I_p_protocol="all")],
        ),
    ]
    if order.need.private_network:
        among = compute_v1.Firewall(
            name=_rule_name(order, "let-each-other-in"),
            description=_tags_of_session(order),
            network=settings.path(),
            direction="INGRESS",
            priority=_ALLOW,
            source_tags=[tag],
            target_tags=[tag],
            allowed=[compute_v1.Allowed(I_p_protocol="all")],
        )
        rules.append(among)
    return rules


def placement(order: Order, region: str) -> compute_v1.ResourcePolicy:
    """Build the placement policy, a resource policy that puts the machines of a private network close together.

    All orders of one run of the pool share the policy in a region: its name is the same for all of them.
    """
    return compute_v1.ResourcePolicy(
        name=_api.name(order.pool, tags.session(order), region),
        description=_tags_of_session(order),
        group_placement_policy=compute_v1.ResourcePolicyGroupPlacementPolicy(collocation="COLLOCATED"),
    )


def workload_policy(order: Order, *, name: str, topology: str) -> compute_v1.ResourcePolicy:
    """Build the resource policy that connects the TPU chips of a slice.

    Args:
        topology: The numbers of chips along each axis of the slice, such as "2x2x2".
    """
    return compute_v1.ResourcePolicy(
        name=name,
        description=_tags_of_session(order),
        workload_policy=compute_v1.ResourcePolicyWorkloadPolicy(
            type_="HIGH_THROUGHPUT",
            accelerator_topology=topology,
        ),
    )


def admitting(rule: compute_v1.Firewall, network: str) -> compute_v1.Firewall | None:
    """Build a firewall rule that allows ssh from a further network to the machines of a rule of `firewall_rules`.

    Returns None if the given rule is another one, or allows that network itself.

    Args:
        network: An IPv4 address as a network, such as "203.0.113.7/32".
    """
    if not rule.name.endswith(_LET_SSH_IN) or network in rule.source_ranges:
        return None
    address = int(ipaddress.IPv4Network(network).network_address)
    return compute_v1.Firewall(
        name=f"{rule.name.removesuffix(_LET_SSH_IN)}in{address:08x}",  # as long as the name of the other rule
        description=rule.description,
        network=rule.network,
        direction="INGRESS",
        priority=_ALLOW,
        source_ranges=[network],
        target_tags=[*rule.target_tags],
        allowed=[compute_v1.Allowed(I_p_protocol="tcp", ports=["22"])],
    )


def _rule_name(order: Order, rule: str) -> str:
    """Return the name of a firewall rule of one run of a pool. `rule` is the last part of the name."""
    return _api.name(order.pool, tags.session(order), rule)


def _tags_of_session(order: Order) -> str:
    """Return the tags that all orders of one run of a pool share, as JSON for a resource's description text."""
    common = {key: text for key, text in tags.tags(order).items() if key not in (tags.NODES, tags.TOKEN)}
    return _api.description(common)
