"""How Cloud TPU speaks: errors, operations, and replies that are checked against what Google publishes.

Every request and every reply is checked twice: against the discovery document (tests/lab/tpu_v2.json), and by the
messages of google-cloud-tpu, which know what is inside of an operation. Enums are names; a client that asks for
"$alt=json;enum-encoding=int", as Google's Python client does, gets numbers.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import google.cloud.tpu_v2 as api
from google.cloud.location import locations_pb2
from google.longrunning import operations_pb2
from google.protobuf import json_format

from tests.lab.cloud import Refused, Request
from tests.lab.discovery import Document, Wrong

CODES = {
    "INVALID_ARGUMENT": (400, 3), "FAILED_PRECONDITION": (400, 9), "UNAUTHENTICATED": (401, 16),
    "PERMISSION_DENIED": (403, 7), "NOT_FOUND": (404, 5), "ALREADY_EXISTS": (409, 6), "ABORTED": (409, 10),
    "RESOURCE_EXHAUSTED": (429, 8), "INTERNAL": (500, 13), "UNIMPLEMENTED": (501, 12), "UNAVAILABLE": (503, 14),
}  # fmt: skip
"""Statuses: of HTTP, and of gRPC."""
TYPE = "type.googleapis.com/google.cloud.tpu.v2"
EMPTY = {"@type": "type.googleapis.com/google.protobuf.Empty"}
"""The result of a delete. Empty is no type that JSON writes with a "value", and Google's client refuses one:
https://protobuf.dev/programming-guides/json/ (read 2026-11-24), google.protobuf.json_format."""
MESSAGES: dict[str, Any] = {
    "tpu.projects.locations.list": locations_pb2.ListLocationsResponse,
    "tpu.projects.locations.get": locations_pb2.Location,
    "tpu.projects.locations.acceleratorTypes.list": api.ListAcceleratorTypesResponse.pb(),
    "tpu.projects.locations.acceleratorTypes.get": api.AcceleratorType.pb(),
    "tpu.projects.locations.runtimeVersions.list": api.ListRuntimeVersionsResponse.pb(),
    "tpu.projects.locations.runtimeVersions.get": api.RuntimeVersion.pb(),
    "tpu.projects.locations.operations.get": operations_pb2.Operation,
    "tpu.projects.locations.operations.list": operations_pb2.ListOperationsResponse,
    "tpu.projects.locations.nodes.list": api.ListNodesResponse.pb(),
    "tpu.projects.locations.nodes.get": api.Node.pb(),
    "tpu.projects.locations.nodes.create": operations_pb2.Operation,
    "tpu.projects.locations.nodes.patch": operations_pb2.Operation,
    "tpu.projects.locations.nodes.delete": operations_pb2.Operation,
    "tpu.projects.locations.queuedResources.list": api.ListQueuedResourcesResponse.pb(),
    "tpu.projects.locations.queuedResources.get": api.QueuedResource.pb(),
    "tpu.projects.locations.queuedResources.create": operations_pb2.Operation,
    "tpu.projects.locations.queuedResources.delete": operations_pb2.Operation,
}
"""What each method answers, by its id. The other methods of the API are not built here."""
REQUESTS: dict[str, Any] = {
    "tpu.projects.locations.nodes.create": api.Node.pb(),
    "tpu.projects.locations.nodes.patch": api.Node.pb(),
    "tpu.projects.locations.queuedResources.create": api.QueuedResource.pb(),
}
"""The body of each method that has one."""


def refused(status: str, message: str, *details: Any) -> Refused:
    return Refused(CODES[status][0], error(status, message, *details))


def error(status: str, message: str, *details: Any) -> dict[str, Any]:
    about = {"code": CODES[status][0], "message": message, "status": status}
    return {"error": {**about, **({"details": [*details]} if details else {})}}


def info(reason: str, domain: str = "googleapis.com", **metadata: str) -> dict[str, Any]:
    """The detail that says in a word why something is refused."""
    told = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": reason, "domain": domain}
    return {**told, "metadata": metadata}


def time_of(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class Wire:
    """The schema of one world's API, and the counts of what was checked.

    Attributes:
        document: see `Document`.
    """

    def __init__(self) -> None:
        self.document = Document(Path(__file__).parent / "tpu_v2.json")

    def method(self, request: Request) -> str:
        """The id of the method that a request calls.

        Raises:
            Refused: there is none.
        """
        found = self.document.method(request.method, request.path)
        if found is None:
            raise refused("NOT_FOUND", "Method not found.")
        return found.id

    def read(self, request: Request) -> Any:
        """The body of a request, with names for enums and without what is empty.

        Raises:
            Refused: the request is not one that the API takes.
        """
        kind = REQUESTS.get(self.method(request))
        body = request.body or None
        if kind is not None and isinstance(body, dict):
            body = _named(kind, body)
        wrong = self.document.wrong_request(request.method, request.path, request.query, body)
        if wrong:
            raise _bad_request(wrong)
        return body

    def written(self, request: Request, body: Any) -> Any:
        """A reply as its client asked for it.

        Raises:
            AssertionError: it is not one that the API gives.
        """
        if wrong := self.document.wrong_reply(request.method, request.path, body):
            raise AssertionError(f"the lab's reply to {request.method} {request.path} is not Google's: {wrong}")
        for each in _results(body):
            if wrong := self.document.wrong_resource(each["@type"].rpartition(".")[2], _bare(each)):
                raise AssertionError(f"the lab's result of {request.method} {request.path} is not Google's: {wrong}")
        message = json_format.ParseDict(body, MESSAGES[self.method(request)]())
        if "enum-encoding=int" not in request.query.get("$alt", ""):
            return body
        return json_format.MessageToDict(message, use_integers_for_enums=True)


def _named(kind: Any, body: dict[str, Any]) -> dict[str, Any]:
    """A body whose enums are names. What is no message stays as it is, and the schema says why it is wrong."""
    try:
        message = json_format.ParseDict(body, kind())
    except json_format.ParseError:
        return body
    made: dict[str, Any] = json_format.MessageToDict(message)
    return made


def _results(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Resources of the API that the results of operations have."""
    found = [each.get("response", {}) for each in [body, *body.get("operations", ())]]
    return [each for each in found if str(each.get("@type", "")).startswith(TYPE)]


def _bare(told: Mapping[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in told.items() if key != "@type"}


def _bad_request(wrong: list[Wrong]) -> Refused:
    """What Google says of JSON that it cannot read: a line for each fault, and the fields as details."""
    lines = [_said(each) for each in wrong]
    violations = [{"field": each.place, "description": line} for each, line in zip(wrong, lines, strict=True)]
    details = {"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": violations}
    return refused("INVALID_ARGUMENT", "\n".join(lines), details)


def _said(wrong: Wrong) -> str:
    at, _, name = wrong.place.rpartition(".")
    match wrong.kind:
        case "unknown":
            return f"Invalid JSON payload received. Unknown name \"{name}\" at '{at}': Cannot find field."
        case "missing":
            return f"Missing required field: {wrong.place}"
        case _:
            return f"Invalid value at '{wrong.place}' ({wrong.wanted}), {json.dumps(wrong.value)}"


class Operations:
    """Long-running operations of one project, by their names.

    An operation has metadata from the start, and then `done` with either a response or an error:
    https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.operations (read 2026-11-24).
    """

    def __init__(self, project: str) -> None:
        self.project = project
        self.there: dict[str, dict[str, Any]] = {}
        self._numbers = itertools.count(1)

    def begin(self, zone: str, target: str, verb: str, now: float) -> dict[str, Any]:
        """A new one: of "nodes/ID" or "queuedResources/ID", and "create", "update" or "delete"."""
        at = f"projects/{self.project}/locations/{zone}"
        name = f"{at}/operations/operation-{next(self._numbers)}-{secrets.token_hex(6)}"
        about = {
            "@type": f"{TYPE}.OperationMetadata", "createTime": time_of(now), "target": f"{at}/{target}", "verb": verb,
            "cancelRequested": False, "apiVersion": "v2",
        }  # fmt: skip
        self.there[name] = {"name": name, "metadata": about, "done": False}
        return self.there[name]

    def end(
        self, operation: dict[str, Any], now: float, *, response: Mapping[str, Any] | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """It is over, with its result or the `google.rpc.Status` of its failure."""
        operation["metadata"]["endTime"] = time_of(now)
        operation["done"] = True
        operation.update({"error": error} if error is not None else {"response": response or EMPTY})
