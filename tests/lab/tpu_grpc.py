"""The lab's Cloud TPU over gRPC, as the SDK asks it by itself: each call becomes that of REST, faults and journal too.

with grpc_of(tpu) as address:  # "grpc://127.0.0.1:40123"
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import google.cloud.tpu_v2 as api
import grpc
import requests
from google.cloud.location import locations_pb2
from google.longrunning import operations_pb2
from google.protobuf import json_format
from google.rpc import (
    error_details_pb2,  # noqa: F401 - the details of errors are messages, which must be known to be written
    status_pb2,
)

from tests.lab.tpu import TPU
from tests.lab.tpu_wire import CODES

TPU_SERVICE, OPERATIONS, LOCATIONS = (
    "google.cloud.tpu.v2.Tpu",
    "google.longrunning.Operations",
    "google.cloud.location.Locations",
)
_OPERATION = operations_pb2.Operation
METHODS: dict[tuple[str, str], tuple[Any, Any, str, str]] = {
    (TPU_SERVICE, "CreateQueuedResource"): (
        api.CreateQueuedResourceRequest.pb(), _OPERATION, "POST {parent}/queuedResources", "queuedResource",
    ),
    (TPU_SERVICE, "GetQueuedResource"): (
        api.GetQueuedResourceRequest.pb(), api.QueuedResource.pb(), "GET {name}", "",
    ),
    (TPU_SERVICE, "ListQueuedResources"): (
        api.ListQueuedResourcesRequest.pb(), api.ListQueuedResourcesResponse.pb(), "GET {parent}/queuedResources", "",
    ),
    (TPU_SERVICE, "DeleteQueuedResource"): (api.DeleteQueuedResourceRequest.pb(), _OPERATION, "DELETE {name}", ""),
    (TPU_SERVICE, "CreateNode"): (api.CreateNodeRequest.pb(), _OPERATION, "POST {parent}/nodes", "node"),
    (TPU_SERVICE, "GetNode"): (api.GetNodeRequest.pb(), api.Node.pb(), "GET {name}", ""),
    (TPU_SERVICE, "ListNodes"): (api.ListNodesRequest.pb(), api.ListNodesResponse.pb(), "GET {parent}/nodes", ""),
    (TPU_SERVICE, "UpdateNode"): (api.UpdateNodeRequest.pb(), _OPERATION, "PATCH {node.name}", "node"),
    (TPU_SERVICE, "DeleteNode"): (api.DeleteNodeRequest.pb(), _OPERATION, "DELETE {name}", ""),
    (TPU_SERVICE, "ListAcceleratorTypes"): (
        api.ListAcceleratorTypesRequest.pb(), api.ListAcceleratorTypesResponse.pb(), "GET {parent}/acceleratorTypes",
        "",
    ),
    (TPU_SERVICE, "GetAcceleratorType"): (
        api.GetAcceleratorTypeRequest.pb(), api.AcceleratorType.pb(), "GET {name}", "",
    ),
    (TPU_SERVICE, "ListRuntimeVersions"): (
        api.ListRuntimeVersionsRequest.pb(), api.ListRuntimeVersionsResponse.pb(), "GET {parent}/runtimeVersions", "",
    ),
    (TPU_SERVICE, "GetRuntimeVersion"): (
        api.GetRuntimeVersionRequest.pb(), api.RuntimeVersion.pb(), "GET {name}", "",
    ),
    (OPERATIONS, "ListOperations"): (
        operations_pb2.ListOperationsRequest, operations_pb2.ListOperationsResponse, "GET {name}/operations", "",
    ),
    (OPERATIONS, "GetOperation"): (operations_pb2.GetOperationRequest, _OPERATION, "GET {name}", ""),
    (LOCATIONS, "GetLocation"): (locations_pb2.GetLocationRequest, locations_pb2.Location, "GET {name}", ""),
    (LOCATIONS, "ListLocations"): (
        locations_pb2.ListLocationsRequest, locations_pb2.ListLocationsResponse, "GET {name}/locations", "",
    ),
}  # fmt: skip
"""Of each method: what it is asked, what it answers, how REST is asked the same, and which field is the body there."""


@contextlib.contextmanager
def grpc_of(world: TPU) -> Iterator[str]:
    """A server in front of a world; its address."""
    server = grpc.server(ThreadPoolExecutor(16, "tpu-grpc"))
    for service in {service for service, _ in METHODS}:
        methods = {
            name: grpc.unary_unary_rpc_method_handler(
                _answering(world, f"/{of}/{name}"),
                request_deserializer=told[0].FromString,
                response_serializer=_serialized,
            )
            for (of, name), told in METHODS.items()
            if of == service
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


class _Refusal(grpc.Status):  # type: ignore[misc,unused-ignore]  # grpc has no types
    """An error with its details, which gRPC carries in the trailing metadata."""

    def __init__(self, status: Any) -> None:
        self.code = next(each for each in grpc.StatusCode if each.value[0] == status.code)
        self.details = status.message
        self.trailing_metadata = (("grpc-status-details-bin", status.SerializeToString()),)


def _serialized(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def as_rest(called: str, given: dict[str, Any]) -> tuple[str, str, dict[str, Any], Any]:
    """How REST is asked the same as a method of gRPC with these fields: method, path, parameters and body.

    Args:
        called: "/google.cloud.tpu.v2.Tpu/GetNode", or the method of Google's catalogue of prices.
    """
    _, service, name = called.split("/")
    if name == "ListSkus":
        how, body_field, version = "GET {parent}/skus", "", "v1"
    else:
        _, _, how, body_field = METHODS[service, name]
        version = "v2"
    body = given.get(body_field) if body_field else None

    def part(found: re.Match[str]) -> str:
        value: Any = given
        for name in found[1].split("."):
            value = value[name]
        return str(value)

    method, _, path = re.sub(r"\{([\w.]+)\}", part, how).partition(" ")
    query = {k: json.dumps(v) if v is True else v for k, v in given.items() if k not in ("name", "parent", body_field)}
    return method, f"/{version}/{path}", query, body


def _answering(world: TPU, called: str) -> Callable[[Any, Any], Any]:
    _, service, name = called.split("/")
    answers = METHODS[service, name][1]

    def answer(request: Any, context: Any) -> Any:
        method, path, query, body = as_rest(called, json_format.MessageToDict(request))
        shown = {key: value for key, value in context.invocation_metadata() if key == "authorization"}
        try:
            got = requests.request(method, f"{world.url}{path}", params=query, json=body, headers=shown, timeout=30)
        except requests.ConnectionError as e:
            context.abort(grpc.StatusCode.UNAVAILABLE, f"Socket closed: {e}")
        said = got.json()
        if got.status_code >= 400:
            about = said["error"]
            told = {"code": CODES[about["status"]][1], "message": about["message"], "details": about.get("details", [])}
            context.abort_with_status(_Refusal(json_format.ParseDict(told, status_pb2.Status())))
        return json_format.ParseDict(said, answers())

    return answer
