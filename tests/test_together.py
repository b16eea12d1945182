"""Calls that travel together stay calls of their own, whatever happens to one of them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skypool as sky
from skypool import events
from skypool.agent.batch import LARGEST_END, ROOM, Batch, SharedBatch
from skypool.agent.unacknowledged import Unacknowledged
from skypool.agent.value_storage import SpareMemory
from skypool.calls.arguments import payload_of
from skypool.calls.futures import CallFuture
from skypool.calls.pending_calls import PendingCall
from skypool.errors import ProtocolError
from skypool.wire.frames import Decoder, Frame, Kind, encode, end_of, ends_in
from tests.conftest import eventually


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(slots=2, console="off", grace=1.0) as shared:
        yield shared


@pytest.fixture
def single() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(slots=1, console="off", grace=1.0) as alone:
        yield alone


def together(
    pool: sky.ComputePool, function: sky.ComputeFunction[..., Any], items: Iterable[tuple[Any, ...]]
) -> list[CallFuture[Any]]:
    """Send a call for each item, all in one frame."""
    engine: Any = pool._engine
    futures, pending_calls = [], []
    items = list(items)
    for args in items:
        payload, _ = payload_of(function, args, {})
        futures.append(CallFuture[Any](function.name))
        options = function.options
        pending_calls.append(PendingCall(function.code(), payload, futures[-1], options, chunk=len(items)))
    engine.dispatch.submit(*pending_calls)
    return futures


def in_company() -> bool:
    """Whether the running call came with others; asked in a worker."""
    frame, stack = sys._getframe(), set()
    while frame.f_back:
        frame = frame.f_back
        stack.add(frame.f_code.co_name)
    return "_serve_all" in stack


def test_calls_that_travel_together_run_in_one_worker_and_each_knows_itself(pool: sky.ComputePool) -> None:
    @sky.compute
    def who(n: int) -> tuple[int, int, bool]:
        return n, sky.instance_info().call, in_company()

    said = [future.result(20) for future in together(pool, who, [(n,) for n in range(5)])]
    assert [n for n, _, _ in said] == list(range(5))
    assert len({call for _, call, _ in said}) == 5
    assert said[0][2]
    assert not (who(0) >> pool)[2]


def test_an_exception_in_the_middle_is_that_calls_alone(pool: sky.ComputePool) -> None:
    @sky.compute
    def picky(n: int) -> int:
        if n % 7 == 3:
            raise ValueError(f"not {n}")
        return n * n

    futures = together(pool, picky, [(n,) for n in range(20)])
    for n, future in enumerate(futures):
        if n % 7 == 3:
            with pytest.raises(ValueError, match=f"^not {n}$"):
                future.result(20)
        else:
            assert future.result(20) == n * n


def test_values_of_any_size_come_back_each_to_its_own_call(pool: sky.ComputePool) -> None:
    @sky.compute
    def grown(n: int) -> Any:
        return np.full(n, n % 251, dtype=np.uint8) if n % 2 else "x" * n

    sizes = [0, 1, 10, LARGEST_END - 40, LARGEST_END, LARGEST_END + 1, 70_000, 70_001, 1_000_001, 7, 8]
    for n, future in zip(sizes, together(pool, grown, [(n,) for n in sizes]), strict=True):
        value = future.result(20)
        assert len(value) == n
        assert value == "x" * n if n % 2 == 0 else (value == n % 251).all()


def test_more_ends_than_a_pipe_holds_come_back(pool: sky.ComputePool) -> None:
    @sky.compute
    def text(n: int) -> str:
        return f"{n:03}" * 1200

    futures = together(pool, text, [(n,) for n in range(100)])
    assert [future.result(20)[:3] for future in futures] == [f"{n:03}" for n in range(100)]


@pytest.mark.slow
def test_a_worker_that_dies_fails_the_call_that_it_ran_and_no_other(single: sky.ComputePool, tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    @sky.compute
    def fragile(n: int) -> int:
        with open(ran, "a") as file:
            file.write(f"{n}\n")
        print("these are the words of", n)
        if n in (7, 8):
            os.kill(os.getpid(), signal.SIGKILL)
        return n

    futures = together(single, fragile, [(n,) for n in range(20)])
    for n, future in enumerate(futures):
        if n in (7, 8):
            with pytest.raises(sky.WorkerDied) as caught:
                future.result(20)
            assert caught.value.tail == f"these are the words of {n}\n"
        else:
            assert future.result(20) == n
    assert sorted(map(int, ran.read_text().split())) == list(range(20))


def test_a_call_that_died_among_others_runs_again_if_it_was_asked_to(single: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute(retries=1)
    def second_try(n: int) -> int:
        if n == 3 and not (tmp_path / "tried").exists():
            (tmp_path / "tried").touch()
            os._exit(1)
        return n

    assert [f.result(20) for f in together(single, second_try, [(n,) for n in range(6)])] == list(range(6))


@pytest.mark.slow
def test_a_slow_call_keeps_nobody_waiting_while_a_slot_is_free(pool: sky.ComputePool, tmp_path: Path) -> None:
    go = tmp_path / "go"

    @sky.compute
    def one_waits(n: int) -> int:
        while n == 4 and not go.exists():
            time.sleep(0.01)
        return n

    futures = together(pool, one_waits, [(n,) for n in range(12)])
    others = [future for n, future in enumerate(futures) if n != 4]
    assert not wait(others, timeout=60).not_done
    assert not futures[4].done()
    go.touch()
    assert futures[4].result(20) == 4


def test_what_has_ended_is_told_while_a_slow_call_still_runs(single: sky.ComputePool, tmp_path: Path) -> None:
    go = tmp_path / "go"

    @sky.compute
    def third_waits(n: int) -> int:
        while n == 2 and not go.exists():
            time.sleep(0.01)
        return n

    futures = together(single, third_waits, [(n,) for n in range(4)])
    assert [future.result(60) for future in futures[:2]] == [0, 1]
    assert not futures[3].done()
    go.touch()
    assert [future.result(60) for future in futures[2:]] == [2, 3]


@pytest.mark.slow
def test_calls_are_cancelled_one_by_one_whether_they_run_or_wait(single: sky.ComputePool, tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    @sky.compute
    def noted(n: int) -> int:
        with open(ran, "a") as file:
            file.write(f"{n}\n")
        if n == 2:
            time.sleep(60)
        return n

    futures = together(single, noted, [(n,) for n in range(8)])
    eventually(lambda: ran.exists() and "2\n" in ran.read_text(), what="the slow call")
    for n in (5, 6, 2):
        assert futures[n].cancel()
    assert [futures[n].result(20) for n in (0, 1, 3, 4, 7)] == [0, 1, 3, 4, 7]
    assert sorted(map(int, ran.read_text().split())) == [0, 1, 2, 3, 4, 7]


def test_all_of_many_can_be_cancelled_at_once_and_soon(single: sky.ComputePool) -> None:
    @sky.compute
    def slow(n: int) -> int:
        time.sleep(60)
        return n

    futures = [future for _ in range(8) for future in together(single, slow, [(n,) for n in range(128)])]
    began = time.monotonic()
    for future in futures:
        future.cancel()
    assert single.submit(abs, -3).result(20) == 3
    assert time.monotonic() - began < 30


def test_a_call_is_cancelled_whose_arguments_are_still_on_their_way(single: sky.ComputePool) -> None:
    @sky.compute
    def rest(_: Any) -> None:
        time.sleep(60)

    future = rest(np.ones(200_000_000, dtype=np.uint8)) > single
    assert future.cancel()
    assert single.submit(abs, -3).result(20) == 3


def test_a_timeout_counts_for_each_call_alone(single: sky.ComputePool) -> None:
    @sky.compute(timeout=0.6)
    def patient(n: int) -> int:
        time.sleep(60 if n == 2 else 0.25)
        return n

    futures = together(single, patient, [(n,) for n in range(5)])
    with pytest.raises(sky.CallTimeout):
        futures[2].result(20)
    assert [futures[n].result(20) for n in (0, 1, 3, 4)] == [0, 1, 3, 4]


def test_a_function_that_forks_among_others_answers_once(pool: sky.ComputePool, tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    @sky.compute
    def forks(n: int) -> int:
        with open(ran, "a") as file:
            file.write(f"{n}\n")
        if n == 2:
            os.fork()
        return n

    assert [future.result(20) for future in together(pool, forks, [(n,) for n in range(6)])] == list(range(6))
    assert sorted(map(int, ran.read_text().split())) == list(range(6))


def test_what_each_call_prints_is_its_own(single: sky.ComputePool) -> None:
    @sky.compute
    def prints(n: int) -> int:
        print(f"this is {n}")
        return sky.instance_info().call

    heard: list[events.Output] = []
    single.events.listen(lambda e: heard.append(e) if isinstance(e, events.Output) else None)
    calls = [future.result(20) for future in together(single, prints, [(n,) for n in range(10)])]
    assert [(e.call, e.text) for e in heard] == [(call, f"this is {n}\n") for n, call in enumerate(calls)]


@pytest.mark.slow
def test_calls_that_write_past_python_run_one_by_one_from_then_on(single: sky.ComputePool) -> None:
    @sky.compute
    def native(n: int) -> int:
        os.write(1, f"this is {n}\n".encode())
        return in_company()

    heard: list[str] = []
    single.events.listen(lambda e: heard.append(e.text) if isinstance(e, events.Output) else None)
    assert together(single, native, [(0,), (1,)])[0].result(20)
    eventually(lambda: "".join(heard) == "this is 0\nthis is 1\n", what="the output")
    assert [future.result(20) for future in together(single, native, [(n,) for n in range(5)])] == [False] * 5


@pytest.mark.parametrize("chunksize", [None, 1, 7, 5000])
def test_a_map_gives_every_result_once_and_in_order(pool: sky.ComputePool, chunksize: int | None) -> None:
    @sky.compute
    def double(n: int) -> int:
        return 2 * n

    for items in (range(3000), iter(range(3000))):
        assert list(pool.map(double, items, chunksize=chunksize)) == list(range(0, 6000, 2))


def test_a_chunk_of_no_size_is_refused(pool: sky.ComputePool) -> None:
    with pytest.raises(sky.UsageError, match="chunksize"):
        pool.map(abs, [1], chunksize=0)


def test_a_map_sends_what_it_has_while_it_waits_for_more(pool: sky.ComputePool, tmp_path: Path) -> None:
    """An iterator may give its next item only after the result of the one before."""

    @sky.compute
    def touched(n: int, path: str) -> int:
        Path(path).touch()
        return n

    def items(folder: Path) -> Iterator[tuple[int, str]]:
        for n in range(30):
            path = folder / f"{n}"
            yield n, str(path)
            eventually(path.exists, what=f"call {n}")

    assert list(pool.map(lambda pair: touched.local(*pair), items(tmp_path))) == list(range(30))


def test_a_cut_link_costs_no_call_of_a_map_and_runs_none_twice(tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    @sky.compute
    def note(n: int) -> int:
        fd = os.open(ran, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(fd, f"{n}\n".encode())
        os.close(fd)
        return n

    count = 20_000
    with sky.ComputePool(slots=2, console="off", liveness=30) as mine:
        broken: list[str] = []
        mine.events.listen(lambda e: broken.append(e.reason) if isinstance(e, events.LinkDown) else None)
        results: list[int] = []
        engine: Any = mine._engine
        for n, result in enumerate(mine.map(note, range(count))):
            results.append(result)
            if n % 5000 == 1000 and (stream := engine.connections.links[0]._stream) is not None:
                with contextlib.suppress(OSError):  # it may break by itself just now, from the cut before
                    stream.socket.shutdown(socket.SHUT_RDWR)
        assert results == list(range(count))
    assert broken
    assert sorted(map(int, ran.read_text().split())) == list(range(count))


# --- the parts -----------------------------------------------------------------------------------------------


def framed(**changes: Any) -> Frame:
    header = {"ids": [5, 6, 7], "fn": "f", "lens": [1, 0, 2], "timeout": 3.0} | changes
    data = encode(Kind.CALLS, header, 3) + b"abb"
    decoder = Decoder()
    decoder.space()[: len(data)] = data
    return decoder.advance(len(data))[0]


def test_a_batch_gives_each_of_its_calls_as_if_it_had_come_alone() -> None:
    batch = Batch(framed(), "name")
    batch.offered = True
    calls = [batch.single(id_) for id_ in (5, 6, 7)]
    assert [call.packet[-2:] for call in calls] == [b"}a", b"]}", b"bb"]
    assert all(call.offered and call.timeout == 3.0 and call.fn == "f" for call in calls)
    assert b'"id":7' in calls[2].packet
    assert b"ids" not in calls[2].packet


@pytest.mark.parametrize(
    "wrong",
    [{"ids": [5, 6]}, {"ids": [5, 5, 6]}, {"lens": [1, 1, 2]}, {"lens": [4, 0, -1]}, {"ids": [], "lens": []},
     {"ids": [1, 2, 1 << 64]}, {"ids": [True, 2, 3]}],
)  # fmt: skip
def test_a_batch_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        Batch(framed(**wrong), "name")


def test_a_call_is_begun_or_taken_back_and_never_both() -> None:
    batch = SharedBatch()
    try:
        batch.hold([3, 1 << 63, 9])
        assert batch.claim()
        assert batch.take_back() == [1 << 63, 9]
        assert not batch.claim()
        assert batch.take_back() == []
    finally:
        batch.keep()
        batch.close()


@pytest.fixture
def shared() -> Iterator[SharedBatch]:
    batch = SharedBatch()
    yield batch
    batch.keep()
    batch.close()


def test_outcomes_are_read_once_and_in_order(shared: SharedBatch) -> None:
    assert shared.ended() == b""
    assert shared.end(end_of(3, True, 0.5, b"x"))
    assert shared.end(end_of(4, False, 0.25, b""))
    assert list(ends_in(shared.ended())) == [(3, True, 0.5, b"x"), (4, False, 0.25, b"")]
    assert shared.ended() == b""


def test_an_outcome_that_finds_no_room_is_refused_until_others_were_read(shared: SharedBatch) -> None:
    end = bytes(ROOM // 4)
    assert [shared.end(end) for _ in range(5)] == [True] * 4 + [False]
    assert shared.ended() == bytes(ROOM)
    assert shared.end(end)


def test_a_worker_whose_count_is_impossible_is_refused(shared: SharedBatch) -> None:
    for count in (ROOM + 1, (1 << 64) - 1):
        shared._numbers[0] = count
        with pytest.raises(ProtocolError):
            list(ends_in(shared.ended()))


@pytest.mark.parametrize("in_order", [True, False])
def test_outcomes_that_another_process_writes_while_they_are_read_arrive_whole(
    shared: SharedBatch, monkeypatch: pytest.MonkeyPatch, in_order: bool
) -> None:
    monkeypatch.setattr("skypool.agent.batch._IN_ORDER", in_order)
    sizes = random.Random(5).choices((0, 7, 60, 1000, LARGEST_END - 40), k=5_000)
    pid = os.fork()
    if pid == 0:
        for id_, size in enumerate(sizes):
            while not shared.end(end_of(id_, True, 0.0, bytes([id_ % 256]) * size)):
                pass
        os._exit(0)
    found: list[Any] = []
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        found += ends_in(shared.ended(asked=False))
    found += ends_in(shared.ended())
    assert [each[0] for each in found] == list(range(5_000))
    assert all(data == bytes([id_ % 256]) * sizes[id_] for id_, _, _, data in found)


@pytest.mark.parametrize("length", [1, 20, 24])
def test_ends_that_stop_in_the_middle_are_refused(length: int) -> None:
    body = end_of(3, True, 0.5, b"four")
    assert list(ends_in(body)) == [(3, True, 0.5, b"four")]
    with pytest.raises(ProtocolError):
        list(ends_in(body[:length]))


def test_the_spool_keeps_ends_that_came_together_until_all_are_acknowledged() -> None:
    class Paper:
        def __init__(self) -> None:
            self.sent: list[Any] = []

        def send(self, buffers: Any) -> None:
            self.sent.append(buffers)

    spool, first, second = Unacknowledged(SpareMemory()), Paper(), Paper()
    spool.connection = first  # type: ignore[assignment]  # all that it needs of one
    spool.add_together([1, 2], [b"one and two"])
    spool.add_together([3], [b"three"])
    assert first.sent == [[b"one and two"], [b"three"]]
    spool.acknowledge([1, 3], 0)
    assert spool.calls == [2]
    assert spool.knows(2)
    assert not spool.knows(1)
    spool.resend(second)  # type: ignore[arg-type]  # all that it needs of one
    assert second.sent == [[b"one and two"]]
    spool.acknowledge([2], 0)
    assert spool.calls == []
