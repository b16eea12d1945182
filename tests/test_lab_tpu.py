"""The lab's Cloud TPU, asked by Google's own client, over REST and over gRPC: what drivers rely on."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import google.cloud.tpu_v2 as api
import grpc
import pytest
import requests
from google.api_core import exceptions
from google.auth.credentials import AnonymousCredentials
from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport
from google.oauth2.credentials import Credentials
from google.protobuf import empty_pb2

from tests.lab import tpu_wares as wares
from tests.lab.gcp_iam import NUMBER
from tests.lab.tpu import NO_CAPACITY, NO_QUOTA, PROJECT, TPU
from tests.lab.tpu_grpc import grpc_of

ROBOT = "robot@lab-project.iam.gserviceaccount.com"
AT = f"projects/{PROJECT}/locations/us-east5-a"


@pytest.fixture(params=["rest", "grpc"])
def client(tpu_api: TPU, request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "rest":
        options: Any = {"api_endpoint": tpu_api.url}
        yield api.TpuClient(credentials=AnonymousCredentials(), transport="rest", client_options=options)
        return
    with grpc_of(tpu_api) as address:
        channel = grpc.insecure_channel(address.removeprefix("grpc://"))
        yield api.TpuClient(transport=TpuGrpcTransport(channel=channel))
        channel.close()


def queued(client: Any, name: str = "mine", kind: str = "v5p-16", at: str = AT, **more: Any) -> Any:
    """The operation of a create."""
    node = {"accelerator_type": kind, "runtime_version": "v2-alpha-tpuv5", "labels": {"a": "b"}, **more}
    told = {"tpu": {"node_spec": [{"parent": at, "node_id": name, "node": node}]}}
    return client.create_queued_resource(
        request={"parent": at, "queued_resource_id": name, "queued_resource": told}, timeout=10
    )


def test_a_queued_resource_becomes_a_node_of_several_hosts(tpu_api: TPU, client: Any) -> None:
    made = queued(client).result(timeout=10)
    assert made.name == f"{AT}/queuedResources/mine"
    tpu_api.wait(lambda: client.get_queued_resource(name=made.name).state.state.name == "ACTIVE")
    node = client.get_node(name=f"{AT}/nodes/mine")
    assert {each.access_config.external_ip for each in node.network_endpoints} == {""}, "nobody asked for one"
    assert (node.state.name, node.accelerator_type, len(node.network_endpoints)) == ("READY", "v5p-16", 2)
    assert dict(node.labels) == {"a": "b"}
    (listed,) = client.list_queued_resources(parent=f"projects/{PROJECT}/locations/-")
    assert dict(listed.tpu.node_spec[0].node.labels) == {"a": "b"}
    assert [each.name for each in client.list_nodes(parent=AT)] == [node.name]
    assert list(client.list_nodes(parent=f"projects/{PROJECT}/locations/us-west4-a")) == []


def test_it_is_deleted_with_its_node_only_by_force(tpu_api: TPU, client: Any) -> None:
    name = queued(client).result(timeout=10).name
    tpu_api.wait(lambda: {each.state for each in tpu_api.queued.values()} == {"ACTIVE"})
    with pytest.raises(exceptions.BadRequest, match="has a node"):
        client.delete_queued_resource(name=name)
    client.delete_queued_resource(request={"name": name, "force": True})
    tpu_api.wait(lambda: tpu_api.left() == {})
    with pytest.raises(exceptions.NotFound):
        client.get_queued_resource(name=name)
    with pytest.raises(exceptions.NotFound):
        client.get_node(name=f"{AT}/nodes/mine")


def test_it_is_suspended_when_its_node_is_deleted_and_stays(tpu_api: TPU, client: Any) -> None:
    name = queued(client).result(timeout=10).name
    tpu_api.wait(lambda: {each.state for each in tpu_api.queued.values()} == {"ACTIVE"})
    client.delete_node(name=f"{AT}/nodes/mine")
    tpu_api.wait(lambda: client.get_queued_resource(name=name).state.state.name == "SUSPENDED")
    assert tpu_api.left() == {"queued resources": 1}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"kind": "v6e-8"}, "accelerator v6e-8 was not found in zone us-east5-a"),
        ({"kind": "v5p-12"}, "accelerator v5p-12 was not found"),
        ({"runtime_version": "tpu-ubuntu2204-base"}, "is not for v5p-16"),
        ({"labels": {"A": "b"}}, "Invalid labels"),
        ({"name": "Mine"}, "Invalid queued resource"),
    ],
    ids=["not in this zone", "no such slice", "another's runtime", "labels", "name"],
)
def test_what_the_api_does_not_take_is_refused(client: Any, more: dict[str, Any], says: str) -> None:
    if more.get("kind") == "v6e-8":
        more = {**more, "runtime_version": "v2-alpha-tpuv6e"}
        says = says.replace("us-east5-a", "us-central1-a")
        more["at"] = AT.replace("us-east5-a", "us-central1-a")
    with pytest.raises(exceptions.BadRequest, match=says):
        queued(client, **more)


def test_a_second_one_of_the_same_name_is_refused_unless_it_is_the_same_request(client: Any) -> None:
    queued(client)
    with pytest.raises(exceptions.Conflict):
        queued(client)


def test_no_capacity_is_a_state_with_an_error(tpu_api: TPU, client: Any) -> None:
    tpu_api.capacity(0)
    name = queued(client).result(timeout=10).name
    tpu_api.wait(lambda: client.get_queued_resource(name=name).state.state.name == "FAILED")
    error = client.get_queued_resource(name=name).state.failed_data.error
    assert (error.code, error.message) == (8, NO_CAPACITY.format(zone="us-east5-a"))


def test_labels_are_changed_once_the_node_is_ready(tpu_api: TPU, client: Any) -> None:
    tpu_api.ready = False
    queued(client).result(timeout=10)
    tpu_api.wait(lambda: {each.state for each in tpu_api.queued.values()} == {"PROVISIONING"})
    asked: Any = {"node": {"name": f"{AT}/nodes/mine", "labels": {"c": "d"}}, "update_mask": {"paths": ["labels"]}}
    with pytest.raises(exceptions.BadRequest, match="is in state CREATING"):
        client.update_node(request=asked)
    tpu_api.ready = True
    with tpu_api.lock:
        tpu_api._active(next(iter(tpu_api.queued.values())))
    client.update_node(request=asked)
    assert dict(client.get_node(name=f"{AT}/nodes/mine").labels) == {"c": "d"}
    (spec,) = client.get_queued_resource(name=f"{AT}/queuedResources/mine").tpu.node_spec
    assert dict(spec.node.labels) == {"a": "b"}, "it says what was asked for"


def test_lists_come_in_pages_and_tell_what_did_not_answer(tpu_api: TPU, client: Any) -> None:
    for number in range(3):
        queued(client, f"mine-{number}")
    first = next(client.list_queued_resources(request={"parent": AT, "page_size": 2}).pages)
    assert len(first.queued_resources) == 2
    assert len(list(client.list_queued_resources(request={"parent": AT, "page_size": 2}))) == 3
    tpu_api.unreachable = ["us-east5-a"]
    page = next(client.list_queued_resources(parent=f"projects/{PROJECT}/locations/-").pages)
    assert list(page.unreachable) == ["us-east5-a"]
    assert list(page.queued_resources) == []


def test_a_host_may_ask_with_the_token_of_its_account_as_long_as_its_slice_is_there(tpu_api: TPU) -> None:
    options: Any = {"api_endpoint": tpu_api.url}
    client = api.TpuClient(credentials=AnonymousCredentials(), transport="rest", client_options=options)
    queued(client, service_account={"email": "robot@lab-project.iam.gserviceaccount.com"})
    (made,) = tpu_api.queued.values()
    url = f"{tpu_api.url}/v2/{AT}/queuedResources/mine"
    assert requests.get(url, headers={"Authorization": f"Bearer {made.token}"}).status_code == 200
    assert requests.get(url, headers={"Authorization": "Bearer another"}).status_code == 401


# --- Google's own client: results of operations, and what else it may ask ----------------------------------------


def test_a_create_has_the_queued_resource_as_its_result(tpu_api: TPU, client: Any) -> None:
    operation = queued(client, service_account={"email": ROBOT})
    assert operation.metadata.verb == "create"
    assert operation.metadata.target == f"{AT}/queuedResources/mine"
    made = operation.result(timeout=10)
    assert isinstance(made, api.QueuedResource)
    (spec,) = made.tpu.node_spec
    assert (spec.node_id, spec.node.accelerator_type, spec.node.service_account.email) == ("mine", "v5p-16", ROBOT)
    assert operation.metadata.end_time >= operation.metadata.create_time
    assert operation.metadata.api_version == "v2"


def test_a_delete_has_an_empty_result(tpu_api: TPU, client: Any) -> None:
    """JSON writes `google.protobuf.Empty` without a value, and the client reads nothing else."""
    name = queued(client).result(timeout=10).name
    tpu_api.wait(lambda: {each.state for each in tpu_api.queued.values()} == {"ACTIVE"})
    operation = client.delete_node(name=f"{AT}/nodes/mine")
    assert operation.result(timeout=10) == empty_pb2.Empty()
    assert operation.metadata.verb == "delete"
    assert client.delete_queued_resource(name=name).result(timeout=10) == empty_pb2.Empty()
    assert tpu_api.left() == {}


def test_a_node_is_made_without_a_queued_resource_too(tpu_api: TPU, client: Any) -> None:
    node = {"accelerator_type": "v5p-16", "runtime_version": "v2-alpha-tpuv5", "labels": {"a": "b"}}
    asked: Any = {"parent": AT, "node_id": "alone", "node": node}
    made = client.create_node(request=asked).result(timeout=10)
    assert (made.name, made.state.name, made.health.name) == (f"{AT}/nodes/alone", "READY", "HEALTHY")
    assert (made.api_version.name, made.queued_resource, len(made.network_endpoints)) == ("V2", "", 2)
    assert made.service_account.email == f"{NUMBER}-compute@developer.gserviceaccount.com"
    assert [each.name for each in client.list_nodes(parent=AT)] == [made.name]
    assert list(client.list_queued_resources(parent=AT)) == []
    change: Any = {"node": {"name": made.name, "labels": {"c": "d"}}, "update_mask": {"paths": ["labels"]}}
    assert dict(client.update_node(request=change).result(timeout=10).labels) == {"c": "d"}
    with pytest.raises(exceptions.Conflict):
        client.create_node(request=asked)
    assert client.delete_node(name=made.name).result(timeout=10) == empty_pb2.Empty()
    with pytest.raises(exceptions.NotFound):
        client.get_node(name=made.name)
    assert tpu_api.left() == {}


def test_operations_are_found_again(tpu_api: TPU, client: Any) -> None:
    begun = queued(client).operation
    tpu_api.wait(lambda: client.get_operation({"name": begun.name}).done)
    found = client.get_operation({"name": begun.name})
    result = api.QueuedResource.pb()()
    assert found.response.Unpack(result)
    assert result.name == f"{AT}/queuedResources/mine"
    listed = client.list_operations({"name": AT})
    assert [each.name for each in listed.operations] == [begun.name]
    with pytest.raises(exceptions.NotFound):
        client.get_operation({"name": f"{begun.name}0"})


def test_what_there_is_in_a_zone_is_listed_and_told(client: Any) -> None:
    kinds = {each.type_: each for each in client.list_accelerator_types(parent=AT)}
    assert {each.type for each in wares.types("us-east5-a")} == {*kinds}
    (shape,) = kinds["v5p-16"].accelerator_configs
    assert (shape.type_.name, shape.topology) == ("V5P", "2x2x2")
    one = client.get_accelerator_type(name=f"{AT}/acceleratorTypes/v5p-16")
    assert one == kinds["v5p-16"]
    versions = [each.version for each in client.list_runtime_versions(parent=AT)]
    assert versions == wares.runtimes("us-east5-a")
    assert client.get_runtime_version(name=f"{AT}/runtimeVersions/{versions[0]}").version == versions[0]
    everywhere = client.list_locations({"name": f"projects/{PROJECT}"}).locations
    assert [each.location_id for each in everywhere] == wares.zones()
    assert client.get_location({"name": AT}).location_id == "us-east5-a"


def test_errors_are_google_s(tpu_api: TPU, client: Any) -> None:
    """Of a bad zone, a bad id, a bad type, a quota, no stock, and of what the lab does not do."""
    with pytest.raises(exceptions.Forbidden, match=r"Permission denied on 'locations/mars-1a' \(or it may not exist\)"):
        queued(client, at=f"projects/{PROJECT}/locations/mars-1a")
    with pytest.raises(exceptions.NotFound, match="queuedResources/nobody' was not found"):
        client.get_queued_resource(name=f"{AT}/queuedResources/nobody")
    with pytest.raises(exceptions.BadRequest, match="accelerator v99-8 was not found in zone us-east5-a"):
        queued(client, kind="v99-8")
    tpu_api.quotas["v5p", "on-demand"] = 0
    name = queued(client).result(timeout=10).name
    tpu_api.wait(lambda: client.get_queued_resource(name=name).state.state.name == "FAILED")
    assert client.get_queued_resource(name=name).state.failed_data.error.message == NO_QUOTA
    node = {"accelerator_type": "v5p-16", "runtime_version": "v2-alpha-tpuv5"}
    with pytest.raises(exceptions.ResourceExhausted, match=r"Quota .* exhausted"):
        client.create_node(request={"parent": AT, "node_id": "alone", "node": node}).result(timeout=10)
    tpu_api.quotas.clear()
    tpu_api.capacity(0)
    with pytest.raises(exceptions.ResourceExhausted, match="no more capacity in the zone"):
        client.create_node(request={"parent": AT, "node_id": "alone", "node": node}).result(timeout=10)


def test_a_bad_key_is_refused_with_a_reason(tpu_api: TPU) -> None:
    options: Any = {"api_endpoint": tpu_api.url}
    later = datetime.now(UTC).replace(tzinfo=None) + timedelta(hours=1)
    key = Credentials(token="bad", refresh_handler=lambda request, scopes: ("bad", later))
    by_rest = api.TpuClient(credentials=key, transport="rest", client_options=options)
    with pytest.raises(exceptions.Unauthorized, match="invalid authentication credentials") as refused:
        by_rest.list_nodes(parent=AT)
    assert refused.value.reason == "ACCESS_TOKEN_TYPE_UNSUPPORTED"
    with grpc_of(tpu_api) as address:
        channel = grpc.insecure_channel(address.removeprefix("grpc://"))
        by_grpc = api.TpuClient(transport=TpuGrpcTransport(channel=channel))
        with pytest.raises(exceptions.Unauthenticated, match="invalid authentication credentials") as refused:
            by_grpc.list_nodes(parent=AT, metadata=[("authorization", "Bearer bad")])
        channel.close()
    assert refused.value.reason == "ACCESS_TOKEN_TYPE_UNSUPPORTED"


def test_enums_are_names_unless_a_client_asks_for_numbers(tpu_api: TPU, client: Any) -> None:
    queued(client).result(timeout=10)
    url = f"{tpu_api.url}/v2/{AT}/queuedResources/mine"
    assert requests.get(url).json()["state"]["stateInitiator"] == "SERVICE"
    assert requests.get(f"{url}?$alt=json;enum-encoding=int").json()["state"]["stateInitiator"] == 2
    spec = {"parent": AT, "nodeId": "other", "node": {"acceleratorConfig": {"type": 10, "topology": "2x2x2"}}}
    wrong = requests.post(
        f"{tpu_api.url}/v2/{AT}/queuedResources?queuedResourceId=other", json={"tpu": {"nodeSpec": [spec]}}
    )
    assert "The accelerator None was not found" in wrong.json()["error"]["message"], "numbers are read, too"


@pytest.mark.parametrize("path", ["nodes/mine:start", "nodes/mine:fly", "reservations"])
def test_a_method_that_is_not_there_is_refused_as_google_does(tpu_api: TPU, path: str) -> None:
    said = requests.post(f"{tpu_api.url}/v2/{AT}/{path}", json={})
    error = said.json()["error"]
    assert (said.status_code, error["code"]) in {(404, 404), (501, 501)}
    assert error["status"] in {"NOT_FOUND", "UNIMPLEMENTED"}
