"""`Values`: the values of `pool.put`, which each node gets once."""

from __future__ import annotations

from skypool.calls.node_queue import NodeQueue
from skypool.calls.roster import Roster
from skypool.wire.frames import Buffer


class Values:
    """The pickled values of one pool that its nodes have. Any thread may call `put` and `drop`."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._objects: dict[str, list[Buffer]] = {}

    def put(self, key: str, buffers: list[Buffer]) -> None:
        """Send a value to every node, now or when the node joins or reconnects. Return at once.

        `key` is a hash of the value. A node that has the value already does not get it again. This object keeps the
        pickled value until `drop`. Raises PoolClosed if the pool has ended.
        """
        with self._roster.lock:
            if self._roster.closed is not None:
                raise self._roster.too_late("a value of put()")
            self._objects[key] = buffers
            for node_queue in self._roster.node_queues.values():
                node_queue.give_object(key, self._objects[key])

    def drop(self, key: str) -> None:
        """Tell every node to free the value of this key. Nodes that join later do not get it. Ignore an unknown key."""
        with self._roster.lock:
            self._objects.pop(key, None)
            for node_queue in self._roster.node_queues.values():
                node_queue.drop_object(key)

    def give(self, node_queue: NodeQueue) -> None:
        """Send a node, which has joined or reconnected, the values that it lacks.

        Values of this client that were dropped while the node was away are freed there.
        """
        for key in node_queue.objects - self._objects.keys() - node_queue.theirs:
            node_queue.drop_object(key)
        for key in self._objects:
            node_queue.give_object(key, self._objects[key])
