"""`Book`: a connection to a SQLite file that accepts any text, also with surrogates, which SQLite cannot store."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from skypool.text import encodable


class Book(sqlite3.Connection):
    """Connection to a SQLite file that escapes surrogates in texts. Pass it as `factory` to `sqlite3.connect`."""

    def execute(self, sql: str, values: Any = (), /) -> sqlite3.Cursor:
        """Execute an SQL statement. Surrogates in the texts among `values` are stored as escapes."""
        return super().execute(sql, _encodable(values))

    def executemany(self, sql: str, rows: Iterable[Any], /) -> sqlite3.Cursor:
        """Execute an SQL statement for each row of values. Surrogates in texts are stored as escapes."""
        return super().executemany(sql, map(_encodable, rows))


def _encodable(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {name: _text(value) for name, value in values.items()}
    return [_text(value) for value in values] if isinstance(values, Sequence) else values


def _text(value: object) -> object:
    return encodable(value) if isinstance(value, str) else value
