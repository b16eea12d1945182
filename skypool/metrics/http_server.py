"""`Server`: an HTTP server for a WSGI application, in one thread, for untrusted clients.

Every user of this computer can connect to a port of 127.0.0.1. So what all of them together can cost this process is
bounded: one thread, `_MOST` connections, `_LONGEST` bytes of a request, `_WITHIN` seconds for request and answer, and a
fifth of the time of one CPU.

If there are `_MOST` connections, a new one replaces the oldest that has not sent its request yet. So an honest client
is answered, even if others keep connections open.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import os
import selectors
import socket
import threading
import time
import weakref
from dataclasses import dataclass, field
from urllib.parse import unquote
from wsgiref.handlers import SimpleHandler
from wsgiref.types import WSGIApplication, WSGIEnvironment

_MOST = 32
"""The most connections that may be open at the same time."""
_WITHIN = 10.0
"""Seconds in which a client must have sent its request and taken the answer."""
_LONGEST = 16 << 10
"""The most bytes of a request."""
_PAUSE = 0.5
"""Seconds without new connections after one could not be accepted, because this process has too many open files."""
_REST = 4.0
"""Seconds that the server rests for each second of CPU time that it has used."""
_ENDING = 2.0
"""Seconds that `close` waits for the thread."""
_INVALID = b"HTTP/1.0 400 Bad Request\r\nContent-Length: 0\r\n\r\n"


@dataclass(slots=True, eq=False)
class _Client:
    """A connection to a client. It is closed at `until`, a time of `time.monotonic()`."""

    socket: socket.socket
    until: float
    request: bytearray = field(default_factory=bytearray)
    answer: memoryview | None = None  # the part that was not sent yet; None while the request is not complete


class Server:
    """An HTTP server. It answers requests from now on, until `close` is called.

    Args:
        app: the WSGI application, called in the thread of the server. Bodies of requests are not passed on.
        address: the address to listen on: IPv4, IPv6 or a name of this computer.
        port: the port; 0 for a free one, which the attribute `port` then has.

    Raises:
        OSError: the address is not one of this computer, or the port is in use.
    """

    def __init__(self, app: WSGIApplication, address: str, port: int) -> None:
        family, _, _, _, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._app = app
        self._clients: dict[_Client, None] = {}  # the oldest first
        self._listener = socket.create_server((str(found[0]), port), family=family, backlog=128)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="skypool metrics server", daemon=True)
        self._thread.start()
        _servers.add(self)

    def close(self) -> None:
        """Stop the server, and close its port. Waits for an answer that is being made, at most 2 s."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._wake.send(b".")
        self._thread.join(_ENDING)

    def leave_to_parent(self) -> None:
        """Close all sockets in a forked child process, where the thread does not run. The parent goes on serving."""
        for each in (self._listener, self._wake, self._woken, *(client.socket for client in self._clients)):
            each.close()
        self._selector.close()

    def _serve(self) -> None:
        paused_until = 0.0
        with self._listener, self._wake, self._woken, self._selector:
            while not self._closed.is_set():
                began = time.thread_time()
                now = time.monotonic()
                is_listening = self._listener.fileno() in self._selector.get_map()
                if not is_listening and now >= paused_until:
                    self._selector.register(self._listener, selectors.EVENT_READ)
                for client in [each for each in self._clients if each.until <= now]:
                    self._end(client)
                first = min((each.until for each in self._clients), default=now + 3600)
                if not is_listening and now < paused_until:
                    first = min(first, paused_until)
                for key, _ in self._selector.select(max(0.0, first - now)):
                    if key.fileobj is self._listener:
                        if not self._accept():
                            self._selector.unregister(self._listener)
                            paused_until = time.monotonic() + _PAUSE
                    elif key.data in self._clients:
                        self._attend(key.data)
                self._closed.wait(_REST * (time.thread_time() - began))
            for client in list(self._clients):
                self._end(client)

    def _accept(self) -> bool:
        """Accept a connection. Return False if this process can have no more open files."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return True  # it is gone
        except OSError:
            return False
        connection.setblocking(False)
        if len(self._clients) >= _MOST:
            asking = (each for each in self._clients if each.answer is None)
            self._end(next(asking, next(iter(self._clients))))
        client = _Client(connection, time.monotonic() + _WITHIN)
        self._clients[client] = None
        self._selector.register(connection, selectors.EVENT_READ, client)
        self._attend(client)  # its request may be there already
        return True

    def _attend(self, client: _Client) -> None:
        """Read what has arrived of the request, or send as much of the answer as the client takes. Does not block."""
        try:
            if client.answer is None:
                if not self._is_asked(client):
                    return
                client.answer = memoryview(self._answer(bytes(client.request)))
                self._selector.modify(client.socket, selectors.EVENT_WRITE, client)
            while client.answer:
                client.answer = client.answer[client.socket.send(client.answer) :]
        except BlockingIOError:
            return
        except OSError:  # the client is gone
            pass
        self._end(client)

    def _is_asked(self, client: _Client) -> bool:
        """Read what has arrived. Return True if the request is complete, or too long to be valid."""
        part = client.socket.recv(_LONGEST)
        if not part:
            raise ConnectionResetError("the connection ended before the request was whole")
        client.request += part
        return b"\r\n\r\n" in client.request or b"\n\n" in client.request or len(client.request) > _LONGEST

    def _answer(self, request: bytes) -> bytes:
        environ = _environ(request)
        if environ is None:
            return _INVALID
        answer = io.BytesIO()
        handler = SimpleHandler(io.BytesIO(), answer, io.StringIO(), environ, multithread=False)
        handler.run(self._app)  # an error becomes status 500
        return answer.getvalue()

    def _end(self, client: _Client) -> None:
        """Close a connection. The client still receives the bytes that were sent."""
        if client in self._clients:
            del self._clients[client]
            self._selector.unregister(client.socket)
            with contextlib.suppress(OSError):
                client.socket.shutdown(socket.SHUT_WR)
            client.socket.close()


def _environ(request: bytes) -> WSGIEnvironment | None:
    """Return the WSGI environment of a request; None if the request is not valid or too long."""
    lines = io.BytesIO(request)
    words = lines.readline().decode("latin-1").split()
    if len(request) > _LONGEST or len(words) != 3 or not words[2].startswith("HTTP/"):
        return None
    try:
        headers = http.client.parse_headers(lines)
    except http.client.HTTPException:
        return None
    path, _, query = words[1].partition("?")
    return {
        "REQUEST_METHOD": words[0],
        "PATH_INFO": unquote(path, "latin-1"),
        "QUERY_STRING": query,
        "SERVER_PROTOCOL": "HTTP/1.0",
        **{f"HTTP_{name.upper().replace('-', '_')}": value for name, value in headers.items()},
    }


_servers: weakref.WeakSet[Server] = weakref.WeakSet()
"""All servers of this process."""


def _forked() -> None:
    for each in list(_servers):
        each.leave_to_parent()
    _servers.clear()


os.register_at_fork(after_in_child=_forked)
