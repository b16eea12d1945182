"""Credentials, errors, names and labels that all parts of the Google Cloud driver share.

- `credentials`, `endpoint`: the account and the addresses of Google's APIs.
- `call`, `error_of`: translate errors of Google's SDK to skypool's errors.
- `name`, `tag`: names of resources. `labels`, `said`, `description`, `tags_in`: write tags to resources and read them.

Tags are facts such as the pool and the node numbers, which skypool writes to each resource.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import lru_cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from skypool.drivers import recording, ssh_machine, tags
from skypool.drivers.pages import WholeList, whole_list
from skypool.drivers.refusals import Refusals
from skypool.drivers.retry import quietly
from skypool.drivers.settings import surroundings
from skypool.errors import ProviderError
from skypool.model import Order
from skypool.text import quotable
from skypool_gcp._sdk import auth, auth_credentials, auth_exceptions, exceptions, requests

if TYPE_CHECKING:
    from google.auth.credentials import Credentials

T = TypeVar("T")


class Paged(Protocol):
    """The type of a page of a list, which names the next page. For type checkers only."""

    @property
    def next_page_token(self) -> str: ...


Page = TypeVar("Page", bound=Paged)

REFUSALS = Refusals("skypool_gcp", "gcp", "Google Cloud")
"""The mapping of Google's error codes to skypool's errors. The table errors.csv of this package defines the mapping."""

_PUBLIC_PROJECTS = (
    "centos-cloud|cos-cloud|debian-cloud|deeplearning-platform-release|ml-images|rhel-cloud|rocky-linux-cloud|"
    "rocky-linux-accelerator-cloud|suse-cloud|ubuntu-os-accelerator-images|ubuntu-os-cloud"
)
"""Projects with images for everybody: https://cloud.google.com/compute/docs/images/os-details (read 2026-11-24)."""

PRIVATE = recording.Private(
    patterns={
        r"\b(ya29\.[\w.-]{8,})": ("secret",),
        r"\bAIza([\w-]{30,})": ("secret",),
        r"(?<![a-z0-9-])([a-z0-9-]+)@([a-z][a-z0-9-]{4,28}[a-z0-9])\.iam\.gserviceaccount\.com": ("person", "project"),
        r"\b(\d{6,})(?:-compute)?@[\w.-]*gserviceaccount\.com": ("account",),
        rf"\bprojects/(?!(?:{_PUBLIC_PROJECTS})\b)([a-z][a-z0-9-]{{4,28}}[a-z0-9])\b": ("project",),
        r"(?i)\bproject(?:s/|[ _-]?(?:number|id)?[\"':= ]+)(\d{6,})\b": ("account",),
        r"(?m)(?<![\w.-])([a-z_][\w.-]+):(?=(?:ssh-|ecdsa-))": ("person",),
    },
    fields={
        "billingaccountname": "account",
        "numericprojectid": "account",
    },
    accounts=frozenset(("commoninstancemetadata", "defaultserviceaccount")),
)
"""What a recording must not contain of Google's requests and replies: tokens, projects, and service accounts."""

DISABLED = ("SERVICE_DISABLED", "accessNotConfigured")
"""Error codes with which Google refuses a request if the API is not enabled for the project."""

LONGEST = 63
"""The largest length, in characters, of a resource's name or a label's value.

https://cloud.google.com/compute/docs/labeling-resources
"""

SLICE = "skypool-slice"
"""The label that marks a machine as a host of a TPU slice. Its value is the slice's name."""

USER = "ubuntu"
"""The name with which skypool logs in to machines."""

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
"""The OAuth scope that covers all Google Cloud APIs. The roles of an account decide what the account may do."""

WATCH = ssh_machine.notice_program(
    base="http://metadata.google.internal",
    path="/computeMetadata/v1/instance/preempted",
    headers={"Metadata-Flavor": "Google"},
    when="time.time() + 30 if said.strip() == 'TRUE' else None",
)
"""The source of a Python program that runs on a machine and waits for the notice that Google takes the machine back.

Google gives the notice 30 s before it takes the machine back.
"""


# --- calls of the SDK ----------------------------------------------------------------------------------------


def endpoint(api: str) -> str | None:
    """Return the address that the user set for one of Google's APIs, or None for Google's own address.

    The address is read from an environment variable of the Google Cloud CLI, such as
    CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE. A "/" or "/compute/v1" at the end of the address is removed.

    Args:
        api: The name of the API: "compute", "tpu", "cloudbilling", "iam" or "storage".
    """
    address = os.environ.get(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{api.upper()}", "").rstrip("/")
    return address.removesuffix("/compute/v1") or None


def credentials(api: str) -> Credentials:
    """Return the credentials for one of Google's APIs. The credentials are cached.

    Usually, these are the Application Default Credentials, which Google's tools find in the environment. Real
    credentials must not be sent unencrypted. So if the user set an address without TLS for the API ("http://" or
    "grpc://"), anonymous credentials are returned.

    Args:
        api: The name of the API: "compute", "tpu", "cloudbilling", "iam" or "storage".

    Raises:
        CredentialsError: There are no credentials, or they cannot be read.
    """
    if (endpoint(api) or "").startswith(("http://", "grpc://")):
        return _anonymous()
    found, _ = _default(_environment())
    return found


def project_of_credentials() -> str | None:
    """Return the id of the project that the credentials name, or None. Raise CredentialsError without credentials."""
    return _default(_environment())[1]


@lru_cache(maxsize=1)
def _anonymous() -> Credentials:
    """Return credentials that carry no account. All calls return the same object."""
    return auth_credentials.AnonymousCredentials()  # type: ignore[no-untyped-call,unused-ignore]  # Google's, untyped


def _environment() -> Hashable:
    """Return a value that changes if Google's environment variables or its credentials file change: a cache key."""
    folder = os.environ.get("CLOUDSDK_CONFIG") or "~/.config/gcloud"
    usual = f"{folder}/application_default_credentials.json"
    return surroundings(("GOOGLE_", "CLOUDSDK_"), {"GOOGLE_APPLICATION_CREDENTIALS": usual})


@lru_cache(maxsize=16)
def _default(environment: Hashable) -> tuple[Credentials, str | None]:
    """Return the Application Default Credentials and their project. Cached by `environment`, as this takes seconds."""
    found: tuple[Credentials, str | None] = call("to log in", lambda: auth.default(scopes=[SCOPE]))
    return followed(found[0]), found[1]


def call(what: str, do: Callable[[], T], **names: str) -> T:
    """Call a function that uses Google's SDK, and return its result. Errors of the SDK become skypool's errors.

    Args:
        what: The request in words, for the error's message.
        do: The function. It is called once.
        names: Values that the error's message may mention, such as `project`, the id of the project.

    Raises:
        ProviderError: The SDK raised an error, which is the cause of the ProviderError. The code of the SDK's error
            decides the subclass.
        Exception: Any other exception of the function, unchanged.
    """
    try:
        return do()
    except (exceptions.GoogleAPIError, auth_exceptions.GoogleAuthError, requests.RequestException) as e:
        raise error_of(e, what, **names) from quotable(e)
    finally:
        _note_tokens()


def pages(what: str, ask: Callable[[], Iterable[Page]], **names: str) -> WholeList[Page]:
    """Return all pages of a list, as Google's SDK requests them one after the other.

    All pages are fetched before the function returns, so that every error of the SDK becomes an error of skypool. A
    page that names an earlier page as the next one is an error, too, because the SDK would then go on for ever.

    Args:
        ask: Sends the request for the first page. It returns an iterator of the SDK, which requests further pages.
        what: The request in words, for the error's message.
        names: Values that the error's message may mention, such as `project`, the id of the project.

    Raises:
        ProviderError: The API refused a request, or the list cannot be read to its end (code "incomplete").
        NoAnswer: The API did not answer.
    """

    def read() -> WholeList[Page]:
        several = iter(ask())

        def page(token: str) -> tuple[list[Page], str]:
            found = next(several)
            return [found], found.next_page_token

        return whole_list(page, partial(REFUSALS.incomplete, what))

    return call(what, read, **names)


_tokens: WeakKeyDictionary[Credentials, str | None] = WeakKeyDictionary()
"""A dict from credentials to the last access token that `_note_tokens` saw. A new token means a request for one."""


def followed(credentials: Credentials) -> Credentials:
    """Return the credentials unchanged. From now on, recordings say when the SDK requests a token for them."""
    _tokens[credentials] = credentials.token
    return credentials


def _note_tokens() -> None:
    """If a recording is on, write into it that the SDK has requested new access tokens, and keep them out of it."""
    recorder = recording.current()
    if recorder is None:
        return
    for each, known in list(_tokens.items()):
        token: str | None = each.token
        if token and token != known:
            _tokens[each] = token
            recorder.hide(token)
            recorder.token(REFUSALS.provider)


def attend(client: Any, service: str) -> None:
    """Make a REST client of Google's SDK record its requests from now on. `service` is the API, such as "compute"."""
    session = client.transport._session  # the SDK has no public name for it
    recording.attend(session, REFUSALS.provider, service, private=PRIVATE)


def error_of(error: BaseException, what: str, **names: str) -> ProviderError:
    """Return, without raising it, skypool's error for an error of Google's SDK.

    The table errors.csv of this package maps the code and the text of the SDK's error to a class. If no row of the
    table fits, the class is ProviderError.

    Args:
        what: The request in words, for the error's message.
        names: Values that the error's message may mention, such as `project`, the id of the project.
    """
    if isinstance(error, exceptions.GoogleAPICallError):
        code, text = _refusal(error)
    else:
        code, text = REFUSALS.known(_class_names(error)), str(error)
    return REFUSALS.error(what, code, text, **{"project": "PROJECT", **names})


def unless_disabled(do: Callable[[], object], note: str) -> object:
    """Call `do`, which sends a request, and return its result.

    If the API is not enabled for the project, or the result is None, return `note` instead.

    Raises:
        ProviderError: The request failed for another reason.
    """
    answer = quietly(do, *DISABLED)
    return note if answer is None else answer


def _refusal(error: exceptions.GoogleAPICallError) -> tuple[str, str]:
    """Return (code, text) of an error of an API. If it has several codes, take the first one that errors.csv has."""
    codes = [each.get("reason", "") for each in error.errors or () if isinstance(each, Mapping)]
    codes.append(getattr(error, "reason", None) or "")
    codes.extend(_class_names(error))
    text = re.sub(r"^(GET|POST|PUT|PATCH|DELETE|HEAD) http\S+: ", "", str(error.message or error))
    return REFUSALS.known([code for code in codes if code]), text


def _class_names(error: BaseException) -> list[str]:
    """Return the names of an exception's class and all its base classes, the most specific first."""
    return [each.__name__ for each in type(error).__mro__]


# --- names and labels ----------------------------------------------------------------------------------------


def name(*words: str) -> str:
    """Return a name that Google accepts for a resource: "skypool" and the words, joined by "-".

    A name of more than 63 characters, or with characters other than [a-z0-9-], is changed. Upper case becomes lower
    case, other characters become "-", and the name is cut. A hash of the unchanged name is appended. The same words
    always give the same name.
    """
    whole = "-".join(("skypool", *words))
    if len(whole) <= LONGEST and re.fullmatch("[a-z0-9-]*[a-z0-9]", whole):
        return whole
    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
    readable = re.sub("[^a-z0-9-]", "-", whole.lower())[: LONGEST - len(digest) - 1]
    return f"{readable.rstrip('-')}-{digest}"


def tag(order: Order) -> str:
    """Return the network tag of the machines of one run of a pool. Firewall rules apply to machines with this tag.

    All orders of the run give the same tag.
    """
    return name(order.pool, tags.session(order))


def last_part(path: str) -> str:
    """Return the text after the last "/" of a path or URL: "us-central1-a" for ".../zones/us-central1-a"."""
    return path.rpartition("/")[2]


def region_of(zone: str) -> str:
    """Return the region of a zone: "us-central1" for "us-central1-a". Returns "" for a text without "-"."""
    return zone.rpartition("-")[0]


def deletes(url: str) -> str:
    """Return shell code with which a machine deletes a resource, usually itself.

    The code uses the rights of the machine's service account. If the deletion fails, the code switches the machine off.

    Args:
        url: The address of the resource in its API.
    """
    script = (files("skypool_gcp") / "end.sh").read_text("utf-8")
    return f"url={shlex.quote(url)}\n{script}"


def labels(said: Mapping[str, str]) -> dict[str, str]:
    """Encode skypool's tags as labels of a resource. The function `said` decodes the labels.

    Each character of a value other than [a-z0-9-] becomes "_xx" for each of its UTF-8 bytes, where xx are two hex
    digits. An encoded value of more than 63 characters continues in the labels "KEY_1", "KEY_2" and so on. Google
    allows 64 labels for a resource; this is not checked.
    """
    made: dict[str, str] = {}
    for key, text in said.items():
        escaped = re.sub("[^a-z0-9-]", _escaped, text)
        made[key] = escaped[:LONGEST]
        for number, start in enumerate(range(LONGEST, len(escaped), LONGEST), 1):
            made[f"{key}_{number}"] = escaped[start : start + LONGEST]
    return made


def said(labels: Mapping[str, str]) -> dict[str, str]:
    """Return skypool's tags, decoded from the labels of a resource. This is the inverse of the function `labels`.

    Only labels with names such as "skypool-pool" are read.
    """
    ours = [key for key in labels if re.fullmatch("skypool-[a-z]+", key)]
    return {key: re.sub("(_[0-9a-f]{2})+", _unescaped, _joined(labels, key)) for key in ours}


def _joined(labels: Mapping[str, str], key: str) -> str:
    """Return the whole value of a label that was split into the labels "KEY", "KEY_1", "KEY_2" and so on."""
    parts = [labels[key]]
    while (more := labels.get(f"{key}_{len(parts)}")) is not None:
        parts.append(more)
    return "".join(parts)


def _escaped(found: re.Match[str]) -> str:
    """Return the escape for a character that labels do not allow: "_" and two hex digits for each UTF-8 byte."""
    return "".join(f"_{byte:02x}" for byte in found[0].encode())


def _unescaped(found: re.Match[str]) -> str:
    """Return the characters for a sequence of escapes, such as "é" for "_c3_a9"; U+FFFD for invalid UTF-8."""
    return bytes.fromhex(found[0].replace("_", "")).decode(errors="replace")


def description(said: Mapping[str, str]) -> str:
    """Return skypool's tags as JSON text, for the description of a resource. The function `tags_in` reads this text."""
    return json.dumps(said, sort_keys=True)


def tags_in(description: str) -> dict[str, str]:
    """Return skypool's tags from the description of a resource, a text that the function `description` made.

    Returns {} if the text is not a JSON object. Values that are not strings are left out.
    """
    try:
        told = json.loads(description)
    except ValueError:
        return {}
    if not isinstance(told, dict):
        return {}
    return {key: text for key, text in told.items() if isinstance(text, str)}
