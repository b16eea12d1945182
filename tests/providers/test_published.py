"""The drivers' requests against what Verda, Vast.ai and RunPod publish about their APIs.

The labs check every request and every reply. Here each driver rents and ends a machine, and the checked values are
counted. Then one thing in one of those very requests is made wrong, and the lab must refuse it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import requests

from skypool.accelerators import parse
from skypool.drivers.contract import Bills, Checks, Driver, Renews, Tidies
from skypool.model import Need, Order
from skypool_runpod import RunPod
from skypool_vastai import VastAI, _api
from skypool_verda import Verda
from tests.lab import runpod, vastai, verda
from tests.lab.cloud import Cloud
from tests.lab.openapi import Document

pytestmark = pytest.mark.needs("openssh")

PAGE = Path(__file__).parents[2] / "docs" / "lab.md"


@dataclass(frozen=True)
class Provider:
    """A driver, a need that its lab can meet, and the document against which the lab checks."""

    driver: Callable[[], Driver]
    need: Need
    document: Document


PROVIDERS = {
    "verda": Provider(lambda: Verda(), Need(accelerators=(parse("V100"),), market="spot"), verda.SCHEMA),
    "vastai": Provider(lambda: VastAI(), Need(accelerators=(parse("RTX 4090"),)), vastai.SCHEMA),
    "runpod": Provider(lambda: RunPod(), Need(accelerators=(parse("A40"),)), runpod.published()),
}


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody counts how often this Vast.ai is asked, and its address is that of this test."""
    monkeypatch.setattr("skypool_vastai._api.PACE", {})
    _api._account.cache_clear()


@pytest.fixture(params=PROVIDERS)
def world(request: pytest.FixtureRequest, pace: None) -> tuple[str, Cloud[Any]]:
    """Each of the three clouds, without machines."""
    return request.param, request.getfixturevalue(f"{request.param}_api")


def live(provider: Provider) -> None:
    """Check the account, rent a machine, do with it what a pool does, end it, and ask what it cost."""
    driver = provider.driver()
    assert isinstance(driver, Checks)
    list(driver.check())
    until = datetime.now(UTC) + timedelta(hours=1)
    order = Order("train", "0123456789abcdef-1", (0,), provider.need, until=until)
    offer = next(each for each in driver.offers(provider.need) if each.available)
    made = driver.launch(offer, order)
    assert [each.id for each in driver.instances(pool="train")] == [each.id for each in made]
    driver.access(made[0])
    if isinstance(driver, Renews):
        driver.renew("train", until + timedelta(hours=1))
    driver.terminate(made)
    if isinstance(driver, Tidies):
        driver.tidy(driver.leftovers(pool="train"))
    assert isinstance(driver, Bills)
    driver.billed([each.id for each in made], datetime.now(UTC) - timedelta(minutes=1), datetime.now(UTC))


def test_every_request_of_a_driver_and_every_reply_fits_what_is_published(world: tuple[str, Cloud[Any]]) -> None:
    name, cloud = world
    document = PROVIDERS[name].document
    before = document.requests, document.replies, document.fields
    live(PROVIDERS[name])
    seen = [
        now - then for now, then in zip((document.requests, document.replies, document.fields), before, strict=True)
    ]
    print(f"{name}: {seen[0]} requests and {seen[1]} replies with {seen[2]} values fit")
    assert cloud.errors == []
    assert {each.status for each in cloud.journal} <= {200, 201, 202, 204, 404}
    row = re.search(rf"^\| {name} \|.*\| (\d+) \| (\d+) \| (\d+) \|$", PAGE.read_text(), re.MULTILINE)
    assert row is not None, f"{PAGE.name} tells how much of {name} is checked"
    assert all(now >= int(told) for now, told in zip(seen, row.groups(), strict=True)), (seen, row[0])


Change = Callable[[dict[str, Any]], object]


def put(value: Any, *path: str | int) -> Change:
    """A change that gives a field, at any depth, this value."""

    def change(body: dict[str, Any]) -> None:
        part: Any = body
        for name in path[:-1]:
            part = part[name]
        part[path[-1]] = value

    return change


def drop(*path: str | int) -> Change:
    """A change that leaves a field out."""

    def change(body: dict[str, Any]) -> None:
        part: Any = body
        for name in path[:-1]:
            part = part[name]
        del part[path[-1]]

    return change


@dataclass(frozen=True)
class Wrong:
    """A wrong request.

    Attributes:
        action: Which of the driver's requests it is.
        change: What is made wrong.
        status: The status of the refusal.
        says: A part of the refusal.
        path: Another path than the request's, or "".
    """

    action: str
    change: Change
    status: int
    says: str
    path: str = ""


def nothing(body: dict[str, Any]) -> None:
    """Change nothing: the path is another one, or what it names is gone."""


def accepted(name: str, cloud: Cloud[Any], planted: Sequence[Wrong]) -> list[str]:
    """Send wrong requests, and return those that were not refused as they should be."""
    live(PROVIDERS[name])
    cloud.wait(lambda: cloud.left() == {}, 10)
    failed = []
    for each in planted:
        [sent, *_] = [call for call in cloud.calls(each.action) if call.status < 300]
        body = copy.deepcopy(sent.body) or {}
        each.change(body)
        headers = {"Authorization": sent.headers["authorization"]}
        url = cloud.url + (each.path or sent.path)
        answer = requests.request(sent.method, url, params=sent.query, json=body, headers=headers, timeout=10)
        if answer.status_code != each.status or each.says not in answer.text or cloud.left() != {}:
            failed.append(f"{each.action}, {each.status} {each.says}: {answer.status_code} {answer.text}")
    return failed


LONG = "x" * 2000
VERDA = [
    Wrong("POST /instances", drop("instance_type"), 400, "'instance_type' is a required"),
    Wrong("POST /instances", drop("image"), 400, "'image' is a required"),
    Wrong("POST /instances", drop("hostname"), 400, "'hostname' is a required"),
    Wrong("POST /instances", drop("description"), 400, "'description' is a required"),
    Wrong("POST /instances", put("9H100.80S", "instance_type"), 400, "Invalid instance type"),
    Wrong("POST /instances", put("ubuntu-18.04", "image"), 400, "Operating system is not valid"),
    Wrong("POST /instances", put("Train_0", "hostname"), 400, "hostname is not valid"),
    Wrong("POST /instances", put("x" * 64, "hostname"), 400, "hostname is not valid"),
    Wrong("POST /instances", put("FIN-09", "location_code"), 400, "Invalid location code"),
    Wrong("POST /instances", put("MONTHLY", "contract"), 400, "'MONTHLY' is not one of"),
    Wrong("POST /instances", put("FIXED", "pricing"), 400, "'FIXED' is not one of"),
    Wrong("POST /instances", put("yes", "is_spot"), 400, "'yes' is not of type 'boolean'"),
    Wrong("POST /instances", put("one", "ssh_key_ids"), 400, "'one' is not of type 'array'"),
    Wrong("POST /instances", put(["nobody"], "ssh_key_ids"), 400, "Invalid ssh key id"),
    Wrong("POST /instances", put(0, "os_volume", "size"), 400, "0 is less than the minimum"),
    Wrong("POST /instances", drop("os_volume", "name"), 400, "'name' is a required"),
    Wrong("POST /instances", put("delete", "os_volume", "on_spot_discontinue"), 400, "os_volume"),
    Wrong("POST /instances", put([{"key": f"k{n}", "value": ""} for n in range(11)], "tags"), 400, "is too long"),
    Wrong("POST /instances", put("x" * 128, "tags", 0, "value"), 400, "is too long"),
    Wrong("POST /instances", put("x" * 64, "tags", 0, "key"), 400, "is too long"),
    Wrong("POST /instances", put("#!/bin/sh", "user_data"), 400, "'user_data' was unexpected"),
    Wrong("PUT /instances", put("destroy", "action"), 400, "'destroy' is not one of"),
    Wrong("PUT /instances", put([], "id"), 400, "$.id"),
    Wrong("PUT /instances", nothing, 404, "Invalid instance id"),  # it is gone
    Wrong("POST /ssh-keys", drop("key"), 400, "'key' is a required"),
    Wrong("POST /scripts", put("", "name"), 400, "should be non-empty"),
]
CREATE = "PUT /api/v0/asks/{id}/"
SEARCH = "POST /api/v0/bundles/"
VASTAI = [
    Wrong(CREATE, drop("image"), 400, "'image' is a required"),
    Wrong(CREATE, put(None, "image"), 400, "None is not of type 'string'"),
    Wrong(CREATE, put("you", "client_id"), 400, "client_id"),
    Wrong(CREATE, put("32", "disk"), 400, "'32' is not of type 'number'"),
    Wrong(CREATE, put("vm", "runtype"), 400, "'vm' is not one of"),
    Wrong(CREATE, put("paused", "target_state"), 400, "'paused' is not one of"),
    Wrong(CREATE, put("yes", "cancel_unavail"), 400, "'yes' is not of type"),
    Wrong(CREATE, put(0, "price"), 400, "0 is less than the minimum of 0.001"),
    Wrong(CREATE, put(200, "price"), 400, "200 is greater than the maximum of 128"),
    Wrong(CREATE, put("-c x", "args"), 400, "'-c x' is not of type"),
    Wrong(CREATE, put({"args": 1}, "env"), 400, "1 is not of type 'string'"),
    Wrong(CREATE, put({"A": "x" * 33_000}, "env"), 400, "env has 33009"),
    Wrong(CREATE, put("x" * 5000, "onstart"), 400, "may have 4096"),
    Wrong(CREATE, put("x" * 257, "label"), 400, "label has 257"),
    Wrong(CREATE, put("x", "tags"), 400, "'tags' was unexpected"),
    Wrong(CREATE, nothing, 404, "no_such_ask", "/api/v0/asks/1/"),
    Wrong(CREATE, nothing, 404, "no_such_ask", "/api/v0/asks/abc/"),
    Wrong(SEARCH, put("weekly", "type"), 400, "'weekly' is not one of"),
    Wrong(SEARCH, put({"eq": 1}, "gpu_nmae"), 400, "'gpu_nmae' was unexpected"),
    Wrong(SEARCH, put({"like": "RTX"}, "gpu_name"), 400, "'like' was unexpected"),
    Wrong(SEARCH, put([["dph_total"]], "order"), 400, "is too short"),
    Wrong(SEARCH, put("many", "limit"), 400, "'many' is not of type 'integer'"),
    Wrong("PUT /api/v0/instances/{id}/", put(LONG, "label"), 400, "is too long"),
    Wrong("PUT /api/v0/instances/{id}/", nothing, 404, "no_such_instance"),  # it is gone
    Wrong("DELETE /api/v0/instances/{id}/", nothing, 404, "no_such_instance"),
]
PODS = "POST /v2/pods"
RUNPOD = [
    Wrong(PODS, put("", "name"), 422, "'' should be non-empty"),
    Wrong(PODS, put(None, "name"), 422, "None is not of type 'string'"),
    Wrong(PODS, put(1, "bogus"), 422, "('bogus' was unexpected)"),
    Wrong(PODS, put("ubuntu", "imageName"), 422, "('imageName' was unexpected)"),
    Wrong(PODS, put("ALL", "cloud"), 422, "'ALL' is not one of ['SECURE', 'COMMUNITY']"),
    Wrong(PODS, put(0, "gpu", "count"), 422, "0 is less than the minimum of 1"),
    Wrong(PODS, drop("gpu", "id"), 422, "'id' is a required property"),
    Wrong(PODS, put("12", "gpu", "minCudaVersion"), 422, "'12' does not match"),
    Wrong(PODS, put(1, "gpu", "bidPerGpu"), 422, "('bidPerGpu' was unexpected)"),
    Wrong(PODS, put("50", "disk"), 422, "'50' is not of type 'integer'"),
    Wrong(PODS, put(0, "disk"), 422, "$.disk: 0 is less than"),
    Wrong(PODS, put("22/tcp", "ports"), 422, "'22/tcp' is not of type 'array'"),
    Wrong(PODS, put([{"key": "A", "value": "b"}], "env"), 422, "is not of type 'object'"),
    Wrong(PODS, put(1, "env", "SKYPOOL_START"), 422, "1 is not of type 'string'"),
    Wrong(PODS, put("CA-MTL-1", "dataCenterIds"), 422, "'CA-MTL-1' is not of type 'array'"),
    Wrong(PODS, put({"network": [{"volumeId": "v"}]}, "mounts"), 422, "'path' is a required property"),
    Wrong(PODS, put({"network": [{"volumeId": "v", "path": "/w"}] * 2}, "mounts"), 422, "is too long"),
    Wrong(PODS, put("no", "startSsh"), 422, "'no' is not of type 'boolean'"),
    Wrong(PODS, put("2030-01-01T00:00:00Z", "terminateAfter"), 422, "('terminateAfter' was unexpected)"),
    Wrong(PODS, put("", "templateId"), 422, "$.templateId: '' should be non-empty"),
    Wrong(PODS, put("NVIDIA A41", "gpu", "id"), 400, "no longer any instances"),
    Wrong(PODS, put(["XX-1"], "dataCenterIds"), 400, "no longer any instances"),
    Wrong("DELETE /v2/pods/{id}", nothing, 404, "Pod not found"),
]


@pytest.mark.parametrize(("name", "planted"), [("verda", VERDA), ("vastai", VASTAI), ("runpod", RUNPOD)])
def test_twenty_requests_with_one_thing_made_wrong_are_all_refused(
    request: pytest.FixtureRequest, pace: None, name: str, planted: Sequence[Wrong]
) -> None:
    assert len(planted) >= 20
    assert accepted(name, request.getfixturevalue(f"{name}_api"), planted) == []
