"""Records every request to a provider and every reply, without secrets, in files that can be read and replayed.

    with recording.to("recorded", about={"provider": "acme"}):
        driver.offers(need)

Private values are replaced by placeholders of the same shape before they are written. Of headers, only those in a list
are kept.

This module only names what two others have. `skypool.drivers.border` has what drivers need while no recording is on.
`skypool.proof.recording` writes and reads the files. It is imported when one of its names is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from skypool.drivers.border import Exchange, Private, attend, current

if TYPE_CHECKING:
    from skypool.proof.recording import Recorder, Recording, read, to

__all__ = ["Exchange", "Private", "Recorder", "Recording", "attend", "current", "read", "to"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(importlib.import_module("skypool.proof.recording"), name)


def __dir__() -> list[str]:
    return __all__
