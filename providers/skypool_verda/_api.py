"""How Verda is asked, its errors as ours, and whose things there are."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from skypool.drivers import tags
from skypool.drivers.refusals import Refusals
from skypool.drivers.rest import OAuth, Rest
from skypool.errors import ProviderError

REFUSALS = Refusals("skypool_verda", "verda", "Verda")
LONGEST = 127  # value of a tag
_SHOWN = 200
_LABEL = re.compile(r"skypool_([a-z0-9-]+)_([a-z0-9-]+)_(\d{4}-\d\d-\d\dT\d{6}Z|)_([A-Za-z0-9@._-]+)")
_NOTHING_TO_DO = re.compile(r"invalid \w+ id|can't discontinue a|already exists", re.IGNORECASE)
T = TypeVar("T")


def account(client_id: str | None, client_secret: str | None) -> Rest:
    """The account of these credentials, or of the environment's. Raises CredentialsError: there are none."""
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
    """Make something, once; its id, which comes as plain text, and from some servers as JSON.

    Raises:
        NoAnswer: what came is no id, too.
    """
    got = account.once("POST", path, what=what, json=told)
    if not isinstance(got, str) or not re.fullmatch(r"[\w-]+", id_ := got.strip()):
        raise REFUSALS.error(what, "502", f"its id should be {str(got)[:_SHOWN]!r}")
    return id_


def quietly(do: Callable[[], T]) -> T | None:
    """None where what it is about is gone, is done already, or cannot be done in its state."""
    try:
        return do()
    except ProviderError as e:
        if e.code != "not_found" and not _NOTHING_TO_DO.search(e.text):
            raise
    return None


class Label(NamedTuple):
    """What the name of a volume, a key or a script says, as they have no tags; `token` is a session's for a key."""

    pool: str
    token: str
    until: datetime | None
    owner: str

    def __str__(self) -> str:
        return f"skypool_{self.pool}_{self.token}_{tags.stamp(self.until).replace(':', '')}_{self.owner}"


def label(name: str, pool: str | None) -> Label | None:
    """None where a name is not exactly as this user's pools give it, or that pool."""
    found = _LABEL.fullmatch(name)
    if found is None or not tags.ours({tags.POOL: found[1], tags.OWNER: found[4]}, pool):
        return None
    return Label(found[1], found[2], tags.when(re.sub(r"(..)(..Z)$", r":\1:\2", found[3])), found[4])
