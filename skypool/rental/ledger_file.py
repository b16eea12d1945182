"""`LedgerFile`: reads and writes the ledger's file in transactions, with locks and recovery from damage.

A damaged file gets a new name, and a fresh one takes its place. Each process that runs pools then writes what it knows
of its pools into the fresh file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from skypool.errors import LedgerError, NotPrivate
from skypool.rental import ledger_damage, lock_holders
from skypool.rental.ledger_schema import SHAPE, bring_up, put_back, rows_of, schema
from skypool.rental.records import Damaged, Rows
from skypool.safety import private
from skypool.safety.sqlite_connection import Book

T = TypeVar("T")
PATIENCE = 30.0
"""Seconds to wait while another process holds the file. On a slow disk, or with many pools that begin or end at once,
the wait may be long."""
_TO_READ = 10.0
"""The same for those who only read. They wait only for one that makes, replaces or closes the file."""
_POLL = 0.01
"""Seconds between two attempts to lock the ledger's lock file."""
_ROOM = 64 * 1024
"""Free bytes below which a disk counts as full. SQLite extends the files beside the ledger by 32 KiB at a time."""
_TROUBLE = (sqlite3.Error, OSError, UnicodeDecodeError, Damaged)
"""Errors that a ledger file can cause. UnicodeDecodeError is one of them, because sqlite3 decodes the file's text."""


class LedgerFile:
    """The ledger file that all processes of this user share, with a copy in memory of the pools that this process runs.

    Args:
        file: path of the file. It is made when it is first used.
        tell: called with a notice for the user if the file was damaged.
    """

    def __init__(self, file: Path, tell: Callable[[str], None]) -> None:
        self.file = file
        self._tell = tell
        self._held: dict[str, Rows] = {}

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Call `work` with a connection to the file, in a read transaction, and return the result of `work`.

        If the file is damaged, a fresh one takes its place, and `work` runs again on the fresh file. Waits up to 10 s
        while another process locks the file. An exception of `work` that the file did not cause is raised unchanged. If
        the file cannot be read, LedgerError is raised.
        """
        patience = min(PATIENCE, _TO_READ)
        return self._healed(lambda: self._transaction(work, "BEGIN", patience), patience)

    def write(
        self,
        work: Callable[[sqlite3.Connection], T],
        *,
        patience: float | None = None,
        thoroughly: bool = False,
        holds: Callable[[T], str] = lambda _: "",
    ) -> T:
        """Run `work` in one write transaction, and return the result of `work`. All of its changes are made, or none.

        If `work` raises, nothing is changed, and the exception is raised. If the file is damaged, a fresh one takes its
        place, and `work` runs again on the fresh file. Pools that this process runs are first written back if the file
        does not have them.

        Args:
            work: function that makes the changes on a connection. It may be called twice.
            patience: seconds to wait while another process locks the file; None means 30.
            thoroughly: True checks the whole file for damage first.
            holds: called with the result of `work`. It returns the session that this process runs from now on; the rows
                of that session are then also kept in memory. "" (the default) means no session.

        Raises:
            LedgerError: the file cannot be written, or is locked for longer than `patience`.
        """
        rows: dict[str, Rows] = {}

        def whole(book: sqlite3.Connection) -> T:
            if thoroughly:
                ledger_damage.verify(book, schema())
            self._restore(book)
            done = work(book)
            rows.update({each: rows_of(book, each) for each in {*self._held, holds(done)} - {""}})
            return done

        wait = PATIENCE if patience is None else patience
        done = self._healed(lambda: self._transaction(whole, "BEGIN IMMEDIATE", wait), wait)
        self._held |= rows
        return done

    def holds(self, session: str) -> bool:
        """Return True if this process keeps the rows of this session in memory, because it runs the session's pool."""
        return session in self._held

    def let_go(self, session: str) -> None:
        """Delete the rows of a session, which this process does not run any more, from memory but not from the file."""
        self._held.pop(session, None)

    @contextmanager
    def remembered(self) -> Iterator[sqlite3.Connection]:
        """Return a context manager for a temporary ledger in memory, with the rows of the pools that this process runs.

        The file is not used. Changes are lost when the context ends.
        """
        with closing(sqlite3.connect(":memory:", isolation_level=None, factory=Book)) as book:
            bring_up(book, 0)
            self._restore(book)
            yield book

    def _restore(self, book: sqlite3.Connection) -> None:
        """Copy the rows of this process's pools from memory into a ledger, except pools that the ledger has already."""
        for session, rows in list(self._held.items()):
            put_back(book, session, rows)

    def _healed(self, attempt: Callable[[], T], patience: float) -> T:
        """Run `attempt`. After an error of the file (not of its lock), replace a damaged file, and run it once more."""
        try:
            try:
                return attempt()
            except _TROUBLE as e:
                if _is_locked(e) or isinstance(e, NotPrivate):
                    raise
                self._set_aside(patience)
                return attempt()
        except _TROUBLE as e:
            raise LedgerError(_trouble(self.file, e)) from e

    def _set_aside(self, patience: float) -> None:
        """Check the file. If it is damaged, rename it, make a fresh one, and tell the user. May raise TimeoutError."""
        with self._locked(patience) as lock:
            _take(lock, fcntl.LOCK_EX, patience)
            why = ledger_damage.examine(self.file, SHAPE, schema(), patience) if self.file.exists() else None
            if why is None:
                return
            try:
                kept = ledger_damage.set_aside(self.file)
            except OSError as e:
                raise LedgerError(_stays_damaged(self.file, why, e)) from e
            _make(self.file)
        self._tell(
            f"the ledger {self.file} was damaged ({why}): it is kept as {kept}, and a new one was started. "
            f"`skypool ps` and `skypool cost` no longer know earlier pools; `skypool gc` finds their machines by tags"
        )

    def _transaction(self, work: Callable[[sqlite3.Connection], T], begin: str, patience: float) -> T:
        with self._opened(patience) as book:
            book.execute(begin)
            try:
                done = work(book)
                book.execute("COMMIT")
            except BaseException:
                if book.in_transaction:
                    book.execute("ROLLBACK")
                raise
        return done

    @contextmanager
    def _opened(self, patience: float) -> Iterator[sqlite3.Connection]:
        """Return a context manager for a connection to the file. The file is first made, or its tables updated."""
        with self._locked(patience) as lock:
            _take(lock, fcntl.LOCK_SH, patience)  # other processes cannot replace the file meanwhile
            if not self.file.exists():
                _take(lock, fcntl.LOCK_EX, patience)
                if not self.file.exists():
                    _make(self.file)
                _take(lock, fcntl.LOCK_SH, patience)
            with closing(ledger_damage.connected(self.file, patience)) as book:
                book.execute("PRAGMA synchronous = FULL")
                version = ledger_damage.version(book)
                if version > SHAPE:
                    raise LedgerError(
                        f"the ledger {self.file} was written by a newer skypool: update skypool in this "
                        "environment (pip install --upgrade skypool)"
                    )
                if version < SHAPE:
                    _take(lock, fcntl.LOCK_EX, patience)
                    bring_up(book, ledger_damage.version(book))
                    _take(lock, fcntl.LOCK_SH, patience)
                yield book

    @contextmanager
    def _locked(self, patience: float) -> Iterator[int]:
        """Yield the open lock file. The caller locks it with `_take`: shared to use the ledger, else exclusive."""
        private.folder(self.file.parent, private.STATE)
        lock = private.opened(self.file.with_name(self.file.name + ".lock"), os.O_CREAT | os.O_RDWR)
        try:
            private.check_file(self.file)
            yield lock
        finally:
            os.close(lock)  # this releases the lock


def _take(lock: int, kind: int, patience: float) -> None:
    """Lock the lock file; `kind` is shared or exclusive. Raise TimeoutError if that takes over `patience` seconds."""
    fcntl.flock(lock, fcntl.LOCK_UN)
    until = time.monotonic() + patience
    while True:
        try:
            return fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise TimeoutError(
                    f"another process has held the lock of skypool's ledger for more than {patience:g} s; end "
                    "that process, or try again later"
                ) from None
            time.sleep(_POLL)


def _make(file: Path) -> None:
    """Make an empty ledger file with all tables. The caller must hold the exclusive lock."""
    new = file.with_name(f"{file.name}.new")  # renamed at the end, so that no process sees a half-made ledger
    for end in ("", "-wal", "-shm"):
        file.with_name(new.name + end).unlink(missing_ok=True)  # left by a process that was killed here
    os.close(os.open(new, os.O_CREAT | os.O_RDWR, 0o600))
    with closing(ledger_damage.connected(new, PATIENCE)) as book:
        book.execute("PRAGMA journal_mode = WAL")
        bring_up(book, 0)
    new.rename(file)


def _stays_damaged(file: Path, why: str, error: OSError) -> str:
    return (
        f"the ledger {file} is damaged ({why}) and cannot be set aside ({error}); nothing is rented without a ledger. "
        f"List what runs with `skypool gc`, which works without one, then move the folder of the ledger away: "
        f"mv {file.parent} {file.parent}.damaged"
    )


def _is_locked(error: BaseException) -> bool:
    code = getattr(error, "sqlite_errorname", "")
    return code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_PROTOCOL")) or isinstance(error, TimeoutError)


def _is_full(file: Path, error: BaseException) -> bool:
    """Return True if the error or the free space (below 64 KiB) says that the disk is full."""
    if getattr(error, "sqlite_errorname", "").startswith("SQLITE_FULL"):
        return True
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    with suppress(OSError):  # SQLite may report a full disk as an I/O error
        return shutil.disk_usage(file.parent).free < _ROOM
    return False


def _trouble(file: Path, error: BaseException) -> str:
    """Return the message for an error of the file: what is wrong, and what to do."""
    if isinstance(error, NotPrivate):
        return f"the ledger {file} is not used, and nothing is rented without it: {error}"
    if _is_locked(error):
        return f"the ledger {file} is locked by {lock_holders.words_about(file)}, and try again"
    if _is_full(file, error):
        return (
            f"the ledger {file} cannot be written because its disk is full, and nothing is rented without it: free "
            f"space on that disk, or set XDG_STATE_HOME to a folder on another disk"
        )
    return (
        f"the ledger {file} cannot be written ({error}), and nothing is rented without it: make the file and its "
        f"folder writable, or set XDG_STATE_HOME to a writable folder"
    )
