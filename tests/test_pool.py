"""Calls on a pool of this machine: real agents, real workers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import skypool as sky
from skypool import events
from skypool.calls import entered
from skypool.pool import states
from skypool.pool.engine import PoolEngine
from tests.conftest import eventually, nodes
from tests.work import add, count, nap, until, where


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(nodes=2, slots=2, console="off", grace=1.0) as shared:
        yield shared


@pytest.fixture(autouse=True, scope="module")
def _end_of_module() -> Iterator[None]:
    yield
    assert not nodes()


# --- the language --------------------------------------------------------------------------------------------


def test_a_call_runs_in_another_process_and_its_value_comes_back(pool: sky.ComputePool) -> None:
    @sky.compute
    def pid() -> int:
        return os.getpid()

    assert add(2, b=3) >> pool == 5
    assert pid() >> pool != os.getpid()


def test_local_runs_here(pool: sky.ComputePool) -> None:
    @sky.compute
    def pid() -> int:
        return os.getpid()

    assert pid.local() == os.getpid()


def test_a_callable_whose_repr_is_long_has_a_short_name(pool: sky.ComputePool) -> None:
    """The name of a `partial` is its repr, which has all its arguments. It goes to the node with each call."""
    future = pool.submit(functools.partial(sum, list(range(100_000))))
    assert future.result(timeout=60) == 4_999_950_000
    function = sky.compute(functools.partial(sum, list(range(100_000))))
    assert len(function.name) == 200
    assert function.name.startswith("functools.partial(<built-in function sum>, [0, 1, 2")


def test_at_runs_on_every_node_and_gives_a_list_by_rank(pool: sky.ComputePool) -> None:
    assert where() @ pool == [0, 1]


def test_greater_than_gives_a_future_that_waits_and_that_can_be_awaited(pool: sky.ComputePool) -> None:
    future = add(1) > pool
    assert isinstance(future, concurrent.futures.Future)
    assert future.result(timeout=60) == 2

    async def main() -> int:
        return await (add(2) > pool)

    assert asyncio.run(main()) == 3


def test_and_runs_calls_at_the_same_time(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute(timeout=30)
    def meet(mine: str, other: str) -> str:
        Path(mine).touch()
        while not Path(other).exists():  # it never ends unless both run at once
            time.sleep(0.01)
        return mine

    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert (meet(a, b) & meet(b, a) & add(1)) >> pool == (a, b, 2)


def test_gather_streams_in_order_or_as_calls_end(pool: sky.ComputePool, tmp_path: Path) -> None:
    list(pool.map(nap, [0.1] * 8))  # every worker has loaded what it needs
    calls = [nap(0.3), nap(0.0), nap(0.1)]
    assert list(sky.gather(*calls, stream=True) >> pool) == [0.3, 0.0, 0.1]
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    got = []
    for value in sky.gather(until(second), nap(0.0), until(first), stream=True, ordered=False) >> pool:
        got.append(value)
        Path(first if value == 0.0 else second).touch()
    assert got == [0.0, first, second]


@sky.compute
def explode(n: int) -> int:
    raise ValueError(n)


def test_a_group_that_is_sent_has_one_future(pool: sky.ComputePool, tmp_path: Path) -> None:
    future = (add(1) & add(2)) > pool
    assert future.result(60) == (2, 3)
    assert (sky.gather() > pool).result(0) == ()
    assert (sky.gather(add(1), add(1).with_options(node="all")) > pool).result(60) == (2, [2, 2])
    failed = sky.gather(explode(1), add(1), explode(2)) > pool
    with pytest.raises(ExceptionGroup, match="2 of 3 calls failed"):
        failed.result(60)
    assert isinstance((sky.gather(explode(1), add(1)) > pool[0]).exception(60), ValueError)
    paths = [str(tmp_path / name) for name in ("a", "b")]
    stopped = sky.gather(*map(until, paths)) > pool
    assert stopped.cancel()
    assert stopped.wait_stopped(60)
    with pytest.raises(sky.UsageError, match="has no future: iterate over"):
        pool.send_group(sky.gather(add(1), stream=True))


def test_a_group_of_which_a_call_cannot_be_sent_is_not_run(pool: sky.ComputePool, tmp_path: Path) -> None:
    path, engine = str(tmp_path / "never"), cast(Any, pool._engine)
    for send in (pool.send_group, pool.run_group):
        with pytest.raises(sky.PickleError):
            send(sky.gather(until(path), add(threading.Lock())))  # type: ignore[arg-type]
        eventually(lambda: not engine.dispatch.unfinished, 30, "the end of the first call")


def test_a_future_as_an_argument_is_refused_with_what_to_pass_instead(pool: sky.ComputePool) -> None:
    future = add(1) > pool
    with pytest.raises(sky.PickleError, match=r"the future of add .* pass its value, future\.result\(\)"):
        add(future) >> pool  # type: ignore[arg-type]
    with pytest.raises(sky.PickleError, match=r"the future of a group of 2 calls .* pass its value"):
        add((add(1) & add(2)) > pool) >> pool  # type: ignore[arg-type]
    with pytest.raises(sky.PickleError, match="a stream can be used only in the process that sent the call"):
        add([count(2) >> pool]) >> pool  # type: ignore[arg-type]


def test_a_call_can_be_pinned_to_a_node(pool: sky.ComputePool) -> None:
    assert [where().with_options(node=n) >> pool for n in (1, 0, 1, 1)] == [1, 0, 1, 1]
    with pytest.raises(sky.UsageError, match=r"has no node 7; its nodes are \[0, 1\]"):
        where().with_options(node=7) >> pool


@sky.compute
def agent() -> int:
    """The process id of the agent, which tells one node of this machine from another."""
    return os.getppid()


def test_a_call_for_several_nodes_runs_on_each_and_gives_a_list_by_node(pool: sky.ComputePool) -> None:
    first, second = (agent().with_options(node=node) >> pool for node in (0, 1))
    both = [first, second]
    assert first != second
    assert agent().with_options(node=[1, 0]) >> pool == both
    assert agent().with_options(node="all") >> pool == both
    assert agent().with_options(node=range(1, 2)) >> pool == [second]
    assert (agent().with_options(node="all") > pool).result(60) == both
    assert pool.send(agent(), node=(0, 1)).result(60) == both
    submitted: object = pool.submit(agent.with_options(node="all")).result(60)
    assert submitted == both
    assert (agent().with_options(node=1) & agent().with_options(node="all")) >> pool == (second, both)


def test_at_runs_on_the_nodes_that_the_call_names(pool: sky.ComputePool) -> None:
    first, second = agent() @ pool
    assert agent().with_options(node=1) >> pool == second
    on_one: object = agent().with_options(node=[1]) @ pool
    on_all: object = agent().with_options(node="all") @ pool
    assert (on_one, on_all) == ([second], [first, second])
    assert agent().with_options(node=1) @ pool == [second]


def test_a_generator_for_several_nodes_gives_a_stream_from_each(pool: sky.ComputePool) -> None:
    streams = count(2).with_options(node="all") >> pool
    assert [list(stream) for stream in streams] == [[0, 1], [0, 1]]


def test_parts_of_a_call_for_several_nodes_know_of_each_other_alone(pool: sky.ComputePool) -> None:
    @sky.compute
    def place() -> tuple[int, int]:
        info = sky.instance_info()
        return info.node, info.nodes

    assert place().with_options(node=[1]) >> pool == [(0, 1)]
    assert place().with_options(node=[0, 1]) >> pool == [(0, 2), (1, 2)]


def test_map_runs_on_the_nodes_that_its_function_names(pool: sky.ComputePool) -> None:
    @sky.compute
    def me(_: int) -> int:
        time.sleep(0.01)
        return where.local()

    assert set(pool.map(me.with_options(node=[1]), range(20))) == {1}
    assert set(pool.map(me.with_options(node=[0, 1]), range(20))) == {0, 1}
    assert set(pool.map(me.with_options(node="all"), range(20))) == {0, 1}
    assert list(pool.map(me.with_options(node=0), range(3), buffersize=1)) == [0, 0, 0]
    with pytest.raises(sky.UsageError, match=r"has no node 7; its nodes are \[0, 1\]"):
        pool.map(me.with_options(node=[0, 7]), range(3))


def test_nodes_that_the_pool_does_not_have_are_named(pool: sky.ComputePool) -> None:
    with pytest.raises(sky.UsageError, match=r"has no node 7, 9; its nodes are \[0, 1\]"):
        where().with_options(node=[9, 0, 7]) >> pool
    with pytest.raises(sky.UsageError, match=r"has no node 7; its nodes are \[0, 1\]"):
        pool.send(where(), node=[7])
    with pytest.raises(sky.UsageError, match="node must not be an empty sequence"):
        pool.send(where(), node=[])


def test_a_call_for_several_nodes_fails_as_at_does(pool: sky.ComputePool) -> None:
    @sky.compute
    def fail(first: int) -> int:
        if sky.instance_info().node >= first:
            raise KeyError(sky.instance_info().node)
        return first

    with pytest.raises(KeyError, match="1"):
        fail(1).with_options(node="all") >> pool
    future = fail(0).with_options(node="all", independent=True) > pool
    with pytest.raises(ExceptionGroup, match="2 of 2 calls failed"):
        future.result(60)
    assert isinstance(future.exception(), ExceptionGroup)


def test_cancelling_a_call_for_several_nodes_stops_it_on_each(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute
    def wait() -> None:
        mark = tmp_path / str(sky.instance_info().node)
        mark.touch()
        try:
            time.sleep(60)
        finally:
            mark.unlink()

    future = wait().with_options(node="all") > pool
    eventually(lambda: len(list(tmp_path.iterdir())) == 2, 60, "the function to run on both nodes")
    assert future.cancel()
    assert future.wait_stopped(60)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(0)


def test_map_keeps_order_and_takes_several_iterables(pool: sky.ComputePool) -> None:
    assert list(pool.map(add, range(500), range(500))) == [2 * i for i in range(500)]


def test_map_with_a_buffersize_reads_no_further_ahead(pool: sky.ComputePool) -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        while True:
            taken += 1
            yield taken

    results = pool.map(add, items(), buffersize=4)
    assert [next(results) for _ in range(10)] == list(range(2, 12))
    assert taken <= 15
    results.close()  # type: ignore[attr-defined]  # it is a generator


def test_map_times_out_from_the_moment_of_the_call(pool: sky.ComputePool) -> None:
    with pytest.raises(TimeoutError):
        list(pool.map(nap, [30.0], timeout=0.2))
    assert add(1) >> pool == 2


def test_what_is_no_call_is_refused_where_it_is_written(pool: sky.ComputePool) -> None:
    for send in (pool.send, pool.run, pool.run_all):
        with pytest.raises(sky.UsageError, match=r"a pool runs calls such as train\(3\), not 7"):
            send(7)  # type: ignore[arg-type, call-overload]  # that is what is tested
        with pytest.raises(sky.UsageError, match=r"a pool runs calls such as .*: call it, add\(…\)"):
            send(add)  # type: ignore[arg-type, call-overload]
    with pytest.raises(sky.UsageError, match=r"takes a group of calls made by gather\(\) or &, not 7"):
        pool.run_group(7)  # type: ignore[arg-type]
    with pytest.raises(sky.UsageError, match=r"drop\(\) takes a reference returned by put\(\), not 7"):
        pool.drop(7)  # type: ignore[arg-type]
    with pytest.raises(
        sky.UsageError, match=r"timeout \(seconds until all results must be there\) must be a number, not '5'"
    ):
        pool.map(add, [1], timeout="5")  # type: ignore[call-overload]
    assert list(pool.map(add, [1], timeout=float("inf"))) == [2]
    with pytest.raises(sky.UsageError, match=r">> sends a call to a pool, and <class .* is not a pool"):
        add(1).with_options(node=0) >> sky.ComputePool  # type: ignore[operator]
    with pytest.raises(sky.UsageError, match="a pool's name must have 1 to 40 letters"):
        sky.ComputePool.attach(7)  # type: ignore[arg-type]


def test_the_pool_is_an_executor_for_what_takes_one(pool: sky.ComputePool) -> None:
    assert isinstance(pool, concurrent.futures.Executor)
    futures = [pool.submit(pow, 2, n) for n in range(20)]
    done, waiting = concurrent.futures.wait(futures, timeout=20)
    assert not waiting
    assert sorted(f.result() for f in done) == [2**n for n in range(20)]

    async def main() -> int:
        return await asyncio.get_running_loop().run_in_executor(pool, max, 3, 9)

    assert asyncio.run(main()) == 9


def test_a_pool_that_was_not_started_starts_at_first_use_and_shuts_down() -> None:
    lazy = sky.ComputePool(console="off", slots=1)
    assert lazy.phase == "planned"
    assert lazy.submit(add, 4).result() == 5
    lazy.shutdown()
    assert lazy.phase == "ended"
    with pytest.raises(sky.PoolClosed, match="has ended"):
        lazy.submit(add, 4)
    with pytest.raises(sky.PoolClosed, match="has ended"):
        add(1) >> lazy


def test_start_gives_the_pool_and_stop_is_quiet_the_second_time() -> None:
    started = sky.ComputePool(console="off", slots=1).start()
    assert add(1) >> started == 2
    assert started.start() is started
    started.stop()
    started.stop()


def test_leaving_the_block_waits_for_what_was_sent() -> None:
    with sky.ComputePool(console="off", slots=1) as mine:
        slow, quick = nap(0.2) > mine, add(1) > mine
    assert (slow.result(), quick.result()) == (0.2, 2)


def test_leaving_the_block_with_an_exception_ends_what_runs() -> None:
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError), sky.ComputePool(console="off", slots=1) as mine:
        future = mine.send(nap(60))
        raise ZeroDivisionError
    assert time.monotonic() - began < 30
    with pytest.raises(sky.PoolClosed):
        future.result(timeout=1)


def test_asyncio_programs_enter_a_pool_and_await_calls() -> None:
    async def main() -> tuple[int, list[int]]:
        async with sky.ComputePool(console="off", slots=1) as mine:
            value = await add(20, 22)
            items = [item async for item in count(3) >> mine]  # type: ignore[attr-defined]  # a stream
        return value, items

    assert asyncio.run(main()) == (42, [0, 1, 2])


def test_await_without_a_pool_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entered, "_everywhere", [])

    async def main() -> None:
        call = add(1)
        call.sent = True
        await call

    with pytest.raises(sky.UsageError, match="async with"):
        contextvars.Context().run(asyncio.run, main())


def test_an_async_function_runs_to_its_end(pool: sky.ComputePool) -> None:
    @sky.compute
    async def later(x: int) -> int:
        await asyncio.sleep(0.01)
        return x + 1

    assert later(1) >> pool == 2  # type: ignore[comparison-overlap]  # the awaited value


# --- where am I ----------------------------------------------------------------------------------------------


def test_instance_info_tells_where_a_call_runs(pool: sky.ComputePool) -> None:
    @sky.compute
    def where() -> sky.InstanceInfo:
        return sky.instance_info()

    first, second = where() @ pool
    assert (first.node, first.nodes, first.slots, first.is_head) == (0, 2, 2, True)
    assert (second.node, second.nodes, second.is_head) == (1, 2, False)
    assert first.pool == pool.name
    assert first.call != second.call
    assert first.addresses == second.addresses == (first.address, second.address)
    assert (where() >> pool).addresses == ()
    assert sky.instance_info().nodes == 1


def test_shards_of_a_broadcast_are_the_whole_together(pool: sky.ComputePool) -> None:
    @sky.compute
    def mine(xs: list[int], ys: Any) -> tuple[list[int], Any]:
        return sky.shard(xs, ys, shuffle=True, seed=7)

    (a, b), (c, d) = mine(list(range(11)), np.arange(11) * 2) @ pool
    assert sorted(a + c) == list(range(11))
    assert [2 * x for x in a] == b.tolist()
    assert [2 * x for x in c] == d.tolist()


# --- values --------------------------------------------------------------------------------------------------


def test_an_array_comes_back_equal_and_writable(pool: sky.ComputePool) -> None:
    @sky.compute
    def double(x: Any) -> Any:
        x *= 2  # arguments may be written to
        return x

    for size in (10, 5_000, 3_000_000):
        array = np.arange(size, dtype=np.float64)
        result = double(array) >> pool
        assert np.array_equal(result, array * 2)
        result[0] = 1.0


def test_many_arrays_in_one_value_keep_their_places(pool: sky.ComputePool) -> None:
    @sky.compute
    def echo(x: Any) -> Any:
        return x

    value = {f"k{i}": np.full(257 + i, i, dtype=np.int16) for i in range(300)}
    back = echo(value) >> pool
    assert all(np.array_equal(back[k], v) for k, v in value.items())


def test_a_value_of_put_travels_once_and_arrives_as_the_value(pool: sky.ComputePool) -> None:
    table = np.arange(1_000_000)
    ref = pool.put(table)

    @sky.compute
    def at(t: Any, i: int) -> int:
        return int(t[i])

    assert [at(ref, i) >> pool for i in (0, 5, 999_999)] == [0, 5, 999_999]
    assert at(ref, 3) @ pool == [3, 3]
    ref.drop()
    eventually(lambda: _is_gone(at(ref, 1), pool), what="the dropped value")


def _is_gone(call: Any, pool: sky.ComputePool) -> bool:
    try:
        call >> pool
    except KeyError as e:
        assert "call put() on this pool again" in str(e)
        return True
    return False


def test_a_captured_global_that_changes_is_seen_by_the_next_call(pool: sky.ComputePool) -> None:
    settings = {"scale": 2}

    @sky.compute
    def scaled(x: int) -> int:
        return x * settings["scale"]

    assert scaled(3) >> pool == 6
    settings["scale"] = 10
    assert scaled(3) >> pool == 30


# --- streams -------------------------------------------------------------------------------------------------


def test_a_generator_streams_its_items_in_order(pool: sky.ComputePool) -> None:
    assert list(count(20_000) >> pool) == list(range(20_000))


def test_items_arrive_while_the_generator_still_runs(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute
    def slowly(path: str) -> Iterator[int]:
        yield 1
        while not Path(path).exists():
            time.sleep(0.01)
        yield 2

    go_on = tmp_path / "go-on"
    items: Any = slowly(str(go_on)) >> pool
    assert next(items) == 1
    go_on.touch()
    assert list(items) == [2]


def test_a_generator_that_raises_half_way_gives_its_items_first(pool: sky.ComputePool) -> None:
    @sky.compute
    def half(n: int) -> Iterator[int]:
        yield from range(n)
        raise ValueError("half way")

    got = []
    with pytest.raises(ValueError, match="half way"):
        for item in half(100) >> pool:
            got.append(item)
    assert got == list(range(100))


def test_a_generators_return_value_is_kept(pool: sky.ComputePool) -> None:
    @sky.compute
    def work() -> Any:
        yield 1
        return "done"

    items: Any = work() >> pool
    assert list(items) == [1]
    assert items.value == "done"


def test_a_slow_consumer_holds_the_generator_back(pool: sky.ComputePool, tmp_path: Path) -> None:
    progress = tmp_path / "made"

    @sky.compute(window=1 << 20)
    def flood(path: str) -> Iterator[bytes]:
        for i in range(200):
            Path(path).write_text(str(i))
            yield bytes(100_000)

    items: Any = flood(str(progress)) >> pool
    next(items)
    time.sleep(0.5)
    assert int(progress.read_text()) < 30
    assert sum(len(item) for item in items) == 199 * 100_000


def test_closing_a_stream_stops_its_generator(pool: sky.ComputePool, tmp_path: Path) -> None:
    ended = tmp_path / "ended"

    @sky.compute
    def forever(path: str) -> Iterator[int]:
        try:
            n = 0
            while True:
                n += 1
                yield n
                time.sleep(0.01)
        finally:
            Path(path).write_text("cleaned up")

    with forever(str(ended)) >> pool as items:  # type: ignore[attr-defined]  # a stream
        assert next(items) == 1
    eventually(ended.exists, what="the generator's clean-up")


def test_breaking_out_of_a_loop_stops_the_generator(pool: sky.ComputePool, tmp_path: Path) -> None:
    ended = tmp_path / "ended"

    @sky.compute
    def forever(path: str) -> Iterator[bytes]:
        try:
            while True:
                yield bytes(100_000)
        finally:
            Path(path).write_text("cleaned up")

    for _ in forever(str(ended)) >> pool:
        break
    eventually(ended.exists, what="the end of a generator that nobody listens to")


def test_nothing_of_a_stream_overtakes_its_large_items(pool: sky.ComputePool) -> None:
    @sky.compute(window=200 << 20)
    def mixed() -> Iterator[Any]:
        for i in range(6):
            yield np.full(2_000_000, i)
            yield i

    assert [int(np.max(item)) for item in mixed() >> pool] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_large_items_stream_too(pool: sky.ComputePool) -> None:
    @sky.compute
    def blocks() -> Iterator[Any]:
        for i in range(6):
            yield np.full(400_000, i)

    assert [int(b[-1]) for b in blocks() >> pool] == [0, 1, 2, 3, 4, 5]


def test_an_iterator_argument_streams_up(pool: sky.ComputePool) -> None:
    @sky.compute
    def total(numbers: Iterator[int], more: Iterator[Any]) -> int:
        return sum(numbers) + sum(len(m) for m in more)

    assert total((i for i in range(200)), more=iter([np.zeros(100_000), [1, 2]])) >> pool == 19900 + 100_002


def test_an_iterator_is_forgotten_when_its_call_has_ended(pool: sky.ComputePool) -> None:
    @sky.compute
    def total(numbers: Iterator[int]) -> int:
        return sum(numbers)

    numbers = [(i for i in range(3)) for _ in range(5)]
    kept = [weakref.ref(each) for each in numbers]
    while numbers:
        assert total(numbers.pop()) >> pool == 3
    total(iter([1])) >> pool
    eventually(lambda: not any(each() for each in kept))


def test_an_iterator_argument_is_pulled_no_further_than_needed(pool: sky.ComputePool) -> None:
    pulled = []

    def source() -> Iterator[int]:
        for i in range(1000):
            pulled.append(i)
            yield i

    @sky.compute
    def first(numbers: Iterator[int], n: int) -> list[int]:
        return [next(numbers) for _ in range(n)]

    assert first(source(), 3) >> pool == [0, 1, 2]
    assert len(pulled) == 3


def test_an_iterator_argument_that_raises_raises_in_the_function(pool: sky.ComputePool) -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise LookupError("the source ran dry")

    @sky.compute
    def total(numbers: Iterator[int]) -> int:
        return sum(numbers)

    with pytest.raises(LookupError, match="ran dry"):
        total(broken()) >> pool


def test_an_async_generator_streams(pool: sky.ComputePool) -> None:
    @sky.compute
    async def ticks() -> AsyncIterator[int]:
        for i in range(3):
            await asyncio.sleep(0)
            yield i

    assert list(ticks() >> pool) == [0, 1, 2]  # type: ignore[call-overload]  # a stream


# --- output --------------------------------------------------------------------------------------------------


def _printed(pool: sky.ComputePool, call: Any, broadcast: bool = False) -> list[events.Output]:
    heard: list[events.Output] = []
    hush = pool.events.listen(lambda e: heard.append(e) if isinstance(e, events.Output) else None)
    try:
        call @ pool if broadcast else call >> pool
    finally:
        hush()
    return heard


@sky.compute
def chatter() -> None:
    print("out", sky.instance_info().node)
    print("err", file=sys.stderr)


def test_what_a_call_prints_appears_here_marked_with_its_node(pool: sky.ComputePool) -> None:
    heard = _printed(pool, chatter(), broadcast=True)
    assert {(e.node, e.stream, e.text) for e in heard} == {
        (0, 1, "out 0\n"),
        (1, 1, "out 1\n"),
        (0, 2, "err\n"),
        (1, 2, "err\n"),
    }


def test_output_can_be_the_heads_alone_or_silent(pool: sky.ComputePool) -> None:
    assert {e.node for e in _printed(pool, chatter().with_options(output="head"), broadcast=True)} == {0}
    assert _printed(pool, chatter().with_options(output="silent"), broadcast=True) == []


def test_captured_output_comes_back_with_the_value_also_a_childs(pool: sky.ComputePool) -> None:
    @sky.compute(output="capture")
    def mixed() -> int:
        print("one")
        os.system("echo two")
        print("three", file=sys.stderr)
        return 3

    result: Any = mixed() >> pool
    assert result == sky.Captured(3, "one\ntwo\nthree\n")


def test_captured_output_comes_back_with_the_value_of_an_async_function(pool: sky.ComputePool) -> None:
    @sky.compute(output="capture")
    async def mixed() -> int:
        print("one")
        return 3

    result: Any = mixed() >> pool
    assert result == sky.Captured(3, "one\n")


def test_a_childs_output_appears_too(pool: sky.ComputePool) -> None:
    @sky.compute
    def shell() -> int:
        return os.system("echo from a child")

    heard: list[str] = []
    hush = pool.events.listen(lambda e: heard.append(e.text) if isinstance(e, events.Output) else None)
    assert shell() >> pool == 0
    eventually(lambda: "".join(heard) == "from a child\n", what="the child's line")
    hush()


# --- stopping ------------------------------------------------------------------------------------------------


def test_cancelling_a_future_stops_the_call_and_lets_it_clean_up(pool: sky.ComputePool, tmp_path: Path) -> None:
    begun, cleaned = tmp_path / "begun", tmp_path / "cleaned"

    @sky.compute
    def work(begun: str, cleaned: str) -> None:
        try:
            Path(begun).touch()
            time.sleep(60)
        finally:
            Path(cleaned).touch()

    future = work(str(begun), str(cleaned)) > pool
    eventually(begun.exists)
    assert future.cancel()
    assert future.cancelled()
    eventually(cleaned.exists, what="the call's finally block")
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    assert add(1) >> pool == 2


def test_a_call_that_ignores_sigterm_is_killed_after_its_grace(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute(grace=0.3)
    def stubborn(path: str) -> None:
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(path).write_text(str(os.getpid()))
        while True:
            time.sleep(1)

    file = tmp_path / "pid"
    future = stubborn(str(file)) > pool
    eventually(lambda: file.exists() and file.read_text())
    pid = int(file.read_text())
    future.cancel()
    eventually(lambda: not Path(f"/proc/{pid}").exists(), what="SIGKILL")


def test_a_waiting_call_is_cancelled_without_having_run(pool: sky.ComputePool, tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    @sky.compute
    def touch(path: str) -> None:
        Path(path).touch()

    go_on = str(tmp_path / "go-on")
    blockers = [until(go_on) > pool for _ in range(4)]
    future = touch(str(ran)) > pool
    assert future.cancel()
    Path(go_on).touch()
    for blocker in blockers:
        blocker.result()
    assert add(1) >> pool == 2
    assert not ran.exists()


def test_a_call_that_never_returns_is_ended_by_its_timeout(pool: sky.ComputePool) -> None:
    began = time.monotonic()
    with pytest.raises(sky.CallTimeout, match=r"nap ran longer than its timeout of 0.3 s"):
        nap(60).with_options(timeout=0.3) >> pool
    assert time.monotonic() - began < 30
    with pytest.raises(TimeoutError):
        nap(60).with_options(timeout=0.1) >> pool


def test_time_in_the_queue_does_not_count_towards_a_timeout(pool: sky.ComputePool) -> None:
    calls = [nap(0.5).with_options(timeout=2) > pool for _ in range(24)]  # the last ones wait for 2.5 s
    assert [c.result() for c in calls] == [0.5] * 24


def test_threads_of_the_caller_share_a_pool(pool: sky.ComputePool) -> None:
    results: list[int] = []

    def many() -> None:
        results.extend(add(i) >> pool for i in range(100))

    threads = [threading.Thread(target=many) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == sorted([i + 1 for i in range(100)] * 6)


def test_a_deep_queue_does_not_slow_another_pools_call(pool: sky.ComputePool) -> None:
    waiting = [nap(0.02) > pool for _ in range(500)]
    with sky.ComputePool(console="off", slots=1) as other:
        add(1) >> other
        times = []
        for _ in range(20):
            began = time.monotonic()
            add(1) >> other
            times.append(time.monotonic() - began)
    assert sorted(times)[10] < 1.0  # of the 2.5 s that the others take
    for future in waiting:
        future.cancel()


@pytest.mark.slow
def test_tens_of_thousands_of_waiting_calls_all_end(pool: sky.ComputePool) -> None:
    assert sum(pool.map(add, range(30_000))) == sum(range(1, 30_001))


def test_short_calls_do_not_wait_behind_a_long_one_while_a_slot_is_free(tmp_path: Path) -> None:
    with sky.ComputePool(console="off", nodes=2, slots=1) as mine:
        list(mine.map(add, range(200)))  # both nodes have learnt that calls are short, and take many ahead
        go_on = tmp_path / "go-on"
        long = until(str(go_on)) > mine
        assert list(mine.map(add, range(200), timeout=60)) == list(range(1, 201))
        assert not long.done()
        go_on.touch()
        long.result()


def test_a_pool_grows_to_its_most_nodes_while_calls_wait(tmp_path: Path) -> None:
    with sky.ComputePool(console="off", nodes=(1, 3), slots=1) as mine:
        assert len(mine.nodes) == 1
        go_on = tmp_path / "go-on"
        futures = [until(str(go_on)) > mine for _ in range(8)]
        eventually(lambda: list(mine.nodes.values()).count("ready") == 3, what="the third node")
        go_on.touch()
        assert [f.result() for f in futures] == [str(go_on)] * 8


def test_a_node_that_is_said_to_be_ready_takes_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for `pool.nodes` and then calls every node must not miss one that is not admitted yet."""
    seen: list[tuple[int, str]] = []
    perform = PoolEngine.perform

    def watched(engine: PoolEngine, action: states.Action) -> None:
        if isinstance(action, states.Admit):
            seen.append((action.node, engine.life.words()[action.node]))
        perform(engine, action)

    monkeypatch.setattr(PoolEngine, "perform", watched)
    with sky.ComputePool(nodes=2, console="off") as pool:
        assert dict(pool.nodes) == {0: "ready", 1: "ready"}
    assert sorted(node for node, _ in seen) == [0, 1]
    assert [word for _, word in seen if word == "ready"] == []
