"""How a cloud without a good SDK is asked over HTTP: one connection pool, patience, and its refusals as our errors.

`OAuth` is for those whose tokens end.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

from skypool.asking import Refusals, imported, patiently
from skypool.errors import CredentialsError, NoAnswer, ProviderError, RateLimitError, UsageError

if TYPE_CHECKING:
    import requests

PATIENCE = 20.0
"""Seconds for which a question is asked again that got no answer, or came too often."""
_CONNECT, _READ = 10.0, 60.0
_EARLY, _FRESH = 60.0, 2.0  # seconds before its end in which a token is renewed, and in which it is new
_MARKUP = re.compile(r"<(style|script)\b.*?</\1>|<[^>]*>", re.DOTALL | re.IGNORECASE)
_LONGEST = 300  # characters of what is not JSON, in an error
_SENDABLE = re.compile("[ -~]*")
Said = Callable[[int, Any], tuple[str, str]]


def said(status: int, body: Any) -> tuple[str, str]:
    """The code and the text of a refusal in one of the usual shapes; the status is the code where there is no other.

    Of a web page, as a proxy's, these are its words.
    """
    if not isinstance(body, Mapping):
        text = str(body or "")
        return str(status), (" ".join(_MARKUP.sub(" ", text).split()) if _is_page(text) else text)[:_LONGEST]
    words = (body.get(name) for name in ("detail", "message", "msg", "error", "title"))
    text = next((word for word in words if isinstance(word, str) and word), "")
    return str(body.get("code") or status), text or str(dict(body))


class Rest:
    """One API of a provider. May be used by several threads at once; making one asks nothing.

    Args:
        base: its address; paths are added to it.
        refusals: what its errors mean.
        headers: asked for each time, for credentials that change.
        stale: told the headers with which a call was refused for its credentials, it says whether others may do now.
        said: the code and the text of a refusal, from its status and its body (JSON where it is, otherwise text).
        refuses: whether such a body is a refusal though its status is of success.
        apart: seconds between two calls of one kind, by patterns of "METHOD /path"; the first that fits.
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
        self._base, self._refusals, self._headers, self._said = base.rstrip("/"), refusals, headers, said
        self._apart, self._stale, self._refuses = dict(apart or {}), stale, refuses
        self._lock, self._next = threading.Lock(), dict[str, float]()
        self._local = threading.local()

    def ask(self, method: str, path: str, *, what: str = "", **given: Any) -> Any:
        """The answer, asked for again with patience: for calls that may be repeated.

        Args:
            what: what is asked for, in an error; else the call itself.
            given: `json`, `params`, `headers` as requests takes them.

        Raises:
            ProviderError: what the provider said, as one of ours; `NoAnswer` if it said nothing.
        """
        return patiently(partial(self.once, method, path, what=what, **given), PATIENCE)

    def once(self, method: str, path: str, *, what: str = "", **given: Any) -> Any:
        """The same for a call that must not be repeated by itself, such as a create."""
        return self.reply(method, path, what=what, **given)[0]

    def reply(self, method: str, path: str, *, what: str = "", **given: Any) -> tuple[Any, Mapping[str, str]]:
        """The answer to one call and its headers."""
        what, more, known = what or f"{method} {path}", given.pop("headers", {}), self._headers()
        try:
            return self._replied(method, path, what, {**known, **more}, given)
        except CredentialsError:
            if not self._stale(known):
                raise
            return self._replied(method, path, what, {**self._headers(), **more}, given)

    def _replied(
        self, method: str, path: str, what: str, headers: Mapping[str, str], given: Mapping[str, Any]
    ) -> tuple[Any, Mapping[str, str]]:
        if not all(_SENDABLE.fullmatch(value) for value in headers.values()):  # requests would show it
            raise self.error(what, "401", "the key has a character that none can have, such as the end of a line")
        self._keep_apart(f"{method} {path}")
        try:
            requests = imported("requests")
        except ImportError as e:
            raise UsageError(f"{what} needs requests: pip install 'skypool[{self._refusals.provider}]'") from e
        try:
            got = self._session().request(
                method, self._base + path, headers=headers, timeout=(_CONNECT, _READ), allow_redirects=False, **given
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
        """A refusal, as one of ours: its answer says so by its status, or is like any other, as some APIs have them."""
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
        for pattern, seconds in self._apart.items():
            if fnmatchcase(call, pattern):
                with self._lock:
                    at = max(self._next.get(pattern, 0.0), time.monotonic())
                    self._next[pattern] = at + seconds
                time.sleep(max(0.0, at - time.monotonic()))
                return


class OAuth:
    """Headers with an access token for a client's credentials, one for all threads, renewed before it ends.

    It is the `headers` of a `Rest`, and `stale` that one's: a token that is refused though it should hold is replaced.

    Args:
        path: of the API, where tokens come from; credentials: what is told there, `client_id` and `client_secret`.
    """

    def __init__(self, base: str, path: str, refusals: Refusals, **credentials: str) -> None:
        self._door, self._path, self._known = Rest(base, refusals, dict, said=_at_the_door), path, credentials
        self._lock, self._access, self._refresh = threading.Lock(), "", ""
        self._came = self._ends = -_EARLY

    def __call__(self) -> dict[str, str]:
        """Raises: CredentialsError: they are refused."""
        with self._lock:
            if time.monotonic() >= self._ends:
                self._came, got = time.monotonic(), self._got()
                self._access, self._refresh = got["access_token"], got.get("refresh_token", "")
                self._ends = self._came + max(_FRESH, float(got.get("expires_in", 0)) - _EARLY)
            return {"Authorization": f"Bearer {self._access}"}

    def stale(self, headers: Mapping[str, str]) -> bool:
        """Whether another token may be taken: this one is not quite new, or there is a newer one already."""
        with self._lock:
            if headers.get("Authorization") == f"Bearer {self._access}":
                if time.monotonic() - self._came < _FRESH:
                    return False
                self._ends = time.monotonic()
            return True

    def _got(self) -> Any:
        """With the refresh token while there is one that is good."""
        ask, refresh = partial(self._door.ask, "POST", self._path, what="your credentials"), self._refresh
        if refresh:
            self._refresh = ""
            try:
                return ask(json={"grant_type": "refresh_token", "refresh_token": refresh})
            except CredentialsError:
                self._access = ""  # which is got with the credentials themselves
        return ask(json={"grant_type": "client_credentials", **self._known})


def _at_the_door(status: int, body: Any) -> tuple[str, str]:
    """Whatever is wrong with what is told there, it is the credentials."""
    code, text = said(status, body)
    return ("401" if status in (400, 401, 403) else code), text


def _is_page(body: object) -> bool:
    """Whether it is a web page. Its Content-Type says little: some servers call every text one."""
    return isinstance(body, str) and body.lstrip().startswith("<")


def _read(got: requests.Response) -> Any:
    """JSON where it is, otherwise text."""
    try:
        return got.json() if got.content else None
    except ValueError:
        return got.text


def _seconds(retry_after: str) -> float | None:
    """None where it is none: it may be a date, too, which no provider was seen to send."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        return None
