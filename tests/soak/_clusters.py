"""Soaks of engines that have clusters: a program with a cluster, machines that are broken as it asks, what is left."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conftest import processes_of
from tests.lab import kernel
from tests.lab.machines import Lab, Machine, unavailable
from tests.lab.spot_metadata import Metadata

MACHINES = 5
LATE = 40.0
"""Seconds by which anything may be late, as this machine may be busy. The pool's lease of 12 s is in it."""
HANG = 900.0
"""Seconds after which a program is killed that has not ended."""


@dataclass
class Run:
    """One run: the program's steps with their seconds, and what was wrong."""

    number: int
    steps: dict[str, float] = field(default_factory=dict[str, float])
    said: list[str] = field(default_factory=list[str])
    troubles: list[str] = field(default_factory=list[str])
    seconds: float = 0.0


@dataclass(frozen=True)
class Engine:
    """An engine, as far as a soak must know it.

    Attributes:
        name: its name, for folders.
        python: the Python of the machines.
        program: the command line of its program. The settings are added as JSON.
        environment: variables of the program.
        steps: what the program can do, in any order.
        last: the step that comes last.
        left: returns the processes of the engine on a machine.
        do: does what the program asks for beside what `Machines` does. Raises a KeyError if that is unknown.
    """

    name: str
    python: str
    program: Sequence[str]
    environment: Mapping[str, str]
    steps: Sequence[str]
    last: str
    left: Callable[[Machine], list[str]]
    do: Callable[[Machine, dict[str, Any]], None]


class Machines:
    """The machines of one run, which break when the program asks for it."""

    def __init__(self, engine: Engine, machines: Sequence[Machine], this: Run) -> None:
        self._engine = engine
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
                self._run.said.append(f"what was there was gone {left:.1f} s before its machine")
                self._until_none([taken], "a worker under notice was gone", max(0.0, left))
                if taken.is_running:
                    taken.kill()
                del Metadata.taken[taken.name]
            case {"do": "power", "address": address}:
                self._by_address[address].kill()
            case {"do": "boot", "address": address}:
                boot(self._by_address[address])
            case {"do": "check cluster gone"}:
                self._until_none([each for each in self._by_address.values() if each.is_running], "a cluster ended")
            case {"do": _, "address": address}:
                self._engine.do(self._by_address[address], asked)
            case _:
                raise KeyError(f"{asked} is unknown")

    def _until_none(self, machines: Sequence[Machine], what: str, within: float = LATE) -> None:
        until = time.monotonic() + within
        for each in machines:
            while found := self._engine.left(each):
                if time.monotonic() > until:
                    self._run.troubles.append(f"after {what}, {found} are left on {each.name}")
                    break
                time.sleep(0.1)


def run(
    engine: Engine, number: int, chance: random.Random, lab: Lab, machines: Sequence[Machine], steps: Sequence[str] = ()
) -> Run:
    """Make one run.

    Args:
        engine: the engine.
        number: the number of the run.
        chance: what the order of the steps, and what they break, depends on.
        lab: the lab.
        machines: five machines, which are clean. They are so afterwards, too, if nothing was wrong.
        steps: the steps; all in an order by chance if there are none.
    """
    this = Run(number)
    began = time.monotonic()
    settings: dict[str, Any] = {
        "name": f"soak-{os.getpid()}-{number}",
        "seed": chance.random(),
        "identity": str(lab.client_key),
        "python": engine.python,
        "machines": [(each.address, each.host_key) for each in machines],
        "steps": list(steps) or [*chance.sample(engine.steps, len(engine.steps)), engine.last],
    }
    with tempfile.TemporaryDirectory(prefix=f"{engine.name}-soak-") as home, open(f"{home}/stderr", "w+") as errors:
        (Path(home) / "tmp").mkdir()
        env = {"HOME": home, "TMPDIR": f"{home}/tmp", "PATH": "/usr/bin:/bin", "XDG_STATE_HOME": f"{home}/state"}
        program = subprocess.Popen(
            [*engine.program, json.dumps(settings)], cwd=home, env={**env, **engine.environment}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip
        with program:
            _converse(program, Machines(engine, machines, this), this)
            program.kill()
        if "end" not in this.steps:
            errors.seek(0)
            said = errors.read()
            this.troubles.append(f"run {number} {settings['steps']}: {said[:3000]} … {said[-2000:]}")
        if here := [*processes_of(settings["name"]), *(each.name for each in (Path(home) / "tmp").iterdir())]:
            this.troubles.append(f"run {number}: left on this computer: {here}")
    Metadata.taken.clear()
    for each in machines:
        _clean(engine, each, this)
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


def left_on(engine: Engine, machine: Machine) -> list[str]:
    """Return what skypool and an engine have left on a machine that runs: processes, files, and open ports."""
    left = [name for name in machine.processes().values() if "skypool" in name] + engine.left(machine)
    left += [each.name for each in machine.path("/tmp").iterdir() if not kernel.mounts_below(each)]  # of the host
    left += machine.run(["ls", "/dev/shm"]).stdout.split()
    listening = machine.run("ss -Hltn").stdout.splitlines()
    return left + [line for line in listening if not line.split()[3].endswith((":22", "169.254.169.254:80"))]


def _clean(engine: Engine, machine: Machine, this: Run) -> None:
    """Note what is left on a machine, and switch it on if it is off."""
    if machine.is_running:
        until = time.monotonic() + LATE
        while left := left_on(engine, machine):
            if time.monotonic() > until:
                this.troubles.append(f"run {this.number}: left on {machine.name}: {left}")
                break
            time.sleep(0.2)
    else:
        boot(machine)


def boot(machine: Machine) -> None:
    """Switch a machine on that has lost its power. Its /tmp is empty then, as on a machine whose /tmp is in memory.

    What is mounted there stays, as it belongs to the host.
    """
    for each in machine.path("/tmp").iterdir():
        if not kernel.mounts_below(each):
            subprocess.run(["rm", "-rf", str(each)], check=True)
    machine.boot()
    machine.wait_for_ssh()


def main(
    prog: str, about: str | None, made: Callable[[], Engine], machine: Callable[[Lab], Machine], argv: Sequence[str]
) -> int:
    """Make the runs; 1 if something was wrong in one of them.

    Args:
        prog: the name of the soak.
        about: what it does.
        made: returns the engine, whose environment is made.
        machine: returns a new machine that sees the environment.
        argv: the options.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", description=about)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first run, which decides what it does")
    parser.add_argument("--steps", default="", help="the steps by their names, with commas; all of them by default")
    asked = parser.parse_args(argv)
    if why := unavailable():
        print(f"not run: {why}")
        return 0
    began = time.monotonic()
    engine, good = made(), 0
    steps = [each for each in asked.steps.split(",") if each]
    with Lab() as lab:
        machines = [machine(lab) for _ in range(MACHINES)]
        for number in range(asked.first, asked.first + asked.runs):
            done = run(engine, number, random.Random(f"{asked.seed}/{number}"), lab, machines, steps)
            good += not done.troubles
            print(f"run {number}: {done.seconds:.0f} s {done.steps} {done.said} {done.troubles or 'fine'}", flush=True)
    print(f"{good} of {asked.runs} runs went well and left nothing, in {time.monotonic() - began:.0f} s")
    return 0 if good == asked.runs else 1


def words_of(argv: Sequence[str] | None) -> list[str]:
    """Return the options of a soak: those of the command line if none are given."""
    return sys.argv[1:] if argv is None else list(argv)
