"""The mover beside s5cmd, to and from SeaweedFS on this machine: files that are saved, and brought back.

`sha256sum` of all files follows s5cmd, as in a script that wants to be sure of them. The mover checks that a file has
not changed while it was sent, and the sizes of what it fetches; of data, also the MD5 sums that the store has.
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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from skypool.wire.save_orders import Order
from tests.benchmarks.core import Row
from tests.lab import stores
from tests.lab.stores import secret_of

_TIMES = 3
_AIM = 1.25
_TREES = {"1 GB in 4,000 files": (4_000, 250_000), "one file of 2 GB": (1, 2_000_000_000)}


def rows() -> Iterator[Row]:
    """(what, figure, baseline, ratio)."""
    s5cmd = shutil.which("s5cmd")
    if why := stores.missing_s3() or ("" if s5cmd else "s5cmd is not installed"):
        yield "save to a bucket", "–", why, "–"
        return
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "store").mkdir()
        with stores.seaweedfs(root / "store", volumes=500) as store:
            for what, (count, size) in _TREES.items():
                yield from _compared(what, _tree(root / "tree", count, size), root, store, str(s5cmd))


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


def _compared(what: str, tree: Path, root: Path, store: stores.Store, s5cmd: str) -> Iterator[Row]:
    ours: dict[str, list[_Taken]] = {"save": [], "bring back": [], "fetch as data": []}
    theirs: dict[str, list[_Taken]] = {"save": [], "bring back": []}
    for number in range(_TIMES):
        place = f"s3://models/{tree.name}-{abs(hash(what))}-{number}"
        ours["save"].append(_measured(partial(_save, tree, f"{place}-ours", root, store)))
        theirs["save"].append(_measured(partial(_s5cmd_up, s5cmd, tree, f"{place}-theirs", store)))
        for folder in ("ours", "data", "theirs"):
            shutil.rmtree(root / folder, ignore_errors=True)
        ours["bring back"].append(_measured(partial(_bring_back, root / "ours", f"{place}-ours", root, store)))
        ours["fetch as data"].append(_measured(partial(_fetch_data, root / "data", f"{place}-ours", root, store)))
        theirs["bring back"].append(_measured(partial(_s5cmd_down, s5cmd, root / "theirs", f"{place}-theirs", store)))
    theirs["fetch as data"] = theirs["bring back"]
    for way, taken in ours.items():
        mine, other = (_Taken(*map(statistics.median, zip(*each, strict=True))) for each in (taken, theirs[way]))
        memory = max(each.mib for each in taken)
        yield (
            f"{way} {what}",
            f"{mine.wall:.2f} s, {mine.cpu:.1f} s CPU, {memory:.0f} MiB",
            f"{other.wall:.2f} s, {other.cpu:.1f} s CPU: s5cmd and sha256sum",
            f"{mine.wall / other.wall:.2f} (≤ {_AIM:g})",
        )


class _Taken(NamedTuple):
    """Seconds, processor seconds, and the most memory of one process in MiB."""

    wall: float
    cpu: float
    mib: float


def _measured(act: Callable[[], object]) -> _Taken:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    act()
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return _Taken(wall, cpu, after.ru_maxrss / 1024)


def _mover(tree: Path, place: str, root: Path, store: stores.Store, until: str) -> None:
    """Run the mover until the folder is in this phase."""
    cache = root / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    order = Order(
        "out", str(tree), place, store.endpoint, values=("owner", secret_of("owner")), journal="journal",
        restores=until != "ended", is_data=until == "there",
    )  # fmt: skip
    code = "from skypool.data.mover import main; main()"
    env = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as mover:
        assert mover.stdin is not None
        assert mover.stdout is not None

        def tell(said: dict[str, Any]) -> None:
            assert mover.stdin is not None
            mover.stdin.write(json.dumps(said).encode() + b"\n")
            mover.stdin.flush()

        tell(order.to_json())
        if until == "ended":
            tell({"do": "end", "id": "out", "seconds": 600, "calm": True})
        for line in mover.stdout:
            folders = json.loads(line)["folders"]
            if folders and folders[0]["phase"] == until:
                assert folders[0].get("whole") or folders[0]["back"]["files"], folders
                break
        if until != "ended":
            mover.kill()
        else:
            mover.stdin.close()


def _save(tree: Path, place: str, root: Path, store: stores.Store) -> None:
    _mover(tree, place, root, store, "ended")


def _bring_back(folder: Path, place: str, root: Path, store: stores.Store) -> None:
    _mover(folder, place, root, store, "saving")


def _fetch_data(folder: Path, place: str, root: Path, store: stores.Store) -> None:
    _mover(folder, place, root, store, "there")


def _s5cmd(s5cmd: str, store: stores.Store, *words: str) -> None:
    env = {**os.environ, "AWS_ACCESS_KEY_ID": "owner", "AWS_SECRET_ACCESS_KEY": secret_of("owner")}
    argv = [s5cmd, "--endpoint-url", store.endpoint, "cp", *words]
    subprocess.run(argv, env=env, check=True, stdout=subprocess.DEVNULL)


def _sums(folder: Path) -> None:
    files = [str(each) for each in sorted(folder.rglob("*")) if each.is_file()]
    subprocess.run(["sha256sum", *files], check=True, stdout=subprocess.DEVNULL)


def _s5cmd_up(s5cmd: str, tree: Path, place: str, store: stores.Store) -> None:
    _s5cmd(s5cmd, store, f"{tree}/", f"{place}/")
    _sums(tree)


def _s5cmd_down(s5cmd: str, folder: Path, place: str, store: stores.Store) -> None:
    folder.mkdir()
    _s5cmd(s5cmd, store, f"{place}/*", f"{folder}/")
    _sums(folder)
