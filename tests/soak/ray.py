"""A Ray cluster on machines that are killed, taken back and lost: each time there are four nodes again, and no loss.

    python -m tests.soak.ray --runs 10 --seed 1

Each run is a program (tests/engines/scripts/ray_lab.py), and a pool of four of five machines of the lab, which it
reaches over ssh. In an order by chance, Ray's daemon of a node is killed, a machine is taken back with a notice, a
machine loses its power, and the cluster gets smaller and larger. At last the head is killed, or its machine loses its
power. At the end no process, file or port of the run may be left on the machines and on this computer.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.clients import venvs
from tests.lab import environments
from tests.lab.machines import Lab, Machine
from tests.lab.spot_metadata import Metadata
from tests.soak import _clusters

ROOT = Path(__file__).parent.parent.parent
ENGINES = ROOT / "tests" / "engines"
STEPS = ("tasks", "kill", "notice", "lose", "resize")
LAST = "head"
"""The step after which the cluster is another one."""


def environment() -> Path:
    """Return the venv with Ray that machines see."""
    return environments.compiled(venvs.environment("ray", ENGINES / "requirements"))


def machine(lab: Lab) -> Machine:
    """Return a new machine that sees the venv and the Python below it."""
    venv = environment()
    return lab.machine(keys=[lab.public_key], prepare=lambda made: environments.show(made, venv), metadata=Metadata.of)


def commands(machine: Machine) -> dict[int, str]:
    """Return the command lines of a machine's processes. A worker of Ray has the name of its task in it."""
    found = {}
    for pid in machine.processes():
        with contextlib.suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def of_ray(machine: Machine) -> list[str]:
    """Return the processes of Ray, and those of services, on a machine."""
    found = []
    for pid, command in commands(machine).items():
        with contextlib.suppress(OSError):
            is_service = b"SKYPOOL_SERVICE" in Path(f"/proc/{pid}/environ").read_bytes()
            if is_service or any(each in command for each in ("ray::", "site-packages/ray/", "skypool-ray-")):
                found.append(f"{pid} {command[:200]}")
    return found


def do(machine: Machine, asked: dict[str, Any]) -> None:
    """Do on a machine what the program asks for: wait for a task, kill a daemon of Ray, or wait until it is back."""
    match asked:
        case {"do": "until task", "task": task}:
            started(machine, task)
        case {"do": "kill daemon", "daemon": daemon, "returns": returns}:
            pids = started(machine, daemon)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            if returns:
                started(machine, daemon, but=pids)
        case _:
            raise KeyError(f"{asked} is unknown")


def started(machine: Machine, word: str, but: Sequence[int] = ()) -> list[int]:
    """Return the processes of a machine whose programs have a word in their names, when there are some.

    Args:
        machine: the machine.
        word: the word.
        but: processes that do not count.
    """
    until = time.monotonic() + _clusters.LATE
    while True:
        found = [pid for pid, command in commands(machine).items() if word in command.partition(" ")[0]]
        if rest := [pid for pid in found if pid not in but]:
            return rest
        if time.monotonic() > until:
            raise TimeoutError(f"no process {word} on {machine.name}: {commands(machine)}")
        time.sleep(0.05)


def engine() -> _clusters.Engine:
    """Return Ray as an engine of a soak. Its program does without Ray on this computer."""
    program = [sys.executable, "-W", "ignore", str(ENGINES / "scripts" / "ray_lab.py")]
    python = str(environment() / "bin" / "python")
    return _clusters.Engine("ray", python, program, {"PYTHONPATH": str(ROOT)}, STEPS, LAST, of_ray, do)


def run(
    number: int, chance: random.Random, lab: Lab, machines: Sequence[Machine], steps: Sequence[str] = ()
) -> _clusters.Run:
    """Make one run, as `_clusters.run` does."""
    return _clusters.run(engine(), number, chance, lab, machines, steps)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the runs; 1 if something was wrong in one of them."""
    return _clusters.main("tests.soak.ray", __doc__, engine, machine, _clusters.words_of(argv))


if __name__ == "__main__":
    sys.exit(main())
