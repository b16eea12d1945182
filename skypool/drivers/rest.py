"""HTTP client for clouds without a good SDK: connection pool, retries, refusals as skypool's errors.

`OAuth` is for APIs with access tokens that expire.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

from skypool.drivers import registry
from skypool.drivers.refusals import Refusals
from skypool.drivers.retry import patiently
from skypool.drivers.sdk import imported
from skypool.errors import CredentialsError, NoAnswer, ProviderError, RateLimitError, UsageError

if TYPE_CHECKING:
    import requests

PATIENCE = 20.0
"""Seconds for which a request is repeated that got no answer, or that came too often."""

_CONNECT = 10.0
"""Seconds to wait for a connection."""

_READ = 60.0
"""Seconds to wait for an answer, and for each part of it."""

_EARLY = 60.0
"""Seconds before its end in which a token is renewed."""

_FRESH = 2.0
"""Age in seconds up to which a refused token is not replaced: another one would be refused, too."""

_MARKUP = re.compile(r"<(style|script)\b.*?</\1>|<[^>]*>", re.DOTALL | re.IGNORECASE)
"""The part of a web page that is not its words."""

_LONGEST = 300
"""Characters that an error shows of an answer that is not JSON."""

_SENDABLE = re.compile("[ -~]*")
"""Value of a header that requests sends: printable ASCII."""

Params = Mapping[str, str | int | float]
"""What is added to a path, as "?name=value"."""

Said = Callable[[int, Any], tuple[str, str]]
"""Reads the code and the text of a refusal from its status and its body."""


def said(status: int, body: Any) -> tuple[str, str]:
    """Return the code and the text of a refusal in one of the usual shapes.

    Without a code in the body, the status is the code. The text of a web page, such as a proxy sends, is its words.
    """
    if not isinstance(body, Mapping):
        text = str(body or "")
        if _is_page(text):
            text = " ".join(_MARKUP.sub(" ", text).split())
        return str(status), text[:_LONGEST]
    words = (body.get(name) for name in ("detail", "message", "msg", "error", "title"))
    text = next((word for word in words if isinstance(word, str) and word), "")
    return str(body.get("code") or status), text or str(dict(body))


class Rest:
    """Client of one API. It may be used by several threads at once, and sends nothing when it is made.

    Args:
        base: address of the API; paths are added to it.
        refusals: meanings of the API's errors.
        headers: called before each request, for credentials that change.
        stale: called with the headers of a request whose credentials were refused. It returns True if a request with
            new headers may succeed.
        said: returns the code and the text of a refusal, from its status and its body (parsed if it is JSON).
        refuses: returns True if a body is a refusal although its status says success.
        apart: seconds between two calls of one kind, by patterns of "METHOD /path". The first that matches holds.
    """

    def __init__(
        self,
        base: str,
        refusals: Refusals,
        headers: Callable[[], Mapping[str, str]],
        *,
        said: Said = said,
        apart: Mapping[str, float] | None = None,
        stale: Callable[[Mapping[str, str]], bool] = lambda headers: False,
        refuses: Callable[[Any], bool] = lambda body: False,
    ) -> None:
        self._base = base.rstrip("/")
        self._refusals = refusals
        self._headers = headers
        self._said = said
        self._apart = dict(apart or {})
        self._stale = stale
        self._refuses = refuses
        self._lock = threading.Lock()  # of _next
        self._next: dict[str, float] = {}  # earliest time of the next call, by pattern
        self._local = threading.local()  # a session for each thread

    def ask(
        self,
        method: str,
        path: str,
        *,
        what: str = "",
        json: object = None,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Return the answer of a call that may be repeated. It is repeated for 20 s while there is no answer.

        Args:
            what: name of the request in an error; "" takes its method and path.
            json: the body, from which JSON is made; None sends no body.
            params: what is added to the path.
            headers: more than those of the client.

        Raises:
            ProviderError: the refusal, as one of ours; `NoAnswer` if there was no answer.
        """
        once = partial(self.once, method, path, what=what, json=json, params=params, headers=headers)
        return patiently(once, PATIENCE)

    def once(
        self,
        method: str,
        path: str,
        *,
        what: str = "",
        json: object = None,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Return the answer of a call that must not be repeated by itself, such as a create."""
        return self.reply(method, path, what=what, json=json, params=params, headers=headers)[0]

    def reply(
        self,
        method: str,
        path: str,
        *,
        what: str = "",
        json: object = None,
        params: Params | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[Any, Mapping[str, str]]:
        """Return the answer of one call, and its headers."""
        what = what or f"{method} {path}"
        known = self._headers()
        try:
            return self._replied(method, path, what, {**known, **(headers or {})}, json, params)
        except CredentialsError:
            if not self._stale(known):
                raise
            return self._replied(method, path, what, {**self._headers(), **(headers or {})}, json, params)

    def _replied(
        self,
        method: str,
        path: str,
        what: str,
        headers: Mapping[str, str],
        json: object,
        params: Params | None,
    ) -> tuple[Any, Mapping[str, str]]:
        if not all(_SENDABLE.fullmatch(value) for value in headers.values()):  # requests would show it
            raise self.error(what, "401", "the key has a character that none can have, such as the end of a line")
        self._keep_apart(f"{method} {path}")
        try:
            requests = imported("requests")
        except ImportError as e:
            command = registry.install_command(self._refusals.provider, "requests")
            raise UsageError(f"{what} needs the package requests: {command}") from e
        try:
            got = self._session().request(
                method,
                self._base + path,
                headers=headers,
                json=json,
                params=params,
                timeout=(_CONNECT, _READ),
                allow_redirects=False,
            )
        except requests.RequestException as e:
            raise self.error(what, "ConnectionError", str(e)) from e
        body = _read(got)
        if got.status_code < 300 and _is_page(body):
            text = f"a web page came in the place of an answer: {said(got.status_code, body)[1]}"
            raise self.error(what, "ConnectionError", text)
        if got.status_code < 300 and not self._refuses(body):
            return body, got.headers
        code, text = self._said(got.status_code, body)
        error = self.error(what, code, text)
        if isinstance(error, RateLimitError):
            error.retry_after = _seconds(got.headers.get("Retry-After", ""))
        raise error

    def error(self, what: str, code: str, text: str) -> ProviderError:
        """Return a refusal as one of ours.

        A lost connection and a server's own trouble become `NoAnswer`, unless the table of errors has another kind.
        """
        error = self._refusals.error(what, code, text)
        silent = code == "ConnectionError" or (code.isdigit() and int(code) >= 500)
        if silent and type(error) is ProviderError:
            return NoAnswer(str(error), provider=error.provider, code=code, text=text)
        return error

    def _session(self) -> requests.Session:
        if not hasattr(self._local, "session"):
            self._local.session = imported("requests").Session()
            self._local.session.auth = lambda request: request  # else what ~/.netrc has is sent in place of our key
        session: requests.Session = self._local.session
        return session

    def _keep_apart(self, call: str) -> None:
        """Sleep until a call of this kind may be sent."""
        for pattern, seconds in self._apart.items():
            if fnmatchcase(call, pattern):
                with self._lock:
                    at = max(self._next.get(pattern, 0.0), time.monotonic())
                    self._next[pattern] = at + seconds
                time.sleep(max(0.0, at - time.monotonic()))
                return


class OAuth:
    """Access token for a client's credentials: one for all threads, renewed before it ends.

    An `OAuth` is the `headers` of a `Rest`, and its method `stale` is the `stale` of that `Rest`. So a token that is
    refused before its end is replaced.

    Args:
        path: path of the API where tokens come from.
        credentials: sent there: `client_id` and `client_secret`.
    """

    def __init__(self, base: str, path: str, refusals: Refusals, **credentials: str) -> None:
        self._api = Rest(base, refusals, dict, said=_said_of_credentials)
        self._path = path
        self._credentials = credentials
        self._lock = threading.Lock()  # of all that follows
        self._access = ""
        self._refresh = ""
        self._came = -_EARLY
        self._ends = -_EARLY

    def __call__(self) -> dict[str, str]:
        """Return the header with a token that holds.

        Raises:
            CredentialsError: the credentials are refused.
        """
        with self._lock:
            if time.monotonic() >= self._ends:
                asked_at = time.monotonic()
                got = self._got()
                self._came = asked_at
                self._access = got["access_token"]
                self._refresh = got.get("refresh_token", "")
                lifetime = float(got.get("expires_in", 0))
                self._ends = self._came + max(_FRESH, lifetime - _EARLY)
            return {"Authorization": f"Bearer {self._access}"}

    def stale(self, headers: Mapping[str, str]) -> bool:
        """Return True if a new request would get another token: this one is not new, or was replaced already."""
        with self._lock:
            if headers.get("Authorization") == f"Bearer {self._access}":
                if time.monotonic() - self._came < _FRESH:
                    return False
                self._ends = time.monotonic()
            return True

    def _got(self) -> Any:
        """Return the answer with a new token. Without a good refresh token the credentials themselves are sent."""
        ask = partial(self._api.ask, "POST", self._path, what="your credentials")
        refresh = self._refresh
        if refresh:
            self._refresh = ""
            try:
                return ask(json={"grant_type": "refresh_token", "refresh_token": refresh})
            except CredentialsError:
                self._access = ""  # a token of the credentials themselves follows
        return ask(json={"grant_type": "client_credentials", **self._credentials})


def _said_of_credentials(status: int, body: Any) -> tuple[str, str]:
    """Return the code and the text of a refused request for a token. Any fault of the request is the credentials'."""
    code, text = said(status, body)
    return ("401" if status in (400, 401, 403) else code), text


def _is_page(body: object) -> bool:
    """Return True for a web page. The Content-Type says little, as some servers call every text a page."""
    return isinstance(body, str) and body.lstrip().startswith("<")


def _read(got: requests.Response) -> Any:
    """Return the body, parsed if it is JSON, and as text if it is not."""
    try:
        return got.json() if got.content else None
    except ValueError:
        return got.text


def _seconds(retry_after: str) -> float | None:
    """Return the seconds of a Retry-After header. Returns None for a date, which no provider was seen to send."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        return None
