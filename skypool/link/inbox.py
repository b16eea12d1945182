"""`Inbox`: reads the messages of one node, in the engine's thread or in the thread of a caller that waits for a result.

It is the counterpart of `outbox`. A connection may break, and be replaced, while a thread reads it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

from skypool.clock import RunningClock
from skypool.errors import ProtocolError, SkypoolError
from skypool.link import inbound
from skypool.link.chunks import Pieces
from skypool.link.inbound import Bye, Outcome, Outcomes, Piece, Pong, Printed, Said, Taken, Welcome, Yielded
from skypool.link.turns import Turns, quickest_turns
from skypool.trust import printable
from skypool.wire.frames import Buffer, Decoder, Frame
from skypool.wire.transport import CommandStream

_PONGS_AHEAD = 1000
"""The most status reports that a node may send without a ping. It sends one with each notice of an interruption."""


class Arrival(NamedTuple):
    """A message of a node.

    Attributes:
        said: the message.
        buffers: the value that came with it, copied out of the receive buffer. Default (): none.
    """

    said: Said
    buffers: Sequence[Buffer] = ()


_make_arrival = functools.partial(tuple.__new__, Arrival)


class Awaited(Protocol):
    """A protocol for objects that a reading thread waits for, such as a pending call.

    Attributes:
        ended: becomes True when the wait is over.
    """

    ended: bool


class Incoming(NamedTuple):
    """The reading side of one connection.

    Attributes:
        stream: the connection.
        decoder: splits the received bytes into frames, and keeps an unfinished one.
        pieces: the large values that have not arrived completely.
        turns: decides which thread reads.
    """

    stream: CommandStream
    decoder: Decoder
    pieces: Pieces
    turns: Turns


class Inbox:
    """A receiver of messages from one node, over one connection after the other.

    Connections are opened and closed in the engine's thread. Any thread may read, one at a time.

    Args:
        clock: measures how long the node is silent.
        awaited: returns the ids of the calls that somebody waits for. Values of other calls are dropped.
        on_arrivals: gets the messages, in the order they came, in the thread that read them.
        on_bye: called when the agent announces its end, in the thread that read the message.
        on_broken: called as (connection, reason) when a connection broke. It may be called in any thread.
        on_senseless: called as (connection, reason) when a message is not valid. It may be called in any thread.

    Attributes:
        current: the current connection; None while there is none.
        heard: when any bytes came last, in seconds by that clock.
        understood: when a complete frame came last, in seconds by that clock; 0 before the first one.
    """

    def __init__(
        self,
        clock: RunningClock,
        awaited: Callable[[], Collection[int]],
        on_arrivals: Callable[[list[Arrival]], None],
        on_bye: Callable[[], None],
        on_broken: Callable[[CommandStream, str], object],
        on_senseless: Callable[[CommandStream, str], object],
    ) -> None:
        self._clock = clock
        self._awaited = awaited
        self._on_arrivals = on_arrivals
        self._on_bye = on_bye
        self._on_broken = on_broken
        self._on_senseless = on_senseless
        self._reading = threading.Lock()
        self._pongs = 0
        self._pongs_expected = 0
        self.current: Incoming | None = None
        self.heard = 0.0
        self.understood = 0.0

    @property
    def stream(self) -> CommandStream | None:
        """The current connection; None while there is none."""
        current = self.current
        return None if current is None else current.stream

    def await_first_sign(self) -> None:
        """Start to measure how long the node is silent, before it has sent anything."""
        self.heard = self._clock()

    def note_sign_of_life(self) -> None:
        """Set the times of the last bytes and the last frame to now."""
        self.heard = self._clock()
        self.understood = self.heard

    def expect_pong(self) -> None:
        """Allow the node one more status report, because a ping is being sent."""
        self._pongs_expected += 1

    # --- one connection after the other ----------------------------------------------------------------------

    def open(self, loop: asyncio.AbstractEventLoop, stream: CommandStream, decoder: Decoder) -> Incoming:
        """Make a connection the current one, after its handshake. It is not read before `begin`.

        Args:
            loop: the engine's event loop.
            stream: the connection.
            decoder: the decoder that the handshake used. It may hold the first bytes of a frame.
        """
        self.current = Incoming(stream, decoder, Pieces(), quickest_turns(loop, stream.socket, self._on_readable))
        return self.current

    def begin(self, incoming: Incoming, frames: list[Frame]) -> None:
        """Handle the frames that arrived with the handshake, and start to read."""
        self._digest(incoming, frames)
        incoming.turns.watch()

    def close(self) -> CommandStream | None:
        """Stop reading the current connection, and return it; None if there was none."""
        current = self.current
        self.current = None
        if current is None:
            return None
        current.turns.unwatch()
        return current.stream

    # --- reading threads -------------------------------------------------------------------------------------

    def drive(self, awaited: Awaited) -> None:
        """Read in the calling thread until `awaited.ended` is True. This saves waking the engine's thread first.

        Returns early if another thread reads already, or if the connection is missing or breaks.
        """
        incoming = self._take_turn()
        if incoming is None:
            return
        try:
            while not awaited.ended and self._read_here(incoming, True):
                pass
        finally:
            self._give_turn_back(incoming)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Callable[[], bool]]:
        """Return a context manager in which the calling thread reads, and the engine's thread does not.

        Yields:
            a function that handles what has arrived, without waiting. It returns False if another thread reads already
            or the connection is over, otherwise True.
        """
        incoming = self._take_turn()
        if incoming is None:
            yield _cannot_read
            return
        try:
            yield functools.partial(self._read_here, incoming, False)
        finally:
            self._give_turn_back(incoming)

    def _take_turn(self) -> Incoming | None:
        """Make the calling thread the reader of the current connection, and return that.

        Returns None if there is no connection, or another thread reads already.
        """
        current = self.current
        if current is None or not self._reading.acquire(blocking=False):
            return None
        try:
            if self.current is current:
                current.turns.take()
        except BaseException:
            self._reading.release()
            raise
        return current

    def _give_turn_back(self, incoming: Incoming) -> None:
        """Let the engine's thread read again."""
        try:
            incoming.turns.give_back()
        finally:
            self._reading.release()
            current = self.current  # this may be another connection by now
            if current is not None:
                current.turns.come_back()

    def _read_here(self, incoming: Incoming, wait: bool) -> bool:
        """Read once in a caller's thread. Return False if the connection is over.

        If the thread is interrupted, as by Ctrl-C, the connection is broken off, and the node sends its messages again.
        """
        if self.current is not incoming:
            return False
        try:
            return self._read(incoming, wait)
        except BaseException:
            self._on_broken(incoming.stream, "interrupted while reading; what came will come again")
            raise

    def _on_readable(self) -> None:
        """Read once in the engine's thread, unless a caller's thread reads."""
        current = self.current
        if current is None:
            return
        if not self._reading.acquire(blocking=False):
            current.turns.stand_aside()
            if not self._reading.acquire(blocking=False):
                return
            current.turns.watch()  # the caller stopped just before, and did not see the call of `stand_aside`
        try:
            self._read(current)
        finally:
            self._reading.release()

    # --- received frames -------------------------------------------------------------------------------------

    def _read(self, incoming: Incoming, wait: bool = False) -> bool:
        """Read once and handle the complete frames. Hold the lock `_reading` while calling it.

        Args:
            incoming: the connection.
            wait: True waits for up to 0.1 s if nothing has arrived.

        Returns:
            False if the connection is over, otherwise True, also if nothing has arrived.
        """
        try:
            received = incoming.turns.receive(incoming.decoder.space(), wait)
            if received == 0:
                raise ConnectionResetError(
                    "the connection was closed on the node's side, as when its machine or the network fails"
                )
            self.heard = self._clock()
            frames = incoming.decoder.advance(received)
            if frames:
                self.understood = self.heard
                self._digest(incoming, frames)
        except BlockingIOError:
            return True
        except ProtocolError as e:
            self._on_senseless(incoming.stream, str(e))
            return False
        except OSError as e:
            self._on_broken(incoming.stream, str(e))
            return False
        return True

    def _digest(self, incoming: Incoming, frames: list[Frame]) -> None:
        """Handle frames that have arrived. If that fails in any way, call `on_senseless` with the reason."""
        arrivals: list[Arrival] = []
        try:
            for frame in frames:
                self._take(incoming, frame, arrivals)
            if arrivals and self.current in (incoming, None):  # else a newer connection brings them again
                self._on_arrivals(arrivals)
        except Exception as e:  # noqa: BLE001 - any failure that a node causes gives up that node alone
            self._on_senseless(incoming.stream, complaint(e))

    def _take(self, incoming: Incoming, frame: Frame, arrivals: list[Arrival]) -> None:
        """Handle one frame. Add its message to `arrivals` if it is for the listener.

        Raises:
            ProtocolError: the message is not valid, or must not come at this point.
        """
        said = inbound.message_of(frame)
        pieces = incoming.pieces
        if isinstance(said, (Outcome, Yielded)):
            arrivals.append(_make_arrival((said, pieces.buffers(said, frame.body, self._awaited))))
            if pieces.rooms and isinstance(said, Outcome):
                pieces.forget(said.id)
        elif isinstance(said, Outcomes):
            arrivals.append(_make_arrival((said, ())))
        elif isinstance(said, Piece):
            pieces.take(said, frame.body, self._awaited)
        elif isinstance(said, Printed):
            arrivals.append(_make_arrival((said, [bytes(frame.body)])))
        elif isinstance(said, Bye):
            self._on_bye()
        elif isinstance(said, (Welcome, Taken)):
            raise ProtocolError(
                f"the node sent a {frame.kind.name} message, which is allowed only at the start of a "
                "connection; giving up this node. Use the same version of skypool on client and node; if you "
                "do, report this bug"
            )
        else:
            if isinstance(said, Pong):
                self._pongs += 1
                if self._pongs > self._pongs_expected + _PONGS_AHEAD:
                    raise ProtocolError(
                        f"the node sent {self._pongs} status reports, although only {self._pongs_expected} "
                        "were requested; giving up this node. Use the same version of skypool on client and "
                        "node; if you do, report this bug"
                    )
            arrivals.append(_make_arrival((said, ())))


def complaint(error: BaseException) -> str:
    """Return the text of an error that a message of a node caused, safe to show and at most 500 characters of it."""
    said = printable(str(error))[:500]
    if isinstance(error, SkypoolError):
        return said
    return f"invalid message: {type(error).__name__}: {said}"


def _cannot_read() -> bool:
    """Return False. `reading` yields this function if another thread reads already or there is no connection."""
    return False
