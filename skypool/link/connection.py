"""Connection to one node: connects, reconnects, and gives up a silent node."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, Protocol

from skypool.clock import RunningClock
from skypool.errors import ConnectionLost, HostKeyMismatch, ProtocolError, SkypoolError
from skypool.link.handshake import Gone, Handshake
from skypool.link.inbound import Welcome
from skypool.link.inbox import Arrival, Inbox, complaint
from skypool.link.outbox import Outbox
from skypool.trust import Reader, printable
from skypool.wire.frames import Buffer, Decoder, Kind, frame
from skypool.wire.handshake import AgentConfig
from skypool.wire.transport import CommandStream, Transport, refusal

_STALE = 15.0
"""Seconds without a sign of life after which a connection is tried anew."""


class Listener(Protocol):
    """Who hears what a link brings. Called in the engine's thread unless it says otherwise."""

    def on_arrivals(self, arrivals: list[Arrival]) -> None:
        """Frames came, in order. In the thread that read them: the engine's, or a caller's that waits for one."""

    def on_welcome(self, welcome: Welcome) -> None:
        """The agent let this client in; what it kept for it follows at once."""

    def on_down(self, reason: str) -> None:
        """The connection broke; the link is trying to get it back."""

    def on_up(self, welcome: Welcome) -> None:
        """The connection is back; `welcome.calls` names the calls that the agent knows."""

    def on_lost(self, error: ConnectionLost) -> None:
        """The node is given up."""


class Link:
    """One node.

    Args:
        config: how the agent works.
        session: names this client; only the same session finds its calls again.
        command: starts the loader on the node.
        preamble: what the loader reads first.
        liveness: seconds without a sign of life after which the node is given up.
        awaited: returns the ids of the calls that this client waits for on the node. From any thread.
        reader: reads values and exceptions of a node that is trusted with data only; None unpickles them.

    Attributes:
        node: the node's number.
        connection: how many connections there were, this one included.
    """

    def __init__(
        self,
        transport: Transport,
        config: AgentConfig,
        listener: Listener,
        *,
        session: str,
        command: Sequence[str],
        preamble: bytes = b"",
        liveness: float,
        awaited: Callable[[], Collection[int]],
        reader: Reader | None = None,
    ) -> None:
        self.node = config.node
        self.reader = reader
        self.connection = 0
        self._transport = transport
        self._listener = listener
        self._command = command
        self._preamble = preamble
        self._liveness = liveness
        self._handshake = Handshake(self.node, config, session, awaited)
        self._outbox = Outbox(
            lambda: self._loop.call_soon_threadsafe(self._watch_writable),
            lambda why: self._loop.call_soon_threadsafe(self._break, why, self._stream),
        )
        self._clock = RunningClock()  # while this process is stopped, it is not the node that is silent
        self._inbox = Inbox(
            self._clock,
            awaited,
            listener.on_arrivals,
            on_bye=self._on_bye,
            on_broken=lambda stream, why: self._loop.call_soon_threadsafe(self._break, why, stream),
            on_senseless=lambda stream, why: self._loop.call_soon_threadsafe(self._reject, why, stream),
        )
        self.send = self._outbox.send
        self.send_large = self._outbox.send_large
        self.reply = self._outbox.reply
        self.drive = self._inbox.drive
        self.reading = self._inbox.reading
        self._closing = False
        self._closed = False
        self._connected = 0.0
        self._allowed: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()

    @property
    def heard(self) -> float:
        """When the node gave its last sign of life, in monotonic seconds; 0 before the first one."""
        return self._inbox.heard if self._inbox.understood else 0.0

    # --- connecting ------------------------------------------------------------------------------------------

    async def open(self, stream: CommandStream | None = None, *, start: bool = True) -> Welcome:
        """Connect for the first time.

        Args:
            stream: a connection on whose other end the loader already runs.
            start: start the agent where there is none; otherwise it must be there.

        Returns:
            the agent's WELCOME.

        Raises:
            ConnectionLost, PythonMismatch: why there is no link.
        """
        self._loop = asyncio.get_running_loop()
        self._inbox.await_first_sign()
        welcome = await self._connect(start, stream)
        self._inbox.note_sign_of_life()
        self._spawn(self._watch_liveness())
        return welcome

    async def _connect(self, start: bool, stream: CommandStream | None = None) -> Welcome:
        """One attempt."""
        left = self._inbox.heard + self._liveness - self._clock()
        patience = self._liveness if start else max(1.0, min(self._liveness / 3, left))
        preamble = b"" if stream else self._preamble
        if stream is None:
            stream = await asyncio.to_thread(CommandStream, self._transport.argv(self._command))
        stream.socket.setblocking(False)
        decoder = Decoder()
        try:
            async with asyncio.timeout(patience):
                await self._loop.sock_sendall(stream.socket, preamble)
                welcome, frames = await self._handshake.perform(stream, decoder, start)
        except BaseException as e:
            said = await asyncio.to_thread(stream.end)
            if isinstance(e, (OSError, EOFError)):
                why = "it did not answer in time" if isinstance(e, TimeoutError) else str(e)
                raise refusal(self._transport, self.node, printable(said) or why) from e
            if isinstance(e, ProtocolError) or (isinstance(e, Exception) and not isinstance(e, SkypoolError)):
                raise ProtocolError(f"node {self.node}: {complaint(e)}", self.node) from e
            raise
        if welcome.trust == "data" and self.reader is None:  # it was started so, by a pool that trusted it less
            from skypool.trust.reader import DataReader

            self.reader = DataReader(self.node)
        incoming = self._inbox.open(self._loop, stream, decoder)
        self._connected = self._clock()
        self.connection += 1
        self._listener.on_welcome(welcome)
        self._outbox.open(stream.socket)
        self._inbox.begin(incoming, frames)
        return welcome

    async def _watch_liveness(self) -> None:
        """Ask for a sign of life; a connection that brings none for a while is tried anew, for it may be dead."""
        pause = min(1.0, self._liveness / 4)
        while not self._closed:
            await asyncio.sleep(pause)
            now = self._clock()
            silent = now - self._inbox.heard
            if self.is_up and silent > self._liveness:
                silence = f"node {self.node} has been silent for {silent:.1f} s (liveness is {self._liveness:g} s)"
                self._give_up(ConnectionLost(silence, self.node))
            elif self.is_up and now - max(self._inbox.heard, self._connected) > min(self._liveness / 2, _STALE):
                senseless = now - self._inbox.understood
                if senseless > self._liveness:  # and another connection would not help
                    what = f"node {self.node} has sent no whole frame for {senseless:.1f} s, only parts of one"
                    self._give_up(ConnectionLost(f"{what} (liveness is {self._liveness:g} s)", self.node))
                    continue
                self._break(f"no sign of life for {silent:.1f} s", self._stream)
            elif self.is_up:
                self.send(self._ping())

    async def _reconnect(self, why: str) -> None:
        """Get the connection back, with growing pauses, until `liveness` is over since the last sign of life."""
        from tenacity import AsyncRetrying, retry_if_exception, wait_random_exponential

        def passing(error: BaseException) -> bool:
            return isinstance(error, ConnectionLost) and not isinstance(error, (Gone, ProtocolError, HostKeyMismatch))

        attempts = AsyncRetrying(
            stop=lambda _: self._clock() - self._inbox.heard >= self._liveness,
            wait=wait_random_exponential(0.05, 2.0),
            retry=retry_if_exception(passing),
            reraise=True,
        )
        try:
            welcome: Welcome = await attempts(self._connect, False)
            if not self._closed:
                self._listener.on_up(welcome)
        except Exception as e:  # noqa: BLE001 - whatever this node makes go wrong, it alone is given up
            silent = self._clock() - self._inbox.heard
            late = f", silent for {silent:.1f} s (liveness is {self._liveness:g} s)" if silent >= self._liveness else ""
            self._give_up(
                ConnectionLost(
                    f"node {self.node} was given up{late}: {complaint(e)} (the link broke: {why})", self.node
                )
            )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _give_up(self, error: ConnectionLost) -> None:
        if not self._closed:
            self._shut()
            self._listener.on_lost(error)

    def _reject(self, why: str, stream: CommandStream) -> None:
        """Give the node up for what came by a connection, if it is still this one."""
        if self._stream is stream:
            self._give_up(ProtocolError(f"node {self.node}: {why}", self.node))

    def _break(self, why: str, stream: CommandStream | None) -> None:
        """The connection broke, if it is still this one."""
        if self._closed or stream is None or self._stream is not stream:
            return
        said = printable(stream.complaint())
        self._detach()
        if self._closing:  # the agent went as it was told
            self._ended.set()
            return
        why = f"{why}; {said}" if said else why
        self._listener.on_down(why)
        self._spawn(self._reconnect(why))

    def _detach(self) -> None:
        stream = self._inbox.close()
        self._outbox.close()
        if stream is None:
            return
        self._loop.remove_writer(stream.socket)
        stream.shut()  # wakes a caller that reads; it sees that this stream is over
        try:
            self._loop.run_in_executor(None, stream.close)
        except RuntimeError:  # the interpreter is about to exit and starts no more threads
            stream.close()

    def allow(self, seconds: float) -> None:
        """Let the node live for so long from now at most. It is told at once, and again with each PING.

        A later word takes the place of an earlier one, also where it is more; the pool's lifetime is never put off.
        From any thread.
        """
        self._allowed = time.monotonic() + seconds
        self.send(self._ping())

    def _ping(self) -> list[Buffer]:
        allowed = self._allowed
        self._inbox.expect_pong()
        return frame(Kind.PING, {} if allowed is None else {"left": max(0.0, allowed - time.monotonic())})

    def bid_farewell(self) -> None:
        """Tell the agent to end everything of the pool on its node. From any thread."""
        self._closing = True
        self.send(frame(Kind.BYE, {}))

    async def close(self, *, bye: bool) -> None:
        """Let go of the node; with `bye`, end everything of the pool on it first."""
        if bye and self.is_up and not self._closed:
            self.bid_farewell()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5):
                    await self._ended.wait()
        self._shut()

    def _on_bye(self) -> None:
        """The agent says that it ends. From the thread that read it."""
        if self._closing and not self._ended.is_set():
            self._loop.call_soon_threadsafe(self._ended.set)

    def _shut(self) -> None:
        self._closed = True
        self._ended.set()
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()
        self._detach()

    @property
    def _stream(self) -> CommandStream | None:
        """The connection that there is."""
        return self._inbox.stream

    # --- writing ---------------------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether frames can travel now; what is sent while they cannot is dropped, and told again on the way up."""
        return self._outbox.is_open

    def _watch_writable(self) -> None:
        if self._stream is not None:
            self._loop.add_writer(self._stream.socket, self._on_writable)

    def _on_writable(self) -> None:
        if self._outbox.write_more() and self._stream is not None:
            self._loop.remove_writer(self._stream.socket)
