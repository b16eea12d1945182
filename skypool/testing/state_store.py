"""Stores the state of a fake cloud in a folder that several processes share, as a log of changes.

`State` opens the stored `World` under a lock, and stores its changes. If a process is stopped (as by SIGSTOP) while it
holds the lock, other processes take the lock away and go on. The stopped process later gets the error `Overtaken`.
"""

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
from skypool.safety import private
from skypool.testing.cloud_state import Machine, World

_SIZE = struct.Struct("<Q")
"""The header of each record of the log: the length of the record in bytes, without the header."""
_COMPACT = 256 << 10
"""Size in bytes from which a log may be compacted (rewritten as one record).

A log is compacted when it is larger than this size, and larger than 8 times its first record.
"""
_SUSPECT = 0.3
"""Seconds to wait for the lock before testing whether its holder has been stopped, as by SIGSTOP."""


class Overtaken(RuntimeError):
    """Raised in a process that was stopped (as by SIGSTOP), and so lost the lock and its change. It may try again."""


class State:
    """The stored `World` of a fake cloud in a folder. One process at a time can open it.

    The log's first record has all machines, and each later record has only the machines that changed. So a change
    writes little, however many machines there are.

    The names of a log and its lock file end with the same number, the generation. If the holder of the lock is stopped
    (as by SIGSTOP), another process copies the log to the next generation and continues there. The stopped process
    checks its lock file and the generation after each write, and so notices that its write is lost.

    Args:
        folder: the folder of the cloud.
        make: function that returns the initial world, for a folder without a cloud. None: the folder must hold a cloud.
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
        """Return a context manager that yields the fake cloud's `World`, locked for this process.

        Entering the block waits until no other process has the state open. A stopped process loses its lock after about
        0.3 seconds. Changes are stored when the block ends, also if the block raises.

        Args:
            settle: True to apply first everything that is due by the cloud's clock, such as ends of leases. This looks
                at each live machine.

        Raises:
            FileNotFoundError: the folder holds no cloud, and `make` is None.
            NotPrivate: another user can change the folder.
            Overtaken: this process was stopped meanwhile, and another process took the lock away. The changes are lost.
        """
        if self._make is not None:
            private.folder(self.folder, "name another folder")
        else:
            private.check(self.folder)  # what is in it is unpickled
        with self._locked() as generation:
            world = self._read(generation)
            try:
                if settle:
                    world.settle()
                yield world
            finally:
                self.keep(world)

    def keep(self, world: World) -> None:
        """Store the changes of the state that `open` yielded. `open` calls this method when the block ends.

        The block may call it to store changes early. Nothing is written if nothing has changed.

        Raises:
            Overtaken: this process was stopped meanwhile, and another process took the lock away. The changes are lost.
            FileNotFoundError: the cloud's folder was removed.
        """
        base = pickle.dumps(replace(world, machines={}), protocol=5)
        changed = [each for each in world.machines.values() if self._marks.get(each.id) != _mark(each)]
        if changed or base != self._base:
            record = pickle.dumps((base, changed), protocol=5)
            try:
                with open(self._log(self._generation), "r+b" if self._end else "wb") as log:
                    log.truncate(self._end)  # remove the incomplete record of a process that was killed
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
        """Return (not raise) the error for a lost change, and make the next `open` read the whole log again."""
        self._generation = -1  # so that the log is read again
        return Overtaken(
            f"process {os.getpid()} was stopped while it changed the fake cloud in {self.folder}, so another process "
            "took its lock away, and the change is lost; repeat the change"
        )

    # --- the log ---------------------------------------------------------------------------------------------

    def _log(self, generation: int) -> Path:
        """Return the path of the log file of a generation. It may not exist."""
        return self.folder / f"world.{generation}"

    def _newest(self) -> int:
        """Return the current generation: the highest number of a log file, or 0 if there is no log yet."""
        logs = [each for each in os.listdir(self.folder) if each.startswith("world.")]
        return max((int(number) for each in logs if (number := each[6:]).isdigit()), default=0)

    def _read(self, generation: int) -> World:
        """Return the world in the log of a generation. Read only new records. Without a log, `make` makes the world."""
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
                raise FileNotFoundError(f"the file {self._log(generation)} of a fake cloud holds no complete record")
            self._world = self._make()
        return self._world

    def _records(self, log: BinaryIO) -> Iterator[tuple[bytes, list[Machine]]]:
        """Yield each complete record: (pickled `World` without machines, changed machines). Set `_end` to its end."""
        while len(size := log.read(_SIZE.size)) == _SIZE.size:
            length = _SIZE.unpack(size)[0]
            record = log.read(length)
            if len(record) < length:
                return
            self._end += _SIZE.size + length
            self._first = self._first or self._end
            yield pickle.loads(record)

    def _note(self, base: bytes, changed: list[Machine]) -> None:
        """Remember what the log has, so that `keep` finds changes. `base` is the pickled world without machines."""
        self._base = base
        self._marks.update((each.id, _mark(each)) for each in changed)

    def _supersede(self, generation: int, world: World) -> None:
        """Write the world to a log of the next generation, and delete the old log. Do nothing if that log exists."""
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
        """Return the path of the lock file of a generation. It may not exist."""
        return self.folder / f"lock.{generation}"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Return a context manager that waits for the cloud's current lock, holds it and yields its generation."""
        while True:
            generation = self._newest()
            with open(os.open(self._lock(generation), os.O_RDWR | os.O_CREAT, 0o600), "r+") as lock:
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
        """Wait for the lock, and return True. Return False if it was replaced. Overtake a holder that is stopped."""
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
        """Return True if an open lock file is still the cloud's current one, and no newer generation exists."""
        try:
            there = os.stat(self._lock(generation))
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(lock.fileno())) and self._newest() == generation

    def _overtake(self, generation: int) -> None:
        """Take the lock away from a process that is stopped, and copy the log to the next generation."""
        new = self.folder / f"new.{os.getpid()}.{time.monotonic_ns()}"
        with open(new, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _sign(lock)
            # First of all: a process whose lock file was replaced treats its write as lost. So every other write was
            # finished before, and is copied.
            os.replace(new, self._lock(generation))
            other = State(self.folder, self._make)
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                self._supersede(generation, other._read(generation))


def _sign(lock: TextIO) -> None:
    """Write the id of this process into a lock file, so that other processes can see if this process is stopped."""
    os.pwrite(lock.fileno(), f"{os.getpid():<20}".encode(), 0)


def _mark(one: Machine) -> tuple[Any, ...]:
    """Return the values of a machine's fields that can change. Two marks differ if the machine changed."""
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
