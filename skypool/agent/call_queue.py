"""Keeps the calls of this node until they end: calls that wait, and calls that a worker process has taken.

A slot is a place where one call runs at a time. Slots with devices and CPU slots (without devices) have separate
queues.
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
from skypool.agent.slots import CPU, OWN, Slot, Slots, WorkerQueue
from skypool.agent.value_storage import SpareMemory


@dataclass(slots=True)
class _Lane:
    """The calls that wait for one kind of slot (place where one call runs at a time).

    Attributes:
        queue: the queue from which worker processes take calls.
        waiting: calls that are not in `queue`, in order. Either `queue` has no room, or they were taken back from
            `queue`.
        full: True while `queue` has no room. The agent's loop then watches for room.
    """

    queue: WorkerQueue
    waiting: deque[NodeCall | Batch] = field(default_factory=deque)
    full: bool = False


class CallQueue:
    """The calls of this node that have not ended.

    A CallQueue puts waiting calls into the sockets that worker processes read. It also takes calls that have not begun
    back from these sockets.

    Args:
        slots: the slots whose workers run the calls.
        watch: `watch(fd, events, callback)` makes the agent's loop call `callback` when these epoll events occur on the
            file descriptor `fd`. With events 0, the loop stops watching `fd`.
        kept: takes over the memory of arguments that are no longer needed, for later values.

    Attributes:
        calls: the calls by id. Calls that came in one frame (message) share a `Batch` until one of them is needed by
            itself.
        suspects: calls by id that must be checked: these calls must stop, or may be lost with a worker that died.
    """

    def __init__(self, slots: Slots, watch: Callable[[int, int, Callable[[], None]], None], kept: SpareMemory) -> None:
        self._slots = slots
        self._watch = watch
        self._kept = kept
        self._lanes = [_Lane(queue) for queue in slots.queues]
        self.calls: dict[int, NodeCall | Batch] = {}
        self.suspects: dict[int, NodeCall] = {}

    def add(self, call: NodeCall | Batch) -> None:
        """Add a call, or a batch of calls, behind all calls that wait for the same kind of slot (place for one call).

        A batch is several small calls that one worker process runs one after the other. If the socket that workers read
        has room, the call or batch is put into it at once. Does not wait.
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
        """Add a call that has a worker process of its own, so that it waits for no slot (place for one call)."""
        call.offered = True
        self.calls[call.id] = call

    def get(self, id_: int) -> NodeCall | None:
        """Return the record of the call with this id.

        A batch is several calls with one record. A call of a batch gets a record of its own, and `calls` then has that
        record under this id. Returns None if the call has ended, or was never added.
        """
        call = self.calls.get(id_)
        if isinstance(call, Batch):
            call = self.calls[id_] = call.single(id_)
        return call

    def forget(self, id_: int, done: bool = False) -> None:
        """Remove a call that has ended, or was given back to the client, together with its arguments.

        Does nothing if there is no such call. Other calls of its batch (several calls that came in one message) stay.
        Only `calls` and `suspects` are changed here: if the call still waits for a worker, the caller must first take
        it off the list of waiting calls.

        Args:
            id_: the call's id.
            done: True if its worker process no longer uses the arguments. The memory of large arguments is then kept
                for another value, unless two workers may have had them. In all other cases it is released.
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
        """Move waiting calls into the sockets from which worker processes take them, as far as these have room.

        Does not wait. The agent's event loop moves the remaining calls as soon as there is room.
        """
        for lane in self._lanes:
            self._pump(lane)

    def _pump(self, lane: _Lane) -> None:
        """Move waiting calls of one kind of slot into the socket from which workers take them, as far as it has room.

        The order is kept. If the socket has no room, the agent's loop calls this again as soon as there is room.

        Args:
            lane: the calls that wait for one kind of slot (place for one call).
        """
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
        """Make a new queue in the place of one whose socket a call has shut. Its workers end, and new ones use it."""
        for kind, lane in enumerate(self._lanes):
            if lane.queue.is_broken:
                self._take_back(lane)
                self._watch(lane.queue.end.fileno(), 0, self.pump)
                lane.queue.close()
                lane.full = False
                lane.queue = self._slots.queues[kind] = WorkerQueue()

    def lacks_workers(self) -> bool:
        """Return True if one more worker process for CPU slots (slots without a device) would have a call to run.

        This is so if a call waits in the queue of CPU slots, and the CPU slots have fewer workers than calls. A batch
        (several calls that came in one message) counts as one call. Returns False if every CPU slot has a worker, or if
        the node has no CPU slots.
        """
        if not self._slots.spare or not self._slots.queues[CPU].has_calls:
            return False
        return self._slots.cpu_workers < len({id(call) for call in self.calls.values() if call.kind == CPU})

    def again(self, ids: Iterable[int]) -> None:
        """Put calls that were offered to worker processes, and have not begun, at the front of the queue again.

        These calls come before all other calls, in the given order. They stay in the agent until `pump` moves them to
        the workers. Calls that have ended, or were not offered, are ignored. So are calls with a worker of their own.

        Args:
            ids: the ids of the calls.
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
        """Take back the calls that no worker process has taken, and put them at the front of the queue again.

        The calls are removed from the sockets that workers read. They stay in the agent until `pump` moves them to the
        workers.
        """
        for lane in self._lanes:
            self._take_back(lane)

    def _take_back(self, lane: _Lane) -> None:
        """Take back the calls of one kind of slot that no worker process has taken.

        The calls are put at the front of the queue again. They stay in the agent until `pump` moves them to the
        workers. File descriptors that came back with the calls are closed.

        Args:
            lane: the calls that wait for one kind of slot (place for one call).
        """
        back: list[int] = []
        for f, fds in lane.queue.take_back():
            for fd in fds:
                os.close(fd)
            back += f.header["ids"] if "ids" in f.header else [f.header["id"]]
        self.again(back)

    def take_back_from(self, slots: Iterable[Slot]) -> None:
        """Take back batched calls that the worker processes of these slots have taken but not begun.

        A slot is a place where one call runs at a time. A batch is several small calls that one worker runs in turn.
        The calls are put at the front of the queue again. They stay in the agent until `pump` moves them to the
        workers.
        """
        self.again([id_ for slot in slots for id_ in slot.pipes.take_back()])

    def give_back(self, n: int, kind: int) -> list[int]:
        """Remove up to `n` calls that have not begun from the end of the queue, and return their ids.

        The client can then send these calls to other nodes. If fewer than `n` calls wait in the agent, more are taken
        back: from the workers' socket, and from batches (several calls for one worker). Afterwards, the caller must
        call `pump`, which moves the remaining calls to the workers.

        Args:
            n: the greatest number of calls to remove.
            kind: the kind of slot (place for one call) that the calls need, MAIN or CPU.

        Returns:
            the ids, the last call first; an empty list if there are no calls that have not begun.
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
        """Remove from the queue, and return, the calls that must stop (see `NodeCall.doomed`) and have not begun.

        The returned calls stay in `calls`. Returns an empty list if there are none. All other calls that have not begun
        are taken back from the worker processes. They wait until `pump` moves them to the workers.
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
        """Return the calls that wait for one kind of slot (place for one call), in order, each with its own record.

        A batch (several small calls with one record) is split into its calls. Calls that have ended are left out. The
        queue itself is not changed.
        """
        ids = (id_ for call in lane.waiting for id_ in (call.ids if isinstance(call, Batch) else [call.id]))
        return [call for id_ in ids if (call := self.get(id_)) is not None]
