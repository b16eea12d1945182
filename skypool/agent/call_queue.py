"""Keeps the calls of this node until they end: calls that wait, and calls that a worker has taken.

MAIN slots and CPU slots have separate queues.
"""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from skypool.agent.batch import Batch
from skypool.agent.call import NodeCall
from skypool.agent.messages import ids_in
from skypool.agent.value_storage import SpareMemory
from skypool.agent.worker_processes import CPU, OWN, Slot, Slots, WorkerQueue


@dataclass(slots=True)
class _Lane:
    """Calls for one kind of slot, in order: `queue` has those that workers can take, and `waiting` has the others."""

    queue: WorkerQueue
    waiting: deque[NodeCall | Batch] = field(default_factory=deque)
    full: bool = False  # True while the agent's loop watches for room in `queue`


class CallQueue:
    """Queue and record of all calls of this node that have not ended.

    This object puts waiting calls into the sockets that workers read, and takes back calls that have not begun.

    Args:
        watch: `watch(fd, events, callback)` makes the agent's loop call `callback` when these epoll events occur on the
            file descriptor `fd`. With events 0, the loop stops watching `fd`.
        kept: takes over the memory of large arguments that are no longer needed.

    Attributes:
        calls: the calls by id. Calls of a batch have the `Batch` as their value until one of them is needed by itself.
        suspects: calls by id that `Stops.look` checks, because they must stop, or may be lost with a worker that died.
        on_stopped: called with each call that has ended, if the mover has looked what it writes.
    """

    def __init__(self, slots: Slots, watch: Callable[[int, int, Callable[[], None]], None], kept: SpareMemory) -> None:
        self._slots = slots
        self._watch = watch
        self._kept = kept
        self._lanes = [_Lane(queue) for queue in slots.queues]
        self.calls: dict[int, NodeCall | Batch] = {}
        self.suspects: dict[int, NodeCall] = {}
        self.on_stopped: Callable[[NodeCall], None] = lambda call: None

    def add(self, call: NodeCall | Batch) -> None:
        """Add a call or a batch behind all calls that wait for the same kind of slot. Does not wait.

        If the socket that workers read has room, the call is put into the socket at once.
        """
        if isinstance(call, Batch):
            self.calls.update(dict.fromkeys(call.ids, call))
        else:
            self.calls[call.id] = call
        lane = self._lanes[call.kind]
        lane.waiting.append(call)
        if not lane.full:  # a full lane is pumped by the loop as soon as there is room
            self._pump(lane)

    def add_begun(self, call: NodeCall) -> None:
        """Add a call that has a worker of its own, so that it waits for no slot."""
        call.offered = True
        self.calls[call.id] = call

    def get(self, id_: int) -> NodeCall | None:
        """Return the record of the call with this id; None if the call has ended, or was never added.

        A call of a batch gets a record of its own here, which `calls` then has under this id.
        """
        call = self.calls.get(id_)
        if isinstance(call, Batch):
            call = self.calls[id_] = call.single(id_)
        return call

    def forget(self, id_: int, done: bool = False) -> None:
        """Remove a call that has ended, or was given back to the client, together with its arguments.

        Ignores unknown ids. Other calls of the same batch stay. A call that waits for a worker must first be taken off
        the list of waiting calls.

        `done` is True if the worker no longer uses the arguments. The memory of large arguments is then kept for
        another value, unless two workers may have had it. Otherwise the memory is released.
        """
        call = self.calls.pop(id_, None)
        self.suspects.pop(id_, None)
        if not isinstance(call, NodeCall):
            return
        if call.looks:
            self.on_stopped(call)
        if call.blob is None:
            return
        if done and not call.again:
            self._kept.give(call.blob)
        else:
            os.close(call.blob.fd)

    def pump(self) -> None:
        """Move waiting calls into the sockets from which workers take them, as far as these have room.

        Does not wait. The event loop moves the remaining calls as soon as there is room.
        """
        for lane in self._lanes:
            self._pump(lane)

    def _pump(self, lane: _Lane) -> None:
        """Move waiting calls of one lane into its socket, in order. If it is full, the loop calls this again later."""
        while lane.waiting:
            call = lane.waiting[0]
            try:
                lane.queue.offer([call.packet], [call.blob.fd] if call.blob else [])
            except (BrokenPipeError, ConnectionResetError):
                self.mend()
                continue
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

    def mend(self) -> None:
        """Replace each worker queue that a call has broken by shutting its socket.

        The calls in it wait again. The workers of the old queue end, and those that replace them use the new one.
        """
        for kind, lane in enumerate(self._lanes):
            if lane.queue.is_broken:
                self._take_back(lane)
                self._watch(lane.queue.end.fileno(), 0, self.pump)
                lane.queue.close()
                lane.full = False
                lane.queue = self._slots.queues[kind] = WorkerQueue()

    def lacks_workers(self) -> bool:
        """Return True if CPU workers are lacking: one more would have a call to run. A batch counts as one call.

        Returns False if every CPU slot has a worker, or if the node has no CPU slots.
        """
        if not self._slots.spare or not self._slots.queues[CPU].has_calls:
            return False
        return self._slots.cpu_workers < len({id(call) for call in self.calls.values() if call.kind == CPU})

    def again(self, ids: Iterable[int]) -> None:
        """Put calls that were offered to workers, and have not begun, at the front of the queue again, in this order.

        They stay in the agent until `pump` moves them to the workers. Calls that have ended, were not offered, or have
        a worker of their own are ignored.
        """
        found = [call for id_ in ids if (call := self.get(id_)) is not None]
        calls = [call for call in found if call.offered and call.kind not in OWN]
        for call in calls:
            call.offered = False
            call.again = True
            call.missing = None
        for call in reversed(calls):
            self._lanes[call.kind].waiting.appendleft(call)

    def take_back(self) -> None:
        """Take back the calls that no worker has taken, and put them at the front of the queue again.

        They stay in the agent until `pump` moves them to the workers.
        """
        for lane in self._lanes:
            self._take_back(lane)

    def _take_back(self, lane: _Lane) -> None:
        """Put calls of a lane that no worker has taken back to its front. Close the file descriptors sent with them."""
        back: list[int] = []
        for f, fds in lane.queue.take_back():
            for fd in fds:
                os.close(fd)
            back += ids_in(f)
        self.again(back)

    def take_back_from(self, slots: Iterable[Slot]) -> None:
        """Take back batched calls that the workers of these slots have not begun, and put them at the queue's front.

        They stay in the agent until `pump` moves them to the workers.
        """
        self.again([id_ for slot in slots for id_ in slot.batch.take_back()])

    def give_back(self, n: int, kind: int) -> list[int]:
        """Remove up to `n` calls that have not begun from the end of the queue. Return their ids, the last call first.

        The client can then send these calls to other nodes. `kind` is the kind of slot that they need, MAIN or CPU. If
        fewer than `n` wait in the agent, more are taken back from the workers' socket and from batches. Afterwards, the
        caller must call `pump`.
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
        """Return the doomed calls that have not begun, and remove them from the queue of waiting calls.

        They stay in `calls`. All other calls that have not begun are taken back from the workers and wait for `pump`.
        """
        self.take_back()
        self.take_back_from(self._slots.all)
        doomed: list[NodeCall] = []
        for lane in self._lanes:
            calls = self._apart(lane)
            lane.waiting = deque(call for call in calls if not call.doomed)
            doomed += [call for call in calls if call.doomed]
        return doomed

    def _apart(self, lane: _Lane) -> list[NodeCall]:
        """Return the waiting calls of a lane in order, those of batches as single calls. The lane does not change."""
        ids = (id_ for call in lane.waiting for id_ in (call.ids if isinstance(call, Batch) else [call.id]))
        return [call for id_ in ids if (call := self.get(id_)) is not None]
