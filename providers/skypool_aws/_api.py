"""Clients of AWS's services, made once and shared by all threads. Errors of AWS are raised as errors of skypool.

A client has the methods of boto3 (AWS's Python package), such as `client.run_instances(...)`. Each client class gets an
additional base class, which translates boto3's exceptions. So callers only see the errors of `skypool.errors`.

The arguments of all functions that return a client mean the same:

- `profile`: a profile of the AWS configuration; None leaves the choice to boto3.
- `region`: a region such as "us-east-1"; "" means the one of the user's AWS configuration, or us-east-1 without one.
- `attempts`: how often a request is sent before it fails, including the first time.

Equal arguments give the same client, until the AWS configuration changes. These functions raise UsageError if boto3 is
not installed, and CredentialsError if there is no such profile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from skypool.drivers import recording
from skypool.drivers.refusals import Refusals
from skypool.drivers.sdk import imported
from skypool.drivers.settings import surroundings
from skypool.errors import ProviderError, UsageError
from skypool.text import quotable

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_pricing import PricingClient
    from types_boto3_service_quotas import ServiceQuotasClient
    from types_boto3_ssm import SSMClient
    from types_boto3_sts import STSClient

REFUSALS = Refusals("skypool_aws", "aws", "AWS")
"""The mapping of AWS's error codes to skypool's errors."""

PRIVATE = recording.Private(
    patterns={
        r"\b(?:AKIA|ASIA|AIDA|AROA|AGPA|ANPA|ABIA|ACCA)([A-Z0-9]{16,})\b": ("secret",),
        r"\barn:[\w-]+:[\w-]*:[\w-]*:(\d{12}):"
        r"(?:(?:user|role|assumed-role|group|instance-profile|federated-user)/([\w+=,.@/-]+))?": ("account", "person"),
        r"(?<![0-9A-Za-z.])(?<![0-9a-fA-F]{4}-)(\d{12})(?![0-9A-Za-z]|\.\d)": ("account",),
    }
)
"""What a recording must not contain of AWS's requests and replies: keys, unique ids of users, and account numbers.

https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_identifiers.html (read 2026-11-24)
"""

_LOGIN_SERVICES = ("sso", "sso-oidc", "signin")
"""Services from which boto3 gets credentials. A recording says only that a request was sent, not what it contained."""

_IDENTITY = "GetCallerIdentity"
"""The only operation of STS (Security Token Service) that is recorded in full, as its answer has no credentials."""

_EXCHANGE = "skypool.exchange"
"""The key in the context of a request, a dict of boto3, under which `_note_request` keeps the request for `_record`."""

CONNECT_TIMEOUT = 5
"""Seconds within which a connection to AWS must be established."""

READ_TIMEOUT = 60
"""Seconds within which AWS must answer a request."""

CONNECTIONS = 16
"""The most connections that one client keeps open, which are as many as the requests sent at the same time."""

ATTEMPTS = 4
"""How often boto3 sends a request before it gives up, including the first time."""

_NO_REGION = "us-east-1"
"""The region of a client if neither the driver nor the user's AWS configuration names one."""

_FILES = {
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
    "AWS_CONFIG_FILE": "~/.aws/config",
}
"""A dict from environment variable to path, for the files that boto3 reads. A variable that is set has another path."""

_making = threading.Lock()
"""Held while a client is made. Threads may share clients, but not the boto3 sessions with which clients are made."""


def ec2(profile: str | None, region: str = "", attempts: int = ATTEMPTS) -> EC2Client:
    """Return a client for EC2 in a region, which sends each request up to `attempts` times.

    The region "" means the one of the user's AWS configuration, or us-east-1 if it names none. `profile` is a profile
    of this configuration; None leaves the choice to boto3.
    """
    return cast("EC2Client", _shared_client(profile, "ec2", region, attempts))


def pricing(profile: str | None) -> PricingClient:
    """Return a client for AWS's price list, which has the prices of all regions."""
    return cast("PricingClient", _shared_client(profile, "pricing", "us-east-1"))


def service_quotas(profile: str | None, region: str) -> ServiceQuotasClient:
    """Return a client for the account's quotas in one region."""
    return cast("ServiceQuotasClient", _shared_client(profile, "service-quotas", region))


def ssm(profile: str | None, region: str) -> SSMClient:
    """Return a client for Systems Manager, whose public parameters hold the ids of AWS's images."""
    return cast("SSMClient", _shared_client(profile, "ssm", region))


def sts(profile: str | None, region: str) -> STSClient:
    """Return a client for the Security Token Service, which tells to whom the credentials in use belong."""
    return cast("STSClient", _shared_client(profile, "sts", region))


def iam(profile: str | None, region: str) -> Any:
    """Return a client for Identity and Access Management, which is for all regions of the part of AWS of this one."""
    return _shared_client(profile, "iam", region)


def all_of(pages: Any, key: str) -> list[Any]:
    """Return the items of all pages of an answer, as one list; [] if the answer does not have the field.

    Blocks until the requests for all pages are answered.

    Args:
        pages: the result of `client.get_paginator(...).paginate(...)`.
        key: the field of the answer that holds the items.

    Raises:
        ProviderError: AWS refused a request.
    """
    with _translated("the next page of an answer", ""):
        return list(pages.build_full_result().get(key, []))


@contextmanager
def accepted(*codes: str) -> Iterator[None]:
    """Suppress a ProviderError with one of these error codes in a `with` block, and continue after the block.

    Args:
        codes: AWS's error codes, such as "InvalidGroup.NotFound".
    """
    try:
        yield
    except ProviderError as e:
        if e.code not in codes:
            raise


def _shared_client(profile: str | None, service: str, region: str, attempts: int = ATTEMPTS) -> object:
    """Return the shared client for a service, such as "ec2". Make it anew if AWS's variables or files have changed."""
    environment = surroundings("AWS_", _FILES)
    with _making, _translated("your settings", region):
        return _client(profile, environment, service, region, attempts)


@lru_cache(maxsize=256)
def _client(profile: str | None, environment: Hashable, service: str, region: str, attempts: int) -> object:
    """Make a client for a service, and cache it by the arguments. The caller must hold the lock `_making`."""
    session = _session(profile, environment)
    config = imported("botocore.config").Config(
        retries={"mode": "standard", "total_max_attempts": attempts},
        connect_timeout=CONNECT_TIMEOUT,
        read_timeout=READ_TIMEOUT,
        max_pool_connections=CONNECTIONS,
    )
    return session.client(service, region_name=region or session.region_name or _NO_REGION, config=config)


@lru_cache(maxsize=64)
def _session(profile: str | None, environment: Hashable) -> Any:
    """Make a boto3 session, whose clients raise skypool's errors, and cache it by the arguments."""
    session = imported("boto3").Session(profile_name=profile)
    session.events.register("creating-client-class", _add_translation)
    session.events.register("request-created", _note_request)
    session.events.register("response-received", _record)
    return session


def _note_request(request: Any, **_: object) -> None:
    """Keep a request until its reply comes, if a recording is on. boto3 calls this before it sends the request."""
    if recording.current() is not None:
        request.context[_EXCHANGE] = (request, datetime.now(UTC), time.monotonic())


def _record(
    event_name: str,
    context: dict[str, Any],
    response_dict: Mapping[str, Any] | None,
    exception: Exception | None,
    **others: object,
) -> None:
    """Record a request and its reply, or its exception, if a recording is on. boto3 calls this after each reply."""
    kept = context.pop(_EXCHANGE, None)
    recorder = recording.current()
    if recorder is None or kept is None:
        return
    request, sent, began = kept
    took, reply = time.monotonic() - began, response_dict or {}
    recorder.add(partial(_exchange, request, sent, took, event_name, context, reply, exception), PRIVATE)


def _exchange(
    request: Any,
    sent: datetime,
    took: float,
    event_name: str,
    context: Mapping[str, Any],
    reply: Mapping[str, Any],
    exception: Exception | None,
) -> recording.Exchange:
    """Return a request of boto3 and its reply, {} for none, as an entry of a recording. `took`: time in seconds."""
    prepared = request.prepare()
    _, service, operation = event_name.split(".", 2)
    url = urlsplit(prepared.url)
    return recording.Exchange(
        provider=REFUSALS.provider,
        service=service,
        region=str(context.get("client_region") or ""),
        operation=operation,
        method=prepared.method,
        url=f"{url.path or '/'}?{url.query}" if url.query else url.path or "/",
        request_headers=_texts(prepared.headers),
        request=prepared.body or "",
        status=reply.get("status_code", -1),
        reply_headers=_texts(reply.get("headers", {})),
        reply=reply.get("body", ""),
        error="" if exception is None else f"{type(exception).__name__}: {exception}",
        confidential=service in _LOGIN_SERVICES or (service == "sts" and operation != _IDENTITY),
        time=sent.isoformat(),
        seconds=round(took, 3),
    )


def _texts(headers: Mapping[str, str | bytes]) -> dict[str, str]:
    """Return headers as a dict of texts. boto3 keeps some as bytes."""
    return {name: each.decode("latin-1") if isinstance(each, bytes) else str(each) for name, each in headers.items()}


def _add_translation(base_classes: list[type], **_: object) -> None:
    """Add `_Translating` to the base classes of a client class, before the others. boto3 calls this for each class."""
    base_classes.insert(0, _Translating)


class _Translating:
    """A base class that all clients of boto3 get. It translates the errors of their requests to skypool's errors."""

    meta: Any

    def _make_api_call(self, operation_name: str, api_params: Mapping[str, object]) -> Any:
        """Send one request of a client, such as "RunInstances", and return the answer."""
        client: Any = super()
        method: str = imported("botocore").xform_name(operation_name)
        with _translated(method, self.meta.region_name):
            return client._make_api_call(operation_name, api_params)


@contextmanager
def _translated(action: str, region: str) -> Iterator[None]:
    """Translate errors of boto3 in a `with` block to skypool's. Their messages name the request, `action`."""
    try:
        exceptions = imported("botocore.exceptions")
        parsers = imported("botocore.parsers")
    except ImportError as e:
        raise UsageError(
            "AWS() needs the Python package boto3, which is not installed: run `pip install 'skypool[aws]'`"
        ) from e
    try:
        yield
    except exceptions.ClientError as e:
        error = e.response["Error"]
        code = error.get("Code") or REFUSALS.known(_class_names(e))
        raise _refusal(action, region, code, error.get("Message", "")) from quotable(e)
    except (exceptions.BotoCoreError, parsers.ResponseParserError) as e:
        raise _refusal(action, region, REFUSALS.known(_class_names(e)), str(e)) from quotable(e)


def _class_names(error: BaseException) -> list[str]:
    """Return the names of an exception's class and base classes. They serve as codes for an error without a code."""
    return [each.__name__ for each in type(error).__mro__]


def _refusal(action: str, region: str, code: str, message: str) -> ProviderError:
    """Return the error for a refusal of the request `action`. Leave out the part of its text that only AWS can read."""
    text, _, _ = message.partition(" Encoded authorization failure")
    return REFUSALS.error(f"{action} in {region}" if region else action, code, text, region=region)
