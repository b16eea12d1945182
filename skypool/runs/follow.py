"""Reads the output of a program from its node while it runs, also across lost connections."""

from __future__ import annotations

import contextlib
import shlex
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import NoReturn

from skypool.files.transfer import NodeEnd
from skypool.runs.output_files import END, LONGEST, Records
from skypool.wire.transport import CommandStream

_PIECE = struct.Struct("!III")
_CURRENT, _OVER = (1 << 32) - 1, (1 << 32) - 2
"""Lengths of pieces that mean something else, as `follow_end` says."""
_MOST = 1 << 20
_PAUSE = 1.0
"""Seconds between two connections."""


class Follower(threading.Thread):
    """Reads the output of one process until its end.

    Args:
        end: the way to its node.
        folder: the folder of its output files below that of the node's agent.
        write: called with the number of the stream and a piece of its output, in this thread.
        whole_lines: True to pass on whole lines, because other processes print, too.

    Attributes:
        status: the exit status of the program; None before its end is read.
        missing: why output is missing; "" if nothing is.
    """

    def __init__(self, end: NodeEnd, folder: str, write: Callable[[int, bytes], None], whole_lines: bool) -> None:
        super().__init__(name="skypool-follow", daemon=True)
        self._end = end
        self._folder = folder
        self._write = write
        self._whole_lines = whole_lines
        self._stopped = threading.Event()
        self._number = self._position = 0
        self._records = Records()
        self._moved = time.monotonic()
        self._stream: CommandStream | None = None
        self.status: int | None = None
        self.missing = ""
        self._is_blocked = False
        self._current = 0.0  # when the node said that nothing more is there
        self._unfinished = {1: b"", 2: b""}

    def run(self) -> None:
        """Read, and connect again after a lost connection, until the end of the program, or `end`."""
        try:
            self._follow()
        finally:
            for stream, piece in self._unfinished.items():
                if piece:
                    self._write(stream, piece)

    def _follow(self) -> None:
        while self.status is None and not self._stopped.is_set():
            words = shlex.join([str(self._number), str(self._position)])
            script = f'exec "$python" -I -c {shlex.quote(_program())} "$folder"/{shlex.quote(self._folder)} {words}'
            with contextlib.suppress(OSError, EOFError):  # lost: the next connection goes on where this one was
                self._stream = stream = self._end.stream(script)
                try:
                    if not self._stopped.is_set():
                        self._read(stream)
                finally:
                    stream.shut()
                    stream.close()
            if self.status is None:
                self._stopped.wait(_PAUSE)

    def finish(self, began: float, patience: float, until: float) -> bool:
        """Wait for the end of the output, while some comes every `patience` seconds, and at most `until` then.

        `began` is when the program has ended, or was to end, by `time.monotonic`.

        Return True if the end came, or if the node says that nothing more is there: the program's end is not written if
        it was killed.
        """
        while self.is_alive() and time.monotonic() < until:
            if not self._is_blocked and time.monotonic() > max(began, self._moved) + patience:
                break
            self.join(0.2)
        is_current = max(began, self._moved) < self._current
        stop([self])
        return self.status is not None or is_current

    def end(self) -> None:
        """Read no more, soon."""
        self._stopped.set()
        if self._stream is not None:
            self._stream.shut()

    def _read(self, stream: CommandStream) -> None:
        """Read from a connection until the program has ended. Raises EOFError or OSError if it is lost before."""
        while self.status is None:
            number, position, length = _PIECE.unpack(exactly(stream, _PIECE.size))
            if length == _CURRENT:
                self._current = time.monotonic()
                continue
            if length == _OVER:
                _, status, lost = END.unpack(exactly(stream, END.size))
                if lost:
                    self.missing = f"{lost:,} bytes could not be written on its node"
                self.status = status
                return
            if length > _MOST:
                self._refuse("the node sent what is no output")
            if not length:
                self.missing = "the node keeps the last 1 GB, and what was before it was not read in time"
            if number != self._number or not length:
                self._records.forget()
            data = exactly(stream, length)
            self._number, self._position = number, position + length
            try:
                records = [*self._records.feed(data)]
            except ValueError as e:
                self._refuse(str(e))
            for kind, piece in records:
                self._pass_on(kind, piece)

    def _refuse(self, why: str) -> NoReturn:
        """Read no more from the node. Raises EOFError."""
        self.missing = why
        self._stopped.set()
        raise EOFError(why)

    def _pass_on(self, stream: int, piece: bytes) -> None:
        """Pass on output; with `whole_lines`, not the beginning of a line unless it is long."""
        if self._whole_lines:
            piece = self._unfinished[stream] + piece
            end = max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1
            if len(piece) - end > LONGEST:
                end = len(piece)
            piece, self._unfinished[stream] = piece[:end], piece[end:]
        if piece:
            self._is_blocked = True
            self._write(stream, piece)
            self._is_blocked = False
            self._moved = time.monotonic()


def stop(followers: Sequence[Follower]) -> None:
    """End followers, and wait for a second, at most, while they pass on their last lines."""
    for each in followers:
        each.end()
    until = time.monotonic() + _PAUSE
    for each in followers:
        if each.ident is not None:
            each.join(max(0.0, until - time.monotonic()))


@cache
def _program() -> str:
    return (files("skypool") / "runs" / "follow_end.py").read_text()


def exactly(stream: CommandStream, size: int) -> bytes:
    """Return the next `size` bytes. Raises EOFError if the connection ends before, and OSError if it is lost."""
    found = bytearray()
    while len(found) < size:
        data = stream.socket.recv(size - len(found))
        if not data:
            raise EOFError
        found += data
    return bytes(found)
