"""Sends a generator's items from a worker to the client, several in a packet if they come fast."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any, Protocol

from skypool.agent.shield import Cancelled, Closed, Shield
from skypool.wire import codec, exceptions
from skypool.wire.frames import INLINE, Buffer, Frame, Kind

_SHORT = 4096
"""The length, in characters or bytes, from which items of type str and bytes are serialized one by one."""
_ATOMS = frozenset({int, float, bool, str, bytes, type(None)})
"""Types of items that are pickled many at a time. Items of other types are serialized one by one."""


class Channel(Protocol):
    """Connection of a worker to the agent, with the three methods of `WorkerChannel` that a `Sender` needs."""

    def send(self, kind: Kind, header: dict[str, Any], buffers: list[Buffer]) -> None: ...
    def receive(self, wanted: Callable[[Frame], bool]) -> tuple[Frame, list[int]]: ...
    def drain(self) -> None: ...


class Sender:
    """Sender of the items of one generator call, from its worker to the agent.

    Args:
        channel: sends packets to the agent, and receives the client's credit.
        call: the id of the call.
        name: the function's name, for messages.
        window: how many bytes of items may be sent before the client takes them. Beyond them, the generator waits.
        shield: keeps a stop of the call out of the code that holds a lock.
        stall: called with the call's id while the generator waits until the client takes items, and with 0 afterwards.
    """

    def __init__(
        self,
        channel: Channel,
        call: int,
        name: str,
        window: int,
        shield: Shield,
        stall: Callable[[int], None] = lambda call: None,
    ) -> None:
        self._stall = stall
        self._shield = shield
        self._channel = channel
        self._call = call
        self._name = name
        self._window = window
        self._ready = threading.Condition()
        self._batch: list[Any] = []
        self._size = self._count = 0
        self._sent: list[tuple[int, int]] = []
        self._underway = 0
        self._closed = False
        self._failure: BaseException | None = None

    def send_all(self, items: Any) -> Any:
        """Send all items of an iterator, and return the generator's return value (None for other iterators).

        A separate thread sends the items, so that the generator can go on. Returns when all items were sent; the client
        may not have taken them yet. Call this method once. A generator is closed at the end in any case.

        Raises:
            TypeError: `items` is neither an iterable nor an asynchronous iterator.
            Exception: the generator raised it, or an item could not be sent.
        """
        iterator = _as_iterator(items)
        thread = threading.Thread(target=self._send_batches, name="skypool-stream", daemon=True)
        with self._shield:
            thread.start()
        self._shield.cancelled = Closed
        try:
            while True:
                try:
                    item = next(iterator)
                except StopIteration as end:
                    return end.value
                self._put(item)
        finally:
            self._shield.cancelled = Cancelled
            if isinstance(iterator, Generator):
                iterator.close()  # if the call is stopped, the generator's cleanup runs now
            with self._shield:
                with self._ready:
                    self._closed = True
                    self._ready.notify()
                thread.join()
            self._channel.drain()
            if self._failure is not None:
                raise self._failure

    def _put(self, item: Any) -> None:
        """Add an item to the next packet, or send it alone if it is large. Waits while the packet or window is full."""
        if type(item) in _ATOMS and (type(item) not in (str, bytes) or len(item) < _SHORT):
            entry = item
            size = 64 + (len(item) if type(item) in (str, bytes) else 0)
        else:
            buffers = exceptions.dump_result(item, f"item {self._count} of {self._name}")
            size = sum(len(b) for b in buffers) + 64
            if len(buffers) > 1 or size > INLINE // 4:
                self._put_large(buffers, size)
                return
            entry = (bytes(buffers[0]),)
        self._wait_for_room(size)
        with self._shield, self._ready:
            self._batch.append(entry)
            self._size += size
            self._count += 1
            if len(self._batch) == 1:
                self._ready.notify()
            while self._size > INLINE // 2 and not self._failure:
                self._ready.wait()

    def _put_large(self, buffers: list[Any], size: int) -> None:
        """Send an item of `size` bytes in a packet of its own, after the earlier items. Waits for room."""
        with self._shield, self._ready:
            while self._batch and not self._failure:
                self._ready.wait()
        self._wait_for_room(size)
        self._count += 1
        self._note(size)
        lens = [len(b) for b in buffers]
        self._channel.send(Kind.YIELD, {"id": self._call, "seq": self._count, "single": 1, "lens": lens}, buffers)

    def _note(self, size: int) -> None:
        """Note that a packet of `size` bytes is sent. The caller must have counted its items in `_count`."""
        self._sent.append((self._count, size))
        self._underway += size

    def _send_batches(self) -> None:
        """Send ready items until the stream is closed and all are sent. Runs in the sending thread."""
        try:
            while True:
                with self._ready:
                    while not self._batch and not self._closed:
                        self._ready.wait()
                    if not self._batch:
                        return
                    batch = self._batch
                    size = self._size
                    count = self._count
                    data = codec.dump_items(batch)
                    self._note(size)
                    self._channel.send(Kind.YIELD, {"id": self._call, "seq": count, "lens": [len(data)]}, [data])
                    self._batch = []
                    self._size = 0
                    self._ready.notify()
        except BaseException as e:  # noqa: BLE001 - `send_all` raises it in the call's thread
            with self._ready:
                self._failure = e
                self._ready.notify()

    def _wait_for_room(self, size: int) -> None:
        """Wait until `size` more bytes fit into the window, or until the client has taken all items that were sent."""
        if self._failure is not None:
            raise self._failure
        while self._underway and self._underway + self._size + size > self._window:
            self._stall(self._call)
            try:
                credit, _ = self._channel.receive(self._is_credit)
            finally:
                self._stall(0)
            with self._shield, self._ready:
                while self._sent and self._sent[0][0] <= credit.header["seq"]:
                    self._underway -= self._sent.pop(0)[1]

    def _is_credit(self, f: Frame) -> bool:
        """Return True if a packet is a CREDIT for this call's stream: it says how many items the client has taken."""
        return f.kind == Kind.CREDIT and f.header["id"] == self._call


def _as_iterator(items: Any) -> Iterator[Any]:
    """Return an iterator over the items of an iterable or of an asynchronous iterator."""
    if isinstance(items, AsyncIterator):
        return _from_async(items)
    return iter(items)


def _from_async(items: AsyncIterator[Any]) -> Iterator[Any]:
    """Yield the items of an asynchronous iterator. An event loop runs in this thread only while an item is awaited."""
    import asyncio

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:  # as for coroutines, in `worker`
        while True:
            try:
                yield runner.run(anext(items))  # type: ignore[arg-type]  # run() accepts an awaitable, too
            except StopAsyncIteration:
                return
