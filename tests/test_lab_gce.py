"""The lab's Compute Engine: what it refuses, in Google's format, and what Google's own client reads from it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import requests
from google.api_core import exceptions
from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials

from skypool.accelerators import parse
from skypool.model import Need, Order
from skypool_gcp import GCP
from skypool_gcp._sdk import compute_v1 as compute  # it is imported at its first use, which takes seconds
from skypool_gcp.catalog import boot_images
from tests.lab.gce import GCE, PROJECT
from tests.lab.gce_rules import LONGEST_VALUE

Change = Callable[[dict[str, Any]], object]
ZONE = "us-central1-a"


def launched(gce: GCE, need: Need, **settings: Any) -> dict[str, Any]:
    """The request with which the driver asks for the cheapest machine."""
    driver = GCP(ssh_from="203.0.113.7", zones=ZONE, **settings)
    offer = min(driver.offers(need), key=lambda each: each.usd_per_hour)
    driver.launch(offer, Order(f"pool-{len(gce.journal)}", "0123456789abcdef-1", (0,), need, lifetime=3600.0))
    body: dict[str, Any] = gce.calls("POST instances")[-1].body
    return body


def posted(gce: GCE, body: Any, path: str = f"zones/{ZONE}/instances", **query: str) -> requests.Response:
    return requests.post(f"{gce.url}/compute/v1/projects/{PROJECT}/{path}", json=body, params=query, timeout=10)


def said(answer: requests.Response) -> tuple[int, str, str]:
    """The status, the reason and the message of a refusal, which is in Google's format."""
    error = answer.json()["error"]
    ((first),) = error["errors"]
    assert error["code"] == answer.status_code
    assert first == {"message": error["message"], "domain": "global", "reason": first["reason"]}
    return answer.status_code, first["reason"], first["message"]


# --- twenty wrong requests -----------------------------------------------------------------------------------


def nic(**change: Any) -> Change:
    return lambda told: told["networkInterfaces"][0].update(change)


def plan(**change: Any) -> Change:
    return lambda told: told["scheduling"].update(change)


def disk(**change: Any) -> Change:
    return lambda told: told["disks"][0]["initializeParams"].update(change)


def item(key: str, value: str) -> Change:
    return lambda told: told["metadata"]["items"].append({"key": key, "value": value})


def changed(**change: Any) -> Change:
    return lambda told: told.update(change)


def twice(told: dict[str, Any]) -> None:
    told["networkInterfaces"].append(told["networkInterfaces"][0])


def metadata(told: dict[str, Any]) -> None:
    for number in range(3):
        item(f"large-{number}", "x" * 200_000)(told)


IMAGE = "projects/ubuntu-os-cloud/global/images/ubuntu-0000"
WRONG: list[tuple[str, Change, str, str]] = [
    ("field missing: name", lambda told: told.pop("name"), "required", "Required field 'resource.name'"),
    (
        "field missing: value",
        lambda told: told["metadata"]["items"][0].pop("value"),
        "required",
        "metadata.items[0].value",
    ),
    ("field unknown", changed(machine_type="e2-small"), "badRequest", 'Unknown name "machine_type"'),
    ("field unknown, inside", nic(nic_type="GVNIC"), "badRequest", "at 'resource.networkInterfaces[0]'"),
    ("enum wrong: nicType", nic(nicType="gvnic"), "invalid", "networkInterfaces[0].nicType': 'gvnic'"),
    ("enum wrong: provisioningModel", plan(provisioningModel="PREEMPTIBLE"), "invalid", "scheduling.provisioningModel"),
    ("enum wrong: access", nic(accessConfigs=[{"type": "NAT"}]), "invalid", "ONE_TO_ONE_NAT"),
    ("type wrong: a size with a unit", disk(diskSizeGb="120GB"), "invalid", "diskSizeGb': '120GB'"),
    ("type wrong: boolean as a string", plan(automaticRestart="false"), "invalid", "It is boolean"),
    ("too long: name", changed(name="a" * 64), "invalid", "Must be a match of regex"),
    ("too long: label", lambda told: told["labels"].update(team="a" * 64), "invalid", "resource.labels"),
    (
        "too long: metadata value",
        item("large", "x" * (LONGEST_VALUE + 1)),
        "invalid",
        "maximum size 262144 character(s)",
    ),
    ("too long: metadata", metadata, "invalid", "the maximum is 524288"),
    (
        "wrong id: machine type",
        changed(machineType=f"zones/{ZONE}/machineTypes/n1-none"),
        "invalid",
        "does not exist in zone",
    ),
    ("wrong id: image", disk(sourceImage=IMAGE), "invalid", "The referenced image resource cannot be found."),
    (
        "wrong id: image family without a project",
        disk(sourceImage="family/debian-9"),
        "invalid",
        "The URL is malformed.",
    ),
    (
        "wrong id: network",
        nic(network="global/networks/none"),
        "invalid",
        "The referenced network resource cannot be found.",
    ),
    (
        "wrong id: subnetwork of another region",
        nic(subnetwork="regions/us-east1/subnetworks/default"),
        "invalid",
        "The referenced subnetwork resource cannot be found.",
    ),
    (
        "wrong id: policy",
        changed(resourcePolicies=["regions/us-central1/resourcePolicies/none"]),
        "notFound",
        "was not found",
    ),
    (
        "combination: spot with MIGRATE",
        plan(provisioningModel="SPOT", onHostMaintenance="MIGRATE"),
        "invalid",
        "OnHostMaintenance isn't TERMINATE",
    ),
    ("combination: GPU with MIGRATE", plan(onHostMaintenance="MIGRATE"), "invalid", "do not support live migration"),
    ("combination: two interfaces in a network", twice, "badRequest", "Networks must be distinct"),
    (
        "combination: too many interfaces",
        lambda told: told["networkInterfaces"].extend([{}] * 9),
        "invalid",
        "Too many network interfaces.",
    ),
    (
        "combination: hyperdisk for G2",
        disk(diskType=f"zones/{ZONE}/diskTypes/hyperdisk-balanced"),
        "badRequest",
        "not compatible",
    ),
    (
        "combination: bound without a reservation",
        plan(provisioningModel="RESERVATION_BOUND"),
        "invalid",
        "specific reservation",
    ),
]


@pytest.mark.needs("openssh")
def test_wrong_requests_made_of_a_real_one_are_refused_in_googles_format(gce_api: GCE) -> None:
    """Each differs from a request of the driver in one point."""
    right = launched(gce_api, Need(accelerators=(parse("L4"),)))
    assert len(WRONG) >= 20
    for title, change, reason, text in WRONG:
        body = {**copy.deepcopy(right), "name": "again"}
        change(body)
        status, why, message = said(posted(gce_api, body))
        assert (status, why) == (404 if reason == "notFound" else 400, reason), (title, message)
        assert text in message, (title, message)
    assert posted(gce_api, {**right, "name": "again"}).status_code == 200, "nothing else was wrong with them"
    assert len(gce_api.rentals) == 2


@pytest.mark.needs("openssh")
def test_a_machine_without_gpus_is_neither_placed_nor_ended_for_maintenance_against_its_kind(gce_api: GCE) -> None:
    right = launched(gce_api, Need())
    assert right["machineType"].endswith("/e2-highcpu-2")
    gce_api.placements["near"] = {
        "name": "near",
        "region": "x/regions/us-central1",
        "groupPlacementPolicy": {"collocation": "COLLOCATED"},
    }
    policy = f"projects/{PROJECT}/regions/us-central1/resourcePolicies/near"
    body = {**right, "name": "again", "resourcePolicies": [policy]}
    assert said(posted(gce_api, body))[2] == "Placement policy is not applicable to machine type e2-highcpu-2"
    body = {**right, "name": "again", "scheduling": {"onHostMaintenance": "TERMINATE"}}
    assert "unless they are preemptible" in said(posted(gce_api, body))[2]


def test_firewall_rules_mix_no_addresses_and_name_protocols(gce_api: GCE) -> None:
    rule: dict[str, Any] = {"name": "a", "allowed": [{"IPProtocol": "tcp", "ports": ["22"]}], "sourceRanges": ["::/0"]}
    create = partial(posted, gce_api, path="global/firewalls")
    assert create(rule).status_code == 200
    assert "same rule" in said(create({**rule, "name": "b", "sourceRanges": ["::/0", "10.0.0.0/8"]}))[2]
    assert "valid CIDR" in said(create({**rule, "name": "b", "sourceRanges": ["all"]}))[2]
    assert "between 0 and 255" in said(create({**rule, "name": "b", "allowed": [{"IPProtocol": "ipv6-icmp"}]}))[2]
    assert said(create({**rule, "name": "b", "network": "global/networks/none"}))[:2] == (404, "notFound")


def test_what_has_a_default_need_not_be_said(gce_api: GCE) -> None:
    """Neither the type nor the size of the disk, and the image may be a path of a family."""
    path = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
    for start in ("", "https://www.googleapis.com/compute/v1/"):
        body = {
            "name": f"small{len(start)}",
            "machineType": f"{start}zones/{ZONE}/machineTypes/e2-standard-2",
            "disks": [{"boot": True, "initializeParams": {"sourceImage": start + path}}],
        }
        assert posted(gce_api, body).status_code == 200
    gce_api.wait(lambda: {each.state for each in gce_api.rentals.values()} == {"RUNNING"})
    small = gce_api.disks["small0"]
    assert (small["type"].rpartition("/")[2], small["sizeGb"]) == ("pd-standard", "10")
    for name in [*gce_api.rentals]:
        requests.delete(f"{gce_api.url}/compute/v1/projects/{PROJECT}/zones/{ZONE}/instances/{name}", timeout=10)
    gce_api.wait(lambda: not gce_api.rentals)
    assert gce_api.left() == {"disks": 2}, "a disk without autoDelete stays"


def test_what_is_no_method_or_is_not_built_here_is_refused_in_googles_format(gce_api: GCE) -> None:
    def get(path: str) -> requests.Response:
        return requests.get(f"{gce_api.url}/compute/v1/{path}", timeout=10)

    assert said(get(f"projects/{PROJECT}/nowhere")) == (404, "notFound", "Method not found.")
    assert said(get(f"projects/{PROJECT}/zones/us-central1")) == (
        400, "invalid", "Invalid value for field 'zone': 'us-central1'. Unknown zone.",
    )  # fmt: skip
    assert said(get("projects/other/zones"))[0] == 404
    assert said(get(f"projects/{PROJECT}/global/networkProfiles"))[:2] == (501, "notImplemented")
    assert said(get(f"projects/{PROJECT}/zones?maxResult=1"))[1] == "badRequest"


# --- interfaces of machines with RDMA ------------------------------------------------------------------------


@pytest.fixture
def ultra(gce_api: GCE) -> dict[str, Any]:
    """A request for an A3 Ultra with all its interfaces."""
    gce_api.network("second", "us-central1", "second-sub")
    gce_api.network("rdma", "us-central1", *(f"rdma-{n}" for n in range(8)), zone="us-central1-b")
    gce_api.network("far", "us-east1", *(f"far-{n}" for n in range(8)), zone="us-east1-b")
    ethernet = [{"nicType": "GVNIC"}, {"nicType": "GVNIC", "subnetwork": "regions/us-central1/subnetworks/second-sub"}]
    rdma = [{"nicType": "MRDMA", "subnetwork": f"regions/us-central1/subnetworks/rdma-{n}"} for n in range(8)]
    image = boot_images.IMAGES["cuda"]
    return {
        "name": "ultra",
        "machineType": "zones/us-central1-b/machineTypes/a3-ultragpu-8g",
        "disks": [{"boot": True, "autoDelete": True, "initializeParams": {"sourceImage": image}}],
        "networkInterfaces": [*ethernet, *rdma],
        "scheduling": {"onHostMaintenance": "TERMINATE"},
    }


def test_an_a3_ultra_takes_two_interfaces_of_gvnic_and_eight_of_mrdma(gce_api: GCE, ultra: dict[str, Any]) -> None:
    assert posted(gce_api, ultra, "zones/us-central1-b/instances").status_code == 200
    types = [each["nicType"] for each in gce_api.rentals["ultra"].told["networkInterfaces"]]
    assert types == ["GVNIC"] * 2 + ["MRDMA"] * 8


LAB = "global/networks/lab-net"
INTERFACES: list[tuple[Change, str]] = [
    (lambda told: told["networkInterfaces"][0].pop("nicType"), "a3-ultragpu-8g requires GVNIC or MRDMA"),
    (nic(nicType="VIRTIO_NET"), "a3-ultragpu-8g requires GVNIC or MRDMA"),
    (nic(nicType="IRDMA"), "a3-ultragpu-8g requires GVNIC or MRDMA"),
    (nic(nicType="MRDMA"), "The network default supports no MRDMA interfaces"),
    (lambda told: told["networkInterfaces"][2].update(nicType="GVNIC"), "The network rdma supports only MRDMA"),
    (lambda told: told["networkInterfaces"][2].update(told["networkInterfaces"][3]), "Networks must be distinct"),
    (lambda told: told["networkInterfaces"].append(told["networkInterfaces"][2]), "Too many network interfaces."),
    (
        lambda told: told["networkInterfaces"][9].update(nicType="GVNIC", network=LAB, subnetwork=""),
        "2 interfaces of GVNIC and 8 of MRDMA",
    ),
    (
        lambda told: told["networkInterfaces"][2].update(subnetwork="regions/us-east1/subnetworks/far-0"),
        "cannot be found",
    ),
    (lambda told: told["networkInterfaces"][2].pop("subnetwork"), "The network default supports no MRDMA"),
]


@pytest.mark.parametrize(("change", "text"), INTERFACES)
def test_interfaces_that_fit_neither_machine_nor_network_are_refused(
    gce_api: GCE, ultra: dict[str, Any], change: Change, text: str
) -> None:
    change(ultra)
    assert text in said(posted(gce_api, ultra, "zones/us-central1-b/instances"))[2]
    assert gce_api.left() == {}


# --- Google's own client -------------------------------------------------------------------------------------


@pytest.fixture
def client(gce_api: GCE) -> Callable[..., Any]:
    """Makes clients of Google's library for the lab."""
    options = ClientOptions(api_endpoint=gce_api.url)
    anonymous: Any = AnonymousCredentials()  # type: ignore[no-untyped-call,unused-ignore]

    def made(kind: Any) -> Any:
        return kind(credentials=anonymous, client_options=options)

    def watching(kind: Any) -> Any:
        """The library asks for operations at Google's own address, whatever `client_options` say."""
        client = made(kind)
        if kind is compute.InstancesClient:
            client.transport._extended_operations_services["zone_operations"] = made(compute.ZoneOperationsClient)
        return client

    return watching


def test_googles_client_creates_changes_and_ends_an_instance(gce_api: GCE, client: Callable[..., Any]) -> None:
    instances = client(compute.InstancesClient)
    image = client(compute.ImagesClient).get_from_family(project="ubuntu-os-cloud", family="ubuntu-2404-lts-amd64")
    disk = compute.AttachedDisk(boot=True, auto_delete=True)
    disk.initialize_params.source_image = image.self_link
    made = compute.Instance(name="one", machine_type=f"zones/{ZONE}/machineTypes/e2-standard-2", disks=[disk])
    made.network_interfaces = [compute.NetworkInterface(access_configs=[compute.AccessConfig(name="External NAT")])]
    where: dict[str, Any] = {"project": PROJECT, "zone": ZONE}
    operation = instances.insert(**where, instance_resource=made)
    operation.result(timeout=20)
    assert (operation.status.name, operation.progress, operation.error_code) == ("DONE", 100, 0)
    one = instances.get(**where, instance="one")
    assert (one.status, one.disks[0].boot, one.network_interfaces[0].access_configs[0].nat_i_p) == (
        "RUNNING", True, gce_api.rentals["one"].ip,
    )  # fmt: skip
    labels = compute.InstancesSetLabelsRequest(label_fingerprint=one.label_fingerprint, labels={"team": "blue"})
    instances.set_labels(**where, instance="one", instances_set_labels_request_resource=labels).result(timeout=20)
    tagged = compute.Tags(fingerprint=one.tags.fingerprint, items=["web"])
    instances.set_tags(**where, instance="one", tags_resource=tagged).result(timeout=20)
    with pytest.raises(exceptions.PreconditionFailed):
        instances.set_tags(**where, instance="one", tags_resource=tagged)
    (found,) = instances.list(request={**where, "filter": "(labels.team = blue) AND (status = RUNNING)"})
    assert list(found.tags.items) == ["web"]
    assert list(instances.list(request={**where, "filter": "status != RUNNING"})) == []
    instances.stop(**where, instance="one").result(timeout=20)
    assert instances.get(**where, instance="one").status == "TERMINATED"
    instances.start(**where, instance="one").result(timeout=20)
    assert instances.get_serial_port_output(**where, instance="one").contents == ""
    instances.delete(**where, instance="one").result(timeout=20)
    gce_api.wait(lambda: gce_api.left() == {})
    with pytest.raises(exceptions.NotFound, match="'projects/lab-project/zones/us-central1-a/instances/one' was not"):
        instances.get(**where, instance="one")


def test_googles_client_makes_several_instances_at_once_or_none(gce_api: GCE, client: Callable[..., Any]) -> None:
    instances = client(compute.InstancesClient)
    properties = compute.InstanceProperties(machine_type="e2-standard-2", disks=launched_body().disks)
    asked = compute.BulkInsertInstanceResource(count=3, name_pattern="node-##", instance_properties=properties)
    where: dict[str, Any] = {"project": PROJECT, "zone": ZONE}
    gce_api.capacity(2)
    with pytest.raises(exceptions.GoogleAPICallError, match="SERVICE UNAVAILABLE"):
        instances.bulk_insert(**where, bulk_insert_instance_resource_resource=asked).result(timeout=20)
    assert gce_api.left() == {}
    gce_api.capacity(None)
    instances.bulk_insert(**where, bulk_insert_instance_resource_resource=asked).result(timeout=20)
    assert [(each.name, each.status) for each in instances.list(**where)] == [
        ("node-01", "RUNNING"), ("node-02", "RUNNING"), ("node-03", "RUNNING"),
    ]  # fmt: skip
    asked.per_instance_properties["other"] = compute.BulkInsertInstanceResourcePerInstanceProperties()
    with pytest.raises(exceptions.BadRequest, match=r"resource\.count"):
        instances.bulk_insert(**where, bulk_insert_instance_resource_resource=asked)


def test_googles_client_reads_an_operation_that_fails(gce_api: GCE, client: Callable[..., Any]) -> None:
    gce_api.capacity(0)
    right = launched_body()
    with pytest.raises(exceptions.GoogleAPICallError, match="SERVICE UNAVAILABLE"):
        client(compute.InstancesClient).insert(project=PROJECT, zone=ZONE, instance_resource=right).result(timeout=20)
    with pytest.raises(exceptions.MethodNotImplemented, match="does not have GET"):
        list(client(compute.NetworkProfilesClient).list(project=PROJECT))


def launched_body() -> compute.Instance:
    disk = compute.AttachedDisk(boot=True, auto_delete=True)
    disk.initialize_params.source_image = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
    return compute.Instance(name="two", machine_type=f"zones/{ZONE}/machineTypes/e2-standard-2", disks=[disk])


LISTS: list[tuple[Any, str]] = [
    (compute.MachineTypesClient, "machine_types"),
    (compute.AcceleratorTypesClient, "accelerator_types"),
    (compute.DiskTypesClient, "disk_types"),
    (compute.SubnetworksClient, "subnetworks"),
]


@pytest.mark.parametrize(("kind", "field"), LISTS)
def test_googles_client_pages_through_aggregated_lists(
    gce_api: GCE, client: Callable[..., Any], kind: Any, field: str
) -> None:
    request = {"project": PROJECT, "max_results": 40}
    scopes = list(client(kind).aggregated_list(request=request))
    found = [each.self_link for _, scope in scopes for each in getattr(scope, field)]
    assert len(found) == len(set(found)) > 40
    assert len(gce_api.journal) > 1
    zone = next(name for name, scope in scopes if getattr(scope, field))
    place = {zone.partition("s/")[0]: zone.partition("/")[2]}
    assert {each.self_link for each in client(kind).list(project=PROJECT, **place)} <= set(found)


def test_googles_client_reads_zones_regions_networks_and_images(gce_api: GCE, client: Callable[..., Any]) -> None:
    zones = list(client(compute.ZonesClient).list(project=PROJECT))
    assert ZONE in {each.name for each in zones}
    region = client(compute.RegionsClient).get(project=PROJECT, region="us-central1")
    assert "NVIDIA_L4_GPUS" in {each.metric for each in region.quotas}
    assert [each.name for each in client(compute.NetworksClient).list(project=PROJECT)] == ["default", "lab-net"]
    images = client(compute.ImagesClient)
    (newest,) = [each for each in images.list(project="ubuntu-os-cloud") if each.family == "ubuntu-2404-lts-amd64"]
    assert images.get(project="ubuntu-os-cloud", image=newest.name) == newest
    with pytest.raises(exceptions.NotFound, match="family/none"):
        images.get_from_family(project="ubuntu-os-cloud", family="none")
    with pytest.raises(exceptions.BadRequest, match="filter"):
        list(images.list(request={"project": "ubuntu-os-cloud", "filter": "name eq ((("}))


# --- the schema ----------------------------------------------------------------------------------------------


@pytest.mark.needs("openssh")
def test_all_requests_of_the_driver_and_all_replies_fit_googles_schema(
    gce_api: GCE, record_property: Callable[[str, object], None]
) -> None:
    """A pool's life at the API: the lab raises what does not fit when it ends, and counts what does."""
    driver = GCP(ssh_from="203.0.113.7")
    need = Need(accelerators=(parse("A100-40GB"),), private_network=True)
    offer = min(driver.offers(need), key=lambda each: each.usd_per_hour)
    driver.launch(offer, Order("train", "0123456789abcdef-1", (0, 1), need, lifetime=3600.0))
    list(driver.check())
    list(driver.prove_creates())
    driver.terminate(driver.instances(pool="train"))
    driver.tidy(driver.leftovers(pool="train"))
    assert gce_api.left() == {}
    document = gce_api.wire.document
    counts = {"requests": document.requests, "replies": document.replies, "fields": document.fields}
    for name, count in counts.items():
        record_property(name, count)
    print(f"{counts} of {len(document.methods)} methods: {', '.join(sorted(document.methods))}")
    assert {"compute.instances.insert", "compute.firewalls.insert", "compute.resourcePolicies.insert"} < {
        *document.methods
    }
    assert len(document.methods) >= 24  # how often it asks for the state of an operation depends on the machine's pace
    assert min(document.requests, document.replies) >= 40
    assert document.fields >= 10_000


def test_every_route_of_the_lab_is_a_method_of_the_schema(gce_api: GCE) -> None:
    for route in gce_api.routes:
        verb, _, path = route.partition(" ")
        if path != "/":
            named = re.sub(r"\{(\w+)\}", r"\1", path)
            assert gce_api.wire.document.method(verb, named) is not None, route
