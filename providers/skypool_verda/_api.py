"""Sends requests to Verda, and translates refusals."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from skypool.drivers import recording
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
