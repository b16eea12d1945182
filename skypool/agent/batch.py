"""Batches: many small calls that arrive in one frame (message). One worker runs them one after the other.

They remain separate calls. At any time, the agent can take back the calls that the worker has not begun. A worker sends
the outcome of a call (its result or error) before it begins the next one. So the calls do not affect each other if the
worker dies, or if one of them is cancelled or slow.
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
"""The greatest size in bytes of an outcome in the pipe. The system writes it completely or not at all."""
_ID = struct.Struct("Q")
_ALL = 64 << 10
"""The number of bytes that are read from a pipe at once. A pipe has no more."""


class Batch:
    """Several calls that arrived in one frame (message). The agent handles them as one until it needs one by itself.

    Args:
        f: the CALLS frame.
        name: the name of the function.
        kind: the kind of slot that the calls need (see `slots`).

    Attributes:
        packet: the frame as it was received.
        ids: the ids of its calls, in their order.
        offered: True if the batch is in a queue of the workers, or a worker has taken it.

    Raises:
        ProtocolError: the frame's ids or lengths are not valid.
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
            raise ProtocolError(
                "the client sent a message with several calls whose ids or lengths are invalid; closing its "
                "connection. Use the same version of skypool on client and node; if you do, report this bug"
            )
        if len(self.ids) > TOGETHER or len(set(self.ids)) < len(self.ids) or max(self.ids) >= 1 << 64:
            raise ProtocolError(
                f"the client sent {len(self.ids)} calls in one message, where only {TOGETHER} with different "
                "64-bit ids are allowed; closing its connection. Use the same version of skypool on client and "
                "node; if you do, report this bug"
            )
        if sum(self._lengths) != len(f.body):
            raise ProtocolError(
                f"the client sent a message of {len(self.ids)} calls with {len(f.body)} bytes of arguments "
                f"instead of {sum(self._lengths)}; closing its connection. Use the same version of skypool on "
                "client and node; if you do, report this bug"
            )

    @property
    def offered(self) -> bool:
        return self._offered

    @offered.setter
    def offered(self, offered: bool) -> None:
        self._offered = offered
        for call in self._singles:
            call.offered = offered

    def single(self, id_: int) -> NodeCall:
        """Return one call of the batch as if it had arrived alone.

        Its `offered` changes together with the batch's from then on.

        Args:
            id_: the call's id, one of `ids`.
        """
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
    """Two pipes that a worker shares with the agent while it runs a batch.

    The agent makes them before it forks the worker.

    The first pipe contains the ids of the calls that have not begun. The worker reads an id before it begins that call.
    The agent reads all the ids if other workers are to run these calls. An id can be read only once, so no call runs
    twice. The second pipe contains the outcomes (results or errors) of calls. The agent reads it when the worker tells
    it to, and at its regular checks.
    """

    def __init__(self) -> None:
        flags = os.O_CLOEXEC | os.O_NONBLOCK
        self._claims, self._claim = os.pipe2(flags)
        self._ended, self._end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._ended, False)

    def leave(self) -> set[int]:
        """Return the file descriptors of both pipes that the worker needs.

        The worker closes all others after the fork.
        """
        return {self._claims, self._claim, self._end}

    def keep(self) -> None:
        """Close the ends of the pipes that only the worker needs.

        Called in the agent, after it has forked the worker.
        """
        os.close(self._claim)
        os.close(self._end)

    def close(self) -> None:
        """Close the agent's ends of the pipes. Called in the agent when the worker has died."""
        os.close(self._claims)
        os.close(self._ended)

    # --- in the worker ---------------------------------------------------------------------------------------

    def hold(self, ids: list[int]) -> None:
        """Write the ids of the calls of a batch to the pipe of calls that have not begun. Called in the worker.

        None of these calls may have begun.
        """
        os.write(self._claim, struct.pack(f"{len(ids)}Q", *ids))

    def claim(self) -> bool:
        """Claim the next call of the batch for the worker, by reading its id from the pipe. Called in the worker.

        Returns True if the worker may begin that call, and False if the agent has taken back the rest of the batch.
        """
        try:
            return bool(os.read(self._claims, _ID.size))
        except BlockingIOError:
            return False

    def end(self, end: bytes) -> None:
        """Write the outcome of a call to the pipe of outcomes. Called in the worker.

        Args:
            end: the outcome as `frames.end_of` makes it, at most LARGEST_END bytes.
        """
        os.write(self._end, end)

    # --- in the agent ----------------------------------------------------------------------------------------

    def take_back(self) -> list[int]:
        """Take the ids of all calls of the batch that have not begun from the pipe, and return them.

        The worker will not begin these calls. Called in the agent.
        """
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._claims, _ALL)
            return [id_ for (id_,) in _ID.iter_unpack(data)]
        return []

    def ended(self) -> bytes:
        """Read the outcomes that the worker has written since the last call, and return them.

        They are returned as one byte string, for `frames.ends_in`; b"" if there are none. Does not wait. Called in the
        agent.
        """
        with contextlib.suppress(BlockingIOError):
            return os.read(self._ended, _ALL)
        return b""


def frame_of_ends(body: bytes) -> list[Buffer]:
    """Return the OUTCOMES frame that sends the outcomes of batched calls to the client, as buffers.

    Args:
        body: the outcomes as `Pipes.ended` returns them.
    """
    return [encode(Kind.OUTCOMES, {}, len(body)), body]
