"""Runs a program on a node, and writes its output to files there. Worker processes import this module."""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence

from skypool import runtime
from skypool.errors import CommandFailed
from skypool.runs.output_files import OutputFiles

_PIECE = 64 << 10
_PIPE = 2 << 20
"""The most bytes that both pipes may hold when a program ends."""
_PATIENCE = 200
"""Milliseconds between two checks whether the program has ended. Another process may keep its stdout open."""


def run(words: Sequence[str], folder: str, programs: str, env: Mapping[str, str], output: str) -> int:
    """Run a program until its end, and return its exit status: the negative number of the signal that ended it.

    When this call is stopped, the program gets SIGINT. The agent kills it when the call's `grace` is over.

    Args:
        words: the program and its arguments.
        folder: the folder in which it starts.
        programs: the folder of the programs of its environment; "" for those of the node's image.
        env: variables of its environment.
        output: the folder of its output files. Its process in a gang has a folder below it with the number of its rank.

    Raises:
        CommandFailed: the program cannot be started.
    """
    info = runtime.instance_info()
    files = OutputFiles(os.path.join(output, str(info.rank)))
    status = 127
    try:
        process = _started(words, folder, _environment(programs, env, info))
        try:
            _keep(process, files)
            status = process.wait()
        except BaseException:
            _interrupt(process, files)
            status = process.wait()
            raise
    finally:
        files.end(status)
    return status


def _environment(programs: str, env: Mapping[str, str], info: runtime.InstanceInfo) -> dict[str, str]:
    """Return the environment of the program, with the variables by which `torchrun` finds the nodes of a gang."""
    found = {"PYTHONUNBUFFERED": "1", **os.environ, **env}
    if programs:
        found["PATH"] = os.pathsep.join([programs, found.get("PATH", os.defpath)])
        found["VIRTUAL_ENV"] = os.path.dirname(programs)
        found.pop("PYTHONHOME", None)
    if "MASTER_ADDR" in found:
        found |= {
            "PET_NNODES": str(info.world_size // info.local_world_size),
            "PET_NODE_RANK": found["NODE_RANK"],
            "PET_NPROC_PER_NODE": str(max(1, len(info.accelerators))),
            "PET_MASTER_ADDR": found["MASTER_ADDR"],
            "PET_MASTER_PORT": found["MASTER_PORT"],
        }
    return found


def _started(words: Sequence[str], folder: str, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            list(words),
            bufsize=0,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(env),
            cwd=folder,
        )
    except OSError as e:
        why = f"{e.filename or words[0]}: {e.strerror}"
        raise CommandFailed(shlex.join(words), node=runtime.node_number(), why=why) from e


def _keep(process: subprocess.Popen[bytes], files: OutputFiles) -> None:
    """Write what a process prints to its output files until it ends."""
    assert process.stdout is not None
    assert process.stderr is not None
    ends = {process.stdout.fileno(): 1, process.stderr.fileno(): 2}
    poll = select.poll()
    for end in ends:
        poll.register(end, select.POLLIN)
    left = _PIPE
    while ends and left > 0:
        has_ended = process.poll() is not None
        ready = poll.poll(0 if has_ended else _PATIENCE)
        for end, _ in ready:
            if data := os.read(end, _PIECE):
                files.write(ends[end], data)
                left -= len(data) if has_ended else 0  # what it has started may print on without end
            else:
                poll.unregister(end)
                del ends[end]
        if has_ended and not ready:
            return


def _interrupt(process: subprocess.Popen[bytes], files: OutputFiles) -> None:
    """Send SIGINT to the program and all that it has started, and wait for its end."""
    if os.getpgrp() == os.getpid():  # a worker; the agent kills the group when the call's `grace` is over
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.killpg(0, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    _keep(process, files)
