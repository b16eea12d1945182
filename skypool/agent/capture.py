"""Captures everything that a call and its child processes print, for the option `output="capture"`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable


def capture(out: io.TextIOBase, err: io.TextIOBase) -> Callable[[], str]:
    """Redirect to a file in memory everything that this process and its children print.

    `sys.stdout`, `sys.stderr` and the file descriptors 1 and 2 are replaced until the end of the capture.

    Args:
        out: the `sys.stdout` to restore at the end.
        err: the `sys.stderr` to restore at the end.

    Returns:
        a function that ends the capture and returns the printed text, decoded as UTF-8; "" if nothing was printed. Call
            the function only once.
    """
    fd = os.memfd_create("skypool-captured", os.MFD_CLOEXEC)
    kept = [os.dup(1), os.dup(2)]
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    raw = io.FileIO(fd, "wb", closefd=False)  # unbuffered, so that the order with output of child processes is kept
    text = io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)
    sys.stdout = sys.stderr = text

    def end() -> str:
        sys.stdout = out
        sys.stderr = err
        for number, original in zip((1, 2), kept, strict=True):
            os.dup2(original, number)
            os.close(original)
        with open(fd, "rb") as file:
            file.seek(0)
            return file.read().decode("utf-8", "replace")

    return end
