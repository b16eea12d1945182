"""Sends requests to Verda, translates refusals, and writes and reads the names of resources that cannot have tags.

Resources without tags are SSH keys, scripts and volumes. Their names hold the pool, a token, the end of the lease, and
the owner.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeVar

from skypool.drivers import recording, tags
from skypool.drivers.refusals import Refusals
from skypool.drivers.rest import OAuth, Rest
from skypool.errors import ProviderError

REFUSALS = Refusals("skypool_verda", "verda", "Verda")

PRIVATE = recording.Private(fields={"amount": "money"})
"""What a recording must not contain of Verda's requests and replies: the account's balance.

https://api.verda.com/v1/docs (read 2026-11-21)
"""

LONGEST = 127
"""Maximum length of a tag's value at Verda, in characters."""

_SHOWN = 200
"""The most characters of an answer that an error shows if the answer is not the id that was expected."""

_LABEL = re.compile(r"skypool_([a-z0-9-]+)_([a-z0-9-]+)_(\d{4}-\d\d-\d\dT\d{6}Z|)_([A-Za-z0-9@._-]+)")
"""Matches the name of a resource that a pool created. Its groups are pool, token, end of the lease, and owner.

The end of the lease has no colons, or is "".
"""

_NOTHING_TO_DO = re.compile(r"invalid \w+ id|can't discontinue a|already exists", re.IGNORECASE)
"""Matches texts of refusals that `quietly` ignores.

They say that a resource does not exist, or exists already, or that a machine cannot end in its present state.
"""

T = TypeVar("T")


def account(client_id: str | None, client_secret: str | None) -> Rest:
    """Return the HTTP client for the account with these credentials. Sends no request.

    Missing credentials are taken from $VERDA_CLIENT_ID and $VERDA_CLIENT_SECRET. The client is cached, so the same
    credentials give the same object. $VERDA_BASE_URL can name another address of the API.

    Raises:
        CredentialsError: the id or the secret is neither given nor in the environment. Whether Verda accepts them is
            not checked.
    """
    id_ = (client_id or os.environ.get("VERDA_CLIENT_ID") or "").strip()
    secret = (client_secret or os.environ.get("VERDA_CLIENT_SECRET") or "").strip()
    if not id_ or not secret:
        raise REFUSALS.error("a login", "missing", "the client id or the client secret is not set")
    return _account(os.environ.get("VERDA_BASE_URL") or "https://api.verda.com/v1", id_, secret)


@lru_cache(maxsize=32)
def _account(base: str, id_: str, secret: str) -> Rest:
    tokens = OAuth(base, "/oauth2/token", REFUSALS, client_id=id_, client_secret=secret)
    return Rest(base, REFUSALS, tokens, stale=tokens.stale, private=PRIVATE)


def made(account: Rest, path: str, what: str, told: Mapping[str, Any]) -> str:
    """Create a resource with a single request that is not repeated, and return the resource's id.

    Args:
        account: client of Verda's API.
        path: path in the API, such as "/instances".
        what: name of the resource, for error messages.
        told: body of the request.

    Raises:
        NoAnswer: there was no answer, or the answer is not an id. The resource may have been created.
        ProviderError: Verda refused.
    """
    got = account.once("POST", path, what=what, json=told)
    id_ = got.strip() if isinstance(got, str) else ""
    if not re.fullmatch(r"[\w-]+", id_):
        raise REFUSALS.error(what, "502", f"the answer is not an id: {str(got)[:_SHOWN]!r}")
    return id_


def quietly(do: Callable[[], T]) -> T | None:
    """Call `do`, which sends a request, and return its result.

    Returns None if Verda refuses because the resource does not exist, or exists already. Also returns None if a machine
    cannot be ended in its present state, for example while it is being set up.

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
    """The values in the name of a volume, an SSH key or a script at Verda. `str(label)` is the name.

    Attributes:
        pool: name of the pool.
        token: token of the order. An SSH key, which all orders of a pool share, has the beginning of the tokens that
            these orders have in common.
        until: end of the lease, or None if there is none.
        owner: user who created the resource, as user@host.
    """

    pool: str
    token: str
    until: datetime | None
    owner: str

    def __str__(self) -> str:
        until = tags.stamp(self.until).replace(":", "")
        return f"skypool_{self.pool}_{self.token}_{until}_{self.owner}"


def label(name: str, pool: str | None) -> Label | None:
    """Return the values in the name of a resource, or None if no pool of this user has written the name.

    Args:
        name: name of the resource at Verda.
        pool: name of a pool that was started from this computer; a resource of another pool gives None. If `pool` is
            None, all pools of this user are accepted.
    """
    found = _LABEL.fullmatch(name)
    if found is None:
        return None
    named, token, until, owner = found.groups()
    if not tags.ours({tags.POOL: named, tags.OWNER: owner}, pool):
        return None
    with_colons = re.sub(r"(..)(..Z)$", r":\1:\2", until)
    return Label(named, token, tags.when(with_colons), owner)
