"""Checkpoints of gangs under faults: whole, of one attempt, and never older than what was said to be safe.

    python -m tests.soak.checkpoints --times 300 --seed 1
    python -m tests.soak.checkpoints --times 20 --kinds late,client

The kinds `notice120`, `notice30` and `notice10` are spot notices so many seconds before a machine is gone: all
processes save the checkpoint of one agreed step, and go on from it. The rest of a long notice is then skipped.

Four processes on two machines write checkpoints into a bucket of SeaweedFS. At a random moment something fails, the
program is started again, by skypool or by another client, and when it has saved checkpoints, the next fault comes.
`tests.lab.work.keep_checkpoints` is the program. A fault must never depend on how fast this computer is, so each step
waits for what it needs. At the end, `tests.soak._bucket_check` reads the bucket and what the program has noted.
"""

from __future__ import annotations

import argparse
import contextlib
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import skypool as sky
from skypool.testing import FakeCloud, Stock
from tests.lab import stores
from tests.lab.machines import Lab, Machine, unavailable
from tests.lab.work import keep_checkpoints
from tests.soak import _bucket_check, _clocks
from tests.soak._faulty_way import FAULTS, FaultyWay

ROOT = Path(__file__).parents[2]
WORLD = 4
PAUSE = 0.1
"""Seconds between two checkpoints of a rank."""
AHEAD = (3, 3, 6, 25)
"""Steps that a rank may be ahead of what is safe."""
FEW_AHEAD = (3, 6)
"""The same before a notice, which must leave the time to send what is not safe yet."""
RARE = 15.0
"""Seconds within which a mover sends something, if all is well."""
PATIENCE = 150.0
"""Seconds within which something must happen that does not depend on a fault any more."""
LEASE = 15.0
LIVENESS = 8.0
KEYS = ("SAVE_ID", "SAVE_SECRET")
NOTICES = {"notice120": 120.0, "notice30": 30.0, "notice10": 10.0}
"""The seconds of notice of each kind."""
JUMPS = (-600, -60, -5, 5, 60, 600)
"""Seconds by which clocks are wrong. Stores refuse requests of a clock that is wrong by more than 15 minutes."""
LONG = 10.0
"""A longer notice is not awaited, once all processes have saved."""


# --- the client ------------------------------------------------------------------------------------------------


def client(said: Mapping[str, Any]) -> int:
    """Be the client of a gang that writes checkpoints. Return 0 if it ends, and 3 if nodes are lost."""
    made: dict[str, Any] = {"provider": "local"}
    if "cloud" in said:
        cloud = FakeCloud(said["cloud"])
        if "python" in said:
            access = cloud.access
            object.__setattr__(cloud, "access", lambda one: replace(access(one), python=said["python"]))
        made = {"provider": cloud}
    elif "hosts" in said:
        hosts = [sky.Host(address, host_key=key) for address, key in said["hosts"]]
        made = {"provider": sky.SSH(hosts=hosts, user="root", identity=said["identity"])}
    bucket = sky.Bucket(f"s3://models/{said['prefix']}", said["endpoint"], keys=KEYS)
    pool = sky.ComputePool(
        **made, nodes=said["nodes"], slots=1, console="off", save={"ckpt": bucket}, lease=LEASE, liveness=LIVENESS
    )  # fmt: skip
    try:
        with pool:
            call = keep_checkpoints(said["log"], PAUSE, said["ahead"])
            _ = call.with_options(node="all", retries=9, procs=WORLD // said["nodes"]) @ pool
    except sky.ConnectionLost as e:
        print(f"lost: {e}", file=sys.stderr, flush=True)
        return 3
    return 0


# --- worlds ----------------------------------------------------------------------------------------------------


class Trouble(Exception):
    """Something was wrong in a world."""


def until(check: Callable[[], object], what: str, within: float = PATIENCE) -> None:
    """Wait until something is true."""
    began = time.monotonic()
    while not check():
        if time.monotonic() - began > within:
            raise Trouble(f"{what} did not happen within {within:g} s")
        time.sleep(0.05)


@dataclass
class World:
    """A program with checkpoints, the machines on which it runs, and its place in the bucket.

    Args:
        folder: for all files of the world.
        way: leads to the store.
        store: the store itself.
        chance: decides what happens when.
        aheads: the steps that a rank may be ahead of what is safe, of which each client takes one.
    """

    folder: Path
    way: FaultyWay
    store: stores.Store
    chance: random.Random
    nodes: int = 2
    aheads: Sequence[int] = AHEAD
    clients: int = field(default=0, init=False)
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    faults: int = field(default=0, init=False)
    errors: int = field(default=0, init=False)
    _noticed: int | None = field(default=None, init=False)
    _stopped: list[int] = field(default_factory=list[int], init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.prefix = f"runs/{self.folder.name}"
        FakeCloud(self.folder / "cloud", [Stock()]).instances()

    # --- the program -------------------------------------------------------------------------------------------

    def logs(self, number: int) -> list[Path]:
        """Return where the program of a client notes what it finds, as this computer sees it."""
        return [self.folder / f"log-{number}"]

    def where(self) -> dict[str, Any]:
        """Say where a client finds its machines."""
        return {"cloud": str(self.folder / "cloud"), "log": str(self.logs(self.clients)[0])}

    def begin(self) -> None:
        """Start a client, whose machines are new."""
        self.clients += 1
        cwd = self.folder / f"client-{self.clients}"
        cwd.mkdir()
        (self.folder / "run").mkdir(exist_ok=True)
        said = {"endpoint": self.way.endpoint, "prefix": self.prefix, "nodes": self.nodes, **self.where()}
        said["ahead"] = self.chance.choice(self.aheads)
        places = {
            f"XDG_{name}": str(self.folder / path) for name, path in (("STATE_HOME", "state"), ("RUNTIME_DIR", "run"))
        }
        keys = dict(zip(KEYS, ("run", stores.secret_of("run")), strict=True))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **places, **keys}
        argv = [sys.executable, "-m", "tests.soak.checkpoints", "--client", json.dumps(said)]
        with (cwd / "said").open("wb") as out:
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=cwd, env=env)

    def lines(self, number: int = 0) -> list[dict[str, Any]]:
        """Return what the program has noted so far, with all clients or the one of this number."""
        numbers = [number] if number else range(1, self.clients + 1)
        texts = [file.read_text() for each in numbers for log in self.logs(each) for file in log.glob("rank-*")]
        return [json.loads(line) for text in texts for line in text.split("\n")[:-1]]

    def going(self, but: frozenset[str] = frozenset()) -> str:
        """Return the start of the program whose ranks are all told that newer checkpoints are safe; "" if none is."""
        told: dict[str, set[int]] = {}
        for each in self.lines(self.clients):
            if each["what"] == "safe" and each["step"] is not None and each["step"] > each["first"]:
                told.setdefault(each["start"], set()).add(each["rank"])
        return next((start for start, ranks in told.items() if len(ranks) == WORLD and start not in but), "")

    def starts(self) -> frozenset[str]:
        return frozenset(each["start"] for each in self.lines())

    def go_on(self, but: frozenset[str] = frozenset()) -> None:
        """Wait until another attempt has saved checkpoints, and start a client if that one has ended."""

        def goes() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                if self.process.returncode != 3:
                    raise Trouble(f"the client has ended with {self.process.returncode}: {self.said()}")
                self.begin()
            return bool(self.going(but))

        until(goes, "checkpoints of the next attempt")

    def said(self) -> str:
        """Return what the clients printed last."""
        return "\n".join(each.read_text()[-1500:] for each in sorted(self.folder.glob("client-*/said")))

    def told(self) -> str:
        """Return what is there, and what each rank has noted last."""
        last = {(each["start"], each["rank"]): each for each in self.lines()}
        there = dict(Counter(self.processes().values()))
        return f"client {self.clients}, {there}, last notes {[*last.values()][-WORLD:]}, errors {self._errors()[-3:]}"

    def _errors(self) -> list[str]:
        return [f"{each['of']}: {each['why']}" for each in self.lines() if each["what"] == "error"]

    def lapse(self, most: float = 1.5) -> None:
        """Let the program train for a while, in half of the cases until something is being sent."""
        time.sleep(self.chance.uniform(0, most))
        if self.chance.random() < 0.5:
            before, began = self.way.moves, time.monotonic()
            while self.way.moves == before and time.monotonic() - began < RARE:
                time.sleep(0.005)
            time.sleep(self.chance.uniform(0, 0.2))

    # --- processes ---------------------------------------------------------------------------------------------

    def processes(self) -> dict[int, str]:
        """Return the processes of the nodes, by what they are: keeper, agent, mover, or rank."""
        found: dict[int, str] = {}
        parents: dict[int, int] = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                place = Path("/proc", name)
                state, parent = (place / "stat").read_bytes().rpartition(b")")[2].split()[:2]
                if state == b"Z":
                    continue
                parents[int(name)] = int(parent)
                comm, words = (place / "comm").read_text().strip(), (place / "cmdline").read_bytes()
                kind = comm.removeprefix("skypool-").partition("-")[0] if comm.startswith("skypool-") else ""
                kind = "mover" if b"skypool.data.mover" in words else kind
                if kind in ("keeper", "agent", "mover", "rank") and self._is_ours(int(name)):
                    found[int(name)] = kind
        return found

    def _is_ours(self, pid: int) -> bool:
        return os.readlink(f"/proc/{pid}/cwd").startswith(f"{self.folder}/")

    def of(self, kind: str) -> list[int]:
        return sorted(pid for pid, each in self.processes().items() if each == kind)

    def kill(self, kind: str, most: int = 1) -> None:
        """Kill processes of the nodes."""
        until(lambda: self.of(kind), f"a {kind}")
        there = self.of(kind)
        for pid in self.chance.sample(there, min(most, len(there))):
            self.signal(pid, signal.SIGKILL)

    @staticmethod
    def signal(pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def kill_client(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    # --- faults ------------------------------------------------------------------------------------------------

    def fault(self, kind: str) -> None:
        """Have a fault, and wait until the next attempt has saved checkpoints."""
        before = self.starts()
        self.faults += 1
        self.ways()[kind]()
        self.go_on(before)
        self._check_notice(before)
        self._wake()

    def ways(self) -> dict[str, Callable[[], None]]:
        """Return the faults that there can be."""
        return {
            "rank": lambda: self.kill("rank"),
            "ranks": lambda: self.kill("rank", WORLD),
            "mover": self._mover,
            "agent": self._agent,
            "client": self._client,
            "late": self._late,
            **{each: lambda each=each: self._notice(NOTICES[each]) for each in NOTICES},  # type: ignore[misc]
            **{each: lambda each=each: self._store(each) for each in FAULTS},  # type: ignore[misc]
        }

    def _mover(self) -> None:
        self.kill("mover", self.chance.choice((1, 2)))
        self.lapse(3)
        self.kill("rank")

    def _agent(self) -> None:
        self.kill("agent")

    def _client(self) -> None:
        """The machines of the former client go on until their lease is over."""
        self.kill_client()
        self.begin()

    def _store(self, fault: str) -> None:
        self.way.fail(fault, self.chance.choice((1.0, 0.5)))
        self.lapse(4)
        is_during = self.chance.random() < 0.5
        if is_during:
            self.kill("rank")
            self.lapse(4)
        self.way.fail("")
        if not is_during:
            self.lapse(2)
            self.kill("rank")

    def _notice(self, seconds: float) -> None:
        """A machine is taken back. All processes save the checkpoint of one step before it is gone."""
        cloud = FakeCloud(self.folder / "cloud")
        victim = self.chance.choice(cloud.instances())
        start = max((each for each in self.lines() if each["what"] == "safe"), key=lambda each: float(each["t1"]))[
            "start"
        ]
        cloud.control.interrupt(victim, seconds)
        told: dict[int, int] = {}

        def have_saved() -> bool:
            noticed = [each for each in self.lines() if each["what"] == "noticed" and each["start"] == start]
            told.update((each["rank"], each["step"]) for each in noticed)
            return len(told) == WORLD

        until(have_saved, f"a checkpoint of all within the notice of {seconds:g} s", seconds)
        if len({*told.values()}) != 1:
            raise Trouble(f"the processes have saved different steps at the notice: {told}")
        self._noticed = told[0]
        if seconds > LONG:
            cloud.control.advance(seconds)

    def _check_notice(self, before: frozenset[str]) -> None:
        """Raise Trouble if the program goes on from another step than the one that was saved at a notice."""
        noticed, self._noticed = self._noticed, None
        found = {each["step"] for each in self.lines() if each["what"] == "latest" and each["start"] not in before}
        if noticed is not None and found != {noticed}:
            raise Trouble(f"step {noticed} was saved at the notice, and the program goes on from {found}")

    def _late(self) -> None:
        """A machine seems to be dead, but its mover only sleeps. It wakes up when the next attempt has begun."""
        movers = self.of("mover")
        for pid in movers:
            self.signal(pid, signal.SIGSTOP)
        self._stopped += movers
        for kind in ("keeper", "agent", "rank"):
            self.kill(kind, 9)
        self.kill_client()
        self.begin()

    def _wake(self) -> None:
        woken, self._stopped = self._stopped, []
        for pid in woken:
            self.signal(pid, signal.SIGCONT)
        self.lapse(2)

    # --- the end -----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Let the program end. Raise Trouble if something is wrong with its checkpoints."""
        assert self.process is not None
        own = self.going()
        until(lambda: self._strangers() == 0, "the end of former machines")
        noted = self.lines()
        last = 1000 + max(each.get("step") or 0 for each in noted)
        self.tell(last)
        try:
            code = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise Trouble(f"the program has not ended within {PATIENCE:g} s; {own}") from None
        if code:
            raise Trouble(f"the client has ended with {code}: {self.said()}")
        noted = self.lines()
        self.errors = sum(each["what"] == "error" for each in noted)
        reader = _bucket_check.Reader(stores.client(self.store.endpoint), f"{self.prefix}/")
        starts: dict[_bucket_check.Key, str] = {}
        wrong = [*_bucket_check.wholeness(reader, WORLD, starts), *_bucket_check.answers(noted, WORLD)]
        wrong += _bucket_check.end(reader, noted, last, starts)
        if wrong:
            raise Trouble("; ".join(wrong[:5]))

    def tell(self, last: int) -> None:
        """Have the program end with a checkpoint of this step."""
        for log in self.logs(self.clients):
            log.mkdir(parents=True, exist_ok=True)
            (log / "stop.new").write_text(str(last))
            (log / "stop.new").rename(log / "stop")

    def _strangers(self) -> int:
        """Return how many movers there are that are not of the present client."""
        return max(0, len(self.of("mover")) - self.nodes)

    def close(self) -> None:
        """End all that is left."""
        self._wake()
        if self.process is not None:
            self.kill_client()
        FakeCloud(self.folder / "cloud").terminate(FakeCloud(self.folder / "cloud").instances())
        while left := self.processes():
            for pid in left:
                self.signal(pid, signal.SIGKILL)
            time.sleep(0.05)
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass
class ClockWorld(World):
    """The clock of its machines can be moved. Each fault moves it, while the program runs or before it goes on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._clock = _clocks.MovedClock(self.folder / "python")

    def where(self) -> dict[str, Any]:
        return {**super().where(), "python": str(self._clock.python)}

    def ways(self) -> dict[str, Callable[[], None]]:
        return {"clock": self._jump}

    def _jump(self) -> None:
        self._clock.jump(self.chance.choice(JUMPS))
        self.lapse(4)
        self.kill("rank")

    def close(self) -> None:
        super().close()
        self._clock.clean()


class LocalWorld(World):
    """Its one node has four processes, and is a folder that stays when the node ends."""

    def where(self) -> dict[str, Any]:
        return {"log": str(self.logs(self.clients)[0])}


@dataclass
class LabWorld(World):
    """Its nodes are machines of a lab, which ssh reaches: two at work, and two for the next client.

    Args:
        lab: makes the machines.
        place: the folder of the machines with what the program notes.
    """

    lab: Lab = field(kw_only=True)
    place: str = "/root/soak"
    _broken: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]], init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.machines = [self.lab.machine(keys=[self.lab.public_key]) for _ in range(4)]

    def logs(self, number: int) -> list[Path]:
        return [each.path(f"{self.place}/log-{number}") for each in self.machines]

    def where(self) -> dict[str, Any]:
        hosts = [(each.address, each.host_key) for each in self.machines[:2]]
        return {"hosts": hosts, "identity": str(self.lab.client_key), "log": f"{self.place}/log-{self.clients}"}

    def processes(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for machine in self.machines:
            for pid, name in machine.processes().items():
                kind = name.removeprefix("skypool-").partition("-")[0]
                with contextlib.suppress(OSError):
                    is_mover = b"skypool.data.mover" in Path(f"/proc/{pid}/cmdline").read_bytes()
                    found |= {pid: "mover" if is_mover else kind}
        return {pid: kind for pid, kind in found.items() if kind in ("keeper", "agent", "mover", "rank")}

    def fault(self, kind: str) -> None:
        until(lambda: not self._keepers(self.machines[2:]), "the end of the former client's nodes")  # its lease ends
        super().fault(kind)

    @staticmethod
    def _keepers(machines: Sequence[Machine]) -> int:
        return sum(name == "skypool-keeper" for each in machines for name in each.processes().values())

    def ways(self) -> dict[str, Callable[[], None]]:
        return {"power": self._power, "link": self._link, "frozen": self._frozen, "disk": self._disk}

    def _change(self) -> None:
        """Have the next client use the other machines."""
        self.machines = self.machines[2:] + self.machines[:2]

    def _victims(self) -> list[Machine]:
        return self.chance.choice((self.machines[:1], self.machines[1:2], self.machines[:2]))

    def _power(self) -> None:
        """The program goes on on the same machines, with what was on their disks, or another client has others."""
        victims = self._victims()
        for each in victims:
            each.kill()
        for each in victims:
            each.boot()
            each.wait_for_ssh(90)
        if self.chance.random() < 0.5:
            self.kill_client()
            self._change()
            self.begin()

    def _link(self) -> None:
        """Machines are cut off. The client is given up soon, and the cut ends when the next one has saved something."""
        victims = self._victims()
        for each in victims:
            each.cut()
        self._broken += [each.mend for each in victims]
        self.lapse(12)
        self.kill_client()
        self._change()
        self.begin()

    def _frozen(self) -> None:
        """Machines stand still, and wake up when the next attempt has saved something."""
        victims = self._victims()
        for each in victims:
            each.freeze()
        self._broken += [each.thaw for each in victims]
        self.kill_client()
        self._change()
        self.begin()

    def _disk(self) -> None:
        victims = self._victims()
        for each in victims:
            each.fill_disk(self.chance.choice((0, 10_000, 1_000_000)))
        self.lapse(4)
        is_during = self.chance.random() < 0.5
        if is_during:
            self.kill("rank")
            self.lapse(4)
        for each in victims:
            each.free_disk()
        if not is_during:
            self.lapse(2)
            self.kill("rank")

    def _wake(self) -> None:
        mends, self._broken = self._broken, []
        for each in mends:
            each()
        self.lapse(2)

    def close(self) -> None:
        for each in self._broken:
            each()
        if self.process is not None:
            self.kill_client()
        for machine in self.machines:
            machine.destroy()
        shutil.rmtree(self.folder, ignore_errors=True)


FAKE = ("rank", "ranks", "mover", "agent", "client", *NOTICES, *FAULTS)
LOCAL = ("late",)
CLOCK = ("clock",)
LAB = ("power", "link", "frozen", "disk")
KINDS = (*FAKE, *LOCAL, *CLOCK, *LAB)


# --- many of them ----------------------------------------------------------------------------------------------


@dataclass
class Done:
    """What was done, and what was found.

    Attributes:
        worlds, faults: how many of each kind.
        troubles: what was wrong.
    """

    worlds: Counter[str] = field(default_factory=Counter[str])
    faults: Counter[str] = field(default_factory=Counter[str])
    troubles: list[str] = field(default_factory=list[str])


def soak(times: int, seed: int, kinds: Sequence[str] = KINDS, kept: Path | None = None, each_world: int = 2) -> Done:
    """Have so many faults, spread equally over the kinds; so many of one kind in each world.

    Args:
        kept: a folder for the worlds in which something was wrong; None to keep none.
    """
    done = Done()
    with tempfile.TemporaryDirectory(prefix="soak-") as top, contextlib.ExitStack() as stack:
        places = Places(Path(top), stack)
        number = 0
        while sum(done.faults.values()) < times:
            kind = kinds[number % len(kinds)]
            number += 1
            began = time.monotonic()
            with places.world(kind, number, random.Random(f"{seed} {number} {kind}")) as world:
                trouble = lived(world, kind, min(each_world, times - sum(done.faults.values())))
                if trouble and kept is not None:
                    with contextlib.suppress(shutil.Error):  # sockets
                        shutil.copytree(world.folder, kept / f"{seed}-{number}-{kind}", True, dirs_exist_ok=True)
            done.worlds[kind] += 1
            done.faults[kind] += world.faults
            if trouble:
                done.troubles.append(f"seed {seed}, world {number}, {kind}: {trouble}")
            spent = time.monotonic() - began
            told = f"{world.faults} faults, {world.errors} errors told, {spent:5.1f} s"
            print(f"{number:4} {kind:8} {told}  {trouble or 'fine'}", flush=True)
    return done


def lived(world: World, kind: str, faults: int) -> str:
    """Let a world live. Return what was wrong."""
    try:
        world.begin()
        world.go_on()
        for _ in range(faults):
            world.lapse()
            world.fault(kind)
        world.lapse()
        world.finish()
    except Trouble as e:
        return f"{e}; {world.told()}"
    return ""


class Places:
    """Makes worlds, and what they share: a store, and a lab with a store that its machines reach.

    Args:
        top: the folder for all of it.
        stack: ends what is made.
    """

    def __init__(self, top: Path, stack: contextlib.ExitStack) -> None:
        self._top, self._stack = top, stack

    @cached_property
    def _lab(self) -> Lab:
        return self._stack.enter_context(Lab())

    @cached_property
    def _store(self) -> stores.Store:
        return self._store_at("127.0.0.1")

    @cached_property
    def _store_of_lab(self) -> stores.Store:
        return self._store_at(self._lab.gateway)

    def _store_at(self, address: str) -> stores.Store:
        folder = self._top / f"store-{address}"
        folder.mkdir()
        return self._stack.enter_context(stores.seaweedfs(folder, 300, address))

    @contextlib.contextmanager
    def world(self, kind: str, number: int, chance: random.Random) -> Iterator[World]:
        """Yield a world in which a kind of fault can be, and end it."""
        folder = self._top / f"w{number}"
        store = self._store_of_lab if kind in LAB else self._store
        with FaultyWay(store.endpoint, random.Random(chance.random())) as way:
            made: World
            if kind in LAB:
                place = "/run/soak" if kind == "disk" else "/root/soak"
                made = LabWorld(folder, way, store, chance, lab=self._lab, place=place)
            elif kind in CLOCK:
                made = ClockWorld(folder, way, store, chance)
            elif kind in LOCAL:
                made = LocalWorld(folder, way, store, chance, nodes=1)
            else:
                aheads = FEW_AHEAD if kind in NOTICES else AHEAD
                made = World(folder, way, store, chance, aheads=aheads)
            try:
                yield made
            finally:
                made.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Have faults, and print what was found; 1 if that is anything."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.checkpoints", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seed", type=int, default=1, help="what happens when; processes add chance")
    parser.add_argument("--times", type=int, default=300, help="the number of faults")
    parser.add_argument("--each-world", type=int, default=2, help="the number of faults in each world")
    parser.add_argument("--kinds", default=",".join(KINDS), help="the kinds of faults, with commas between them")
    parser.add_argument("--kept", type=Path, help="a folder for the worlds in which something was wrong")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.client:
        return client(json.loads(asked.client))
    if why := stores.missing_s3():
        print(f"there is no store: {why}")
        return 0
    kinds = asked.kinds.split(",")
    if why := unavailable():
        print(f"the lab cannot be used: {why}")
        kinds = [each for each in kinds if each not in LAB]
    if {*kinds} & {*CLOCK} and (why := _clocks.missing()):
        print(f"no clock is moved: {why}")
        kinds = [each for each in kinds if each not in CLOCK]
    done = soak(asked.times, asked.seed, kinds, asked.kept, asked.each_world)
    for kind, count in done.worlds.items():
        print(f"{kind:8} {count} worlds, {done.faults[kind]} faults")
    print(
        f"seed {asked.seed}: {sum(done.worlds.values())} worlds, {len(done.troubles)} troubles",
        *done.troubles,
        sep="\n",
    )
    return 1 if done.troubles else 0


if __name__ == "__main__":
    sys.exit(main())
