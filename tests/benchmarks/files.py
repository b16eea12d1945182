"""`pool.push` beside `rsync -aW`, both over ssh to the same lab machine."""

from __future__ import annotations

import os
import random
import shlex
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import skypool as sky
from tests.benchmarks.core import Row
from tests.lab.machines import Lab, unavailable

_TIMES = 5
_LARGE, _LARGE_FILES = 1_000_000_000, 2_000
_SMALL_FILES = 20_000


def rows() -> Iterator[Row]:
    """(what, figure, baseline, ratio)."""
    why = unavailable() or ("" if shutil.which("rsync") else "rsync is not installed")
    if why:
        yield "push over ssh", "–", why, "–"
        return
    with Lab() as lab, tempfile.TemporaryDirectory() as folder:
        machine = lab.machine(keys=[lab.public_key])
        machine.run("apt-get -q update && apt-get -q -y install --no-install-recommends rsync")
        hosts = [sky.Host(machine.address, host_key=machine.host_key)]
        provider = sky.SSH(hosts=hosts, user="root", identity=str(lab.client_key))
        *ssh, there = machine.ssh_argv("root", lab.client_key)
        with sky.ComputePool(provider, console="off") as pool:

            def rsync(source: Path, target: str) -> None:
                argv = ["rsync", "-aW", "-e", shlex.join(ssh), f"{source}/", f"{there}:.skypool/work/{target}/"]
                subprocess.run(argv, check=True)

            def push(source: Path, target: str) -> None:
                pool.push(source, target)

            def clear() -> None:
                machine.run("rm -rf /root/.skypool/work/*")

            large = _tree(Path(folder, "large"), _LARGE_FILES, _LARGE // _LARGE_FILES)
            ours, theirs = _alternating(lambda: push(large, "a"), lambda: rsync(large, "b"), clear)
            yield _row("push 1 GB in 2,000 files over ssh", ours, theirs, 1.25)
            clear()
            small = _tree(Path(folder, "small"), _SMALL_FILES, 1000)
            push(small, "a")
            rsync(small, "b")

            def change() -> None:
                (small / "7" / "7").write_bytes(os.urandom(1000))

            ours, theirs = _alternating(lambda: push(small, "a"), lambda: rsync(small, "b"), change)
            yield _row("push one of 20,000 files that has changed", ours, theirs, 1.5)
        machine.destroy()


def _row(what: str, ours: float, theirs: float, aim: float) -> Row:
    return what, f"{ours:.2f} s", f"{theirs:.2f} s rsync -aW", f"{ours / theirs:.2f} (≤ {aim:g})"


def _tree(root: Path, count: int, size: int) -> Path:
    chance = random.Random(5)
    for number in range(count):
        file = root / f"{number % 100}" / f"{number}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(chance.randbytes(size))
    return root


def _alternating(
    ours: Callable[[], None], theirs: Callable[[], None], before: Callable[[], None]
) -> tuple[float, float]:
    """Return the medians of both in seconds."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_TIMES):
        for run, told in zip((ours, theirs), times, strict=True):
            before()
            began = time.perf_counter()
            run()
            told.append(time.perf_counter() - began)
    return statistics.median(times[0]), statistics.median(times[1])
