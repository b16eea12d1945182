"""Defines the tags of skypool's data format, and the price in bytes of each value.

A value is written as a tag (one byte that says what kind of value follows) and contents that depend on the tag. Values
follow each other without separators. No tag makes the client import a module or call a function that the sender names.

The price of a value is at least the memory that it takes on the client. It is higher for values that take long to make.
The sum of all prices must not exceed `GROWS` times the number of bytes sent, plus `SPARE`. The writer counts the same
prices, and adds zeros at the end if it sends too few bytes for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

GROWS = 3
"""The sum of prices in bytes that each byte sent permits. With the sent byte itself, memory grows at most fourfold."""
SPARE = 16 << 10
"""The sum of prices in bytes that any value may have, however short, so that small values need no added zeros."""
DEEPEST = 150
"""The greatest depth of nested values. Reading one level takes two frames of Python's call stack."""

MAGIC = b"\x93sky1"
"""The first bytes of a value. A pickle never begins with them."""
# Tags of single values. REF is a reference to a value that was read before. MARKED comes before a text or bytes object
# to which later references point.
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
# Tags of collections. WIDE is a dictionary with many keys.
LIST = ord("l")
TUPLE = ord("t")
DICT = ord("d")
WIDE = ord("w")
SET = ord("S")
FROZENSET = ord("Z")
# Tags of lists whose items have one type. TUPLES, DICTS and INSTANCES are tables, written column by column.
INTS = ord("q")
FLOATS = ord("g")
BOOLS = ord("o")
STRS = ord("u")
TUPLES = ord("R")
DICTS = ord("D")
INSTANCES = ord("C")
# Tags of instances of classes. OTHER is for types that have a name in the data format, such as "date".
MEMBER = ord("e")
FLAGS = ord("E")
NAMED = ord("n")
INSTANCE = ord("O")
ERROR = ord("X")
ALLOWED = ord("A")
OTHER = ord("x")

# Prices in bytes, slightly above the memory that CPython 3.11 allocates. Prices named ITEM, ROW or FIELD are for one
# item, row or field.
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
"""The prices in bytes of values with the tag `OTHER`, by the name of their type in the data format."""
OTHER_PRICE = 1200
"""The price in bytes of a value with the tag `OTHER` whose name is not in `OTHERS`."""


def text_price(size: int, is_ascii: bool) -> int:
    """Return the price in bytes of reading a text of `size` bytes of UTF-8.

    The price is 72 plus `size` for ASCII, and 72 plus six times `size` otherwise. Each character of a text that is not
    ASCII takes up to four bytes, and more while the text is decoded.
    """
    return STR_PRICE + (size if is_ascii else 6 * size)


def long_price(size: int) -> int:
    """Return the price in bytes of reading an integer of `size` bytes: 48 plus 1.25 times `size`, rounded down."""
    return 48 + size + size // 4


def extra_price(args: Iterable[Any]) -> int:
    """Return the price in bytes of building a value from these arguments, in addition to the price of the value's type.

    It covers copies of texts, bytes and containers, and slow arithmetic with integers of more than 64 bits. All other
    arguments cost 0.
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
