"""Frames: whatever is sent arrives, and whatever else arrives is a ProtocolError and nothing worse."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skypool.errors import ProtocolError, protocol_violation
from skypool.wire import frames as wire
from skypool.wire.frames import Decoder, Frame, Kind

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
headers = st.dictionaries(st.text().filter(lambda name: name != "lens"), values, max_size=5)
kinds = st.sampled_from(list(Kind))
bodies = st.lists(st.binary(max_size=300), max_size=5)
messages = st.lists(st.tuples(kinds, headers, bodies), max_size=6)


def joined(parts: Sequence[wire.Buffer]) -> bytes:
    return b"".join(bytes(part) for part in parts)


def whole(kind: Kind, header: dict[str, Any], buffers: Sequence[bytes]) -> bytes:
    lens = [len(b) for b in buffers]
    return joined(wire.frame(kind, {**header, "lens": lens}, buffers))


def decode(stream: bytes, cuts: Sequence[int]) -> tuple[list[tuple[Kind, dict[str, Any], list[bytes]]], int]:
    """What a Decoder makes of `stream` when it arrives in pieces of these sizes, and the rest in one."""
    decoder, out, at = Decoder(), [], 0
    sizes = iter(cuts)
    while at < len(stream):
        space = decoder.space()
        n = min(next(sizes, len(space)), len(space), len(stream) - at)
        space[:n] = stream[at : at + n]
        at += n
        out += [copied(f) for f in decoder.advance(n)]
    return out, decoder.pending


def copied(f: Frame) -> tuple[Kind, dict[str, Any], list[bytes]]:
    header = dict(f.header)
    lens = header.pop("lens")
    return f.kind, header, [bytes(part) for part in wire.split_buffers(f.body, lens)]


@given(messages, st.lists(st.integers(1, 200), max_size=60))
def test_whatever_is_sent_arrives_however_the_stream_is_cut(
    sent: list[tuple[Kind, dict[str, Any], list[bytes]]], cuts: list[int]
) -> None:
    sent = [(kind, {k: v for k, v in header.items() if k != "lens"}, buffers) for kind, header, buffers in sent]
    stream = b"".join(whole(*each) for each in sent)
    arrived, pending = decode(stream, cuts)
    assert arrived == sent
    assert pending == 0


@given(kinds, headers, st.integers(0, wire.MAX_BODY))
def test_seal_equals_encode_for_a_header_that_is_json_already(kind: Kind, header: dict[str, Any], length: int) -> None:
    text = json.dumps(header, separators=(",", ":")).encode()
    assert wire.seal(kind, text, length) == wire.encode(kind, header, length)


@given(bodies)
def test_split_gives_back_what_pad_put_together_each_part_aligned(buffers: list[bytes]) -> None:
    padded, total = wire.pad(buffers)
    lens = [len(b) for b in buffers]
    body = joined(padded)
    assert len(body) == total == wire.total_length(lens)
    parts = wire.split_buffers(memoryview(body), lens)
    assert [bytes(part) for part in parts] == buffers
    at = 0
    for buffer in buffers:
        at += -at % wire.ALIGN
        assert body[at : at + len(buffer)] == buffer
        at += len(buffer)


def test_a_single_buffer_is_neither_copied_nor_padded() -> None:
    buffer = bytearray(100)
    padded, total = wire.pad([buffer])
    assert padded[0] is buffer
    assert total == 100


@given(st.lists(st.integers() | st.none() | st.text(max_size=3) | st.floats() | st.booleans(), max_size=6))
def test_lengths_that_do_not_fit_the_body_are_a_protocol_error(lengths: list[Any]) -> None:
    body = memoryview(bytes(256))
    honest = all(type(n) is int and n >= 0 for n in lengths) and wire.total_length(lengths) <= len(body)
    if honest:
        assert [len(part) for part in wire.split_buffers(body, lengths)] == lengths
    else:
        with pytest.raises(ProtocolError, match="cannot have parts of the lengths"):
            wire.split_buffers(body, lengths)


@given(kinds, headers, st.binary(max_size=200), st.data())
def test_a_truncated_frame_is_told_when_the_stream_ends(
    kind: Kind, header: dict[str, Any], body: bytes, data: st.DataObject
) -> None:
    stream = whole(kind, header, [body])
    cut = data.draw(st.integers(1, len(stream) - 1))
    arrived, pending = decode(stream[:cut], [])
    assert arrived == []
    assert pending == cut


@given(kinds, headers, st.binary(max_size=200), st.binary(min_size=1, max_size=20))
def test_a_packet_is_exactly_one_frame(kind: Kind, header: dict[str, Any], body: bytes, more: bytes) -> None:
    packet = whole(kind, header, [body])
    f = wire.parse_frame(memoryview(packet))
    assert (f.kind, bytes(f.body), bytes(f.raw)) == (kind, body, packet)
    for wrong in (packet[:-1], packet + more, packet + packet, b""):
        with pytest.raises(ProtocolError):
            wire.parse_frame(memoryview(wrong))


@given(st.binary(max_size=400))
def test_random_bytes_are_a_protocol_error_or_an_unfinished_frame(noise: bytes) -> None:
    try:
        frames, used = wire.scan(memoryview(noise))
    except ProtocolError:
        assert len(noise) >= wire.PREFIX.size
    else:
        assert used <= len(noise)
        assert all(isinstance(f.header, dict) for f in frames)


@given(kinds, st.binary(max_size=300) | headers.map(lambda h: json.dumps(h).encode()), st.binary(max_size=40))
def test_a_header_of_random_bytes_is_a_protocol_error_unless_it_is_an_object(
    kind: Kind, head: bytes, body: bytes
) -> None:
    packet = wire.seal(kind, head, len(body)) + body
    try:
        expected = json.loads(head.decode("utf-8", "replace"))
    except ValueError:
        expected = None
    if isinstance(expected, dict) and head.startswith(b"{") and head.endswith(b"}"):
        assert wire.parse_frame(memoryview(packet)).header == expected
    else:
        with pytest.raises(ProtocolError, match=r"header (is not|of .* would take)"):
            wire.parse_frame(memoryview(packet))


@given(messages.filter(bool), st.integers(0, 2**32), st.integers(1, 12))
def test_mutated_frames_raise_nothing_but_protocol_errors(
    sent: list[tuple[Kind, dict[str, Any], list[bytes]]], seed: int, hits: int
) -> None:
    stream = bytearray(b"".join(whole(*each) for each in sent))
    dice = random.Random(seed)
    for _ in range(hits):
        at = dice.randrange(len(stream))
        match dice.randrange(3):
            case 0:
                stream[at] = dice.randrange(256)
            case 1:
                stream[at:at] = dice.randbytes(dice.randrange(5))
            case 2 if len(stream) > 40:
                del stream[at : at + dice.randrange(5)]
    try:
        frames, used = wire.scan(memoryview(stream))
    except ProtocolError:
        return
    assert 0 <= used <= len(stream)
    assert all(type(f.header) is dict and f.kind in Kind for f in frames)


@pytest.mark.parametrize(
    ("magic", "version", "kind", "head", "body", "says"),
    [
        (b"HT", wire.WIRE_VERSION, 1, 2, 0, "not a message of skypool"),
        (b"sk", wire.WIRE_VERSION + 1, 1, 2, 0, f"uses version {wire.WIRE_VERSION + 1} of skypool's protocol"),
        (b"sk", wire.WIRE_VERSION, 0, 2, 0, "the unknown kind 0"),
        (b"sk", wire.WIRE_VERSION, 255, 2, 0, "the unknown kind 255"),
        (b"sk", wire.WIRE_VERSION, 1, wire.MAX_HEADER + 1, 0, r"header of \d+ bytes .* body of \d+ bytes"),
        (b"sk", wire.WIRE_VERSION, 1, 2**32 - 1, 0, r"header of \d+ bytes .* body of \d+ bytes"),
        (b"sk", wire.WIRE_VERSION, 1, 2, wire.MAX_BODY + 1, r"header of \d+ bytes .* body of \d+ bytes"),
        (b"sk", wire.WIRE_VERSION, 1, 2, 2**64 - 1, r"header of \d+ bytes .* body of \d+ bytes"),
    ],
)
def test_a_prefix_that_asks_for_too_much_is_refused_before_anything_follows(
    magic: bytes, version: int, kind: int, head: int, body: int, says: str
) -> None:
    prefix = wire.PREFIX.pack(magic, version, kind, head, body)
    with pytest.raises(ProtocolError, match=says):
        decode(prefix, [])


def test_the_largest_lengths_allowed_take_no_memory_until_their_bytes_arrive() -> None:
    prefix = wire.PREFIX.pack(b"sk", wire.WIRE_VERSION, Kind.BLOB, wire.MAX_HEADER, wire.MAX_BODY)
    tracemalloc.start()
    try:
        decoder = Decoder()
        decoder.space()[: len(prefix)] = prefix
        assert decoder.advance(len(prefix)) == []
        decoder.space()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_the_buffer_of_a_decoder_stays_below_three_times_the_largest_frame() -> None:
    stream = whole(Kind.BLOB, {}, [bytes(wire.MAX_BODY)])
    decoder, at, largest = Decoder(), 0, 0
    for _ in range(3):
        frames: list[Frame] = []
        at = 0
        while not frames:
            space = decoder.space()
            largest = max(largest, len(space))
            n = min(len(space), len(stream) - at)
            space[:n] = stream[at : at + n]
            at += n
            frames = decoder.advance(n)
        assert len(frames[0].body) == wire.MAX_BODY
        del frames
    assert largest < 3 * (wire.MAX_BODY + wire.MAX_HEADER)


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("depth", [100, 900, 950, 980, 990, 1000, 5_000, 200_000])
def test_a_header_nested_too_deeply_is_a_protocol_error(depth: int, closed: bool) -> None:
    head = b"[" * depth + b"]" * (depth if closed else 0)
    with pytest.raises(ProtocolError, match=r"header (is not|of .* would take)"):
        wire.parse_frame(memoryview(wire.seal(Kind.PING, head)))


def test_no_depth_of_nesting_raises_anything_else() -> None:
    for depth in range(700, 1100):
        for head in (b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth + b" "):
            with pytest.raises(ProtocolError):
                wire.parse_frame(memoryview(wire.seal(Kind.PING, head)))


DIGITS = b"9" * 5000  # more than Python turns into an int
NO_OBJECTS = [b"", b"{", b"[]", b"1", b'"a"', b"{} ", b" {}", b"{}{}", DIGITS, b'{"a":' + DIGITS + b"}"]


@pytest.mark.parametrize("head", NO_OBJECTS)
def test_a_header_that_is_no_json_object_is_a_protocol_error(head: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"header (is not|of .* would take)"):
        wire.parse_frame(memoryview(wire.seal(Kind.PING, head)))


def test_a_body_is_a_view_of_what_was_read_and_not_a_copy() -> None:
    stream = whole(Kind.CALL, {}, [b"abc"])
    decoder = Decoder()
    space = decoder.space()
    space[: len(stream)] = stream
    (f,) = decoder.advance(len(stream))
    assert bytes(f.body) == b"abc"
    space[len(stream) - 1] = ord("X")
    assert bytes(f.body) == b"abX"


def test_many_frames_in_a_row_never_grow_the_buffer() -> None:
    stream = whole(Kind.OUTPUT, {"n": 1}, [bytes(50_000)])
    decoder = Decoder()
    before = len(decoder.space())
    for _ in range(200):
        at = 0
        while at < len(stream):
            space = decoder.space()
            assert len(space) <= before
            n = min(len(space), len(stream) - at, 7_000)
            space[:n] = stream[at : at + n]
            at += n
            decoder.advance(n)
    assert decoder.pending == 0


def test_a_protocol_violation_says_what_was_wrong_and_then_to_compare_the_versions() -> None:
    error = protocol_violation("the client sent 3 calls instead of 2")
    assert type(error) is ProtocolError
    assert str(error) == (
        "the client sent 3 calls instead of 2; use the same version of skypool on client and node, and report a bug if "
        "the versions are the same"
    )
