"""A call on several nodes is one thing: when a part fails for good, the others are stopped and its error is raised."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import skypool as sky
from skypool import events
from skypool.calls.broadcast import FirstFailure, ListFuture
from skypool.calls.options import Options
from skypool.errors import PoolClosed, WorkerDied
from tests.conftest import eventually


@pytest.fixture(scope="module")
def shared() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(nodes=3, console="off") as made:
        yield made


@pytest.fixture
def pool(shared: sky.ComputePool) -> sky.ComputePool:
    return shared


@sky.compute(grace=2)
def fails_on(node: int, folder: str, stubborn: bool = False, words: str = "of mine") -> int:
    """Wait for the others and then raise on one node; on the others, leave a mark while they run."""
    import signal

    me = sky.instance_info().node
    mark = Path(folder) / str(me)
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mark.symlink_to(str(os.getpid()))  # made at once: a file could stay empty at a kill
    if me == node:
        while len(list(Path(folder).iterdir())) < sky.instance_info().nodes:
            time.sleep(0.01)
        raise KeyError(words)
    try:
        time.sleep(600)
    finally:
        mark.unlink()
    return me


def test_the_first_failure_stops_the_other_parts_and_is_raised_as_itself(pool: sky.ComputePool, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(KeyError, match="of mine") as caught:
        fails_on(1, str(tmp_path)) @ pool
    assert time.monotonic() - began < 30
    assert [each.name for each in tmp_path.iterdir()] == ["1"], "their `finally` is through when the error is raised"
    assert caught.value.__notes__ == ["fails_on failed on node 1, one of 3 nodes of this call"]
    assert caught.value.others == []  # type: ignore[attr-defined]


def test_a_part_that_ignores_sigterm_is_killed_when_its_grace_is_over(pool: sky.ComputePool, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(KeyError):
        fails_on.with_options(grace=1)(1, str(tmp_path), stubborn=True) @ pool
    assert 1 < time.monotonic() - began < 30
    left = [int(each.readlink().name) for each in tmp_path.iterdir() if each.name != "1"]
    assert len(left) == 2, "killed, so that no `finally` ran"
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left), 10, "the end of the killed parts")


def test_a_future_for_several_nodes_does_the_same(pool: sky.ComputePool, tmp_path: Path) -> None:
    future = fails_on(0, str(tmp_path)).with_options(node=[0, 2]) > pool
    with pytest.raises(KeyError, match="of mine"):
        future.result(60)
    assert isinstance(future.exception(), KeyError)
    assert future.wait_stopped(30)
    assert [each.name for each in tmp_path.iterdir()] == ["0"]


def test_parts_that_fail_together_are_attached_to_the_first(pool: sky.ComputePool) -> None:
    @sky.compute
    def fail() -> None:
        me = sky.instance_info().node
        time.sleep(0.1 * me)
        raise KeyError(me)

    with pytest.raises(KeyError) as caught:
        fail() @ pool
    assert caught.value.args == (0,)
    others: list[BaseException] = caught.value.others  # type: ignore[attr-defined]
    assert [each.args for each in others] == [(1,), (2,)]
    (note,) = caught.value.__notes__
    assert ".fail failed on node 0, one of 3 nodes of this call; it also failed on node 1: KeyError: 1; " in note
    assert note.endswith("node 2: KeyError: 2")


def test_an_error_that_is_still_being_read_counts_when_the_last_part_ends() -> None:
    entered, go = threading.Event(), threading.Event()

    class Slow(Exception):
        def __str__(self) -> str:
            entered.set()
            go.wait(10)
            return "slow"

    future: ListFuture[int] = ListFuture("f", [0, 1], Options(), lambda text: None)
    slow = threading.Thread(target=future.parts[0].finish, args=(Slow(),))
    slow.start()
    assert entered.wait(10)
    future.parts[1].finish(KeyError("quick"))
    assert not future.done()
    go.set()
    slow.join()
    with pytest.raises(KeyError) as caught:
        future.result(10)
    assert [type(each) for each in caught.value.others] == [Slow]  # type: ignore[attr-defined]


def test_a_death_counts_before_the_errors_that_it_causes(pool: sky.ComputePool) -> None:
    @sky.compute
    def die_or_notice(folder: str) -> None:
        import socket

        path = f"{folder}/meet"
        if sky.instance_info().node == 1:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path)
                server.listen()
                peers = [server.accept()[0] for _ in range(2)]
                os.kill(os.getpid(), signal.SIGKILL)
                del peers
        with socket.socket(socket.AF_UNIX) as peer:
            while True:
                try:
                    peer.connect(path)
                    break
                except OSError:
                    time.sleep(0.01)
            if not peer.recv(1):
                raise ConnectionResetError("the peer is gone")

    with tempfile.TemporaryDirectory() as folder, pytest.raises(WorkerDied) as caught:
        die_or_notice(folder) @ pool
    assert caught.value.node == 1
    assert [type(each) for each in caught.value.others] == [ConnectionResetError, ConnectionResetError]


def test_independent_parts_go_on(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute(independent=True)
    def fail_first(folder: str) -> None:
        me = sky.instance_info().node
        if me < 2:
            raise KeyError(me)
        time.sleep(1)
        (Path(folder) / "done").touch()

    with pytest.raises(ExceptionGroup, match="2 of 3 calls failed"):
        fail_first(str(tmp_path)) @ pool
    assert (tmp_path / "done").exists()


def test_a_part_that_may_run_again_is_no_failure(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute(retries=1, retry_on=KeyError)
    def once(folder: str) -> int:
        me = sky.instance_info().node
        mark = Path(folder) / str(me)
        if me == 1 and not mark.exists():
            mark.touch()
            raise KeyError(me)
        time.sleep(1)
        return me

    assert once(str(tmp_path)) @ pool == [0, 1, 2]


def test_the_other_streams_raise_the_error_at_their_next_item(pool: sky.ComputePool) -> None:
    @sky.compute
    def count(bad: int) -> Iterator[int]:
        me = sky.instance_info().node
        n = 0
        while True:
            yield n
            n += 1
            time.sleep(0.05)
            if me == bad and n == 10:
                raise KeyError(me)

    streams = count(1) @ pool
    assert [next(each) for each in streams] == [0, 0, 0]
    with pytest.raises(KeyError, match="1"):
        for _ in streams[0]:
            pass
    with pytest.raises(KeyError, match="1"):
        for _ in streams[1]:
            pass
    with pytest.raises(KeyError, match="1"):
        next(streams[2])
    assert all(each.wait_stopped(30) for each in streams)  # type: ignore[attr-defined]
    with pytest.raises(StopIteration):
        next(streams[2])


def test_a_stream_that_the_user_closes_is_no_failure(pool: sky.ComputePool) -> None:
    @sky.compute
    def count() -> Iterator[int]:
        for n in range(60):
            yield n
            time.sleep(0.02)

    first, second, third = count() @ pool
    next(first)
    first.close()  # type: ignore[attr-defined]
    assert list(second) == list(third) == list(range(60))


def test_the_console_says_once_that_healthy_parts_were_stopped(tmp_path: Path) -> None:
    notices = []
    with sky.ComputePool(nodes=2, console="off") as pool:
        pool.events.listen(lambda event: notices.append(event) if isinstance(event, events.Notice) else None)
        for turn in range(2):
            folder = tmp_path / str(turn)
            folder.mkdir()
            with pytest.raises(KeyError):
                fails_on(1, str(folder)) @ pool
        said = [each.text for each in notices if "independent=True" in each.text]
        assert said == [
            "fails_on failed on one of 2 nodes (KeyError), so its other parts are stopped; "
            "with_options(independent=True) lets them go on"
        ]


def test_the_end_of_the_pool_is_raised_as_it_is(tmp_path: Path) -> None:
    pool = sky.ComputePool(nodes=2, console="off").start()
    future = fails_on(7, str(tmp_path)).with_options(node="all") > pool
    eventually(lambda: len(list(tmp_path.iterdir())) == 2, 60, "the parts to run")
    pool.stop()
    error = future.exception(60)
    assert isinstance(error, PoolClosed)
    assert not hasattr(error, "__notes__")


def test_an_exception_that_takes_no_attributes_is_raised_as_itself_and_names_its_node() -> None:
    @dataclass(frozen=True)
    class Rigid(Exception):
        number: int

    rigid = Rigid(1)
    failure = FirstFailure("train", [0, 1], lambda error: None)
    failure.add(1, rigid)
    other = KeyError()
    failure.add(0, other)
    assert failure.choose() is rigid
    assert vars(rigid)["others"] == [other]
    assert "train failed on node 1" in rigid.__notes__[-1]
