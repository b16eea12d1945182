"""Machines of the lab that see a virtual environment of this computer, and pools on them."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import skypool as sky
from tests.lab import kernel
from tests.lab.machines import Lab, Machine


def compiled(venv: Path) -> Path:
    """Compile the modules of a venv if that was not done yet, and return the venv.

    Machines see it, but cannot write it: else each of their processes compiles all that it imports.
    """
    if not (done := venv / ".compiled").exists():
        (packages,) = (venv / "lib").glob("python3*/site-packages")
        argv = [str(venv / "bin" / "python"), "-m", "compileall", "-q", "-x", "/(tests?|rllib)/", str(packages)]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        subprocess.run(argv, env=env, check=False, timeout=280)  # templates in packages are no valid modules
        done.touch()
    return venv


def show(machine: Machine, venv: Path) -> None:
    """Let a machine that is being made see a venv and the Python below it, at the paths that they have here."""
    base = Path(sys.base_prefix)
    for folder in (venv, base) if base != Path("/usr") else (venv,):
        machine.path(folder).mkdir(parents=True, exist_ok=True)
        kernel.bind(folder, machine.path(folder))


@contextmanager
def machines_with(lab: Lab, venv: Path, count: int = 4) -> Iterator[list[Machine]]:
    """Return machines that see a venv, for the `with` block."""
    made = [lab.machine(keys=[lab.public_key], prepare=functools.partial(show, venv=venv)) for _ in range(count)]
    yield made
    for each in made:
        each.destroy()


def ssh_to(lab: Lab, machines: Sequence[Machine], venv: Path) -> sky.SSH:
    """Return the driver for machines that see a venv, whose Python their nodes use."""
    hosts = [sky.Host(each.address, host_key=each.host_key) for each in machines]
    return sky.SSH(hosts=hosts, user="root", identity=str(lab.client_key), python=str(venv / "bin" / "python"))


@contextmanager
def pool_on(lab: Lab, machines: Sequence[Machine], venv: Path) -> Iterator[sky.ComputePool]:
    """Return a pool on machines that see a venv, for the `with` block. Its nodes use the Python of the venv."""
    with sky.ComputePool(ssh_to(lab, machines, venv), nodes=len(machines), slots=1, console="off") as made:
        yield made
