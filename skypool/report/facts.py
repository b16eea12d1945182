"""Reads the stored data of a pool: its record in the ledger, and the samples and the history of its run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from skypool.calls.tally import BOUNDS, CallCounts, EndedCall
from skypool.rental.receipt import Line, Receipt
from skypool.rental.records import Record, State
from skypool.rental.run_state import RunState, state_of
from skypool.samples.journal import JournalContent, JournalEvent, WorkSpan, read
from skypool.samples.store import Point, points

_MOST_POINTS = 240
"""The most points of a device in a plot."""
_MOST_POINTS_IN_ALL = 30_000
"""About the most points of all plots together."""


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """A phase of a node's life, such as "booting" or "ready". Times are in seconds since 1970.

    `is_over` is False if the phase's end is not known. `until` is then the end of the time line.
    """

    phase: str
    since: float
    until: float
    is_over: bool


@dataclass(frozen=True, slots=True)
class StepSpan:
    """A step of a node's setup. Times are in seconds since 1970.

    Attributes:
        number: its number, from 1 to `steps`, the number of all steps.
        until: its end; if that is not known, the end of the node or of the time line.
        state: "done", "skipped" (it was done before) or "started" (its end is not known).
    """

    name: str
    number: int
    steps: int
    since: float
    until: float
    state: str
    retries: int = 0


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The stored data of a node. All tuples are in order of time.

    Attributes:
        phases: the phases of the node's life, without "ended".
        ended: when its machine had ended, in seconds since 1970; None if that is not known.
        error: the error that ended it; "" without one.
        steps: the steps of its setup.
        work: spans of time, and how long the node worked in each.
        marks: the node's events that are marked on the time line.
        calls: the calls that it ran, as far as they are kept.
        done: the number of calls that ended on it; None if that is not known.
        hardware: its devices as text; "" if they are not known.
        claimed: True if the node is not trusted, so that its measurements are only claims of its owner.
        lines: the lines of its machines in the receipt.
    """

    node: int
    phases: tuple[PhaseSpan, ...] = ()
    ended: float | None = None
    error: str = ""
    steps: tuple[StepSpan, ...] = ()
    work: tuple[WorkSpan, ...] = ()
    marks: tuple[JournalEvent, ...] = ()
    calls: tuple[EndedCall, ...] = ()
    done: int | None = None
    hardware: str = ""
    claimed: bool = False
    lines: tuple[Line, ...] = ()

    def span_of(self, phase: str) -> PhaseSpan | None:
        """Return when the node was in a phase, such as "booting"; None if it was not in it."""
        return next((each for each in self.phases if each.phase == phase), None)

    @property
    def worked(self) -> float | None:
        """The share (0 to 1) of the time since the node was ready in which it was not idle; None if unknown.

        A node is idle while no call runs on it, or while all of its devices are under 5 % utilisation.
        """
        seconds = sum(each.until - each.since for each in self.work)
        return sum(each.busy for each in self.work) / seconds if seconds > 0 else None


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """The stored data of a pool. Times are in seconds since 1970.

    Attributes:
        record: the pool's record in the ledger.
        receipt: the pool's machines and their costs.
        now: when the facts were read.
        start: the beginning of the pool's time line.
        end: the end of the time line: now, or the time of the last stored data.
        state: what `Record.state` says of it.
        run: the state of its run, which belongs to its machine; None if it has none.
        is_kept: False if no history is kept, so that only its record and its costs are known.
        nodes: the nodes in the order of their numbers.
        counts: the numbers of calls that ended, by outcome; None if they are not known.
        journal: the pool's history: its events, ended calls, working times and facts such as the plan.
        points: its samples, summarised over steps of time.
    """

    record: Record
    receipt: Receipt
    now: float
    start: float
    end: float
    state: State
    run: RunState | None
    is_kept: bool
    nodes: tuple[NodeFacts, ...]
    counts: CallCounts | None
    journal: JournalContent
    points: tuple[Point, ...]

    @property
    def span(self) -> float:
        """The length of the time line, in seconds."""
        return self.end - self.start


def collect(record: Record, file: Path, now: float) -> PoolFacts:
    """Read the stored data of a pool. `file` has its samples and its history; it need not exist.

    `now` is in seconds since 1970. Raises sqlite3.Error if the file is damaged.
    """
    journal = read(file)
    measured = points(file, _MOST_POINTS, _MOST_POINTS_IN_ALL)
    state = record.state(now)
    seen = [record.beat, *(each.time for each in journal.events), *(each.until for each in journal.work)]
    seen += [*(each.ended for each in journal.calls), *(each.time for each in measured)]
    last = now if state in ("live", "ending", "detached") else max(*seen, record.ended or 0.0)
    start = min([record.started, *(each.time for each in journal.events)])
    end = max(start + 1.0, min(last, now))
    return PoolFacts(
        record=record,
        receipt=record.receipt(now),
        now=now,
        start=start,
        end=end,
        state=state,
        run=state_of(record, now),
        is_kept=bool(journal.events or journal.facts),
        nodes=_nodes(record, journal, end),
        counts=_counts(journal.facts),
        journal=journal,
        points=tuple(measured),
    )


_MARKED = (
    "NodeInterruption",
    "LinkDown",
    "HealthChanged",
    "NodeRetirement",
    "ServiceEnded",
    "GangFailed",
    "FolderSaved",
    "DataFetched",
)
"""The kinds of events that are marked on the time line."""


def _nodes(record: Record, journal: JournalContent, end: float) -> tuple[NodeFacts, ...]:
    events = _by_node(journal.events)
    work, calls = _by_node(journal.work), _by_node(journal.calls)
    lines = _by_node(record.lines)
    numbers = sorted({each for each in (*events, *work, *lines) if each >= 0})
    return tuple(
        _node(each, events.get(each, []), work.get(each, []), calls.get(each, []), lines.get(each, []), journal, end)
        for each in numbers
    )


def _by_node(things: Iterable[Any]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for each in things:
        found.setdefault(each.node, []).append(each)
    return found


def _node(
    node: int,
    events: Sequence[JournalEvent],
    work: Sequence[WorkSpan],
    calls: Sequence[EndedCall],
    lines: Sequence[Line],
    journal: JournalContent,
    end: float,
) -> NodeFacts:
    told = [each for each in events if each.kind == "NodePhase"]
    over = next((each for each in told if each.data.get("phase") == "ended"), None)
    proved = max((each.until for each in lines), default=None) if all(each.ended for each in lines) else None
    ended = over.time if over is not None else proved
    error = next((str(each.data["detail"]) for each in reversed(told) if each.data.get("detail")), "")
    facts: Mapping[str, Any] = journal.facts.get(f"node {node}") or {}
    return NodeFacts(
        node=node,
        phases=_phases(told, ended, end),
        ended=ended,
        error=error,
        steps=_steps([each for each in events if each.kind == "BootstrapStep"], end if ended is None else ended),
        work=_until(work, ended),
        marks=tuple(each for each in events if each.kind in _MARKED),
        calls=tuple(calls),
        done=_done(journal.facts, node),
        hardware=str(facts.get("hardware", "")),
        claimed=bool(facts.get("claimed")),
        lines=tuple(lines),
    )


def _done(facts: Mapping[str, Any], node: int) -> int | None:
    """Return how many calls ended on a node, counted by all processes that ran the pool in turn; None if unknown."""
    found = [int(value) for name, value in facts.items() if name.startswith(f"done {node} ")]
    return sum(found) if found else None


def _until(work: Sequence[WorkSpan], ended: float | None) -> tuple[WorkSpan, ...]:
    if ended is None:
        return tuple(work)
    cut = [each._replace(until=min(each.until, ended)) for each in work if each.since < ended]
    return tuple(each._replace(busy=min(each.busy, each.until - each.since)) for each in cut)


def _phases(told: Sequence[JournalEvent], ended: float | None, end: float) -> tuple[PhaseSpan, ...]:
    alive = [each for each in told if each.data.get("phase") != "ended"]
    spans = [PhaseSpan(str(one.data["phase"]), one.time, other.time, True) for one, other in pairwise(alive)]
    if alive:
        last = alive[-1]
        until = max(last.time, end if ended is None else ended)
        spans.append(PhaseSpan(str(last.data["phase"]), last.time, until, ended is not None))
    return tuple(spans)


def _steps(told: Sequence[JournalEvent], end: float) -> tuple[StepSpan, ...]:
    begun: dict[int, JournalEvent] = {}
    retries: dict[int, int] = {}
    steps: list[StepSpan] = []

    def add(number: int, event: JournalEvent, until: float, state: str) -> None:
        said = event.data
        steps.append(
            StepSpan(str(said["step"]), number, said["steps"], event.time, until, state, retries.get(number, 0))
        )

    for event in told:
        number, state = event.data["number"], event.data["state"]
        if state == "retried":
            retries[number] = retries.get(number, 0) + 1
        elif state == "started":
            begun[number] = event
        else:
            add(number, begun.pop(number, event), event.time, state)
    for number, event in begun.items():
        add(number, event, max(end, event.time), "started")
    return tuple(sorted(steps, key=lambda each: each.since))


def _counts(facts: Mapping[str, Any]) -> CallCounts | None:
    """Return the sum of the counts of all processes that ran the pool, one after another; None if there are none."""
    found = [value for name, value in facts.items() if name.startswith("calls ")]
    found = [each for each in found if len(each["classes"]) == len(BOUNDS) + 1]
    if not found:
        return None
    return CallCounts(
        **{name: sum(each[name] for each in found) for name in ("ok", "failed", "cancelled", "retried", "seconds")},
        classes=tuple(map(sum, zip(*(each["classes"] for each in found), strict=True))),
    )
