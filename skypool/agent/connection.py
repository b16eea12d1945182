"""Reads and writes frames at the agent's end of a connection to a client, and never blocks."""

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
"""The most buffers that are written with one system call."""


@dataclass(slots=True, eq=False)
class Large:
    """Large value that is being sent to the client in pieces, and the frame that is sent after it.

    Attributes:
        call: the id of the call whose outcome or item the value is.
        key: the key by which the frames of the pieces name the value.
        blob: the storage of the value; None if there is no value, only the frame `then`.
        written: how many bytes of the value can be sent, because the worker has written them.
        then: the frame that is sent after the value and refers to it; None until the worker has sent that frame.
    """

    call: int
    key: int | str
    blob: Blob | None
    written: int
    then: list[Buffer] | None


class Connection:
    """Connection to a client: two file descriptors, through which frames come and go without blocking.

    Small frames are sent before pieces of large values, so small frames need not wait. Frames about the same call stay
    in order: the outcome of a generator call must not arrive before its last item.

    Args:
        source: the file descriptor from which frames are read.
        sink: the file descriptor to which frames are written. It may be `source`. Both are made non-blocking here, and
            closed by `close`.
        watch: `watch(fd, events)` tells the agent's loop which epoll events to wait for; 0 for none.
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
        """Return the frames that have arrived completely, without waiting.

        The frames are views of memory that the next `read` overwrites.

        Raises:
            EOFError: the client is gone.
            OSError: the connection failed.
            ProtocolError: the bytes are not valid frames, or the stream ended inside a frame.
        """
        try:
            n = os.readv(self.source, [self._decoder.space()])
        except BlockingIOError:
            return []
        if n == 0:
            if self._decoder.pending:
                raise ProtocolError(
                    f"the client's connection ended in the middle of a message, after {self._decoder.pending} "
                    "bytes of it; a client that still runs reconnects by itself"
                )
            raise EOFError
        return self._decoder.advance(n)

    def send(self, buffers: list[Buffer], call: int = 0) -> None:
        """Queue a small frame, which a later `flush` writes.

        `call` is the id of the call that the frame is about; 0 if it is about none. The frame is written after the
        large values of the same call that are queued already.
        """
        if call in self._held_up:
            self.send_large(Large(call, "", None, 0, buffers))
        else:
            self._small.extend(buffers)

    def send_large(self, large: Large) -> None:
        """Queue a large value, which later calls of `flush` write in pieces, as far as the worker has written it.

        After the last piece, the frame that refers to the value is written.
        """
        self._large.append(large)
        self._held_up[large.call] += 1

    def abandon(self, large: Large) -> None:
        """Stop sending a large value, if it is being sent, so that its file descriptor can be closed.

        If a piece of it was sent in part, the remaining bytes of that piece are copied, and sent later.
        """
        if large in self._large:
            self._let_go(large)
        for index, part in enumerate(self._rest):
            if isinstance(part, list) and large.blob is not None and part[0] == large.blob.fd:
                self._rest[index] = os.pread(part[0], part[2], part[1])

    def abandon_all(self) -> None:
        """Stop sending large values, and frames that wait for them. The rest of a piece is copied, and sent later."""
        for large in list(self._large):
            self._let_go(large)
        for index, part in enumerate(self._rest):
            if isinstance(part, list):
                self._rest[index] = os.pread(part[0], part[2], part[1])

    def _let_go(self, large: Large) -> None:
        """Remove a large value from the queue, so that small frames of its call no longer wait for it."""
        self._large.remove(large)
        self._offsets.pop(large, None)
        self._held_up[large.call] -= 1
        if not self._held_up[large.call]:
            del self._held_up[large.call]

    def flush(self) -> None:
        """Write as much of the queued frames and large values as the client takes now, without waiting.

        If the connection is full, the loop is asked to report when it has room again. Parts of a large value that the
        worker has not written yet stay queued. Raises OSError if the client is gone, ProtocolError if the file of a
        large value has become shorter.
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
        """Watch the sink for room only if `_full` is True. If it is also the source, always watch it for reading."""
        if self.source == self.sink:
            self._watch(self.sink, select.EPOLLIN | (select.EPOLLOUT if self._full else 0))
        else:
            self._watch(self.sink, select.EPOLLOUT if self._full else 0)

    def _write_small(self) -> None:
        """Write up to `_GATHER` small buffers with one system call. Raises BlockingIOError if there is no room now."""
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
        """Keep what comes after the first `written` bytes of these buffers, to be sent next."""
        for buffer in batch:
            if written >= len(buffer):
                written -= len(buffer)
            else:
                self._rest.append(memoryview(buffer)[written:])
                written = 0

    def _next_piece(self) -> bool:
        """Queue the next piece of the first large value of which more can be sent. Return False if there is none."""
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
        """Write the buffer or piece that is next, or what is left of it. Raises BlockingIOError if there is no room."""
        first = self._rest[0]
        if isinstance(first, list):
            fd, at, length = first
            sent = os.sendfile(self.sink, fd, at, length)
            first[:] = [fd, at + sent, length - sent]
            if sent == length:
                self._rest.popleft()
            elif sent == 0:
                raise ProtocolError(
                    "the file of a stored value on this node became shorter while it was being sent; keep "
                    "other programs from changing files in skypool's folders"
                )
        else:
            sent = os.write(self.sink, first)
            self._rest.popleft()
            if sent < len(first):
                self._rest.appendleft(memoryview(first)[sent:])

    def close(self) -> None:
        """Close the connection's file descriptors, and stop watching them. Queued frames are not sent. Call it once."""
        for fd in {self.source, self.sink}:
            self._watch(fd, 0)
            os.close(fd)
        self._watch = _nothing  # what it was may refer to this connection, which then stays until garbage is collected


def _nothing(fd: int, events: int) -> None:
    """Do nothing. This function takes the place of `watch` in a closed connection."""
