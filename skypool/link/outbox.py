"""`Outbox`: the send queue of the connection to one node. Small frames overtake large values, which are sent in pieces.

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
"""The most buffers in one write. Systems accept 1024 (IOV_MAX)."""
_TURNS = 16
"""The most writes in a row, so that the engine's thread gets to its other work."""
_MOST_OWED = 16 << 20
"""The most bytes of answers that may wait for a node to read them. A node that asks for more is refused."""


class Outbox:
    """A send queue for one socket at a time, from `open` until `close`. Any thread may send.

    Args:
        wake: called when something waits to be written. The owner must then call `write_more` whenever the socket can
            be written to, until that returns True. `wake` may be called in any thread.
        broken: called with the reason when writing fails. It may be called in any thread.
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
        """True if there is a socket. Frames that are sent while there is none are dropped."""
        return self._socket is not None

    def open(self, connected: socket.socket) -> None:
        """Send over this connected socket from now on.

        On Linux the socket may be blocking. On systems where MSG_DONTWAIT does not work for `send`, it must not be.
        """
        with self._lock:
            self._socket = connected

    def close(self) -> None:
        """Drop all queued frames, and drop frames that are sent before the next `open`. The socket is not closed."""
        with self._lock:
            self._socket = None
            self._waiting = False
            self._owed = 0
            self._small.clear()
            self._large.clear()
            self._rest.clear()

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send small frames: at once if the queue is empty, otherwise before the next piece of a large value.

        Args:
            buffers: the encoded frames. They must not be changed afterwards.
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
        """Send a small frame that answers a request of the node.

        Raises:
            ProtocolError: more than 16 MiB of such answers wait, because the node does not read them.
        """
        self.send(buffers)
        with self._lock:
            if not self._small:
                self._owed = 0
            elif self._owed > _MOST_OWED:
                raise ProtocolError(
                    f"the node sends requests but leaves {self._owed} bytes of answers unread (limit "
                    f"{_MOST_OWED}); giving up this node. Use the same version of skypool on client and node; "
                    "if you do, report this bug"
                )
            else:
                self._owed += sum(map(len, buffers))

    def send_large(self, key: int | str, buffers: Sequence[Buffer], then: Sequence[Buffer]) -> None:
        """Send a large value in pieces of 1 MiB, and then the frame that refers to it.

        Args:
            key: names the value in its pieces and in that frame.
            buffers: the value.
            then: the encoded frame that refers to the value.
        """
        with self._lock:
            if self._socket is not None:
                self._large.append(_pieces(key, buffers, then))
                self._wait()

    def _wait(self) -> None:
        """Ask the owner to call `write_more`, unless it was asked already."""
        if not self._waiting:
            self._waiting = True
            self._wake()

    def _write_at_once(self, connected: socket.socket, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """Write to the socket without blocking, and return the buffers that it did not accept.

        If writing fails, report that and return ().
        """
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
        """Write as much of the queue as the socket accepts now, in at most 16 writes.

        Returns:
            True if nothing is left or writing failed, False if the owner must call this again.
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
        """Choose what is written next, and return False if nothing is left.

        The rest of the last write comes first, then small frames, then one piece of a large value.
        """
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
    """Yield a BLOB frame for each piece of a value, and then the frame that refers to the value.

    The buffers are padded as `frames.pad` does.
    """
    size = total_length([len(b) for b in buffers])
    at = 0
    for piece in cut(buffers, CHUNK):
        length = sum(len(part) for part in piece)
        yield [encode(Kind.BLOB, {"key": key, "at": at, "size": size}, length), *piece]
        at += length
    yield list(then)
