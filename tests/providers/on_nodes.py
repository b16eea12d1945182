"""What tests send to nodes that have nothing but Python: it must import nothing else."""

from __future__ import annotations

import os
import signal
import subprocess

import skypool as sky


@sky.compute
def where(word: str = "") -> str:
    """The node's home."""
    print(f"said {word}")
    return os.environ["HOME"]


@sky.compute
def fail() -> None:
    raise KeyError("my own")


@sky.compute
def parent() -> int:
    """The pid of the node's agent."""
    return os.getppid()


@sky.compute
def stop_keeper() -> int:
    """Stop the process that looks after this node, and leave a daemon; the keeper's pid."""
    subprocess.Popen(["setsid", "sleep", "1000"])
    agent = os.getppid()
    with open(f"/proc/{agent}/stat") as file:
        keeper = int(file.read().rpartition(")")[2].split()[1])
    os.kill(keeper, signal.SIGSTOP)
    return keeper
