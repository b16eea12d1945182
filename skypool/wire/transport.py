"""Builds and starts the command that reaches a node: `ssh`, `docker exec -i` or a local program."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import selectors
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
from skypool.text import plain


class Trouble(Enum):
    """Reason why a command could not be run on a node. The values are texts for messages."""

    UNREACHABLE = "the machine does not answer"
    LOGIN = "the login was refused"
    HOST_KEY = "the host key is not the expected one"
    OTHER = "the command failed"


class Transport(Protocol):
    """Way to run commands on one node. Implementations only build command lines; they start nothing.

    `CommandStream` and `Errand` start the commands.
    """

    def argv(self, command: Sequence[str], *, terminal: bool = False) -> list[str]:
        """Return the local command that runs `command` on the node. Nothing is started.

        The local command passes its stdin on to `command`, and writes to stdout what `command` writes to stdout. With
        `terminal`, `command` gets a terminal on the node, and the local command must run in one.
        """
        ...

    def trouble(self, said: str) -> Trouble:
        """Return why the local command failed, by its stderr `said`; `Trouble.OTHER` if that shows no known reason."""
        ...


@dataclass(frozen=True, slots=True)
class Subprocess:
    """Transport that runs commands on this machine directly. `trouble` always returns `Trouble.OTHER`."""

    def argv(self, command: Sequence[str], *, terminal: bool = False) -> list[str]:
        return list(command)

    def trouble(self, said: str) -> Trouble:
        return Trouble.OTHER


@dataclass(frozen=True, slots=True)
class Exec:
    """Transport that runs commands in a container. `trouble` always returns `Trouble.OTHER`.

    Args:
        runtime: the container program with its options, such as ("docker",).
        container: the container's id.
        user: the user that runs the commands there; "" for the image's own user.
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
"""Options of `ssh` that connect its stdin and stdout with the command, whatever the user's configuration says."""
_NAMES_STREAMS = (8, 7)
"""The first release of OpenSSH (major, minor) with the options in `_STREAM_KEPT`. An older `ssh` refuses them."""


@functools.cache
def _names_streams() -> bool:
    """Return True if `ssh` is OpenSSH 8.7 or later, which knows the options in `_STREAM_KEPT`. Run `ssh -V` once."""
    try:
        done = subprocess.run(["ssh", "-V"], stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False  # the error shows when `ssh` is used for a connection
    release = re.search(rb"OpenSSH\w*_(\d+)\.(\d+)", done.stderr)
    return release is not None and (int(release[1]), int(release[2])) >= _NAMES_STREAMS


@dataclass(frozen=True, slots=True)
class SSH:
    """Transport that runs commands on another machine with the `ssh` program.

    The user's ssh configuration and ssh-agent are used. ssh never asks for a password or anything else.

    Args:
        host: a host name, an address, or the name of a `Host` section in the user's ssh configuration.
        user: the login name; "" leaves it to the user's configuration.
        port: the port of the SSH server; None leaves it to the user's configuration.
        identity: the file of a private key; "" leaves it to the user's configuration.
        jump: the host to connect through, as for `ssh -J`; "" leaves it to the user's configuration.
        known_hosts: files with the host keys to trust; empty for the user's own files. ssh writes new keys into the
            first file, so that file must be skypool's own.
        alias: the name under which the files `known_hosts` have the host's key; "" for the host's own name.
        pin: trust the first key that an unknown host shows, and remember it. If False, an unknown key is refused.
        config: a configuration file to use instead of the user's own; "" for the user's own.
        connect_timeout: seconds after which an address that does not answer is given up.
        forwards: triples (local port, host, port). ssh listens on each local port of 127.0.0.1, and forwards
            connections to this port of the host, as the other machine knows it. In place of a local port, there may be
            the path of a Unix socket, to which only this user can connect.
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
    forwards: tuple[tuple[int | str, str, int], ...] = ()

    def argv(self, command: Sequence[str], *, terminal: bool = False) -> list[str]:
        options = {
            "BatchMode": "yes",
            "StrictHostKeyChecking": "accept-new" if self.pin else "yes",
            "UpdateHostKeys": "no",
            "ConnectTimeout": str(self.connect_timeout),
            "ServerAliveInterval": "10",
            "ServerAliveCountMax": "3",
            "ControlMaster": "no",  # one ssh process for each node, so that its end means the end of the connection
            "ControlPath": "none",
            "ClearAllForwardings": "no" if self.forwards else "yes",
            "ExitOnForwardFailure": "yes",
            "ForwardAgent": "no",
            "PermitLocalCommand": "no",
            "RemoteCommand": "none",
            "LogLevel": "ERROR",
            **(_STREAM_KEPT if _names_streams() else {}),
        }
        if any(isinstance(here, str) for here, _, _ in self.forwards):
            options["StreamLocalBindMask"] = "0177"  # for the sockets
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
        for here, host, there in self.forwards:
            end = here if isinstance(here, str) else f"127.0.0.1:{here}"
            argv += ["-L", f"{end}:{f'[{host}]' if ':' in host else host}:{there}"]
        return [*argv, "--", self.host, shlex.join(command)]

    def dropped(self, said: str) -> bool:
        """Return True if an SSH server on the way closed the connection before the login, by the stderr of `ssh`.

        Servers do so when many connections come at once. A new attempt a little later may succeed. Refused connections,
        timeouts and refused logins give False.
        """
        return "exchange_identification" in said and not re.search(_NOT_DROPPED, said)

    def trouble(self, said: str) -> Trouble:
        return next((trouble for trouble, words in _SSH_SAYS if re.search(words, said)), Trouble.OTHER)


_BUFFERS = (4 << 20, 1 << 20, 256 << 10)
_COMPLAINTS = 16
"""The most reads, of up to 64 KiB each, from a command's stderr in one call of `complaint`."""


class CommandStream:
    """Running command with one socket for its stdin and stdout, and a pipe for its stderr.

    The command starts at once, in a session (and process group) of its own, so that Ctrl-C does not reach it. Raises
    OSError if it could not be started.

    Attributes:
        socket: this side's end of the connection to the command's stdin and stdout.
        stderr: the file descriptor from which the command's stderr is read; -1 after `close`.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        with contextlib.ExitStack() as undone:
            ours, theirs = socket.socketpair()
            undone.callback(ours.close)
            with theirs:
                for end in (ours, theirs):
                    _widen(end)
                self.stderr, stderr = os.pipe()
                undone.callback(os.close, self.stderr)
                try:
                    os.set_blocking(self.stderr, False)
                    self.process = subprocess.Popen(
                        argv, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=stderr, start_new_session=True
                    )
                finally:
                    os.close(stderr)
            undone.pop_all()
        self.socket = ours
        self.argv = list(argv)

    def complaint(self) -> str:
        """Return what the command wrote to stderr since the last call of this method: its last 2000 bytes, stripped.

        Does not wait for more, and reads at most 1 MiB of a command that writes without end. Returns "" after `close`.
        """
        said = b""
        with contextlib.suppress(BlockingIOError, OSError):
            for _ in range(_COMPLAINTS):
                part = os.read(self.stderr, 65536)
                if not part:
                    break
                said = (said + part)[-2000:]
        return plain(said.decode("utf-8", "replace")).strip()

    def end(self, patience: float = 2.0) -> str:
        """Close the socket, wait until the command ends, and return the last 2000 bytes of stderr, as stripped text.

        A command that still runs after `patience` seconds and another half second is killed, with its process group.
        """
        self.socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        said = self.complaint()
        self.close()
        return said

    def shut(self) -> None:
        """Shut the socket down in both directions, so that threads that read or write it wake up at once.

        The command is not ended, and its pipe for stderr stays open. Does nothing if the socket is closed already.
        """
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self, patience: float = 0.5) -> None:
        """Close the socket and the pipe for stderr, and wait until the command ends. May be called more than once.

        A command that still runs after `patience` seconds is killed, with its process group.
        """
        self.socket.close()
        self.reap(patience)

    def reap(self, patience: float = 0.5) -> None:
        """Close the pipe for stderr, and wait until the command ends. Call `shut` before.

        A command that still runs after `patience` seconds is killed, with its process group. Unlike `close`, this
        leaves the socket open, because a thread may still read it.
        """
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
    """Give a socket the largest of the sizes in `_BUFFERS` that the system accepts. Raises nothing."""
    for size in _BUFFERS:
        try:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
        except OSError:  # macOS raises ENOBUFS; Linux silently uses its maximum
            continue
        return


_LONGEST = 4 << 20
"""The most bytes that the command of an `Errand` may write to stdout and stderr together."""
_COMPLAINT = 4096
"""The number of last bytes of stderr that an `Errand` keeps."""


class Errand:
    """Running command that gets its whole stdin, `given`, at the start. Its output is kept until `result` is called.

    The command starts at once. It counts as ended when its own process has ended and its stdout is closed. Other
    processes that it started are not waited for, even if they keep stderr open. Raises OSError if it cannot be started.
    """

    def __init__(self, argv: Sequence[str], given: bytes) -> None:
        with tempfile.TemporaryFile() as stdin:
            stdin.write(given)
            stdin.seek(0)
            self._process = subprocess.Popen(
                argv, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )

    def result(self, until: float) -> tuple[int, str, str]:
        """Wait for the command and return its exit status, its stdout and its stderr. Call it once.

        The status is negative if a signal ended the command. A status other than 0 is returned, not raised. Stderr is
        stripped, and only its last 4 KiB are returned. A command that writes more than 4 MiB is killed. The command,
        with its process group, is also killed if the wait is interrupted, as by Ctrl-C.

        Raises TimeoutError if it was killed because it had not ended at `until`, a time of `time.monotonic()`.
        """
        out, said = bytearray(), bytearray()
        with self._process:
            try:
                if not self._read(out, said, until):
                    self._kill()
                self._process.wait(max(0.0, until - time.monotonic()))
            except BaseException as e:
                self._kill()
                if isinstance(e, (TimeoutError, subprocess.TimeoutExpired)):
                    raise TimeoutError(
                        "the command did not end in time and was killed; check that the machine to which the command "
                        "connects runs and can be reached"
                    ) from e
                raise
        complaint = plain(said.decode("utf-8", "replace")).strip()
        return self._process.returncode, out.decode("utf-8", "replace"), complaint

    def _read(self, out: bytearray, said: bytearray, until: float) -> bool:
        """Read stdout to its end, and stderr as far as it has come. Return False if too long. Raises TimeoutError."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        total = 0
        with selectors.DefaultSelector() as selector:
            for file, kept in ((self._process.stdout, out), (self._process.stderr, said)):
                os.set_blocking(file.fileno(), False)
                selector.register(file, selectors.EVENT_READ, kept)
            while self._process.stdout in {key.fileobj for key in selector.get_map().values()}:
                ready = selector.select(max(0.0, until - time.monotonic()))
                if not ready:
                    raise TimeoutError
                for key, _ in ready:
                    part = os.read(key.fd, 65536)
                    total += len(part)
                    key.data.extend(part)
                    del said[:-_COMPLAINT]
                    if not part:
                        selector.unregister(key.fileobj)
                if total > _LONGEST:
                    return False
        with contextlib.suppress(BlockingIOError):
            while total <= _LONGEST and (part := os.read(self._process.stderr.fileno(), 65536)):
                total += len(part)
                said.extend(part)
                del said[:-_COMPLAINT]
        return total <= _LONGEST

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def missing_key(transport: Transport) -> str:
    """Return the beginning of a sentence that says that the file of the private key is missing; "" if it is there."""
    identity = transport.identity if isinstance(transport, SSH) else ""
    return (
        f"the key file {identity} does not exist on this computer; "
        if identity and not os.path.exists(identity)
        else ""
    )


def refusal(transport: Transport, node: int, said: str) -> ConnectionLost:
    """Return (do not raise) the error for a connection to a node that could not be made.

    It is a HostKeyMismatch for a wrong host key, a LoginRefused for a refused login, else a ConnectionLost. Its message
    has `said`, the text that the command of the connection wrote to stderr.
    """
    match transport.trouble(said):
        case Trouble.HOST_KEY:
            return HostKeyMismatch(
                f"the machine of node {node} has another SSH host key than the known one, so nothing was sent to that "
                "machine. If the machine is your own and its key has changed, remove the old key with `ssh-keygen -R "
                f"HOST`. If the machine is rented, do not trust it: rent another one. ssh printed:\n{said}",
                node,
            )
        case Trouble.LOGIN:
            return LoginRefused(
                f"the machine of node {node} refused the SSH login; {missing_key(transport)}check the user and "
                f"identity settings, and try `ssh` by hand. ssh printed:\n{said}",
                node,
            )
        case _:
            return ConnectionLost(f"node {node} cannot be reached: {said}", node)
