"""What it costs to start a gang, beside as many bare Pythons.

python -m tests.benchmarks.gangs

`torchrun` is from the environment that tests/engines/test_frameworks.py makes. Its row is left out without that.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import skypool as sky
from skypool.gangs.ports import free_ports
from tests.clients import venvs

NODES = 4
PROCS = 2
TIMES = 15


@sky.compute(procs=PROCS)
def rank() -> int:
    return sky.instance_info().rank


def rows() -> list[tuple[str, str, str, str]]:
    """(what, figure, baseline, ratio)."""
    with sky.ComputePool(nodes=NODES, console="off") as pool:
        ours, bare = timed(lambda: _gang(pool)), timed(_bare)
    count = NODES * PROCS
    table = [
        (
            f"a gang of {NODES} × {PROCS} processes on local nodes, from `@` to its values",
            f"{1000 * ours:.0f} ms",
            f"{1000 * bare:.0f} ms for {count} bare Pythons",
            f"{ours / bare:.2f} (≤ 2)",
        )
    ]
    torchrun = next(venvs.PLACE.parent.glob("engines/frameworks-*/bin/torchrun"), None)
    if torchrun is not None:
        by_hand = timed(lambda: _torchrun(torchrun), times=3)
        table.append(
            (
                "the same gang",
                f"{1000 * ours:.0f} ms",
                f"{by_hand:.1f} s for {NODES} torchrun by hand",
                f"{ours / by_hand:.3f}",
            )
        )
    return table


def timed(work: Callable[[], None], times: int = TIMES) -> float:
    """Return the median time of `work` in seconds."""
    work()
    spent = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)


def _gang(pool: sky.ComputePool) -> None:
    assert rank() @ pool == list(range(NODES * PROCS))


def _bare() -> None:
    running = [subprocess.Popen([sys.executable, "-c", "pass"]) for _ in range(NODES * PROCS)]
    for each in running:
        assert each.wait() == 0


def _torchrun(torchrun: Path) -> None:
    """Start a torchrun for each node, as a user does, with a program that does nothing."""
    (port,) = free_ports(1)
    python = str(torchrun.with_name("python"))
    shared = [f"--nnodes={NODES}", f"--nproc-per-node={PROCS}", "--rdzv-backend=c10d", "--rdzv-id=1"]
    where = [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"]
    argv = [python, "-m", "torch.distributed.run", *shared, *where, "--no-python", python, "-c", "pass"]
    running = [
        subprocess.Popen([*argv[:5], f"--rdzv-conf=is_host={int(not node)}", *argv[5:]], stderr=subprocess.DEVNULL)
        for node in range(NODES)
    ]
    for each in running:
        assert each.wait() == 0


if __name__ == "__main__":
    for row in rows():
        print("  ".join(row))
