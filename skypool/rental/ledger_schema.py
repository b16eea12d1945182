"""The tables of the ledger, steps that update older files, and functions that copy the rows of a session."""

from __future__ import annotations

import functools
import sqlite3
from contextlib import closing

from skypool.rental import ledger_damage
from skypool.rental.records import Rows
from skypool.safety.sqlite_connection import Book

STEPS = (
    """
CREATE TABLE IF NOT EXISTS pools (
    session TEXT PRIMARY KEY, pool TEXT NOT NULL, host TEXT NOT NULL, pid INTEGER NOT NULL, birth TEXT NOT NULL,
    started REAL NOT NULL, beat REAL NOT NULL, lease REAL NOT NULL, max_usd REAL, warn REAL, drivers TEXT NOT NULL,
    ending REAL, ended REAL, error TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS pools_by_name ON pools (pool);
CREATE TABLE IF NOT EXISTS orders (
    session TEXT NOT NULL, token TEXT NOT NULL, at REAL NOT NULL, ranks TEXT NOT NULL, state TEXT NOT NULL,
    error TEXT NOT NULL DEFAULT '', provider TEXT NOT NULL, type TEXT NOT NULL, region TEXT NOT NULL,
    zone TEXT NOT NULL, market TEXT NOT NULL, usd_per_hour REAL NOT NULL, least_billed REAL NOT NULL,
    PRIMARY KEY (session, token)
);
CREATE TABLE IF NOT EXISTS instances (
    session TEXT NOT NULL, provider TEXT NOT NULL, id TEXT NOT NULL, rank INTEGER NOT NULL, token TEXT NOT NULL,
    type TEXT NOT NULL, region TEXT NOT NULL, zone TEXT NOT NULL, market TEXT NOT NULL, usd_per_hour REAL NOT NULL,
    least_billed REAL NOT NULL, launched REAL NOT NULL, ended REAL,
    PRIMARY KEY (session, provider, id)
);
""",
    """
ALTER TABLE pools ADD COLUMN best_effort INTEGER NOT NULL DEFAULT 0;
ALTER TABLE orders ADD COLUMN sent REAL NOT NULL DEFAULT 0;
ALTER TABLE instances ADD COLUMN billed_from REAL;
UPDATE orders SET sent = at;
UPDATE instances SET billed_from = launched;
CREATE TABLE IF NOT EXISTS earlier_prices (
    session TEXT NOT NULL, provider TEXT NOT NULL, id TEXT NOT NULL, until REAL NOT NULL, usd_per_hour REAL NOT NULL
);
""",
    """
ALTER TABLE instances ADD COLUMN idle_at REAL;
ALTER TABLE instances ADD COLUMN idle_seconds REAL NOT NULL DEFAULT 0;
ALTER TABLE instances ADD COLUMN idle_usd REAL NOT NULL DEFAULT 0;
ALTER TABLE instances ADD COLUMN is_idle INTEGER NOT NULL DEFAULT 1;
""",
    """
ALTER TABLE pools ADD COLUMN stays REAL;
""",
    """
ALTER TABLE pools ADD COLUMN lifetime REAL;
""",
    """
ALTER TABLE orders ADD COLUMN start_usd REAL NOT NULL DEFAULT 0;
ALTER TABLE instances ADD COLUMN start_usd REAL NOT NULL DEFAULT 0;
""",
    """
CREATE TABLE IF NOT EXISTS runs (
    session TEXT PRIMARY KEY, run TEXT NOT NULL, generation INTEGER NOT NULL, state TEXT NOT NULL, outcome TEXT,
    at REAL NOT NULL, ends REAL NOT NULL, latest REAL NOT NULL, worst_usd REAL NOT NULL
);
""",
    """
ALTER TABLE runs ADD COLUMN heir TEXT NOT NULL DEFAULT '';
ALTER TABLE runs ADD COLUMN seen REAL;
""",
    """
ALTER TABLE runs ADD COLUMN unsaved TEXT NOT NULL DEFAULT '';
""",
    """
ALTER TABLE runs ADD COLUMN returncode INTEGER;
ALTER TABLE runs ADD COLUMN attempts INTEGER;
ALTER TABLE runs ADD COLUMN ended REAL;
ALTER TABLE runs ADD COLUMN usd REAL;
ALTER TABLE runs ADD COLUMN end_limit TEXT NOT NULL DEFAULT '';
ALTER TABLE runs ADD COLUMN why TEXT NOT NULL DEFAULT '';
ALTER TABLE runs ADD COLUMN seal TEXT NOT NULL DEFAULT '';
""",
)
"""SQL steps that bring the tables from each version to the next. The first step makes the tables in an empty file.

Users have files of every version, so only add steps. `orders.at` is the time when an order was first sent, and
`orders.sent` the time when it was last sent. `instances.idle_at` is the time until which `idle_seconds` and `idle_usd`
count; it is NULL for instances of an older skypool. From then on, an instance is idle if `is_idle` is 1. `pools.stays`
is the time until which machines stay after the end of their `with` block; NULL before that. `pools.lifetime` is the
pool's `max_lifetime` in seconds; NULL for no limit. `start_usd` is the estimated cost of the start of a machine. `runs`
has a row for each pool whose run is handed over to its machine: `ledger_runs`. `runs.heir` is the digest by which the
hand-over is known on the machine, and `runs.seen` the time when the machine has last said how the run stands.
`runs.unsaved` says what of its folders is saved nowhere. The columns after it are the other fields of `records.RunEnd`:
`end_limit` is its `limit`. They are NULL or empty for what is not known. `runs.seal` is the key with which the run
signs its end in buckets.
"""
SHAPE = len(STEPS)
"""Version of the tables. A file with a higher version was written by a newer skypool."""
KEPT = ("pools", "orders", "instances", "earlier_prices", "runs")
"""The tables whose rows a process keeps in memory for the pools that the process runs. These are all tables."""


def bring_up(book: sqlite3.Connection, version: int) -> None:
    """Change the tables of a ledger from this version to the current one. Version 0 is an empty file.

    Each step is a transaction of its own. Does nothing if the version is the current one or a newer one.
    """
    for n in range(version, SHAPE):
        marks = f"PRAGMA user_version = {n + 1}; PRAGMA application_id = {ledger_damage.MARK + n + 1};"
        book.executescript(f"BEGIN IMMEDIATE; {STEPS[n]} {marks} COMMIT")


@functools.cache
def schema() -> ledger_damage.Schema:
    """Return the tables and indexes that a ledger of the current version has. The list is computed once."""
    with closing(sqlite3.connect(":memory:", isolation_level=None, factory=Book)) as book:
        bring_up(book, 0)
        return ledger_damage.schema_of(book)


def rows_of(book: sqlite3.Connection, session: str) -> Rows:
    """Return all rows of one session in the ledger, as lists by the name of the table. Every table has a list."""
    return {each: book.execute(f"SELECT * FROM {each} WHERE session = ?", (session,)).fetchall() for each in KEPT}


def put_back(book: sqlite3.Connection, session: str, rows: Rows) -> None:
    """Write the rows of a session into the ledger, within a transaction, unless the ledger has the session."""
    if book.execute("SELECT 1 FROM pools WHERE session = ?", (session,)).fetchone() is not None:
        return
    for table, lines in rows.items():
        for line in lines:
            book.execute(f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * len(line))})", line)
