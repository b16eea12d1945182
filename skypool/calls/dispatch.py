"""Which call goes to which node, and what becomes of it when the node goes away.

Callers' threads and the engine's thread meet here, under one lock that is never held while anything waits. The cost of
a call does not depend on how many wait: they stand in a queue until a node has room. Calls that ask for no device have
a queue of their own, as nodes with devices have slots of their own for them.
"""

from __future__ import annotations

import itertools
import secrets
import signal
import sys
import threading
from collections import ChainMap, deque
from collections.abc import Callable, Container, Sequence
from typing import Any

from skypool.calls.futures import CallFuture, Items, Place, Returned
from skypool.calls.node_queue import Desk, Lane, lanes_of
from skypool.calls.pending import Code, Ticket
from skypool.errors import (
    ConnectionLost,
    NodeInterrupted,
    PoolClosed,
    ProtocolError,
    SkypoolError,
    UsageError,
    WorkerDied,
    gone_with,
    taken_back,
)
from skypool.link import inbound
from skypool.link.connection import Arrival, Link
from skypool.link.inbound import Outcome, Outcomes, Recalled, Wanted, Welcome, Yielded
from skypool.trust.text import plain_error
from skypool.wire import codec
from skypool.wire.frames import Buffer, End, Kind, frame

_SHUTDOWN = (signal.SIGTERM, signal.SIGKILL)
Ended = list[tuple[Ticket, BaseException | Returned]]


class Dispatch:
    """The calls of one pool.

    Args:
        pool: its name, for messages.
        on_failed: told of each call that raised: (ticket, error).
        on_retry: told of each call that runs again.
        on_feed: a worker wants item `n` of iterator argument `arg` of a ticket.
        on_drained: told of a leaving node's rank, at least once, when no call is left on it. Must not wait.
    """

    def __init__(
        self,
        pool: str,
        on_failed: Callable[[Ticket, BaseException], None],
        on_retry: Callable[[Ticket, BaseException], None],
        on_feed: Callable[[Ticket, int, int], None],
        on_drained: Callable[[int], None],
    ) -> None:
        self._pool = pool
        self._on_failed, self._on_retry, self._on_feed = on_failed, on_retry, on_feed
        self._on_drained = on_drained
        self._lock = threading.RLock()
        self._queues: tuple[deque[Ticket], deque[Ticket]] = (deque(), deque())  # by `Ticket.on_cpu`
        self._enough = [0, 0]
        self.desks: dict[int, Desk] = {}
        self._objects: dict[str, list[Buffer]] = {}
        self._ids = itertools.count((secrets.randbits(30) << 32) + 1)
        self._closed: BaseException | None = None
        self.done = 0

    # --- calls in --------------------------------------------------------------------------------------------

    def submit(self, *tickets: Ticket) -> None:
        """Send calls to the node with the most room, or let them wait for one.

        Raises:
            PoolClosed: the pool has ended.
            UsageError: one is meant for a node that the pool does not have.
        """
        with self._lock:
            for ticket in tickets:
                if self._closed is not None:
                    raise self._too_late(f"{ticket.name} was sent to")
                ticket.id = next(self._ids)
                if type(ticket.outlet) is not Place:
                    self._connect(ticket)
                if ticket.node is None:
                    self._queues[ticket.on_cpu].append(ticket)
                elif (desk := self.desks.get(ticket.node)) is None:
                    raise UsageError(f"pool {self._pool!r} has no node {ticket.node}; it has {sorted(self.desks)}")
                elif desk.leaving:
                    self._lost(ticket, taken_back(ticket.node), begun=False)
                else:
                    desk.lane(ticket).pinned.append(ticket)
                    self._fill(desk)
            if tickets:
                self._send_on(tickets[-1])

    def _send_on(self, last: Ticket) -> None:
        """Send what waits as `last` does, which has just come, if a node has room for it."""
        queue = self._queues[last.on_cpu]
        idle = (desk for desk in self.desks.values() if not desk.lane(last).underway and desk.is_up)
        if len(queue) == 1 and (desk := next(idle, None)):
            desk.send([queue.popleft()])
        elif len(queue) >= self._enough[last.on_cpu]:
            self._hand_out(queue)

    def frame_full(self, ticket: Ticket) -> int:
        """How many calls like this one may travel together wherever they go."""
        with self._lock:
            return min((desk.lane(ticket).frame_full(ticket) for desk in self.desks.values()), default=1)

    def _hand_out(self, queue: deque[Ticket]) -> None:
        """Send what waits to the nodes with the most room; and note how much must wait before that makes sense."""
        while queue:
            first = queue[0]
            best = self._roomiest(first)
            if best is None or not self._fill_lane(best, best.lane(first)):
                full = best.lane(first).frame_full(first) if best else 1
                self._enough[first.on_cpu] = full if len(queue) < full else sys.maxsize  # until a call ends
                return

    def _connect(self, ticket: Ticket) -> None:
        if isinstance(ticket.outlet, Items):
            ticket.outlet.connect(lambda seq: self._credit(ticket, seq), lambda: self.stop(ticket))
        elif isinstance(ticket.outlet, CallFuture):
            ticket.outlet.on_cancel(lambda: self.stop(ticket))

    def _roomiest(self, ticket: Ticket) -> Desk | None:
        best, load = None, 1e9
        for desk in self.desks.values():
            lane = desk.lane(ticket)
            if len(lane.underway) / lane.slots < load and desk.is_up and lane.room(ticket.together) > 0:
                best, load = desk, len(lane.underway) / lane.slots
        return best

    def _fill(self, desk: Desk) -> None:
        """Send a node all it has room for."""
        if desk.leaving:
            self._enough[:] = 0, 0
            self._leave(desk)
            return
        for lane in desk.lanes:
            self._fill_lane(desk, lane)

    def _fill_lane(self, desk: Desk, lane: Lane) -> bool:
        """Send a node all it has room for on slots of one kind, in one write; whether anything was sent.

        While it has enough to do, calls that may travel together wait until they fill a frame, or until a call ends.
        """
        for on_cpu in lane.takes:
            self._enough[on_cpu] = 0
        queue = self._next_queue(lane)
        if not queue:
            if len(self.desks) > 1 and not lane.underway and desk.is_up:
                self._recall_for(desk, lane)
            return False
        together = queue[0].together
        waiting = len(lane.pinned) + sum(len(self._queues[on_cpu]) for on_cpu in lane.takes)
        if lane.waits(waiting, queue[0]) or not desk.is_up:
            return False
        batch: list[Ticket] = []
        room = lane.room(together)
        is_mixed = len(lane.takes) > 1 and all(self._queues)
        while room > len(batch) and (queue or (queue := self._next_queue(lane))):
            ticket = queue.popleft()
            if not ticket.stopped:
                batch.append(ticket)
            if is_mixed:
                queue = self._next_queue(lane)
        if batch:
            desk.send(batch)
        return bool(batch)

    def _next_queue(self, lane: Lane) -> deque[Ticket]:
        """Return where the next call for these slots is: what must run there first, and then what came first."""
        if lane.pinned:
            return lane.pinned
        if len(lane.takes) == 1:
            return self._queues[lane.on_cpu]
        either, on_cpu = self._queues
        return on_cpu if on_cpu and not (either and either[0].id < on_cpu[0].id) else either

    def _leave(self, desk: Desk) -> None:
        """A node gets no more calls: others do, and it is told when none is left on it."""
        for other in self.desks.values():
            if self.pressed and other.is_up:
                self._fill(other)
        if desk.is_idle:
            self._on_drained(desk.rank)

    def _recall_for(self, idle: Desk, free: Lane) -> None:
        """Slots of a node have nothing to do: let another give back calls for such that it has not begun."""
        busiest, spare = None, 0
        for desk in self.desks.values():
            for lane in desk.lanes:
                fits = desk is not idle and not desk.leaving and any(on_cpu in free.takes for on_cpu in lane.takes)
                waiting = sum(t.node is None and t.on_cpu in free.takes for t in lane.underway.values()) - lane.slots
                if fits and not lane.recalling and waiting > spare:
                    busiest, spare = (desk, lane), waiting
        if busiest is not None:
            desk, lane = busiest
            lane.recalling = True
            desk.recall(lane, max(1, spare // 2))

    def stop(self, ticket: Ticket) -> None:
        """Stop a call, wherever it is."""
        with self._lock:
            if ticket.stopped or ticket.ended:
                return
            ticket.stopped = True
            desk = self.desks.get(ticket.at)
            if desk is not None and desk.has(ticket):
                desk.cancel(ticket)
            else:
                self._end_stopped(ticket)  # where it waits, it is passed over

    def _credit(self, ticket: Ticket, seq: int) -> None:
        with self._lock:
            desk = self.desks.get(ticket.at)
            if desk is not None and desk.has(ticket):
                desk.link.send(frame(Kind.CREDIT, {"id": ticket.id, "seq": seq}))

    def item(self, ticket: Ticket, header: dict[str, Any], buffers: list[Buffer]) -> None:
        """Send an item of an iterator argument to where its call runs."""
        with self._lock:
            desk = self.desks.get(ticket.at)
            if desk is not None and desk.has(ticket):
                desk.send_item(ticket.id, header, buffers)

    def connection(self, ticket: Ticket) -> int:
        """Return the number of the connection to the node where a call runs: another one after each reconnection."""
        desk = self.desks.get(ticket.at)
        return 0 if desk is None else desk.link.connection

    def _too_late(self, what: str) -> PoolClosed:
        """For `raise`: the pool has ended, and why."""
        why = f": {self._closed}" if self._closed is not None else ""
        error = PoolClosed(f"{what} pool {self._pool!r}, which has ended{why}")
        error.__cause__ = self._closed
        return error

    # --- objects ---------------------------------------------------------------------------------------------

    def put(self, key: str, buffers: list[Buffer]) -> None:
        """Give every node a value, now or when it joins."""
        with self._lock:
            if self._closed is not None:
                raise self._too_late("put() on")
            self._objects[key] = buffers
            for desk in self.desks.values():
                desk.give_object(key, self._objects[key])

    def drop(self, key: str) -> None:
        """Let every node forget a value."""
        with self._lock:
            self._objects.pop(key, None)
            for desk in self.desks.values():
                desk.drop_object(key)

    # --- nodes -----------------------------------------------------------------------------------------------

    def add(self, rank: int, welcome: Welcome, link: Link) -> None:
        """A node is ready for work."""
        with self._lock:
            address = inbound.address(welcome.health)
            lanes = lanes_of(welcome.slots, welcome.cpu_slots)
            desk = self.desks[rank] = Desk(rank, lanes, link, address=address)
            awaited = ChainMap(*(lane.underway for lane in lanes))
            link.awaited = lambda: awaited
            for key in self._objects:
                desk.give_object(key, self._objects[key])
            self._fill(desk)

    def inherit(self, rank: int, welcome: Welcome, link: Link) -> list[CallFuture[Any]]:
        """A node whose former client is gone: its calls' futures. Streams nobody can read any more are stopped."""
        with self._lock:
            self.add(rank, welcome, link)
            desk, futures = self.desks[rank], []
            desk.theirs = frozenset(welcome.objects)
            known, streams, on_cpu = set(welcome.calls), set(welcome.streams), set(welcome.cpu_calls)
            for id_, name in welcome.names.items():
                if id_ in known - streams:
                    future: CallFuture[Any] = CallFuture(name)
                    ticket = Ticket(Code("", name, ()), [], "", future, rank, on_cpu=id_ in on_cpu, id=id_, at=rank)
                    self._connect(ticket)
                    desk.lane(ticket).underway[id_] = ticket
                    futures.append(future)
            return futures

    def pause(self, rank: int) -> None:
        """The link to a node broke: no calls for it until `resume`."""
        with self._lock:
            if rank in self.desks:
                self.desks[rank].resumed = False

    def resume(self, rank: int, welcome: Welcome) -> None:
        """The link to a node is back: tell it again what it may have missed."""
        with self._lock:
            desk = self.desks.get(rank)
            if desk is None:
                return
            known = set(welcome.calls)
            desk.functions = set(welcome.functions)
            desk.objects = set(welcome.objects)
            desk.resumed = True
            desk.asked_back = desk.strays = 0
            for key in desk.objects - self._objects.keys() - desk.theirs:
                desk.drop_object(key)
            for key in self._objects:
                desk.give_object(key, self._objects[key])
            for lane in desk.lanes:
                lane.recalling = False
                desk.send(self._unknown(desk, lane, known))
            desk.recall_all()
            self._fill(desk)

    def _unknown(self, desk: Desk, lane: Lane, known: Container[int]) -> list[Ticket]:
        """Return the calls of a lane that a node never got, or has forgotten, and that it is to get again."""
        again: list[Ticket] = []
        for ticket in list(lane.underway.values()):
            if ticket.id in known:
                desk.tell_again(ticket)
                continue
            del lane.underway[ticket.id]
            if ticket.stopped:
                self._end_stopped(ticket)
            elif desk.leaving:
                self._lost(ticket, taken_back(desk.rank), begun=False)
            else:
                again.append(ticket)
        return again

    def drain(self, rank: int) -> None:
        """A node's provider takes it back: it gets no more calls, and those it has not begun run elsewhere."""
        with self._lock:
            desk = self.desks.get(rank)
            if desk is None or desk.leaving:
                return
            desk.leaving = True
            for lane in desk.lanes:
                while lane.pinned:
                    self._lost(lane.pinned.popleft(), taken_back(rank), begun=False)
            desk.recall_all()
            self._fill(desk)

    def nodes(self) -> dict[int, str]:
        """The nodes that take calls, by rank, and their addresses.

        Raises:
            PoolClosed: the pool has ended.
        """
        with self._lock:
            if self._closed is not None:
                raise self._too_late("a call was sent to")
            return {rank: self.desks[rank].address for rank in sorted(self._staying())}

    def _staying(self) -> set[int]:
        return {rank for rank, desk in self.desks.items() if not desk.leaving}

    def _end_stopped(self, ticket: Ticket) -> None:
        """A call that was stopped runs nowhere any more."""
        ticket.finish(SkypoolError(f"{ticket.name} was cancelled"))

    def lose(self, rank: int, error: BaseException, others: Sequence[int] = ()) -> None:
        """A node is gone, with the others of its slice: their calls run elsewhere if they may, and fail if not."""
        with self._lock:
            gone = [desk for each in (rank, *others) if (desk := self.desks.pop(each, None))]
            for desk in gone:
                why = error if desk.rank == rank else gone_with(rank, desk.rank, error)
                for ticket in [*desk.underway, *desk.pinned]:
                    lost = why
                    if not isinstance(why, NodeInterrupted):
                        lost = ConnectionLost(f"{ticket.name} was lost with node {desk.rank}: {why}", desk.rank)
                        lost.__cause__ = why
                    self._lost(ticket, lost, begun=desk.has(ticket))
            for other in self.desks.values() if gone else ():
                self._fill(other)

    def _lost(self, ticket: Ticket, error: BaseException, begun: bool) -> None:
        """A call went down with its node or worker, or cannot begin there: it runs elsewhere if it may."""
        interrupted = error if isinstance(error, NodeInterrupted) else None
        why_not = ticket.bound(self._staying(), begun)
        if ticket.stopped:
            self._end_stopped(ticket)
        elif not why_not and (ticket.retries > 0 or interrupted or not begun) and self._closed is None:
            if begun:
                ticket.retries -= interrupted is None
                ticket.attempt += 1
                ticket.id = next(self._ids)  # its old one has ended
                self._on_retry(ticket, error)
            self._requeue(ticket)
        else:
            if interrupted is not None:
                words = f"{ticket.name} was lost: {interrupted}, and {why_not or 'the pool ends'}"
                error = NodeInterrupted(words, interrupted.node)
                error.__cause__ = interrupted
            ticket.finish(error)
            self._on_failed(ticket, error)

    def _requeue(self, ticket: Ticket) -> None:
        ticket.at = -1
        if ticket.node is not None:
            self.desks[ticket.node].lane(ticket).pinned.appendleft(ticket)
        else:
            self._queues[ticket.on_cpu].appendleft(ticket)

    def close(self, error: BaseException) -> None:
        """No more calls; those that have not ended fail with `error`."""
        with self._lock:
            if self._closed is not None:
                return
            self._closed = error
            left = [ticket for queue in self._queues for ticket in queue]
            for desk in self.desks.values():
                left += [*desk.underway, *desk.pinned]
            self.desks.clear()
            for queue in self._queues:
                queue.clear()
        for ticket in left:
            if not ticket.stopped:
                ticket.finish(error)
            else:
                self._end_stopped(ticket)

    @property
    def pressed(self) -> bool:
        """Whether calls wait and no node has room for them."""
        with self._lock:
            return any(self._queues)

    @property
    def unfinished(self) -> int:
        """How many calls have not ended."""
        with self._lock:
            return sum(map(len, self._queues)) + sum(len(d.underway) + len(d.pinned) for d in self.desks.values())

    # --- what comes back -------------------------------------------------------------------------------------

    def arrived(self, rank: int, arrivals: Sequence[Arrival]) -> None:
        """Frames about calls, from one node."""
        ended: Ended = []
        desk = self.desks.get(rank)
        if desk is None:
            return
        try:
            with self._lock:
                if self.desks.get(rank) is not desk:
                    return  # it was given up just now
                for said, buffers in arrivals:
                    if isinstance(said, Outcome):
                        self._on_outcome(desk, said, buffers, ended)
                    elif isinstance(said, Outcomes):
                        self._on_ends(desk, said.ends, ended)
                    elif isinstance(said, Recalled):
                        self._on_recalled(desk, said)
                    elif isinstance(said, (Wanted, Yielded)):
                        self._on_progress(desk, said, buffers)
                self._fill(desk)
            for ticket, end in ended:
                ticket.finish(end)
                if isinstance(end, BaseException) and not ticket.stopped:
                    self._on_failed(ticket, end)
        finally:
            with self._lock:
                for ticket, _ in ended:
                    if ticket.ended:
                        desk.to_ack.append(ticket.id)
                    else:  # Ctrl-C in a caller's thread: it comes again when the link is back
                        desk.lane(ticket).underway[ticket.id] = ticket
                if acks := desk.acks():
                    desk.link.reply(acks)

    def _on_progress(self, desk: Desk, said: Wanted | Yielded, buffers: Sequence[Buffer]) -> None:
        """A call that runs gives items, or wants some.

        Raises:
            ProtocolError: it has no such argument, or is no generator.
        """
        ticket = desk.find(said.id)
        if ticket is None:
            desk.stray()
        elif isinstance(said, Wanted):
            if said.arg >= len(ticket.feeds):
                raise ProtocolError(f"{ticket.name} has no iterator argument {said.arg}")
            self._on_feed(ticket, said.arg, said.n)
        elif isinstance(ticket.outlet, Items):
            ticket.outlet.feed(said.seq, said.single, list(buffers), desk.link.reader)
        else:
            raise ProtocolError(f"{ticket.name} is no generator, and yields")

    def drive(self, ticket: Ticket) -> None:
        """Wait for a call by reading its node's link in this thread, as far as that is possible."""
        desk = self.desks.get(ticket.at)
        if desk is not None:
            desk.link.drive(ticket)

    def _on_ends(self, desk: Desk, ends: Sequence[End], ended: Ended) -> None:
        """Calls that travelled together have ended."""
        count, took, last = 0, 0.0, None
        if ends and desk.find(ends[0][0]) is None:
            desk.stray()
        for id_, ok, seconds, data in ends:
            ticket = desk.find(id_)
            if ticket is None:
                desk.to_ack.append(id_)
                continue
            error = None if ok else self._error(desk, ticket, (data,))
            del desk.lane(ticket).underway[id_]
            count, took, last = count + 1, took + seconds, ticket
            if error is None:
                ended.append((ticket, Returned((data,), desk.link.reader)))
            else:
                self._on_error(desk, ticket, error, ended)
        if last is not None:
            self.done += count
            desk.lane(last).learn(last.code.key, took / count)

    def _on_outcome(self, desk: Desk, said: Outcome, buffers: Sequence[Buffer], ended: Ended) -> None:
        """A call that travelled alone has ended."""
        desk.holds_memory |= said.large
        ticket = desk.find(said.id)
        if ticket is None:
            desk.stray()
            desk.to_ack.append(said.id)  # or the node would keep it
            return
        error = None if said.ok else self._error(desk, ticket, buffers)
        del desk.lane(ticket).underway[said.id]
        self.done += 1
        desk.lane(ticket).learn(ticket.code.key, said.seconds)
        if error is None:
            ended.append((ticket, Returned(buffers, desk.link.reader)))
        else:
            self._on_error(desk, ticket, error, ended)

    def _error(self, desk: Desk, ticket: Ticket, buffers: Sequence[Buffer]) -> BaseException:
        """Return what a call raised. The call is still under way: this may fail.

        Raises:
            ProtocolError: what came is no exception.
        """
        if desk.link.reader is not None:
            return desk.link.reader.error(buffers, ticket.name)
        try:
            return plain_error(codec.load_error(buffers))
        except Exception as e:
            raise ProtocolError(f"the exception of {ticket.name} cannot be read: {type(e).__name__}: {e}") from e

    def _on_error(self, desk: Desk, ticket: Ticket, error: BaseException, ended: Ended) -> None:
        id_ = ticket.id  # it gets another one where it runs again
        if desk.leaving and isinstance(error, WorkerDied) and error.signal in _SHUTDOWN:
            self._lost(ticket, taken_back(desk.rank, error), begun=True)  # its machine shuts down
        elif ticket.retries > 0 and isinstance(error, (WorkerDied, ConnectionLost, *ticket.retry_on)):
            self._lost(ticket, error, begun=True)
        else:
            ended.append((ticket, error))
            return
        desk.to_ack.append(id_)

    def _on_recalled(self, desk: Desk, said: Recalled) -> None:
        desk.gave_back(len(said.calls), said.on_cpu)
        for id_ in said.calls:
            ticket = desk.take(id_)
            if ticket is not None:
                self._lost(ticket, taken_back(desk.rank), begun=False)  # the error is for those bound to that node
        for other in self.desks.values():
            if other is not desk:
                self._fill(other)

    def acknowledge(self, rank: int, output: int = 0) -> None:
        """Send what is still to be acknowledged, when no call carries it along."""
        with self._lock:
            desk = self.desks.get(rank)
            if desk is not None and (desk.to_ack or output > desk.output_seen):
                desk.output_seen = max(desk.output_seen, output)
                desk.link.reply(desk.acks(least=0))
