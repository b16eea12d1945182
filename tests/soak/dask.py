"""A Dask cluster on machines that are killed, taken back and lost: each time there are four workers again, and no loss.

    python -m tests.soak.dask --runs 10 --seed 1

Each run is a program with Dask (tests/engines/scripts/dask_lab.py), and a pool of four of five machines of the lab,
which it reaches over ssh. In an order by chance, a worker is killed, a machine is taken back with a notice, a machine
loses its power, and the cluster gets smaller and larger by hand and by its load. At last the machine of the scheduler
loses its power. At the end no process, file or port of the run may be left on the machines and on this computer.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.clients import venvs
from tests.lab import environments, kernel
from tests.lab.machines import Lab, Machine
from tests.lab.spot_metadata import Metadata
from tests.soak import _clusters

ROOT = Path(__file__).parent.parent.parent
ENGINES = ROOT / "tests" / "engines"
MACHINES = _clusters.MACHINES
STEPS = ("tasks", "kill", "notice", "lose", "scale", "adapt")
LAST = "head"
"""The step after which the cluster is another one."""


# --- an environment and machines ---------------------------------------------------------------------------------


def environment() -> Path:
    """Return the venv with Dask and this skypool. Its modules are compiled: machines see it, but cannot write it."""
    folder = venvs.with_skypool(venvs.environment("dask", ENGINES / "requirements"))
    return environments.compiled(folder)


def machine(lab: Lab, venv: Path, others: Mapping[Path, Path] = MappingProxyType({})) -> Machine:
    """Return a new machine that sees the venv and the Python below it.

    Args:
        lab: the lab.
        venv: the folder of the venv.
        others: folders of this computer that it sees in place of others. Default: none.
    """

    def show(made: Machine) -> None:
        environments.show(made, venv)
        for folder, own in others.items():
            kernel.bind(own, made.path(folder))

    return lab.machine(keys=[lab.public_key], prepare=show, metadata=Metadata.of)


def of_dask(machine: Machine, any_of: Sequence[bytes] = (b"DASK_TEMPORARY_DIRECTORY", b"SKYPOOL_SERVICE")) -> list[str]:
    """Return the processes of a machine that have one of these texts in their environment."""
    found = []
    for pid, name in machine.processes().items():
        with contextlib.suppress(OSError):
            seen = Path(f"/proc/{pid}/environ").read_bytes()
            if any(each in seen for each in any_of):
                found.append(f"{pid} {name}")
    return found


# --- a run -------------------------------------------------------------------------------------------------------


def engine() -> _clusters.Engine:
    """Return Dask as an engine of a soak."""
    python = str(environment() / "bin" / "python")
    argv = [python, "-W", "ignore", str(ENGINES / "scripts" / "dask_lab.py")]
    return _clusters.Engine("dask", python, argv, {}, STEPS, LAST, of_dask, _unknown)


def _unknown(machine: Machine, asked: dict[str, Any]) -> None:
    raise KeyError(f"{asked} is unknown")


def run(
    number: int, chance: random.Random, lab: Lab, machines: Sequence[Machine], steps: Sequence[str] = ()
) -> _clusters.Run:
    """Make one run, as `_clusters.run` does."""
    return _clusters.run(engine(), number, chance, lab, machines, steps)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the runs; 1 if something was wrong in one of them."""
    words = _clusters.words_of(argv)
    return _clusters.main("tests.soak.dask", __doc__, engine, lambda lab: machine(lab, environment()), words)


if __name__ == "__main__":
    sys.exit(main())
