"""Reads the logs of a pool: records as they were written, and whole lines made of the records.

A record is a JSON object with "event" (the type of the event) and the fields of that event. Output of a call may be cut
into several records; `Assembler` makes lines of it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

from skypool import events
from skypool.console.event_text import Words
from skypool.console.whole_lines import Lines
from skypool.logs import files
from skypool.logs.writer import LAST, MISSED

Record = Mapping[str, Any]
REMOVED = "Removed"
"""The type of a record that the reader adds in place of output that was removed to keep the limits."""
_LOOK = 0.1
"""Seconds between two looks for new records."""
_CHECK = 1.0
"""Seconds between two checks whether the process that writes is still there."""
_LONGEST = 16 << 20
"""The most bytes of a record. A longer line is not one that skypool wrote, and is left out."""


def records(run: Path, follow: bool = False, is_alive: Callable[[], bool] = lambda: True) -> Iterator[Record | None]:
    """Yield the records of a run of a pool, the oldest first. Incomplete lines are left out.

    Args:
        run: the folder of the run.
        follow: True goes on with new records until the pool ends. While there are none, yield None about 10 times a
            second.
        is_alive: with `follow`, called about once a second. It returns False when the process that writes the records
            has ended. The iterator then ends after the last records.
    """
    number = min(files.segments(run), default=1)
    if number > 1:
        yield {"event": REMOVED, "time": time.time()}
    last = ""
    checked = time.monotonic()
    is_over = False
    while True:
        with contextlib.ExitStack() as opened:
            file: IO[bytes] | None = None
            while True:
                if file is None:
                    with contextlib.suppress(FileNotFoundError):
                        file = opened.enter_context(files.segment(run, number).open("rb"))
                following = min((each for each in files.segments(run) if each > number), default=None)
                if file is not None:
                    for record in _whole(file):
                        last = record["event"]
                        yield record
                if following is not None:
                    break
                if not follow or last == LAST or is_over:
                    return
                yield None
                time.sleep(_LOOK)
                if time.monotonic() - checked > _CHECK:
                    checked = time.monotonic()
                    is_over = not is_alive()  # what it wrote last is read once more
        if following > number + 1:
            yield {"event": REMOVED, "time": time.time()}
        number = following


def _whole(file: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Yield complete records from the file's position on. If the last one is incomplete, set the position before it."""
    while True:
        at = file.tell()
        line = file.readline(_LONGEST)
        if not line.endswith(b"\n"):
            if len(line) < _LONGEST:
                file.seek(at)
                return
            continue
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("event"), str):
                yield record


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of output, or a line in which skypool describes an event.

    Attributes:
        record: the record that completed the line.
        place: where it comes from: "0" for node 0, "0.1" for its second slot, "0 rank 3" for a process of a call, "0
            web" for a service, "0 setup" for the setup of a node. "" for the description of an event.
    """

    text: str
    record: Record
    place: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the line as a JSON object: the fields of its record, with the whole line as "text"."""
        return {**self.record, "text": self.text}


class Assembler:
    """Maker of whole lines from the records of one run of a pool.

    Args:
        node: give only lines from this node; None for all nodes.
        call: give only lines from this call: its id, or the name of its function or service. None for all.
        since: give only lines from this time on, in seconds since 1970.
        whole: False if the run's first records are missing.
    """

    def __init__(
        self, node: int | None = None, call: str | None = None, since: float = 0.0, *, whole: bool = True
    ) -> None:
        self._node = node
        self._call = call
        self._since = since
        self._words = Words(limited=False, whole=whole)
        self._is_first = True
        self._slots: dict[int, int] = {}
        self._sources: dict[tuple[int, int, int], tuple[Record, Lines]] = {}

    def feed(self, record: Record) -> Iterator[LogLine]:
        """Yield the lines that become complete with a record. Pass all records in order."""
        kind = record["event"]
        if kind == REMOVED and self._is_first:
            self._words = Words(limited=False, whole=False)
        self._is_first = False
        if kind == "NodePhase" and isinstance(record.get("slots"), int):
            self._slots[record["node"]] = max(record["slots"], self._slots.get(record["node"], 0))
        if kind != "Output":
            yield from self._told(record)
        elif self._is_wanted(record):
            yield from self._printed(record)

    def finish(self) -> Iterator[LogLine]:
        """Yield the last lines, which have no newline."""
        for record, lines in self._sources.values():
            yield from self._lines(record, lines.finish())
        self._sources.clear()

    def _is_wanted(self, record: Record) -> bool:
        if record.get("time", 0.0) < self._since:
            return False
        if self._node is not None and record.get("node") != self._node:
            return False
        return self._call is None or self._call in (
            str(record.get("call")),
            record.get("function"),
            record.get("service"),
            str(record.get("id", "")),
        )

    def _printed(self, record: Record) -> Iterator[LogLine]:
        source = record.get("node", 0), record.get("slot", 0), record.get("stream", 1)
        known = self._sources.get(source)
        if known is not None and known[0].get("call") != record.get("call"):
            yield from self._lines(known[0], known[1].finish())
        lines = known[1] if known is not None else Lines()
        self._sources[source] = record, lines
        yield from self._lines(record, lines.feed(str(record.get("text", ""))))

    def _lines(self, record: Record, text: str) -> Iterator[LogLine]:
        for line in text.removesuffix("\n").split("\n") if text else ():
            yield LogLine(line, record, self._place(record))

    def _place(self, record: Record) -> str:
        node, slot = record.get("node", 0), record.get("slot", 0)
        if record.get("rank") is not None:
            return f"{node} rank {record['rank']}"
        if record.get("service"):
            return f"{node} {record['service']}"
        return f"{node}.{slot}" if slot or self._slots.get(node, 0) > 1 else f"{node}"

    def _told(self, record: Record) -> Iterator[LogLine]:
        """Yield lines about an event that is not output. `Words` gets every event: its lines depend on earlier ones."""
        kind = record["event"]
        if kind == "BootstrapOutput":
            if self._is_wanted(record):
                for text in str(record.get("text", "")).split("\n"):
                    yield LogLine(text, record, f"{record.get('node', 0)} setup")
            return
        if kind in (MISSED, REMOVED):
            if self._node is None and self._call is None:
                count = record.get("count")
                missing = f"{count} events are missing here: they came too fast, or the disk was full"
                yield LogLine(missing if kind == MISSED else "earlier output was removed to save space", record)
            return
        event = _event_of(record)
        texts = [] if event is None else self._words.tell(event)
        if self._is_wanted(record):
            for text in texts:
                yield LogLine(text.rstrip("\n"), record)


def _event_of(record: Record) -> events.Event | None:
    """Return the event of a record; None if this version of skypool has no such event."""
    kind = getattr(events, record["event"], None) if record["event"].isidentifier() else None
    if not (isinstance(kind, type) and issubclass(kind, events.Event)):
        return None
    known = {each.name for each in fields(kind)}
    said: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in record.items() if name in known
    }
    make: Callable[..., events.Event] = kind
    try:
        return make(**said)
    except TypeError:  # a field is missing
        return None


def lines(found: Iterable[Record | None], assembler: Assembler) -> Iterator[LogLine | None]:
    """Yield the lines that `assembler` makes of records. For None in `found`, yield None: no record is there yet."""
    for record in found:
        if record is None:
            yield None
        else:
            yield from assembler.feed(record)
    yield from assembler.finish()
