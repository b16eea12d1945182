"""A machine of the fake cloud: processes on this computer, a folder, and a door for commands.

All that runs there has the folder in its environment, by which it is found when the machine is switched off.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from skypool.accelerators import Accelerator
from skypool.devices import Device
from skypool.wire.transport import Trouble

MARK = "SKYPOOL_FAKE_MACHINE"
"""Environment variable with the machine's folder, by which the processes of a machine are found."""
_UP = "up"
"""File of a machine that lets commands in."""
_LEASE = "lease"
"""File of a machine's guard, by which its end is put off."""
_INTERRUPTION = "interruption"
"""File with the time at which a machine is taken back."""
_NOBODY = "No route to host: this fake machine does not answer"


@dataclass(frozen=True, slots=True)
class Door:
    """How commands are run on a fake machine.

    Args:
        folder: the machine's; devices: what it finds when it looks for accelerators, as JSON.
    """

    folder: str
    devices: str = "[]"

    def argv(self, command: Sequence[str], *, terminal: bool = False) -> list[str]:
        env = [f"{MARK}={self.folder}", f"HOME={self.folder}/home", f"SKYPOOL_DEVICES={self.devices}"]
        door = _program("door.sh")
        return ["env", *env, "sh", "-c", door, self.folder, _UP, _NOBODY, *command]

    def trouble(self, said: str) -> Trouble:
        return Trouble.UNREACHABLE if _NOBODY in said else Trouble.OTHER


class Heard(NamedTuple):
    """What a machine's guard says: its text, when that was written, and the seconds it grants."""

    text: str
    at: float
    seconds: float


def run_here() -> bool:
    """Return whether this computer can run them: what runs on a node needs Linux."""
    return os.path.exists("/proc/self/stat")


def create(folder: str) -> None:
    """A new machine that does not answer yet, with a guard that was told nothing yet."""
    (Path(folder) / "home").mkdir(parents=True, exist_ok=True)  # there if who was to make it was overtaken
    Path(guard(folder)).write_text(f"{'':<31}\n")  # written over, as `skypool.drivers.userdata` says


def answer(folder: str) -> None:
    """Its boot is through: from now on it lets commands in."""
    with contextlib.suppress(FileNotFoundError):  # a cloud without real machines
        (Path(folder) / _UP).touch()


def hush(folder: str) -> None:
    """Nobody answers there any more; what runs there goes on."""
    (Path(folder) / _UP).unlink(missing_ok=True)


def guard(folder: str) -> str:
    """The file by which its end is put off."""
    return f"{folder}/{_LEASE}"


def heard(folder: str) -> Heard | None:
    """What its guard says now; None if nothing was said yet, or nothing that makes sense."""
    file = Path(guard(folder))
    try:
        at = file.stat().st_mtime
        text = file.read_text()
        return Heard(text, at, float(text.split()[1]))
    except (OSError, ValueError, IndexError):
        return None


def interrupt(folder: str, at: float) -> None:
    """Give notice that it is taken back at `at`, seconds since 1970."""
    file = Path(folder) / _INTERRUPTION
    if file.parent.exists():
        new = file.with_suffix(".new")
        new.write_text(f"{at}")
        new.replace(file)


def watch(folder: str) -> str:
    """The source of what waits there for that notice."""
    return f"{_program('notice_watch.py')}\nwait({f'{folder}/{_INTERRUPTION}'!r})\n"


@cache
def _program(name: str) -> str:
    """Return the text of a program in this folder."""
    return (files("skypool.testing") / name).read_text("utf-8")


def devices(has: Accelerator | None) -> str:
    """What a machine with this accelerator finds in itself, as JSON."""
    if has is None or has.kind == "cpu":
        return "[]"
    count = has.slice.chips_per_vm if has.slice else has.count
    profile = has.part.profile if has.part else ""
    name = str(has).partition("/")[0].partition(":")[0]
    found = [Device(has.runtime, index, name, pin=str(index), profile=profile) for index in range(count)]
    return json.dumps([asdict(each) for each in found])


def terminate(folder: str, patience: float = 10.0) -> None:
    """Kill all that runs there and remove its folder; quiet if it has gone already."""
    hush(folder)
    until = time.monotonic() + patience
    while left := inhabitants(folder):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            raise RuntimeError(f"processes {left} of the fake machine {folder} survive SIGKILL")
        time.sleep(0.002)
    remove(folder)


def remove(folder: str) -> None:
    """Remove the folder of a machine on which nothing runs; quiet if it has gone already."""
    shutil.rmtree(folder, ignore_errors=True)


def inhabitants(folder: str) -> list[int]:
    """The live processes of a machine: those that say so, and all below them."""
    if not run_here():
        return []
    mark = f"{MARK}={folder}\0".encode()
    found = set[int]()
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                place = Path("/proc", name)
                state, parent = (place / "stat").read_bytes().rpartition(b")")[2].split()[:2]
                marked = mark in (place / "environ").read_bytes()
            except OSError:
                continue
            if state != b"Z":
                children.setdefault(int(parent), []).append(int(name))
                found |= {int(name)} if marked else set()
    todo = list(found)
    while todo:
        below = set(children.get(todo.pop(), [])) - found
        found |= below
        todo += below
    return sorted(found - {os.getpid()})


def start_hypervisor(folder: str) -> None:
    """Start what lets the machines of a cloud end by themselves when nobody looks; one that is there is enough."""
    subprocess.run(
        ["sh", "-c", '"$@" &', "sh", sys.executable, "-m", "skypool.testing.hypervisor", folder],
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))},
        start_new_session=True,
    )
