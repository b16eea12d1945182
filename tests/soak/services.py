"""Services that are killed, whose node is lost, and whose client is killed: nothing of them is left after the lease.

    python -m tests.soak.services --runs 50 --seed 1

Each run is a program with a pool of two machines of the lab, which it reaches over ssh, and three services. A service
ignores SIGTERM, and has a process in another session. First the program or the worker process of one service is killed:
all of its processes must go, and the others must stay. Then a machine is cut off: its services must end with the lease.
At last the program is killed, and what is left on the other machine must end with the lease, too.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import skypool as sky
from skypool import events
from tests.lab.machines import Lab, Machine, unavailable

ROOT = Path(__file__).parent.parent.parent
LEASE = 8.0
LIVENESS = 5.0
LATE = 30.0
"""Seconds by which anything may be late, as this machine may be busy."""
STUBBORN = "trap '' TERM; setsid sh -c 'while :; do sleep 1; done' $1 & echo up; while :; do sleep 1; done"
"""A shell script that ignores SIGTERM, with a process in another session. Both have $1 in their command lines."""


# --- the program that is killed ----------------------------------------------------------------------------------


def client(words: Sequence[str]) -> None:
    """Start three services, tell when they are up, and then how the first two have ended.

    Args:
        words: the mark of the run, the private key, and for each machine its address and its host key.
    """
    mark, identity, *addresses = words
    hosts = [sky.Host(address, host_key=key) for address, key in zip(addresses[::2], addresses[1::2], strict=True)]
    driver = sky.SSH(hosts=hosts, user="root", identity=identity)
    pool = sky.ComputePool(
        driver, name=mark, nodes=2, slots=1, lease=LEASE, liveness=LIVENESS, console="off", order_by="cheapest"
    )
    pool.events.listen(_tell)
    pool.start()
    first, second = (node for node, state in pool.nodes.items() if state == "ready")  # others may have failed before
    with contextlib.redirect_stdout(sys.stderr):
        services = [
            pool.service(sky.cmd("sh", "-c", STUBBORN, f"{mark}-{name}", f"{mark}-{name}"), node=node, restart=again)
            for name, node, again in (("killed", first, False), ("lost", second, False), ("kept", first, True))
        ]
        while not all("up" in each.output for each in services):
            time.sleep(0.01)
    instances = [pool._engine.state.instance_of(node).id for node in (first, second)] if pool._engine else []
    _say({"up": instances})
    for service in services[:2]:
        _say({"ended": type(service.exception(300)).__name__})
    time.sleep(3600)


def _tell(event: events.Event) -> None:
    if isinstance(event, events.NodePhase) and event.detail:
        sys.stderr.write(f"{event.pool}: node {event.node} is {event.phase}: {event.detail}\n")


def _say(words: dict[str, object]) -> None:
    sys.__stdout__.write(f"@{json.dumps(words)}\n")  # type: ignore[union-attr]  # it is there
    sys.__stdout__.flush()  # type: ignore[union-attr]  # it is there


# --- a run -------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One run, and what was wrong in it."""

    number: int
    chance: random.Random
    troubles: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def check(self, machine: Machine, mark: str, within: float, what: str) -> None:
        """Note a trouble if processes with this mark are still on the machine after so many seconds."""
        until = time.monotonic() + within
        while left := marked(machine, mark):
            if time.monotonic() > until:
                self.troubles.append(f"run {self.number}: after {what}, {len(left)} processes are left")
                return
            time.sleep(0.1)


def marked(machine: Machine, mark: str) -> dict[int, str]:
    """The processes of a machine whose command line has the mark, by pid; with "", all that skypool started."""
    found = {}
    for pid, name in machine.processes().items():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if (mark and mark in words) or (not mark and (name.startswith("skypool") or "SKYPOOL_SERVICE" in words)):
                found[pid] = words
    return found


def run(number: int, chance: random.Random, lab: Lab, machines: tuple[Machine, Machine]) -> Run:
    """Make one run on two machines, which are clean and connected afterwards if nothing was wrong."""
    this = Run(number, chance)
    began = time.monotonic()
    mark = f"soak-{os.getpid()}-{number}"
    argv = [sys.executable, "-W", "ignore", "-m", "tests.soak.services", "--client", mark, str(lab.client_key)]
    argv += [word for each in machines for word in (each.address, each.host_key)]
    with tempfile.TemporaryDirectory() as home:
        env = {**os.environ, "XDG_STATE_HOME": f"{home}/state"}
        with subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as program:
            said = _answers(program)
            try:
                _steps(this, mark, machines, program, said)
            except (KeyError, StopIteration, TimeoutError) as e:
                this.troubles.append(f"run {number}: the program said nothing in time, or something else: {e!r}")
            finally:
                program.kill()
                program.wait()
                for machine in machines:
                    machine.mend()
    for machine in machines:
        this.check(machine, mark, LEASE + LATE, "the client was killed")
        this.check(machine, "", LEASE + LATE, "the client was killed")
    this.seconds = time.monotonic() - began
    return this


def _answers(program: subprocess.Popen[str]) -> Iterator[dict[str, list[str] | str]]:
    """Yield what the program says. It is killed if it has not ended after three minutes."""
    timer = threading.Timer(180, program.kill)
    timer.daemon = True
    timer.start()
    assert program.stdout is not None
    for line in program.stdout:
        if "@{" in line:
            yield json.loads(line[line.index("@{") + 1 :])
    timer.cancel()


def _steps(
    this: Run,
    mark: str,
    machines: tuple[Machine, Machine],
    program: subprocess.Popen[str],
    said: Iterator[dict[str, list[str] | str]],
) -> None:
    """Kill a service, cut a machine off, and kill the program."""
    places = next(said)["up"]
    first, second = sorted(machines, key=lambda each: [each.address in place for place in places].index(True))
    time.sleep(this.chance.uniform(0.0, 0.5))
    pids = marked(first, f"{mark}-killed")
    parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids}
    shell = next(pid for pid in pids if parents[pid] not in pids and "echo up" in pids[pid])
    victim = shell if this.chance.random() < 0.5 else parents[shell]
    os.kill(victim, signal.SIGKILL)
    this.check(first, f"{mark}-killed", LATE, "a service was killed")
    wanted = "CommandFailed" if victim == shell else "WorkerDied"
    if (ended := next(said)["ended"]) != wanted:
        this.troubles.append(f"run {this.number}: a killed service raised {ended}, not {wanted}")
    if not marked(first, f"{mark}-kept") or not marked(second, f"{mark}-lost"):
        this.troubles.append(f"run {this.number}: a service has ended with another one")
    second.cut()
    if (ended := next(said)["ended"]) != "ConnectionLost":
        this.troubles.append(f"run {this.number}: a service whose node was cut off raised {ended}")
    this.check(second, mark, LEASE + LATE, "its machine was cut off")
    if not marked(first, f"{mark}-kept"):
        this.troubles.append(f"run {this.number}: a service has ended with another node")
    time.sleep(this.chance.uniform(0.0, 0.5))
    program.kill()


def soak(runs: int, seed: int, side_by_side: int) -> list[Run]:
    """Make so many runs, some at a time, each on two machines of the lab."""
    numbers = iter(range(runs))
    lock = threading.Lock()
    done: list[Run] = []

    def work(lab: Lab) -> None:
        pair = (lab.machine(keys=[lab.public_key]), lab.machine(keys=[lab.public_key]))
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                break
            made = run(number, random.Random(f"{seed}/{number}"), lab, pair)
            with lock:
                done.append(made)
            print(f"run {number}: {made.seconds:.1f} s {made.troubles or 'fine'}", flush=True)

    with Lab() as lab, ThreadPoolExecutor(side_by_side) as threads:
        for each in [threads.submit(work, lab) for _ in range(min(side_by_side, runs))]:
            each.result()
    return done


def main(argv: Sequence[str] | None = None) -> int:
    """Make the runs; 1 if something was wrong in one of them."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["--client"]:
        client(words[1:])
        return 0
    parser = argparse.ArgumentParser(prog="python -m tests.soak.services", description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--side-by-side", type=int, default=3)
    asked = parser.parse_args(words)
    if why := unavailable():
        print(f"not run: {why}")
        return 0
    began = time.monotonic()
    done = soak(asked.runs, asked.seed, asked.side_by_side)
    good = sum(not each.troubles for each in done)
    print(f"{good} of {asked.runs} runs left nothing, in {time.monotonic() - began:.0f} s")
    return 0 if good == asked.runs else 1


if __name__ == "__main__":
    sys.exit(main())
