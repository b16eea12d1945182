"""How far what a node sends is believed.

A result is a pickle, and a pickle is a program: whoever wrote it runs code where it is read. On a machine of one's own,
or of a cloud, that is nobody else. On a machine that a marketplace rents out it is a stranger, and what that one sends
is read as data: by `reader`, which calls nothing that a pickle names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from skypool.trust.text import plain as plain
from skypool.trust.text import unfinished as unfinished
from skypool.wire.frames import Buffer


class Reader(Protocol):
    """Reads what one node sends that may run nothing here."""

    def value(self, buffers: Sequence[Buffer], what: str) -> Any:
        """A value, which messages call `what`.

        Raises:
            UntrustedResult: it is no data.
        """
        ...

    def error(self, buffers: Sequence[Buffer], call: str) -> BaseException:
        """What a call raised, or the refusal of it."""
        ...
