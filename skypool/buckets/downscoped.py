"""Tokens of Google for the prefix of one bucket, which the login of this computer makes.

Security Token Service makes them of a token of the login and a Credential Access Boundary, which they cannot exceed:
https://cloud.google.com/iam/docs/downscoping-short-lived-credentials (read 2026-11-30). They count as long as the token
that they are made of, which is an hour at most. The bucket must have uniform bucket-level access.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, NamedTuple

from skypool.buckets import google
from skypool.buckets.bucket import Bucket
from skypool.buckets.policies import condition
from skypool.errors import UsageError
from skypool.text import one_line

ROLE = "roles/storage.objectUser"
"""The role with what saving needs: to list, read, write and delete objects, and to upload them in parts."""
STS = "https://sts.googleapis.com"
_EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
_LONGEST = 3600.0
"""The most seconds for which a token counts."""
_CACHED = 225.0
"""The seconds before its end in which a machine of Google surely gives another token of its service account. Before, it
gives the same one: https://github.com/googleapis/google-cloud-go/pull/9139 (read 2026-11-30)."""
_ACCESS_TOKEN = "urn:ietf:params:oauth:token-type:access_token"


def boundary(bucket: Bucket) -> dict[str, Any]:
    """Return the Credential Access Boundary for the prefix of a bucket."""
    rule: dict[str, Any] = {
        "availableResource": f"//storage.googleapis.com/projects/_/buckets/{bucket.name}",
        "availablePermissions": [f"inRole:{ROLE}"],
    }
    if bucket.prefix:
        rule["availabilityCondition"] = {"expression": condition(bucket), "title": "skypool"}
    return {"accessBoundary": {"accessBoundaryRules": [rule]}}


class Token(NamedTuple):
    """A token for the prefix of a bucket.

    Attributes:
        value: the token.
        life: the seconds for which it counts.
        least: the seconds for which it counts, at least, when it is to be replaced; 0 if that depends on `life` alone.
    """

    value: str
    life: float
    least: float = 0.0


def token(bucket: Bucket, remedies: str) -> Token:
    """Return a new token for the prefix of a bucket.

    Raises UsageError if this computer has no login, or one that cannot make it. `remedies` says what else helps.
    """
    limits, service = boundary(bucket), google.override("sts", STS)
    login = google.login(service)
    from google.auth import compute_engine
    from google.auth.exceptions import GoogleAuthError, TransportError
    from google.oauth2 import sts

    request = google.request()
    what = "the login of this computer has failed or expired"
    try:
        login.refresh(request)
        what = "Security Token Service makes none"
        said = sts.Client(f"{service}/v1/token").exchange_token(  # type: ignore[no-untyped-call,unused-ignore]
            request=request,
            grant_type=_EXCHANGE,
            subject_token=login.token,
            subject_token_type=_ACCESS_TOKEN,
            requested_token_type=_ACCESS_TOKEN,
            additional_options=limits,
        )
        found = str(said["access_token"])
    except (GoogleAuthError, OSError, ValueError, KeyError) as e:
        if isinstance(e, TransportError) or isinstance(e.__cause__, TransportError):
            raise UsageError(
                f"no temporary credentials for {bucket}: Google, or who makes its tokens, cannot be reached: "
                f"{one_line(str(e), 300)}; check the network and the proxy"
            ) from e
        raise UsageError(
            f"no temporary credentials for {bucket}: {what}: {one_line(str(e.args[0] if e.args else e), 300)}; to log "
            f"in again, {google.LOG_IN}, or {remedies}"
        ) from e
    if said.get("expires_in"):
        life = float(said["expires_in"])
    else:  # as long as the token that it is made of
        now, ends = datetime.now(UTC), login.expiry.replace(tzinfo=UTC) if login.expiry else None
        life = (ends - now).total_seconds() if ends else _LONGEST
        if life <= 0:
            raise UsageError(
                f"no temporary credentials for {bucket}: the token of the login expires at {ends:%Y-%m-%d %H:%M} UTC, "
                f"and the clock of this computer says {now:%Y-%m-%d %H:%M} UTC; set the clock"
            )
    return Token(found, min(_LONGEST, life), _CACHED if isinstance(login, compute_engine.Credentials) else 0.0)
