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


# --- what Verda's SDKs do ------------------------------------------------------------------------------------
# The Python SDK (verda 1.25.0) and https://github.com/verda-cloud/verdacloud-sdk-go, both read 2026-11-24.


def test_an_instance_may_have_no_script_and_an_image_by_its_id(verda_api: Verda) -> None:
    """The Python SDK sends null for what is not asked for, and says that an image is meant by its type or its id."""
    known = token(verda_api)
    images = asked(verda_api, "GET", "/images", known, params={"instance_type": "1V100.6V"}).json()
    [id_] = [each["id"] for each in images if each["image_type"] == "ubuntu-22.04-cuda-12.4-docker"]
    nothing: dict[str, Any] = {
        "startup_script_id": None,
        "coupon": None,
        "os_volume": None,
        "volumes": [],
        "existing_volumes": [],
    }
    made = deployed(verda_api, known, image=id_, **nothing)
    assert asked(verda_api, "GET", f"/instances/{made}", known).json()["startup_script_id"] is None


@pytest.mark.parametrize(("path", "field", "body"), [("ssh-keys", "keys", "key"), ("sshkeys", "keys", "key"),
                                                     ("scripts", "scripts", "script")])  # fmt: skip
def test_several_keys_or_scripts_are_deleted_at_once_or_none(
    verda_api: Verda, path: str, field: str, body: str
) -> None:
    known = token(verda_api)
    ids = [asked(verda_api, "POST", f"/{path}", known, json={"name": n, body: "x"}).text for n in "abc"]
    assert asked(verda_api, "GET", f"/{path}/{ids[0]}", known).json()[0]["name"] == "a"
    some = asked(verda_api, "DELETE", f"/{path}", known, json={field: [ids[0], "nobody"]})
    assert (some.status_code, len(asked(verda_api, "GET", f"/{path}", known).json())) == (404, 3)
    assert asked(verda_api, "DELETE", f"/{path}", known, json={field: ids[:2]}).status_code == 200
    assert [each["id"] for each in asked(verda_api, "GET", f"/{path}", known).json()] == ids[2:]


def test_a_volume_is_made_attached_to_what_is_off_cloned_and_thrown_away(verda_api: Verda) -> None:
    known = token(verda_api)
    id_ = deployed(verda_api, known)
    verda_api.wait(lambda: verda_api.rentals[id_].state == "running")
    told = {"type": "NVMe", "name": "data", "size": 100, "instance_id": None, "location_code": "FIN-01"}
    made = asked(verda_api, "POST", "/volumes", known, json=told)
    assert (made.status_code, made.headers["Content-Type"]) == (202, "text/plain")

    def act(action: str, **more: Any) -> requests.Response:
        return asked(verda_api, "PUT", "/volumes", known, json={"id": [made.text], "action": action, **more})

    assert act("attach", instance_id=id_).json()["code"] == "forbidden_action"
    off = {"id": [id_], "action": "shutdown", "volume_ids": None}
    assert asked(verda_api, "PUT", "/instances", known, json=off).status_code == 204
    assert act("attach", instance_id=id_).status_code == 202
    assert asked(verda_api, "GET", f"/volumes/{made.text}", known).json()["status"] == "attached"
    assert act("delete").json()["code"] == "forbidden_action"
    assert [act("detach").status_code, act("resize", size=200).status_code] == [202, 202]
    assert act("resize", size=100).json()["code"] == "invalid_request"
    [clone] = act("clone", name="copy").json()
    assert asked(verda_api, "GET", f"/volumes/{clone}", known).json()["size"] == 200
    assert act("delete", is_permanent=True).status_code == 202
    there = asked(verda_api, "GET", "/volumes", known, params={"status": "detached"}).json()
    assert [each["id"] for each in there] == [clone]


def test_clusters_are_listed_made_and_discontinued(verda_api: Verda) -> None:
    known = token(verda_api)
    kinds = [each["cluster_type"] for each in asked(verda_api, "GET", "/cluster-types", known).json()]
    [place] = asked(verda_api, "GET", "/cluster-availability", known).json()
    assert place["availabilities"] == kinds
    assert asked(verda_api, "GET", f"/cluster-availability/{kinds[0]}", known).text == "true"
    [image] = asked(verda_api, "GET", "/images/cluster", known).json()
    told = {"cluster_type": kinds[0], "image": image["image_type"], "hostname": "c", "description": "d",
            "shared_volume": {"name": "v", "size": 1000}}  # fmt: skip
    made = asked(verda_api, "POST", "/clusters", known, json=told)
    assert (made.status_code, verda_api.left()) == (202, {"clusters": 1})
    assert len(asked(verda_api, "GET", f"/clusters/{made.json()['id']}", known).json()["worker_nodes"]) == 2
    end = {"actions": [{"id": made.json()["id"], "action": "discontinue"}]}
    assert asked(verda_api, "PUT", "/clusters", known, json=end).status_code == 204
    assert (asked(verda_api, "GET", "/clusters", known).json(), verda_api.left()) == ([], {})


@pytest.mark.parametrize(
    "path",
    ["/long-term/periods/instances", "/long-term/periods/clusters", "/container-types", "/serverless-compute-resources",
     "/container-deployments", "/job-deployments", "/secrets", "/file-secrets", "/container-registry-credentials"],
)  # fmt: skip
def test_what_else_the_sdk_lists_is_there(verda_api: Verda, path: str) -> None:
    assert isinstance(asked(verda_api, "GET", path, token(verda_api)).json(), list)


def test_the_balance_is_charged_ten_minutes_ahead_and_what_was_not_used_comes_back(verda_api: Verda) -> None:
    known = token(verda_api)
    id_ = deployed(verda_api, known)
    usd = verda_api.rentals[id_].usd

    def spent() -> float:
        return 100.0 - float(asked(verda_api, "GET", "/balance", known).json()["amount"])

    assert spent() == pytest.approx(usd / 6)
    verda_api.clock.advance(900)
    assert spent() == pytest.approx(usd / 3)
    assert asked(verda_api, "PUT", "/instances", known, json={"id": id_, "action": "delete"}).status_code == 204
    verda_api.wait(lambda: id_ not in verda_api.rentals)
    assert spent() == pytest.approx(usd / 3)
    verda_api.clock.advance(600)
    assert spent() == pytest.approx(usd / 4, rel=0.05)
