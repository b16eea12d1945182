"""Skypool's data format: its tags, and the prices of what they make.

The format is a tag and what belongs to it, one value after the other. There is no tag that calls or imports anything.

Everything that is made costs a price in bytes, which is at least the memory that it takes and pays for the time that
making it takes. All prices together must not exceed `GROWS` times what was sent, plus `SPARE`. An honest writer counts
the same prices and adds zeros where its text is shorter than that.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

GROWS = 3
"""How many bytes of objects one byte that was sent pays for. With what was sent itself that is four times as much."""
SPARE = 16 << 10
"""Bytes of objects that are free, so that small values need no zeros."""
DEEPEST = 150
"""How deep values may be nested. Reading one level takes two levels of Python's own stack."""

MAGIC = b"\x93sky1"
"""How a value begins; a pickle never does."""
# The first byte of a value says what it is: single values,
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
# collections,
LIST = ord("l")
TUPLE = ord("t")
DICT = ord("d")
WIDE = ord("w")
SET = ord("S")
FROZENSET = ord("Z")
# columns of many values of one type,
INTS = ord("q")
FLOATS = ord("g")
BOOLS = ord("o")
STRS = ord("u")
TUPLES = ord("R")
DICTS = ord("D")
INSTANCES = ord("C")
# and values of classes.
MEMBER = ord("e")
FLAGS = ord("E")
NAMED = ord("n")
INSTANCE = ord("O")
ERROR = ord("X")
ALLOWED = ord("A")
OTHER = ord("x")

# Prices in bytes, somewhat above what CPython 3.11 allocates. An ITEM, ROW or FIELD is paid for each one.
SLOT = 32
"""The price of whatever has none of its own, and of its place in what it is in."""
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
"""Prices of what has a name in the format."""
OTHER_PRICE = 1200
"""The price of all others of these."""


def text_price(size: int, is_ascii: bool) -> int:
    """The price of a text of so many bytes: each letter takes up to four, and more while it is read."""
    return STR_PRICE + (size if is_ascii else 6 * size)


def long_price(size: int) -> int:
    """The price of an integer of so many bytes."""
    return 48 + size + size // 4


def extra_price(args: Iterable[Any]) -> int:
    """The price of what is made of these, beside that of its kind: it copies them, or counts with them."""
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
