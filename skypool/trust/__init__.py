"""Safe reading of what nodes send, for machines that belong to strangers.

A result is a pickle, and a pickle can run code where it is read. Results from one's own machines, or from a cloud's,
are unpickled. A machine from a marketplace belongs to a stranger: its results come in a data format of skypool's own,
which cannot run code.

- `format`: the tags of the format, and the prices that bound what it may become.
- `reader`: reads results and exceptions of such a node; `reading`: the decoder; `cursor`: its budget and place.
- `sending`: the worker's side; `writing`: the encoder; `tables`: lists of like values; `refusals`: what is no data.
- `values` (standard library), `arrays` (numpy, torch), `classes` (the user's own): the types that may travel.
- `text`: removes terminal control sequences from what nodes send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from skypool.trust.text import printable as printable
from skypool.trust.text import unfinished as unfinished
from skypool.wire.frames import Buffer

__all__ = ["Reader", "printable", "unfinished"]


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
