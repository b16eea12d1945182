"""Connection to one node: connects, greets the agent, reads frames, reconnects, and gives up a silent node."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from skypool.clock import RunningClock
from skypool.errors import ConnectionLost, HostKeyMismatch, ProtocolError, PythonMismatch, SkypoolError
from skypool.link import inbound
from skypool.link.chunks import Pieces
from skypool.link.inbound import Bye, Outcome, Outcomes, Piece, Pong, Printed, Said, Taken, Welcome, Yielded
from skypool.link.outbox import Outbox
from skypool.link.turns import Turns, turns
from skypool.shipping import bundle as ship
from skypool.trust import Reader, printable
from skypool.wire.frames import WIRE_VERSION, Buffer, Decoder, Frame, Kind, frame, long_frame
from skypool.wire.handshake import AgentConfig
from skypool.wire.transport import Stream, Transport, refusal

_STALE = 15.0
"""Seconds without a sign of life after which a connection is tried anew."""
_PONGS_AHEAD = 1000
"""Signs of life that a node may send beside those it was asked for: one each time it hears of an interruption."""


class Arrival(NamedTuple):
    """What a frame said, and its buffers, in memory of their own."""

    said: Said
    buffers: Sequence[Buffer] = ()


_make_arrival = functools.partial(tuple.__new__, Arrival)


class _Intake(NamedTuple):
    """What arrives by one connection. Who reads it may be in the middle of that when the next one is there."""

    stream: Stream
    decoder: Decoder
    pieces: Pieces
    turns: Turns


class Awaited(Protocol):
    """What a thread that reads waits for."""

    ended: bool


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
        config: what the agent is started with; see `agent.start`.
        session: names this client; only the same session finds its calls again.
        command: starts the loader on the node; preamble: what it reads first.
        liveness: seconds without a sign of life after which the node is given up.
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
    ) -> None:
        self.rank = config.rank
        self._transport, self._config, self._listener = transport, config, listener
        self._session, self._command, self._preamble, self._liveness = session, command, preamble, liveness
        self.awaited: Callable[[], Collection[int]] = tuple
        self.reader: Reader | None = None
        """Reads what the node sends where it is trusted with data only."""
        self._outbox = Outbox(
            lambda: self._loop.call_soon_threadsafe(self._watch_writable),
            lambda why: self._loop.call_soon_threadsafe(self._break, why, self._stream),
        )
        self.send, self.send_large, self.reply = self._outbox.send, self._outbox.send_large, self._outbox.reply
        self._reading = threading.Lock()
        self._intake: _Intake | None = None
        self._closing = self._closed = False
        self._clock = RunningClock()  # while this process is stopped, it is not the node that is silent
        self._heard = self._understood = self._connected = 0.0
        self._pings = self._pongs = 0
        self.connection = 0
        """How many connections there were, this one included."""
        self._allowed: float | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()

    @property
    def heard(self) -> float:
        """When the node gave its last sign of life, in monotonic seconds; 0 before the first one."""
        return self._heard if self._understood else 0.0

    # --- connecting ------------------------------------------------------------------------------------------

    async def open(self, stream: Stream | None = None, *, start: bool = True) -> Welcome:
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
        self._heard = self._clock()
        welcome = await self._connect(start, stream)
        self._heard = self._understood = self._clock()
        self._spawn(self._watch_liveness())
        return welcome

    async def _connect(self, start: bool, stream: Stream | None = None) -> Welcome:
        """One attempt."""
        left = self._heard + self._liveness - self._clock()
        patience = self._liveness if start else max(1.0, min(self._liveness / 3, left))
        preamble = b"" if stream else self._preamble
        if stream is None:
            stream = await asyncio.to_thread(Stream, self._transport.argv(self._command))
        stream.socket.setblocking(False)
        decoder = Decoder()
        try:
            async with asyncio.timeout(patience):
                await self._loop.sock_sendall(stream.socket, preamble)
                welcome, rest = await self._handshake(stream, start, decoder)
        except BaseException as e:
            said = await asyncio.to_thread(stream.end)
            if isinstance(e, (OSError, EOFError)):
                why = "it did not answer in time" if isinstance(e, TimeoutError) else str(e)
                raise refusal(self._transport, self.rank, printable(said) or why) from e
            if isinstance(e, ProtocolError) or (isinstance(e, Exception) and not isinstance(e, SkypoolError)):
                raise ProtocolError(f"node {self.rank}: {_complaint(e)}", self.rank) from e
            raise
        if welcome.trust == "data" and self.reader is None:  # it was started so, by a pool that trusted it less
            from skypool.trust.reader import DataReader

            self.reader = DataReader(self.rank)
        intake = _Intake(stream, decoder, Pieces(), turns(self._loop, stream.socket, self._on_readable))
        self._intake = intake
        self._connected = self._clock()
        self.connection += 1
        self._listener.on_welcome(welcome)
        self._outbox.open(stream.socket)
        self._digest(intake, rest)
        intake.turns.watch()
        return welcome

    async def _handshake(self, stream: Stream, start: bool, decoder: Decoder) -> tuple[Welcome, list[Frame]]:
        loop, sock = self._loop, stream.socket
        await loop.sock_sendall(sock, ship.prelude(self._config, start))
        line, rest = await self._line(stream, b"")
        answer = inbound.greeting(json.loads(line))
        ours = sys.version_info[:2]
        if answer.gone:
            raise Gone(f"the agent of node {self.rank} is gone", self.rank)
        if answer.python[:2] != ours:
            theirs = ".".join(map(str, answer.python))
            raise PythonMismatch(
                f"node {self.rank} runs Python {theirs} and this is Python {ours[0]}.{ours[1]}: functions travel as "
                f"bytecode, so the minor versions must agree; give the node python{ours[0]}.{ours[1]}"
            )
        if not answer.have:
            await loop.sock_sendall(sock, ship.bundle().data)
        line, rest = await self._line(stream, rest)
        if line == b"gone":
            raise Gone(f"the agent of node {self.rank} is gone", self.rank)
        if line != b"ready":
            raise ProtocolError(f"it answered {line[:80]!r} instead of skypool's handshake")
        hello = {"wire": WIRE_VERSION, "session": self._session, "calls": list(self.awaited())}
        await loop.sock_sendall(sock, b"".join(long_frame(Kind.HELLO, hello)))
        return await self._welcome(stream, rest, decoder)

    async def _line(self, stream: Stream, got: bytes) -> tuple[bytes, bytes]:
        while b"\n" not in got:
            part = await self._loop.sock_recv(stream.socket, 65536)
            if not part:
                raise EOFError(f"the command ended: {' '.join(stream.argv[:2])} …")
            got += part
            if len(got) > 65536:
                raise ProtocolError("it answers with something that is not skypool")
        line, _, rest = got.partition(b"\n")
        return line, rest

    async def _welcome(self, stream: Stream, rest: bytes, decoder: Decoder) -> tuple[Welcome, list[Frame]]:
        space = decoder.space()
        space[: len(rest)] = rest
        frames = decoder.advance(len(rest))
        while not frames:
            n = await self._loop.sock_recv_into(stream.socket, decoder.space())
            if n == 0:
                raise EOFError("the agent closed the link during the handshake")
            frames = decoder.advance(n)
        first = inbound.parse(frames[0])
        if isinstance(first, Taken):
            raise Gone(
                f"node {self.rank} belongs to another client, heard {first.silent:g} s ago; end it there, or "
                f"wait until it has been silent for the liveness of its pool",
                self.rank,
            )
        if not isinstance(first, Welcome):
            raise ProtocolError(f"it began with {frames[0].kind.name} instead of WELCOME")
        return first, frames[1:]

    async def _watch_liveness(self) -> None:
        """Ask for a sign of life; a connection that brings none for a while is tried anew, for it may be dead."""
        pause = min(1.0, self._liveness / 4)
        while not self._closed:
            await asyncio.sleep(pause)
            now = self._clock()
            silent = now - self._heard
            if self.is_up and silent > self._liveness:
                silence = f"node {self.rank} has been silent for {silent:.1f} s (liveness is {self._liveness:g} s)"
                self._give_up(ConnectionLost(silence, self.rank))
            elif self.is_up and now - max(self._heard, self._connected) > min(self._liveness / 2, _STALE):
                if (senseless := now - self._understood) > self._liveness:  # and another connection would not help
                    what = f"node {self.rank} has sent no whole frame for {senseless:.1f} s, only parts of one"
                    self._give_up(ConnectionLost(f"{what} (liveness is {self._liveness:g} s)", self.rank))
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
            stop=lambda _: self._clock() - self._heard >= self._liveness,
            wait=wait_random_exponential(0.05, 2.0),
            retry=retry_if_exception(passing),
            reraise=True,
        )
        try:
            welcome: Welcome = await attempts(self._connect, False)
            if not self._closed:
                self._listener.on_up(welcome)
        except Exception as e:  # noqa: BLE001 - whatever this node makes go wrong, it alone is given up
            silent = self._clock() - self._heard
            late = f", silent for {silent:.1f} s (liveness is {self._liveness:g} s)" if silent >= self._liveness else ""
            self._give_up(
                ConnectionLost(
                    f"node {self.rank} was given up{late}: {_complaint(e)} (the link broke: {why})", self.rank
                )
            )

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _give_up(self, error: ConnectionLost) -> None:
        if not self._closed:
            self._shut()
            self._listener.on_lost(error)

    def _break(self, why: str, stream: Stream | None) -> None:
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
        intake, self._intake = self._intake, None
        self._outbox.close()
        if intake is None:
            return
        stream = intake.stream
        intake.turns.unwatch()
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
        self._pings += 1
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

    def _shut(self) -> None:
        self._closed = True
        self._ended.set()
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()
        self._detach()

    @property
    def _stream(self) -> Stream | None:
        """The connection that there is."""
        intake = self._intake
        return None if intake is None else intake.stream

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

    # --- reading ---------------------------------------------------------------------------------------------

    def drive(self, awaited: Awaited) -> None:
        """Read in the calling thread until that has ended: its answer wakes it without waking the engine first.

        Comes back early when another thread does so already, or the connection breaks.
        """
        if (intake := self._take_turn()) is not None:
            try:
                while not awaited.ended and self._read_here(intake, True):
                    pass
            finally:
                self._give_turn_back(intake)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Callable[[], bool]]:
        """Have the calling thread read while the engine sleeps on.

        Yields:
            a function that takes in what has arrived. It returns whether more may come: not when another thread reads
            already, nor when the connection is over.
        """
        if (intake := self._take_turn()) is None:
            yield _cannot_read
            return
        try:
            yield functools.partial(self._read_here, intake, False)
        finally:
            self._give_turn_back(intake)

    def _take_turn(self) -> _Intake | None:
        intake = self._intake
        if intake is None or not self._reading.acquire(blocking=False):
            return None
        try:
            if self._intake is intake:
                intake.turns.take()
        except BaseException:
            self._reading.release()
            raise
        return intake

    def _give_turn_back(self, intake: _Intake) -> None:
        try:
            intake.turns.give_back()
        finally:
            self._reading.release()
            if (current := self._intake) is not None:  # another connection by now, perhaps
                current.turns.come_back()

    def _read_here(self, intake: _Intake, wait: bool) -> bool:
        if self._intake is not intake:
            return False
        try:
            return self._read(intake, wait)
        except BaseException:
            self._break_soon(intake.stream, "interrupted while reading; what came will come again")
            raise

    def _on_readable(self) -> None:
        intake = self._intake
        if intake is None:
            return
        if not self._reading.acquire(blocking=False):
            intake.turns.stand_aside()
            if not self._reading.acquire(blocking=False):
                return
            intake.turns.watch()  # the caller let go just before, and had seen nobody stand aside
        try:
            self._read(intake)
        finally:
            self._reading.release()

    def _read(self, intake: _Intake, wait: bool = False) -> bool:
        """Take in what has arrived, or arrives within a moment; whether more may. For who holds `_reading`."""
        try:
            n = intake.turns.receive(intake.decoder.space(), wait)
            if n == 0:
                raise ConnectionResetError("the other end closed it")
            self._heard = self._clock()
            if frames := intake.decoder.advance(n):
                self._understood = self._heard
                self._digest(intake, frames)
        except BlockingIOError:
            return True
        except ProtocolError as e:
            self._give_up_soon(intake, str(e))
            return False
        except OSError as e:
            self._break_soon(intake.stream, str(e))
            return False
        return True

    def _break_soon(self, stream: Stream, why: str) -> None:
        self._loop.call_soon_threadsafe(self._break, why, stream)

    def _digest(self, intake: _Intake, frames: list[Frame]) -> None:
        """Take in frames; a node is given up if whatever it says cannot be taken in."""
        arrivals: list[Arrival] = []
        try:
            for f in frames:
                self._take(intake, f, arrivals)
            if arrivals and self._intake in (intake, None):  # the next connection brings them again
                self._listener.on_arrivals(arrivals)
        except Exception as e:  # noqa: BLE001 - whatever this node makes go wrong, it alone is given up
            self._give_up_soon(intake, _complaint(e))

    def _take(self, intake: _Intake, f: Frame, arrivals: list[Arrival]) -> None:
        """Take in one frame: what is for the listener is added to `arrivals`.

        Raises:
            ProtocolError: an agent does not say this, or not now.
        """
        said, pieces = inbound.parse(f), intake.pieces
        if isinstance(said, (Outcome, Yielded)):
            arrivals.append(_make_arrival((said, pieces.buffers(said, f.body, self.awaited))))
            if pieces.rooms and isinstance(said, Outcome):
                pieces.forget(said.id)
        elif isinstance(said, Outcomes):
            arrivals.append(_make_arrival((said, ())))
        elif isinstance(said, Piece):
            pieces.take(said, f.body, self.awaited)
        elif isinstance(said, Printed):
            arrivals.append(_make_arrival((said, [bytes(f.body)])))
        elif isinstance(said, Bye):
            if not self._ended.is_set() and self._closing:
                self._loop.call_soon_threadsafe(self._ended.set)
        elif isinstance(said, (Welcome, Taken)):
            raise ProtocolError(f"it sent {f.kind.name} in the middle of a connection")
        else:
            if isinstance(said, Pong):
                self._pongs += 1
                if self._pongs > self._pings + _PONGS_AHEAD:
                    raise ProtocolError("it sends signs of life that nobody asked for, one after the other")
            arrivals.append(_make_arrival((said, ())))

    def _give_up_soon(self, intake: _Intake, why: str) -> None:
        error = ProtocolError(f"node {self.rank}: {why}", self.rank)
        self._loop.call_soon_threadsafe(lambda: self._give_up(error) if self._intake is intake else None)


def _complaint(error: BaseException) -> str:
    """What went wrong with what a node sent, in words that are safe to show."""
    said = printable(str(error))[:500]
    if isinstance(error, SkypoolError):
        return said
    return f"it sent what makes no sense: {type(error).__name__}: {said}"


def _cannot_read() -> bool:
    """Reads nothing, and never will."""
    return False


class Gone(ConnectionLost):
    """There is nothing to come back to."""
