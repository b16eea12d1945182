"""`pool.map`: many calls of one function, with results in order."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from skypool.calls.arguments import payload_of
from skypool.calls.call import ComputeFunction
from skypool.calls.dispatch import Dispatch
from skypool.calls.futures import ResultCell
from skypool.calls.pending import PendingCall

T = TypeVar("T")
_GATHER = 0.001
"""Seconds after which calls are sent that do not fill a frame yet."""


class Map(Generic[T]):
    """Calls of one function whose results are wanted in order.

    Args:
        chunksize: how many travel together; None for as many as suits.
        at_hand: the items need not be waited for, so that a few may be gathered before they are sent.
    """

    def __init__(
        self, dispatch: Dispatch, function: ComputeFunction[..., T], chunksize: int | None, at_hand: bool
    ) -> None:
        self._dispatch = dispatch
        self._function = function
        self._chunksize = chunksize
        self._at_hand = at_hand
        self._sent: deque[PendingCall] = deque()

    def send(self, items: Iterable[tuple[object, ...]]) -> None:
        """Send a call for each item.

        Raises:
            PickleError: here and now, naming what cannot travel. PoolClosed: the pool has ended.
        """
        with contextlib.ExitStack() as stack:
            reads = []
            if self._at_hand:  # this thread is busy and never waits: the engine's would only take turns with it
                reads = [
                    stack.enter_context(node_queue.link.reading())
                    for node_queue in list(self._dispatch.node_queues.values())
                ]
            self._send(items, reads)

    def _send(self, items: Iterable[tuple[object, ...]], reads: Sequence[Callable[[], bool]]) -> None:
        function = self._function
        options = function.options
        node = None if options.node == "all" else options.node
        code = function.code()
        chunk: list[PendingCall] = []
        full = self._chunksize or 1
        began = time.monotonic()
        for args in items:
            payload, feeds = payload_of(function, args, {})
            pending = PendingCall(code, payload, ResultCell(), options, node=node, feeds=feeds, chunk=self._chunksize)
            self._sent.append(pending)
            chunk.append(pending)
            if len(chunk) >= full or (self._chunksize is None and time.monotonic() - began > _GATHER):
                self._dispatch.submit(*chunk)
                chunk = []
                began = time.monotonic()
                if self._chunksize is None and self._at_hand:
                    full = self._dispatch.frame_full(pending)
                for read in reads:
                    read()
        self._dispatch.submit(*chunk)

    def results(self, rest: Iterator[tuple[object, ...]], until: float | None) -> Iterator[T]:
        """The results; for each that is taken, one of the `rest` is sent. When it is closed, what is left is stopped.

        Raises:
            TimeoutError: one was not there at `until`, by the monotonic clock.
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
                    self._dispatch.drive(pending)
                assert isinstance(pending.outlet, ResultCell)
                values = [pending.outlet.result(name, left)]
                sent.popleft()
                del pending  # while the caller holds a result or has dropped it, nothing here keeps it alive
                if more := list(itertools.islice(rest, 1)):
                    self._send(more, ())
                yield values.pop()
        finally:
            for pending in self._sent:
                self._dispatch.stop(pending)
