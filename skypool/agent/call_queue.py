"""Keeps the calls of this node until they end: calls that wait, and calls that a worker has taken."""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from skypool.agent.batch import Batch
from skypool.agent.call import NodeCall
from skypool.agent.slots import CPU, MAIN, Slot, Slots, WorkerQueue
from skypool.agent.value_storage import SpareMemory


@dataclass(slots=True)
class _Lane:
    """The calls that wait for one kind of slot.

    Attributes:
        queue: the queue from which workers take calls.
        waiting: calls for which the queue has no room.
        full: True while the queue has no room.
    """

    queue: WorkerQueue
    waiting: deque[NodeCall | Batch] = field(default_factory=deque)
    full: bool = False


class CallQueue:
    """The calls of this node that have not ended.

    It puts waiting calls into the sockets that workers read, and takes calls that have not begun back from there.

    Args:
        slots: the slots whose workers run the calls.
        watch: `watch(fd, events, callback)` of the agent's loop. Events 0 stop the watching.
        kept: takes the memory of arguments that are no longer needed.

    Attributes:
        calls: the calls by id. Calls of one frame share a `Batch` until one of them is asked for by itself.
        suspects: calls by id that must be checked: they shall stop, or may have died with a worker.
    """

    def __init__(self, slots: Slots, watch: Callable[[int, int, Callable[[], None]], None], kept: SpareMemory) -> None:
        self._slots = slots
        self._watch = watch
        self._kept = kept
        self._lanes = [_Lane(queue) for queue in slots.queues]
        self.calls: dict[int, NodeCall | Batch] = {}
        self.suspects: dict[int, NodeCall] = {}

    def add(self, call: NodeCall | Batch) -> None:
        """Add a call, or a batch of calls, behind all calls that wait for the same kind of slot."""
        if isinstance(call, Batch):
            self.calls.update(dict.fromkeys(call.ids, call))
        else:
            self.calls[call.id] = call
        lane = self._lanes[call.kind]
        lane.waiting.append(call)
        if not lane.full:  # a full lane is pumped by the loop as soon as there is room
            self._pump(lane)

    def get(self, id_: int) -> NodeCall | None:
        """Return the call with this id.

        If it is part of a batch, it is separated from that. Returns None if it has ended.
        """
        call = self.calls.get(id_)
        if isinstance(call, Batch):
            call = self.calls[id_] = call.single(id_)
        return call

    def forget(self, id_: int, done: bool = False) -> None:
        """Remove a call that has ended or was given back, and release the memory of its arguments.

        Args:
            id_: the call's id.
            done: True if its worker no longer uses the arguments, so that their memory can be used again.
        """
        call = self.calls.pop(id_, None)
        self.suspects.pop(id_, None)
        if not isinstance(call, NodeCall) or call.blob is None:
            return
        if done and not call.again:
            self._kept.give(call.blob)
        else:
            os.close(call.blob.fd)

    def pump(self) -> None:
        """Move waiting calls into the sockets from which workers take them, as far as these have room."""
        for lane in self._lanes:
            self._pump(lane)

    def _pump(self, lane: _Lane) -> None:
        """Move waiting calls of one kind of slot into the socket of its workers, as far as that has room."""
        while lane.waiting:
            call = lane.waiting[0]
            try:
                lane.queue.offer([call.packet], [call.blob.fd] if call.blob else [])
            except BlockingIOError:
                if not lane.full:
                    lane.full = True
                    self._watch(lane.queue.end.fileno(), select.EPOLLOUT, partial(self._pump, lane))
                return
            call.offered = True
            lane.waiting.popleft()
        if lane.full:
            lane.full = False
            self._watch(lane.queue.end.fileno(), 0, self.pump)

    def lacks_workers(self) -> bool:
        """Return True if calls wait in the queue of the CPU slots, and another worker would have a call to run."""
        if not self._slots.spare or not self._slots.queues[CPU].has_calls:
            return False
        there = len(self._slots.all) - self._slots.counts[MAIN]
        return there < len({id(call) for call in self.calls.values() if call.kind == CPU})

    def again(self, ids: Iterable[int]) -> None:
        """Make calls that were offered to workers and have not begun wait again, before all others and in this order.

        Calls that have ended, or were not offered, are ignored.

        Args:
            ids: the ids of the calls.
        """
        calls = [call for id_ in ids if (call := self.get(id_)) is not None and call.offered]
        for call in calls:
            call.offered = False
            call.again = True
            call.missing = None
        for call in reversed(calls):
            self._lanes[call.kind].waiting.appendleft(call)

    def take_back(self) -> None:
        """Take calls that no worker has taken out of the workers' sockets. They wait again, before all others."""
        for lane in self._lanes:
            self._take_back(lane)

    def _take_back(self, lane: _Lane) -> None:
        """Take calls that no worker has taken out of the socket of one kind of slot.

        They wait again, before all others.
        """
        back: list[int] = []
        for f, fds in lane.queue.take_back():
            for fd in fds:
                os.close(fd)
            back += f.header["ids"] if "ids" in f.header else [f.header["id"]]
        self.again(back)

    def take_back_from(self, slots: Iterable[Slot]) -> None:
        """Take batched calls back that the workers of these slots have taken but not begun.

        They wait again, before all others.
        """
        self.again([id_ for slot in slots for id_ in slot.pipes.take_back()])

    def give_back(self, n: int, kind: int) -> list[int]:
        """Remove up to `n` calls that have not begun, and return their ids. The last calls are removed first.

        The client sends them to another node then.

        Args:
            n: the greatest number of calls.
            kind: the kind of slot that they are for, MAIN or CPU.
        """
        lane = self._lanes[kind]
        calls = self._apart(lane)
        if n > len(calls):
            lane.waiting = deque(calls)
            self._take_back(lane)
            self.take_back_from(slot for slot in self._slots.all if slot.kind == kind)
            calls = self._apart(lane)
        kept = max(0, len(calls) - n)
        lane.waiting = deque(calls[:kept])
        back = [call.id for call in reversed(calls[kept:])]
        for id_ in back:
            self.forget(id_)
        return back

    def doomed(self) -> list[NodeCall]:
        """Remove the calls that are marked to be stopped (`NodeCall.doomed`) and have not begun, and return them."""
        self.take_back()
        self.take_back_from(self._slots.all)
        doomed: list[NodeCall] = []
        for lane in self._lanes:
            calls = self._apart(lane)
            lane.waiting = deque(call for call in calls if not call.doomed)
            doomed += [call for call in calls if call.doomed]
        return doomed

    def _apart(self, lane: _Lane) -> list[NodeCall]:
        """Return the calls that wait for one kind of slot, in order, each separated from its batch."""
        ids = (id_ for call in lane.waiting for id_ in (call.ids if isinstance(call, Batch) else [call.id]))
        return [call for id_ in ids if (call := self.get(id_)) is not None]
