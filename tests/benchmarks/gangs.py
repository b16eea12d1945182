"""What it costs to start a gang, beside as many bare Pythons.

python -m tests.benchmarks.gangs
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import skypool as sky

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
    return [
        (
            f"a gang of {NODES} × {PROCS} processes on local nodes, from `@` to its values",
            f"{1000 * ours:.0f} ms",
            f"{1000 * bare:.0f} ms for {count} bare Pythons",
            f"{ours / bare:.2f} (≤ 2)",
        )
    ]


def timed(work: Callable[[], None]) -> float:
    """Return the median time of `work` in seconds."""
    work()
    spent = []
    for _ in range(TIMES):
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


if __name__ == "__main__":
    for row in rows():
        print("  ".join(row))
