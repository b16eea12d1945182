"""Builds and starts the command that reaches a node: `ssh`, `docker exec -i`, or a local subprocess."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from skypool.errors import ConnectionLost, HostKeyMismatch, LoginRefused


class Trouble(Enum):
    """Why a command could not be run on a node."""

    UNREACHABLE = "nobody answers there"
    LOGIN = "the login was refused"
    HOST_KEY = "its host key is not the one that is known"
    OTHER = "it failed"


class Transport(Protocol):
    """How commands are run on one node."""

    def argv(self, command: Sequence[str], *, terminal: bool = False) -> list[str]:
        """The local command that runs `command` on the node with its stdin and stdout connected to ours.

        Args:
            terminal: ours are a terminal, and `command` is to have one there.
        """
        ...

    def trouble(self, said: str) -> Trouble:
        """What the local command meant by what it said on stderr before it ended."""
        ...


@dataclass(frozen=True, slots=True)
class Subprocess:
    """A command on this machine."""

    def argv(self, command: Sequence[str], *, terminal: bool = False) -> list[str]:
        return list(command)

    def trouble(self, said: str) -> Trouble:
        return Trouble.OTHER


@dataclass(frozen=True, slots=True)
class Exec:
    """A command in a container.

    Args:
        runtime: the container program with its options, such as ("docker",).
        container: its id; user: who runs the command there, "" for the image's own user.
    """

    runtime: tuple[str, ...]
    container: str
    user: str = ""

    def argv(self, command: Sequence[str], *, terminal: bool = False) -> list[str]:
        user = ["--user", self.user] if self.user else []
        return [*self.runtime, "exec", "-it" if terminal else "-i", *user, self.container, *command]

    def trouble(self, said: str) -> Trouble:
        return Trouble.OTHER


_SSH_SAYS = (
    (Trouble.HOST_KEY, r"Host key verification failed|HOST IDENTIFICATION HAS CHANGED|host key is known for"),
    (Trouble.LOGIN, r"Permission denied|Too many authentication failures|No supported authentication"),
    (
        Trouble.UNREACHABLE,
        r"Connection refused|timed out|No route to host|[Nn]etwork is unreachable|Connection (closed|reset)"
        r"|kex_exchange_identification|banner exchange|Could not resolve hostname|Broken pipe|not responding",
    ),
)
_NOT_DROPPED = r"forwarding failed|refused|timed out|verification failed|Permission denied|Could not resolve"

_STREAM_KEPT = {"StdinNull": "no", "ForkAfterAuthentication": "no", "SessionType": "default"}
"""Options that keep our stream connected to the command, whatever the user's configuration says."""
_NAMES_STREAMS = (8, 7)
"""The release of OpenSSH whose configuration has these options first. An older `ssh` refuses to run with them."""


@functools.cache
def _names_streams() -> bool:
    """Return True if the `ssh` program here knows the options in `_STREAM_KEPT`."""
    try:
        done = subprocess.run(["ssh", "-V"], stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False  # running it for real says what is the matter
    release = re.search(rb"OpenSSH\w*_(\d+)\.(\d+)", done.stderr)
    return release is not None and (int(release[1]), int(release[2])) >= _NAMES_STREAMS


@dataclass(frozen=True, slots=True)
class SSH:
    """A command on another machine, by the `ssh` program: the user's configuration, agent and keys just work.

    Args:
        host: a name, an address, or a Host of the user's ssh configuration.
        user, port, identity, jump: only where the user's configuration is not to decide; identity is a file.
        known_hosts: files with the host keys to believe. The first one is ours: a pinned key is written there.
        alias: the name under which the host's key is in `known_hosts`, "" for its own.
        pin: believe the first key seen and keep it. Otherwise a key that is not known is refused.
        config: a configuration file in the place of the user's own.
        connect_timeout: seconds until an address that does not answer is given up.
        forwards: ports here that lead to ports there, as (here, there).
    """

    host: str
    user: str = ""
    port: int | None = None
    identity: str = ""
    jump: str = ""
    known_hosts: tuple[str, ...] = ()
    alias: str = ""
    pin: bool = False
    config: str = ""
    connect_timeout: int = 10
    forwards: tuple[tuple[int, int], ...] = ()

    def argv(self, command: Sequence[str], *, terminal: bool = False) -> list[str]:
        options = {
            "BatchMode": "yes",
            "StrictHostKeyChecking": "accept-new" if self.pin else "yes",
            "UpdateHostKeys": "no",
            "ConnectTimeout": str(self.connect_timeout),
            "ServerAliveInterval": "10",
            "ServerAliveCountMax": "3",
            "ControlMaster": "no",  # one process a node: its end is the end of its connection
            "ControlPath": "none",
            "ClearAllForwardings": "no" if self.forwards else "yes",
            "ExitOnForwardFailure": "yes",
            "ForwardAgent": "no",
            "PermitLocalCommand": "no",
            "RemoteCommand": "none",
            "LogLevel": "ERROR",
            **(_STREAM_KEPT if _names_streams() else {}),
        }
        if self.known_hosts:
            options["UserKnownHostsFile"] = " ".join(f'"{file}"' for file in self.known_hosts)
        if self.alias:
            options |= {"HostKeyAlias": self.alias, "CheckHostIP": "no"}
        if self.identity:
            options |= {"IdentityFile": f'"{self.identity}"', "IdentitiesOnly": "yes"}
        argv = ["ssh", "-t" if terminal else "-T"]
        argv += ["-F", self.config] if self.config else []
        for name, value in options.items():
            argv += ["-o", f"{name}={value}"]
        argv += ["-l", self.user] if self.user else []
        argv += ["-p", str(self.port)] if self.port else []
        argv += ["-J", self.jump] if self.jump else []
        for here, there in self.forwards:
            argv += ["-L", f"127.0.0.1:{here}:localhost:{there}"]
        return [*argv, "--", self.host, shlex.join(command)]

    def dropped(self, said: str) -> bool:
        """Whether an sshd on the way hung up before it asked who comes: it does so when many come at once."""
        return "exchange_identification" in said and not re.search(_NOT_DROPPED, said)

    def trouble(self, said: str) -> Trouble:
        return next((trouble for trouble, words in _SSH_SAYS if re.search(words, said)), Trouble.OTHER)


_BUFFERS = (4 << 20, 1 << 20, 256 << 10)


class CommandStream:
    """A running command: one socket that is its stdin and stdout, and what it says on stderr.

    Args:
        argv: the local command.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            for end in (ours, theirs):
                _widen(end)
            self.stderr, stderr = os.pipe()
            os.set_blocking(self.stderr, False)
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

    def end(self, patience: float = 2.0) -> str:
        """Close our end; what the command said on stderr until it ended."""
        self.socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        said = self.complaint()
        self.close()
        return said

    def shut(self) -> None:
        """End both directions at once, for whoever reads or writes just now."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self, patience: float = 0.5) -> None:
        """Close our end and let the command end; one that does not is killed. Quiet when it was closed before."""
        self.socket.close()
        stderr = self.stderr
        self.stderr = -1
        if stderr >= 0:
            os.close(stderr)
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _widen(end: socket.socket) -> None:
    """Give one end of a socket pair as large a buffer as its system allows; macOS begins with 8 KiB."""
    for size in _BUFFERS:
        try:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
        except OSError:  # ENOBUFS on macOS; Linux takes its largest without a word
            continue
        return


class Errand:
    """A running command that is given its stdin at once. It is over when it ends, whatever it leaves behind: what a
    ProxyCommand started may live on and hold its stderr open.

    Args:
        argv: the local command; given: all that it reads.
    """

    def __init__(self, argv: Sequence[str], given: bytes) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - `result` closes it
        with tempfile.TemporaryFile() as stdin:
            stdin.write(given)
            stdin.seek(0)
            self._process = subprocess.Popen(
                argv, stdin=stdin, stdout=subprocess.PIPE, stderr=self._said, start_new_session=True
            )

    def result(self, until: float) -> tuple[int, str, str]:
        """Its exit status, and what it wrote to stdout and to stderr.

        Args:
            until: by the monotonic clock; what still runs then is killed.

        Raises:
            TimeoutError: it had not ended by then.
        """
        with self._said, self._process:
            try:
                out, _ = self._process.communicate(timeout=max(0.0, until - time.monotonic()))
            except BaseException as e:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                if isinstance(e, subprocess.TimeoutExpired):
                    raise TimeoutError("it did not end in time") from e
                raise
            self._said.seek(0)
            said = self._said.read().decode("utf-8", "replace").strip()
        return self._process.returncode, out.decode("utf-8", "replace"), said


def refusal(transport: Transport, node: int, said: str) -> ConnectionLost:
    """Why there is no connection to a node, by what the transport's command said."""
    match transport.trouble(said):
        case Trouble.HOST_KEY:
            return HostKeyMismatch(
                f"the machine of node {node} is not the one whose host key is known, and nothing was sent to it. If it "
                f"is your own and its key did change, remove the old one (`ssh-keygen -R HOST`); a rented one got "
                f"its key when it began: do not trust what answers in its place, and rent another:\n{said}",
                node,
            )
        case Trouble.LOGIN:
            return LoginRefused(
                f"the machine of node {node} does not let us in: check user and identity, and try `ssh` by hand:\n"
                f"{said}",
                node,
            )
        case _:
            return ConnectionLost(f"node {node} cannot be reached: {said}", node)
