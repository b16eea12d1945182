"""Background process of a fake cloud: ends machines on time while no client calls; ends with the last machine."""

from __future__ import annotations

import contextlib
import fcntl
import sys
import time
from pathlib import Path

from skypool.testing import machine
from skypool.testing.state import Overtaken, State

_TICK = 0.1
"""Seconds between two looks at the machines."""


def busy(folder: Path) -> bool:
    """Whether a hypervisor looks after this cloud."""
    with open(folder / "hypervisor", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def run(folder: Path) -> None:
    """Look after this cloud until none of its machines is left, or its folder is removed."""
    with open(folder / "hypervisor", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # another one does
        machines: list[str] = []
        state = State(folder)
        try:
            while True:
                with contextlib.suppress(Overtaken), state.open() as world:
                    machines = [each.folder for each in world.alive()]
                    if not machines:
                        fcntl.flock(lock, fcntl.LOCK_UN)  # while no machine can be made
                        return
                time.sleep(_TICK)
        except FileNotFoundError:
            for each in machines:
                machine.terminate(each)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
