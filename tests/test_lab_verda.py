"""The oddities of the lab's Verda, asked as any client asks."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import requests

from tests.lab.cloud import Cloud
from tests.lab.verda import ID, SECRET, Verda

CREDENTIALS = {"client_id": ID, "client_secret": SECRET}


def asked(world: Cloud[Any], method: str, path: str, token: str = "", **given: Any) -> requests.Response:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return requests.request(method, f"{world.url}/v1{path}", headers=headers, timeout=10, **given)


def token(world: Verda) -> str:
    got = asked(world, "POST", "/oauth2/token", json={"grant_type": "client_credentials", **CREDENTIALS})
    return str(got.json()["access_token"])


def deployed(world: Verda, known: str, **more: Any) -> str:
    key = asked(world, "POST", "/ssh-keys", known, json={"name": "k", "key": "ssh-ed25519 AAAA"}).text
    disk = {"name": "disk", "size": 50}
    told: dict[str, Any] = {
        "instance_type": "1V100.6V",
        "image": "ubuntu-22.04-cuda-12.4-docker",
        "hostname": "a",
        "description": "b",
    }
    told |= {"ssh_key_ids": [key], "location_code": "FIN-01", "is_spot": False, "os_volume": disk, **more}
    got = asked(world, "POST", "/instances", known, json=told)
    assert got.status_code == 202, got.text
    world.wait(lambda: world.rentals[got.text.strip('"')].state not in ("ordered", "provisioning"))
    return got.text.strip('"')


def test_a_token_is_for_an_hour_and_a_refresh_token_is_used_once(verda_api: Verda) -> None:
    got = asked(verda_api, "POST", "/oauth2/token", json={"grant_type": "client_credentials", **CREDENTIALS}).json()
    assert (got["token_type"], got["expires_in"]) == ("Bearer", 3600)
    assert asked(verda_api, "GET", "/balance", got["access_token"]).status_code == 200
    verda_api.clock.advance(3601)
    late = asked(verda_api, "GET", "/balance", got["access_token"])
    assert (late.status_code, late.json()["code"]) == (401, "unauthorized_request")
    again = {"grant_type": "refresh_token", "refresh_token": got["refresh_token"]}
    assert [asked(verda_api, "POST", "/oauth2/token", json=again).status_code for _ in range(2)] == [200, 400]
    wrong = {"grant_type": "client_credentials", **CREDENTIALS, "client_secret": "x"}
    assert asked(verda_api, "POST", "/oauth2/token", json=wrong).status_code == 401


@pytest.mark.parametrize("quoted", [False, True])
def test_ids_are_plain_text_and_prices_strings(verda_api: Verda, quoted: bool) -> None:
    verda_api.quoted, known = quoted, token(verda_api)
    got = asked(verda_api, "POST", "/scripts", known, json={"name": "n", "script": "s"})
    assert got.headers["Content-Type"] == ("application/json" if quoted else "text/plain")
    assert got.text.startswith('"') is quoted
    assert asked(verda_api, "GET", f"/scripts/{got.text.strip(chr(34))}", known).json()[0]["script"] == "s"
    for each in asked(verda_api, "GET", "/instance-types", known).json():
        assert isinstance(each["price_per_hour"], str)
        assert isinstance(each["spot_price"], str)


def test_availability_is_by_location_and_market_and_for_one_type_a_bare_word(verda_api: Verda) -> None:
    known = token(verda_api)
    verda_api.capacity(0, "1V100.6V", market="spot")
    for name in ("is_spot", "isSpot"):
        for spot in ("true", "false"):
            got = asked(verda_api, "GET", "/instance-availability/1V100.6V", known, params={name: spot})
            assert got.text == ("false" if spot == "true" else "true")
    listed = asked(verda_api, "GET", "/instance-availability", known, params={"location_code": "FIN-01"}).json()
    assert [each["location_code"] for each in listed] == ["FIN-01"]
    assert "1V100.6V" in listed[0]["availabilities"]


def test_what_is_switched_off_is_billed_on(verda: Verda) -> None:
    id_ = deployed(verda, token(verda))
    verda.wait(lambda: verda.rentals[id_].state == "running")
    machine = verda.rentals[id_].machine
    assert machine is not None
    try:
        machine.run("shutdown -P now")
    except (subprocess.CalledProcessError, RuntimeError):
        machine.wait_off()
    verda.wait(lambda: verda.rentals[id_].state == "offline")
    assert verda.count()["instances"] == 1


@pytest.mark.parametrize(
    ("told", "left"),
    [
        ({"volume_ids": [], "delete_permanently": True}, {"volumes": 1}),
        ({"volume_ids": None}, {}),  # in the trash
        ({"volume_ids": ["os"]}, {}),
        ({"volume_ids": ["os"], "delete_permanently": True}, {}),
    ],
)
def test_a_disk_that_is_not_named_stays(verda_api: Verda, told: dict[str, Any], left: dict[str, int]) -> None:
    known = token(verda_api)
    id_ = deployed(verda_api, known)
    disk = asked(verda_api, "GET", f"/instances/{id_}", known).json()["os_volume_id"]
    if told["volume_ids"]:
        told = {**told, "volume_ids": [disk]}
    done = asked(verda_api, "PUT", "/instances", known, json={"id": id_, "action": "delete", **told})
    assert done.status_code == 204
    verda_api.wait(lambda: id_ not in verda_api.rentals)
    assert {name: n for name, n in verda_api.left().items() if name != "ssh keys"} == left
    trash = [each["id"] for each in asked(verda_api, "GET", "/volumes/trash", known).json()]
    assert trash == ([disk] if not left and not told.get("delete_permanently") else [])


def test_ends_are_refused_in_some_states_and_several_have_an_outcome_each(verda_api: Verda) -> None:
    known = token(verda_api)
    one, two = deployed(verda_api, known), deployed(verda_api, known, is_spot=True)
    verda_api.preempt(two)
    alone = asked(verda_api, "PUT", "/instances", known, json={"id": [two], "action": "delete"})
    assert (alone.status_code, alone.json()["message"]) == (403, "Can't discontinue a discontinued instance")
    both = asked(verda_api, "PUT", "/instances", known, json={"id": [one, two, "x"], "action": "delete"})
    assert both.status_code == 207
    assert [each["statusCode"] for each in both.json()] == [200, 403, 404]


def test_tags_are_few_and_short_in_lower_case_and_not_there_twice(verda_api: Verda) -> None:
    known = token(verda_api)
    id_ = deployed(verda_api, known, tags=[{"key": "Skypool-Pool", "value": "a"}])
    assert list(verda_api.rentals[id_].tags) == ["skypool-pool"]
    at = f"/instances/{id_}/tags"
    assert asked(verda_api, "POST", at, known, json={"key": "skypool-pool", "value": "b"}).status_code == 409
    assert asked(verda_api, "POST", at, known, json={"key": "b", "value": "x" * 128}).status_code == 400
    statuses = [asked(verda_api, "POST", at, known, json={"key": f"k{n}", "value": ""}).status_code for n in range(10)]
    assert statuses == [201] * 9 + [400]
    assert [asked(verda_api, "DELETE", f"{at}/k0", known).status_code for _ in range(2)] == [204, 404]


def test_without_funds_or_stock_nothing_is_deployed(verda_api: Verda) -> None:
    known = token(verda_api)
    verda_api.capacity(0)
    with pytest.raises(
        AssertionError, match=r"Not enough resources to deploy a 1 GPU instance type 1V100\.6V in FIN-01"
    ):
        deployed(verda_api, known)
    verda_api.balance = 0.0
    with pytest.raises(AssertionError, match="insufficient_funds"):
        deployed(verda_api, known)
    assert verda_api.count()["instances"] == verda_api.count()["volumes"] == 0
