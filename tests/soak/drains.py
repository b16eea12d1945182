"""What is saved before machines end, and that they end in time: random folders, stores, and ends.

    python -m tests.soak.drains --times 200 --seed 1
    python -m tests.soak.drains --times 20 --never-drains     # finds what is lost, and so must fail

In each world, a machine of a cloud saves a folder over a way that carries so many bytes in a second. A program writes
into it, sometimes faster than that, and much at once shortly before the end. Then the pool ends in one of `KINDS`. What
the program wrote is compared with what the store has, and the cloud's bill with the limit of the pool.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import skypool as sky
from skypool import events
from skypool.pool.saving import Saving
from skypool.testing import FakeCloud, Stock
from tests.bill import bill
from tests.lab import stores
from tests.lab.work import keep_writing
from tests.soak._faulty_way import FaultyWay

KINDS = ("leave", "stop", "lifetime", "client", "agent", "smaller")
KEYS = ("SAVE_ID", "SAVE_SECRET")
PATIENCE = 120.0
"""Seconds within which something must happen that is not measured."""
OVERHEAD = 5.0
"""Seconds of the time to save that are not for sending: calls are stopped first, and files are looked at."""
MARGIN = 1.5
"""By what the seconds for sending are multiplied. Requests have heads, and this computer has other things to do."""
LATE = 5.0
"""Seconds after the end of a lease in which a machine has ended without its client."""


def client(said: Mapping[str, Any]) -> int:
    """Be the client of a world. Print the last state of each folder."""
    last: dict[int, events.FolderSaved] = {}
    notices: list[str] = []

    def hear(event: object) -> None:
        if isinstance(event, events.FolderSaved):
            last[event.node] = event
        elif isinstance(event, events.Notice) and "perhaps saved nowhere" in event.text:
            notices.append(event.text)

    bucket = sky.Bucket(f"s3://models/{said['prefix']}", said["endpoint"], keys=KEYS)
    pool = sky.ComputePool(
        FakeCloud(said["cloud"]), slots=1, console="off", save={"out": bucket}, liveness=8, **said["options"]
    )  # fmt: skip
    pool.events.listen(hear)
    kind, number = said["kind"], int(said["options"].get("nodes", 1))
    goes_on = kind not in ("leave", "smaller")
    ended = ""
    try:
        with pool:
            sizes, rate, burst, seconds = said["writes"]
            calls = [
                pool.submit(keep_writing, said["log"], f"of-{each}", sizes, rate, burst, seconds, goes_on)
                for each in range(number)
            ]
            if kind == "stop":
                sys.stdin.readline()
                pool.stop()
            if kind == "smaller":
                calls[1].result()
                pool.resize(1)
            for going in calls:
                going.result()
    except (sky.LifetimeExceeded, sky.ConnectionLost, sky.PoolClosed) as e:
        ended = f"{type(e).__name__}: {e}"
    told = [{"unsaved": each.unsaved, "whole": each.whole, "phase": each.phase} for each in last.values()]
    print(json.dumps({"folders": told, "notices": notices, "ended": ended}), flush=True)
    return 0


@contextlib.contextmanager
def nothing_is_drained() -> Iterator[None]:
    """Have pools end without saving what is left."""
    begin = Saving.begin
    with (
        mock.patch.object(Saving, "end", return_value=None),
        mock.patch.object(Saving, "begin", lambda *args, **options: begin(*args, **{**options, "drain": 0.0})),
    ):
        yield


class Trouble(Exception):
    """Something did not happen in a world."""


@dataclass
class World:
    """A pool, and what is found when it has ended.

    Attributes:
        wrong: what is wrong.
        fits: True if all could be saved.
        lost: the number of files that are not saved.
        needed: the seconds that sending takes what was left when the last file was written, and `bound` those that
            there were for it.
        early: the seconds between its end and its limit; None if it has none.
    """

    folder: Path
    kind: str
    chance: random.Random
    store: stores.Store
    drains: bool = True
    wrong: list[str] = field(default_factory=list[str])
    fits: bool = True
    lost: int = 0
    needed: float = 0.0
    bound: float = 0.0
    early: float | None = None

    def live(self) -> None:
        """Let the pool live and end, and compare."""
        self.folder.mkdir(parents=True)
        chance = self.chance
        self.rate = chance.choice((2e5, 5e5, 1e6))
        self.drain = chance.choice((12.0, 16.0, 20.0))
        self.lease = chance.choice((24.0, 40.0))
        self.limit = 5 * self.drain + chance.uniform(2, 10)
        self.cloud = FakeCloud(self.folder / "cloud", [Stock()])
        list(self.cloud.instances())
        self.prefix = f"runs/{self.folder.name}"
        self.log = self.folder / "log"
        self.sent: list[tuple[float, int]] = []
        with FaultyWay(self.store.endpoint, random.Random(chance.random()), self.rate) as self.way:
            try:
                self._live()
                self._compare()
            except Trouble as e:
                self.wrong.append(str(e))
            finally:
                self._close()

    # --- what happens ------------------------------------------------------------------------------------------

    def _live(self) -> None:
        self._begin()
        if self.kind in ("stop", "client", "agent"):
            self._wait(lambda: any(each["does"] == "burst" for each in self._notes()), "the last files")
            time.sleep(self.chance.uniform(0, 2))
        if self.kind == "stop":
            assert self.process.stdin is not None
            self.process.stdin.write(b"\n")
            self.process.stdin.flush()
        self.killed = time.time()
        if self.kind == "client":
            self.process.kill()
        if self.kind == "agent":
            os.kill(self._agent(), signal.SIGKILL)
        self._wait(lambda: self.process.poll() is not None, "the end of the client", 10 * self.drain + PATIENCE)
        self._wait(lambda: not self.cloud.instances(), "the end of all machines")

    def _begin(self) -> None:
        chance = self.chance
        options: dict[str, Any] = {"drain": self.drain, "lease": self.lease}
        if self.kind == "lifetime":
            options["max_lifetime"] = self.limit
        elif self.kind == "smaller":
            options["nodes"] = 2
        sizes = [int(10 ** chance.uniform(3, 5.3)) for _ in range(20)]
        bound = min(self.drain, self.lease / 2) if self.kind == "client" else self.drain
        burst = int(self.rate * bound * chance.choice((0.1, 0.2, 0.3, 1.5)))
        seconds = chance.uniform(1, 15)
        said = {
            "kind": self.kind, "endpoint": self.way.endpoint, "prefix": self.prefix, "cloud": str(self.cloud.state),
            "options": options, "log": str(self.log), "drains": self.drains,
            "writes": (sizes, self.rate * chance.choice((0.1, 0.3, 0.6, 1.1)), max(1, burst), seconds),
        }  # fmt: skip
        places = {f"XDG_{name}_HOME": str(self.folder / name.lower()) for name in ("STATE", "CACHE")}
        keys = dict(zip(KEYS, ("run", stores.secret_of("run")), strict=True))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **places, **keys}
        argv = [sys.executable, "-m", "tests.soak.drains", "--client", json.dumps(said)]
        with (self.folder / "said").open("wb") as out:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=out, stderr=out, cwd=self.folder, env=env
            )

    def _wait(self, check: Any, what: str, within: float = PATIENCE) -> None:
        """Wait until something is true, and note meanwhile how much was sent when."""
        until = time.monotonic() + within
        while not check():
            now = time.monotonic()
            self.sent.append((now, self.way.sent))
            if now > until:
                raise Trouble(f"{what} did not happen within {within:g} s: {self._said()}")
            time.sleep(0.05)

    def _notes(self) -> list[dict[str, Any]]:
        text = self.log.read_text() if self.log.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def _said(self) -> str:
        return (self.folder / "said").read_text()[-1500:]

    def _agent(self) -> int:
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_ours = os.readlink(place / "cwd").startswith(f"{self.folder}/")
                if is_ours and (place / "comm").read_text().startswith("skypool-agent"):
                    return int(place.name)
        raise Trouble(f"there is no agent: {self._said()}")

    # --- what is found -----------------------------------------------------------------------------------------

    def _compare(self) -> None:
        notes = self._notes()
        begun = {each["name"]: each for each in notes if each["does"] == "write"}
        wrote = {each["name"]: each for each in notes if each["does"] == "wrote"}
        if not wrote:
            raise Trouble(f"nothing was written: {self._said()}")
        there = self._there()
        for name, data in there.items():
            if not name.endswith(".part") and hashlib.sha256(data).hexdigest() != begun[name]["sha256"]:
                self.wrong.append(f"{name} is torn")
        lost = wrote.keys() - there.keys()
        self.lost = len(lost)
        last = max(each["at"] for each in wrote.values())
        before = max((count for at, count in self.sent if at <= last), default=0)
        left = max(0, sum(each["size"] for each in wrote.values()) - before)
        self.needed = left / self.rate
        self.bound = min(self.drain, self.lease / 2) if self.kind == "client" else self.drain
        self.fits = self.needed * MARGIN + OVERHEAD <= self.bound
        if lost and self.fits:
            self.wrong.append(f"{len(lost)} of {len(wrote)} files are not saved: {sorted(lost)[:3]}")
        if self.kind != "client":
            self._compare_told(len(lost))
        self._compare_end()

    def _there(self) -> dict[str, bytes]:
        """Return the files that the store has, by their names."""
        s3 = stores.client(self.store.endpoint)
        found = {}
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket="models", Prefix=f"{self.prefix}/of-"):
            for each in page.get("Contents", ()):
                name = each["Key"].rpartition("/")[2]
                found[name] = s3.get_object(Bucket="models", Key=each["Key"])["Body"].read()
        return found

    def _compare_told(self, lost: int) -> None:
        """A client says at the end how many files are saved nowhere, unless the node is lost with its agent."""
        said = json.loads(self._said().splitlines()[-1])
        told = said["folders"]
        unsaved = sum(each["unsaved"] for each in told)
        if lost and not unsaved and not said["notices"]:
            self.wrong.append(f"{lost} files are saved nowhere, and nobody is told: {told}")
        if not lost and self.kind != "agent" and any(not each["whole"] for each in told) and self.fits:
            self.wrong.append(f"all is saved, but nobody is told so: {told}")

    def _compare_end(self) -> None:
        """Compare the cloud's bill with the limit."""
        items = [*bill(Path(str(self.cloud.state), "events"), time.time()).values()]
        if any(each.ended is None for each in items):
            self.wrong.append("a machine lives on")
            return
        if self.kind == "lifetime":
            self.early = self.limit - sum(each.seconds for each in items)
        elif self.kind == "client":
            self.early = self.killed + self.lease + LATE - max(each.ended or 0.0 for each in items)
        if self.early is not None and self.early < 0:
            self.wrong.append(f"it ended {-self.early:.2f} s after its limit")

    def _close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        with contextlib.suppress(sky.SkypoolError):
            self.cloud.terminate(self.cloud.instances())
        s3 = stores.client(self.store.endpoint)
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket="models", Prefix=f"{self.prefix}/"):
            for each in page.get("Contents", ()):
                s3.delete_object(Bucket="models", Key=each["Key"])


@dataclass
class Done:
    """What was found in many worlds.

    Attributes:
        worlds: how many of each kind.
        full: how many saved all, and `fit` how many had the time for it.
        late: the least seconds between an end and its limit, by kind.
        troubles: what was wrong.
    """

    worlds: Counter[str] = field(default_factory=Counter[str])
    full: Counter[str] = field(default_factory=Counter[str])
    fit: Counter[str] = field(default_factory=Counter[str])
    early: dict[str, float] = field(default_factory=dict[str, float])
    troubles: list[str] = field(default_factory=list[str])

    def add(self, world: World, name: str) -> None:
        self.worlds[world.kind] += 1
        self.full[world.kind] += not world.lost
        self.fit[world.kind] += world.fits
        if world.early is not None:
            self.early[world.kind] = min(world.early, self.early.get(world.kind, world.early))
        self.troubles += [f"{name}: {each}" for each in world.wrong]


def soak(times: int, seed: int, beside: int, kinds: Sequence[str] = KINDS, drains: bool = True) -> Done:
    """Have so many worlds, spread equally over the kinds; `beside` of them at the same time."""
    done = Done()
    with tempfile.TemporaryDirectory(prefix="soak-") as top:
        (Path(top) / "store").mkdir()
        with stores.seaweedfs(Path(top) / "store", 200) as store:

            def live(number: int) -> tuple[World, str]:
                kind = kinds[number % len(kinds)]
                chance = random.Random(f"{seed} {number} {kind}")
                world = World(Path(top) / f"w{number}", kind, chance, store, drains)
                began = time.monotonic()
                world.live()
                shutil.rmtree(world.folder, ignore_errors=True)
                had = f"{world.needed:4.1f} of {world.bound:4.1f} s, {world.lost:3} files lost"
                told = "; ".join(world.wrong) or "fine"
                print(f"{number:4} {kind:8} {time.monotonic() - began:5.1f} s  {had}  {told}", flush=True)
                return world, f"seed {seed}, world {number}, {kind}"

            with ThreadPoolExecutor(beside) as threads:
                for world, name in threads.map(live, range(times)):
                    done.add(world, name)
    return done


def main(argv: Sequence[str] | None = None) -> int:
    """Have worlds, and print what was found; 1 if that is anything."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.drains", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="what happens when; processes add chance")
    parser.add_argument("--times", type=int, default=200, help="the number of worlds")
    parser.add_argument("--beside", type=int, default=4, help="how many of them live at the same time")
    parser.add_argument("--kinds", default=",".join(KINDS), help="the kinds of ends, with commas between them")
    parser.add_argument("--never-drains", action="store_true", help="save nothing at the end, which must be found")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.client:
        said = json.loads(asked.client)
        with contextlib.nullcontext() if said["drains"] else nothing_is_drained():
            return client(said)
    if why := stores.missing_s3():
        print(f"there is no store: {why}")
        return 0
    done = soak(asked.times, asked.seed, asked.beside, asked.kinds.split(","), not asked.never_drains)
    for kind, count in done.worlds.items():
        early = f", {done.early[kind]:.1f} s before the limit at least" if kind in done.early else ""
        print(f"{kind:8} {count} worlds, {done.fit[kind]} had time to save all, {done.full[kind]} did{early}")
    print(*done.troubles, sep="\n")
    return 1 if done.troubles else 0


if __name__ == "__main__":
    sys.exit(main())
