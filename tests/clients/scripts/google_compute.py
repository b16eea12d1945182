"""Google's own client of Compute Engine, led to the lab by `client_options`, with operations that are waited for."""

import os
import sys
from datetime import UTC, datetime, timedelta

from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import compute_v1 as compute
from google.oauth2.credentials import Credentials
from report import Report

project, zone, kind, sold_out, wrong = sys.argv[1:]
address = os.environ["CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE"].removesuffix("/compute/v1/")
where = {"project": project, "zone": zone}


def client(of, credentials=None):
    """Return a client for the lab."""
    return of(credentials=credentials or AnonymousCredentials(), client_options=ClientOptions(api_endpoint=address))


def waiting(made):
    """Let a client wait for its operations at the lab, too.

    The library asks for operations at Google's own address, whatever `client_options` say.
    """
    services = made.transport._extended_operations_services
    services["zone_operations"] = client(compute.ZoneOperationsClient)
    services["global_operations"] = client(compute.GlobalOperationsClient)
    return made


def instance(name, machine, image):
    """Return an instance as the library's own samples describe it."""
    disk = compute.AttachedDisk(boot=True, auto_delete=True)
    disk.initialize_params.source_image = image.self_link
    disk.initialize_params.disk_size_gb = 10
    public = compute.AccessConfig(name="External NAT", type_="ONE_TO_ONE_NAT")
    network = compute.NetworkInterface(network="global/networks/default", access_configs=[public])
    told = {"name": name, "machine_type": f"zones/{zone}/machineTypes/{machine}", "disks": [disk]}
    script = compute.Items(key="startup-script", value="#!/bin/sh\necho hello\n")
    return compute.Instance(**told, network_interfaces=[network], metadata=compute.Metadata(items=[script]))


def made_by(operation):
    """Wait for an operation, and note that this was called."""
    report.call("create", operation.result, timeout=60, as_="ExtendedOperation.result")


with Report() as report:
    zones = report.call("list", client(compute.ZonesClient).list, project=project)
    regions = report.call("list", client(compute.RegionsClient).list, project=project)
    report.show(zones=[each.name for each in zones], regions=[each.name for each in regions])
    sizes = list(report.call("list", client(compute.MachineTypesClient).list, **where))
    report.show(sizes=[[each.name, each.guest_cpus, each.memory_mb] for each in sizes])
    cards = report.call("list", client(compute.AcceleratorTypesClient).aggregated_list, project=project)
    report.show(accelerators=sorted({each.name for _, scope in cards for each in scope.accelerator_types}))
    images = client(compute.ImagesClient)
    listed = report.call("list", images.list, project="ubuntu-os-cloud")
    report.show(images=[[each.name, each.family] for each in listed])
    image = report.call("get", images.get_from_family, project="ubuntu-os-cloud", family="ubuntu-2404-lts-amd64")
    report.show(image=image.name)

    instances = waiting(client(compute.InstancesClient))
    first = instance("first", kind, image)
    made_by(report.call("create", instances.insert, **where, instance_resource=first))
    one = report.call("get", instances.get, **where, instance="first")
    labels = compute.InstancesSetLabelsRequest(label_fingerprint=one.label_fingerprint, labels={"owner": "somebody"})
    report.call(
        "tag", instances.set_labels, **where, instance="first", instances_set_labels_request_resource=labels
    ).result(timeout=60)
    items = [*one.metadata.items, compute.Items(key="note", value="mine")]
    metadata = compute.Metadata(fingerprint=one.metadata.fingerprint, items=items)
    report.call("tag", instances.set_metadata, **where, instance="first", metadata_resource=metadata).result(timeout=60)
    firewalls = waiting(client(compute.FirewallsClient))
    ssh = compute.Allowed(I_p_protocol="tcp", ports=["22"])
    rule = compute.Firewall(
        name="mine", allowed=[ssh], source_ranges=["192.0.2.0/24"], network="global/networks/default"
    )
    made_by(report.call("create", firewalls.insert, project=project, firewall_resource=rule))

    nodes = [
        each for _, scope in report.call("list", instances.aggregated_list, project=project) for each in scope.instances
    ]
    report.show(
        nodes=[
            {
                "name": each.name, "id": str(each.id), "status": each.status, "labels": dict(each.labels),
                "zone": each.zone.rpartition("/")[2], "type": each.machine_type.rpartition("/")[2],
                "private": each.network_interfaces[0].network_i_p,
                "public": each.network_interfaces[0].access_configs[0].nat_i_p,
                "metadata": {item.key: item.value for item in each.metadata.items},
            }
            for each in nodes
        ],
        disks=[[each.name, each.size_gb] for each in report.call("list", client(compute.DisksClient).list, **where)],
        firewalls=[each.name for each in report.call("list", firewalls.list, project=project)],
    )  # fmt: skip
    for _ in range(600):
        log = report.call("log", instances.get_serial_port_output, **where, instance="first").contents
        if "hello" in log:
            break
    report.show(log=log)

    gpus = instance("none", sold_out, image)
    gpus.scheduling = compute.Scheduling(on_host_maintenance="TERMINATE")  # machines with accelerators cannot migrate
    scarce = instances.insert(**where, instance_resource=gpus)
    report.refused("no stock", scarce.result, timeout=60, as_="ExtendedOperation.result")
    report.refused("bad id", instances.get, **where, instance="nobody")
    report.refused("bad id", instances.delete, **where, instance="nobody")
    later = datetime.now(UTC).replace(tzinfo=None) + timedelta(hours=1)
    key = Credentials(token=wrong, refresh_handler=lambda request, scopes: (wrong, later))
    thief = client(compute.InstancesClient, key)
    report.refused("bad key", thief.list, **where)

    report.call("end", instances.delete, **where, instance="first").result(timeout=60)
    report.call("end", firewalls.delete, project=project, firewall="mine").result(timeout=60)
    report.show(left=[each.name for each in instances.list(**where)])
