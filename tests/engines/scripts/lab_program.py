"""What programs share that use an engine on machines of the lab, and are started by a soak that breaks the machines.

What such a program prints after "@" is for the soak, which does what it is asked for and then answers with a line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import psutil

import skypool as sky
from skypool.model import Access, Instance
from skypool_aws import _WATCH as WATCH

NODES = 4
"""The number of nodes of the pool."""


@dataclass(frozen=True)
class SpotHosts(sky.SSH):
    """Hosts that hear of their end as machines of AWS do: from a metadata service."""

    def access(self, instance: Instance) -> Access:
        return replace(super().access(instance), watch=WATCH)


def say(words: dict[str, Any]) -> None:
    sys.__stdout__.write(f"@{json.dumps(words)}\n")
    sys.__stdout__.flush()


def ask(words: dict[str, Any]) -> None:
    """Have the program that started this one do something, and wait until it is done."""
    say(words)
    assert sys.stdin.readline() == "done\n"


def ready(pool: sky.ComputePool) -> list[int]:
    return [node for node, state in pool.nodes.items() if state == "ready"]


def ports() -> int:
    """Return how many ports of this computer this process, and those that it has started, listen at."""
    own, count = psutil.Process(), 0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            count += sum(each.status == psutil.CONN_LISTEN for each in process.net_connections("tcp"))
    return count


class Told(logging.Handler):
    """A handler that keeps what the cluster has told the user as a warning."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Steps(Protocol):
    """What is done to one cluster: a method for each step, by its name."""

    def close(self) -> None:
        """Close the cluster."""


def main(make: Callable[[sky.ComputePool, random.Random], Steps], settings: dict[str, Any]) -> None:
    """Take the steps with a cluster on the machines, and check that its end leaves no service and no port.

    Args:
        make: makes a cluster, and returns its steps.
        settings: the name of the pool, the seed, the private key, the Python of the machines, the machines as pairs of
            address and host key, and the names of the steps.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(900)  # bounds a hang
    hosts = [sky.Host(address, host_key=key) for address, key in settings["machines"]]
    driver = SpotHosts(hosts=hosts, user="root", identity=settings["identity"], python=settings["python"])
    pool = sky.ComputePool(driver, nodes=NODES, slots=1, name=settings["name"], lease=20, liveness=15, console="off")
    with pool:
        before = ports()
        steps = make(pool, random.Random(settings["seed"]))
        try:
            assert ports() > before
            for name in settings["steps"]:
                began = time.monotonic()
                getattr(steps, name)()
                say({"step": name, "seconds": round(time.monotonic() - began, 1)})
        except BaseException:
            traceback.print_exc()  # first, as the end may fail, too
            raise
        finally:
            steps.close()
        assert pool.services == []
        assert ports() == before, f"{ports()} ports are open, not {before}"
        ask({"do": "check cluster gone"})
    say({"end": "fine"})
