"""What a caller holds: a future that fits wherever one does, and a stream of items in order."""

from __future__ import annotations

import asyncio
import concurrent.futures
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from skypool.calls.futures import CallFuture, Items, Returned, Stream
from skypool.errors import PickleError
from skypool.wire import codec


def returned(value: object) -> Any:
    return Returned(codec.dumps(value))


def later(do: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=do)
    thread.start()
    return thread


class Counted:
    """Counts how often it was unpickled, and where."""

    loaded: list[str] = []  # noqa: RUF012 - a log that the test empties

    def __reduce__(self) -> Any:
        return _count, ()


def _count() -> Counted:
    Counted.loaded.append(threading.current_thread().name)
    return Counted()


def _refuse() -> None:
    raise ImportError("no such thing here")


class Refuses:
    def __reduce__(self) -> Any:
        return _refuse, ()


# --- a future ------------------------------------------------------------------------------------------------


def test_a_future_gives_its_value_to_who_waits() -> None:
    future: CallFuture[int] = CallFuture("train")
    thread = later(lambda: future.set_result(returned(42)))
    assert future.result(timeout=60) == 42
    thread.join()
    assert future.done()
    assert future.exception() is None


def test_a_future_raises_what_the_call_raised() -> None:
    future: CallFuture[int] = CallFuture()
    error = ValueError("bad")
    future.set_exception(error)
    assert future.exception() is error
    with pytest.raises(ValueError, match="bad"):
        future.result()


def test_a_future_that_takes_too_long_raises_timeout_and_goes_on() -> None:
    future: CallFuture[int] = CallFuture()
    with pytest.raises(TimeoutError):
        future.result(timeout=0.01)
    future.set_result(returned(1))
    assert future.result() == 1


def test_a_value_is_unpickled_once_by_the_thread_that_asks_first() -> None:
    Counted.loaded.clear()
    future: CallFuture[Counted] = CallFuture()
    future.set_result(returned(Counted()))
    Counted.loaded.clear()
    first = future.result()
    results: list[Counted] = []
    threads = [later(lambda: results.append(future.result())) for _ in range(4)]
    for thread in threads:
        thread.join()
    assert [each is first for each in results] == [True] * 4
    assert Counted.loaded == [threading.current_thread().name]


def test_a_value_that_waits_for_another_future_while_it_is_unpickled_does_not_hang() -> None:
    inner: CallFuture[int] = CallFuture()
    outer: CallFuture[int] = CallFuture()
    _waiting["inner"] = inner
    outer.set_result(Returned([pickle.dumps(WaitsForInner())]))  # type: ignore[arg-type]  # as dispatch does
    results: list[int] = []
    thread = later(lambda: results.append(outer.result()))
    inner.set_result(returned(5))
    assert inner.result(timeout=60) == 5
    thread.join(60)
    assert results == [5]


_waiting: dict[str, CallFuture[int]] = {}


def _wait_for_inner() -> int:
    return _waiting["inner"].result(timeout=60)


class WaitsForInner:
    def __reduce__(self) -> Any:
        return _wait_for_inner, ()


def test_a_value_that_cannot_be_rebuilt_here_is_a_pickle_error_each_time_it_is_asked_for() -> None:
    future: CallFuture[int] = CallFuture("train")
    future.set_result(Returned([pickle.dumps(Refuses())]))  # type: ignore[arg-type]  # as dispatch does
    for _ in range(2):
        with pytest.raises(
            PickleError, match="the result of train arrived, but cannot be unpickled here: ImportError"
        ) as e:
            future.result()
        assert isinstance(e.value.__cause__, ImportError)


def test_wait_and_as_completed_take_these_futures() -> None:
    futures: list[CallFuture[int]] = [CallFuture() for _ in range(5)]
    done, waiting = concurrent.futures.wait(futures, timeout=0)
    assert (len(done), len(waiting)) == (0, 5)

    def finish() -> None:
        for number in (3, 1, 4, 0, 2):
            futures[number].set_result(returned(number))

    thread = later(finish)
    assert sorted(each.result() for each in concurrent.futures.as_completed(futures, timeout=60)) == [0, 1, 2, 3, 4]
    thread.join()
    first = concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_COMPLETED)
    assert len(first.done) == 5


def test_a_callback_hears_of_the_end_and_one_added_afterwards_too() -> None:
    future: CallFuture[int] = CallFuture()
    heard: list[object] = []
    future.add_done_callback(lambda f: heard.append(f.result()))
    assert heard == []
    future.set_result(returned(7))
    future.add_done_callback(lambda f: heard.append(f))
    assert heard == [7, future]


def test_cancelling_stops_the_call_once_and_wakes_who_waits() -> None:
    future: CallFuture[int] = CallFuture()
    stopped: list[int] = []
    future.on_cancel(lambda: stopped.append(1))
    assert future.cancel()
    assert future.cancel()
    assert stopped == [1]
    assert future.cancelled()
    assert future in concurrent.futures.wait([future], timeout=60).done
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()


def test_a_call_that_has_ended_cannot_be_cancelled() -> None:
    future: CallFuture[int] = CallFuture()
    stopped: list[int] = []
    future.on_cancel(lambda: stopped.append(1))
    future.set_result(returned(1))
    assert not future.cancel()
    assert stopped == []
    assert future.result() == 1


def test_a_future_can_be_awaited_more_than_once() -> None:
    future: CallFuture[int] = CallFuture()

    async def main() -> list[int]:
        thread = later(lambda: future.set_result(returned(3)))
        got = [await future, await future, *await asyncio.gather(*(_awaited(future) for _ in range(2)))]
        thread.join()
        return got

    assert asyncio.run(main()) == [3, 3, 3, 3]


async def _awaited(future: CallFuture[int]) -> int:
    return await future


def test_awaiting_raises_what_the_call_raised() -> None:
    future: CallFuture[int] = CallFuture()
    future.set_exception(KeyError("k"))
    with pytest.raises(KeyError):
        asyncio.run(_awaited(future))


def test_awaiting_a_value_that_cannot_be_rebuilt_raises_pickle_error() -> None:
    future: CallFuture[int] = CallFuture("train")
    future.set_result(Returned([pickle.dumps(Refuses())]))  # type: ignore[arg-type]  # as dispatch does
    with pytest.raises(PickleError, match="train"):
        asyncio.run(asyncio.wait_for(_awaited(future), 10))


def test_cancelling_a_task_that_awaits_stops_the_call() -> None:
    future: CallFuture[int] = CallFuture()
    stopped = threading.Event()
    future.on_cancel(stopped.set)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_awaited(future), 0.01)

    asyncio.run(main())
    assert stopped.wait(10)


# --- items ---------------------------------------------------------------------------------------------------


def _now(stop: Callable[[], None]) -> None:
    stop()


class Upstairs:
    """An `Items` and what it told its generator."""

    def __init__(self) -> None:
        self.items: Items[Any] = Items("count")
        self.credits: list[int] = []
        self.stops: list[int] = []
        self.items.connect(self.credits.append, lambda: self.stops.append(1))

    def batch(self, seq: int, *values: object) -> None:
        entries = [v if type(v) in (int, str) else (codec.dumps(v)[0],) for v in values]
        self.items.feed(seq, False, [pickle.dumps(entries)])

    def single(self, seq: int, value: object) -> None:
        self.items.feed(seq, True, codec.dumps(value))


def test_items_come_in_the_order_they_were_yielded_and_then_the_end() -> None:
    up = Upstairs()
    up.batch(3, 1, "two", [3])
    up.single(4, {"four": b"x" * 5000})
    up.batch(6, 5, (6,))
    up.items.finish(returned("all"))
    assert list(up.items) == [1, "two", [3], {"four": b"x" * 5000}, 5, (6,)]
    assert up.items.value == "all"
    assert next(up.items, None) is None


def test_credit_is_given_when_a_batch_is_used_up_and_not_before() -> None:
    up = Upstairs()
    up.batch(2, 1, 2)
    up.batch(3, 3)
    assert next(up.items) == 1
    assert next(up.items) == 2
    assert up.credits == []
    assert next(up.items) == 3
    assert up.credits == [2]
    up.items.finish(returned(None))
    assert list(up.items) == []
    assert up.credits == [2, 3]
    assert up.items.taken == 3


def test_items_told_again_after_a_reconnection_are_not_given_twice() -> None:
    up = Upstairs()
    up.batch(2, 1, 2)
    assert next(up.items) == 1
    up.batch(2, 1, 2)
    up.batch(3, 3)
    up.batch(3, 3)
    up.items.finish(returned(None))
    assert list(up.items) == [2, 3]


def test_an_error_half_way_comes_after_the_items_before_it_and_only_once() -> None:
    up = Upstairs()
    up.batch(2, 1, 2)
    up.items.finish(ValueError("half way"))
    assert [next(up.items), next(up.items)] == [1, 2]
    with pytest.raises(ValueError, match="half way"):
        next(up.items)
    assert list(up.items) == []
    assert up.stops == []


def test_waiting_for_an_item_ends_when_it_comes() -> None:
    up = Upstairs()
    got: list[Any] = []
    thread = later(lambda: got.append(next(up.items)))
    up.batch(1, "here")
    thread.join(10)
    assert got == ["here"]


def test_closing_stops_the_generator_once_and_ends_the_iteration() -> None:
    up = Upstairs()
    up.batch(3, 1, 2, 3)
    assert next(up.items) == 1
    up.items.close()
    up.items.close()
    assert up.stops == [1]
    assert list(up.items) == []


def test_leaving_a_with_block_stops_the_generator() -> None:
    up = Upstairs()
    with Stream(up.items, _now) as items:
        assert not up.stops
    assert list(items) == []
    assert up.stops == [1]


def test_items_that_are_dropped_stop_their_generator() -> None:
    up = Upstairs()
    stream = Stream(up.items, _now)
    del stream
    assert up.stops == [1]


def test_items_that_were_all_taken_stop_nothing() -> None:
    up = Upstairs()
    up.items.finish(returned(None))
    assert list(up.items) == []
    up.items.close()
    assert up.stops == []


def test_items_can_be_iterated_by_an_asyncio_program_that_goes_on_meanwhile() -> None:
    up = Upstairs()

    async def main() -> tuple[list[Any], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticking = asyncio.create_task(tick())
        await asyncio.sleep(0)
        feeding = later(feed)
        got = [item async for item in Stream(up.items, _now)]
        ticking.cancel()
        feeding.join()
        return got, ticks

    def feed() -> None:
        for n in range(1, 6):
            up.batch(n, n)
            time.sleep(0.01)  # a generator that takes its time
        up.items.finish(returned(None))

    got, ticks = asyncio.run(main())
    assert got == [1, 2, 3, 4, 5]
    assert ticks >= 5


def test_an_error_half_way_reaches_an_asyncio_program() -> None:
    up = Upstairs()
    up.batch(1, 1)
    up.items.finish(ValueError("half way"))

    async def main() -> list[Any]:
        got: list[Any] = []
        try:
            async for item in Stream(up.items, _now):
                got.append(item)
        except ValueError as e:
            got.append(str(e))
        return got

    assert asyncio.run(main()) == [1, "half way"]
