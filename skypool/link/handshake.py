"""Performs the handshake with a node: compares Python versions and sends skypool's code.

The handshake ends when the WELCOME arrives.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from skypool.errors import ConnectionLost, ProtocolError, PythonMismatch, TakenOver, protocol_violation
from skypool.head.states import Status
from skypool.link import agent_messages
from skypool.link.agent_messages import Taken, Welcome
from skypool.shipping import package_zip
from skypool.wire.agent_config import AgentConfig
from skypool.wire.frames import WIRE_VERSION, Decoder, Frame, Kind, long_frame
from skypool.wire.transport import CommandStream

_LONGEST_LINE = 65536
"""The most bytes of a line that the loader sends. A longer line is refused."""
LONGEST_WELCOME = 2 << 20
"""The most bytes of the first message of a node that is not trusted. It can name about 20,000 calls."""


class Gone(ConnectionLost):
    """The error for a connection attempt that is not worth repeating: the agent has ended or serves another client."""


class HandedOver(TakenOver):
    """The error for a node whose run belongs to its machine now. `status` is the state of the hand-over."""

    def __init__(self, text: str, node: int, status: Status) -> None:
        super().__init__(text, node)
        self.status = status


@dataclass(frozen=True, slots=True)
class Handshake:
    """The client's side of the handshake with one node. Each new connection to the node performs it.

    Attributes:
        node: the number of the node.
        config: the configuration that the loader gives to an agent which it starts.
        session: a random name of this client. The agent uses it to recognise the client after a reconnection.
        awaited: returns the ids of the calls that this client waits for.
        linger: returns None for no limit, or two numbers of seconds. The node ends itself when the first has passed and
            no call runs, but not before the second has passed since its last call.
        longest: the most bytes of the WELCOME; None for the limit of every message.
        heir: the word by which the agent knows its new owner, as which this client comes; "" for any other client.
    """

    node: int
    config: AgentConfig
    session: str
    awaited: Callable[[], Collection[int]]
    linger: Callable[[], tuple[float, float] | None] = lambda: None
    longest: int | None = None
    heir: str = field(default="", repr=False)

    async def perform(
        self, stream: CommandStream, decoder: Decoder, start: bool, epoch: int = 0
    ) -> tuple[Welcome, list[Frame]]:
        """Start the agent on the node or reach the running one, and wait for the WELCOME.

        The node first gets the agent's configuration, and skypool's code if it does not have this version. This method
        has no time limit; the caller sets one.

        Args:
            stream: a connection at whose other end the loader runs.
            decoder: splits the received bytes into frames, and keeps an incomplete frame for later reads.
            start: True starts the agent if none runs. False requires that an agent runs.
            epoch: how many clients had owned the node when it last sent a WELCOME to this client; 0 before the first.

        Returns:
            (welcome, frames): the WELCOME, and the frames that arrived together with it.

        Raises:
            Gone: the agent has ended, or serves another client.
            TakenOver: another client has taken the node over since this client owned it.
            HandedOver: the node's run belongs to its machine.
            PythonMismatch: the node runs another minor version of Python.
            ProtocolError: the answer is not that of skypool's loader or agent.
            EOFError: the other end closed the connection.
            OSError: sending or receiving failed.
        """
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(package_zip.bundle)  # the first time, it is made here, which takes seconds
        await loop.sock_sendall(stream.socket, package_zip.prelude(self.config, start))
        line, rest = await _line(stream, b"")
        try:
            answer = agent_messages.greeting(json.loads(line))
        except ValueError as e:
            raise ProtocolError(
                f"the node answered {line[:80]!r} when skypool connected; check that shell start files on the node "
                "(~/.bashrc, ~/.profile) print nothing"
            ) from e
        if answer.other:
            self._check_python(answer.python)
            raise Gone(
                f"node {self.node} was started with another version of skypool, of Python or of a driver, which alone "
                f"can take it over: go back to that, or end the pool with `skypool down {self.config.pool}`",
                self.node,
            )
        if answer.gone:
            raise Gone(
                f"skypool's agent process on node {self.node} has ended, and with it the calls that ran there; set "
                "retries=1 to run such calls again on another node",
                self.node,
            )
        self._check_python(answer.python)
        if not answer.have:
            await loop.sock_sendall(stream.socket, package_zip.bundle().read())
        line, rest = await _line(stream, rest)
        if line == b"gone":
            raise Gone(
                f"skypool's agent process on node {self.node} has ended, and with it the calls that ran there; set "
                "retries=1 to run such calls again on another node",
                self.node,
            )
        if line != b"ready":
            raise ProtocolError(
                f"the node answered {line[:80]!r} instead of 'ready' when skypool connected; check that shell start "
                "files on the node (~/.bashrc, ~/.profile) print nothing"
            )
        hello = {
            "wire": WIRE_VERSION,
            "session": self.session,
            "calls": list(self.awaited()),
            "epoch": epoch,
            "linger": self.linger(),
        }
        if self.heir:
            hello["heir"] = self.heir
        await loop.sock_sendall(stream.socket, b"".join(long_frame(Kind.HELLO, hello)))
        return await self._welcome(stream, decoder, rest)

    def _check_python(self, python: tuple[int, ...]) -> None:
        """Raise PythonMismatch if the node's Python version has another major or minor number than this Python."""
        ours = sys.version_info[:2]
        if python[:2] != ours:
            theirs = ".".join(map(str, python))
            raise PythonMismatch(
                f"node {self.node} runs Python {theirs}, and this client runs Python {ours[0]}.{ours[1]}. Functions "
                f"travel as bytecode, so the minor versions must be the same; install python{ours[0]}.{ours[1]} on the "
                "node"
            )

    async def _welcome(self, stream: CommandStream, decoder: Decoder, rest: bytes) -> tuple[Welcome, list[Frame]]:
        """Wait for the WELCOME. Return it and the frames that came with it. `rest`: bytes that have arrived already."""
        loop = asyncio.get_running_loop()
        space = decoder.space()
        space[: len(rest)] = rest
        frames = decoder.advance(len(rest))
        while not frames:
            received = await loop.sock_recv_into(stream.socket, decoder.space())
            if received == 0:
                raise EOFError(
                    f"skypool's agent process on node {self.node} closed the connection before the agent answered; "
                    "check that the node has free memory and disk space"
                )
            frames = decoder.advance(received)
            size = len(frames[0].raw) if frames else decoder.pending
            if self.longest is not None and size > self.longest:
                raise protocol_violation(f"the node's first message has more than {self.longest} bytes")
        first = agent_messages.message_of(frames[0])
        if isinstance(first, Taken) and first.handover is not None:
            raise HandedOver(
                f"node {self.node} belongs to its run {first.handover.claim.run!r}, which was handed over to the "
                f"machine; `skypool ps` shows the run",
                self.node,
                first.handover,
            )
        if isinstance(first, Taken) and first.former:
            raise TakenOver(
                f"node {self.node} has a new owner: another process has taken the pool over with ComputePool.attach "
                "while this one was away; go on there, and end this process",
                self.node,
            )
        if isinstance(first, Taken) and first.why:
            raise Gone(
                f"node {self.node} cannot be taken over any more: {first.why}; make a new ComputePool", self.node
            )
        if isinstance(first, Taken):
            raise Gone(
                f"node {self.node} is used by another client, which sent its last message {first.silent:g} s ago; end "
                "that client's pool, or wait until that client has been silent for the liveness= of its pool",
                self.node,
            )
        if not isinstance(first, Welcome):
            raise protocol_violation(f"the node's first message is {frames[0].kind.name} instead of WELCOME")
        return first, frames[1:]


async def _line(stream: CommandStream, got: bytes) -> tuple[bytes, bytes]:
    """Return the next line, without its newline, and the bytes after it. `got` are bytes that have arrived already."""
    loop = asyncio.get_running_loop()
    while b"\n" not in got:
        part = await loop.sock_recv(stream.socket, _LONGEST_LINE)
        if not part:
            raise EOFError(
                f"the command `{' '.join(stream.argv[:2])} …`, which connects to the node, ended before the node "
                "answered; check that the node's machine still runs"
            )
        got += part
        if len(got) > _LONGEST_LINE:
            raise ProtocolError(
                f"the node answered with a line of more than {_LONGEST_LINE} bytes when skypool connected; check that "
                "shell start files on the node (~/.bashrc, ~/.profile) print nothing"
            )
    line, _, rest = got.partition(b"\n")
    return line, rest
