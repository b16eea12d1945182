"""Converts lists of similar values to tables, which are written column by column instead of value by value."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from skypool.trust import classes
from skypool.trust.format import (
    DICT_ITEM,
    DICT_PRICE,
    DICTS,
    FIELD_PRICE,
    INSTANCE_PRICE,
    INSTANCES,
    ROW,
    ROW_ITEM,
    TUPLES,
)

_SMALL_DICT = 5
"""The greatest number of keys for which `DICT_PRICE` covers the memory of a dictionary."""


@dataclass(frozen=True, slots=True)
class Table:
    """A list of similar values (tuples, dictionaries or instances of a data class) as columns.

    Attributes:
        tag: the tag of the table: TUPLES, DICTS or INSTANCES.
        names: the names of the columns: keys of dictionaries, fields of instances, or for tuples numbers from 0.
        columns: the columns. Each has one value for each row.
        row_price: the price in bytes of one row, without the values in it.
    """

    tag: int
    names: Sequence[Any]
    columns: Iterable[Sequence[Any]]
    row_price: int


def table_of(kind: type, items: Sequence[Any]) -> Table | None:
    """Return a table of these items, at least one and all of type `kind`, or None if they do not form a table.

    Items form a table if they are tuples of the same length, or instances of a data class with the same fields. So do
    dictionaries with the same keys, all of type str, in the same order. Empty items form no table. Neither do items
    among which an object occurs twice, because the reader would make two objects of it.
    """
    if kind is tuple:
        table = _of_tuples(items)
    elif kind is dict:
        table = _of_dicts(items)
    elif classes.is_data(kind):
        table = _of_instances(items)
    else:
        return None
    return table if table is not None and len(set(map(id, items))) == len(items) else None


def _of_tuples(items: Sequence[tuple[Any, ...]]) -> Table | None:
    width = len(items[0])
    if not width or any(len(row) != width for row in items):
        return None
    return Table(TUPLES, range(width), zip(*items, strict=True), ROW + ROW_ITEM * width)


def _of_dicts(items: Sequence[dict[Any, Any]]) -> Table | None:
    names = list(items[0])
    same = items[0].keys()
    if not names or set(map(type, names)) != {str} or any(row.keys() != same for row in items):
        return None
    if any(list(row) != names for row in items):
        return None
    large = DICT_ITEM * len(names) if len(names) > _SMALL_DICT else 0
    columns = zip(*(row.values() for row in items), strict=True)
    return Table(DICTS, names, columns, ROW_ITEM * len(names) + DICT_PRICE + large)


def _of_instances(items: Sequence[Any]) -> Table | None:
    states = []
    for item in items:
        state = classes.state_of(item)
        if state is None:
            return None
        states.append(state)
    names = list(states[0])
    if not names or any(list(state) != names for state in states):
        return None
    columns = zip(*(state.values() for state in states), strict=True)
    return Table(INSTANCES, names, columns, ROW + INSTANCE_PRICE + (ROW_ITEM + FIELD_PRICE) * len(names))
