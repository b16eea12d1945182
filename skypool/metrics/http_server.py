"""`Server`: an HTTP server for a WSGI application, in threads of its own."""

from __future__ import annotations

import socket
import socketserver
import threading
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import WSGIApplication

_LOOK_EVERY = 0.1
"""Seconds between two checks whether the server was closed."""


class Server(socketserver.ThreadingMixIn, WSGIServer):
    """An HTTP server that answers each request in a thread of its own.

    Use `serve` to make one.
    """

    daemon_threads = True
    block_on_close = False

    def server_bind(self) -> None:
        """Bind the socket to its address. Unlike the method of the base class, do not ask DNS for a name of it."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.socket.getsockname()[:2]
        self.setup_environ()

    def close(self) -> None:
        """Stop the server, and close its port. Blocks for about 0.1 s. Running requests are finished."""
        self.shutdown()
        self.server_close()


class _Quiet(WSGIRequestHandler):
    """A request handler that logs nothing, and drops clients that send nothing for 30 s."""

    timeout = 30.0

    def log_message(self, format: str, *args: object) -> None:
        """Do nothing."""


def serve(app: WSGIApplication, address: str, port: int) -> Server:
    """Start a server, and return it. It answers requests from now on.

    Args:
        app: answers the requests.
        address: the address to listen on: IPv4, IPv6 or a name of this computer.
        port: the port; 0 for a free one.

    Raises:
        OSError: the address is not one of this computer, or the port is in use.
    """
    family, _, _, _, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]

    class Here(Server):
        """A server for the family of this address."""

        address_family = family

    server = Here((str(found[0]), port), _Quiet)
    server.set_app(app)
    thread = threading.Thread(
        target=server.serve_forever, args=(_LOOK_EVERY,), name="skypool metrics server", daemon=True
    )
    thread.start()
    return server
