"""What nodes say about calls that run there: how they end, what they yield, and which items they want."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from skypool.calls.futures import Items, Returned
from skypool.calls.node_queue import NodeQueue
from skypool.calls.pending import PendingCall
from skypool.errors import ConnectionLost, ProtocolError, WorkerDied, taken_back
from skypool.link.inbound import ItemWanted, Outcome, Yielded
from skypool.trust.text import plain_error
from skypool.wire import exceptions
from skypool.wire.frames import Buffer, End

Ended = list[tuple[PendingCall, BaseException | Returned]]
"""Calls that have ended, and how. Whoever waits for them is told when the lock of the dispatch is free."""

_SHUTDOWN = (signal.SIGTERM, signal.SIGKILL)
"""What kills the workers of a machine that shuts down."""


class CallProgress:
    """Takes in what one pool's nodes say about their calls. The dispatch holds its lock meanwhile.

    Args:
        on_lost: told of a call that its node did not end, with the error that it would end with. It may run again.
        on_feed: told that a call wants item `n` of its iterator argument `arg`: (pending, arg, n).

    Attributes:
        done: how many calls have ended.
    """

    def __init__(
        self,
        on_lost: Callable[[PendingCall, BaseException], None],
        on_feed: Callable[[PendingCall, int, int], None],
    ) -> None:
        self._on_lost = on_lost
        self._on_feed = on_feed
        self.done = 0

    def on_items(self, node_queue: NodeQueue, said: ItemWanted | Yielded, buffers: Sequence[Buffer]) -> None:
        """A call that runs gives items, or wants some.

        Raises:
            ProtocolError: it has no such argument, or is no generator.
        """
        pending = node_queue.find(said.id)
        if pending is None:
            node_queue.stray()
        elif isinstance(said, ItemWanted):
            if said.arg >= len(pending.feeds):
                raise ProtocolError(f"{pending.name} has no iterator argument {said.arg}")
            self._on_feed(pending, said.arg, said.n)
        elif isinstance(pending.outlet, Items):
            pending.outlet.feed(said.seq, said.single, list(buffers), node_queue.link.reader)
        else:
            raise ProtocolError(f"{pending.name} is no generator, and yields")

    def on_ends(self, node_queue: NodeQueue, ends: Sequence[End], ended: Ended) -> None:
        """Calls that travelled together have ended."""
        count = 0
        took = 0.0
        last: PendingCall | None = None
        if ends and node_queue.find(ends[0][0]) is None:
            node_queue.stray()
        for id_, ok, seconds, data in ends:
            pending = node_queue.find(id_)
            if pending is None:
                node_queue.to_ack.append(id_)
                continue
            error = None if ok else _error_of(node_queue, pending, (data,))
            del node_queue.lane(pending).underway[id_]
            count += 1
            took += seconds
            last = pending
            if error is None:
                ended.append((pending, Returned((data,), node_queue.link.reader)))
            else:
                self._on_error(node_queue, pending, error, ended)
        if last is not None:
            self.done += count
            node_queue.lane(last).learn(last.code.key, took / count)

    def on_outcome(self, node_queue: NodeQueue, said: Outcome, buffers: Sequence[Buffer], ended: Ended) -> None:
        """A call that travelled alone has ended."""
        node_queue.holds_memory |= said.large
        pending = node_queue.find(said.id)
        if pending is None:
            node_queue.stray()
            node_queue.to_ack.append(said.id)  # or the node would keep it
            return
        error = None if said.ok else _error_of(node_queue, pending, buffers)
        del node_queue.lane(pending).underway[said.id]
        self.done += 1
        node_queue.lane(pending).learn(pending.code.key, said.seconds)
        if error is None:
            ended.append((pending, Returned(buffers, node_queue.link.reader)))
        else:
            self._on_error(node_queue, pending, error, ended)

    def _on_error(self, node_queue: NodeQueue, pending: PendingCall, error: BaseException, ended: Ended) -> None:
        """A call raised, or its worker died: it ends, unless it is to run again."""
        id_ = pending.id  # it gets another one where it runs again
        if node_queue.leaving and isinstance(error, WorkerDied) and error.signal in _SHUTDOWN:
            self._on_lost(pending, taken_back(node_queue.node, error))  # its machine shuts down
        elif pending.retries > 0 and isinstance(error, (WorkerDied, ConnectionLost, *pending.options.retry_on)):
            self._on_lost(pending, error)
        else:
            ended.append((pending, error))
            return
        node_queue.to_ack.append(id_)


def _error_of(node_queue: NodeQueue, pending: PendingCall, buffers: Sequence[Buffer]) -> BaseException:
    """Return what a call raised. The call is still under way: this may fail.

    Raises:
        ProtocolError: what came is no exception.
    """
    if node_queue.link.reader is not None:
        return node_queue.link.reader.error(buffers, pending.name)
    try:
        return plain_error(exceptions.load_error(buffers))
    except Exception as e:
        raise ProtocolError(f"the exception of {pending.name} cannot be read: {type(e).__name__}: {e}") from e
