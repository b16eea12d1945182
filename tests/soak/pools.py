"""Pools under random kills, stops and cuts: no call is lost, wrong or hung, none runs twice, and nothing is left.

    python -m tests.soak.pools --seed 1 --minutes 10

Six pools work side by side: four of this machine, and two on machines of the lab where there can be one. Each call
appends its number to a file outside of its node, by which runs are counted. Workers and agents are killed and stopped,
keepers and transports (ssh) are stopped or killed, lab machines are cut off and come back.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import itertools
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import skypool as sky
from skypool.agent.processes import descendants
from skypool.errors import ConnectionLost, ErrorGroup, PoolClosed, WorkerDied
from tests.lab.machines import Lab, Machine, unavailable

PATIENCE = 120.0
"""Seconds until a call that has not ended is said to hang: several times what a lost node and its successor take."""
LIVENESS = 20.0
LEASE = 30.0
"""Seconds until a host whose end could not be proved, as its ssh was killed, serves the next pool."""
LIFE = (20.0, 60.0)
"""For how many seconds a pool lives until another one takes its place."""
STOP = (0.1, 4.0)
CUT = (0.1, 5.0)
LOST = (ConnectionLost, WorkerDied, PoolClosed)
"""What a call may end in whose node or worker was killed."""


@sky.compute
def mark(number: int, path: str, pause: float = 0.0) -> int:
    """Say that this call has run."""
    with open(path, "a") as file:
        file.write(f"{number}\n")
    time.sleep(pause)
    return answer(number)


@sky.compute
def items(number: int, path: str, count: int) -> Iterator[int]:
    """A stream that says that it has run."""
    with open(path, "a") as file:
        file.write(f"{number}\n")
    for n in range(count):
        yield answer(number + n)
        time.sleep(0.01)


def answer(number: int) -> int:
    """What a call with this number returns: nothing that could be there by chance."""
    return number * 7919 + 13


@dataclass
class Books:
    """What was asked for, and what came of it."""

    counts: Counter[str] = field(default_factory=Counter[str])
    troubles: list[str] = field(default_factory=list)
    once: set[int] = field(default_factory=set)
    ended_well: set[int] = field(default_factory=set)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(0, 1000))

    def trouble(self, words: str) -> None:
        print(f"TROUBLE {words}", flush=True)
        self.troubles.append(words)


@dataclass
class Site:
    """Where the nodes of one pool are, and how what runs there is found.

    Attributes:
        log: the file that its calls write, as they see it; logs: the same as this process sees it.
    """

    name: str
    make: Callable[[], sky.ComputePool]
    log: str
    logs: Sequence[Path]
    machines: Sequence[Machine] = ()
    pool: sky.ComputePool | None = None

    def trees(self) -> list[tuple[int, int, list[int]]]:
        """The keeper, agent and workers of each of its nodes, as this host counts processes."""
        found = []
        pool = self.pool
        for keeper in self._keepers(pool.name) if pool is not None else ():
            for agent in _children(keeper):
                found.append((keeper, agent, _children(agent)))
        return found

    def _keepers(self, pool: str) -> Iterator[int]:
        if not self.machines:
            for folder in _home().glob(f"{pool}.*"):
                with contextlib.suppress(OSError, ValueError, KeyError):
                    yield int(json.loads((folder / "keeper.json").read_text())["pid"])
        for machine in self.machines:
            pids = {_inner(pid): pid for pid in machine.processes()}
            for file in _keeper_files(machine):
                with contextlib.suppress(OSError, ValueError, KeyError):
                    if pid := pids.get(int(json.loads(file.read_text())["pid"])):
                        yield pid


def _keeper_files(machine: Machine) -> list[Path]:
    """Return the files of a machine's keepers. Folders may vanish meanwhile, which Path.glob does not bear."""
    pattern = "root/.skypool/**/keeper.json"
    return [machine.path("/") / each for each in glob.glob(pattern, root_dir=machine.path("/"), recursive=True)]


def _home() -> Path:
    return Path(os.environ["XDG_RUNTIME_DIR"]) / f"skypool-{os.getuid()}"


def _inner(pid: int) -> int:
    """The number of a process where it runs."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return 0


def _children(parent: int) -> list[int]:
    found = []
    for pid in descendants(parent):
        with contextlib.suppress(OSError):
            if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(pid)
    return found


# --- calls ---------------------------------------------------------------------------------------------------


def work(site: Site, books: Books, chance: random.Random, until: float) -> None:
    """Pools of one site, one after the other, each with calls, maps and streams from three threads."""
    while time.monotonic() < until:
        try:
            with site.make() as pool:
                site.pool = pool
                over = min(until, time.monotonic() + chance.uniform(*LIFE))
                books.counts["pools"] += 1
                seeds = [chance.random() for _ in range(3)]
                with ThreadPoolExecutor(3) as callers:
                    for done in [callers.submit(_call, site, pool, books, random.Random(s), over) for s in seeds]:
                        done.result()
        except (*LOST, ErrorGroup, sky.SkypoolError) as e:
            books.counts[f"pool ended: {type(e).__name__}"] += 1
            if not isinstance(e, LOST) and "lost" not in str(e):
                print(f"note: {site.name}: {type(e).__name__}: {str(e)[:300]}", flush=True)
        finally:
            site.pool = None


def _call(site: Site, pool: sky.ComputePool, books: Books, chance: random.Random, until: float) -> None:
    ways = [_single, _again, _map, _stream]
    while time.monotonic() < until:
        began, number = time.monotonic(), next(books.numbers)
        way = chance.choice(ways)
        try:
            way(site, pool, books, chance, number)
            books.counts[way.__name__] += 1
        except LOST as e:
            books.counts[f"{way.__name__} {type(e).__name__}"] += 1
            if isinstance(e, PoolClosed):
                return
        except TimeoutError:
            books.trouble(f"{site.name}: {way.__name__} {number} hung")
            return
        except Exception as e:  # noqa: BLE001 - whatever else it is counts against us
            books.trouble(f"{site.name}: {way.__name__} {number} raised {type(e).__name__}: {e}")
        if (took := time.monotonic() - began) > PATIENCE:
            books.trouble(f"{site.name}: {way.__name__} {number} took {took:.0f} s")


def _good(books: Books, number: int, got: Any) -> None:
    if got != answer(number):
        books.trouble(f"call {number} gave {got!r} instead of {answer(number)}")
    books.ended_well.add(number)


def _single(site: Site, pool: sky.ComputePool, books: Books, chance: random.Random, number: int) -> None:
    books.once.add(number)
    future = mark(number, site.log, chance.choice([0.0, 0.0, 0.05, 0.5])) > pool
    _good(books, number, future.result(PATIENCE))


def _again(site: Site, pool: sky.ComputePool, books: Books, chance: random.Random, number: int) -> None:
    """A call that may run again, by contract."""
    future = mark.with_options(retries=3)(number, site.log, chance.choice([0.0, 0.3])) > pool
    _good(books, number, future.result(PATIENCE))


def _map(site: Site, pool: sky.ComputePool, books: Books, chance: random.Random, number: int) -> None:
    count = chance.choice([3, 40, 400])
    numbers = range(number, number + count)
    books.once.update(numbers)
    results = pool.map(mark, numbers, [site.log] * count, [chance.choice([0.0, 0.002, 0.02])] * count, timeout=PATIENCE)
    for each, got in zip(numbers, results, strict=False):
        _good(books, each, got)
        books.counts["results of maps"] += 1


def _stream(site: Site, pool: sky.ComputePool, books: Books, chance: random.Random, number: int) -> None:
    books.once.add(number)
    count, place = chance.choice([5, 100]), 0
    for got in items(number, site.log, count) >> pool:
        if got != answer(number + place):
            books.trouble(f"stream {number} gave {got!r} at place {place}")
        place += 1
        books.counts["items of streams"] += 1
    if place != count:
        books.trouble(f"stream {number} ended after {place} of {count} items")
    books.ended_well.add(number)


# --- what happens to them ------------------------------------------------------------------------------------


def disturb(sites: Sequence[Site], books: Books, chance: random.Random, until: float) -> None:
    """Kill, stop and cut something every now and then."""
    with ThreadPoolExecutor(8) as later:
        while time.monotonic() < until:
            time.sleep(chance.uniform(0.1, 1.0))
            site = chance.choice(sites)
            for _ in range(2 if chance.random() < 0.1 else 1):
                later.submit(_strike, site, books, random.Random(chance.random()))


def _strike(site: Site, books: Books, chance: random.Random) -> None:
    try:
        if site.machines and chance.random() < 0.3:
            machine = chance.choice(site.machines)
            machine.cut()
            try:
                time.sleep(chance.uniform(*CUT))
            finally:
                machine.mend()
            books.counts["cuts"] += 1
            return
        what = chance.choices(["worker", "agent", "keeper", "transport"], [5, 2, 2, 3])[0]
        victims = _transports(site) if what == "transport" else _of(site.trees(), what)
        if not victims:
            return
        victim = chance.choice(victims)
        kill = {"worker": 0.5, "agent": 0.15, "keeper": 0.0, "transport": 0.5}[what]
        if chance.random() < kill:
            os.kill(victim, signal.SIGKILL)
            books.counts[f"{what} killed"] += 1
            return
        os.kill(victim, signal.SIGSTOP)
        books.counts[f"{what} stopped"] += 1
        time.sleep(chance.uniform(*STOP))
        os.kill(victim, signal.SIGCONT)
    except ProcessLookupError:
        pass  # it has ended just now
    except Exception as e:  # noqa: BLE001 - a thread's error would be heard by nobody
        books.trouble(f"the disturber failed: {type(e).__name__}: {e}")


def _of(trees: list[tuple[int, int, list[int]]], what: str) -> list[int]:
    if what == "keeper":
        return [keeper for keeper, _, _ in trees]
    return [agent for _, agent, _ in trees] if what == "agent" else [each for _, _, some in trees for each in some]


def _transports(site: Site) -> list[int]:
    """The programs on this machine that carry the links of a site: `ssh` to its machines, or the local holder."""
    found = []
    for pid in _children(os.getpid()):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            ssh = any(machine.address.encode() in part for machine in site.machines for part in command)
            local = not site.machines and b"take(8)" in b" ".join(command)
            found += [pid] if ssh or local else []
    return found


# --- all of it -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _place() -> Iterator[Path]:
    """A folder for nodes, ledger and logs; nothing of this run is elsewhere."""
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        os.environ |= {"XDG_RUNTIME_DIR": name, "XDG_STATE_HOME": f"{name}/state", "XDG_CACHE_HOME": f"{name}/cache"}
        yield Path(name)


def _sites(place: Path, lab: Lab | None) -> list[Site]:
    def local(name: str, nodes: int, slots: int) -> Site:
        log = place / f"{name}.log"
        return Site(
            name, lambda: sky.ComputePool(nodes=nodes, slots=slots, liveness=LIVENESS, console="off"), str(log), [log]
        )

    def remote(name: str, nodes: int) -> Site:
        assert lab is not None
        machines = [lab.machine(keys=[lab.public_key]) for _ in range(nodes)]
        hosts = [sky.Host(each.address, host_key=each.host_key) for each in machines]
        provider = sky.SSH(hosts=hosts, user="root", identity=str(lab.client_key))
        log = "/var/tmp/soak.log"
        return Site(
            name,
            lambda: sky.ComputePool(provider, nodes=nodes, slots=2, liveness=LIVENESS, lease=LEASE, console="off"),
            log,
            [each.path(log) for each in machines],
            machines,
        )

    sites = [local("one", 1, 2), local("two", 2, 1), local("three", 3, 2), local("four", 1, 4)]
    return sites + (
        [local("five", 2, 2), local("six", 1, 1)] if lab is None else [remote("far", 2), remote("farther", 1)]
    )


def _count_runs(sites: Sequence[Site], books: Books) -> None:
    runs: Counter[int] = Counter()
    for site in sites:
        for log in site.logs:
            if log.exists():
                runs.update(map(int, log.read_text().split()))
    for number in sorted(books.once):
        if runs[number] > 1:
            books.trouble(f"call {number} ran {runs[number]} times")
    for number in sorted(books.ended_well):
        if not runs[number]:
            books.trouble(f"call {number} gave a value and never ran")
    books.counts["runs"] = sum(runs.values())


def _look_for_leftovers(place: Path, sites: Sequence[Site], before: set[int], mounts: str, books: Books) -> None:
    def left() -> list[str]:
        found = [f"folder {each}" for each in _home().glob("*")] if _home().exists() else []
        found += [f"process {pid}" for pid in _processes_of(str(place))]
        for machine in [machine for site in sites for machine in site.machines]:
            now = {each: name for each, name in machine.processes().items() if each not in before}
            found += [f"process {each} ({name}) of {machine.name}" for each, name in now.items() if "python" in name]
            found += [f"{each} of {machine.name}" for each in _keeper_files(machine)]
        return found

    until = time.monotonic() + PATIENCE
    while (found := left()) and time.monotonic() < until:
        time.sleep(0.5)
    for each in found:
        books.trouble(f"left behind: {each}")
    own = {machine.lab.run.folder.name for site in sites for machine in site.machines}
    now = Path("/proc/self/mounts").read_text().splitlines()
    if new := {each for each in now if not _of_another_lab(each, own)} - set(mounts.splitlines()):
        books.trouble(f"left behind: mounts {sorted(new)}")


def _of_another_lab(mount: str, own: set[str]) -> bool:
    """Return whether a line of /proc/self/mounts is of a machine or a Docker daemon of other tests."""
    named = re.search(r"(?:/skypool-lab/runs/|/netns/lab-|/skypool-docker-)(\w+)", mount)
    return named is not None and named[1] not in own


def _processes_of(place: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if place.encode() in (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def run(seed: int, minutes: float) -> Books:
    """Run it all; what it found is in `troubles`."""
    books, chance = Books(), random.Random(seed)
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(_place())
        lab = None if unavailable() else stack.enter_context(Lab())
        if lab is None:
            print(f"without machines: {unavailable()}")
        sites = _sites(place, lab)
        before = {pid for site in sites for machine in site.machines for pid in machine.processes()}
        mounts = Path("/proc/self/mounts").read_text()
        until = time.monotonic() + 60 * minutes
        seeds = [random.Random(chance.random()) for _ in range(len(sites) + 1)]
        with ThreadPoolExecutor(len(sites) + 1) as threads:
            under = [threads.submit(work, site, books, own, until) for site, own in zip(sites, seeds[1:], strict=True)]
            under.append(threads.submit(disturb, sites, books, seeds[0], until))
            for each in under:
                try:
                    each.result(60 * minutes + 3 * PATIENCE)
                except Exception as e:  # noqa: BLE001 - found, like everything else
                    books.trouble(f"{type(e).__name__}: {e}")
        _count_runs(sites, books)
        _look_for_leftovers(place, sites, before, mounts, books)
    return books


def main(argv: Sequence[str] | None = None) -> int:
    """Run it, print what happened and what it found; 1 if that is anything."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.pools", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="what happens when; threads and processes add chance")
    parser.add_argument("--minutes", type=float, default=10.0)
    asked = parser.parse_args(argv)
    books = run(asked.seed, asked.minutes)
    for what, count in sorted(books.counts.items()):
        print(f"{count:>8} {what}")
    print(f"seed {asked.seed}, {asked.minutes:g} minutes: {len(books.troubles)} troubles")
    return 1 if books.troubles else 0


if __name__ == "__main__":
    sys.exit(main())
