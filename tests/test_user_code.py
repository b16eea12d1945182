"""Code of the user that runs where it may not is found, in all tests. Here it is made to run there on purpose."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, ClassVar

import pytest

import skypool as sky
from skypool.calls import dispatch
from skypool.calls.futures import CallFuture
from skypool.event_loop import Loop
from skypool.events import EventStream, Notice
from tests import user_code
from tests.user_code import UserCodeError


@pytest.fixture(autouse=True)
def _meant() -> Iterator[None]:
    """What these tests find is no failure."""
    yield
    user_code.found.clear()


def watched_lock() -> Any:
    """A lock as the dispatch makes it."""
    threads: Any = dispatch.threading  # type: ignore[attr-defined]  # which the fixture has replaced
    return threads.RLock()


def test_a_done_callback_under_a_lock_is_found() -> None:
    future = CallFuture[int]()
    with (
        watched_lock(),
        pytest.raises(UserCodeError, match=r"a done-callback .* skypool.calls.dispatch"),
    ):
        future._tell()
    future._tell()


def test_a_listener_under_a_lock_is_found() -> None:
    stream = EventStream()
    with watched_lock(), pytest.raises(UserCodeError, match="a listener of events"):
        stream.emit(Notice(pool="p", text=""))
    stream.emit(Notice(pool="p", text=""))


def test_a_lock_that_is_taken_twice_is_held_until_it_is_released_twice() -> None:
    lock = watched_lock()
    with lock:
        with lock:
            pass
        with pytest.raises(UserCodeError):
            user_code.check("a callback")
        heard: list[bool] = []
        other = threading.Thread(target=lambda: heard.append(lock.acquire(blocking=False)))
        other.start()
        other.join()
        assert heard == [False]
    user_code.check("a callback")


def test_code_on_the_thread_of_the_event_loop_is_found() -> None:
    with pytest.raises(UserCodeError, match="the thread of skypool's event loop"):
        Loop.shared().call(lambda: user_code.check("a callback"))
    Loop.shared().call(lambda: user_code.check("a listener", on_loop=True))


def test_an_inline_listener_does_not_keep_other_threads_from_emitting() -> None:
    stream = EventStream()
    heard: list[str] = []

    def hear(event: Any) -> None:
        if event.text == "first":
            other = threading.Thread(target=stream.emit, args=(Notice(pool="p", text="second"),), daemon=True)
            other.start()
            other.join(10)
            heard.append("ended" if not other.is_alive() else "hangs")

    stream.listen(hear, inline=True)
    stream.emit(Notice(pool="p", text="first"))
    assert heard == ["ended"]


class Slow(Exception):
    """An exception that is read slowly: until the other call of its pool has ended."""

    other: Future[Any] | None = None
    read: ClassVar[list[object]] = []

    def __setstate__(self, state: object) -> None:
        if Slow.other is not None:
            Slow.read.append(Slow.other.result(20))


def fail_slowly() -> None:
    error = Slow("it failed")
    error.detail = "an attribute"  # type: ignore[attr-defined]  # so that there is a state
    raise error


def test_reading_an_exception_may_wait_for_a_call_of_another_node() -> None:
    from tests.work import nap

    with sky.ComputePool(nodes=2, slots=1, console="off") as pool:
        Slow.read = []
        Slow.other = nap(1).with_options(node=1) > pool
        try:
            failed = pool.submit(sky.compute(fail_slowly).with_options(node=0))
            assert isinstance(failed.exception(60), Slow)
        finally:
            Slow.other = None
        assert Slow.read == [1.0]
