"""Trainers that know nothing of skypool, on machines that are lost: they go on from a whole checkpoint.

    python -m tests.soak.trainers --times 40 --seed 1
    python -m tests.soak.trainers --times 10 --kinds hf,orbax

`skypool run --save` runs programs of `tests/engines/scripts` on machines of a fake cloud, with a bucket of SeaweedFS.
At a random moment a machine is killed with all that runs on it, and its disk is removed. The client is killed, too. The
same line again must go on from the newest checkpoint in the bucket, as boto3 sees it, and end with the loss of a
training that nothing has interrupted. At times a program that removes its folder runs between two attempts.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skypool.testing import FakeCloud, Stock
from tests.clients import venvs
from tests.lab import stores
from tests.soak import _trainer_check
from tests.soak._bucket_check import Reader

ENGINES = Path(__file__).parents[1] / "engines"
PROGRAMS = ENGINES / "scripts"
KINDS = ("hf", "lightning", "dcp", "orbax")
STEPS = 40
EVERY = 10
"""Steps between two checkpoints."""
PAUSE = 0.7
"""Seconds that each step takes until the last attempt: a file that is replaced must be quiet for 5 seconds."""
PATIENCE = 240.0
"""Seconds within which a program must begin to train, or a checkpoint be in the bucket."""
KEYS = ("SAVE_ID", "SAVE_SECRET")
_LOOK, _SETTLING = 0.2, 1.0


class Trouble(Exception):
    """Something was wrong with a training."""


def environment() -> Path:
    """Return the Python of the venv with all trainers."""
    return venvs.environment("frameworks", ENGINES / "requirements") / "bin" / "python"


class Attempt:
    """One `skypool run` of a program, whose lines are read as they come.

    Args:
        argv: the command.
        options: of its process.
    """

    def __init__(self, argv: Sequence[str], **options: Any) -> None:
        self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, **options)
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # else it was killed in its middle
                self.lines.append((time.monotonic(), line[:-1]))

    def losses(self) -> dict[int, float]:
        return _trainer_check.said([line for _, line in self.lines])[0]

    def final(self) -> float | None:
        return _trainer_check.said([line for _, line in self.lines])[1]

    def kill(self) -> None:
        self.process.kill()
        self.end()

    def end(self) -> int:
        code = self.process.wait(PATIENCE)
        self._reader.join()
        return code


@dataclass
class Training:
    """A training, with its machines and its place in the bucket.

    Args:
        kind: of trainer.
        folder: for all files of the training.
        store: has the bucket.
        chance: decides what happens when.

    Attributes:
        lost: the steps that each kill has cost.
        lags: seconds from the end of a checkpoint on the disk until boto3 has found it in the bucket.
    """

    kind: str
    folder: Path
    store: stores.Store
    python: Path
    chance: random.Random
    lost: list[int] = field(default_factory=list[int], init=False)
    lags: list[float] = field(default_factory=list[float], init=False)
    _losses: list[dict[int, float]] = field(default_factory=list[dict[int, float]], init=False)
    _numbers: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        (self.folder / "project").mkdir(parents=True)
        self.program = f"train_{self.kind}.py"
        shutil.copy(PROGRAMS / self.program, self.folder / "project")
        self.prefix = f"runs/{self.folder.name}"
        self.cloud = FakeCloud(self.folder / "cloud", [Stock()])
        self.cloud.instances()  # it is there now
        self.reader = Reader(stores.client(self.store.endpoint), f"{self.prefix}/")
        names = {"STATE_HOME": "state", "RUNTIME_DIR": "run", "CACHE_HOME": "cache"}
        places = {f"XDG_{name}": str(self.folder / path) for name, path in names.items()}
        (self.folder / "run").mkdir()
        keys = dict(zip(KEYS, ("run", stores.secret_of("run")), strict=True))
        paths = os.pathsep.join(filter(None, map(os.path.abspath, filter(None, sys.path))))
        cloud = {"SKYPOOL_FAKE_CLOUD": str(self.folder / "cloud")}
        self.env = {**os.environ, **places, **keys, **cloud, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}

    def words(self, pause: float) -> list[str]:
        """Return the command line of the program."""
        return [str(self.python), self.program, f"--steps={STEPS}", f"--every={EVERY}", f"--pause={pause}"]

    def alone(self) -> Attempt:
        """Start the program without skypool. Nothing interrupts it."""
        place = self.folder / "alone"
        place.mkdir()
        shutil.copy(PROGRAMS / self.program, place)
        return Attempt(self.words(0), cwd=place, env=_plain(self.env), stderr=subprocess.DEVNULL)

    def start(self, *words: str) -> Attempt:
        """Start a program on a new machine."""
        self._numbers += 1
        argv = [
            sys.executable, "-m", "skypool", "run", "--provider", "fake", "--max-lifetime", "1h",
            "--save", f"out=s3://models/{self.prefix}", "--bucket-endpoint", self.store.endpoint,
            "--bucket-keys", ",".join(KEYS), "--env", "OMP_NUM_THREADS=1", *words,
        ]  # fmt: skip
        with (self.folder / f"said-{self._numbers}").open("w") as told:
            return Attempt(argv, cwd=self.folder / "project", env=self.env, stderr=told)

    def told(self) -> str:
        """Return what skypool and the program said last."""
        return (self.folder / f"said-{self._numbers}").read_text()[-1500:]

    def lose_machine(self, attempt: Attempt) -> None:
        """Kill everything on the machine, remove its disk, and kill the client."""
        self.cloud.terminate(self.cloud.instances())
        attempt.kill()
        before, now = None, self.reader.tags()
        while now != before:  # the store may still be ending what the machine had sent
            time.sleep(_SETTLING)
            before, now = now, self.reader.tags()

    def whole(self) -> list[int]:
        """Return the steps of the checkpoints that would be brought back, from old to new."""
        return sorted(_trainer_check.steps(self.kind, _trainer_check.programs_files(self.reader)))

    def newest(self) -> int:
        """Return the step from which a program would go on; 0 for none."""
        if self.kind != "lightning":
            return max(self.whole(), default=0)
        # it goes on from the newest of these; on another machine, each attempt has one of its own
        last = [each for each in self.reader.names() if re.fullmatch(r"last(-v\d+)?\.ckpt", each)]
        return max((_trainer_check.global_step(self.reader.get(each)) for each in last), default=0)

    def until(self, attempt: Attempt, is_so: Any, what: str) -> None:
        began = time.monotonic()
        while not is_so():
            if attempt.process.poll() is not None:
                raise Trouble(f"the program has ended before {what}: {self.told()}")
            if time.monotonic() - began > PATIENCE:
                raise Trouble(f"{what} did not happen within {PATIENCE:g} s: {self.told()}")
            time.sleep(_LOOK)

    # --- one training ------------------------------------------------------------------------------------------

    def train_until_killed(self, is_saved: bool) -> int:
        """Have an attempt, and kill it at a random moment: with `is_saved`, after a new checkpoint is in the bucket.

        Returns the step from which it has begun.
        """
        before, saved = self.newest(), max(self.whole(), default=0)
        attempt = self.start(*self.words(PAUSE))
        try:
            self.until(attempt, attempt.losses, "its first step")
            first = min(attempt.losses()) - 1
            seen: dict[int, float] = {}
            if is_saved:
                self.until(attempt, lambda: max(self._look(seen), default=0) > saved, "a checkpoint in the bucket")
                until = time.monotonic() + self.chance.uniform(0, EVERY * PAUSE)
            else:
                left = STEPS - max(attempt.losses()) - 1
                until = time.monotonic() + self.chance.uniform(0, max(0, left) * PAUSE)
            while time.monotonic() < until and attempt.process.poll() is None:
                self._look(seen)
                time.sleep(_LOOK)
            safe, reached, at = max(seen, default=0), max(attempt.losses()), time.monotonic()
        finally:
            self.lose_machine(attempt)
        self._losses.append(attempt.losses())
        if first != before:
            raise Trouble(f"it went on from {first}, and the bucket had {before}: {self.reader.tags()}")
        there = max(self.whole(), default=0)
        if there < safe:
            raise Trouble(f"step {safe} was in the bucket before the kill, and now only {there}")
        self.lost.append(reached - max(self.newest(), first))
        for step, when in seen.items():
            if done := [t for t, line in attempt.lines if line.startswith(f"step {step + 1} ") and t <= at]:
                self.lags.append(when - done[0])
        return first

    def _look(self, seen: dict[int, float]) -> dict[int, float]:
        """Note when each checkpoint was found in the bucket for the first time."""
        for step in self.whole():
            seen.setdefault(step, time.monotonic())
        return seen

    def remove_the_folder(self) -> None:
        """Have a program that removes its folder, and kill it."""
        before = self.whole()
        attempt = self.start("sh", "-c", "ls out && rm -rf out && mkdir out && echo removed && sleep 600")
        try:
            self.until(attempt, lambda: [each for _, each in attempt.lines if each == "removed"], "the removal")
            time.sleep(self.chance.uniform(0, 8))
        finally:
            self.lose_machine(attempt)
        if self.whole() != before:
            raise Trouble(f"the bucket had the steps {before}, and has {self.whole()} after `rm -rf out`")

    def finish(self, alone: Attempt) -> None:
        """Have an attempt that nobody kills. Raise Trouble if it does not end as without an interruption."""
        before = self.newest()
        attempt = self.start(*self.words(0))
        if code := attempt.end():
            raise Trouble(f"the program has ended with {code}: {self.told()}")
        if alone.end():
            raise Trouble("the program has failed without skypool")
        first = min(attempt.losses(), default=STEPS + 1) - 1
        if first != before:
            raise Trouble(f"it went on from {first}, and the bucket had {before}: {self.reader.tags()}")
        for losses in (*self._losses, attempt.losses()):
            if wrong := _trainer_check.differences(losses, alone.losses()):
                raise Trouble(f"losses differ: {wrong[:3]}")
        mine, theirs = attempt.final(), alone.final()
        if mine is None or theirs is None or abs(mine - theirs) > 1e-6 * max(1.0, abs(theirs)):
            raise Trouble(f"the final loss is {mine}, and {theirs} without an interruption")
        if max(self.whole(), default=0) != STEPS:
            raise Trouble(f"the bucket has {self.whole()} at the end")

    def check(self, name: str) -> Path:
        """Fetch what is in the bucket. Raise Trouble if a checkpoint lacks its last file."""
        there = _trainer_check.steps(self.kind, _trainer_check.programs_files(self.reader))
        if wrong := [*_trainer_check.without_last(self.kind, there)]:
            raise Trouble("; ".join(wrong))
        return _trainer_check.fetched(self.reader, self.folder / name)

    def load(self, folders: Sequence[Path], found: Sequence[list[int]]) -> None:
        """Load what was fetched, with the trainer's own library."""
        argv = [str(self.python), str(PROGRAMS / "load_checkpoints.py"), self.kind, *map(str, folders)]
        done = subprocess.run(argv, env=_plain(self.env), capture_output=True, text=True, timeout=PATIENCE)
        if done.returncode or done.stdout.splitlines() != [str(each) for each in found]:
            raise Trouble(f"{found} cannot be loaded: {done.stdout} {done.stderr[-1500:]}")

    def live(self, kills: int, is_saved: bool, removes: bool, loads: bool) -> None:
        """Train, with so many kills. Raise Trouble if something is wrong.

        Args:
            is_saved: True to kill the program after a new checkpoint is in the bucket, False for at any time.
            removes: True to have a program that removes its folder after the first kill.
            loads: True to load all checkpoints that were there after a kill or at the end.
        """
        alone = self.alone()
        folders, found = [], []
        try:
            for number in range(kills):
                self.train_until_killed(is_saved)
                folders.append(self.check(f"fetched-{number}"))
                found.append(self.whole())
                if removes and number == 0:
                    self.remove_the_folder()
            self.finish(alone)
        finally:
            alone.kill()
        folders.append(self.check("fetched-last"))
        found.append(self.whole())
        if loads:
            self.load(folders, found)

    def close(self) -> None:
        self.cloud.terminate(self.cloud.instances())
        shutil.rmtree(self.folder, ignore_errors=True)


def _plain(env: dict[str, str]) -> dict[str, str]:
    """Return an environment in which a Python finds its own packages only."""
    return {name: value for name, value in env.items() if name != "PYTHONPATH"}


def lived(
    kind: str, folder: Path, store: stores.Store, python: Path, chance: random.Random, is_soak: bool = True
) -> tuple[Training, str]:
    """Have one training. Return it, and what was wrong; "" for nothing.

    Args:
        is_soak: False for one kill, which comes after a checkpoint was saved. Only the last checkpoint is loaded then.
    """
    training = Training(kind, folder, store, python, chance)
    is_saved = chance.random() < 0.5 if is_soak else True
    kills = chance.choice((1, 1, 2) if is_saved else (2, 3, 4)) if is_soak else 1
    removes = is_soak and chance.random() < 0.3
    try:
        training.live(kills, is_saved, removes, loads=is_soak)
    except (Trouble, subprocess.TimeoutExpired) as e:
        return training, str(e)
    finally:
        training.close()
    return training, ""


def main(argv: Sequence[str] | None = None) -> int:
    """Have trainings, and print what was found; 1 if that is anything."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.trainers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="what happens when; processes add chance")
    parser.add_argument("--times", type=int, default=8, help="the number of trainings")
    parser.add_argument("--kinds", default=",".join(KINDS), help="the kinds of trainers, with commas between them")
    parser.add_argument("--together", type=int, default=2, help="trainings at one time")
    asked = parser.parse_args(argv)
    if why := stores.missing_s3():
        print(f"there is no store: {why}")
        return 0
    python, kinds = environment(), asked.kinds.split(",")
    troubles: list[str] = []
    done: dict[str, list[Training]] = {kind: [] for kind in kinds}
    with contextlib.ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        (top / "store").mkdir()
        store = stack.enter_context(stores.seaweedfs(top / "store", 100))
        threads = stack.enter_context(ThreadPoolExecutor(asked.together))
        stack.callback(threads.shutdown, cancel_futures=True)  # of a soak that is stopped

        def one(number: int) -> None:
            kind, began = kinds[number % len(kinds)], time.monotonic()
            chance = random.Random(f"{asked.seed} {number} {kind}")
            training, trouble = lived(kind, top / f"t{number}", store, python, chance)
            done[kind].append(training)
            if trouble:
                troubles.append(f"seed {asked.seed}, training {number}, {kind}: {trouble}")
            lags = " ".join(f"{each:.1f}" for each in training.lags)
            spent = time.monotonic() - began
            told = f"lost {training.lost}, lags {lags}, {spent:5.1f} s  {trouble or 'fine'}"
            print(f"{number:4} {kind:9} {told}", flush=True)

        for future in [threads.submit(one, number) for number in range(asked.times)]:
            future.result()
    for kind, trainings in done.items():
        lost = [each for training in trainings for each in training.lost]
        lags = sorted(each for training in trainings for each in training.lags)
        told = f"lags median {lags[len(lags) // 2]:.1f} s, most {lags[-1]:.1f} s" if lags else ""
        most = f"at most {max(lost)} steps lost, {EVERY} are between two checkpoints" if lost else ""
        print(f"{kind:9} {len(trainings)} trainings, {len(lost)} kills; {most}; {told}")
    print(f"seed {asked.seed}: {asked.times} trainings, {len(troubles)} troubles", *troubles, sep="\n")
    return 1 if troubles else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
