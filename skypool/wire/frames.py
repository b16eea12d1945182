"""Frames: the binary message format between client, agent and workers. Pure: bytes in, frames out.

A frame is a 16-byte prefix, a small JSON header and a raw body:

    0  2s  b"sk"            anything else is no frame of ours
    2  B   WIRE_VERSION
    3  B   kind
    4  I   header length    at most MAX_HEADER
    8  Q   body length      at most MAX_BODY

All numbers are big-endian. A frame is bounded so that garbage can ask for no memory: a value larger than
`INLINE` travels beforehand as `Kind.BLOB` frames of at most `CHUNK` bytes each, between which other frames pass.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from functools import partial
from json.scanner import make_scanner
from typing import Any, NamedTuple

from skypool.errors import ProtocolError

WIRE_VERSION = 3
"""What two sides must agree on.

3 (2026-11): WELCOME says `devices`, `cpu_slots` and `cpu_calls`; RECALL and RECALLED say of which kind of slot, as
`cpu`; CALL and CALLS may say `"devices": 0`; PONG says `cpu_busy`.
"""
PREFIX = struct.Struct("!2sBBIQ")
"""Magic, version, kind, and the lengths of header and body."""
MAX_HEADER = 1 << 20
"""Bytes of the longest header."""
MAX_BODY = 16 << 20
"""Bytes of the longest body."""
INLINE = 64 << 10
"""Bytes of the largest value that is the body of one frame."""
CHUNK = 1 << 20
"""Bytes of a piece of a larger value."""
ALIGN = 64
"""A buffer begins at a multiple of so many bytes, as vector instructions like it."""
TOGETHER = 512
"""How many calls may travel in one frame: so many ids go through a pipe at once."""
CALLS_NAMED = 16 << 10
"""How many calls one header names: there is room for more."""
_SHORT_JSON = 4 << 10
"""Bytes of JSON up to which it does not matter what it becomes."""
_JSON_GROWS = 3
"""How many times its length the objects of a long JSON text may take. A list of ids takes twice."""
_JSON_SPARE = 256 << 10
"""Bytes that the objects of a long JSON text may take besides: many short numbers, a node with many devices."""

Buffer = bytes | bytearray | memoryview


class Kind(IntEnum):
    """What a frame says. The letter tells who says it: c client, a agent, w worker."""

    HELLO = 1  # c    who I am and which calls I still wait for
    WELCOME = 2  # a    who I am and which calls I know
    FUNCTION = 3  # c    a pickled function, under its key
    OBJECT = 4  # c    a value of pool.put, under its key
    DROP = 5  # c    forget an object
    CALL = 6  # c    run this; travels unchanged to the worker
    OUTCOME = 7  # w    the call's end; travels unchanged to the client
    YIELD = 8  # w    items of a stream
    CREDIT = 9  # c w  stream items up to here are consumed
    ITEM = 10  # c    items of an iterator argument
    BLOB = 11  # c a w  a piece of a large value; from a worker: so much of it is written
    CANCEL = 12  # c    stop a call
    RECALL = 13  # c    give back calls that have not begun
    RECALLED = 14  # a    these
    ACK = 15  # c    outcomes and output that arrived
    OUTPUT = 16  # a w  what a call printed
    FETCH = 17  # w    a function, an object, a module I lack
    MODULE = 18  # a c  asked for, and answered: a module of the user's own
    PING = 19  # c    are you there? And how long the node may live on, where a budget says so
    PONG = 20  # a    alive, and what the node is doing
    BYE = 21  # c a  end everything of this pool on this node
    TAKEN = 22  # a    another client holds this node
    CALLS = 23  # c    small calls of one function with the same options; travels unchanged to one worker
    OUTCOMES = 24  # a w  the ends of such calls, as `end_of` writes them; from a worker: some wait in its pipe


KINDS: dict[int, Kind] = {int(kind): kind for kind in Kind}


class Frame(NamedTuple):
    """One frame. `body` and `raw`, which is all of it, are views that the next read overwrites: copy what you keep."""

    kind: Kind
    header: dict[str, Any]
    body: memoryview
    raw: memoryview


_encode_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_unpack = PREFIX.unpack_from
_scan_json = make_scanner(json.JSONDecoder())  # type: ignore[arg-type]  # it takes a decoder, as json.decoder does
_make_frame = partial(tuple.__new__, Frame)


def encode(kind: Kind, header: Mapping[str, object], body_length: int = 0) -> bytes:
    """The prefix and header of a frame; the body's buffers follow as they are."""
    return seal(kind, _encode_json(header).encode(), body_length)


def members(header: Mapping[str, object]) -> str:
    """Return the JSON of a header without its braces: what `seal` may be given as a part of a longer header."""
    return _encode_json(header)[1:-1]


def seal(kind: int, head: bytes, body_length: int = 0) -> bytes:
    """`encode` for a header that is JSON already: what travels often is written by hand."""
    return PREFIX.pack(b"sk", WIRE_VERSION, kind, len(head), body_length) + head


def frame(kind: Kind, header: Mapping[str, object], buffers: Sequence[Buffer] = ()) -> list[Buffer]:
    """A whole small frame as buffers to be written one after the other, the body padded by `layout`."""
    padded, total = pad(buffers)
    return [encode(kind, header, total), *padded]


def long_frame(kind: Kind, header: Mapping[str, object]) -> list[Buffer]:
    """A frame whose header may be long, as it names every call of a node: that is its body."""
    return frame(kind, {}, [_encode_json(header).encode()])


def header_of(f: Frame) -> dict[str, Any]:
    """The header of a frame, one of `long_frame` included.

    Raises:
        ProtocolError: its body is no such header.
    """
    return f.header if not f.body else f.header | _object_in(f.body)


def pad(buffers: Sequence[Buffer]) -> tuple[Sequence[Buffer], int]:
    """`buffers` with zeros between them, so that each starts at a multiple of `ALIGN`; and their length in all."""
    if len(buffers) == 1:
        return buffers, len(buffers[0])
    out: list[Buffer] = []
    at = 0
    for buffer in buffers:
        if gap := -at % ALIGN:
            out.append(bytes(gap))
            at += gap
        out.append(buffer)
        at += len(buffer)
    return out, at


def split_buffers(body: memoryview, lengths: Sequence[int]) -> list[memoryview]:
    """The buffers that `pad` put together.

    Raises:
        ProtocolError: when the lengths do not fit the body.
    """
    out: list[memoryview] = []
    at = 0
    for length in lengths:
        at += -at % ALIGN
        if type(length) is not int or length < 0 or at + length > len(body):
            raise ProtocolError(f"a frame's body of {len(body)} bytes has no room for lengths {lengths}")
        out.append(body[at : at + length])
        at += length
    return out


def total_length(lengths: Sequence[int]) -> int:
    """How long `pad` makes buffers of these lengths."""
    at = 0
    for length in lengths:
        at += -at % ALIGN + length
    return at


def cut(buffers: Sequence[Buffer], size: int) -> Iterator[list[Buffer]]:
    """What `pad` makes of the buffers, in pieces of `size` bytes and a last one of what is left, nothing copied."""
    piece: list[Buffer] = []
    room = size
    at = 0
    for buffer in buffers:
        gap = -at % ALIGN
        for view in (memoryview(bytes(gap)), memoryview(buffer)):
            at += len(view)
            while len(view):
                piece.append(view[:room])
                taken = len(piece[-1])
                view = view[taken:]
                room = room - taken
                if not room:
                    yield piece
                    piece = []
                    room = size
    if piece:
        yield piece


_END = struct.Struct("!QI?d")


End = tuple[int, bool, float, bytes]
"""How a call ended that travelled with others: id, whether it returned, seconds, its value or error in one buffer."""


def end_of(id_: int, ok: bool, seconds: float, data: Buffer) -> bytes:
    """One end as it stands in the body of an OUTCOMES frame."""
    return _END.pack(id_, len(data), ok, seconds) + data


def ends_in(body: bytes) -> Iterator[End]:
    """The ends in the body of an OUTCOMES frame.

    Raises:
        ProtocolError: it stops in the middle of one.
    """
    at = 0
    while at < len(body):
        start = at + _END.size
        if start > len(body):
            raise ProtocolError(f"{len(body) - at} bytes are no end of a call")
        id_, length, ok, seconds = _END.unpack_from(body, at)
        at = start + length
        if at > len(body):
            raise ProtocolError(f"an end of {length} bytes stops after {len(body) - start}")
        yield id_, ok, seconds, body[start:at]


def parse_frame(packet: memoryview) -> Frame:
    """The one frame that fills `packet`, as packets between agent and worker do."""
    frames, used = scan(packet)
    if len(frames) != 1 or used != len(packet):
        raise ProtocolError(f"a packet of {len(packet)} bytes is not one frame")
    return frames[0]


def scan(view: memoryview) -> tuple[list[Frame], int]:
    """Every whole frame at the start of `view`, and how many bytes they take.

    Raises:
        ProtocolError: when the bytes are no frame of ours.
    """
    frames: list[Frame] = []
    at = 0
    end = len(view)
    while end - at >= 16:
        magic, version, kind, head, body = _unpack(view, at)
        if magic != b"sk" or version != WIRE_VERSION or kind not in KINDS or head > MAX_HEADER or body > MAX_BODY:
            raise ProtocolError(_complaint(magic, version, kind, head, body))
        middle = at + 16 + head
        stop = middle + body
        if stop > end:
            break
        header = _object_in(view[at + 16 : middle])
        frames.append(_make_frame((KINDS[kind], header, view[middle:stop], view[at:stop])))
        at = stop
    return frames, at


def _object_in(data: memoryview) -> dict[str, Any]:
    if len(data) > _SHORT_JSON:
        _check_json(bytes(data))
    text = str(data, "utf-8", "replace")
    try:
        found, used = _scan_json(text, 0)
    except (ValueError, RecursionError, StopIteration) as e:
        raise ProtocolError(f"a frame's header is not JSON: {text[:60]!r} {e}") from e
    if type(found) is not dict or used != len(text):
        raise ProtocolError(f"a frame's header is not a JSON object but {text[:60]!r}")
    return found


def _check_json(data: bytes) -> None:
    """Refuse JSON that takes far more memory as objects than as text, such as a list of empty lists.

    Raises:
        ProtocolError: it would.
    """
    count = data.count
    memory = 96 * count(b"[") + 256 * count(b"{") + 40 * count(b",") + 32 * count(b'"')
    if memory > _JSON_GROWS * len(data) + _JSON_SPARE:
        raise ProtocolError(f"a frame's header is not what one is: of {len(data)} bytes, {memory} as objects")


def _complaint(magic: bytes, version: int, kind: int, head: int, body: int) -> str:
    if magic != b"sk":
        return f"bytes arrived that are no skypool frame (they begin with {magic!r})"
    if version != WIRE_VERSION:
        return f"the other side speaks wire version {version}, this side {WIRE_VERSION}"
    return f"a frame of kind {kind} with {head} + {body} bytes is not allowed"


class Decoder:
    """Turns a byte stream into frames without copying: read into `space()`, then `advance(n)`."""

    def __init__(self) -> None:
        self._view = memoryview(bytearray(CHUNK + (64 << 10)))
        self._start = self._end = 0

    def space(self) -> memoryview:
        """Where the next bytes go. Frames handed out before must no longer be in use."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start and len(self._view) - self._end < 64 << 10:
            kept = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, len(kept)
            self._view[: len(kept)] = kept
        if self._end == len(self._view):
            self._view = memoryview(bytearray(self._view) + bytes(len(self._view)))
        return self._view[self._end :]

    def advance(self, n: int) -> list[Frame]:
        """The frames completed by `n` more bytes."""
        self._end += n
        frames, used = scan(self._view[self._start : self._end])
        self._start += used
        return frames

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not whole yet: at the end of a stream, a truncated one."""
        return self._end - self._start
