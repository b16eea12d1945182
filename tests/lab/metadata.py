"""A cloud's metadata service: 169.254.169.254 in each machine, answered by this process.

A socket belongs to the network namespace in which it was made. So a short-lived thread enters the machine's namespace,
makes the listening socket there, and ends; the server itself runs here and knows which machine asks.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab.kernel import enter_netns
from tests.lab.network import METADATA

if TYPE_CHECKING:
    from tests.lab.machines import Machine


class MetadataServer(ThreadingHTTPServer):
    """Serves one machine; a handler finds it as `self.server.machine`."""

    def __init__(self, machine: Machine, netns: Path, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__((METADATA, 80), handler, bind_and_activate=False)
        self.machine = machine
        self.socket.close()
        self.socket = socket_inside(netns)
        self.server_name, self.server_port = METADATA, 80
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name=f"metadata-{machine.name}", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closing:
            self.handle_request()

    def close(self) -> None:
        """Stop at once. Its socket would keep the namespace alive."""
        self._closing = True
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self.server_close()


def socket_inside(netns: Path, address: tuple[str, int] = (METADATA, 80)) -> socket.socket:
    """A socket that listens on an address of a namespace."""
    made: list[socket.socket | OSError] = []

    def make() -> None:
        try:
            enter_netns(netns)
            made.append(socket.create_server(address, backlog=64))
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make, name="netns")
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]
