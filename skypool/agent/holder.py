"""The holder: the process that each connection of the client starts on the node, by SSH for example.

It starts the agent if there is none, passes its own stdin and stdout to it, and waits. So no process stands between
client and agent. A client whose connection breaks waits for the next holder, so this module imports little.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Mapping
from typing import Any, NoReturn

from skypool.agent import agent_socket


def connect(config: Mapping[str, Any], start: bool) -> NoReturn:
    """Find or start the agent, hand stdin and stdout to it, wait until it closes them, and end this process.

    Before the handover, a line "ready" is printed. If there is no agent, the line is "gone", and this process ends with
    status 3. If this process started the agent and the agent failed, the error is printed to stderr, and the status is
    70. Otherwise it is 0.

    Args:
        config: an `AgentConfig` as JSON from the client. `config["folder"]` is the folder with the agent's socket. The
            rest is checked only if an agent is started.
        start: True to start an agent if there is none. A client that reconnects passes False: the calls of an ended
            agent are lost, and a new agent would hide that.

    Raises:
        OSError: the folder does not exist or cannot be used.
        ProtocolError: an agent must be started, and the configuration is not valid.
    """
    os.chdir(config["folder"])
    with open("lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        agent = agent_socket.find()
        words = -1
        if agent is None and start:
            words = os.open("last-words", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            from skypool.agent import keeper  # most connections find an agent

            keeper.start(config, words)
            agent = agent_socket.find()
            if agent is None:
                raise RuntimeError(
                    f"the socket {agent_socket.NAME} of skypool's agent, its process on this node, was deleted right "
                    "after it was created; keep other programs from changing files in skypool's folders"
                )
    if agent is None:
        os.write(1, b"gone\n")
        os._exit(3)
    os.write(1, b"ready\n")
    socket.send_fds(agent, [b"skypool"], [0, 1])
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    with contextlib.suppress(ConnectionError):
        agent.recv(1)
    if words >= 0 and (said := os.pread(words, 1 << 16, 0)):
        os.write(2, said)
        os._exit(70)
    os._exit(0)
