"""The calls that wait for a node: those that any node may run, and those that only some may."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping

from skypool.calls.node_queue import Lane, NodeQueue
from skypool.calls.pending import PendingCall


class WaitingCalls:
    """The calls of one pool that wait, but for those that must run on one node, which wait in its lanes.

    Args:
        node_queues: the nodes of the pool by node, as they are at any time.

    Attributes:
        anywhere: the calls that any node may run, by `Options.on_cpu`.
    """

    def __init__(self, node_queues: Mapping[int, NodeQueue]) -> None:
        self._node_queues = node_queues
        self._shared: dict[tuple[tuple[int, ...], bool], deque[PendingCall]] = {}
        self.anywhere: tuple[deque[PendingCall], deque[PendingCall]] = (deque(), deque())

    def __len__(self) -> int:
        return sum(map(len, self.anywhere)) + sum(map(len, self._shared.values()))

    def __iter__(self) -> Iterator[PendingCall]:
        for queue in (*self.anywhere, *self._shared.values()):
            yield from queue

    def next_queue(self, lane: Lane) -> deque[PendingCall]:
        """Return where the next call for these slots is: what must run there first, and then what came first."""
        if lane.pinned:
            return lane.pinned
        for shared in lane.shared:
            if shared:
                return shared
        if len(lane.takes) == 1:
            return self.anywhere[lane.on_cpu]
        either, on_cpu = self.anywhere
        return on_cpu if on_cpu and not (either and either[0].id < on_cpu[0].id) else either

    def count(self, lane: Lane) -> int:
        """Return how many calls wait that may run on these slots."""
        waiting = len(lane.pinned) + sum(len(self.anywhere[on_cpu]) for on_cpu in lane.takes)
        if lane.shared:
            waiting += sum(map(len, lane.shared))
        return waiting

    def shared(self, nodes: tuple[int, ...], on_cpu: bool) -> deque[PendingCall]:
        """Return the queue of the calls that any of these nodes may run. It is made when it is first needed."""
        queue = self._shared.get((nodes, on_cpu))
        if queue is None:
            self._drop_empty()
            queue = self._shared[nodes, on_cpu] = deque()
            for node in nodes:
                if node in self._node_queues:
                    lanes = self._node_queues[node].lanes
                    lanes[-1 if on_cpu else 0].shared.append(queue)
        return queue

    def _drop_empty(self) -> None:
        """Forget the shared queues in which no call waits."""
        self._shared = {key: queue for key, queue in self._shared.items() if queue}
        for node_queue in self._node_queues.values():
            for lane in node_queue.lanes:
                lane.shared = [queue for queue in lane.shared if queue]

    def take_orphans(self, staying: Collection[int]) -> list[PendingCall]:
        """Take out the calls that wait for nodes of which none is among those that stay."""
        orphans: list[PendingCall] = []
        for (nodes, _), queue in self._shared.items():
            if not any(node in staying for node in nodes):
                orphans += queue
                queue.clear()
        return orphans

    def put_back(self, pending: PendingCall) -> None:
        """Let a call wait again, before those that came after it."""
        if isinstance(pending.node, tuple):
            self.shared(pending.node, pending.options.on_cpu).appendleft(pending)
        elif pending.node is not None:
            self._node_queues[pending.node].lane(pending).pinned.appendleft(pending)
        else:
            self.anywhere[pending.options.on_cpu].appendleft(pending)

    def clear(self) -> None:
        """Forget all of them."""
        for queue in self.anywhere:
            queue.clear()
        self._shared.clear()
