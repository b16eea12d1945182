"""Storage of a fake cloud between processes: a log of its changes in a folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from skypool import processes
from skypool.testing.world import Machine, World

_SIZE = struct.Struct("<Q")
"""In front of each record of the log: how many bytes it has."""
_COMPACT = 256 << 10
"""A log is written anew, without what has been overwritten, when it has so many bytes and is mostly that."""
_SUSPECT = 0.3
"""Seconds to wait for the lock before its holder is looked at, which may have been stopped (as by SIGSTOP)."""


class Overtaken(RuntimeError):
    """This process was stopped while it changed the cloud; others went on, and its change counts no more."""


class State:
    """A world in a folder, for one process at a time.

    The world is a log: its first record has all machines, each later one the machines that changed. What one call
    costs depends on what has changed since the last one, not on how many machines there are. A log and its lock have
    the number of a generation. A holder of the lock that is stopped is overtaken: others copy the log to the next
    generation and go on there, and the holder finds out before it relies on what it wrote.

    Args:
        folder: of the cloud.
        make: Returns the world as it begins. None where there must be one already.
    """

    def __init__(self, folder: str | Path, make: Callable[[], World] | None = None) -> None:
        self.folder = Path(folder)
        self._make = make
        self._generation = -1
        self._first = 0
        self._end = 0
        self._world: World | None = None
        self._held: TextIO | None = None
        self._base = b""
        self._marks: dict[str, tuple[Any, ...]] = {}

    @contextlib.contextmanager
    def open(self, settle: bool = True) -> Iterator[World]:
        """Give the world to this process alone; what is changed is kept, also if what runs here raises.

        Args:
            settle: let happen first what was to happen until now, which looks at every machine.

        Raises:
            FileNotFoundError: there is no such cloud, and none is to be made.
            Overtaken: see there.
        """
        if self._make is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
        with self._locked() as generation:
            world = self._read(generation)
            try:
                if settle:
                    world.settle()
                yield world
            finally:
                self.keep(world)

    def keep(self, world: World) -> None:
        """Write down what has changed, for whoever has it open.

        Raises:
            Overtaken: see there.
        """
        base = pickle.dumps(replace(world, machines={}), protocol=5)
        changed = [each for each in world.machines.values() if self._marks.get(each.id) != _mark(each)]
        if changed or base != self._base:
            record = pickle.dumps((base, changed), protocol=5)
            try:
                with open(self._log(self._generation), "r+b" if self._end else "wb") as log:
                    log.truncate(self._end)  # a record that is not whole is of a process that was killed
                    log.seek(self._end)
                    log.write(_SIZE.pack(len(record)) + record)
            except FileNotFoundError:
                if not self.folder.exists():
                    raise
                raise self._overtaken() from None
            self._end += _SIZE.size + len(record)
            self._note(base, changed)
        if self._held is None or not self._counts(self._held, self._generation):
            raise self._overtaken()
        if self._end > max(_COMPACT, 8 * self._first):
            self._supersede(self._generation, world)

    def _overtaken(self) -> Overtaken:
        self._generation = -1  # to be read again
        return Overtaken(f"process {os.getpid()} was stopped while it changed the fake cloud in {self.folder}")

    # --- the log ---------------------------------------------------------------------------------------------

    def _log(self, generation: int) -> Path:
        return self.folder / f"world.{generation}"

    def _newest(self) -> int:
        """The generation that counts, 0 before the first."""
        logs = [each for each in os.listdir(self.folder) if each.startswith("world.")]
        return max((int(number) for each in logs if (number := each[6:]).isdigit()), default=0)

    def _read(self, generation: int) -> World:
        if generation != self._generation:
            self._world = None
            self._first = 0
            self._end = 0
            self._base = b""
            self._marks = {}
        self._generation = generation
        try:
            with open(self._log(generation), "rb") as log:
                log.seek(self._end)
                machines = {} if self._world is None else self._world.machines
                base = b""
                for base, changed in self._records(log):
                    machines.update((each.id, each) for each in changed)
                    self._note(base, changed)
                if base:
                    self._world = pickle.loads(base)
                    assert self._world is not None
                    self._world.machines = machines
        except FileNotFoundError:
            if self._make is None:
                raise
        if self._world is None:
            if self._make is None:
                raise FileNotFoundError(self._log(generation))
            self._world = self._make()
        return self._world

    def _records(self, log: BinaryIO) -> Iterator[tuple[bytes, list[Machine]]]:
        """The whole records from here on."""
        while len(size := log.read(_SIZE.size)) == _SIZE.size:
            length = _SIZE.unpack(size)[0]
            record = log.read(length)
            if len(record) < length:
                return
            self._end += _SIZE.size + length
            self._first = self._first or self._end
            yield pickle.loads(record)

    def _note(self, base: bytes, changed: list[Machine]) -> None:
        self._base = base
        self._marks.update((each.id, _mark(each)) for each in changed)

    def _supersede(self, generation: int, world: World) -> None:
        """Begin the generation after this one with a world, unless another process has done so."""
        record = pickle.dumps((pickle.dumps(replace(world, machines={})), list(world.machines.values())), protocol=5)
        new = self.folder / f"new.{os.getpid()}.{time.monotonic_ns()}"
        new.write_bytes(_SIZE.pack(len(record)) + record)
        with contextlib.suppress(FileExistsError):
            os.link(new, self._log(generation + 1))
            self._log(generation).unlink(missing_ok=True)
            self._lock(generation).unlink(missing_ok=True)
        new.unlink()

    # --- the lock --------------------------------------------------------------------------------------------

    def _lock(self, generation: int) -> Path:
        return self.folder / f"lock.{generation}"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the lock of the generation that counts."""
        while True:
            generation = self._newest()
            with open(os.open(self._lock(generation), os.O_RDWR | os.O_CREAT, 0o666), "r+") as lock:
                if not self._taken(lock, generation):
                    continue
                _sign(lock)
                self._held = lock
                try:
                    yield generation
                finally:
                    self._held = None
                return

    def _taken(self, lock: TextIO, generation: int) -> bool:
        """Wait for a lock; False if it is no longer the one that counts."""
        pause = 0.001
        suspect_at = time.monotonic() + _SUSPECT
        while self._counts(lock, generation):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return self._counts(lock, generation)
            except BlockingIOError:
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
            if time.monotonic() > suspect_at:
                suspect_at = time.monotonic() + _SUSPECT
                lock.seek(0)
                holder = lock.read().strip()
                if holder.isdigit() and processes.is_stopped(int(holder)):
                    self._overtake(generation)
        return False

    def _counts(self, lock: TextIO, generation: int) -> bool:
        """Whether this is still the lock of the world, and not one that was taken from a stopped holder."""
        try:
            there = os.stat(self._lock(generation))
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(lock.fileno())) and self._newest() == generation

    def _overtake(self, generation: int) -> None:
        """Begin the next generation without the holder of the lock.

        A lock of ours takes the place of the holder's first. The holder looks for its lock after it has written: what
        it relies on was written before, and is read here.
        """
        new = self.folder / f"new.{os.getpid()}.{time.monotonic_ns()}"
        with open(new, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _sign(lock)
            os.replace(new, self._lock(generation))
            other = State(self.folder, self._make)
            with contextlib.suppress(FileNotFoundError):  # somebody else was quicker
                self._supersede(generation, other._read(generation))


def _sign(lock: TextIO) -> None:
    """Say in a lock who holds it."""
    os.pwrite(lock.fileno(), f"{os.getpid():<20}".encode(), 0)


def _mark(one: Machine) -> tuple[Any, ...]:
    """All of a machine that can change."""
    return (
        one.state,
        one.said,
        one.granted,
        one.taken_at,
        one.undying,
        one.ended_at,
        one.tagged,
        one.until,
        one.stock,
        one.ran_at,
        tuple(one.tags.items()),
    )
