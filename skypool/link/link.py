"""`Link`: the connection to one node. A link connects, reconnects, and gives up a node that is silent for too long."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol

from skypool.clock import RunningClock
from skypool.errors import ConnectionLost, HostKeyMismatch, ProtocolError, SkypoolError, TakenOver
from skypool.link.agent_messages import Welcome
from skypool.link.handshake import LONGEST_WELCOME, Gone, Handshake
from skypool.link.inbox import Arrival, Inbox, complaint
from skypool.link.outbox import Outbox
from skypool.text import printable
from skypool.trust import Reader
from skypool.wire.agent_config import AgentConfig
from skypool.wire.frames import CHUNK, Buffer, Decoder, Kind, frame
from skypool.wire.transport import CommandStream, Transport, refusal

_STALE = 15.0
"""Seconds without any message from the node after which the connection is replaced by a new one."""
_START = 30.0
"""Seconds that a node always has for its first answer: its agent is started, and asks the drivers of its devices."""
_AT_ONCE = 20
"""The most reconnections without a pause while no call of the node ends, and none is sent."""
_EACH_SECOND = 1.0
"""The most reconnections in each further second, on average."""
_LACKS = (OSError, RuntimeError, MemoryError)
"""The errors of a process that has no free descriptor, may start no process or thread, or has no memory, for now."""


class Listener(Protocol):
    """A protocol for the object that receives a link's messages and changes of state.

    All methods are called in the thread of the pool's event loop, except `on_arrivals`.
    """

    def on_arrivals(self, arrivals: list[Arrival], connection: int) -> None:
        """Handle messages of the node, in the order in which they came. The list has at least one message.

        This is called in the thread that read the messages: that of the event loop, or one that waits for a result.
        When a connection was replaced, two threads may call it. If it raises an exception, the link gives up the node.

        Args:
            arrivals: the messages.
            connection: the number of the connection that brought them. If it is not `Link.connection`, a newer
                connection was made meanwhile, over which the node sends again what the client has not acknowledged.
        """

    def on_welcome(self, welcome: Welcome) -> None:
        """Handle the first message of a new connection, also after a reconnection, before any other message.

        After a reconnection, the node sends again what the client has not acknowledged.
        """

    def on_down(self, reason: str) -> None:
        """Handle the loss of the connection. The link is about to reconnect, so the node is not lost yet."""

    def on_up(self, welcome: Welcome) -> None:
        """Handle a reconnection (not the first connection). `welcome.calls` has the calls that the node still knows.

        Messages that were sent to the node while the link was down are lost, so the listener sends them again.
        """

    def on_lost(self, error: ConnectionLost) -> None:
        """Handle the loss of the node: the link has given up the node and will not reconnect. `error` tells why."""


class _Pace:
    """A limit on how often a link reconnects. A node may end each connection as soon as it is made."""

    __slots__ = ("_at", "_clock", "_left", "_waited_for")

    def __init__(self, clock: RunningClock) -> None:
        self._clock = clock
        self._left = float(_AT_ONCE)
        self._at = clock()
        self._waited_for: Collection[int] = ()

    def pause(self, waited_for: Collection[int]) -> float:
        """Count a reconnection, and return the seconds to wait before it.

        `waited_for` are the ids of the calls that this client waits for on the node.
        """
        now = self._clock()
        got = _AT_ONCE if waited_for != self._waited_for else (now - self._at) * _EACH_SECOND
        self._left = min(_AT_ONCE, self._left + got) - 1
        self._at = now
        self._waited_for = waited_for
        return max(0.0, -self._left / _EACH_SECOND)


class Link:
    """The lasting connection to one node. If a network connection breaks, the link makes a new one.

    Call the methods in the thread of the pool's event loop, unless a method says otherwise. Messages that are sent
    while the link is down are dropped silently. The listener must send them again when its `on_up` is called.

    Args:
        transport: how commands are run on the node, such as OpenSSH.
        config: the configuration that the loader gives to an agent which it starts. It has the node's number.
        listener: told of messages, breaks, reconnections and the loss of the node.
        session: a random name of this client, by which the agent recognises the client after a reconnection.
        command: the command that starts the loader on the node.
        preamble: the bytes that the loader reads first.
        liveness: seconds without any bytes from the node after which the node is given up.
        awaited: returns the ids of the calls that this client waits for on the node. Any thread may call it.
        reader: decodes values and exceptions of a node that is not trusted. If None, results are unpickled, unless the
            agent announces that it sends no pickles.
        linger: returns None for no limit, or two numbers of seconds. The node ends itself when the first has passed and
            no call runs, but not before the second has passed since its last call.
        heir: the word by which the agent knows its new owner, as which this client comes; "" for any other client.

    Attributes:
        node: the number of the node.
        connection: the number of connections that were made so far.
        heard_at: while the link is down: when the node last sent any bytes, in seconds since 1970.
        send: queues small frames for the node; the method of `Outbox`. Any thread may call it.
        send_large: queues a large value and the frame that refers to it; the method of `Outbox`, for any thread.
        reply: as `send`, for an answer to a request of the node; the method of `Outbox`, for any thread.
        drive: reads the connection in the calling thread until a result has come; the method of `Inbox`.
        reading: returns a context manager in which the calling thread reads the connection; the method of `Inbox`.
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
        linger: Callable[[], tuple[float, float] | None] = lambda: None,
        heir: str = "",
    ) -> None:
        self.node = config.node
        self._linger = linger
        self.reader = reader
        self.connection = 0
        self.heard_at = 0.0
        self._transport = transport
        self._listener = listener
        self._command = command
        self._preamble = preamble
        self._liveness = liveness
        longest = None if reader is None else LONGEST_WELCOME
        self._handshake = Handshake(self.node, config, session, awaited, linger, longest, heir)
        self._epoch = 0
        self._outbox = Outbox(
            lambda: self._loop.call_soon_threadsafe(self._watch_writable),
            lambda why: self._loop.call_soon_threadsafe(self._break, why, self._stream),
        )
        self._clock = RunningClock()  # a pause of this process does not count as silence of the node
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
        self._pace = _Pace(self._clock)
        self._allowed: float | None = None
        self._stop: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()

    @property
    def silence(self) -> float | None:
        """Seconds since the node last sent any bytes; None until the node's first complete frame has come.

        Times in which this process was suspended, as with a closed laptop, are not counted.
        """
        return self._clock() - self._inbox.heard if self._inbox.understood else None

    # --- connecting ------------------------------------------------------------------------------------------

    async def open(self, stream: CommandStream | None = None, *, start: bool = True) -> Welcome:
        """Connect to the node for the first time, and start to watch whether the node is silent. Call this once.

        There is only one attempt. The node must answer within `liveness` seconds. An agent that is started has at least
        30 s, because it looks at the node's devices first.

        Args:
            stream: a connection at whose other end the loader already runs. If None, a new connection is made.
            start: True starts the agent if none runs. False requires that an agent runs, and waits for it at most
                `liveness` / 3 seconds, or 1 s if that is longer.

        Raises:
            ConnectionLost: the node cannot be reached, its agent is gone or serves another client, or its answer is not
                valid (ProtocolError).
            PythonMismatch: the node runs another minor version of Python.
            OSError: the local command for the connection could not be started.
        """
        self._loop = asyncio.get_running_loop()
        self._inbox.await_first_sign()
        welcome = await self._connect(start, stream)
        self._inbox.note_sign_of_life()
        self._spawn(self._watch_liveness())
        return welcome

    async def _connect(self, start: bool, stream: CommandStream | None = None) -> Welcome:
        """Try once to connect, within the time limit of `open`. Pass the WELCOME to `on_welcome`, and return it."""
        left = self._inbox.heard + self._liveness - self._clock()
        # without `start`, at most until the node is given up, but at least 1 s
        patience = max(self._liveness, _START) if start else max(1.0, min(self._liveness / 3, left))
        preamble = b"" if stream else self._preamble
        if stream is None:
            stream = await asyncio.to_thread(CommandStream, self._transport.argv(self._command))
        stream.socket.setblocking(False)
        decoder = Decoder()
        try:
            async with asyncio.timeout(patience):
                await self._loop.sock_sendall(stream.socket, preamble)
                welcome, frames = await self._handshake.perform(stream, decoder, start, self._epoch)
            decoder.most = CHUNK  # no other message of an agent is as long as the first one
            incoming = self._inbox.open(self._loop, stream, decoder, self.connection + 1)
        except BaseException as e:
            said = await asyncio.to_thread(stream.end)
            if isinstance(e, (OSError, EOFError)):
                said = printable(said)
                why = said or str(e)
                if isinstance(e, TimeoutError):
                    why = f"the node did not answer within {patience:.3g} s"
                    why += f"; its end of the connection printed: {said}" if said else ""
                raise refusal(self._transport, self.node, why) from e
            if isinstance(e, ProtocolError) or (isinstance(e, Exception) and not isinstance(e, SkypoolError)):
                raise ProtocolError(f"node {self.node}: {complaint(e)}", self.node) from e
            raise
        try:
            if welcome.trust == "data" and self.reader is None:  # the pool that started the agent trusted it less
                from skypool.trust.reader import DataReader

                self.reader = DataReader(self.node)
            self._connected = self._clock()
            self.connection += 1
            self._epoch = welcome.epoch
            self._listener.on_welcome(welcome)
            self._outbox.open(stream.socket)
            self._inbox.begin(incoming, frames)
        except BaseException:
            self._detach()
            raise
        return welcome

    async def _watch_liveness(self) -> None:
        """Ping the node, replace a connection that may be dead, and give up a silent node, until the link is closed."""
        pause = min(1.0, self._liveness / 4)
        now, waited_for = self._clock(), -1.0
        while not self._closed:
            await asyncio.sleep(pause)
            before, now = now, self._clock()
            heard = self._inbox.heard
            silent = now - heard
            # if this process was held up, messages of the node may still wait to be read: let that happen first
            is_early = now - before > 2 * pause and heard != waited_for
            if is_early:
                waited_for = heard
            if self.is_up and not is_early and silent > self._liveness:
                silence = (
                    f"node {self.node} has been silent for {silent:.1f} s (the limit is liveness={self._liveness:g} s)"
                )
                self._give_up(ConnectionLost(silence, self.node))
            elif self.is_up and not is_early and now - max(heard, self._connected) > min(self._liveness / 2, _STALE):
                senseless = now - self._inbox.understood
                if senseless > self._liveness:  # and another connection would not help
                    what = f"node {self.node} has sent only parts of a message for {senseless:.1f} s"
                    self._give_up(ConnectionLost(f"{what} (the limit is liveness={self._liveness:g} s)", self.node))
                    continue
                self._break(f"nothing was received for {silent:.1f} s", self._stream)
            elif self.is_up:
                self.send(self._ping())

    async def _reconnect(self, why: str) -> None:
        """Try to reconnect, with random and growing pauses. Give up the node when it was silent for `liveness` s."""
        from tenacity import AsyncRetrying, retry_if_exception, wait_random_exponential

        def passing(error: BaseException) -> bool:
            """Return True if a new attempt may succeed: the node was not reached, or this process lacks something."""
            if isinstance(error, ConnectionLost):
                return not isinstance(error, (Gone, ProtocolError, HostKeyMismatch, TakenOver))
            return isinstance(error, _LACKS)

        attempts = AsyncRetrying(
            stop=lambda _: self._clock() - self._inbox.heard >= self._liveness,
            wait=wait_random_exponential(0.05, 2.0),
            retry=retry_if_exception(passing),
            reraise=True,
        )
        try:
            # a node whose connections break all the time, while none of its calls ends, is reconnected once a second
            await asyncio.sleep(self._pace.pause(frozenset(self._handshake.awaited())))
            welcome: Welcome = await attempts(self._connect, False)
            if not self._closed:
                self._listener.on_up(welcome)
        except TakenOver as e:
            self._give_up(e)
        except Exception as e:  # noqa: BLE001 - any failure that a node causes gives up that node alone
            silent = self._clock() - self._inbox.heard
            limit = f"(the limit is liveness={self._liveness:g} s)"
            late = f", silent for {silent:.1f} s {limit}" if silent >= self._liveness else ""
            what = complaint(e) if isinstance(e, SkypoolError) else f"this process cannot connect to it: {e}"
            self._give_up(
                ConnectionLost(f"node {self.node} was given up{late}: {what} (the connection broke: {why})", self.node)
            )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task, which is cancelled when the link closes. If the task fails, give up the node."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            failed = f"node {self.node} was given up, because skypool failed here: {type(error).__name__}: {error}"
            lost = ConnectionLost(f"{failed}; this is a bug of skypool, so please report it", self.node)
            lost.__cause__ = error
            self._give_up(lost)

    def _give_up(self, error: ConnectionLost) -> None:
        """Close the link and tell the listener that the node is lost. Do nothing if the link is closed already."""
        if not self._closed:
            self._shut()
            self._listener.on_lost(error)

    def _reject(self, why: str, stream: CommandStream) -> None:
        """Give up the node, which sent an invalid message, unless that came over an earlier connection."""
        if self._stream is stream:
            self._give_up(ProtocolError(f"node {self.node}: {why}", self.node))

    def _break(self, why: str, stream: CommandStream | None) -> None:
        """Drop a connection that broke, unless it is no longer the current one. Tell the listener, and reconnect."""
        if self._closed or stream is None or self._stream is not stream:
            return
        said = printable(stream.complaint())
        self.heard_at = time.time() - (self.silence or 0.0)
        self._detach()
        if self._closing:  # the agent ended because it was told to
            self._ended.set()
            return
        why = f"{why}; {said}" if said else why
        self._listener.on_down(why)
        self._spawn(self._reconnect(why))

    def _detach(self) -> None:
        """Stop reading and writing the current connection, if any, and close it."""
        incoming = self._inbox.close()
        self._outbox.close()
        if incoming is None:
            return
        stream = incoming.stream
        self._loop.remove_writer(stream.socket)
        stream.shut()  # wakes a caller that reads this connection
        incoming.end()
        try:
            # another thread waits for the end of the connection's command, such as `ssh`
            self._loop.run_in_executor(None, stream.reap)
        except RuntimeError:  # the interpreter is about to exit and starts no more threads
            stream.reap()

    def allow(self, seconds: float, stop: float | None = None) -> None:
        """Let the node end itself in this many seconds from now. Any thread may call this. It returns at once.

        The node is told now, and with each ping it is told how many of these seconds are left. A later call replaces
        the time of an earlier one, and may make it longer. The pool's `max_lifetime` still holds.

        Args:
            stop: the seconds after which this client stops the calls of the node; None if that is not known.
        """
        now = time.monotonic()
        self._allowed, self._stop = now + seconds, None if stop is None else now + stop
        self.send(self._ping())

    def _ping(self) -> list[Buffer]:
        """Return the buffers of a PING frame, and note that one more status report of the node is expected."""
        header: dict[str, object] = {}
        if self._allowed is not None:
            header["left"] = max(0.0, self._allowed - time.monotonic())
        if self._stop is not None:
            header["stop"] = max(0.0, self._stop - time.monotonic())
        if (linger := self._linger()) is not None:
            header["linger"] = linger
        self._inbox.expect_pong()
        return frame(Kind.PING, header)

    def bid_farewell(self) -> None:
        """Tell the node's agent to end all work of the pool there, then itself. Do not wait. Any thread may call this.

        When the connection ends afterwards, the link does not reconnect. If the link is down, the message is lost.
        """
        self._closing = True
        self.send(frame(Kind.BYE, {}))

    async def leave(self, seconds: float) -> bool:
        """Let the node stay for this many seconds without a client, and close the link. The listener is not told.

        Return True if the agent then closed the connection within 5 s. Otherwise, the node may not have been told.
        """
        return await self._part(partial(self.send, frame(Kind.BYE, {"stay": seconds})))

    async def end(self) -> bool:
        """Tell the node to end now, and close the link. The listener is not told.

        The machine ends, too, if it is one that ends itself. Return True if the agent then closed the connection within
        5 s. Otherwise, the node may not have been told.
        """
        return await self._part(partial(self.allow, 0.0))

    async def close(self, *, bye: bool) -> None:
        """Close the link for good. The listener is not told.

        Args:
            bye: True first tells the agent to end all work of the pool on the node and then itself, and waits at most
                5 s until it has. If the link is down, the agent is not told. False leaves the agent running.
        """
        if bye:
            await self._part(self.bid_farewell)
        else:
            self._shut()

    async def _part(self, say: Callable[[], None]) -> bool:
        """Call `say` if the link is up, wait up to 5 s until the agent hangs up, and close the link. True if it did."""
        if self.is_up and not self._closed:
            self._closing = True
            say()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5):
                    await self._ended.wait()
        told = self._ended.is_set() and not self._closed
        self._shut()
        return told

    def _on_bye(self) -> None:
        """Note that the agent has announced its end, if this link had asked for it. Any thread may call this."""
        if self._closing and not self._ended.is_set():
            self._loop.call_soon_threadsafe(self._ended.set)

    def _shut(self) -> None:
        """Mark the link as closed, cancel its tasks except the one that calls this, and close the connection."""
        self._closed = True
        self._ended.set()
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()
        self._detach()

    @property
    def _stream(self) -> CommandStream | None:
        """The current network connection, a command such as `ssh`; None while there is none."""
        return self._inbox.stream

    # --- writing ---------------------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        """True if the link is connected. While it is not, messages that are sent are dropped."""
        return self._outbox.is_open

    def _watch_writable(self) -> None:
        """Have the event loop write more of the send queue whenever the connection, if there is one, can take more."""
        if self._stream is not None:
            self._loop.add_writer(self._stream.socket, self._on_writable)

    def _on_writable(self) -> None:
        """Write more of the send queue. Stop watching the socket when nothing is left to write."""
        if self._outbox.write_more() and self._stream is not None:
            self._loop.remove_writer(self._stream.socket)
