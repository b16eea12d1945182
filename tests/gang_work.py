"""Functions for the processes of gangs in tests. The module imports little, as each process imports it anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import skypool as sky

SHOWN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES"),
    *("JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_IDS", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME"),
)


@sky.compute
def place() -> tuple[sky.InstanceInfo, dict[str, str], int, list[int]]:
    env = {name: os.environ[name] for name in SHOWN if name in os.environ}
    return sky.instance_info(), env, os.getpid(), sky.shard(list(range(8)))


@sky.compute
def end(how: str) -> int:
    """Rank 1 ends in some other way than by returning."""
    if sky.instance_info().rank != 1:
        return sky.instance_info().rank
    print("these are my last words", flush=True)
    if how == "exit":
        os._exit(3)
    if how == "sys.exit":
        sys.exit(3)
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
    raise KeyError(how)


@sky.compute
def dawdle(folder: str, stubborn: bool = False) -> None:
    """Run on, with a child process; ignore SIGTERM if asked to."""
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "300"])
    Path(folder, f"{os.getpid()} {child.pid}").touch()
    time.sleep(300)


@sky.compute
def agent() -> int:
    return os.getppid()


@sky.compute
def meet(folder: str, count: int) -> int:
    """Come back when so many processes are here."""
    Path(folder, str(os.getpid())).touch()
    until = time.monotonic() + 60
    while len(os.listdir(folder)) < count:
        assert time.monotonic() < until
        time.sleep(0.01)
    return sky.instance_info().rank


@sky.compute
def sizes(data: bytes, kept: Any) -> tuple[int, int, int, bytes]:
    from tests import planting  # a module of the user's own

    return len(data), len(kept), len(planting.__name__), data


@sky.compute
def speak() -> None:
    info = sky.instance_info()
    print(f"I am {info.rank}")
    os.write(1, f"directly {info.rank}\n".encode())


@sky.compute
def await_file(folder: str, name: str) -> int:
    Path(folder, str(os.getpid())).touch()
    while not Path(folder, name).exists():
        time.sleep(0.2)
    return sky.instance_info().rank


@sky.compute
def own_rank() -> int:
    return sky.instance_info().rank


@sky.compute
def count(first: int, pause: float) -> tuple[int, str, float]:
    """Count steps until the notice comes at one; that step, the reason, and the longest wait."""
    step, longest = first, 0.0
    while True:
        began = time.monotonic()
        found = sky.interruption(step)
        longest = max(longest, time.monotonic() - began)
        if found is not None:
            assert sky.interruption(step + 1) == found
            return step, found.reason, longest
        time.sleep(pause * (1 + sky.instance_info().rank / 4))
        step += 1
