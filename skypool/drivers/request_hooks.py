"""Borders: the places where requests to providers leave this process, and where an active recording sees them.

At each request, a border asks for the recorder with `current()`, and gives it the request and its reply as an
`Exchange`. `attend` makes a session of the package `requests` a border.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol

from skypool.errors import UsageError

if TYPE_CHECKING:
    import requests
    from requests.adapters import BaseAdapter
else:
    BaseAdapter = object  # importing requests takes time, and its sessions take any object that can send and close

Kind = Literal["account", "address", "email", "money", "person", "private-key", "project", "secret", "ssh-key", "url"]
"""The kind of a private value.

- "account": the number or the id of an account.
- "address": an IPv4 or IPv6 address.
- "email": an e-mail address, or a user and a host as user@host.
- "money": an amount that tells about the user's account, such as a balance. 0 stays 0.
- "person": the name of a user.
- "private-key": a private key in the PEM format.
- "project": the name of a project.
- "secret": a password, a token, an API key, or a part of one.
- "ssh-key": the base64 part of a public SSH key.
- "url": a URL that grants access to whoever has it.
"""

_GRAPHQL = re.compile(r'^\{"query": ?"\s*((?:query|mutation)\s+\w+)')
"""Matches the body of a GraphQL request whose operation has a name."""


@dataclass(frozen=True, slots=True, eq=False)
class Private:
    """The private values in one provider's requests and replies, beside those that every recording leaves out.

    A recording writes a placeholder in place of each private value. A `Kind`, such as "secret", selects the form of the
    placeholder. Names of fields are written in lower case, without "-" and "_".

    Attributes:
        patterns: a dict from regular expression to the kinds of its groups. What the groups match is private. An
            expression without groups has one kind, and everything that it matches is private.
        fields: a dict from name of a field whose value is private to the kind of the value.
        accounts: names of fields that only a JSON object about the user's account has. In an object with such a field,
            the values of "id" and "name" are private.
    """

    patterns: Mapping[str, tuple[Kind, ...]] = field(default_factory=dict[str, tuple[Kind, ...]])
    fields: Mapping[str, Kind] = field(default_factory=dict[str, Kind])
    accounts: frozenset[str] = frozenset()


NOTHING_PRIVATE = Private()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A request and the reply to it.

    Attributes:
        provider: name of the driver.
        service: the provider's service, such as "ec2"; "" if the provider has only one.
        region: the region that was asked; "" if the address does not depend on it.
        operation: the operation, such as "DescribeInstances" or "GET /v2/pods".
        method: HTTP method, or "gRPC".
        url: path and query. For gRPC, the path is "/SERVICE/METHOD".
        request_headers, reply_headers: the headers. The file of a recording has only some of them, with names in lower
            case.
        request: body of the request; "" for none. Messages of gRPC are JSON.
        status: HTTP status, or the status code of gRPC; -1 if no reply came.
        reply: body of the reply; "" for none. Bytes that are no text stay bytes.
        error: why no reply came; "" if one came. For gRPC, it is also the text of a refusal.
        confidential: True if the request is for a token or another secret. Only the fact that it was sent is recorded.
        number: number of the exchange in its recording, counted from 1 in the order in which the exchanges ended. 0 if
            it is not recorded yet.
        time: when the request was sent, as an ISO time in UTC.
        seconds: seconds from sending the request until the whole reply had come.
    """

    provider: str
    service: str = ""
    region: str = ""
    operation: str = ""
    method: str = ""
    url: str = ""
    request_headers: Mapping[str, str] = field(default_factory=dict[str, str])
    request: str | bytes = ""
    status: int = -1
    reply_headers: Mapping[str, str] = field(default_factory=dict[str, str])
    reply: str | bytes = ""
    error: str = ""
    confidential: bool = False
    number: int = 0
    time: str = ""
    seconds: float = 0.0


class Recorder(Protocol):
    """The interface of the object that writes a recording. `skypool.proof.recording.Recorder` implements it."""

    def add(self, exchange: Callable[[], Exchange], private: Private = NOTHING_PRIVATE) -> None:
        """Write the exchange that the function `exchange` returns, with placeholders for private values.

        Never raises. `private` names the private values of the provider.
        """

    def hide(self, value: str, kind: Kind = "secret") -> None:
        """Write a placeholder of this kind in place of `value` in all texts that are written from now on."""

    def token(self, provider: str, service: str = "") -> None:
        """Write that a token was requested from a provider's service, without the request and the reply."""


_lock = threading.Lock()  # held while a recording begins or ends
_current: Recorder | None = None


def current() -> Recorder | None:
    """Return the recorder of this process, or None while no recording is on. Borders call this at each request."""
    return _current


def begin(recorder: Recorder) -> None:
    """Make `recorder` the recorder of this process. Raise UsageError if another recording is on."""
    global _current
    with _lock:
        if _current is not None:
            raise UsageError("a recording is on already; there can be only one in a process")
        _current = recorder


def end() -> None:
    """Remove the recorder of this process, so that `current` returns None."""
    global _current
    with _lock:
        _current = None


def attend(
    session: requests.Session,
    provider: str,
    service: str = "",
    *,
    private: Private = NOTHING_PRIVATE,
    confidential: bool = False,
) -> None:
    """Make a session of the package `requests` a border: its requests and replies are recorded from now on.

    Nothing is written while no recording is on.

    Args:
        session: the session.
        provider: name of the driver.
        service: the provider's service; "" if the provider has only one.
        private: the patterns and names of fields of the provider's private values.
        confidential: True if the session only requests tokens. The recording then says only that they were requested.
    """
    for prefix, adapter in list(session.adapters.items()):
        session.mount(prefix, _Recorded(adapter, provider, service, private, confidential))


class _Recorded(BaseAdapter):
    """An adapter of a `requests` session. It sends requests by the adapter `inner`, and records them."""

    def __init__(self, inner: BaseAdapter, provider: str, service: str, private: Private, confidential: bool) -> None:
        self._inner = inner
        self._provider = provider
        self._service = service
        self._private = private
        self._confidential = confidential

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        """Send a request by the adapter `inner`, and return the reply. While a recording is on, record both."""
        recorder = current()
        if recorder is None:
            return self._inner.send(request, *args, **kwargs)
        sent, began = datetime.now(UTC), time.monotonic()
        try:
            reply = self._inner.send(request, *args, **kwargs)
            _ = reply.content  # reads all of it
        except Exception as e:
            why = str(e) or type(e).__name__
            recorder.add(lambda: self._exchange(request, None, why, sent, time.monotonic() - began), self._private)
            raise
        recorder.add(lambda: self._exchange(request, reply, "", sent, time.monotonic() - began), self._private)
        return reply

    def _exchange(
        self,
        request: requests.PreparedRequest,
        reply: requests.Response | None,
        error: str,
        sent: datetime,
        took: float,
    ) -> Exchange:
        """Return the exchange of a request and its reply, or of its `error` if no reply came, in `took` seconds."""
        return Exchange(
            provider=self._provider,
            service=self._service,
            operation=_operation(request),
            method=request.method or "",
            url=request.path_url,
            request_headers=_texts(request.headers),
            request=request.body or "",
            status=-1 if reply is None else reply.status_code,
            reply_headers={} if reply is None else _texts(reply.headers),
            reply=b"" if reply is None else reply.content or b"",
            error=error,
            confidential=self._confidential,
            time=sent.isoformat(),
            seconds=round(took, 3),
        )

    def close(self) -> None:
        """Close the adapter `inner`."""
        self._inner.close()


def _operation(request: requests.PreparedRequest) -> str:
    """Return the name of a request, such as "GET /v2/pods". For GraphQL, it is that of the operation: "query Stock"."""
    body = request.body or b""
    text = body if isinstance(body, str) else body[:200].decode(errors="replace")
    if found := _GRAPHQL.match(text):
        return " ".join(found[1].split())
    return f"{request.method} {request.path_url.partition('?')[0]}"


def _texts(headers: Mapping[str, str | bytes]) -> dict[str, str]:
    return {name: value if isinstance(value, str) else value.decode("latin-1") for name, value in headers.items()}
