"""Reads the output of a program from its node while it runs, also across lost connections."""

from __future__ import annotations

import contextlib
import shlex
import struct
import threading
from collections.abc import Callable
from functools import cache
from importlib.resources import files

from skypool.files.transfer import NodeEnd
from skypool.runs.output_files import HEAD, STATUS
from skypool.wire.transport import CommandStream

_PIECE = struct.Struct("!III")
_MOST = 1 << 20
_PAUSE = 1.0
"""Seconds between two connections."""


class Follower(threading.Thread):
    """Reads the output of one process until its end.

    Args:
        end: the way to its node.
        folder: the folder of its output files there.
        write: called with the number of the stream and a piece of its output, in this thread. If it raises OSError, no
            more is read.

    Attributes:
        status: the exit status of the program; None before its end is read.
    """

    def __init__(self, end: NodeEnd, folder: str, write: Callable[[int, bytes], None]) -> None:
        super().__init__(name="skypool-follow", daemon=True)
        self._end = end
        self._folder = folder
        self._write = write
        self._stopped = threading.Event()
        self._number = self._position = 0
        self._rest = b""
        self._failed = False
        self.status: int | None = None

    def run(self) -> None:
        while self.status is None and not self._failed:
            words = shlex.join([self._folder, str(self._number), str(self._position)])
            stream = CommandStream(self._end.command(f'exec "$python" -I -c {shlex.quote(_program())} {words}'))
            with contextlib.suppress(OSError, EOFError):  # lost: the next connection goes on where this one was
                self._read(stream)
            stream.shut()
            stream.close()
            if self.status is None and self._stopped.wait(_PAUSE):
                return

    def stop(self, patience: float) -> None:
        """Wait for the end of the output for at most `patience` seconds, and give it up then."""
        self.join(patience)
        self._stopped.set()

    def _read(self, stream: CommandStream) -> None:
        """Read from a connection until the program has ended. Raises EOFError or OSError if it is lost before."""
        while self.status is None:
            number, position, length = _PIECE.unpack(_exactly(stream, _PIECE.size))
            if length > _MOST:
                raise EOFError
            if number != self._number:
                self._rest = b""
            data = _exactly(stream, length)
            self._number, self._position = number, position + length
            self._hear(self._rest + data)

    def _hear(self, data: bytes) -> None:
        """Pass on the whole records of `data`, and keep the rest."""
        begin = 0
        while len(data) - begin >= HEAD.size:
            kind, length = HEAD.unpack_from(data, begin)
            if len(data) - begin - HEAD.size < length:
                break
            piece = data[begin + HEAD.size : begin + HEAD.size + length]
            begin += HEAD.size + length
            if kind == 0:
                (self.status,) = STATUS.unpack(piece)
            elif kind in (1, 2):
                try:
                    self._write(kind, piece)
                except OSError:
                    self._failed = True
                    raise
        self._rest = data[begin:]


@cache
def _program() -> str:
    return (files("skypool") / "runs" / "follow_end.py").read_text()


def _exactly(stream: CommandStream, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        data = stream.socket.recv(size - len(found))
        if not data:
            raise EOFError
        found += data
    return bytes(found)
