"""Queue of the calls on this node that have not ended: waiting, or taken by a worker."""

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
    """The calls in line for one kind of slot; `full` while its queue takes no more."""

    queue: WorkerQueue
    waiting: deque[NodeCall | Batch] = field(default_factory=deque)
    full: bool = False


class CallQueue:
    """Puts calls where workers take them, as many as fit there, and takes back what has not begun.

    Args:
        slots: whose workers run them.
        watch: watch(fd, events, callback) for the agent's loop; events 0 to stop.
        kept: takes the memory of arguments that nobody needs any more.

    Attributes:
        calls: by id; those that came together share one `Batch` until somebody asks for one of them.
        suspects: calls to look at again, by id: they are to stop, or may have died with a worker.
    """

    def __init__(self, slots: Slots, watch: Callable[[int, int, Callable[[], None]], None], kept: SpareMemory) -> None:
        self._slots = slots
        self._watch = watch
        self._kept = kept
        self._lanes = [_Lane(queue) for queue in slots.queues]
        self.calls: dict[int, NodeCall | Batch] = {}
        self.suspects: dict[int, NodeCall] = {}

    def add(self, call: NodeCall | Batch) -> None:
        """A call, or several that came together, at the end of the line."""
        if isinstance(call, Batch):
            self.calls.update(dict.fromkeys(call.ids, call))
        else:
            self.calls[call.id] = call
        lane = self._lanes[call.kind]
        lane.waiting.append(call)
        if not lane.full:  # if it is, the loop pumps as soon as there is room
            self._pump(lane)

    def get(self, id_: int) -> NodeCall | None:
        """A call by itself, None when it has ended."""
        call = self.calls.get(id_)
        if isinstance(call, Batch):
            call = self.calls[id_] = call.single(id_)
        return call

    def forget(self, id_: int, done: bool = False) -> None:
        """A call has ended, or is no longer ours.

        Args:
            done: its worker has let go of its arguments.
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
        """Put calls where workers take them, as many as fit."""
        for lane in self._lanes:
            self._pump(lane)

    def _pump(self, lane: _Lane) -> None:
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
        """Return True if calls wait for CPU workers, and one more would have something to do."""
        if not self._slots.spare or not self._slots.queues[CPU].has_calls:
            return False
        there = len(self._slots.all) - self._slots.counts[MAIN]
        return there < len({id(call) for call in self.calls.values() if call.kind == CPU})

    def again(self, ids: Iterable[int]) -> None:
        """Calls that were offered and have not begun go back to the front of the line, in this order."""
        calls = [call for id_ in ids if (call := self.get(id_)) is not None and call.offered]
        for call in calls:
            call.offered = False
            call.again = True
            call.missing = None
        for call in reversed(calls):
            self._lanes[call.kind].waiting.appendleft(call)

    def take_back(self) -> None:
        """Bring the calls that no worker has taken back to the front of the line."""
        for lane in self._lanes:
            self._take_back(lane)

    def _take_back(self, lane: _Lane) -> None:
        back: list[int] = []
        for f, fds in lane.queue.take_back():
            for fd in fds:
                os.close(fd)
            back += f.header["ids"] if "ids" in f.header else [f.header["id"]]
        self.again(back)

    def take_back_from(self, slots: Iterable[Slot]) -> None:
        """Bring the calls that these workers took with others and have not begun back to the front of the line."""
        self.again([id_ for slot in slots for id_ in slot.pipes.take_back()])

    def give_back(self, n: int, kind: int) -> list[int]:
        """Let go of up to `n` calls for one kind of slot that have not begun, the last ones first."""
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
        """Take the calls that are to stop and have not begun out of the line."""
        self.take_back()
        self.take_back_from(self._slots.all)
        doomed: list[NodeCall] = []
        for lane in self._lanes:
            calls = self._apart(lane)
            lane.waiting = deque(call for call in calls if not call.doomed)
            doomed += [call for call in calls if call.doomed]
        return doomed

    def _apart(self, lane: _Lane) -> list[NodeCall]:
        """The calls in the line for one kind of slot, each by itself."""
        ids = (id_ for call in lane.waiting for id_ in (call.ids if isinstance(call, Batch) else [call.id]))
        return [call for id_ in ids if (call := self.get(id_)) is not None]
