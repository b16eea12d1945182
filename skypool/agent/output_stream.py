"""`sys.stdout` and `sys.stderr` of a worker. They send printed text to the agent.

Lines are sent at once, or gathered for a moment if there are many.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

_PIECE = 32 << 10
"""The greatest size of a piece of output in bytes."""
_RATE = 1000.0
"""Lines a second that are sent one by one. Beyond this rate, lines are gathered for up to 20 ms and sent together.

A line that is sent by itself has left the process before the next one is printed, so a crash does not lose it.
"""


class OutputStream(io.TextIOBase):
    """The `sys.stdout` or `sys.stderr` of a worker. Threads may share it.

    `fd` is 1 for stdout, 2 for stderr. Bytes that are written to the attribute `buffer` go directly to this file
    descriptor. `send(fd, data)` is called with each piece of encoded text, from any thread.
    """

    def __init__(self, fd: int, send: Callable[[int, bytes], None]) -> None:
        super().__init__()
        self._fd = fd
        self._send = send
        self._lock = threading.RLock()
        self.waiting: list[str] = []
        self._size = 0
        self._allowance = _RATE / 5
        self._last = time.monotonic()
        self._flooded: threading.Event | None = None

    encoding = "utf-8"
    errors = "backslashreplace"
    mode = "w"
    line_buffering = True
    write_through = False

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

    def reconfigure(
        self,
        *,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        line_buffering: bool | None = None,
        write_through: bool | None = None,
    ) -> None:
        """Accept the arguments of `io.TextIOWrapper.reconfigure`, and ignore all except `write_through`.

        Text is sent as UTF-8, line by line, and no character is refused. With `write_through=True`, each text is sent
        at once, also one that ends no line.
        """
        del encoding, errors, newline, line_buffering
        self.flush()
        if write_through is not None:
            self.write_through = write_through

    def detach(self) -> BinaryIO:
        """Return `buffer`, so that a program can put another text stream around it. This stream can still be used."""
        self.flush()
        return self.buffer

    def close(self) -> None:
        """Send the waiting text. The stream stays open, because later calls use it."""
        self.flush()

    def write(self, text: str) -> int:
        """Add text to the output, and return its length in characters. Any thread may call this.

        A text that contains a line end, or a carriage return, is sent at once. If there are more than 1000 such texts a
        second, they are sent within about 20 ms. Other text is sent at `flush`, with the next line end, or when 32 Ki
        characters have gathered. After `reconfigure(write_through=True)`, all text is sent like a text with a line end.
        """
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        with self._lock:
            self.waiting.append(text)
            self._size += len(text)
            if self._size >= _PIECE:
                self.flush()
            elif "\n" in text or "\r" in text or self.write_through:
                if self._may_go():
                    self.flush()
                else:
                    self._flush_soon()
        return len(text)

    def _flush_soon(self) -> None:
        """Have a thread send the waiting text within about 20 ms. Does not wait."""
        if self._flooded is None:
            self._flooded = threading.Event()
            threading.Thread(target=self._flush_often, args=(self._flooded,), daemon=True).start()
        self._flooded.set()

    def _flush_often(self, flooded: threading.Event) -> None:
        """Send the waiting text each time that `flooded` is set, at most every 20 ms. Runs in a thread of its own."""
        while self._flooded is flooded:
            flooded.wait()
            time.sleep(0.02)
            flooded.clear()
            self.flush()

    def _may_go(self) -> bool:
        """Return True if a line may be sent at once, and count it as sent. The limit is `_RATE` lines a second."""
        now = time.monotonic()
        # up to a fifth of `_RATE` lines may be sent in a burst
        self._allowance = min(_RATE / 5, self._allowance + (now - self._last) * _RATE)
        self._last = now
        if self._allowance < 1:
            return False
        self._allowance -= 1
        return True

    def flush(self) -> None:
        """Send the waiting text to the agent as UTF-8, in pieces of at most 32 KiB that end between characters."""
        if not self.waiting:
            return
        with self._lock:
            if not self.waiting:
                return
            data = "".join(self.waiting).encode("utf-8", "backslashreplace")
            self.waiting.clear()
            self._size = 0
            start = 0
            while start < len(data):
                end = start + _PIECE
                while end < len(data) and data[end] & 0xC0 == 0x80:
                    end -= 1  # do not cut a character in two
                self._send(self._fd, data[start:end])
                start = end

    def forget(self) -> None:
        """Reset the stream in a forked child process. Waiting text is dropped, because the parent process sends it."""
        self._lock = threading.RLock()
        self.waiting = []
        self._size = 0
        self._flooded = None
