"""Reassembly of large values that arrive from a node in several frames."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence

from skypool.errors import ProtocolError
from skypool.link import buffers as memory
from skypool.link.inbound import Outcome, Piece, Yielded
from skypool.wire.frames import Buffer, split_buffers

MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _Room:
    """Memory for one value, and how much of it is filled."""

    __slots__ = ("filled", "memory", "seq")

    def __init__(self, seq: int, size: int) -> None:
        self.seq = seq
        self.memory = memory.room(size)
        self.filled = 0


class Pieces:
    """What one connection has brought of values that are not whole yet.

    A node sends one large value of a call after the other, so there is one room for each call at most.

    Attributes:
        rooms: by call.
    """

    def __init__(self) -> None:
        self.rooms: dict[int, _Room] = {}

    def take(self, piece: Piece, body: memoryview, awaited: Callable[[], Collection[int]]) -> None:
        """Take in a piece of a value. What belongs to a call that nobody waits for is dropped.

        Args:
            awaited: tells the calls that are waited for.

        Raises:
            ProtocolError: it is not the next one, or there is no room for the value.
        """
        if piece.at == 0:
            self.rooms.pop(piece.call, None)
            if piece.call not in awaited():
                return
            if piece.size + sum(len(room.memory) for room in self.rooms.values()) > MEMORY:
                raise ProtocolError(f"a value of {piece.size} bytes has no room in this machine's memory")
            self.rooms[piece.call] = _Room(piece.seq, piece.size)
        room = self.rooms.get(piece.call)
        if room is None:
            if piece.call in awaited():
                raise ProtocolError(f"a value began at byte {piece.at} instead of 0")
            return
        if (piece.seq, piece.at, piece.size) != (room.seq, room.filled, len(room.memory)):
            raise ProtocolError(f"a piece of a value came at byte {piece.at} instead of {room.filled}")
        room.memory[piece.at : piece.at + len(body)] = body
        room.filled += len(body)

    def forget(self, call: int) -> None:
        """Drop what came of a value of a call that has ended: its worker did not live to send all of it."""
        self.rooms.pop(call, None)

    def buffers(
        self, said: Outcome | Yielded, body: memoryview, awaited: Callable[[], Collection[int]]
    ) -> Sequence[Buffer]:
        """Return the buffers of a value, in memory of their own: those of the frame, or those that came in pieces.

        They are empty if nobody waits for the call, so that its pieces were dropped.

        Raises:
            ProtocolError: the value is not whole.
        """
        if not said.large:
            return [bytes(body)] if len(said.lens) == 1 else split_buffers(memoryview(bytearray(body)), said.lens)
        room = self.rooms.pop(said.id, None)
        if room is None and said.id not in awaited():
            return ()
        seq = said.seq if isinstance(said, Yielded) else 0
        if room is None or room.seq != seq or room.filled != len(room.memory):
            raise ProtocolError("a value ended before all of its pieces had come")
        return split_buffers(room.memory, said.lens)
