"""Functions that print, for tests of what pools keep."""

from __future__ import annotations

import os
import sys

import skypool as sky


@sky.compute
def greet(name: str) -> None:
    print("hello", name, os.environ["TOKEN"])
    print("to stderr", file=sys.stderr)
    print("no newline", end="")


@sky.compute(output="silent")
def hush() -> None:
    print("silent")


@sky.compute(procs=2, output="rank0")
def gang() -> None:
    print("in the gang")


@sky.compute
def serve() -> None:
    print("serving", flush=True)


@sky.compute
def flood(mib: int) -> None:
    for n in range(mib << 13):
        print(f"{n:07} {'x' * 119}")


@sky.compute
def fail() -> None:
    raise ValueError("the token is " + os.environ["TOKEN"])
