"""A service account that reaches one prefix of a bucket of Cloud Storage, and nothing else.

Requests, read 2026-11-30:

- accounts: https://cloud.google.com/iam/docs/reference/rest/v1/projects.serviceAccounts
- policies: https://cloud.google.com/storage/docs/json_api/v1/buckets/getIamPolicy and setIamPolicy
- conditions, which need uniform bucket-level access: https://cloud.google.com/storage/docs/access-control/iam#conditions
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from skypool.buckets.bucket import Bucket
from skypool.buckets.downscoped import ROLE
from skypool.buckets.google import request, without_lists, without_netrc
from skypool.buckets.policies import condition
from skypool.drivers.bucket_identity import BucketIdentity
from skypool.errors import UsageError
from skypool_gcp import _api
from skypool_gcp._sdk import auth_requests, exceptions

_BASES = {"iam": "https://iam.googleapis.com", "storage": "https://storage.googleapis.com"}
_PATIENCE = 30.0
"""Seconds after which a request that has no answer has failed."""
_TO_SPREAD = 120.0
"""Seconds in which a new account must be known everywhere: https://cloud.google.com/iam/docs/access-change-propagation."""
_PAUSE = 2.0
"""Seconds between two attempts to change a policy."""
_CHANGED = HTTPStatus.CONFLICT, HTTPStatus.PRECONDITION_FAILED
"""What is answered to who would replace a policy that has changed meanwhile."""
_LONGEST = 256
"""The most bytes of the description of an account."""


def name_of(bucket: Bucket) -> str:
    """Return the id of the service account for a prefix: at most 30 characters, with 32 bits of a hash."""
    place = f"{bucket.name}/{bucket.prefix}"
    plain = re.sub(r"[^a-z0-9]+", "-", place.lower()).strip("-")
    return f"skypool-{plain[:13].strip('-')}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def identity(project: str, bucket: Bucket) -> BucketIdentity:
    """Return the identity for the prefix of a bucket. Raises as `Identifies.bucket_identity` does."""
    found = _ask("storage", "GET", _path_of(bucket), f"to look at {bucket}", accepts=(HTTPStatus.NOT_FOUND,))
    if "error" in found:
        raise UsageError(f"{bucket}: there is no such bucket; make it, or correct the URL")
    if not found.get("iamConfiguration", {}).get("uniformBucketLevelAccess", {}).get("enabled"):
        raise UsageError(
            f"{bucket} has access lists for single objects, so that no account can be limited to a prefix; switch them "
            f"off: {without_lists(bucket)}"
        )
    name = name_of(bucket)
    email = f"{name}@{'.'.join(reversed(project.split(':')))}.iam.gserviceaccount.com"
    member = f"serviceAccount:{email}"
    return BucketIdentity(
        plan=(
            f"service account {email}, for {bucket} alone, by a binding in the policy of the bucket:\n"
            f"role: {ROLE}\ncondition: {condition(bucket)}"
        ),
        use=(
            f"on machines of Google Cloud: GCP(service_account={email!r}) with Bucket({bucket.url!r}, identity=True)\n"
            f"  your login needs the role roles/iam.serviceAccountUser for that account\n"
            f"elsewhere, no account is needed: Bucket({bucket.url!r}) makes temporary credentials"
        ),
        removal="\n".join(f"  gcloud {each}" for each in _removals(bucket, email, member)),
        make=lambda: _make(project, bucket, name, email, member),
    )


def _make(project: str, bucket: Bucket, name: str, email: str, member: str) -> None:
    """Make the account and the binding, or what is missing of them.

    Raises UsageError if the account is another one, or may do more in the bucket than skypool lets it.
    """
    text = f"Machines that skypool rents save files to {bucket.url}."
    said = {"displayName": "skypool", "description": text.encode()[:_LONGEST].decode(errors="ignore")}
    asked = {"accountId": name, "serviceAccount": said}
    accounts = f"/v1/projects/{project}/serviceAccounts"
    _ask("iam", "POST", accounts, "to make a service account", accepts=(HTTPStatus.CONFLICT,), body=asked)
    there = _ask("iam", "GET", f"{accounts}/{email}", "to look at a service account", until=_TO_SPREAD)
    if there.get("description") != said["description"] or there.get("disabled"):
        raise UsageError(
            f"the service account {email} exists and was not made for {bucket}, or is disabled; remove it, or use "
            "another prefix"
        )
    _bind(bucket, member)


def _bind(bucket: Bucket, member: str) -> None:
    """Add the binding to the policy of the bucket, which others may change meanwhile."""
    binding = {"role": ROLE, "members": [member], "condition": {"title": "skypool", "expression": condition(bucket)}}
    what = f"to change the policy of {bucket.name}"
    until = time.monotonic() + _TO_SPREAD
    while True:
        path = f"{_path_of(bucket)}/iam"
        policy = _ask("storage", "GET", f"{path}?optionsRequestedPolicyVersion=3", what)
        theirs = [each for each in policy.get("bindings", ()) if member in each["members"]]
        others = [each["role"] for each in theirs if not _is_ours(each, binding)]
        if others:
            raise UsageError(
                f"{member} may do more in gs://{bucket.name} than skypool lets it: {', '.join(others)}; remove that "
                "from the policy of the bucket"
            )
        if theirs:
            return
        changed = {**policy, "version": 3, "bindings": [*policy.get("bindings", ()), binding]}
        is_last = time.monotonic() > until
        tries = "" if is_last else member.partition(":")[2]
        answer = _ask("storage", "PUT", path, what, accepts=() if is_last else _CHANGED, body=changed, unknown=tries)
        if "error" not in answer:
            return
        time.sleep(_PAUSE)  # somebody else has changed it, or the new account is not known there yet


def _is_ours(binding: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    expressions = [each.get("condition", {}).get("expression") for each in (binding, wanted)]
    return bool(binding["role"] == wanted["role"] and expressions[0] == expressions[1])


def _removals(bucket: Bucket, email: str, member: str) -> list[str]:
    """Return the commands that remove all of it, in their order."""
    return [
        f"storage buckets remove-iam-policy-binding gs://{bucket.name} --member={member} --role={ROLE} --all",
        f"iam service-accounts delete {email}",
    ]


def _path_of(bucket: Bucket) -> str:
    return f"/storage/v1/b/{quote(bucket.name, safe='')}"


def _ask(
    api: str,
    method: str,
    path: str,
    what: str,
    accepts: Collection[int] = (),
    body: Mapping[str, Any] | None = None,
    until: float = 0.0,
    unknown: str = "",
) -> dict[str, Any]:
    """Make a request, and return the answer; an error, too, if its status is among `accepts`.

    Args:
        what: the request in words, for the message of an error.
        until: seconds for which something that is not there is asked for again.
        unknown: the email address of an account that may not be known yet, so that an error which names it is accepted.
    """
    address = (_api.endpoint(api) or _BASES[api]).removesuffix("/storage/v1")
    session: Any = auth_requests.AuthorizedSession(_api.credentials(api), auth_request=request())
    ends = time.monotonic() + until

    def ask() -> dict[str, Any]:
        while True:
            said = session.request(method, f"{address}{path}", json=body, timeout=_PATIENCE)
            is_unknown = bool(unknown) and said.status_code == HTTPStatus.BAD_REQUEST and unknown in said.text
            if said.status_code == HTTPStatus.NOT_FOUND and time.monotonic() < ends:
                time.sleep(_PAUSE)
            elif said.ok or said.status_code in accepts or is_unknown:
                return dict(said.json())
            else:
                raise exceptions.from_http_response(said)

    with without_netrc(session):
        return _api.call(what, ask)
