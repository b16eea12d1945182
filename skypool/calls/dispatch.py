"""`Dispatch`: takes calls, has `Placement` send each to a node, and sends it again when the node is lost.

Threads of callers and the engine's thread use a `Dispatch` under one lock. No thread blocks or runs the user's code,
unpickling included, while it holds that lock. Callbacks, and the ends of calls that are decided under the lock, wait in
`effects`. `act` performs them after the lock is released.
The cost of a call does not depend on the number of waiting calls, which stay in queues until a node has room.
Calls that need no device have separate queues, because nodes with devices have separate slots for them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from skypool import clock
from skypool.calls.call_events import CallEvents
from skypool.calls.call_messages import CallProgress, Ended, errors_in
from skypool.calls.callbacks import Callbacks
from skypool.calls.effects import Effects
from skypool.calls.futures import CallFuture, Items, ResultCell
from skypool.calls.node_queue import Lane, NodeQueue, lanes_of
from skypool.calls.options import Options, no_such_node
from skypool.calls.pending_calls import Code, PendingCall
from skypool.calls.placement import Placement
from skypool.calls.roster import Roster
from skypool.calls.tally import CallTally, Parts, Present, present, text_of_error
from skypool.calls.values import Values
from skypool.calls.waiting_calls import CallQueue, WaitingCalls
from skypool.errors import (
    ConnectionLost,
    NodeInterrupted,
    NodeRetired,
    SkypoolError,
    gone_with,
)
from skypool.link.agent_messages import ItemWanted, Outcome, Outcomes, Recalled, Welcome, Yielded
from skypool.link.inbox import Arrival
from skypool.link.link import Link

if TYPE_CHECKING:
    from skypool.calls.gangs import GangRunner

P = ParamSpec("P")
T = TypeVar("T")

_STREAMS = 64
"""The number of generator calls that are added to the list before those that have ended are removed from it."""

_MOST_INHERITED = 10_000
"""The most calls of a former client that are taken over from a node that is not trusted. Each takes 2 KB of memory."""


def _then_acts(method: Callable[Concatenate[Dispatch, P], T]) -> Callable[Concatenate[Dispatch, P], T]:
    """Decorate a method of `Dispatch`, so that it calls `act` at its end, also if it raises."""

    def work(self: Dispatch, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        finally:
            self.act()

    functools.update_wrapper(work, method)
    return work


class Dispatch:
    """The calls of one pool, and the nodes that run them.

    Methods may be called from any thread. Only `drive` waits until a call ends.

    Args:
        told: reports to the user which calls failed for good, and which run again. It does not report processes of
            gangs, nor calls that were cancelled or that the end of the pool has ended.
        on_feed: called as (pending, arg, n) when a call asks for item `n` (from 1) of its iterator argument number
            `arg` (from 0).
        on_drained: called with the number of a leaving node that has no call left, maybe repeatedly. Must not block.
        wait: seconds for which a gang that runs again waits for nodes in place of lost ones.

    Attributes:
        node_queues: the queue of each node, by the node's number.
        gangs: None until the first gang is submitted.
        roster: the nodes, and what is known about them.
        placement: sends waiting calls to nodes.
        values: the values of `pool.put`.
        progress: handles what nodes say about running calls.
        parts: the parts of calls that run on several nodes.
        ids: gives each run of a call a new id.
        effects: the actions that are performed after the lock is released.
        callbacks: calls what users add to futures with `add_done_callback`.
    """

    def __init__(
        self,
        pool: str,
        told: CallEvents,
        on_feed: Callable[[PendingCall, int, int], None],
        on_drained: Callable[[int], None],
        wait: float = 0.0,
    ) -> None:
        self._pool = pool
        self._told = told
        self._lock = threading.RLock()
        self.effects = Effects(self._lock)
        self.callbacks = Callbacks()
        self.roster = Roster(pool, self._lock)
        self.node_queues = self.roster.node_queues
        self._staying = self.roster.staying
        self._waiting = WaitingCalls(self.node_queues)
        self.placement = Placement(self.roster, self._waiting, on_drained)
        self.values = Values(self.roster)
        self._has_stopped = False  # True if calls may wait that were cancelled meanwhile
        self.parts = Parts()
        self.tally = CallTally(self._lock, self._present)
        self.progress = CallProgress(partial(self._lost, begun=True), on_feed, self.tally)
        self.ids: Iterator[int] = itertools.count((secrets.randbits(30) << 32) + 1)
        self.gangs: GangRunner | None = None
        self._gang_settings = (wait, self.effects.later(told.gang_failed), self.effects.later(told.notice))
        self._coming = self._expected = 0
        self._streams: list[PendingCall] = []
        self._most_streams = _STREAMS
        self._until_done: list[threading.Event] = []  # of threads in `wait_done`

    # --- calls in --------------------------------------------------------------------------------------------

    def submit(self, *pending_calls: PendingCall, spread: bool = False) -> None:
        """Send calls to the nodes with the most room, or queue them until a node has room. Return at once.

        Each call gets a new id. A call that may run only on leaving nodes ends with an error, which is not raised here.

        Args:
            spread: True to send one call to each idle lane first. So a map over idle nodes begins on all of them, even
                if its first calls end before the last are sent.

        Raises:
            PoolClosed: the pool has ended.
            UsageError: a call names a node that the pool does not have. The calls before that call stay submitted.
        """
        queues: dict[int, CallQueue] = {}
        last: CallQueue | None = None
        try:
            with self._lock:
                if self.roster.closed is not None and pending_calls:
                    raise self.roster.too_late(pending_calls[0].name)
                try:
                    for pending in pending_calls:
                        pending.id = next(self.ids)
                        if type(pending.outlet) is not ResultCell:
                            self._connect(pending)
                            if pending.part_of is not None:
                                self.parts.add(pending)
                        if pending.node is None:
                            queue = self._waiting.anywhere[pending.options.on_cpu]
                        elif isinstance(pending.node, int):
                            self._submit_to_one(pending, pending.node)
                            continue
                        elif self._has_one_of(pending, pending.node):
                            queue = self._waiting.queue_of(pending)
                        else:
                            continue
                        queue.append(pending)
                        if queue is not last:
                            last = queues[id(queue)] = queue
                finally:
                    for queue in queues.values():
                        self.placement.send_on(queue, spread)
        finally:
            if self.effects.ends or self.effects.others:
                self.act()

    def _submit_to_one(self, pending: PendingCall, node: int) -> None:
        node_queue = self.node_queues.get(node)
        if node_queue is None:
            raise no_such_node(self._pool, [node], self.node_queues)
        if node_queue.leaving:
            self._lost(pending, node_queue.why_leaving, begun=False)
        else:
            node_queue.lane(pending).pinned.append(pending)
            self.placement.fill(node_queue)

    def _has_one_of(self, pending: PendingCall, nodes: tuple[int, ...]) -> bool:
        """Return True if one of these nodes can run a call; else end the call. Raises UsageError if none exists."""
        if any(node in self._staying for node in nodes):
            return True
        there = [self.node_queues[node] for node in nodes if node in self.node_queues]
        if not there:
            raise no_such_node(self._pool, nodes, self.node_queues)
        self._lost(pending, there[0].why_leaving, begun=False)
        return False

    @_then_acts
    def submit_together(self, parts: Sequence[PendingCall]) -> bool:
        """Send the parts of a call, each to its own node, and return True. Queue those whose node has no room.

        If one of these nodes gets no new calls, send nothing and return False. Raises PoolClosed if the pool has ended.
        """
        with self._lock:
            if self.roster.closed is None and not all(pending.node in self._staying for pending in parts):
                return False
            self.submit(*parts)
            return True

    def act(self) -> None:
        """Perform the effects that wait. Do nothing if this thread holds the lock.

        A thread that holds the lock calls this method again when it has released the lock.
        """
        self.effects.perform()
        if self._until_done:
            self._note_done()

    def gang_runner(self) -> GangRunner:
        """Return the pool's `GangRunner`. The first call makes it."""
        from skypool.calls.gangs import GangRunner  # imported here: few pools need it, and it would delay each start

        with self._lock:
            if self.gangs is None:
                self.gangs = GangRunner(self._pool, self, *self._gang_settings)
                self.gangs.coming(self._coming + self._expected)
                for node, node_queue in self.node_queues.items():
                    self.gangs.node_up(node, node_queue.devices)
                    if node_queue.leaving:
                        self.gangs.node_leaving(node)
            return self.gangs

    @_then_acts
    def coming(self, count: int) -> None:
        """Set the number of nodes that are being rented or set up. Gangs that need more nodes wait for them."""
        with self._lock:
            self._coming = count
            if self.gangs is not None:
                self.gangs.coming(count + self._expected)

    @_then_acts
    def expect(self, more: int) -> None:
        """Add `more`, which may be negative, to the number of nodes that may be rented soon. Gangs wait for them."""
        with self._lock:
            self._expected += more
            if self.gangs is not None:
                self.gangs.coming(self._coming + self._expected)

    def start_service(self, pending: PendingCall) -> None:
        """Send a service to its node. Return at once.

        The service gets a new id. If the node is not connected, the service is sent when it reconnects. A service that
        was stopped before is not sent. `pending.node` must be the number of one node.

        Raises:
            PoolClosed: the pool has ended.
            UsageError: the pool does not have the node.
            NodeInterrupted, NodeRetired, NodeUnhealthy: the node gets no new calls.
        """
        assert isinstance(pending.node, int)
        with self._lock:
            if self.roster.closed is not None:
                raise self.roster.too_late(pending.name)
            node_queue = self.node_queues.get(pending.node)
            if node_queue is None:
                raise no_such_node(self._pool, [pending.node], self.node_queues)
            if node_queue.leaving:
                raise node_queue.why_leaving
            if pending.stopped:
                return
            pending.id = next(self.ids)
            self._connect(pending)
            if node_queue.is_up:
                node_queue.send([pending])
            else:
                pending.at = pending.node
                node_queue.services.underway[pending.id] = pending  # `resume` sends what the node does not know
                node_queue.note_idle()

    def _lose_shared(self, node: int, error: BaseException) -> None:
        """End waiting calls whose last possible node, `node`, is gone or leaving now. `error` says why it is."""
        for pending in self._waiting.take_orphans(self._staying):
            self._lost(pending, _lost_with_node(pending, node, error), begun=False)

    def _connect(self, pending: PendingCall) -> None:
        """Let the caller's future or stream stop the call, and a stream ask for more items."""
        if isinstance(pending.outlet, Items):
            if len(self._streams) >= self._most_streams:
                self._streams = [each for each in self._streams if not each.ended]
                self._most_streams = 2 * len(self._streams) + _STREAMS
            self._streams.append(pending)
            pending.outlet.connect(lambda seq: self.roster.credit(pending, seq), lambda: self.stop(pending))
        elif isinstance(pending.outlet, CallFuture):
            pending.outlet.on_cancel(lambda: self.stop(pending))
            pending.outlet.call_in(self.callbacks)

    @_then_acts
    def stop(self, pending: PendingCall) -> None:
        """Stop a call that is waiting or running. Do nothing if it has ended or was stopped before.

        A waiting call ends at once with a SkypoolError. A node that has the call is told to stop it. Do not wait for
        that.
        """
        with self._lock:
            if pending.stopped or pending.ended or pending.settled:
                return
            pending.stopped = True
            node_queue = self.node_queues.get(pending.at)
            if node_queue is not None and node_queue.has(pending):
                node_queue.cancel(pending)
            else:
                self._end_stopped(pending)  # it stays in its queue, where it is passed over
                self._has_stopped = True

    def close_streams(self, error: BaseException) -> list[PendingCall]:
        """Stop all generators that have not ended, and let the iteration of their items raise `error`. Do not wait.

        Return the calls of these generators. Generators whose stream was closed before are left out.
        """
        with self._lock:
            open_ = [each for each in self._streams if not each.ended]
            self._streams.clear()
        failed = [each for each in open_ if isinstance(each.outlet, Items) and each.outlet.fail(error)]
        for each in failed:  # only now, as the others may notice that one is stopped, and fail in another way
            self.stop(each)
        return failed

    # --- nodes -----------------------------------------------------------------------------------------------

    @_then_acts
    def add(self, node: int, welcome: Welcome, link: Link) -> None:
        """Add a node that can run calls. Send the values of `put` to the node, and then waiting calls."""
        with self._lock:
            lanes = lanes_of(welcome.slots, welcome.cpu_slots)
            node_queue = self.node_queues[node] = NodeQueue(
                node, lanes, link, devices=welcome.devices, address=welcome.health.address, host=welcome.health.host
            )
            self.roster.idle[node] = node_queue.idle
            self._staying.add(node)
            self.values.give(node_queue)
            if self.gangs is not None:
                self.gangs.node_up(node, node_queue.devices)
            self.placement.fill(node_queue)

    @_then_acts
    def inherit(self, node: int, welcome: Welcome, link: Link) -> list[CallFuture[object]]:
        """Add a node on which calls of a former client still run. Return futures of these calls.

        The node's first message, `welcome`, names the calls. Generators get no future, because nobody can read their
        items any more. Services get none either; they go on. Of a node that is not trusted, at most 10,000 calls are
        taken over.
        """
        most = None if link.reader is None else _MOST_INHERITED
        with self._lock:
            self.add(node, welcome, link)
            node_queue = self.node_queues[node]
            futures: list[CallFuture[object]] = []
            node_queue.theirs = frozenset(welcome.objects)
            quiet = set(welcome.quiet)
            streams = node_queue.their_streams = frozenset(welcome.streams)
            on_cpu = set(welcome.cpu_calls)
            services = set(welcome.services)
            anywhere, without_devices = Options(), Options(devices=0)
            known = set(welcome.calls) - streams
            for id_, name in itertools.islice(welcome.names.items(), most):
                if id_ in known:
                    future: CallFuture[object] = CallFuture(name)
                    options = without_devices if id_ in on_cpu else anywhere
                    pending = PendingCall(Code("", name, ()), [], future, options, node=node, id=id_, at=node)
                    pending.service = id_ in services
                    pending.busy = id_ in services and id_ not in quiet
                    self._connect(pending)
                    node_queue.lane(pending).underway[id_] = pending
                    if not pending.service:
                        futures.append(future)
            node_queue.note_idle()
            return futures

    def pause(self, node: int) -> None:
        """Send no calls to a node whose connection broke, until `resume`. Its calls stay assigned to it."""
        with self._lock:
            if node in self.node_queues:
                self.node_queues[node].resumed = False
                if self.gangs is not None:
                    self.gangs.node_changed(node)

    @_then_acts
    def resume(self, node: int, welcome: Welcome) -> None:
        """Send a reconnected node the messages that it may have missed, and then new calls. Ignore an unknown node.

        The node's first message, `welcome`, names the calls that it knows. All other calls that were sent to it are
        sent again. If the node is leaving, they move to other nodes or fail instead.
        """
        with self._lock:
            node_queue = self.node_queues.get(node)
            if node_queue is None:
                return
            known = set(welcome.calls)
            node_queue.functions = set(welcome.functions)
            node_queue.objects = set(welcome.objects)
            node_queue.resumed = True
            node_queue.asked_back = 0
            node_queue.strays = 0
            self.values.give(node_queue)
            for lane in node_queue.all_lanes:
                lane.recalling = False
                node_queue.send(self._unknown(node_queue, lane, known))
            node_queue.note_idle()
            node_queue.recall_all()
            if self.gangs is not None:
                self.gangs.resumed(node)
            self.placement.fill(node_queue)
            self.placement.hand_out_again()

    def _unknown(self, node_queue: NodeQueue, lane: Lane, known: Container[int]) -> list[PendingCall]:
        """Remove a lane's calls that the node does not know (not in `known`). Return those that must be sent again."""
        again: list[PendingCall] = []
        for pending in list(lane.underway.values()):
            if pending.id in known:  # only messages about it may have been lost
                node_queue.tell_again(pending)
                continue
            del lane.underway[pending.id]
            if pending.stopped:
                self._end_stopped(pending)
            elif node_queue.leaving:
                self._lost(pending, node_queue.why_leaving, begun=False)
            else:
                again.append(pending)
        return again

    @_then_acts
    def drain(self, node: int, *, retired: bool = False, unhealthy: ConnectionLost | None = None) -> None:
        """Send no more calls to a node: it was retired, is unhealthy, or its provider takes the machine back.

        Running calls go on. The node is asked to give back calls that it has not begun, which other nodes then get.
        Calls that only this node may run, and that do not run yet, fail with a NodeInterrupted, NodeRetired or
        NodeUnhealthy. Do nothing for an unknown node. For a node that is leaving already, only note whether its
        provider takes the machine back.

        Args:
            retired: True if the node was retired.
            unhealthy: what is wrong with an unhealthy node. If this is None and `retired` is False, the provider takes
                the machine back.
        """
        with self._lock:
            node_queue = self.node_queues.get(node)
            if node_queue is None:
                return
            if node_queue.leaving:
                node_queue.retired = node_queue.retired and retired
                return
            node_queue.leaving = True
            self._staying.discard(node)
            node_queue.retired = retired
            node_queue.unhealthy = unhealthy
            for lane in node_queue.lanes:
                while lane.pinned:
                    self._lost(lane.pinned.popleft(), node_queue.why_leaving, begun=False)
            self._lose_shared(node, node_queue.why_leaving)
            self.placement.hand_out_again()
            if self.gangs is not None:
                self.gangs.node_leaving(node)
            node_queue.recall_all()
            self.placement.fill(node_queue)

    @contextlib.contextmanager
    def transferring(self, nodes: Sequence[int]) -> Iterator[None]:
        """Count the block as work of these nodes: files go to them, or come from them. A leaving node waits for it."""
        try:
            with self.roster.transferring(nodes):
                yield
        finally:
            self._transferred(nodes)

    @_then_acts
    def _transferred(self, nodes: Sequence[int]) -> None:
        with self._lock:
            for node in nodes:
                node_queue = self.node_queues.get(node)
                if node_queue is not None and node_queue.leaving:
                    self.placement.fill(node_queue)

    def _end_stopped(self, pending: PendingCall) -> None:
        """End a cancelled call that no node runs any more. Its result becomes a SkypoolError that says so."""
        error = SkypoolError(f"{pending.name} was cancelled")
        self.tally.failed(pending, pending.at, None, text_of_error(error))
        self._end(pending, error)

    def _end(self, pending: PendingCall, error: BaseException) -> None:
        """End a call with an error of skypool's own. A gang gets it at once, others after the lock is released."""
        pending.settled = True
        if pending.gang is None:
            self.effects.ends.append(partial(pending.finish, error))
        else:
            pending.finish(error)

    @_then_acts
    def lose(self, node: int, error: BaseException, others: Sequence[int] = ()) -> None:
        """Remove a lost node and the `others` of its TPU slice. Their calls are moved to other nodes or fail.

        The machines of a TPU slice are rented together and end together. `error` says why the node is lost; calls that
        fail get an error that is made from it. A call that may have begun is moved only if it has a retry left, or if
        the provider took the machine back. Unknown nodes are ignored.
        """
        with self._lock:
            gone = [self.node_queues.pop(each) for each in (node, *others) if each in self.node_queues]
            if not gone:
                return
            self._staying.difference_update((node, *others))
            for node_queue in gone:
                node_queue.idle.gone(clock.now())
                why = error if node_queue.node == node else gone_with(node, node_queue.node, error)
                for pending in [*node_queue.underway, *node_queue.pinned, *node_queue.services.underway.values()]:
                    lost = _lost_with_node(pending, node_queue.node, why)
                    self._lost(pending, lost, begun=node_queue.has(pending))
            if self.gangs is not None:
                for node_queue in gone:
                    self.gangs.node_gone(node_queue.node)
            self._lose_shared(node, error)
            self.placement.hand_out_again()

    def _lost(self, pending: PendingCall, error: BaseException, text: str = "", *, begun: bool) -> None:
        """Queue a call again whose run failed or whose node is lost; if it cannot run again, end it with `error`."""
        # `begun`: the call may have begun. `text`: the error for records, "" for an error of skypool's own.
        if pending.settled:  # it was cancelled while it waited
            return
        interrupted = error if isinstance(error, NodeInterrupted) else None
        why_not = pending.bound(self._staying, begun)  # the reason why it cannot run again, or ""
        if pending.stopped:
            self._end_stopped(pending)
        elif not why_not and (pending.retries > 0 or interrupted or not begun) and self.roster.closed is None:
            if begun:
                pending.retried += interrupted is None
                pending.attempt += 1
                pending.id = next(self.ids)  # frames about the old id belong to the run before
                self.tally.retried()
                self.effects.others.append(partial(self._told.retried, pending, error, pending.at, pending.attempt))
            self.placement.requeue(pending)
        else:
            if isinstance(error, (NodeInterrupted, NodeRetired)):
                words = f"{pending.name} was lost: {error}, and {why_not or 'the pool is ending'}"
                lost = type(error)(words, error.node)
                lost.__cause__ = error
                error, text = lost, ""
            self.tally.failed(pending, pending.at, None, text or text_of_error(error))
            self._end(pending, error)
            if pending.gang is None:
                self.effects.others.append(partial(self._told.failed, pending, error, pending.at))

    @_then_acts
    def end_calls(self, error: BaseException) -> None:
        """Accept no more calls, and end all unfinished calls with `error`, but let services go on.

        Cancelled calls end with a SkypoolError. Nothing is sent to the nodes. Do nothing if this was called before.
        """
        with self._lock:
            if self.roster.closed is not None:
                return
            self.roster.closed = error
            if self.gangs is not None:
                self.gangs.close(error)
            left = list(self._waiting)
            self._waiting.clear()
            for node_queue in self.node_queues.values():
                left += [*node_queue.underway, *node_queue.pinned]
                for lane in node_queue.lanes:
                    lane.underway.clear()
                    lane.pinned.clear()
                node_queue.note_idle()
        self._end_all(left, error)

    @_then_acts
    def close(self, error: BaseException) -> None:
        """Accept no more calls, and end all unfinished calls and services with `error`. All nodes are removed.

        Cancelled calls end with a SkypoolError. Nothing is sent to the nodes. Do nothing if this was called before.
        """
        self.end_calls(error)
        with self._lock:
            left = [each for node_queue in self.node_queues.values() for each in node_queue.services.underway.values()]
            for node_queue in self.node_queues.values():
                node_queue.idle.gone(clock.now())
            self.node_queues.clear()
            self._staying.clear()
            self.placement.heavy.clear()
        self._end_all(left, error)

    def _end_all(self, calls: Sequence[PendingCall], error: BaseException) -> None:
        with self._lock:
            left = [each for each in calls if not (each.settled or each.ended)]
            for pending in left:
                pending.settled = True
                self.tally.closed(pending)
        for pending in left:
            pending.finish(SkypoolError(f"{pending.name} was cancelled") if pending.stopped else error)

    @property
    def pressed(self) -> bool:
        """True if calls that any node may run are waiting, because no node has room.

        Calls that only certain nodes may run do not count. A waiting gang counts if it needs more nodes than the pool
        has.
        """
        with self._lock:
            self._forget_stopped()
            return any(self._waiting.anywhere) or (self.gangs is not None and self.gangs.lacks_nodes)

    @property
    def worked(self) -> float | None:
        """The time of the pool's last work, in seconds since 1970; 0 if it had none, and None while it has work.

        Work is a call or gang that waits or runs, and a service with `busy=True`. A generator that waits until its
        items are taken does not count.
        """
        with self._lock:
            stalled = sum(node_queue.has_stalled for node_queue in self.node_queues.values())
            if any(each.since is None for each in self.roster.idle.values()) or self.unfinished > stalled:
                return None
            return max((each.worked for each in self.roster.idle.values() if each.worked is not None), default=0.0)

    @property
    def unfinished(self) -> int:
        """The number of calls that wait or run, on all nodes. Services do not count.

        A cancelled call counts until the node has ended it, or until it is taken from its queue. A gang counts once for
        itself and once for each of its processes.
        """
        with self._lock:
            gangs = 0 if self.gangs is None else self.gangs.unfinished
            return len(self._waiting) + gangs + sum(self.roster.load.values())

    def wait_done(self, timeout: float) -> bool:
        """Wait until no call waits or runs, at most `timeout` seconds. Return False if some still do."""
        done = threading.Event()
        with self._lock:
            if not self.unfinished:
                return True
            self._until_done.append(done)
        try:
            return done.wait(timeout)
        finally:
            with self._lock:
                self._until_done.remove(done)

    def _note_done(self) -> None:
        with self._lock:
            if not self.unfinished:
                for each in self._until_done:
                    each.set()

    def _present(self, node: int | None) -> Present:
        if node is not None:
            there = {node: self.node_queues[node]} if node in self.node_queues else {}
            if self._has_stopped:
                _drop_stopped(lane.pinned for node_queue in there.values() for lane in node_queue.lanes)
            return present(there, 0, self.parts.of(node), (0, 0))
        self._forget_stopped()
        gangs = (0, 0) if self.gangs is None else self.gangs.present
        return present(self.node_queues, len(self._waiting), self.parts, gangs)

    def _forget_stopped(self) -> None:
        """Remove cancelled calls from the queues in which they waited."""
        if self._has_stopped:
            self._has_stopped = False
            _drop_stopped(self._waiting.queues)
            _drop_stopped(lane.pinned for node_queue in self.node_queues.values() for lane in node_queue.lanes)

    # --- messages from nodes ---------------------------------------------------------------------------------

    def arrived(self, node: int, arrivals: Sequence[Arrival], connection: int | None = None) -> None:
        """Handle messages that one node sent about calls, and wake the threads that wait for calls which ended.

        Then send more calls to the node, and acknowledge its results, so that the node can free their memory. Ignore
        messages of an unknown node and of a connection that was replaced: over the new connection, the node sends again
        what is not acknowledged.

        Args:
            connection: the number of the connection over which the messages came. None for the present one.

        Raises:
            ProtocolError: a message does not fit the calls of that node, or the node does not read the client's
                messages.
        """
        ended: Ended = []
        node_queue = self.node_queues.get(node)
        if node_queue is None:
            return
        errors = errors_in(node_queue, arrivals)
        try:
            with self._lock:
                if self.node_queues.get(node) is not node_queue:
                    return  # it was given up just now
                if connection is not None and connection != node_queue.link.connection:
                    return  # what was sent again since is not known to these messages
                for said, buffers in arrivals:
                    if isinstance(said, Outcome):
                        self.progress.on_outcome(node_queue, said, buffers, ended, errors)
                    elif isinstance(said, Outcomes):
                        self.progress.on_ends(node_queue, said.ends, ended, errors)
                    elif isinstance(said, Recalled):
                        self._on_recalled(node_queue, said)
                    elif isinstance(said, (ItemWanted, Yielded)):
                        self.progress.on_items(node_queue, said, buffers)
                self.placement.fill(node_queue)
                if self.placement.put_back:
                    self.placement.hand_out_again()
                if node_queue.idle.calls or node_queue.idle.held:
                    node_queue.note_idle()
            for pending, end in ended:
                pending.finish(end)
                if isinstance(end, BaseException) and not pending.stopped and pending.gang is None:
                    self._told.failed(pending, end, node)
        finally:
            with self._lock:
                enough = 32
                for pending, _ in ended:
                    if pending.gang is not None:
                        enough = 1  # a process of a gang that has failed waits until its error is acknowledged
                    if pending.ended:
                        node_queue.to_ack.append(pending.id)
                    else:  # interrupted, as by Ctrl-C: the result comes again over a new connection
                        pending.settled = False
                        node_queue.lane(pending).underway[pending.id] = pending
                        node_queue.note_idle()
                if acks := node_queue.acks(enough):
                    node_queue.link.reply(acks)
                if self._until_done:
                    self._note_done()
                if self.gangs is not None:
                    self.gangs.node_changed(node)
            if self.effects.ends or self.effects.others:
                self.act()

    def _on_recalled(self, node_queue: NodeQueue, said: Recalled) -> None:
        """Send calls that a node gave back unbegun to other nodes. Ignore ids of calls that are not under way."""
        node_queue.gave_back(len(said.calls), said.on_cpu)
        for id_ in said.calls:
            pending = node_queue.take(id_)
            if pending is not None:
                self._lost(pending, node_queue.why_leaving, begun=False)  # the error is for those bound to that node
        self.placement.hand_out_again()


def _drop_stopped(queues: Iterable[deque[PendingCall]]) -> None:
    for queue in queues:
        left = [pending for pending in queue if not pending.stopped]
        if len(left) < len(queue):
            queue.clear()
            queue.extend(left)


def _lost_with_node(pending: PendingCall, node: int, error: BaseException) -> BaseException:
    """Return a lost call's error: `error` itself if it is a NodeInterrupted or NodeRetired, else a ConnectionLost."""
    if isinstance(error, (NodeInterrupted, NodeRetired)):
        return error
    lost = ConnectionLost(f"{pending.name} was lost with node {node}: {error}", node)
    lost.__cause__ = error
    return lost
