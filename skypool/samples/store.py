"""Keeps the samples of a pool on the client, in a SQLite file beside the ledger. Only this module reads or writes them.

Old samples are thinned out: after an hour, one in 10 s is kept of each node, and after a day, one in a minute. Samples
with an error of a driver stay. The size of the file is limited, and so is the part of an untrusted node. Beyond these
limits, every second sample is removed: of the nodes with the most samples, or of that node.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

from skypool.devices.sample import NodeSample, node_sample
from skypool.pool.new_samples import DEVICE, ROW, SampleRow
from skypool.safety.received_data_limit import Quota, Share
from skypool.samples import session_file

_HOUR = 3600.0
_DAY = 24 * _HOUR
_THIN_EVERY = 300.0
"""Seconds between two passes that thin old samples."""
_MOST_BYTES = 64 << 20
"""The largest size of one file, in bytes. If it is larger, samples are removed until it has 80 % of this size."""
_LEFT = 0.8
_KEPT = Share("samples", 12 << 20, "its measurements are thinned out, so that they take at most 12 MiB", strangers=True)
"""The limit for the samples of an untrusted node in the file."""
_DEVICES = 8
"""The number of devices that `points` assumes for each node, to find out how many points each device can have."""


class SampleStore:
    """The file with the samples of one pool. One thread at a time may write it.

    Args:
        file: returns the path of the file. Called when the file is first needed.
        quota: limits what is kept of each node. None: every node is trusted.
    """

    def __init__(self, file: Callable[[], Path], quota: Quota | None = None) -> None:
        self._file_of = file
        self._quota = quota or Quota(lambda node: False)
        self._is_measured = False  # True once the quotas know what the file had
        self._nodes: set[int] = set()
        self._thinned = 0.0

    @cached_property
    def _file(self) -> Path:
        return self._file_of()

    def write(self, rows: Sequence[SampleRow]) -> None:
        """Write samples to the file, which is made if needed.

        If that fails, these samples are lost, but newer ones will come.

        Raises OSError if the file cannot be made, and sqlite3.Error if it cannot be written.
        """
        with session_file.writing(self._file) as book:
            if not self._is_measured:
                for node, size in sizes(book).items():
                    self._quota.set(node, _KEPT, size)
                self._is_measured = True
            with book:
                book.executemany(
                    "insert into sample values (?, ?, ?, ?)",
                    [(each.node, each.time, each.error, each.data) for each in rows],
                )
            now = time.time()
            if now - self._thinned > _THIN_EVERY:
                self._thinned = now
                thin(book, now)
            self._nodes.update(each.node for each in rows)
            full = {each.node for each in rows if not self._quota.take(each.node, _KEPT, each.size)}
            if full:
                halve(book, sorted(full))
            if shrink(book) or full:
                left = sizes(book)
                for node in self._nodes:
                    self._quota.set(node, _KEPT, left.get(node, 0))


def history(
    file: Path, node: int | None = None, since: float = 0.0, until: float | None = None
) -> Iterator[NodeSample]:
    """Yield the samples of a session's file, ordered by time. Yield none if there is no such file.

    `since` and `until` are in seconds since 1970; None for no limit. With `node` None, yield those of all nodes. Raises
    sqlite3.Error if the file is damaged.
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
    """A summary of the samples of a device, or of the node itself, in a step of time. A value is None if it is unknown.

    Values are means of the samples, except for the maxima: `most_…`, `memory_total_mib` and `temperature_celsius`.

    Attributes:
        kind: the kind of the device, such as "cuda"; "" for the node itself.
        index: the number that the vendor's tool gives the device; 0 for the node itself.
        time: the mean time of the samples, in seconds since 1970.
        samples: the number of samples.
        use_percent: utilisation of the device, or of the node's CPUs. `most_used_percent` is its maximum.
        sm_activity_percent: the share of the streaming multiprocessors that were busy.
        memory_mib: used memory. `most_memory_mib` is its maximum, and `memory_total_mib` the size of the memory.
        claimed: True if the node is not trusted.
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
    """Return the samples of a session's file, summarised over time steps of equal length.

    The points are ordered by node, device and time. The points of a node itself come before those of its devices.
    Raises sqlite3.Error if the file is damaged.

    Args:
        most: the most points for each device.
        total: the most points in all, about. With many nodes there are fewer points for each device, but at least 24.
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
    """Thin out old samples, and then newer ones if the file is too large. `now` is in seconds since 1970."""
    with book:
        for age, step in ((_HOUR, 10), (_DAY, 60)):
            book.execute(
                "delete from sample where time < ? and not error and rowid not in "
                "(select min(rowid) from sample where time < ? group by node, cast(time / ? as integer))",
                (now - age, now - age, step),
            )
    if not shrink(book):
        _vacuum(book)


def shrink(book: sqlite3.Connection) -> bool:
    """If the file is too large, halve the samples of the nodes that have most, and return True. Else return False."""
    pages, free, size = (
        book.execute(f"pragma {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    surplus = (pages - free) * size - _MOST_BYTES
    if surplus <= 0:
        return False
    surplus += int((1 - _LEFT) * _MOST_BYTES)
    while surplus > 0:
        most = sorted(sizes(book).items(), key=itemgetter(1), reverse=True)
        chosen: list[int] = []
        for node, taken in most:
            chosen.append(node)
            surplus -= taken // 2
            if surplus <= 0:
                break
        if not chosen:
            break  # it is full of other things
        halve(book, chosen)
    return True


def halve(book: sqlite3.Connection, nodes: Sequence[int]) -> None:
    """Remove every second sample of `nodes`. But of samples with an error of a driver, remove the older half."""
    with book:
        book.execute(
            "delete from sample where rowid in (select rowid from (select rowid, error, "
            "row_number() over (partition by node, error order by time desc) as place, "
            "count(*) over (partition by node, error) as count "
            f"from sample where node in ({','.join('?' * len(nodes))})) "
            "where case when error then place * 2 > count else place % 2 = 0 end)",
            nodes,
        )
    _vacuum(book)


def sizes(book: sqlite3.Connection) -> dict[int, int]:
    """Return the bytes of the samples in a file, by the node's number."""
    return dict(
        book.execute(
            "select node, sum(? + max(length(data), ? * coalesce(json_array_length(data, '$.devices'), 0))) "
            "from sample group by node",
            (ROW, DEVICE),
        )
    )


def _vacuum(book: sqlite3.Connection) -> None:
    book.executescript("pragma incremental_vacuum")  # `execute` would free a single page
