"""Batches: many small calls in one frame, which one worker runs one after the other.

They stay calls of their own. What a worker has not begun, the agent can take back at any time, and what has ended has
left the worker before the next one begins: a death, a cancellation or a slow call touches no other than itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
from collections.abc import Mapping
from typing import ClassVar

from skypool.agent.call import NodeCall
from skypool.agent.value_storage import Blob
from skypool.errors import ProtocolError
from skypool.wire.frames import TOGETHER, Buffer, Frame, Kind, encode

LARGEST_END = select.PIPE_BUF
"""How many bytes a pipe takes whole or not at all."""
_ID = struct.Struct("Q")
_ALL = 64 << 10
"""Bytes that are read from a pipe at once: more than it holds."""


class Batch:
    """Calls that came in one frame, as the agent sees them while it need not tell them apart.

    Attributes:
        packet: the frame as it came; ids: its calls in their order; kind: of slot that they run on (see `slots`).
        offered: whether it is where workers take calls.

    Raises:
        ProtocolError: the frame is not what it should be.
    """

    streams: ClassVar[bool] = False
    blob: ClassVar[Blob | None] = None
    pulls: ClassVar[Mapping[int, int]] = {}
    given: ClassVar[Mapping[int, int]] = {}
    doomed: ClassVar[str] = ""

    def __init__(self, f: Frame, name: str, kind: int = 0) -> None:
        header = dict(f.header)
        self.kind = kind
        self.packet = bytes(f.raw)
        self.name = name
        self.fn = header["fn"]
        self.ids: list[int] = header.pop("ids")
        self._lengths: list[int] = header.pop("lens")
        self._options = header
        self.timeout: float | None = header.get("timeout")
        self.silent = header.get("output") == "silent"
        self._singles: list[NodeCall] = []
        self._offered = False
        numbers = {type(each) for each in (*self.ids, *self._lengths)}
        if numbers != {int} or len(self.ids) != len(self._lengths) or min(*self.ids, *self._lengths) < 0:
            raise ProtocolError("calls that came together do not say which they are")
        if len(self.ids) > TOGETHER or len(set(self.ids)) < len(self.ids) or max(self.ids) >= 1 << 64:
            raise ProtocolError(f"{len(self.ids)} calls came together that have no ids of their own")
        if sum(self._lengths) != len(f.body):
            raise ProtocolError(f"{len(self.ids)} calls came together in {len(f.body)} bytes that are not theirs")

    @property
    def offered(self) -> bool:
        return self._offered

    @offered.setter
    def offered(self, offered: bool) -> None:
        self._offered = offered
        for call in self._singles:
            call.offered = offered

    def single(self, id_: int) -> NodeCall:
        """One of its calls as if it had come alone."""
        index = self.ids.index(id_)
        length = self._lengths[index]
        stop = len(self.packet) - sum(self._lengths[index + 1 :])
        header = {"id": id_, **self._options, "lens": [length]}
        packet = encode(Kind.CALL, header, length) + self.packet[stop - length : stop]
        call = NodeCall(
            id_, packet, None, self.name, self.fn, self.timeout, self.silent, False, self.kind, self.offered
        )
        self._singles.append(call)
        return call


class Pipes:
    """What a worker that runs a batch shares with the agent; made by the agent before the worker is forked.

    One pipe holds the ids of its calls that have not begun: the worker takes one before it begins a call, the agent
    takes them all when somebody else is to run them, and nobody can take one twice. The other one holds how calls
    ended; the agent is not woken by it, but reads it when it is told, or when it looks.
    """

    def __init__(self) -> None:
        flags = os.O_CLOEXEC | os.O_NONBLOCK
        self._claims, self._claim = os.pipe2(flags)
        self._ended, self._end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._ended, False)

    def leave(self) -> set[int]:
        """The worker's file descriptors among them: all the others are the agent's."""
        return {self._claims, self._claim, self._end}

    def keep(self) -> None:
        """In the agent, once the worker has its ends: close what only that needs."""
        os.close(self._claim)
        os.close(self._end)

    def close(self) -> None:
        """In the agent, when the worker is gone."""
        os.close(self._claims)
        os.close(self._ended)

    # --- in the worker ---------------------------------------------------------------------------------------

    def hold(self, ids: list[int]) -> None:
        """These calls are in this worker's hands, and have not begun."""
        os.write(self._claim, struct.pack(f"{len(ids)}Q", *ids))

    def claim(self) -> bool:
        """Take the next of them to begin it; False when the agent has taken back what was left."""
        try:
            return bool(os.read(self._claims, _ID.size))
        except BlockingIOError:
            return False

    def end(self, end: bytes) -> None:
        """A call has ended: `end_of`, at most LARGEST_END bytes."""
        os.write(self._end, end)

    # --- in the agent ----------------------------------------------------------------------------------------

    def take_back(self) -> list[int]:
        """The calls that have not begun, which the worker will not begin any more."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._claims, _ALL)
            return [id_ for (id_,) in _ID.iter_unpack(data)]
        return []

    def ended(self) -> bytes:
        """The ends that have come since the last time."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self._ended, _ALL)
        return b""


def frame_of_ends(body: bytes) -> list[Buffer]:
    """The frame that carries ends on to the client."""
    return [encode(Kind.OUTCOMES, {}, len(body)), body]
