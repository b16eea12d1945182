"""Google's own client of Cloud TPU against the lab, over REST and over gRPC."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients import table, worlds
from tests.clients.runs import Client, Report
from tests.clients.worlds import WRONG_TOKEN
from tests.lab import tpu_wares as wares
from tests.lab.tpu import PROJECT, TPU
from tests.lab.tpu_grpc import grpc_of

NO_LOG = {"log": "Cloud TPU's API has no method that reads a machine's output"}
ABOUTS = [
    table.About(
        f"google-cloud-tpu ({name})", "google-cloud-tpu", "google", "Cloud TPU", f"Led to the lab by {how}.", NO_LOG
    )
    for name, how in (("REST", "`client_options`"), ("gRPC", "the channel of its transport"))
]
ZONE, KIND = "us-east5-a", "v5p-8"


@pytest.fixture(scope="module", params=["rest", "grpc"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def world(way: str) -> Iterator[TPU]:
    with TPU() as world:
        world.capacity(0, worlds.TPU_SOLD_OUT)
        yield world


@pytest.fixture(scope="module")
def report(way: str, world: TPU, tmp_path_factory: pytest.TempPathFactory) -> Report:
    client = Client("google", tmp_path_factory.mktemp("home"), world.environment)
    more = (PROJECT, ZONE, KIND, worlds.TPU_SOLD_OUT, WRONG_TOKEN)
    if way == "rest":
        return client.script("google_tpu.py", way, world.url, *more)
    with grpc_of(world) as address:
        return client.script("google_tpu.py", way, address.removeprefix("grpc://"), *more)


def test_its_lists_are_those_of_the_lab(report: Report) -> None:
    assert report.shown["zones"] == wares.zones() != []
    assert set(report.shown["types"]) == {each.type for each in wares.types(ZONE)} != set()
    assert report.shown["versions"] == wares.runtimes(ZONE) != []


def test_slices_are_made_found_changed_and_ended(report: Report, world: TPU) -> None:
    shown, at = report.shown, f"projects/{PROJECT}/locations/{ZONE}"
    made = shown["made"]
    assert (made["name"], made["state"], made["type"]) == (f"{at}/nodes/first", "READY", KIND)
    assert len(made["hosts"]) == 1
    assert made["labels"] == {"team": "blue"}
    assert shown["queued"] == "ACTIVE"
    assert shown["got"] == {**made, "labels": {"owner": "somebody"}}
    assert [each["name"] for each in shown["nodes"]] == [f"{at}/nodes/first", f"{at}/nodes/second"]
    assert shown["nodes"][0] == shown["got"]
    assert shown["requests"] == [f"{at}/queuedResources/second"]
    assert shown["left"] == []
    assert world.left() == {}


def test_errors_are_those_of_google(report: Report, way: str) -> None:
    assert "no more capacity in the zone" in report.refusals["no stock"][0]
    assert [each.partition(":")[0] for each in report.refusals["bad id"]] == ["NotFound", "NotFound"]
    assert report.refusals["bad key"][0].partition(":")[0] == {"rest": "Unauthorized", "grpc": "Unauthenticated"}[way]


def test_the_readme_says_what_ran(report: Report, way: str) -> None:
    table.check(ABOUTS[way == "grpc"], report)
