"""Room for large values: memory or a file without a name, and a clear word when there is neither."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skypool.agent import value_storage
from skypool.agent.connection import Connection
from skypool.agent.unacknowledged import Unacknowledged
from skypool.errors import SpoolFull
from skypool.wire import exceptions
from skypool.wire.frames import Decoder, Kind, encode

buffers = st.lists(st.binary(max_size=50) | st.binary(max_size=50).map(bytearray), max_size=1500)


def content(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@given(buffers)
def test_what_is_written_is_what_is_read_in_order(parts: list[bytes | bytearray | memoryview]) -> None:
    fd = os.memfd_create("test")
    try:
        value_storage.write_all(fd, parts)
        assert content(fd) == b"".join(parts)
    finally:
        os.close(fd)


def test_a_write_goes_on_when_the_other_end_takes_it_in_small_pieces() -> None:
    source, sink = os.pipe()
    sent: list[bytes | bytearray | memoryview] = [
        os.urandom(100_000),
        b"",
        memoryview(bytearray(os.urandom(300_000))),
        b"end",
    ]
    got = bytearray()

    def read() -> None:
        while part := os.read(source, 7_001):
            got.extend(part)

    reader = threading.Thread(target=read)
    reader.start()
    value_storage.write_all(sink, sent)
    os.close(sink)
    reader.join()
    os.close(source)
    assert bytes(got) == b"".join(sent)


@pytest.mark.parametrize("memory", [0, 1_000, None])
def test_a_value_finds_room_in_memory_or_in_the_folder_and_leaves_no_name(tmp_path: Path, memory: int | None) -> None:
    fd = value_storage.create_storage(5_000, str(tmp_path), memory)
    try:
        assert list(tmp_path.iterdir()) == []
        in_memory = os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")
        assert in_memory == (memory is None)
        value_storage.write_all(fd, [b"x" * 5_000])
        assert content(fd) == b"x" * 5_000
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_room_in_the_folder_is_taken_before_the_value_arrives(tmp_path: Path) -> None:
    fd = value_storage.create_storage(1 << 20, str(tmp_path), 0)
    try:
        assert os.fstat(fd).st_size == 1 << 20
        assert os.fstat(fd).st_blocks * 512 >= 1 << 20
    finally:
        os.close(fd)


def test_a_file_without_a_name_is_made_where_the_file_system_has_no_such_thing(tmp_path: Path) -> None:
    fd = value_storage._unnamed_file(str(tmp_path))
    os.write(fd, b"x")
    os.close(fd)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("size", "folder"), [(1 << 60, ""), (10, "missing"), (10, "file")])
def test_no_room_is_told_with_the_size_and_what_to_do_and_leaks_nothing(tmp_path: Path, size: int, folder: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    before = open_fds()
    with pytest.raises(SpoolFull, match=r"no room for a value of [\d,.]+ MiB: .*; free some") as caught:
        value_storage.create_storage(size, str(tmp_path / folder), 0)
    assert open_fds() == before
    assert isinstance(caught.value, OSError)
    assert caught.value.errno is not None
    assert caught.value.filename == str(tmp_path / folder)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file"]


def test_the_word_that_there_is_no_room_comes_home_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(SpoolFull) as caught:
        value_storage.create_storage(10, str(tmp_path / "missing"), 0)
    back = exceptions.load_error(exceptions.dump_error(caught.value))
    assert type(back) is SpoolFull
    assert str(back) == str(caught.value)
    assert back.errno == caught.value.errno


def test_a_value_larger_than_half_the_free_memory_goes_to_the_folder(tmp_path: Path) -> None:
    assert value_storage._memory_room(1) >= 1
    assert 0 < value_storage._memory_room(1 << 40) < 1 << 40


def connected() -> tuple[Connection, Unacknowledged, socket.socket]:
    """A connection, what sends frames over it that must arrive, and the socket at its other end."""
    ours, theirs = socket.socketpair()
    fd = ours.detach()
    connection = Connection(fd, fd, lambda fd, events: None)
    spool_ = Unacknowledged(value_storage.SpareMemory())
    spool_.connection = connection
    return connection, spool_, theirs


def test_what_is_about_one_call_arrives_in_order_and_other_calls_pass_its_large_values() -> None:
    connection, spool_, theirs = connected()
    for seq in (1, 2):
        fd = os.memfd_create("test")
        value_storage.write_all(fd, [bytes(3 << 20)])
        spool_.begin(7, seq, value_storage.Blob(fd, 3 << 20))
        spool_.add(7, seq, [encode(Kind.YIELD, {"id": 7, "seq": seq})], whole=True)
    spool_.add(7, 3, [encode(Kind.YIELD, {"id": 7, "seq": 3})])
    spool_.add(7, 0, [encode(Kind.OUTCOME, {"id": 7})])
    spool_.add(8, 0, [encode(Kind.OUTCOME, {"id": 8})])
    told: list[tuple[int, int]] = []
    decoder = Decoder()
    theirs.setblocking(False)
    while (7, 0) not in told:
        connection.flush()
        with contextlib.suppress(BlockingIOError):
            while n := theirs.recv_into(decoder.space()):
                frames = decoder.advance(n)
                told += [(f.header["id"], f.header.get("seq", 0)) for f in frames if f.kind is not Kind.BLOB]
    assert told == [(8, 0), (7, 1), (7, 2), (7, 3), (7, 0)]
    spool_.acknowledge([7, 8], 0)
    spool_.consumed(7, 3)
    connection.close()
    theirs.close()


def memory_with(data: bytes) -> value_storage.Blob:
    fd = os.memfd_create("test")
    value_storage.write_all(fd, [data])
    return value_storage.Blob(fd, len(data))


def test_a_value_that_will_never_be_whole_is_sent_no_further_and_tears_no_frame() -> None:
    connection, spool_, theirs = connected()
    data, blob = os.urandom(4 << 20), memory_with(b"")
    os.write(blob.fd, data)
    spool_.begin(7, 0, value_storage.Blob(blob.fd, 64 << 20))
    spool_.written(7, len(data))
    connection.flush()  # until the socket is full, in the middle of a piece
    spool_.add(7, 0, [encode(Kind.OUTCOME, {"id": 7})])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(blob.fd)
    assert not spool_.knows(8)
    told: list[int] = []
    got = b""
    decoder = Decoder()
    theirs.setblocking(False)
    while not told:
        connection.flush()
        with contextlib.suppress(BlockingIOError):
            while n := theirs.recv_into(decoder.space()):
                for f in decoder.advance(n):
                    if f.kind is Kind.BLOB:
                        assert f.header["at"] == len(got)
                        got += f.body
                    else:
                        told.append(f.header["id"])
    assert 0 < len(got) < len(data)
    assert data.startswith(got)
    assert decoder.pending == 0
    spool_.acknowledge([7], 0)
    connection.close()
    theirs.close()


def test_a_connection_that_is_to_send_no_more_values_finishes_a_frame_without_their_files() -> None:
    connection, spool_, theirs = connected()
    data = os.urandom(4 << 20)
    blob = memory_with(data)
    spool_.begin(7, 0, blob)
    spool_.add(7, 0, [encode(Kind.OUTCOME, {"id": 7})], whole=True)
    connection.flush()  # until the socket is full, in the middle of a piece
    connection.abandon_all()
    os.ftruncate(blob.fd, 0)
    connection.send([encode(Kind.HANDED, {})], call=7)
    got, last = b"", None
    decoder = Decoder()
    theirs.setblocking(False)
    while last is not Kind.HANDED:
        connection.flush()
        with contextlib.suppress(BlockingIOError):
            while n := theirs.recv_into(decoder.space()):
                for f in decoder.advance(n):
                    last = f.kind
                    got += f.body
    assert 0 < len(got) < len(data)
    assert data.startswith(got)
    assert decoder.pending == 0
    spool_.connection = None
    spool_.acknowledge([7], 0)
    connection.close()
    theirs.close()


def test_items_that_are_sent_again_and_were_there_already_are_sent_no_further() -> None:
    ours, theirs = socket.socketpair()
    fd = ours.detach()
    connection = Connection(fd, fd, lambda fd, events: None)
    spool_ = Unacknowledged(value_storage.SpareMemory())
    for seq in (1, 2):
        blob = memory_with(bytes(5 << 20))
        spool_.begin(7, seq, blob)
        spool_.add(7, seq, [encode(Kind.YIELD, {"id": 7, "seq": seq})], whole=True)
    spool_.resend(connection)  # the link is back
    connection.flush()  # until the socket is full, in the middle of a piece
    spool_.consumed(7, 2)  # only now is it heard that they had arrived before it broke
    spool_.add(7, 0, [encode(Kind.OUTCOME, {"id": 7})])
    told: list[Kind] = []
    decoder = Decoder()
    theirs.setblocking(False)
    while Kind.OUTCOME not in told:
        connection.flush()
        with contextlib.suppress(BlockingIOError):
            while n := theirs.recv_into(decoder.space()):
                told += [f.kind for f in decoder.advance(n)]
    assert set(told) == {Kind.BLOB, Kind.OUTCOME}
    assert decoder.pending == 0
    spool_.acknowledge([7], 0)
    connection.close()
    theirs.close()


def test_memory_is_kept_for_the_next_value_for_a_while_and_a_file_is_not(tmp_path: Path) -> None:
    kept = value_storage.SpareMemory()
    blob = memory_with(bytes(value_storage.WORTH_KEEPING))
    kept.give(blob)
    kept.let_go(0.0)
    other = value_storage.create_storage(value_storage.WORTH_KEEPING // 2 - 1, str(tmp_path), None, kept.take)
    assert other != blob.fd, "a small value does not take large memory along"
    os.close(other)
    fd = value_storage.create_storage(value_storage.WORTH_KEEPING // 2, str(tmp_path), None, kept.take)
    assert fd == blob.fd
    assert os.lseek(fd, 0, os.SEEK_CUR) == 0
    assert kept.take(value_storage.WORTH_KEEPING) is None
    kept.give(blob)
    kept.let_go()
    assert kept.take(value_storage.WORTH_KEEPING) is None
    before = open_fds()
    kept.give(memory_with(b"small"))
    # /tmp may be a tmpfs, whose files are memory, too; /var/tmp is on a disk.
    fd = value_storage.create_storage(value_storage.WORTH_KEEPING, "/var/tmp", 0)
    kept.give(value_storage.Blob(fd, value_storage.WORTH_KEEPING))
    assert kept.take(value_storage.WORTH_KEEPING) is None
    assert open_fds() == before
