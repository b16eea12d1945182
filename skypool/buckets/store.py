"""Opens a bucket with credentials of this computer, and tells what the errors of object stores mean."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from html import unescape
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from skypool.buckets import google
from skypool.buckets.bucket import Bucket
from skypool.errors import UsageError
from skypool.text import one_line

if TYPE_CHECKING:
    from obstore.store import ObjectStore

MISSING = "{} is not installed on this computer, and buckets need it: pip install 'skypool[buckets]'"
UNREACHED = "the store cannot be reached"
DENIED = "the credentials do not allow it"
EXPIRED = "the credentials have expired"
NO_LOGIN = "this computer has no login for the store"
PATIENCE = 10.0
"""Seconds after which a request that has no answer has failed."""
USUAL_REGION = "us-east-1"
"""What stores with the protocol of S3 expect that have no regions."""
_LOGINS = "http://169.254.169.254/", "/computeMetadata/"
"""Where machines of clouds get a login, as it is in errors."""
_AT_ONCE = timedelta(seconds=1)
"""The life of credentials that may be replaced at any time. obstore asks again for those that expire soon."""
_CODE = re.compile(r"<Code>([\w.]{1,80})</Code>|\(code: ([\w.]{1,80})\)")
_SAID = re.compile(r"<Message>([^<]*)</Message>")
_DETAILS = re.compile(r"<Details>([^<]*)</Details>")
_REGION = re.compile(r"<Region>([a-z0-9-]+)</Region>|expecting '([a-z0-9-]+)'")
_PLAIN_NAME = re.compile(r"[A-Z][A-Z0-9_]*_[A-Z0-9_]*")
"""Matches a name that cannot be a secret which was given in the place of a variable."""


class Trouble(NamedTuple):
    """The meaning of an error of an object store.

    Attributes:
        text: what is wrong: `DENIED` if the store knows who asks, and does not allow it.
        advice: what to do about it.
    """

    text: str
    advice: str

    @property
    def words(self) -> str:
        """Both in one sentence."""
        return f"{self.text}; {self.advice}" if self.advice else self.text


_MEANINGS = {
    "NoSuchBucket": ("there is no such bucket", "make it, or correct the URL or the endpoint"),
    "AccessDenied": (DENIED, "ask whoever owns the bucket for the permission"),
    "InvalidAccessKeyId": ("the store does not know the access key", "name the keys of this store"),
    "SignatureDoesNotMatch": ("the secret does not belong to the access key", "correct the secret"),
    "ExpiredToken": (EXPIRED, "log in again"),
    "InvalidToken": ("the store does not know the session token", "name the variables of one login, with its token"),
    "Unauthorized": ("the store does not accept the keys", "name the keys of this store"),
    "RequestTimeTooSkewed": ("the clocks of this computer and the store differ", "set the clock"),
    "PermanentRedirect": ("the bucket is in another region", "name its region"),
    "AuthorizationHeaderMalformed": ("the bucket is in another region", "name its region"),
    "IllegalLocationConstraintException": ("the bucket is in another region", "name its region"),
    "NoSuchKey": ("the object is not there", ""),
    "AuthenticationRequired": (f"{EXPIRED}, or the store does not know them", "log in again, or name other keys"),
}


_STATUSES = {"401 Unauthorized": "AuthenticationRequired", "403 Forbidden": "AccessDenied"}
"""The codes of `_MEANINGS` by the status lines of answers without a text, such as those about HEAD requests."""


def opened(
    bucket: Bucket,
    variables: Mapping[str, str] = os.environ,
    patience: float = PATIENCE,
    newest: Callable[[], Sequence[str]] | None = None,
    *,
    unsigned: bool = False,
) -> ObjectStore:
    """Return the store of a bucket. Nothing is asked yet, but for the bucket's region if it is not known.

    Args:
        variables: where the values of `Bucket.keys` are.
        patience: seconds after which a request has failed that has no answer, or was not sent to its end.
        newest: returns the values for the next request, which may be others each time. Any thread may call it. Default
            None: those of `variables`.
        unsigned: True to use no login if the bucket has no keys. Then only public buckets can be read.

    Raises:
        UsageError: a variable has no value, or a library is not installed.
    """
    if find_spec("obstore") is None:
        raise UsageError(MISSING.format("obstore"))
    from obstore.store import LocalStore, S3Store

    if bucket.scheme == "file":
        if not os.path.isdir(bucket.name):
            raise UsageError(f"{bucket.name} is no folder here; make it, or name another one")
        return LocalStore(bucket.name)
    bucket = google.as_s3(bucket)
    common: dict[str, Any] = {
        "client_options": {
            "timeout": f"{patience:g}s",
            "connect_timeout": f"{PATIENCE:g}s",
            "allow_http": (bucket.endpoint or _endpoint_in_environment()).startswith("http://"),
        },
        "retry_config": {"max_retries": 2, "retry_timeout": timedelta(seconds=patience)},
    }
    if bucket.prefix:
        common["prefix"] = bucket.prefix
    if bucket.scheme == "gs":
        if newest is None and bucket.keys:
            given = values(bucket, variables)
            newest = lambda: given  # noqa: E731
        return google.opened(bucket, common, newest, unsigned)
    if bucket.endpoint:  # by a name that is stronger than all variables of the environment
        common |= {"aws_endpoint_url_s3": bucket.endpoint, "virtual_hosted_style_request": False}
    if newest is not None:
        common["credential_provider"] = lambda: _login(newest(), datetime.now(UTC) + _AT_ONCE)
    elif bucket.keys:
        login = _login(values(bucket, variables), None)
        common["credential_provider"] = lambda: login
    elif unsigned:
        common["skip_signature"] = True
    elif not bucket.identity and find_spec("boto3") is not None:  # obstore asks the machine for its identity
        common |= _of_this_computer()
    region = bucket.region or (USUAL_REGION if bucket.endpoint else region_of(bucket, variables, unsigned=unsigned))
    # not all stores can delete many objects at once
    return S3Store(bucket.name, region=region, disable_bulk_delete=True, **common)


def endpoint_here() -> str:
    """Return the endpoint that the environment or boto3's files of this computer name for buckets; "" for none.

    Raises UsageError if these files have a mistake.
    """
    if find_spec("boto3") is None:
        return _endpoint_in_environment()
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config

    with _mistakes_told():
        session = boto3.Session()
        named, usual = (
            session.client(
                "s3",
                region_name=USUAL_REGION,
                config=Config(signature_version=UNSIGNED, ignore_configured_endpoint_urls=ignores),
            ).meta.endpoint_url
            for ignores in (False, True)
        )
    return "" if named == usual else str(named)


def _endpoint_in_environment() -> str:
    """Return the endpoint that the environment of this computer names, as boto3 and obstore read it; "" for none."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


def _login(found: Sequence[str], expires: datetime | None) -> dict[str, Any]:
    """Return credentials as obstore takes them."""
    key, secret, token = [*found, None][:3]
    return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": expires}


def values(bucket: Bucket, variables: Mapping[str, str]) -> list[str]:
    """Return the values of `Bucket.keys`. Raises UsageError if one has none, or one that no key has."""
    found = [variables.get(each, "") for each in bucket.keys]
    for number, (name, value) in enumerate(zip(bucket.keys, found, strict=True), 1):
        which = name if _PLAIN_NAME.fullmatch(name) else f"variable {number} of the keys"
        if not value:
            raise UsageError(f"{which}, which {bucket} needs, has no value in the environment; set it")
        if not value.isprintable() or not value.isascii() or value != value.strip():
            raise UsageError(
                f"{which} has characters that no key has, such as a space or the end of a line; correct it"
            )
    return found


def client(bucket: Bucket, variables: Mapping[str, str] = os.environ, *, unsigned: bool = False) -> Any:
    """Return boto3's client for a bucket with the protocol of S3, which can do what obstore cannot.

    `unsigned` is as of `opened`. Raises UsageError as `opened` does.
    """
    bucket = google.as_s3(bucket)
    if find_spec("boto3") is None:
        raise UsageError(MISSING.format("boto3"))
    import boto3
    from botocore import UNSIGNED
    from botocore.config import Config

    timing: dict[str, Any] = {
        "connect_timeout": PATIENCE,
        "read_timeout": PATIENCE,
        "retries": {"total_max_attempts": 3},
    }
    style: dict[str, Any] = {"s3": {"addressing_style": "path"}} if bucket.endpoint else {}
    if unsigned and not bucket.keys:
        style["signature_version"] = UNSIGNED
    with _mistakes_told():
        return boto3.Session(*values(bucket, variables)).client(
            "s3",
            endpoint_url=bucket.endpoint or None,
            region_name=bucket.region or USUAL_REGION,
            config=Config(**timing, **style),
        )


def region_of(bucket: Bucket, variables: Mapping[str, str] = os.environ, *, unsigned: bool = False) -> str:
    """Return the region of a bucket, which the store tells also to those who may not use it; "" where none is needed.

    `unsigned` is as of `opened`. Raises UsageError if it does not tell.
    """
    if bucket.scheme != "s3":
        return ""
    asked = client(bucket, variables, unsigned=unsigned)
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        said = asked.head_bucket(Bucket=bucket.name)
    except ClientError as e:
        said = e.response
    except BotoCoreError as e:
        raise UsageError(
            f"the region of {bucket} cannot be looked up: {one_line(str(e), 200)}; log in, or name it"
        ) from e
    found = said.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region", "")
    if not found:
        if said.get("Error", {}).get("Code") in ("404", "NoSuchBucket"):
            raise UsageError(f"{bucket}: there is no such bucket; make it, or correct the URL or the endpoint")
        raise UsageError(f"the store does not tell the region of {bucket}; name it")
    return str(found)


def _of_this_computer() -> dict[str, Any]:
    """Return the credentials that this computer has, as arguments of the store; {} for none that boto3 finds."""
    import boto3
    from obstore.auth.boto3 import Boto3CredentialProvider

    with _mistakes_told():
        session = boto3.Session()
        return {} if session.get_credentials() is None else {"credential_provider": Boto3CredentialProvider(session)}


@contextmanager
def _mistakes_told() -> Iterator[None]:
    """Raise UsageError for mistakes in the settings from which boto3 takes a login, and in an endpoint."""
    from botocore.exceptions import BotoCoreError

    try:
        yield
    except (BotoCoreError, ValueError) as e:
        raise UsageError(f"no login for the bucket: {one_line(str(e), 200)}; correct it, or name keys") from e


def trouble(error: Exception) -> Trouble:
    """Return what an error of obstore means."""
    text = str(error).partition("\n\nDebug source")[0]
    found = _CODE.search(text)
    if "LOCATION" in text:  # a redirect to another region, which does not say to which
        return Trouble(*_MEANINGS["PermanentRedirect"])
    if "External" in text and "credential provider" in text:
        return Trouble("the login of this computer has failed or expired", "log in again")
    if any(each in text for each in _LOGINS):  # the last place where a login is looked for
        return Trouble(NO_LOGIN, "log in, or name keys")
    bare = next((code for status, code in _STATUSES.items() if status in text), "")
    code = (found[1] or found[2]) if found else bare
    if code in _MEANINGS:
        meaning, advice = _MEANINGS[code]
        region = _REGION.search(text)
        if region and "region" in advice:
            advice = f"name its region, {region[1] or region[2]}"
        details = _DETAILS.search(text)  # at Google, such as the permission that is missing
        if details and advice:
            advice = f"{advice} ({one_line(unescape(details[1]), 200)})"
        return Trouble(meaning, advice)
    if "error sending request" in text or "operation timed out" in text:
        return Trouble(UNREACHED, "check the endpoint, the network, and whether a proxy changes certificates")
    said = _SAID.search(text)
    return Trouble(f"the store answers {code}: {one_line(said[1], 200)}" if said else one_line(text, 300), "")
