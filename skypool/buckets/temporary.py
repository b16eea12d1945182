"""`Issuer`: makes temporary credentials for the prefix of a bucket, with the login of this computer.

AWS's STS makes them: https://docs.aws.amazon.com/IAM/latest/UserGuide/id_credentials_temp_request.html and the pages
of its requests (read 2026-11-30). The keys of an IAM user may ask for 36 hours by GetFederationToken. A login that is
temporary itself, such as that of SSO, must assume a role: for 12 hours at most if the role allows it, and for one hour
if it is a role's login already. Both requests take a policy, which the credentials cannot exceed. Other stores, such as
MinIO, know AssumeRole. For buckets of Google, `downscoped` makes a token.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from typing import Any

from skypool import clock
from skypool.buckets import downscoped, google, store
from skypool.buckets.bucket import Bucket
from skypool.buckets.policies import LONGEST, policy
from skypool.errors import UsageError
from skypool.text import one_line

_HALF = 0.5
"""The part of their life after which credentials are renewed."""
_AGAIN = 30.0
"""Seconds after which credentials are asked for again that could not be made."""
_LIVES = 43200, 3600
"""The seconds that are asked for: a role that does not allow 12 hours, or that a role assumes, allows one."""
_TOKEN = "AWS_SESSION_TOKEN"
"""The variable of a session token, as `aws configure export-credentials --format env` prints it."""
_EXPIRES = "AWS_CREDENTIAL_EXPIRATION"
"""The variable with the time when it expires."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Credentials that expire.

    Attributes:
        values: the access key, its secret and the session token; or a token alone.
        number: counts those of one `Issuer`, from 1.
        life: the seconds for which they count.
        made: when they were made, in seconds of `clock.elapsed()`.
        least: the seconds for which they may count only, when new ones are to be made; 0 if that depends on `life`.
    """

    values: tuple[str, ...] = field(repr=False)
    number: int
    life: float
    made: float
    least: float = 0.0

    @property
    def left(self) -> float:
        """The seconds for which they still count; 0 if they have expired."""
        return max(0.0, self.made + self.life - clock.elapsed())


def argument(name: str, value: object = None) -> str:
    """Return an argument as a program writes it, with a value unless it is None."""
    return f"{name}=True" if name == "identity" else f"{name}={'' if value is None else repr(value)}"


def remedies(bucket: Bucket, option: Callable[..., str] = argument) -> str:
    """Return what to do about a login that makes no temporary credentials for a bucket, or too short ones.

    `option` returns an option as the user writes it.
    """
    role = "" if bucket.scheme == "gs" else f" name a role to assume as {option('role')},"
    return (
        f"name keys that reach this prefix alone as {option('keys')},{role} or "
        f"give the machines an identity and pass {option('identity')} (`skypool setup` makes one)"
    )


class Issuer:
    """Makes temporary credentials for the prefix of one bucket. Any thread may use it.

    Args:
        bucket: the bucket. Its region is known.
        reads: True if they may only list and read.

    Attributes:
        trouble: why the last attempt to make some has failed; "" if it has not.
    """

    def __init__(self, bucket: Bucket, *, reads: bool = False) -> None:
        self.trouble = ""
        self._bucket, self._reads = bucket, reads
        self._name = f"skypool-{secrets.token_hex(4)}"  # in the log of the account, for all that it makes
        self._last: Credentials | None = None
        self._again = -math.inf
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Issuer({self._bucket!r})"

    @property
    def shortest(self) -> float:
        """The seconds for which credentials last when nobody renews them, at least; 0 before there are any."""
        last = self._last
        return 0.0 if last is None else min(last.least or math.inf, _HALF * last.life)

    def lasts(self, number: int) -> float:
        """Return the seconds for which the credentials with this number still count; 0 if there are newer ones."""
        last = self._last
        return last.left if last is not None and last.number == number else 0.0

    def current(self) -> Credentials:
        """Return credentials as `newest` does. Raises UsageError if there are none that count."""
        found = self.newest()
        if found is None:
            raise UsageError(self.trouble)
        return found

    def newest(self) -> Credentials | None:
        """Return credentials; new ones if half of the life of the last ones is over.

        If new ones cannot be made, return the last ones while they count, and try again later. Returns None if there
        are none that count.
        """
        with self._lock:
            last = self._last
            is_due = last is None or last.left <= _HALF * last.life
            if is_due and clock.elapsed() >= self._again:
                try:
                    self._last = last = self._made((last.number if last else 0) + 1)
                    self.trouble = ""
                except Exception as e:  # noqa: BLE001 - whatever it is, the last ones count, and it is told
                    text = f"no temporary credentials for {self._bucket}: {type(e).__name__}: {one_line(str(e), 300)}"
                    self.trouble = str(e) if isinstance(e, UsageError) else text
                    self._again = clock.elapsed() + _AGAIN
            return last if last is not None and last.left else None

    def _made(self, number: int) -> Credentials:
        """Ask for new credentials."""
        began = clock.elapsed()
        if self._bucket.scheme == "gs":
            token, life, least = downscoped.token(self._bucket, remedies(self._bucket))
            return Credentials((token,), number, life, began, least)
        check_login(self._bucket)
        with _told(self._bucket):
            said = self._answer()
        found = said["Credentials"]
        values = found["AccessKeyId"], found["SecretAccessKey"], found["SessionToken"]
        return Credentials(values, number, _life(said, found["Expiration"]), began)

    def _answer(self) -> Any:
        from botocore.exceptions import ClientError

        bucket, client = self._bucket, _client(self._bucket)
        text = self._policy(client)
        if len(text) > LONGEST:
            raise UsageError(
                f"the policy for {bucket} would have {len(text)} characters, and STS takes {LONGEST}; use a shorter "
                "prefix, or name keys that reach it alone"
            )
        if not bucket.role:
            return client.get_federation_token(Name=self._name, Policy=text, DurationSeconds=_LIVES[0])
        longest, usual = _LIVES
        asked = {"RoleArn": bucket.role, "RoleSessionName": self._name, "Policy": text}
        try:
            return client.assume_role(DurationSeconds=longest, **asked)
        except ClientError as e:
            if e.response.get("Error", {}).get("Code") != "ValidationError":
                raise
        return client.assume_role(DurationSeconds=usual, **asked)

    def _policy(self, client: Any) -> str:
        bucket = self._bucket
        if bucket.endpoint:
            return policy(bucket, reads=self._reads)
        return policy(bucket, client.get_caller_identity()["Arn"].split(":")[1], reads=self._reads)


def end_of(bucket: Bucket, variables: Mapping[str, str]) -> datetime | None:
    """Return when the session token among the keys of a bucket expires; None if that is not known.

    Raises UsageError if the environment names a time that is none.
    """
    if _TOKEN not in bucket.keys or not variables.get(_EXPIRES):
        return None
    try:
        found = datetime.fromisoformat(variables[_EXPIRES])
    except ValueError as e:
        raise UsageError(f"{_EXPIRES} is no time such as 2026-11-30T18:00:00Z; correct it, or unset it") from e
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def check_login(bucket: Bucket) -> bool:
    """Raise UsageError if this computer has no login that can make temporary credentials for a bucket.

    Return True if that login is one that is never renewed, and expires at a time that is not known.
    """
    if bucket.scheme == "gs":
        try:
            google.login(google.override("sts", downscoped.STS))
        except UsageError as e:
            raise UsageError(
                f"{bucket} needs credentials that a machine may have, which a login makes: {e}, or {remedies(bucket)}"
            ) from e
        return False
    if find_spec("boto3") is None:
        raise UsageError(store.MISSING.format("boto3"))
    import boto3

    if bucket.endpoint and not bucket.role:
        raise UsageError(
            f"{bucket} needs keys that a machine may have: those of this computer's login are never sent to one, and "
            f"{bucket.endpoint} is not known to make temporary ones. Name keys that reach "
            f"{bucket.prefix or bucket.name} alone as its keys, or a role that the store knows as role="
        )
    with _told(bucket):
        found = boto3.Session().get_credentials()
        login = None if found is None else found.get_frozen_credentials()
    if found is None or login is None:
        raise UsageError(
            f"{bucket} needs keys that a machine may have, and this computer has no login that could make temporary "
            f"ones. Log in, or {remedies(bucket)}"
        )
    if login.token and not bucket.role:
        ways = remedies(bucket)
        raise UsageError(
            f"{bucket} needs keys that a machine may have: the login of this computer is temporary itself, and must "
            f"assume a role to make some for {bucket.prefix or bucket.name} alone. {ways[0].upper()}{ways[1:]}"
        )
    return bool(login.token) and not hasattr(found, "refresh_needed")


def _client(bucket: Bucket) -> Any:
    """Return boto3's client of STS, with the login of this computer."""
    import boto3
    from botocore.config import Config

    timing: dict[str, Any] = {"connect_timeout": store.PATIENCE, "read_timeout": store.PATIENCE}
    return boto3.Session().client(
        "sts",
        endpoint_url=bucket.endpoint or None,
        region_name=bucket.region or store.USUAL_REGION,
        config=Config(**timing, retries={"total_max_attempts": 3}),
    )


def _life(said: Any, expires: datetime) -> float:
    """Return for how many seconds credentials count, by the clock of who made them."""
    headers = said.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    now = parsedate_to_datetime(headers["date"]) if "date" in headers else datetime.now(expires.tzinfo)
    return (expires - now).total_seconds()


_CODES = {
    "AccessDenied": "the login of this computer may not do that",
    "ExpiredToken": "the login of this computer has expired; log in again",
    "InvalidClientTokenId": "STS does not know the login of this computer",
    "PackedPolicyTooLarge": "the prefix is too long for a policy; use a shorter one",
}


@contextmanager
def _told(bucket: Bucket) -> Iterator[None]:
    """Raise UsageError for what boto3 raises while credentials for a bucket are made."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except UsageError:
        raise
    except ClientError as e:
        code = e.response.get("Error", {}).get("Code", "")
        request = "AssumeRole" if bucket.role else "GetFederationToken"
        how = f"; {bucket.role} must trust it" if bucket.role else ""
        why = f"{_CODES[code]}{how if code == 'AccessDenied' else ''}" if code in _CODES else one_line(str(e), 300)
        raise UsageError(f"no temporary credentials for {bucket} by {request}: {why}. Or {remedies(bucket)}") from e
    except (BotoCoreError, OSError, ValueError) as e:  # OSError of a program that a login names
        raise UsageError(
            f"no temporary credentials for {bucket}: {one_line(str(e), 300)}; log in again, or {remedies(bucket)}"
        ) from e
