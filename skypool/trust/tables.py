"""Lists of many values that are alike, as tables: their columns are written, and not each value by itself."""

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
"""Keys of a dictionary that are in its own price."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one kind.

    Attributes:
        tag: of tuples, dictionaries, or instances of a data class.
        names: of the columns; those of tuples are numbers.
        columns: one for each name.
        row_price: of one row, without what its columns cost.
    """

    tag: int
    names: Sequence[Any]
    columns: Iterable[Sequence[Any]]
    row_price: int


def table_of(kind: type, items: Sequence[Any]) -> Table | None:
    """Return a table of these, all of this type; None where they do not make one.

    A value that is in it twice is no row: it would come back as two.
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
