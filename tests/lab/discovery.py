"""Checks requests and replies against one of Google's discovery documents: every parameter, field, type and enum.

    document = Document(Path("tests/lab/compute_v1.json"))
    wrong = document.wrong_request("POST", "/compute/v1/projects/p/zones/z/instances", query={}, body={"name": "A"})
    wrong[0].place, wrong[0].kind, str(wrong[0])

A discovery document lists the methods of an API, and the schema of each resource. The package google-api-python-client
carries those of all of Google's APIs. The documents here are parts of them: some methods, and the schemas which these
need. Words of explanation are left out. To renew one, or to add methods to it, name the file of the package:

    python -m tests.lab.discovery compute.v1.json tests/lab/compute_v1.json "PACKAGE VERSION (DAY)" [METHOD.ID …]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tests.lab.openapi import count

Kind = Literal["unknown", "missing", "type", "enum", "pattern"]

WHOLE = {
    "int32": (-(2**31), 2**31 - 1),
    "uint32": (0, 2**32 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "uint64": (0, 2**64 - 1),
}
"""The smallest and the largest number of each format. Those of 64 bits are strings in JSON."""
TEXTS = {
    "byte": re.compile(r"[A-Za-z0-9+/_-]*={0,2}"),
    "google-duration": re.compile(r"-?\d+(\.\d{1,9})?s"),
    "google-datetime": re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)"),
}
"""The forms of strings, by the name of the format."""
SYSTEM = {"$alt", "$fields", "$userProject", "$prettyPrint"}
"""Query parameters that every API takes besides those of its document, with "$" before the name.
https://cloud.google.com/apis/docs/system-parameters (read 2026-11-24 in a stored copy)"""


@dataclass(frozen=True)
class Wrong:
    """One thing about a request or a reply that the document does not allow.

    Attributes:
        place: The field, such as "networkInterfaces[0].nicType", or the name of a parameter. "" for the whole body.
        kind: Why it is wrong. "unknown": there is no such field or parameter; "missing": it is required.
        value: The value that was sent, or None.
        wanted: What the document asks for: a type, a pattern, or the values of an enum.
    """

    place: str
    kind: Kind
    value: Any
    wanted: str = ""

    def __str__(self) -> str:
        wanted = f", not {self.wanted}" if self.wanted else ""
        return f"{self.place or 'the body'}: {self.kind} ({self.value!r}{wanted})"


@dataclass(frozen=True)
class Method:
    """One method of the API. `record` is what the document says of it."""

    id: str
    verb: str
    path: re.Pattern[str]
    record: Mapping[str, Any]


class Document:
    """A discovery document.

    Args:
        file: Where it is. Files are read once.
        numbers: True if enums may be numbers, as clients ask with "$alt=json;enum-encoding=int".

    Attributes:
        requests, replies: How many were checked.
        fields: How many values they had, at all depths.
        methods: How many requests were checked of each method, by its id.
    """

    def __init__(self, file: Path, *, numbers: bool = False) -> None:
        self._known, self._schemas, self._parameters = _read(file)
        self._numbers = numbers
        self.requests = self.replies = self.fields = 0
        self.methods: dict[str, int] = {}

    def method(self, verb: str, path: str) -> Method | None:
        """The method that a request calls, None if the document has none."""
        return next((each for each in self._known if each.verb == verb and each.path.fullmatch(path)), None)

    def wrong_request(self, verb: str, path: str, query: Mapping[str, str], body: Any) -> list[Wrong]:
        """What a request has that the document does not allow, and lacks that it requires.

        A request whose method the document does not have is not judged: the caller asks `method`.
        """
        self.requests += 1
        method = self.method(verb, path)
        if method is None:
            return []
        self.methods[method.id] = self.methods.get(method.id, 0) + 1
        wrong = list(self._wrong_parameters(method, path, query))
        asked = method.record.get("request")
        if asked is None:
            return wrong  # a body is ignored then: libcloud sends one to `instances.reset`
        if body in (None, ""):
            return [*wrong, Wrong("", "missing", None)]
        self.fields += count(body)
        return [*wrong, *self._wrong(asked, body, "", method.id)]

    def wrong_reply(self, verb: str, path: str, body: Any) -> list[Wrong]:
        """What the body of a reply with status 200 has that the document does not allow."""
        self.replies += 1
        method = self.method(verb, path)
        if method is None:
            return []
        said = method.record.get("response")
        if said is None:
            return [] if body in (None, "", {}) else [Wrong("", "unknown", body)]
        return self.wrong_resource(said["$ref"], body)

    def wrong_resource(self, schema: str, value: Any) -> list[Wrong]:
        """What a value has that a schema of the document, such as "Instance", does not allow."""
        self.fields += count(value)
        return list(self._wrong({"$ref": schema}, value, "", ""))

    # --- checking ------------------------------------------------------------------------------------------------

    def _wrong_parameters(self, method: Method, path: str, query: Mapping[str, str]) -> Iterator[Wrong]:
        found = method.path.fullmatch(path)
        known = {**self._parameters, **method.record.get("parameters", {})}
        given = dict(query)
        for name, text in (found.groupdict() if found else {}).items():
            if name in known:  # a path such as {+parent} has other parts than parameters: they were matched
                given[name] = text
        for name, text in given.items():
            self.fields += 1
            if name in known:
                # repeated parameters arrive as their last value
                yield from self._wrong(known[name], _parameter(known[name], text), name, method.id)
            elif name not in SYSTEM:
                yield Wrong(name, "unknown", text)
        for name, about in known.items():
            if about.get("required") and about["location"] == "query" and name not in given:
                yield Wrong(name, "missing", None)

    def _wrong(self, schema: Mapping[str, Any], value: Any, place: str, method: str) -> Iterator[Wrong]:
        """Yield what is wrong with a value; `method` is the id of the method that is asked, "" for a reply."""
        while "$ref" in schema:
            schema = self._schemas[schema["$ref"]]
        match schema.get("type"):
            case "object":
                yield from self._wrong_object(schema, value, place, method)
            case "array":
                if not isinstance(value, list):
                    yield Wrong(place, "type", value, "array")
                    return
                for number, each in enumerate(value):
                    yield from self._wrong(schema["items"], each, f"{place}[{number}]", method)
            case "string" if "enum" in schema:
                if isinstance(value, int) and self._numbers and not isinstance(value, bool):
                    return
                if value not in schema["enum"]:
                    yield Wrong(place, "enum", value, "one of " + ", ".join(schema["enum"]))
            case "any" | None:
                return
            case type:
                yield from _wrong_value(type, schema, value, place, is_request=bool(method))

    def _wrong_object(self, schema: Mapping[str, Any], value: Any, place: str, method: str) -> Iterator[Wrong]:
        if not isinstance(value, dict):
            yield Wrong(place, "type", value, "object")
            return
        known, more = schema.get("properties", {}), schema.get("additionalProperties")
        for name, each in value.items():
            where = f"{place}.{name}" if place else name
            if each is None and method and name in known:
                continue  # null is as good as nothing, as the page at `_wrong_value` says
            if name in known:
                yield from self._wrong(known[name], each, where, method)
            elif more is not None:
                yield from self._wrong(more, each, where, method)
            else:
                yield Wrong(where, "unknown", each)
        for name, about in known.items():
            if value.get(name) is None and method and method in about.get("required", ()):
                yield Wrong(f"{place}.{name}" if place else name, "missing", None)


def _wrong_value(type: str, schema: Mapping[str, Any], value: Any, place: str, *, is_request: bool) -> Iterator[Wrong]:
    """Yield what is wrong with a number, a string or a boolean.

    Google writes numbers of 64 bits as strings, and reads all integers as numbers and as strings:
    https://protobuf.dev/programming-guides/json/ (read 2026-11-24 in a stored copy).
    """
    form = schema.get("format", "")
    if type == "boolean":
        if not isinstance(value, bool):
            yield Wrong(place, "type", value, "boolean")
    elif type == "integer" or (type == "string" and form in WHOLE):
        usual = str if type == "string" else int
        right = (str, int) if is_request else (usual,)
        if not isinstance(value, right) or isinstance(value, bool) or not re.fullmatch(r"-?\d+", str(value)):
            yield Wrong(place, "type", value, f"{form} as a JSON {'string' if usual is str else 'number'}")
            return
        least, most = WHOLE.get(form, WHOLE["int64"])
        if not max(least, int(schema.get("minimum", least))) <= int(value) <= most:
            yield Wrong(place, "type", value, form)
    elif type == "number":
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            yield Wrong(place, "type", value, "number")
    elif not isinstance(value, str):
        yield Wrong(place, "type", value, "string")
    elif form in TEXTS and not TEXTS[form].fullmatch(value):
        yield Wrong(place, "type", value, form)
    elif "pattern" in schema and not re.fullmatch(schema["pattern"], value):
        yield Wrong(place, "pattern", value, schema["pattern"])


def _parameter(schema: Mapping[str, Any], text: str) -> Any:
    """The value that the text of a parameter stands for. Text that is no such value stays text."""
    if schema.get("type") == "boolean":
        return {"true": True, "false": False}.get(text.lower(), text)
    if schema.get("type") == "integer" and re.fullmatch(r"-?\d+", text):
        return int(text)
    return text


@cache
def _read(file: Path) -> tuple[list[Method], dict[str, Any], dict[str, Any]]:
    """The methods of a document, those with the most literal paths first; its schemas; parameters of all methods."""
    document = json.loads(file.read_text())
    methods = []
    for each in _methods(document["resources"]):
        path = each.get("flatPath", each["path"])
        literal = re.sub(r"\{[^}]*\}", "", path)
        parts = re.split(r"\{(\w+)\}", f"/{document['servicePath']}{path}")
        pattern = "".join(f"(?P<{part}>[^/]+)" if n % 2 else re.escape(part) for n, part in enumerate(parts))
        methods.append((-len(literal), Method(each["id"], each["httpMethod"], re.compile(pattern), each)))
    methods.sort(key=lambda each: each[0])
    return [each for _, each in methods], document["schemas"], document["parameters"]


def _methods(resources: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for resource in resources.values():
        yield from resource.get("methods", {}).values()
        yield from _methods(resource.get("resources", {}))


# --- making a part of a document -----------------------------------------------------------------------------

KEPT = {
    "$ref", "additionalProperties", "enum", "flatPath", "format", "httpMethod", "id", "items", "location", "minimum",
    "parameters", "path", "pattern", "properties", "repeated", "request", "required", "response", "type",
}  # fmt: skip
"""Keys of a document that say what is allowed."""


def part(document: Mapping[str, Any], wanted: set[str], about: str) -> dict[str, Any]:
    """The methods of a discovery document with these ids, and the schemas that they need, without explanations."""

    def resources(told: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for name, each in told.items():
            methods = {key: _bare(one) for key, one in each.get("methods", {}).items() if one["id"] in wanted}
            inner = resources(each.get("resources", {}))
            if methods or inner:
                found[name] = {**({"methods": methods} if methods else {}), **({"resources": inner} if inner else {})}
        return found

    kept = resources(document["resources"])
    needed: set[str] = set()
    left = [*_references(kept)]
    while left:
        name = left.pop()
        if name not in needed:
            needed.add(name)
            left += _references(document["schemas"][name])
    return {
        "about": about,
        "id": document["id"],
        "revision": document["revision"],
        "servicePath": document["servicePath"],
        "parameters": {name: _bare(each) for name, each in document["parameters"].items()},
        "resources": kept,
        "schemas": {name: _bare(document["schemas"][name]) for name in sorted(needed)},
    }


def _bare(told: Mapping[str, Any]) -> dict[str, Any]:
    """A schema, a parameter or a method without explanations."""
    made: dict[str, Any] = {}
    for key, each in told.items():
        if key == "annotations":
            made["required"] = each["required"]
        elif key in ("properties", "parameters"):
            made[key] = {name: _bare(one) for name, one in each.items()}
        elif key in KEPT and key != "id":
            made[key] = _bare(each) if isinstance(each, dict) else each
    if "httpMethod" in told:
        made["id"] = told["id"]
        if made.get("flatPath") == made["path"]:
            del made["flatPath"]
    return made


def _references(told: Any) -> list[str]:
    if isinstance(told, dict):
        own = [told["$ref"]] if isinstance(told.get("$ref"), str) else []
        return [*own, *(name for each in told.values() for name in _references(each))]
    return [name for each in told for name in _references(each)] if isinstance(told, list) else []


def _written(document: Mapping[str, Any]) -> str:
    """The text of a document, with one method and one schema a line, so that a change of it can be read."""
    marks: dict[str, str] = {}

    def marked(told: Any) -> Any:
        if isinstance(told, dict) and ("httpMethod" in told or "type" in told or "$ref" in told):
            marks[key := f"@{len(marks)}@"] = json.dumps(told, sort_keys=True)
            return key
        return {name: marked(each) for name, each in told.items()} if isinstance(told, dict) else told

    text = json.dumps(marked(document), indent=1)
    return re.sub(r'"(@\d+@)"', lambda found: marks[found[1]], text) + "\n"


def main() -> None:
    """Write a part of a document: the methods that the file has already, and those that are named."""
    source, target, package, *more = sys.argv[1:]
    whole, file = json.loads(Path(source).read_text()), Path(target)
    known = {each.id for each in _read(file)[0]} if file.exists() else set()
    about = f"A part of the discovery document {whole['id']}, made by tests/lab/discovery.py from {package}."
    made = part(whole, known | set(more), about)
    lost = (known | set(more)) - {each["id"] for each in _methods(made["resources"])}
    if lost:
        sys.exit(f"{source} has no {', '.join(sorted(lost))}")
    file.write_text(_written(made))


if __name__ == "__main__":
    main()
