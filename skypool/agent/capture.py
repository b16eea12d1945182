"""Captures everything that a call and its child processes print, for the option `output="capture"`."""

from __future__ import annotations

import io
import os
import sys

PRINTED = "what the call printed:\n"
"""The beginning of the note that shows, in an error, what a call with `output="capture"` has printed."""
LONGEST = 64 << 10
"""The most bytes of captured output in the error of a call that did not end in time. The last bytes are shown."""


class Capture:
    """Capture of what a call and its child processes print, in a file in memory that the agent can read, too.

    So the agent has the output of a call that does not end by itself. The file is empty while nothing is captured.

    Args:
        fd: the file descriptor of the file in memory.
        out: the value to which `sys.stdout` is set when a capture ends.
        err: the same for `sys.stderr`.

    Attributes:
        last: what the last capture that has ended contains: at most its last `LONGEST` (64 Ki) bytes, as text. The
            worker sets it to "" before each call.
    """

    def __init__(self, fd: int, out: io.TextIOBase, err: io.TextIOBase) -> None:
        self._fd = fd
        self._streams = out, err
        self._kept: list[int] = []
        self.last = ""

    def begin(self) -> None:
        """Redirect `sys.stdout`, `sys.stderr` and the file descriptors 1 and 2 to the file until `end` is called."""
        self._kept = [os.dup(1), os.dup(2)]
        os.dup2(self._fd, 1)
        os.dup2(self._fd, 2)
        raw = io.FileIO(self._fd, "wb", closefd=False)  # unbuffered, to keep the order with output of child processes
        text = io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
        sys.stdout = sys.stderr = text

    def end(self) -> str:
        """End the capture, and return the printed text, decoded as UTF-8; "" if nothing was printed."""
        sys.stdout, sys.stderr = self._streams
        for number, original in zip((1, 2), self._kept, strict=True):
            os.dup2(original, number)
            os.close(original)
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(0)
            printed = file.read()
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self.last = printed[-LONGEST:].decode("utf-8", "replace")
        return printed.decode("utf-8", "replace")


def captured(fd: int, most: int = LONGEST) -> str:
    """Return the end of what a running call has printed so far; "" if its output is not captured or empty.

    Called in the agent. `fd` is the file in memory that a `Capture` writes. At most its last `most` bytes are read.
    """
    size = os.fstat(fd).st_size
    return os.pread(fd, most, max(0, size - most)).decode("utf-8", "replace") if size else ""
