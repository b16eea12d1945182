"""HTTP client for clouds without a good SDK: connection pool, retries, and refusals as skypool's errors.

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
"""Seconds for which `Rest.ask` repeats a request that got no answer, or was refused as too frequent."""

_CONNECT = 10.0
"""Seconds to wait for a connection."""

_READ = 60.0
"""Seconds to wait for an answer, and for each further part of it."""

_EARLY = 60.0
"""Seconds before its expiry at which a token is renewed."""

_FRESH = 2.0
"""Age of a token in seconds up to which a refusal does not replace it: a newer token would be refused, too."""

_MARKUP = re.compile(r"<(style|script)\b.*?</\1>|<[^>]*>", re.DOTALL | re.IGNORECASE)
"""Matches the parts of a web page that are not text to read: tags, styles and scripts."""

_LONGEST = 300
"""Number of characters of a non-JSON answer that an error shows."""

_SENDABLE = re.compile("[ -~]*")
"""Matches a header value that can be sent: printable ASCII."""

Params = Mapping[str, str | int | float]
"""Query parameters of a request, sent as "?name=value"."""

Said = Callable[[int, Any], tuple[str, str]]
"""A function that reads the error code and the error text from a refusal's status and body."""


def said(status: int, body: Any) -> tuple[str, str]:
    """Return the error code and the error text of a refusal whose body has one of the usual shapes.

    If the body has no "code", the status is the code. If the body is a web page, as proxies send them, the text is its
    readable words. The text of a body that is no JSON object is cut to 300 characters.

    Args:
        status: HTTP status.
        body: the body, parsed if it is JSON.
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
    """A client of one HTTP API. Several threads may use it at once. Making one sends nothing.

    Args:
        base: address of the API; paths are appended to it.
        refusals: table of the API's errors.
        headers: called before each request; returns headers, such as credentials that change.
        stale: called with the client's headers when credentials were refused. It returns True if the request may
            succeed with new headers.
        said: returns the error code and text of a refusal, from its status and its body (parsed if it is JSON).
        refuses: returns True if a body is a refusal although its status says success.
        apart: minimum seconds between two calls of one kind, by patterns of "METHOD /path". The first pattern that
            matches counts.
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
        self._lock = threading.Lock()  # guards _next
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
        """Send a request that may be repeated, and return its body (parsed if it is JSON).

        It is repeated for up to 20 s while there is no answer, or while the API says that requests come too often.

        Args:
            method: HTTP method, such as "GET".
            path: path of the request, appended to the base address.
            what: name of the request in errors; "" takes its method and path.
            json: value that is sent as JSON; None sends no body.
            params: query parameters.
            headers: additional headers.

        Returns:
            The body: None if it is empty, text if it is not JSON.

        Raises:
            ProviderError: the refusal as one of skypool's errors; `NoAnswer` if there was no answer.
            UsageError: the package `requests` is not installed.
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
        """Send a request once, and return its body. Use it for requests that must not be repeated, such as a create.

        It is sent a second time only if `stale` says that refused credentials can be renewed.

        Args:
            method, path, what, json, params, headers: as in `ask`.

        Returns:
            The body: parsed if it is JSON, None if it is empty, otherwise text.

        Raises:
            ProviderError: as in `ask`.
        """
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
        """Send a request once as `once` does, and return its body and the headers of the answer.

        Args:
            method, path, what, json, params, headers: as in `ask`.

        Raises:
            ProviderError: as in `ask`.
        """
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
        """Send one request with these headers, and return its body and the headers of the answer.

        Raises:
            ProviderError: the API refused it or did not answer.
            UsageError: the package `requests` is not installed.
        """
        if not all(_SENDABLE.fullmatch(value) for value in headers.values()):  # requests would show the key
            raise self.error(what, "401", "the key contains a character other than printable ASCII, such as a newline")
        self._keep_apart(f"{method} {path}")
        try:
            requests = imported("requests")
        except ImportError as e:
            command = registry.install_command(self._refusals.provider, "requests")
            raise UsageError(f"{what} needs the package requests, which is not installed; run: {command}") from e
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
            text = f"the reply is a web page instead of an API response: {said(got.status_code, body)[1]}"
            raise self.error(what, "ConnectionError", text)
        if got.status_code < 300 and not self._refuses(body):
            return body, got.headers
        code, text = self._said(got.status_code, body)
        error = self.error(what, code, text)
        if isinstance(error, RateLimitError):
            error.retry_after = _seconds(got.headers.get("Retry-After", ""))
        raise error

    def error(self, what: str, code: str, text: str) -> ProviderError:
        """Return the error for a refusal, as one of skypool's. Nothing is raised.

        A lost connection and a server error (status 500 or more) become `NoAnswer`, unless the table of errors has
        another class.

        Args:
            what: name of the request.
            code: error code; "ConnectionError" for a lost connection.
            text: error text.
        """
        error = self._refusals.error(what, code, text)
        silent = code == "ConnectionError" or (code.isdigit() and int(code) >= 500)
        if silent and type(error) is ProviderError:
            return NoAnswer(str(error), provider=error.provider, code=code, text=text)
        return error

    def _session(self) -> requests.Session:
        """Return the HTTP session of the calling thread, which is made at the first call."""
        if not hasattr(self._local, "session"):
            self._local.session = imported("requests").Session()
            self._local.session.auth = lambda request: request  # otherwise ~/.netrc would replace our key
        session: requests.Session = self._local.session
        return session

    def _keep_apart(self, call: str) -> None:
        """Sleep until enough time has passed since the last call of this kind.

        Args:
            call: method and path, such as "GET /instances". It is looked up in the patterns of `apart`.
        """
        for pattern, seconds in self._apart.items():
            if fnmatchcase(call, pattern):
                with self._lock:
                    at = max(self._next.get(pattern, 0.0), time.monotonic())
                    self._next[pattern] = at + seconds
                time.sleep(max(0.0, at - time.monotonic()))
                return


class OAuth:
    """An access token for a client's credentials. All threads share it, and it is renewed before it expires.

    Pass the object as `headers` of a `Rest`, and its method `stale` as `stale`. Then a token that is refused before it
    expires is replaced.

    Args:
        base: address of the API.
        path: path of the API that gives tokens.
        refusals: table of the API's errors.
        credentials: sent to get a token: `client_id` and `client_secret`.
    """

    def __init__(self, base: str, path: str, refusals: Refusals, **credentials: str) -> None:
        self._api = Rest(base, refusals, dict, said=_said_of_credentials)
        self._path = path
        self._credentials = credentials
        self._lock = threading.Lock()  # guards the attributes below
        self._access = ""
        self._refresh = ""
        self._came = -_EARLY
        self._ends = -_EARLY

    def __call__(self) -> dict[str, str]:
        """Return the Authorization header with a valid token.

        A new token is requested if there is none, or if it expires within a minute.

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
        """Return True if the next request would carry another token than these refused headers.

        Returns False if the headers have the current token and it is less than 2 s old: a newer one would be refused,
        too. An older current token is marked as expired, so that the next request gets a new one.
        """
        with self._lock:
            if headers.get("Authorization") == f"Bearer {self._access}":
                if time.monotonic() - self._came < _FRESH:
                    return False
                self._ends = time.monotonic()
            return True

    def _got(self) -> Any:
        """Request a new token, and return the API's answer.

        The refresh token is sent if there is one. If it is refused, the credentials are sent instead.
        """
        ask = partial(self._api.ask, "POST", self._path, what="your credentials")
        refresh = self._refresh
        if refresh:
            self._refresh = ""
            try:
                return ask(json={"grant_type": "refresh_token", "refresh_token": refresh})
            except CredentialsError:
                self._access = ""  # the credentials below get a new token
        return ask(json={"grant_type": "client_credentials", **self._credentials})


def _said_of_credentials(status: int, body: Any) -> tuple[str, str]:
    """Return the error code and text of a refused request for a token.

    The statuses 400, 401 and 403 all give "401", because any fault of such a request is the credentials'.
    """
    code, text = said(status, body)
    return ("401" if status in (400, 401, 403) else code), text


def _is_page(body: object) -> bool:
    """Return True if a body is a web page: text that begins with "<".

    The Content-Type is not used, as some servers call every text a page.
    """
    return isinstance(body, str) and body.lstrip().startswith("<")


def _read(got: requests.Response) -> Any:
    """Return the body of an answer: parsed if it is JSON, otherwise as text, and None if it is empty."""
    try:
        return got.json() if got.content else None
    except ValueError:
        return got.text


def _seconds(retry_after: str) -> float | None:
    """Return the seconds of a Retry-After header, at least 0.

    Returns None if it is not a number. It could be a date, but no provider was seen to send one.
    """
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        return None
