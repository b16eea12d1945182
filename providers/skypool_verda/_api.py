"""How Verda is asked: OAuth with tokens that are renewed, and its errors as ours; what is in names and tags there."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

from skypool import tags
from skypool.asking import Refusals, patiently
from skypool.errors import CredentialsError, ProviderError
from skypool.rest import Rest, said

BASE = "https://api.verda.com/v1"
REFUSALS = Refusals("skypool_verda", "verda", "Verda")
_EARLY = 120.0  # seconds before the end of a token at which it is renewed
_LABEL = re.compile(r"skypool_([a-z0-9-]+)_([a-z0-9-]+)_(\d{8}T\d{6}Z|)_([A-Za-z0-9@._-]+)")


class Api:
    """An account, asked by any thread. Making one asks nothing. See `account`."""

    def __init__(self, base: str, client_id: str, client_secret: str) -> None:
        self._id, self._secret = client_id, client_secret
        self._door = Rest(base, REFUSALS, dict, said=_said_at_the_door)
        self._rest = Rest(base, REFUSALS, lambda: {"Authorization": f"Bearer {self._token()}"})
        self._lock, self._access, self._refresh, self._ends = threading.Lock(), "", "", 0.0

    def ask(self, method: str, path: str, **given: Any) -> Any:
        """The answer, asked for again with patience."""
        return self._known(partial(self._rest.ask, method, path, **given))

    def once(self, method: str, path: str, **given: Any) -> Any:
        """The answer to a call that must not be repeated by itself."""
        return self._known(partial(self._rest.once, method, path, **given))

    def date(self) -> str:
        """When Verda says that it is."""
        return str(self._known(partial(self._rest.reply, "GET", "/locations"))[1]["Date"])

    def made(self, path: str, what: str, **told: Any) -> str:
        """The id of what is created. It comes as plain text, and from some servers as JSON."""
        got = self.once("POST", path, what=what, json=told)
        return str(got["id"] if isinstance(got, Mapping) else got).strip()

    def _known(self, do: Callable[[], Any]) -> Any:
        """Again with a new token where Verda does not know this one any more, however long it was to hold."""
        token = self._access
        try:
            return do()
        except CredentialsError:
            with self._lock:
                if not token:
                    raise  # it is new
                if self._access == token:  # nobody else has renewed it meanwhile
                    self._ends = 0.0
            return do()

    def _token(self) -> str:
        with self._lock:
            if time.monotonic() > self._ends - _EARLY:
                now, got = time.monotonic(), self._login()
                self._access, self._refresh = got["access_token"], got.get("refresh_token", "")
                self._ends = now + max(float(got["expires_in"]), 2 * _EARLY)
            return self._access

    def _login(self) -> Any:
        """With the refresh token while there is one that is good."""
        what, known = "your credentials", {"client_id": self._id, "client_secret": self._secret}
        login = partial(self._door.ask, "POST", "/oauth2/token", what=what)
        if refresh := self._refresh:
            self._refresh = ""
            try:
                return login(json={"grant_type": "refresh_token", "refresh_token": refresh})
            except CredentialsError:
                self._access = ""  # it is asked for anew
        return login(json={"grant_type": "client_credentials", **known})


def _said_at_the_door(status: int, body: Any) -> tuple[str, str]:
    """Whatever is wrong with a login, it is the credentials."""
    code, text = said(status, body)
    return ("unauthorized_request" if status in (400, 401, 403) else code), text


_making, _accounts = threading.Lock(), dict[tuple[str, str, str], Api]()


def account(client_id: str | None, client_secret: str | None) -> Api:
    """The account of these credentials or of the environment's; one object for all who ask.

    Raises:
        CredentialsError: there are none.
    """
    known = client_id or os.environ.get("VERDA_CLIENT_ID"), client_secret or os.environ.get("VERDA_CLIENT_SECRET")
    if known[0] is None or known[1] is None or not all(known):
        raise REFUSALS.error("to be asked", "missing", "there are no credentials")
    key = os.environ.get("VERDA_BASE_URL") or BASE, known[0], known[1]
    with _making:
        return _accounts.setdefault(key, Api(*key))


# --- whose it is ---------------------------------------------------------------------------------------------


class Label(NamedTuple):
    """What the name of a volume, a key or a script says, as they have no tags; `token` is a session's for a key."""

    pool: str
    token: str
    until: datetime | None
    owner: str

    def __str__(self) -> str:
        until = self.until.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ") if self.until else ""
        return f"skypool_{self.pool}_{self.token}_{until}_{self.owner}"


def label(name: str, pool: str | None) -> Label | None:
    """None where a name is not exactly as this user's pools give it, or that pool's."""
    if not (found := _LABEL.fullmatch(name)) or pool not in (None, found[1]):
        return None
    until = datetime.strptime(found[3], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC) if found[3] else None
    return Label(found[1], found[2], until, found[4]) if fnmatchcase(found[4], tags.owners(pool)) else None


def ours(said: Mapping[str, str], pool: str | None) -> bool:
    """Whether an instance with these tags is of this user's pools, or of that one."""
    return (
        pool in (None, said.get(tags.POOL))
        and bool(said.get(tags.POOL))
        and fnmatchcase(said.get(tags.OWNER, ""), tags.owners(pool)[:127])
    )


def insist(seconds: float, do: Callable[[], Any], codes: Sequence[str] = ("forbidden_action",)) -> Any:
    """Asked again while it is refused for its state. Quiet for what is gone."""
    try:
        return patiently(do, seconds, *codes)
    except ProviderError as e:
        if e.code != "not_found":
            raise
        return None
