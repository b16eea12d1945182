"""`WaitingCalls`: queues the calls that no node (rented machine) has room for yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping

from skypool.calls.node_queue import Lane, NodeQueue
from skypool.calls.pending import PendingCall


class WaitingCalls:
    """The calls of one pool that wait for a node: calls that any node may run, and calls that only some nodes may run.

    Calls that must run on a single node wait in the `Lane` of that node instead. (A lane is the slots of one kind on a
    node: slots with devices, or CPU slots.) The dispatch, which chooses a node for each call, holds its lock while it
    uses this object. `len()` gives the number of calls, and iterating yields them without removing them.

    Args:
        node_queues: a mapping from the number of each node to its queue. It changes as nodes come and go.

    Attributes:
        anywhere: two queues of calls that any node may run. The second queue has the calls that need no device and can
            run on CPU slots. The first queue has all other calls.
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
        """Return the queue that has the next call for a lane (the slots of one kind on a node). Remove nothing.

        Calls that must run on the lane's node come first, then calls that only some nodes may run, then calls for any
        node. Of the calls for any node, the one that was submitted first comes first.

        Returns:
            a queue whose first item is the next call. The queue is empty if no call waits for the lane.
        """
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
        """Return the number of waiting calls that may run on a lane (the slots of one kind on a node).

        Calls that must run on the lane's node are counted too.
        """
        waiting = len(lane.pinned) + sum(len(self.anywhere[on_cpu]) for on_cpu in lane.takes)
        if lane.shared:
            waiting += sum(map(len, lane.shared))
        return waiting

    def shared(self, nodes: tuple[int, ...], on_cpu: bool) -> deque[PendingCall]:
        """Return the queue of the calls that only these nodes may run. If there is no such queue, make an empty one.

        A new queue is also added to the lane of each of these nodes. Nodes that the pool does not have are skipped.

        Args:
            nodes: the numbers of the nodes, in ascending order.
            on_cpu: True for the queue of the calls that need no device, False for the queue of the other calls.
        """
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
        """Remove the empty queues that `shared` made, also from the lanes (groups of slots) of all nodes."""
        self._shared = {key: queue for key, queue in self._shared.items() if queue}
        for node_queue in self._node_queues.values():
            for lane in node_queue.lanes:
                lane.shared = [queue for queue in lane.shared if queue]

    def take_orphans(self, staying: Collection[int]) -> list[PendingCall]:
        """Remove and return the calls that wait for certain nodes, none of which is in `staying`.

        Calls that any node may run are not removed. The list may be empty.

        Args:
            staying: the numbers of the nodes that can still take calls.
        """
        orphans: list[PendingCall] = []
        for (nodes, _), queue in self._shared.items():
            if not any(node in staying for node in nodes):
                orphans += queue
                queue.clear()
        return orphans

    def put_back(self, pending: PendingCall) -> None:
        """Put a call at the front of the queue that it belongs to, which may be the queue of a single node.

        Raises:
            KeyError: the call must run on a single node that the pool no longer has.
        """
        if isinstance(pending.node, tuple):
            self.shared(pending.node, pending.options.on_cpu).appendleft(pending)
        elif pending.node is not None:
            self._node_queues[pending.node].lane(pending).pinned.appendleft(pending)
        else:
            self.anywhere[pending.options.on_cpu].appendleft(pending)

    def clear(self) -> None:
        """Remove all calls from the queues of this object. This does not end the calls: they get no result or error."""
        for queue in self.anywhere:
            queue.clear()
        self._shared.clear()
