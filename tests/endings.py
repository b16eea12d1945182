"""Every way in which the cost of a pool ends (the table of docs/money.md), and what can be wrong with what watches it.

`END` has the ends: each makes a pool of a fake cloud, has a call run where one can, and brings the end about. A
`Saboteur` makes what watches a pool raise, hang, or have no room on the disk. The machines must end all the same.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import errno
import gc
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import skypool as sky
from skypool.console import nonblocking_writer
from skypool.errors import BudgetExceeded, LifetimeExceeded, PoolClosed, SkypoolError
from skypool.logs.writer import LogWriter
from skypool.metrics.exporter import Exporter, Source
from skypool.observers.server import ObserverServer
from skypool.pool import call_ends, engine, terminations
from skypool.pool.new_samples import NewSamples
from skypool.pool.open_forwards import Forwards
from skypool.rental.ledger import Ledger
from skypool.rental.reaper import terminate_all
from skypool.report import report
from skypool.samples.journal import Journal
from skypool.testing import FakeCloud
from tests.conftest import eventually
from tests.work import add, endless, nap, stay

WATCHERS = ("history", "logs", "samples", "metrics", "report", "console", "listener", "observers", "forwards")
TROUBLES = ("raises", "hangs", "full")
BOUND = 20.0
"""Seconds within which machines must have ended. A pool that waits for what hangs takes for ever."""
PATIENCE = ((engine, "_TO_CLOSE"), (terminations, "_TO_RECORD"), (call_ends, "_TO_END_CALLS"))
"""The times for which the end of a pool waits for what hangs."""


# --- what is wrong -------------------------------------------------------------------------------------------


@dataclass
class Saboteur:
    """Breaks what watches a pool, until it is left. What hangs goes on then.

    Attributes:
        watchers: what is broken, of `WATCHERS`.
        trouble: how it is broken, of `TROUBLES`; "" for not at all.
    """

    watchers: tuple[str, ...] = ()
    trouble: str = ""
    _over: threading.Event = field(default_factory=threading.Event)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Saboteur:
        patch = self._stack.enter_context
        self._stack.callback(self._over.set)
        for module, name in PATIENCE:
            patch(mock.patch.object(module, name, 1.0))
        patch(mock.patch.object(nonblocking_writer, "_LAST", 1.0))
        broken: dict[str, tuple[Any, str]] = {
            "history": (Journal, "write"),
            "logs": (LogWriter, "_put"),
            "samples": (NewSamples, "take"),
            "report": (report, "report_of"),
            "observers": (ObserverServer, "close"),
            "forwards": (Forwards, "close"),
        }
        for watcher, (place, name) in broken.items():
            if watcher in self.watchers:
                patch(mock.patch.object(place, name, self.break_down))
        if "console" in self.watchers:
            patch(mock.patch.object(sys, "stderr", _Broken(self)))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def break_down(self, *_: object, **__: object) -> NoReturn:
        """Do not work, in the way that was asked for."""
        if self.trouble == "hangs":
            self._over.wait()
        elif self.trouble == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise RuntimeError("it is broken")

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of a pool that has the broken parts."""
        metrics = [_BrokenExporter(self)] if "metrics" in self.watchers else None
        return {"console": "plain" if "console" in self.watchers else "off", "metrics": metrics}

    def watch(self, pool: sky.ComputePool) -> None:
        """Let broken parts watch a pool that was made, and not started yet."""
        if "listener" in self.watchers:
            pool.events.listen(self.break_down)

    def look(self, pool: sky.ComputePool) -> None:
        """Begin what looks at a pool that runs."""
        if "report" in self.watchers:
            threading.Thread(target=self._report, args=(pool.report,), daemon=True).start()

    @staticmethod
    def _report(report: Callable[[], object]) -> None:
        with suppress(Exception):
            report()


class _Broken(io.TextIOBase):
    """A stderr that does not work."""

    def __init__(self, saboteur: Saboteur) -> None:
        self._saboteur = saboteur

    def write(self, text: str) -> int:
        self._saboteur.break_down()


class _BrokenExporter(Exporter):
    """An exporter whose end does not work."""

    def __init__(self, saboteur: Saboteur) -> None:
        self._saboteur = saboteur

    def _begin(self, source: Source) -> Callable[[], None]:
        return self._saboteur.break_down


# --- the ends ------------------------------------------------------------------------------------------------


@dataclass
class Rows:
    """The ends of pools of a cloud. Each is a method that returns when the end was brought about.

    Attributes:
        cloud: the cloud; a machine costs 36,000 USD an hour, which is 10 a second.
        saboteur: breaks what watches.
        error: what the call raised that ran at the end; None if none ran.
    """

    cloud: FakeCloud
    saboteur: Saboteur
    error: BaseException | None = None

    def pool(self, **options: Any) -> sky.ComputePool:
        made = sky.ComputePool(self.cloud, name="p", slots=1, **{**self.saboteur.options, **options})
        self.saboteur.watch(made)
        return made

    def started(self, **options: Any) -> tuple[sky.ComputePool, Any]:
        """A pool that runs, and a call that runs there for ever."""
        pool = self.pool(**options).start()
        assert add(1) >> pool == 2
        self.saboteur.look(pool)
        return pool, pool.send(nap(600))

    def note(self, call: Any) -> None:
        """Wait for the call, and note what it raises."""
        try:
            call.result(BOUND)
        except BaseException as e:  # noqa: BLE001 - whatever it is
            self.error = e

    # --- rows of the table

    def block_left(self) -> None:
        with self.pool() as pool:
            self.saboteur.look(pool)
            call = add(1) > pool
        assert call.result(0) == 2

    def exception(self) -> None:
        with suppress(ZeroDivisionError), self.pool() as pool:
            self.saboteur.look(pool)
            call = pool.send(nap(600))
            raise ZeroDivisionError
        self.note(call)

    def interrupted(self) -> None:
        """Ctrl-C while the end of the block waits for its calls. The program goes on."""
        with suppress(KeyboardInterrupt), self.pool() as pool:
            self.saboteur.look(pool)
            call = pool.send(nap(600))
            interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc
            args = ctypes.c_ulong(threading.get_ident()), ctypes.py_object(KeyboardInterrupt)
            threading.Thread(target=when_left, args=(pool, partial(interrupt, *args))).start()
        self.note(call)

    def cancelled(self) -> None:
        """The task is cancelled while the end of its block waits for its calls. The program goes on."""

        async def main(calls: list[Any]) -> None:
            async with self.pool() as pool:
                self.saboteur.look(pool)
                calls.append(pool.send(nap(600)))
                task = asyncio.current_task()
                assert task is not None
                cancel = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
                threading.Thread(target=when_left, args=(pool, cancel)).start()

        calls: list[Any] = []
        with suppress(asyncio.CancelledError):
            asyncio.run(main(calls))
        self.note(calls[0])

    def stop(self) -> None:
        pool, call = self.started()
        pool.stop()
        self.note(call)

    def budget(self) -> None:
        with mock.patch.object(sky.Budget, "check_start"):  # a budget pays for 20 minutes otherwise
            pool, call = self.started(budget=60.0)
        self.note(call)
        with suppress(SkypoolError):
            pool.stop()

    def max_lifetime(self) -> None:
        pool, call = self.started(max_lifetime=6.0)
        self.note(call)
        with suppress(SkypoolError):
            pool.stop()

    def linger(self) -> None:
        pool = self.pool(linger=1.0).start()
        self.saboteur.look(pool)
        eventually(lambda: pool.phase != "ready", BOUND, "the end of the pool")
        self.note(_Sent(pool))
        with suppress(SkypoolError):
            pool.stop()

    def linger_after_block(self) -> None:
        with self.pool(linger=2.0) as pool:
            self.saboteur.look(pool)

    def unread_stream(self) -> None:
        with self.pool() as pool:
            self.saboteur.look(pool)
            stream = endless() >> pool
            for _ in stream:
                break
        self.note(_Read(stream))

    def collected(self) -> None:
        pool = self.pool().start()
        del pool
        eventually(self._is_collected, BOUND, "the end of what holds the pool")

    def _is_collected(self) -> bool:
        gc.collect()
        return Ledger.here().pools("p")[0].ended is not None

    def down(self) -> None:
        pool, call = self.started()
        ledger = Ledger.here()
        ledger.ending("p")
        terminate_all([self.cloud], "p", ledger)
        self.note(call)
        with suppress(SkypoolError):
            pool.stop()

    def failed_start(self) -> None:
        self.cloud.control.next_machines(9, deaf=True)
        try:
            self.pool().start()
        except SkypoolError as e:
            self.error = e


def when_left(pool: sky.ComputePool, interrupt: Callable[[], object]) -> None:
    """Interrupt the end of a block while it waits for the calls."""
    eventually(lambda: not pool._entries, BOUND, "the end of the block")
    time.sleep(0.2)  # not for luck: an interrupt that comes earlier is that of the block
    interrupt()


@dataclass
class _Sent:
    """A call that is sent when its result is asked for."""

    pool: sky.ComputePool

    def result(self, _: float) -> object:
        return self.pool.send(add(1)).result(BOUND)


@dataclass
class _Read:
    """A stream that is read when its result is asked for."""

    stream: Iterator[object]

    def result(self, _: float) -> object:
        return list(self.stream)


END: dict[str, tuple[type[BaseException] | None, str]] = {
    "block_left": (None, ""),
    "exception": (PoolClosed, "pool 'p' was stopped before the call ended"),
    "interrupted": (PoolClosed, "pool 'p' was stopped before the call ended"),
    "cancelled": (PoolClosed, "pool 'p' was stopped before the call ended"),
    "stop": (PoolClosed, "pool 'p' was stopped before the call ended"),
    "budget": (BudgetExceeded, "has spent"),
    "max_lifetime": (LifetimeExceeded, "max_lifetime of 6 s is over"),
    "linger": (PoolClosed, "has had no work"),
    "linger_after_block": (None, ""),
    "unread_stream": (PoolClosed, "was left before this stream was read to its end"),
    "collected": (None, ""),
    "down": (PoolClosed, "was ended by another process"),
    "failed_start": (SkypoolError, ""),
}
"""For each end: what the call raises that ran then, or the next one, and words of its message."""


def run(row: str, watchers: tuple[str, ...], trouble: str, cloud: FakeCloud) -> float:
    """Bring one end about, and check it. Return the seconds until the machines had ended."""
    kind, words = END[row]
    with Saboteur(watchers, trouble) as saboteur:
        rows = Rows(cloud, saboteur)
        began = time.monotonic()
        failure: list[BaseException] = []

        def act() -> None:
            try:
                getattr(rows, row)()
            except BaseException as e:  # noqa: BLE001 - it is raised below
                failure.append(e)

        end = threading.Thread(target=act, daemon=True)
        end.start()
        eventually(lambda: not end.is_alive() or failure, 3 * BOUND, f"the end by {row}")
        if failure:
            raise failure[0]
        eventually(lambda: cloud.count() == 0, BOUND, "the end of machines, keys and groups")
        took = time.monotonic() - began
    assert rows.error is None if kind is None else isinstance(rows.error, kind), repr(rows.error)
    assert words in str(rows.error or "")
    eventually(lambda: Ledger.here().pools("p")[-1].ended is not None, BOUND, "the record of the end")
    items = _bill(cloud)
    assert all(each.ended is not None for each in items)
    return took


# --- ends of the process -------------------------------------------------------------------------------------

SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGKILL", "SIGSTOP", "")
"""How a process ends that has a pool: by a signal, or "" at the end of its program. SIGSTOP pauses it for a while."""
LEASE = 4.0
"""Seconds after which machines end themselves when their client was killed."""


def client(state: str, watchers: str, trouble: str, stays: str) -> None:
    """Have a pool with broken watchers and a call that runs, say so, and wait to be ended. The pool is not stopped."""
    with Saboteur(tuple(filter(None, watchers.split(","))), trouble) as saboteur:
        rows = Rows(FakeCloud(state), saboteur)
        kept = rows.started(lease=LEASE)
        print("ready", flush=True)
        if stays:
            stay()
        atexit.register(lambda: kept)  # the pool is there until the interpreter exits
        saboteur._stack.pop_all()  # what is broken stays so


def run_process(number: str, watchers: tuple[str, ...], trouble: str, cloud: FakeCloud) -> None:
    """End a process in one of the ways of `SIGNALS`, and check that its machines end, and that it does."""
    argv = [sys.executable, "-c", "import sys; from tests.endings import client; client(*sys.argv[1:])"]
    argv += [str(cloud.state), ",".join(watchers), trouble, number]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            if number:
                process.send_signal(signal.Signals[number])
            left = "machine" if number in ("SIGKILL", "SIGSTOP") else ""  # `skypool gc` removes keys and groups
            eventually(lambda: cloud.count(left) == 0, BOUND + LEASE, "the end of machines, keys and groups")
            if number == "SIGSTOP":
                process.send_signal(signal.SIGCONT)
                eventually(lambda: cloud.count() == 0, BOUND, "the end of keys and groups, when it goes on")
            else:
                process.wait(BOUND)
        finally:
            process.kill()


def _bill(cloud: FakeCloud) -> list[Any]:
    from tests.bill import bill

    return [*bill(Path(str(cloud.state)) / "events", time.time()).values()]
