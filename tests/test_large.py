"""Large values: whole in the end, or not at all, and nobody else's, whatever happens meanwhile.

Results are sent while they are written, and memory that a value is done with serves the next.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import skypool as sky
from skypool.agent import value_storage
from skypool.agent.call import NodeCall
from skypool.agent.call_queue import CallQueue
from tests.conftest import descendants, eventually, home

LARGE = 150_000_000


def at_half(number: int) -> None:
    """Have this process get a signal once a part of the value that it will write for the agent is there."""
    threading.Thread(target=_signal_at_half, args=(number,), daemon=True).start()


def _signal_at_half(number: int) -> None:
    while _written() < 8 << 20:
        time.sleep(0.0005)
    os.kill(os.getpid(), number)


def _written() -> int:
    return max((each.stat().st_size for each in Path("/proc/self/fd").iterdir() if _is_value(each)), default=0)


def _is_value(fd: Path) -> bool:
    try:
        return os.readlink(fd).startswith("/memfd:skypool ")
    except OSError:
        return False


@sky.compute
def made(n: int) -> Any:
    return np.arange(n // 8)


@sky.compute(grace=0.2)
def made_and_hit(n: int, number: int) -> Any:
    value = np.arange(n // 8)
    at_half(number)
    return value


@sky.compute
def streamed_and_hit(n: int, number: int) -> Iterator[Any]:
    yield 1
    value = np.arange(n // 8)
    at_half(number)
    yield value


@sky.compute
def made_while_short(n: int) -> Any:
    """Memory that ends in the middle of the value."""
    value = np.arange(n // 8)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n // 2, resource.RLIM_INFINITY))
    return value


@sky.compute
def with_room_again(n: int) -> Any:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return np.arange(n // 8)


def the_file(value: Any) -> int:
    """The inode of the memory that a value arrived in."""
    at = value.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        ends, _, _, _, inode, *name = line.split(maxsplit=5)
        first, last = (int(end, 16) for end in ends.split("-"))
        if first <= at < last:
            assert "memfd:skypool" in name[0], line
            return int(inode)
    raise AssertionError("it is nowhere")


held: list[Any] = []


@sky.compute
def same(value: Any) -> Any:
    return value


@sky.compute
def taken(value: Any) -> int:
    return the_file(value)


@sky.compute
def held_on_to(value: Any) -> int:
    held.append(value)
    return the_file(value)


@sky.compute
def how_they_are() -> list[bool]:
    return [is_whole(each) for each in held]


@sky.compute
def written_to(value: Any) -> int:
    value += 1
    return the_file(value)


@sky.compute
def failing_with(value: Any) -> None:
    raise ValueError(value)


@sky.compute
def left_to_a_child(value: Any, inode: str, go: str) -> int:
    """Leave the value to a child process, and return 0 if it is whole when the child has seen the file `go`."""
    child = os.fork()
    if not child:
        status = 1
        try:
            Path(f"{inode}.part").write_text(str(the_file(value)))
            os.rename(f"{inode}.part", inode)
            while not Path(go).exists():
                time.sleep(0.01)
            status = 0 if is_whole(value) else 2
        finally:
            os._exit(status)
    del value
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(slots=2, console="off", liveness=20) as fresh:
        yield fresh


def link_of(pool: sky.ComputePool) -> Any:
    engine: Any = pool._engine
    return engine.connections.links[0]


def cut(pool: sky.ComputePool) -> None:
    link = link_of(pool)
    link._loop.call_soon_threadsafe(link._break, "cut by the test", link._stream)


def processes(pool: sky.ComputePool) -> list[int]:
    """The agent of its only node and all workers."""
    (folder,) = home().glob(f"{pool.name}.0.*")
    return descendants(json.loads((folder / "keeper.json").read_text())["pid"])


def stopped(pool: sky.ComputePool) -> list[int]:
    found = []
    for pid in processes(pool):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state == "T":
            found.append(pid)
    return found


def is_whole(value: Any) -> bool:
    return bool(np.array_equal(value, np.arange(len(value))))


@pytest.mark.slow
@pytest.mark.parametrize("function", [made_and_hit, streamed_and_hit])
def test_a_worker_killed_while_it_writes_its_result_fails_that_call_and_nothing_else(
    pool: sky.ComputePool, function: Any
) -> None:
    with pytest.raises(sky.WorkerDied) as caught:
        list(function(LARGE, signal.SIGKILL) >> pool)
    assert caught.value.signal == signal.SIGKILL
    assert link_of(pool)._inbox.current.pieces.rooms == {}
    assert is_whole(made(LARGE) >> pool)


def test_a_result_that_is_half_sent_holds_nobody_up_and_survives_a_broken_link(pool: sky.ComputePool) -> None:
    future = made_and_hit(LARGE, signal.SIGSTOP) > pool
    eventually(lambda: stopped(pool), what="a worker that stopped in the middle")
    eventually(lambda: link_of(pool)._inbox.current.pieces.rooms, what="a first part of the result")
    assert is_whole(made(20_000_000) >> pool)
    assert not future.done()
    old = link_of(pool)._stream
    cut(pool)
    eventually(lambda: link_of(pool).is_up and link_of(pool)._stream is not old, what="another connection")
    for pid in stopped(pool):
        os.kill(pid, signal.SIGCONT)
    assert is_whole(future.result(timeout=60))
    assert link_of(pool)._inbox.current.pieces.rooms == {}


@pytest.mark.slow
def test_a_call_cancelled_while_it_writes_its_result_is_ended_and_its_slot_works_on(pool: sky.ComputePool) -> None:
    future = made_and_hit(LARGE, signal.SIGSTOP) > pool
    eventually(lambda: stopped(pool), what="a worker that stopped in the middle")
    assert future.cancel()
    eventually(lambda: not stopped(pool), what="the end of that worker")
    eventually(lambda: link_of(pool)._inbox.current.pieces.rooms == {}, what="the end of what it sent")
    assert all(is_whole(value) for value in pool.map(made, [LARGE // 4] * 4))


@pytest.mark.slow
def test_memory_that_ends_in_the_middle_of_a_result_fails_that_call_and_nothing_else(pool: sky.ComputePool) -> None:
    with pytest.raises(sky.SpoolFull, match=r"no room for a value of [\d.]+ MiB: File too large"):
        made_while_short(LARGE) >> pool
    assert link_of(pool)._inbox.current.pieces.rooms == {}
    assert is_whole(with_room_again(LARGE) >> pool)


def test_results_that_are_kept_are_not_touched_by_those_that_follow(pool: sky.ComputePool) -> None:
    sizes = [30_000_000, 20_000_000, 30_000_000, 16_000_000, 40_000_000]
    held: list[Any] = []
    for turn in range(12):
        value = made(sizes[turn % 5]) >> pool
        value += turn
        if turn % 3 == 0:
            held.append((turn, value))
        else:
            del value
    for turn, value in held:
        assert np.array_equal(value, np.arange(len(value)) + turn)


@pytest.mark.slow
def test_memory_of_a_result_that_arrived_is_used_for_the_next_and_then_given_back() -> None:
    with sky.ComputePool(slots=1, console="off") as mine:

        def files() -> set[int]:
            found = set()
            for pid in processes(mine):
                for each in Path(f"/proc/{pid}/fd").iterdir():
                    if _is_value(each):
                        found.add(each.stat().st_ino)
            return found

        made(20_000_000) >> mine
        eventually(files, what="memory that is kept")
        first = files()
        made(30_000_000) >> mine
        eventually(files, what="memory that is kept")
        assert files() == first
        eventually(lambda: not files(), within=10, what="the end of memory that nobody needed")


def value_of(turn: int) -> Any:
    return np.arange(turn, turn + 1_500_000)


def test_arguments_that_a_call_is_done_with_make_room_for_the_next_value() -> None:
    with sky.ComputePool(slots=1, console="off") as mine:
        first = taken(value_of(0)) >> mine
        assert taken(value_of(1)) >> mine == first
        assert written_to(value_of(2)) >> mine == first
        assert np.array_equal(same(value_of(3)) >> mine, value_of(3)), "what a call wrote there is not seen"
        with pytest.raises(ValueError, match="0") as raised:
            failing_with(value_of(0)) >> mine
        assert np.array_equal(raised.value.args[0], value_of(0))


def test_arguments_that_a_function_holds_on_to_stay_as_they_are() -> None:
    with sky.ComputePool(slots=1, console="off") as mine:
        files = [held_on_to(np.arange(1_500_000)) >> mine for _ in range(3)]
        assert len(set(files)) == 3
        for turn in range(3):
            assert taken(value_of(turn)) >> mine not in files
        assert how_they_are() >> mine == [True] * 3


def test_arguments_of_a_service_stay_as_they_are_for_its_child_process_while_calls_come_and_go(tmp_path: Path) -> None:
    inode, go = tmp_path / "inode", tmp_path / "go"
    with sky.ComputePool(slots=1, console="off") as mine:
        service = mine.service(left_to_a_child(np.arange(1_500_000), str(inode), str(go)))
        eventually(inode.exists, what="the child")
        for turn in range(1, 4):
            assert taken(value_of(turn)) >> mine != int(inode.read_text())
        go.touch()
        assert service.result(30) == 0


def test_a_result_that_is_its_argument_is_whole_whatever_follows(pool: sky.ComputePool) -> None:
    sent = [value_of(turn) for turn in range(8)]
    came = list(pool.map(same, sent))
    for one, other in zip(sent, came, strict=True):
        assert np.array_equal(one, other)


class Anywhere:
    """Where calls are put."""

    @property
    def queues(self) -> list[Anywhere]:
        return [self]

    def offer(self, buffers: list[Any], fds: list[int]) -> None:
        assert fds


def test_arguments_of_a_call_that_was_offered_twice_serve_no_other_value(tmp_path: Path) -> None:
    kept, slots = value_storage.SpareMemory(), Anywhere()
    line = CallQueue(cast(Any, slots), lambda fd, events, callback: None, kept)
    for id_, again in ((1, True), (2, False)):
        fd = value_storage.create_storage(value_storage.WORTH_KEEPING, str(tmp_path))
        os.ftruncate(fd, value_storage.WORTH_KEEPING)
        line.add(NodeCall(id_, b"", value_storage.Blob(fd, value_storage.WORTH_KEEPING), "f", "f", None, False, False))
        if again:
            line.again([id_])
            line.pump()
        line.forget(id_, done=True)
        assert (kept.take(value_storage.WORTH_KEEPING) is None) is again
