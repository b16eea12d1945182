"""A link that breaks at a bad moment, under a real agent: what was under way arrives, however much that is."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skypool as sky
from skypool import events
from skypool.link.agent_messages import Piece
from skypool.link.chunks import Pieces
from skypool.link.link import Link
from skypool.link.reading_turns import Turns
from skypool.wire.transport import CommandStream
from tests.conftest import eventually
from tests.exhausted import without_descriptors
from tests.work import nap

ROOT = Path(__file__).parent.parent


def link_of(pool: sky.ComputePool) -> Link:
    engine: Any = pool._engine
    link: Link = engine.connections.links[0]
    return link


def cut(link: Link) -> None:
    """Break the connection; it comes back by itself."""
    link._loop.call_soon_threadsafe(link._break, "cut by the test", link._stream)


def names_heard(pool: sky.ComputePool) -> list[str]:
    heard: list[str] = []
    pool.events.listen(lambda e: heard.append(type(e).__name__))
    return heard


@pytest.mark.slow
def test_a_large_function_that_was_half_sent_is_sent_again_for_the_call_that_waits_for_it() -> None:
    values = np.ones(40_000_000)

    @sky.compute
    def first(n: int) -> float:
        return float(values[0]) + n

    with sky.ComputePool(slots=1, console="off", liveness=20) as mine:
        link, heard = link_of(mine), names_heard(mine)
        future = first(1) > mine  # its frame passes the function, of which most is still to come
        eventually(lambda: link._outbox._large)
        time.sleep(0.02)
        assert link._outbox._large
        cut(link)
        assert future.result(timeout=60) == 2.0
        assert "LinkUp" in heard


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[Crowd]:
    with sky.ComputePool(slots=110, console="off", liveness=30) as mine:
        made = Crowd(mine, tmp_path / "go")
        yield made
        made.go()  # otherwise the pool would wait for its calls after a test that failed


class Crowd:
    """A node with as many calls as it takes, and none of them ends before it may."""

    def __init__(self, pool: sky.ComputePool, go: Path) -> None:
        engine: Any = pool._engine
        self.pool, self.node_queue, self._go = pool, engine.dispatch.node_queues[0], go
        self.count = 110 * 512
        self.heard: list[events.Event] = []

    def begin(self) -> Iterator[int]:
        path = str(self._go)

        def wait_until_it_may_go_on(n: int) -> int:
            while not os.path.exists(path):
                time.sleep(0.1)
            return n

        self.pool.events.listen(self.heard.append)
        results = self.pool.map(wait_until_it_may_go_on, range(self.count), chunksize=512)
        eventually(lambda: self.running() == self.count, 120, "that all calls are under way")
        return results

    def running(self) -> int:
        """The number of calls under way. Iterates over none of them, as their lock is not held."""
        return sum(len(lane.underway) for lane in self.node_queue.lanes)

    def go(self) -> None:
        self._go.touch()

    def told(self, *kinds: type[events.Event]) -> list[events.Event]:
        return [event for event in self.heard if isinstance(event, kinds)]


def test_a_pause_of_this_process_is_no_silence_of_its_nodes() -> None:
    with sky.ComputePool(slots=1, console="off") as mine:
        link = link_of(mine)
        assert sum([1, 2]) == mine.submit(sum, [1, 2]).result(60)
        before = time.monotonic() - link._clock()
        link._clock._last -= 600.0  # as if the clock had not been asked for ten minutes
        silence = link.silence
        assert silence is not None
        assert time.monotonic() - link._clock() > before + 500
        assert silence < 60


@pytest.mark.slow
def test_a_client_that_is_held_up_reads_what_has_come_before_it_judges_its_node() -> None:
    with sky.ComputePool(slots=1, console="off", liveness=2) as mine:
        heard = names_heard(mine)
        call = threading.Thread(target=lambda: nap(14) >> mine)  # this thread reads
        call.start()
        for _ in range(4):
            time.sleep(1.2)
            ctypes.PyDLL(None).usleep(2_200_000)  # no other thread of this process runs meanwhile
        call.join()
        assert "NodeStatus" in heard
        assert "LinkDown" not in heard


def test_a_link_that_breaks_while_a_caller_takes_in_a_large_value_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    caller, take = threading.current_thread(), Pieces.take
    taken: list[int] = []

    @sky.compute
    def made(size: int) -> np.ndarray:
        return np.ones(size)

    with sky.ComputePool(slots=1, console="off", liveness=20) as mine:
        link, heard = link_of(mine), names_heard(mine)

        def take_slowly(self: Pieces, piece: Piece, body: memoryview, awaited: Any) -> None:
            if threading.current_thread() is caller and piece.at and not taken:
                taken.append(piece.at)
                cut(link)
                eventually(lambda: not link.is_up)
            take(self, piece, body, awaited)

        monkeypatch.setattr(Pieces, "take", take_slowly)
        assert (made(4_000_000) >> mine).sum() == 4_000_000
        assert taken
        assert "LinkUp" in heard
        assert "CallFailed" not in heard


def test_a_connection_that_is_cut_when_a_caller_begins_to_read_it_stays_open_until_the_caller_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with sky.ComputePool(slots=1, console="off", liveness=20) as mine:
        link, heard = link_of(mine), names_heard(mine)
        assert link._inbox.current is not None
        turns: Any = type(link._inbox.current.turns)
        caller, take = threading.current_thread(), turns.take
        open_then: list[bool] = []

        def take_late(self: Turns) -> None:
            if threading.current_thread() is caller and not open_then:
                stream = link._stream
                assert stream is not None
                cut(link)
                eventually(lambda: stream.process.poll() is not None)  # all that can be closed is closed
                open_then.append(stream.socket.fileno() >= 0)
            take(self)

        monkeypatch.setattr(turns, "take", take_late)
        assert list(mine.map(sum, [[n, 1] for n in range(100)])) == list(range(1, 101))
        assert open_then == [True]
        eventually(lambda: "LinkUp" in heard)
        assert "CallFailed" not in heard


def test_a_connection_is_closed_when_it_was_replaced_and_its_last_reader_has_left() -> None:
    with sky.ComputePool(slots=1, console="off", liveness=20) as mine:
        link = link_of(mine)
        stream = link._stream
        assert stream is not None
        with link.reading():
            cut(link)
            eventually(lambda: link.is_up and link._stream is not stream)
            assert nap(0) >> mine == 0, "the new connection is read meanwhile"
            assert stream.socket.fileno() >= 0
        assert stream.socket.fileno() < 0
        stream = link._stream
        assert stream is not None
        cut(link)
        eventually(lambda: stream.socket.fileno() < 0)


def test_a_process_without_descriptors_loses_no_node_when_a_connection_breaks() -> None:
    with sky.ComputePool(slots=1, console="off", liveness=30) as mine:
        link, heard = link_of(mine), names_heard(mine)
        future = nap(0.5) > mine
        with without_descriptors() as hoard:
            cut(link)
            eventually(lambda: "LinkDown" in heard)
            for _ in range(100):  # several attempts fail
                hoard.grow()  # by what the broken connection had, which another thread closes
                time.sleep(0.01)
            assert not link.is_up
        assert future.result(30) == 0.5
        assert nap(0) >> mine == 0
        assert {"LinkUp", "CallFailed", "CallRetried"} & {*heard} == {"LinkUp"}


def test_a_node_that_is_watched_no_more_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with sky.ComputePool(slots=1, console="off", liveness=20) as mine:
        future = nap(60) > mine
        monkeypatch.setattr(link_of(mine), "_ping", lambda: 1 // 0)
        with pytest.raises(sky.ConnectionLost, match="skypool failed here: ZeroDivisionError"):
            future.result(30)


def test_a_command_that_cannot_be_started_leaves_no_descriptor_open() -> None:
    def opened() -> set[str]:
        return {os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}

    before = opened()
    with pytest.raises(FileNotFoundError):
        CommandStream(["/no/such/program"])
    with pytest.raises(ValueError, match="null byte"):
        CommandStream(["no\0program"])
    for spare in range(4):  # a pair of sockets, and the ends of a pipe
        hold = [os.open("/dev/null", os.O_RDONLY) for _ in range(spare)]
        with without_descriptors():
            for each in hold:
                os.close(each)
            with pytest.raises(OSError, match="Too many open files"):
                CommandStream(["true"])
    assert opened() <= before


@pytest.mark.slow
def test_a_link_comes_back_to_tens_of_thousands_of_calls(crowd: Crowd) -> None:
    results = crowd.begin()
    cut(link_of(crowd.pool))
    eventually(lambda: crowd.told(events.LinkUp, events.CallFailed))
    crowd.go()
    assert list(results) == list(range(crowd.count))
    assert not crowd.told(events.CallFailed)


@pytest.mark.slow
def test_a_node_gives_back_more_calls_than_one_frame_can_name(crowd: Crowd) -> None:
    results = crowd.begin()
    crowd.node_queue.leaving = True
    crowd.node_queue.recall_all()
    crowd.node_queue.leaving = False
    eventually(lambda: crowd.running() < crowd.count or crowd.told(events.CallFailed))
    crowd.go()
    assert list(results) == list(range(crowd.count))
    assert not crowd.told(events.LinkDown, events.CallFailed)


def test_a_value_dropped_while_the_link_is_down_is_forgotten_when_it_is_back() -> None:
    with sky.ComputePool(slots=1, console="off", liveness=20) as mine:
        engine: Any = mine._engine
        link, heard = link_of(mine), names_heard(mine)
        kept, dropped = mine.put(b"kept"), mine.put(b"dropped")
        assert nap(0) >> mine == 0
        cut(link)
        eventually(lambda: not link.is_up)
        mine.drop(dropped)
        eventually(lambda: "LinkUp" in heard)
        assert nap(0) >> mine == 0
        heard.clear()
        cut(link)
        eventually(lambda: "LinkUp" in heard)
        assert engine.dispatch.node_queues[0].objects == {kept.key}


@pytest.mark.slow
def test_a_call_whose_client_died_while_it_sent_the_function_fails_and_its_slot_works_on() -> None:
    code = """
        import os, signal, threading, time
        import numpy as np, skypool as sky
        values = np.ones(40_000_000)
        @sky.compute
        def first(n):
            return float(values[0]) + n
        pool = sky.ComputePool(name="halfway", slots=1, lease=30, console="off").start()
        link = pool._engine.connections.links[0]
        outbox, send, called = link._outbox, link.send, threading.Event()
        def send_and_tell(buffers):
            send(buffers)
            if outbox._large:
                called.set()  # the frame of the call is the first one after the function
        link.send = send_and_tell
        def die():
            called.wait()
            # Small frames go first: once a piece of the function is next, the frame of the call is on its way.
            while outbox._small or sum(map(len, list(outbox._rest))) < 100_000:
                time.sleep(0.001)
            print("large" if outbox._large else "sent", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=die).start()
        first(1) >> pool
    """
    said = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, cwd=ROOT, timeout=60
    )
    assert said.stdout == "large\n"
    with sky.ComputePool.attach("halfway", console="off") as mine:
        [future] = mine.inherited
        with pytest.raises(sky.SkypoolError, match="disconnected before the call's function had arrived"):
            future.result(timeout=60)
        assert nap(0) >> mine == 0
