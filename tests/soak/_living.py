"""Random lives of real pools on the fake cloud: what they are billed after the moment at which their end was promised.

`bills` runs them. In each world a pool of one or two machines idles, works, has streams that nobody reads, errors with
lone surrogates, watchers that raise, hang or have no room (listeners, history, logs, samples, metrics, observers,
forwards), and machines that die. It ends by its lifetime, its budget, its linger time, its user, an interrupt, garbage
collection or another process. Each machine must have ended then, and nothing more be rented.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import random
import shutil
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import skypool as sky
from skypool.logs.writer import LogWriter
from skypool.metrics.exporter import Exporter, Source
from skypool.metrics.metering import Metering
from skypool.observers.watch import Observers
from skypool.rental import reaper
from skypool.rental.ledger import Ledger
from skypool.report.history import History
from skypool.testing import FakeCloud, Stock
from tests.bill import Item, bill
from tests.endings import PATIENCE, when_left
from tests.facts import watch_of
from tests.work import add, endless, nap

LATE = 15.0
"""Seconds of rent after the promised end that are not counted, as this computer may be busy; far below `LEASE`."""
LEASE = 60.0
"""Seconds after which a machine that was forgotten ends itself."""
PRICE = 3600.0
"""USD an hour for a machine, which is 1 USD a second."""
WATCHERS = ("history", "logs", "samples", "metrics", "observers", "forwards")
"""What watches a pool, beside the listeners of its events."""
_WORD = os.fsdecode(b"caf\xe9")
_HANGS = 90.0
"""Seconds after which a pool that has not ended counts as one that never ends."""


@sky.compute
def fail(word: str) -> None:
    raise ValueError("cannot read " + word)


@sky.compute
def slow_items() -> Iterator[int]:
    yield 0
    time.sleep(600)
    yield 1


class _Quiet(Exporter):
    """An exporter that exports nothing."""

    def _begin(self, source: Source) -> Callable[[], None]:
        return lambda: None


@dataclass
class LivingWorld:
    """The life of one pool, made from a seed.

    Attributes:
        happened: what befell it, for the summary.
        faults: what is wrong.
        late: seconds of rent after the promised end.
    """

    seed: int
    folder: Path
    happened: Counter[str] = field(default_factory=Counter[str])
    faults: list[str] = field(default_factory=list)
    late: float = 0.0

    def run(self) -> None:
        """Let the pool live and end, and look at its bill."""
        self.dice = random.Random(self.seed)
        self.name = f"w{self.seed}"
        self.promised = float("inf")
        self.over = threading.Event()
        self.kept: list[Any] = []
        with FakeCloud(self.folder / "cloud", [Stock(usd_per_hour=PRICE)], patience=5.0) as self.cloud:
            thread = threading.Thread(target=self._live, daemon=True)
            thread.start()
            thread.join(_HANGS)
            if thread.is_alive():
                self.faults.append("it does not end")
            self._await_end()
            self.over.set()
            thread.join(_HANGS)
            self._look_at_bill()

    # --- its life --------------------------------------------------------------------------------------------

    def _live(self) -> None:
        try:
            self._live_and_end()
        except Exception as e:  # noqa: BLE001 - it is a fault of this world
            self.faults.append(f"{type(e).__name__}: {e}")

    def _live_and_end(self) -> None:
        dice = self.dice
        self.lifetime = dice.choice([None, None, dice.uniform(2.0, 5.0)])
        self.budget = dice.choice([None, None, dice.uniform(3.0, 8.0)])
        self.linger = dice.choice([None, None, dice.uniform(1.0, 2.5)])
        self.nodes = dice.choice([1, 1, 2])
        pool: sky.ComputePool | None = sky.ComputePool(
            self.cloud,
            name=self.name,
            nodes=self.nodes,
            slots=4,
            lease=LEASE,
            liveness=4.0,
            console="off",
            max_lifetime=self.lifetime,
            budget=self.budget,
            linger=self.linger,
            metrics=_Quiet(),
        )
        assert pool is not None
        if dice.random() < 0.3:
            pool.events.listen(dice.choice([self._raise, self._hang]))
        try:
            pool.start()
        except sky.SkypoolError:
            self.happened["ended at its start"] += 1
            return
        for watcher in dice.sample(WATCHERS, dice.choice([0, 0, 1, 3, len(WATCHERS)])):
            self._break(pool, watcher)
        self.is_at_work = False
        for _ in range(dice.randint(0, 3)):
            with suppress(sky.SkypoolError):
                self._do_something(pool)
        ends = ["stop", "left", "raised", "collected", "down"]
        if (self.lifetime, self.budget) != (None, None) or (self.linger is not None and not self.is_at_work):
            ends += ["planned"] * 5
        if self.is_at_work and (self.lifetime, self.budget) == (None, None):
            ends.append("interrupted")
        end = dice.choice(ends)
        self.happened[f"end: {end}"] += 1
        if end == "collected":
            self.kept = [each for each in self.kept if not hasattr(each, "close")]  # who holds a stream may read it
            if self.is_at_work:
                end = "stop"
        if end != "planned":
            stays = self.linger if end in ("left", "raised") else None
            self.promised = time.time() + (stays or 0.0)
        self._end(pool, end)
        del pool
        gc.collect()

    def _do_something(self, pool: sky.ComputePool) -> None:
        what = self.dice.choice(
            ["idle", "call", "long call", "unread", "broken off", "working stream", "error", "name", "program", "death"]
        )
        self.happened[what] += 1
        match what:
            case "idle":
                time.sleep(self.dice.uniform(0.0, 1.0))
            case "call":
                assert pool.send(add.with_options(retries=2)(1)).result(30) == 2
            case "long call":
                self.is_at_work = True
                self.kept.append(pool.send(nap.with_options(retries=2)(600)))
            case "unread":
                self.kept.append(endless() >> pool)
            case "broken off":
                stream = endless() >> pool
                for _ in stream:
                    break
                self.kept.append(stream)
            case "working stream":
                self.is_at_work = True
                self.kept.append(slow_items() >> pool)
            case "error":
                with suppress(ValueError):
                    fail(_WORD) >> pool
            case "name":
                self.kept.append(pool.submit(_named(abs), -1))
            case "program":
                self.kept.append(sky.cmd("sh", "-c", "exit 3", _WORD) > pool)
            case "death":
                there = self.cloud.instances(pool=self.name)
                if there:
                    self.cloud.control.kill(self.dice.choice(there))

    def _raise(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(_WORD)

    def _fill(self, *_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _hang(self, *_: Any, **__: Any) -> None:
        self.over.wait()

    def _break(self, pool: sky.ComputePool, watcher: str) -> None:
        """Let a part that watches a pool raise, hang, or find no room on the disk."""
        begun = pool._begun
        assert begun is not None
        trouble = self.dice.choice(["raises", "hangs", "full"])
        broken = {"raises": self._raise, "hangs": self._hang, "full": self._fill}[trouble]
        self.happened[f"watcher {trouble}"] += 1
        where, name = {
            "history": (watch_of(pool, History).journal, "write"),
            "logs": (watch_of(pool, LogWriter), "_put"),
            "samples": (begun.health.samples, "take"),
            "metrics": (watch_of(pool, Metering), "close"),
            "observers": (watch_of(pool, Observers), "close"),
            "forwards": (begun.forwards, "close"),
        }[watcher]
        setattr(where, name, broken)

    def _end(self, pool: sky.ComputePool, end: str) -> None:
        try:
            match end:
                case "stop":
                    pool.stop()
                case "left" if not self.is_at_work:
                    with pool:
                        pass
                case "left" | "raised":
                    with pool:
                        raise ZeroDivisionError(_WORD)
                case "interrupted":
                    with suppress(KeyboardInterrupt), pool:
                        interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc
                        args = ctypes.c_ulong(threading.get_ident()), ctypes.py_object(KeyboardInterrupt)
                        threading.Thread(target=when_left, args=(pool, partial(interrupt, *args))).start()
                case "down":
                    ledger = Ledger.here()
                    ledger.ending(self.name)
                    reaper.terminate_all([self.cloud], self.name, ledger)
                    self._await(pool)
                case "planned":
                    self._await(pool)
        except (sky.SkypoolError, ZeroDivisionError):
            self.happened["end raised"] += 1

    def _await(self, pool: sky.ComputePool) -> None:
        until = time.monotonic() + _HANGS
        while pool.phase not in ("ended", "planned") and time.monotonic() < until:
            time.sleep(0.05)
        with suppress(sky.SkypoolError):
            pool.stop()

    # --- its bill --------------------------------------------------------------------------------------------

    def _await_end(self) -> None:
        until = time.monotonic() + _HANGS
        while self.cloud.count() and time.monotonic() < until:
            time.sleep(0.05)
        left = self.cloud.control.alive()
        self.faults += [f"still there: {each}" for each in left]

    def _look_at_bill(self) -> None:
        items = [*bill(self.folder / "cloud" / "events", time.time()).values()]
        self.happened["machines"] += len(items)
        if not items:
            return
        promised = min(self.promised, *self._promises(items))
        for each in items:
            if each.made > promised + LATE:
                self.faults.append(f"{each.machine} was rented {each.made - promised:.1f} s after the promised end")
            if each.ended is not None:
                self.late = max(self.late, each.ended - promised)
        if self.late > LATE:
            self.faults.append(f"rent for {self.late:.1f} s after the promised end")

    def _promises(self, items: list[Item]) -> Iterator[float]:
        """Yield the moments at which the pool was to end by itself."""
        began = min(each.made for each in items)
        if self.lifetime is not None:
            yield began + self.lifetime
        if self.budget is not None:
            yield _spent_at(items, self.budget)
        yield float("inf")


def _spent_at(items: list[Item], budget: float) -> float:
    """Return when machines at 1 USD a second had cost so much."""
    spent, at, running = 0.0, 0.0, 0
    changes = sorted([(each.made, 1) for each in items] + [(each.ended or time.time(), -1) for each in items])
    for when, change in changes:
        if running and spent + running * (when - at) >= budget:
            return at + (budget - spent) / running
        spent += running * (when - at)
        at, running = when, running + change
    return float("inf")


def _named(function: Any) -> Any:
    """A function whose name has a lone surrogate."""

    def named(*arguments: Any) -> Any:
        return function(*arguments)

    named.__name__ = named.__qualname__ = f"read_{_WORD}"
    return named


def run(worlds: int, seed: int, at_once: int = 6) -> tuple[Counter[str], dict[int, list[str]], list[float]]:
    """Run so many worlds, some at once. Return what happened, the faults by seed, and the lateness of each world."""
    with ExitStack() as stack:
        place = tempfile.mkdtemp(prefix="sl-")
        stack.callback(shutil.rmtree, place, ignore_errors=True)
        homes = {"XDG_STATE_HOME": f"{place}/state", "XDG_CACHE_HOME": f"{place}/cache", "XDG_RUNTIME_DIR": place}
        stack.enter_context(mock.patch.dict(os.environ, homes))
        stack.enter_context(mock.patch.object(sky.Budget, "check_start"))  # a budget pays for 20 minutes otherwise
        stack.enter_context(mock.patch.object(reaper, "SETTLING", 0.5))
        for module, name in PATIENCE:
            stack.enter_context(mock.patch.object(module, name, 1.0))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", ResourceWarning)

        def one(n: int) -> LivingWorld:
            world = LivingWorld(seed * 1_000_000 + n, Path(place) / str(n))
            world.folder.mkdir()
            world.run()
            shutil.rmtree(world.folder, ignore_errors=True)
            return world

        with ThreadPoolExecutor(at_once) as threads:
            lived = list(threads.map(one, range(worlds)))
    happened = sum((each.happened for each in lived), Counter[str]())
    return happened, {each.seed: each.faults for each in lived if each.faults}, [each.late for each in lived]
