"""Reads the bytes of a value in skypool's data format, and limits the memory that the value may take.

The limit is a budget in bytes: each part of the value costs a price, which is at least the memory that it takes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from skypool.trust.format import DEEPEST, GROWS, MAGIC, SPARE, text_price
from skypool.wire.frames import Buffer

_U64 = struct.Struct("<Q")
_COPIED = 1 << 20
"""The size in bytes up to which a value's text is copied, because bytes are read faster than a memoryview."""
_INSIDE = 10
"""The number of levels that are added to the depth of a value which is read on its own as a part of another one."""


class NotData(Exception):
    """An error for bytes that are not valid in skypool's data format, or that name something not allowed.

    Attributes:
        why: the reason, for a message.
        name: the name that the bytes contain, such as "os.system"; "" if a name is not the problem.
        allowable: True if the user may allow this name with `allow_results`.
    """

    def __init__(self, why: str, name: str = "", allowable: bool = False) -> None:
        self.why = why
        self.name = name
        self.allowable = allowable
        super().__init__(why)


class Cursor:
    """The state of reading one value: the position in its bytes, the depth of nesting, and the budget that is left.

    The budget is the number of bytes of memory that the rest of the value may take. The first buffer has the encoded
    value; this class calls it the text.

    Args:
        buffers: the encoded value, followed by the buffers of its large arrays.
        parent: the cursor of the enclosing value, if this value is a part of one. Both values then share the parent's
            budget. Default None: the budget is three times the size of all `buffers`, plus 16 KiB.
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
            raise NotData(
                "the node sent a value that does not begin like skypool's data format; a correct node never "
                "sends this, so stop using that machine"
            )

    def check_end(self) -> None:
        """Raise NotData unless all buffers that were sent beside the encoded value were used.

        Bytes that are left in the encoded value itself are not checked.
        """
        if self._taken != len(self.buffers):
            raise NotData(
                f"the node sent {len(self.buffers)} buffers with a value that uses {self._taken} of them; a "
                "correct node never sends this, so stop using that machine"
            )

    def charge(self, price: int) -> None:
        """Subtract the price of an object that is about to be made, in bytes, from the memory budget.

        The budget of an enclosing value is reduced, too.

        Raises:
            NotData: the budget does not suffice.
        """
        if self._parent is not None:
            self._parent.charge(price)
        self.left -= price
        if self.left < 0:
            raise NotData(
                "the node sent a value that would take far more memory here than the bytes that were sent; a "
                "correct node never sends this, so stop using that machine"
            )

    def deeper(self) -> None:
        """Count one more level of nesting, before a nested value is read.

        The caller decreases `depth` again after the nested value.

        Raises:
            NotData: values are nested more than `DEEPEST` (150) levels deep.
        """
        self.depth += 1
        if self.depth > DEEPEST:
            raise NotData(f"the node sent a value that is nested more than {DEEPEST} levels deep; return a flatter one")

    def number(self) -> int:
        """Read the next 8 bytes of the encoded value and return them as an unsigned integer: a length or an index.

        Raises:
            struct.error: fewer than 8 bytes are left.
        """
        at = self.at
        self.at = at + 8
        return _U64.unpack_from(self.data, at)[0]  # type: ignore[no-any-return]  # the format code gives this type

    def count(self, least: int = 1) -> int:
        """Read the number of items that follow in the encoded value, and return it. It takes 8 bytes.

        Args:
            least: the smallest number of bytes that each item takes. Default 1.

        Raises:
            NotData: the remaining bytes are too few for so many items.
            struct.error: fewer than 8 bytes are left.
        """
        count = self.number()
        if count * least > len(self.data) - self.at:
            raise NotData(
                f"the node sent a truncated value: {count} items do not fit into the rest of its "
                f"{len(self.data)} bytes; a correct node never sends this, so stop using that machine"
            )
        return count

    def take(self, size: int) -> bytes | memoryview:
        """Read the next `size` bytes of the encoded value and return them.

        Returns a view without a copy if the encoded value has 1 MiB or more and was not given as bytes.

        Raises:
            NotData: fewer bytes are left.
        """
        start = self.at
        self.at = start + size
        if self.at > len(self.data):
            raise NotData(
                f"the node sent a truncated value: it has {len(self.data)} bytes, and at least {self.at} are "
                "needed; a correct node never sends this, so stop using that machine"
            )
        return self.data[start : self.at]

    def view(self, size: int) -> memoryview:
        """Read the next `size` bytes of the encoded value and return a view of them, without a copy.

        The view is shorter if fewer bytes are left. No error is raised then.
        """
        start = self.at
        self.at = start + size
        return memoryview(self.data)[start : self.at]

    def text(self) -> str:
        """Read a string (its length, then UTF-8) and return it. Subtract its price from the memory budget.

        Lone surrogates are accepted.

        Raises:
            NotData: the string is cut off, or the budget does not suffice.
            struct.error: fewer than 8 bytes are left for its length.
            UnicodeDecodeError: the bytes are not UTF-8.
        """
        data = bytes(self.take(self.count()))
        self.charge(text_price(len(data), data.isascii()))
        return str(data, "utf-8", "surrogatepass")

    def next_buffer(self) -> memoryview:
        """Return the next of the buffers that were sent beside the encoded value. Each is returned once, in order.

        Raises:
            NotData: all of them were used already.
        """
        if self._taken == len(self.buffers):
            raise NotData(
                f"the node sent a value that needs more than the {len(self.buffers)} buffers sent with it; a "
                "correct node never sends this, so stop using that machine"
            )
        self._taken += 1
        return memoryview(self.buffers[self._taken - 1])
