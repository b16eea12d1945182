"""Send queue of the connection to one node: small frames overtake large values, which go in chunks.

Any thread may send.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from skypool.errors import ProtocolError
from skypool.wire.frames import CHUNK, Buffer, Kind, cut, encode, total_length

_GATHER = 256
"""Buffers in one write at most. Systems take 1024 (IOV_MAX)."""
_TURNS = 16
"""Writes in a row at most, so that the engine's thread gets to its other work."""
_MOST_OWED = 16 << 20
"""Bytes of answers that may wait for a node to read them before it may ask for more."""


class Outbox:
    """Frames for one socket, which is lent by `open` and taken back by `close`.

    Args:
        wake: called when something waits: `write_more` is to be called whenever the socket can be written to.
        broken: called with the reason when writing fails.
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
        """Whether there is a socket; what is sent while there is none is dropped."""
        return self._socket is not None

    def open(self, connected: socket.socket) -> None:
        """Send by this non-blocking socket from now on."""
        with self._lock:
            self._socket = connected

    def close(self) -> None:
        """Drop what waits, and what is sent from now on."""
        with self._lock:
            self._socket = None
            self._waiting = False
            self._owed = 0
            self._small.clear()
            self._large.clear()
            self._rest.clear()

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send small frames; at once if nothing waits before them."""
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
        """Send a small frame that the node has asked for.

        Raises:
            ProtocolError: it goes on asking without reading the answers.
        """
        self.send(buffers)
        with self._lock:
            if not self._small:
                self._owed = 0
            elif self._owed > _MOST_OWED:
                raise ProtocolError(f"it asks for more and does not read the {self._owed} bytes of answers that wait")
            else:
                self._owed += sum(map(len, buffers))

    def send_large(self, key: int | str, buffers: Sequence[Buffer], then: Sequence[Buffer]) -> None:
        """Send a large value in pieces, then the frame that refers to it."""
        with self._lock:
            if self._socket is not None:
                self._large.append(_pieces(key, buffers, then))
                self._wait()

    def _wait(self) -> None:
        if not self._waiting:
            self._waiting = True
            self._wake()

    def _write_at_once(self, connected: socket.socket, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """What the socket did not take."""
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
        """Write what waits, as much as the socket takes now; whether nothing is left."""
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
        """Fill `rest`: what is begun goes first, then small frames, then one piece of a large value."""
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
    """The BLOB frames of a value, padded as `wire.pad` does, and then the frame that refers to it."""
    size = total_length([len(b) for b in buffers])
    at = 0
    for piece in cut(buffers, CHUNK):
        length = sum(len(part) for part in piece)
        yield [encode(Kind.BLOB, {"key": key, "at": at, "size": size}, length), *piece]
        at += length
    yield list(then)
