"""Random damage to the files of the state folder: every command works afterwards, and no healthy ledger is set aside.

    python -m tests.soak.ledgers --runs 1000 --seed 1

Each run takes a copy of a state folder and of a cloud with one lost machine, and damages one file. It then starts a
pool and runs `ps`, `cost`, `doctor` and `gc --yes` in any order, each of which must succeed. The lost machine must be
gone at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import skypool as sky
from skypool.cli import main as program
from skypool.drivers import blocklist, registry
from skypool.model import Instance, Need, Offer, Order
from skypool.rental.budget import Budget
from skypool.rental.ledger import Ledger
from skypool.testing import FakeCloud, Stock

REAL = 25
"""One run in so many uses real processes of the command line; the others call it in this process, which is faster."""
STARTS = 10
"""One run in so many starts a pool of this machine; the others write what a start writes."""
_COMMANDS = (("ps",), ("cost",), ("doctor", "--provider", "fake"), ("gc", "--provider", "fake", "--yes"))
_TABLES = ("pools", "orders", "instances")
_OFFER = Offer("fake", "gpu", "north", "north-a", "on-demand", 3.6, least_billed=60.0)


@dataclass
class Outcome:
    """What became of all runs."""

    runs: int = 0
    set_aside: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def main(argv: list[str] | None = None) -> int:
    """Do the runs; 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="tests.soak.ledgers", description="Damage ledgers at random.")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first run, to see one again")
    asked = parser.parse_args(argv)
    began = time.monotonic()
    done = soak(asked.runs, asked.seed, first=asked.first)
    for each in done.failures:
        print(each)
    kinds = ", ".join(f"{name} {n}" for name, n in sorted(done.by_kind.items()))
    print(f"ledgers: {done.runs} runs (seed {asked.seed}; {kinds}), {done.set_aside} set aside,")
    print(f"  {len(done.failures)} failed, {time.monotonic() - began:.0f} s")
    return 1 if done.failures else 0


def soak(runs: int, seed: int, *, first: int = 0, real: int = REAL, starts: int = STARTS) -> Outcome:
    """Do so many runs.

    Args:
        real: one run in so many uses real processes; starts: one in so many starts a pool of this machine. 0 for none.
    """
    done = Outcome()
    with tempfile.TemporaryDirectory(prefix="soak-") as place, _settings():
        root = Path(place)
        bases = [_base(root / f"base-{with_log}", with_log) for with_log in (False, True)]
        for n in range(first, first + runs):
            chance = random.Random(f"{seed}-{n}")
            run = _Run(
                root / "run", chance, is_real=bool(real) and n % real == 1, starts=bool(starts) and n % starts == 2
            )
            shutil.copytree(chance.choice(bases), run.folder)
            os.environ["XDG_STATE_HOME"] = str(run.folder / "state")
            os.environ["SKYPOOL_FAKE_CLOUD"] = str(run.folder / "cloud")
            run.go()
            done.runs += 1
            done.by_kind[run.kind] += 1
            done.set_aside += run.set_aside
            done.failures += [f"seed {seed}, run {n}, {run.kind} of {run.what}: {each}" for each in run.failures]
            shutil.rmtree(run.folder)
    return done


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """No provider but those that need no credentials, and the environment as it was afterwards."""
    before, every = dict(os.environ), registry.providers
    near = {name: each for name, each in every().items() if name in ("local", "ssh")}
    registry.providers = lambda group="": every(group) if group else near
    try:
        yield
    finally:
        registry.providers = every
        os.environ.clear()
        os.environ.update(before)


# --- what is damaged -----------------------------------------------------------------------------------------


def _base(folder: Path, with_log: bool) -> Path:
    """A state folder with pools in every state, and a cloud with a machine that is lost.

    Args:
        with_log: the ledger is as a client leaves it that was killed: the newest lines are in its write-ahead log.
    """
    folder.mkdir()
    cloud = FakeCloud(folder / "cloud", [Stock("gpu", 3.6)], machines=False)
    (offer,) = cloud.offers(Need())
    cloud.launch(offer, Order("lost", "gone-0", (0,), Need(), until=datetime.now(UTC) - timedelta(hours=1)))
    file = folder / "made" / "ledger.sqlite3"
    ledger = Ledger(file)
    ledger.check()
    with closing(sqlite3.connect(file, isolation_level=None)) as holder:
        if with_log:
            holder.execute("PRAGMA wal_autocheckpoint = 0")
            holder.execute("BEGIN")
            holder.execute("SELECT * FROM pools").fetchall()
        for n in range(12):
            _pool(ledger, n, Budget(20) if n % 3 else None)
        state = folder / "state" / "skypool"
        shutil.copytree(file.parent, state / "ledger")
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    blocklist.note("vastai", 12, "no device")
    for name in ("ssh/known_hosts", "reaper/pool-1-s1.log", "pools/pool-1/keys/client", "pools/pool-1/keys/client.pub"):
        (state / name).parent.mkdir(parents=True, exist_ok=True)
        (state / name).write_text(f"what {name} has\n" * 20)
    return folder


def _pool(ledger: Ledger, n: int, budget: Budget | None) -> None:
    name, session = f"pool-{n}", f"s{n}"
    ledger.begin(name, session, lease=600, budget=budget, drivers=[sky.Local()])
    for node in range(3):
        ledger.intend(session, f"{session}-{node}", _OFFER, (node,))
        if n % 4 or node:
            ledger.rented(session, f"{session}-{node}", [Instance("fake", f"i-{n}-{node}", name, node, offer=_OFFER)])
    if n % 2:
        ledger.ended(session, "fake", *(f"i-{n}-{node}" for node in range(3)))
        ledger.end(session, "the budget is spent" if budget else "")


def _flip(data: bytearray, chance: random.Random) -> bytearray:
    for _ in range(chance.choice((1, 1, 2, 8, 64))):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return data


def _truncate(data: bytearray, chance: random.Random) -> bytearray:
    return data[: chance.randrange(len(data))]


def _zero(data: bytearray, chance: random.Random) -> bytearray:
    start = chance.randrange(len(data))
    length = min(chance.choice((1, 16, 512, 4096, len(data))), len(data) - start)
    data[start : start + length] = bytes(length)
    return data


def _garbage(data: bytearray, chance: random.Random) -> bytearray:
    start = chance.randrange(len(data))
    length = min(chance.choice((1, 16, 100, 512, 4096, len(data))), len(data) - start)
    data[start : start + length] = chance.randbytes(length)
    return data


def _header(data: bytearray, chance: random.Random) -> bytearray:
    data[chance.randrange(min(100, len(data)))] = chance.randrange(256)
    return data


_KINDS: dict[str, Callable[[bytearray, random.Random], bytearray]] = {
    "flip": _flip,
    "truncate": _truncate,
    "zero": _zero,
    "garbage": _garbage,
    "header": _header,
}


# --- one run -------------------------------------------------------------------------------------------------


@dataclass
class _Run:
    folder: Path
    chance: random.Random
    is_real: bool
    starts: bool
    kind: str = ""
    what: str = ""
    set_aside: int = 0
    failures: list[str] = field(default_factory=list)

    def go(self) -> None:
        before = _content(self._ledger, self.folder / "looked-before")
        self._damage()
        is_healthy = _content(self._ledger, self.folder / "looked-after") == before
        steps: list[Callable[[], None]] = [self._start, *(partial(self._command, *argv) for argv in _COMMANDS)]
        self.chance.shuffle(steps)
        for step in [*steps, self._machine_is_gone]:
            try:
                step()
            except Exception:  # noqa: BLE001 - it is what a run reports
                self.failures.append(traceback.format_exc())
        self.set_aside = len(list(self._ledger.parent.glob("ledger.damaged-*.sqlite3")))
        if is_healthy and self.set_aside:
            self.failures.append("a healthy ledger was set aside")

    @property
    def _ledger(self) -> Path:
        return self.folder / "state" / "skypool" / "ledger" / "ledger.sqlite3"

    def _damage(self) -> None:
        files = sorted(each for each in (self.folder / "state").rglob("*") if each.is_file() and each.stat().st_size)
        ours = [each for each in files if each.name.startswith("ledger.sqlite3")]
        file = self.chance.choice([self._ledger, self._ledger, *ours, *ours, self.chance.choice(files)])
        self.kind, self.what = (
            self.chance.choice(list(_KINDS)),
            str(file.relative_to(self.folder / "state" / "skypool")),
        )
        file.write_bytes(_KINDS[self.kind](bytearray(file.read_bytes()), self.chance))

    def _start(self) -> None:
        """What a pool needs of the state folder; where it is this run's turn, a pool."""
        blocklist.known("vastai")
        if self.starts:
            with sky.ComputePool(sky.Local(), name="new", console="off") as pool:
                assert pool.submit(pow, 2, 5).result() == 32
            return
        ledger = Ledger.here(lambda text: None)
        ledger.begin("new", "new", lease=600, drivers=[sky.Local()])
        ledger.intend("new", "new-0", _OFFER, (0,))
        ledger.rented("new", "new-0", [Instance("fake", "i-new", "new", 0, offer=_OFFER)])
        ledger.beat("new")
        assert not ledger.standing("new")[0]
        ledger.ended("new", "fake", "i-new")
        assert [each.id for each in ledger.receipt("new").lines] == ["i-new"]
        ledger.end("new")

    def _command(self, *argv: str) -> None:
        status, out, err = _process(argv) if self.is_real else _here(argv)
        assert status == 0, f"skypool {' '.join(argv)}: status {status}\n{out}\n{err}"
        assert "Traceback" not in out + err, f"skypool {' '.join(argv)}:\n{err}"
        if "damaged (" in err:
            assert "it is kept as" in err, err

    def _machine_is_gone(self) -> None:
        assert FakeCloud(self.folder / "cloud", machines=False).count("machine") == 0, "gc left the lost machine"


def _here(argv: tuple[str, ...]) -> tuple[int, str, str]:
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["skypool", *argv]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            program()
    except SystemExit as e:
        return (e.code if isinstance(e.code, int) else 0 if e.code is None else 1), out.getvalue(), err.getvalue()
    finally:
        sys.argv = before
    return 0, out.getvalue(), err.getvalue()


def _process(argv: tuple[str, ...]) -> tuple[int, str, str]:
    run = [sys.executable, "-c", "from skypool.cli import main; main()", *argv]
    done = subprocess.run(run, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
    return done.returncode, done.stdout, done.stderr


def _content(file: Path, copy: Path) -> object:
    """All that SQLite itself reads of a copy of the ledger, None where that is not whole or cannot be written."""
    shutil.copytree(file.parent, copy)
    try:
        with closing(sqlite3.connect(copy / file.name)) as book:
            if book.execute("PRAGMA integrity_check").fetchall() != [("ok",)]:
                return None
            book.execute("DELETE FROM pools WHERE FALSE")  # refused where the header names a format that is only read
            marks = [book.execute(f"PRAGMA {name}").fetchone() for name in ("user_version", "application_id")]
            marks += book.execute("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name").fetchall()
            return marks, [book.execute(f"SELECT * FROM {table} ORDER BY 1, 2, 3").fetchall() for table in _TABLES]
    except (sqlite3.Error, UnicodeDecodeError):
        return None
    finally:
        shutil.rmtree(copy)


if __name__ == "__main__":
    sys.exit(main())
