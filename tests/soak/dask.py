"""A Dask cluster on machines that are killed, taken back and lost: each time there are four workers again, and no loss.

    python -m tests.soak.dask --runs 10 --seed 1

Each run is a program with Dask (tests/engines/scripts/dask_lab.py), and a pool of four of five machines of the lab,
which it reaches over ssh. In an order by chance, a worker is killed, a machine is taken back with a notice, a machine
loses its power, and the cluster gets smaller and larger by hand and by its load. At last the machine of the scheduler
loses its power. At the end no process, file or port of the run may be left on the machines and on this computer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.clients import venvs
from tests.conftest import processes_of
from tests.lab import environments, kernel
from tests.lab.machines import Lab, Machine, unavailable
from tests.lab.spot_metadata import Metadata

ROOT = Path(__file__).parent.parent.parent
ENGINES = ROOT / "tests" / "engines"
MACHINES = 5
STEPS = ("tasks", "kill", "notice", "lose", "scale", "adapt")
LAST = "head"
"""The step after which the cluster is another one."""
LATE = 40.0
"""Seconds by which anything may be late, as this machine may be busy. The pool's lease of 12 s is in it."""
HANG = 900.0
"""Seconds after which a program is killed that has not ended."""


# --- an environment and machines ---------------------------------------------------------------------------------


def environment() -> Path:
    """Return the venv with Dask and this skypool. Its modules are compiled: machines see it, but cannot write it."""
    folder = venvs.environment("dask", ENGINES / "requirements")
    (packages,) = (folder / "lib").glob("python3*/site-packages")
    lines = [str(ROOT / each) for each in ("", "providers", "images")]
    (packages / "_skypool.pth").write_text("\n".join(lines) + "\n")
    own = metadata.distribution("skypool")
    target = packages / f"skypool-{own.version}.dist-info"
    target.mkdir(exist_ok=True)
    for name in ("METADATA", "entry_points.txt"):  # the names of the drivers
        (target / name).write_text(own.read_text(name) or "")
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


def left_on(machine: Machine) -> list[str]:
    """Return what skypool and Dask have left on a machine that runs: processes, files in /tmp, and open ports."""
    left = [name for name in machine.processes().values() if "skypool" in name] + of_dask(machine)
    left += [each.name for each in machine.path("/tmp").iterdir()]
    listening = machine.run("ss -Hltn").stdout.splitlines()
    return left + [line for line in listening if not line.split()[3].endswith((":22", "169.254.169.254:80"))]


# --- a run -------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One run: the program's steps with their seconds, and what was wrong."""

    number: int
    steps: dict[str, float] = field(default_factory=dict[str, float])
    said: list[str] = field(default_factory=list[str])
    troubles: list[str] = field(default_factory=list[str])
    seconds: float = 0.0


class Machines:
    """The machines of one run, which break when the program asks for it."""

    def __init__(self, machines: Sequence[Machine], this: Run) -> None:
        self._by_address = {each.address: each for each in machines}
        self._run = this

    def do(self, asked: dict[str, Any]) -> None:
        """Do what the program has asked for.

        Raises:
            KeyError, RuntimeError, TimeoutError: it cannot be done.
        """
        match asked:
            case {"do": "kill", "address": address, "inside": pid}:
                self._by_address[address].run(["kill", "-9", str(pid)])
            case {"do": "notice", "address": address, "seconds": seconds}:
                Metadata.taken[self._by_address[address].name] = int(time.time() + seconds)
            case {"do": "check gone", "address": address}:
                taken = self._by_address[address]
                left = Metadata.taken[taken.name] - time.time()
                self._run.said.append(f"the worker was gone {left:.1f} s before its machine")
                self._until_none([taken], "a worker under notice was gone", max(0.0, left))
                if taken.is_running:
                    taken.kill()
                del Metadata.taken[taken.name]
            case {"do": "power", "address": address}:
                self._by_address[address].kill()
            case {"do": "boot", "address": address}:
                boot(self._by_address[address])
            case {"do": "check dask gone"}:
                self._until_none([each for each in self._by_address.values() if each.is_running], "a cluster ended")
            case _:
                raise KeyError(f"{asked} is unknown")

    def _until_none(self, machines: Sequence[Machine], what: str, within: float = LATE) -> None:
        until = time.monotonic() + within
        for each in machines:
            while found := of_dask(each):
                if time.monotonic() > until:
                    self._run.troubles.append(f"after {what}, {found} are left on {each.name}")
                    break
                time.sleep(0.1)


def run(number: int, chance: random.Random, lab: Lab, machines: Sequence[Machine], steps: Sequence[str] = ()) -> Run:
    """Make one run.

    Args:
        number: the number of the run.
        chance: what the order of the steps, and what they break, depends on.
        lab: the lab.
        machines: five machines, which are clean. They are so afterwards, too, if nothing was wrong.
        steps: the steps; all in an order by chance if there are none.
    """
    this = Run(number)
    began = time.monotonic()
    venv = environment()
    settings: dict[str, Any] = {
        "name": f"soak-{os.getpid()}-{number}",
        "seed": chance.random(),
        "identity": str(lab.client_key),
        "python": str(venv / "bin" / "python"),
        "machines": [(each.address, each.host_key) for each in machines],
        "steps": list(steps) or [*chance.sample(STEPS, len(STEPS)), LAST],
    }
    argv = [str(venv / "bin" / "python"), "-W", "ignore", str(ENGINES / "scripts" / "dask_lab.py")]
    with tempfile.TemporaryDirectory(prefix="dask-soak-") as home, open(f"{home}/stderr", "w+") as errors:
        (Path(home) / "tmp").mkdir()
        env = {"HOME": home, "TMPDIR": f"{home}/tmp", "PATH": "/usr/bin:/bin", "XDG_STATE_HOME": f"{home}/state"}
        program = subprocess.Popen(
            [*argv, json.dumps(settings)], cwd=home, env=env, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip
        with program:
            _converse(program, Machines(machines, this), this)
            program.kill()
        if "end" not in this.steps:
            errors.seek(0)
            said = errors.read()
            this.troubles.append(f"run {number} {settings['steps']}: {said[:3000]} … {said[-2000:]}")
        if here := [*processes_of(settings["name"]), *(each.name for each in (Path(home) / "tmp").iterdir())]:
            this.troubles.append(f"run {number}: left on this computer: {here}")
    Metadata.taken.clear()
    for each in machines:
        _clean(each, this)
    this.seconds = time.monotonic() - began
    return this


def _converse(program: subprocess.Popen[str], machines: Machines, this: Run) -> None:
    """Do what the program asks for until it ends. It is killed if it has not ended after `HANG` seconds."""
    timer = threading.Timer(HANG, program.kill)
    timer.start()
    assert program.stdin is not None
    try:
        for words in _words(program):
            match words:
                case {"do": _}:
                    machines.do(words)
                    program.stdin.write("done\n")
                    program.stdin.flush()
                case {"step": name, "seconds": seconds}:
                    this.steps[name] = seconds
                case {"end": "fine"}:
                    this.steps["end"] = 0.0
                case _:
                    this.said.append(str(words))
    except (KeyError, OSError, RuntimeError, subprocess.CalledProcessError) as e:
        this.troubles.append(f"run {this.number}: {e!r}")
    finally:
        timer.cancel()


def _words(program: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert program.stdout is not None
    for line in program.stdout:
        if "@{" in line:
            yield json.loads(line[line.index("@{") + 1 :])


def _clean(machine: Machine, this: Run) -> None:
    """Note what is left on a machine, and switch it on if it is off."""
    if machine.is_running:
        until = time.monotonic() + LATE
        while left := left_on(machine):
            if time.monotonic() > until:
                this.troubles.append(f"run {this.number}: left on {machine.name}: {left}")
                break
            time.sleep(0.2)
    else:
        boot(machine)


def boot(machine: Machine) -> None:
    """Switch a machine on that has lost its power. Its /tmp is empty then, as on a machine whose /tmp is in memory."""
    for each in machine.path("/tmp").iterdir():
        subprocess.run(["rm", "-rf", str(each)], check=True)
    machine.boot()
    machine.wait_for_ssh()


def main(argv: Sequence[str] | None = None) -> int:
    """Make the runs; 1 if something was wrong in one of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.dask", description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", default="", help="the steps by their names, with commas; all of them by default")
    asked = parser.parse_args(sys.argv[1:] if argv is None else list(argv))
    if why := unavailable():
        print(f"not run: {why}")
        return 0
    began = time.monotonic()
    venv, good = environment(), 0
    with Lab() as lab:
        machines = [machine(lab, venv) for _ in range(MACHINES)]
        for number in range(asked.runs):
            steps = [each for each in asked.steps.split(",") if each]
            done = run(number, random.Random(f"{asked.seed}/{number}"), lab, machines, steps)
            good += not done.troubles
            print(f"run {number}: {done.seconds:.0f} s {done.steps} {done.said} {done.troubles or 'fine'}", flush=True)
    print(f"{good} of {asked.runs} runs went well and left nothing, in {time.monotonic() - began:.0f} s")
    return 0 if good == asked.runs else 1


if __name__ == "__main__":
    sys.exit(main())
