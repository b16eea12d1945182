"""`Checksums`: compares what comes from a store with its ETags, where these are MD5 sums of the content.

An ETag of 32 hexadecimal digits is the MD5 of an object that was uploaded at once. One that ends with "-N" is the MD5
of the MD5s of its N parts, except at Google, where the MD5 of such an object is not known:
https://cloud.google.com/storage/docs/hashes-etags (2026-11). Some stores have others, and so has AWS for objects that
are encrypted with keys of KMS or of the customer: https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html
(2026-11). A difference alone is therefore no proof. What comes twice alike is as the store has it.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from dataclasses import dataclass, field
from typing import Protocol

from skypool.data.folder_saver import PART

_ETAG = re.compile(r'"?([0-9a-f]{32})(?:-([1-9]\d{0,4}))?"?')
_ENOUGH = 3
"""So many objects whose ETags are no MD5, and none whose ETag is, say that the others are not looked at."""
_BLOCK = 1 << 20
"""The bytes of a file that are read at a time."""


class Damaged(OSError):
    """Error: the content that came of an object differs from the checksum of the store."""


class FileSum(Protocol):
    """The checksum of a file that comes in parts."""

    def add(self, at: int) -> None:
        """Take the part of the file that begins at `at`, and is there now. Any thread may call this."""

    def found(self) -> str:
        """Return the checksum, when all parts are there."""
        ...


@dataclass
class Checksums:
    """Compares the objects of one folder with the checksums of the store. Any thread may call the methods.

    Attributes:
        parts: False if ETags of objects that were uploaded in parts say nothing of the content.
        checked: the number of objects that are as the store's checksums say.
    """

    parts: bool = True
    checked: int = 0
    _others: int = 0
    _came: dict[str, str] = field(default_factory=dict[str, str])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def expected(self, version: str | None, size: int) -> str:
        """Return the checksum that an object with this ETag should have; "" if nothing can be compared."""
        found = _ETAG.fullmatch(version or "")
        if found is None or (self._others >= _ENOUGH and not self.checked):
            return ""
        if not found[2]:
            return found[1]
        is_ours = self.parts and int(found[2]) == max(1, -(-size // PART))
        return found[0].strip('"') if is_ours else ""

    def compare(self, name: str, expected: str, found: str) -> None:
        """Raise Damaged if an object has not the expected checksum, unless it has come in the same way before."""
        with self._lock:
            if found == expected:
                self.checked += 1
            elif self._came.pop(name, "") == found:
                self._others += 1
            else:
                self._came[name] = found
                raise Damaged(f"{name} did not come as it is in the bucket: its MD5 is {found}, not {expected}")


def sum_of(data: bytes | bytearray, expected: str) -> str:
    """Return the checksum of an object of one part, of the same kind as the expected one."""
    whole = _md5(data)
    return f"{_md5(whole.digest()).hexdigest()}-1" if "-" in expected else whole.hexdigest()


def sum_of_file(file: int, expected: str) -> FileSum:
    """Return the checksum to be of an open file, of the same kind as the expected one."""
    return _OfParts(file) if "-" in expected else _InOrder(file)


def _md5(data: bytes | bytearray = b"") -> hashlib._Hash:
    return hashlib.md5(data, usedforsecurity=False)


def _read(file: int, at: int, into: hashlib._Hash) -> None:
    """Take one part of a file into a sum."""
    end = at + PART
    while at < end and (data := os.pread(file, min(_BLOCK, end - at), at)):
        into.update(data)
        at += len(data)


class _OfParts:
    """The MD5 of the MD5s of the parts of an object, which was uploaded in parts of `PART` bytes."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._sums: dict[int, bytes] = {}

    def add(self, at: int) -> None:
        part = _md5()
        _read(self._file, at, part)
        self._sums[at] = part.digest()

    def found(self) -> str:
        return f"{_md5(b''.join(each for _, each in sorted(self._sums.items()))).hexdigest()}-{len(self._sums)}"


class _InOrder:
    """The MD5 of an object whose parts come in any order."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._sum, self._next = _md5(), 0
        self._there: set[int] = set()
        self._turn = threading.Lock()

    def add(self, at: int) -> None:
        self._there.add(at)
        if self._turn.acquire(blocking=False):  # else another thread is at it, and the rest follows
            try:
                self._go_on()
            finally:
                self._turn.release()

    def _go_on(self) -> None:
        while self._next in self._there:
            _read(self._file, self._next, self._sum)
            self._next += PART

    def found(self) -> str:
        with self._turn:
            self._go_on()
            return self._sum.hexdigest()
