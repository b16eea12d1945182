"""Every request of the driver to Cloud TPU and to the catalogue of prices, by Google's schema; and wrong ones."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import requests

from skypool.accelerators import parse
from skypool.model import Need, Order
from skypool_gcp._settings import Settings
from skypool_gcp.list_prices import rates
from skypool_gcp.tpu import Tpu, _api
from tests.lab.billing import Billing
from tests.lab.cloud import Request
from tests.lab.tpu import PROJECT, TPU
from tests.lab.tpu_wire import CODES

V5P = Need(accelerators=(parse("v5p-16"),))
ROBOT = "robot@lab-project.iam.gserviceaccount.com"
AT = f"/v2/projects/{PROJECT}/locations/us-east5-a"

pytestmark = [
    pytest.mark.needs("openssh"),
    pytest.mark.filterwarnings("ignore:not all firewall rules for TPU hosts"),  # no Compute Engine there
]


def settings(**more: Any) -> Settings:
    given: dict[str, Any] = {
        "project": PROJECT, "zones": ("us-east5-a",), "network": "default", "subnetwork": "inner", "image": None,
        "reservation": None, "service_account": ROBOT, "ssh_from": ("203.0.113.7",), "queue": 60.0, **more,
    }  # fmt: skip
    return Settings(**given)


def live(driver: Tpu, need: Need) -> None:
    """All that the driver asks of Cloud TPU."""
    offer = driver.offers(need)[0]
    until = datetime.now(UTC) + timedelta(hours=1)
    launched = driver.launch(offer, Order("train", f"{secrets.token_hex(8)}-1", (0, 1), need, until=until))
    for each in launched:
        driver.access(each)
    driver.renew("train", until)
    driver.terminate(launched)


@pytest.fixture(autouse=True)
def _forgetful(own_state: None) -> None:
    """An address may be one at which another test's world was."""
    _api._client.cache_clear()


def test_all_requests_of_the_driver_and_all_replies_of_the_lab_are_google_s(
    tpu_api: TPU,
) -> None:
    """The lab refuses what the schema does not have, and fails if it answers so itself."""
    live(Tpu(settings()), V5P)
    live(Tpu(settings(service_account=None, reservation="ours")), V5P)
    live(Tpu(settings()), Need(accelerators=V5P.accelerators, market="spot"))
    assert all(each.good for each in Tpu(settings()).check())
    assert all(each.good for each in Tpu(settings()).prove_creates())
    sent = tpu_api.calls(CREATE)[0]
    requests.post(f"{tpu_api.url}{AT}/nodes", params={"nodeId": "alone"}, json=node(sent.body)).raise_for_status()
    Tpu(settings()).terminate(Tpu(settings()).instances())  # a node without a queued resource
    document = tpu_api.wire.document
    called = {name.removeprefix("tpu.projects.locations.") for name in document.methods}
    assert called == {
        "list", "acceleratorTypes.list", "runtimeVersions.list", "operations.get", "nodes.get", "nodes.list",
        "nodes.create", "nodes.patch", "nodes.delete", "queuedResources.create", "queuedResources.delete",
        "queuedResources.get", "queuedResources.list",
    }  # fmt: skip
    refused = [each for each in tpu_api.calls(CREATE) if each.status >= 400]
    assert len(refused) == 2, "those of the proof"
    assert (document.requests > 60, document.replies > 50, document.fields > 2000) == (True, True, True)
    print(f"Cloud TPU: {document.requests} requests, {document.replies} replies, {document.fields} fields")


def test_all_requests_to_the_catalogue_and_all_its_pages_are_google_s(monkeypatch: pytest.MonkeyPatch) -> None:
    with Billing() as world:
        for name, value in world.environment.items():
            monkeypatch.setenv(name, value)
        assert rates(settings(), insist=True).why == ""
    document = world.document
    assert document.methods == {"cloudbilling.services.skus.list": document.requests}
    assert (document.requests == document.replies > 4, document.fields > 10_000) == (True, True)
    print(f"Cloud Billing: {document.requests} requests, {document.replies} replies, {document.fields} fields")


# --- wrong requests ------------------------------------------------------------------------------------------


def node(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["tpu"]["nodeSpec"][0]["node"]
    return found


CREATE, PATCH, DELETE = "POST queuedResources", "PATCH node", "DELETE queuedResource"
BODIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no node": (lambda body: body["tpu"].update(nodeSpec=[]), "one node in its own location is needed"),
    "no tpu": (lambda body: body.pop("tpu"), "one node in its own location is needed"),
    "unknown field": (lambda body: node(body).update(flavor="large"), 'Unknown name "flavor"'),
    "unknown field above": (lambda body: body.update(flavor="large"), 'Unknown name "flavor"'),
    "a number for a name": (lambda body: node(body).update(acceleratorType=8), "acceleratorType"),
    "no enum": (lambda body: node(body).update(acceleratorConfig={"type": "V9"}), "acceleratorConfig.type"),
    "a word for a truth": (lambda body: node(body).update(schedulingConfig={"spot": "yes"}), "schedulingConfig.spot"),
    "a name for a list": (lambda body: node(body)["serviceAccount"].update(scope="all"), "serviceAccount.scope"),
    "a list for labels": (lambda body: node(body).update(labels=["a"]), "labels"),
    "label in capitals": (lambda body: node(body)["labels"].update(Team="blue"), "Invalid labels"),
    "65 labels": (lambda body: node(body)["labels"].update({f"l{n}": "x" for n in range(65)}), "Invalid labels"),
    "long label": (lambda body: node(body)["labels"].update(a="x" * 64), "Invalid labels"),
    "long description": (lambda body: node(body).update(description="x" * 513), "at most 512 characters"),
    "much metadata": (lambda body: node(body)["metadata"].update(a="x" * 2**19), "larger than 512 KiB"),
    "two markets": (lambda body: body.update(spot={}), "guaranteed or spot"),
    "two networks": (lambda body: node(body).update(networkConfigs=[{}]), "network config"),
    "two accelerators": (lambda body: node(body).update(acceleratorConfig={"type": "V5P"}), "accelerator config"),
    "unknown type": (lambda body: node(body).update(acceleratorType="v99-8"), "v99-8 was not found in zone us-east5-a"),
    "unknown runtime": (lambda body: node(body).update(runtimeVersion="v9"), "Runtime version v9 is not for v5p-16"),
    "no time": (lambda body: body["queueingPolicy"].update(validUntilTime="soon"), "queueingPolicy.validUntilTime"),
    "no seconds": (lambda body: body["queueingPolicy"].update(validUntilDuration="3h"), "validUntilDuration"),
    "a list for seconds": (lambda body: body["guaranteed"].update(minDuration=[60]), "guaranteed.minDuration"),
    "another zone": (lambda body: body["tpu"]["nodeSpec"][0].update(parent="projects/p/locations/z"), "own location"),
    "a name with capitals": (lambda body: body["tpu"]["nodeSpec"][0].update(nodeId="Mine"), "Invalid node id"),
}
"""Wrong bodies of the driver's create, and what the refusal says."""
REST: dict[str, tuple[str, Callable[[Request], object], str]] = {
    "bad id": (CREATE, lambda request: request.query.update(queuedResourceId="Mine"), "Invalid queued resource 'Mine'"),
    "long id": (CREATE, lambda request: request.query.update(queuedResourceId="m" * 64), "Invalid queued resource"),
    "no id": (CREATE, lambda request: request.query.pop("queuedResourceId"), "Invalid queued resource"),
    "no UUID": (CREATE, lambda request: request.query.update(requestId="1"), "must be a UUID"),
    "dry run": (CREATE, lambda request: request.query.update(validateOnly="true"), 'Unknown name "validateOnly"'),
    "no body": (CREATE, lambda request: setattr(request, "body", None), "Missing required field"),
    "a zone that is not there": (CREATE, lambda request: _moved(request, "us-east5-a", "mars-1a"), "Permission denied"),
    "no truth": (DELETE, lambda request: request.query.update(force="yes"), "force"),
    "another's field": (PATCH, lambda request: request.query.update(updateMask="acceleratorType"), "does not update"),
    "a number for labels": (PATCH, lambda request: request.body.update(labels=1), "labels"),
    "no number": ("GET nodes", lambda request: request.query.update(pageSize="many"), "pageSize"),
    "no page": ("GET nodes", lambda request: request.query.update(pageToken="x"), "Invalid page token"),
    "no such one": ("GET queuedResource", lambda request: _moved(request, "skypool-", "nobody-"), "was not found"),
}
"""Other wrong requests: from which of the driver's, how, and what the refusal says."""


def _moved(request: Request, old: str, new: str) -> None:
    request.path = request.path.replace(old, new)


def said(world: TPU, request: Request) -> str:
    """What a wrong request is refused with, in the form of Google's errors."""
    reply = requests.request(request.method, world.url + request.path, params=request.query, json=request.body)
    error = reply.json()["error"]
    assert reply.status_code == error["code"] == CODES[error["status"]][0]
    assert 400 <= error["code"] < 500
    return str(error["message"])


@pytest.fixture(scope="module")
def wrong() -> dict[str, Request]:
    """What the driver really asked for, once for all of the tests below."""
    return {}


def fresh(tpu_api: TPU, wrong: dict[str, Request], action: str) -> Request:
    """A request of the driver that may be changed, with an id and a name of its own."""
    if not wrong:
        live(Tpu(settings()), V5P)
        wrong.update({each.action: each for each in tpu_api.journal if each.status == 200})
    made = copy.deepcopy(wrong[action])
    made.query.pop("requestId", None)
    return made


@pytest.mark.parametrize("what", BODIES)
def test_a_wrong_queued_resource_is_refused_in_google_s_words(
    tpu_api: TPU, wrong: dict[str, Request], what: str
) -> None:
    change, says = BODIES[what]
    request = fresh(tpu_api, wrong, CREATE)
    change(request.body)
    assert says in said(tpu_api, request)
    assert tpu_api.left() == {}


@pytest.mark.parametrize("what", REST)
def test_another_wrong_request_is_refused_in_google_s_words(tpu_api: TPU, wrong: dict[str, Request], what: str) -> None:
    action, change, says = REST[what]
    there = fresh(tpu_api, wrong, CREATE)
    if action != CREATE:
        requests.post(tpu_api.url + there.path, params=there.query, json=there.body).raise_for_status()
        tpu_api.wait(lambda: {each.state for each in tpu_api.queued.values()} == {"ACTIVE"})
    request = fresh(tpu_api, wrong, action)
    change(request)
    assert says in said(tpu_api, request)
    assert len(tpu_api.queued) == (action != CREATE)


def test_the_same_requests_are_right_without_the_change(tpu_api: TPU, wrong: dict[str, Request]) -> None:
    """So it is the change that is refused."""
    request = fresh(tpu_api, wrong, CREATE)
    reply = requests.post(tpu_api.url + request.path, params=request.query, json=request.body)
    assert reply.status_code == 200
