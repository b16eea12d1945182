"""`Turns`: decides which thread reads a connection: that of the pool's event loop, or one that waits for a result.

A thread that waits for a result is called a caller's thread here. Such a thread reads the connection itself, which is
faster than being woken by the event loop's thread. Meanwhile data on the connection must not wake the event loop.
`EpollTurns` ensures that on Linux, with one system call. `PollTurns` does so on other systems, such as macOS.
"""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Callable
from typing import Protocol

WAIT = 0.1
"""The most seconds that one `receive` waits. Then the thread can check whether another one has got its result."""


class Turns(Protocol):
    """A protocol for objects with which the event loop's thread and callers' threads take turns at reading.

    A thread must hold the lock of the `Inbox` that owns the connection while it reads.
    """

    def watch(self) -> None:
        """Have the event loop call the callback, which reads, when there is data. Call this in the loop's thread."""

    def unwatch(self) -> None:
        """Have the event loop stop calling the callback of `watch` for good. Call this in the loop's thread."""

    def take(self) -> None:
        """Keep incoming data from waking the event loop's thread from now on, until `give_back`.

        A caller's thread calls this after it has got the lock for reading.
        """

    def give_back(self) -> None:
        """Let incoming data wake the event loop's thread again.

        The thread that called `take` calls this before it releases the lock for reading.
        """

    def stand_aside(self) -> None:
        """Keep incoming data from waking the event loop's thread until `come_back`.

        The event loop's thread calls this if data woke it while another thread reads.
        """

    def come_back(self) -> None:
        """Let incoming data wake the event loop's thread again after `stand_aside`. Otherwise do nothing.

        A caller's thread calls this after it has read and released the lock.
        """

    def close(self) -> None:
        """Free what this object has opened, but not the socket. Call this after `unwatch`, when no thread reads."""

    def receive(self, space: memoryview, wait: bool) -> int:
        """Read once from the connection into `space`, and return the number of bytes; 0 if the other end has closed it.

        The calling thread must hold the lock for reading. With `wait`, this waits up to `WAIT` (0.1) seconds.

        Raises:
            BlockingIOError: there was no data.
            OSError: the connection is broken or closed.
        """
        ...


class EpollTurns:
    """`Turns` for Linux: the event loop watches an epoll object, which watches the socket.

    One system call switches the epoll object off or on. The socket is made blocking, with a timeout of `WAIT` (0.1) s.
    The event loop calls `on_readable` when there is something to read.
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
        """Have the event loop call `on_readable` from now on when there is something to read."""
        self._loop.add_reader(self._epoll, self._on_readable)

    def unwatch(self) -> None:
        """Have the event loop stop calling `on_readable` for good."""
        self._loop.remove_reader(self._epoll)

    def take(self) -> None:
        """Keep incoming data from waking the event loop, by switching the epoll object off, until `give_back`."""
        self._epoll.modify(self._socket, 0)

    def give_back(self) -> None:
        """Let incoming data wake the event loop again, by switching the epoll object on."""
        self._epoll.modify(self._socket, select.EPOLLIN)

    def stand_aside(self) -> None:
        """Do nothing, because the thread that reads has switched the epoll object off already, with `take`."""

    def come_back(self) -> None:
        """Do nothing, because `give_back` has switched the epoll object on again already."""

    def close(self) -> None:
        """Close the epoll object."""
        self._epoll.close()

    def receive(self, space: memoryview, wait: bool) -> int:
        """Read once into `space`, and return the number of bytes; 0 if the other end has closed the connection.

        With `wait`, wait up to `WAIT` (0.1) seconds. Raises BlockingIOError if there was no data, or another OSError.
        """
        return self._receive(space, 0, 0 if wait else socket.MSG_DONTWAIT)


class PollTurns:
    """`Turns` for any Unix, with `poll` instead of epoll. The socket is made non-blocking.

    The event loop calls `on_readable` when there is something to read. If data wakes the event loop while another
    thread reads, the loop ignores the socket until `come_back` is called.
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
        connected.setblocking(False)  # because on some systems `send` blocks in spite of MSG_DONTWAIT

    def watch(self) -> None:
        """Have the event loop call `on_readable` when there is something to read. Do nothing after `unwatch`."""
        if not self._over:
            self._aside = False
            self._loop.add_reader(self._socket, self._on_readable)

    def unwatch(self) -> None:
        """Have the event loop stop calling `on_readable` for good. A later `watch` does nothing."""
        self._over = True
        self._loop.remove_reader(self._socket)

    def take(self) -> None:
        """Do nothing. The event loop's thread finds out itself that another thread holds the lock for reading."""

    def give_back(self) -> None:
        """Do nothing, because `come_back` lets the event loop's thread read again."""

    def stand_aside(self) -> None:
        """Keep incoming data from waking the event loop until `come_back`."""
        self._loop.remove_reader(self._socket)
        self._aside = True

    def come_back(self) -> None:
        """Let incoming data wake the event loop again after `stand_aside`. Otherwise do nothing.

        This returns at once; soon after, the event loop's thread calls `watch`.
        """
        if self._aside:
            self._loop.call_soon_threadsafe(self.watch)

    def close(self) -> None:
        """Do nothing: a poll object has no descriptor."""

    def receive(self, space: memoryview, wait: bool) -> int:
        """Read once into `space`, and return the number of bytes; 0 if the other end has closed the connection.

        With `wait`, wait up to `WAIT` (0.1) seconds. Raises BlockingIOError if there was no data, or another OSError.
        """
        if wait and not self._poll.poll(WAIT * 1000):
            raise BlockingIOError
        return self._socket.recv_into(space)


def quickest_turns(loop: asyncio.AbstractEventLoop, connected: socket.socket, on_readable: Callable[[], None]) -> Turns:
    """Return an `EpollTurns` where Python has epoll (Linux), else a `PollTurns`.

    The event loop calls `on_readable` when there is something to read from the socket `connected`. The socket becomes
    blocking on Linux, and non-blocking on other systems.
    """
    kind = EpollTurns if hasattr(select, "epoll") else PollTurns
    return kind(loop, connected, on_readable)
