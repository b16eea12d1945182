"""`ObserverServer`: the owner of a pool serves observers on a Unix socket, with a thread for each connection.

Bytes of forwarded ports and of commands on nodes never pass through the owner's process.

What an observer can cost the owner is bounded. At most 16 connections are open, and at most 25 begin in a second. A
request must come whole within 10 s. Events wait in a buffer of 1 MiB for each observer, and 64 KiB are sent at a time,
at most 3 MiB in a second. An observer that takes nothing for 30 s is disconnected.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Protocol

from skypool import events
from skypool.errors import SkypoolError
from skypool.observers import pool_sockets
from skypool.observers.protocol import (
    LONGEST_LINE,
    ForwardPort,
    Info,
    Logs,
    Reach,
    line_of,
    read_line,
    request_of,
)
from skypool.safety import peers

_MOST = 16
"""The most connections that may be open at the same time."""
_BURST = 50.0
"""The most connections that may begin at once after a quiet time."""
_PER_SECOND = 25.0
"""The most connections that may begin in a second after `_BURST` have begun."""
_ASKING = 10.0
"""Seconds in which the whole request must have come."""
_TAKING = 30.0
"""Seconds after which an observer that takes nothing of what is sent to it is disconnected."""
_LOOK = 1.0
"""Seconds between two checks whether a forward or an observer is still there."""
_HELD = 1 << 20
"""About how many bytes of events wait for one observer. Later ones are dropped and counted."""
_AT_ONCE = 64 << 10
"""The most bytes that are sent to an observer at a time. A pause of `_REST` seconds follows."""
_REST = 0.02
_ENDING = 2.0
"""Seconds that `close` waits for the threads."""


class OpenForward(Protocol):
    """A forward that the owner has made. `closed` becomes True if it ends early, for example with its node."""

    closed: bool

    @property
    def address(self) -> str:
        """Host and port on this computer, or the path of a socket."""
        ...

    def close(self) -> None:
        """Free the port."""
        ...


class Watched(Protocol):
    """The pool that observers look at. The methods are called in the server's threads, and may block."""

    def info(self) -> Mapping[str, object]:
        """Return the state of the pool and its nodes, as values for JSON."""
        ...

    def listen(self, hear: Callable[[events.Event], None]) -> Callable[[], None]:
        """Call `hear`, which does not block, with each event from now on, until the returned function is called."""
        ...

    def forward(self, node: int, host: str, port: int, here: int | str) -> OpenForward:
        """Make a forward to a port of a node, and return it when it can be used.

        `here` is a port of this computer, 0 for a free one, or the path of a Unix socket. Raises SkypoolError if there
        is no such node, it cannot be reached, or the port is not free.
        """
        ...

    def command(self, node: int, script: str, terminal: bool, ports: Sequence[tuple[int, str, int]]) -> Sequence[str]:
        """Return a local command that runs a shell script on a node. Raise SkypoolError if that is not possible.

        `terminal` is True if the command is to run in a terminal. `ports` has triples (port of this computer, host,
        port) to forward while the command runs.
        """
        ...


class ObserverServer:
    """Server for the observers of one pool. Any thread may use it.

    The server's socket has the name of the pool. `watched` answers the requests of observers.
    """

    def __init__(self, pool: str, watched: Watched) -> None:
        self._pool = pool
        self._watched = watched
        self._lock = threading.Lock()  # guards _serving, _closed, _listener and _place
        self._closed = threading.Event()
        self._serving: dict[threading.Thread, socket.socket] = {}
        self._listener: socket.socket | None = None
        self._place: pool_sockets.Place | None = None
        self._accepting: threading.Thread | None = None

    def open(self) -> None:
        """Make the socket, and begin to serve, unless `close` was already called. Raises OSError if that fails."""
        with self._lock:
            if self._closed.is_set():
                return
            self._listener, self._place = pool_sockets.listen(self._pool)
            _servers.add(self)
            self._accepting = threading.Thread(
                target=self._accept, args=(self._listener,), name=f"skypool observers of {self._pool}", daemon=True
            )
            self._accepting.start()

    def close(self) -> None:
        """Remove the socket and end all connections. Waits for the threads, at most 2 s. May be called at any time."""
        with self._lock:
            self._closed.set()
            listener, accepting, put = self._listener, self._accepting, self._place
            self._listener = self._place = None
            serving = dict(self._serving)
        if put is None or listener is None or accepting is None:
            return
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, on Linux
        if sys.platform != "linux":
            with contextlib.suppress(OSError):
                pool_sockets.connect(self._pool, _LOOK).close()  # wakes it elsewhere
        put.remove()
        for connection in serving.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        until = time.monotonic() + _ENDING
        for thread in (accepting, *serving):
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def leave_to_parent(self) -> None:
        """Close the sockets in a forked child process, where the threads do not run. The parent goes on serving."""
        for each in (self._listener, *self._serving.values()):
            if each is not None:
                each.close()

    def _accept(self, listener: socket.socket) -> None:
        allowed, refilled = _BURST, time.monotonic()
        with listener:
            while not self._closed.is_set():
                try:
                    connection, _ = listener.accept()
                except OSError:  # `close` has shut it down, or this process has too many open files
                    self._closed.wait(_LOOK)
                    continue
                self._begin(connection)
                now = time.monotonic()
                allowed = min(_BURST, allowed - 1 + _PER_SECOND * (now - refilled))
                refilled = now
                if allowed < 1:
                    self._closed.wait(1 / _PER_SECOND)

    def _begin(self, connection: socket.socket) -> None:
        """Serve a connection in a thread of its own. Refuse it if too many are open, or if it is another user's."""
        user = peers.user(connection)
        with self._lock:
            full = len(self._serving) >= _MOST
            thread = threading.Thread(target=self._serve, args=(connection,), name="skypool observer", daemon=True)
            if not (full or self._closed.is_set() or user not in (None, os.geteuid(), 0)):
                self._serving[thread] = connection
                try:
                    thread.start()
                except RuntimeError:  # no further thread can be started
                    del self._serving[thread]
                else:
                    return
        with connection, contextlib.suppress(OSError):
            connection.setblocking(False)
            if full:
                connection.send(
                    _refusal(
                        f"pool {self._pool!r} has {_MOST} observers, and takes no more: "
                        "end a `skypool logs` or `skypool forward`",
                        "UsageError",
                    )
                )

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError, EOFError):  # the observer is gone, or takes nothing
                try:
                    self._answer(connection)
                except SkypoolError as e:
                    _send(connection, _refusal(str(e), type(e).__name__))
                except (OSError, EOFError):
                    raise
                except Exception as e:  # noqa: BLE001 - a request must not end the owner, and the observer is told
                    _send(connection, _refusal(f"the owner of the pool failed: {type(e).__name__}: {e}", ""))
        finally:
            with self._lock:
                self._serving.pop(threading.current_thread(), None)

    def _answer(self, connection: socket.socket) -> None:
        line, rest = read_line(connection, LONGEST_LINE, time.monotonic() + _ASKING)
        request = request_of(line)
        if rest:
            return  # an observer sends nothing after its request
        match request:
            case Info():
                _send(connection, line_of({"ok": True, **self._watched.info()}))
            case Logs():
                self._tell_events(connection)
            case ForwardPort(port, node, host, here, path):
                self._keep(connection, self._watched.forward(node, host, port, path or here))
            case Reach(node, script, terminal, ports):
                argv = list(self._watched.command(node, script, terminal, ports))
                _send(connection, line_of({"ok": True, "argv": argv}))

    def _keep(self, connection: socket.socket, forward: OpenForward) -> None:
        """Keep a forward open until the observer leaves, the forward is closed, or the server is closed."""
        try:
            _send(connection, line_of({"ok": True, "address": forward.address}))
            while not forward.closed and not self._closed.is_set() and not _has_left(connection, _LOOK):
                pass
            if forward.closed or self._closed.is_set():
                _send(connection, line_of({"closed": f"the node or the pool {self._pool!r} has ended"}))
        finally:
            forward.close()

    def _tell_events(self, connection: socket.socket) -> None:
        """Send all events from now on, until the observer leaves or the server is closed."""
        waiting = Waiting()
        stop = self._watched.listen(waiting.hear)
        try:
            _send(connection, line_of({"ok": True}))
            while not self._closed.is_set() and not _has_left(connection, 0):
                lines = waiting.taken(_LOOK, _AT_ONCE)
                if lines:
                    _send(connection, b"".join(lines))
                    self._closed.wait(_REST)
        finally:
            stop()


class Waiting:
    """The events that wait for one observer. Their size is bounded; events that come later are dropped and counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all that follows
        self._there = threading.Event()
        self._events: deque[events.Event | int] = deque()  # a number tells how many were missed there
        self._size = 0
        self._missed = 0

    def hear(self, event: events.Event) -> None:
        """Keep an event, or count it if too many wait. Called in the threads that emit events; does not block."""
        size = events.weight(event)
        with self._lock:
            if self._size + size > _HELD:
                self._missed += 1
                return
            self._note_missed()
            self._size += size
            self._events.append(event)
        if not self._there.is_set():
            self._there.set()

    def _note_missed(self) -> None:
        """If events were missed, add a line with their number to the waiting events. The caller must hold the lock."""
        if self._missed:
            self._events.append(self._missed)
            self._missed = 0

    def taken(self, patience: float, most: int) -> list[bytes]:
        """Wait up to `patience` seconds for events, and return them as lines of JSON; [] if none came.

        After about `most` bytes, further events are left for the next call.
        """
        self._there.wait(patience)
        taken: list[events.Event | int] = []
        with self._lock:
            size = 0
            while self._events and size < most:
                event = self._events.popleft()
                size += 0 if isinstance(event, int) else events.weight(event)
                taken.append(event)
                if not self._events:
                    self._note_missed()
            self._size -= size
            if not self._events:
                self._there.clear()
        return [_line(each) for each in taken]


def _line(event: events.Event | int) -> bytes:
    if isinstance(event, int):
        return line_of({"event": "Missed", "count": event})
    return line_of({"event": type(event).__name__, **asdict(event)})


def _has_left(connection: socket.socket, patience: float) -> bool:
    """Wait up to `patience` seconds. Return True if the observer leaves, or sends something, which it must not."""
    connection.settimeout(patience)
    try:
        connection.recv(1)
    except (TimeoutError, BlockingIOError):
        return False
    return True


def _send(connection: socket.socket, data: bytes) -> None:
    """Send bytes. Raise TimeoutError, an OSError, if the observer takes nothing for 30 s."""
    connection.settimeout(_TAKING)
    view = memoryview(data)
    while view:
        view = view[connection.send(view) :]


def _refusal(error: str, kind: str) -> bytes:
    return line_of({"ok": False, "error": error, "kind": kind})


_servers: weakref.WeakSet[ObserverServer] = weakref.WeakSet()
"""All servers of this process."""


def _forked() -> None:
    for each in list(_servers):
        each.leave_to_parent()
    _servers.clear()


os.register_at_fork(after_in_child=_forked)
