"""Reads and writes frames (messages) at the agent's end of a connection to a client, and never blocks.

The agent is the main process of a node, and the client is the user's process.
"""

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
"""The number of buffers that are written with one system call."""


@dataclass(slots=True, eq=False)
class Large:
    """A large value that is being sent to the client in pieces, and the frame (message) that is sent after it.

    A worker process may still be writing the value.

    Attributes:
        call: the id of the call that the value belongs to.
        key: the key by which the frames of the pieces name the value.
        blob: the storage of the value; None if there is no value, only the frame `then`.
        written: how many bytes of the value can be sent, because the worker has written them.
        then: the frame that is sent after the value and refers to it; None until that frame is known.
    """

    call: int
    key: int | str
    blob: Blob | None
    written: int
    then: list[Buffer] | None


class Connection:
    """A connection to a client: two file descriptors, through which frames (messages) come and go without blocking.

    Small frames are sent before pieces of large values, so small frames need not wait. Frames about the same call stay
    in order: the outcome (result or error) of a generator call must not arrive before its last item.

    Args:
        source: the file descriptor to read from. It is made non-blocking, and `close` closes it.
        sink: the file descriptor to write to; may be the same as `source`. It is made non-blocking, and `close` closes
            it, too.
        watch: `watch(fd, events)` tells the agent's loop which epoll events to wait for.

    Attributes:
        source: the argument `source`.
        sink: the argument `sink`.
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
        """Return the frames (messages) that have arrived completely, without waiting. The list may be empty.

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
        """Queue a small frame (message) for sending. A later `flush` writes the frame.

        If large values of the same call are queued, the frame is sent after these.

        Args:
            buffers: the frame.
            call: the id of the call that the frame is about; 0 if it is about no call.
        """
        if call in self._held_up:
            self.send_large(Large(call, "", None, 0, buffers))
        else:
            self._small.extend(buffers)

    def send_large(self, large: Large) -> None:
        """Queue a large value for sending. A later `flush` writes the value.

        The value is sent in pieces, as far as the worker process has filled it. After the last piece comes the frame
        (message) that refers to it.
        """
        self._large.append(large)
        self._held_up[large.call] += 1

    def abandon(self, large: Large) -> None:
        """Stop sending a large value, so that its file descriptor can be closed.

        If a piece is already partly sent, the rest of that piece is copied and still sent later. Does nothing if the
        value is not being sent.
        """
        if large in self._large:
            self._let_go(large)
        for index, part in enumerate(self._rest):
            if isinstance(part, list) and large.blob is not None and part[0] == large.blob.fd:
                self._rest[index] = os.pread(part[0], part[2], part[1])

    def _let_go(self, large: Large) -> None:
        """Remove a large value from the queue of values to send.

        If the value's call has no other large value in the queue, later small frames (messages) about the call are sent
        without waiting.

        Raises:
            ValueError: the value is not in the queue.
        """
        self._large.remove(large)
        self._offsets.pop(large, None)
        self._held_up[large.call] -= 1
        if not self._held_up[large.call]:
            del self._held_up[large.call]

    def flush(self) -> None:
        """Write as much of the queued frames (messages) and large values as the client takes now, without waiting.

        If the connection is full, the agent's loop is asked to report when it has room again. Parts of a large value
        that the worker process has not written yet stay queued, too.

        Raises:
            OSError: the client is gone.
            ProtocolError: the file of a large value has become shorter.
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
        """Have the agent's loop watch the sink (where bytes are written) for room if `_full` is True, else stop that.

        If source and sink are the same file descriptor, it is watched for reading in both cases.
        """
        if self.source == self.sink:
            self._watch(self.sink, select.EPOLLIN | (select.EPOLLOUT if self._full else 0))
        else:
            self._watch(self.sink, select.EPOLLOUT if self._full else 0)

    def _write_small(self) -> None:
        """Write up to `_GATHER` (256) buffers of small frames (messages) with one system call.

        If only a part is written, the rest is kept to be sent next.

        Raises:
            BlockingIOError: the connection accepts no bytes now. The buffers stay queued.
            OSError: the client is gone.
        """
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
        """Keep the part of a list of buffers that was not written, to be sent next. The list is not changed.

        Args:
            batch: the buffers, in the order in which they are written.
            written: how many bytes of them were written.
        """
        for buffer in batch:
            if written >= len(buffer):
                written -= len(buffer)
            else:
                self._rest.append(memoryview(buffer)[written:])
                written = 0

    def _next_piece(self) -> bool:
        """Queue the next piece of the first large value that has bytes ready. Return False if none has, else True.

        A piece has at most `CHUNK` (1 Mi) bytes. The frame (message) that refers to the value is queued after its last
        piece. A value whose next bytes are not written yet is skipped.
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
        """Continue with the first buffer, or piece of a large value, that was not written completely.

        One system call is made. Bytes that it does not write stay first in the queue.

        Raises:
            BlockingIOError: the connection accepts no more bytes now.
            OSError: the client is gone.
            ProtocolError: the file of a large value has become shorter.
        """
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
        """Close the file descriptors of the connection, and stop watching them. Queued frames (messages) are not sent.

        Call it once.
        """
        for fd in {self.source, self.sink}:
            self._watch(fd, 0)
            os.close(fd)
        self._watch = _nothing  # what it was may refer to this connection, which then stays until garbage is collected


def _nothing(fd: int, events: int) -> None:
    """Do nothing."""
