"""Decides which thread reads a connection: the engine's event loop, or a caller that waits for its answer.

A caller that waits for an answer reads the connection itself, so that the answer need not wake the engine first.
`Turns` says how the engine is kept asleep meanwhile. On Linux that is one call of `epoll`; elsewhere (macOS) it is
done with what every Unix has.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Callable
from typing import Protocol

WAIT = 0.1
"""Seconds for which a caller's `receive` waits at most before it looks around."""


class Turns(Protocol):
    """How one connection's readers take turns. Whoever reads holds a lock of the connection's owner."""

    def watch(self) -> None:
        """Begin to call the engine's callback when there is something to read. In the engine's thread."""

    def unwatch(self) -> None:
        """Never call it again: the connection is about to be closed. In the engine's thread."""

    def take(self) -> None:
        """Keep the engine asleep from now on. By a caller that has just got the lock."""

    def give_back(self) -> None:
        """Let the engine read again. By that caller, before it releases the lock."""

    def stand_aside(self) -> None:
        """Sleep until `come_back`. By the engine, which was woken while a caller reads."""

    def come_back(self) -> None:
        """Wake an engine that stands aside. By a caller, when it has released the lock."""

    def receive(self, space: memoryview, wait: bool) -> int:
        """Read once. By whoever holds the lock.

        Args:
            wait: for up to `WAIT` seconds.

        Raises:
            BlockingIOError: there was nothing.
        """
        ...


class EpollTurns:
    """Turns by an epoll between the loop and the socket: switching it off and on is one system call each."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, connected: socket.socket, on_readable: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._socket = connected
        self._on_readable = on_readable
        self._epoll = select.epoll()
        self._epoll.register(connected, select.EPOLLIN)
        self._receive = connected.recv_into
        connected.setblocking(True)  # for a caller that waits; everybody else says MSG_DONTWAIT
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(WAIT * 1e6)))

    def watch(self) -> None:
        self._loop.add_reader(self._epoll, self._on_readable)

    def unwatch(self) -> None:
        self._loop.remove_reader(self._epoll)

    def take(self) -> None:
        self._epoll.modify(self._socket, 0)

    def give_back(self) -> None:
        try:
            self._epoll.modify(self._socket, select.EPOLLIN)
        except (ValueError, OSError):
            return  # closed meanwhile

    def stand_aside(self) -> None:
        """Nothing: the epoll is off."""

    def come_back(self) -> None:
        """Nothing: the epoll is on again."""

    def receive(self, space: memoryview, wait: bool) -> int:
        return self._receive(space, 0, 0 if wait else socket.MSG_DONTWAIT)


class PollTurns:
    """Turns by what every Unix has: the engine is woken once while a caller reads, and then stands aside.

    The socket is non-blocking, as MSG_DONTWAIT does not keep `send` from blocking on every Unix.
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
        if not self._over:
            self._aside = False
            self._loop.add_reader(self._socket, self._on_readable)

    def unwatch(self) -> None:
        self._over = True
        self._loop.remove_reader(self._socket)

    def take(self) -> None:
        """Nothing: the engine finds the lock taken."""

    def give_back(self) -> None:
        """Nothing yet: `come_back` wakes it."""

    def stand_aside(self) -> None:
        self._loop.remove_reader(self._socket)
        self._aside = True

    def come_back(self) -> None:
        if self._aside:
            self._loop.call_soon_threadsafe(self.watch)

    def receive(self, space: memoryview, wait: bool) -> int:
        if wait and not self._poll.poll(WAIT * 1000):
            raise BlockingIOError
        return self._socket.recv_into(space)


def quickest_turns(loop: asyncio.AbstractEventLoop, connected: socket.socket, on_readable: Callable[[], None]) -> Turns:
    """Return the quickest kind of turns that this system has.

    Args:
        on_readable: the engine's callback.
    """
    kind = EpollTurns if hasattr(select, "epoll") else PollTurns
    return kind(loop, connected, on_readable)
