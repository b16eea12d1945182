"""Clients of AWS's services, made once and shared by all threads. Errors of AWS are raised as errors of skypool.

A client has the methods of boto3 (AWS's Python package), such as `client.run_instances(...)`. Each client class gets an
additional base class, which translates boto3's exceptions. So callers only see the errors of `skypool.errors`.
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
"""The mapping of AWS's error codes to skypool's errors."""

CONNECT_TIMEOUT = 5
"""Seconds within which a connection to AWS must be established."""

READ_TIMEOUT = 60
"""Seconds within which AWS must answer a request."""

CONNECTIONS = 16
"""Connections that one client keeps open: the number of requests that are sent at the same time."""

ATTEMPTS = 4
"""How often boto3 sends a request before it gives up, including the first time."""

_NO_REGION = "us-east-1"
"""The region of a client if neither the driver nor the user's AWS configuration names one."""

_FILES = {
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
    "AWS_CONFIG_FILE": "~/.aws/config",
}
"""A dict from environment variable to the default path of a file of boto3. The variable can name another path."""

_making = threading.Lock()
"""Held while a client is made: threads may share clients, but not the sessions that make them."""


def ec2(profile: str | None, region: str = "", attempts: int = ATTEMPTS) -> EC2Client:
    """Return a client for EC2. Equal arguments give the same client, until the AWS configuration changes.

    Args:
        profile: a profile of the AWS configuration; None leaves the choice to boto3.
        region: a region such as "us-east-1"; "" means the one of the user's AWS configuration, or us-east-1 without
            one.
        attempts: how often a request is sent before it fails, including the first time.

    Raises:
        UsageError: boto3 is not installed.
        CredentialsError: there is no such profile.
    """
    return cast("EC2Client", _shared_client(profile, "ec2", region, attempts))


def pricing(profile: str | None) -> PricingClient:
    """Return a client for AWS's price list, which has the prices of all regions.

    Args:
        profile: a profile of the AWS configuration; None leaves the choice to boto3.

    Raises:
        UsageError: boto3 is not installed.
        CredentialsError: there is no such profile.
    """
    return cast("PricingClient", _shared_client(profile, "pricing", "us-east-1"))


def service_quotas(profile: str | None, region: str) -> ServiceQuotasClient:
    """Return a client for the account's quotas in one region.

    Args:
        profile: a profile of the AWS configuration; None leaves the choice to boto3.
        region: a region such as "us-east-1"; "" means the one of the user's AWS configuration, or us-east-1 without
            one.

    Raises:
        UsageError: boto3 is not installed.
        CredentialsError: there is no such profile.
    """
    return cast("ServiceQuotasClient", _shared_client(profile, "service-quotas", region))


def ssm(profile: str | None, region: str) -> SSMClient:
    """Return a client for Systems Manager, whose public parameters hold the ids of AWS's images.

    Args:
        profile: a profile of the AWS configuration; None leaves the choice to boto3.
        region: a region such as "us-east-1"; "" means the one of the user's AWS configuration, or us-east-1 without
            one.

    Raises:
        UsageError: boto3 is not installed.
        CredentialsError: there is no such profile.
    """
    return cast("SSMClient", _shared_client(profile, "ssm", region))


def sts(profile: str | None, region: str) -> STSClient:
    """Return a client for the Security Token Service, which tells to whom the credentials belong.

    Args:
        profile: a profile of the AWS configuration; None leaves the choice to boto3.
        region: a region such as "us-east-1"; "" means the one of the user's AWS configuration, or us-east-1 without
            one.

    Raises:
        UsageError: boto3 is not installed.
        CredentialsError: there is no such profile.
    """
    return cast("STSClient", _shared_client(profile, "sts", region))


def all_of(pages: Any, key: str) -> list[Any]:
    """Return the items of all pages of an answer, as one list; [] if the answer does not have the field.

    Sends the requests for all pages, and blocks until they are answered.

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

    Other exceptions are not suppressed.

    Args:
        codes: AWS's error codes, such as "InvalidGroup.NotFound".

    Raises:
        ProviderError: an error in the block has another code.
    """
    try:
        yield
    except ProviderError as e:
        if e.code not in codes:
            raise


def _shared_client(profile: str | None, service: str, region: str, attempts: int = ATTEMPTS) -> object:
    """Return a client for a service. Equal arguments give the same client, which threads may share.

    When the AWS environment variables or configuration files change, a new client is made.

    Args:
        profile: a profile of the AWS configuration; None leaves the choice to boto3.
        service: boto3's name of the service, such as "ec2".
        region: the region; "" means the one of the user's AWS configuration, or us-east-1 without one.
        attempts: how often a request is sent before it fails, including the first time.

    Raises:
        UsageError: boto3 is not installed.
        CredentialsError: there is no such profile.
    """
    environment = surroundings("AWS_", _FILES)
    with _making, _translated("your settings", region):
        return _client(profile, environment, service, region, attempts)


@lru_cache(maxsize=256)
def _client(profile: str | None, environment: Hashable, service: str, region: str, attempts: int) -> object:
    """Return a client for a service, the same one for the same arguments. The caller must hold the lock `_making`.

    Args:
        profile: a profile of the AWS configuration; None leaves the choice to boto3.
        environment: a value that changes when a variable or file that boto3 reads changes. A new value gives a new
            client.
        service: boto3's name of the service, such as "ec2".
        region: the region; "" means the one of the profile, or us-east-1 without one.
        attempts: how often a request is sent before it fails, including the first time.
    """
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
    """Return a boto3 session of a profile, the same one for the same arguments.

    Clients that the session makes raise errors of AWS as errors of skypool.

    Args:
        profile: a profile of the AWS configuration; None leaves the choice to boto3.
        environment: a value that changes when a variable or file that boto3 reads changes. A new value gives a new
            session.
    """
    session = imported("boto3").Session(profile_name=profile)
    session.events.register("creating-client-class", _add_translation)
    return session


def _add_translation(base_classes: list[type], **_: object) -> None:
    """Put `_Translating` before the other base classes of a client class that boto3 is making.

    The list `base_classes` is changed in place. boto3 calls this event handler with more arguments, which are ignored.
    """
    base_classes.insert(0, _Translating)


class _Translating:
    """A base class that is added to all clients of boto3, to raise errors of AWS as skypool's errors.

    Every request passes through the overridden method `_make_api_call`, also the requests of paginators.
    """

    meta: Any

    def _make_api_call(self, operation_name: str, api_params: Mapping[str, object]) -> Any:
        """Send one request of a client, and return the answer. A failure is raised as an error of skypool.

        Args:
            operation_name: AWS's name of the operation, such as "RunInstances".
            api_params: the parameters of the request.

        Raises:
            ProviderError: AWS or boto3 refused.
        """
        client: Any = super()
        method: str = imported("botocore").xform_name(operation_name)
        with _translated(method, self.meta.region_name):
            return client._make_api_call(operation_name, api_params)


@contextmanager
def _translated(action: str, region: str) -> Iterator[None]:
    """Raise errors of boto3 in a `with` block as errors of skypool. Other exceptions are not changed.

    Args:
        action: what the message says was refused, such as the name of the client's method.
        region: the region of the request; "" leaves it out of the message.

    Raises:
        ProviderError: AWS or boto3 refused. The error's code decides the subclass.
        UsageError: boto3 is not installed.
    """
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
        raise _refusal(action, region, code, error.get("Message", "")) from e
    except (exceptions.BotoCoreError, parsers.ResponseParserError) as e:
        raise _refusal(action, region, REFUSALS.known(_class_names(e)), str(e)) from e


def _class_names(error: BaseException) -> list[str]:
    """Return the names of an exception's class and base classes, the class itself first.

    These names are used in place of an error code if the exception has no code.
    """
    return [each.__name__ for each in type(error).__mro__]


def _refusal(action: str, region: str, code: str, message: str) -> ProviderError:
    """Return the error of skypool for a code and message of AWS. Nothing is raised.

    The encoded part of an authorization failure is left out, because only AWS can read it.

    Args:
        action: what was refused.
        region: the region of the request; "" leaves it out of the message.
        code: AWS's error code, or the name of an exception class of boto3.
        message: AWS's error text.
    """
    text, _, _ = message.partition(" Encoded authorization failure")
    return REFUSALS.error(f"{action} in {region}" if region else action, code, text, region=region)
