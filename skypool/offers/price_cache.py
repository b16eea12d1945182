"""Cache of providers' offers and price lists between runs, in a SQLite file of this user.

A driver says with `offers_keep: ClassVar[float]` for how many seconds its offers hold; without it nothing is kept.
What depends on the hour, spot prices and what is in stock, is believed for minutes whatever the driver says.
A driver may `remember` what it makes offers of, such as a list of prices that takes long to read.
One SQLite file for all processes of this user; whatever goes wrong with it costs time, nothing else.
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

T = TypeVar("T")
PASSING = 300.0
"""Seconds for which spot prices and what is in stock are believed."""
FORGET = 7 * 86400.0
"""Seconds after which an answer is of no use even where the provider cannot be asked."""
_SHAPE = "2 " + " ".join(f"{each.name}:{each.type}" for kind in (Need, Offer) for each in fields(kind))
"""What the values look like that are kept. Its number grows when a driver changes what it keeps in `Offer.detail`."""
_TABLE = "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, at REAL NOT NULL, offers BLOB NOT NULL)"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a provider said it sells, and how many seconds ago it did."""

    offers: tuple[Offer, ...]
    age: float = 0.0


def question(need: Need) -> Need:
    """What a driver is asked: without what only the plan looks at, so that one answer serves for any price cap."""
    return replace(need, max_usd_per_hour=None)


def keeps(driver: Driver) -> float:
    """For how many seconds a driver's offers hold."""
    return float(getattr(driver, "offers_keep", 0.0))


def holds(driver: Driver, need: Need, offers: Iterable[Offer]) -> float:
    """For how many seconds these offers hold, as far as they can serve the need."""
    passing = any(o.available is not None or o.market == "spot" for o in offers if o.market in need.markets)
    return min(keeps(driver), PASSING) if passing else keeps(driver)


def read(driver: Driver, need: Need) -> Answer | None:
    """The answer that was written last for this driver's settings and this need, however old; None without one."""
    found = recall(_key(driver, need), tuple) if keeps(driver) > 0 else None
    return Answer(*found) if found else None


def write(driver: Driver, need: Need, offers: tuple[Offer, ...]) -> None:
    """Keep an answer, if the driver's answers are kept at all; those that are of no use any more go."""
    if keeps(driver) > 0:
        remember(_key(driver, need), offers)


def recall(key: str, kind: type[T]) -> tuple[T, float] | None:
    """Return what was remembered under a key, such as a price list, and its age in seconds.

    Returns None where there is nothing, or something of another kind.
    """
    try:
        with _book() as book:
            found = book.execute("SELECT at, offers FROM answers WHERE key = ?", (key,)).fetchone()
        if found is None:
            return None
        age = time.time() - found[0]
        value = pickle.loads(zlib.decompress(found[1])) if 0 <= age <= FORGET else None
        return (value, age) if isinstance(value, kind) else None
    except Exception:  # noqa: BLE001 - torn bytes raise anything; the provider is asked instead
        return None


def remember(key: str, value: object) -> None:
    """Keep what can be pickled under a key, for all processes of this user."""
    blob = zlib.compress(pickle.dumps(value, protocol=5), 1)
    now = time.time()
    try:
        with _book() as book:
            book.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", (key, now, blob))
            book.execute("DELETE FROM answers WHERE at < ? OR at > ?", (now - FORGET, now + 60))
    except (sqlite3.Error, OSError):
        return


def path() -> Path:
    """Where the file is. Its folder is this user's alone, as what is in it is believed."""
    import platformdirs  # not on a node, where modules that import skypool are imported too

    return Path(platformdirs.user_cache_dir("skypool")) / "offers" / "offers.sqlite"


@contextmanager
def _book() -> Iterator[sqlite3.Connection]:
    file = path()
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        book = _opened(file)
    except sqlite3.DatabaseError as e:
        if isinstance(e, sqlite3.OperationalError):
            raise
        for each in file.parent.glob(file.name + "*"):  # no database: a new one does as well
            each.unlink(missing_ok=True)
        book = _opened(file)
    with closing(book), book:
        yield book


def _opened(file: Path) -> sqlite3.Connection:
    book = sqlite3.connect(file, timeout=5.0)
    try:
        book.execute("PRAGMA journal_mode = WAL")
        book.execute(_TABLE)
    except BaseException:
        book.close()
        raise
    return book


def _key(driver: Driver, need: Need) -> str:
    """Of the driver's settings as its repr shows them, which leaves secrets out, and of what it was asked."""
    asked = replace(question(need), bases=dict(sorted(need.bases.items())))
    kind = f"{type(driver).__module__}.{type(driver).__qualname__}"
    return hashlib.sha256(f"{_SHAPE}\n{kind}\n{driver!r}\n{asked!r}".encode()).hexdigest()
