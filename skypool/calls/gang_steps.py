"""`StepAgreements`: has the ranks of gangs on several nodes hear of a notice at one agreed step.

`skypool.gangs.agreement` decides; this module sends its questions and decisions to the nodes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from skypool import clock
from skypool.calls.node_queue import NodeQueue
from skypool.calls.pending_calls import PendingCall
from skypool.gangs import agreement
from skypool.gangs.agreement import Agreement, Answer
from skypool.link.agent_messages import Steps
from skypool.runtime import Reason
from skypool.wire.frames import Kind, frame

_TICK = 0.25
"""Seconds between two looks at agreements that are not over."""


class _Gang(Protocol):
    """A protocol for a call that runs as a gang."""

    @property
    def pending(self) -> Sequence[PendingCall]: ...


@dataclass
class _Open:
    """An agreement of one run of a gang.

    Attributes:
        ranks: all calls of the run.
        at: when a machine of the gang ends, in seconds since 1970, as a node has told. `reason` says why.
        passed: the nodes that have told of a rank that has gone past the decided step.
    """

    ranks: Sequence[PendingCall]
    at: float
    reason: Reason
    state: Agreement
    passed: set[int] = field(default_factory=set[int])

    def on(self) -> dict[int, list[int]]:
        """Return the ids of the ranks that have not ended, by node."""
        found: dict[int, list[int]] = {}
        for each in self.ranks:
            if not each.ended:
                found.setdefault(each.at, []).append(each.id)
        return found


class StepAgreements:
    """The agreements of one pool's gangs.

    Args:
        lock: the lock of the dispatch.
        ranks: the gang and the rank of each call that is one process of a gang, by the call's id.
        queues: the nodes.
        after: calls a function, in another thread, after so many seconds.
        notice: called with a sentence for the user, with the lock held.
    """

    def __init__(
        self,
        lock: threading.RLock,
        ranks: Mapping[int, tuple[_Gang, int]],
        queues: Callable[[], Mapping[int, NodeQueue]],
        after: Callable[[float, Callable[[], None]], object],
        notice: Callable[[str], None],
    ) -> None:
        self._lock, self._ranks, self._queues, self._after, self._notice = lock, ranks, queues, after, notice
        self._open: dict[int, _Open] = {}  # by the id of the first rank
        self._is_waiting = False

    def heard(self, node: int, said: Steps) -> None:
        """Take what a node tells of its ranks. Any thread may call this."""
        with self._lock:
            found = (self._ranks[each] for each in said.calls if each in self._ranks)
            gang = next((gang for gang, rank in found if gang.pending[rank].at == node), None)
            if gang is None:
                return
            ranks, now = gang.pending, clock.elapsed()
            open_ = self._open.get(ranks[0].id)
            if open_ is None:
                if not said.at or len({each.at for each in ranks}) < 2:
                    return
                ranks = [*ranks]
                open_ = _Open(ranks, said.at, said.reason, Agreement(frozenset(), began=now))
                self._open[ranks[0].id] = open_
                open_.state = Agreement(frozenset(open_.on()), began=now)
                self._tell(open_)
                self._wait()
            self._go_on(open_, agreement.heard(open_.state, node, said.answer, now))
            self._note_passed(open_, node, said.answer)

    def _note_passed(self, open_: _Open, node: int, said: Answer) -> None:
        """Tell the user once of a node where a rank has gone past the decided step."""
        if node in open_.state.confirmed and not said.ok and node not in open_.passed:
            open_.passed.add(node)
            self._notice(
                f"a process of {open_.ranks[0].code.name} on node {node} went past step {said.decided} before it heard "
                "that all must save there; its part of that checkpoint is missing"
            )

    def _go_on(self, open_: _Open, state: Agreement) -> None:
        before, open_.state = open_.state, state
        if (state.round, state.offer) != (before.round, before.offer):
            self._tell(open_)

    def _tell(self, open_: _Open) -> None:
        """Tell all nodes what the present round says."""
        state, queues = open_.state, self._queues()
        step = None if state.offer is None else state.offer.step
        decided = state.offer is not None and state.offer.decided
        about = {"round": state.round, "step": step, "decided": decided, "at": open_.at}
        for node, ids in open_.on().items():
            if node in queues:
                header = {"calls": ids, **about, "reason": open_.reason}
                queues[node].link.send(frame(Kind.AGREE, header))

    def _wait(self) -> None:
        if self._open and not self._is_waiting:
            self._is_waiting = True
            self._after(_TICK, self._tick)

    def _tick(self) -> None:
        with self._lock:
            self._is_waiting = False
            now = clock.elapsed()
            for key, open_ in [*self._open.items()]:
                left = open_.on()
                for node in open_.state.nodes - left.keys():
                    self._go_on(open_, agreement.without(open_.state, node, now))
                if not left or key not in self._ranks:
                    del self._open[key]
                elif not open_.state.is_over and (later := agreement.waited(open_.state, now)) is not None:
                    open_.state = later
                    self._tell(open_)
            self._wait()
