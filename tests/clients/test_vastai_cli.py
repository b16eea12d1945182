"""The Vast.ai CLI against the lab's Vast.ai."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients import table
from tests.clients.runs import Client, Commands, Report
from tests.lab.machines import Lab
from tests.lab.vastai import KEY, VastAI

ABOUT = table.About(
    "Vast.ai CLI", "vastai", "vastai", "Vast.ai", "Led to the lab by its option `--url` (or `VAST_URL`)."
)


@pytest.fixture(scope="module")
def world(lab: Lab) -> Iterator[VastAI]:
    with VastAI(lab) as world:
        yield world


@pytest.fixture(scope="module")
def report(world: VastAI, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """All that the CLI does to one instance."""
    client = Client("vastai", tmp_path_factory.mktemp("home"), {**world.environment, "VAST_API_KEY": KEY})
    vastai = Commands(client, "vastai", "--raw", "--url", world.url, failure='"error": true')
    shown = vastai.report.shown
    shown["offers"] = vastai.call("list", "search", "offers", "gpu_name=RTX_4090 num_gpus>=1", "-o", "dph")
    ask, other = (str(each["id"]) for each in shown["offers"][:2])
    world.capacity(0, other)
    shown["user"] = vastai.call("get", "show", "user")
    shown["key"] = vastai.call("create", "create", "ssh-key", "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIA me")
    shown["keys"] = vastai.call("list", "show", "ssh-keys")
    order = ["--image", "ubuntu:24.04", "--disk", "20", "--label", "first"]
    command = ["--args", "sh", "-c", "echo hello; exec sleep 1000"]
    made = vastai.call("create", "create", "instance", ask, *order, *command)
    id = str(made["new_contract"])
    world.wait(lambda: world.rentals[id].status == "running", 60)
    shown["instances"] = vastai.call("list", "show", "instances")
    vastai.call("tag", "label", "instance", id, "renamed")
    shown["instance"] = vastai.call("get", "show", "instance", id)
    machine = world.rentals[id].machine
    assert machine is not None
    world.wait(lambda: "hello" in machine.console(), 60)
    shown["log"] = vastai.call("log", "logs", id)

    vastai.refused("no stock", "create", "instance", other, *order)
    shown["nobody"] = vastai.call("bad id", "show", "instance", "1")
    vastai.refused("bad id", "destroy", "instance", "1", "--yes")
    vastai.refused("bad key", "show", "instances", "--api-key", "wrong")

    shown["stopped"] = vastai.call("end", "stop", "instance", id)
    shown["ended"] = vastai.call("end", "destroy", "instance", id, "--yes")
    shown["left"] = vastai.call("list", "show", "instances")
    return vastai.report


def test_its_offers_are_what_is_for_rent_by_price(report: Report, world: VastAI) -> None:
    offers = report.shown["offers"]
    assert len(offers) >= 2
    assert {each["id"] for each in offers} <= {id for id, ask in world.asks.items() if ask["gpu_name"] == "RTX 4090"}
    assert offers == sorted(offers, key=lambda each: each["dph_total"])


def test_the_instance_is_shown_with_its_label(report: Report) -> None:
    (listed,) = report.shown["instances"]
    assert (listed["label"], report.shown["instance"]["label"]) == ("first", "renamed")
    assert listed["id"] == report.shown["instance"]["id"]
    assert listed["actual_status"] == "running"
    assert len(report.shown["keys"]) == 1
    assert report.shown["user"]["id"]


def test_its_log_is_what_the_container_said(report: Report) -> None:
    assert "hello" in report.shown["log"]


def test_what_it_made_ends(report: Report, world: VastAI) -> None:
    assert report.shown["left"] == []
    world.wait(lambda: world.left() == {}, 30)


def test_errors_are_those_of_the_service(report: Report) -> None:
    assert "no_such_ask" in report.refusals["no stock"][0]
    assert "Instance 1 not found" in report.refusals["bad id"][0]
    assert report.shown["nobody"] == {"instances": None}
    assert "Invalid user key" in report.refusals["bad key"][0]


def test_the_readme_says_what_ran(report: Report) -> None:
    table.check(ABOUT, report)
