"""Finds free ports on a node, for the processes of a gang.

The client sends `free_ports` as the empty call that each node must answer before a gang runs there.
"""

from __future__ import annotations

import contextlib
import random
import socket

from skypool.errors import protocol_violation

_LOWEST = 20_000
"""The lowest port that is tried. Services on machines seldom listen above it."""
_EPHEMERAL = 32_768
"""The first port that Linux gives to outgoing connections, unless the machine is configured otherwise."""


def free_ports(count: int) -> list[int]:
    """Return `count` different free TCP ports of this machine. They are free on all of its addresses.

    Another program may take such a port before the caller does. Ports are chosen at random, below those that the system
    gives to outgoing connections: otherwise connections that wait for the port's listener could take the port. Raises
    OSError if no port is free.
    """
    with contextlib.ExitStack() as bound:
        return [_bind(bound.enter_context(_socket())) for _ in range(count)]


def ports_of(answer: object, count: int) -> list[int]:
    """Return the ports in a node's answer to `free_ports(count)`. Nothing in the answer is trusted.

    Raises ProtocolError if the answer is not a list of `count` ports.
    """
    if type(answer) is not list or len(answer) != count or not all(type(p) is int and 0 < p < 65536 for p in answer):
        raise protocol_violation(f"the node answered a request for {count} free ports with something else")
    return answer


def _socket() -> socket.socket:
    """Return a TCP socket for IPv4 and IPv6 addresses alike, or for IPv4 only on machines without IPv6."""
    with contextlib.suppress(OSError):
        made = socket.socket(socket.AF_INET6)
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        return made
    return socket.socket(socket.AF_INET)


def _bind(to_bind: socket.socket) -> int:
    """Bind a socket to a free port on all addresses, and return the port."""
    for port in random.sample(range(_LOWEST, _EPHEMERAL), 100):
        with contextlib.suppress(OSError):
            to_bind.bind(("", port))
            return port
    to_bind.bind(("", 0))
    return int(to_bind.getsockname()[1])
