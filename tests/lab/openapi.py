"""Checks requests and replies against an OpenAPI document: every parameter, field, type and enum.

document = Document(Path("tests/lab/runpod_v2.json"))
wrong = document.wrong_request("POST", "/v2/pods", query={}, body={"name": "x"})

A cloud of the lab wraps its routes with a `Checker`, which refuses wrong requests and reports wrong replies.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from tests.lab.cloud import Answer, Refused, Request, Route

_LONGEST = 300
"""Characters of one message."""


class Document:
    """An OpenAPI 3.1 document.

    Args:
        source: its file, or the document itself.

    Attributes:
        requests, replies: how many were checked; fields: how many values they had, at all depths.
    """

    def __init__(self, source: Path | Mapping[str, Any]) -> None:
        self._document: dict[str, Any] = json.loads(source.read_text()) if isinstance(source, Path) else dict(source)
        self._validators: dict[str, Draft202012Validator] = {}
        self.requests = self.replies = self.fields = 0

    def wrong_request(self, method: str, route: str, query: Mapping[str, str], body: Any) -> list[str]:
        """What a request has that the document does not allow, and lacks that it requires."""
        self.requests += 1
        operation = self._operation(method, route)
        if operation is None:
            return [f"there is no {method} {route}"]
        known = {each["name"]: each for each in map(self._resolved, operation.get("parameters", []))}
        wrong = [f"query: {name} is not known" for name in query if name not in known]
        for name, text in query.items():
            if name in known:
                schema = self._resolved(known[name]["schema"])
                wrong += self._wrong(schema, self._read(schema, text), f"query {name}")
        asked = operation.get("requestBody")
        if asked is None:
            return wrong + (["no body is expected"] if body else [])
        if body is None and not asked.get("required", True):
            return wrong
        return wrong + self._wrong(asked["content"]["application/json"]["schema"], body, "$")

    def wrong_reply(self, method: str, route: str, status: int, body: Any) -> list[str]:
        """What a reply has that the document does not allow, and lacks that it requires."""
        self.replies += 1
        operation = self._operation(method, route)
        if operation is None:
            return [f"there is no {method} {route}"]
        known = operation["responses"]
        said = known[str(status)] if str(status) in known else known.get("default")
        if said is None:
            return [f"{method} {route} never answers {status}"]
        content = self._resolved(said).get("content")
        if not content:
            return [] if body in (None, "") else [f"{status} has no body"]
        ((_, told),) = content.items()
        return self._wrong(told["schema"], body, "$")

    def _operation(self, method: str, route: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self._document["paths"].get(route, {}).get(method.lower())
        return found

    def _resolved(self, part: Mapping[str, Any]) -> dict[str, Any]:
        while "$ref" in part:
            found: Any = self._document
            for name in part["$ref"].removeprefix("#/").split("/"):
                found = found[name]
            part = found
        return dict(part)

    def _read(self, schema: Mapping[str, Any], text: str) -> Any:
        """The value of a query parameter: lists are written with commas."""
        if schema.get("type") == "array":
            item = self._resolved(schema["items"])
            return [self._read(item, each) for each in text.split(",")]
        if schema.get("type") in ("integer", "number") and text.lstrip("-").isdigit():
            return int(text)
        return {"true": True, "false": False}.get(text, text) if schema.get("type") == "boolean" else text

    def _wrong(self, schema: Mapping[str, Any], value: Any, place: str) -> list[str]:
        self.fields += count(value)
        name = json.dumps(schema, sort_keys=True)
        if name not in self._validators:
            whole = {**schema, "components": self._document.get("components", {})}
            self._validators[name] = Draft202012Validator(whole)
        return [
            f"{place}{each.json_path[1:]}: {_short(each.message)}" for each in self._validators[name].iter_errors(value)
        ]


class Checker:
    """Checks what goes in and out of a cloud of the lab.

    Args:
        document: what is allowed.
        refusal: makes the cloud's refusal of a request, from what is wrong with it.
        errors: of the cloud: a reply that the document does not allow is appended here.
    """

    def __init__(self, document: Document, refusal: Callable[[list[str]], Refused], errors: list[Exception]) -> None:
        self.document, self._refusal, self._errors = document, refusal, errors

    def checked(self, operation: str, do: Route) -> Route:
        """A route that answers only requests that fit.

        Args:
            operation: "METHOD /path" in the document.
            do: the route itself.
        """
        method, path = operation.split()

        def answer(request: Request) -> Any:
            wrong = self.document.wrong_request(method, path, request.query, request.body)
            try:
                if wrong:
                    raise self._refusal(wrong)
                told = do(request)
            except Refused as e:
                self._reply(method, path, e.status, e.body)
                raise
            told = told if isinstance(told, Answer) else Answer(told)
            self._reply(method, path, told.status, told.body)
            return told

        return answer

    def _reply(self, method: str, path: str, status: int, body: Any) -> None:
        if wrong := self.document.wrong_reply(method, path, status, body):
            self._errors.append(
                AssertionError(f"the lab's reply {status} to {method} {path} is not the cloud's: {wrong}")
            )


def _short(message: str) -> str:
    """A message that begins with the value, however large that is."""
    return message if len(message) <= _LONGEST else f"…{message[-_LONGEST:]}"


def count(value: Any) -> int:
    """How many values there are, at all depths."""
    if isinstance(value, Mapping):
        return sum(map(count, value.values()))
    if isinstance(value, list):
        return sum(map(count, value))
    return 1
