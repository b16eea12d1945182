"""Gangs on machines, one rank of which ends in some way: the rank that began is named, and the others are gone in time.

    python -m tests.soak.ranks --runs 20 --seed 1

The machines are four of the lab, over SSH, with two processes each. In half of the runs the gang may run again, and
must then return the right values. After each run no process of it may be left, and its port must be free.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import skypool as sky
from skypool import events
from skypool.errors import CallTimeout, ConnectionLost, RemoteError, WorkerDied
from tests.lab.machines import Lab, Machine, unavailable

NODES = 4
PROCS = 2
WORLD = NODES * PROCS
GRACE = 1.0
LIVENESS = 6.0
TIMEOUT = 6.0
BOOT = 60.0
"""Seconds that a machine may take to be replaced."""
SLACK = 10.0
"""Seconds that a run may take beside detection and grace: a machine with two cores runs everything here."""


@dataclass(frozen=True)
class Way:
    """A way for one rank to end.

    Attributes:
        name: its name.
        kind: the class of the error that is raised.
        detection: seconds within which it is known.
        whole: True if the whole node goes, so that its first rank counts.
    """

    name: str
    kind: type[BaseException]
    detection: float = 0.0
    whole: bool = False


WAYS = (
    Way("raise", KeyError),
    Way("exit", RemoteError),
    Way("_exit", WorkerDied),
    Way("SIGKILL", WorkerDied),
    Way("SIGSEGV", WorkerDied),
    Way("hang", CallTimeout, TIMEOUT),
    Way("power", ConnectionLost, LIVENESS, whole=True),
    Way("cut", ConnectionLost, LIVENESS, whole=True),
)


@sky.compute(procs=PROCS, grace=GRACE, output="silent")
def together(how: str, rank: int) -> list[int]:
    """Meet the other ranks, then end as `how` says on one rank of the first run. Others wait for it on their sockets.

    Returns the ranks that met.
    """
    import os
    import signal
    import socket
    import time

    me = sky.instance_info()
    where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    peers: list[socket.socket] = []
    if me.rank:
        until = time.monotonic() + 60
        while not peers:
            try:
                peers.append(socket.create_connection(where, timeout=60))
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.02)
        peers[0].sendall(bytes([me.rank]))
        met = list(peers[0].recv(64))
        peers[0].settimeout(None)
    else:
        server = socket.create_server(where)
        peers = [server.accept()[0] for _ in range(me.world_size - 1)]
        met = sorted([0, *(peer.recv(1)[0] for peer in peers)])
        for peer in peers:
            peer.sendall(bytes(met))
    if me.attempt > 1 or how == "none":
        return met
    if me.rank == rank:
        time.sleep(0.05)
        if how == "raise":
            raise KeyError("the rank that began")
        if how == "exit":
            raise SystemExit(3)
        if how == "_exit":
            os._exit(5)
        if how.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, how))
        time.sleep(600)
    if how == "hang":
        return met
    while True:  # as in a collective: whoever is connected to a rank that dies gets an error at once
        for peer in peers:
            if not peer.recv(1):
                raise ConnectionResetError(f"rank {me.rank} lost a peer")


class Machines:
    """The machines of a pool, and how the one of a node loses its power or its line.

    Args:
        lab: makes the machines.
    """

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self.there = [lab.machine(keys=[lab.public_key]) for _ in range(NODES + 1)]  # one to replace another
        for each in self.there:
            each.wait_for_ssh()

    def provider(self) -> sky.SSH:
        hosts = [sky.Host(each.address, host_key=each.host_key) for each in self.there]
        return sky.SSH(hosts=hosts, user="root", identity=str(self._lab.client_key))

    def of(self, address: str) -> Machine:
        return next(each for each in self.there if each.address == address)

    def replace(self, machine: Machine) -> None:
        """Destroy a machine, and make another one in its place."""
        machine.destroy()
        self.there.remove(machine)
        self.there.append(self._lab.machine(keys=[self._lab.public_key]))
        self.there[-1].wait_for_ssh()


def started(machines: Machines) -> sky.ComputePool:
    """Return a pool that was started. On a busy computer, a machine may first take longer than `LIVENESS` to answer."""
    for attempts_left in (2, 1, 0):
        pool = sky.ComputePool(machines.provider(), nodes=NODES, console="off", liveness=LIVENESS, lease=60)
        try:
            return pool.start()
        except ConnectionLost:
            if not attempts_left:
                raise
    raise AssertionError("not reached")


def run(machines: Machines, way: Way, rank: int, again: bool) -> tuple[float, list[str]]:
    """Run one gang that fails on one rank.

    Returns:
        (seconds, troubles): how long the gang took from the moment of the failure (roughly), and what was wrong.
    """
    troubles: list[str] = []
    failures: list[events.GangFailed] = []
    with started(machines) as pool:
        ready = sorted(node for node, word in pool.nodes.items() if word == "ready")
        where = {node: sky.compute(_address)().with_options(node=node) >> pool for node in ready}
        pool.events.listen(lambda e: failures.append(e) if isinstance(e, events.GangFailed) else None)
        victim = ready[rank // PROCS]
        call = together(way.name, rank).with_options(node="all", timeout=TIMEOUT if way.name == "hang" else 120)
        future = (call.with_options(retries=1, retry_on=KeyError) if again else call) > pool
        machine = machines.of(where[victim])
        if way.whole:
            _until(lambda: _ranks(machines) >= WORLD or future.done(), "all ranks")
            time.sleep(0.5)
            machine.kill() if way.name == "power" else machine.cut()
        began = time.monotonic()
        limit = way.detection + GRACE + 2 + SLACK
        try:
            values = future.result(timeout=limit + (BOOT if again else 0) + 60)
        except BaseException as e:  # noqa: BLE001 - it is compared below
            spent = time.monotonic() - began
            troubles += _unlike(e, way, rank, again)
            if spent > limit and not again:
                troubles.append(f"it took {spent:.1f} s, over {limit:.1f}")
        else:
            spent = time.monotonic() - began
            if not again or way.name == "hang":
                troubles.append(f"it returned {values}")
            elif values != [list(range(WORLD))] * WORLD:
                troubles.append(f"wrong values: {values}")
        with contextlib.suppress(TimeoutError):  # then none is named
            _until(lambda: failures, "event", 5.0)
        named = [(each.rank, each.node) for each in failures]
        first = rank - rank % PROCS if way.whole else rank
        if way.name != "hang" and named[:1] != [(first, victim)]:
            troubles.append(f"blamed {named}, and rank {first} began")
        _until(lambda: not _ranks(machines, but=where[victim] if way.whole else ""), "processes gone")
    if way.whole:
        machines.replace(machine)
    return spent, troubles


def _address() -> str:
    return sky.instance_info().address


def _ranks(machines: Machines, but: str = "") -> int:
    """Return how many processes of gangs there are on the machines that run, except one."""
    running = [each for each in machines.there if each.is_running and each.address != but]
    return sum(name.startswith("skypool-rank") for each in running for name in each.processes().values())


def _until(check: Callable[[], object], what: str, within: float = 60.0) -> None:
    began = time.monotonic()
    while not check():
        if time.monotonic() - began > within:
            raise TimeoutError(f"{what} did not happen within {within:g} s")
        time.sleep(0.05)


def _unlike(error: BaseException, way: Way, rank: int, again: bool) -> list[str]:
    """Return what is wrong with the error of a gang."""
    if not isinstance(error, way.kind):
        return [f"{type(error).__name__} in place of {way.kind.__name__}: {error}"]
    if again and way.name not in ("hang", "exit"):
        return [f"it did not run again: {type(error).__name__}: {error} {getattr(error, '__notes__', '')}"]
    if way.name == "hang" and f"had not ended: rank {rank} " not in str(error):
        return [f"a rank that hangs was not named: {error}"]
    return []


def main(argv: Sequence[str] | None = None) -> int:
    """Run each way so many times, and print a table; 1 if something was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.ranks", description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="of each way")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ways", nargs="*", default=[way.name for way in WAYS])
    asked = parser.parse_args(argv)
    if reason := unavailable():
        print(f"the lab cannot be used: {reason}")
        return 0
    draw = random.Random(asked.seed)
    wrong: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as home, Lab() as lab:
        import os

        os.environ.update(XDG_STATE_HOME=str(Path(home) / "state"), XDG_CACHE_HOME=str(Path(home) / "cache"))
        machines = Machines(lab)
        for way in WAYS:
            if way.name not in asked.ways:
                continue
            times = []
            for number in range(asked.runs):
                rank = draw.randrange(WORLD)
                spent, troubles = run(machines, way, rank, again=number % 2 == 1)
                times.append(spent)
                for trouble in troubles:
                    wrong[way.name] += 1
                    print(f"{way.name}, run {number}, rank {rank}: {trouble}", flush=True)
            print(f"{way.name}: {asked.runs} runs, longest {max(times):.1f} s, wrong {wrong[way.name]}", flush=True)
        for each in machines.there:
            each.destroy()
    print(f"seed {asked.seed}: {sum(wrong.values())} troubles")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
