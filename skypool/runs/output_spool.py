"""`OutputSpool`: keeps output here until it is shown, so that who reads slowly holds up neither a node nor its end."""

from __future__ import annotations

import os
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from typing import IO

_HEAD = struct.Struct("!IBI")
_SEGMENT = 64 << 20
_MOST = 1 << 30
"""The most bytes that wait to be shown while the program runs."""
Show = Callable[[int, int, bytes], None]


_LOOK = 1.0
"""Seconds between two calls of `check`."""
_IN_MEMORY = 1 << 20
"""The most bytes that are kept in memory because the disk is full."""


class _Segment:
    """A part of the queue, in a file without a name or in memory. `size` is the number of its bytes."""

    def __init__(self, in_memory: bool) -> None:
        self.size = 0
        self.in_memory = in_memory
        self._file: IO[bytes] | None = None if in_memory else tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - see `close`
        self._memory = bytearray()

    def append(self, data: bytes) -> None:
        """Raises OSError, and appends nothing, if the disk is full."""
        if self._file is None:
            self._memory += data
        else:
            view, at = memoryview(data), self.size
            while view:
                written = os.pwrite(self._file.fileno(), view, at)
                view, at = view[written:], at + written
        self.size += len(data)

    def read(self, size: int, at: int) -> bytes:
        if self._file is None:
            return bytes(self._memory[at : at + size])
        found = b""
        while len(found) < size:
            found += os.pread(self._file.fileno(), size - len(found), at + len(found))
        return found

    def clear(self) -> None:
        self.size = 0
        self._memory.clear()
        if self._file is not None:
            os.ftruncate(self._file.fileno(), 0)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class OutputSpool:
    """A queue of pieces of output in files without a name. A thread shows them in their order.

    Args:
        show: called with the rank, the number of the stream, and a piece, in that thread.
        on_failure: called once, in that thread, with the OSError that `show` or `check` has raised. Nothing is shown
            after it.
        check: called each second while nothing waits to be shown. It raises OSError if nobody reads any more.

    Attributes:
        failure: that error; None if there was none.
        lost: the number of bytes that could not be kept here.
        why_lost: why, as text; "" if none are lost.
    """

    def __init__(
        self, show: Show, on_failure: Callable[[OSError], object], check: Callable[[], None] = lambda: None
    ) -> None:
        self._show = show
        self._on_failure = on_failure
        self._check = check
        self._segments: deque[_Segment] = deque()
        self._changed = threading.Condition()
        self._waiting = 0
        self._hurries = self._is_over = False
        self.failure: OSError | None = None
        self.lost = 0
        self.why_lost = ""
        self._thread = threading.Thread(target=self._work, name="skypool-output", daemon=True)
        self._thread.start()

    def put(self, rank: int, stream: int, data: bytes, *, wait: bool = False, always: bool = False) -> bool:
        """Add a piece, and return True. With `wait`, wait first while 1 GB has not been shown; 2 GB after `hurry`.

        Return False if the piece cannot be kept here, or nothing can be shown any more. With `always`, it is kept in
        memory, up to 1 MiB, if the disk is full.
        """
        record = _HEAD.pack(rank, stream, len(data)) + data
        with self._changed:
            while wait and self._waiting > (2 if self._hurries else 1) * _MOST and self.failure is None:
                self._changed.wait()
            if self.failure is not None:
                return False
            if not self._append(record, always):
                self.lost += len(data)
                return False
            self._waiting += len(record)
            self._changed.notify_all()
        return True

    def _append(self, record: bytes, always: bool) -> bool:
        last = self._segments[-1] if self._segments else None
        new: _Segment | None = None
        try:
            if last is None or last.in_memory or last.size > _SEGMENT:
                last = new = _Segment(in_memory=False)
            last.append(record)
            if new is not None:
                self._segments.append(new)
        except OSError as e:
            self.why_lost = e.strerror or str(e)
            if new is not None:
                new.close()
            in_memory = sum(each.size for each in self._segments if each.in_memory)
            if not always or in_memory + len(record) > _IN_MEMORY:
                return False
            if not self._segments or not self._segments[-1].in_memory:
                self._segments.append(_Segment(in_memory=True))
            self._segments[-1].append(record)
        return True

    def hurry(self) -> None:
        """Take more than before without waiting: the machines wait for it."""
        with self._changed:
            self._hurries = True
            self._changed.notify_all()

    def settle(self) -> None:
        """Wait until everything is shown that was added so far."""
        with self._changed:
            while self._waiting and self.failure is None:
                self._changed.wait()

    def drain(self) -> None:
        """Wait until everything is shown. Nothing can be added any more."""
        with self._changed:
            self._hurries = self._is_over = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        try:
            self._show_all()
        except OSError as e:
            self._fail(e)

    def _show_all(self) -> None:
        position = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_over, _LOOK)
                is_idle = not self._waiting
                if is_idle and self._is_over:
                    return
                while not is_idle and position >= self._segments[0].size:
                    self._segments.popleft().close()
                    position = 0
            if is_idle:
                self._check()
                continue
            segment = self._segments[0]
            rank, stream, length = _HEAD.unpack(segment.read(_HEAD.size, position))
            data = segment.read(length, position + _HEAD.size)
            position += _HEAD.size + length
            self._show(rank, stream, data)
            with self._changed:
                self._waiting -= _HEAD.size + length
                if not self._waiting:
                    while len(self._segments) > 1:
                        self._segments.popleft().close()
                    self._segments[0].clear()
                    position = 0
                self._changed.notify_all()

    def _fail(self, error: OSError) -> None:
        with self._changed:
            self.failure = error
            self._waiting = 0
            while self._segments:
                self._segments.popleft().close()
            self._changed.notify_all()
        self._on_failure(error)
