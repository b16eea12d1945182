"""Folders in buckets: the mover beside s5cmd and rclone, what it costs a trainer beside it, and the client's memory.

`sha256sum` of all files follows the other tools, as in a script that wants to be sure of them. The mover checks that a
file has not changed while it was sent, and the sizes of what it fetches; of data, also the MD5 sums that the store has.
All run here beside SeaweedFS, then in a machine of the lab behind a slow line.

python -m tests.benchmarks.save
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from skypool.wire.save_orders import Order
from tests.benchmarks.core import Row
from tests.lab import stores
from tests.lab.kernel import most_memory
from tests.lab.machines import Lab, unavailable
from tests.lab.stores import secret_of

_TIMES = 3
_AIM = 1.25
_TREES = {"1 GB in 4,000 files": (4_000, 250_000), "one file of 2 GB": (1, 2_000_000_000)}
_RATE = "400mbit"
"""The rate of the slow line, each way."""
_TRAININGS = 3


class _Place(NamedTuple):
    """Where the tools run.

    Attributes:
        name: what is said of it in the table.
        times: how often each of them runs.
        words: the words that stand before each command.
    """

    name: str
    times: int
    words: tuple[str, ...] = ()


def rows() -> Iterator[Row]:
    """(what, figure, baseline, ratio)."""
    tools = [each for each in _UP if shutil.which(each)]
    if why := stores.missing_s3() or ("" if tools else "neither s5cmd nor rclone is installed"):
        yield "save to a bucket", "–", why, "–"
        return
    for what, (count, size) in _TREES.items():
        with _work() as (root, address), stores.seaweedfs(root / "store", 500, address) as store:
            yield from _compared(what, _tree(root / "tree", count, size), root, store, tools, _Place("", _TIMES))
    if why := unavailable():
        yield f"save behind {_RATE}", "–", why, "–"
    else:
        for what, (count, size) in _TREES.items():
            with Lab() as lab, _work() as (root, _), stores.seaweedfs(root / "store", 500, lab.gateway) as store:
                place = _Place(f", {_RATE}", 1, _slow_line(lab))
                yield from _compared(what, _tree(root / "tree", count, size), root, store, tools, place)
    with _work() as (root, address), stores.seaweedfs(root / "store", 500, address) as store:
        yield _client_memory(root, store)
    yield _beside_a_trainer()


@contextmanager
def _work() -> Iterator[tuple[Path, str]]:
    """A folder with a place for a store, and the store's address."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "store").mkdir()
        yield Path(folder), "127.0.0.1"


def _slow_line(lab: Lab) -> tuple[str, ...]:
    """Make a machine whose line is slow both ways. Return the words that run a command in its network."""
    machine = lab.machine()
    netns, device = lab.network.netns(machine.number), lab.network.device(machine.number)
    inside = ("ip", "netns", "exec", netns)
    limit = ("root", "tbf", "rate", _RATE, "burst", "256kbit", "latency", "50ms")
    subprocess.run(["tc", "qdisc", "add", "dev", device, *limit], check=True)
    subprocess.run([*inside, "tc", "qdisc", "add", "dev", "eth0", *limit], check=True)
    return inside


def _tree(root: Path, count: int, size: int) -> Path:
    shutil.rmtree(root, ignore_errors=True)
    block = os.urandom(1 << 20)
    for number in range(count):
        file = root / f"{number % 100}" / f"{number}"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as out:
            for at in range(0, size, len(block)):
                out.write(block[: size - at])
            out.seek(0)
            out.write(str(number).encode())
    return root


def _compared(
    what: str, tree: Path, root: Path, store: stores.Store, tools: Sequence[str], place: _Place
) -> Iterator[Row]:
    ours: dict[str, list[_Taken]] = {"save": [], "bring back": [], "fetch as data": []}
    theirs: dict[str, dict[str, list[_Taken]]] = {way: {tool: [] for tool in tools} for way in ("save", "bring back")}
    for number in range(place.times):
        prefix = f"runs/{number}"
        line = _Line(root, store, place.words)
        ours["save"].append(_measured(partial(line.save, tree, f"{prefix}-ours")))
        for tool in tools:
            theirs["save"][tool].append(_measured(partial(line.copy, _UP[tool], tree, f"{prefix}-{tool}")))
        ours["bring back"].append(_measured(partial(line.bring_back, line.emptied(), f"{prefix}-ours")))
        ours["fetch as data"].append(_measured(partial(line.fetch_data, line.emptied(), f"{prefix}-ours")))
        for tool in tools:
            down = partial(line.copy, _DOWN[tool], line.emptied(), f"{prefix}-ours")
            theirs["bring back"][tool].append(_measured(down))
    theirs["fetch as data"] = theirs["bring back"]
    for way, taken in ours.items():
        mine = _median(taken)
        best = min(theirs[way], key=lambda tool: _median(theirs[way][tool]).wall)
        other = _median(theirs[way][best])
        memory = max(each.mib for each in taken)
        yield (
            f"{way} {what}{place.name}",
            f"{mine.wall:.2f} s, {mine.cpu:.1f} s CPU, {memory:.0f} MiB",
            f"{other.wall:.2f} s, {other.cpu:.1f} s CPU: {best} and sha256sum",
            f"{mine.wall / other.wall:.2f} (≤ {_AIM:g})",
        )


class _Taken(NamedTuple):
    """Seconds, processor seconds, and the most memory of a mover in MiB; 0 for others."""

    wall: float
    cpu: float
    mib: float


def _measured(act: Callable[[], float]) -> _Taken:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    mib = act()
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return _Taken(wall, cpu, mib)


def _median(taken: Sequence[_Taken]) -> _Taken:
    return _Taken(*map(statistics.median, zip(*taken, strict=True)))


@contextmanager
def _mover(order: Order, root: Path, words: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """A mover that has its order, with the folders for what it keeps."""
    cache = root / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    argv = [*words, sys.executable, "-c", "from skypool.data.mover import main; main()"]
    env = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(argv, cwd=root, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as mover:
        try:
            _tell(mover, order.to_json())
            yield mover
        finally:
            mover.kill()


def _tell(mover: subprocess.Popen[bytes], said: dict[str, Any]) -> None:
    assert mover.stdin is not None
    mover.stdin.write(json.dumps(said).encode() + b"\n")
    mover.stdin.flush()


def _end(mover: subprocess.Popen[bytes]) -> float:
    """Let the mover save what is left, and end. Return its memory as `_wait` does."""
    _tell(mover, {"do": "end", "id": "out", "seconds": 600, "calm": True})
    mib = _wait(mover, "ended")
    assert mover.stdin is not None
    mover.stdin.close()
    mover.wait()
    return mib


def _wait(mover: subprocess.Popen[bytes], phase: str) -> float:
    """Wait until the folder is in this phase. Return the most memory that the mover had so far in MiB."""
    assert mover.stdout is not None
    for line in mover.stdout:
        folders = json.loads(line)["folders"]
        if folders and folders[0]["phase"] == phase:
            assert folders[0].get("whole") or folders[0]["back"]["files"], folders
            return most_memory(mover.pid)
    raise AssertionError(f"the mover ended before its folder was {phase}")


class _Line(NamedTuple):
    """A store, the words that run a command on the line that leads there, and a folder for what comes from it."""

    root: Path
    store: stores.Store
    words: tuple[str, ...]

    def emptied(self) -> Path:
        """Return a folder that does not exist."""
        shutil.rmtree(self.root / "down", ignore_errors=True)
        return self.root / "down"

    def order(self, folder: Path, prefix: str, **options: Any) -> Order:
        values = ("owner", secret_of("owner"))
        place = f"s3://models/{prefix}"
        return Order("out", str(folder), place, self.store.endpoint, values=values, journal="journal", **options)

    def save(self, tree: Path, prefix: str) -> float:
        with _mover(self.order(tree, prefix, restores=False), self.root, self.words) as mover:
            return _end(mover)

    def bring_back(self, folder: Path, prefix: str) -> float:
        with _mover(self.order(folder, prefix), self.root, self.words) as mover:
            return _wait(mover, "saving")

    def fetch_data(self, folder: Path, prefix: str) -> float:
        with _mover(self.order(folder, prefix, is_data=True), self.root, self.words) as mover:
            return _wait(mover, "there")

    def copy(self, argv: Callable[[Path, str], list[str]], folder: Path, prefix: str) -> float:
        """Copy up or down with another tool, then read all files once more."""
        folder.mkdir(exist_ok=True)
        login = {"AWS_ACCESS_KEY_ID": "owner", "AWS_SECRET_ACCESS_KEY": secret_of("owner")}
        end = {"S3_ENDPOINT_URL": self.store.endpoint, "RCLONE_S3_ENDPOINT": self.store.endpoint}
        others = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        env = {**others, **login, **end, **_RCLONE}
        subprocess.run([*self.words, *argv(folder, prefix)], env=env, check=True, stdout=subprocess.DEVNULL)
        files = [str(each) for each in sorted(folder.rglob("*")) if each.is_file()]
        subprocess.run(["sha256sum", *files], check=True, stdout=subprocess.DEVNULL)
        return 0.0


_RCLONE = {
    "RCLONE_CONFIG": os.devnull,
    "RCLONE_S3_PROVIDER": "Other",
    "RCLONE_S3_ENV_AUTH": "true",
    "RCLONE_S3_FORCE_PATH_STYLE": "true",
}
_UP: dict[str, Callable[[Path, str], list[str]]] = {
    "s5cmd": lambda folder, prefix: ["s5cmd", "cp", f"{folder}/", f"s3://models/{prefix}/"],
    "rclone": lambda folder, prefix: ["rclone", "copy", f"{folder}", f":s3:models/{prefix}"],
}
_DOWN: dict[str, Callable[[Path, str], list[str]]] = {
    "s5cmd": lambda folder, prefix: ["s5cmd", "cp", f"s3://models/{prefix}/*", f"{folder}/"],
    "rclone": lambda folder, prefix: ["rclone", "copy", f":s3:models/{prefix}", f"{folder}"],
}


def _client_memory(root: Path, store: stores.Store) -> Row:
    """The most memory of a client whose pool of one node on this machine saves 1 GB in 4,000 files."""
    argv = [sys.executable, "-m", "tests.benchmarks.saving_client", store.endpoint, "4000", "250000"]
    paths = os.pathsep.join(map(os.path.abspath, sys.path))
    env = {**os.environ, "XDG_STATE_HOME": f"{root}/state", "XDG_CACHE_HOME": f"{root}/cache", "PYTHONPATH": paths}
    done = subprocess.run(argv, cwd=root, env=env, check=True, capture_output=True, text=True)
    mib = float(done.stdout.split()[-1])
    bare = [sys.executable, "-c", "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"]
    python = int(subprocess.run(bare, check=True, capture_output=True, text=True).stdout) / 1024
    what = "memory of a client whose node saves 1 GB in 4,000 files"
    return what, f"{mib:.0f} MiB", f"{python:.0f} MiB bare python", f"{mib / python:.1f} (≤ 150 MB)"


def _beside_a_trainer() -> Row:
    """A trainer on one core, with and without a mover that saves its checkpoints; mover and store have another."""
    what = "a trainer that writes 20 MB a second, with its folder saved"
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return what, "–", "this machine has one core", "–"
    os.sched_setaffinity(0, {cores[0]})  # what is started from here on has this core, but for the trainer
    times: dict[bool, list[float]] = {True: [], False: []}
    try:
        with _work() as (root, address), stores.seaweedfs(root / "store", 500, address) as store:
            for number in range(_TRAININGS):
                for is_saved in (False, True):
                    times[is_saved].append(_trained(_Line(root, store, ()), f"runs/{number}", cores[1], is_saved))
    finally:
        os.sched_setaffinity(0, cores)
    saved, alone = (statistics.median(times[each]) for each in (True, False))
    return what, f"{saved:.2f} s", f"{alone:.2f} s not saved", f"{saved / alone:.3f} (≤ 1.03)"


def _trained(line: _Line, prefix: str, core: int, is_saved: bool) -> float:
    """Return the seconds of one training."""
    folder = line.emptied()
    folder.mkdir()
    argv = [sys.executable, "-m", "tests.benchmarks.pinned_trainer", str(folder), str(core)]
    if not is_saved:
        return float(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
    with _mover(line.order(folder, prefix, restores=False), line.root) as mover:
        took = float(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
        _end(mover)
    return took


if __name__ == "__main__":
    for row in rows():
        print("  ".join(row), flush=True)
