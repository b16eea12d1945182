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


class Damaged(OSError):
    """Error: the content that came of an object differs from the checksum of the store."""


class Sum(Protocol):
    """The checksum of one object.

    Attributes:
        expected: what the store says.
    """

    expected: str

    def add(self, at: int, data: memoryview) -> None:
        """Take a part of the content, which begins at `at`. Any thread may call this."""

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

    def begin(self, version: str | None, size: int, file: int | None) -> Sum | None:
        """Return the checksum to be of an object with this ETag; None if nothing can be compared.

        Args:
            file: the open file to which parts are written before they are added; None if all comes at once.
        """
        found = _ETAG.fullmatch(version or "")
        if found is None or (self._others >= _ENOUGH and not self.checked):
            return None
        if found[2]:
            parts = int(found[2]) if self.parts else 0
            return _OfParts(found[0].strip('"')) if parts == max(1, -(-size // PART)) else None
        return _AtOnce(found[1]) if file is None else _InOrder(found[1], file, size)

    def compare(self, name: str, sum_: Sum) -> None:
        """Raise Damaged if an object is not as the checksum says, unless it has come in the same way before."""
        found = sum_.found()
        with self._lock:
            if found == sum_.expected:
                self.checked += 1
            elif self._came.pop(name, "") == found:
                self._others += 1
            else:
                self._came[name] = found
                raise Damaged(f"{name} did not come as it is in the bucket: its MD5 is {found}, not {sum_.expected}")


def _md5(data: bytes | memoryview = b"") -> hashlib._Hash:
    return hashlib.md5(data, usedforsecurity=False)


class _AtOnce:
    """The MD5 of an object that comes in one part."""

    def __init__(self, expected: str) -> None:
        self.expected = expected
        self._sum = _md5()

    def add(self, at: int, data: memoryview) -> None:
        self._sum.update(data)

    def found(self) -> str:
        return self._sum.hexdigest()


class _OfParts:
    """The MD5 of the MD5s of the parts of an object, which was uploaded in parts of `PART` bytes."""

    def __init__(self, expected: str) -> None:
        self.expected = expected
        self._sums: dict[int, bytes] = {}

    def add(self, at: int, data: memoryview) -> None:
        self._sums[at] = _md5(data).digest()

    def found(self) -> str:
        return f"{_md5(b''.join(each for _, each in sorted(self._sums.items()))).hexdigest()}-{len(self._sums)}"


class _InOrder:
    """The MD5 of an object whose parts come in any order. It is made while they come, of what is in the file."""

    def __init__(self, expected: str, file: int, size: int) -> None:
        self.expected = expected
        self._file, self._size = file, size
        self._sum, self._next = _md5(), 0
        self._there: set[int] = set()
        self._turn = threading.Lock()

    def add(self, at: int, data: memoryview) -> None:
        self._there.add(at)
        if self._turn.acquire(blocking=False):  # else another thread is at it, and the rest follows
            try:
                self._go_on()
            finally:
                self._turn.release()

    def _go_on(self) -> None:
        while self._next in self._there:
            self._sum.update(os.pread(self._file, PART, self._next))
            self._next += PART

    def found(self) -> str:
        with self._turn:
            self._go_on()
            return self._sum.hexdigest()
