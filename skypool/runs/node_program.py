"""Runs a program on a node, and writes its output to files there. Worker processes import this module."""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from functools import partial

from skypool import runtime
from skypool.agent import child_imports
from skypool.errors import CommandFailed
from skypool.runs import node_folders
from skypool.runs.output_files import LONGEST, OutputFiles

_PIPE = 2 << 20
"""The most bytes that both pipes may hold when a program ends."""
_PATIENCE = 200
"""Milliseconds between two checks whether the program has ended. Another process may keep its stdout open."""


def run(
    words: Sequence[str],
    places: Mapping[int, tuple[str, str]],
    folder: str,
    env: Mapping[str, str],
    output: str,
    in_gang: bool,
) -> int:
    """Run a program until its end, and return its exit status: the negative number of the signal that ended it.

    When this call is stopped, the program gets SIGINT. The agent kills it when the call's `grace` is over.

    Args:
        words: the program and its arguments.
        places: the project's folder and that of the programs of its environment, by node; "" for the programs of the
            node's image.
        folder: the folder below the project's in which the program starts.
        env: variables of its environment.
        output: the folder of its output files, below that of the node. Each process of a gang has a folder below it.
        in_gang: True for a process of a gang, which ends the others by an error if its status is not 0.

    Raises:
        CommandFailed: the program cannot be started, or it has failed in a gang.
    """
    copy, programs = places[runtime.node_number()]
    info = runtime.instance_info()
    files = OutputFiles(os.path.join(runtime.node_folder(), output, str(info.local_rank)))
    with node_folders.held(copy, programs and os.path.dirname(programs)):
        try:
            os.makedirs(os.path.join(copy, folder), exist_ok=True)
            process = _started(words, os.path.join(copy, folder), _environment(programs, env, info, in_gang))
        except BaseException:
            files.end(127)
            raise
        # in a thread, as an exception that stops this call may come between reading and writing
        has_ended = threading.Event()  # `Thread.join` returns too early once an exception has interrupted it
        work = partial(_keep, process, files, has_ended)
        threading.Thread(target=work, name="skypool-output", daemon=True).start()
        try:
            has_ended.wait()
        except BaseException:
            _interrupt(process)
            has_ended.wait()
            raise
        status = process.wait()
    if status and in_gang:
        raise CommandFailed(shlex.join(words), status, node=runtime.node_number())
    return status


def _environment(programs: str, env: Mapping[str, str], info: runtime.InstanceInfo, in_gang: bool) -> dict[str, str]:
    """Return the environment of the program, with the variables by which `torchrun` finds the nodes of a gang."""
    found = {"PYTHONUNBUFFERED": "1", **os.environ}
    for name in (child_imports.PLACE, child_imports.FIRST):  # it asks the client for no modules
        found.pop(name, None)
    if programs:
        found["PATH"] = os.pathsep.join([programs, found.get("PATH", os.defpath)])
        found["VIRTUAL_ENV"] = os.path.dirname(programs)
        found.pop("PYTHONHOME", None)
    if in_gang:
        found |= {
            "PET_NNODES": str(info.world_size // info.local_world_size),
            "PET_NODE_RANK": found["NODE_RANK"],
            "PET_NPROC_PER_NODE": str(max(1, len(info.accelerators))),
            "PET_MASTER_ADDR": found["MASTER_ADDR"],
            "PET_MASTER_PORT": found["MASTER_PORT"],
        }
    return {**found, **env}


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


def _keep(process: subprocess.Popen[bytes], files: OutputFiles, has_ended: threading.Event) -> None:
    """Write what a process prints to its output files, and then its end."""
    try:
        _write(process, files)
        files.end(process.wait())
    finally:
        has_ended.set()


def _write(process: subprocess.Popen[bytes], files: OutputFiles) -> None:
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
            if data := os.read(end, LONGEST):
                files.write(ends[end], data)
                left -= len(data) if has_ended else 0  # what it has started may print on without end
            else:
                poll.unregister(end)
                del ends[end]
        if has_ended and not ready:
            return


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Send SIGINT to the program and all that it has started."""
    if os.getpgrp() == os.getpid():  # a worker; the agent kills the group when the call's `grace` is over
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.killpg(0, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
