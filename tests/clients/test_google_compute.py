"""Google's own client of Compute Engine against the lab, with instances that are machines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients import table, worlds
from tests.clients.runs import Client, Report
from tests.clients.worlds import WRONG_TOKEN
from tests.lab import gce_wares as wares
from tests.lab.gce import GCE, PROJECT
from tests.lab.machines import Lab

ABOUT = table.About(
    "google-cloud-compute", "google-cloud-compute", "google", "Compute Engine",
    "Led to the lab by `client_options`, and for operations by the transport's own table of services.",
)  # fmt: skip
ZONE = "us-central1-a"


@pytest.fixture(scope="module")
def world(lab: Lab) -> Iterator[GCE]:
    with worlds.gce(lab) as world:
        yield world


@pytest.fixture(scope="module")
def report(world: GCE, tmp_path_factory: pytest.TempPathFactory) -> Report:
    client = Client("google", tmp_path_factory.mktemp("home"), world.environment)
    return client.script("google_compute.py", PROJECT, ZONE, worlds.GCE_KIND, worlds.GCE_SOLD_OUT, WRONG_TOKEN)


def test_its_lists_are_those_of_the_lab(report: Report) -> None:
    shown = report.shown
    assert sorted(shown["zones"]) == sorted(wares.sold())
    assert {zone.rpartition("-")[0] for zone in shown["zones"]} == set(shown["regions"])
    assert {each[0]: each[1] for each in shown["sizes"]} == {
        name: kind.vcpus for name, kind in wares.sold()[ZONE].items()
    }
    assert "nvidia-l4" in shown["accelerators"]
    assert [shown["image"], "ubuntu-2404-lts-amd64"] in shown["images"]


def test_an_instance_runs_says_what_it_did_and_ends(report: Report, world: GCE) -> None:
    shown = report.shown
    (node,) = shown["nodes"]
    assert (node["name"], node["status"], node["zone"], node["type"]) == ("first", "RUNNING", ZONE, worlds.GCE_KIND)
    assert node["labels"] == {"owner": "somebody"}
    assert node["metadata"]["note"] == "mine"
    assert node["private"]
    assert node["public"]
    assert (shown["disks"], shown["firewalls"]) == ([["first", 10]], ["mine"])
    assert "hello" in shown["log"]
    assert shown["left"] == []
    assert world.left() == {}


def test_errors_are_those_of_google(report: Report) -> None:
    (no_stock,) = report.refusals["no stock"]
    assert "does not have enough resources available" in no_stock
    assert [each.partition(":")[0] for each in report.refusals["bad id"]] == ["NotFound", "NotFound"]
    assert report.refusals["bad key"][0].startswith("Unauthorized: 401")


def test_the_readme_says_what_ran(report: Report) -> None:
    table.check(ABOUT, report)
