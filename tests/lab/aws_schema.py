"""Checks AWS's requests and replies against the service models that botocore ships, field by field and enum by enum.

botocore itself checks a request for required fields, types and a few limits, and reads a reply with tolerance. Here a
field that the model lacks, an enum value that it does not have and a wrong type are told, in both directions. `SOURCE`
names the botocore whose models are used: the installed one, which was 1.44.5 of 2026-11-17 when this was written.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl
from xml.etree import ElementTree

import botocore
import botocore.session

from tests.lab.aws_wire import EC2, STS, ApiError, Call, Reply

SOURCE = f"botocore {botocore.__version__}"
MODELS = {"ec2": "ec2", "ssm": "ssm", "pricing": "pricing", "servicequotas": "service-quotas", "sts": "sts"}
"""botocore's name of each service that is checked, by the name with which requests are signed."""

NAMESPACES = {"ec2": EC2, "sts": STS}
COMMON = ("Action", "Version")
"""Fields of a form that every action has."""

_NUMBERS = {"integer": 32, "long": 64}
"""Bits of a whole number."""

BEYOND = {
    ("SupportedAdditionalProcessorFeature", "metal-compatibility"),  # in moto's data, which the real API answered
    # https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_InternetGatewayAttachment.html
    ("AttachmentStatus", "available"),
}
"""Values that an enum of the models lacks and the real API answers."""

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:?\d\d)")


@dataclass(frozen=True)
class Wrong:
    """What is wrong with one field.

    Attributes:
        kind: "unknown", "missing" or "invalid".
        place: the name of the field, with those of the structures that it is in: "NetworkInterface.1.SubnetId".
        text: what is wrong, for people.
    """

    kind: str
    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


@dataclass
class Schema:
    """The models of all services that are checked.

    Attributes:
        requests, replies: how many were checked; fields: how many values they had, at all depths.
        operations: those that were checked, such as "ec2:RunInstances".
    """

    requests: int = 0
    replies: int = 0
    fields: int = 0
    operations: set[str] = field(default_factory=set[str])

    # --- requests --------------------------------------------------------------------------------------------

    def wrong_request(self, call: Call) -> list[Wrong]:
        """What a request has that its model does not allow, and lacks that it requires. [] for another service."""
        operation = _operation(call)
        if operation is None:
            return []
        self.requests += 1
        self.operations.add(f"{call.service}:{call.action}")
        if call.is_json:
            return list(self._json(operation.input_shape, call.params, ""))
        form = parse_qsl(call.body.decode(), keep_blank_values=True)
        tree: dict[str, Any] = {}
        for name, value in form:
            if name not in COMMON:
                node = tree
                *parents, last = name.split(".")
                for each in parents:
                    node = node.setdefault(each, {})
                    if not isinstance(node, dict):
                        return [Wrong("invalid", name, "it is a value and a structure")]
                node[last] = value
        if operation.input_shape is None:
            return [Wrong("unknown", name, "the action has no fields") for name in tree]
        return list(self._form(operation.input_shape, tree, ""))

    def _form(self, shape: Any, value: Any, place: str) -> Iterator[Wrong]:
        match shape.type_name:
            case "structure":
                if not isinstance(value, dict):
                    yield Wrong("invalid", place, "it is no structure")
                    return
                members = {_query_name(name, member): (name, member) for name, member in shape.members.items()}
                for name, inner in value.items():
                    if name in members:
                        yield from self._form(members[name][1], inner, _join(place, name))
                    else:
                        yield Wrong("unknown", _join(place, name), "it is not known")
                given = {members[name][0] for name in value if name in members}
                yield from _missing(shape, given, place, lambda name: _query_name(name, shape.members[name]))
            case "list":
                numbers = [name for name in value if name.isdecimal()] if isinstance(value, dict) else []
                if not isinstance(value, dict) or sorted(map(int, numbers)) != list(range(1, len(value) + 1)):
                    yield Wrong("invalid", place, "its items are not numbered from 1")
                    return
                yield from _size(shape, len(value), place)
                for name, inner in value.items():
                    yield from self._form(shape.member, inner, _join(place, name))
            case _:
                yield from self._text(shape, value, place)

    # --- replies ---------------------------------------------------------------------------------------------

    def wrong_reply(self, call: Call, reply: Reply) -> list[str]:
        """What a reply that is no error has that its model does not allow. [] for another service."""
        operation = _operation(call)
        if operation is None:
            return []
        self.replies += 1
        if call.is_json:
            return [str(each) for each in self._json(operation.output_shape, json.loads(reply.body or b"{}"), "")]
        root = ElementTree.fromstring(reply.body)
        space = NAMESPACES[call.service].removeprefix('xmlns="').removesuffix('"')
        wrong = [f"{each.tag} is not of {space}" for each in root.iter() if not each.tag.startswith(f"{{{space}}}")]
        if root.tag != f"{{{space}}}{call.action}Response":
            wrong.append(f"it is a {root.tag}")
        if wrong:
            return wrong
        for each in root.iter():
            each.tag = each.tag.partition("}")[2]
        shape = operation.output_shape
        if call.service == "sts":
            metadata, (root,) = root.find("ResponseMetadata"), root.findall(shape.serialization["resultWrapper"])
            named = metadata is not None and metadata.find("RequestId") is not None
        else:
            if named := (request_id := root.find("requestId")) is not None:
                root.remove(request_id)
        told = [] if named else [Wrong("missing", "requestId", "it is missing")]
        if shape is None or not shape.members:
            # An action without output says whether it has succeeded, or nothing at all.
            said = [(each.tag, each.text) for each in root]
            told += [
                Wrong("unknown", name, "it is not known") for name, text in said if (name, text) != ("return", "true")
            ]
        else:
            told += self._xml(shape, root, "")
        return [str(each) for each in told]

    def _xml(self, shape: Any, element: ElementTree.Element, place: str) -> Iterator[Wrong]:
        match shape.type_name:
            case "structure":
                members = {_xml_name(name, member): (name, member) for name, member in shape.members.items()}
                if (element.text or "").strip():
                    yield Wrong("invalid", place, "it is no structure")
                seen: set[str] = set()
                for each in element:
                    if each.tag not in members:
                        yield Wrong("unknown", _join(place, each.tag), "it is not known")
                        continue
                    name, member = members[each.tag]
                    if name in seen and not member.serialization.get("flattened"):
                        yield Wrong("invalid", _join(place, each.tag), "it is there twice")
                    seen.add(name)
                    yield from self._xml(member, each, _join(place, each.tag))
                yield from _missing(shape, seen, place, lambda name: _xml_name(name, shape.members[name]))
            case "list":
                item = shape.member.serialization.get("name", "member")
                yield from _size(shape, len(element), place)
                for number, each in enumerate(element):
                    if each.tag != item:
                        yield Wrong("unknown", _join(place, each.tag), f"an item is called {item}")
                    yield from self._xml(shape.member, each, _join(place, str(number)))
            case _:
                if len(element):
                    yield Wrong("invalid", place, "it is a structure")
                yield from self._text(shape, element.text or "", place)

    # --- values ----------------------------------------------------------------------------------------------

    def _text(self, shape: Any, value: Any, place: str) -> Iterator[Wrong]:
        """A value that is written as text."""
        self.fields += 1
        if not isinstance(value, str):
            yield Wrong("invalid", place, f"it is a structure, where {shape.type_name} is expected")
            return
        match shape.type_name:
            case "string":
                yield from _string(shape, value, place)
            case "integer" | "long" as kind:
                if not re.fullmatch(r"-?\d+", value) or not _fits(int(value), _NUMBERS[kind]):
                    yield Wrong("invalid", place, f"{value!r} is no {kind}")
                else:
                    yield from _range(shape, int(value), place)
            case "float" | "double" as kind:
                if not re.fullmatch(r"-?\d+(\.\d+)?([eE][+-]?\d+)?", value):
                    yield Wrong("invalid", place, f"{value!r} is no {kind}")
            case "boolean":
                if value not in ("true", "false"):
                    yield Wrong("invalid", place, f"{value!r} is no boolean")
            case "timestamp":
                if not _TIME.fullmatch(value):
                    yield Wrong("invalid", place, f"{value!r} is no timestamp")
            case "blob":
                try:
                    yield from _size(shape, len(base64.b64decode(value, validate=True)), place)
                except binascii.Error:
                    yield Wrong("invalid", place, "it is not BASE64")
            case other:
                raise NotImplementedError(other)

    def _json(self, shape: Any, value: Any, place: str) -> Iterator[Wrong]:
        """A value as JSON has it."""
        if not _is(shape.type_name, value):
            yield Wrong("invalid", place, f"{value!r} is no {shape.type_name}")
            return
        match shape.type_name:
            case "structure":
                members = {member.serialization.get("name", name): name for name, member in shape.members.items()}
                for name, inner in value.items():
                    if name in members:
                        yield from self._json(shape.members[members[name]], inner, _join(place, name))
                    else:
                        yield Wrong("unknown", _join(place, name), "it is not known")
                yield from _missing(shape, {members[name] for name in value if name in members}, place, str)
            case "map":
                for name, inner in value.items():
                    yield from self._json(shape.value, inner, _join(place, name))
            case "list":
                yield from _size(shape, len(value), place)
                for number, inner in enumerate(value):
                    yield from self._json(shape.member, inner, _join(place, str(number)))
            case "string":
                self.fields += 1
                yield from _string(shape, value, place)
            case "integer" | "long" as kind:
                self.fields += 1
                if value != int(value) or not _fits(int(value), _NUMBERS[kind]):
                    yield Wrong("invalid", place, f"{value!r} is no {kind}")
                else:
                    yield from _range(shape, int(value), place)
            case _:
                self.fields += 1


def _is(kind: str, value: Any) -> bool:
    """Whether a value of JSON is of a kind of shape."""
    expected = {"structure": dict, "map": dict, "list": list, "string": str, "boolean": bool}.get(kind, (int, float))
    return isinstance(value, expected) and (kind == "boolean" or not isinstance(value, bool))


# --- limits --------------------------------------------------------------------------------------------------


def _string(shape: Any, value: str, place: str) -> Iterator[Wrong]:
    if shape.enum and value not in shape.enum and (shape.name, value) not in BEYOND:
        yield Wrong("invalid", place, f"{value!r} is none of its values")
    yield from _size(shape, len(value), place)
    if (pattern := shape.metadata.get("pattern")) and not _python(pattern).search(value):
        yield Wrong("invalid", place, f"{value!r} does not fit {pattern}")


def _size(shape: Any, size: int, place: str) -> Iterator[Wrong]:
    least, most = shape.metadata.get("min", 0), shape.metadata.get("max")
    if size < least:
        yield Wrong("invalid", place, f"its length {size} is less than {least}")
    if most is not None and size > most:
        yield Wrong("invalid", place, f"its length {size} is more than {most}")


def _range(shape: Any, value: int, place: str) -> Iterator[Wrong]:
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    if (least is not None and value < least) or (most is not None and value > most):
        yield Wrong("invalid", place, f"{value} is not between {least} and {most}")


def _fits(value: int, bits: int) -> bool:
    most = 1 << (bits - 1)
    return -most <= value < most


def _missing(shape: Any, given: set[str], place: str, spelt: Callable[[str], str]) -> Iterator[Wrong]:
    for name in shape.required_members:
        if name not in given:
            yield Wrong("missing", _join(place, spelt(name)), "it is missing")


@functools.cache
def _python(pattern: str) -> re.Pattern[str]:
    """A pattern of a model, which is one of Java's. Without anchors, it is of the whole value.

    One of EC2's has a "^" in its middle, where nothing can fit it.
    """
    whole = pattern if pattern.startswith("^") else f"^(?:{pattern})$"
    for java, python in (("/^", "/"), ("\\p{L}", "a-zA-Z"), ("\\p{Z}", " "), ("\\p{N}", "0-9")):
        whole = whole.replace(java, python)
    return re.compile(whole)


# --- names ---------------------------------------------------------------------------------------------------


def _query_name(name: str, member: Any) -> str:
    """What a field is called in EC2's forms: https://smithy.io/2.0/aws/protocols/aws-ec2-query-protocol.html."""
    said = member.serialization
    if "queryName" in said:
        return str(said["queryName"])
    spelt: str = said.get("name", name)
    return spelt[0].upper() + spelt[1:]


def _xml_name(name: str, member: Any) -> str:
    return str(member.serialization.get("name", name))


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


# --- models --------------------------------------------------------------------------------------------------


def _operation(call: Call) -> Any:
    """The model of what a call asks for; None for another service or an action that there is not."""
    if call.service not in MODELS or call.action not in (model := _model(call.service)).operation_names:
        return None
    return model.operation_model(call.action)


@functools.cache
def _model(service: str) -> Any:
    return botocore.session.get_session().get_service_model(MODELS[service])


@functools.cache
def schema() -> Schema:
    """The models, read once for all worlds of the process."""
    return Schema()


# --- refusals ------------------------------------------------------------------------------------------------

_CODES: Mapping[str, str] = {
    "ssm": "ValidationException",
    "pricing": "InvalidParameterException",
    "servicequotas": "IllegalArgumentException",
    "sts": "ValidationError",
}


def refusal_of(call: Call, wrong: Wrong) -> ApiError:
    """The error with which a service refuses such a field.

    EC2's codes: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/errors-overview.html (read 2026-11-24 in a
    stored copy). Texts without that page's words, and those of the other services, are made up.
    """
    if call.service != "ec2":
        return ApiError(_CODES[call.service], f"{wrong.place}: {wrong.text}")
    match wrong.kind:
        case "unknown":
            return ApiError("UnknownParameter", f"The parameter {wrong.place} is not recognized")
        case "missing":
            return ApiError("MissingParameter", f"The request must contain the parameter {wrong.place}")
        case _:
            return ApiError("InvalidParameterValue", f"Invalid value for parameter {wrong.place}: {wrong.text}")
