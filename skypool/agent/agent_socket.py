"""The agent's Unix socket, in the current folder: finds the agent that listens there, or makes the socket."""

from __future__ import annotations

import contextlib
import os
import socket

from skypool.safety import peers

NAME = "agent.sock"


def find(waits: bool = True) -> socket.socket | None:
    """Return a connection to the agent that listens at the socket; None if there is none.

    Raises:
        PermissionError: another user's process listens there.
        BlockingIOError: the agent accepts no connection just now, and `waits` is False.
    """
    agent = socket.socket(socket.AF_UNIX)
    agent.setblocking(waits)
    try:
        agent.connect(NAME)
    except (FileNotFoundError, ConnectionRefusedError):
        agent.close()
        return None
    except BlockingIOError:
        agent.close()
        raise
    if peers.user(agent) != os.geteuid():
        agent.close()
        raise PermissionError(f"the socket {NAME} of skypool's agent on this node is served by another user")
    return agent


def listen() -> socket.socket:
    """Return a new socket at which an agent can listen, in place of what has its name."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(NAME)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(NAME)
    os.chmod(NAME, 0o600)
    listener.listen(8)
    return listener
