"""`pool.map`: runs many calls of one function at the same time, and yields their results in order."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from skypool.calls.arguments import payload_of
from skypool.calls.call import ComputeFunction
from skypool.calls.dispatch import Dispatch
from skypool.calls.futures import CallFuture, ResultCell, cancel_all
from skypool.calls.pending_calls import Packed, PendingCall
from skypool.link.direct_reading import reading

T = TypeVar("T")
_GATHER = 0.001
"""Seconds after which calls that were collected for a frame are sent, even if the frame is not full."""


class Map(Generic[T]):
    """A sender of the calls of one `pool.map`, which yields their results in order.

    Args:
        nodes: the nodes that may run the calls: the number of one, a tuple of several, or None for any node.
        chunksize: the number of calls that are sent together. If None, it depends on how long the calls take.
        at_hand: True if the items can be read without blocking, as from a list. If False and `chunksize` is None, each
            call is sent alone.
    """

    def __init__(
        self,
        dispatch: Dispatch,
        function: ComputeFunction[..., T],
        nodes: int | tuple[int, ...] | None,
        chunksize: int | None,
        at_hand: bool,
    ) -> None:
        self._dispatch = dispatch
        self._function = function
        self._nodes = nodes
        self._chunksize = chunksize
        self._at_hand = at_hand
        self._sent: deque[PendingCall] = deque()
        self._has_begun = False

    def send(self, items: Iterable[tuple[object, ...]]) -> None:
        """Send a call for each item, a tuple of its arguments, and return when all are sent.

        This method does not wait for results, but it blocks while the iterable of items blocks.

        Raises:
            PickleError: the function or an argument cannot be pickled. The message names the value.
            PoolClosed: the pool has ended.
            UsageError: the function's option `node` names a node that the pool does not have.
        """
        if not self._at_hand:
            self._send(items)
            return
        # this thread never waits, so it also reads the answers, instead of the engine's thread
        with reading([each.link for each in list(self._dispatch.node_queues.values())]) as read:
            self._send(items, read)

    def _send(self, items: Iterable[tuple[object, ...]], read: Callable[[], None] | None = None) -> None:
        """Send a call for each item, in groups. Call `read` after each group: it handles messages, without waiting."""
        function = self._function
        options = function.options
        node = self._nodes
        code = function.code()
        chunk: list[PendingCall] = []
        is_timed = self._chunksize is None
        full = self._chunksize or 1
        begins = self._at_hand and is_timed and not self._has_begun
        self._has_begun = True
        first = 0  # how many calls are sent first, one to each idle node
        began = time.monotonic()
        for args in items:
            payload, feeds = payload_of(function, args, {})
            pending = PendingCall(code, payload, ResultCell(), options, node=node, feeds=feeds, chunk=self._chunksize)
            if begins:
                begins = False
                first = self._dispatch.placement.idle_lanes(pending)
            self._sent.append(pending)
            chunk.append(pending)
            if first:
                if len(chunk) == first:
                    self._dispatch.submit(*chunk, spread=True)
                    first, chunk = 0, []
                continue
            # without a `chunksize`, a group is sent when it fills a frame, or 1 ms after the previous group
            if len(chunk) >= full or (is_timed and time.monotonic() - began > _GATHER):
                self._dispatch.submit(*chunk)
                chunk = []
                began = time.monotonic()
                if is_timed and self._at_hand:
                    full = self._dispatch.progress.frame_full(pending)
                if read is not None:
                    read()
        if first:
            self._dispatch.submit(*chunk, spread=True)
        else:
            self._dispatch.submit(*chunk)

    def results(self, rest: Iterator[tuple[object, ...]], until: float | None) -> Iterator[T]:
        """Yield the results in order, waiting for each.

        For each result that is taken, send a call for the next item of `rest`. The exception of a call that failed is
        raised when its turn comes. When the iterator is closed or raises, the remaining calls are stopped. Raises
        TimeoutError if a result has not arrived at `until`, a time of `time.monotonic()`; None for no limit.
        """
        sent = self._sent
        name = self._function.name
        left: float | None = None
        try:
            while sent:
                pending = sent[0]
                if until is not None:
                    left = until - time.monotonic()
                elif not pending.ended:
                    self._dispatch.roster.drive(pending)
                assert isinstance(pending.outlet, ResultCell)
                values = [pending.outlet.result(name, left)]
                sent.popleft()
                del pending  # while the caller holds a result or has dropped it, nothing here keeps it alive
                if more := list(itertools.islice(rest, 1)):
                    self._send(more)
                yield values.pop()
        finally:
            for pending in self._sent:
                self._dispatch.stop(pending)


def map_of_gangs(
    send: Callable[[Packed[T]], CallFuture[T]], calls: Iterator[Packed[T]], buffersize: int | None, until: float | None
) -> Iterator[T]:
    """Send calls that run as gangs, and return an iterator of their results in order.

    The calls are sent before this returns, but at most `buffersize` before their results are taken (None: all). The
    iterator raises TimeoutError if a result has not arrived at `until`, a time of `time.monotonic()`; None for no
    limit. When it is closed or raises, the remaining calls are cancelled.
    """
    sent = deque(send(call) for call in itertools.islice(calls, buffersize))

    def results() -> Iterator[T]:
        """Yield the results in order, and send a further call for each result that is taken."""
        try:
            while sent:
                left = None if until is None else max(0.0, until - time.monotonic())
                value = sent[0].result(left)
                sent.popleft()
                sent.extend(send(call) for call in itertools.islice(calls, 1))
                yield value
        finally:
            cancel_all(sent)

    return results()
