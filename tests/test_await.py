"""`await call`: it runs on the innermost pool of its task or thread, and never on the pool of another."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import skypool as sky
from skypool.runtime import instance_info
from tests.work import add


@sky.compute
def here() -> str:
    return instance_info().pool


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[str, sky.ComputePool]]:
    """Pools that run, each entered by nobody. Leaving a block ends its pool, so each test has its own."""
    made = {name: sky.ComputePool(name=name, slots=1, console="off") for name in ("a", "b", "c")}
    for each in made.values():
        each.start()
    yield made
    for each in made.values():
        each.stop()


class Block:
    """Enters a pool as its block does, and leaves it without ending the pool."""

    def __init__(self, pool: sky.ComputePool) -> None:
        self._pool = pool
        self._ends = pool._leave

    def _stay(self, kind: object) -> None:
        """Called instead of the end of the pool."""

    def __enter__(self) -> sky.ComputePool:
        return self._pool.__enter__()

    def __exit__(self, *_: object) -> None:
        self._pool._leave = self._stay  # type: ignore[method-assign]
        self._pool.__exit__(None, None, None)
        self._pool._leave = self._ends  # type: ignore[method-assign]

    async def __aenter__(self) -> sky.ComputePool:
        return await self._pool.__aenter__()

    async def __aexit__(self, *_: object) -> None:
        self._pool._leave = self._stay  # type: ignore[method-assign]
        await self._pool.__aexit__(None, None, None)
        self._pool._leave = self._ends  # type: ignore[method-assign]


Pools = dict[str, sky.ComputePool]


def test_two_tasks_with_a_pool_each_never_meet(pools: Pools) -> None:
    async def work(name: str, turn: asyncio.Barrier) -> list[str]:
        async with Block(pools[name]):
            await turn.wait()  # both are in their blocks
            first = await here()
            await turn.wait()
            return [first, *(await asyncio.gather(*(_one() for _ in range(5))))]

    async def _one() -> str:
        await asyncio.sleep(0)
        return await here()

    async def both() -> list[list[str]]:
        turn = asyncio.Barrier(2)
        return [*await asyncio.gather(work("a", turn), work("b", turn))]

    assert asyncio.run(both()) == [["a"] * 6, ["b"] * 6]


def test_a_task_whose_block_ends_first_takes_no_pool_from_another(pools: Pools) -> None:
    async def work(name: str, first: asyncio.Event, then: asyncio.Event) -> str:
        async with Block(pools[name]):
            first.set()
            await then.wait()
            return await here()

    async def both() -> list[str]:
        begun, over = asyncio.Event(), asyncio.Event()
        outer = asyncio.create_task(work("a", begun, over))
        await begun.wait()
        ready = asyncio.Event()
        ready.set()
        inner = await work("b", asyncio.Event(), ready)
        over.set()
        return [inner, await outer]

    assert asyncio.run(both()) == ["b", "a"]


def test_blocks_nest_and_the_outer_pool_is_back_after_the_inner_block(pools: Pools) -> None:
    async def work() -> list[str]:
        async with Block(pools["a"]):
            found = [await here()]
            async with Block(pools["b"]):
                found.append(await here())
                with Block(pools["c"]):
                    found.append(await here())
                found.append(await here())
            return [*found, await here()]

    assert asyncio.run(work()) == ["a", "b", "c", "b", "a"]


def test_blocks_that_end_in_another_order_are_left_all_the_same(pools: Pools) -> None:
    async def work() -> list[str]:
        stack_a, stack_b = contextlib.AsyncExitStack(), contextlib.AsyncExitStack()
        await stack_a.enter_async_context(Block(pools["a"]))
        await stack_b.enter_async_context(Block(pools["b"]))
        await stack_a.aclose()
        found = [await here()]
        await stack_b.aclose()
        with pytest.raises(sky.UsageError, match="needs an `async with"):
            await here()
        return found

    assert asyncio.run(work()) == ["b"]


def test_a_block_that_is_left_in_another_task_is_left_everywhere(pools: Pools) -> None:
    async def work() -> None:
        block = Block(pools["a"])
        await block.__aenter__()
        await asyncio.create_task(block.__aexit__())
        with pytest.raises(sky.UsageError, match="needs an `async with"):
            await here()

    asyncio.run(work())


def test_threads_of_a_block_use_its_pool_and_each_threads_own_comes_first(pools: Pools) -> None:
    found: dict[str, str] = {}

    async def ask() -> str:
        return await here()

    def plain() -> None:
        found["plain"] = asyncio.run(ask())

    def own() -> None:
        with Block(pools["b"]):
            found["own"] = asyncio.run(ask())

    with Block(pools["a"]):
        for work in (plain, own):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        found["main"] = asyncio.run(ask())
    assert found == {"plain": "a", "own": "b", "main": "a"}


def test_a_thread_without_a_pool_of_its_own_does_not_guess_among_several(pools: Pools) -> None:
    errors: list[BaseException] = []

    async def ask() -> None:
        try:
            await here()
        except sky.UsageError as e:
            errors.append(e)

    with Block(pools["a"]), Block(pools["b"]):
        thread = threading.Thread(target=lambda: asyncio.run(ask()))
        thread.start()
        thread.join()
    assert "others have entered 2" in str(errors[0])


def test_a_pool_of_one_task_is_not_used_by_a_task_without_one(pools: Pools) -> None:
    async def without(go: asyncio.Event) -> None:
        await go.wait()
        with pytest.raises(sky.UsageError, match="needs an `async with"):
            await here()

    async def both() -> None:
        go = asyncio.Event()
        task = asyncio.create_task(without(go))
        async with Block(pools["a"]):
            go.set()
            await task

    asyncio.run(both())


def test_a_thread_of_a_task_has_the_pool_of_that_task(pools: Pools) -> None:
    async def ask() -> str:
        return await here()

    async def work(name: str) -> str:
        async with Block(pools[name]):
            return await asyncio.to_thread(lambda: asyncio.run(ask()))

    async def both() -> list[str]:
        return [*await asyncio.gather(work("a"), work("b"))]

    assert asyncio.run(both()) == ["a", "b"]


def test_generators_that_enter_a_pool_leave_it_when_they_end(pools: Pools) -> None:
    @contextlib.asynccontextmanager
    async def entered() -> AsyncIterator[None]:
        async with Block(pools["a"]):
            yield

    async def work() -> list[str]:
        async with entered():
            found = [await here()]
        with pytest.raises(sky.UsageError, match="needs an `async with"):
            await here()
        return found

    assert asyncio.run(work()) == ["a"]


def test_a_notebooks_cells_have_a_context_each_and_find_the_pool_of_an_earlier_cell(pools: Pools) -> None:
    async def ask() -> str:
        return await here()

    block = Block(pools["a"])
    contextvars.copy_context().run(block.__enter__)
    assert contextvars.copy_context().run(asyncio.run, ask()) == "a"
    contextvars.copy_context().run(block.__exit__)


def test_a_group_is_awaited_as_a_call_is(pools: Pools) -> None:
    async def work() -> Any:
        async with Block(pools["a"]):
            return await sky.gather(here(), add(1)), await (add(1) & add(2))

    assert asyncio.run(work()) == (("a", 2), (2, 3))
