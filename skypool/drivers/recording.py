"""Records every request to a provider and every reply, without secrets, in files that can be read and replayed.

    with recording.to("recorded", about={"provider": "acme"}):
        driver.offers(need)

While a recording is on, each border writes its requests and replies. A border is a place where requests leave this
process: `Rest`, or the sessions and channels of a provider's SDK. At each request, a border asks for the recorder with
`current()`. There is one recorder for the whole process, because a driver is called from many threads, and its clients
live longer than a recording.

The folder has two files. `manifest.json` says when and with which version the recording was made. `exchanges.jsonl` has
one JSON object in each line, an `Exchange`. Each line is written at once, so a process that is killed leaves a file
that can be read. Both files can be read by their owner only.

Private values are replaced by placeholders of the same shape before they are written; see `skypool.drivers.scrub`. Of
headers, only those in a list are kept. A driver says with `Private` what is private at its provider.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skypool.drivers.recorder import EXCHANGES, NOTHING_PRIVATE, Exchange, Recorder, begin, current, end, opened
from skypool.drivers.scrub import Private
from skypool.drivers.sdk import imported
from skypool.errors import UsageError
from skypool.safety import private

if TYPE_CHECKING:
    import requests

__all__ = ["Exchange", "Private", "Recorder", "Recording", "attend", "current", "read", "to"]

FORMAT = 1
"""Version of the format of both files."""

MANIFEST = "manifest.json"
"""Name of the file that says when and with which version a recording was made."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The contents of a folder with a recording.

    Attributes:
        manifest: version, time, and the entries of the argument `about` of `to`.
        exchanges: the exchanges, in the order in which they ended.
    """

    manifest: Mapping[str, Any]
    exchanges: list[Exchange]


@contextlib.contextmanager
def to(
    directory: str | os.PathLike[str], *, scrub: Iterable[str] = (), about: Mapping[str, object] | None = None
) -> Iterator[Recorder]:
    """Record all requests of this process to providers, and the replies, during a `with` block.

    The requests of all threads are recorded, also those of clients that were made before. Other processes are not.

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
    begin(recorder)
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
        with open(opened(folder / MANIFEST), "w", encoding="utf-8") as file:
            file.write(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
        recorder.open(folder / EXCHANGES)
        yield recorder
    finally:
        end()
        recorder.close()


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
    adapters = imported("skypool.drivers.recorded_session")  # imports `requests`
    for prefix, adapter in list(session.adapters.items()):
        session.mount(prefix, adapters.Recorded(adapter, provider, service, private, confidential))


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
    """Return the exchange that `recorder._data` made into this JSON object."""
    fields = dict(data)
    for name in ("request", "reply"):
        if (coded := fields.pop(f"{name}_base64", None)) is not None:
            fields[name] = base64.b64decode(coded)
    return Exchange(**fields)
