"""`FaultyWay`: a way to a store on which requests are refused, slow, never answered, or cut in the middle."""

from __future__ import annotations

import random
import re
import socket
import struct
import threading
import time
from contextlib import suppress
from types import TracebackType

FAULTS = ("403", "500", "503", "slow", "hang", "cut")
_REASONS = {403: ("AccessDenied", "Forbidden"), 500: ("InternalError", "Internal"), 503: ("SlowDown", "Unavailable")}
_LENGTH = re.compile(rb"(?im)^content-length: *(\d+)")
_PIECE = 1 << 16
_RATE = 2 << 20
"""Bytes in a second of each connection that is slow."""


class FaultyWay:
    """A port of this host that leads to a store, and does what `fail` says.

    Connections are served in threads of their own. Those that are there when a fault begins or ends are cut.

    Args:
        endpoint: the URL of the store.
        chance: says which connections fail, and after how many bytes.
        rate: the most bytes in a second that all connections together send to the store; None for no limit.

    Attributes:
        endpoint: the URL of this port.
        moves: how often data has been sent to the store.
        sent: how many bytes that were.
    """

    def __init__(self, endpoint: str, chance: random.Random, rate: float | None = None) -> None:
        host, _, port = endpoint.removeprefix("http://").partition(":")
        self._target = host, int(port)
        self._chance = chance
        self._fault, self._share, self._is_closed = "", 1.0, False
        self._lock = threading.Lock()
        self.moves = self.sent = 0
        self._rate, self._is_free = rate, 0.0  # since when more can be sent
        self._open = set[socket.socket]()
        self._listener = socket.create_server((host, 0), backlog=128)
        self.endpoint = f"http://{host}:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._serve, name="faulty way")]
        self._threads[0].start()

    def fail(self, fault: str, share: float = 1.0) -> None:
        """Have connections fail from now on, or a share of them. No fault is ""."""
        with self._lock:
            self._fault, self._share = fault, share
        self._cut_all()

    def _cut_all(self) -> None:
        with self._lock:
            for each in self._open:
                _shut(each)

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return  # closed
            with self._lock:
                fault = self._fault if self._chance.random() < self._share else ""
                most = self._chance.choice((200, 2_000, 50_000, 3_000_000)) * self._chance.random()
                is_answer = self._chance.random() < 0.5
                self._open.add(peer)
            thread = threading.Thread(target=self._lead, args=(peer, fault, int(most), is_answer), daemon=True)
            thread.start()
            self._threads = [each for each in self._threads if each.is_alive()] + [thread]

    def _lead(self, peer: socket.socket, fault: str, most: int, is_answer: bool) -> None:
        """Serve a connection until it ends."""
        try:
            with suppress(OSError):
                if fault == "hang":
                    while peer.recv(_PIECE):
                        continue
                elif fault.isdecimal():
                    _refuse(peer, int(fault))
                else:
                    self._join(peer, fault, most, is_answer)
        finally:
            with self._lock:
                self._open.discard(peer)
            peer.close()

    def _join(self, peer: socket.socket, fault: str, most: int, is_answer: bool) -> None:
        store = socket.create_connection(self._target, timeout=30)
        store.settimeout(None)
        with self._lock:
            self._open.add(store)
        limits = (None, most) if is_answer else (most, None)
        ask, answer = limits if fault == "cut" else (None, None)
        back = threading.Thread(target=self._pump, args=(store, peer, fault == "slow", answer), daemon=True)
        back.start()
        try:
            self._pump(peer, store, fault == "slow", ask, 1)
        finally:
            back.join()
            with self._lock:
                self._open.discard(store)
            store.close()

    def _pump(
        self, source: socket.socket, sink: socket.socket, is_slow: bool, most: int | None, moves: int = 0
    ) -> None:
        """Send on what comes, at most so many bytes. Then both connections are cut."""
        with suppress(OSError):
            while data := source.recv(_PIECE):
                if is_slow:
                    time.sleep(0.05 + len(data) / _RATE)
                if most is not None:
                    data, most = data[:most], most - len(data)
                if moves:
                    self._pace(len(data))
                sink.sendall(data)
                self.moves += moves
                if most is not None and most <= 0:
                    for each in (source, sink):
                        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    break
        for each in (source, sink):
            _shut(each)

    def _pace(self, count: int) -> None:
        """Wait until so many bytes may be sent."""
        with self._lock:
            self.sent += count
            now = time.monotonic()
            if self._rate is not None:
                self._is_free = max(now, self._is_free) + count / self._rate
            wait = self._is_free - now
        if wait > 0:
            time.sleep(wait)

    def close(self) -> None:
        """End all connections, and the threads that serve them."""
        _shut(self._listener)
        self._listener.close()
        while any(each.is_alive() for each in self._threads):
            self._cut_all()
            time.sleep(0.01)

    def __enter__(self) -> FaultyWay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _refuse(peer: socket.socket, status: int) -> None:
    """Read a request, and answer it with an error."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (more := peer.recv(_PIECE)):
            return
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    found = _LENGTH.search(head)
    left = (int(found[1]) if found else 0) - len(body)
    if b"100-continue" in head.lower():
        left = 0
    while left > 0 and (more := peer.recv(_PIECE)):
        left -= len(more)
    code, reason = _REASONS[status]
    text = (
        b""
        if head.startswith(b"HEAD")
        else f"<Error><Code>{code}</Code><Message>by the test</Message></Error>".encode()
    )
    lines = f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/xml\r\ncontent-length: {len(text)}\r\n"
    peer.sendall(f"{lines}connection: close\r\n\r\n".encode() + text)


def _shut(each: socket.socket) -> None:
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
