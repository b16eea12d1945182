"""Caches providers' offers and price lists between runs, in a SQLite file that all processes of this user share.

A driver declares with `offers_keep: ClassVar[float]` for how many seconds its offers are valid. Offers of a driver
without this attribute are not cached. Spot prices and stock change often, so offers that state either are valid for at
most `PASSING` seconds. A driver may also store data that is slow to fetch, such as a price list, with `remember`.

Errors of the SQLite file are never raised: the provider is asked again instead.
"""

from __future__ import annotations

import hashlib
import pickle
import sqlite3
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

from skypool.drivers.contract import Driver
from skypool.model import Need, Offer
from skypool.safety import private, user_folders

T = TypeVar("T")
PASSING = 300.0
"""Seconds for which cached spot prices and stock are valid, at most."""
FORGET = 7 * 86400.0
"""Seconds after which a cached answer is deleted. Until then, it is used if the provider cannot be asked."""
_SHAPE = "4 " + " ".join(f"{each.name}:{each.type}" for kind in (Need, Offer) for each in fields(kind))
"""Text for the form of cached answers, which is part of their keys. Answers of another form are not found. Increase the
number at its beginning when a driver changes what it keeps in `Offer.detail`."""
_TABLE = "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, at REAL NOT NULL, offers BLOB NOT NULL)"


@dataclass(frozen=True, slots=True)
class Answer:
    """A provider's offers, and their age in seconds: 0 if the provider was asked just now, at most 7 days."""

    offers: tuple[Offer, ...]
    age: float = 0.0


def question(need: Need) -> Need:
    """Return a copy of the need without its price cap, so that one cached answer is valid for any cap."""
    return replace(need, max_usd_per_hour=None)


def keeps(driver: Driver) -> float:
    """Return for how many seconds a driver's offers are valid; 0.0 if they are not to be cached."""
    return float(getattr(driver, "offers_keep", 0.0))


def holds(driver: Driver, need: Need, offers: Iterable[Offer]) -> float:
    """Return for how many seconds these offers are valid: the driver's `offers_keep`, or less.

    Return at most `PASSING` (300 s) if any offer on the need's markets is a spot offer, or says whether it is in stock.
    Offers on other markets do not matter.
    """
    passing = any(o.available is not None or o.market == "spot" for o in offers if o.market in need.markets)
    return min(keeps(driver), PASSING) if passing else keeps(driver)


def read(driver: Driver, need: Need) -> Answer | None:
    """Return the last cached answer for this driver's settings and this need, up to 7 days old.

    The answer may be outdated, so the caller must check its age. The price cap of the need does not matter. Return None
    if there is no such answer, if the driver's offers are not cached, or if the cache file cannot be read.
    """
    found = recall(_key(driver, need), tuple) if keeps(driver) > 0 else None
    return Answer(*found) if found else None


def write(driver: Driver, need: Need, offers: tuple[Offer, ...]) -> None:
    """Store a driver's offers for a need, if they may be cached. Do nothing if the cache file cannot be written."""
    if keeps(driver) > 0:
        remember(_key(driver, need), offers)


def recall(key: str, kind: type[T]) -> tuple[T, float] | None:
    """Return (value, age in seconds) for the value that `remember` stored under a key.

    Return None if there is no value of the type `kind`, if it is older than 7 days, or if the cache file cannot be
    read.
    """
    try:
        with _book() as book:
            found = book.execute("SELECT at, offers FROM answers WHERE key = ?", (key,)).fetchone()
        if found is None:
            return None
        age = time.time() - found[0]
        value = pickle.loads(zlib.decompress(found[1])) if 0 <= age <= FORGET else None
        return (value, age) if isinstance(value, kind) else None
    except Exception:  # noqa: BLE001 - damaged bytes raise any error; the provider is asked instead
        return None


def remember(key: str, value: object) -> None:
    """Store a value under a key for all processes of this user, and delete entries older than 7 days.

    If the cache file cannot be written, nothing is stored, and no error is raised. An error is raised if the value
    cannot be pickled.
    """
    blob = zlib.compress(pickle.dumps(value, protocol=5), 1)
    now = time.time()
    try:
        with _book() as book:
            book.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", (key, now, blob))
            book.execute("DELETE FROM answers WHERE at < ? OR at > ?", (now - FORGET, now + 60))
    except (sqlite3.Error, OSError):
        return


def path() -> Path:
    """Return the path of the cache file. The file may not exist.

    Its folder must be this user's alone, because unpickling the file's data could run code of another user.
    """
    return user_folders.cache() / "offers" / "offers.sqlite"


@contextmanager
def _book() -> Iterator[sqlite3.Connection]:
    file = path()
    private.folder(file.parent, private.CACHE)
    private.check_file(file)
    try:
        book = _opened(file)
    except sqlite3.DatabaseError as e:
        if isinstance(e, sqlite3.OperationalError):
            raise
        for each in file.parent.glob(file.name + "*"):  # not a database: replace it with a new one
            each.unlink(missing_ok=True)
        book = _opened(file)
    with closing(book), book:
        yield book


def _opened(file: Path) -> sqlite3.Connection:
    book = sqlite3.connect(file, timeout=5.0)
    try:
        book.execute(_TABLE)
    except BaseException:
        book.close()
        raise
    return book


def _key(driver: Driver, need: Need) -> str:
    """Return the key of an answer: a hash of the driver's class and settings, and of the need without its price cap."""
    asked = replace(question(need), bases=dict(sorted(need.bases.items())))
    kind = f"{type(driver).__module__}.{type(driver).__qualname__}"
    # `_SHAPE` keeps answers of other versions from being used. The driver's repr has no secrets.
    return hashlib.sha256(f"{_SHAPE}\n{kind}\n{driver!r}\n{asked!r}".encode()).hexdigest()
