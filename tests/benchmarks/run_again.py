"""From an edit to the program's first line on machines that stay, beside `rsync -aW` and `ssh true`.

python -m tests.benchmarks.run_again
"""

from __future__ import annotations

import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.core import Row
from tests.lab.machines import Lab, Machine, unavailable

_FILES = 10_000
_TIMES = 5
_AIM = 2
_RUN = """
import skypool as sky
hosts = [sky.Host({address!r}, host_key={host_key!r})]
sky.run("train.py", sky.SSH(hosts=hosts, user="root", identity={identity!r}), linger="10m", yes=True)
"""


def rows() -> Iterator[Row]:
    """(what, figure, baseline, ratio)."""
    what = f"edit to first line, {_FILES:,} files"
    if why := unavailable() or ("" if shutil.which("rsync") else "rsync is not installed"):
        yield what, "–", why, "–"
        return
    with Lab() as lab, tempfile.TemporaryDirectory() as folder:
        machine = lab.machine(keys=[lab.public_key])
        machine.run("apt-get -q update && apt-get -q -y install --no-install-recommends rsync")
        project, script = Path(folder, "project"), Path(folder, "run.py")
        for number in range(_FILES):
            file = project / f"{number % 100}" / f"{number}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{number}\n" * 100)
        told = {"address": machine.address, "host_key": machine.host_key, "identity": str(lab.client_key)}
        script.write_text(_RUN.format(**told))
        env = os.environ | {"XDG_STATE_HOME": f"{folder}/state", "XDG_CACHE_HOME": f"{folder}/cache"}
        ours, theirs = _alternating(machine, lab, project, script, env)
        machine.destroy()
    baseline = f"{theirs:.2f} s rsync -aW of no change and ssh true"
    yield what, f"{ours:.2f} s", baseline, f"{ours / theirs:.2f} (≤ {_AIM})"


def _alternating(machine: Machine, lab: Lab, project: Path, script: Path, env: dict[str, str]) -> tuple[float, float]:
    """Return the medians of both in seconds."""
    *ssh, there = machine.ssh_argv("root", lab.client_key)
    rsync = ["rsync", "-aW", "-e", shlex.join(ssh), f"{project}/", f"{there}:copy/"]
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(-1, _TIMES):  # the first makes everything ready
        (project / "train.py").write_text(f"print('first line', {number})\n")
        began = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, str(script)], cwd=project, env=env, stdout=subprocess.PIPE, text=True
        ) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == f"first line {number}\n"
            ours = time.perf_counter() - began
            client.communicate()
        subprocess.run(rsync, check=True)
        began = time.perf_counter()
        subprocess.run(rsync, check=True)
        subprocess.run([*ssh, there, "true"], check=True)
        theirs = time.perf_counter() - began
        if number >= 0:
            times[0].append(ours)
            times[1].append(theirs)
    return statistics.median(times[0]), statistics.median(times[1])


if __name__ == "__main__":
    for row in rows():
        print(*row, sep="  |  ")
