"""A command with a byte stream on both ends, and nothing else: a subprocess, `ssh`, `docker exec -i`."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class Transport(Protocol):
    """How commands are run on one node."""

    def argv(self, command: Sequence[str]) -> list[str]:
        """The local command that runs `command` on the node with its stdin and stdout connected to ours."""
        ...


@dataclass(frozen=True, slots=True)
class Subprocess:
    """A command on this machine."""

    def argv(self, command: Sequence[str]) -> list[str]:
        return list(command)


class Stream:
    """A running command: one socket that is its stdin and stdout, and what it says on stderr.

    Args:
        argv: the local command.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            for end in (ours, theirs):
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
            self.stderr, stderr = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            os.set_blocking(stderr, True)
            try:
                self.process = subprocess.Popen(
                    argv, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=stderr, start_new_session=True
                )
            except OSError:
                os.close(self.stderr)
                ours.close()
                raise
            finally:
                os.close(stderr)
        self.socket = ours
        self.argv = list(argv)

    def complaint(self) -> str:
        """What the command has said on stderr so far, its last 2000 characters."""
        said = b""
        with contextlib.suppress(BlockingIOError, OSError):
            while part := os.read(self.stderr, 65536):
                said = (said + part)[-2000:]
        return said.decode("utf-8", "replace").strip()

    def shut(self) -> None:
        """End both directions at once, for whoever reads or writes just now."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self, patience: float = 0.5) -> None:
        """Close our end and let the command end; one that does not is killed."""
        self.socket.close()
        with contextlib.suppress(OSError):
            os.close(self.stderr)
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
