"""What a call prints: at once while it is little, in larger pieces when it floods, and never lost or torn."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skypool.agent import output_stream
from skypool.agent.output_stream import OutputStream


class CallOutput:
    """An `Output` and the pieces it sent."""

    def __init__(self, fd: int = 1) -> None:
        self.pieces: list[bytes] = []
        self.out = OutputStream(fd, self._take)
        self.fd = fd

    def _take(self, fd: int, data: bytes) -> None:
        assert fd == self.fd
        self.pieces.append(data)

    @property
    def text(self) -> str:
        return b"".join(self.pieces).decode()

    def wait_for(self, text: str, within: float = 10.0) -> None:
        until = time.monotonic() + within
        while self.text != text:
            assert time.monotonic() < until, f"{len(self.text)} of {len(text)} characters arrived"
            time.sleep(0.005)

    def end(self) -> None:
        flooded = self.out._flooded
        self.out.forget()
        if flooded is not None:
            flooded.set()


@pytest.fixture
def printed() -> Iterator[CallOutput]:
    made = CallOutput()
    yield made
    made.end()


def test_a_line_leaves_before_the_next_is_printed(printed: CallOutput) -> None:
    for n in range(100):
        print("line", n, file=printed.out)
        assert printed.pieces[-1] == f"line {n}\n".encode()
    assert len(printed.pieces) == 100


def test_a_part_of_a_line_waits_for_its_end(printed: CallOutput) -> None:
    printed.out.write("a")
    printed.out.write("b")
    assert printed.pieces == []
    printed.out.write("c\n")
    assert printed.pieces == [b"abc\n"]


def test_a_part_of_a_line_leaves_when_it_is_flushed(printed: CallOutput) -> None:
    print("…", end="", file=printed.out, flush=True)
    assert printed.pieces == ["…".encode()]
    printed.out.flush()
    assert len(printed.pieces) == 1


def test_a_progress_bar_that_goes_back_to_the_line_start_leaves_at_once(printed: CallOutput) -> None:
    printed.out.write("\r 50 %")
    assert printed.pieces == [b"\r 50 %"]


def test_a_flood_leaves_in_few_pieces_and_arrives_whole_and_in_order(printed: CallOutput) -> None:
    lines = [f"line {n}\n" for n in range(20_000)]
    for line in lines:
        printed.out.write(line)
    printed.wait_for("".join(lines))
    assert len(printed.pieces) < len(lines) / 10


def test_the_last_lines_of_a_flood_leave_without_a_flush(printed: CallOutput) -> None:
    for n in range(1_000):
        printed.out.write(f"{n}\n")
    printed.wait_for("".join(f"{n}\n" for n in range(1_000)))
    printed.out.write("after\n")
    printed.wait_for("".join(f"{n}\n" for n in range(1_000)) + "after\n")


def test_lines_leave_one_by_one_again_after_a_flood() -> None:
    printed = CallOutput()
    try:
        for _ in range(1_000):
            printed.out.write("x\n")
        until = time.monotonic() + 10
        while True:  # the allowance grows with time: some line leaves at once again
            count = len(printed.pieces)
            printed.out.write("y\n")
            if len(printed.pieces) == count + 1 and printed.pieces[-1] == b"y\n":
                break
            assert time.monotonic() < until
            time.sleep(0.005)
    finally:
        printed.end()


@given(st.lists(st.text(max_size=30), max_size=40))
def test_whatever_is_written_arrives_whole_after_a_flush(texts: list[str]) -> None:
    printed = CallOutput()
    texts = [text.encode("utf-8", "ignore").decode() for text in texts]
    for text in texts:
        assert printed.out.write(text) == len(text)
    printed.out.flush()
    assert printed.text == "".join(texts)
    printed.end()


@pytest.mark.parametrize("letter", ["x", "é", "語", "🦊"])
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_a_large_piece_is_cut_between_characters(printed: CallOutput, letter: str, shift: int) -> None:
    text = "a" * shift + letter * 100_000
    printed.out.write(text)
    assert "".join(piece.decode() for piece in printed.pieces) == text
    assert all(0 < len(piece) <= output_stream._PIECE for piece in printed.pieces)


def test_what_is_no_unicode_is_spelled_out(printed: CallOutput) -> None:
    printed.out.write("bad \ud800\n")
    assert printed.pieces == [b"bad \\ud800\n"]


@pytest.mark.parametrize("value", [b"bytes", None, 3])
def test_only_text_can_be_written(printed: CallOutput, value: object) -> None:
    with pytest.raises(TypeError, match="must be str"):
        printed.out.write(value)  # type: ignore[arg-type]  # that is what is tested
    assert printed.pieces == []


def test_it_looks_like_a_text_stream_that_is_no_terminal(printed: CallOutput) -> None:
    assert printed.out.writable()
    assert not printed.out.readable()
    assert not printed.out.isatty()
    assert printed.out.encoding == "utf-8"
    assert (printed.out.fileno(), printed.out.name) == (1, "<stdout>")
    assert OutputStream(2, print).name == "<stderr>"


def test_bytes_go_straight_to_the_file_descriptor() -> None:
    source, sink = os.pipe()
    try:
        OutputStream(sink, print).buffer.write(b"raw")
        assert os.read(source, 10) == b"raw"
    finally:
        os.close(source)
        os.close(sink)


def test_lines_of_several_threads_are_never_mixed(printed: CallOutput) -> None:
    def write(name: str) -> None:
        for n in range(500):
            printed.out.write(f"{name * 20} {n}\n")

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    printed.out.flush()
    lines = printed.text.splitlines()
    for name in "abcd":
        assert [line for line in lines if line[0] == name] == [f"{name * 20} {n}" for n in range(500)]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_leaves_to_its_parent_what_the_parent_wrote(printed: CallOutput) -> None:
    source, sink = os.pipe()
    printed.out.write("parent's")
    pid = os.fork()
    if pid == 0:
        printed.out.forget()
        printed.out.write("child's\n")
        os.write(sink, b"|".join(printed.pieces))
        os._exit(0)
    os.close(sink)
    os.waitpid(pid, 0)
    with open(source, "rb") as file:
        assert file.read() == b"child's\n"
    printed.out.flush()
    assert printed.pieces == [b"parent's"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_while_another_thread_writes_can_still_write(printed: CallOutput) -> None:
    with printed.out._lock:
        done = threading.Event()

        def fork() -> None:
            pid = os.fork()
            if pid == 0:
                printed.out.forget()
                printed.out.write("child\n")
                os._exit(0 if printed.pieces == [b"child\n"] else 1)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            done.set()

        codes: list[int] = []
        thread = threading.Thread(target=fork)
        thread.start()
        assert done.wait(20), "the child waits for a lock that nobody there holds"
        thread.join()
    assert codes == [0]
