"""Opens the SQLite file of a session, which has the samples and the history of one run of a pool.

Each session has its own file, so no two processes write the same one. The files of old sessions are removed.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from skypool.safety import private, user_folders
from skypool.safety.sqlite_connection import Book

_MOST_FILES = 200
"""The most files that are kept: those of the newest sessions."""
_MOST_OF_ALL = 1 << 30
"""The largest size of all files together, in bytes. Beyond it, the files of the oldest sessions are removed."""
FETCHED = ".fetched"
"""The end of the name of a file in which the machine of a run has kept the same, and which was fetched from there."""
FETCHING = ".fetching"
"""The end of its name while it is fetched."""
_SCHEMA = """
create table if not exists sample (node integer, time real, error integer, data text);
create index if not exists sample_time on sample (time);
create table if not exists event (id integer primary key, time real, kind text, node integer, data text);
create table if not exists call
    (id integer primary key, name text, node integer, ended real, seconds real, outcome text, error text);
create table if not exists work (node integer, since real, until real, busy real, primary key (node, since));
create table if not exists fact (name text primary key, data text);
"""
_MAKING = threading.Lock()
"""A lock that a thread holds while it makes a file, as two threads must not make the same file."""
_UNFINISHED = 3600.0
"""Seconds after which a file that was never finished is removed. Its process was killed while it made the file."""
_WAIT = 30.0
"""Seconds to wait while another connection writes to the same file."""


def folder() -> Path:
    """Return the folder that has the files of all sessions. It may not exist yet."""
    return user_folders.state() / "samples"


def path_of(session: str) -> Path:
    """Return the path of a session's file. It need not exist."""
    return folder() / f"{session}.sqlite3"


@contextmanager
def writing(file: Path) -> Iterator[sqlite3.Connection]:
    """Open a file for writing in a `with` block. A missing file is made. Any thread may use this.

    A new file gets its name only when its tables have been made, so that no reader sees an unfinished file.

    Raises:
        OSError: the folder cannot be made, or another user can change it.
        sqlite3.Error: the file cannot be written.
    """
    with _MAKING:
        is_new = not file.exists()
        private.folder(file.parent, private.STATE)
        private.check_file(file)
        if is_new:
            part = file.with_suffix(".part")
            with closing(sqlite3.connect(part, timeout=_WAIT, factory=Book)) as book:
                book.executescript("pragma auto_vacuum = incremental; pragma journal_mode = wal;" + _SCHEMA)
            part.rename(file)
            _prune(file.parent)
    with closing(sqlite3.connect(file, timeout=_WAIT, factory=Book)) as book:
        book.execute("pragma synchronous = off")
        yield book


@contextmanager
def reading(file: Path) -> Iterator[sqlite3.Connection | None]:
    """Open a file for reading in a `with` block. Yield None if there is no such file.

    Raises NotPrivate if another user can change the file or its folder, and sqlite3.Error if it is damaged.
    """
    if not file.exists():
        yield None
        return
    private.check(file.parent, private.STATE)
    private.check_file(file)
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=_WAIT)) as book:
        yield book


def _prune(files: Path) -> None:
    """Remove files of old sessions, and files that were never finished. A file that vanishes meanwhile is no error."""
    for part in (*files.glob("*.part*"), *files.glob(f"*{FETCHING}*")):
        if 0 < _stat(part)[0] < time.time() - _UNFINISHED:
            part.unlink(missing_ok=True)
    total = 0
    for number, (_, size, old) in enumerate(sorted(map(_stat, files.glob("*.sqlite3")), reverse=True)):
        total += size
        if number and (number >= _MOST_FILES or total > _MOST_OF_ALL):
            for name in (old, Path(f"{old}-wal"), Path(f"{old}-shm"), old.with_suffix(FETCHED)):
                name.unlink(missing_ok=True)


def _stat(file: Path) -> tuple[float, int, Path]:
    with contextlib.suppress(OSError):
        found = file.stat()
        return found.st_mtime, found.st_size, file
    return 0.0, 0, file
