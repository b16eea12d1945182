"""A mapped port: one of this host that leads to one of a machine."""

from __future__ import annotations

import socket
import threading


class Relay:
    """A port of this host that leads to a port of a machine, as a container's mapped port does.

    Attributes:
        target: where whoever comes from now on is led.
    """

    def __init__(self, host: str | socket.socket, target: tuple[str, int]) -> None:
        self.target = target
        self._listener = socket.create_server((host, 0), backlog=64) if isinstance(host, str) else host
        self.host, self.port = self._listener.getsockname()[:2]
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, name=f"relay-{self.port}", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                outer, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._join, args=(outer,), daemon=True).start()

    def _join(self, outer: socket.socket) -> None:
        try:
            inner = socket.create_connection(self.target, timeout=10)
        except OSError:
            outer.close()
            return
        inner.settimeout(None)
        for each in (outer, inner):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._open |= {outer, inner}
        there = threading.Thread(target=self._pump, args=(outer, inner), daemon=True)
        there.start()
        self._pump(inner, outer)
        there.join()
        for each in (outer, inner):
            self._open.discard(each)
            each.close()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            for each in (source, sink):
                try:
                    each.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # it is gone on that side already

    def close(self) -> None:
        """Nobody comes in any more, and who is in is thrown out."""
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        finally:
            self._listener.close()
        for each in list(self._open):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it is gone already
