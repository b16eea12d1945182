"""The empty call that precedes each run of a gang: the node that answers it can run processes."""

from __future__ import annotations

import contextlib
import socket


def free_ports(count: int) -> list[int]:
    """Return the numbers of TCP ports of this machine that are free at the moment.

    Another process may take a port before the caller uses it.

    Args:
        count: the number of ports.

    Raises:
        OSError: there are not enough free ports.
    """
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [int(each.getsockname()[1]) for each in sockets]
