"""Writes the requests of this process to providers, and the replies, into the files of a recording, without secrets.

`to` begins and ends a recording, a `Recorder` writes it, and `read` returns it as a `Recording`. Users find these names
in `skypool.drivers.recording`, which says what is in the files.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from skypool.drivers import request_hooks, tags
from skypool.drivers.request_hooks import NOTHING_PRIVATE, Exchange, Kind, Private
from skypool.errors import UsageError
from skypool.proof.recording_scrub import Scrubber
from skypool.safety import private

FORMAT = 1
"""Version of the format of the two files of a recording."""

MANIFEST = "manifest.json"
"""Name of the file that says when and with which version a recording was made."""

EXCHANGES = "exchanges.jsonl"
"""Name of the file with the requests and replies, one JSON object on each line."""

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


class Recorder:
    """Writer of a recording, made by `to`. Any thread may use it.

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
            self._file = _opened(file)

    def hide(self, value: str, kind: Kind = "secret") -> None:
        """Replace a private value, such as a key, in all texts written from now on, also where it is encoded.

        `kind` is the kind of the value, such as "secret", which selects the form of the placeholder.
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
        """Record that a token was requested. Call this if the request itself cannot be seen, as inside an SDK.

        `provider` is the name of the driver. `service` is the provider's service, such as "ec2"; "" for its only one.
        """
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
        """Return an exchange with placeholders. If it is confidential, also remove its query, headers and bodies."""
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


@dataclass(frozen=True, slots=True)
class Recording:
    """The contents of a folder with a recording.

    Attributes:
        manifest: version, time, and the entries of the argument `about` of `to`.
        exchanges: the requests with their replies, in the order in which they ended.
    """

    manifest: Mapping[str, Any]
    exchanges: list[Exchange]


@contextlib.contextmanager
def to(
    directory: str | os.PathLike[str], *, scrub: Iterable[str] = (), about: Mapping[str, object] | None = None
) -> Iterator[Recorder]:
    """Record all requests of this process to providers, and the replies, during a `with` block.

    The requests of all threads are recorded, also those of clients that were made before the block. The requests of
    other processes are not.

    Args:
        directory: the folder for the recording. It is made if it does not exist.
        scrub: private values to replace in all texts, in addition to values that are recognised as private.
        about: further entries of the manifest, such as the provider and the settings.

    Raises:
        UsageError: another recording is on, or the folder already has a recording.
        NotPrivate: another user can change the folder.
        OSError: the folder or a file could not be made or written.
    """
    folder = Path(directory)
    recorder = Recorder(scrub)
    request_hooks.begin(recorder)
    try:
        if folder.is_dir():
            private.check(folder, "name another folder")
        else:
            private.folder(folder, "name another folder")
        if (folder / EXCHANGES).exists():
            raise UsageError(f"{folder} already has a recording; name another folder")
        manifest = {
            "format": FORMAT,
            "skypool": metadata.version("skypool"),
            "began": datetime.now(UTC).isoformat(),
            **recorder.about(dict(about or {})),
        }
        with open(_opened(folder / MANIFEST), "w", encoding="utf-8") as file:
            file.write(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
        recorder.open(folder / EXCHANGES)
        yield recorder
    finally:
        request_hooks.end()
        recorder.close()


def read(directory: str | os.PathLike[str]) -> Recording:
    """Return the recording in a folder. A last line that was not written to its end is left out.

    Raises:
        UsageError: the folder has no recording, or one of another version.
    """
    folder = Path(directory)
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        lines = (folder / EXCHANGES).read_text("utf-8").split("\n")[:-1]
    except OSError as e:
        raise UsageError(f"{folder} has no recording: {e}") from e
    if manifest.get("format") != FORMAT:
        raise UsageError(
            f"the recording in {folder} has format {manifest.get('format')}, and this skypool reads {FORMAT}"
        )
    return Recording(manifest, [_exchange(json.loads(line)) for line in lines])


def _exchange(data: Mapping[str, Any]) -> Exchange:
    """Return the exchange that a JSON object from `_data` describes."""
    fields = dict(data)
    for name in ("request", "reply"):
        if (coded := fields.pop(f"{name}_base64", None)) is not None:
            fields[name] = base64.b64decode(coded)
    return Exchange(**fields)


def _opened(file: Path) -> int:
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
