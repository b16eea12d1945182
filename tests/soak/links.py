"""Connections under random cuts and without descriptors: no call fails, none is wrong, and no node is lost.

    python -m tests.soak.links --seed 1 --operations 1000000 --cuts 20000

Threads send calls of all kinds to two pools of this machine. Meanwhile connections are cut in three ways, and from time
to time this process has no free descriptor for 0.1 to 2 s. An operation is a call that ended, or an item that was read.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import skypool as sky
from skypool import events
from tests.exhausted import Hoard

DESCRIPTORS = 200
"""The most descriptors of this process. The fewer there are, the quicker they are exhausted."""
LIVENESS = 60.0
PATIENCE = 120.0
"""Seconds without any operation after which the run is said to hang."""
PAUSE = (0.5, 5.0)
"""Seconds between two times without descriptors."""
WITHOUT = (0.1, 2.0)
"""Seconds without descriptors."""
AHEAD = 2.0
"""Threads slow down when there were so many times more operations per cut than asked for."""
THREADS = 6


@sky.compute
def answer(n: int) -> int:
    return n * 7919 + 13


@sky.compute
def large(n: int) -> bytes:
    return bytes([n % 251]) * 300_000


@sky.compute
def items(n: int, count: int) -> Iterator[int]:
    for each in range(count):
        yield n + each


class Books:
    """What was done, and what was found.

    Args:
        per_cut: operations that were asked for, per cut.
    """

    def __init__(self, per_cut: float) -> None:
        self._per_cut = per_cut
        self.lock = threading.Lock()
        self.operations = 0
        self.counts: Counter[str] = Counter()
        self.troubles: list[str] = []

    @property
    def is_ahead(self) -> bool:
        """True while there were more operations than there should be for the cuts so far."""
        return self.operations > AHEAD * self._per_cut * (self.counts["cuts"] + 1)

    def did(self, what: str, operations: int) -> None:
        with self.lock:
            self.operations += operations
            self.counts[what] += operations

    def trouble(self, words: str) -> None:
        print(f"TROUBLE {words}", flush=True)
        with self.lock:
            self.troubles.append(words)


class Complaints(logging.Handler):
    """What asyncio logs of tasks and callbacks that nobody awaits is a trouble."""

    def __init__(self, books: Books) -> None:
        super().__init__(logging.WARNING)
        self._books = books

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._books.trouble(f"logged: {record.getMessage():.500} {type(error).__name__}: {error}")


# --- calls ---------------------------------------------------------------------------------------------------


def work(pool: sky.ComputePool, books: Books, chance: random.Random, over: threading.Event) -> None:
    """Send calls until it is over."""
    kinds = [_map, _map, _map, _part_of_a_map, _calls, _futures, _stream, _part_of_a_stream, _large, _awaited]
    asyncio.set_event_loop(asyncio.new_event_loop())  # now, as it needs descriptors of its own
    while not over.is_set():
        if slow := books.is_ahead:
            over.wait(0.02)
        kind = _call if slow else chance.choice(kinds)
        try:
            kind(pool, books, chance)
        except Exception as e:  # noqa: BLE001 - whatever a call raises here is found
            books.trouble(f"{kind.__name__}: {type(e).__name__}: {e}")
            over.wait(0.1)
    asyncio.get_event_loop().close()


def _map(pool: sky.ComputePool, books: Books, chance: random.Random) -> None:
    first, count = chance.randrange(10**6), chance.choice((1, 10, 100, 1000, 5000))
    numbers: Any = range(first, first + count)
    given = numbers if chance.random() < 0.7 else iter(numbers)
    for n, value in zip(numbers, pool.map(answer, given), strict=True):
        _check(books, value, n * 7919 + 13)
    books.did("calls of map", count)


def _part_of_a_map(pool: sky.ComputePool, books: Books, chance: random.Random) -> None:
    results = pool.map(answer, range(1000))
    count = chance.randrange(1, 200)
    for n in range(count):
        _check(books, next(results), n * 7919 + 13)
    results.close()  # type: ignore[attr-defined]  # it is a generator
    books.did("calls of a map that was left", count)


def _call(pool: sky.ComputePool, books: Books, chance: random.Random) -> None:
    n = chance.randrange(10**6)
    _check(books, answer(n) >> pool, n * 7919 + 13)
    books.did("calls", 1)


def _calls(pool: sky.ComputePool, books: Books, chance: random.Random) -> None:
    for _ in range(chance.randrange(1, 50)):
        _call(pool, books, chance)


def _futures(pool: sky.ComputePool, books: Books, chance: random.Random) -> None:
    futures = {n: answer(n) > pool for n in range(chance.randrange(1, 200))}
    cancelled = [n for n in futures if chance.random() < 0.1 and futures[n].cancel()]
    for n in futures.keys() - set(cancelled):
        _check(books, futures[n].result(PATIENCE), n * 7919 + 13)
    if not all(futures[n].wait_stopped(PATIENCE) for n in cancelled):
        books.trouble("a call that was cancelled did not stop")
    books.did("futures", len(futures))


def _stream(pool: sky.ComputePool, books: Books, chance: random.Random) -> None:
    count = chance.choice((1, 100, 2000))
    for n, value in zip(range(count), items(5, count) >> pool, strict=True):
        _check(books, value, n + 5)
    books.did("items", count)


def _part_of_a_stream(pool: sky.ComputePool, books: Books, chance: random.Random) -> None:
    stream: Any = items(5, 100_000) >> pool
    with stream:
        for n in range(count := chance.randrange(1, 500)):
            _check(books, next(stream), n + 5)
    if not stream.wait_stopped(PATIENCE):
        books.trouble("a stream that was closed did not stop")
    books.did("items of a stream that was left", count)


def _large(pool: sky.ComputePool, books: Books, chance: random.Random) -> None:
    n = chance.randrange(1000)
    _check(books, large(n) >> pool, bytes([n % 251]) * 300_000)
    books.did("large values", 1)


def _awaited(pool: sky.ComputePool, books: Books, chance: random.Random) -> None:
    async def several() -> list[int]:
        return await asyncio.gather(*((answer(n) > pool) for n in range(50)))

    values = asyncio.get_event_loop().run_until_complete(several())
    _check(books, values, [n * 7919 + 13 for n in range(50)])
    books.did("awaited calls", 50)


def _check(books: Books, value: object, expected: object) -> None:
    if value != expected:
        books.trouble(f"{value!r:.80} instead of {expected!r:.80}")


# --- what happens meanwhile ----------------------------------------------------------------------------------


def cut(pools: Sequence[sky.ComputePool], books: Books, chance: random.Random, over: threading.Event) -> None:
    """Cut one connection after the other. One that is being made again counts only when it is there."""
    while not over.is_set():
        engine: Any = chance.choice(pools)._engine
        link = engine.connections.links.get(chance.choice(list(engine.connections.links)))
        stream = link._stream
        if stream is None:
            over.wait(0.01)
            continue
        how = chance.choice(("shut", "kill", "break"))
        if how == "shut":
            stream.shut()
        elif how == "kill":
            with contextlib.suppress(ProcessLookupError):
                os.kill(stream.process.pid, signal.SIGKILL)
        else:
            link._loop.call_soon_threadsafe(link._break, "cut by the test", stream)
        with books.lock:
            books.counts["cuts"] += 1
        over.wait(chance.expovariate(1 / 0.02))


def exhaust(books: Books, chance: random.Random, over: threading.Event) -> None:
    """Take all free descriptors from time to time, and whatever becomes free meanwhile."""
    while not over.wait(chance.uniform(*PAUSE)):
        hoard = Hoard()
        until = time.monotonic() + chance.uniform(*WITHOUT)
        try:
            while time.monotonic() < until:
                hoard.grow()  # also by what becomes free
                time.sleep(0.005)
        finally:
            hoard.drop()
        with books.lock:
            books.counts["times without descriptors"] += 1


def hear(books: Books, event: events.Event) -> None:
    """Note an event of a pool that must not be."""
    bad = (events.CallFailed, events.CallRetried, events.NodeInterruption, events.HealthChanged, events.GangFailed)
    if isinstance(event, bad) or (isinstance(event, events.NodePhase) and event.phase == "draining"):
        books.trouble(f"event: {event!r:.500}")
    if isinstance(event, events.LinkUp):
        with books.lock:
            books.counts["reconnections"] += 1


def run(seed: int, operations: int, cuts: int) -> Books:
    """Run it all; what it found is in `troubles`."""
    books, chance, over = Books(operations / cuts), random.Random(seed), threading.Event()
    logging.getLogger().addHandler(Complaints(books))
    threading.excepthook = lambda args: books.trouble(f"a thread failed: {args.exc_type.__name__}: {args.exc_value}")
    with tempfile.TemporaryDirectory(prefix="soak-") as place, contextlib.ExitStack() as stack:
        os.environ |= {"XDG_RUNTIME_DIR": place, "XDG_STATE_HOME": f"{place}/state", "XDG_CACHE_HOME": f"{place}/cache"}
        pools = [
            stack.enter_context(sky.ComputePool(nodes=2, slots=slots, liveness=LIVENESS, console="off", lease=60))
            for slots in (1, 2)
        ]
        unlisten = [pool.events.listen(lambda event: hear(books, event)) for pool in pools]
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        before = _descriptors() + 3 * THREADS  # for their event loops
        threads = stack.enter_context(ThreadPoolExecutor(THREADS + 2))
        seeds = [random.Random(chance.random()) for _ in range(THREADS + 2)]
        under = [threads.submit(work, pools[n % 2], books, seeds[n], over) for n in range(THREADS)]
        under.append(threads.submit(cut, pools, books, seeds[-2], over))
        under.append(threads.submit(exhaust, books, seeds[-1], over))
        done, moved = -1, time.monotonic()
        while (books.operations < operations or books.counts["cuts"] < cuts) and not all(f.done() for f in under):
            time.sleep(0.5)
            if books.operations != done:
                done, moved = books.operations, time.monotonic()
            elif time.monotonic() - moved > PATIENCE:
                books.trouble(f"no operation for {PATIENCE:g} s")
                over.set()
                os._exit(_told(books, seed))  # threads that hang cannot be joined
        over.set()
        wait(under)
        for each in under:
            if (error := each.exception()) is not None:
                books.trouble(f"the test failed: {type(error).__name__}: {error}")
        _look_for_leaks(before, pools, books)
        for stop in unlisten:
            stop()
    return books


def _descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def _look_for_leaks(before: int, pools: Sequence[sky.ComputePool], books: Books) -> None:
    def is_calm() -> bool:
        links = [link for pool in pools for link in pool._engine.connections.links.values()]  # type: ignore[union-attr]
        return all(link.is_up for link in links) and _descriptors() <= before

    until = time.monotonic() + 30
    while not is_calm() and time.monotonic() < until:
        time.sleep(0.2)
    if not is_calm():
        left = sorted(os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.exists())
        books.trouble(f"{before} descriptors have become {_descriptors()}: {Counter(left).most_common(5)}")


def _told(books: Books, seed: int) -> int:
    for what, count in sorted(books.counts.items()):
        print(f"{count:>9} {what}")
    print(f"seed {seed}: {books.operations} operations, {len(books.troubles)} troubles", flush=True)
    return 1 if books.troubles else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run it, print what happened and what it found; 1 if that is anything."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.links", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="what happens when; threads and processes add chance")
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--cuts", type=int, default=20_000)
    asked = parser.parse_args(argv)
    return _told(run(asked.seed, asked.operations, asked.cuts), asked.seed)


if __name__ == "__main__":
    sys.exit(main())
