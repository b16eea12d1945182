"""`Placement`: sends waiting calls to the nodes with most room, and has busy nodes give calls back for idle ones."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable

from skypool.calls.node_queue import STUCK, Lane, NodeQueue
from skypool.calls.pending_calls import PendingCall
from skypool.calls.roster import Roster
from skypool.calls.waiting_calls import CallQueue, WaitingCalls
from skypool.event_loop import Loop

_LOOKED_AT = 8
"""The most busy lanes that are compared to choose the one from which an idle lane takes calls over."""


class Placement:
    """The sender of waiting calls to the nodes of one pool. Callers of its methods hold the lock of the roster.

    Args:
        on_drained: called with the number of a leaving node that has no call left, maybe repeatedly. Must not block.
    """

    def __init__(self, roster: Roster, waiting: WaitingCalls, on_drained: Callable[[int], None]) -> None:
        self._roster = roster
        self._lock = roster.lock
        self._waiting = waiting
        self._on_drained = on_drained
        self.put_back: dict[int, CallQueue] = {}  # queues to which calls were put back, by their identity
        self.heavy: dict[Lane, NodeQueue] = {}  # lanes where calls wait that others may run, in the order of looks
        self._looks = False  # True while `_look_for_stuck` is about to be called

    def idle_lanes(self, pending: PendingCall) -> int:
        """Return the number of idle lanes that may run a call like this one. The call itself is not sent."""
        with self._lock:
            numbers = self._roster.staying if pending.node is None else self._roster.staying.intersection(pending.nodes)
            there = (self._roster.node_queues[node] for node in numbers)
            lanes = [each.lane(pending) for each in there if each.is_up]
            return sum(not each.underway and each.held is None for each in lanes)

    def send_on(self, queue: CallQueue, spread: bool = False) -> None:
        """Send waiting calls of a queue to which calls were just added, if a node has room.

        A single call is sent at once if a lane is idle. Other calls are sent if at least `queue.enough` of them wait.
        If `spread` is True, each idle lane gets one call first.
        """
        while (spread or len(queue) == 1) and queue and (best := queue.best(queue[0])) and not best[1].underway:
            pending = queue.popleft()
            if not pending.stopped:
                best[0].send([pending])
        if queue and len(queue) >= queue.enough:
            self._hand_out(queue)

    def fill(self, node_queue: NodeQueue) -> None:
        """Send a node as many waiting calls as it has room for.

        If the node is leaving, send waiting calls to other nodes instead. If it then has nothing left to
        do, call `on_drained`.
        """
        if node_queue.leaving:
            self._leave(node_queue)
            return
        for lane in node_queue.lanes:
            self._fill_lane(node_queue, lane)

    def _fill_lane(self, node_queue: NodeQueue, lane: Lane) -> bool:
        """Send as many waiting calls as a lane has room for, in one write. Return True if any was sent."""
        if lane.held is not None:
            return False
        self._waiting.offer(node_queue, lane)
        queue = self._waiting.next_queue(lane)
        if not queue:
            if len(self._roster.node_queues) > 1 and not lane.underway and node_queue.is_up:
                self._recall_for(node_queue, lane)
            return False
        together = queue[0].together
        # while the node has enough to do, small calls wait until they fill a frame, or until a call ends
        if lane.waits(self._waiting.count(lane), queue[0]) or not node_queue.is_up:
            return False
        batch: list[PendingCall] = []
        room = lane.room(together)
        is_mixed = len(lane.takes) > 1 and all(self._waiting.anywhere)
        while room > len(batch):
            if is_mixed or not queue:
                queue = self._waiting.next_queue(lane)
                if not queue:
                    break
            pending = queue.popleft()
            if not pending.stopped:
                batch.append(pending)
        if batch:
            node_queue.send(batch)
            if lane.spare > 0 and not isinstance(batch[-1].node, int):
                self.heavy[lane] = node_queue
        return bool(batch)

    def _hand_out(self, queue: CallQueue) -> None:
        """Send waiting calls to the least loaded nodes, until no node has room or no call waits."""
        while queue:
            first = queue[0]
            best = queue.best(first)
            if best is None or not self._fill_lane(*best):
                full = 1 if best is None else best[1].frame_full(first)
                # infinity: no more tries until a call ends
                queue.enough = full if len(queue) < full else math.inf
                return

    def hand_out_again(self) -> None:
        """Send calls that were put back to the queues where they waited, if a node has room."""
        for queue in self.put_back.values():
            self._hand_out(queue)
        self.put_back.clear()

    def _leave(self, node_queue: NodeQueue) -> None:
        """Send waiting calls to nodes other than this leaving one. If this one has nothing to do, call `on_drained`."""
        for queue in self._waiting.queues:
            self._hand_out(queue)
        if node_queue.is_drained:
            self._on_drained(node_queue.node)

    def _recall_for(self, idle: NodeQueue, free: Lane) -> None:
        """Ask a busier node to give back calls that it has not begun, so that the idle lane `free` can run them."""
        now = time.monotonic()
        busiest = None
        may_be_stuck = False
        for lane, node_queue in list(itertools.islice(self.heavy.items(), _LOOKED_AT)):
            del self.heavy[lane]
            if lane.spare <= 0 or self._roster.node_queues.get(node_queue.node) is not node_queue:
                continue
            self.heavy[lane] = node_queue  # behind those that were not looked at
            if node_queue is idle or node_queue.leaving or lane.recalling:
                continue
            if not any(each in free.takes for each in lane.takes):
                continue
            if not lane.is_late(now):
                may_be_stuck = True
            elif busiest is None or lane.spare > busiest[1].spare:
                busiest = (node_queue, lane)
        if busiest is not None:
            self._recall(*busiest, idle.node, free)
        elif may_be_stuck and not self._looks:  # look again soon: a call may run longer than those before it
            self._looks = True
            loop = Loop.shared().loop
            loop.call_soon_threadsafe(loop.call_later, STUCK, self._look_for_stuck)

    def _recall(self, node_queue: NodeQueue, lane: Lane, node: int, free: Lane) -> None:
        """Ask a node to give back calls of a lane that the node of number `node` may run on its idle lane `free`."""
        movable = [pending for pending in lane.underway.values() if _may_move(pending, node, free)]
        spare = len(movable) - lane.slots
        if spare <= 0:
            del self.heavy[lane]  # until it gets other calls
            return
        lane.recalling = True
        node_queue.recall(lane, max(1, min(spare // 2, free.room(movable[0].together))))

    def _look_for_stuck(self) -> None:
        """Let idle nodes take over calls that wait on a node where no call has ended for a while (`STUCK` seconds)."""
        with self._lock:
            self._looks = False
            now = time.monotonic()
            for lane, node_queue in list(self.heavy.items()):
                there = self._roster.node_queues.get(node_queue.node) is node_queue and not node_queue.leaving
                if lane.spare <= 0 or not there or lane.recalling:
                    continue
                for on_cpu in lane.takes:
                    best = self._waiting.anywhere[on_cpu].best(next(iter(lane.underway.values())))
                    if best is None or best[1].underway:
                        continue
                    if lane.is_late(now):
                        self._recall(node_queue, lane, best[0].node, best[1])
                    else:
                        self._recall_for(*best)  # which has this called again
                    break

    def requeue(self, pending: PendingCall) -> None:
        """Put a call that was taken from its node back to the front of the queue where it waited. Send nothing."""
        pending.at = -1
        queue = self._waiting.put_back(pending)
        if queue is not None:
            self.put_back[id(queue)] = queue


def _may_move(pending: PendingCall, node: int, free: Lane) -> bool:
    """Return True if a call that was sent to another node may run on a lane of this node."""
    fits = pending.node is None or (isinstance(pending.node, tuple) and node in pending.node)
    return fits and pending.options.on_cpu in free.takes
