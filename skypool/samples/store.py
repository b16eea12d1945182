"""Keeps the samples of a pool on the client, in a SQLite file beside the ledger. Only this module reads or writes them.

`session_file` opens the file. Old samples are thinned: one for each node in 10 s after an hour, and one in a minute
after a day. Samples with an error of a driver stay. The file has a largest size, and so has the folder.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from skypool.samples import session_file
from skypool.samples.values import NodeSample, node_sample, to_json

_HOUR = 3600.0
_DAY = 24 * _HOUR
_THIN_EVERY = 300.0
"""Seconds between two passes that thin old samples."""
_MOST_BYTES = 64 << 20
"""The largest size of one file. Beyond it, the oldest samples are removed."""
_MOST_WAITING = 20_000
"""The most samples that wait in memory to be written, if the disk does not take them."""
_DEVICES = 8
"""The number of devices of a node that is assumed where points are shared out."""
_SEEN = 64
"""The number of samples of a node that are compared with new ones, to drop those that come a second time."""
_CLOCKS = 2 * _HOUR
"""Seconds by which a node's clock may differ. Beyond it, a sample gets the client's time, so that thinning works."""


class SampleStore:
    """The samples of one pool: the newest of each node in memory, and the others in a file.

    `add` only notes samples, so it is quick. `flush` writes them. The file is made by the first `flush` with samples.
    Any thread may call the methods.

    Args:
        file: returns the path of the file. It is called when the file is first needed.
    """

    def __init__(self, file: Callable[[], Path]) -> None:
        self._file_of = file
        self._lock = threading.Lock()  # guards the three below
        self._waiting: list[NodeSample] = []
        self.newest: dict[int, NodeSample] = {}
        self._seen: dict[int, deque[float]] = {}
        self._writing = threading.Lock()
        self._thinned = 0.0

    @cached_property
    def _file(self) -> Path:
        return self._file_of()

    def add(self, samples: Sequence[NodeSample]) -> list[NodeSample]:
        """Note samples, and return those that are new. A node may send samples again after a reconnection."""
        new = []
        with self._lock:
            for each in samples:
                seen = self._seen.setdefault(each.node, deque(maxlen=_SEEN))
                if each.time in seen:
                    continue
                seen.append(each.time)
                now = time.time()
                if abs(each.time - now) > _CLOCKS:
                    each = replace(each, time=now)
                self.newest[each.node] = each
                new.append(each)
            self._waiting += new
            del self._waiting[:-_MOST_WAITING]
        return new

    def forget(self, node: int) -> None:
        """Forget the newest sample of a node that has ended. The file keeps its samples."""
        with self._lock:
            self.newest.pop(node, None)
            self._seen.pop(node, None)

    def flush(self) -> None:
        """Write the samples that wait to the file. If that fails, they are dropped, because newer ones will come.

        Raises:
            OSError: the file cannot be made.
            sqlite3.Error: the file cannot be written.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        rows = [
            (each.node, each.time, any(one.xids or one.lost for one in each.devices), json.dumps(_row(each)))
            for each in waiting
        ]
        with self._writing, session_file.writing(self._file) as book:
            with book:
                book.executemany("insert into sample values (?, ?, ?, ?)", rows)
            now = time.time()
            if now - self._thinned > _THIN_EVERY:
                self._thinned = now
                thin(book, now)

    def history(self, node: int | None = None, since: float = 0.0, until: float | None = None) -> list[NodeSample]:
        """Return samples in the order of their time, as `history` of this module."""
        with contextlib.suppress(OSError, sqlite3.Error):
            self.flush()
        return list(history(self._file, node, since, until))


def history(
    file: Path, node: int | None = None, since: float = 0.0, until: float | None = None
) -> Iterator[NodeSample]:
    """Yield the samples of a file, ordered by time. Yield none if there is no such file.

    Args:
        file: the file of a session: `session_file.path_of(session)`.
        node: the number of a node. Default None: all nodes.
        since: the earliest time, in seconds since 1970. Default: no limit.
        until: the latest time. Default None: no limit.

    Raises:
        sqlite3.Error: the file is damaged.
    """
    asked = "select node, data from sample where time between ? and ?"
    values: list[float] = [since, 1e300 if until is None else until]
    if node is not None:
        asked += " and node = ?"
        values.append(node)
    with session_file.reading(file) as book:
        if book is None:
            return
        for number, data in book.execute(f"{asked} order by time", values):
            said = json.loads(data)
            yield replace(node_sample(said), node=number, claimed=bool(said.get("claimed")))


@dataclass(frozen=True, slots=True)
class Point:
    """The measurements of a device in a step of time, put together. A value is None if it is unknown.

    Attributes:
        node: the number of the node.
        kind: the kind of the device, such as "cuda"; "" for the node itself.
        index: the number that the vendor's tool gives the device; 0 for the node itself.
        time: the mean time of the samples, in seconds since 1970.
        samples: the number of samples.
        use_percent: the mean of the device's utilisation, or of the node's CPUs.
        most_used_percent: the highest utilisation.
        sm_activity_percent: the mean share of the streaming multiprocessors that were busy.
        memory_mib: the mean of the used memory in MiB.
        most_memory_mib: the most used memory in MiB.
        memory_total_mib: the whole memory in MiB.
        power_watts: the mean power draw in watts.
        temperature_celsius: the highest temperature in degrees Celsius.
        claimed: True if the node is not trusted, so that the values are what its owner claims.
        unknown: why the device could not be read; "" if each sample was read.
    """

    node: int
    kind: str
    index: int
    time: float
    samples: int
    use_percent: float | None
    most_used_percent: float | None
    sm_activity_percent: float | None
    memory_mib: float | None
    most_memory_mib: float | None
    memory_total_mib: float | None
    power_watts: float | None
    temperature_celsius: float | None
    claimed: bool
    unknown: str


_POINTS = """
with measured as (
    select node, '' as kind, 0 as number, time,
        json_extract(data, '$.cpu_percent') as use, null as sm_activity,
        json_extract(data, '$.memory_used_mib') as memory, json_extract(data, '$.memory_total_mib') as memory_total,
        null as power, null as temperature,
        coalesce(json_extract(data, '$.claimed'), 0) as claimed, '' as unknown
    from sample
    union all
    select node, json_extract(value, '$.kind'), json_extract(value, '$.index'), time,
        json_extract(value, '$.utilization_percent'), json_extract(value, '$.sm_activity_percent'),
        json_extract(value, '$.memory_used_mib'), json_extract(value, '$.memory_total_mib'),
        json_extract(value, '$.power_watts'), json_extract(value, '$.temperature_celsius'),
        coalesce(json_extract(data, '$.claimed'), 0), coalesce(json_extract(value, '$.unknown'), '')
    from sample, json_each(data, '$.devices')
)
select node, kind, number, avg(time), count(*), avg(use), max(use), avg(sm_activity), avg(memory), max(memory),
    max(memory_total), avg(power), max(temperature), max(claimed), max(unknown)
from measured group by node, kind, number, cast((time - :start) / :step as integer) order by 1, 2, 3, 4
"""


def points(file: Path, most: int, total: int) -> list[Point]:
    """Return the samples of a file, put together in steps of time of equal length.

    The points are ordered by node, device and time. Those of the node itself come before those of its devices.

    Args:
        file: the file of a session: `session_file.path_of(session)`.
        most: the most points for each device.
        total: the most points in all, about. With many nodes there are fewer points for each device.

    Raises:
        sqlite3.Error: the file is damaged.
    """
    with session_file.reading(file) as book:
        if book is None:
            return []
        nodes, start, end = book.execute("select count(distinct node), min(time), max(time) from sample").fetchone()
        if not nodes:
            return []
        each = max(24, min(most, total // (_DEVICES * nodes)))
        step = max(0.5, (end - start) / each)
        found = book.execute(_POINTS, {"start": start, "step": step})
        return [_point(list(row)) for row in found]


def _point(values: list[Any]) -> Point:
    values[13] = bool(values[13])  # SQLite has no type for it
    return Point(*values)


def thin(book: sqlite3.Connection, now: float) -> None:
    """Thin old samples, and remove the oldest if the file is too large.

    Args:
        book: a connection to the file.
        now: the time in seconds since 1970.
    """
    with book:
        for age, step in ((_HOUR, 10), (_DAY, 60)):
            book.execute(
                "delete from sample where time < ? and not error and rowid not in "
                "(select min(rowid) from sample where time < ? group by node, cast(time / ? as integer))",
                (now - age, now - age, step),
            )
        pages, free, size = (
            book.execute(f"pragma {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
        used = (pages - free) * size
        if used > _MOST_BYTES:
            count = book.execute("select count(*) from sample").fetchone()[0]
            surplus = int(count * (1 - 0.9 * _MOST_BYTES / used))
            book.execute(
                "delete from sample where rowid in (select rowid from sample order by time limit ?)", (surplus,)
            )
    book.executescript("pragma incremental_vacuum")  # `execute` would free a single page


def _row(sample: NodeSample) -> dict[str, object]:
    return {name: value for name, value in to_json(sample).items() if name != "node"}
