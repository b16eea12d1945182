"""`Forwards`: the ports and sockets of this computer that lead to ports of a pool's nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from skypool.errors import PoolClosed
from skypool.link.forward import RELAY, Forward
from skypool.model import Access
from skypool.shipping import package_zip


class Forwards:
    """The open forwards of one pool. They are closed with their node, and with the pool. Any thread may use this.

    Args:
        ways: by node number, how each node is reached and the path of Python on it ("" if its setup wrote the path to a
            file there).
        notice: shows a sentence to the user.
    """

    def __init__(self, ways: Mapping[int, tuple[Access, str]], notice: Callable[[str], None]) -> None:
        self._ways = ways
        self._notice = notice
        self._lock = threading.Lock()  # guards _open and _closed
        self._open: list[Forward] = []
        self._closed = False

    def open(self, node: int, host: str, port: int, here: int | str) -> Forward:
        """Open a forward to a port of a node, and return it when it can be used.

        Args:
            host: the name or address of the host to connect to, as the node knows it; "localhost" is the node itself.
            port: the port to connect to.
            here: the port of this computer that leads to it (0 for a free one), or the path of a Unix socket.

        Raises:
            UsageError: the port of this computer is not free, or the socket cannot be made.
            NotPrivate: another user can change the folder of the socket.
            ConnectionLost: the node cannot be reached.
            PoolClosed: the pool has ended.
        """
        access, python = self._ways[node]
        relay = ["sh", "-c", package_zip.program(RELAY, python, access.home), "relay"]
        made = Forward(access.transport, relay, node, host, port, here, self._notice)
        with self._lock:
            if not self._closed:
                self._open = [each for each in self._open if not each.closed]
                self._open.append(made)
                return made
        made.close()
        raise PoolClosed("the pool ended while the forward was made; make a new ComputePool")

    def close(self, *nodes: int) -> None:
        """Close the forwards to these nodes; without nodes, close all, and refuse new ones."""
        with self._lock:
            ending = [each for each in self._open if not nodes or each.node in nodes]
            self._open = [each for each in self._open if each not in ending]
            self._closed = self._closed or not nodes
        for each in ending:
            each.close()
