"""Streams that nobody reads to their end: they keep no pool open, and their generators may clean up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

import skypool as sky
from skypool import events
from skypool.errors import PoolClosed
from tests.conftest import eventually, nodes

BOUND = 30.0


@sky.compute
def losses(log: str, size: int = 1 << 16) -> Iterator[bytes]:
    """Never ends by itself; leaves what stopped it."""
    try:
        Path(log).write_text("began")
        while True:
            yield bytes(size)
    except GeneratorExit:
        Path(log).write_text("GeneratorExit")
        raise


@sky.compute
def slow_losses(log: str) -> Iterator[int]:
    """Works for long between two items."""
    try:
        Path(log).write_text("began")
        yield 0
        time.sleep(600)
        yield 1
    except GeneratorExit:
        Path(log).write_text("GeneratorExit")
        raise


class Told(sky.ComputePool):
    """A pool of this machine that notes what it says."""

    def __init__(self, name: str, **options: object) -> None:
        super().__init__(name=name, slots=1, console="off", **options)  # type: ignore[arg-type]
        self.told: list[str] = []
        self.events.listen(self._hear)

    def _hear(self, event: events.Event) -> None:
        if isinstance(event, events.Notice):
            self.told.append(event.text)

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        return self

    @property
    def said(self) -> list[str]:
        return [text for text in self.told if "discarded" in text]


def broken_off(pool: sky.ComputePool, log: str) -> Any:
    stream = losses(log) >> pool
    for _ in stream:
        break
    return stream


def never_read(pool: sky.ComputePool, log: str) -> Any:
    stream = losses(log) >> pool
    eventually(Path(log).exists, BOUND, "the generator's begin")
    return stream


def broadcast(pool: sky.ComputePool, log: str) -> Any:
    streams = losses(log) @ pool
    eventually(Path(log).exists, BOUND, "the generator's begin")
    return streams


def working(pool: sky.ComputePool, log: str) -> Any:
    stream = slow_losses(log) >> pool
    next(iter(stream))
    return stream


@pytest.mark.parametrize("left", [broken_off, never_read, broadcast, working])
def test_leaving_the_block_closes_what_was_not_read(left: Callable[..., Any], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Told("unread") as pool:
        kept = left(pool, str(log))
        began = time.monotonic()
    assert time.monotonic() - began < 5.0
    assert kept is not None
    assert log.read_text() == "GeneratorExit"
    [said] = pool.said
    assert f"discarded: {'slow_losses' if left is working else 'losses'}. Read a stream" in said
    for stream in kept if isinstance(kept, list) else [kept]:
        with pytest.raises(PoolClosed, match="was left before this stream was read to its end"):
            list(stream)


def test_leaving_an_async_block_closes_what_was_not_read(tmp_path: Path) -> None:
    async def main() -> None:
        async with Told("unread") as pool:
            stream: Any = losses(str(tmp_path / "log")) >> pool
            async for _ in stream:
                break
        assert len(pool.said) == 1

    asyncio.run(asyncio.wait_for(main(), BOUND))
    assert (tmp_path / "log").read_text() == "GeneratorExit"


@pytest.mark.parametrize("end", [sky.ComputePool.stop, sky.ComputePool.shutdown])
def test_stop_and_shutdown_let_a_generator_clean_up(end: Callable[[sky.ComputePool], None], tmp_path: Path) -> None:
    pool = Told("unread")
    kept = broken_off(pool, str(tmp_path / "log"))
    end(pool)
    assert (tmp_path / "log").read_text() == "GeneratorExit"
    assert len(pool.said) == 1
    assert kept is not None


def test_an_error_in_the_block_lets_a_generator_clean_up(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Told("unread") as pool:
        kept = broken_off(pool, str(tmp_path / "log"))
        raise ZeroDivisionError
    assert (tmp_path / "log").read_text() == "GeneratorExit"
    assert kept is not None


def test_machines_stay_for_the_linger_time_without_the_generator(tmp_path: Path) -> None:
    with Told("unread", linger=60) as pool:
        kept = broken_off(pool, str(tmp_path / "log"))
    assert (tmp_path / "log").read_text() == "GeneratorExit"
    assert kept is not None
    assert len(nodes("unread")) == 1
    with sky.ComputePool.attach("unread", console="off") as again:
        assert again.inherited == []
    assert nodes("unread") == []


def test_a_stream_that_nobody_reads_is_no_work(tmp_path: Path) -> None:
    """Its generator waits, so the pool is idle, and ends with its linger time."""
    pool = Told("unread", linger=2)
    kept = broken_off(pool, str(tmp_path / "log"))
    eventually(lambda: pool.phase == "ended", BOUND, "the end of the pool")
    assert (tmp_path / "log").read_text() == "GeneratorExit"
    with pytest.raises(PoolClosed, match=r"has had no work for .* \(linger\)"):
        list(kept)
    pool.stop()


@pytest.mark.slow
def test_a_generator_that_works_and_one_that_is_read_are_work(tmp_path: Path) -> None:
    with Told("unread", linger=1.5) as pool:
        kept = working(pool, str(tmp_path / "log"))
        time.sleep(4.0)  # not for luck: longer than the linger time
        assert pool.phase == "ready"
        kept.close()
        stream = iter(losses(str(tmp_path / "other")) >> pool)
        until = time.monotonic() + 4.0
        while time.monotonic() < until:
            next(stream)
            time.sleep(0.1)
        assert pool.phase == "ready"
        pool.stop()


def test_who_reads_in_another_thread_learns_that_the_stream_was_closed(tmp_path: Path) -> None:
    """An end of the items would look as if the generator had ended."""
    errors: list[BaseException] = []

    def read() -> None:
        try:
            for _ in stream:
                pass
        except PoolClosed as e:
            errors.append(e)

    with Told("unread") as pool:
        stream = slow_losses(str(tmp_path / "log")) >> pool
        reader = threading.Thread(target=read)
        reader.start()
        eventually((tmp_path / "log").exists, BOUND, "the generator's begin")
    reader.join(BOUND)
    assert len(errors) == 1


def test_a_stream_whose_items_are_all_here_can_be_read_after_the_end() -> None:
    from tests.work import count

    with Told("unread") as pool:
        stream: Any = count(5) >> pool
        eventually(lambda: stream.wait_stopped(0), BOUND, "the end of the generator")
    assert list(stream) == [0, 1, 2, 3, 4]
    assert pool.said == []
