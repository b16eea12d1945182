"""Start of a Dask cluster on four machines that are warm, beside `dask.distributed.SSHCluster` on the same machines.

python -m tests.benchmarks.dask_start

The machines are those of the lab, reached by ssh. The pool has been started before, as machines that SSHCluster uses
have been, too. Both have a scheduler and a worker with one thread on each machine when the clock stops. A start waits
until the processes of the one before have ended. Needs a lab (docs/lab.md) and the environment of the tests of Dask,
and is left out without a lab.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.lab.machines import Lab, unavailable
from tests.soak import dask

TIMES = 5
NODES = 4
SCRIPT = dask.ENGINES / "scripts" / "dask_start.py"


def rows() -> list[tuple[str, str, str, str]]:
    """(what, figure, baseline, ratio)."""
    return [] if unavailable() else [compared("a Dask cluster", "its workers are connected", "SSHCluster", *measured())]


def compared(
    what: str, until: str, baseline: str, ours: Sequence[float], theirs: Sequence[float]
) -> tuple[str, str, str, str]:
    """Return the row of a cluster's start: the medians of our starts and of the baseline's, and their ratio."""
    one, other = statistics.median(ours), statistics.median(theirs)
    return (
        f"{what} on {NODES} warm machines, until {until} (median of {len(ours)})",
        f"{one:.2f} s",
        f"{other:.2f} s for {baseline}",
        f"{one / other:.2f} (≤ 1.2)",
    )


def measured() -> tuple[list[float], list[float]]:
    """Return the seconds of each start of our cluster, and of SSHCluster. They take turns."""
    venv = dask.environment()
    with Lab() as lab, tempfile.TemporaryDirectory(prefix="dask-start-") as home:
        machines = [dask.machine(lab, venv) for _ in range(NODES)]
        known = Path(home) / "known_hosts"
        known.write_text("".join(f"{each.address} {each.host_key}\n" for each in machines))
        python = str(venv / "bin" / "python")
        settings = {
            "machines": [(each.address, each.host_key) for each in machines],
            "identity": str(lab.client_key),
            "known_hosts": str(known),
            "python": python,
            "times": TIMES,
        }
        env = {"HOME": home, "TMPDIR": home, "PATH": "/usr/bin:/bin"}
        argv = [python, "-W", "ignore", str(SCRIPT), json.dumps(settings)]
        done = subprocess.run(argv, env=env, cwd=home, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    found = json.loads(done.stdout.splitlines()[-1])
    return found["ours"], found["theirs"]


if __name__ == "__main__":
    for row in rows():
        print("  ".join(row))
