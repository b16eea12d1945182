"""`Inbox`: receives the messages of one node. The module `outbox` has the class that sends.

An `Inbox` reads in the thread of the pool's event loop, or in the thread of a caller that waits for a result. A
connection may break and be replaced while a thread reads from that connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

from skypool.clock import RunningClock
from skypool.errors import ProtocolError, SkypoolError, protocol_violation
from skypool.link import agent_messages
from skypool.link.agent_messages import Bye, Outcome, Outcomes, Piece, Pong, Printed, Said, Taken, Welcome, Yielded
from skypool.link.chunks import Pieces
from skypool.link.reading_turns import Turns, quickest_turns
from skypool.text import printable
from skypool.wire.frames import Buffer, Decoder, Frame
from skypool.wire.transport import CommandStream

_PONGS_AHEAD = 1000
"""The most status reports (PONG) that a node may send without a request (PING).

A node also sends a report, unasked, when its provider announces that the machine will be taken back.
"""
_REPORTED_AHEAD = 16 << 20
"""The most bytes of a node's status reports, in addition to `_REPORTED_EACH` bytes for each requested report.

After a broken connection, a node sends up to 600 measurements that have waited.
"""
_REPORTED_EACH = 1 << 20
"""The bytes that each requested status report may have, on average."""
_SMALL_PIECE = 1 << 10
"""The size in bytes below which a piece of output is joined to the one before. Each arrival takes 20 microseconds."""
_PIECES_TOGETHER = 64
"""The most pieces of output that are joined to one arrival."""
_MEASURED = 1 << 10
"""Bytes that each measurement, device and call in a report counts beyond its size, because handling it takes time."""


class Arrival(NamedTuple):
    """A message of a node, with the value or printed output that belongs to it.

    Attributes:
        said: the message.
        buffers: the bytes of the value or the output, copied out of the receive buffer; () for none. Several pieces of
            output may be joined here; `said` is then the header of the last one.
    """

    said: Said
    buffers: Sequence[Buffer] = ()


_make_arrival = functools.partial(tuple.__new__, Arrival)


class Awaited(Protocol):
    """A protocol for what a reading thread waits for, such as a pending call.

    Another object sets `ended` to True when the thread need not wait any longer.
    """

    ended: bool


class Incoming:
    """The reading side of one connection to a node.

    A thread owns the socket between its calls of `enter` and `leave`, and the socket is closed only while no thread
    owns it. So no thread reads from a descriptor that was closed and may have become another file.

    Args:
        stream: the connection.
        turns: decides whether data on the connection wakes the thread of the event loop.
        decoder: splits the received bytes into frames, and keeps an incomplete frame for later reads.
        number: the number of the connection: how many were made to the node, with this one.

    Attributes:
        next: a thread, not started yet, that will handle messages which the event loop's thread has received; None for
            none.
        pieces: the large values that have arrived in part.
    """

    __slots__ = ("_is_over", "_reading", "decoder", "next", "number", "pieces", "stream", "turns")

    def __init__(self, stream: CommandStream, decoder: Decoder, turns: Turns, number: int) -> None:
        self.stream = stream
        self.decoder = decoder
        self.pieces = Pieces()
        self.turns = turns
        self.number = number
        self._reading = threading.Lock()
        self._is_over = False
        self.next: threading.Thread | None = None

    def enter(self) -> bool:
        """Make the calling thread the reader. Return False at once if another thread reads, or after `end`."""
        if not self._reading.acquire(blocking=False):
            return False
        if self._is_over:
            self.leave()
            return False
        return True

    def leave(self) -> None:
        """Let other threads read. Call this after each `enter` that returned True."""
        self._reading.release()
        if self._is_over:
            self._close()

    def end(self) -> None:
        """Let no further thread read, and close the socket: now, or when the thread that reads it now has left.

        Return at once. The socket must be shut down before, so that a thread that reads now comes back.
        """
        self._is_over = True
        self._close()

    def _close(self) -> None:
        if self._reading.acquire(blocking=False):  # and keep it: nobody reads again
            self.turns.close()
            self.stream.socket.close()


class Reading:
    """The right of one thread to read one connection. `Inbox.reading` gives it to the thread."""

    __slots__ = ("_incoming", "_read")

    def __init__(self, incoming: Incoming, read: Callable[[], bool]) -> None:
        self._incoming = incoming
        self._read = read

    def fileno(self) -> int:
        """Return the descriptor of the connection, which stays open until the `with` block of `reading` is left."""
        return self._incoming.stream.socket.fileno()

    def __call__(self) -> bool:
        """Handle the messages that have arrived, without waiting. Return False if the connection is over."""
        return self._read()


class Inbox:
    """A receiver of messages from one node, over one connection after the other.

    Connections are opened and closed in the thread of the pool's event loop. Any thread may read, one at a time.

    Args:
        clock: returns the time in seconds, to measure how long the node is silent.
        awaited: returns the ids of the calls that somebody waits for. Pieces of large values of other calls are
            dropped.
        on_arrivals: called with the messages in order and the number of their connection, in the thread that read them.
        on_bye: called when the agent announces its end, in the thread that read the announcement.
        on_broken: called in any thread when a connection has broken, with the connection and the reason as text.
        on_senseless: called in any thread when a message is not valid, with the connection and the fault as text.

    Attributes:
        current: the current connection; None while there is none.
        heard: when any bytes came last, in seconds by `clock`; 0 before `await_first_sign` was called.
        understood: when a complete frame came last, in seconds by `clock`; 0 before the first one.
    """

    def __init__(
        self,
        clock: RunningClock,
        awaited: Callable[[], Collection[int]],
        on_arrivals: Callable[[list[Arrival], int], None],
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
        self._pongs = 0
        self._pongs_expected = 0
        self._reported = 0  # bytes of status reports
        self.current: Incoming | None = None
        self.heard = 0.0
        self.understood = 0.0

    @property
    def stream(self) -> CommandStream | None:
        """The current connection; None while there is none."""
        current = self.current
        return None if current is None else current.stream

    def await_first_sign(self) -> None:
        """Start to measure the node's silence now, before the node has sent anything."""
        self.heard = self._clock()

    def note_sign_of_life(self) -> None:
        """Set the times of the last bytes and of the last complete frame to now."""
        self.heard = self._clock()
        self.understood = self.heard

    def expect_pong(self) -> None:
        """Allow the node one more status report, because the client is about to request one.

        A node is given up if it sends more than 1000 reports beyond the requested ones, or more than 16 MiB beyond 1
        MiB for each requested one.
        """
        self._pongs_expected += 1

    # --- one connection after the other ----------------------------------------------------------------------

    def open(self, loop: asyncio.AbstractEventLoop, stream: CommandStream, decoder: Decoder, number: int) -> Incoming:
        """Make a connection the current one, after its handshake, and return its reading side.

        `decoder` is that of the handshake, and may hold the first bytes of a frame. Nothing is read before `begin`. An
        earlier connection must have been closed with `close`. Raises OSError if this process has no free descriptor.
        """
        self.current = Incoming(stream, decoder, quickest_turns(loop, stream.socket, self._on_readable), number)
        return self.current

    def begin(self, incoming: Incoming, frames: list[Frame]) -> None:
        """Handle the frames, if any, that arrived with the handshake, and have the event loop read from now on.

        If a frame is not valid, call `on_senseless` instead of raising.
        """
        if not incoming.enter():  # a caller's thread was quicker
            self._digest(incoming, frames)
            incoming.turns.watch()
            return
        try:
            self._digest(incoming, frames, on_loop=True)
            incoming.turns.watch()
        finally:
            self._leave_loop(incoming)

    def close(self) -> Incoming | None:
        """Stop reading the current connection, if any, and return its reading side, which the caller must `end`."""
        current = self.current
        self.current = None
        if current is not None:
            current.turns.unwatch()
        return current

    # --- reading threads -------------------------------------------------------------------------------------

    def drive(self, awaited: Awaited) -> None:
        """Read in the calling thread and block until `awaited.ended` is True. There is no time limit.

        This is faster than waiting until the thread of the event loop has read. Return early if another thread reads
        already, or if the connection is missing or breaks. The caller must therefore check `awaited.ended`.
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
    def reading(self) -> Iterator[Reading | None]:
        """Return a context manager in which the calling thread reads, instead of the thread of the event loop.

        Yields:
            A `Reading`, which reads when called; None if another thread reads already, or if there is no connection.
        """
        incoming = self._take_turn()
        if incoming is None:
            yield None
            return
        try:
            yield Reading(incoming, functools.partial(self._read_here, incoming, False))
        finally:
            self._give_turn_back(incoming)

    def _take_turn(self) -> Incoming | None:
        """Make the calling thread the reader of the current connection, and return that; None if it cannot read now."""
        current = self.current
        if current is None or not current.enter():
            return None
        current.turns.take()
        return current

    def _give_turn_back(self, incoming: Incoming) -> None:
        """Let the event loop's thread read again. Call this in the thread that called `_take_turn`, with its result."""
        incoming.turns.give_back()
        incoming.leave()
        incoming.turns.come_back()

    def _read_here(self, incoming: Incoming, wait: bool) -> bool:
        """Read once in a caller's thread. Return False if the connection is over, otherwise True, even without data."""
        if self.current is not incoming:
            return False
        try:
            return self._read(incoming, wait)
        except BaseException:
            self._on_broken(
                incoming.stream, "the reading thread was interrupted, as by Ctrl-C; the node sends its messages again"
            )
            raise

    def _on_readable(self) -> None:
        """Read once in the thread of the event loop, without blocking, if there is a connection."""
        current = self.current
        if current is None:
            return
        if not current.enter():
            # another thread reads; the event loop ignores the socket until that thread has finished
            current.turns.stand_aside()
            if not current.enter():
                return
            current.turns.watch()  # the caller stopped just before, and did not see the call of `stand_aside`
        try:
            self._read(current, on_loop=True)
        finally:
            self._leave_loop(current)

    def _leave_loop(self, incoming: Incoming) -> None:
        """End the event loop's turn to read. Start the thread that handles its messages, or let any thread read."""
        thread, incoming.next = incoming.next, None
        if thread is None:
            incoming.leave()
            return
        incoming.turns.take()
        try:
            thread.start()
        except RuntimeError:  # the interpreter is about to exit, or no further thread can be started
            thread.run()

    # --- received frames -------------------------------------------------------------------------------------

    def _read(self, incoming: Incoming, wait: bool = False, on_loop: bool = False) -> bool:
        """Read once, and handle complete frames. Return False if the connection is over. Only the reader calls this."""
        try:
            received = incoming.turns.receive(incoming.decoder.space(), wait)
            if received == 0:
                raise ConnectionResetError(
                    "the connection was closed on the node's side, as happens when the node's machine or the network "
                    "fails"
                )
            self.heard = self._clock()
            frames = incoming.decoder.advance(received)
            if frames:
                self.understood = self.heard
                self._digest(incoming, frames, on_loop)
        except BlockingIOError:
            return True
        except ProtocolError as e:
            self._on_senseless(incoming.stream, str(e))
            return False
        except OSError as e:
            self._on_broken(incoming.stream, str(e))
            return False
        return True

    def _digest(self, incoming: Incoming, frames: list[Frame], on_loop: bool = False) -> None:
        """Handle frames in their order, with one call of `on_arrivals`. If one is not valid, drop all of them."""
        arrivals: list[Arrival] = []
        try:
            for frame in frames:
                self._take(incoming, frame, arrivals)
        except Exception as e:  # noqa: BLE001 - any failure that a node causes gives up that node alone
            self._on_senseless(incoming.stream, complaint(e))
            return
        if on_loop and any(map(_has_failed, arrivals)):
            # reading an exception runs code of the user, which may block, so it gets a thread of its own
            work = functools.partial(self._pass_on_beside, incoming, arrivals)
            incoming.next = threading.Thread(target=work, name="skypool errors", daemon=True)
        elif arrivals:
            self._pass_on(incoming, arrivals)

    def _pass_on(self, incoming: Incoming, arrivals: list[Arrival]) -> None:
        """Pass messages to `on_arrivals`, unless their connection was replaced: then the node sends them again."""
        try:
            if self.current in (incoming, None):  # else a newer connection brings them again
                self._on_arrivals(arrivals, incoming.number)
        except Exception as e:  # noqa: BLE001 - any failure that a node causes gives up that node alone
            self._on_senseless(incoming.stream, complaint(e))

    def _pass_on_beside(self, incoming: Incoming, arrivals: list[Arrival]) -> None:
        try:
            self._pass_on(incoming, arrivals)
        finally:
            self._give_turn_back(incoming)

    def _take(self, incoming: Incoming, frame: Frame, arrivals: list[Arrival]) -> None:
        """Handle one frame: store a piece of a value, call `on_bye`, or add to `arrivals`. Raises ProtocolError."""
        said = agent_messages.message_of(frame)
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
            pieces_of_text: list[Buffer] = [bytes(frame.body)]
            if arrivals and len(frame.body) < _SMALL_PIECE and said.goes_on(arrivals[-1].said):
                earlier = arrivals[-1].buffers
                if len(earlier) < _PIECES_TOGETHER:
                    pieces_of_text = [*earlier, *pieces_of_text]
                    arrivals.pop()
            arrivals.append(_make_arrival((said, pieces_of_text)))
        elif isinstance(said, Bye):
            self._on_bye()
        elif isinstance(said, (Welcome, Taken)):
            raise protocol_violation(
                f"the node sent a {frame.kind.name} message, which is allowed only at the start of a connection"
            )
        else:
            if isinstance(said, Pong):
                self._count(said, len(frame.raw))
            arrivals.append(_make_arrival((said, ())))

    def _count(self, said: Pong, size: int) -> None:
        """Count a status report and its bytes. Raises ProtocolError if the node exceeds the limits of `expect_pong`."""
        self._pongs += 1
        self._reported += size + _MEASURED * sum(1 + len(one.devices) + len(one.calls) for one in said.samples)
        most = self._pongs_expected + _PONGS_AHEAD
        largest = _REPORTED_EACH * self._pongs_expected + _REPORTED_AHEAD
        if self._pongs > most:
            raise protocol_violation(
                f"the node sent {self._pongs} status reports, and the limit is {most} after {self._pongs_expected} "
                "requests"
            )
        if self._reported > largest:
            raise protocol_violation(
                f"the node sent status reports of {self._reported} bytes, and the limit is {largest} after "
                f"{self._pongs_expected} requests"
            )


def _has_failed(arrival: Arrival) -> bool:
    """Return True if a message brings the exception of a call."""
    said = arrival.said
    return (isinstance(said, Outcome) and not said.ok) or (
        isinstance(said, Outcomes) and not all(each[1] for each in said.ends)
    )


def complaint(error: BaseException) -> str:
    """Return at most 500 characters of the text of an error that a node's message caused, without control characters.

    For an error that is not a SkypoolError, the text begins with "invalid message:" and the error's type.
    """
    said = printable(str(error))[:500]
    if isinstance(error, SkypoolError):
        return said
    return f"invalid message: {type(error).__name__}: {said}"
