"""Sends requests to Verda, translates refusals, and encodes tags in the names of resources that have no tags."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeVar

from skypool.drivers import tags
from skypool.drivers.refusals import Refusals
from skypool.drivers.rest import OAuth, Rest
from skypool.errors import ProviderError

REFUSALS = Refusals("skypool_verda", "verda", "Verda")

LONGEST = 127
"""Maximum length of a tag's value."""

_SHOWN = 200
"""Number of characters of a malformed answer that an error shows."""

_LABEL = re.compile(r"skypool_([a-z0-9-]+)_([a-z0-9-]+)_(\d{4}-\d\d-\d\dT\d{6}Z|)_([A-Za-z0-9@._-]+)")
"""Name of a thing that a pool created: pool, token, time (without colons) and owner."""

_NOTHING_TO_DO = re.compile(r"invalid \w+ id|can't discontinue a|already exists", re.IGNORECASE)
"""Texts of refusals that mean that the thing is already in the wanted state, or does not exist."""

T = TypeVar("T")


def account(client_id: str | None, client_secret: str | None) -> Rest:
    """Return the account of these credentials, or of those in the environment.

    Raises:
        CredentialsError: there are no credentials.
    """
    id_ = (client_id or os.environ.get("VERDA_CLIENT_ID") or "").strip()
    secret = (client_secret or os.environ.get("VERDA_CLIENT_SECRET") or "").strip()
    if not id_ or not secret:
        raise REFUSALS.error("a login", "missing", "there are no credentials")
    return _account(os.environ.get("VERDA_BASE_URL") or "https://api.verda.com/v1", id_, secret)


@lru_cache(maxsize=32)
def _account(base: str, id_: str, secret: str) -> Rest:
    tokens = OAuth(base, "/oauth2/token", REFUSALS, client_id=id_, client_secret=secret)
    return Rest(base, REFUSALS, tokens, stale=tokens.stale)


def made(account: Rest, path: str, what: str, told: Mapping[str, Any]) -> str:
    """Create something with a single request, and return its id.

    Args:
        account: the account.
        path: path of the API.
        what: what is created, for error messages.
        told: body of the request.

    Raises:
        NoAnswer: there was no answer, or the answer is not an id.
    """
    got = account.once("POST", path, what=what, json=told)
    id_ = got.strip() if isinstance(got, str) else ""
    if not re.fullmatch(r"[\w-]+", id_):
        raise REFUSALS.error(what, "502", f"the answer is not an id: {str(got)[:_SHOWN]!r}")
    return id_


def quietly(do: Callable[[], T]) -> T | None:
    """Return the result of `do`, or None if the thing no longer exists or is already in the wanted state.

    Raises:
        ProviderError: the request failed for another reason.
    """
    try:
        return do()
    except ProviderError as e:
        if e.code != "not_found" and not _NOTHING_TO_DO.search(e.text):
            raise
    return None


@dataclass(frozen=True, slots=True)
class Label:
    """Content of the name of a volume, a key or a script, which have no tags.

    Attributes:
        pool: name of the pool.
        token: token of the order; for a key, of its session.
        until: end of the lease, or None if there is none.
        owner: user who rented it, as user@host.
    """

    pool: str
    token: str
    until: datetime | None
    owner: str

    def __str__(self) -> str:
        until = tags.stamp(self.until).replace(":", "")
        return f"skypool_{self.pool}_{self.token}_{until}_{self.owner}"


def label(name: str, pool: str | None) -> Label | None:
    """Return the content of a name, or None if no pool of this user has written it.

    With `pool`, a name of another pool gives None, too.
    """
    found = _LABEL.fullmatch(name)
    if found is None:
        return None
    named, token, until, owner = found.groups()
    if not tags.ours({tags.POOL: named, tags.OWNER: owner}, pool):
        return None
    with_colons = re.sub(r"(..)(..Z)$", r":\1:\2", until)
    return Label(named, token, tags.when(with_colons), owner)
