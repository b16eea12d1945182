"""Detects a damaged ledger file, and sets it aside under a new name."""

from __future__ import annotations

import itertools
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from skypool.rental.records import Damaged, read

MARK = 0x534B0000
"""Added to a file's version in `PRAGMA application_id`: a version that is stored once only could be one flipped bit."""
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
"""SQLite's errors of the lock, the disk, the folder or the machine: they say nothing about what is in the file."""
_SUFFIXES = ("-wal", "-shm", "")
"""The files of a database. Its log goes first: a log that stayed behind would be applied to the next database."""


Schema = list[tuple[str, str, str, str | None]]
"""Tables and indexes: type, name, table, and the statement that made it."""


def _passes(error: BaseException) -> bool:
    """Return True if an error says nothing about the file's content, as when it is locked or its disk is full."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorname", "").startswith(_PASSING)
    return not isinstance(error, (Damaged, UnicodeDecodeError))


def version(book: sqlite3.Connection) -> int:
    """Return the version of a ledger's tables, which may be that of a newer skypool.

    Raises:
        Damaged: no skypool wrote this version.
    """
    said: int = book.execute("PRAGMA user_version").fetchone()[0]
    mark: int = book.execute("PRAGMA application_id").fetchone()[0]
    if said > 0 and mark == MARK + said:
        return said
    if (said, mark) == (1, 0):  # the first files had no mark
        return said
    raise Damaged(f"its version is said to be {said}, and its mark is {mark:#x}")


def examine(file: Path, shape: int, schema: Schema, patience: float) -> str | None:
    """Look at all of a ledger's file.

    Args:
        shape: the newest version of the tables that this skypool reads; schema: its tables and indexes.
        patience: seconds to wait while another process holds the file.

    Returns:
        What is wrong with it; None if nothing is.

    Raises:
        sqlite3.Error, OSError: it cannot be looked at now.
    """
    with open(file, "rb") as raw:
        header = raw.read(100)
    if not header:
        return "it is empty"
    if not header.startswith(_HEADER):
        return "file is not a database"
    if not {header[18], header[19]} <= {1, 2}:
        return "its header names a format that SQLite does not have"
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
    """Let SQLite check every page and index, and read every value.

    Args:
        schema: the tables and indexes that must be there; None where those of an earlier version are.

    Raises:
        Damaged: something is wrong with them. sqlite3.Error, UnicodeDecodeError: they cannot be read.
    """
    book.execute("PRAGMA cell_size_check = ON")
    if (found := str(book.execute("PRAGMA integrity_check(1)").fetchone()[0])) != "ok":
        raise Damaged(" ".join(found.split()))
    if schema is not None and schema_of(book) != schema:
        raise Damaged("its tables are not those that skypool made")
    read(book, time.time())


def schema_of(book: sqlite3.Connection) -> Schema:
    """Return the tables and indexes of a database, and how each was made."""
    return book.execute("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name").fetchall()


def connected(file: Path, patience: float) -> sqlite3.Connection:
    """Open a database that exists; none is made where there is none."""
    return sqlite3.connect(f"{file.absolute().as_uri()}?mode=rw", uri=True, timeout=patience, isolation_level=None)


def set_aside(file: Path) -> Path:
    """Rename a database and what belongs to it. Nobody may use it meanwhile.

    Returns:
        Its new name.
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
