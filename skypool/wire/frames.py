"""The binary message format between client, agent and workers, as pure functions: bytes go in, frames come out.

A frame is a 16-byte prefix, a small JSON header and a raw body. The prefix has these fields, at these byte offsets:

    0  2s  b"sk"            marks a frame of skypool; other bytes are refused
    2  B   WIRE_VERSION
    3  B   kind
    4  I   header length    at most MAX_HEADER
    8  Q   body length      at most MAX_BODY

All numbers are big-endian. Because of the limits, a damaged prefix cannot make the receiver reserve a lot of memory. A
value larger than `INLINE` (64 KiB) is sent in advance, in pieces of at most `CHUNK` (1 MiB). Each piece is the body of
a `Kind.BLOB` frame. Other frames may be sent between these frames.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from functools import partial
from json.scanner import make_scanner
from typing import Any, NamedTuple

from skypool.errors import ProtocolError, protocol_violation

WIRE_VERSION = 8
"""The version of the protocol. Client and node must have the same version."""
# 8 (2026-11): There are HANDOVER and HANDED. HELLO may have `heir`, TAKEN `handover`, CALL `attempt`.
# 7 (2026-11): There are AGREE and STEPS.
# 6 (2026-11): There are SAVE and SAVED.
# 4 (2026-11): CALL may have `gang` or `service`. OUTPUT may have `rank` and `label`. WELCOME has `services`. There is
# NOTICE.
# 3 (2026-11): WELCOME has `devices`, `cpu_slots` and `cpu_calls`. RECALL and RECALLED have `cpu`, which names the kind
# of slot. CALL and CALLS may have `"devices": 0`. PONG has `cpu_busy`.
PREFIX = struct.Struct("!2sBBIQ")
"""The fields of a frame's prefix: the bytes b"sk", version, kind, length of the header, length of the body."""
MAX_HEADER = 1 << 20
"""The greatest length of a frame's header, in bytes."""
MAX_BODY = 16 << 20
"""The greatest length of a frame's body, in bytes."""
INLINE = 64 << 10
"""The greatest size in bytes of a value that is sent as the body of one frame. Larger values are sent in pieces."""
CHUNK = 1 << 20
"""The size in bytes of the pieces in which a value larger than `INLINE` is sent. The last one may be smaller."""
_USUAL = CHUNK + (64 << 10)
"""The usual size in bytes of a decoder's memory. It grows for a larger frame, and shrinks afterwards."""
ALIGN = 64
"""Each buffer in a frame's body starts at a multiple of this number of bytes: aligned arrays are processed faster."""
TOGETHER = 512
"""The greatest number of calls in one frame."""
# A pipe takes this many call ids in one write.
CALLS_NAMED = 16 << 10
"""The greatest number of calls that the header of one frame may name."""
_SHORT_JSON = 4 << 10
"""The size in bytes up to which JSON is parsed without the memory check of `check_json`."""
_JSON_GROWS = 3
"""The memory that the objects of a long JSON text may take, as a multiple of the text's length."""
# A list of call ids needs 2.
JSON_SPARE = 256 << 10
"""The memory in bytes that the objects of a long JSON text may take in addition to `_JSON_GROWS` times its length."""
# Many short numbers need this.

Buffer = bytes | bytearray | memoryview


class Kind(IntEnum):
    """Kind of a frame. The comment beside each kind names its senders: c the client, a the agent, w a worker."""

    HELLO = 1  # c: introduces the client and names the calls that it still waits for
    WELCOME = 2  # a: introduces the agent and names the calls that it knows
    FUNCTION = 3  # c: a pickled function and its key
    OBJECT = 4  # c: a value of pool.put() and its key
    DROP = 5  # c: asks the agent to forget an object
    CALL = 6  # c: a call to run; goes to a worker unchanged
    OUTCOME = 7  # w: the result of a call; goes to the client unchanged
    YIELD = 8  # w: items of a stream
    CREDIT = 9  # c w: says up to which item a stream has been consumed
    ITEM = 10  # c: items of an iterator argument
    BLOB = 11  # c a w: a piece of a large value; from a worker: how many bytes of it are written
    CANCEL = 12  # c: asks the agent to stop a call
    RECALL = 13  # c: asks the agent to give back calls that have not begun
    RECALLED = 14  # a: names the calls that the agent gives back
    ACK = 15  # c: says which outcomes and how much output arrived
    OUTPUT = 16  # a w: output that a call printed
    FETCH = 17  # w: asks for a function, object or module that the worker lacks
    MODULE = 18  # a c: a module of the user's own: the agent asks for it, the client answers
    PING = 19  # c: checks the connection; may carry how long a budget lets the node live
    PONG = 20  # a: answers a PING and says what the node is doing
    BYE = 21  # c a: ends everything of this pool on this node
    TAKEN = 22  # a: says that another client uses this node
    CALLS = 23  # c: small calls of one function with the same options; go to one worker unchanged
    OUTCOMES = 24  # a w: the results of such calls, as `end_of` writes them; from a worker: some are ready in its pipe
    NOTICE = 25  # c: a machine is taken back on which other processes of the gangs of these calls run
    SAVE = 26  # c: an order to save a folder to a bucket, or to save what is left of it
    SAVED = 27  # a: the state of all folders that are saved
    AGREE = 28  # c: asks how far ranks of a gang are, and proposes or decides the step at which they hear of a notice
    STEPS = 29  # a: how far these ranks are, and the answer to a proposal
    HANDOVER = 30  # c: a message about the hand-over of a run to its machine; also from others than the node's client
    HANDED = 31  # a: the state of that hand-over


KINDS: dict[int, Kind] = {int(kind): kind for kind in Kind}


class Frame(NamedTuple):
    """Frame as it was received, with its parsed JSON header.

    `body` is a view of the part after the header, and `raw` of the whole frame. The next read may overwrite their
    memory, so copy what must be kept.
    """

    kind: Kind
    header: dict[str, Any]
    body: memoryview
    raw: memoryview


_encode_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_unpack = PREFIX.unpack_from
_scan_json = make_scanner(json.JSONDecoder())  # type: ignore[arg-type]  # it takes a decoder, as json.decoder does
_make_frame = partial(tuple.__new__, Frame)


def encode(kind: Kind, header: Mapping[str, object], body_length: int = 0) -> bytes:
    """Return the prefix and the header of a frame, to be followed by a body of `body_length` bytes.

    The limits `MAX_HEADER` and `MAX_BODY` are not checked here.
    """
    return seal(kind, _encode_json(header).encode(), body_length)


def members(header: Mapping[str, object]) -> str:
    """Return the JSON of a header without its outer braces, such as `"id":1,"ok":true`, for a longer header."""
    return _encode_json(header)[1:-1]


def seal(kind: int, head: bytes, body_length: int = 0) -> bytes:
    """Return the prefix and the header of a frame. Neither the JSON nor the lengths are checked.

    `head` is the whole header as JSON, with its braces. The caller writes `body_length` bytes after it.
    """
    return PREFIX.pack(b"sk", WIRE_VERSION, kind, len(head), body_length) + head


def frame(kind: Kind, header: Mapping[str, object], buffers: Sequence[Buffer] = ()) -> list[Buffer]:
    """Return a whole small frame as a list of buffers, to be written one after the other.

    The body has `buffers`, each at a multiple of 64 bytes. The limit `MAX_BODY` is not checked.
    """
    padded, total = pad(buffers)
    return [encode(kind, header, total), *padded]


def long_frame(kind: Kind, header: Mapping[str, object]) -> list[Buffer]:
    """Return a frame whose body is `header` as JSON, because `header` may be too long for a frame's header.

    `header_of` reads such a frame. Headers that name every call of a node are sent this way.
    """
    return frame(kind, {}, [_encode_json(header).encode()])


def header_of(f: Frame) -> dict[str, Any]:
    """Return the header of a frame, also of one that `long_frame` made.

    The members of a JSON body replace members of the same name. Raises ProtocolError if the body is not a JSON object.
    """
    return f.header if not f.body else f.header | _object_in(f.body)


def pad(buffers: Sequence[Buffer]) -> tuple[Sequence[Buffer], int]:
    """Return the buffers with zeros between them, and the length in bytes of all together.

    The zeros make each buffer start at a multiple of `ALIGN` (64 bytes). Nothing is copied.
    """
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
    """Split the body of a frame into buffers of these lengths in bytes, and return views of them.

    Each buffer starts at a multiple of 64 bytes. Bytes between the buffers and after the last one are ignored. Raises
    ProtocolError if the lengths do not fit the body, or if one is negative or not an integer.
    """
    out: list[memoryview] = []
    at = 0
    for length in lengths:
        at += -at % ALIGN
        if type(length) is not int or length < 0 or at + length > len(body):
            raise protocol_violation(
                f"skypool received a message whose body of {len(body)} bytes cannot have parts of the lengths {lengths}"
            )
        out.append(body[at : at + length])
        at += length
    return out


def total_length(lengths: Sequence[int]) -> int:
    """Return the length in bytes of all buffers together, with the padding to multiples of 64 between them."""
    at = 0
    for length in lengths:
        at += -at % ALIGN + length
    return at


def cut(buffers: Sequence[Buffer], size: int) -> Iterator[list[Buffer]]:
    """Cut a sequence of buffers into pieces of `size` bytes, and yield the pieces. The last piece may be shorter.

    Zeros between the buffers make each buffer start at a multiple of `ALIGN` (64 bytes). Each piece is a list of views
    of the buffers and of these zeros. Nothing is copied.
    """
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
"""The result of one call in a frame with several: (id, True if it returned, seconds that it ran, value or error)."""


def end_of(id_: int, ok: bool, seconds: float, data: Buffer) -> bytes:
    """Return the outcome of one call as an entry of the body of an OUTCOMES frame.

    `ok` is True if the call returned, False if it raised, and `data` is its serialized value or error.
    """
    return _END.pack(id_, len(data), ok, seconds) + data


def ends_in(body: bytes) -> Iterator[End]:
    """Yield the outcomes in the body of an OUTCOMES frame, in order.

    If the body ends in the middle of an outcome, raises ProtocolError after the outcomes before it.
    """
    at = 0
    while at < len(body):
        start = at + _END.size
        if start > len(body):
            raise protocol_violation(
                f"skypool received an incomplete result of a call: {len(body) - at} bytes instead of at least "
                f"{_END.size}"
            )
        id_, length, ok, seconds = _END.unpack_from(body, at)
        at = start + length
        if at > len(body):
            raise protocol_violation(
                f"skypool received an incomplete result of a call: {len(body) - start} bytes instead of {length}"
            )
        yield id_, ok, seconds, body[start:at]


def parse_frame(packet: memoryview) -> Frame:
    """Return the single frame that fills `packet`, as a view of it. Raises ProtocolError for anything else."""
    frames, used = scan(packet)
    if len(frames) != 1 or used != len(packet):
        raise protocol_violation(
            f"skypool received a packet of {len(packet)} bytes with {len(frames)} complete messages in {used} bytes "
            "instead of exactly one message"
        )
    return frames[0]


def scan(view: memoryview, most: int = MAX_BODY) -> tuple[list[Frame], int]:
    """Return all complete frames at the start of `view`, as views, and the number of bytes that they take.

    An incomplete frame at the end is left for a later call. `most` is the greatest length of a body, in bytes.

    Raises:
        ProtocolError: a frame is invalid, of another protocol version, or too large. The frames before it are lost.
    """
    frames: list[Frame] = []
    at = 0
    end = len(view)
    while end - at >= 16:
        magic, version, kind, head, body = _unpack(view, at)
        if magic != b"sk" or version != WIRE_VERSION or kind not in KINDS or head > MAX_HEADER or body > most:
            raise _complaint(magic, version, kind, head, body, most)
        middle = at + 16 + head
        stop = middle + body
        if stop > end:
            break
        header = _object_in(view[at + 16 : middle])
        frames.append(_make_frame((KINDS[kind], header, view[middle:stop], view[at:stop])))
        at = stop
    return frames, at


def _object_in(data: memoryview) -> dict[str, Any]:
    """Return the JSON object that these bytes are. Raises ProtocolError if they are none, or need too much memory."""
    if len(data) > _SHORT_JSON:
        check_json(bytes(data))
    text = str(data, "utf-8", "replace")
    try:
        found, used = _scan_json(text, 0)
    except (ValueError, RecursionError, StopIteration) as e:
        raise protocol_violation(
            f"skypool received a message whose header is not valid JSON: {text[:60]!r} ({e})"
        ) from e
    if type(found) is not dict or used != len(text):
        raise protocol_violation(f"skypool received a message whose header is not a JSON object: {text[:60]!r}")
    return found


def check_json(data: bytes) -> None:
    """Refuse JSON that would take far more memory when parsed than it takes as text, such as a list of empty lists.

    Raises ProtocolError if the estimated memory exceeds 3 times the length of the text plus 256 KiB.
    """
    memory, limit = _memory_of(data), _JSON_GROWS * len(data) + JSON_SPARE
    if memory > limit:
        raise protocol_violation(
            f"skypool received a message whose header of {len(data)} bytes of JSON would take {memory} bytes of memory "
            f"(limit {limit})"
        )


def _memory_of(data: bytes) -> int:
    """Estimate how many bytes the objects of a JSON text take, by the number of brackets, commas and quotes."""
    count = data.count
    return 96 * count(b"[") + 256 * count(b"{") + 40 * count(b",") + 32 * count(b'"')


def share_of_header(value: Mapping[str, object]) -> tuple[int, int]:
    """Return how much of the limits of a frame's header a part of that header takes.

    A sender adds up these numbers for all parts, because a receiver gives up the connection if a header is too large.

    Returns:
        (length, memory). The length of the JSON in bytes counts towards `MAX_HEADER`. The memory in bytes that its
        objects take, beyond what is allowed for that length, counts towards `JSON_SPARE`. It is negative if they take
        less than that.
    """
    data = _encode_json(value).encode()
    return len(data), _memory_of(data) - _JSON_GROWS * len(data)


def _complaint(magic: bytes, version: int, kind: int, head: int, body: int, most: int) -> ProtocolError:
    """Return (do not raise) the error for a prefix that is not allowed. It names the first problem."""
    if magic != b"sk":
        return ProtocolError(
            f"skypool received bytes that are not a message of skypool (they begin with {magic!r}); check that no "
            "other program writes into the connection, such as a shell start file of the node (~/.bashrc, ~/.profile)"
        )
    if version != WIRE_VERSION:
        return ProtocolError(
            f"the other side uses version {version} of skypool's protocol and this side version {WIRE_VERSION}; use "
            "the same version of skypool on client and node"
        )
    if kind not in KINDS:
        return protocol_violation(f"skypool received a message of the unknown kind {kind}")
    return protocol_violation(
        f"skypool received a message with a header of {head} bytes (limit {MAX_HEADER}) and a body of {body} bytes "
        f"(limit {most})"
    )


class Decoder:
    """Decoder that turns a stream of bytes into frames without copying them.

    Read from the socket into `space()`, then call `advance(n)` with the number of bytes read. `most` is the greatest
    length of a frame's body in bytes, from the next frame on.
    """

    def __init__(self) -> None:
        self.most = MAX_BODY
        self._view = memoryview(bytearray(_USUAL))
        self._start = self._end = 0

    def space(self) -> memoryview:
        """Return the memory to read the next bytes into, with room for at least one byte.

        Frames that `advance` returned before become invalid, because their memory may be used again.
        """
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._view) > _USUAL:  # it has grown for a frame that is gone
                self._view = memoryview(bytearray(_USUAL))
        elif self._start and len(self._view) - self._end < 64 << 10:
            kept = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, len(kept)
            self._view[: len(kept)] = kept
        if self._end == len(self._view):
            self._view = memoryview(bytearray(self._view) + bytes(len(self._view)))
        return self._view[self._end :]

    def advance(self, n: int) -> list[Frame]:
        """Count `n` more bytes as read, and return the frames that they complete.

        The frames are views of the decoder's memory, valid until the next call of `space`. Bytes of an incomplete frame
        are kept for later calls. Raises ProtocolError if a frame is invalid, of another protocol version, or too large.
        """
        self._end += n
        frames, used = scan(self._view[self._start : self._end], self.most)
        self._start += used
        return frames

    @property
    def pending(self) -> int:
        """The number of bytes of an incomplete frame that were read.

        If it is not 0 at the end of the stream, that frame was cut off.
        """
        return self._end - self._start
