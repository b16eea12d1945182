"""Detects a damaged file of the ledger, and gives it a new name.

The ledger is a SQLite database in WAL mode, so up to two more files belong to it.
"""

from __future__ import annotations

import itertools
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from skypool.rental.records import Damaged, read
from skypool.safety.sqlite_connection import Book

MARK = 0x534B0000
"""Added to the version of the tables to get `PRAGMA application_id`. If the version were stored only once, a damaged
bit could make it another valid one."""
_HEADER = b"SQLite format 3\x00"
_PASSING = (
    "SQLITE_BUSY",
    "SQLITE_LOCKED",
    "SQLITE_PROTOCOL",
    "SQLITE_FULL",
    "SQLITE_IOERR",
    "SQLITE_CANTOPEN",
    "SQLITE_PERM",
    "SQLITE_READONLY",
    "SQLITE_NOMEM",
    "SQLITE_INTERRUPT",
    "SQLITE_NOLFS",
)
"""SQLite errors about the lock, the disk, the folder or the machine. They say nothing about the content of the file."""
_SUFFIXES = ("-wal", "-shm", "")
"""Suffixes of the files of a database. The log is renamed first: if it stayed behind, it would be applied to the next
database."""


Schema = list[tuple[str, str, str, str | None]]
"""Tables and indexes of a database, each as (type, name, table, the SQL statement that made it)."""


def _passes(error: BaseException) -> bool:
    """Return True if an error does not mean that the file is damaged, as when it is locked or the disk is full."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorname", "").startswith(_PASSING)
    return not isinstance(error, (Damaged, UnicodeDecodeError))


def version(book: sqlite3.Connection) -> int:
    """Return the version of a ledger's tables, a number from 1. A newer skypool may have written a higher version.

    The file stores the version twice. Raises Damaged if the two do not match, or if the file has no version.
    """
    said: int = book.execute("PRAGMA user_version").fetchone()[0]
    mark: int = book.execute("PRAGMA application_id").fetchone()[0]
    if said > 0 and mark == MARK + said:
        return said
    if (said, mark) == (1, 0):  # files of the first version had no mark
        return said
    raise Damaged(
        f"the version of the ledger's tables is {said}, but its application id is {mark:#x} instead of "
        f"{MARK + said:#x}, so another program has changed the file"
    )


def examine(file: Path, shape: int, schema: Schema, patience: float) -> str | None:
    """Check a whole ledger file for damage. Return text that says what is wrong, or None if the file is good.

    A file of a newer skypool counts as good, without a check of its content. An empty file counts as damaged.

    Args:
        shape: newest version of the tables that this skypool reads.
        schema: tables and indexes of that version.
        patience: seconds to wait while another process locks the file.

    Raises:
        sqlite3.Error, OSError: the file cannot be checked now, for example because it is locked or does not exist.
    """
    with open(file, "rb") as raw:
        header = raw.read(100)
    if not header:
        return "the file is empty"
    if not header.startswith(_HEADER):
        return "file is not a database"
    if not {header[18], header[19]} <= {1, 2}:
        return "the header of the file names an unknown SQLite format"
    try:
        with closing(connected(file, patience)) as book:
            if (found := version(book)) > shape:
                return None
            verify(book, schema if found == shape else None)
    except (sqlite3.Error, UnicodeDecodeError, Damaged) as e:
        if _passes(e):
            raise
        return str(e)
    return None


def verify(book: sqlite3.Connection, schema: Schema | None) -> None:
    """Check a ledger for damage: every page and index with SQLite, and every value. Raise an error if there is any.

    Args:
        schema: the expected tables and indexes; None to accept those of an earlier version.

    Raises:
        Damaged: something is wrong with the content, or the tables and indexes differ from `schema`.
        sqlite3.Error, UnicodeDecodeError: the content cannot be read.
    """
    book.execute("PRAGMA cell_size_check = ON")
    if (found := str(book.execute("PRAGMA integrity_check(1)").fetchone()[0])) != "ok":
        raise Damaged(" ".join(found.split()))
    if schema is not None and schema_of(book) != schema:
        raise Damaged(
            "the ledger's tables differ from those that skypool creates, so another program has changed the file"
        )
    read(book, time.time())


def schema_of(book: sqlite3.Connection) -> Schema:
    """Return the tables and indexes of a database, sorted by type and name.

    The SQL statement in an item is None for an index that SQLite made by itself.
    """
    return book.execute("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name").fetchall()


def connected(file: Path, patience: float) -> sqlite3.Connection:
    """Return a connection to an existing database, in autocommit mode. Raise sqlite3.Error if it is missing.

    A statement waits for `patience` seconds while another process locks the file.
    """
    return sqlite3.connect(
        f"{file.absolute().as_uri()}?mode=rw", uri=True, timeout=patience, isolation_level=None, factory=Book
    )


def set_aside(file: Path) -> Path:
    """Rename a damaged database and its log files, and return the new path. No process may use it meanwhile.

    The new name is like "ledger.damaged-20261121T152800Z.sqlite3", with a number if a file has that name already.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    names = (f"{file.stem}.damaged-{stamp}{f'-{n}' if n else ''}{file.suffix}" for n in itertools.count())
    kept = next(
        each for each in map(file.with_name, names) if not any(_beside(each, end).exists() for end in _SUFFIXES)
    )
    for end in _SUFFIXES:
        if _beside(file, end).exists():
            _beside(file, end).rename(_beside(kept, end))
    return kept


def _beside(file: Path, suffix: str) -> Path:
    return file.with_name(file.name + suffix)
