"""What programs share that use an engine on machines of the lab, and are started by a soak that breaks the machines.

What such a program prints after "@" is for the soak, which does what it is asked for and then answers with a line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from dataclasses import dataclass, replace
from typing import Any

import psutil

import skypool as sky
from skypool.model import Access, Instance
from skypool_aws import _WATCH as WATCH


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
