"""The lab's RunPod keeps the oddities of the real one: by a client that is not the driver."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import requests

from tests.lab.runpod import RunPod, _command

CREATE = "mutation($input: PodFindAndDeployOnDemandInput!) { podFindAndDeployOnDemand(input: $input) { id } }"
LOOK = "query($id: String!) { pod(input: {podId: $id}) { desiredStatus runtime { ports { privatePort isIpPublic } } } }"
END = "mutation($id: String!) { podTerminate(input: {podId: $id}) }"


def post(world: RunPod, query: str, key: str = "", **variables: Any) -> requests.Response:
    headers = {"Authorization": f"Bearer {key or world.key}"}
    asked = {"query": query, "variables": variables}
    return requests.post(f"{world.url}/graphql", json=asked, headers=headers, timeout=10)


def create(world: RunPod, **asked: Any) -> str:
    usual = {"name": "x", "imageName": "ubuntu", "gpuTypeId": "NVIDIA A40", "gpuCount": 1, "dockerArgs": "sleep 60"}
    made = post(world, CREATE, input={**usual, "cloudType": "SECURE", "ports": "22/tcp,8888/http", **asked}).json()
    return str(made["data"]["podFindAndDeployOnDemand"]["id"])


def test_errors_come_with_http_200_and_what_is_no_graphql_with_400(runpod_api: RunPod) -> None:
    refused = post(runpod_api, END, id="nobody")
    assert (refused.status_code, refused.json()["data"]) == (200, {"podTerminate": None})
    assert refused.json()["errors"][0]["message"] == "pod not found to terminate"
    assert post(runpod_api, "query { nothing }").status_code == 400
    assert post(runpod_api, CREATE, input={"objectMounts": None}).status_code == 400
    assert post(runpod_api, END, key="stranger", id="nobody").status_code == 401


def test_what_is_not_in_stock_has_null_for_its_prices(runpod_api: RunPod) -> None:
    query = 'query($p: GpuLowestPriceInput) { gpuTypes(input: {id: "NVIDIA A40"}) { lowestPrice(input: $p) %s } }'
    query %= "{ stockStatus uninterruptablePrice minimumBidPrice }"
    runpod_api.capacity(0, "NVIDIA A40", "CA-MTL-1")
    for place, price in (("CA-MTL-1", None), ("EU-RO-1", 0.35)):
        told = post(runpod_api, query, p={"gpuCount": 4, "secureCloud": True, "dataCenterId": place}).json()
        assert told["data"]["gpuTypes"][0]["lowestPrice"]["uninterruptablePrice"] == price


def test_a_pod_is_running_before_it_has_a_runtime_and_only_its_own_ports_are_public(runpod_api: RunPod) -> None:
    runpod_api.delays.starting = 30
    id = create(runpod_api)
    assert post(runpod_api, LOOK, id=id).json()["data"]["pod"] == {"desiredStatus": "RUNNING", "runtime": None}
    runpod_api.clock.advance(31)
    ports = post(runpod_api, LOOK, id=id).json()["data"]["pod"]["runtime"]["ports"]
    assert {(each["privatePort"], each["isIpPublic"]) for each in ports} == {(19123, False), (22, True)}
    assert post(runpod_api, LOOK, id="nobody").json()["data"] == {"pod": None}


def test_a_pods_own_key_ends_that_pod_and_does_nothing_else(runpod_api: RunPod) -> None:
    one, other = create(runpod_api), create(runpod_api)
    key = runpod_api.rentals[one].key
    for query, given in ((END, {"id": other}), ("{ myself { id } }", {}), (CREATE, {"input": {}})):
        assert post(runpod_api, query, key=key, **given).json()["errors"][0]["extensions"]["code"] == "FORBIDDEN"
    assert post(runpod_api, END, key=key, id=one).json() == {"data": {"podTerminate": None}}
    assert [*runpod_api.rentals] == [other]


def test_rest_knows_names_and_says_when_it_is_asked_too_often(runpod_api: RunPod) -> None:
    id, headers = create(runpod_api), {"Authorization": f"Bearer {runpod_api.key}"}
    runpod_api.limits = {"PATCH *": (2, 0.001)}
    for name, status in (("y", 200), ("", 422), ("z", 429)):
        told = requests.patch(f"{runpod_api.url}/v2/pods/{id}", json={"name": name}, headers=headers, timeout=10)
        assert told.status_code == status
    assert told.headers["Retry-After"] == "1"
    assert runpod_api.rentals[id].name == "y"


def test_an_outbid_pod_has_exited_and_is_there_until_it_is_terminated(runpod_api: RunPod) -> None:
    spot = CREATE.replace("FindAndDeployOnDemand", "RentInterruptable")
    asked = {"imageName": "ubuntu", "gpuTypeId": "NVIDIA A40", "gpuCount": 1, "dockerArgs": "sleep 60"}
    told = post(runpod_api, spot, input={**asked, "bidPerGpu": 0.25}).json()
    id = told["data"]["podRentInterruptable"]["id"]
    runpod_api.price("NVIDIA A40", 0.35, 0.26)
    assert post(runpod_api, LOOK, id=id).json()["data"]["pod"] == {"desiredStatus": "EXITED", "runtime": None}
    assert runpod_api.count()["instances"] == 1
    post(runpod_api, END, id=id)
    assert runpod_api.left() == {}


def test_a_container_knows_itself_and_is_started_anew_when_its_command_ends(runpod: RunPod) -> None:
    command = "sh -c 'env | grep RUNPOD > /seen; echo once more >> /starts; [ $(wc -l < /starts) = 1 ] || sleep 60'"
    id = create(runpod, dockerArgs=command, env=[{"key": "A", "value": "b"}])
    runpod.wait(lambda: runpod.rentals[id].starts == 2 and runpod.rentals[id].runtime is not None, 20)
    pod = runpod.rentals[id]
    assert pod.machine is not None
    seen = dict(line.split("=", 1) for line in pod.machine.path("/seen").read_text().splitlines())
    assert (seen["RUNPOD_POD_ID"], seen["RUNPOD_API_KEY"], seen["RUNPOD_DC_ID"]) == (id, pod.key, "CA-MTL-1")
    with socket.create_connection((seen["RUNPOD_PUBLIC_IP"], int(seen["RUNPOD_TCP_PORT_22"])), timeout=5):
        pass  # mapped, though nobody listens in there


POD = {"name": "x", "image": "ubuntu", "gpu": {"id": "NVIDIA A40"}, "args": "sleep 60", "ports": ["22/tcp"]}


def ask(world: RunPod, method: str, path: str, body: Any = None, key: str = "", **query: Any) -> requests.Response:
    headers = {"Authorization": f"Bearer {key or world.key}"}
    return requests.request(method, f"{world.url}/v2{path}", json=body, params=query, headers=headers, timeout=10)


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"cpu": {"id": "cpu3c", "vcpuCount": 2}}, 400, "exactly one of gpu or cpu"),
        ({"gpu": {"id": "NVIDIA A40", "count": 9}}, 400, "no longer any instances"),
        ({"gpu": {"id": "A40"}}, 400, "no longer any instances"),
        ({"gpu": {"id": "NVIDIA A40", "minCudaVersion": "99.0"}}, 400, "no longer any instances"),
        ({"dataCenterIds": ["XX-1"]}, 400, "no longer any instances"),
        ({"mounts": {"network": [{"volumeId": "other", "path": "/w"}]}}, 400, "no longer any instances"),
        ({"env": {f"V{n}": "x" for n in range(51)}}, 400, "environment variables"),
    ],
)
def test_what_breaks_a_rule_and_what_is_not_in_stock_are_both_bad_requests(
    runpod_api: RunPod, change: dict[str, Any], status: int, says: str
) -> None:
    told = ask(runpod_api, "POST", "/pods", POD | change)
    assert (told.status_code, told.json()["status"]) == (status, status)
    assert says in told.json()["detail"]


@pytest.mark.parametrize(
    ("cpu", "disk", "status"),
    [
        ({"id": "cpu3c", "vcpuCount": 2}, 20, 201),
        ({"id": "cpu3c", "vcpuCount": 2}, 21, 400),
        ({"id": "cpu5c", "vcpuCount": 2}, 30, 201),
        ({"id": "cpu3c", "vcpuCount": 3}, 20, 400),
        ({"id": "cpu9c", "vcpuCount": 2}, 20, 400),
        ({"id": "cpu3c", "vcpuCount": 1}, 10, 422),
        ({"id": "cpu3c", "vcpuCount": 2, "memory": 4}, 20, 422),
    ],
)
def test_cpu_pods_have_the_sizes_of_their_flavor(
    runpod_api: RunPod, cpu: dict[str, Any], disk: int, status: int
) -> None:
    body = {key: value for key, value in POD.items() if key != "gpu"} | {"cpu": cpu, "disk": disk}
    assert ask(runpod_api, "POST", "/pods", body).status_code == status


def test_the_catalogue_tells_stock_only_to_who_says_for_what(runpod_api: RunPod) -> None:
    assert "availability" not in ask(runpod_api, "GET", "/catalog/gpus").json()["gpus"][0]
    queries: list[dict[str, Any]] = [{"include": "AVAILABILITY"}, {"product": "POD"}, {"count": 2}]
    for query in queries:
        assert ask(runpod_api, "GET", "/catalog/gpus", **query).status_code == 400
    assert ask(runpod_api, "GET", "/catalog/gpus", include="STOCK", product="POD").status_code == 422
    assert ask(runpod_api, "GET", "/catalog/gpus", gpus="A40").status_code == 422
    runpod_api.capacity(0, "NVIDIA A40", "CA-MTL-1")
    told = ask(runpod_api, "GET", "/catalog/gpus", include="AVAILABILITY", product="POD", count=4).json()["gpus"]
    [a40] = [each for each in told if each["id"] == "NVIDIA A40"]
    assert [each["id"] for each in a40["dataCenters"]] == ["EU-RO-1", "US-TX-3"]


def test_a_pod_tells_where_its_ssh_is_once_it_runs_and_is_gone_when_it_is_deleted(runpod_api: RunPod) -> None:
    runpod_api.delays.starting = 30
    id = ask(runpod_api, "POST", "/pods", POD).json()["id"]
    seen = ask(runpod_api, "GET", f"/pods/{id}").json()
    assert (seen["status"], seen["ssh"]["direct"], seen["runtime"]) == ("STARTING", None, None)
    runpod_api.clock.advance(31)
    seen = ask(runpod_api, "GET", f"/pods/{id}").json()
    assert (seen["status"], seen["ssh"]["direct"]["port"], seen["cost"]) == ("RUNNING", 10022, 0.35)
    other = ask(runpod_api, "POST", "/pods", POD).json()["id"]
    key = runpod_api.rentals[id].key
    for method, path, status in (
        ("GET", "/pods", 403),
        ("DELETE", f"/pods/{other}", 403),
        ("DELETE", f"/pods/{id}", 204),
    ):
        assert ask(runpod_api, method, path, key=key).status_code == status
    assert ask(runpod_api, "DELETE", f"/pods/{id}").status_code == 404
    assert [each["id"] for each in ask(runpod_api, "GET", "/pods").json()["pods"]] == [other]
    assert ask(runpod_api, "GET", "/pods", key="stranger").status_code == 401


def test_what_is_sold_is_told_without_a_key_by_graphql_alone(runpod_api: RunPod) -> None:
    asked = {"query": "{ gpuTypes { id memoryInGb } countryCodes myself { id } }"}
    told = requests.post(f"{runpod_api.url}/graphql", json=asked, timeout=10).json()
    assert {"id": "NVIDIA A40", "memoryInGb": 48} in told["data"]["gpuTypes"]
    assert told["data"]["myself"] is None
    assert told["errors"][0]["extensions"]["code"] == "FORBIDDEN"
    assert requests.get(f"{runpod_api.url}/v2/catalog/gpus", timeout=10).status_code == 401


def test_a_pod_without_a_start_command_does_what_its_image_does(runpod: RunPod) -> None:
    id = ask(runpod, "POST", "/pods", {key: value for key, value in POD.items() if key != "args"}).json()["id"]
    runpod.wait(lambda: runpod.rentals[id].machine is not None and runpod.rentals[id].runtime is not None, 20)
    assert runpod.rentals[id].starts == 1


def test_the_start_command_is_json_with_its_own_entry_point_or_the_image_runs_it() -> None:
    assert _command('{"entrypoint": ["sh", "-c"], "cmd": ["echo a b"]}') == ["sh", "-c", "echo a b"]
    assert _command("sleep 60") == ["sleep", "60"]


def test_a_pod_is_stopped_and_resumed_and_billed_for_its_disk_alone_meanwhile(runpod_api: RunPod) -> None:
    """As the runpod package 1.12.0 does it (read 2026-11-24)."""
    id = create(runpod_api, containerDiskInGb=73)
    runpod_api.clock.advance(3600)
    stopped = post(runpod_api, "mutation($id: String!) { podStop(input: {podId: $id}) { desiredStatus } }", id=id)
    assert stopped.json()["data"]["podStop"]["desiredStatus"] == "EXITED"
    runpod_api.wait(lambda: runpod_api.rentals[id].runs[-1][1] is not None)
    runpod_api.clock.advance(7200)
    resume = "mutation($id: String!) { podResume(input: {podId: $id, gpuCount: 1}) { desiredStatus } }"
    assert post(runpod_api, resume, id=id).json()["data"]["podResume"]["desiredStatus"] == "RUNNING"
    runpod_api.clock.advance(3600)
    post(runpod_api, END, id=id)
    told = ask(runpod_api, "GET", "/billing/pods", podId=id, bucketSize="hour", lastN=6).json()
    totals = told["metadata"]["totals"]
    assert totals["gpuAmount"] == pytest.approx(2 * 0.35, rel=0.01)
    assert totals["diskAmount"] == pytest.approx(4 * 73 * 0.1 / 730, rel=0.01)
    assert totals["totalAmount"] == pytest.approx(sum(each["totalAmount"] for each in told["records"]))
    assert len({each["startTime"] for each in told["records"]}) == len(told["records"]) >= 4
    assert ask(runpod_api, "GET", "/billing/pods", podId="nobody").json()["records"] == []


def test_what_the_sdk_asks_of_the_account_is_told(runpod_api: RunPod) -> None:
    """`get_endpoints`, `get_user` and `update_user_settings` of the runpod package 1.12.0 (read 2026-11-24)."""
    asked = post(runpod_api, "{ myself { id pubKey endpoints { id name env { key } networkVolume { id } } } }").json()
    assert asked["data"]["myself"] == {"id": "user_lab", "pubKey": "", "endpoints": []}
    told = post(runpod_api, 'mutation { updateUserSettings(input: {pubKey: "ssh-ed25519 A"}) { pubKey } }').json()
    assert told["data"]["updateUserSettings"] == {"pubKey": "ssh-ed25519 A"}
    assert post(runpod_api, "{ myself { pubKey } }").json()["data"]["myself"] == {"pubKey": "ssh-ed25519 A"}
