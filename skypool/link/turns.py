"""`Turns`: decides which thread reads a connection: the engine's thread, or a thread that waits for a result.

The engine's thread runs the pool's event loop. A thread that waits for a result reads the connection itself, which is
faster than being woken by the engine. Meanwhile data on the connection must not wake the engine. On Linux, one `epoll`
call ensures that. On other systems, such as macOS, `PollTurns` does it with functions that every Unix has.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Callable
from typing import Protocol

WAIT = 0.1
"""The most seconds that a caller's `receive` waits, so that it notices soon if its wait is over."""


class Turns(Protocol):
    """A protocol by which the engine's thread and callers' threads take turns at reading one connection.

    The `Inbox` that owns the connection has a lock. A thread must hold that lock while it reads.
    """

    def watch(self) -> None:
        """Call the engine's callback from now on when there is something to read. Call it in the engine's thread."""

    def unwatch(self) -> None:
        """Stop calling the callback for good, because the connection will be closed. Call it in the engine's thread."""

    def take(self) -> None:
        """Keep incoming data from waking the engine from now on. A caller's thread calls this when it has the lock."""

    def give_back(self) -> None:
        """Wake the engine again when data arrives. The same thread calls this before it releases the lock."""

    def stand_aside(self) -> None:
        """Ignore incoming data until `come_back`. The engine calls this if it was woken while a caller reads."""

    def come_back(self) -> None:
        """Let the engine read again if it has called `stand_aside`.

        A caller's thread calls this after it has read and released the lock.
        """

    def receive(self, space: memoryview, wait: bool) -> int:
        """Read once from the connection. The calling thread must hold the lock.

        Args:
            space: the memory to read into.
            wait: True waits up to `WAIT` seconds for data.

        Returns:
            the number of bytes that were read; 0 if the other end has closed the connection.

        Raises:
            BlockingIOError: there was no data.
        """
        ...


class EpollTurns:
    """`Turns` for Linux: an epoll object stands between the event loop and the socket. A switch is one system call.

    Args:
        loop: the engine's event loop.
        connected: the socket of the connection. It becomes blocking, with a receive timeout of `WAIT`.
        on_readable: the engine's callback.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, connected: socket.socket, on_readable: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._socket = connected
        self._on_readable = on_readable
        self._epoll = select.epoll()
        self._epoll.register(connected, select.EPOLLIN)
        self._receive = connected.recv_into
        connected.setblocking(True)  # for a caller that waits; all other reads and writes use MSG_DONTWAIT
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(WAIT * 1e6)))

    def watch(self) -> None:
        """Call the engine's callback from now on when there is something to read."""
        self._loop.add_reader(self._epoll, self._on_readable)

    def unwatch(self) -> None:
        """Stop calling the callback for good."""
        self._loop.remove_reader(self._epoll)

    def take(self) -> None:
        """Keep incoming data from waking the engine from now on, by switching the epoll object off."""
        self._epoll.modify(self._socket, 0)

    def give_back(self) -> None:
        """Wake the engine again when data arrives, by switching the epoll object on. Do nothing if it is closed."""
        try:
            self._epoll.modify(self._socket, select.EPOLLIN)
        except (ValueError, OSError):
            return  # the connection was closed meanwhile

    def stand_aside(self) -> None:
        """Do nothing, because the epoll object is switched off already."""

    def come_back(self) -> None:
        """Do nothing, because `give_back` has switched the epoll object on again."""

    def receive(self, space: memoryview, wait: bool) -> int:
        """Read once from the connection; see `Turns.receive`."""
        return self._receive(space, 0, 0 if wait else socket.MSG_DONTWAIT)


class PollTurns:
    """`Turns` for any Unix. If data wakes the engine while a caller reads, it ignores the socket until `come_back`.

    Args:
        loop: the engine's event loop.
        connected: the socket of the connection. It becomes non-blocking, because MSG_DONTWAIT does not keep `send` from
            blocking on every Unix.
        on_readable: the engine's callback.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, connected: socket.socket, on_readable: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._socket = connected
        self._on_readable = on_readable
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self._aside = False
        self._over = False
        connected.setblocking(False)

    def watch(self) -> None:
        """Call the engine's callback from now on when there is something to read. Do nothing after `unwatch`."""
        if not self._over:
            self._aside = False
            self._loop.add_reader(self._socket, self._on_readable)

    def unwatch(self) -> None:
        """Stop calling the callback for good."""
        self._over = True
        self._loop.remove_reader(self._socket)

    def take(self) -> None:
        """Do nothing, because the engine notices that the lock is taken."""

    def give_back(self) -> None:
        """Do nothing, because `come_back` lets the engine read again."""

    def stand_aside(self) -> None:
        """Ignore incoming data until `come_back`. The engine calls this if it was woken while a caller reads."""
        self._loop.remove_reader(self._socket)
        self._aside = True

    def come_back(self) -> None:
        """Let the engine read again if it has called `stand_aside`. A caller's thread calls this."""
        if self._aside:
            self._loop.call_soon_threadsafe(self.watch)

    def receive(self, space: memoryview, wait: bool) -> int:
        """Read once from the connection; see `Turns.receive`."""
        if wait and not self._poll.poll(WAIT * 1000):
            raise BlockingIOError
        return self._socket.recv_into(space)


def quickest_turns(loop: asyncio.AbstractEventLoop, connected: socket.socket, on_readable: Callable[[], None]) -> Turns:
    """Return the quickest kind of turns on this system: `EpollTurns` on Linux, otherwise `PollTurns`.

    Args:
        loop: the engine's event loop.
        connected: the socket of the connection.
        on_readable: the engine's callback, which the loop calls when there is something to read.
    """
    kind = EpollTurns if hasattr(select, "epoll") else PollTurns
    return kind(loop, connected, on_readable)
