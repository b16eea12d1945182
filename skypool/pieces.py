"""Large values on their way from a node: they come in pieces, into memory that is made for all of them at the first."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from skypool import memory
from skypool.errors import ProtocolError
from skypool.wire import Buffer, Frame, split

MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Pieces:
    """What one connection has brought of values that are not whole yet.

    Attributes:
        rooms: by key, the memory of each and how much of it is filled.
    """

    def __init__(self) -> None:
        self.rooms: dict[int | str, tuple[memoryview, int]] = {}

    def take(self, f: Frame, awaited: Callable[[], list[int]] | None) -> None:
        """A piece of a value.

        Args:
            awaited: tells the calls that are waited for, where a stranger sends it: that one fills no memory with what
                nobody waits for, nor with more than there is. None where the sender is believed.

        Raises:
            ProtocolError: it is none, or is not the next one.
        """
        key, at, size = f.header["key"], f.header["at"], f.header["size"]
        if at == 0:
            if awaited is not None:
                self._check_room(key, size, awaited)
            self.rooms[key] = (memory.room(size), 0)
        room, filled = self.rooms[key]
        if at != filled:
            raise ProtocolError(f"a piece of a value came at byte {at} instead of {filled}")
        room[at : at + len(f.body)] = f.body
        self.rooms[key] = (room, at + len(f.body))

    def _check_room(self, key: int | str, size: int, awaited: Callable[[], list[int]]) -> None:
        if int(str(key).partition(":")[0]) not in awaited():
            raise ProtocolError(f"a value came for call {key}, which is not there")
        if size + sum(len(room) for room, _ in self.rooms.values()) > MEMORY:
            raise ProtocolError(f"a value of {size} bytes has no room in this machine's memory")

    def forget(self, call: int) -> None:
        """The call has ended: what came of a value that its worker did not live to send whole is no good."""
        for key in [key for key in self.rooms if str(key).partition(":")[0] == str(call)]:
            del self.rooms[key]

    def buffers(self, f: Frame) -> Sequence[Buffer]:
        """The buffers of a frame, in memory of their own; of a value that came in pieces, those.

        Raises:
            ProtocolError: it is not whole.
        """
        lengths = f.header.get("lens")
        if lengths is None or ("blob" not in f.header and len(lengths) == 1):
            return [bytes(f.body)]
        if "blob" not in f.header:
            return split(memoryview(bytearray(f.body)), lengths)
        seq = f.header.get("seq")
        room, filled = self.rooms.pop(f.header["id"] if seq is None else f"{f.header['id']}:{seq}")
        if filled != len(room):
            raise ProtocolError(f"a value of {len(room)} bytes ended after {filled}")
        return split(room, lengths)
