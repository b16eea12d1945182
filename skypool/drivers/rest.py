"""HTTP client for cloud APIs that have no good SDK.

`Rest` sends the requests: it keeps connections open, repeats requests, and raises refusals of the API as skypool's
errors. `OAuth` supplies the Authorization header for APIs whose access tokens expire.
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
"""Seconds for which `Rest.ask` repeats a request that got no answer, or that the API refused as too frequent."""

_CONNECT = 10.0
"""Seconds to wait for a connection."""

_READ = 60.0
"""Seconds to wait for an answer, and for each further part of it."""

_EARLY = 60.0
"""Seconds before its expiry at which a token is renewed."""

_FRESH = 2.0
"""Age of a token in seconds below which a refusal does not replace it: a newer token would be refused, too."""

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

    If the body is a JSON object, the code is its "code", or else the status. The text is the first non-empty string
    among its entries "detail", "message", "msg", "error" and "title". Without such a string, the text is the whole
    object.

    For any other body, the code is the status and the text is the first 300 characters of the body. If the body is a
    web page, as proxies send them, its markup is removed first. An empty body or None gives the text "".

    Args:
        status: HTTP status.
        body: the body, parsed if it is JSON.

    Returns:
        The pair (code, text), both strings. Nothing is raised.
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
    """A client of one HTTP API.

    Several threads may use one object at the same time; each thread has its own connections. The constructor sends
    nothing.

    Args:
        base: address of the API, such as "https://api.acme.com/v1"; paths are appended to it.
        refusals: table that translates the API's error codes to skypool's errors.
        headers: called before each request; returns headers, such as credentials that change.
        stale: called with the client's headers when credentials were refused. It returns True if the request may
            succeed with new headers; the request is then sent once more. By default it returns False.
        said: returns the error code and text of a refusal, from its status and its body (parsed if it is JSON).
        refuses: returns True if a body is a refusal although its status says success. By default it returns False.
        apart: minimum seconds between two calls of one kind, by patterns of "METHOD /path". The first pattern that
            matches counts; a call that matches none is not delayed.
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
        """Send a request that is safe to repeat, and return the body of the answer.

        The request is repeated for up to 20 s while there is no answer, or while the API says that requests come too
        often. The call blocks during that time. Other refusals are raised at once.

        Args:
            method: HTTP method, such as "GET".
            path: path of the request, appended to the base address.
            what: name of the request in errors; "" takes its method and path.
            json: value that is sent as JSON; None sends no body.
            params: query parameters.
            headers: additional headers.

        Returns:
            The parsed body if it is JSON, the text of any other body, or None if the body is empty.

        Raises:
            ProviderError: the API refused the request; the class is one of skypool's errors, such as CredentialsError.
                `NoAnswer` if no answer came within the 20 s, and RateLimitError if requests were still too frequent.
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
        """Send a request that must not be repeated, such as a create, and return the body of the answer.

        The request is sent a second time in one case only: the credentials were refused, and `stale` says that new ones
        may succeed.

        Args:
            method, path, what, json, params, headers: as in `ask`.

        Returns:
            The parsed body if it is JSON, the text of any other body, or None if the body is empty.

        Raises:
            ProviderError: the API refused the request, or did not answer (`NoAnswer`).
            UsageError: the package `requests` is not installed.
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
        """Send a request once, as `once` does, and return the pair (body, headers of the answer).

        The body is parsed if it is JSON, None if it is empty, otherwise text.

        Args:
            method, path, what, json, params, headers: as in `ask`.

        Raises:
            ProviderError: the API refused the request, or did not answer (`NoAnswer`).
            UsageError: the package `requests` is not installed.
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
        """Send one request with exactly these headers, and return the pair (body, headers of the answer).

        Blocks until the pause between calls of this kind is over and the answer is there. Redirects are not followed;
        they count as refusals. A web page with a status of success counts as a lost connection.

        Raises:
            ProviderError: the API refused the request or did not answer. A header value with other characters than
                printable ASCII counts as a refusal with code "401", and nothing is sent.
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
        """Return the error for a refusal as one of skypool's error classes. Nothing is raised.

        The table of errors chooses the class. For a code without a class there, a lost connection or a server error
        (code 500 or more) becomes `NoAnswer`. Everything else becomes a plain ProviderError.

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
        """Return the HTTP session of the calling thread.

        It is created at the thread's first call, and never uses `~/.netrc`.
        """
        if not hasattr(self._local, "session"):
            self._local.session = imported("requests").Session()
            self._local.session.auth = lambda request: request  # otherwise ~/.netrc would replace our key
        session: requests.Session = self._local.session
        return session

    def _keep_apart(self, call: str) -> None:
        """Sleep until enough time has passed since the last call of the same kind.

        Only the first pattern of `apart` that matches counts. Returns at once if no pattern matches. Threads share the
        waiting times: each one that waits reserves the next free moment.

        Args:
            call: method and path, such as "GET /instances".
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

    Pass the object as `headers` of a `Rest`, and its method `stale` as `stale`. A token that the API refuses before its
    expiry is then replaced. The constructor sends nothing.

    Args:
        base: address of the API.
        path: path of the API that gives tokens.
        refusals: table that translates the API's error codes to skypool's errors.
        credentials: entries that are sent to get a token, usually `client_id` and `client_secret`.
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
        """Return the Authorization header with a valid token, as a dict with this one entry.

        A new token is requested if there is none yet, or if the present one expires within a minute. The call, and
        every other thread that needs the token, then blocks until the new token has come.

        Raises:
            CredentialsError: the credentials are refused.
            ProviderError: the API gave no token for another reason, for example it did not answer (`NoAnswer`).
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
        """Return True if a request that was refused with these headers may succeed when it is sent again.

        Returns True if another thread has replaced the token meanwhile. Also returns True if the headers have the
        current token and it is at least 2 s old. That token is then marked as expired, so the next request gets a new
        one. Returns False if the current token is younger: a newer one would be refused, too.
        """
        with self._lock:
            if headers.get("Authorization") == f"Bearer {self._access}":
                if time.monotonic() - self._came < _FRESH:
                    return False
                self._ends = time.monotonic()
            return True

    def _got(self) -> Any:
        """Request a new token, and return the API's parsed answer.

        The refresh token is sent if there is one. It is used only once. If the API refuses it, the credentials are sent
        instead.

        Raises:
            CredentialsError: the credentials are refused.
            ProviderError: the API gave no token for another reason.
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

    The statuses 400, 401 and 403 all give the code "401", because any fault of such a request is the credentials'
    fault. Other statuses give what `said` returns.
    """
    code, text = said(status, body)
    return ("401" if status in (400, 401, 403) else code), text


def _is_page(body: object) -> bool:
    """Return True if a body is a web page: text that begins with "<", apart from white space.

    The Content-Type is not used, as some servers call every text a page. Returns False for None and for parsed JSON.
    """
    return isinstance(body, str) and body.lstrip().startswith("<")


def _read(got: requests.Response) -> Any:
    """Return the body of an answer: the parsed value if it is JSON, otherwise the text.

    Returns None if the body is empty.
    """
    try:
        return got.json() if got.content else None
    except ValueError:
        return got.text


def _seconds(retry_after: str) -> float | None:
    """Return the seconds of a Retry-After header as a float. A negative number gives 0.

    Returns None if the text is empty or no number. The header may also be a date, but no provider was seen to send one.
    """
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        return None
