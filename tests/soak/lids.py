"""Runs that belong to their machine, while clients are killed and machines have troubles: real processes, with a bill.

    python -m tests.soak.lids --times 100 --seed 1
    python -m tests.soak.lids --times 26 --kinds runner,stopped,livelock,lies --seed 1

In each world, `skypool run --detach` rents a machine of a simulated cloud. In worlds of the kind "client", it is killed
at a random moment: first stopped for a while, as by a network that is lost, or at once. Before the commit, the lease
must end all, and the program has never run. After it, the program runs once, all that it printed can be read, and the
machine ends itself. Other kinds are troubles on the machine after the commit. In each third world, `skypool gc --yes`
runs all the time, with and without the ledger. The cloud's own bill is compared with the receipt.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skypool.model import Need
from skypool.rental.ledger import Ledger
from skypool.rental.records import newest
from skypool.runs import stored
from skypool.testing import FakeCloud, Stock, machine
from tests.bill import Item, bill
from tests.soak import _clocks

ROOT = Path(__file__).parents[2]
KINDS = ("client",)
TROUBLES = (
    "runner", "runners", "paused", "stopped", "agent", "agent-paused", "agent-stopped", "livelock", "spin", "lies",
    "memory", "program", "worker", "link", "disk", "clock", "limit",
)  # fmt: skip
LONG = ("stopped", "livelock", "spin", "lies", "agent-stopped")
"""The kinds that take over a minute."""
PLANTS = ("livelock", "spin", "lies", "memory")
"""The kinds for which a runner has code of its own."""
LEASE = 25.0
"""Seconds. Agents replace a runner only after a minute of silence, for which kinds with one have `LONG_LEASE`."""
LONG_LEASE = 100.0
KEEP = 12.0
LIFETIME = 240.0
"""Seconds of a run in any case. Kinds that never end by themselves have `SHORT`."""
SHORT = 50.0
LATE = 6.0
"""Seconds after its lease or its written end in which the cloud has ended a machine."""
TO_END = 60.0
"""Seconds after the end of the run and `KEEP` in which a machine has ended itself."""
PATIENCE = 120.0
"""Seconds within which something must happen that is not measured."""
USD_PER_HOUR = 36.0
STATUS = 3

PROGRAM = """import os, sys, time
open("ran", "a").write("1")
print("began", flush=True)
trouble, lines = {trouble!r}, {lines}
for number in range(lines):
    print("line", number, "x" * {width}, flush=True)
    time.sleep({pause})
if trouble == "disk":
    try:
        with open("filler", "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
    except OSError:
        pass
if trouble in ("program", "worker", "limit", "forever"):
    time.sleep(600)
os._exit({status})
"""
PLANTED = '''

def _planted(self, run=RunnerProcess.run):
    """Trouble the runner as a file in the folder of the run asks for."""

    def spin():
        while True:
            pass

    def lie(event):
        until = time.monotonic() + 59.0
        while time.monotonic() < until:
            self._moves += 1
            self._write(messages.Alive(self._moves))
            time.sleep(1.0)
        del self._step
        self._step(event)

    def watch():
        kept = []
        while True:
            time.sleep(0.05)
            for kind in ("livelock", "spin", "memory", "lies"):
                try:
                    os.unlink(self._folder / f"plant-{kind}")
                except FileNotFoundError:
                    continue
                if kind == "livelock":
                    Loop.shared().loop.call_soon_threadsafe(spin)
                elif kind == "spin":
                    self._step = lambda event: spin()
                elif kind == "memory":
                    kept.append(b"x" * (600 << 20))
                else:
                    self._step = lie

    threading.Thread(target=watch, daemon=True).start()
    run(self)


RunnerProcess.run = _planted
'''


def client(words: Sequence[str]) -> None:
    """Be the command line, with a short lease."""
    whole_run: Any = importlib.import_module("skypool.runs.whole_run")
    whole_run._LEASE = float(words[0])
    sys.argv = ["skypool", *words[1:]]
    importlib.import_module("skypool.cli").main()


class Trouble(Exception):
    """Something did not happen in a world."""


@dataclass
class World:
    """A run, and what was found when all of it has ended.

    Attributes:
        planted: a folder with skypool's source in which troubles of a runner are planted.
        has_gc: True if `skypool gc` runs beside it.
        wrong: what is wrong.
        end: how it has ended: "before" or "after" the commit, and the state of the run.
    """

    folder: Path
    kind: str
    chance: random.Random
    planted: Path
    has_gc: bool = False
    wrong: list[str] = field(default_factory=list[str])
    end: str = ""

    # --- the stage -------------------------------------------------------------------------------------------

    def live(self) -> None:
        """Let the run live and end, and compare."""
        self.folder.mkdir(parents=True)
        self.name = f"lid-{os.getpid()}-{self.folder.name}"
        self.lifetime = SHORT if self.kind == "limit" else LIFETIME
        self.silent = self.chance.choice((0.0, 0.0, 1.0, LEASE + 2)) if self.kind == "client" else 0.0
        self.keep = KEEP + self.silent  # so that the machine of a run that is soon over is still there then
        self.lease = LONG_LEASE if self.kind in ("paused", "stopped", *PLANTS) else LEASE
        self.cloud = FakeCloud(self.folder / "cloud", [Stock("small", USD_PER_HOUR)])
        list(self.cloud.offers(Need()))
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            if self.kind == "disk":
                stack.enter_context(_small_disk(self.folder / "cloud" / "machines"))
            if self.kind == "clock":
                self.clock = _clocks.MovedClock(self.folder / "clock")
                stack.callback(self.clock.clean)
            self._write_project()
            try:
                self._live(stack)
            except Trouble as e:
                self.wrong.append(str(e))

    def _write_project(self) -> None:
        self.project = self.folder / "project"
        self.project.mkdir()
        (self.project / "pyproject.toml").write_text('[project]\nname = "lid"\nversion = "1"\n')
        self.lines = self.chance.randint(1, 60)
        self.width = self.chance.choice((0, 10, 3000))
        seconds = self.chance.uniform(0, 6) if self.kind == "client" else self.chance.uniform(6, 10)
        if self.kind == "livelock":
            seconds += 80  # a runner that is stuck is replaced meanwhile
        words = {"trouble": self.kind, "lines": self.lines, "width": self.width, "pause": seconds / self.lines}
        (self.project / "train.py").write_text(PROGRAM.format(**words, status=STATUS))

    @property
    def output(self) -> str:
        """All that the program prints."""
        return "began\n" + "".join(f"line {number} {'x' * self.width}\n" for number in range(self.lines))

    def env(self, state: str = "state", source: Path = ROOT) -> dict[str, str]:
        places = {f"XDG_{name}_HOME": str(self.folder / name.lower()) for name in ("CACHE", "DATA", "CONFIG")}
        path = os.pathsep.join(str(source / name) for name in ("", "providers", "images"))
        return {
            **os.environ, **places, "XDG_STATE_HOME": str(self.folder / state),
            "SKYPOOL_FAKE_CLOUD": str(self.cloud.state),
            "PYTHONPATH": os.pathsep.join((path, str(ROOT))),
        }  # fmt: skip

    def skypool(self, *words: str, state: str = "state", most: float = PATIENCE) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "skypool", *words]
        try:
            return subprocess.run(
                argv, cwd=self.project, env=self.env(state), text=True, capture_output=True, timeout=most,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired as e:
            raise Trouble(f"`skypool {' '.join(words)}` has not returned within {most:g} s") from e

    def _begin(self) -> None:
        python = str(self.clock.python) if self.kind == "clock" else sys.executable
        run = [f"{self.lease:g}", "run", "--detach", "--provider", "fake", "--name", self.name, "--budget", "5"]
        run += ["--max-lifetime", f"{self.lifetime:g}s", "--keep", f"{self.keep:g}s", "train.py"]
        argv = [python, "-m", "tests.soak.lids", "--client", json.dumps(run)]
        source = self.planted if self.kind in PLANTS else ROOT
        with (self.folder / "said").open("wb") as out:
            self.process = subprocess.Popen(
                argv, cwd=self.project, env=self.env(source=source), stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip

    def _said(self) -> str:
        return (self.folder / "said").read_text()[-1500:]

    def _wait(self, check: Callable[[], object], what: str, within: float = PATIENCE) -> None:
        until = time.monotonic() + within
        while not check():
            if time.monotonic() > until:
                raise Trouble(f"{what} did not happen within {within:g} s: {self._said()}")
            time.sleep(0.05)

    # --- what there is ---------------------------------------------------------------------------------------

    @property
    def machines(self) -> list[Path]:
        return sorted((self.folder / "cloud" / "machines").glob("i-*"))

    @property
    def place(self) -> Path:
        """The folder of the run on its machine."""
        home = self.machines[-1] if self.machines else self.folder / "none"  # others were given up before
        return home / "home" / ".skypool" / "heads" / f"{self.name}-1"

    def _items(self) -> list[Item]:
        return [*bill(self.folder / "cloud" / "events", time.time()).values()]

    def _agent(self) -> int:
        mark = f"{machine.MARK}={self.folder}/".encode()
        for each in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if (each / "comm").read_text() == "skypool-agent\n" and mark in (each / "environ").read_bytes():
                    return int(each.name)
        raise Trouble("there is no agent")

    def _runners(self) -> list[int]:
        """The processes of runners, which the agent has started without the variable of the machine."""
        found = []
        place = f"/{self.name}.0.".encode(), f"{self.folder}/".encode()
        for each in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it has ended
                words = each.read_bytes()
                if b"skypool.runs.runner" in words and any(part in words for part in place):
                    found.append(int(each.parent.name))
        return found

    def _runner(self) -> int:
        self._wait(lambda: len(self._runners()) == 1, "a runner")
        return self._runners()[0]

    def _ran(self) -> list[str]:
        """What each copy of the program has written of its starts, on any machine that is there."""
        return [each.read_text() for each in self.folder.glob("cloud/machines/*/home/**/ran")]

    # --- what happens ----------------------------------------------------------------------------------------

    def _live(self, stack: contextlib.ExitStack) -> None:
        self._begin()
        if self.has_gc:
            stack.enter_context(self._collected())
        if self.kind == "client":
            self._kill_client()
        elif self.kind == "link":
            self._cut_link()
        else:
            self._wait(lambda: self.process.poll() is not None, "the end of the client")
            if self.process.returncode:
                raise Trouble(f"the client has failed: {self._said()}")
        # it is settled then
        self._wait(
            lambda: self._is_committed() or not self.machines, "the commit or the end of its lease", LEASE + LATE + 60
        )
        if self._is_committed():
            self._go_on()
        else:
            self._check_none()

    def _is_committed(self) -> bool:
        return (self.place / "row.json").exists()

    def _kill_client(self) -> None:
        """Kill the client at a random moment, after its network was lost for a while or not."""
        moment, most = self.chance.choice((("start", 5.0), ("machine", 5.0), ("head", 0.5), ("row", 0.1), ("row", 2.0)))
        if moment != "start":
            self._wait(lambda: self._has_come(moment) or self.process.poll() is not None, f"the {moment}")
        time.sleep(self.chance.uniform(0, most))
        with contextlib.suppress(ProcessLookupError):
            if self.silent:
                os.killpg(self.process.pid, signal.SIGSTOP)
                time.sleep(self.silent)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.killed = time.time()

    def _has_come(self, moment: str) -> bool:
        """True if the machine is there, the folder of its run, or the row in that."""
        return bool({"machine": self.machines, "head": self.place.exists(), "row": self._is_committed()}[moment])

    def _cut_link(self) -> None:
        """Cut the connections of the client to its machine, and let none be made for a while."""
        self._wait(lambda: self.machines or self.process.poll() is not None, "the machine")
        time.sleep(self.chance.uniform(0.5, 3.0))
        self.cut = seconds = self.chance.choice((0.1, 0.5, 2.0, 8.0, 15.0, 100.0))
        for home in self.machines:
            machine.hush(str(home))
            for each in _children(self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            until = time.monotonic() + seconds
            while time.monotonic() < until and home.exists():
                time.sleep(0.05)
            if home.exists():
                machine.answer(str(home))
        self._wait(lambda: self.process.poll() is not None, "the end of the client", 200 + PATIENCE)
        self.killed = time.time()

    @contextlib.contextmanager
    def _collected(self) -> Iterator[None]:
        """Run `skypool gc --yes` all the time, with this ledger and with none."""
        is_over = threading.Event()

        def collect() -> None:
            while not is_over.wait(3.0):
                for state in ("state", "other"):
                    argv = [sys.executable, "-m", "skypool", "gc", "--provider", "fake", "--yes"]
                    subprocess.run(argv, env=self.env(state), capture_output=True, timeout=PATIENCE)

        thread = threading.Thread(target=collect)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def _go_on(self) -> None:
        """Trouble the run, look in from another terminal, and compare all."""
        row = json.loads((self.place / "row.json").read_text())
        self.written = float(row["end"])
        status: list[stored.RunStatus] = []
        watching = threading.Thread(target=self._watch, args=(status,))
        watching.start()
        # from before the trouble, as the machine may soon be gone after it
        with ThreadPoolExecutor(1) as another:
            waits = another.submit(self.skypool, "wait", "--json", self.name, most=self.lifetime + PATIENCE)
            printed, has_followed = self._look_in(waits)
            done = waits.result()
        if self.chance.random() < 0.5 and not self.has_gc:
            self.skypool("down", self.name, "--yes")
        self._wait(lambda: not self.machines, "the end of the machine", self.lifetime + LATE + PATIENCE)
        watching.join()
        self._compare(done, status, printed, has_followed)

    def _look_in(self, waits: Future[subprocess.CompletedProcess[str]]) -> tuple[str | None, bool]:
        """Trouble the run, follow its output, and read that when it is over. Return it, and whether it was followed."""
        logs = None
        if self.kind in ("client", "runner", "paused"):
            argv = [sys.executable, "-m", "skypool", "logs", "-f", self.name]
            with (self.folder / "printed").open("wb") as out, (self.folder / "notes").open("wb") as notes:
                logs = subprocess.Popen(argv, cwd=self.project, env=self.env(), stdout=out, stderr=notes)
        try:
            if self.kind not in ("client", "link"):
                self._trouble()
            waits.result()
            printed = self._printed()
            if logs is not None:
                logs.wait(PATIENCE)
        finally:
            if logs is not None:
                logs.kill()
                logs.wait()
        return printed, logs is not None

    def _printed(self) -> str | None:
        """Return all output, as `skypool logs` prints it; None if the machine has ended before."""
        done = self.skypool("logs", self.name)
        if "fake does not list it any more" in done.stderr:
            return None
        if done.returncode == 0:
            return done.stdout
        if self.machines and self.kind not in ("agent", "agent-stopped"):
            self.wrong.append(f"`logs` cannot be read: {done.stderr[-500:]}")
        return None

    def _watch(self, found: list[stored.RunStatus]) -> None:
        """Read the status of the run, which ends with its machine, and how often the program was started."""
        place, self.starts = self.place, ""
        while self.machines:
            with contextlib.suppress(Exception):
                self.starts = max([self.starts, *self._ran()], key=len)
                if not found and (status := stored.stored(place)) is not None:
                    found.append(status)
            time.sleep(0.05)

    def _trouble(self) -> None:
        """Do on the machine what the kind of this world says."""
        chance, kind = self.chance, self.kind
        self._wait(self._ran, "the start of the program")
        time.sleep(chance.uniform(0, 4))
        if kind == "runner":
            _end(self._runner())
        elif kind == "runners":
            for _ in range(2):
                _end(self._runner())
                time.sleep(chance.uniform(0, 3))
        elif kind in ("paused", "stopped"):
            self._pause(self._runner(), None if kind == "stopped" else chance.uniform(0.1, 40))
        elif kind in ("agent-paused", "agent-stopped"):
            self._pause(self._agent(), None if kind == "agent-stopped" else chance.uniform(0.1, LEASE / 3))
        elif kind == "agent":
            _end(self._agent())
        elif kind in PLANTS:
            self._runner()
            (self.place / f"plant-{kind}").touch()
        elif kind in ("program", "worker"):
            self._kill_program(parent=kind == "worker")
        elif kind == "clock":
            self._replace_hypervisor()
            for _ in range(chance.randint(1, 4)):
                self.clock.jump(chance.choice((-90000, -3600, -70, -5, 5, 70, 3600, 90000)))
                time.sleep(chance.uniform(0.1, 3))

    def _pause(self, pid: int, seconds: float | None) -> None:
        """Stop a process, and let it go on after so many seconds; None for never."""
        self.stopped = pid
        os.kill(pid, signal.SIGSTOP)
        if seconds is not None:
            time.sleep(seconds)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _kill_program(self, parent: bool) -> None:
        for each in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                is_ours = os.readlink(each / "cwd").startswith(f"{self.folder}/cloud/machines/")
                if is_ours and (each / "cmdline").read_bytes().endswith(b"\0train.py\0"):
                    pid = int((each / "stat").read_text().rpartition(")")[2].split()[1]) if parent else int(each.name)
                    os.kill(pid, signal.SIGKILL)
                    return
        raise Trouble("the program does not run")

    def _replace_hypervisor(self) -> None:
        """Let the cloud have the clock of this computer. The client that has started it has another one."""
        for each in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (each / "cmdline").read_bytes().split(b"\0")
                if b"skypool.testing.hypervisor" in words and str(self.cloud.state).encode() in words:
                    _end(int(each.name))
        argv = [sys.executable, "-m", "skypool.testing.hypervisor", str(self.cloud.state)]
        self.hypervisor = subprocess.Popen(argv, env=self.env())

    # --- what is found ---------------------------------------------------------------------------------------

    def _check_none(self) -> None:
        """Compare a run that was never committed."""
        self.end = "before the commit"
        if self.kind == "link":
            print(f"{self.folder.name}: cut {self.cut:g} s: {self._said()[-700:]}", flush=True)
        self._wait(lambda: not self.cloud.instances(), "the end of all machines")
        items = self._items()
        for item in items:
            if item.ended is None or item.ended > self.killed + self.lease + LATE:
                self.wrong.append(f"without a commit, a machine lived {(item.ended or 1e12) - self.killed:.1f} s on")
        for state in ("state", "other"):
            self.skypool("gc", "--provider", "fake", "--yes", state=state)
        if self.process.returncode == 0:
            self.wrong.append(f"the client says that it has handed the run over: {self._said()}")
        self._check_money(items, is_exact=False)

    def _compare(
        self, done: subprocess.CompletedProcess[str], status: list[stored.RunStatus], printed: str | None, logs: bool
    ) -> None:
        """Compare a committed run whose machine has ended."""
        items = self._items()
        ended = max(each.ended or 1e12 for each in items)
        told = json.loads(done.stdout) if done.stdout.startswith("{") else {}
        self.end = f"after the commit: {told.get('state')} {told.get('returncode')}"
        if ended > self.written + LATE:
            self.wrong.append(f"the machine has ended {ended - self.written:.1f} s after its written end")
        if len(self.starts) > 1:
            self.wrong.append(f"the program was started {len(self.starts)} times")
        if self.kind in ("agent", "agent-stopped"):
            if ended > time.time() + LATE or told.get("state") not in ("interrupted", "lost", None):
                self.wrong.append(f"the agent is gone, and the run is {told}")
        else:
            self._compare_whole(status, told, printed, logs, ended)
        time.sleep(0.5)
        said = self.skypool("gc", "--provider", "fake", "--yes")
        until = time.monotonic() + PATIENCE
        while self.cloud.count() and time.monotonic() < until:  # 30 s after an order, what is not listed is gone
            time.sleep(2)
            said = self.skypool("gc", "--provider", "fake", "--yes")
        if self.cloud.count():
            self.wrong.append(f"{self.cloud.count()} things are left: {said.stdout}{said.stderr}")
        self._check_money(items, is_exact="has ended" in said.stdout)

    def _compare_whole(
        self, status: list[stored.RunStatus], told: dict[str, Any], printed: str | None, logs: bool, ended: float
    ) -> None:
        """Compare a run of which all is known: it is complete, or it says why not."""
        expected: dict[str, tuple[str, int | None]] = {
            "program": ("ended", 137), "worker": ("failed", None), "limit": ("cancelled", 130)
        }  # fmt: skip
        state, returncode = expected.get(self.kind, ("ended", STATUS))
        if not status:
            self.wrong.append(f"no end is stored; `wait` says {told}")
            return
        [found] = status
        if (found.outcome.value, found.returncode, found.attempts) != (state, returncode, 1):
            self.wrong.append(f"the run is {found.outcome.value}, {found.returncode}, {found.attempts}: {found.why}")
        if self.kind == "limit" and found.limit != "lifetime":
            self.wrong.append(f"it was stopped by {found.limit!r}")
        if self.starts != "1":
            self.wrong.append(f"the program was started {len(self.starts)} times")
        if (told.get("state"), told.get("returncode")) != (state, returncode):
            self.wrong.append(f"`wait` says {told}")
        if printed is not None and state == "ended" and self.kind != "program" and printed != self.output:
            self.wrong.append(f"{len(printed)} of {len(self.output)} characters of the output: {printed[-200:]!r}")
        if logs and (followed := (self.folder / "printed").read_text()) != self.output:
            notes = (self.folder / "notes").read_text()
            self.wrong.append(f"`logs -f` has printed {len(followed)} of {len(self.output)} characters: {notes}")
        if self.kind != "clock" and ended > found.ended + self.keep + TO_END:
            self.wrong.append(
                f"the machine has ended {ended - found.ended - self.keep:.1f} s after the run and `--keep`"
            )

    def _check_money(self, items: list[Item], is_exact: bool) -> None:
        """Compare the receipt and the worst bill with the cloud's bill."""
        billed = sum(each.usd for each in items)
        file = self.folder / "state" / "skypool" / "ledger" / "ledger.sqlite3"
        if not file.exists():
            return
        known = Ledger(file)
        record = newest(known.pools(self.name))
        if record is None:
            if billed:
                self.wrong.append("there is a bill, and the ledger has no pool")
            return
        spent = known.receipt(record.session).usd
        second = USD_PER_HOUR / 3600
        if spent < billed * 0.99 - second:
            self.wrong.append(f"the receipt says {spent:.4f} USD, and the bill {billed:.4f}")
        if is_exact and self.kind == "client" and spent > billed * 1.01 + PATIENCE * second:
            self.wrong.append(f"the receipt says {spent:.4f} USD, and the bill only {billed:.4f}")
        if record.run is not None and billed > record.run.worst_usd * (1 + 1e-9) + 0.1 * second:
            self.wrong.append(f"the bill is {billed:.4f} USD, and the worst bill was {record.run.worst_usd:.4f}")

    def _close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for each in (*self._runners(), getattr(self, "stopped", 0)):
            if each:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGCONT)
        with contextlib.suppress(Exception):
            self.cloud.terminate(self.cloud.instances())
        for pid in self._runners():
            _end(pid)
        if (hypervisor := getattr(self, "hypervisor", None)) is not None:
            hypervisor.kill()
            hypervisor.wait()


def _end(pid: int) -> None:
    """Kill a process, and wait until it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        while Path("/proc", str(pid)).exists():
            time.sleep(0.02)


def _children(pid: int) -> list[int]:
    found = []
    for task in Path("/proc", str(pid), "task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(each) for each in task.read_text().split()]
    return found


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """A small file system in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1300m", "skypool-test", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def missing(kind: str) -> str:
    """Return why there can be no world of a kind; "" if there can."""
    if kind == "disk" and os.geteuid():
        return "only root may mount a small disk"
    return _clocks.missing() if kind == "clock" else ""


def plant(folder: Path) -> None:
    """Copy skypool's source into a folder, with troubles of a runner that files ask for."""
    for name in ("skypool", "providers", "images"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "skypool" / "runs" / "runner.py").open("a") as file:
        file.write(PLANTED)


def soak(times: int, seed: int, beside: int, kinds: Sequence[str]) -> tuple[Counter[str], list[str]]:
    """Have so many worlds, spread equally over the kinds; `beside` of them at the same time."""
    ends, troubles = Counter[str](), list[str]()
    with tempfile.TemporaryDirectory(prefix="lids-") as top:
        plant(Path(top) / "planted")

        def live(number: int) -> World:
            kind = kinds[number % len(kinds)]
            chance = random.Random(f"{seed} {number} {kind}")
            world = World(Path(top) / f"w{number}", kind, chance, Path(top) / "planted", has_gc=number % 3 == 2)
            began = time.monotonic()
            try:
                world.live()
            except Exception as e:  # noqa: BLE001 - a defect of this program, which must not end the others
                world.wrong.append(f"{type(e).__name__}: {e}")
            told = "; ".join(world.wrong) or "fine"
            print(f"{number:4} {kind:13} {time.monotonic() - began:5.1f} s  {world.end}  {told}", flush=True)
            if not world.wrong:
                shutil.rmtree(world.folder, ignore_errors=True)
            return world

        with ThreadPoolExecutor(beside) as threads:
            for number, world in enumerate(threads.map(live, range(times))):
                ends[f"{world.kind}, {world.end}"] += 1
                troubles += [f"seed {seed}, world {number}, {world.kind}: {each}" for each in world.wrong]
        if troubles and os.environ.get("KEEP_WORLDS"):
            shutil.copytree(top, os.environ["KEEP_WORLDS"], dirs_exist_ok=True, symlinks=True)
    return ends, troubles


def main(argv: Sequence[str] | None = None) -> int:
    """Have worlds, and print what was found; 1 if that is anything."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.lids", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="what happens when; processes add chance")
    parser.add_argument("--times", type=int, default=200, help="the number of worlds")
    parser.add_argument("--beside", type=int, default=4, help="how many of them live at the same time")
    parser.add_argument("--kinds", default="", help="the kinds of troubles, with commas between them; half are clients")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.client:
        client(json.loads(asked.client))
        return 0
    kinds = asked.kinds.split(",") if asked.kinds else [each for kind in TROUBLES for each in (*KINDS, kind)]
    for each in sorted({each for each in kinds if missing(each)}):
        print(f"no world of the kind {each}: {missing(each)}")
    ends, troubles = soak(asked.times, asked.seed, asked.beside, [each for each in kinds if not missing(each)])
    for end, count in sorted(ends.items()):
        print(f"{count:4} {end}")
    print(*troubles, sep="\n")
    return 1 if troubles else 0


if __name__ == "__main__":
    sys.exit(main())
