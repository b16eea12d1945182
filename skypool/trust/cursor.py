"""The bytes of a value in skypool's data format, read one after the other within a budget."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from skypool.trust.format import DEEPEST, GROWS, MAGIC, SPARE, text_price
from skypool.wire.frames import Buffer

_U64 = struct.Struct("<Q")
_COPIED = 1 << 20
"""Bytes up to which a text is copied: bytes are read faster than a view of memory."""
_INSIDE = 10
"""How much deeper a value counts that is read on its own as a part of another one."""


class NotData(Exception):
    """What was sent is no data.

    Attributes:
        name: what it named, such as "os.system", "" where that is not the point; why: what is wrong with it.
        allowable: whether the user might allow that name.
    """

    def __init__(self, why: str, name: str = "", allowable: bool = False) -> None:
        self.why = why
        self.name = name
        self.allowable = allowable
        super().__init__(why)


class Cursor:
    """The text of one value: the place where reading is, how deep that is, and what is left of the budget.

    Args:
        buffers: the text, and the buffers that travel beside it.
        parent: reads the value that this one is a part of, and bears what it costs.
    """

    def __init__(self, buffers: Sequence[Buffer], parent: Cursor | None = None) -> None:
        data = buffers[0]
        self.data: bytes | memoryview = (
            data if type(data) is bytes else bytes(data) if len(data) < _COPIED else memoryview(data)
        )
        self.buffers = buffers
        self.at = len(MAGIC)
        self.left: int = GROWS * sum(map(len, buffers)) + SPARE if parent is None else parent.left
        self.depth: int = parent.depth + _INSIDE if parent else 0
        self._taken = 1
        self._parent = parent

    def check_begin(self) -> None:
        """Raise NotData unless a value in the format begins here."""
        if bytes(self.data[: len(MAGIC)]) != MAGIC:
            raise NotData("it is no value in skypool's format")

    def check_end(self) -> None:
        """Raise NotData unless every buffer was taken."""
        if self._taken != len(self.buffers):
            raise NotData("it has buffers that belong to nothing")

    def charge(self, price: int) -> None:
        """Pay for what is about to be made.

        Raises:
            NotData: not so much was sent.
        """
        if self._parent is not None:
            self._parent.charge(price)
        self.left -= price
        if self.left < 0:
            raise NotData("it would become far more than was sent")

    def deeper(self) -> None:
        """Begin a value in a value; `depth` is taken back when it has ended."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise NotData(f"it is nested more than {DEEPEST} deep")

    def number(self) -> int:
        """A length or an index."""
        at = self.at
        self.at = at + 8
        return _U64.unpack_from(self.data, at)[0]  # type: ignore[no-any-return]  # as the format says

    def count(self, least: int = 1) -> int:
        """How many follow, of which each takes so many bytes at least: never more than there can be."""
        count = self.number()
        if count * least > len(self.data) - self.at:
            raise NotData("it is cut off")
        return count

    def take(self, size: int) -> bytes | memoryview:
        """The next bytes."""
        start = self.at
        self.at = start + size
        if self.at > len(self.data):
            raise NotData("it is cut off")
        return self.data[start : self.at]

    def view(self, size: int) -> memoryview:
        """The next bytes, which are not copied."""
        start = self.at
        self.at = start + size
        return memoryview(self.data)[start : self.at]

    def text(self) -> str:
        """A text."""
        data = bytes(self.take(self.count()))
        self.charge(text_price(len(data), data.isascii()))
        return str(data, "utf-8", "surrogatepass")

    def next_buffer(self) -> memoryview:
        """The next of the buffers that travel beside the value."""
        if self._taken == len(self.buffers):
            raise NotData("a buffer of it is missing")
        self._taken += 1
        return memoryview(self.buffers[self._taken - 1])
