"""Runs a program of a node, for `cmd` and for services, and tests if a port of the node answers.

Worker processes import this module, so it imports little.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import PurePath

from skypool import runtime
from skypool.errors import CommandFailed

_TAIL = 4096
"""The number of bytes of a program's output that are kept, to show its last lines if it fails."""
_PIECE = 64 << 10
"""The most bytes of output that are passed on at a time."""
_PATIENCE = 200
"""Milliseconds between two checks whether the program has ended. Another process may keep its stdout open."""
_LOOK = 0.05
"""Seconds between two attempts to connect to a port."""


class Program:
    """A function that runs the program of a path, or of a name that is looked up on `PATH`. `cmd` makes calls of it."""

    def __init__(self, program: str) -> None:
        self.program = program
        self.__name__ = self.__qualname__ = PurePath(program).name or program  # the call's name in messages

    def __call__(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        check: bool = True,
        expand: bool = False,
    ) -> int:
        """Run the program, pass its output on as it comes, wait for its end, and return its exit status.

        For a program that a signal ended, the status is the negative number of the signal. When the call is stopped,
        the process group of this worker, to which the program belongs, gets SIGTERM. The agent kills the group when the
        call's `grace` is over.

        Args:
            arguments: the arguments of the program.
            env: variables that are added to the environment of the program.
            cwd: the folder in which the program starts. None: that of this process.
            check: True raises CommandFailed if the status is not 0.
            expand: True replaces `$NAME` and `${NAME}` in the words of the command and in `cwd` by variables.

        Raises:
            CommandFailed: the program cannot be started, a variable is not set, or the status is not 0.
        """
        argv = [self.program, *arguments]
        environment = {"PYTHONUNBUFFERED": "1", **os.environ, **(env or {})}
        if expand:
            try:
                argv = [_expanded(word, environment) for word in argv]
                cwd = None if cwd is None else _expanded(cwd, environment)
            except KeyError as e:
                why = f"the variable ${e.args[0]} is not set there; with expand=True, write $$ for a dollar sign"
                raise CommandFailed(shlex.join(argv), node=runtime.node_number(), why=why) from None
        sys.stdout.flush()
        sys.stderr.flush()
        process = self._start(argv, environment, cwd)
        try:
            tail = _pass_on(process)
            status = process.wait()
        except BaseException as e:
            _stop(process, is_failure=isinstance(e, Exception))
            raise
        finally:
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        if check and status:
            raise CommandFailed(shlex.join(argv), status, tail.decode("utf-8", "replace"), runtime.node_number())
        return status

    def _start(self, argv: list[str], env: Mapping[str, str], cwd: str | None) -> subprocess.Popen[bytes]:
        """Start the program. Raises CommandFailed if that fails, for example because the node does not have it."""
        pipe = subprocess.PIPE
        try:
            return subprocess.Popen(
                argv, bufsize=0, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=env, cwd=cwd
            )
        except FileNotFoundError as e:
            if cwd is not None and not os.path.isdir(cwd):
                why = f"there is no folder {cwd!r}, which cwd= names"
            elif os.path.exists(argv[0]):
                why = "the program that its first line names (#!) does not exist"
            else:
                why = f"there is no program {argv[0]!r}; install it with Image(pip=[…]) or Image(apt=[…])"
            raise CommandFailed(shlex.join(argv), node=runtime.node_number(), why=why) from e
        except (OSError, ValueError) as e:
            why = os.strerror(e.errno) if isinstance(e, OSError) and e.errno else str(e)
            raise CommandFailed(shlex.join(argv), node=runtime.node_number(), why=why) from e


def _expanded(word: str, environment: Mapping[str, str]) -> str:
    """Return a word of a command with its variables replaced. Raises KeyError if one is not set."""
    from string import Template  # imported here, as few calls need it

    return Template(word).substitute(environment)


def _pass_on(process: subprocess.Popen[bytes]) -> bytearray:
    """Write the output of a process to this process's stdout and stderr until it ends. Return its last 4096 bytes."""
    tail = bytearray()
    poll = select.poll()
    ends: dict[int, int] = {}
    for fd, stream in ((1, process.stdout), (2, process.stderr)):
        assert stream is not None
        ends[stream.fileno()] = fd
        poll.register(stream, select.POLLIN)

    def pass_on(patience: int) -> None:
        """Wait at most `patience` milliseconds for output, and pass on one piece of each stream that has some."""
        for end, _ in poll.poll(patience):
            data = os.read(end, _PIECE)
            if not data:
                poll.unregister(end)
                del ends[end]
                continue
            tail.extend(data)
            del tail[:-_TAIL]
            _write_all(ends[end], data)

    # other processes may still hold these pipes: do not wait for their output
    while ends and process.poll() is None:
        pass_on(_PATIENCE)
    pass_on(0)  # a pipe holds no more than one piece
    return tail


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _stop(process: subprocess.Popen[bytes], is_failure: bool) -> None:
    """End the program of a stopped call; kill it if passing its output on has failed. Wait for its end."""
    if is_failure:
        process.kill()
    elif os.getpgrp() == os.getpid():  # a worker; the agent kills the group when the call's `grace` is over
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this worker ends after this call
        os.killpg(0, signal.SIGTERM)
    else:
        process.terminate()
    with contextlib.suppress(OSError):
        _pass_on(process)
    process.wait()


def await_port(port: int, hosts: tuple[str, ...], timeout: float) -> bool:
    """Wait until a program on this node accepts connections at a port. Return False if none does in `timeout` seconds.

    The addresses in `hosts` are tried, each time in this order.
    """
    until = time.monotonic() + timeout
    while True:
        for host in hosts:
            with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=2.0):
                return True
        if time.monotonic() >= until:
            return False
        time.sleep(_LOOK)
