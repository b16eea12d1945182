"""The console: real pipes, files and pseudo-terminals, and a small terminal to see what is on the screen."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skypool import console, events
from skypool.console.event_text import Words, span
from skypool.console.layout import share_lines
from skypool.console.nonblocking_writer import Above, Backlog, Outlet
from skypool.console.whole_lines import LONGEST, Lines, bare, harmless, last_line, marked
from skypool.logs.reader import Assembler

# --- what the tests need --------------------------------------------------------------------------------


class Terminal:
    """A pseudo-terminal whose other end is read all the time."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        self.seen, self._hung_up = b"", False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self._files: list[TextIO] = []

    def take_over(self) -> None:
        """Stdout and stderr are this terminal; in a fixture, pytest would undo it before the test runs."""
        for name in ("stdout", "stderr"):
            self._files.append(os.fdopen(os.dup(self.slave), "w", encoding="utf-8"))
            self._patch.setattr(sys, name, self._files[-1])

    def on(self, patch: pytest.MonkeyPatch) -> Terminal:
        self._patch = patch
        return self

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while not self._hung_up:
                if select.select([self.master], [], [], 0.02)[0]:
                    self.seen += os.read(self.master, 65536)

    def hang_up(self) -> None:
        """The terminal's window is closed: who writes to it gets an error."""
        self._hung_up = True
        self._thread.join(10)
        os.close(self.master)

    def until(self, text: str) -> None:
        poll(lambda: text in self.seen.decode(), f"{text!r} in {self.seen!r}")

    def end(self) -> list[str]:
        """Nobody writes any more; what a person sees now."""
        for file in self._files:
            with contextlib.suppress(OSError):  # hung up, and something was left in its buffer
                file.close()
        os.close(self.slave)
        self._thread.join(10)
        if not self._hung_up:
            os.close(self.master)
        return self.screen()

    def screen(self) -> list[str]:
        """What a person sees, scrolled-away lines too."""
        lines, row, column = [""], 0, 0
        for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", self.seen.decode("utf-8", "replace")):
            if token == "\r":
                column = 0
            elif token == "\n":
                row, lines = row + 1, [*lines, ""] if row + 1 == len(lines) else lines
            elif token.endswith("A"):
                row -= int(token[2:-1])
            elif token == "\x1b[2K":
                lines[row] = ""
            elif token[0] != "\x1b":
                old = lines[row].ljust(column)
                lines[row] = old[:column] + token + old[column + len(token) :]
                column += len(token)
        return [line.rstrip() for line in lines if line.strip()]


def poll(true: Callable[[], bool], what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not in {seconds} s: {what}"
        time.sleep(0.01)


class Shown:
    """All that came to a captured stream so far."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self._seen = capsys, ["", ""]

    def out(self) -> str:
        return self._read()[0]

    def err(self) -> str:
        return self._read()[1]

    def _read(self) -> list[str]:
        self._seen = [old + new for old, new in zip(self._seen, self._capsys.readouterr(), strict=True)]
        return self._seen


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Shown:
    return Shown(capsys)


@pytest.fixture
def stream() -> events.EventStream:
    return events.EventStream()


@pytest.fixture
def plain(stream: events.EventStream, shown: Shown) -> Iterator[Callable[[], None]]:
    end = console.attach(stream, "plain")
    yield end
    end()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    made = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("CI", raising=False)
    with monkeypatch.context() as patch:
        yield made.on(patch)
    made.end()


def output(
    text: str, *, pool: str = "p", node: int = 0, slot: int = 0, call: int = 1, fd: int = 1, time: float = 0.0
) -> events.Output:
    return events.Output(pool=pool, node=node, slot=slot, call=call, stream=fd, text=text, time=time)


def phase(name: str, *, node: int = 0, slots: int = 0, detail: str = "", at: float = 0.0) -> events.NodePhase:
    return events.NodePhase(pool="p", node=node, phase=name, slots=slots, detail=detail, time=at)


def pool_phase(name: str, *, detail: str = "", at: float = 0.0) -> events.PoolPhase:
    return events.PoolPhase(pool="p", phase=name, detail=detail, time=at)


def failed(at: float, error: str = "ValueError: no") -> events.CallFailed:
    return events.CallFailed(pool="p", node=1, call="train", error=error, time=at)


def status(busy: int, *, at: float = 0.0, running: tuple[str, ...] = (), done: int = 0) -> events.NodeStatus:
    return events.NodeStatus(pool="p", node=0, busy=busy, waiting=0, done=done, running=running, time=at)


def told(words: Words, *happened: events.Event) -> list[str]:
    """What is said, without the time of day and the pool."""
    return [line[line.index("  ") + 2 : -1] for e in happened for line in words.tell(e)]


# --- lines ----------------------------------------------------------------------------------------------


@given(st.text(st.sampled_from("ab\r\n"), max_size=40), st.lists(st.integers(0, 40)))
def test_however_a_text_is_cut_into_pieces_its_lines_are_the_same(text: str, cuts: list[int]) -> None:
    at_once, in_pieces = Lines(), Lines()
    whole = at_once.feed(text)
    places = [0, *sorted(cuts), len(text)]
    fed = "".join(in_pieces.feed(text[a:b]) for a, b in pairwise(places))
    assert (fed, in_pieces.unfinished) == (whole, at_once.unfinished)
    assert fed + in_pieces.finish() == whole + at_once.finish()


@given(st.lists(st.text("abc ", max_size=8)), st.text("abc ", max_size=8))
def test_text_without_redrawn_lines_comes_out_as_it_went_in(lines: list[str], rest: str) -> None:
    whole = "".join(f"{line}\n" for line in lines)
    cut = Lines()
    assert cut.feed(whole + rest) == whole
    assert cut.unfinished == rest


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("\r 10%\r 50%\r100%\n", "100%\n"),
        ("10%\r50%\r100%\r\n", "100%\n"),
        ("dos\r\nunix\n", "dos\nunix\n"),
        ("a\r\rb\nc\r\r\n", "b\nc\n"),
    ],
)
def test_a_redrawn_line_is_its_last_state(printed: str, shown: str) -> None:
    assert Lines().feed(printed) == shown


def test_a_line_that_never_ends_is_broken_and_costs_no_more_than_its_length() -> None:
    lines, pieces = Lines(), 4 * LONGEST // 1024
    got = sum(lines.feed("x" * 1024).count("x") for _ in range(pieces))
    assert got + len(lines.unfinished) == 1024 * pieces
    assert len(lines.unfinished) <= LONGEST


def test_a_progress_bar_that_moves_a_million_times_keeps_one_state() -> None:
    lines = Lines()
    for percent in range(100):
        assert lines.feed("".join(f"\r{percent}.{i}%" for i in range(1000))) == ""
    assert lines.unfinished == "99.999%"
    assert lines.finish() == "99.999%\n"


def test_every_line_is_marked() -> None:
    assert marked("a\n\nb\n", "[0] ") == "[0] a\n[0] \n[0] b\n"
    assert marked("", "[0] ") == ""


def test_colours_stay_and_cursor_movements_go() -> None:
    assert harmless("\x1b[2J\x1b[31mred\x1b[5A\x1b]0;title\x07\n") == "\x1b[31mred\n\x1b[0m"
    assert bare("\x1b[31mred\x1b[0m\x1b[2K") == "red"
    assert last_line("first\n\x1b[1mlast\x1b[0m\n \n") == "last"


# --- what functions print -------------------------------------------------------------------------------


def test_what_is_printed_goes_to_the_same_stream_marked_with_its_node(
    stream: events.EventStream, plain: Callable[[], None], shown: Shown
) -> None:
    stream.emit(output("hello\n", node=3))
    stream.emit(output("oh\n", node=3, fd=2))
    assert (shown.out(), shown.err()) == ("[3] hello\n", "[3] oh\n")


def test_a_node_with_several_slots_is_marked_with_the_slot(
    stream: events.EventStream, plain: Callable[[], None], shown: Shown
) -> None:
    stream.emit(phase("ready", slots=2))
    stream.emit(output("a\nb\n", slot=0))
    stream.emit(output("c\n", slot=1))
    assert shown.out() == "[0.0] a\n[0.0] b\n[0.1] c\n"


def test_lines_of_two_slots_are_never_mixed(
    stream: events.EventStream, plain: Callable[[], None], shown: Shown
) -> None:
    stream.emit(output("half ", slot=1))
    stream.emit(output("other\n", slot=2))
    stream.emit(output("a line\n", slot=1))
    assert shown.out() == "[0.2] other\n[0.1] half a line\n"


def test_lines_of_a_gang_are_marked_with_the_rank_in_the_terminal_and_in_the_logs(
    stream: events.EventStream, plain: Callable[[], None], shown: Shown
) -> None:
    stream.emit(phase("ready", slots=1))
    for rank, label in enumerate(("gpu0", "gpu1", "1", "")):
        stream.emit(dataclasses.replace(output(f"text {rank}\nand", slot=9, call=rank), rank=rank, label=label))
    stream.emit(output("other\n", call=9))
    assert shown.out() == (
        "[0 rank 0] text 0\n[0 rank 0] and\n[0 rank 1] text 1\n[0 rank 1] and\n[0 rank 2] text 2\n[0 rank 2] and\n"
        "[0 rank 3] text 3\n[0] other\n"
    )
    kept = {
        "event": "Output",
        "node": 0,
        "slot": 9,
        "call": 2,
        "stream": 1,
        "rank": 2,
        "label": "1",
        "text": "text 2\n",
    }
    assert [f"[{each.place}] {each.text}" for each in Assembler().feed(kept)] == ["[0 rank 2] text 2"]


def test_with_two_pools_the_mark_names_the_pool(shown: Shown) -> None:
    one, two = events.EventStream(), events.EventStream()
    ends = [console.attach(one, "plain"), console.attach(two, "plain")]
    one.emit(output("a\n", pool="one"))
    two.emit(output("b\n", pool="two"))
    ends[1]()
    one.emit(output("c\n", pool="one"))
    ends[0]()
    assert shown.out() == "[one 0] a\n[two 0] b\n[0] c\n"


def test_the_next_call_does_not_continue_the_line_of_the_last(
    stream: events.EventStream, plain: Callable[[], None], shown: Shown
) -> None:
    stream.emit(output("no end", call=1))
    stream.emit(output("another\n", call=2))
    assert shown.out() == "[0] no end\n[0] another\n"


def test_an_idle_node_has_no_unfinished_lines(
    stream: events.EventStream, plain: Callable[[], None], shown: Shown
) -> None:
    stream.emit(output("no end"))
    stream.emit(status(1))
    assert shown.out() == ""
    stream.emit(status(0))
    assert shown.out() == "[0] no end\n"


def test_the_end_prints_what_has_no_end_and_hears_nothing_after(
    stream: events.EventStream, plain: Callable[[], None], shown: Shown
) -> None:
    stream.emit(output("no end"))
    plain()
    stream.emit(output("too late\n"))
    plain()
    assert shown.out() == "[0] no end\n"


def test_a_progress_bar_is_printed_seldom_and_at_its_end(
    stream: events.EventStream, plain: Callable[[], None], shown: Shown
) -> None:
    for tenth in range(250):
        stream.emit(output(f"\r{tenth}", time=tenth / 10))
    stream.emit(output("\rdone\n", time=25))
    assert shown.out() == "[0] 100\n[0] 200\n[0] done\n"


def test_stdout_is_looked_up_at_each_write(stream: events.EventStream, plain: Callable[[], None], shown: Shown) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as other:
        stream.emit(output("there\n"))
    stream.emit(output("here\n"))
    assert (other.getvalue(), shown.out()) == ("[0] there\n", "[0] here\n")


def test_output_is_written_before_emit_comes_back(
    stream: events.EventStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(tmp_path / "out.txt", "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        end = console.attach(stream, "plain")
        print("before")
        stream.emit(output("during\n"))
        assert (tmp_path / "out.txt").read_text() == "before\n[0] during\n"
        end()


def test_through_a_pipe_what_the_script_printed_first_comes_first(
    stream: events.EventStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    with open(reader) as read, open(writer, "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        end = console.attach(stream, "plain")
        print("before")  # a pipe is not flushed by its lines
        stream.emit(output("during\n"))
        end()
        print("after", flush=True)
        assert [read.readline() for _ in range(3)] == ["before\n", "[0] during\n", "after\n"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_an_encoding_cannot_say_is_escaped(
    stream: events.EventStream, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    reader, writer = os.pipe()
    with open(reader, "rb") as read, open(writer, "w", encoding=encoding) as file:
        monkeypatch.setattr(sys, "stdout", file)
        end = console.attach(stream, "plain")
        stream.emit(output("naïve →\n"))
        end()
        assert os.read(read.fileno(), 100) == "[0] naïve →\n".encode(encoding, "backslashreplace")


# --- files that break, readers that stop ----------------------------------------------------------------


def test_a_reader_that_is_gone_is_told_of_once_and_breaks_nothing(
    stream: events.EventStream, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    file = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stdout", file)
    end = console.attach(stream, "plain")
    for i in range(100):
        stream.emit(output(f"{i}\n"))
    assert shown.err().count("stdout cannot be written") == 1
    file.close()  # nothing of ours is left in its buffer: this does not raise
    fresh = io.StringIO()
    monkeypatch.setattr(sys, "stdout", fresh)
    stream.emit(output("again\n"))
    end()
    assert fresh.getvalue() == "[0] again\n"


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_closed_file_breaks_nothing(stream: events.EventStream, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    heard: list[events.Event] = []
    files = {"stdout": io.StringIO(), "stderr": io.StringIO()}
    for each, file in files.items():
        monkeypatch.setattr(sys, each, file)
    files[name].close()
    end = console.attach(stream, "plain")
    stream.listen(heard.append)
    stream.emit(output("a\n"))
    stream.emit(output("b\n", fd=2))
    stream.emit(phase("ready", slots=1))
    end()
    assert len(heard) == 3
    left = files["stderr" if name == "stdout" else "stdout"].getvalue()
    assert ("[0] b" in left and "ready" in left) if name == "stdout" else left == "[0] a\n"


def test_no_stdout_at_all_breaks_nothing(
    stream: events.EventStream, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    end = console.attach(stream, "plain")
    stream.emit(output("a\n"))
    end()
    assert shown.err() == ""


def test_a_reader_that_does_not_read_stops_nobody_and_loses_nothing(
    stream: events.EventStream, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    end = console.attach(stream, "plain")
    for i in range(2000):  # far more than a pipe takes: with a write that waits this would never end
        stream.emit(output(f"{i:01000}\n"))
    with open(reader) as file:
        got: list[str] = []
        thread = threading.Thread(target=lambda: got.extend(file))
        thread.start()
        end()
        sys.stdout.close()
        thread.join(30)
    assert got == [f"[0] {i:01000}\n" for i in range(2000)]


def test_what_waits_for_a_reader_is_bounded_and_a_loss_is_told() -> None:
    backlog = Backlog(most=10, patience=0.01)
    for _ in range(5):
        backlog.put("12345\n")
    assert backlog.take() == "12345\n" * 2 + "[skypool] output was read too slowly: 18 characters are missing here\n"
    backlog.put("on\n")
    assert backlog.take() == "on\n"


def test_whoever_prints_waits_for_a_reader_that_is_only_slow() -> None:
    backlog = Backlog(most=4, patience=60)
    backlog.put("12345")
    taken: list[str] = []
    thread = threading.Thread(target=lambda: taken.append(backlog.take()))
    thread.start()
    backlog.put("67890")
    thread.join(10)
    assert "".join([*taken, backlog.take()]) == "1234567890"


def test_a_flood_is_written_as_fast_as_it_comes(
    stream: events.EventStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(tmp_path / "out.txt", "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        end = console.attach(stream, "plain")
        piece, began = "the quick brown fox jumps over the lazy dog\n" * 700, time.perf_counter()
        for _ in range(1000):
            stream.emit(output(piece))
        end()
        assert time.perf_counter() - began < 30  # 31 MB; it takes 0.1 s
    assert (tmp_path / "out.txt").stat().st_size == 1000 * (len(piece) + 700 * len("[0] "))


# --- words ----------------------------------------------------------------------------------------------


def test_a_pool_that_goes_as_planned_is_told_in_few_lines() -> None:
    words = Words()
    starting = [phase("launching", node=n) for n in range(3)]
    assert told(words, *starting, pool_phase("launching")) == ["launching 3 nodes"]
    quick = [phase(name, node=0, slots=2, at=0.3) for name in ("booting", "bootstrapping", "ready")]
    assert told(words, *quick) == ["node 0 ready (2 slots)"]
    slow = [
        phase("booting", node=1, at=3),
        phase("bootstrapping", node=1, at=40),
        phase("ready", node=1, slots=1),
    ]
    assert told(words, *slow) == ["node 1 booting", "node 1 bootstrapping", "node 1 ready (1 slot)"]
    assert told(words, pool_phase("ready", at=60)) == ["ready after 1:00 min: 2 nodes, 3 slots"]
    end = [pool_phase("draining"), phase("draining"), phase("ended"), pool_phase("ended", at=90)]
    assert told(words, *end) == ["ended after 1:30 min"]


def test_lines_begin_with_the_time_and_the_pool() -> None:
    (line,) = Words().tell(phase("ready", slots=1, at=1_000_000_000.0))
    assert re.fullmatch(r"\d\d:46:40 p  node 0 ready \(1 slot\)\n", line)


def test_a_lost_node_says_why_once() -> None:
    words = Words()
    told(words, phase("launching"), phase("ready", slots=1))
    why = "node 0 has been silent\nfor 30 s"
    lost = [phase("draining", detail=why), phase("ended", detail=why), pool_phase("draining", detail=why)]
    assert told(words, *lost) == ["node 0 lost: node 0 has been silent", "node 0 ended"]
    assert told(words, pool_phase("ended", detail=why)) == ["ended after 0.0 s; 1 node lost"]


@pytest.mark.parametrize(
    ("usd", "idle_usd", "said"),
    [
        (72.89, 4.375, "; spent 72.8900 USD, idle 4.3750 USD"),
        (72.89, 0.0, "; spent 72.8900 USD, idle 0.0000 USD"),
        (72.89, None, "; spent 72.8900 USD, idle unknown"),
        (0.0, 0.0, ""),
        (None, None, ""),
    ],
)
def test_the_last_line_has_the_cost_and_its_idle_share(usd: float | None, idle_usd: float | None, said: str) -> None:
    end = events.PoolPhase(pool="p", phase="ended", usd=usd, idle_usd=idle_usd, time=90.0)
    assert (
        told(Words(), events.PoolPhase(pool="p", phase="launching", time=0.0), end)[-1] == f"ended after 1:30 min{said}"
    )


def test_a_pool_whose_machines_stay_has_not_ended_but_was_left() -> None:
    left = events.PoolPhase(pool="p", phase="ended", usd=2.0, idle_usd=1.0, staying=1, time=90.0)
    said = told(Words(), events.PoolPhase(pool="p", phase="launching", time=0.0), left)[-1]
    assert said == "left after 1:30 min; spent 2.0000 USD, idle 1.0000 USD"


def test_a_node_that_could_not_be_ended_is_told_when_it_ends_with_a_pool() -> None:
    words = Words()
    told(words, phase("launching"), phase("ready", slots=1), pool_phase("draining"), phase("draining"))
    assert told(words, phase("ended", detail="i-123 still runs")) == ["node 0 failed: i-123 still runs"]


def test_a_pool_that_cannot_start_says_why() -> None:
    assert told(Words(), pool_phase("draining", detail="no offers\nat all")) == ["ends: no offers"]


def test_links_retries_and_failures_are_one_line_each() -> None:
    down = events.LinkDown(pool="p", node=1, reason="ssh: reset\nby peer")
    up = events.LinkUp(pool="p", node=1)
    again = events.CallRetried(pool="p", node=1, call="train", attempt=2, reason="its worker died\nSIGKILL")
    lost = events.CallFailed(pool="p", node=-1, call="train", error="ConnectionLost: x")
    assert told(Words(), down, up, again, failed(1, "ValueError: a\nb"), lost) == [
        "node 1 link down: ssh: reset",
        "node 1 link is back",
        "train() runs again (attempt 2): its worker died",
        "train() failed on node 1: ValueError: a",
        "train() failed: ConnectionLost: x",
    ]


def test_the_end_of_a_service_is_one_line() -> None:
    def ended(error: str = "", delay: float | None = None, **more: bool) -> events.ServiceEnded:
        return events.ServiceEnded(pool="p", node=1, service="ray", error=error, delay=delay, **more)

    soon = ended("WorkerDied: the worker\nSIGKILL", 0.5, restarts=True)
    assert told(Words(), ended("CommandFailed: x"), soon, ended("ConnectionLost: y", restarts=True), ended()) == [
        "service ray ended on node 1: CommandFailed: x",
        "service ray ended on node 1, and starts again in 0.5 s: WorkerDied: the worker",
        "service ray ended on node 1, and starts again when a node joins: ConnectionLost: y",
        "service ray ended on node 1: its function returned",
    ]


def test_an_interruption_says_when_and_shows_in_the_view() -> None:
    notice = events.NodeInterruption(pool="p", node=3, at=1118.0, time=1000.0)
    assert told(Words(), notice) == ["node 3 will be taken back by its provider in 1:58 min: it gets no new calls"]
    from skypool.console.board import Board

    board = Board()
    board.hear(phase("ready", node=3, slots=1))
    board.hear(notice)
    assert [row.phase for row in board.picture().rows] == ["leaving"]


def test_a_retirement_is_told_and_shows_in_the_view() -> None:
    from skypool.console.board import Board

    notice = events.NodeRetirement(pool="p", node=3)
    assert told(Words(), notice) == [
        "node 3 is retired: it gets no new calls, and ends when those that run there have ended"
    ]
    board = Board()
    board.hear(phase("ready", node=3, slots=1))
    board.hear(notice)
    assert [row.phase for row in board.picture().rows] == ["leaving"]


def test_a_long_error_is_cut_to_one_line() -> None:
    (line,) = told(Words(), failed(0, "x" * 10_000))
    assert len(line) < 200
    assert line.endswith("…")


def test_ten_thousand_failures_are_a_few_lines_that_count_them_all() -> None:
    words = Words()
    lines = told(words, *(failed(i / 1000) for i in range(10_000)))
    lines += told(words, pool_phase("ended", at=11))
    assert len(lines) < 10
    shown = sum("failed on node" in line for line in lines)
    held = sum(int(m[1].replace(",", "")) for line in lines if (m := re.match(r"… and ([\d,]+) more", line)))
    assert (shown + held, lines[-1]) == (10_000, "ended after 11 s; 10,000 calls failed")


def test_what_was_held_back_is_told_by_the_next_event_after_a_while_and_at_the_end() -> None:
    words = Words()
    told(words, *(failed(0) for _ in range(20)))
    assert told(words, status(1, at=5)) == []
    assert told(words, status(1, at=11)) == ["… and 15 more calls failed"]
    told(words, *(failed(12) for _ in range(20)))
    assert [line.split("  ")[1] for line in words.close(13)] == ["… and 15 more calls failed\n"]


def test_status_is_not_printed(stream: events.EventStream, plain: Callable[[], None], shown: Shown) -> None:
    stream.emit(status(1, running=("train",)))
    assert (shown.out(), shown.err()) == ("", "")


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.34, "0.3 s"), (59.9, "59 s"), (187, "3:07 min"), (3725, "1:02 h"), (-1, "0.0 s")]
)
def test_durations_are_said_as_a_person_would(seconds: float, said: str) -> None:
    assert span(seconds) == said


# --- which console --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "asked", "live"),
    [
        ({"TERM": "xterm"}, False, True),
        ({"TERM": "xterm", "CI": "false"}, False, True),
        ({"TERM": "xterm", "CI": "true"}, False, False),
        ({"TERM": "xterm", "CI": "true"}, True, True),
        ({"TERM": "dumb"}, False, False),
        ({"TERM": "dumb"}, True, False),
        ({}, False, False),
    ],
)
def test_a_view_is_drawn_on_terminals_that_can_be_drawn_on(
    terminal: Terminal, environ: dict[str, str], asked: bool, live: bool
) -> None:
    terminal.take_over()
    assert console.drawable(sys.stderr, environ, asked=asked) is live


def test_a_view_is_not_drawn_on_files_pipes_and_nothing(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(tmp_path / "log", "w") as file, open(writer, "w") as pipe:
        files = [file, pipe, io.StringIO(), None]
        assert not any(console.drawable(each, {"TERM": "xterm"}, asked=True) for each in files)
    assert not console.drawable(file, {"TERM": "xterm"})


def test_off_shows_what_functions_print_and_nothing_else(stream: events.EventStream, shown: Shown) -> None:
    end = console.attach(stream, "off")
    for name in ("launching", "ready"):
        stream.emit(phase(name, slots=1))
        stream.emit(pool_phase(name))
    stream.emit(output("a\n"))
    stream.emit(output("b\nunfinished", fd=2))
    stream.emit(failed(1.0))
    stream.emit(events.Notice(pool="p", text="look"))
    stream.emit(pool_phase("ended"))
    end()
    assert (shown.out(), shown.err()) == ("[0] a\n", "[0] b\n[0] unfinished\n")


def test_the_plain_console_does_not_load_rich() -> None:
    code = (
        "import sys; from skypool import console, events; s = events.EventStream();"
        "end = console.attach(s, 'auto');"
        "s.emit(events.Output(pool='p', node=0, slot=0, call=1, stream=1, text='a\\n')); end();"
        "sys.exit(any(m.split('.')[0] in ('rich', 'asyncio', 'logging') for m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[0] a\n")


# --- the live view --------------------------------------------------------------------------------------


def drawn(*happened: events.Event, height: int = 24, now: float = 100.0, unfinished: tuple[str, ...] = ()) -> list[str]:
    from rich.console import Console

    from skypool.console.board import Board
    from skypool.console.layout import draw

    board = Board()
    for e in happened:
        board.hear(e)
    file = io.StringIO()
    terminal = Console(file=file, force_terminal=True, width=100, color_system=None, highlight=False)
    terminal.print(draw([board.picture()], now, height, unfinished))
    return [line.rstrip() for line in file.getvalue().splitlines() if line.strip()]


def test_the_view_has_a_line_for_the_pool_and_one_for_each_node() -> None:
    lines = drawn(
        pool_phase("ready", at=35.0),
        phase("ready", slots=2, at=40.0),
        phase("booting", node=1, at=58.0),
        status(2, running=("train", "train"), done=1200),
        output("epoch 1\nepoch 2"),
        failed(50),
    )
    assert [re.sub(" {2,}", "  ", line) for line in lines] == [
        "p  ready  2 nodes  2/2 busy  1,200 done  1 failed  1:05",
        "  node 0  ready  ██  2/2  1,200 done  train ×2  epoch 2".replace("██  ", "██ "),
        "  node 1  booting 0:42  0 done",
    ]


def test_a_view_that_has_heard_nothing_yet_counts_from_zero() -> None:
    assert drawn(now=1.8e9)[0].split()[-1] == "0:00"


def test_the_view_tells_of_a_broken_link_and_its_return() -> None:
    ready, down = phase("ready", slots=1), events.LinkDown(pool="p", node=0, reason="ssh: reset")
    assert "unreachable 0:42" in drawn(ready, replace(down, time=1000.0), now=1042.0)[1]
    assert "ssh: reset" in drawn(ready, down)[1]
    assert "unreachable" not in drawn(ready, down, events.LinkUp(pool="p", node=0))[1]


def test_nodes_that_do_not_fit_are_counted_and_the_troubled_ones_shown() -> None:
    nodes: list[events.Event] = [phase("ready", node=n, slots=1) for n in range(60)]
    nodes.append(events.LinkDown(pool="p", node=57, reason="x"))
    lines = drawn(*nodes, height=10)
    assert len(lines) < 10
    assert any("node 57" in line for line in lines)
    assert lines[-1].strip() == f"… and {60 - (len(lines) - 2)} more nodes: {60 - (len(lines) - 2)} ready"


def test_pools_that_need_little_room_leave_it_to_the_others() -> None:
    assert share_lines([3, 12, 1], 20) == [4, 13, 2]
    assert share_lines([3, 40, 50], 24) == [4, 10, 10]
    assert share_lines([9, 9], 3) == [3, 3]


def test_ended_nodes_leave_the_view_and_their_calls_stay_counted() -> None:
    lines = drawn(phase("ready", slots=1), status(0, done=7), phase("ended"), phase("ready", node=1, slots=1))
    assert not any("node 0" in line for line in lines)
    assert "7 done" in lines[0]


def test_what_a_function_prints_cannot_break_the_view() -> None:
    lines = drawn(phase("ready", slots=1), output("\x1b[2J[bold]\tx\x07\x1b[5A[/]\n"))
    assert len(lines) == 2
    assert lines[1].endswith("  [bold]  x[/]")


def test_on_a_terminal_output_goes_above_the_view_and_only_it_is_left_at_the_end(
    stream: events.EventStream, terminal: Terminal
) -> None:
    terminal.take_over()
    before = sys.stdout, sys.stderr
    end = console.attach(stream, "auto")
    stream.emit(pool_phase("launching"))
    stream.emit(phase("ready", slots=1))
    terminal.until("node 0")
    stream.emit(output("hello\n"))
    print("by the script")
    sys.stderr.write("\r50%")
    terminal.until("50%")
    view = terminal.screen()
    assert view[:2] == ["[0] hello", "by the script"]
    assert view[2].startswith("p  launching")
    assert view[-1] == "50%"
    sys.stderr.write("\r100%\n")
    stream.emit(pool_phase("ended", at=3.0))
    end()
    assert (sys.stdout, sys.stderr) == before
    print("goodbye")
    sys.stdout.flush()
    terminal.until("goodbye")
    left = terminal.screen()
    assert left[:3] == ["[0] hello", "by the script", "100%"]
    assert left[3].endswith("p  ended after 3.0 s")
    assert left[4:] == ["goodbye"]
    assert terminal.seen.rindex(b"\x1b[?25h") > terminal.seen.rindex(b"\x1b[?25l")  # the cursor is back


def test_a_line_longer_than_the_terminal_is_wider_is_neither_cut_nor_broken(
    stream: events.EventStream, terminal: Terminal
) -> None:
    terminal.take_over()
    end = console.attach(stream, "live")
    stream.emit(phase("ready", slots=1))
    terminal.until("node 0")
    stream.emit(output("x" * 500 + "\n"))
    terminal.until("[0] " + "x" * 500)
    end()


def test_what_is_printed_above_the_view_cannot_move_its_cursor(stream: events.EventStream, terminal: Terminal) -> None:
    terminal.take_over()
    end = console.attach(stream, "live")
    stream.emit(phase("ready", slots=1))
    terminal.until("node 0")
    poll(lambda: isinstance(sys.stdout, Above), "the view stands in for stdout")
    stream.emit(output("\x1b[9Afrom a node\n"))
    print("\x1b[9Afrom \x1b[31mhere")
    terminal.until("here")
    end()
    assert b"\x1b[9A" not in terminal.seen
    assert b"from \x1b[31mhere\r\n\x1b[0m" in terminal.seen


def test_stdout_that_is_a_file_gets_what_functions_print_while_the_view_is_drawn(
    stream: events.EventStream, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal.take_over()
    file = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        end = console.attach(stream, "live")
        stream.emit(phase("ready", slots=1))
        terminal.until("node 0")
        stream.emit(output("a\n"))
        print("b")
        assert file.getvalue() == "[0] a\nb\n"
        end()


def test_two_pools_share_one_view(terminal: Terminal) -> None:
    terminal.take_over()
    one, two = events.EventStream(), events.EventStream()
    ends = [console.attach(each, "live") for each in (one, two)]
    one.emit(events.PoolPhase(pool="one", phase="ready"))
    two.emit(events.PoolPhase(pool="two", phase="ready"))
    poll(lambda: [line[:10] for line in terminal.screen()] == ["one  ready", "two  ready"], "both pools")
    ends[0]()
    poll(lambda: [line[:10] for line in terminal.screen()] == ["two  ready"], "the second pool")
    ends[1]()
    poll(lambda: terminal.screen() == [], "nothing")


def test_what_was_begun_before_the_view_ends_goes_on_after_it(stream: events.EventStream, terminal: Terminal) -> None:
    terminal.take_over()
    end = console.attach(stream, "live")
    stream.emit(phase("ready", slots=1))
    terminal.until("node 0")
    kept = sys.stdout  # as a logging handler keeps it
    print("begun", end=" ")
    end()
    kept.write("and ended\n")
    kept.flush()
    terminal.until("ended\r\n")
    assert terminal.screen() == ["begun and ended"]


def test_a_terminal_that_goes_away_breaks_nothing(stream: events.EventStream, terminal: Terminal) -> None:
    terminal.take_over()
    end = console.attach(stream, "live")
    stream.emit(phase("ready", slots=1))
    terminal.until("node 0")
    stands_in = sys.stdout
    terminal.hang_up()
    with pytest.raises(OSError, match="Input/output"):
        os.write(terminal.slave, b"x")
    stream.emit(output("a\n" * 10))
    poll(lambda: sys.stdout is not stands_in, "the view has given up")
    stream.emit(output("a\n" * 10))
    end()


def test_a_stand_in_is_the_file_in_all_but_writing(terminal: Terminal) -> None:
    terminal.take_over()
    above: Any = Above(sys.stdout, Backlog())
    assert (above.fileno(), above.isatty(), above.encoding) == (sys.stdout.fileno(), True, "utf-8")
    assert above.write("abc") == 3
    above.writelines(["d", "e"])
    assert above.unfinished == "abcde"


def test_a_forked_child_prints_as_if_there_were_no_view(stream: events.EventStream, terminal: Terminal) -> None:
    terminal.take_over()
    end = console.attach(stream, "live")
    stream.emit(phase("ready", slots=1))
    terminal.until("node 0")
    poll(lambda: isinstance(sys.stdout, Above), "the view stands in for stdout")
    child = os.fork()
    if not child:
        status = 1
        with contextlib.suppress(BaseException):
            status = int(isinstance(sys.stdout, Above))
            sys.stdout.write("child\n")
            sys.stdout.flush()
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    terminal.until("child")
    end()


# --- with a pool ----------------------------------------------------------------------------------------

_SCRIPT = """
import sys, time
from skypool import ComputePool, compute

@compute
def talk(words):
    print(words)
    print(words, file=sys.stderr)
    return len(words)

@compute
def work():
    print("working", flush=True)
    time.sleep(60)

with ComputePool(name="p", nodes=2, slots=1, console=sys.argv[1]) as pool:
    {body}
"""


def script(tmp_path: Path, body: str) -> str:
    (tmp_path / "script.py").write_text(_SCRIPT.format(body=body))
    return str(tmp_path / "script.py")


def test_stdout_of_a_script_is_what_its_functions_printed_in_order(tmp_path: Path) -> None:
    path = script(tmp_path, "print(talk('hello') >> pool)")
    done = subprocess.run([sys.executable, path, "plain"], capture_output=True, text=True, timeout=60)
    assert re.fullmatch(r"\[[01]\] hello\n5\n", done.stdout), done
    assert re.search(r"^\[[01]\] hello$", done.stderr, re.MULTILINE)
    said = [line.split("  ", 1)[1] for line in done.stderr.splitlines() if line[0] != "["]
    assert said[0] == "launching 2 nodes"
    assert sorted(said[1:3]) == ["node 0 ready (1 slot)", "node 1 ready (1 slot)"]
    assert said[3].startswith("ready after")
    assert said[4].startswith("ended after")
    assert len(said) == 5


def test_a_script_with_the_console_off_still_prints_what_its_functions_print(tmp_path: Path) -> None:
    path = script(tmp_path, "print(talk('hello') >> pool)")
    done = subprocess.run([sys.executable, path, "off"], capture_output=True, text=True, timeout=60)
    assert re.fullmatch(r"\[[01]\] hello\n5\n", done.stdout), done
    assert re.fullmatch(r"\[[01]\] hello\n", done.stderr), done


@pytest.mark.parametrize("mode", ["live", "plain"])
def test_an_exception_leaves_the_terminal_as_it_was(tmp_path: Path, mode: str) -> None:
    terminal = Terminal()
    code, screen = on_terminal(terminal, script(tmp_path, "talk('hi') >> pool; 1 / 0"), mode)
    assert code == 1
    assert screen[-1] == "ZeroDivisionError: division by zero"
    assert terminal.seen.count(b"\x1b[?25h") == terminal.seen.count(b"\x1b[?25l") == (mode == "live")


def test_ctrl_c_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    terminal = Terminal()
    code, screen = on_terminal(terminal, script(tmp_path, "work() >> pool"), "live", interrupt="working")
    assert code in (-signal.SIGINT, 130)
    assert screen[-1] == "KeyboardInterrupt"
    assert any("p  ended after" in line for line in screen)
    assert terminal.seen.count(b"\x1b[?25h") == terminal.seen.count(b"\x1b[?25l") == 1


def test_a_pool_that_nobody_ends_leaves_the_terminal_as_it_was_too(tmp_path: Path) -> None:
    terminal = Terminal()
    body = "pass\npool = ComputePool(console='live')\nprint(talk('bye') >> pool)\ntime.sleep(0.5)"
    code, screen = on_terminal(terminal, script(tmp_path, body), "off")
    assert code == 0
    assert "3" in screen
    assert terminal.seen.count(b"\x1b[?25h") == terminal.seen.count(b"\x1b[?25l") == 1


def test_what_input_asks_and_what_is_typed_is_seen_under_a_live_view(tmp_path: Path) -> None:
    terminal = Terminal()
    body = "talk('before') >> pool; time.sleep(0.5); got = input('your name? '); print('hello', got)\n"
    body += "    talk('after') >> pool; time.sleep(0.5)"
    process = subprocess.Popen(
        [sys.executable, script(tmp_path, body), "live"],
        stdin=terminal.slave,
        stdout=terminal.slave,
        stderr=terminal.slave,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
        start_new_session=True,
    )
    terminal.until("your name? ")
    os.write(terminal.master, b"Ada")
    terminal.until("Ada")
    time.sleep(1.5)  # in which a view would have been drawn twice
    assert terminal.screen()[-1] == "your name? Ada"
    os.write(terminal.master, b"\n")
    assert process.wait(60) == 0
    screen = terminal.end()
    assert "your name? Ada" in screen
    assert "hello Ada" in screen
    assert any(line.endswith("] after") for line in screen)


def on_terminal(terminal: Terminal, path: str, mode: str, interrupt: str = "") -> tuple[int, list[str]]:
    """Run a script on a terminal; Ctrl-C when it shows `interrupt`. Its exit code, what is seen."""
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen(
        [sys.executable, path, mode],
        stdin=terminal.slave,
        stdout=terminal.slave,
        stderr=terminal.slave,
        env=environ,
        start_new_session=True,
    )
    if interrupt:
        terminal.until(interrupt)
        process.send_signal(signal.SIGINT)
    code = process.wait(60)
    return code, terminal.end()


def test_a_reader_that_stops_reading_does_not_cost_a_pool_its_nodes(tmp_path: Path) -> None:
    body = "talk('x' * 99_000 + chr(10) + 'y' * 99_000) >> pool; time.sleep(4)\n"
    body += "    print(list(pool.nodes.values()), file=sys.stderr)"
    path = script(tmp_path, body)
    text = Path(path).read_text().replace("console=", "liveness=1.5, console=")
    Path(path).write_text(text)
    process = subprocess.Popen(
        [sys.executable, path, "plain"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert process.stdout is not None
    said = ""
    while not said.endswith("']\n"):
        line = process.stderr.readline()
        assert line, f"it ended: {said}"
        said += line
    assert said.endswith("\n['ready', 'ready']\n")
    assert process.stdout.read().count("y") == 99_000
    process.stderr.read()
    assert process.wait(30) == 0


def test_an_outlet_can_be_waited_for_when_nothing_waits() -> None:
    Outlet("stdout").drain(0.0)


def test_steps_are_told_only_where_making_ready_takes_long() -> None:
    words = Words()

    def step(at: float, state: str, detail: str = "") -> list[str]:
        e = events.BootstrapStep(pool="p", node=0, time=at, step="env", state=state, number=3, steps=5, detail=detail)
        return [line.partition("  ")[2] for line in words.tell(e)]

    words.tell(events.NodePhase(pool="p", node=0, time=100.0, phase="launching"))
    assert step(100.5, "started") == []
    assert step(102.0, "started") == ["node 0 step 3 of 5: env\n"]
    assert step(103.0, "done") == []
    assert step(104.0, "retried", "attempt 1 failed; the next one in 2 s") == [
        "node 0 step env: attempt 1 failed; the next one in 2 s\n"
    ]
    assert [line.partition("  ")[2] for line in words.tell(events.Notice(pool="p", text="look"))] == ["look\n"]


def test_files_that_take_long_are_told_every_few_seconds() -> None:
    words = Words()

    def files(at: float, done: int, node: int = -1) -> list[str]:
        e = events.FilesProgress(pool="p", time=at, done=done * 10**6, total=300 * 10**6, node=node)
        return [line.partition("  ")[2] for line in words.tell(e)]

    assert [files(100.0, 10), files(104.0, 20), files(106.0, 120), files(107.0, 300)] == [
        [],
        [],
        ["packing files: 120 of 300 MB\n"],
        [],
    ]
    assert files(110.0, 1, node=2) == []
    assert files(116.0, 150, node=2) == ["node 2 receives files: 150 of 300 MB\n"]
