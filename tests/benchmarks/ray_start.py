"""Start of a Ray cluster on four machines that are warm, beside a script like `ray up` over ssh on the same machines.

python -m tests.benchmarks.ray_start

The machines are those of the lab. The pool has been started before. The script runs `ray start --head` on the first
machine, and then `ray start --address` on the others at the same time, each over an ssh connection of its own, without
a token. Its clock stops when all commands have returned, and ours when all nodes have joined. A start waits until the
processes of the one before have ended. Needs a lab (docs/lab.md) and the environment of the tests of Ray, and is left
out without a lab.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import skypool as sky
from tests.benchmarks.dask_start import NODES, compared
from tests.conftest import eventually
from tests.engines.scripts.idle import alone
from tests.lab import environments
from tests.lab.machines import Lab, Machine, unavailable
from tests.soak import ray

TIMES = 5
CPUS = 2
STORE = 100 << 20
PORT = 6379


def rows() -> list[tuple[str, str, str, str]]:
    """(what, figure, baseline, ratio)."""
    if unavailable():
        return []
    return [compared("a Ray cluster", "its nodes have joined", "ray start over ssh", *measured())]


def measured(times: int = TIMES) -> tuple[list[float], list[float]]:
    """Return the seconds of each start of our cluster, and of the script's. They take turns.

    Args:
        times: how often each starts, after a first start that warms both up.
    """
    venv = ray.environment()
    ours: list[float] = []
    theirs: list[float] = []
    with Lab() as lab, environments.machines_with(lab, venv, NODES) as machines:
        with environments.pool_on(lab, machines, venv) as pool:
            for turn in range(times + 1):
                with alone(keep=turn == 0):
                    began = time.monotonic()
                    with sky.ray.cluster(pool, cpus=CPUS, object_store=STORE) as cluster:
                        seconds = time.monotonic() - began
                        assert list(cluster.nodes().values()) == ["ALIVE"] * NODES
                if turn:
                    ours.append(seconds)
                with alone():
                    began = time.monotonic()
                    by_hand(machines, venv)
                    seconds = time.monotonic() - began
                    try:
                        # The head counts what its nodes have every few seconds.
                        eventually(lambda: f"{NODES * CPUS}.0 CPU" in on(machines[0], venv, "status"), 60, "all CPUs")
                    finally:
                        end(machines, venv)
                if turn:
                    theirs.append(seconds)
    return ours, theirs


def by_hand(machines: Sequence[Machine], venv: Path) -> None:
    """Start Ray on machines as a script would."""
    options = ["--disable-usage-stats", f"--num-cpus={CPUS}", f"--object-store-memory={STORE}"]
    head, *others = machines
    on(head, venv, "start", "--head", f"--port={PORT}", f"--node-ip-address={head.address}", *options)
    with ThreadPoolExecutor() as threads:
        address = f"--address={head.address}:{PORT}"
        joined = [
            threads.submit(on, each, venv, "start", address, f"--node-ip-address={each.address}", *options)
            for each in others
        ]
        for each in joined:
            each.result()


def end(machines: Sequence[Machine], venv: Path) -> None:
    """End Ray on machines, and remove its files."""
    with ThreadPoolExecutor() as threads:
        for each in [threads.submit(on, machine, venv, "stop", "--force") for machine in machines]:
            each.result()
    for machine in machines:
        machine.run(["rm", "-rf", "/tmp/ray"])


def on(machine: Machine, venv: Path, *words: str) -> str:
    """Run Ray's program on a machine over ssh, and return its output."""
    argv = [*machine.ssh_argv(), str(venv / "bin" / "ray"), *words]
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=120).stdout


if __name__ == "__main__":
    for row in rows():
        print("  ".join(row))
