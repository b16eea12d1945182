"""`Forward`: a port of this computer whose connections lead to a port that a node (a rented machine) reaches."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from types import TracebackType

from skypool.errors import SkypoolError, UsageError
from skypool.shipping.bundle import NOT_FROM_HERE
from skypool.wire.transport import SSH, CommandStream, Transport, refusal

RELAY = NOT_FROM_HERE + (files("skypool") / "link" / "relay.py").read_text("utf-8")
"""The Python program that connects its stdin and stdout with a port of a node."""

_HERE = "127.0.0.1"
"""The only address of this computer on which a forward listens."""

_READY = 60.0
"""Seconds within which `ssh` must be connected."""

_PORTS = 5
"""How many free ports are tried. Another program may take one between the choice and its use."""

_LONGEST_PAUSE = 10.0
"""The longest pause in seconds between two attempts to connect again."""

_IS_UP = b"up\n"


class Forward:
    """A port of 127.0.0.1 on this computer whose connections lead to an address and port that a node reaches.

    Any number of connections may be open at the same time. Use it in a `with` block, or call `close`. To a node that is
    reached by ssh, one `ssh -L` carries all connections. If it breaks, it is started again. On other nodes, each
    connection has a small program of its own.

    Args:
        transport: runs commands on the node.
        relay: the command on the node that runs `RELAY`, without host and port. It is not used with ssh.
        node: the number of the node, for messages.
        host: the host to connect to, as the node knows it.
        port: the port to connect to.
        here: the port of this computer; 0 for a free one.
        on_trouble: called with a sentence for the user when the connection to the node has broken.

    Attributes:
        port: the port of this computer.
        node: the number of the node.
        closed: True once `close` was called.

    Raises:
        ConnectionLost: the node cannot be reached.
        UsageError: the port of this computer is not free.
    """

    def __init__(
        self,
        transport: Transport,
        relay: Sequence[str],
        node: int,
        host: str,
        port: int,
        here: int = 0,
        on_trouble: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.node = node
        self.closed = False
        self._target = f"{host}:{port}"
        self._door = (
            _SSHDoor(transport, node, host, port, here, on_trouble)
            if isinstance(transport, SSH)
            else _RelayDoor(transport.argv([*relay, host, str(port)]), here, on_trouble)
        )
        self.port = self._door.port

    @property
    def address(self) -> str:
        """Host and port on this computer, such as "127.0.0.1:41234"."""
        return f"{_HERE}:{self.port}"

    @property
    def url(self) -> str:
        """The address as a web address, such as "http://127.0.0.1:41234"."""
        return f"http://{self.address}"

    def close(self) -> None:
        """Free the port of this computer, and end all connections through it. May be called more than once."""
        self.closed = True
        self._door.close()

    def __enter__(self) -> Forward:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Forward of {self.address} to {self._target} of node {self.node}>"


class _RelayDoor:
    """A listening socket that starts a command for each connection, with the connection as its stdin and stdout.

    Args:
        argv: the local command.
        here: the port to listen on; 0 for a free one.
        on_trouble: called with a sentence for the user when the command cannot be started.

    Attributes:
        port: the port.
    """

    def __init__(self, argv: Sequence[str], here: int, on_trouble: Callable[[str], None]) -> None:
        self._argv = list(argv)
        self._on_trouble = on_trouble
        try:
            self._listener = socket.create_server((_HERE, here), backlog=128)
        except OSError as e:
            raise _not_free(here, str(e)) from e
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()  # guards _running and _closed
        self._running: list[subprocess.Popen[bytes]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name=f"skypool forward {self.port}", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # `close` has shut the listener
            with connection, self._lock:
                if self._closed:
                    return
                self._running = [each for each in self._running if each.poll() is None]
                try:
                    self._running.append(self._started(connection))
                except OSError as e:
                    self._on_trouble(f"a connection to port {self.port} was closed: {self._argv[0]} cannot start: {e}")

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
            socket.create_connection((_HERE, self.port), timeout=1).close()  # wakes it on macOS
        self._listener.close()
        for process in running:
            _kill(process)
        if self._thread is not threading.current_thread():
            self._thread.join(5)


class _SSHDoor:
    """A port on which an `ssh` process listens, which is started again when it has ended.

    `ssh` runs a program on the node that ends with its stdin. So `ssh` ends also when this process is killed.

    Args:
        transport: the way to the node.
        node: the number of the node, for messages.
        host: the host to connect to, as the node knows it.
        port: the port to connect to.
        here: the port to listen on; 0 for a free one.
        on_trouble: called with a sentence for the user when the connection has broken.

    Attributes:
        port: the port on which `ssh` listens.
    """

    def __init__(
        self, transport: SSH, node: int, host: str, port: int, here: int, on_trouble: Callable[[str], None]
    ) -> None:
        self._transport = transport
        self._node = node
        self._target = (host, port)
        self._on_trouble = on_trouble
        self._closing = threading.Event()
        for attempt in range(_PORTS):
            self.port = here or _free_port()
            try:
                self._stream = self._connect()
                break
            except UsageError:
                if here or attempt == _PORTS - 1:
                    raise
        self._thread = threading.Thread(target=self._watch, name=f"skypool forward {self.port}", daemon=True)
        self._thread.start()

    def _connect(self) -> CommandStream:
        """Start `ssh`, wait until it listens, and return its stream.

        `ssh` begins to listen before it starts the program on the node. So the first output of the program is the sign.

        Raises:
            UsageError: the port is not free.
            ConnectionLost: the node cannot be reached.
        """
        host, port = self._target
        forwarding = replace(self._transport, forwards=((self.port, host, port),))
        stream = CommandStream(forwarding.argv(["sh", "-c", "echo up; exec cat >/dev/null"]))
        stream.socket.settimeout(_READY)
        said = b""
        with contextlib.suppress(TimeoutError, OSError):
            while len(said) < len(_IS_UP) and (part := stream.socket.recv(len(_IS_UP) - len(said))):
                said += part
        if said == _IS_UP:
            return stream
        complaint = stream.end()
        if "cannot listen" in complaint or "already in use" in complaint:
            raise _not_free(self.port, complaint)
        raise refusal(self._transport, self._node, complaint or f"no answer within {_READY:g} s")

    def _watch(self) -> None:
        """Wait until `ssh` ends, and start it again, until the door is closed."""
        while True:
            self._wait()
            self._stream.close()
            if self._closing.is_set():
                return
            self._on_trouble(f"the forward of port {self.port} to node {self._node} broke; it is being made again")
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


def _free_port() -> int:
    with socket.create_server((_HERE, 0)) as probe:
        return int(probe.getsockname()[1])


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a process group of its own, with that group, and wait until it has ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _not_free(port: int, why: str) -> UsageError:
    return UsageError(f"port {port} of this computer cannot be used: {why}; choose another, or leave it out")
