"""Reads the bytes of a value in skypool's data format, and limits the memory that the value may take.

The limit is a budget in bytes. Each part of the value has a price in bytes, which is at least the memory that this part
takes. Reading a part subtracts its price from the budget.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from skypool.trust.format import DEEPEST, GROWS, MAGIC, SPARE, text_price
from skypool.wire.frames import Buffer

_U64 = struct.Struct("<Q")
_COPIED = 1 << 20
"""The size in bytes below which an encoded value is copied to bytes, because they are read faster than a memoryview."""
_INSIDE = 10
"""The number of levels added to the depth of nesting when a part of a value is read by a decoder of its own."""
FAULTY = "No correct node sends this: end the pool and rent another machine"
"""The advice of messages about bytes that skypool's own code on a node never writes."""


class NotData(Exception):
    """An error for bytes that are not valid in skypool's data format, or that name something not allowed.

    Attributes:
        why: the reason, as a part of an error message. The word "it" in this text means the value that is read.
        name: the refused name of a class, function or module, such as "os.system"; "" for other reasons.
        allowable: True if `name` is a class that the user may allow with the pool's argument `allow_results`.
        advice: the next step for the user, as whole sentences; "" for the advice to return plain values instead.
    """

    def __init__(self, why: str, name: str = "", allowable: bool = False, advice: str = "") -> None:
        self.why = why
        self.name = name
        self.allowable = allowable
        self.advice = advice
        super().__init__(why)


class Cursor:
    """The state of reading one value: the position in its bytes, the depth of nesting, and the budget that is left.

    Methods that read a number or a length raise struct.error if fewer than 8 bytes are left.

    Args:
        buffers: the encoded value, followed by the buffers of its large arrays. At least one buffer.
        parent: the cursor of the enclosing value, if this value is a part of another value. Both values then share the
            parent's budget. If None, the budget is three times the size of all `buffers`, plus 16 KiB.
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
        """Raise NotData unless the value begins with the magic bytes of skypool's data format."""
        if bytes(self.data[: len(MAGIC)]) != MAGIC:
            raise NotData("it does not begin like a value in skypool's data format", advice=FAULTY)

    def check_end(self) -> None:
        """Raise NotData unless all buffers that were sent beside the encoded value were used.

        Bytes that are left over at the end of the encoded value are not checked.
        """
        if self._taken != len(self.buffers):
            raise NotData(f"it uses only {self._taken} of the {len(self.buffers)} buffers sent with it", advice=FAULTY)

    def charge(self, price: int) -> None:
        """Subtract a price in bytes from the budget, and from the parent's. Raises NotData if it exceeds either."""
        if self._parent is not None:
            self._parent.charge(price)
        self.left -= price
        if self.left < 0:
            raise NotData("it would take far more memory on your machine than the bytes that were sent", advice=FAULTY)

    def deeper(self) -> None:
        """Count one more level of nesting. Raises NotData if there are more than `DEEPEST` (150).

        The caller subtracts 1 from `depth` after it has read the nested value.
        """
        self.depth += 1
        if self.depth > DEEPEST:
            raise NotData(f"its nesting is more than {DEEPEST} levels deep", advice="Return a value with less nesting")

    def number(self) -> int:
        """Read the next 8 bytes of the encoded value and return them as an unsigned integer: a length or an index."""
        at = self.at
        self.at = at + 8
        return _U64.unpack_from(self.data, at)[0]  # type: ignore[no-any-return]  # the format code gives this type

    def count(self, least: int = 1) -> int:
        """Read the number of items that follow, of at least `least` bytes each. Raises NotData if they cannot fit."""
        count = self.number()
        if count * least > len(self.data) - self.at:
            raise NotData(
                f"it is cut off: {count} items do not fit into what is left of its {len(self.data)} bytes",
                advice=FAULTY,
            )
        return count

    def take(self, size: int) -> bytes | memoryview:
        """Read the next `size` bytes of the encoded value and return them. Raises NotData if fewer are left.

        Returns a memoryview, without a copy, if the encoded value has 1 MiB or more and was not given as bytes.
        """
        start = self.at
        self.at = start + size
        if self.at > len(self.data):
            raise NotData(
                f"it is cut off: it has {len(self.data)} bytes, and at least {self.at} are needed", advice=FAULTY
            )
        return self.data[start : self.at]

    def view(self, size: int) -> memoryview:
        """Read the next `size` bytes of the encoded value and return a view of them, without a copy.

        If fewer bytes are left, the view is shorter than `size`, and no error is raised.
        """
        start = self.at
        self.at = start + size
        return memoryview(self.data)[start : self.at]

    def text(self) -> str:
        """Read a string (its length, then UTF-8, also lone surrogates), and subtract its price from the budget.

        Raises NotData if it is cut off or exceeds the budget, and UnicodeDecodeError if it is not UTF-8.
        """
        data = bytes(self.take(self.count()))
        self.charge(text_price(len(data), data.isascii()))
        return str(data, "utf-8", "surrogatepass")

    def next_buffer(self) -> memoryview:
        """Return the next of the buffers that were sent beside the encoded value. Raises NotData if none is left."""
        if self._taken == len(self.buffers):
            raise NotData(f"it needs more buffers than were sent with it ({len(self.buffers)})", advice=FAULTY)
        self._taken += 1
        return memoryview(self.buffers[self._taken - 1])
