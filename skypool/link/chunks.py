"""Reassembles large values that arrive from a node in several frames."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence

from skypool.errors import ProtocolError, protocol_violation
from skypool.link import buffers as memory
from skypool.link.agent_messages import Outcome, Piece, Yielded
from skypool.wire.frames import Buffer, split_buffers

MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
"""The bytes of physical memory of this machine. The unfinished values of one connection may not take more."""


class _Room:
    """Memory for one value that arrives in pieces. `seq`: 0 for a call's result, else the last item's number."""

    __slots__ = ("filled", "memory", "seq")

    def __init__(self, seq: int, size: int) -> None:
        self.seq = seq
        self.memory = memory.room(size)
        self.filled = 0


class Pieces:
    """The unfinished large values of one connection to a node.

    A node sends the large values of a call one after the other. So `rooms` has at most one unfinished value of each
    call.
    """

    def __init__(self) -> None:
        self.rooms: dict[int, _Room] = {}

    def take(self, piece: Piece, body: memoryview, awaited: Callable[[], Collection[int]]) -> None:
        """Copy a piece of a large value into the memory for that value.

        At the first piece of a value, memory for the whole value is allocated, and an unfinished value of the same call
        is dropped. If nobody waits for the call at this point, all pieces of the value are ignored.

        Args:
            piece: the header of the piece.
            body: the bytes of the piece.
            awaited: returns the ids of the calls that somebody waits for.

        Raises:
            ProtocolError: the piece does not follow the previous piece of the same value, or all unfinished values
                together would exceed the physical memory of this machine.
        """
        if piece.at == 0:
            self.rooms.pop(piece.call, None)
            if piece.call not in awaited():
                return
            others = sum(len(room.memory) for room in self.rooms.values())
            if piece.size + others > MEMORY:
                raise ProtocolError(
                    f"a result of {piece.size} bytes, together with {others} bytes of unfinished results of other "
                    f"calls, does not fit into the client's memory of {MEMORY} bytes; return less, or write the result "
                    "to a file or bucket"
                )
            self.rooms[piece.call] = _Room(piece.seq, piece.size)
        room = self.rooms.get(piece.call)
        if room is None:
            if piece.call in awaited():
                raise protocol_violation(f"the node began to send a large result at byte {piece.at} instead of 0")
            return
        if (piece.seq, piece.at, piece.size) != (room.seq, room.filled, len(room.memory)):
            raise protocol_violation(
                f"the node sent a piece that does not continue a large result: item {piece.seq}, byte {piece.at} of "
                f"{piece.size} instead of item {room.seq}, byte {room.filled} of {len(room.memory)}"
            )
        room.memory[piece.at : piece.at + len(body)] = body
        room.filled += len(body)

    def forget(self, call: int) -> None:
        """Drop the unfinished value, if any, of a call that has ended.

        A value stays unfinished if the worker process that ran the call died before it had sent all pieces.
        """
        self.rooms.pop(call, None)

    def buffers(
        self, said: Outcome | Yielded, body: memoryview, awaited: Callable[[], Collection[int]]
    ) -> Sequence[Buffer]:
        """Return the buffers of a complete value, copied out of one frame or put together from its pieces.

        A value that came in pieces is forgotten here, so it can be fetched only once. If its pieces were dropped
        because nobody waits for the call, return ().

        Args:
            said: the header of the frame that completes the value.
            body: the body of that frame; empty if the value came in pieces.
            awaited: returns the ids of the calls that somebody waits for.

        Raises:
            ProtocolError: pieces of the value are missing, or the lengths do not fit the value.
        """
        if not said.large:
            return [bytes(body)] if len(said.lens) == 1 else split_buffers(memoryview(bytearray(body)), said.lens)
        room = self.rooms.pop(said.id, None)
        if room is None and said.id not in awaited():
            return ()
        seq = said.seq if isinstance(said, Yielded) else 0
        if room is None or room.seq != seq or room.filled != len(room.memory):
            arrived = 0 if room is None else room.filled
            raise protocol_violation(
                f"the node ended a large result before all pieces had arrived: {arrived} bytes have arrived here"
            )
        return split_buffers(room.memory, said.lens)
