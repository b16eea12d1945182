"""AWS's protocols: a request read into a `Call`, an answer or an error written as the service would, moto for the rest.

Requests are told apart by the service in their SigV4 header, so one port serves all of them. Signatures are not
checked.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl, urlencode
from wsgiref.types import WSGIEnvironment
from xml.sax.saxutils import escape

from moto import backends
from moto.core import responses
from moto.core.parse import EC2QueryParser
from moto.core.serialize import EC2Serializer, SerializationContext, XFormedAttributePicker, return_if_not_empty
from moto.core.utils import get_service_model, method_names_from_class
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.datastructures import Headers, MultiDict
from werkzeug.test import run_wsgi_app

_CREDENTIAL = re.compile(r"Credential=([^/]+)/\d+/([^/]+)/([^/]+)/aws4_request")
DENIED = (
    "You are not authorized to perform this operation. User: arn:aws:iam::123456789012:user/lab is not authorized to "
    "perform: {action} because no identity-based policy allows the {action} action. Encoded authorization failure "
    "message: 6vVtNzKQ3wqKmvB0cLkqX2l5"
)
TEXTS: Mapping[str, tuple[int, str]] = {
    "AuthFailure": (401, "AWS was not able to validate the provided access credentials"),
    "Blocked": (403, "This account is currently blocked and not recognized as a valid account."),
    "ExpiredToken": (403, "The security token included in the request is expired"),
    "ExpiredTokenException": (400, "The security token included in the request is expired"),
    "IdempotentParameterMismatch": (400, "Arguments on this idempotent request are inconsistent with arguments used in previous request(s)."),  # noqa: E501
    "InsufficientHostCapacity": (500, "Insufficient capacity on this host."),
    "InsufficientInstanceCapacity": (500, "Insufficient capacity."),
    "InternalError": (500, "An internal error has occurred"),
    "InvalidClientTokenId": (403, "The security token included in the request is invalid."),
    "MaxSpotInstanceCountExceeded": (400, "Max spot instance count exceeded"),
    "OptInRequired": (403, "You are not subscribed to this service. Please go to http://aws.amazon.com to subscribe."),
    "PendingVerification": (400, "Your request for accessing resources in this region is being validated, and you will not be able to launch additional resources in this region until the validation is complete."),  # noqa: E501
    "RequestExpired": (400, "Request has expired."),
    "RequestLimitExceeded": (503, "Request limit exceeded."),
    "ServiceUnavailable": (503, "The service is unavailable. Please try again shortly."),
    "ThrottlingException": (400, "Rate exceeded"),
    "UnauthorizedOperation": (403, DENIED),
    "AccessDeniedException": (400, DENIED),
    "Unavailable": (503, "The service is unavailable. Please try again shortly."),
    "UnrecognizedClientException": (400, "The security token included in the request is invalid."),
}  # fmt: skip
"""Status and text of errors that a test may ask for by their code alone."""


SKEW = 300.0
"""Seconds by which the time of a signature may be off."""


class ApiError(Exception):
    """What a service refuses with: `code`, text and HTTP status."""

    def __init__(self, code: str, message: str = "", status: int = 0) -> None:
        known = TEXTS.get(code, (400, code))
        self.code = code
        self.message = message or known[1]
        self.status = status or known[0]
        super().__init__(f"{code}: {self.message}")


@dataclass
class Call:
    """One request, in the order of arrival.

    Attributes:
        number: from 1.
        service: "ec2", "ssm", "pricing", "servicequotas", "sts", …: as it is signed.
        params: names and values as boto3 has them; as on the wire for services whose answers all come from moto.
        key: the access key id that signed it.
        at: the lab's clock.
        error: the code it was refused with; "" if it was not, or has not been answered yet.
        status: of HTTP; 0 while it is not answered, and if it never is.
    """

    number: int
    service: str
    action: str
    region: str
    params: dict[str, Any]
    key: str
    at: float
    error: str = ""
    status: int = 0
    body: bytes = field(default=b"", repr=False)
    target: str = field(default="", repr=False)

    @property
    def is_json(self) -> bool:
        return bool(self.target)


@dataclass(frozen=True)
class Reply:
    """What goes back."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


def read(environ: WSGIEnvironment, number: int, at: float) -> Call:
    """A request as a call. Unsigned ones have no service."""
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    if not body and "Action=" in environ.get("QUERY_STRING", ""):
        # A query in the URL, as libcloud sends it: https://docs.aws.amazon.com/AWSEC2/latest/APIReference/Query-Requests.html
        body = environ["QUERY_STRING"].encode()
        environ["REQUEST_METHOD"], environ["QUERY_STRING"] = "POST", ""
        environ["CONTENT_TYPE"] = "application/x-www-form-urlencoded; charset=utf-8"
    environ["wsgi.input"] = io.BytesIO(body)
    signed = _CREDENTIAL.search(environ.get("HTTP_AUTHORIZATION", ""))
    key, region, service = signed.groups() if signed else ("", "", "")
    if target := environ.get("HTTP_X_AMZ_TARGET", ""):
        params = json.loads(body or b"{}")
        return Call(number, service, target.rpartition(".")[2], region, params, key, at, body=body, target=target)
    form = dict(parse_qsl(body.decode(errors="replace"), keep_blank_values=True))
    if counted := _counted_from_one(form):
        form, body = counted, urlencode(counted).encode()
    action = form.get("Action", f"{environ['REQUEST_METHOD']} {environ.get('PATH_INFO', '')}")
    call = Call(number, service, action, region, dict(form), key, at, body=body)
    if service == "ec2" and action in _ec2().operation_names:
        with contextlib.suppress(ValueError):  # a value of a wrong type: the call is refused for that
            call.params = _ec2_params(action, form)
    return call


def check_time(environ: WSGIEnvironment, call: Call) -> None:
    """Refuse a signature whose time is more than 5 minutes away.

    The texts are those of https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-troubleshooting.html as
    they are widely quoted; the page itself was not read. EC2 only says that it cannot validate the credentials.

    Raises:
        ApiError: As the service says it.
    """
    signed = environ.get("HTTP_X_AMZ_DATE", "")
    if not signed:
        return
    at = datetime.strptime(signed, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    if abs(at - call.at) <= SKEW:
        return
    if call.service == "ec2":
        raise ApiError("AuthFailure")
    bound, sign = (call.at - SKEW, "-") if at < call.at else (call.at + SKEW, "+")
    past = at < call.at
    said = "Signature expired: {} is now earlier than" if past else "Signature not yet current: {} is still later than"
    now, limit = (datetime.fromtimestamp(each, UTC).strftime("%Y%m%dT%H%M%SZ") for each in (call.at, bound))
    text = f"{said.format(signed)} {limit} ({now} {sign} 5 min.)"
    if call.is_json:
        raise ApiError("InvalidSignatureException", text)
    raise ApiError("SignatureDoesNotMatch", text, 403)


def _counted_from_one(form: dict[str, str]) -> dict[str, str]:
    """Return a form whose lists begin at 1, {} if all of them do already.

    libcloud numbers `ResourceId.0` and `Tag.0.Key` in CreateTags (its `ex_create_tags`), and EC2 takes that.
    """
    changed: dict[str, str] = {}
    while lists := {name[: found.start()] for name in form if (found := re.search(r"\.0(?=\.|$)", name))}:
        prefix = min(lists, key=len)
        item = re.compile(rf"{re.escape(prefix)}\.(\d+)(.*)")
        form = changed = {
            f"{prefix}.{int(found[1]) + 1}{found[2]}" if (found := item.fullmatch(name)) else name: value
            for name, value in form.items()
        }
    return changed


@functools.cache
def _ec2() -> Any:
    return get_service_model("ec2")


def _ec2_params(action: str, form: dict[str, str]) -> dict[str, Any]:
    request: Any = {
        "method": "POST", "values": MultiDict(form), "headers": Headers(), "body": b"", "url_path": "/",
        "url_params": {},
    }  # fmt: skip
    parsed: dict[str, Any] = EC2QueryParser(_ec2().operation_model(action)).parse(request)
    return parsed


# --- answers -------------------------------------------------------------------------------------------------

STS = 'xmlns="https://sts.amazonaws.com/doc/2011-06-15/"'
EC2 = 'xmlns="http://ec2.amazonaws.com/doc/2016-11-15/"'
XML = '<?xml version="1.0" encoding="UTF-8"?>\n'
EMPTY_IS_ABSENT = {"Instances.Instance.Tags": return_if_not_empty}


def answer(call: Call, result: Any) -> Reply:
    """A result as the service writes it: a dict, named as boto3 names it, or for EC2 an object of moto's."""
    if call.is_json:
        return Reply(200, _headers("application/x-amz-json-1.1"), json.dumps(result).encode())
    operation = _ec2().operation_model(call.action)
    if isinstance(result, dict):
        shape = operation.output_shape
        inner = "".join(_members(shape, result)) if shape else "<return>true</return>"
        text = f"<{call.action}Response {EC2}><requestId>{request_id()}</requestId>{inner}</{call.action}Response>"
        return Reply(200, _headers("text/xml;charset=UTF-8"), f"{XML}{text}".encode())
    picker = XFormedAttributePicker(response_transformers=EMPTY_IS_ABSENT)
    serializer = EC2Serializer(operation, SerializationContext(request_id()), value_picker=picker)
    return Reply(200, _headers("text/xml;charset=UTF-8"), _spelt(str(serializer.serialize(result)["body"]).encode()))


def _members(shape: Any, value: Mapping[str, Any]) -> Iterator[str]:
    for name, inner in value.items():
        member = shape.members[name]
        if inner is not None:
            yield _element(member.serialization.get("name", name), member, inner)


def _element(name: str, shape: Any, value: Any) -> str:
    match shape.type_name:
        case "structure":
            text = "".join(_members(shape, value))
        case "list":
            item = shape.member.serialization.get("name", "member")
            text = "".join(_element(item, shape.member, each) for each in value)
        case "boolean":
            text = "true" if value else "false"
        case "timestamp":
            text = value.strftime("%Y-%m-%dT%H:%M:%S.000Z")
        case _:
            text = escape(str(value))
    return f"<{name}>{text}</{name}>"


def continued(call: Call, reply: Reply, token: str) -> Reply:
    """A reply of moto with the token of the next page; unchanged without one."""
    if not token or reply.status >= 300:
        return reply
    end = f"</{call.action}Response>".encode()
    return replace(reply, body=reply.body.replace(end, f"<nextToken>{token}</nextToken>".encode() + end))


def refusal(call: Call, error: ApiError) -> Reply:
    """An error in the words of the service's protocol."""
    name = "ec2" if call.service == "ec2" else call.service
    message = error.message.format(action=f"{name}:{call.action}") if error.message is DENIED else error.message
    if call.is_json:
        told = json.dumps({"__type": error.code, "message": message})
        return Reply(error.status, _headers("application/x-amz-json-1.1"), told.encode())
    inner = f"<Code>{escape(error.code)}</Code><Message>{escape(message)}</Message>"
    if call.service == "ec2":
        told = f"<Response><Errors><Error>{inner}</Error></Errors><RequestID>{request_id()}</RequestID></Response>"
    else:
        told = f"<ErrorResponse {STS}><Error><Type>Sender</Type>{inner}</Error></ErrorResponse>"
    return Reply(error.status, _headers("text/xml;charset=UTF-8"), f"{XML}{told}".encode())


def _headers(kind: str) -> list[tuple[str, str]]:
    return [("Content-Type", kind), ("x-amzn-RequestId", request_id())]


def request_id() -> str:
    """Shaped like a UUID."""
    text = secrets.token_hex(16)
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


# --- moto ----------------------------------------------------------------------------------------------------

_moto = DomainDispatcherApplication(create_backend_app)
# moto reads the list of its folders, and that of a class's methods, for each request: a sixth of the lab's time
backends.list_of_moto_modules = functools.cache(lambda listed=backends.list_of_moto_modules: tuple(listed()))
responses.__dict__["method_names_from_class"] = functools.cache(method_names_from_class)


def ask_moto(environ: WSGIEnvironment, body: bytes) -> Reply:
    """The request, with this body, put to moto."""
    asked = {**environ, "wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
    chunks, status, headers = run_wsgi_app(_moto, asked, buffered=True)
    kept = [(name, value) for name, value in headers.items() if name.lower() not in ("content-length", "connection")]
    return Reply(int(status.split()[0]), kept, _spelt(b"".join(chunks)))


def _spelt(body: bytes) -> bytes:
    """An answer of moto's with EC2's namespace as EC2 spells it, whose last "/" botocore's model leaves out.

    Clients that look elements up by namespace read empty lists without it, as libcloud does (its `NAMESPACE`).
    """
    return body.replace(f'{EC2[:-2]}"'.encode(), EC2.encode(), 1)


def confirmed(call: Call, reply: Reply) -> Reply:
    """An answer of moto's with EC2's `<return>true</return>`, which moto leaves out.

    EC2 says so for every action that returns nothing else, and where its model has `Return`. libcloud takes its absence
    for a failure. See https://docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DeleteSecurityGroup.html and
    API_CreateTags.html beside it (read 2026-11-24).
    """
    if call.service != "ec2" or reply.status != 200 or call.action not in _ec2().operation_names:
        return reply
    shape = _ec2().operation_model(call.action).output_shape
    if b"<return>" in reply.body or (shape and "Return" not in shape.members):
        return reply
    end = f"</{call.action}Response>".encode()
    return Reply(reply.status, reply.headers, reply.body.replace(end, b"<return>true</return>" + end, 1))


def rewritten(body: bytes, changes: Mapping[str, str], without: Iterable[str] = ()) -> bytes:
    """A form with other values; `without` are the beginnings of names that go."""
    gone = tuple(without)
    kept = {
        name: value
        for name, value in parse_qsl(body.decode(), keep_blank_values=True)
        if not (gone and name.startswith(gone))
    }
    return urlencode(kept | dict(changes)).encode()


def error_code(reply: Reply) -> str:
    """The code in an answer of moto's; "" if it is none."""
    if reply.status < 400:
        return ""
    found = re.search(rb"<Code>([^<]+)</Code>|\"__type\": ?\"([^\"]+)\"", reply.body)
    return (found[1] or found[2]).decode() if found else "InternalFailure"
