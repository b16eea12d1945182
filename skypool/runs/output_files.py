"""The files with a program's output on its node: records of stdout and stderr, in the order in which they were read.

A record is the number of the stream (1 byte: 1 for stdout, 2 for stderr) and the length of its data (4 bytes), followed
by the data. The last record, of stream 0, has the exit status of the program as its data (4 bytes, signed). Files have
at most `SIZE` bytes and the names 0, 1, 2 and so on. The newest `KEPT` files are kept.

Nodes read this module without skypool, so it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import struct

HEAD = struct.Struct("!BI")
STATUS = struct.Struct("!i")
SIZE = 64 << 20
KEPT = 16


class OutputFiles:
    """The files of one program, to write.

    Args:
        folder: their folder, which is made.
    """

    def __init__(self, folder: str) -> None:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._folder = folder
        self._number = 0
        self._size = 0
        self._file = self._open()

    def _open(self) -> int:
        return os.open(os.path.join(self._folder, str(self._number)), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def write(self, stream: int, data: bytes) -> None:
        """Append a record. Raises OSError, as of a full disk."""
        if self._size + HEAD.size + len(data) > SIZE:
            os.close(self._file)
            self._number += 1
            self._size = 0
            self._file = self._open()
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._folder, str(self._number - KEPT)))
        view = memoryview(HEAD.pack(stream, len(data)) + data)
        self._size += len(view)
        while view:
            view = view[os.write(self._file, view) :]

    def end(self, status: int) -> None:
        """Append the record of the end, and close the files."""
        self.write(0, STATUS.pack(status))
        os.close(self._file)
