"""Reads results safely from machines that belong to strangers.

A result is normally a pickle, and reading a pickle can run code. Pickles are read only from nodes (rented machines)
that are trusted in full, such as the user's own machines and those of a cloud. A machine from a marketplace belongs to
a stranger. It sends results in skypool's data format, and reading that format cannot run code that the stranger chose.

- `format`: the tags of the data format, and the prices that limit how much memory a value may take.
- `reader`: reads results and exceptions; `reading`: decodes one value; `cursor`: the position in its bytes, and the
  budget, which is the memory that the value may still take.
- `sending`: what a worker process on the node calls; `writing`: the encoder; `tables`: lists of similar values.
- `refusals`: errors for values that cannot be written as data.
- `values` (standard library), `arrays` (numpy, torch), `classes` (the user's own): the types that may be sent.
- `text`: removes terminal control sequences from texts that nodes send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from skypool.trust.text import printable as printable
from skypool.trust.text import unfinished as unfinished
from skypool.wire.frames import Buffer

__all__ = ["Reader", "printable", "unfinished"]


class Reader(Protocol):
    """A reader of the results of one node (a rented machine) that may not run code on the client."""

    def value(self, buffers: Sequence[Buffer], what: str) -> Any:
        """Return the value that was encoded in these buffers.

        Args:
            buffers: the buffers as the node sent them.
            what: the value's name in error messages, such as "the result of train".

        Raises:
            UntrustedResult: the buffers are not in skypool's data format, or name a class that is not allowed.
        """
        ...

    def error(self, buffers: Sequence[Buffer], call: str) -> BaseException:
        """Return the exception that a call raised, without raising it.

        Returns an UntrustedResult instead if the buffers cannot be read as data.

        Args:
            buffers: the buffers as the node sent them.
            call: the call's name in error messages.
        """
        ...
