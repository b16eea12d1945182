"""Defines the tags of skypool's data format, and the price in bytes of each value.

The format carries results of nodes (rented machines) that may not run code on the client. A value is written as a tag
and the contents that belong to this tag. Values follow each other without separators. No tag calls a function that the
sender names, or imports a module.

Making a value costs a price in bytes. The price is at least the memory that the value takes, and covers the time for
making it. The sum of all prices must not exceed `GROWS` times the number of bytes sent, plus `SPARE`. An honest writer
counts the same prices, and adds zeros if its data is too short for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

GROWS = 3
"""Bytes of objects that each byte sent pays for. Together with the sent byte itself, memory grows at most fourfold."""
SPARE = 16 << 10
"""Bytes of objects that are free, so that small values need no added zeros."""
DEEPEST = 150
"""The greatest depth of nested values. Reading one level takes two levels of Python's own stack."""

MAGIC = b"\x93sky1"
"""The first bytes of a value. A pickle never begins with them."""
# The first byte of a value is its tag. These are the tags of single values,
NONE = ord("N")
TRUE = ord("T")
FALSE = ord("F")
INT = ord("i")
LONG = ord("I")
FLOAT = ord("f")
STR = ord("s")
BYTES = ord("b")
REF = ord("r")
MARKED = ord("m")
# of collections,
LIST = ord("l")
TUPLE = ord("t")
DICT = ord("d")
WIDE = ord("w")
SET = ord("S")
FROZENSET = ord("Z")
# of columns with many values of one type,
INTS = ord("q")
FLOATS = ord("g")
BOOLS = ord("o")
STRS = ord("u")
TUPLES = ord("R")
DICTS = ord("D")
INSTANCES = ord("C")
# and of instances of classes.
MEMBER = ord("e")
FLAGS = ord("E")
NAMED = ord("n")
INSTANCE = ord("O")
ERROR = ord("X")
ALLOWED = ord("A")
OTHER = ord("x")

# Prices in bytes, slightly above what CPython 3.11 allocates. A price named ITEM, ROW or FIELD is for each one.
SLOT = 32
"""The price of a value without a price of its own, and of each place in a container."""
LIST_PRICE = 120
DICT_PRICE = 320
DICT_ITEM = 150
SET_PRICE = 280
SET_ITEM = 170
ROW = 120
ROW_ITEM = 16
INSTANCE_PRICE = 400
FIELD_PRICE = 100
SHAPE_PRICE = 3000
STR_PRICE = 72
OTHERS = {
    **dict.fromkeys(("date", "time", "datetime", "timedelta", "decimal", "uuid", "complex", "bytearray"), 300),
    **dict.fromkeys(("range", "slice", "fraction"), 400),
    **dict.fromkeys(("path", "address", "scalar", "ndarray"), 900),
    **dict.fromkeys(("zone", "dtype", "tensor"), 3000),
}
"""The prices of values that have a name in the data format."""
OTHER_PRICE = 1200
"""The price of such a value whose name is not in `OTHERS`."""


def text_price(size: int, is_ascii: bool) -> int:
    """Return the price in bytes of reading a text. A reader subtracts prices from its memory budget.

    It is 72 plus the size for ASCII, and 72 plus six times the size otherwise. A character takes up to four bytes, and
    more while it is decoded.

    Args:
        size: the text's length in bytes of UTF-8.
        is_ascii: True if it has ASCII characters only.
    """
    return STR_PRICE + (size if is_ascii else 6 * size)


def long_price(size: int) -> int:
    """Return the price in bytes of reading an integer that is `size` bytes long.

    It is 48 plus 1.25 times the size. A reader subtracts prices from its memory budget.
    """
    return 48 + size + size // 4


def extra_price(args: Iterable[Any]) -> int:
    """Return the price in bytes of building a value from these arguments, in addition to the price of its type.

    It covers copies of the arguments, and slow arithmetic with long integers. Arguments of other types, integers up to
    64 bits and an empty `args` cost 0. A reader subtracts prices from its memory budget.
    """
    price = 0
    for each in args:
        kind = type(each)
        if kind is str or kind is bytes or kind is bytearray:
            price += 3 * len(each)
        elif kind is list or kind is dict or kind is tuple:
            price += 250 * len(each)
        elif kind is int and (bits := each.bit_length()) > 64:
            price += bits // 2 + (bits // 30) ** 2 // 15
    return price
