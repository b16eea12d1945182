"""Reading of what a node sends: by the engine's thread, or by a caller that waits for an answer.

The counterpart of `outbox`. Connections come and go; who reads one may be in the middle of that when it breaks.
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
"""Signs of life that a node may send beside those it was asked for: one each time it hears of an interruption."""


class Arrival(NamedTuple):
    """What a frame said, and its buffers, in memory of their own."""

    said: Said
    buffers: Sequence[Buffer] = ()


_make_arrival = functools.partial(tuple.__new__, Arrival)


class Awaited(Protocol):
    """What a thread that reads waits for."""

    ended: bool


class Incoming(NamedTuple):
    """What one connection brings: where it comes from, and what is not whole yet."""

    stream: CommandStream
    decoder: Decoder
    pieces: Pieces
    turns: Turns


class Inbox:
    """Frames from one node, over one connection after the other.

    Connections are opened and closed in the engine's thread. Any thread may read.

    Args:
        clock: measures how long the node is silent.
        awaited: returns the ids of the calls whose values are wanted.
        on_arrivals: takes what frames said, in order, in the thread that read them.
        on_bye: told that the agent ends.
        on_broken: told that a connection broke, and why. Any thread.
        on_senseless: told that what came by a connection makes no sense, and why. Any thread.

    Attributes:
        current: the connection that there is.
        heard: when anything came last, by that clock.
        understood: when a whole frame came last; 0 before the first one.
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
        """The connection that there is."""
        current = self.current
        return None if current is None else current.stream

    def await_first_sign(self) -> None:
        """Measure the node's silence from now on. It has not said anything yet."""
        self.heard = self._clock()

    def note_sign_of_life(self) -> None:
        """Take it that the node has sent a whole frame just now."""
        self.heard = self._clock()
        self.understood = self.heard

    def expect_pong(self) -> None:
        """Expect one more sign of life."""
        self._pongs_expected += 1

    # --- one connection after the other ----------------------------------------------------------------------

    def open(self, loop: asyncio.AbstractEventLoop, stream: CommandStream, decoder: Decoder) -> Incoming:
        """Take a connection whose handshake is over. It is read once `begin` is called."""
        self.current = Incoming(stream, decoder, Pieces(), quickest_turns(loop, stream.socket, self._on_readable))
        return self.current

    def begin(self, incoming: Incoming, frames: list[Frame]) -> None:
        """Take in the frames that came with the handshake, and read on."""
        self._digest(incoming, frames)
        incoming.turns.watch()

    def close(self) -> CommandStream | None:
        """Read the connection no more, and return it."""
        current = self.current
        self.current = None
        if current is None:
            return None
        current.turns.unwatch()
        return current.stream

    # --- who reads -------------------------------------------------------------------------------------------

    def drive(self, awaited: Awaited) -> None:
        """Read in the calling thread until that has ended: its answer wakes it without waking the engine first.

        Comes back early when another thread does so already, or the connection breaks.
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
        """Have the calling thread read while the engine sleeps on.

        Yields:
            a function that takes in what has arrived. It returns whether more may come: not when another thread reads
            already, nor when the connection is over.
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
        try:
            incoming.turns.give_back()
        finally:
            self._reading.release()
            current = self.current  # another connection by now, perhaps
            if current is not None:
                current.turns.come_back()

    def _read_here(self, incoming: Incoming, wait: bool) -> bool:
        if self.current is not incoming:
            return False
        try:
            return self._read(incoming, wait)
        except BaseException:
            self._on_broken(incoming.stream, "interrupted while reading; what came will come again")
            raise

    def _on_readable(self) -> None:
        current = self.current
        if current is None:
            return
        if not self._reading.acquire(blocking=False):
            current.turns.stand_aside()
            if not self._reading.acquire(blocking=False):
                return
            current.turns.watch()  # the caller let go just before, and had seen nobody stand aside
        try:
            self._read(current)
        finally:
            self._reading.release()

    # --- what is read ----------------------------------------------------------------------------------------

    def _read(self, incoming: Incoming, wait: bool = False) -> bool:
        """Take in what has arrived, or arrives within a moment. Return True if more may.

        Call it with `_reading` held.
        """
        try:
            received = incoming.turns.receive(incoming.decoder.space(), wait)
            if received == 0:
                raise ConnectionResetError("the other end closed it")
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
        """Take in frames; a node is given up if whatever it says cannot be taken in."""
        arrivals: list[Arrival] = []
        try:
            for frame in frames:
                self._take(incoming, frame, arrivals)
            if arrivals and self.current in (incoming, None):  # the next connection brings them again
                self._on_arrivals(arrivals)
        except Exception as e:  # noqa: BLE001 - whatever this node makes go wrong, it alone is given up
            self._on_senseless(incoming.stream, complaint(e))

    def _take(self, incoming: Incoming, frame: Frame, arrivals: list[Arrival]) -> None:
        """Take in one frame: what is for the listener is added to `arrivals`.

        Raises:
            ProtocolError: an agent does not say this, or not now.
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
            raise ProtocolError(f"it sent {frame.kind.name} in the middle of a connection")
        else:
            if isinstance(said, Pong):
                self._pongs += 1
                if self._pongs > self._pongs_expected + _PONGS_AHEAD:
                    raise ProtocolError("it sends signs of life that nobody asked for, one after the other")
            arrivals.append(_make_arrival((said, ())))


def complaint(error: BaseException) -> str:
    """Return what went wrong with what a node sent, in words that are safe to show."""
    said = printable(str(error))[:500]
    if isinstance(error, SkypoolError):
        return said
    return f"it sent what makes no sense: {type(error).__name__}: {said}"


def _cannot_read() -> bool:
    """Read nothing. It takes the place of a reader that another thread has."""
    return False
