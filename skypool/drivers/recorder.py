"""Writes the requests of this process to providers, and the replies, into the file of a recording, without secrets.

A `Recorder` writes one recording; `skypool.drivers.recording.to` begins and ends it. An `Exchange` is one request with
its reply. `current` returns the recorder of this process.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from skypool.drivers import tags
from skypool.drivers.placeholders import Kind
from skypool.drivers.scrub import Private, Scrubber
from skypool.errors import UsageError

EXCHANGES = "exchanges.jsonl"
"""Name of the file with the exchanges."""

_REQUEST_HEADERS = ("accept", "content-type", "x-amz-target")
"""Headers of requests that are kept, in small letters."""

_REPLY_HEADERS = (
    "content-type",
    "date",
    "deprecation",
    "location",
    "ratelimit",
    "ratelimit-policy",
    "retry-after",
    "sunset",
    "x-amzn-errortype",
    "x-amzn-requestid",
    "x-ratelimit-limit",
    "x-ratelimit-remaining",
    "x-ratelimit-reset",
)
"""Headers of replies that are kept, in small letters."""

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
        request_headers, reply_headers: the headers. A file has only some of them, with names in lower case.
        request: body of the request; "" for none. Messages of gRPC are JSON.
        status: HTTP status, or the status code of gRPC; -1 if no reply came.
        reply: body of the reply; "" for none. Bytes that are no text stay bytes.
        error: why no reply came; "" if one came. For gRPC also the text of a refusal.
        confidential: the request was for a token or another secret, so only the fact is recorded.
        number: counts the exchanges of a recording, from 1, in the order in which they ended.
        time: when the request was sent, as an ISO time in UTC.
        seconds: time from then until the whole reply had come.
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


class Recorder:
    """A recording that is on. Any thread may use it. `skypool.drivers.recording.to` makes one.

    If a write fails, the recording ends, and `to` raises the error at the end of its block. The error never reaches the
    driver, because a driver that loses a reply to a request for a machine would cost money.

    Args:
        scrub: private values that are searched for in every text.
    """

    def __init__(self, scrub: Iterable[str]) -> None:
        self._lock = threading.Lock()  # guards all attributes
        self._scrubber = Scrubber(scrub)
        self._scrubber.hide(tags.owner(), "email")
        self._number = 0
        self._failure: Exception | None = None
        self._file: int | None = None  # before the beginning, and after the end

    def open(self, file: Path) -> None:
        """Make the file, and begin to write. Exchanges that come before this call are not recorded.

        Raises:
            OSError: the file exists, or could not be made.
        """
        with self._lock:
            self._file = opened(file)

    def hide(self, value: str, kind: Kind = "secret") -> None:
        """Replace a private value, such as a key, in all texts that are written from now on.

        It is replaced also where it is encoded.
        """
        with self._lock:
            self._scrubber.hide(value, kind)

    def add(self, exchange: Callable[[], Exchange], private: Private = NOTHING_PRIVATE) -> None:
        """Write an exchange with placeholders. Does nothing before `open` and after `close`. Never raises.

        Args:
            exchange: returns the exchange, as it was sent and received, with all headers. The number of the exchange
                is ignored. If this function raises, the recording ends.
            private: the patterns and names of fields of the provider's private values.
        """
        with self._lock:
            if self._file is None:
                return
            try:
                self._number += 1
                public = dataclasses.replace(self._scrubbed(exchange(), private), number=self._number)
                line = (json.dumps(_data(public), ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
                while line:
                    line = line[os.write(self._file, line) :]
            except Exception as e:  # noqa: BLE001 - `close` raises it
                self._failure = e
                self._end()

    def token(self, provider: str, service: str = "") -> None:
        """Write that a token was requested. Call this if the request itself cannot be seen, as inside an SDK."""
        now = datetime.now(UTC).isoformat()
        told = Exchange(provider=provider, service=service, operation="a token", confidential=True, time=now)
        self.add(lambda: told)

    def about(self, value: object) -> Any:
        """Return a value as JSON data for the manifest, with placeholders for private values."""
        with self._lock:
            return json.loads(self._scrubber.body(json.dumps(value, default=str), NOTHING_PRIVATE))

    def close(self) -> None:
        """End the recording.

        Raises:
            Exception: the failure for which the recording ended early.
        """
        with self._lock:
            self._end()
            if self._failure is not None:
                self._failure.add_note("the recording ended early, and lacks the requests after this failure")
                raise self._failure

    def _end(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _scrubbed(self, sent: Exchange, private: Private) -> Exchange:
        """Return an exchange with placeholders. A confidential one loses its query, headers and bodies."""
        scrubber = self._scrubber
        scrubber.hide_credentials(sent.request_headers)
        if sent.confidential:
            sent = dataclasses.replace(
                sent, url=sent.url.partition("?")[0], request_headers={}, request="", reply_headers={}, reply=""
            )
        return dataclasses.replace(
            sent,
            operation=scrubber.text(sent.operation, private),
            url=scrubber.url(sent.url, private),
            request_headers=self._kept(sent.request_headers, _REQUEST_HEADERS, private),
            request=self._body(sent.request, private),
            reply_headers=self._kept(sent.reply_headers, _REPLY_HEADERS, private),
            reply=self._body(sent.reply, private),
            error=scrubber.text(sent.error, private),
        )

    def _kept(self, headers: Mapping[str, str], names: Iterable[str], private: Private) -> dict[str, str]:
        found = {name.lower(): value for name, value in headers.items()}
        return {name: self._scrubber.text(found[name], private) for name in names if name in found}

    def _body(self, body: str | bytes, private: Private) -> str | bytes:
        """Return a body with placeholders. Bytes that are no text, but contain private text, are left out."""
        if isinstance(body, bytes):
            try:
                return self._scrubber.body(body.decode(), private)
            except UnicodeDecodeError:
                text = body.decode("latin-1")
                return body if self._scrubber.text(text, private) == text else "left out: bytes with private text"
        return self._scrubber.body(body, private)


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


def opened(file: Path) -> int:
    """Make a file that only its owner can read, and return its descriptor."""
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _data(exchange: Exchange) -> dict[str, object]:
    """Return the JSON object of an exchange, without empty fields. Bytes are written as base64."""
    data: dict[str, object] = {}
    for name in Exchange.__dataclass_fields__:
        value = getattr(exchange, name)
        if isinstance(value, bytes):
            data[f"{name}_base64"] = base64.b64encode(value).decode()
        elif value or name == "status":
            data[name] = value
    return data
