"""`Outbox`: the send queue of the connection to one node. Any thread may send.

Small frames overtake large values, which are sent in pieces.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from skypool.errors import protocol_violation
from skypool.wire.frames import CHUNK, Buffer, Kind, cut, encode, total_length

_GATHER = 256
"""The most buffers in one write. Systems accept 1024 (IOV_MAX)."""
_TURNS = 16
"""The most writes in one call of `write_more`, so that the pool's event loop gets to its other work."""
_MOST_OWED = 16 << 20
"""The most bytes of answers that may wait until a node reads them. A node that causes more answers is given up."""


class Outbox:
    """A send queue for one socket at a time, from `open` until `close`. Any thread may send.

    Args:
        wake: called in any thread when data waits to be written. The creator of the Outbox must then call `write_more`
            whenever the socket can be written to, until `write_more` returns True.
        broken: called in any thread when writing fails, with the reason as text.
    """

    def __init__(self, wake: Callable[[], object], broken: Callable[[str], object]) -> None:
        self._wake = wake
        self._broken = broken
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._small: deque[Buffer] = deque()
        self._large: deque[Iterator[list[Buffer]]] = deque()
        self._rest: deque[Buffer] = deque()
        self._waiting = False
        self._owed = 0

    @property
    def is_open(self) -> bool:
        """True if there is a socket. While there is none, frames that are sent are dropped silently."""
        return self._socket is not None

    def open(self, connected: socket.socket) -> None:
        """Send over this connected socket from now on. Frames that were sent over an earlier one are not sent again.

        The socket may be blocking on Linux. On systems where `send` ignores MSG_DONTWAIT, it must be non-blocking.
        """
        with self._lock:
            self._socket = connected

    def close(self) -> None:
        """Drop all queued frames, and all that are sent before the next `open`. The socket itself is not closed."""
        with self._lock:
            self._socket = None
            self._waiting = False
            self._owed = 0
            self._small.clear()
            self._large.clear()
            self._rest.clear()

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send small encoded frames without blocking. Drop them silently if there is no socket.

        They are written at once if nothing waits in the queue and there are fewer than 256 buffers. Otherwise they are
        queued, and written before the next piece of a large value. The buffers must not be changed afterwards. If
        writing fails, `broken` is called, and nothing is raised.
        """
        with self._lock:
            if self._socket is None:
                return
            if not self._waiting and len(buffers) < _GATHER:
                buffers = self._write_at_once(self._socket, buffers)
                if not buffers:
                    return
            self._small.extend(buffers)
            self._wait()

    def reply(self, buffers: Sequence[Buffer]) -> None:
        """Send a small frame that answers a request of the node. Like `send`, but count the bytes of answers.

        Raises ProtocolError, after queueing the frame, if the node does not read the answers: more than 16 MiB of them
        were sent since the queue of small frames was last empty.
        """
        self.send(buffers)
        with self._lock:
            if not self._small:
                self._owed = 0
            elif self._owed > _MOST_OWED:
                raise protocol_violation(
                    f"the node sends requests but leaves {self._owed} bytes of answers unread (limit {_MOST_OWED})"
                )
            else:
                self._owed += sum(map(len, buffers))

    def send_large(self, key: int | str, buffers: Sequence[Buffer], then: Sequence[Buffer]) -> None:
        """Queue a large value in pieces of 1 MiB, and after them the frame `then`. Return at once.

        Drop both silently if there is no socket. Large values are sent one after the other, with small frames between
        their pieces. The buffers must not be changed until they are sent.

        Args:
            key: identifies the value in its pieces and in `then`: the id of a call, or a text.
            then: the encoded frame that refers to the value by its key.
        """
        with self._lock:
            if self._socket is not None:
                self._large.append(_pieces(key, buffers, then))
                self._wait()

    def _wait(self) -> None:
        """Have `write_more` called soon: call `wake`, unless data waits already. The caller holds the lock."""
        if not self._waiting:
            self._waiting = True
            self._wake()

    def _write_at_once(self, connected: socket.socket, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """Write without blocking, and return what the socket did not accept. On failure, call `broken`, return ()."""
        try:
            sent = connected.sendmsg(buffers, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return buffers
        except OSError as e:
            self._broken(str(e))
            return ()
        for index, buffer in enumerate(buffers):
            if sent < len(buffer):
                return [memoryview(buffer)[sent:], *buffers[index + 1 :]]
            sent -= len(buffer)
        return ()

    def write_more(self) -> bool:
        """Write as much of the queue as the socket accepts now, in at most 16 writes, without blocking.

        Return False if data is left, so that this method must be called again. If writing failed, call `broken` with
        the reason and return True.
        """
        with self._lock:
            for _ in range(_TURNS):
                if self._socket is None or not self._next():
                    self._waiting = False
                    return True
                try:
                    sent = self._socket.sendmsg(self._rest, (), socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return False
                except OSError as e:
                    self._broken(str(e))
                    return True
                while self._rest and sent >= len(self._rest[0]):
                    sent -= len(self._rest.popleft())
                if sent:
                    self._rest[0] = memoryview(self._rest[0])[sent:]
            return False

    def _next(self) -> bool:
        """Put the data to write next into `_rest`: small frames before pieces. Return False if nothing is left."""
        if not self._rest and self._small:
            self._rest.extend(self._small.popleft() for _ in range(min(_GATHER, len(self._small))))
        while self._large and not self._rest:
            piece = next(self._large[0], None)
            if piece is None:
                self._large.popleft()
            else:
                self._rest.extend(piece)
        return bool(self._rest)


def _pieces(key: int | str, buffers: Sequence[Buffer], then: Sequence[Buffer]) -> Iterator[list[Buffer]]:
    """Yield a BLOB frame for each piece of a large value, and after them the frame `then`, as lists of buffers."""
    # with padding, by which each of the value's buffers begins at a multiple of 64 bytes
    size = total_length([len(b) for b in buffers])
    at = 0
    for piece in cut(buffers, CHUNK):
        length = sum(len(part) for part in piece)
        yield [encode(Kind.BLOB, {"key": key, "at": at, "size": size}, length), *piece]
        at += length
    yield list(then)
