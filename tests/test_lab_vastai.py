"""The Vast.ai of the lab: every point in which it is to be like the real one, as a plain client sees it."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
import requests

from tests.lab.vastai import KEY, VastAI


def ask(world: VastAI, method: str, path: str, key: str = KEY, **given: Any) -> tuple[int, Any]:
    """The status and the body of an answer."""
    got = requests.request(method, world.url + path, headers={"Authorization": f"Bearer {key}"}, timeout=10, **given)
    return got.status_code, got.json()


def rent(world: VastAI, ask_: int = 9_000_010, **more: Any) -> str:
    body = {"client_id": "me", "image": "python:3.11-slim", "disk": 10, "label": "mine", **more}
    status, told = ask(world, "PUT", f"/api/v0/asks/{ask_}/", json=body)
    assert status == 200, told
    return str(told["new_contract"])


def show(world: VastAI, id: str) -> Any:
    return ask(world, "GET", f"/api/v0/instances/{id}/", params={"owner": "me"})[1]["instances"]


def test_a_search_knows_operators_order_and_the_disk_that_is_charged(vastai_api: VastAI) -> None:
    body: dict[str, Any] = {"gpu_name": {"in": ["RTX 4090", "RTX 3090"]}, "num_gpus": {"gte": "2"}, "limit": 5}
    body |= {"order": [["dph_total", "asc"]], "verified": {"eq": True}, "allocated_storage": 725}
    found = ask(vastai_api, "POST", "/api/v0/bundles/", json=body)[1]["offers"]
    assert len(found) == 5
    assert found == sorted(found, key=lambda each: each["dph_total"])
    assert all(each["num_gpus"] >= 2 and each["gpu_name"] in ("RTX 4090", "RTX 3090") for each in found)
    assert found[0]["dph_total"] - found[0]["dph_base"] == pytest.approx(0.2 * 725 / 720)
    [bid] = ask(vastai_api, "PUT", "/api/v0/search/asks/", json={"q": {"id": {"eq": found[0]["id"]}, "type": "bid"}})[
        1
    ]["offers"]
    assert (bid["dph_base"], bid["is_bid"]) == (bid["min_bid"], True)
    status, refused = ask(vastai_api, "POST", "/api/v0/bundles/", json={"gpu_nmae": {"eq": "H100"}})
    assert (status, refused["error"]) == (400, "invalid_args")


def test_an_ask_can_be_taken_once(vastai_api: VastAI) -> None:
    rent(vastai_api)
    body = {"client_id": "me", "image": "x"}
    for number in (9_000_010, 1):
        status, refused = ask(vastai_api, "PUT", f"/api/v0/asks/{number}/", json=body)
        words = f"error 404/3603: no_such_ask Instance type by id {number} is not available."
        assert (status, refused) == (404, {"success": False, "error": "no_such_ask", "msg": words})


def test_a_bid_that_is_too_low_leaves_a_stopped_contract_behind(vastai_api: VastAI) -> None:
    body = {"client_id": "me", "image": "x", "price": 0.001, "cancel_unavail": True}
    status, refused = ask(vastai_api, "PUT", "/api/v0/asks/9000010/", json=body)
    assert (status, refused["success"], refused["error"]) == (400, False, "invalid_price")
    assert show(vastai_api, str(refused["new_contract"]))["intended_status"] == "stopped"
    assert vastai_api.count() == {"instances": 1}


def test_an_instance_is_an_object_called_instances_and_null_when_it_is_gone(vastai_api: VastAI) -> None:
    id = rent(vastai_api, env={"-p 22:22": "1"})
    assert show(vastai_api, id)["actual_status"] in (None, "created", "loading")  # by how soon we ask
    vastai_api.wait(lambda: show(vastai_api, id)["actual_status"] == "running")
    shown = show(vastai_api, id)
    assert shown["ports"]["22/tcp"][0]["HostPort"] == "40123"
    assert shown["label"] == "mine"
    assert ask(vastai_api, "PUT", f"/api/v0/instances/{id}/", json={"label": "other"})[0] == 200
    assert show(vastai_api, id)["label"] == "other"
    assert ask(vastai_api, "DELETE", f"/api/v0/instances/{id}/", json={})[1] == {"success": True}
    vastai_api.wait(lambda: show(vastai_api, id) is None)
    status, refused = ask(vastai_api, "DELETE", f"/api/v0/instances/{id}/", json={})
    assert (status, refused["error"]) == (404, "no_such_instance")


def test_the_list_has_pages_of_25_at_most(vastai_api: VastAI) -> None:
    made = {int(rent(vastai_api, 9_000_001 + number)) for number in range(26)}
    _, first = ask(vastai_api, "GET", "/api/v1/instances/")
    _, second = ask(vastai_api, "GET", "/api/v1/instances/", params={"after_token": first["next_token"]})
    assert (len(first["instances"]), len(second["instances"]), second["next_token"]) == (25, 1, None)
    assert {each["id"] for each in first["instances"] + second["instances"]} == made
    assert ask(vastai_api, "GET", "/api/v1/instances/", params={"limit": 26})[0] == 400


@pytest.mark.parametrize(
    ("more", "what"),
    [({"label": "x" * 257}, "label"), ({"args": ["x" * 4097]}, "args"), ({"env": {"A": "x" * 32768}}, "env"),
     ({"runtype": "vm"}, "runtype"), ({"price": 200}, "128")],
)  # fmt: skip
def test_what_is_too_long_or_unknown_is_refused(vastai_api: VastAI, more: dict[str, Any], what: str) -> None:
    body = {"client_id": "me", "image": "x", **more}
    status, refused = ask(vastai_api, "PUT", "/api/v0/asks/9000010/", json=body)
    assert status == 400
    assert what in refused["msg"]


def test_an_outbid_instance_only_stands_still_and_is_billed_on(vastai_api: VastAI) -> None:
    id = rent(vastai_api, price=1.0)
    vastai_api.outbid(id)
    shown = show(vastai_api, id)
    assert {shown[name] for name in ("cur_state", "next_state", "intended_status")} == {"stopped"}
    assert vastai_api.asks[9_000_010]["min_bid"] == pytest.approx(1.1)
    assert vastai_api.count() == {"instances": 1}


def test_a_containers_key_reaches_its_own_instance_alone(vastai_api: VastAI) -> None:
    first, second = rent(vastai_api), rent(vastai_api, 9_000_011)
    key = vastai_api.rentals[first].key
    assert ask(vastai_api, "GET", "/api/v1/instances/", key)[0] == 403
    assert ask(vastai_api, "DELETE", f"/api/v0/instances/{second}/", key, json={})[0] == 403
    assert ask(vastai_api, "PUT", "/api/v0/asks/9000012/", key, json={"client_id": "me", "image": "x"})[0] == 403
    assert ask(vastai_api, "DELETE", f"/api/v0/instances/{first}/", key, json={})[0] == 200
    vastai_api.wait(lambda: not vastai_api.rentals[first].living)
    assert ask(vastai_api, "GET", f"/api/v0/instances/{second}/", key)[0] == 401
    assert ask(vastai_api, "GET", "/api/v1/instances/", "another")[0] == 401


def test_calls_that_come_too_often_and_searches_beyond_the_days_are_429_with_different_words(
    vastai_api: VastAI,
) -> None:
    vastai_api.limits = {"DELETE *": (1, 1 / 3.0)}
    ids = [rent(vastai_api, 9_000_010 + number) for number in range(2)]
    told = [ask(vastai_api, "DELETE", f"/api/v0/instances/{id}/", json={}) for id in ids]
    assert [status for status, _ in told] == [200, 429]
    assert told[1][1]["msg"] == "API requests too frequent endpoint threshold=3"
    vastai_api.quota = 0
    status, refused = ask(vastai_api, "POST", "/api/v0/bundles/", json={})
    assert (status, refused["error"]) == (429, "search_quota_exceeded")


def test_a_container_runs_what_it_is_told_with_its_own_id_key_and_ports(vastai: VastAI) -> None:
    script = "mkdir -p /run/sshd; env > /root/env; exec /usr/sbin/sshd -D -e -p 22"
    told: dict[str, Any] = {
        "onstart": "sh",
        "args": ["-c", script],
        "runtype": "args",
        "env": {"-p 22:22": "1", "WORD": "two words"},
    }
    id = rent(vastai, **told)
    vastai.wait(lambda: show(vastai, id)["actual_status"] == "running", 30)
    shown, machine = show(vastai, id), vastai.rentals[id].machine
    assert machine is not None
    vastai.wait(lambda: machine.path("/root/env").exists() and machine.path("/root/env").read_text(), 20)
    env = dict(line.split("=", 1) for line in machine.path("/root/env").read_text().splitlines())
    port = shown["ports"]["22/tcp"][0]["HostPort"]
    assert (env["CONTAINER_ID"], env["VAST_TCP_PORT_22"], env["WORD"]) == (id, port, "two words")
    assert env["CONTAINER_API_KEY"] == vastai.rentals[id].key
    assert env["PUBLIC_IPADDR"] == shown["public_ipaddr"].strip()
    scan = ["ssh-keyscan", "-T", "10", "-p", port, env["PUBLIC_IPADDR"]]
    vastai.wait(lambda: "ssh-ed25519" in subprocess.run(scan, capture_output=True, text=True).stdout, 20)
    machine.kill()
    vastai.wait(lambda: show(vastai, id)["actual_status"] == "exited", 20)
    assert vastai.count() == {"instances": 1}, "a container that has exited is billed on"


def scanned(shown: Any) -> str:
    """The host key that its port of the proxy shows, "" for none."""
    told = ["ssh-keyscan", "-T", "3", "-t", "ed25519", "-p", str(shown["ssh_port"]), shown["ssh_host"]]
    lines = subprocess.run(told, capture_output=True, text=True).stdout.splitlines()
    return next((line.split(" ", 1)[1] for line in lines if " ssh-ed25519 " in line), "")


def test_the_proxy_leads_to_an_sshd_of_vast_ais_own_making_in_the_container_and_to_nothing_else(vastai: VastAI) -> None:
    assert vastai.lab is not None
    vastai.key = vastai.lab.public_key
    vastai.asks[9_000_010]["direct_port_count"] = 0
    told: dict[str, Any] = {"env": {"-p 22:22": "1", "WORD": "a word"}}
    one = rent(vastai, **told, runtype="ssh_proxy", onstart="env > /root/env; touch ~/.no_auto_tmux")
    two = rent(vastai, 9_000_011, **told, runtype="args", onstart="sh", args=["-c", "exec sleep 1000"])
    vastai.wait(lambda: all(show(vastai, each)["actual_status"] == "running" for each in (one, two)), 30)
    shown, machine = show(vastai, one), vastai.rentals[one].machine
    assert machine is not None
    assert shown["ports"] == {}
    vastai.wait(lambda: scanned(shown), 20)
    vastai.wait(lambda: machine.path("/root/.no_auto_tmux").exists(), 20)
    own = machine.path("/etc/ssh/ssh_host_ed25519_key.pub").read_text()
    assert scanned(shown) == " ".join(own.split()[:2])
    assert f"CONTAINER_API_KEY={vastai.rentals[one].key}" in machine.path("/root/env").read_text()
    options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "BatchMode=yes"]
    argv = ["ssh", *options, "-i", str(vastai.lab.client_key), "-p", str(shown["ssh_port"])]
    login = subprocess.run([*argv, f"root@{shown['ssh_host']}", "echo here"], capture_output=True, text=True)
    assert login.stdout == "here\n", login
    assert "Welcome to vast.ai" in login.stderr
    assert scanned(show(vastai, two)) == ""


@pytest.mark.parametrize(("flaw", "status", "words"), [("oci", "created", "OCI runtime"), ("offline", "offline", "")])
def test_machines_fail_as_strangers_machines_do(vastai_api: VastAI, flaw: str, status: str, words: str) -> None:
    vastai_api.flaws[vastai_api.asks[9_000_010]["machine_id"]] = flaw
    id = rent(vastai_api)
    vastai_api.wait(lambda: show(vastai_api, id)["actual_status"] == status)
    assert words in show(vastai_api, id)["status_msg"]


# --- what the `vastai` command does --------------------------------------------------------------------------
# Paths and fields are those of vastai 1.9.1 and of https://docs.vast.ai/api-reference/openapi.yaml (read 2026-11-24).


def test_a_search_needs_no_key_but_not_a_wrong_one(vastai_api: VastAI) -> None:
    body = {"gpu_name": {"eq": "RTX 4090"}, "limit": 1}
    answer = requests.post(f"{vastai_api.url}/api/v0/bundles/", json=body, timeout=10)
    assert (answer.status_code, len(answer.json()["offers"])) == (200, 1)
    assert ask(vastai_api, "POST", "/api/v0/bundles/", "wrong", json=body)[0] == 401
    assert requests.get(f"{vastai_api.url}/api/v1/instances/", timeout=10).status_code == 401


def test_keys_for_ssh_are_made_listed_changed_and_deleted(vastai_api: VastAI) -> None:
    status, made = ask(vastai_api, "POST", "/api/v0/ssh/", json={"ssh_key": "ssh-ed25519 AAAA me"})
    assert (status, made["key"]["public_key"]) == (200, "ssh-ed25519 AAAA me")
    id = made["key"]["id"]
    assert [each["key"] for each in ask(vastai_api, "GET", "/api/v0/ssh/")[1]] == ["ssh-ed25519 AAAA me"]
    assert ask(vastai_api, "PUT", f"/api/v0/ssh/{id}/", json={"id": id, "ssh_key": "ssh-rsa B"})[0] == 200
    assert ask(vastai_api, "POST", "/api/v0/ssh/", json={"ssh_key": "no key"})[1]["error"] == "no_ssh_key"
    assert ask(vastai_api, "DELETE", f"/api/v0/ssh/{id}/", json={})[1] == {"success": True}
    assert ask(vastai_api, "DELETE", f"/api/v0/ssh/{id}/", json={})[0] == 400
    assert ask(vastai_api, "GET", "/api/v0/ssh/")[1] == []


def test_a_bid_is_changed_and_below_the_least_one_the_instance_stands_still(vastai_api: VastAI) -> None:
    own, spot = rent(vastai_api), rent(vastai_api, 9_000_012, price=5.0)
    path = "/api/v0/instances/bid_price"
    assert ask(vastai_api, "PUT", f"{path}/{own}/", json={"client_id": "me", "price": 1})[1]["error"] == "invalid_args"
    assert ask(vastai_api, "PUT", f"{path}/{spot}/", json={"client_id": "me", "price": 33})[0] == 400
    assert ask(vastai_api, "PUT", f"{path}/{spot}/", json={"client_id": "me", "price": 6})[0] == 200
    assert vastai_api.rentals[spot].body["price"] == 6
    assert ask(vastai_api, "PUT", f"{path}/{spot}/", json={"client_id": "me", "price": 0.001})[0] == 200
    assert show(vastai_api, spot)["intended_status"] == "stopped"
    assert ask(vastai_api, "PUT", f"{path}/1/", json={"client_id": "me", "price": 1})[0] == 404


def test_charges_are_told_by_contract_and_only_for_a_span_of_days(vastai_api: VastAI) -> None:
    began = vastai_api.clock.now()
    id = rent(vastai_api, disk=72)
    vastai_api.clock.advance(3600)
    assert ask(vastai_api, "DELETE", f"/api/v0/instances/{id}/", json={})[0] == 200
    vastai_api.wait(lambda: not vastai_api.rentals[id].living)
    hours = (vastai_api.clock.now() - began) / 3600  # a little more than it lived: the lab's clock never stands still
    vastai_api.clock.advance(3600)
    now = vastai_api.clock.now()
    wanted = {"day": {"gte": int(now - 9000), "lte": int(now)}, "type": {"in": ["instance"]}}
    told = ask(vastai_api, "GET", "/api/v0/charges/", params={"select_filters": json.dumps(wanted)})[1]
    [charge] = told["results"]
    ask_ = vastai_api.asks[9_000_010]
    assert charge["source"] == f"instance-{id}"
    an_hour = ask_["dph_base"] + 72 * 0.2 / 720
    traffic = 10 * ask_["inet_down_cost"] + ask_["inet_up_cost"]
    assert an_hour + traffic - 0.001 <= charge["amount"] <= an_hour * hours + traffic + 0.001
    assert {each["type"] for each in charge["items"]} == {"gpu", "disk", "bwd", "bwu"}
    assert ask(vastai_api, "GET", "/api/v0/users/current/")[1]["credit"] == pytest.approx(
        100 - charge["amount"], abs=1e-3
    )
    early = json.dumps({"day": {"gte": 0, "lte": 1}})
    assert ask(vastai_api, "GET", "/api/v0/charges/", params={"select_filters": early})[1]["results"] == []
    assert ask(vastai_api, "GET", "/api/v0/charges/", params={"select_filters": "{}"})[0] == 400
    assert ask(vastai_api, "GET", "/api/v1/invoices/", params={"select_filters": "{}"})[1]["results"] == []
    old = {"owner": "me", "sdate": now - 9000, "edate": now, "inc_charges": "true"}
    rows = ask(vastai_api, "GET", "/api/v0/users/me/invoices", params=old)[1]["invoices"]
    assert sum(each["amount"] for each in rows) == pytest.approx(charge["amount"], abs=0.002)


def test_a_container_is_rebooted_runs_commands_and_tells_its_log(vastai: VastAI) -> None:
    script = "echo started >> /starts; exec sleep 1000"
    id = rent(vastai, onstart="sh", args=["-c", script], runtype="args", env={})
    vastai.wait(lambda: show(vastai, id)["actual_status"] == "running", 30)

    def printed(action: str, body: Any) -> str:
        url = ask(vastai, "PUT", f"/api/v0/instances/{action}/{id}/", json=body)[1]["result_url"]
        vastai.wait(lambda: requests.get(url, timeout=10).status_code == 200, 20)
        return requests.get(url, timeout=10).text

    vastai.wait(lambda: printed("command", {"command": "cat /starts"}) == "started\n", 20)
    assert ask(vastai, "PUT", f"/api/v0/instances/reboot/{id}/", json={}) == (200, {"success": True})
    vastai.wait(lambda: show(vastai, id)["actual_status"] == "running", 30)
    vastai.wait(lambda: printed("command", {"command": "cat /starts"}) == "started\nstarted\n", 20)
    assert "No such file" in printed("command", {"command": "ls /nowhere"})
    assert printed("request_logs", {"tail": "1", "filter": "x" * 99}) == ""
    assert ask(vastai, "PUT", f"/api/v0/instances/command/{id}/", json={"command": "x" * 513})[0] == 400
    assert ask(vastai, "PUT", "/api/v0/instances/reboot/1/", json={})[0] == 404
