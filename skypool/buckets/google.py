"""Google Cloud Storage: opens a bucket with tokens, and makes the requests that obstore cannot make.

obstore speaks the XML API (https://cloud.google.com/storage/docs/xml-api/overview, read 2026-11-30). The login of this
computer is what Google calls Application Default Credentials. HMAC keys sign as at S3, so that buckets with these are
opened with that protocol: see `as_s3`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, urlsplit

from skypool.buckets.bucket import Bucket, is_private
from skypool.errors import UsageError
from skypool.text import one_line

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from obstore.store import GCSStore
    from requests import Session

ENDPOINT = "https://storage.googleapis.com"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
"""What a token may be used for: all that the roles of its account allow."""
LOG_IN = "run `gcloud auth application-default login`"
_PATIENCE = 10
"""Seconds after which a request that has no answer has failed."""
_AT_ONCE = timedelta(seconds=1)
"""The life of a token that may be replaced at any time. obstore asks again for one that expires soon."""
_DOTS = {".": "%2E", "..": "%2E%2E"}
"""The parts of a path that mean another folder, as they are written to mean themselves."""
S = TypeVar("S", bound="Session")


class NoLogin(UsageError):
    """Error: this computer has no login for Google Cloud."""


class Refused(OSError):
    """Error: the store refuses a request. `code` is its word for that."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def is_google(bucket: Bucket) -> bool:
    """Return True if a bucket is in Cloud Storage, by either protocol."""
    host = urlsplit(bucket.endpoint).hostname or ""
    return bucket.scheme == "gs" or host.endswith(".googleapis.com")  # of a region or a private network, too


def as_s3(bucket: Bucket) -> Bucket:
    """Return a bucket with HMAC keys as one with the protocol of S3. Other buckets are returned as they are."""
    if bucket.scheme != "gs" or len(bucket.keys) != 2:
        return bucket
    return replace(bucket, url=f"s3{bucket.url.removeprefix('gs')}", endpoint=bucket.endpoint or ENDPOINT)


def without_lists(bucket: Bucket) -> str:
    """Return the command that gives a bucket uniform access: none by lists of single objects any more."""
    return f"`gcloud storage buckets update gs://{bucket.name} --uniform-bucket-level-access`"


def opened(
    bucket: Bucket, common: Mapping[str, Any], tokens: Callable[[], Sequence[str]] | None, unsigned: bool
) -> GCSStore:
    """Return the store of a bucket, as `store.opened` does.

    Args:
        common: the arguments that all stores have.
        tokens: returns the token for the next request. Default None: the login of this computer is used, or the
            identity of the machine, or none if `unsigned`.
    """
    from obstore.exceptions import BaseError
    from obstore.store import GCSStore

    # whatever the environment names
    more: dict[str, Any] = {"base_url": bucket.endpoint or ENDPOINT, "skip_signature": unsigned and tokens is None}
    if tokens is not None:
        more["credential_provider"] = lambda: {"token": tokens()[0], "expires_at": datetime.now(UTC) + _AT_ONCE}
    elif unsigned:
        more["credential_provider"] = lambda: {"token": "", "expires_at": None}  # else it looks for a login
    elif not bucket.identity:  # obstore asks the machine for its identity
        from obstore.auth.google import GoogleCredentialProvider

        more["credential_provider"] = GoogleCredentialProvider(login(more["base_url"]), request=request())
    try:
        return GCSStore(bucket.name, **common, **more)
    except BaseError as e:  # such as a file of GOOGLE_SERVICE_ACCOUNT that is not there
        why = one_line(str(e).partition("\n\nDebug source")[0], 200)
        raise UsageError(f"the login for {bucket} in the environment or the files of Google is wrong: {why}") from e


def login(address: str) -> Any:
    """Return the login of this computer, as google-auth has it, for requests to an address.

    Raises UsageError if there is none, or if its token would be sent to another computer unencrypted.
    """
    if not is_private(address):
        raise UsageError(
            f"{address} would get the token of this computer's login unencrypted, which everybody on the way can use; "
            "name an address with https://"
        )
    try:
        import google.auth
        from google.auth.exceptions import GoogleAuthError
    except ImportError as e:
        raise UsageError(
            f"google-auth is not installed on this computer, and buckets with gs:// need it ({e}): "
            "pip install 'skypool[buckets]'"
        ) from e
    try:
        found, _ = google.auth.default(scopes=[SCOPE])
    except OSError as e:
        raise UsageError(
            f"the login for Google Cloud cannot be read: {one_line(str(e), 300)}; correct the file, or what "
            f"GOOGLE_APPLICATION_CREDENTIALS names, or {LOG_IN}"
        ) from e
    except GoogleAuthError as e:
        why = one_line(str(e), 300).partition(". ")[0]
        raise NoLogin(f"this computer has no login for Google Cloud ({why}); {LOG_IN}") from e
    return found


def request() -> Any:
    """Return what makes requests for google-auth. One that has no answer fails after some seconds."""
    import requests
    from google.auth.transport.requests import Request

    return partial(Request(without_netrc(requests.Session())), timeout=_PATIENCE)


def without_netrc(session: S) -> S:
    """Return a session of requests that sends its own tokens: otherwise, ~/.netrc would replace them."""
    session.auth = lambda request: request
    return session


def override(api: str, usual: str) -> str:
    """Return the address of one of Google's APIs, such as "sts": that of gcloud's variable for it, or the usual one."""
    return os.environ.get(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{api.upper()}", "").rstrip("/") or usual


# --- unfinished uploads --------------------------------------------------------------------------------------


def uploads(bucket: Bucket, values: Sequence[str]) -> Iterator[tuple[str, str, datetime]]:
    """Yield the name, the id and the beginning of each unfinished upload below the prefix of a bucket.

    The request is https://cloud.google.com/storage/docs/xml-api/get-bucket-uploads (read 2026-11-30).

    Args:
        values: a token; () for the login of this computer.

    Raises:
        UsageError: this computer has no login.
        Refused: the store refuses.
        requests.RequestException, google.auth.exceptions.GoogleAuthError: it cannot be reached, or the login fails.
    """
    asked = {"uploads": "", "prefix": f"{bucket.prefix}/" if bucket.prefix else ""}
    while True:
        said = _without_namespaces(_ask(bucket, values, "GET", "", asked))
        for each in said.iter("Upload"):
            key, upload, began = (each.findtext(name) for name in ("Key", "UploadId", "Initiated"))
            if key and upload and began:
                yield key, upload, datetime.fromisoformat(began)
        marks = {"key-marker": said.findtext("NextKeyMarker"), "upload-id-marker": said.findtext("NextUploadIdMarker")}
        following = asked | {name: mark for name, mark in marks.items() if mark}
        if said.findtext("IsTruncated") != "true" or following == asked:
            return
        asked = following


def abort(bucket: Bucket, values: Sequence[str], key: str, upload: str) -> None:
    """Remove the parts of an unfinished upload. Raises as `uploads` does."""
    _ask(bucket, values, "DELETE", key, {"uploadId": upload})


def _ask(bucket: Bucket, values: Sequence[str], method: str, key: str, query: Mapping[str, str]) -> bytes:
    """Make a request of the XML API, and return the answer."""
    import requests

    headers = {"Authorization": f"Bearer {values[0]}"} if values else {}
    address = bucket.endpoint or ENDPOINT
    asked = requests.Request(method, f"{address}/{bucket.name}", params=dict(query)).prepare()
    if not values:
        login(address).before_request(request(), method, asked.url, headers)
    asked.headers.update(headers)
    if key:  # after requests has changed what it changes in a path: it takes "a/../b" for "b"
        path = "/".join(_DOTS.get(each, each) for each in quote(key, safe="/").split("/"))
        asked.url = (asked.url or "").replace("?", f"/{path}?", 1)
    with without_netrc(requests.Session()) as session:
        more = session.merge_environment_settings(asked.url, {}, None, None, None)  # proxies and their certificates
        said = session.send(asked, timeout=_PATIENCE, allow_redirects=False, **more)
    if said.ok and not said.is_redirect:
        return bytes(said.content)
    raise _refusal(said.status_code, said.content)


def _refusal(status: int, content: bytes) -> Refused:
    from xml.etree.ElementTree import ParseError

    try:
        said = _without_namespaces(content)
        code = said.findtext("Code") or str(status)
        words = " ".join(filter(None, (said.findtext("Message"), said.findtext("Details"))))
    except ParseError:
        code, words = str(status), content.decode(errors="replace")
    return Refused(code, one_line(f"the store answers {code}: {words}", 300))


def _without_namespaces(content: bytes) -> Element:
    from xml.etree.ElementTree import fromstring

    found = fromstring(content)
    for each in found.iter():
        each.tag = each.tag.rpartition("}")[2]
    return found
