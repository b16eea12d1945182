"""`WaitingCalls`: queues the calls that no node has room for yet, and finds the next node for them.

The cost of finding a node grows with the logarithm of the number of nodes.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Container, Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace

from skypool.calls.node_queue import Lane, NodeQueue
from skypool.calls.pending_calls import PendingCall

_SPARE = 8
"""The number of empty queues of calls for certain nodes that are kept, as more such calls often follow."""
_Found = tuple[NodeQueue, Lane]
_Entry = tuple[float, int, int, NodeQueue, Lane]


class CallQueue(deque[PendingCall]):
    """Waiting calls that the same lanes may run, and these lanes by their load.

    Attributes:
        enough: the number of waiting calls from which another search for a lane makes sense.
        loads: (load, node) of each lane that may have room. The load is the calls under way for each slot.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enough = 0.0
        self._heap: list[_Entry] = []
        self.loads: dict[Lane, tuple[float, NodeQueue]] = {}
        self._numbers = itertools.count()

    def offer(self, node_queue: NodeQueue, lane: Lane, load: float) -> None:
        """Note that a lane of this load may run calls of this queue, and may have room now.

        `load` is the number of calls under way for each slot. When a lane gets more calls, it need not be offered
        again: `best` checks its load.
        """
        self.enough = 0.0
        known = self.loads.get(lane)
        if known is not None and known[0] <= load:
            return
        self.loads[lane] = load, node_queue
        heappush(self._heap, (load, node_queue.node, next(self._numbers), node_queue, lane))
        if len(self._heap) > 4 * len(self.loads) + 16:  # most entries are outdated
            self._heap = [(at, each.node, next(self._numbers), each, of) for of, (at, each) in self.loads.items()]
            heapify(self._heap)

    def best(self, pending: PendingCall) -> _Found | None:
        """Return the least loaded lane that has room for a call like this one, with its node; None if there is none.

        Of equally loaded lanes, that of the node with the lowest number is returned. A lane that cannot be used now is
        forgotten until it is offered again.
        """
        heap = self._heap
        while heap:
            at, _, _, node_queue, lane = heap[0]
            known = self.loads.get(lane)
            if known is None or known[0] != at:
                heappop(heap)
                continue
            is_free = not lane.underway and lane.held is None
            if not node_queue.is_up or not (is_free or lane.room(pending.together) > 0):
                heappop(heap)
                del self.loads[lane]
                continue
            load = 0.0 if is_free else lane.load
            if load > at:
                self.loads[lane] = load, node_queue
                heapreplace(heap, (load, node_queue.node, next(self._numbers), node_queue, lane))
                continue
            return node_queue, lane
        return None


class WaitingCalls:
    """The calls of one pool that wait for a node and that more than one node may run.

    Calls that must run on a certain node wait in the `Lane` of that node instead. The dispatch holds its lock while it
    uses this object. `len()` gives the number of calls, and iterating yields them without removing them.

    Args:
        node_queues: the queue of each node, by the node's number. It changes as nodes come and go.

    Attributes:
        anywhere: two queues of calls that any node may run. The second has the calls that need no device and can run on
            CPU slots. The first has all other calls.
    """

    def __init__(self, node_queues: Mapping[int, NodeQueue]) -> None:
        self._node_queues = node_queues
        self._shared: dict[tuple[tuple[int, ...], bool], CallQueue] = {}
        self.anywhere: tuple[CallQueue, CallQueue] = (CallQueue(), CallQueue())
        self._shared_by: dict[Lane, list[CallQueue]] = {}  # those of `_shared` that a lane may take calls from
        self._drop_at = _SPARE

    def __len__(self) -> int:
        return sum(map(len, self.anywhere)) + sum(map(len, self._shared.values()))

    def __iter__(self) -> Iterator[PendingCall]:
        for queue in (*self.anywhere, *self._shared.values()):
            yield from queue

    @property
    def queues(self) -> list[CallQueue]:
        """All queues that more than one node may take calls from, as a new list."""
        return [*self.anywhere, *self._shared.values()]

    def offer(self, node_queue: NodeQueue, lane: Lane) -> None:
        """Note in all queues of a lane that it may have fewer calls than before, or can be used again."""
        load = len(lane.underway) / lane.slots
        for on_cpu in lane.takes:
            queue = self.anywhere[on_cpu]
            queue.enough = 0.0
            if (known := queue.loads.get(lane)) is None or known[0] > load:
                queue.offer(node_queue, lane, load)
        if self._shared_by:
            for shared in self._shared_by.get(lane, ()):
                shared.offer(node_queue, lane, load)

    def next_queue(self, lane: Lane) -> deque[PendingCall]:
        """Return the queue whose first item is the next call for a lane. It is empty if no call waits for the lane.

        Calls that must run on the lane's node come first, then calls that only some nodes may run, then calls for any
        node. Of the calls for any node, the one that was submitted first comes first.
        """
        if lane.pinned:
            return lane.pinned
        for shared in self._shared_by.get(lane, ()):
            if shared:
                return shared
        if len(lane.takes) == 1:
            return self.anywhere[lane.on_cpu]
        either, on_cpu = self.anywhere
        return on_cpu if on_cpu and not (either and either[0].id < on_cpu[0].id) else either

    def count(self, lane: Lane) -> int:
        """Return the number of waiting calls that may run on a lane, including those that must run on its node."""
        waiting = len(lane.pinned) + sum(len(self.anywhere[on_cpu]) for on_cpu in lane.takes)
        return waiting + sum(map(len, self._shared_by.get(lane, ())))

    def shared(self, nodes: tuple[int, ...], on_cpu: bool) -> CallQueue:
        """Return the queue of the calls that only these nodes may run. If there is no such queue, make an empty one.

        `nodes` must be in ascending order. Those that the pool does not have are skipped. If `on_cpu` is True, return
        the queue of the calls that need no device, otherwise that of the other calls.
        """
        queue = self._shared.get((nodes, on_cpu))
        if queue is None:
            if len(self._shared) >= self._drop_at:
                self._drop_empty()
                self._drop_at = 2 * len(self._shared) + _SPARE
            queue = self._shared[nodes, on_cpu] = CallQueue()
            for node in nodes:
                if node in self._node_queues:
                    node_queue = self._node_queues[node]
                    lane = node_queue.lanes[-1 if on_cpu else 0]
                    self._shared_by.setdefault(lane, []).append(queue)
                    queue.offer(node_queue, lane, lane.load)
        return queue

    def _drop_empty(self) -> None:
        """Remove the empty queues that `shared` made, and the lanes of nodes that are gone."""
        self._shared = {key: queue for key, queue in self._shared.items() if queue}
        lanes = [lane for node_queue in self._node_queues.values() for lane in node_queue.lanes]
        left = {lane: [queue for queue in self._shared_by.get(lane, ()) if queue] for lane in lanes}
        self._shared_by = {lane: queues for lane, queues in left.items() if queues}

    def take_orphans(self, staying: Container[int]) -> list[PendingCall]:
        """Remove and return the calls that name several nodes of which none gets new calls.

        `staying` has the numbers of the nodes that get new calls. Calls that any node may run are not removed.
        """
        orphans: list[PendingCall] = []
        for (nodes, _), queue in self._shared.items():
            if not any(node in staying for node in nodes):
                orphans += queue
                queue.clear()
        return orphans

    def queue_of(self, pending: PendingCall) -> CallQueue:
        """Return the queue of a call that more than one node may run."""
        on_cpu = pending.options.on_cpu
        return self.shared(pending.node, on_cpu) if isinstance(pending.node, tuple) else self.anywhere[on_cpu]

    def put_back(self, pending: PendingCall) -> CallQueue | None:
        """Put a call back to the front of its queue. Return that queue; None if the queue is that of a single node.

        Raises KeyError if the pool no longer has that node.
        """
        if isinstance(pending.node, int):
            self._node_queues[pending.node].lane(pending).pinned.appendleft(pending)
            return None
        queue = self.queue_of(pending)
        queue.appendleft(pending)
        return queue

    def clear(self) -> None:
        """Remove all calls from the queues of this object. They get no result or error."""
        for queue in self.anywhere:
            queue.clear()
        self._shared.clear()
        self._shared_by.clear()
