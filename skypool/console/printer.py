"""Prints functions' output to the user's stdout and stderr, as whole lines that are each marked with the node."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from skypool import events
from skypool.console.nonblocking_writer import outlet
from skypool.console.whole_lines import LONGEST, Lines, marked

REDRAW_EVERY = 10.0
"""Minimum seconds between two printed states of a progress bar, where printed text cannot be redrawn."""

_open: set[Printer] = set()
"""All open printers of this process. If there are several, the mark before each line also names the pool."""


@dataclass(slots=True)
class _Source:
    """State of one output stream (stdout or stderr) of one slot of a node.

    Attributes:
        call: id of the call whose output came last.
        place: text after the node's number in the mark of the lines: " rank 5" for a process of a gang, " ray" for a
            service named ray. None for other calls: their mark has the slot's number.
        lines: splits the output into lines.
        state: the newest printed state of a progress bar; "" if there is none.
        shown: when `state` was printed, in seconds since 1970; 0.0 if none was printed yet.
    """

    call: int
    place: str | None = None
    lines: Lines = field(default_factory=Lines)
    shown: float = 0.0
    state: str = ""


class Printer:
    """Printer of the output of one pool's nodes. Each line is printed with a mark, as `[node.slot] line`.

    A node's stdout goes to stdout here, and its stderr to stderr. With `states`, the states of progress bars are
    printed, too. The marks, which `skypool logs` also has:

    - `[node]`: a node with one slot.
    - `[node.cpu3]`: a CPU slot of a node with devices.
    - `[node rank 5]`: a process of a gang.
    - `[node name]`: a service.
    - `[pool node.slot]`: several pools print, so the pool's name comes first.
    """

    def __init__(self, *, states: bool = True) -> None:
        self.stdout = outlet("stdout")
        self.stderr = outlet("stderr")
        self._states = states
        self._lock = threading.RLock()
        self._sources: dict[tuple[int, int, int], _Source] = {}
        self._unfinished: Counter[int] = Counter()  # characters of unfinished lines of each node
        self._slots: dict[int, int] = {}
        self._have_cpu_slots: set[int] = set()
        self._pool = ""
        _open.add(self)

    def hear(self, e: events.Event) -> None:
        """Print the output that an event contains. When a node no longer runs a call, print its unfinished lines."""
        match e:
            case events.Output():
                self._print(e)
            case events.NodePhase():
                self._slots[e.node] = e.slots
                if e.cpu_slots:
                    self._have_cpu_slots.add(e.node)
            case events.NodeStatus() if not e.busy:
                self.finish(e.node)
            case _:
                pass

    def finish(self, node: int | None = None) -> None:
        """Print the unfinished lines of one node, or of all nodes for None. Each gets a newline."""
        with self._lock:
            for (number, slot, stream), source in self._sources.items():
                if node is None or number == node:
                    self._write(number, slot, stream, source.lines.finish(), source.place)
                    self._unfinished[number] = 0

    def close(self, timeout: float | None = None) -> None:
        """Print the unfinished lines, and wait until all text is written.

        `timeout` is the maximum seconds to wait for stdout, and then for stderr; None for no limit.
        """
        self.finish()
        _open.discard(self)
        self.stdout.drain(timeout)
        self.stderr.drain(timeout)

    def _print(self, e: events.Output) -> None:
        with self._lock:
            self._pool = e.pool
            source = self._sources.get((e.node, e.slot, e.stream))
            if source is None:
                source = self._sources[e.node, e.slot, e.stream] = _Source(e.call)
            before = source.lines.size
            if source.call != e.call:
                source.call = e.call
                self._write(e.node, e.slot, e.stream, source.lines.finish(), source.place)
            if e.rank is not None:
                source.place = f" rank {e.rank}"
            elif e.service:
                source.place = f" {e.service}"
            self._write(e.node, e.slot, e.stream, source.lines.feed(e.text), source.place)
            self._unfinished[e.node] += source.lines.size - before
            if self._unfinished[e.node] > LONGEST:  # in several slots together
                self.finish(e.node)
            if self._states and source.lines.redrawn:
                self._show_state(e, source)

    def _show_state(self, e: events.Output, source: _Source) -> None:
        """Print the state of a progress bar if it has changed, at most every `REDRAW_EVERY` (10) seconds."""
        state = source.lines.unfinished
        if source.state == "":
            source.shown = e.time
            source.state = state
        elif e.time - source.shown >= REDRAW_EVERY and state != source.state:
            source.shown = e.time
            source.state = state
            self._write(e.node, e.slot, e.stream, f"{state}\n", source.place)

    def _write(self, node: int, slot: int, stream: int, lines: str, place: str | None) -> None:
        if lines:
            file = self.stderr if stream == 2 else self.stdout
            file.write(marked(lines, self._mark(node, slot, place)))

    def _mark(self, node: int, slot: int, own_place: str | None) -> str:
        slots = self._slots.get(node, 0)
        place = f"{node}.{slot}" if slots > 1 or slot else f"{node}"
        if node in self._have_cpu_slots and slot >= slots:
            place = f"{node}.cpu{slot - slots}"
        if own_place is not None:
            place = f"{node}{own_place}"
        return f"[{self._pool} {place}] " if len(_open) > 1 else f"[{place}] "
