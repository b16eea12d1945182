"""Clients of AWS's services, made once and shared by all threads. What AWS refuses is raised as skypool's errors.

A client's methods are boto3's own: `client(...).run_instances(...)`. Each client class has one more base class here,
which translates the exceptions of the SDK, so that callers only ever see the errors of `skypool.errors`.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from skypool.drivers.refusals import Refusals
from skypool.drivers.sdk import imported
from skypool.drivers.settings import surroundings
from skypool.errors import ProviderError, UsageError

if TYPE_CHECKING:
    from types_boto3_ec2 import EC2Client
    from types_boto3_pricing import PricingClient
    from types_boto3_service_quotas import ServiceQuotasClient
    from types_boto3_ssm import SSMClient
    from types_boto3_sts import STSClient

REFUSALS = Refusals("skypool_aws", "aws", "AWS")
"""AWS's error codes as skypool's errors."""

CONNECT_TIMEOUT = 5
"""Seconds until a connection to AWS is given up."""

READ_TIMEOUT = 60
"""Seconds for which an answer may take."""

CONNECTIONS = 16
"""Connections that one client keeps open: as many as regions are asked at the same time."""

ATTEMPTS = 4
"""How often the SDK sends a request before it gives up, the first time included."""

_NO_REGION = "us-east-1"
"""The region of a client for which neither the driver nor the user's AWS configuration names one."""

_FILES = {
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
    "AWS_CONFIG_FILE": "~/.aws/config",
}
"""The files that boto3 reads, by the environment variable that names another path."""

_making = threading.Lock()
"""Held while a client is made: clients may be shared by threads, the sessions that make them may not."""


def ec2(profile: str | None, region: str = "", attempts: int = ATTEMPTS) -> EC2Client:
    """Return a client for EC2.

    Args:
        profile: a profile of the AWS configuration; None leaves the choice to the SDK.
        region: such as "us-east-1"; "" takes the user's own.
        attempts: how often a request is sent before it is given up.
    """
    return cast("EC2Client", _shared_client(profile, "ec2", region, attempts))


def pricing(profile: str | None) -> PricingClient:
    """Return a client for the price list, which is kept in us-east-1 for all regions."""
    return cast("PricingClient", _shared_client(profile, "pricing", "us-east-1"))


def service_quotas(profile: str | None, region: str) -> ServiceQuotasClient:
    """Return a client for the account's limits in one region."""
    return cast("ServiceQuotasClient", _shared_client(profile, "service-quotas", region))


def ssm(profile: str | None, region: str) -> SSMClient:
    """Return a client for Systems Manager, whose public parameters hold the ids of AWS's images."""
    return cast("SSMClient", _shared_client(profile, "ssm", region))


def sts(profile: str | None, region: str) -> STSClient:
    """Return a client for the Security Token Service, which knows whose credentials these are."""
    return cast("STSClient", _shared_client(profile, "sts", region))


def all_of(pages: Any, key: str) -> list[Any]:
    """Return what all pages of an answer list under `key`.

    Args:
        pages: from `client.get_paginator(...).paginate(...)`.
    """
    with _translated("get all pages", ""):
        return list(pages.build_full_result().get(key, []))


@contextmanager
def accepted(*codes: str) -> Iterator[None]:
    """Leave the block quietly if AWS refuses a request in it with one of these codes."""
    try:
        yield
    except ProviderError as e:
        if e.code not in codes:
            raise


def _shared_client(profile: str | None, service: str, region: str, attempts: int = ATTEMPTS) -> object:
    """Return a client, the same one as long as $AWS_... and its files stay the same."""
    environment = surroundings("AWS_", _FILES)
    with _making, _translated("your settings", region):
        return _client(profile, environment, service, region, attempts)


@lru_cache(maxsize=256)
def _client(profile: str | None, environment: Hashable, service: str, region: str, attempts: int) -> object:
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
    """Return the session of a profile, with credentials as `environment` has them."""
    session = imported("boto3").Session(profile_name=profile)
    session.events.register("creating-client-class", _add_translation)
    return session


def _add_translation(base_classes: list[type], **_: object) -> None:
    """Put `_Translating` before the other base classes of a client class that is being made."""
    base_classes.insert(0, _Translating)


class _Translating:
    """A base class of all clients, whose requests raise skypool's errors.

    `_make_api_call` is the one method of botocore that every request passes, also those of paginators. Tools that
    observe boto3 (moto, OpenTelemetry, Sentry) override it, too.
    """

    meta: Any

    def _make_api_call(self, operation_name: str, api_params: Mapping[str, object]) -> Any:
        client: Any = super()
        method: str = imported("botocore").xform_name(operation_name)
        with _translated(method, self.meta.region_name):
            return client._make_api_call(operation_name, api_params)


@contextmanager
def _translated(action: str, region: str) -> Iterator[None]:
    """Raise what the SDK raises in the block as one of skypool's errors.

    Args:
        action: what the message says was refused: the name of the client's method.
        region: where; "" if that does not matter.

    Raises:
        ProviderError: of the kind that errors.csv has for the error's code.
        UsageError: the SDK is not installed.
    """
    try:
        exceptions = imported("botocore.exceptions")
        parsers = imported("botocore.parsers")
    except ImportError as e:
        raise UsageError("AWS needs its SDK: pip install 'skypool[aws]'") from e
    try:
        yield
    except exceptions.ClientError as e:
        error = e.response["Error"]
        code = error.get("Code") or REFUSALS.known(_class_names(e))
        raise _refusal(action, region, code, error.get("Message", "")) from e
    except (exceptions.BotoCoreError, parsers.ResponseParserError) as e:
        raise _refusal(action, region, REFUSALS.known(_class_names(e)), str(e)) from e


def _class_names(error: BaseException) -> list[str]:
    """Return the names of an exception's classes, which stand in for a code where AWS gave none."""
    return [each.__name__ for each in type(error).__mro__]


def _refusal(action: str, region: str, code: str, message: str) -> ProviderError:
    """Return the error for a code. A message's encoded part, which only AWS can read, is left out."""
    text, _, _ = message.partition(" Encoded authorization failure")
    return REFUSALS.error(f"{action} in {region}" if region else action, code, text, region=region)
