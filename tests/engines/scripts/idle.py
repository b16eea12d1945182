"""Wait for the end of processes of a cluster, so that the next measurement has the CPUs of this computer alone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import psutil

LOOK = 0.2
"""Seconds between two looks."""
LIMIT = 60.0
"""Seconds after which this gives up."""


@contextlib.contextmanager
def alone(*, keep: bool = False) -> Iterator[None]:
    """Wait at the end of the block until all processes that have started in it on this computer have ended.

    A cluster's `close` may return earlier: the workers of SSHCluster look for their scheduler for some seconds then.

    Args:
        keep: do not wait. Default False. The first turn starts processes that stay, such as those of a pool's slots.

    Raises:
        TimeoutError: some have not ended in time.
    """
    before = _commands().keys()
    yield
    deadline = time.monotonic() + LIMIT
    while not keep and (left := [command for pid, command in _commands().items() if pid not in before]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"still there: {left}")
        time.sleep(LOOK)


def _commands() -> dict[int, str]:
    """Return the last characters of the command lines of all processes. Threads of the kernel have none."""
    return {
        each.pid: " ".join(each.info["cmdline"])[-100:]
        for each in psutil.process_iter(["cmdline"])
        if each.info["cmdline"]
    }
