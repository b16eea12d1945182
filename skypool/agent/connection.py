"""The agent's end of the connection: reads and writes frames, and never blocks."""

from __future__ import annotations

import os
import select
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from skypool.agent.value_storage import Blob
from skypool.errors import ProtocolError
from skypool.wire.frames import CHUNK, Buffer, Decoder, Frame, Kind, encode

_GATHER = 256
"""How many buffers are written with one call of the system."""


@dataclass(slots=True, eq=False)
class Large:
    """What is sent behind a large value, and that value, which a worker may still be writing.

    Attributes:
        key: names the value's pieces; blob: None if there is only `then`.
        written: how much of it can be sent; then: the frame that refers to it, None while it is not there yet.
    """

    call: int
    key: int | str
    blob: Blob | None
    written: int
    then: list[Buffer] | None


class Connection:
    """Two file descriptors of a client: its frames in, ours out. Never blocks.

    Small frames go before pieces of large values, so that nobody waits behind a gigabyte. But what is sent about one
    call arrives in order: its end must not come before its last item.

    Args:
        source, sink: non-blocking; owned by this object from here on.
        watch: watch(fd, events) tells the loop what to wait for.
    """

    def __init__(self, source: int, sink: int, watch: Callable[[int, int], None]) -> None:
        self.source = source
        self.sink = sink
        self._watch = watch
        os.set_blocking(source, False)
        os.set_blocking(sink, False)
        self._decoder = Decoder()
        self._small: deque[Buffer] = deque()
        self._large: deque[Large] = deque()
        self._offsets: dict[Large, int] = {}
        self._held_up: Counter[int] = Counter()
        self._rest: deque[Buffer | list[int]] = deque()
        self._full = False
        watch(source, select.EPOLLIN)

    def read(self) -> list[Frame]:
        """The frames that have arrived.

        Raises:
            EOFError: the client is gone.
            ProtocolError: what arrived is no frame of ours.
        """
        try:
            n = os.readv(self.source, [self._decoder.space()])
        except BlockingIOError:
            return []
        if n == 0:
            if self._decoder.pending:
                raise ProtocolError(f"the stream ended {self._decoder.pending} bytes into a frame")
            raise EOFError
        return self._decoder.advance(n)

    def send(self, buffers: list[Buffer], call: int = 0) -> None:
        """Send a small frame; one about a call goes behind the large values of that call."""
        if call in self._held_up:
            self.send_large(Large(call, "", None, 0, buffers))
        else:
            self._small.extend(buffers)

    def send_large(self, large: Large) -> None:
        """Send a large value of a call in pieces as far as it is written, then the frame that refers to it."""
        self._large.append(large)
        self._held_up[large.call] += 1

    def abandon(self, large: Large) -> None:
        """Send no more of a value that will never be whole; a piece that is begun is sent to its end."""
        if large in self._large:
            self._let_go(large)
        for index, part in enumerate(self._rest):
            if isinstance(part, list) and large.blob is not None and part[0] == large.blob.fd:
                self._rest[index] = os.pread(part[0], part[2], part[1])

    def _let_go(self, large: Large) -> None:
        self._large.remove(large)
        self._offsets.pop(large, None)
        self._held_up[large.call] -= 1
        if not self._held_up[large.call]:
            del self._held_up[large.call]

    def flush(self) -> None:
        """Write as much as the client takes now; the rest when `watch` says so.

        Raises:
            OSError: the client is gone.
        """
        try:
            while self._rest or self._small or self._large:
                if self._rest:
                    self._write_rest()
                elif self._small:
                    self._write_small()
                elif not self._next_piece():
                    break
        except BlockingIOError:
            if not self._full:
                self._full = True
                self._watch_sink()
            return
        if self._full:
            self._full = False
            self._watch_sink()

    def _watch_sink(self) -> None:
        if self.source == self.sink:
            self._watch(self.sink, select.EPOLLIN | (select.EPOLLOUT if self._full else 0))
        else:
            self._watch(self.sink, select.EPOLLOUT if self._full else 0)

    def _write_small(self) -> None:
        if len(self._small) == 1:
            self._rest.append(self._small.popleft())
            self._write_rest()
            return
        batch = [self._small.popleft() for _ in range(min(len(self._small), _GATHER))]
        size = sum(len(b) for b in batch)
        try:
            written = os.writev(self.sink, batch)
        except BlockingIOError:
            self._small.extendleft(reversed(batch))
            raise
        if written < size:
            self._keep_rest(batch, written)

    def _keep_rest(self, batch: list[Buffer], written: int) -> None:
        for buffer in batch:
            if written >= len(buffer):
                written -= len(buffer)
            else:
                self._rest.append(memoryview(buffer)[written:])
                written = 0

    def _next_piece(self) -> bool:
        """Cut the next piece of the first large value of which there is one; when it was the last, its frame follows.

        A value that is still being written is the last of its call, so nothing of that call passes it.
        """
        for large in self._large:
            blob = large.blob
            offset = self._offsets.get(large, 0)
            if blob is not None and offset < large.written:
                length = min(CHUNK, large.written - offset)
                self._rest.append(encode(Kind.BLOB, {"key": large.key, "at": offset, "size": blob.size}, length))
                self._rest.append([blob.fd, offset, length])
                offset = self._offsets[large] = offset + length
            elif large.then is None:
                continue
            if large.then is not None and (blob is None or offset == blob.size):
                self._rest.extend(large.then)
                self._let_go(large)
            return True
        return False

    def _write_rest(self) -> None:
        first = self._rest[0]
        if isinstance(first, list):
            fd, at, length = first
            sent = os.sendfile(self.sink, fd, at, length)
            first[:] = [fd, at + sent, length - sent]
            if sent == length:
                self._rest.popleft()
            elif sent == 0:
                raise ProtocolError("a spooled value is shorter than it was")
        else:
            sent = os.write(self.sink, first)
            self._rest.popleft()
            if sent < len(first):
                self._rest.appendleft(memoryview(first)[sent:])

    def close(self) -> None:
        """Give the client's file descriptors up."""
        for fd in {self.source, self.sink}:
            self._watch(fd, 0)
            os.close(fd)
