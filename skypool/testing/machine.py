"""A machine of the fake cloud: a folder and processes on this computer, and a transport that runs commands there.

Each process of a machine has the path of the machine's folder in its environment, in `SKYPOOL_FAKE_MACHINE`. When the
machine ends, its processes are found by that variable and killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
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
from skypool.agent.guard import END, HELD
from skypool.devices import Device
from skypool.safety import removal
from skypool.wire.transport import Trouble

MARK = "SKYPOOL_FAKE_MACHINE"
"""Environment variable with the path of the machine's folder. The processes of a machine are found by this variable."""
_UP = "up"
"""Name of the file in a machine's folder that exists while the machine accepts commands."""
_LEASE = "lease"
"""Name of the file in a machine's folder that the client rewrites to keep the machine alive."""
_INTERRUPTION = "interruption"
"""Name of the file in a machine's folder with the time at which the cloud takes the machine back."""
_REQUEST = re.compile(r"(\d+) (\d{1,8}) (-|[0-9a-f]+) \1\s*")
"""Matches a request for an earlier end, as `skypool.agent.guard` writes it."""
_COMMON = re.compile(
    "PATH|LANG|LANGUAGE|LC_.*|TZ|USER|LOGNAME|SHELL|TMPDIR|LD_LIBRARY_PATH|SSL_CERT_(FILE|DIR)|(?i:.*_proxy)"
)
"""The environment variables of this process that a machine has, too: a rented one has those of its system alone."""
_NOBODY = "No route to host: this fake machine does not answer"


@dataclass(frozen=True, slots=True)
class Door:
    """A transport that runs commands on a fake machine. It is used where a real machine has ssh.

    Args:
        folder: the machine's folder.
        devices: the accelerators that the machine reports, as a JSON list that the function `devices` of this module
            made.
    """

    folder: str
    devices: str = "[]"

    def argv(self, command: Sequence[str], *, terminal: bool = False) -> list[str]:
        """Return (not run) the local command that runs `command` on the machine, in the machine's home folder.

        If the machine does not accept commands, the returned command exits with status 255. `terminal` is ignored.
        """
        env = [f"{MARK}={self.folder}", f"HOME={self.folder}/home", f"SKYPOOL_DEVICES={self.devices}"]
        door = _program("door.sh")
        # removed by name, as all users of this computer may read the words of a command
        others = [word for name in os.environ if not _COMMON.fullmatch(name) for word in ("-u", name)]
        return ["env", *others, *env, "sh", "-c", door, self.folder, _UP, _NOBODY, *command]

    def trouble(self, said: str) -> Trouble:
        """Return why a command could not be run, judged by `said`, its text on stderr.

        The result is `Trouble.UNREACHABLE` if the machine does not answer, and `Trouble.OTHER` for any other reason.
        """
        return Trouble.UNREACHABLE if _NOBODY in said else Trouble.OTHER


class Heard(NamedTuple):
    """The content of a machine's lease file, in which the client writes how long the machine may live on.

    Attributes:
        text: the whole text, "SERIAL SECONDS".
        at: when the text was written, in seconds since 1970 on this computer's clock.
        seconds: for how many seconds from then on the machine may live.
    """

    text: str
    at: float
    seconds: float


class AskedEnd(NamedTuple):
    """A request on a machine that the machine ends in `seconds` at the latest, whatever is asked for later.

    Attributes:
        serial: the number of the request, for the answer.
        at: when it was written, in seconds since 1970 on this computer's clock.
        heir: digest of the heir; "-" for none.
    """

    serial: str
    at: float
    seconds: int
    heir: str


def run_here() -> bool:
    """Return True if fake machines can run as processes on this computer, which requires Linux."""
    return os.path.exists("/proc/self/stat")


def create(folder: str) -> None:
    """Make the folder of a machine, with empty files for its lease and its end. It does not accept commands yet.

    If the folder exists already, its other contents are kept.
    """
    (Path(folder) / "home").mkdir(parents=True, exist_ok=True)  # a lost change may have made it
    Path(guard(folder)).write_text(f"{'':<31}\n")  # overwritten in place: see `skypool.drivers.userdata`
    (Path(folder) / END).write_text(f"{'':<127}\n")


def answer(folder: str) -> None:
    """Make a machine accept commands from now on, because its boot has ended. Does nothing if the folder is missing."""
    with contextlib.suppress(FileNotFoundError):  # the folder was removed
        (Path(folder) / _UP).touch()


def hush(folder: str) -> None:
    """Make a machine refuse commands from now on. Processes there continue. Does nothing without the folder."""
    (Path(folder) / _UP).unlink(missing_ok=True)


def guard(folder: str) -> str:
    """Return the path of a machine's lease file, which the client rewrites to keep the machine alive."""
    return f"{folder}/{_LEASE}"


def heard(folder: str) -> Heard | None:
    """Return the content of a machine's lease file. Returns None if the file is missing, empty or malformed."""
    file = Path(guard(folder))
    try:
        at = file.stat().st_mtime
        text = file.read_text()
        return Heard(text, at, float(text.split()[1]))
    except (OSError, ValueError, IndexError):
        return None


def asked_end(folder: str) -> AskedEnd | None:
    """Return the last request for an earlier end of a machine. Returns None if there is none."""
    file = Path(folder) / END
    try:
        at = file.stat().st_mtime
        match = _REQUEST.fullmatch(file.read_text())
    except (OSError, ValueError):
        return None
    return None if match is None else AskedEnd(match[1], at, int(match[2]), match[3])


def answer_end(folder: str, asked: AskedEnd, left: float, heir: str) -> None:
    """Answer a request for an earlier end: the machine has `left` seconds, and `heir` is the digest that counts."""
    file = Path(folder) / HELD
    if file.parent.exists():
        new = file.with_suffix(".new")
        new.write_text(f"{asked.serial} {int(left)} {heir}\n")
        new.replace(file)


def interrupt(folder: str, at: float) -> None:
    """Announce on a machine that the cloud takes it back. Does nothing if the machine's folder is missing.

    `at` is the time of the end, in seconds since 1970 on this computer's clock. It replaces an earlier announcement.
    """
    file = Path(folder) / _INTERRUPTION
    if file.parent.exists():
        new = file.with_suffix(".new")
        new.write_text(f"{at}")
        new.replace(file)


def watch(folder: str) -> str:
    """Return the source of a program that waits on a machine for the announcement made by `interrupt`.

    The program then prints the announced time, in seconds since 1970, and ends. It waits without limit.
    """
    return f"{_program('notice_watch.py')}\nwait({f'{folder}/{_INTERRUPTION}'!r})\n"


@cache
def _program(name: str) -> str:
    return (files("skypool.testing") / name).read_text("utf-8")


def devices(has: Accelerator | None) -> str:
    """Return the accelerators that a machine reports, as a JSON list for the environment variable `SKYPOOL_DEVICES`.

    `has` may be the accelerators of a whole slice. The list is empty for None and for CPUs.
    """
    if has is None or has.kind == "cpu":
        return "[]"
    count = has.slice.chips_per_vm if has.slice else has.count
    profile = has.part.profile if has.part else ""
    name = str(has).partition("/")[0].partition(":")[0]
    found = [Device(has.runtime, index, name, pin=str(index), profile=profile) for index in range(count)]
    return json.dumps([asdict(each) for each in found])


def terminate(folder: str, patience: float = 10.0) -> None:
    """Kill all processes of a machine with SIGKILL, wait until they are gone, and remove the machine's folder.

    Does nothing if the machine is gone already. RuntimeError is raised, and the folder kept, if processes survived for
    `patience` seconds.
    """
    hush(folder)
    until = time.monotonic() + patience
    while left := inhabitants(folder):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            raise RuntimeError(
                f"processes {left} of the fake machine {folder} survived SIGKILL for {patience:g} s; "
                "find out with `ps` what blocks these processes"
            )
        time.sleep(0.002)
    remove(folder)


def remove(folder: str) -> None:
    """Remove the folder of a machine, with everything in it. Errors, such as a missing folder, are ignored.

    The caller must first end the machine's processes.
    """
    removal.remove(folder)


def inhabitants(folder: str) -> list[int]:
    """Return the sorted ids of a machine's live processes, without this process. Empty on systems other than Linux.

    These are the processes that have the machine's folder in the environment variable `MARK`, and all their
    descendants.
    """
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
    """Start the background process that ends a cloud's machines on time, without waiting for it.

    If such a process already runs for this cloud, the new one exits at once.
    """
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
