"""`sys.stdout` and `sys.stderr` inside a worker: sends prints to the agent, at once or in larger pieces."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

_PIECE = 32 << 10
"""Bytes of one piece of output."""
_RATE = 1000.0
"""Lines a second that go out one by one. Each has left this process before the next is printed, so that a crash
loses none; beyond the rate up to 20 ms of lines wait together."""


class OutputStream(io.TextIOBase):
    """`sys.stdout` or `sys.stderr` of a worker.

    Args:
        fd: 1 or 2, for `fileno()` and for what writes bytes.
        send: takes a piece of text, called from any thread.
    """

    def __init__(self, fd: int, send: Callable[[int, bytes], None]) -> None:
        super().__init__()
        self._fd = fd
        self._send = send
        self._lock = threading.RLock()
        self._waiting: list[str] = []
        self._size = 0
        self._allowance = _RATE / 5
        self._last = time.monotonic()
        self._flooded: threading.Event | None = None

    encoding = "utf-8"
    errors = "backslashreplace"

    @property
    def name(self) -> str:
        return "<stdout>" if self._fd == 1 else "<stderr>"

    @property
    def buffer(self) -> BinaryIO:
        return open(self._fd, "wb", 0, closefd=False)

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        with self._lock:
            self._waiting.append(text)
            self._size += len(text)
            if self._size >= _PIECE:
                self.flush()
            elif "\n" in text or "\r" in text:
                if self._may_go():
                    self.flush()
                else:
                    self._flush_soon()
        return len(text)

    def _flush_soon(self) -> None:
        if self._flooded is None:
            self._flooded = threading.Event()
            threading.Thread(target=self._flush_often, args=(self._flooded,), daemon=True).start()
        self._flooded.set()

    def _flush_often(self, flooded: threading.Event) -> None:
        while self._flooded is flooded:
            flooded.wait()
            time.sleep(0.02)
            flooded.clear()
            self.flush()

    def _may_go(self) -> bool:
        now = time.monotonic()
        self._allowance = min(_RATE / 5, self._allowance + (now - self._last) * _RATE)
        self._last = now
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True

    def flush(self) -> None:
        if not self._waiting:
            return
        with self._lock:
            if not self._waiting:
                return
            data = "".join(self._waiting).encode("utf-8", "backslashreplace")
            self._waiting.clear()
            self._size = 0
            start = 0
            while start < len(data):
                end = start + _PIECE
                while end < len(data) and data[end] & 0xC0 == 0x80:
                    end -= 1  # a piece ends where a character does: each is decoded alone
                self._send(self._fd, data[start:end])
                start = end

    def forget(self) -> None:
        """Begin anew in a forked child: what waits is the parent's to send."""
        self._lock = threading.RLock()
        self._waiting = []
        self._size = 0
        self._flooded = None
