"""`Spares`: connections to nodes that are opened before they are needed, because ssh takes its time to log in."""

from __future__ import annotations

import contextlib
import threading

from skypool.errors import UsageError
from skypool.model import Access
from skypool.shipping.package_zip import STAGE, staged
from skypool.wire.transport import CommandStream


class Spares:
    """Connections to nodes, each of which waits for a shell script. Any thread may call the methods.

    Args:
        each: the number of connections to each node.
    """

    def __init__(self, each: int) -> None:
        self._each = each
        self._streams: dict[int, list[CommandStream]] = {}
        self._is_closed = False
        self._lock = threading.Lock()

    def connect(self, node: int, access: Access) -> None:
        """Open the connections to a node. Returns at once; a connection that fails does so when it is used."""
        with self._lock, contextlib.suppress(OSError):  # there is no ssh here: the takeover itself fails
            for _ in range(0 if self._is_closed else self._each):
                self._streams.setdefault(node, []).append(CommandStream(access.transport.argv(STAGE)))

    def take(self, node: int, script: str) -> CommandStream | None:
        """Run a shell script, and return the connection to its stdin and stdout, which the caller closes.

        Return None if no connection to this node is left, or if the script is too long.
        """
        try:
            data = staged(script)
        except UsageError:
            return None
        with self._lock:
            left = self._streams.get(node)
            stream = left.pop() if left else None
        if stream is not None:
            with contextlib.suppress(OSError):  # it is lost, which the caller sees when it reads
                stream.socket.sendall(data)
        return stream

    def close(self) -> None:
        """Close the connections that were not taken, and open no others."""
        with self._lock:
            self._is_closed = True
            left, self._streams = [stream for each in self._streams.values() for stream in each], {}
        for stream in left:
            stream.shut()
        for stream in left:
            stream.close()
