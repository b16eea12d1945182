"""The node's part of the network check: a function that listens on a TCP port, and connects to all other nodes.

The client runs `probe` on all nodes at once, and tells each node the addresses and ports of the others.
`skypool.gangs.network_report` makes a report of the answers.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

BULK = 64 << 10
"""The number of bytes that are sent over each connection. They fill the largest packets of usual networks."""
WITHIN = 3.0
"""Seconds in which a connection must be made. After that, the bytes must arrive in the same time again."""
_AT_ONCE = 64
"""The most connections that a node makes at the same time."""
_MOST = 256
"""The most connections that a listener has open."""
_PAUSE = 0.2
"""Seconds without new connections after one could not be accepted, as when there are too many open files."""
_TOKEN = 32
"""The number of characters of a token: random text by which a node knows that it has reached the right listener."""
_DONE = b"."
"""What a listener sends when all bytes have arrived."""
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)

Target = tuple[int, str, int, str]
"""(node, address, port, token): where a node listens, and the token that its listener expects and sends back."""


def probe(address: str, token: str, targets: Iterator[Sequence[Target]], within: float) -> Iterator[object]:
    """Listen on a free port, then connect to other nodes that do the same. The port is closed at the end.

    Args:
        address: this node's address, at which others connect; "" if unknown.
        token: 32 random characters for this node. A connection that does not begin with them is closed.
        targets: an iterator from the client. Its first item is the list of nodes to connect to. Its end means that all
            nodes are done, so that this one need not listen any longer.
        within: seconds for making a connection, and the same time again for exchanging the bytes.

    Yields:
        First a dict with the facts about this node that `facts` returns, and its `port`. Then a list that has (node,
        outcome, seconds, text) for each target, in no particular order.
    """
    with Listener(token, socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        yield {**facts(address), "port": listener.port}
        yield connect_all(next(targets, ()), within)
        for _ in targets:
            continue


def facts(address: str) -> dict[str, object]:
    """Return what is known about the network of this machine. `address` is its own; "" if unknown.

    The keys: `hostname` is this machine's own name, and `found` a list of the addresses to which it resolves.
    `interface` is the name of the interface that has `address`, or "", and `mtu` the size in bytes of its largest
    packet, or None. `told` is the interface that GLOO_SOCKET_IFNAME names, or "".
    """
    from skypool.devices import network

    hostname = socket.gethostname()
    interface = network.interface(address) if address else ""
    return {
        "hostname": hostname,
        "found": sorted(network.found(hostname)),
        "interface": interface,
        "mtu": network.mtu(interface) if interface else None,
        "told": os.environ.get("GLOO_SOCKET_IFNAME", ""),
    }


class Listener:
    """TCP port of this machine that answers everybody who sends the right token, while a `with` block runs.

    From each connection, the token of 32 characters is read and sent back in reverse. Then `BULK` (64 Ki) more bytes
    are read, and a full stop is sent. A single thread serves all connections. Everybody can connect, so at most `_MOST`
    (256) connections are open. One more takes the place of the oldest that has not sent the token.

    Args:
        token: the token that each connection must send.
        family: `socket.AF_INET` to accept IPv4 connections, or `socket.AF_INET6` to accept IPv6 connections, too.

    Attributes:
        port: the port, a free one that the system has chosen.
    """

    def __init__(self, token: str, family: socket.AddressFamily) -> None:
        self._token = token.encode()
        self._socket = socket.create_server(
            ("", 0),
            family=family,
            backlog=128,
            dualstack_ipv6=family == socket.AF_INET6 and socket.has_dualstack_ipv6(),
        )
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="skypool-probe", daemon=True)

    def __enter__(self) -> Listener:
        """Start to serve connections."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close the port and all connections. Returns when the thread has ended."""
        self._wake.close()
        self._thread.join()

    def _serve(self) -> None:
        """Serve connections until `__exit__` closes the other end of the socket pair of `_woken`."""
        received: dict[socket.socket, bytes] = {}
        is_listening = True
        with selectors.DefaultSelector() as selector, self._woken, self._socket:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                found = selector.select(None if is_listening else _PAUSE)
                if not is_listening:
                    selector.register(self._socket, selectors.EVENT_READ)
                    is_listening = True
                for key, _ in found:
                    if key.fileobj is self._woken:
                        for each in received:
                            each.close()
                        return
                    if key.fileobj is self._socket:
                        is_listening = self._accept(selector, received)
                    elif key.data in received and not self._answer(key.data, received):
                        self._end(key.data, selector, received)

    def _accept(self, selector: selectors.BaseSelector, received: dict[socket.socket, bytes]) -> bool:
        """Accept a connection, if one is there. Return False if no more files can be opened."""
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):  # the peer has given up already
            return True
        except OSError:
            # too many open files: stop watching the port for now
            selector.unregister(self._socket)
            return False
        connection.setblocking(False)
        if len(received) >= _MOST:
            unknown = (each for each, got in received.items() if len(got) < _TOKEN)
            self._end(next(unknown, next(iter(received))), selector, received)
        received[connection] = b""
        selector.register(connection, selectors.EVENT_READ, connection)
        return True

    def _end(
        self, connection: socket.socket, selector: selectors.BaseSelector, received: dict[socket.socket, bytes]
    ) -> None:
        """Close a connection, and forget it."""
        selector.unregister(connection)
        del received[connection]
        connection.close()

    def _answer(self, connection: socket.socket, received: dict[socket.socket, bytes]) -> bool:
        """Read what a connection has sent, and send what is due. Return False if the connection must be closed."""
        before = received[connection]
        try:
            more = connection.recv(BULK)
            got = received[connection] = before + more
            if not more or not self._token.startswith(got[:_TOKEN]):
                return False
            if len(before) < _TOKEN <= len(got):
                connection.sendall(self._token[::-1])
            if len(got) >= _TOKEN + BULK:
                connection.sendall(_DONE)
                return False
        except OSError:  # the peer has closed it
            return False
        return True


def connect_all(targets: Iterable[Target], within: float) -> list[tuple[int, str, float, str]]:
    """Connect to all targets, up to 64 at the same time. Return a list of (node, outcome, seconds, text) for them.

    `connect` describes these. The list is in no particular order. `within` is the time limit in seconds for making a
    connection, and again for exchanging the bytes.
    """
    left = list(targets)
    outcomes: list[tuple[int, str, float, str]] = []

    def work() -> None:
        """Connect to one target after the other, until none is left."""
        while True:
            try:
                target = left.pop()
            except IndexError:
                return
            outcomes.append(connect(target, within))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(len(left), _AT_ONCE))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def connect(target: Target, within: float) -> tuple[int, str, float, str]:
    """Connect to a listener of another node, and exchange the token and `BULK` bytes with it.

    The connection must be made in `within` seconds, and the bytes must be exchanged in `within` seconds after that.

    Returns (node, outcome, seconds, text). The outcome is one of `skypool.gangs.network_report.Outcome`, such as "ok"
    or "timeout". `seconds` is the time until the connection was made, about one round trip; 0.0 if none was made.
    `text` is the error of the operating system, or "".
    """
    node, address, port, token = target
    if not address:
        return node, "no address", 0.0, ""
    begun = time.monotonic()
    try:
        connection = socket.create_connection((address, port), timeout=within)
    except OSError as e:
        return node, _failure(e), 0.0, str(e)
    took = time.monotonic() - begun
    with connection:
        try:
            return node, _exchange(connection, token, within), took, ""
        except OSError as e:
            return node, "stalled" if isinstance(e, TimeoutError) else "broken", took, str(e)


def _failure(error: OSError) -> str:
    """Return the outcome for an error of connecting, such as "timeout" or "refused"."""
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    return "unreachable" if error.errno in _UNREACHABLE else "broken"


def _exchange(connection: socket.socket, token: str, within: float) -> str:
    """Send a token and `BULK` bytes, and return "ok", "silent" for no answer, or "stranger" for a wrong one."""
    until = time.monotonic() + within
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(token.encode())
    expected = token.encode()[::-1]
    answer = b""
    while len(answer) < len(expected):
        try:
            more = connection.recv(len(expected) - len(answer))
        except TimeoutError:
            return "silent"
        answer += more
        if not more or not expected.startswith(answer):
            return "stranger"
    # from here on, a TimeoutError means that the token was answered, but the bytes have not arrived in time
    connection.settimeout(max(0.1, until - time.monotonic()))
    connection.sendall(bytes(BULK))
    return "ok" if connection.recv(1) == _DONE else "stranger"
