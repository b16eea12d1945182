"""Pauses: parts of a pool are stopped under its calls and go on later. Nothing may be lost, and nothing run twice.

    python -m tests.soak.pauses --runs 20 --seed 1

Each run is a pool in a process of its own. Runs take place side by side, for what is stopped needs no processor.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import skypool as sky
from skypool import events
from skypool.agent.processes import descendants
from tests.lab.kernel import Group
from tests.lab.machines import Lab, Machine, unavailable

ROOT = Path(__file__).parent.parent.parent
PAUSES = (1.0, 20.0, 60.0)
_KINDS = 4
"""Kinds of calls that a client makes at once."""
PATIENCE = 120.0
"""Seconds for whatever should take less than one."""


@dataclass(frozen=True)
class Part:
    """What is stopped, and the terms of a pool that must not count the pause.

    `liveness` and `lease` are shorter than the longest pause wherever the pause is no silence of the other side.
    """

    name: str
    liveness: float
    lease: float


PARTS = {
    part.name: part
    for part in (
        Part("keeper", liveness=15, lease=15),
        Part("agent", liveness=180, lease=600),
        Part("node", liveness=180, lease=15),
        Part("machine", liveness=180, lease=30),
        Part("client", liveness=15, lease=600),
    )
}


# --- the client's side: a process of its own -----------------------------------------------------------------


@sky.compute
def note(n: int, log: str) -> int:
    """Leave a line for each time that it begins."""
    with open(log, "a") as file:
        file.write(f"{n}\n")
    time.sleep(n % 7 / 100)
    return n


@sky.compute
def noted(log: str) -> list[int]:
    return [int(line) for line in Path(log).read_text().split()]


@sky.compute
def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@sky.compute
def count() -> Iterator[int]:
    n = 0
    while True:
        yield n
        n += 1
        time.sleep(0.02)


@sky.compute
def add_up(numbers: Iterator[int]) -> int:
    return sum(numbers)


class Client:
    """Calls of every kind, until it is told to finish; then what was lost, wrong or run twice."""

    def __init__(self, pool: sky.ComputePool) -> None:
        self.pool = pool
        self.finish = threading.Event()
        self.under_way = threading.Semaphore(0)
        """Released by each kind of call when its first result is there."""
        self.troubles: list[str] = []
        self.calls = 0

    def work(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            log = f"{folder}/log"
            jobs = [
                threading.Thread(target=self._guarded, args=(job, log))
                for job in (self._notes, self._naps, self._stream, self._feed)
            ]
            self.pool.send(self._prepare(folder)).result(PATIENCE)
            for job in jobs:
                job.start()
            for job in jobs:
                job.join()

    @staticmethod
    def _prepare(folder: str) -> Any:
        return sky.compute(lambda: os.makedirs(folder, exist_ok=True))()

    def _guarded(self, job: Any, log: str) -> None:
        try:
            job(log)
        except BaseException as e:  # noqa: BLE001 - a verdict is printed, whatever happens
            self.troubles.append(f"{job.__name__}: {type(e).__name__}: {e}")

    def _notes(self, log: str) -> None:
        n = 0
        while n == 0 or not self.finish.is_set():
            futures = [note(n + i, log) > self.pool for i in range(6)]
            for i, future in enumerate(futures):
                if (got := future.result(PATIENCE)) != n + i:
                    self.troubles.append(f"note({n + i}) gave {got}")
            if n == 0:
                self.under_way.release()
            n += len(futures)
        ran = Counter((noted(log) > self.pool).result(PATIENCE))
        self.troubles += [f"note({i}) ran {ran[i]} times" for i in range(n) if ran[i] != 1]
        self.calls += n

    def _naps(self, _log: str) -> None:
        while not self.finish.is_set():
            (nap(1.0).with_options(timeout=15) > self.pool).result(PATIENCE)
            if self.calls == 0:
                self.under_way.release()
            self.calls += 1

    def _stream(self, _log: str) -> None:
        for expected, got in enumerate(count() >> self.pool):
            if got == 0:
                self.under_way.release()
            if got != expected:
                self.troubles.append(f"item {expected} of a stream was {got}")
            if self.finish.is_set():
                self.calls += 1
                return

    def _feed(self, _log: str) -> None:
        fed: list[int] = []

        def numbers() -> Iterator[int]:
            while not self.finish.is_set():
                if len(fed) == 1:
                    self.under_way.release()  # the second item is asked for when the first is there
                fed.append(len(fed))
                yield fed[-1]
                time.sleep(0.02)

        total = (add_up(numbers()) > self.pool).result(PATIENCE + 2 * max(PAUSES))
        self.calls += 1
        if total != sum(fed):
            self.troubles.append(f"the sum of an iterator was {total}, not {sum(fed)}")


def be_client(terms: dict[str, Any]) -> None:
    """Say who the keeper is; finish when a line comes in; print the verdict."""
    host = terms.pop("host", None)
    provider = None
    if host is not None:
        provider = sky.SSH(
            hosts=[sky.Host(host["address"], host_key=host["key"])], user="root", identity=host["identity"]
        )
    with sky.ComputePool(provider, slots=4, console="off", **terms) as pool:
        client = Client(pool)
        ready: list[float] = []  # what failed while the pool started is told again to whoever listens later
        pool.events.listen(lambda e: client.troubles.append(str(e)) if ready and _is_loss(e) else None)
        worker = threading.Thread(target=client.work)
        worker.start()
        for _ in range(_KINDS):
            if not client.under_way.acquire(timeout=PATIENCE):
                client.troubles.append("not every kind of call was under way")
        ready.append(time.time())
        print(json.dumps({"ready": pool.name}), flush=True)
        sys.stdin.readline()
        client.finish.set()
        worker.join()
        print(json.dumps({"calls": client.calls, "troubles": client.troubles}), flush=True)


def _is_loss(event: events.Event) -> bool:
    return isinstance(event, events.CallFailed | events.CallRetried) or (
        isinstance(event, events.NodePhase) and event.phase != "ready"
    )


# --- one run -------------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """How a run ended: `calls` that ended well, and what went wrong."""

    part: str
    seconds: float
    calls: int = 0
    troubles: list[str] = field(default_factory=list)


def run(part: Part, seconds: float, chance: random.Random, machine: Machine | None = None) -> Verdict:
    """Stop one part of a new pool for so long, a moment after its calls have begun; see what became of them."""
    terms: dict[str, Any] = {"liveness": part.liveness, "lease": part.lease}
    if machine is not None:
        terms["host"] = {
            "address": machine.address,
            "key": machine.host_key,
            "identity": str(machine.lab.client_key),
        }
    with tempfile.TemporaryDirectory(prefix="sp-") as home:
        environment = {**os.environ, "XDG_RUNTIME_DIR": home, "XDG_STATE_HOME": f"{home}/state"}
        client = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.pauses", "--client", json.dumps(terms)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert client.stdin is not None
        assert client.stdout is not None
        verdict = Verdict(part.name, seconds)
        try:
            if not client.stdout.readline():
                verdict.troubles.append(f"the client ended with {client.wait()} before it was ready")
                return verdict
            time.sleep(chance.uniform(0.3, 1.5))
            with stopped(part.name, client.pid, Path(home), machine):
                time.sleep(seconds)
            time.sleep(chance.uniform(0.3, 1.0))
            client.stdin.write("finish\n")
            client.stdin.flush()
            said = _last_line(client, PATIENCE + 4 * max(PAUSES))
            verdict.calls, verdict.troubles = said["calls"], said["troubles"]
        finally:
            client.kill()
            client.wait()
        return verdict


def _last_line(client: subprocess.Popen[str], within: float) -> dict[str, Any]:
    out, _ = client.communicate(timeout=within)
    lines = out.splitlines()
    return json.loads(lines[-1]) if lines else {"calls": 0, "troubles": [f"the client ended with {client.returncode}"]}


@contextlib.contextmanager
def stopped(what: str, client: int, home: Path, machine: Machine | None) -> Iterator[None]:
    """Stop that part; it goes on at the end of the block."""
    if what == "machine":
        assert machine is not None
        with machine.frozen():
            yield
    elif what == "client":
        with _signalled(client):
            yield
    else:
        (keeper_file,) = home.glob("skypool-*/*/keeper.json")
        keeper = int(json.loads(keeper_file.read_text())["pid"])
        if what == "node":
            with _frozen([keeper, *descendants(keeper)]):
                yield
        else:
            with _signalled(keeper if what == "keeper" else _child_of(keeper)):
                yield


@contextlib.contextmanager
def _signalled(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def _frozen(pids: Sequence[int]) -> Iterator[None]:
    """A control group of their own; it is removed when they have left or ended."""
    group = Group(f"skypool-pause-{os.getpid()}-{pids[0]}")
    group.create()
    try:
        for pid in pids:
            (group.main / "cgroup.procs").write_text(str(pid))
        group.freeze(True)
        yield
        group.freeze(False)
    finally:
        (group.main / "cgroup.freeze").write_text("0")
        for pid in group.processes():
            with contextlib.suppress(OSError):  # it has just ended
                (group.main.parent / "cgroup.procs").write_text(str(pid))
        group.remove()


def _child_of(keeper: int) -> int:
    """The agent: the keeper's only child, unless a worker's orphan was adopted."""
    (agent, *_) = (int(pid) for pid in Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split())
    return agent


# --- many runs -----------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Run all parts with all pauses; print a line for each pair and what went wrong. 0 if nothing did."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.pauses", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="of each part with each pause")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, nargs="+", default=PAUSES)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[p for p in PARTS if p in possible()])
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.client:
        be_client(json.loads(args.client))
        return 0
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab()) if "machine" in args.parts else None
        verdicts = list(_runs(args, lab))
    for name in args.parts:
        for seconds in args.seconds:
            of_it = [v for v in verdicts if (v.part, v.seconds) == (name, seconds)]
            good = sum(not v.troubles for v in of_it)
            print(f"{name:>8} {seconds:4g} s: {good} of {len(of_it)} runs, {sum(v.calls for v in of_it)} calls")
    failed = [v for v in verdicts if v.troubles]
    for each in failed:
        print(f"{each.part} stopped for {each.seconds:g} s: {each.troubles[:5]}")
    return 1 if failed else 0


def possible() -> list[str]:
    """The parts that can be stopped here: control groups and machines need root."""
    if os.geteuid() != 0:
        return ["keeper", "agent", "client"]
    return [name for name in PARTS if name != "machine" or not unavailable()]


def _runs(args: argparse.Namespace, lab: Lab | None) -> Iterator[Verdict]:
    """Yield the verdicts as they come; the longest pauses begin first."""
    todo = [(n, s, name) for s in sorted(args.seconds, reverse=True) for name in args.parts for n in range(args.runs)]

    def one(n: int, seconds: float, name: str) -> Verdict:
        chance = random.Random(f"{args.seed} {n} {seconds} {name}")
        if name != "machine":
            return run(PARTS[name], seconds, chance)
        assert lab is not None
        machine = lab.machine(keys=[lab.public_key])
        try:
            return run(PARTS[name], seconds, chance, machine)
        finally:
            machine.destroy()

    with ThreadPoolExecutor(args.at_once) as threads:
        yield from threads.map(lambda each: one(*each), todo)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
