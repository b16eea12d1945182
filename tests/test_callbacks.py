"""Code of the user that runs in this process when a call ends: it may block, and delays neither a node nor the pool."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from skypool import events
from tests.conftest import eventually, nodes
from tests.counted_work import die_once
from tests.test_bad_luck import agent_of, processes_busy
from tests.work import add, nap, until


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(slots=2, console="off", grace=1.0) as shared:
        yield shared


class Waiter:
    """A done-callback that waits for another call, for a while."""

    def __init__(self, other: Future[Any]) -> None:
        self.other = other
        self.got: list[object] = []

    def __call__(self, _: Future[Any]) -> None:
        try:
            self.got.append(self.other.result(20))
        except BaseException as e:  # noqa: BLE001 - the test looks at it
            self.got.append(e)


def fail() -> None:
    raise ValueError("it failed")


def begin_and_sleep(path: str) -> None:
    open(path, "w").close()
    time.sleep(60)


def begin(path: str) -> str:
    open(path, "w").close()
    time.sleep(1)
    return "it has begun"


def test_a_callback_may_wait_for_another_call_of_the_same_node(pool: sky.ComputePool) -> None:
    first, second = nap(0.2) > pool, nap(0.5) > pool
    waiter = Waiter(second)
    first.add_done_callback(waiter)
    assert first.result(60) == 0.2
    eventually(lambda: waiter.got, 60)
    assert waiter.got == [0.5]


def test_a_callback_may_send_a_call_and_wait_for_it(pool: sky.ComputePool) -> None:
    got: list[int] = []
    first = add(1) > pool
    first.add_done_callback(lambda f: got.append(add(f.result(), 40) >> pool))
    eventually(lambda: got, 60)
    assert got == [42]


def test_callbacks_that_block_do_not_wait_for_each_other(pool: sky.ComputePool, tmp_path: Path) -> None:
    both = threading.Barrier(2)
    passed: list[str] = []

    def meet(future: Future[str]) -> None:
        both.wait(20)
        passed.append(future.result())

    futures = [until(str(tmp_path / "go")) > pool for _ in range(2)]
    for each in futures:
        each.add_done_callback(meet)
    (tmp_path / "go").touch()
    eventually(lambda: len(passed) == 2, 60)


def test_callbacks_of_a_future_are_called_in_order_once_and_one_that_raises_does_no_harm(
    pool: sky.ComputePool, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[object] = []
    future = nap(0.1) > pool
    future.add_done_callback(lambda _: heard.append(1))
    future.add_done_callback(lambda _: 1 // 0)
    future.add_done_callback(lambda f: heard.append(f.result()))
    eventually(lambda: len(heard) == 2, 60)
    future.add_done_callback(lambda _: heard.append(3))
    assert heard == [1, 0.1, 3]
    assert "ZeroDivisionError" in caplog.text


def test_callbacks_of_broadcasts_gangs_and_cancelled_calls_may_wait_too(pool: sky.ComputePool) -> None:
    other = nap(1) > pool
    waiters = [Waiter(other) for _ in range(3)]
    cancelled = nap(60) > pool
    futures: list[Future[Any]] = [pool.send(add(1), node="all"), add(1).with_options(procs=1) > pool, cancelled]
    for future, waiter in zip(futures, waiters, strict=True):
        future.add_done_callback(waiter)
    assert cancelled.cancel()
    eventually(lambda: all(each.got for each in waiters), 60)
    assert [each.got for each in waiters] == [[1.0]] * 3


def test_a_callback_may_wait_for_another_call_when_its_node_is_lost() -> None:
    with sky.ComputePool(nodes=2, slots=1, console="off", liveness=20) as mine:
        lost, other = nap(60).with_options(node=0) > mine, nap(2).with_options(node=1) > mine
        waiting = nap(60).with_options(node=0) > mine
        waiters = [Waiter(other), Waiter(other)]
        lost.add_done_callback(waiters[0])
        waiting.add_done_callback(waiters[1])
        eventually(lambda: processes_busy(mine))
        os.kill(agent_of(mine, 0), signal.SIGKILL)
        eventually(lambda: all(each.got for each in waiters), 60)
        assert [each.got for each in waiters] == [[2.0], [2.0]]


def test_a_callback_may_wait_for_another_call_when_its_node_is_retired(tmp_path: Path) -> None:
    with sky.ComputePool(nodes=2, slots=1, console="off") as mine:
        running = sky.compute(begin)(str(tmp_path / "began")).with_options(node=0) > mine
        other = nap(2).with_options(node=1) > mine
        eventually((tmp_path / "began").exists)
        bound = nap(60).with_options(node=0) > mine
        waiter = Waiter(other)
        bound.add_done_callback(waiter)
        mine.retire(0)
        eventually(lambda: waiter.got, 60)
        assert waiter.got == [2.0]
        assert running.result(60) == "it has begun"
        assert isinstance(bound.exception(), sky.NodeRetired)


def test_callbacks_may_wait_for_each_others_calls_when_their_pool_is_stopped() -> None:
    mine = sky.ComputePool(slots=1, console="off").start()
    futures = [nap(60) > mine for _ in range(3)]
    waiters = [Waiter(futures[(n + 1) % 3]) for n in range(3)]
    for future, waiter in zip(futures, waiters, strict=True):
        future.add_done_callback(waiter)
    mine.stop()
    assert [type(each.got[0]) for each in waiters] == [sky.PoolClosed] * 3


def test_callbacks_have_run_when_the_block_of_their_pool_is_over() -> None:
    got: list[int] = []
    with sky.ComputePool(slots=2, console="off") as mine:
        for n in range(200):
            (add(n, 0) > mine).add_done_callback(lambda f: got.append(f.result()))
    assert sorted(got) == list(range(200))


def test_a_callback_may_stop_its_pool() -> None:
    mine = sky.ComputePool(slots=1, console="off").start()
    (add(1) > mine).add_done_callback(lambda _: mine.stop())
    eventually(lambda: not nodes(mine.name), 60)
    assert mine.phase == "ended"


# --- listeners and exceptions --------------------------------------------------------------------------------


class Prober:
    """A listener that notes for each kind of event whether the calls of the pool could go on meanwhile."""

    def __init__(self, pool: sky.ComputePool) -> None:
        self.free: dict[str, bool] = {}
        self._pool = pool
        pool.events.listen(self.hear)

    def hear(self, event: events.Event) -> None:
        name = type(event).__name__
        if name in ("CallFailed", "CallRetried", "GangFailed"):
            self.free[name] = self.free.get(name, True) and self.probe()

    def probe(self) -> bool:
        """Return True if another thread can have the lock of the calls now."""
        thread = threading.Thread(target=self._pool.slots, daemon=True)
        thread.start()
        thread.join(5)
        return not thread.is_alive()


def test_listeners_hear_of_failures_and_retries_while_other_threads_send_calls(tmp_path: Path) -> None:
    with sky.ComputePool(nodes=2, slots=2, console="off", liveness=20) as mine:
        prober = Prober(mine)
        lost = [nap(60).with_options(node=0) > mine, nap(60).with_options(node=0) > mine]
        again = die_once(str(tmp_path / "died")).with_options(retries=1) > mine
        eventually(lambda: processes_busy(mine))
        os.kill(agent_of(mine, 0), signal.SIGKILL)
        assert [type(each.exception(60)) for each in lost] == [sky.ConnectionLost] * 2
        assert again.result(60) == "the second run"
        with pytest.raises(ValueError, match="it failed"):
            sky.compute(fail)().with_options(procs=1) >> mine
        eventually(lambda: {"CallFailed", "CallRetried", "GangFailed"} <= prober.free.keys())
        assert prober.free == {"CallFailed": True, "CallRetried": True, "GangFailed": True}


class Probing(Exception):
    """An exception that notes, where it is unpickled, whether other threads can send calls meanwhile."""

    probe: Any = None
    free: list[bool]

    def __setstate__(self, state: object) -> None:
        if Probing.probe is not None:
            Probing.free.append(Probing.probe())


def probing() -> None:
    error = Probing("it failed")
    error.detail = "an attribute"  # type: ignore[attr-defined]  # so that there is a state
    raise error


@pytest.mark.parametrize("together", [1, 50])
def test_exceptions_are_read_while_other_threads_send_calls(pool: sky.ComputePool, together: int) -> None:
    Probing.free = []
    Probing.probe = Prober(pool).probe
    try:
        futures = [pool.submit(probing) for _ in range(together)]
        assert {type(each.exception(60)) for each in futures} == {Probing}
    finally:
        Probing.probe = None
    assert Probing.free
    assert all(Probing.free)


class Watch:
    """Notes which code of the user runs in this process, and which of it while its thread has the lock of the calls."""

    def __init__(self) -> None:
        self.lock: Any = None
        self.ran: set[str] = set()
        self.with_lock: set[str] = set()

    def note(self, what: str) -> None:
        if self.lock is not None:
            self.ran.add(what)
            if self.lock._is_owned():
                self.with_lock.add(what)


WATCH = Watch()


class Kind(type):
    """A metaclass that decides itself which exceptions are of its classes."""

    def __instancecheck__(cls, error: object) -> bool:
        WATCH.note("retry_on")
        return type(error).__name__ == "Talkative"


class Talkative(Exception):
    """An exception with methods of its own."""

    def __setstate__(self, state: object) -> None:
        WATCH.note("state")

    def __str__(self) -> str:
        WATCH.note("text")
        return "it failed"


class AnyTalkative(Exception, metaclass=Kind):
    """What `retry_on` names."""


def talk() -> None:
    error = Talkative()
    error.detail = "an attribute"  # type: ignore[attr-defined]  # so that there is a state
    raise error


@sky.compute
def talk_on_first() -> None:
    if sky.instance_info().rank == 0:
        talk()
    time.sleep(60)


@pytest.mark.slow
def test_no_code_of_the_user_runs_in_a_thread_that_has_the_lock_of_the_calls() -> None:
    def note_end(_: object) -> None:
        WATCH.note("callback")

    def note_event(_: object) -> None:
        WATCH.note("listener")

    with sky.ComputePool(nodes=2, slots=2, console="off", liveness=20) as mine:
        engine: Any = mine._engine
        WATCH.lock = engine.dispatch._lock
        try:
            mine.events.listen(note_event)
            again: Any = {"retries": 1, "retry_on": AnyTalkative}
            ways: list[dict[str, Any]] = [{}, again, {"node": "all"}, {"procs": 2}, {"procs": 2, **again}]
            failed: list[Future[Any]] = [sky.compute(talk)().with_options(**way) > mine for way in ways]
            failed += [mine.submit(talk) for _ in range(50)]
            for each in failed:
                each.add_done_callback(note_end)
            assert {type(each.exception(60)) for each in failed} == {Talkative}
            both = talk_on_first().with_options(node="all", independent=True) > mine
            bound = [nap(60).with_options(node=1) > mine for _ in range(4)]
            both.add_done_callback(note_end)
            for one in bound:
                one.add_done_callback(note_end)
            eventually(lambda: processes_busy(mine))
            bound[-1].cancel()
            os.kill(agent_of(mine, 1), signal.SIGKILL)
            assert [type(each.exception(60)) for each in bound[:-1]] == [sky.ConnectionLost] * 3
            assert isinstance(both.exception(60), ExceptionGroup)
            (nap(60) > mine).add_done_callback(note_end)
            mine.stop()
        finally:
            WATCH.lock = None
    assert WATCH.ran == {"callback", "listener", "retry_on", "state", "text"}
    assert not WATCH.with_lock


@pytest.mark.slow
def test_retry_on_is_not_looked_at_under_the_lock_when_the_node_of_a_gang_is_lost(tmp_path: Path) -> None:
    with sky.ComputePool(nodes=2, slots=1, console="off", liveness=20) as mine:
        engine: Any = mine._engine
        again: Any = {"procs": 1, "node": 1, "retries": 1, "retry_on": AnyTalkative}
        lost = sky.compute(begin_and_sleep)(str(tmp_path / "began")).with_options(**again) > mine
        eventually((tmp_path / "began").exists, 60)
        WATCH.ran.clear()
        WATCH.with_lock.clear()
        WATCH.lock = engine.dispatch._lock
        try:
            os.kill(agent_of(mine, 1), signal.SIGKILL)
            assert isinstance(lost.exception(60), sky.ConnectionLost)
        finally:
            WATCH.lock = None
        assert not WATCH.with_lock
