"""`Book`: a connection to a SQLite file that takes any text."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from skypool.text import encodable


class Book(sqlite3.Connection):
    """A connection to a SQLite file. Surrogates in texts, which SQLite refuses, are written as escapes.

    Pass it as `factory` to `sqlite3.connect`.
    """

    def execute(self, sql: str, values: Any = (), /) -> sqlite3.Cursor:
        """Execute a statement, as the base class does."""
        return super().execute(sql, _encodable(values))

    def executemany(self, sql: str, rows: Iterable[Any], /) -> sqlite3.Cursor:
        """Execute a statement for each row of values, as the base class does."""
        return super().executemany(sql, map(_encodable, rows))


def _encodable(values: Any) -> Any:
    """Return the values of a statement without surrogates."""
    if isinstance(values, Mapping):
        return {name: _text(value) for name, value in values.items()}
    return [_text(value) for value in values] if isinstance(values, Sequence) else values


def _text(value: object) -> object:
    return encodable(value) if isinstance(value, str) else value
