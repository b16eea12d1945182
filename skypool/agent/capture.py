"""Captures everything that a call and its child processes print, for the option `output="capture"`."""

from __future__ import annotations

import io
import os
import sys

PRINTED = "what the call printed:\n"
"""The beginning of an error's note with the text that a call with `output="capture"` has printed."""
LONGEST = 64 << 10
"""The error of a call that did not end in time has at most this many bytes of what the call printed, the last ones."""


class Capture:
    """Capture of what a call and its child processes print, in a file in memory that the agent can read, too.

    So the agent has the output of a call that does not end by itself. The file is empty while nothing is captured.
    `out` and `err` are the values of `sys.stdout` and `sys.stderr` to restore at the end.

    Attributes:
        last: the end of the last capture, at most `LONGEST` (64 Ki) bytes, if it has ended; "" otherwise. The worker
            empties it before each call.
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
    """Return the last `most` bytes or less of what the file `fd` of a capture has now; "" if nothing is captured.

    Called in the agent.
    """
    size = os.fstat(fd).st_size
    return os.pread(fd, most, max(0, size - most)).decode("utf-8", "replace") if size else ""
