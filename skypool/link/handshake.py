"""Performs the handshake with a node: compares Python versions, sends skypool's code, and waits for a WELCOME message.

The WELCOME comes from the agent, the program that runs on the node.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass

from skypool.errors import ConnectionLost, ProtocolError, PythonMismatch
from skypool.link import inbound
from skypool.link.inbound import Taken, Welcome
from skypool.shipping import bundle
from skypool.wire.frames import WIRE_VERSION, Decoder, Frame, Kind, long_frame
from skypool.wire.handshake import AgentConfig
from skypool.wire.transport import CommandStream

_LONGEST_LINE = 65536
"""The most bytes of a line of the loader. A longer line is not from skypool."""


class Gone(ConnectionLost):
    """The error of a reconnection that cannot succeed: the agent has ended, or serves another client."""


@dataclass(frozen=True, slots=True)
class Handshake:
    """The client's side of the handshake with the agent of one node. Each new connection performs it.

    The loader is the small program that is started first on the node. It starts the agent, or connects to it.

    Attributes:
        node: the number of the node.
        config: the configuration of the agent; see `agent.start`.
        session: a random name of this client.
        awaited: returns the ids of the calls that this client waits for.
    """

    node: int
    config: AgentConfig
    session: str
    awaited: Callable[[], Collection[int]]

    async def perform(self, stream: CommandStream, decoder: Decoder, start: bool) -> tuple[Welcome, list[Frame]]:
        """Start the agent on the node or reach the running one, and wait for its WELCOME, its first message.

        The node first gets the agent's configuration, and skypool's code if it lacks that.

        Args:
            stream: a connection at whose other end the loader runs.
            decoder: splits the received bytes into frames. It keeps the rest for later reads.
            start: True starts the agent if none runs. False requires that it runs.

        Returns:
            (welcome, frames): the WELCOME, and the frames that arrived together with it.

        Raises:
            Gone: the agent has ended, or serves another client.
            PythonMismatch: the node runs another minor version of Python.
            ProtocolError: the answer is not that of skypool's loader or agent.
            EOFError: the connection ended.
        """
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(stream.socket, bundle.prelude(self.config, start))
        line, rest = await _line(stream, b"")
        answer = inbound.greeting(json.loads(line))
        if answer.gone:
            raise Gone(
                f"skypool's agent process on node {self.node} has ended, and with it the calls that ran there; "
                "with retries=1 such calls run again on another node",
                self.node,
            )
        self._check_python(answer.python)
        if not answer.have:
            await loop.sock_sendall(stream.socket, bundle.bundle().data)
        line, rest = await _line(stream, rest)
        if line == b"gone":
            raise Gone(
                f"skypool's agent process on node {self.node} has ended, and with it the calls that ran there; "
                "with retries=1 such calls run again on another node",
                self.node,
            )
        if line != b"ready":
            raise ProtocolError(
                f"the node answered {line[:80]!r} instead of 'ready' when skypool connected; check that shell "
                "start files there (~/.bashrc, ~/.profile) print nothing"
            )
        hello = {"wire": WIRE_VERSION, "session": self.session, "calls": list(self.awaited())}
        await loop.sock_sendall(stream.socket, b"".join(long_frame(Kind.HELLO, hello)))
        return await self._welcome(stream, decoder, rest)

    def _check_python(self, python: tuple[int, ...]) -> None:
        """Raise PythonMismatch if the node's Python version differs from this one in its major or minor number."""
        ours = sys.version_info[:2]
        if python[:2] != ours:
            theirs = ".".join(map(str, python))
            raise PythonMismatch(
                f"node {self.node} runs Python {theirs} and this is Python {ours[0]}.{ours[1]}: functions travel as "
                f"bytecode, so the minor versions must agree; give the node python{ours[0]}.{ours[1]}"
            )

    async def _welcome(self, stream: CommandStream, decoder: Decoder, rest: bytes) -> tuple[Welcome, list[Frame]]:
        """Wait for the WELCOME.

        Args:
            stream: the connection.
            decoder: splits the received bytes into frames.
            rest: bytes that have arrived already.

        Returns:
            (welcome, frames): the WELCOME, and the frames that arrived together with it.

        Raises:
            Gone: the agent serves another client.
            ProtocolError: the first frame is another one.
            EOFError: the connection ended.
        """
        loop = asyncio.get_running_loop()
        space = decoder.space()
        space[: len(rest)] = rest
        frames = decoder.advance(len(rest))
        while not frames:
            received = await loop.sock_recv_into(stream.socket, decoder.space())
            if received == 0:
                raise EOFError(
                    "skypool's agent process on the node closed the connection before it answered; check that "
                    "its machine has free memory and disk space"
                )
            frames = decoder.advance(received)
        first = inbound.message_of(frames[0])
        if isinstance(first, Taken):
            raise Gone(
                f"node {self.node} is used by another client, last heard {first.silent:g} s ago; end that "
                "client's pool, or wait until it has been silent for the liveness= of its pool",
                self.node,
            )
        if not isinstance(first, Welcome):
            raise ProtocolError(
                f"the node's first message is {frames[0].kind.name} instead of WELCOME; giving up this node. "
                "Use the same version of skypool on client and node; if you do, report this bug"
            )
        return first, frames[1:]


async def _line(stream: CommandStream, got: bytes) -> tuple[bytes, bytes]:
    """Read a line.

    Args:
        stream: the connection.
        got: bytes that have arrived already.

    Returns:
        (line, rest): the line without its end, and the bytes that arrived after it.

    Raises:
        EOFError: the connection ended.
        ProtocolError: more than 64 KiB arrived before the line was complete.
    """
    loop = asyncio.get_running_loop()
    while b"\n" not in got:
        part = await loop.sock_recv(stream.socket, _LONGEST_LINE)
        if not part:
            raise EOFError(
                "the command that connects to the node ended before the node answered: "
                f"{' '.join(stream.argv[:2])} …; check that the machine still runs"
            )
        got += part
        if len(got) > _LONGEST_LINE:
            raise ProtocolError(
                f"the node answered with a line of more than {_LONGEST_LINE} bytes when skypool connected; "
                "check that shell start files there (~/.bashrc, ~/.profile) print nothing"
            )
    line, _, rest = got.partition(b"\n")
    return line, rest
