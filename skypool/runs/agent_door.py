"""Sends a message to the agent of this machine, and prints its answer. A node runs this text, as `node_program` says.

It speaks the protocol of the skypool that has started the run, so it also works for a client with a later version.
"""

import contextlib
import json
import os
import socket
import struct

from skypool.agent import agent_socket

PREFIX = struct.Struct("!2sBBIQ")
"""The beginning of a frame, as `wire.frames` says. It is the same in all versions."""
_PATIENCE = 20.0
"""Seconds in which the agent answers. It does so at once unless it hangs."""


def main(folder: str, about: str, wire: str, asks: str, answers: str, message: str) -> None:
    """Print the header of the answer as a line of JSON; an empty line if no agent runs.

    Args:
        folder: the folder of the agent.
        about: the file that says what runs here. It has the version of the protocol.
        wire: the version that counts if that file is not there.
        asks, answers: the kinds of the message and of its answer, as numbers.
        message: the header of the message, as JSON.
    """
    agent = None
    with contextlib.suppress(FileNotFoundError):  # the agent has ended, and its keeper has removed its folder
        os.chdir(folder)
        agent = agent_socket.find()
    if agent is None:
        print(flush=True)
        return
    ours = asked(agent, about, int(wire), int(asks), message)
    ours.settimeout(_PATIENCE)
    with ours.makefile("rb") as file:
        while True:
            _, _, kind, header, body = PREFIX.unpack(file.read(PREFIX.size))  # raises if the agent closes it
            answer = file.read(header + body)[:header]
            if kind == int(answers):
                print(json.dumps(json.loads(answer)), flush=True)
                return


def asked(agent: socket.socket, about: str, wire: int, asks: int, message: str) -> socket.socket:
    """Send a message to an agent, and return the connection over which the answer comes.

    Args:
        agent: the connection to the agent's socket. The agent keeps it open as long as the other one.
        about, wire, asks, message: as for `main`.
    """
    with contextlib.suppress(OSError, ValueError), open(about, "rb") as file:
        wire = json.load(file).get("wire", wire)
    ours, theirs = socket.socketpair()
    with theirs:
        socket.send_fds(agent, [b"skypool"], [theirs.fileno(), theirs.fileno()])
    said = message.encode()
    ours.sendall(PREFIX.pack(b"sk", wire, asks, len(said), 0) + said)
    return ours
