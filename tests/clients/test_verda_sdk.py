"""Verda's SDK against the lab's Verda."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients import table
from tests.clients.runs import Client, Report
from tests.lab import verda_wares
from tests.lab.verda import Verda

ABOUT = table.About(
    "Verda SDK", "verda", "verda", "Verda",
    "Led to the lab by the argument `base_url` of `VerdaClient`. The SDK has no function for tags of "
    "instances; it renames a volume instead.",
    {"log": "Verda's API has no console of instances"},
)  # fmt: skip


@pytest.fixture(scope="module")
def world() -> Iterator[Verda]:
    with Verda() as world:
        world.capacity(0, "1H100.80S.32V")
        yield world


@pytest.fixture(scope="module")
def report(world: Verda, tmp_path_factory: pytest.TempPathFactory) -> Report:
    client = Client("verda", tmp_path_factory.mktemp("home"), world.environment)
    return client.script("verda_sdk.py")


def test_its_lists_are_what_the_lab_sells(report: Report) -> None:
    shown, sold = report.shown, verda_wares.types()
    assert {each[0] for each in shown["types"]} == set(sold)
    prices = {name: [float(each["price_per_hour"]), float(each["spot_price"])] for name, each in sold.items()}
    assert {name: prices for name, *prices in shown["types"]} == prices
    assert shown["locations"] == [each["code"] for each in verda_wares.LOCATIONS]
    assert {each["location_code"] for each in shown["availabilities"]} == set(shown["locations"])
    assert shown["available"] is True
    assert "ubuntu-24.04-cuda-12.8-open-docker" in shown["images"]


def test_an_instance_is_made_with_key_and_script_and_found_again(report: Report) -> None:
    made, found = report.shown["made"], report.shown["running"]
    assert report.shown["listed"] == [made["id"]]
    assert (found["status"], found["hostname"], found["description"]) == ("running", "first", "a test")
    assert found["ssh_key_ids"] == [report.shown["key"]["id"]]
    assert found["startup_script_id"] == report.shown["scripts"][0]["id"]
    assert report.shown["keys"] == [report.shown["key"]]
    assert found["os_volume_id"] in report.shown["volumes"]
    assert report.shown["renamed"] == "renamed"


def test_what_it_made_ends(report: Report, world: Verda) -> None:
    world.wait(lambda: world.left() == {})


def test_errors_are_those_of_the_service(report: Report) -> None:
    assert "service_unavailable" in report.refusals["no stock"][0]
    assert [each.split("error code: ")[1].split("\n")[0] for each in report.refusals["bad id"]] == ["not_found"] * 2
    assert "unauthorized_request" in report.refusals["bad key"][0]


def test_the_readme_says_what_ran(report: Report) -> None:
    table.check(ABOUT, report)
