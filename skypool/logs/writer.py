"""`LogWriter`: keeps the events of a pool in files."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from json.encoder import encode_basestring
from pathlib import Path
from typing import Any, ClassVar

from skypool import events
from skypool.events import node_of
from skypool.logs import files
from skypool.logs.files import Limits
from skypool.logs.masking import Masker
from skypool.pool.watch import PoolFacts, Watch
from skypool.safety.received_data_limit import Share

_GATHER = 0.05
"""Seconds for which events are gathered before they are written. A killed client loses at most these events."""
_LARGEST = 64 << 10
"""The most characters of output in one record."""
_TOUCH = 3600.0
"""Seconds after which the modification time of a run's folder is set anew, to show that the pool still runs."""
_LEFT_OUT = (events.NodeStatus, events.FilesProgress)
"""The events that are not kept, because they only report progress."""
LAST = "End"
"""The type of the record that a process writes last, when it ends or no longer runs the pool."""
MISSED = "Missed"
"""The type of the record that says how many events could not be kept."""
_Key = tuple[int, int, int, int]
_NodeLine = tuple[int, bytes]
"""A line of a file, and the number of the node that it is about; -1 for none."""


class LogWriter(Watch):
    """Writer of one pool's events to files.

    If the files cannot be written, the user is told once, and these events are dropped. Writing is tried again for
    later events. An untrusted node may fill half of a run's files.

    Args:
        kept: the limits of size and age. With `kept.pool` 0, nothing is kept. Default: the user's settings.
    """

    name = "the logs of the pool"
    hears_hidden = True
    gather = _GATHER
    every: ClassVar[float | None] = _TOUCH
    closes = 1  # they have what is told of the ends of other watches

    def __init__(self, kept: Limits | None = None) -> None:
        self._limits = kept or files.limits()
        self._share = Share("output", self._limits.pool // 2, "older output is removed from its logs", strangers=True)
        self._heard: list[events.Event] = []
        self._missed = 0
        self._run: Path | None = None
        self._file: int | None = None
        self._number = 0
        self._written = 0
        self._sizes: dict[Path, Counter[int]] = {}  # bytes of each node in each segment of this process
        self._told = False
        self._touched = 0.0
        self._last_calls: dict[tuple[int, int, int], int] = {}

    def begin(self, facts: PoolFacts) -> None:
        self._pool, self._session, self._quota, self._notice = facts.pool, facts.session, facts.quota, facts.notice
        self._masker = Masker(facts.secrets)
        if self._limits.pool:
            self._begin()

    def hear(self, event: events.Event) -> None:
        if self._limits.pool and not isinstance(event, _LEFT_OUT):
            self._heard.append(event)

    def missed(self, count: int) -> bool:
        self._missed += count
        return True  # it stands in the logs

    def tick(self) -> None:
        if self._heard or self._missed:
            if self._run is None:
                self._begin()
            self._write(self._taken())
        elif time.monotonic() - self._touched > _TOUCH:
            self._touch()

    def close(self) -> None:
        """Write the events that wait and a last record, remove runs that exceed the limits, and close the file."""
        if self._run is None:
            return
        lines = [*self._taken(), *self._unmasked()]
        self._write([*lines, (-1, _line({"event": LAST, "pool": self._pool, "time": time.time()}))])
        self._prune(self._run)  # not at the start, which would wait for it
        self._run = None
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _begin(self) -> None:
        """Make the folder of the run. If that fails, tell the user; `tick` tries it again when later events come."""
        try:
            run = files.make_run(self._pool, self._session)
            self._number = max(files.segments(run), default=0)
        except OSError as e:
            self._complain(e)
        else:
            self._run = run
            self._touched = time.monotonic()  # the first segment, which is made soon, changes the folder

    def _touch(self) -> None:
        if self._run is not None:
            with contextlib.suppress(OSError):
                os.utime(self._run)
            self._touched = time.monotonic()
            self._prune(self._run)

    def _prune(self, run: Path) -> None:
        try:
            files.prune(self._limits, run)
        except OSError as e:
            self._complain(e)

    def _taken(self) -> list[_NodeLine]:
        """Return all events that wait, as lines of JSON. Pieces of output of one stream become one record."""
        taken, self._heard = self._heard, []
        missed, self._missed = self._missed, 0
        lines: list[_NodeLine] = []
        at = 0
        while at < len(taken):
            event = taken[at]
            at += 1
            if not isinstance(event, events.Output):
                lines.append((node_of(event), _line(self._masked(_record(event)))))
                continue
            texts = [event.text]
            size = len(event.text)
            while at < len(taken) and size < _LARGEST and _continues(taken[at], event):
                texts.append(getattr(taken[at], "text", ""))
                size += len(texts[-1])
                at += 1
            lines += self._printed(event, "".join(texts))
        if missed:
            lines.append((-1, _line({"event": MISSED, "pool": self._pool, "time": time.time(), "count": missed})))
        return lines

    def _printed(self, event: events.Output, text: str) -> list[_NodeLine]:
        if not self._masker.is_needed:
            return [(event.node, _line_of_output(event, text))]
        source = event.node, event.slot, event.stream
        key = (*source, event.call)
        last = self._last_calls.get(source, event.call)
        self._last_calls[source] = event.call
        lines = [] if last == event.call else self._rest((*source, last))
        text = self._masker.feed(key, text)
        return [*lines, (event.node, _line_of_output(event, text))] if text else lines

    def _rest(self, key: _Key) -> list[_NodeLine]:
        """Return as a line the text of a stream that was held back, as it might begin a secret; [] if there is none."""
        text = self._masker.finish(key)
        node, slot, stream, call = key
        event = events.Output(pool=self._pool, node=node, slot=slot, call=call, stream=stream, text=text)
        return [(node, _line_of_output(event, text))] if text else []

    def _unmasked(self) -> list[_NodeLine]:
        return [line for key in self._masker.held() if isinstance(key, tuple) for line in self._rest(key)]

    def _masked(self, record: dict[str, Any]) -> dict[str, Any]:
        return {name: self._masked_value(value) for name, value in record.items()}

    def _masked_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._masker.mask(value)
        return [self._masked_value(each) for each in value] if isinstance(value, (list, tuple)) else value

    # --- files -----------------------------------------------------------------------------------------------

    def _write(self, lines: list[_NodeLine]) -> None:
        """Write lines of JSON, in as many segments as they need. If that fails, tell the user, and drop the lines."""
        if not lines:
            return
        if self._run is None:
            self._missed += len(lines)
            return
        most = max(1, self._limits.pool // files.SEGMENTS)
        together = bytearray()
        try:
            for node, line in lines:
                if self._file is None or self._written + len(together) + len(line) > most:
                    self._put(together)
                    together.clear()
                    self._next_segment(self._run)
                if not self._quota.take(node, self._share, len(line)):
                    self._put(together)
                    together.clear()
                    self._make_room(self._run, node, len(line))
                self._sizes[files.segment(self._run, self._number)][node] += len(line)
                together += line
            self._put(together)
        except OSError as e:
            if self._file is not None:
                os.close(self._file)
                self._file = None  # the line may be cut, so a new segment follows
            self._missed += len(lines)
            self._complain(e)
        if time.monotonic() - self._touched > _TOUCH:
            self._touch()

    def _put(self, data: bytearray) -> None:
        """Write bytes to the current segment, if there is one."""
        with memoryview(data) as left:
            at = 0
            while self._file is not None and at < len(data):
                at += os.write(self._file, left[at:])
        self._written += len(data)

    def _next_segment(self, run: Path) -> None:
        """Begin a new segment. Remove the oldest ones, so that at most `files.SEGMENTS` are left."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._number += 1
        path = files.segment(run, self._number)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_APPEND, 0o600)
        self._written = 0
        self._sizes[path] = Counter()
        there = list(files.segments(run).values())
        for old in there[: -files.SEGMENTS]:
            self._remove(old)

    def _make_room(self, run: Path, node: int, size: int) -> None:
        """Remove the oldest segments until a node's quota has room for `size` bytes. Count these bytes in the quota."""
        self._next_segment(run)
        for old in list(files.segments(run).values())[:-1]:
            self._remove(old)
            if self._quota.take(node, self._share, size):
                return

    def _remove(self, segment: Path) -> None:
        segment.unlink(missing_ok=True)
        for node, size in self._sizes.pop(segment, {}).items():
            self._quota.give_back(node, self._share, size)

    def _complain(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            self._notice(
                f"what the pool prints cannot be kept in {files.folder()}: {error}; free space there, or set "
                f"{files.SWITCH}=off. The pool goes on"
            )


def _continues(event: events.Event, first: events.Output) -> bool:
    return (
        isinstance(event, events.Output)
        and event.call == first.call
        and event.stream == first.stream
        and event.slot == first.slot
        and event.node == first.node
    )


def _record(event: events.Event) -> dict[str, Any]:
    return {"event": type(event).__name__, **{each.name: getattr(event, each.name) for each in fields(event)}}


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def _line_of_output(event: events.Output, text: str) -> bytes:
    """Return output of a call as a line of JSON. Empty fields are left out, as there may be many lines."""
    line = (
        f'{{"event":"Output","pool":"{event.pool}","time":{event.time!r},"node":{event.node},"slot":{event.slot},'
        f'"call":{event.call},"stream":{event.stream},"text":{encode_basestring(text)}'
    )
    if event.rank is not None:
        line += f',"rank":{event.rank},"label":{encode_basestring(event.label)}'
    if event.service:
        line += f',"service":{encode_basestring(event.service)}'
    if event.function:
        line += f',"function":{encode_basestring(event.function)}'
    return (line + "}\n").encode("utf-8", "backslashreplace")
