"""Reads results safely from machines that belong to strangers.

A result is normally a pickle, and reading a pickle can run code. Pickles are read only from nodes (rented machines)
with the setting `trust="full"`. It is the default for the user's own machines and those of a cloud. A machine from a
marketplace belongs to a stranger. Such a machine has `trust="data"` by default. It sends results in skypool's data
format, and reading this format cannot run code that the stranger chose.

Words that this package uses:

- client: the user's process, which reads results. Node: a rented machine, which writes them.
- tag: the first byte of an encoded value, which says what kind of value it is.
- price: bytes that a value counts, at least the memory that it takes when it is read.
- budget: the sum of the prices that the parts of a value may have which are not read yet. At the beginning, it depends
  on the number of bytes that were sent.
- beside: memory of large arrays travels in buffers beside (after) the encoded value.
- table: a list of similar values that is written column by column.

Modules:

- `format`: defines the tags and the prices.
- `reader`: reads results and exceptions. `decoding` decodes one value. `bounded_reader` holds the position in its bytes
  and the budget.
- `sending`: writes results in a worker process on the node. `encoding` encodes one value. `tables` makes tables.
- `refusals`: makes the errors for values that cannot be written as data.
- `values` (standard library), `arrays` (numpy, torch), `classes` (the user's own): the types that may be sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from skypool.wire.frames import Buffer

__all__ = ["Reader"]


class Reader(Protocol):
    """A decoder of the results of one node. It runs no code that the node chooses."""

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
        """Return (do not raise) the exception that a call of the function `call` raised.

        Return an UntrustedResult instead if the buffers cannot be read as data.
        """
        ...
