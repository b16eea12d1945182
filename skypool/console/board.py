"""State of the live view: collects a pool's events, and returns one row for each node. `live_screen` draws the rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from skypool import events
from skypool.console.whole_lines import bare
from skypool.devices.sample import NodeSample

_TAIL = 400
"""Maximum number of characters that are kept of what a node printed. The view shows the last line of this text."""
_FIGURES_EVERY = 1.0
"""Seconds after which costs and measurements are read again."""


class Calls(NamedTuple):
    """Numbers of ended calls of a pool.

    Attributes:
        done: all ended calls, those that failed included.
        failed: the calls that failed.
        nodes: the ended calls of each node, by the node's number.
    """

    done: int
    failed: int
    nodes: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Figures:
    """Costs of a pool, and measurements of its nodes. Money is in US dollars. None means not known.

    Attributes:
        usd: the cost of the pool so far.
        usd_per_hour: the sum of the prices of the machines that run now.
        idle_usd: the part of `usd` for the time in which machines ran no call.
        samples: the newest measurements of each measured node, by the node's number.
        counts: numbers of ended calls; None if only the events tell them.
    """

    usd: float | None = None
    usd_per_hour: float | None = None
    idle_usd: float | None = None
    samples: Mapping[int, NodeSample] = field(default_factory=dict)
    counts: Calls | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """State of one node in the live view. Times are in seconds since 1970.

    Attributes:
        phase: phase of the node's life, such as "launching" or "ready".
        since: when this phase began.
        detail: reason for the phase, or its current step; "" for none.
        slots: slots with devices, or all slots if no slot has a device.
        busy: number of the slots counted in `slots` that run a call.
        cpu_slots, cpu_busy: number of the CPU slots that are not counted in `slots`, and how many of them run a call.
        waiting: number of calls that wait on the node for a free slot.
        running: names of running functions.
        down: reason why the connection to the node is broken; "" if it works.
        down_at: when the connection broke; 0 if it works.
        tail: the last part of the output of the node's calls or of its setup.
        machine: facts about the machine, the most important first. As many as fit are shown in place of `tail`.
        sample: the newest measurements of the node; None if there are none.
        health: "degraded" or "unhealthy" if something is wrong with the node's devices; otherwise "".
        why: what is wrong with the devices; "" if nothing is.
    """

    node: int
    phase: str = "launching"
    since: float = 0.0
    detail: str = ""
    slots: int = 0
    busy: int = 0
    cpu_slots: int = 0
    cpu_busy: int = 0
    waiting: int = 0
    done: int = 0
    running: tuple[str, ...] = ()
    down: str = ""
    down_at: float = 0.0
    tail: str = ""
    machine: tuple[str, ...] = ()
    sample: NodeSample | None = None
    health: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """State of a pool at one moment, as the live view shows it.

    Attributes:
        pool: name of the pool; "" before the first event.
        phase: phase of the pool's life, such as "ready".
        began: time of the first event, in seconds since 1970; 0.0 if there was none yet.
        gone: number of nodes that have ended.
        done: number of calls that have completed, including those on nodes that have ended.
        rows: the nodes that have not ended, in the order of their numbers.
        figures: None if the view shows no costs and measurements.
    """

    pool: str = ""
    phase: str = "planned"
    began: float = 0.0
    failed: int = 0
    gone: int = 0
    done: int = 0
    rows: tuple[Row, ...] = ()
    figures: Figures | None = None


def health_of(state: object, reasons: Iterable[object]) -> tuple[str, str]:
    """Return `health` and `why` for the `Row` of a node, from the state and reasons in an event about its health.

    Both are "" for the states "ok" and "unknown".
    """
    if state not in ("degraded", "unhealthy"):
        return "", ""
    return str(state), bare("; ".join(map(str, reasons)))


class Board:
    """Collector of a pool's events, which derives the current state of the pool from them.

    `figures` returns costs and measurements of the pool. It is called when the view is drawn, at most once a second,
    and may block. None: the view shows no costs and measurements.
    """

    def __init__(self, figures: Callable[[], Figures] | None = None) -> None:
        self._figures = figures
        self._asked = Figures()
        self._asked_at = -_FIGURES_EVERY
        self._lock = threading.RLock()
        self._picture = Picture()
        self._rows: dict[int, Row] = {}
        self._tails: dict[int, str] = {}
        self.changes = 0
        """Number of events so far. The drawing thread compares this number to see if something changed."""

    def hear(self, e: events.Event) -> None:
        """Apply one event to the state. Any thread may call this."""
        with self._lock:
            self.changes += 1
            if isinstance(e, events.BootstrapOutput):
                self._tails[e.node] = f"{e.text}\n"
                return
            if isinstance(e, events.Output):
                self._tails[e.node] = (self._tails.get(e.node, "") + e.text[-_TAIL:])[-_TAIL:]
                return
            if not self._picture.began:
                self._picture = replace(self._picture, pool=e.pool, began=e.time)
            self._take_in(e)

    def picture(self) -> Picture:
        """Return the current state of the pool. One thread at a time may call this."""
        figures = self._newest_figures()
        samples = figures.samples if figures else {}
        with self._lock:
            rows = tuple(
                replace(row, tail=self._tails.get(n, ""), sample=samples.get(n))
                for n, row in sorted(self._rows.items())
            )
            counts = figures.counts if figures else None
            if counts is None:
                done = self._picture.done + sum(row.done for row in rows)
                return replace(self._picture, rows=rows, done=done, figures=figures)
            rows = tuple(replace(row, done=counts.nodes.get(row.node, row.done)) for row in rows)
            return replace(self._picture, rows=rows, done=counts.done, failed=counts.failed, figures=figures)

    def _newest_figures(self) -> Figures | None:
        """Return figures that are at most a second old. Holds no lock, so that `hear` does not wait for them."""
        if self._figures is None:
            return None
        if (now := time.monotonic()) - self._asked_at >= _FIGURES_EVERY:
            self._asked = self._figures()
            self._asked_at = now
        return self._asked

    def _take_in(self, e: events.Event) -> None:
        match e:
            case events.PoolPhase():
                self._picture = replace(self._picture, phase=e.phase)
            case events.CallFailed():
                self._picture = replace(self._picture, failed=self._picture.failed + 1)
            case events.NodePhase(phase="ended"):
                self._bury(e.node)
            case events.NodePhase():
                row = self._rows.get(e.node, Row(e.node))
                self._rows[e.node] = replace(
                    row, phase=e.phase, since=e.time, detail=e.detail, slots=e.slots, cpu_slots=e.cpu_slots
                )
            case events.BootstrapStep():
                row = self._rows.get(e.node, Row(e.node, "bootstrapping", e.time))
                self._rows[e.node] = replace(row, detail=f"{e.step} ({e.number} of {e.steps})")
            case events.NodeStatus():
                row = self._rows.get(e.node, Row(e.node, "ready", e.time))
                self._rows[e.node] = replace(
                    row,
                    busy=e.busy - e.cpu_busy,
                    cpu_busy=e.cpu_busy,
                    waiting=e.waiting,
                    done=e.done,
                    running=e.running,
                )
            case events.NodeInterruption() | events.NodeRetirement():
                row = self._rows.get(e.node, Row(e.node))
                self._rows[e.node] = replace(row, phase="leaving", since=e.time)
            case events.HealthChanged():
                health, why = health_of(e.state, e.reasons)
                self._rows[e.node] = replace(self._rows.get(e.node, Row(e.node)), health=health, why=why)
            case events.LinkDown() | events.LinkUp():
                down, at = (e.reason, e.time) if isinstance(e, events.LinkDown) else ("", 0.0)
                self._rows[e.node] = replace(self._rows.get(e.node, Row(e.node)), down=down, down_at=at)
            case _:
                pass

    def _bury(self, node: int) -> None:
        row = self._rows.pop(node, None)
        self._tails.pop(node, None)
        done = self._picture.done + (row.done if row else 0)
        self._picture = replace(self._picture, gone=self._picture.gone + 1, done=done)
