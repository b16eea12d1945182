"""The lab's Cloud TPU, asked by Google's own client, over REST and over gRPC: what drivers rely on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import google.cloud.tpu_v2 as api
import grpc
import pytest
from google.api_core import exceptions
from google.auth.credentials import AnonymousCredentials
from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport

from tests.lab.tpu import NO_CAPACITY, PROJECT, TPU
from tests.lab.tpu_grpc import grpc_of

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
    import requests

    options: Any = {"api_endpoint": tpu_api.url}
    client = api.TpuClient(credentials=AnonymousCredentials(), transport="rest", client_options=options)
    queued(client, service_account={"email": "robot@lab-project.iam.gserviceaccount.com"})
    (made,) = tpu_api.queued.values()
    url = f"{tpu_api.url}/v2/{AT}/queuedResources/mine"
    assert requests.get(url, headers={"Authorization": f"Bearer {made.token}"}).status_code == 200
    assert requests.get(url, headers={"Authorization": "Bearer another"}).status_code == 401
