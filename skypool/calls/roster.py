"""`Roster`: the nodes that run the calls of a pool, what is known about them, and messages about calls to them."""

from __future__ import annotations

import contextlib
import threading
from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from skypool import clock
from skypool.calls.idle_time import Idleness, IdleTime
from skypool.calls.node_queue import NodeQueue
from skypool.calls.options import no_such_node
from skypool.calls.pending_calls import NO_CALL, PendingCall
from skypool.errors import ConnectionLost, PoolClosed, taken_back
from skypool.wire.frames import Buffer, Kind, frame

_MOST_NAMED = 5
"""The most calls that a message names."""


class Roster:
    """The nodes that run the calls of one pool. `Dispatch` adds and removes them. Any thread may call the methods.

    Attributes:
        lock: the lock of the dispatch, the object that queues the calls.
        node_queues: the queue of each node, by the node's number.
        staying: the nodes that get new calls.
        idle: the idle time of each node, by its number. Nodes that are gone stay in it.
        closed: the error with which the pool has ended; None before that.
    """

    def __init__(self, pool: str, lock: threading.RLock) -> None:
        self.pool = pool
        self.lock = lock
        self.node_queues: dict[int, NodeQueue] = {}
        self.staying: set[int] = set()
        self.idle: dict[int, IdleTime] = {}
        self.closed: BaseException | None = None

    def nodes(self, named: Sequence[int] | None = None) -> dict[int, str]:
        """Return the address of each node, by its number, in ascending order. An unknown address is "".

        Args:
            named: the numbers of the nodes to return, which may be leaving. If None, all nodes except leaving ones.

        Raises:
            PoolClosed: the pool has ended.
            UsageError: the pool does not have one of the nodes in `named`.
        """
        with self.lock:
            if self.closed is not None:
                raise self.too_late("a call")
            nodes = self.staying if named is None else set(named)
            missing = nodes - self.node_queues.keys()
            if missing:
                raise no_such_node(self.pool, missing, self.node_queues)
            return {node: self.node_queues[node].address for node in sorted(nodes)}

    def slots(self, *, on_cpu: bool) -> dict[int, int]:
        """Return how many calls each node runs at once, by its number. Leaving nodes are left out.

        If `on_cpu` is True, count calls that need no device, otherwise all other calls.
        """
        with self.lock:
            there = {node: self.node_queues[node].lanes for node in sorted(self.staying)}
            return {node: lanes[-1 if on_cpu else 0].slots for node, lanes in there.items()}

    def can_start_on(self, node: int) -> bool:
        """Return True if a service can start on a node: it is known and not leaving. It need not be connected now."""
        with self.lock:
            return node in self.staying

    def why_leaving(self, node: int) -> ConnectionLost:
        """Return (do not raise) the error for calls and services that a leaving node cannot begin or continue."""
        with self.lock:
            node_queue = self.node_queues.get(node)
            return taken_back(node) if node_queue is None else node_queue.why_leaving

    def awaited(self, node: int) -> Collection[int]:
        """Return the ids of the calls under way on a node, as a view that changes with them. Takes no lock.

        For an unknown node, return ().
        """
        node_queue = self.node_queues.get(node)
        return () if node_queue is None else ChainMap(*(lane.underway for lane in node_queue.all_lanes))

    def services_on(self, node: int) -> list[PendingCall]:
        """Return the services that run on a node, as a new list; [] if the pool has no such node."""
        with self.lock:
            node_queue = self.node_queues.get(node)
            return [] if node_queue is None else list(node_queue.services.underway.values())

    def service(self, node: int, id_: int) -> PendingCall | None:
        """Return the service of this id that runs on a node, or None. Takes no lock."""
        node_queue = self.node_queues.get(node)
        return None if node_queue is None else node_queue.services.underway.get(id_)

    def function_of(self, node: int, id_: int) -> str:
        """Return the name of the function of a call that is under way on a node; "" if it is not. Takes no lock."""
        node_queue = self.node_queues.get(node)
        pending = None if node_queue is None else node_queue.find(id_)
        return "" if pending is None else pending.name

    def occupants(self, nodes: Iterable[int], *, former: bool = False) -> str:
        """Return the calls under way on nodes as words, such as "train on nodes 0, 1"; "" for none.

        For calls of a former client, the words say so, and how to stop them. If `former` is True, only calls of a
        former client are included.
        """
        found: dict[tuple[bool, str], set[int]] = {}
        with self.lock:
            for node_queue in [self.node_queues[node] for node in nodes if node in self.node_queues]:
                for pending in node_queue.underway:
                    is_former = not pending.code.buffers
                    if pending.part_of is not NO_CALL and (is_former or not former):
                        found.setdefault((is_former, pending.name), set()).add(node_queue.node)
        texts = []
        for is_former in (False, True):
            names = [
                f"{name} on node{'' if len(there) == 1 else 's'} {', '.join(map(str, sorted(there)))}"
                for (its, name), there in found.items()
                if its is is_former
            ]
            more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
            text = ", ".join(names[:_MOST_NAMED]) + more
            if names and is_former:
                text += " (sent by the process that had the pool before; the futures in pool.inherited can cancel them)"
            texts += [text] if names else []
        return " and ".join(texts)

    @property
    def load(self) -> dict[int, int]:
        """A new dict from the number of each node to the number of calls that it runs or that wait for it alone."""
        with self.lock:
            return {node: len(each.underway) + len(each.pinned) for node, each in self.node_queues.items()}

    def idleness(self) -> dict[int, Idleness]:
        """Return how long each node was idle until now, by its number. Nodes that are gone are included."""
        with self.lock:
            now = clock.now()
            return {node: each.until(now) for node, each in self.idle.items()}

    def measured(self, node: int, low: bool) -> None:
        """Note a reading of a node's devices. Do nothing for an unknown node.

        `low` is True if all devices of the node are under 5 % utilisation.
        """
        with self.lock:
            node_queue = self.node_queues.get(node)
            if node_queue is not None:
                node_queue.idle.measured(clock.now(), low)

    @contextlib.contextmanager
    def transferring(self, nodes: Iterable[int]) -> Iterator[None]:
        """Count the block as work of these nodes: files go to them, or come from them."""
        with self.lock:
            queues = [self.node_queues[node] for node in nodes if node in self.node_queues]
            self._transfer(queues, 1)
        try:
            yield
        finally:
            with self.lock:
                self._transfer([each for each in queues if self.node_queues.get(each.node) is each], -1)

    def _transfer(self, queues: Iterable[NodeQueue], more: int) -> None:
        for each in queues:
            each.transfers += more
            each.note_idle()

    def stall(self, node: int, calls: Collection[int]) -> None:
        """Note the ids of all generators on a node that wait until their items are taken. These count as idle."""
        with self.lock:
            node_queue = self.node_queues.get(node)
            if node_queue is not None and (node_queue.stalled or calls):
                node_queue.stalled = frozenset(id_ for id_ in calls if node_queue.find(id_) is not None)
                node_queue.note_idle()

    def runs(self, pending: PendingCall) -> bool:
        """Return True if a call was sent to a node that is connected now, and the node has not reported its end."""
        with self.lock:
            node_queue = self.node_queues.get(pending.at)
            return node_queue is not None and node_queue.is_reachable and node_queue.has(pending)

    def drive(self, pending: PendingCall) -> None:
        """Read the connection to a call's node in the calling thread until the call ends.

        This is faster than waiting for another thread to read the result, which is stored in `pending.outlet`. Return
        earlier if no node has the call yet, if another thread reads already, or if the connection breaks.
        """
        node_queue = self.node_queues.get(pending.at)
        if node_queue is not None:
            node_queue.link.drive(pending)

    def connection(self, pending: PendingCall) -> int:
        """Return the number of the connection to the node that has a call; 0 if no node has it. Takes no lock.

        The number rises by one with each reconnection to the node.
        """
        node_queue = self.node_queues.get(pending.at)
        return 0 if node_queue is None else node_queue.link.connection

    def item(self, pending: PendingCall, header: Mapping[str, object], buffers: list[Buffer]) -> None:
        """Send a pickled item of an iterator argument to the node that runs the call. Drop it if no node does.

        `header` has the index of the iterator argument (`arg`, from 0) and the number of the item (`n`, from 1).
        """
        with self.lock:
            node_queue = self.node_queues.get(pending.at)
            if node_queue is not None and node_queue.has(pending):
                node_queue.send_item(pending.id, header, buffers)

    def credit(self, pending: PendingCall, seq: int) -> None:
        """Tell the node that runs a generator, if any, that the consumer has taken all items up to number `seq`."""
        with self.lock:
            node_queue = self.node_queues.get(pending.at)
            if node_queue is not None and node_queue.has(pending):
                node_queue.link.send(frame(Kind.CREDIT, {"id": pending.id, "seq": seq}))
                if pending.id in node_queue.stalled:
                    node_queue.stalled -= {pending.id}
                    node_queue.note_idle()

    def acknowledge(self, node: int, output: int = 0) -> None:
        """Tell a node now which of its results and output have arrived, instead of with the next call that it gets.

        `output` is the number of the last frame with printed text that was read. Do nothing if there is nothing new, or
        for an unknown node. Raises ProtocolError if the node does not read the client's messages.
        """
        with self.lock:
            node_queue = self.node_queues.get(node)
            if node_queue is not None and (node_queue.to_ack or output > node_queue.output_seen):
                node_queue.output_seen = max(node_queue.output_seen, output)
                node_queue.link.reply(node_queue.acks(least=0))

    def too_late(self, what: str) -> PoolClosed:
        """Return (do not raise) a PoolClosed: `what`, such as "a call", was sent after the end of the pool."""
        why = f": {self.closed}" if self.closed is not None else ""
        error = PoolClosed(f"{what} was sent to pool {self.pool!r}, which has ended{why}")
        error.__cause__ = self.closed
        return error
