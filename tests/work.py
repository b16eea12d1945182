"""What tests send to nodes of this machine: each worker imports it anew, so it imports nothing that takes long."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import skypool as sky


def stay() -> None:
    """Wait for a signal, for a minute at most. One that comes just before a sleep begins is handled when it ends."""
    for _ in range(600):
        time.sleep(0.1)


@sky.compute
def add(a: int, b: int = 1) -> int:
    return a + b


@sky.compute
def count(n: int, pause: float = 0.0) -> Iterator[int]:
    for i in range(n):
        yield i
        time.sleep(pause)


@sky.compute
def endless() -> Iterator[bytes]:
    """Fills its window, and waits for its reader."""
    while True:
        yield bytes(1 << 16)


@sky.compute
def total(numbers: Iterator[int]) -> int:
    return sum(numbers)


@sky.compute
def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@sky.compute
def until(path: str) -> str:
    """Ends when there is such a file."""
    while not os.path.exists(path):
        time.sleep(0.01)
    return path


@sky.compute
def where(go: str = "") -> int:
    """Its node; not before there is a file of that name."""
    while go and not os.path.exists(go):
        time.sleep(0.01)
    return sky.instance_info().node


@sky.compute
def info() -> sky.InstanceInfo:
    return sky.instance_info()


@sky.compute
def outlast(go: str, log: str) -> int:
    """Its node, once there is a file of that name; leaves a line for each time it begins."""
    with open(log, "a") as file:
        file.write(f"{sky.instance_info().node}\n")
    while not os.path.exists(go):
        time.sleep(0.01)
    return sky.instance_info().node


@sky.compute
def note(n: int, log: str) -> int:
    """Leaves a line for each time it runs."""
    with open(log, "a") as file:
        file.write(f"{n}\n")
    time.sleep(0.01)
    return n * n


@sky.compute
def poll() -> float:
    """When its machine is taken back, once that is known."""
    while (interruption := sky.interruption()) is None:
        time.sleep(0.01)
    return interruption.at
