"""How Google is asked, its errors as ours, and what labels say: what both of its APIs have in common."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, TypeVar

from skypool import tags
from skypool.asking import Refusals, imported, quietly, surroundings, table
from skypool.errors import UsageError
from skypool.model import Order

FACTS: dict[str, Any] = table("skypool_gcp", "facts.json")
REFUSALS = Refusals("skypool_gcp", "gcp", "Google Cloud")
DISABLED = "SERVICE_DISABLED", "accessNotConfigured"
LONGEST = 63  # of a name, and of a label's value: https://cloud.google.com/compute/docs/labeling-resources
SLICE = "skypool-slice"  # the label of a machine that is a host of this slice
USER = "ubuntu"  # who logs in
_PROJECTS = "GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user said, checked: see `GCP`."""

    project: str | None
    zones: tuple[str, ...] | None
    network: str
    subnetwork: str | None
    image: str | None
    reservation: str | None
    service_account: str | None
    ssh_from: tuple[str, ...] | None
    queue: float = 300.0

    def billed(self) -> str:
        """The project that pays.

        Raises:
            CredentialsError: there are no credentials, or they are of no project and none is named.
        """
        known = self.project or next(filter(None, map(os.environ.get, _PROJECTS)), None)
        project = known or _default(_environment())[1]
        if not project:
            raise REFUSALS.error("a login", "NoProject", "it is not known which project pays")
        return project

    def path(self) -> str:
        """The path of the network that machines are put into."""
        return f"projects/{self.billed()}/global/networks/{self.network}"


# --- asking --------------------------------------------------------------------------------------------------


def endpoint(api: str) -> str | None:
    """Where an API is asked if that is not its own address, as the Google Cloud CLI names it; without its version."""
    said = os.environ.get(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{api.upper()}", "").rstrip("/")
    return said.removesuffix("/compute/v1") or None


def sdk(module: str) -> Any:
    """A module of Google's SDK. Raises UsageError: it is not installed."""
    try:
        return imported(module)
    except ImportError as e:
        raise UsageError(f"GCP needs its SDK ({e}): pip install 'skypool[gcp]'") from e


def credentials(api: str) -> Any:
    """Application Default Credentials; none for an endpoint without TLS, which must not see any.

    Raises:
        CredentialsError: there are none.
    """
    if (endpoint(api) or "").startswith(("http://", "grpc://")):
        return _nobody()
    return _default(_environment())[0]


@lru_cache(maxsize=1)
def _nobody() -> Any:
    return sdk("google.auth.credentials").AnonymousCredentials()


def _environment() -> Hashable:
    usual = f"{os.environ.get('CLOUDSDK_CONFIG') or '~/.config/gcloud'}/application_default_credentials.json"
    return surroundings(("GOOGLE_", "CLOUDSDK_"), {"GOOGLE_APPLICATION_CREDENTIALS": usual})


@lru_cache(maxsize=16)
def _default(environment: Hashable) -> tuple[Any, str | None]:
    """The credentials and their project; found once as long as these stay the same, as it takes seconds."""
    found: tuple[Any, str | None] = asked("a login", lambda: sdk("google.auth").default(scopes=[SCOPE]))
    return found


def asked(what: str, do: Callable[[], T], **names: str) -> T:
    """The answer of Google's SDK.

    Raises:
        ProviderError: its error as ours, which says what was refused; `names` are what the advice may speak of.
    """
    names = {"project": "PROJECT", **names}
    failures, login = sdk("google.api_core.exceptions"), sdk("google.auth.exceptions")
    lost = sdk("requests").RequestException
    try:
        return do()
    except failures.GoogleAPICallError as e:
        code, text = _refusal(e)
        raise REFUSALS.error(what, code, text, **names) from e
    except (failures.GoogleAPIError, login.GoogleAuthError, lost) as e:
        code = REFUSALS.known([each.__name__ for each in type(e).__mro__])
        raise REFUSALS.error(what, code, str(e), **names) from e


def unless_disabled(do: Callable[[], object], note: str) -> object:
    """The answer; the note where the API is not enabled for the project, and need not be."""
    told = quietly(do, *DISABLED)
    return note if told is None else told


def _refusal(error: Any) -> tuple[str, str]:
    """The code and text of a refusal: what Compute Engine calls the reason, the newer kind of reason, or the class."""
    told = [each.get("reason", "") for each in error.errors or () if isinstance(each, Mapping)]
    codes = [*told, getattr(error, "reason", None), *(each.__name__ for each in type(error).__mro__)]
    text = re.sub(r"^(GET|POST|PUT|PATCH|DELETE|HEAD) http\S+: ", "", str(error.message or error))
    return REFUSALS.known([code for code in codes if code]), text


# --- names and labels ----------------------------------------------------------------------------------------


def name(*words: str) -> str:
    """A name as Google takes it (RFC 1035): of "skypool" and these words, [a-z0-9-]; cut with a hash if too long."""
    whole = "-".join(("skypool", *words))
    if len(whole) <= LONGEST and re.fullmatch("[a-z0-9-]*[a-z0-9]", whole):
        return whole
    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
    return f"{re.sub('[^a-z0-9-]', '-', whole.lower())[: LONGEST - 17].rstrip('-')}-{digest}"


def tag(order: Order) -> str:
    """The network tag of a session's machines, which firewall rules are about."""
    return name(order.pool, tags.session(order))


def deletes(url: str) -> str:
    """Shell by which a machine deletes what has this address in its API, with the rights of its own service account."""
    return f"url={shlex.quote(url)}\n{(files('skypool_gcp') / 'end.sh').read_text('utf-8')}"


def labels(said: Mapping[str, str]) -> dict[str, str]:
    """What tags say, as labels, which have [a-z0-9_-] alone: other characters become "_" and the hex of their bytes.

    What is longer than a label's value is continued in "KEY_1", "KEY_2"; there may be 64 labels in all.
    """
    made: dict[str, str] = {}
    for key, text in said.items():
        escaped = re.sub("[^a-z0-9-]", lambda found: "".join(f"_{byte:02x}" for byte in found[0].encode()), text)
        for nth in range(max(1, -(-len(escaped) // LONGEST))):
            made[f"{key}_{nth}" if nth else key] = escaped[nth * LONGEST : (nth + 1) * LONGEST]
    return made


def said(labels: Mapping[str, str]) -> dict[str, str]:
    """What `labels` wrote, of those that are skypool's own."""
    ours = [key for key in labels if re.fullmatch("skypool-[a-z]+", key)]
    return {key: _unescaped("".join(_continued(labels, key))) for key in ours}


def _continued(labels: Mapping[str, str], key: str) -> list[str]:
    parts = [labels[key]]
    while (more := labels.get(f"{key}_{len(parts)}")) is not None:
        parts.append(more)
    return parts


def _unescaped(text: str) -> str:
    def decoded(found: re.Match[str]) -> str:
        return bytes.fromhex(found[0].replace("_", "")).decode(errors="replace")

    return re.sub("(_[0-9a-f]{2})+", decoded, text)
