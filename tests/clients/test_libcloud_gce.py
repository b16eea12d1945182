"""Apache Libcloud's driver for Compute Engine against the lab, and its lists beside those of Google's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials

from skypool_gcp._sdk import compute_v1 as compute  # it is imported at its first use, which takes seconds
from tests.clients import table, worlds
from tests.clients.runs import Client, Report
from tests.clients.worlds import WRONG_TOKEN
from tests.lab.gce import GCE, PROJECT
from tests.lab.machines import Lab

ABOUT = table.About(
    "Apache Libcloud (GCE)", "apache-libcloud", "libcloud", "Compute Engine",
    "Led to the lab by host and port of its connection. Its token comes from its `credential_file`.",
)  # fmt: skip
ZONE = "us-central1-a"
TOKEN = "a-good-token"


@pytest.fixture(scope="module")
def world(lab: Lab) -> Iterator[GCE]:
    with worlds.gce(lab) as world:
        world.tokens.add(TOKEN)
        yield world


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    """What Google's client reads at the moment when libcloud has read its lists."""
    return {}


@pytest.fixture(scope="module")
def report(world: GCE, ours: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Report:
    def beside(call: Any, moment: str) -> None:
        """Read what there is while the console is asked for."""
        if call.action == "GET serialPort" and moment == "after" and not ours:
            ours["asking"] = True
            scopes = client(world, compute.InstancesClient).aggregated_list(project=PROJECT)
            ours["nodes"] = [each for _, scope in scopes for each in scope.instances]
            ours["disks"] = list(client(world, compute.DisksClient).list(project=PROJECT, zone=ZONE))
            ours["firewalls"] = list(client(world, compute.FirewallsClient).list(project=PROJECT))

    world.on_call = beside
    runner = Client("libcloud", tmp_path_factory.mktemp("home"), world.environment)
    kinds = (worlds.GCE_KIND, worlds.GCE_SOLD_OUT)
    return runner.script("libcloud_gce.py", PROJECT, ZONE, *kinds, TOKEN, WRONG_TOKEN)


def client(world: GCE, kind: Any) -> Any:
    """A client of Google's own library for the lab."""
    anonymous: Any = AnonymousCredentials()  # type: ignore[no-untyped-call,unused-ignore]
    return kind(credentials=anonymous, client_options=ClientOptions(api_endpoint=world.url))


def test_its_lists_of_what_there_is_are_those_of_googles_client(world: GCE, report: Report) -> None:
    shown = report.shown
    zones = [each.name for each in client(world, compute.ZonesClient).list(project=PROJECT)]
    assert shown["zones"] == zones != []
    regions = [each.name for each in client(world, compute.RegionsClient).list(project=PROJECT)]
    assert shown["regions"] == regions != []
    sizes = client(world, compute.MachineTypesClient).list(project=PROJECT, zone=ZONE)
    assert sorted(shown["sizes"]) == sorted([each.name, each.guest_cpus, each.memory_mb] for each in sizes) != []
    images = client(world, compute.ImagesClient)
    listed = [[each.name, each.family] for each in images.list(project="ubuntu-os-cloud")]
    assert sorted(shown["images"]) == sorted(listed) != []
    networks = [each.name for each in client(world, compute.NetworksClient).list(project=PROJECT)]
    assert sorted(shown["networks"]) == sorted(networks) != []
    newest = images.get_from_family(project="ubuntu-os-cloud", family="ubuntu-2404-lts-amd64")
    assert shown["image"] == newest.name


def test_its_list_of_nodes_is_that_of_googles_client(report: Report, ours: dict[str, Any]) -> None:
    (node,), (instance,) = report.shown["nodes"], ours["nodes"]
    network = instance.network_interfaces[0]
    assert node == {
        "name": instance.name, "id": str(instance.id), "status": instance.status, "labels": dict(instance.labels),
        "zone": instance.zone.rpartition("/")[2], "type": instance.machine_type.rpartition("/")[2],
        "private": network.network_i_p, "public": network.access_configs[0].nat_i_p,
        "metadata": {item.key: item.value for item in instance.metadata.items},
    }  # fmt: skip
    assert (node["name"], node["status"], node["labels"]) == ("first", "RUNNING", {"owner": "somebody"})
    assert node["metadata"]["note"] == "mine"


def test_its_other_lists_are_those_of_googles_client(report: Report, ours: dict[str, Any]) -> None:
    disks = [[each.name, str(each.size_gb)] for each in ours["disks"]]
    assert report.shown["disks"] == disks != []
    assert report.shown["firewalls"] == [each.name for each in ours["firewalls"]] == ["mine"]


def test_the_console_says_what_the_machine_said(report: Report) -> None:
    assert "hello" in report.shown["log"]


def test_what_it_made_ends(report: Report, world: GCE) -> None:
    shown = report.shown
    assert [shown[each] for each in ("tagged", "noted", "destroyed", "rule_gone")] == [True, True, True, True]
    assert shown["left"] == []
    assert world.left() == {}


def test_errors_are_those_of_google(report: Report) -> None:
    assert "does not have enough resources available" in report.refusals["no stock"][0]
    assert report.refusals["bad id"][0].startswith("ResourceNotFoundError")
    assert "Invalid Credentials" in report.refusals["bad key"][0]


def test_the_readme_says_what_ran(report: Report) -> None:
    table.check(ABOUT, report)
