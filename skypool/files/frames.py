"""`Channel`: the frames of a transfer, over a socket or two pipes.

A node gets the text of this module, so it uses the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any, TypeVar

T = TypeVar("T")
VERSION = 1
_HEAD = struct.Struct(">BI")
BLOCK = 1 << 18
"""The most bytes of a file in one frame."""
_LONGEST = 1 << 20
"""The most bytes in one frame."""
_LONGEST_TEXT = 2 << 20
"""The most bytes of a text in one frame, once it is decompressed."""
PART = 1000
"""The most entries or paths in one frame."""
_PART_SIZE = 1 << 17
"""The number of characters after which the entries or paths of one frame end."""
_SILENCE = 60.0
"""Seconds without a byte from the other end after which the connection is given up."""
SIGN = 10.0
"""Seconds without a frame after which an end sends a sign of life."""


class Kind(IntEnum):
    """The kinds of frames. `skypool.files` has their contents."""

    BEGIN = 1
    LIST = 2
    AGAIN = 3
    LISTED = 4
    WANT = 5
    FILE = 6
    DATA = 7
    HOLE = 8
    DONE = 9
    CHANGED = 10
    SAME = 11
    EXTRA = 12
    KEEP = 13
    ALIVE = 14
    END = 15
    FAILED = 16


class Broken(Exception):
    """An error for a connection that is lost. Another connection may be able to go on."""


class Refused(Exception):
    """An error for a transfer that cannot go on, with the reason."""


class Channel:
    """Frames to and from the other end. Any thread may send, and one may receive.

    Args:
        source: the descriptor that is read.
        target: the descriptor that is written; it may be the same one.

    Attributes:
        gone: True once a sign of life could not be sent, as the other end has closed the connection.
        came: the time by `time.monotonic()` at which the other end sent something last; None if it has not yet.
    """

    def __init__(self, source: int, target: int) -> None:
        self._source = source
        self._target = target
        for each in (source, target):
            os.set_blocking(each, False)
        self._read = select.poll()
        self._read.register(source, select.POLLIN)
        self._write = select.poll()
        self._write.register(target, select.POLLOUT)
        self._buffer = bytearray(_HEAD.size + BLOCK)
        self._begin = self._end = 0
        self._sending = threading.Lock()
        self._sent = time.monotonic()
        self._signer: threading.Thread | None = None
        self.gone = False
        self.came: float | None = None

    def send(self, kind: int, content: bytes = b"") -> None:
        """Send one frame, as `send_all`."""
        self.send_all([(kind, content)])

    def tell(self, kind: int, about: object) -> None:
        """Send a frame with JSON, as `send_all`."""
        self.send(kind, packed(about))

    def send_all(self, frames: Sequence[tuple[int, bytes]]) -> None:
        """Send frames. Raises Broken if the other end is gone, or neither takes nor sends anything for 60 s."""
        left: list[memoryview] = []
        for kind, content in frames:
            left.append(memoryview(_HEAD.pack(kind, len(content))))
            if content:
                left.append(memoryview(content))
        with self._sending:
            self._send(left)
            self._sent = time.monotonic()

    def _send(self, left: list[memoryview]) -> None:
        """Write everything in `left`, which this changes."""
        began = time.monotonic()
        try:
            while left:
                try:
                    written = os.writev(self._target, left[:64])
                except BlockingIOError:
                    if not self._write.poll(1000) and time.monotonic() - max(began, self.came or 0.0) > _SILENCE:
                        raise Broken(f"the other end took no data for {_SILENCE:g} s") from None
                    continue
                while left and written >= len(left[0]):
                    written -= len(left.pop(0))
                if written:
                    left[0] = left[0][written:]
                began = time.monotonic()
        except OSError as e:
            raise Broken(f"the connection was closed: {e.strerror}") from e

    def sign(self) -> None:
        """Send a sign of life if nothing was sent for a while."""
        if time.monotonic() - self._sent > SIGN and not self._sending.locked():
            self.send(Kind.ALIVE)

    @contextlib.contextmanager
    def signs(self) -> Iterator[None]:
        """Send signs of life from another thread, while this one is busy in the block. Call `join` some time later."""
        ended = threading.Event()

        def run() -> None:
            try:
                while not ended.wait(SIGN / 4):
                    self.sign()
            except Broken:
                self.gone = True  # the thread in the block finds out

        self._signer = threading.Thread(target=run, daemon=True)
        self._signer.start()
        try:
            yield
        finally:
            ended.set()

    def check(self) -> None:
        """Raise Broken if the other end is known to be gone. Call this in long work, and before its result is used."""
        if self.gone:
            raise Broken("the connection was closed")

    def join(self) -> None:
        """Wait until nothing writes any more. The connection must be shut."""
        if self._signer is not None:
            self._signer.join()

    def receive(self) -> tuple[int, memoryview]:
        """Return the kind and the content of the next frame. The content is valid until the next call.

        Raises Broken if the connection ends, or nothing comes for 60 s, and Refused for the error that the other end
        has told.
        """
        while True:
            self._fill(_HEAD.size)
            kind, size = _HEAD.unpack_from(self._buffer, self._begin)
            if size > _LONGEST:
                raise Refused(f"the other end announced a message of {size} bytes, and the limit is {_LONGEST}")
            self._fill(_HEAD.size + size)
            begin = self._begin + _HEAD.size
            self._begin = begin + size
            content = memoryview(self._buffer)[begin : begin + size]
            if kind == Kind.FAILED:
                raise Refused(str(unpacked(content))[:2000])
            if kind != Kind.ALIVE:
                return kind, content

    def _fill(self, size: int) -> None:
        """Read until `size` bytes are in the buffer."""
        have = self._end - self._begin
        if have >= size:
            return
        if self._begin + size > len(self._buffer):
            kept = self._buffer[self._begin : self._end]
            if size > len(self._buffer):
                self._buffer = bytearray(size)  # not `extend`: views of the old one may live
            self._buffer[:have] = kept
            self._begin, self._end = 0, have
        while self._end - self._begin < size:
            try:
                got = os.readv(self._source, [memoryview(self._buffer)[self._end :]])
            except BlockingIOError:
                if not self._read.poll(_SILENCE * 1000):
                    raise Broken(f"nothing came from the other end for {_SILENCE:g} s") from None
                continue
            except OSError as e:
                raise Broken(f"the connection was closed: {e.strerror}") from e
            if not got:
                raise Broken("the connection was closed")
            self._end += got
            self.came = time.monotonic()


def in_parts(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield items in parts that fit into a frame. `size_of` returns the number of characters of an item."""
    part: list[T] = []
    size = 0
    for each in items:
        part.append(each)
        size += size_of(each)
        if len(part) >= PART or size > _PART_SIZE:
            yield part
            part, size = [], 0
    if part:
        yield part


def packed(about: object) -> bytes:
    """Return the content of a frame with JSON."""
    return zlib.compress(json.dumps(about).encode(), 1)


def unpacked(content: bytes | memoryview) -> Any:
    """Return the JSON of a frame that `packed` made. Raises Refused if it is none, or too long."""
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(content, _LONGEST_TEXT)
        if not unpacker.eof:
            raise Refused("the other end sent a message that is cut off or too long")
        return json.loads(text)
    except (zlib.error, ValueError, RecursionError) as e:
        raise nonsense(e) from e


def nonsense(why: object = "") -> Refused:
    """Return the error for a message that the other end may not send."""
    return Refused("the other end sent a message that makes no sense" + (f": {why}" if why else ""))
