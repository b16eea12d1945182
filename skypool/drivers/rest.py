"""HTTP client for cloud APIs that have no good SDK.

`Rest` sends requests, keeps connections open, repeats requests, and translates the API's refusals to skypool's errors.
`OAuth` supplies the Authorization header for APIs whose access tokens expire.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

from skypool.drivers import recording, registry
from skypool.drivers.pages import WholeList, whole_list
from skypool.drivers.refusals import Refusals
from skypool.drivers.retry import patiently
from skypool.drivers.sdk import imported
from skypool.errors import CredentialsError, NoAnswer, ProviderError, RateLimitError, UsageError
from skypool.text import plain, plain_value, quotable

if TYPE_CHECKING:
    import requests

PATIENCE = 20.0
"""Seconds for which `Rest.ask` repeats a request that got no answer, or that the API refused as too frequent."""

_CONNECT = 10.0
"""Seconds to wait for a connection."""

_READ = 60.0
"""Seconds to wait for the first part of an answer, and for each further part."""

_EARLY = 60.0
"""A token is renewed this number of seconds before it expires."""

_FRESH = 2.0
"""The least age of a token in seconds at which it is replaced, even if the API refused it or it expires soon."""

_MARKUP = re.compile(r"<(style|script)\b.*?</\1>|<[^>]*>", re.DOTALL | re.IGNORECASE)
"""Matches the parts of a web page that are not text to read: tags, styles and scripts."""

_LONGEST = 300
"""Largest number of characters of a non-JSON answer that an error shows."""

_SENDABLE = re.compile("[ -~]*")
"""Matches a header value that consists of printable ASCII characters. Other values are not sent."""

_MORE = re.compile(r"(?i)(?!.*prev)(.*next.*|(has_?)?more|continue|continuation.*|(is_?)?truncated)")
"""Matches the name of a field of an answer that says that a list goes on, such as "nextCursor" or "has_more"."""

_HAS_MORE = re.compile(r"(?i)has_?(next|more)\w*")
"""Matches the name of a field of an answer that says if a page follows, such as "hasNextPage"."""

_PAGING = re.compile(r"(?i)_?(pag|meta|link)\w*")
"""Matches the name of a field of an answer that may hold the fields about further pages, such as "pagination"."""

_TOTAL = re.compile(
    r"(?i)(x-)?total(_?(count|items|elements|entries|hits|objects|records|results|size))?|(x-total-)?count"
)
"""Matches the name of a field or header of an answer with the number of elements of the whole list."""

_PAGES = re.compile(r"(?i)x-total-pages|total_?pages|num_?pages|pages?_?(count|total)|last_?page|pages")
"""Matches the name of a field or header of an answer with the number of pages of the whole list."""

_LEFT = re.compile(r"(?i)remaining_?items?(_?count)?")
"""Matches the name of a field of an answer with the number of elements on the pages that follow."""

_RANGE = re.compile(r"\w+ .*/(\d+)")
"""Matches a header "Content-Range" such as "items 0-49/120", whose last number counts all elements.

https://www.rfc-editor.org/rfc/rfc9110#section-14.4
"""

_NEXT_LINK = re.compile(r"""\brel=["']?[^"';,]*\bnext\b""", re.IGNORECASE)
"""Matches a header "Link" that names the next page: https://www.rfc-editor.org/rfc/rfc8288#section-3.3."""

Params = Mapping[str, str | int | float]
"""Query parameters of a request, sent as "?name=value"."""

Said = Callable[[int, Any], tuple[str, str]]
"""A function that returns the pair (error code, error text) for the HTTP status and the body of a refusal."""


def said(status: int, body: Any) -> tuple[str, str]:
    """Return the pair (error code, error text) of a refusal whose body has one of the usual forms.

    If the body is a JSON object, the code is its entry "code", or else the status. The text is the first non-empty
    string among its entries "detail", "message", "msg", "error" and "title", or else the whole object.

    For any other body, the code is the status and the text is the first 300 characters of the body. HTML markup of a
    web page, which proxies may send, is removed first.
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

    Several threads may use one `Rest` object at the same time; each thread has its own connections. The constructor
    sends nothing. Requests raise UsageError if the package `requests` is not installed.

    Args:
        base: address of the API, such as "https://api.acme.com/v1"; the paths of requests are appended to it.
        refusals: table that translates the API's error codes to skypool's errors.
        headers: called before each request. It returns headers of the request, such as the credentials.
        said: called with the status and the body (parsed if it is JSON) of a refusal. It returns the error code and the
            error text. Default: the function `said` of this module.
        apart: a dict from kind of request to the minimum pause in seconds between two requests of this kind. A kind is
            a shell-style pattern of "METHOD /path". The first pattern that matches a request counts. Requests that
            match none are not delayed.
        stale: called when the API refused the credentials, with the dict that `headers` had returned. If it returns
            True, `headers` is called again, and the request is sent once more. Default: a function that returns False.
        refuses: called with the body of an answer whose status says success. It returns True if the body is a refusal
            all the same. Default: a function that returns False.
        private: the private values of this API's requests and replies. Recordings (`skypool.drivers.recording`) replace
            them, in addition to those that are private at every provider.
        confidential: True if this object only requests tokens. A recording then says only that a request was sent.
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
        private: recording.Private = recording.Private(),  # noqa: B008 - cannot be changed
        confidential: bool = False,
    ) -> None:
        self._base = base.rstrip("/")
        self._refusals = refusals
        self._headers = headers
        self._said = said
        self._apart = dict(apart or {})
        self._stale = stale
        self._refuses = refuses
        self._private = private
        self._confidential = confidential
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

        The request is repeated for up to 20 s if there is no answer, or if the API says that requests come too often.
        An attempt that has begun is not cut short, so the call may block for longer. Other refusals are raised at once.

        Args:
            method: HTTP method, such as "GET".
            path: path of the request, appended to the base address.
            what: name of the request in errors, such as "the list of machines"; "" for the method and path.
            json: value that is sent as JSON; None for a request without a body.
            params: query parameters.
            headers: further headers, which override headers of the client.

        Returns:
            The parsed body if it is JSON, the text of any other body, or None if the body is empty.

        Raises:
            ProviderError: the API refused the request. The class of the error depends on the API's error code, for
                example CredentialsError.
            NoAnswer: no attempt got an answer, or the API answered with a server error.
            RateLimitError: requests still came too often for the API after 20 s.
        """
        once = partial(self.once, method, path, what=what, json=json, params=params, headers=headers)
        return patiently(once, PATIENCE)

    def ask_all(
        self,
        path: str,
        field: str = "",
        *,
        what: str = "",
        params: Params | None = None,
        next: str = "",
        token: str = "",
    ) -> WholeList[Any]:
        """Send GET requests for all pages of a list, and return the elements of the list.

        Each request is repeated for up to 20 s if there is no answer, or if the API says that requests come too often.

        skypool takes a machine that is missing from a list as ended. So an error is raised if an answer says that there
        are more elements, but the client cannot request them. Signs of more elements are a field "next…", "hasMore" or
        "truncated", a total above the number of elements, a number of pages above 1, and the headers "Link",
        "X-Total-Count" and "Content-Range".

        Args:
            path: path of the request, appended to the base address.
            field: name of the answer's field that holds the elements; "" if the answer is the list itself.
            what: name of the request in errors, such as "the list of machines"; "" for the method and path.
            params: query parameters of each request.
            next: field of an answer with the token of the next page, such as "pagination.nextCursor". The field is
                missing, empty or null in the last page. "" if the API has no pages.
            token: query parameter that carries the token of a page.

        Raises:
            NoAnswer: no attempt got an answer, or an answer has no list in `field`.
            ProviderError: the API refused a request, or the list cannot be read to its end (code "incomplete").
            RateLimitError: requests still came too often for the API after 20 s.
        """
        what = what or f"GET {path}"

        def page(of: str) -> tuple[list[Any], str]:
            asked = {**(params or {}), token: of} if of else params
            request = partial(self.reply, "GET", path, what=what, params=asked)
            answer, headers = patiently(request, PATIENCE)
            elements = answer.get(field) if field and isinstance(answer, Mapping) else answer
            if not isinstance(elements, list):
                lacks = f"no list {field!r}" if field else "no list"
                raise self.error(what, "502", f"the answer has {lacks}: {str(answer)[:_LONGEST]}")
            if _says_end(answer):
                return elements, ""
            follows = str(_inside(answer, next) or "") if next else ""
            if not follows and (sign := _says_more(answer, headers, field, None if of else len(elements))):
                raise self._refusals.incomplete(what, f"the answer says that the list goes on ({sign}), but not how")
            return elements, follows

        return whole_list(page, partial(self._refusals.incomplete, what))

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
        """Send a request that must not be repeated, for example to make a machine, and return the body of the answer.

        The request is sent a second time only if the API refused the credentials, and the function `stale` of this
        client returned True.

        Args:
            method: HTTP method, such as "POST".
            path: path of the request, appended to the base address.
            what: name of the request in errors, such as "your machine"; "" for the method and path.
            json: value that is sent as JSON; None for a request without a body.
            params: query parameters.
            headers: further headers, which override headers of the client.

        Returns:
            The parsed body if it is JSON, the text of any other body, or None if the body is empty.

        Raises:
            ProviderError: the API refused the request. The class of the error depends on the API's error code.
            NoAnswer: the API did not answer, or answered with a server error. The request may have taken effect.
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
        """Send a request that must not be repeated, and return the pair (body of the answer, headers of the answer).

        Except for the headers in the result, this is the method `once`.

        Args:
            method: HTTP method, such as "GET".
            path: path of the request, appended to the base address.
            what: name of the request in errors; "" for the method and path.
            json: value that is sent as JSON; None for a request without a body.
            params: query parameters.
            headers: further headers, which override headers of the client.

        Raises:
            ProviderError: the API refused the request.
            NoAnswer: the API did not answer, or answered with a server error. The request may have taken effect.
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
        """Send one request with these headers, after the pause for its kind. Return the answer as (body, headers)."""
        if not all(_SENDABLE.fullmatch(value) for value in headers.values()):  # requests would show the key
            why = "nothing was sent, as the key contains a newline or another character that is not printable ASCII"
            raise self.error(what, "401", why)
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
                allow_redirects=False,  # a redirect counts as a refusal
            )
        except requests.RequestException as e:
            raise self.error(what, "ConnectionError", str(e)) from quotable(e)
        body = _read(got)
        if got.status_code < 300 and _is_page(body):
            text = f"the reply is a web page, perhaps of a proxy, not of the API: {said(got.status_code, body)[1]}"
            raise self.error(what, "ConnectionError", text)
        if got.status_code < 300 and not self._refuses(body):
            return body, got.headers
        code, text = self._said(got.status_code, body)
        error = self.error(what, code, text)
        if isinstance(error, RateLimitError):
            error.retry_after = _seconds(got.headers.get("Retry-After", ""))
        raise error

    def error(self, what: str, code: str, text: str) -> ProviderError:
        """Return (not raise) the error for a refused or unanswered request, as one of skypool's error classes.

        The client's table `refusals` gives the class for the code. For a code that the table lacks, the class is
        NoAnswer if the connection was lost or the code is 500 or more, and otherwise ProviderError.

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
        """Return the HTTP session of the calling thread, which ignores credentials in `~/.netrc`."""
        if not hasattr(self._local, "session"):
            made: requests.Session = imported("requests").Session()
            made.auth = lambda request: request  # otherwise ~/.netrc would replace our header
            provider = self._refusals.provider
            recording.attend(made, provider, private=self._private, confidential=self._confidential)
            self._local.session = made
        session: requests.Session = self._local.session
        return session

    def _keep_apart(self, call: str) -> None:
        """Sleep until the pause after the last request of this kind, from any thread, is over. `call`: "GET /path"."""
        for pattern, seconds in self._apart.items():
            if fnmatchcase(call, pattern):
                with self._lock:
                    at = max(self._next.get(pattern, 0.0), time.monotonic())
                    self._next[pattern] = at + seconds
                time.sleep(max(0.0, at - time.monotonic()))
                return


class OAuth:
    """An OAuth access token, which is requested with the user's credentials and renewed before its expiry.

    Pass the object as the argument `headers` of `Rest`, and its method `stale` as the argument `stale`. `Rest` then
    also replaces a token that the API refuses before its expiry. All threads share one token. The constructor sends
    nothing.

    Args:
        base: address of the API.
        path: path of the API's token endpoint, appended to `base`.
        refusals: table that translates the API's error codes to skypool's errors.
        credentials: the credentials that are sent to get a token, usually `client_id` and `client_secret`.
    """

    def __init__(self, base: str, path: str, refusals: Refusals, **credentials: str) -> None:
        self._api = Rest(base, refusals, dict, said=_said_of_credentials, confidential=True)
        self._path = path
        self._credentials = credentials
        self._lock = threading.Lock()  # guards the attributes below
        self._access = ""
        self._refresh = ""
        self._came = -_EARLY
        self._ends = -_EARLY

    def __call__(self) -> dict[str, str]:
        """Return the Authorization header with a valid token.

        A new token is requested if there is none yet, or if the present one expires within a minute. This call, and
        every other thread that needs the token, then blocks until it has come.

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

        That is so if the headers do not have the current token, because another thread has replaced it meanwhile. It is
        also so if the current token is at least 2 s old: it is then marked as expired, so that the next request gets a
        new one. A younger token gives False, because a newer one would be refused, too.

        Args:
            headers: the headers of the refused request, as this object returned them.
        """
        with self._lock:
            if headers.get("Authorization") == f"Bearer {self._access}":
                if time.monotonic() - self._came < _FRESH:
                    return False
                self._ends = time.monotonic()
            return True

    def _got(self) -> Any:
        """Return the API's answer with a new token. Use the refresh token if there is a valid one, else credentials."""
        ask = partial(self._api.ask, "POST", self._path, what="your credentials")
        refresh = self._refresh
        if refresh:
            self._refresh = ""
            try:
                return ask(json={"grant_type": "refresh_token", "refresh_token": refresh})
            except CredentialsError:
                self._access = ""  # the refused token is forgotten; the credentials below get a new one
        return ask(json={"grant_type": "client_credentials", **self._credentials})


def _said_of_credentials(status: int, body: Any) -> tuple[str, str]:
    """Return (code, text) of a refused request for a token. 400 and 403 become 401: they mean wrong credentials."""
    code, text = said(status, body)
    return ("401" if status in (400, 401, 403) else code), text


def _inside(answer: Any, path: str) -> Any:
    """Return the value of a field of an answer, such as "pagination.nextCursor"; None if there is no such field."""
    for name in path.split("."):
        answer = answer.get(name) if isinstance(answer, Mapping) else None
    return answer


def _paging(answer: Any, place: str = "") -> list[tuple[str, Any]]:
    """Return pairs (path, value): an answer's fields, and those in fields about pages, such as "pagination.next"."""
    told: list[tuple[str, Any]] = []
    for name, value in answer.items() if isinstance(answer, Mapping) else ():
        told.append((f"{place}{name}", value))
        if _PAGING.fullmatch(name):
            told += _paging(value, f"{place}{name}.")
    return told


def _says_end(answer: Any) -> bool:
    """Return True if an answer says that no page follows: it has a field such as "hasNextPage" with the value false."""
    return any(_HAS_MORE.fullmatch(name.rpartition(".")[2]) and value is False for name, value in _paging(answer))


def _says_more(answer: Any, headers: Mapping[str, str], field: str, number: int | None) -> str:
    """Return what says that the list in `field` has more than `number` elements, such as "has_more=True", or ""."""
    if _NEXT_LINK.search(headers.get("Link", "")):
        return f"Link: {headers['Link']}"
    told = [each for each in _paging(answer) if each[0] != field]
    told += [(name, headers.get(name, "")) for name in ("X-Total-Count", "X-Total", "X-Total-Pages", "X-Next-Page")]
    if in_all := _RANGE.fullmatch(headers.get("Content-Range", "")):
        told.append(("total", in_all[1]))
    for name, value in told:
        last = name.rpartition(".")[2]
        if _MORE.fullmatch(last.removeprefix("X-")) and value and str(value).casefold() != "false":
            return f"{name}={value}"
        if number is None or not str(value).isdecimal():  # None: there were pages before
            continue
        if _TOTAL.fullmatch(last) and int(value) > number:
            return f"{name}={value}, but {number} elements"
        if (_PAGES.fullmatch(last) and int(value) > 1) or (_LEFT.fullmatch(last) and int(value)):
            return f"{name}={value}"
    return ""


def _is_page(body: object) -> bool:
    """Return True if a body is a web page: text that begins with "<". The header Content-Type is often wrong."""
    return isinstance(body, str) and body.lstrip().startswith("<")


def _read(got: requests.Response) -> Any:
    """Return the body of an answer, parsed if it is JSON, without control characters; None if the body is empty."""
    try:
        return plain_value(got.json()) if got.content else None
    except (ValueError, RecursionError):
        return plain(got.text)


def _seconds(retry_after: str) -> float | None:
    """Return the seconds in a Retry-After header, at least 0; None if it is no number."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        return None
