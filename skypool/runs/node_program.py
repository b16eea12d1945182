"""Runs a program on a node, and writes its output to files there. Worker processes import this module."""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from skypool import runtime
from skypool.agent import child_imports
from skypool.agent.own_notices import interruption
from skypool.errors import CommandFailed, NodeInterrupted
from skypool.logs.masking import masker_of_bytes
from skypool.runs import call_program, node_folders
from skypool.runs.output_files import LONGEST, OutputFiles

_PIPE = 2 << 20
"""The most bytes that both pipes may hold when a program ends."""
_LOOK = 0.2
"""Seconds between two looks whether there is a notice for the machine."""
NOTICES = {"TERM": signal.SIGTERM, "USR1": signal.SIGUSR1, "none": None, "": signal.SIGTERM}
"""The signals that a program may get at a notice, by the names of the option; "" for the default."""
_STANDS = 60.0
"""Seconds after the withdrawal of a notice in which status 0 still counts as an end by its signal."""
_PATIENCE = 200
"""Milliseconds between two checks whether the program has ended. Another process may keep its stdout open."""


def run(
    words: Sequence[str],
    places: Mapping[int, tuple[str, str]],
    folder: str,
    env: Mapping[str, str],
    output: str,
    in_gang: bool,
    on_notice: str = "",
    secrets: Mapping[str, str] = MappingProxyType({}),
    is_call: bool = False,
) -> int:
    """Run a program until its end, and return its exit status: the negative number of the signal that ended it.

    When this call is stopped, the program gets SIGINT. The agent kills it when the call's `grace` is over.
    At a notice that its machine is taken back, or that the lease ends, it gets a signal if it catches that.

    Args:
        words: the program and its arguments.
        places: the project's folder and that of the programs of its environment, by node; "" for the programs of the
            node's image.
        folder: the folder below the project's in which the program starts.
        env: variables of its environment.
        output: the folder of its output files, below that of the node. Each process of a gang has a folder below it.
        in_gang: True for a process of a gang, which ends the others by an error if its status is not 0.
        on_notice: the name of the signal at a notice, as in `NOTICES`.
        secrets: the values in place of which the output files get marks, by their names.
        is_call: True for a call of a `@compute` function, whose file is in `folder`. `words` only name it then.

    Raises:
        CommandFailed: the program cannot be started, or it has failed in a gang.
        NodeInterrupted: the program was ended by the signal that it got at a notice.
    """
    copy, programs = places[runtime.node_number()]
    info = runtime.instance_info()
    kept = os.path.join(runtime.node_folder(), output, str(info.local_rank))
    files = _MaskedFiles(kept, secrets)
    with node_folders.held(copy, programs and os.path.dirname(programs)):
        try:
            os.makedirs(os.path.join(copy, folder), exist_ok=True)
            argv = call_program.argv(kept) if is_call else words
            process = _started(argv, os.path.join(copy, folder), _environment(programs, env, info, in_gang))
        except BaseException:
            files.end(127)
            raise
        # in a thread, as an exception that stops this call may come between reading and writing
        is_over = threading.Event()  # `Thread.join` returns too early once an exception has interrupted it
        notes: deque[str] = deque()
        work = partial(_keep, process, files, is_over, notes)
        threading.Thread(target=work, name="skypool-output", daemon=True).start()
        teller = _NoticeTeller(process, notes.append, on_notice)
        try:
            while not is_over.wait(_LOOK):
                teller.look()
        except BaseException:
            _interrupt(process)
            is_over.wait()
            raise
        status = process.wait()
    if teller.has_ended_it(status):
        node, notice = runtime.node_number(), interruption()
        error = NodeInterrupted(
            f"the machine of node {node} ends soon, and {shlex.join(words)} ended by {teller.name} when it was told; "
            "run it again to go on from what it has saved",
            node,
        )
        error.left = 0.0 if notice is None else max(0.0, notice.left)
        raise error
    if status and in_gang:
        raise CommandFailed(shlex.join(words), status, node=runtime.node_number())
    return status


class _MaskedFiles(OutputFiles):
    """The output files of a program, with marks in place of secrets, which are given by their names."""

    def __init__(self, folder: str, secrets: Mapping[str, str]) -> None:
        super().__init__(folder)
        self._masker = masker_of_bytes(secrets)

    def write(self, stream: int, data: bytes) -> None:
        """Append output of any length. What may be the beginning of a secret is held back until the next piece."""
        if self._masker.is_needed:
            data = self._masker.feed(stream, data.decode("latin-1")).encode("latin-1")
        self._split(stream, data)

    def end(self, status: int) -> None:
        """Append what is held back, and tell of the end."""
        for each in (1, 2):
            self._split(each, self._masker.finish(each).encode("latin-1"))
        super().end(status)

    def _split(self, stream: int, data: bytes) -> None:
        for begin in range(0, len(data), LONGEST):  # marks may be longer than the values
            super().write(stream, data[begin : begin + LONGEST])


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


def _keep(process: subprocess.Popen[bytes], files: OutputFiles, is_over: threading.Event, notes: deque[str]) -> None:
    """Write what a process prints, and notes, to its output files, and then its end."""
    try:
        _write(process, files, notes)
        files.end(process.wait())
    finally:
        is_over.set()


def _write(process: subprocess.Popen[bytes], files: OutputFiles, notes: deque[str]) -> None:
    assert process.stdout is not None
    assert process.stderr is not None
    ends = {process.stdout.fileno(): 1, process.stderr.fileno(): 2}
    poll = select.poll()
    for end in ends:
        poll.register(end, select.POLLIN)
    left = _PIPE
    while ends and left > 0:
        has_ended = process.poll() is not None
        while notes:
            files.write(2, f"[skypool] {notes.popleft()}\n".encode())
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


class _NoticeTeller:
    """Sends a program a signal when its machine ends soon.

    Args:
        tell: called with a line if the signal is not sent, though its user has named it.
        on_notice: the name of the signal, as in `NOTICES`.

    Attributes:
        name: the name of the signal; "" for none.
    """

    def __init__(self, process: subprocess.Popen[bytes], tell: Callable[[str], object], on_notice: str) -> None:
        self._process, self._tell = process, tell
        self._signal = NOTICES[on_notice]
        self.name = "" if self._signal is None else self._signal.name
        self._is_named = bool(on_notice)
        self._is_asked = on_notice == "USR1"
        self._is_sent = False
        self._told: runtime.Reason | None = None
        self._stands_until = 0.0

    def look(self) -> None:
        """Send the signal once for each notice, as soon as the program catches it.

        A notice that was withdrawn may be followed by another one. That of the provider is told after that of a lease.
        """
        if self._signal is None or self._process.poll() is not None:
            return
        found = interruption()
        if found is None:
            self._told = None
            return
        self._stands_until = time.monotonic() + _STANDS
        if found.reason == runtime.LIMIT or self._told in (found.reason, runtime.PROVIDER):
            return  # at a limit, the client interrupts it
        if catches(self._process.pid, self._signal):
            self._is_sent, self._told = True, found.reason
            self._process.send_signal(self._signal)
        elif self._is_asked:
            self._is_asked = False
            self._tell(f"the machine ends soon; {self.name} is not sent, as the program does not catch it yet")

    def has_ended_it(self, status: int) -> bool:
        """Return True if the program with this exit status was ended by the signal.

        If the user has not named the signal, that holds for status 0, too: some libraries end so, and save nothing.
        """
        if not self._is_sent or self._signal is None:
            return False
        if status == 0:
            return not self._is_named and time.monotonic() < self._stands_until
        return status in (-self._signal, 128 + self._signal)


def catches(pid: int, number: int) -> bool:
    """Return True if a process has a handler for a signal, so that the signal does not end it at once."""
    try:
        with open(f"/proc/{pid}/status") as file:
            caught = next(line.split()[1] for line in file if line.startswith("SigCgt:"))
    except (OSError, StopIteration):  # it has just ended
        return False
    return bool(int(caught, 16) >> (number - 1) & 1)


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Send SIGINT to the program and all that it has started."""
    if os.getpgrp() == os.getpid():  # a worker; the agent kills the group when the call's `grace` is over
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.killpg(0, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
