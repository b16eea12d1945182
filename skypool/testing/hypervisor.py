"""A background process of a fake cloud, which ends machines on time, also while no client calls the cloud.

Run it as `python -m skypool.testing.hypervisor FOLDER`, with the folder of the cloud. It exits when the last machine
has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import sys
import time
from pathlib import Path

from skypool.testing import machine
from skypool.testing.state_store import Overtaken, State

_TICK = 0.1
"""Seconds between two checks of the machines."""


def busy(folder: Path) -> bool:
    """Return True if a process that ends machines on time runs for the fake cloud in a folder. Does not wait."""
    with open(folder / "hypervisor", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def run(folder: Path) -> None:
    """End the machines of a cloud when their lease, lifetime or notice is over. Blocks until none is alive.

    Returns at once if another process already runs this function for the cloud. If the folder is removed, all machines
    that were alive at the last look are ended.
    """
    with open(folder / "hypervisor", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # another hypervisor is running
        machines: list[str] = []
        state = State(folder)
        try:
            while True:
                with contextlib.suppress(Overtaken), state.open() as world:
                    machines = [each.folder for each in world.alive()]
                    if not machines:
                        fcntl.flock(lock, fcntl.LOCK_UN)  # unlock while no machine can be made
                        return
                time.sleep(_TICK)
        except FileNotFoundError:
            for each in machines:
                machine.terminate(each)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
