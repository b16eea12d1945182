"""`CallTally`: counts the calls of a pool, and keeps a record of each call that has ended until somebody takes it.

The live view, `skypool top` and `ps`, the metrics, the notebook and the report all read these counts. A call is what
the user has started: the parts of a broadcast and the processes of a gang are one call. Services, and the calls with
which skypool itself checks nodes, do not count.

Adding a call costs a fraction of a microsecond: it is only appended to a list. The list is counted when somebody reads
the counts, or when it is long.
"""

from __future__ import annotations

import heapq
import itertools
import operator
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from skypool.calls.node_queue import NodeQueue
from skypool.calls.pending_calls import NO_CALL, PendingCall
from skypool.wire import error_text

Outcome = Literal["ok", "failed", "cancelled"]

BOUNDS = tuple(round(step * 10.0**power, 6) for power in range(-4, 5) for step in (1, 2.5, 5))
"""The upper bounds of the buckets of the histogram of wall times, in seconds. A last bucket has all longer calls."""
MOST_SLOWEST = 100
"""The most records of succeeded calls that `take` returns: those of the slowest calls."""
_COUNT_AT = 4096
"""The number of calls that are appended before they are counted."""
_PARTS = 64
"""The number of parts that are added before those that have ended are removed."""
_MOST_WAITING = 20_000
"""The most records of succeeded calls that wait for `take`. If there are more, the `MOST_SLOWEST` slowest ones stay."""
_SECONDS: Callable[[Any], Any] = operator.itemgetter(3)
"""The wall time in a record of a call that succeeded."""
_MOST_FAILED = 2000
"""The most records of failed and cancelled calls that are kept for `take`. Later calls are only counted."""
_MOST_NAMES = 8
"""The most names of running functions of a node."""
_LONGEST_ERROR = 1000
"""The most characters of an error in a record."""


class EndedCall(NamedTuple):
    """The record of a call that has ended. A call that ran on several nodes, or as several processes, has one record.

    Attributes:
        name: the name of the function.
        node: the number of the node that ran the call, or of one of them; -1 if none did.
        ended: when its result arrived, in seconds since 1970.
        seconds: the wall time of the function, as the node measured it; None if unknown.
        outcome: "ok", "failed" or "cancelled".
        error: the type and the message of the error; "" without one.
    """

    name: str
    node: int
    ended: float
    seconds: float | None
    outcome: str = "ok"
    error: str = ""


class SlotUse(NamedTuple):
    """The use of the slots of one kind on a node.

    Attributes:
        on_cpu: True for the CPU slots of a node that also has slots with devices.
        slots: the number of slots.
        busy: the number of slots that run something. While a gang runs on them, all are busy.
    """

    on_cpu: bool
    slots: int
    busy: int


@dataclass(frozen=True, slots=True)
class NodeCounts:
    """The calls of one node. A call that runs on several nodes counts on each.

    Attributes:
        slots: the slots of the node by their kind; () for a node that runs no calls.
        running: the number of calls that run there.
        waiting: the number of calls that wait there for a slot, or that wait and may run on this node only.
        done: the number of calls that have ended there.
        names: the names of a few functions that run there.
    """

    slots: tuple[SlotUse, ...] = ()
    running: int = 0
    waiting: int = 0
    done: int = 0
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallCounts:
    """The number of calls that have ended, and how long they ran.

    Attributes:
        ok, failed: the number of calls that succeeded, and of those that ended with an error.
        cancelled: the number of calls that were cancelled, or that the end of the pool has ended.
        retried: the number of runs after which a call ran again, because the run failed or lost its node.
        classes: the histogram of wall times: the number of calls in the bucket below each of `BOUNDS`, and of longer
            calls. Calls whose wall time is unknown are left out.
        seconds: the sum of the wall times.
    """

    ok: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0
    classes: tuple[int, ...] = (0,) * (len(BOUNDS) + 1)
    seconds: float = 0.0

    @property
    def done(self) -> int:
        """The number of calls that have ended, with or without an error."""
        return self.ok + self.failed + self.cancelled


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """The calls of a pool at one moment.

    Attributes:
        ended: the numbers of the calls that have ended.
        running, waiting: the numbers of the calls that run, and of those that wait.
        nodes: the calls of each node, by the node's number. For a node that is gone, only `done` is known.
    """

    ended: CallCounts = field(default_factory=CallCounts)
    running: int = 0
    waiting: int = 0
    nodes: Mapping[int, NodeCounts] = field(default_factory=dict)


class Present(NamedTuple):
    """The calls that have not ended: the numbers of those that run and wait, and those of each node by its number."""

    running: int
    waiting: int
    nodes: Mapping[int, NodeCounts]


def present(
    node_queues: Mapping[int, NodeQueue], waiting: int, parts: Iterable[PendingCall], gangs: tuple[int, int]
) -> Present:
    """Return the calls that have not ended. Call this with the lock of the dispatch held.

    Of the calls that were sent to a node, those that were sent first count as running. The others count as waiting.

    Args:
        waiting: the number of calls that more than one node may run, and that were not sent to a node.
        parts: the pending calls whose `part_of` is not None, and that have not ended.
        gangs: the number of gangs that run, and of those that wait.
    """
    wholes: dict[int, bool] = {}  # whether a part of a call has begun, by the identity of the call
    running, waiting = gangs[0], waiting + gangs[1]
    there: dict[int, list[PendingCall]] = {node: [] for node in node_queues}
    for pending in parts:
        if isinstance(pending.node, int) and pending.node in there:
            there[pending.node].append(pending)
        if _is_counted(pending):
            wholes.setdefault(id(pending.part_of), False)
    nodes: dict[int, NodeCounts] = {}
    for node, node_queue in node_queues.items():
        begun: dict[int, str] = {}  # the names of the calls that have begun, by their identity
        slots: list[SlotUse] = []
        waiting_here = 0
        for lane in node_queue.lanes:
            parts_here = [each for each in there[node] if node_queue.lane(each) is lane]
            ranks = [each for each in parts_here if each.member is not None and node_queue.has(each)]
            runs = ranks or [*itertools.islice(lane.underway.values(), lane.slots)]
            slots.append(SlotUse(lane.on_cpu, lane.slots, lane.slots if ranks else len(runs)))
            plain = [each for each in runs if each.part_of is None]
            running += len(plain)
            waiting_plain = len(lane.underway) + len(lane.pinned) - len(parts_here) - len(plain)
            waiting += waiting_plain
            waiting_here += waiting_plain
            for each in runs:
                if each.part_of is not NO_CALL:
                    begun[id(each.part_of or each)] = each.name
                    if _is_counted(each):
                        wholes[id(each.part_of)] = True
        waiting_here += len({id(each.part_of) for each in there[node] if _is_counted(each)} - begun.keys())
        names = tuple(itertools.islice(begun.values(), _MOST_NAMES))
        nodes[node] = NodeCounts(tuple(slots), len(begun), waiting_here, names=names)
    begun_wholes = sum(wholes.values())
    return Present(running + begun_wholes, waiting + len(wholes) - begun_wholes, nodes)


def _is_counted(pending: PendingCall) -> bool:
    """Return True for a part of a call of the user, except for processes of a gang: `GangRunner` counts gangs."""
    return pending.part_of is not None and pending.part_of is not NO_CALL and pending.gang is None


class Parts:
    """The pending calls that are parts of a call of the user or of a gang, and have not ended.

    They are grouped by the node that runs them. Their `part_of` is not None.
    """

    def __init__(self) -> None:
        self._by_node: dict[int, list[PendingCall]] = {}  # with some that have ended
        self._count = 0
        self._most = _PARTS

    def add(self, pending: PendingCall) -> None:
        """Note a part, which one node must run."""
        if self._count >= self._most:
            left = {node: [*self.of(node)] for node in self._by_node}
            self._by_node = {node: parts for node, parts in left.items() if parts}
            self._count = sum(map(len, left.values()))
            self._most = 2 * self._count + _PARTS
        assert isinstance(pending.node, int)
        self._by_node.setdefault(pending.node, []).append(pending)
        self._count += 1

    def of(self, node: int) -> Iterator[PendingCall]:
        """Yield the parts that a node runs, or will run."""
        return (each for each in self._by_node.get(node, ()) if not (each.settled or each.ended))

    def __iter__(self) -> Iterator[PendingCall]:
        return itertools.chain.from_iterable(map(self.of, self._by_node))


class CallTally:
    """The tally of one pool's calls since its start.

    `now`, `on`, `counts` and `take` may be called from any thread. The other methods must be called with `lock` held.

    Args:
        lock: the lock of the dispatch.
        present: takes the number of a node, or None for all nodes, and returns the calls that have not ended there. It
            is called with the lock held.
    """

    def __init__(self, lock: AbstractContextManager[object], present: Callable[[int | None], Present]) -> None:
        self._lock = lock
        self._present = present
        self._new: list[tuple[str, int, float, float]] = []
        self._kept: list[tuple[str, int, float, float]] = []
        self._least = 0.0  # seconds of the fastest call in _kept that may still be among the slowest
        self._unhappy: list[EndedCall] = []
        self._classes = [0] * (len(BOUNDS) + 1)
        self._ok = self._failed = self._cancelled = self._retried = 0
        self._seconds = 0.0
        self._done: Counter[int] = Counter()  # by node

    def returned(self, pending: PendingCall, node: int, seconds: float, now: float) -> None:
        """Note a pending call that succeeded after `seconds` of wall time. `now` is in seconds since 1970."""
        if pending.part_of is not None or pending.service:
            self._part_ended(pending, node, seconds, None)
            return
        self._new.append((pending.code.name, node, now, seconds))
        if len(self._new) >= _COUNT_AT:
            self._count()

    def failed(self, pending: PendingCall, node: int, seconds: float | None, error: str) -> None:
        """Note a pending call that failed for good or was cancelled.

        `node` is -1 for no node, `seconds` is None if the wall time is not known, and `error` is from `text_of_error`.
        """
        if pending.part_of is not None or pending.service:
            self._part_ended(pending, node, seconds, error)
            return
        self.ended(pending.code.name, (node,), seconds, error, stopped=pending.stopped)

    def _part_ended(
        self,
        pending: PendingCall,
        node: int,
        seconds: float | None,
        error: str | None,
        is_closed: bool = False,
    ) -> None:
        """Note the end of a part. The end of the last part is the end of its call. Ignore the processes of gangs."""
        whole = pending.part_of
        if whole is None or whole is NO_CALL or pending.gang is not None:
            return
        whole.left -= 1
        self._done[node] += 1
        if seconds is not None:
            whole.seconds = max(seconds, whole.seconds or 0.0)
        if error is None or pending.stopped:
            whole.stopped = whole.stopped or pending.stopped or is_closed
        elif not whole.error:
            whole.error, whole.node = error, node
        if not whole.error:
            whole.node = node
        if not whole.left:
            stopped = whole.stopped and not whole.error
            self.ended(whole.name, (), whole.seconds, whole.error or None, stopped=stopped, node=whole.node)

    def ended(
        self,
        name: str,
        nodes: Collection[int],
        seconds: float | None,
        error: str | None,
        *,
        stopped: bool,
        node: int | None = None,
    ) -> None:
        """Note that a call has ended.

        Args:
            nodes: the numbers of the nodes that ran it, except nodes that were counted when its parts ended. -1 stands
                for no node.
            seconds: its wall time; None if that is not known.
            error: the text of the error, from `text_of_error`; None if the call succeeded.
            stopped: True if it was cancelled.
            node: the number of the node that its record names. If None, the first of `nodes`.
        """
        self._done.update(each for each in nodes if each >= 0)
        node = next(iter(nodes), -1) if node is None else node
        if error is None and not stopped:
            self._ok += 1
        elif stopped:
            self._cancelled += 1
        else:
            self._failed += 1
        if seconds is not None:
            self._measure(seconds)
        if error is None and not stopped:
            self._kept.append((name, node, time.time(), seconds or 0.0))
        elif len(self._unhappy) < _MOST_FAILED:
            outcome: Outcome = "cancelled" if stopped else "failed"
            text = "" if stopped or error is None else error
            self._unhappy.append(EndedCall(name, node, time.time(), seconds, outcome, text))

    def closed(self, pending: PendingCall) -> None:
        """Note a pending call that the end of the pool has ended."""
        if pending.part_of is not None or pending.service:
            self._part_ended(pending, pending.at, None, None, is_closed=True)
        else:
            self._cancelled += 1

    def gang_closed(self) -> None:
        """Note a gang that the end of the pool has ended."""
        self._cancelled += 1

    def retried(self) -> None:
        """Note that a call will run again, because its run failed or its node was lost."""
        self._retried += 1

    def now(self) -> PoolCounts:
        """Return the counts of all calls at this moment, including those that run and wait."""
        with self._lock:
            self._count()
            present = self._present(None)
            gone = {node: NodeCounts() for node in self._done if node >= 0}
            there = sorted({**gone, **present.nodes}.items())
            nodes = {node: replace(each, done=self._done[node]) for node, each in there}
            return PoolCounts(self._ended(), present.running, present.waiting, nodes)

    def on(self, node: int) -> NodeCounts:
        """Return the counts of the calls of one node at this moment."""
        with self._lock:
            self._count()
            return replace(self._present(node).nodes.get(node, NodeCounts()), done=self._done[node])

    def counts(self) -> CallCounts:
        """Return the counts of all calls that have ended so far."""
        with self._lock:
            self._count()
            return self._ended()

    def _ended(self) -> CallCounts:
        return CallCounts(self._ok, self._failed, self._cancelled, self._retried, tuple(self._classes), self._seconds)

    def take(self) -> list[EndedCall]:
        """Return the records of the calls that have ended since the last `take`, and forget them. They are not ordered.

        Of the calls that succeeded, only the `MOST_SLOWEST` (100) slowest ones have records.
        """
        with self._lock:
            self._count()
            kept, self._kept, self._least = self._kept, [], 0.0
            unhappy, self._unhappy = self._unhappy, []
        return [*unhappy, *itertools.starmap(EndedCall, heapq.nlargest(MOST_SLOWEST, kept, key=_SECONDS))]

    def _count(self) -> None:
        """Count the calls that `returned` has appended to a list, and keep their records for `take`."""
        new, self._new = self._new, []
        classes, done, least, kept = self._classes, self._done, self._least, self._kept
        total = 0.0
        for each in new:
            seconds = each[3]
            classes[bisect_left(BOUNDS, seconds)] += 1
            done[each[1]] += 1
            total += seconds
            if seconds >= least:
                kept.append(each)
        self._seconds += total
        self._ok += len(new)
        if len(kept) > _MOST_WAITING:
            self._kept = heapq.nlargest(MOST_SLOWEST, kept, key=_SECONDS)
            self._least = _SECONDS(self._kept[-1])

    def _measure(self, seconds: float) -> None:
        self._classes[bisect_left(BOUNDS, seconds)] += 1
        self._seconds += seconds


def text_of_error(error: BaseException) -> str:
    """Return the text of an error for a record. This runs code of the user, so call it without the lock."""
    return error_text.told(error, _LONGEST_ERROR)
