"""`CallProgress`: handles messages of nodes about running calls: results, yielded items, and requests for items.

Items are what a generator yields, or what an iterator argument gives.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from skypool.calls.futures import Items, Returned
from skypool.calls.node_queue import NodeQueue, frame_full
from skypool.calls.pending_calls import PendingCall
from skypool.calls.tally import CallTally, text_of_error
from skypool.errors import ConnectionLost, SkypoolError, WorkerDied, protocol_violation, taken_back
from skypool.link.agent_messages import ItemWanted, Outcome, Outcomes, Yielded
from skypool.link.inbox import Arrival
from skypool.text import plain_error
from skypool.wire import exceptions
from skypool.wire.frames import Buffer, End

Ended = list[tuple[PendingCall, BaseException | Returned]]
"""Calls that have ended, each as (call, its value or exception). Their callers are woken later, without the lock."""


class Failure(NamedTuple):
    """An exception of a call, and facts about it.

    To find out these facts may run code of the user, so it is done without the lock.

    Attributes:
        error: the exception.
        text: the exception's type and text, for records.
        is_retried: True if the call may run again after this exception, provided that a retry is left.
    """

    error: BaseException
    text: str
    is_retried: bool


Errors = Mapping[int, Failure]
"""The exceptions of calls that raised, by the calls' ids."""

_SHUTDOWN = (signal.SIGTERM, signal.SIGKILL)
"""The signals that end worker processes when their machine shuts down."""


class CallProgress:
    """A handler of messages from nodes about running calls, for all nodes of one pool.

    The dispatch holds its own lock while it calls these methods. They raise ProtocolError if a node has sent more than
    10,000 messages about calls that it does not run.

    Args:
        on_lost: called as (pending, error, text) for a call that failed with `error` and may run again. It either
            queues the call again or ends the call with the error, whose text for records is `text`.
        on_feed: called as (pending, arg, n) when a call asks for item `n` (from 1) of its iterator argument number
            `arg` (from 0).

    Attributes:
        done: the number of calls whose result has arrived. A call that runs again counts again.
        paces: the recent time of one call of a function on any node, in seconds, by the function's key.
    """

    def __init__(
        self,
        on_lost: Callable[[PendingCall, BaseException, str], None],
        on_feed: Callable[[PendingCall, int, int], None],
        tally: CallTally,
    ) -> None:
        self._on_lost = on_lost
        self._tally = tally
        self._on_feed = on_feed
        self.done = 0
        self.paces: dict[str, float] = {}

    def frame_full(self, pending: PendingCall) -> int:
        """Return how many calls like this one may share a frame; 1 if no call of its function has ended yet."""
        return frame_full(pending, self.paces.get(pending.code.key))

    def on_items(self, node_queue: NodeQueue, said: ItemWanted | Yielded, buffers: Sequence[Buffer]) -> None:
        """Handle a message with items of a generator (`buffers`), or a request for an item of an iterator argument.

        A message about a call that the node does not run is counted and otherwise ignored. Raises ProtocolError if it
        does not fit the call, or if far more items wait to be taken than the call's `window`.
        """
        pending = node_queue.find(said.id)
        if pending is None:
            node_queue.stray(said.id)
        elif isinstance(said, ItemWanted) and not pending.code.buffers:
            node_queue.send_item(said.id, *_gone_iterator(pending, said))
        elif isinstance(said, ItemWanted):
            if said.arg >= len(pending.feeds):
                raise protocol_violation(
                    f"the node asks for an item of iterator argument {said.arg} of {pending.name}, but that call has "
                    f"{len(pending.feeds)} iterator arguments, numbered from 0"
                )
            self._on_feed(pending, said.arg, said.n)
        elif isinstance(pending.outlet, Items):
            window = pending.options.window
            pending.outlet.feed(said.seq, said.single, list(buffers), node_queue.link.reader, window)
        else:
            raise protocol_violation(f"the node sent an item of {pending.name}, which is not a generator function")

    def on_ends(self, node_queue: NodeQueue, ends: Sequence[End], ended: Ended, errors: Errors) -> None:
        """Handle the results of calls that shared a frame.

        A call that raised and may run again is passed to `on_lost`. The average run time of the calls updates the
        averages of their node. A result of a call that the node does not run is acknowledged and otherwise ignored.

        Args:
            ends: the results, each as (id, ok, seconds, encoded value or exception).
            ended: each call that has ended and does not run again is added here, with its value or exception.
            errors: the exceptions of the calls that raised, as `errors_in` returns them.
        """
        count = 0
        took = 0.0
        last: PendingCall | None = None
        now = time.time()
        if ends and node_queue.find(ends[0][0]) is None:
            node_queue.stray(ends[0][0])
        underway = node_queue.lanes[0].underway
        for id_, ok, seconds, data in ends:
            pending = underway.pop(id_, None) or node_queue.take(id_)
            if pending is None:
                node_queue.to_ack.append(id_)
                continue
            failure = None if ok else errors[id_]
            count += 1
            took += seconds
            last = pending
            if failure is None:
                self._tally.returned(pending, node_queue.node, seconds, now)
                pending.settled = True
                ended.append((pending, Returned((data,), node_queue.link.reader)))
            else:
                self._on_error(node_queue, pending, failure, seconds, ended)
        if last is not None:
            self.done += count
            node_queue.lane(last).learn(last.code.key, took / count, self.paces)

    def on_outcome(
        self, node_queue: NodeQueue, said: Outcome, buffers: Sequence[Buffer], ended: Ended, errors: Errors
    ) -> None:
        """Handle the result of one call. If it raised and may run again, pass it to `on_lost`.

        A result of a call that the node does not run is acknowledged and otherwise ignored.

        Args:
            said: the message of the node. `buffers` has the encoded value or exception.
            ended: if the call does not run again, it is added here with its value or exception.
            errors: the exceptions of the calls that raised, as `errors_in` returns them.
        """
        node_queue.holds_memory |= said.large
        pending = node_queue.find(said.id)
        if pending is None:
            node_queue.stray(said.id)
            node_queue.to_ack.append(said.id)  # otherwise the node would keep the result
            return
        failure = None if said.ok else errors[said.id]
        lane = node_queue.lane(pending)
        del lane.underway[said.id]
        self.done += 1
        lane.learn(pending.code.key, said.seconds, self.paces)
        if failure is None:
            self._tally.returned(pending, node_queue.node, said.seconds, time.time())
            pending.settled = True
            ended.append((pending, Returned(buffers, node_queue.link.reader)))
        else:
            self._on_error(node_queue, pending, failure, said.seconds, ended)

    def _on_error(
        self, node_queue: NodeQueue, pending: PendingCall, failure: Failure, seconds: float, ended: Ended
    ) -> None:
        """Handle a call that raised or whose process died: pass it to `on_lost` if it may rerun, else to `ended`."""
        error = failure.error
        id_ = pending.id  # a call that runs again gets a new id
        is_taken = node_queue.leaving and not node_queue.retired
        if is_taken and isinstance(error, WorkerDied) and getattr(error, "signal", None) in _SHUTDOWN:
            taken = taken_back(node_queue.node, error)  # its machine shuts down, so no retry is used up
            self._on_lost(pending, taken, text_of_error(taken))
        elif pending.retries > 0 and failure.is_retried:
            self._on_lost(pending, error, failure.text)
        else:
            self._tally.failed(pending, node_queue.node, seconds, failure.text)
            pending.settled = True
            ended.append((pending, error))
            return
        node_queue.to_ack.append(id_)


def _gone_iterator(pending: PendingCall, said: ItemWanted) -> tuple[dict[str, object], list[Buffer]]:
    """Return (header, body) of a frame with an error: the iterator asked for is gone with the former client."""
    error = SkypoolError(
        f"an iterator argument of {pending.name} was in the process that sent the call, and is gone with it: another "
        "process has taken the pool over"
    )
    return {"arg": said.arg, "n": said.n, "end": True, "error": True}, exceptions.dump_error(error)


def errors_in(node_queue: NodeQueue, arrivals: Sequence[Arrival]) -> Errors:
    """Return the exceptions in messages about calls that raised, by the ids of these calls. This takes no lock.

    Reading an exception runs code of the user, such as the constructor of its class, which may take long or block.
    Making its text, and comparing its class with `retry_on`, may run such code, too. Messages about calls that the node
    does not run are left out. Raises ProtocolError if a trusted node sent something that is not a readable exception.
    """
    errors: dict[int, Failure] = {}
    for said, buffers in arrivals:
        if isinstance(said, Outcome):
            if not said.ok and (pending := node_queue.find(said.id)) is not None:
                errors[said.id] = _failure(node_queue, pending, buffers)
        elif isinstance(said, Outcomes):
            for id_, ok, _, data in said.ends:
                if not ok and (pending := node_queue.find(id_)) is not None:
                    errors[id_] = _failure(node_queue, pending, (data,))
    return errors


def _failure(node_queue: NodeQueue, pending: PendingCall, buffers: Sequence[Buffer]) -> Failure:
    error = _error_of(node_queue, pending, buffers)
    is_retried = isinstance(error, (WorkerDied, ConnectionLost, *pending.options.retry_on))
    return Failure(error, text_of_error(error), is_retried)


def _error_of(node_queue: NodeQueue, pending: PendingCall, buffers: Sequence[Buffer]) -> BaseException:
    """Return (do not raise) the exception of a call; an UntrustedResult if an untrusted node's cannot be read."""
    if node_queue.link.reader is not None:
        return node_queue.link.reader.error(buffers, pending.name)
    try:
        return plain_error(exceptions.load_error(buffers))
    except Exception as e:
        raise protocol_violation(
            f"the node sent an exception of {pending.name} that cannot be read: {type(e).__name__}: {e}"
        ) from e
