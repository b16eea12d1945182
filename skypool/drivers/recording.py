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

Private values are replaced by placeholders of the same shape before they are written. Of headers, only those in a list
are kept. A driver says with `Private` what is private at its provider.

The names of this module are defined in `request_hooks` (what drivers need) and in `skypool.proof.recording` (what
writes and reads the files). The latter is imported when one of its names is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from skypool.drivers.request_hooks import Exchange, Private, attend, current

if TYPE_CHECKING:
    from skypool.proof.recording import Recorder, Recording, read, to

__all__ = ["Exchange", "Private", "Recorder", "Recording", "attend", "current", "read", "to"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(importlib.import_module("skypool.proof.recording"), name)


def __dir__() -> list[str]:
    return __all__
