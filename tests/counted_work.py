"""What the test of counts sends to nodes: each worker imports it anew, so it imports nothing that nodes lack."""

from __future__ import annotations

import os
import signal
import time

import skypool as sky


@sky.compute
def die_once(path: str) -> str:
    if os.path.exists(path):
        return "the second run"
    open(path, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it lives")


@sky.compute
def explode() -> None:
    raise ValueError("it failed")


@sky.compute(procs=4, output="silent")
def ranks(path: str) -> int:
    while not os.path.exists(path):
        time.sleep(0.01)
    return sky.instance_info().rank


@sky.compute(procs=2, output="silent", retries=1, retry_on=(ValueError,))
def fails_first(path: str) -> int:
    if sky.instance_info().attempt == 1:
        raise ValueError("the first run")
    return 1
