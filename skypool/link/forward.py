"""`Forward`: a port or socket of this computer whose connections lead to a port of a node."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from types import TracebackType
from urllib.parse import quote

from skypool.errors import SkypoolError, UsageError
from skypool.safety import peers, private
from skypool.shipping.package_zip import NOT_FROM_HERE
from skypool.wire.transport import SSH, CommandStream, Transport, refusal

RELAY = NOT_FROM_HERE + (files("skypool") / "link" / "relay.py").read_text("utf-8")
"""The Python program that connects its stdin and stdout with a port of a node."""

_HERE = "127.0.0.1"
"""The only address of this computer on which a forward listens."""

_READY = 60.0
"""Seconds within which `ssh` must be connected."""

_PORTS = 5
"""The number of free ports that are tried, because another program may take one between the choice and its use."""

_LONGEST_PAUSE = 10.0
"""The longest pause in seconds between two attempts to connect again."""

_IS_UP = b"up\n"

_MOST = 64
"""The most open connections of a forward that needs a program for each connection. Any user may connect."""

_BREATH = 0.5
"""Seconds to wait after a connection could not be accepted, as when this process has too many open files."""

_PATH = re.compile(r"/[^\s:%$~\\\"'\x00-\x1f\x7f]+")
"""The allowed paths of sockets. They are absolute, and have no characters that `ssh` would replace."""

_LONGEST_PATH = 103
"""The most bytes of the path of a Unix socket. Linux allows 107, and macOS allows 103."""


class Forward:
    """A port or a Unix socket of this computer whose connections lead to an address and port that a node reaches.

    A port listens on 127.0.0.1, where every user of this computer can connect. Only this user can connect to a socket.

    Use it in a `with` block, or call `close`. To a node that is reached by ssh, one `ssh -L` carries all connections,
    any number of them. If it breaks, it is started again. On other nodes, each connection has a small program of its
    own, and up to 64 connections may be open at the same time.

    Args:
        transport: runs commands on the node.
        relay: the command on the node that runs `RELAY`, without host and port. It is not used with ssh.
        node: the number of the node, for messages.
        host: the host to connect to, as the node knows it.
        port: the port to connect to.
        here: the port of this computer, 0 for a free one; or the path of a Unix socket, which is made.
        on_trouble: called with a sentence for the user when a connection has broken or cannot be made.

    Attributes:
        port: the port of this computer; 0 for a socket.
        socket: the path of the socket; "" for a port.
        node: the number of the node.
        closed: True once `close` was called.

    Raises:
        ConnectionLost: the node cannot be reached.
        UsageError: the port of this computer is not free, or the socket cannot be made.
        NotPrivate: another user can change the folder of the socket.
    """

    def __init__(
        self,
        transport: Transport,
        relay: Sequence[str],
        node: int,
        host: str,
        port: int,
        here: int | str = 0,
        on_trouble: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.node = node
        self.closed = False
        self._target = f"{host}:{port}"
        if isinstance(here, str):
            _make_way(here)
        self._door = (
            _SSHDoor(transport, node, host, port, here, on_trouble)
            if isinstance(transport, SSH)
            else _RelayDoor(transport.argv([*relay, host, str(port)]), here, on_trouble)
        )
        end = self._door.here
        self.port, self.socket = (0, end) if isinstance(end, str) else (end, "")

    @property
    def address(self) -> str:
        """Host and port on this computer, such as "127.0.0.1:41234"; the path of the socket if it is one."""
        return self.socket or f"{_HERE}:{self.port}"

    @property
    def url(self) -> str:
        """The address as a web address, such as "http://127.0.0.1:41234".

        For a socket, it is of the form "http+unix://%2Fhome%2Fann%2Fboard", which some HTTP clients take.
        """
        return f"http+unix://{quote(self.socket, safe='')}" if self.socket else f"http://{self.address}"

    def close(self) -> None:
        """Free the port or remove the socket, and end all connections through it. May be called more than once."""
        self.closed = True
        self._door.close()

    def __enter__(self) -> Forward:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Forward of {self.address} to {self._target} of node {self.node}>"


def _make_way(path: str) -> None:
    """Check the path of a new socket, and remove an old socket that nobody serves. Raises UsageError or NotPrivate."""
    if not _PATH.fullmatch(path) or len(os.fsencode(path)) > _LONGEST_PATH:
        raise UsageError(
            f"socket must be an absolute path of at most {_LONGEST_PATH} bytes, without spaces, quotes, backslashes "
            f"and the characters : % $ ~, not {path!r}"
        )
    folder = os.path.dirname(path)
    try:
        private.check(folder, "choose a socket in a folder of your own")
        about = os.lstat(path)
    except FileNotFoundError as e:
        if os.path.isdir(folder):
            return
        raise UsageError(f"there is no folder {folder} for the socket {path}; make it, or choose another path") from e
    except NotADirectoryError as e:
        raise UsageError(f"{folder} is no folder; choose another path for the socket") from e
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            if stat.S_ISSOCK(about.st_mode) and about.st_uid == os.geteuid():
                probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)  # of a process that was killed
            return
        except OSError:
            pass
    raise UsageError(f"{path} exists already; remove it, or choose another path for the socket")


class _RelayDoor:
    """A listening socket that starts a command for each connection, with the connection as its stdin and stdout."""

    def __init__(self, argv: Sequence[str], here: int | str, on_trouble: Callable[[str], None]) -> None:
        self._argv = list(argv)
        self._on_trouble = on_trouble
        self._is_told = False
        try:
            self._listener = socket.create_server((_HERE, here), backlog=128) if isinstance(here, int) else _bound(here)
        except OSError as e:
            raise _not_free(here, str(e)) from e
        # the path, or the real port
        self.here: int | str = here if isinstance(here, str) else self._listener.getsockname()[1]
        self._lock = threading.Lock()  # guards _running and _closed
        self._running: list[subprocess.Popen[bytes]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name=f"skypool forward {self.here}", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as e:
                if self._closed:
                    return  # `close` has shut the listener
                self._tell(str(e))
                time.sleep(_BREATH)
                continue
            with connection, self._lock:
                if self._closed:
                    return
                if isinstance(self.here, str) and peers.user(connection) not in (None, os.geteuid(), 0):
                    continue
                self._running = [each for each in self._running if each.poll() is None]
                if len(self._running) >= _MOST:
                    self._tell(f"{_MOST} others are open")
                    continue
                try:
                    self._running.append(self._started(connection))
                except OSError as e:
                    self._tell(f"{self._argv[0]} cannot start: {e}")

    def _tell(self, why: str) -> None:
        """Tell the user, at the first call only, that a connection was closed, and why."""
        if not self._is_told:
            self._is_told = True
            self._on_trouble(f"a connection to {_named(self.here)} was closed: {why}. This is told once")

    def _started(self, connection: socket.socket) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._argv,
            stdin=connection.fileno(),
            stdout=connection.fileno(),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            running = self._running
            self._running = []
        with contextlib.suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which `close` does not on Linux
        with contextlib.suppress(OSError):
            _connected(self.here).close()  # wakes it on macOS
        self._listener.close()
        _remove(self.here)
        for process in running:
            _kill(process)
        if self._thread is not threading.current_thread():
            self._thread.join(5)


class _SSHDoor:
    """A port or socket on which an `ssh` process listens, which is started again when it has ended."""

    def __init__(
        self, transport: SSH, node: int, host: str, port: int, here: int | str, on_trouble: Callable[[str], None]
    ) -> None:
        self._transport = transport
        self._node = node
        self._target = (host, port)
        self._on_trouble = on_trouble
        self._closing = threading.Event()
        for attempt in range(_PORTS):
            self.here = here or _free_port()
            try:
                self._stream = self._connect()
                break
            except UsageError:
                if here or attempt == _PORTS - 1:
                    raise
        self._thread = threading.Thread(target=self._watch, name=f"skypool forward {self.here}", daemon=True)
        self._thread.start()

    def _connect(self) -> CommandStream:
        """Start `ssh`, wait until it listens, and return its stream. Raises UsageError or ConnectionLost."""
        host, port = self._target
        _remove(self.here)  # of an `ssh` that was killed
        forwarding = replace(self._transport, forwards=((self.here, host, port),))
        # The program on the node ends with its stdin, so `ssh` ends also when this process is killed. `ssh` listens
        # before it starts the program, so the program's output shows that `ssh` listens.
        stream = CommandStream(forwarding.argv(["sh", "-c", "echo up; exec cat >/dev/null"]))
        stream.socket.settimeout(_READY)
        said = b""
        with contextlib.suppress(TimeoutError, OSError):
            while len(said) < len(_IS_UP) and (part := stream.socket.recv(len(_IS_UP) - len(said))):
                said += part
        if said == _IS_UP:
            return stream
        complaint = stream.end()
        if any(each in complaint for each in ("cannot listen", "cannot bind", "already in use")):
            raise _not_free(self.here, complaint)
        raise refusal(self._transport, self._node, complaint or f"no answer within {_READY:g} s")

    def _watch(self) -> None:
        """Wait until `ssh` ends, and start it again. Repeat this until the port or socket is closed."""
        while True:
            self._wait()
            self._stream.close()
            if self._closing.is_set():
                return
            self._on_trouble(f"the forward of {_named(self.here)} to node {self._node} broke; it is being made again")
            pause = 0.5
            while not self._closing.wait(pause):
                pause = min(2 * pause, _LONGEST_PAUSE)
                with contextlib.suppress(SkypoolError, OSError):  # told above; the next attempt follows
                    self._stream = self._connect()
                    break
            if self._closing.is_set():
                self._stream.close()
                return

    def _wait(self) -> None:
        """Wait until `ssh` or its program on the node has ended. Read what `ssh` writes to stderr meanwhile."""
        self._stream.socket.settimeout(5)
        while not self._closing.is_set():
            try:
                if not self._stream.socket.recv(4096):
                    return
            except TimeoutError:
                self._stream.complaint()
            except OSError:
                return  # `close` has shut the socket

    def close(self) -> None:
        self._closing.set()
        self._stream.shut()
        _kill(self._stream.process)  # it would wait for the connections through it
        if self._thread is not threading.current_thread():
            self._thread.join(5)
        _remove(self.here)


def _free_port() -> int:
    with socket.create_server((_HERE, 0)) as probe:
        return int(probe.getsockname()[1])


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a process group of its own, with that group, and wait until it has ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _bound(path: str) -> socket.socket:
    """Return a listening socket at a path, to which only this user can connect."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(path)
        os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener


def _connected(here: int | str) -> socket.socket:
    if isinstance(here, int):
        return socket.create_connection((_HERE, here), timeout=1)
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(1)
    try:
        made.connect(here)
    except BaseException:
        made.close()
        raise
    return made


def _remove(here: int | str) -> None:
    """Remove a Unix socket. Does nothing for a port, or if the socket is gone."""
    if isinstance(here, str):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.lstat(here).st_mode):
                os.unlink(here)


def _named(here: int | str) -> str:
    return f"port {here}" if isinstance(here, int) else f"the socket {here}"


def _not_free(here: int | str, why: str) -> UsageError:
    if isinstance(here, str):
        return UsageError(f"the socket {here} cannot be made: {why}; choose another path")
    return UsageError(f"port {here} of this computer cannot be used: {why}; choose another, or leave it out")
