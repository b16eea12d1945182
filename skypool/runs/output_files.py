"""The files with a program's output on its node: records of stdout and stderr, in the order in which they were read.

A record is the number of the stream (1 byte: 1 for stdout, 2 for stderr) and the length of its data (4 bytes), followed
by the data. Files have at most `SIZE` bytes and the names 0, 1, 2 and so on. The newest `KEPT` files are kept. The file
`END_FILE` tells of the end. It has its size from the beginning, so that a full disk has room for it: 0 or 1 for the
end (1 byte), the exit status of the program (4 bytes, signed) and how many bytes of output are missing (8 bytes).

Nodes read this module without skypool, so it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator

HEAD = struct.Struct("!BI")
END_FILE = "end"
END = struct.Struct("!?iQ")
LONGEST = 64 << 10
"""The most bytes of data in a record."""
SIZE = 64 << 20
KEPT = 16


class OutputFiles:
    """The files of one program, to write.

    What cannot be written, as the disk is full, is counted. The next record that can be written says how much it was.

    Args:
        folder: their folder, which is made.
    """

    def __init__(self, folder: str) -> None:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._folder = folder
        self._number = 0
        self._size = 0
        self._lost = 0
        self._why = ""
        self._rest = b""  # of the last record
        self._file = self._open()
        self._end = os.open(os.path.join(folder, END_FILE), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.write(self._end, bytes(END.size))

    def _open(self) -> int:
        return os.open(os.path.join(self._folder, str(self._number)), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def write(self, stream: int, data: bytes) -> None:
        """Append a record of at most `LONGEST` bytes of data, or count it as lost."""
        if not self._tell_lost() or not self._append(stream, data):
            self._lost += len(data)

    def _tell_lost(self) -> bool:
        """Write how much was lost, if anything. Return False if that cannot be written either."""
        if self._lost:
            words = f"\nskypool: {self._lost} bytes of output are missing here: {self._why}\n".encode()
            if not self._append(2, words):
                return False
            self._lost = 0
        return True

    def _append(self, stream: int, data: bytes) -> bool:
        """Append a record and return True. Return False, and leave the record out, if nothing can be written."""
        record = HEAD.pack(stream, len(data)) + data
        try:
            self._complete()
            if self._size and self._size + len(record) > SIZE:
                self._begin_next()
        except OSError as e:
            self._why = e.strerror or str(e)
            return False
        self._rest = record
        try:
            self._complete()
        except OSError as e:
            self._why = e.strerror or str(e)
            if self._rest == record:
                self._rest = b""
                return False
        return True  # or it will be completed, as a reader may have read its beginning already

    def _complete(self) -> None:
        """Write what is left of the last record. Raises OSError if the disk is full."""
        while self._rest:
            written = os.write(self._file, self._rest)
            self._rest = self._rest[written:]
            self._size += written

    def _begin_next(self) -> None:
        self._number += 1
        try:
            file = self._open()
        except OSError:
            self._number -= 1
            raise
        os.close(self._file)
        self._file, self._size = file, 0
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._folder, str(self._number - KEPT)))

    def end(self, status: int) -> None:
        """Tell of the end, and close the files."""
        self._tell_lost()
        os.pwrite(self._end, END.pack(True, status, self._lost), 0)
        os.close(self._file)
        os.close(self._end)


class Records:
    """The records in pieces of output files, to read."""

    def __init__(self) -> None:
        self._rest = b""

    def forget(self) -> None:
        """Forget an unfinished record: what comes next is the beginning of a file."""
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the stream and the data of each record that is whole with the next piece of a file.

        Raises ValueError if the piece is none of such a file.
        """
        data = self._rest + data
        begin = 0
        while len(data) - begin >= HEAD.size:
            stream, length = HEAD.unpack_from(data, begin)
            if length > LONGEST:
                raise ValueError("the node sent what is no output")
            if len(data) - begin - HEAD.size < length:
                break
            piece = data[begin + HEAD.size : begin + HEAD.size + length]
            begin += HEAD.size + length
            if stream in (1, 2) and piece:
                yield stream, piece
        self._rest = data[begin:]
