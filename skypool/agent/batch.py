"""Batches: many small calls that arrive in one frame. One worker runs them one after the other.

The calls of a batch remain separate. At any time, the agent can take back the calls that the worker has not begun. A
worker sends the outcome of a call before it begins the next one. So the calls do not affect each other if the worker
dies, or if one of them is cancelled or slow.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Mapping
from typing import ClassVar

from skypool.agent.call import NodeCall
from skypool.agent.value_storage import Blob
from skypool.errors import protocol_violation
from skypool.wire.frames import TOGETHER, Buffer, Frame, Kind, encode

LARGEST_END = 4 << 10
"""The greatest size in bytes of one outcome in shared memory. A larger outcome is sent in a packet of its own."""
ROOM = 64 << 10
"""The number of bytes of outcomes that shared memory holds."""
_ID = struct.Struct("Q")
_ALL = 64 << 10
"""The greatest number of bytes that are read from a pipe at once. A pipe holds no more than that."""
_NUMBERS = 128
"""The size in bytes of the two counters before the outcomes, each of them in a line of its own of the CPU's cache."""
_WRITTEN = 0
_READ = 8
_IMPOSSIBLE = b"\0"
_IN_ORDER = os.uname().machine == "x86_64"
"""True if other processors see what a processor writes in the order in which it was written."""


class Batch:
    """Several calls that arrived in one frame of kind CALLS, whose bytes are copied.

    The agent handles the batch like one call. If it needs one of these calls alone, for example to stop it, `single`
    makes a record of that call. Calls of a batch have no large arguments, send no items and have not been asked to
    stop.

    Attributes:
        packet: the bytes of the frame, as received.
        ids: the ids of the calls, in order.
        name: the name of the function that all the calls run.
        fn: the key by which the node stores that function.
        kind: the kind of slot that the calls need: MAIN or CPU.
        timeout: seconds that each call may run; None for no limit.
        silent: True if output of the calls is not sent to the client.
        offered: True if the batch was put into the socket from which workers take calls. A worker may have taken it.

    Raises:
        ProtocolError: the frame's ids or lengths are not valid, it has no calls or more than `TOGETHER` (512), or its
            calls are services or processes of gangs, which cannot be batched.
    """

    # The same for all batches; see `NodeCall`.
    streams: ClassVar[bool] = False
    blob: ClassVar[Blob | None] = None
    pulls: ClassVar[Mapping[int, int]] = {}
    given: ClassVar[Mapping[int, int]] = {}
    doomed: ClassVar[str] = ""
    busy: ClassVar[bool] = True

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
        if "gang" in header or "service" in header:
            raise protocol_violation("the client sent several calls of a gang or services in one message")
        numbers = {type(each) for each in (*self.ids, *self._lengths)}
        if numbers != {int} or len(self.ids) != len(self._lengths) or min(*self.ids, *self._lengths) < 0:
            raise protocol_violation("the client sent a message with several calls whose ids or lengths are invalid")
        if len(self.ids) > TOGETHER or len(set(self.ids)) < len(self.ids) or max(self.ids) >= 1 << 64:
            raise protocol_violation(
                f"the client sent {len(self.ids)} calls with {len(set(self.ids))} different ids in one message; at "
                f"most {TOGETHER} calls with different ids below 2^64 are allowed"
            )
        if sum(self._lengths) != len(f.body):
            raise protocol_violation(
                f"the client sent a message of {len(self.ids)} calls with {len(f.body)} bytes of arguments instead of "
                f"{sum(self._lengths)}"
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
        """Return a new record of the call with this id, as if the call had arrived alone and not in this batch.

        The id stays in `ids`. When `offered` of the batch is set later, `offered` of the record is set, too.
        """
        index = self.ids.index(id_)
        length = self._lengths[index]
        stop = len(self.packet) - sum(self._lengths[index + 1 :])
        header = {"id": id_, **self._options, "lens": [length]}
        packet = encode(Kind.CALL, header, length) + self.packet[stop - length : stop]
        call = NodeCall(
            id_,
            packet,
            None,
            self.name,
            self.fn,
            self.timeout,
            self.silent,
            False,
            self.kind,
            offered=self.offered,
            grace=self._options.get("grace"),
        )
        self._singles.append(call)
        return call


class SharedBatch:
    """A pipe and memory that a worker and the agent share for batches. The agent makes them before it forks the worker.

    A pipe contains the ids of the calls that have not begun. The worker reads an id before it begins that call. To take
    back these calls, the agent reads all ids that are left. An id can be read only once, so no call runs twice.

    The memory contains the outcomes of calls, as writing them there takes no system call. The worker writes each
    outcome after the last one. At the end of the memory, it begins again at the start. Then it writes how many bytes it
    has written in all. The agent reads the outcomes when the worker asks for that, at regular checks, and after the
    worker's death.
    """

    def __init__(self) -> None:
        flags = os.O_CLOEXEC | os.O_NONBLOCK
        self._claims, self._claim = os.pipe2(flags)
        memory = memoryview(mmap.mmap(-1, _NUMBERS + ROOM))
        self._numbers = memory[:_NUMBERS].cast("Q")
        self._outcomes = memory[_NUMBERS:]
        self._written = self._read = self._seen = 0
        self._limit = ROOM

    def leave(self) -> set[int]:
        """Return the file descriptors that a new worker must leave open when it closes all others. Closes nothing."""
        return {self._claims, self._claim}

    def keep(self) -> None:
        """Keep only the agent's end of the pipe: close the writing end, which only the worker needs.

        Called in the agent, once, after the fork.
        """
        os.close(self._claim)

    def close(self) -> None:
        """Close the agent's end of the pipe. Called in the agent, once, when the worker has died."""
        os.close(self._claims)

    # --- in the worker ---------------------------------------------------------------------------------------

    def hold(self, ids: list[int]) -> None:
        """Write the ids of a new batch's calls, at most 512, in order to the pipe of calls that have not begun.

        Called in the worker. The pipe must be empty: each call of the previous batch was claimed or taken back.
        """
        os.write(self._claim, struct.pack(f"{len(ids)}Q", *ids))

    def claim(self) -> bool:
        """Claim the next call of the batch, by reading its id from a pipe. Does not wait.

        Called in the worker. Returns False if no id is left: all calls of the batch were claimed or taken back.
        """
        try:
            return bool(os.read(self._claims, _ID.size))
        except BlockingIOError:
            return False

    def end(self, end: bytes) -> bool:
        """Write the outcome of a call to the shared memory. Called in the worker.

        `end` is the outcome as `frames.end_of` encodes it, at most `ROOM` (64 Ki) bytes. Returns False, and writes
        nothing, if there is no room because the agent has not yet read enough of the earlier outcomes.
        """
        written = self._written + len(end)
        if written > self._limit:
            self._limit = self._numbers[_READ] + ROOM
            if written > self._limit:
                return False
        at = self._written % ROOM
        stop = at + len(end)
        if stop <= ROOM:
            self._outcomes[at:stop] = end
        else:
            self._outcomes[at:] = end[: ROOM - at]
            self._outcomes[: stop - ROOM] = end[ROOM - at :]
        self._numbers[_WRITTEN] = self._written = written
        return True

    # --- in the agent ----------------------------------------------------------------------------------------

    def take_back(self) -> list[int]:
        """Remove from the pipe the ids of the batch's calls that have not begun, and return them in order.

        Called in the agent, also after the worker's death. The worker will not begin these calls. Does not wait.
        """
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._claims, _ALL)
            whole = len(data) - len(data) % _ID.size  # a call may have written to a file that it did not open
            return [id_ for (id_,) in _ID.iter_unpack(data[:whole])]
        return []

    def ended(self, asked: bool = True) -> bytes:
        """Return the outcomes that the worker has written since the last call; b"" if there are none.

        Called in the agent. `frames.ends_in` splits the result into outcomes, or raises ProtocolError if a damaged
        worker has written an impossible count.

        Args:
            asked: True if the worker has asked the agent to read, or has died. False if the worker may be writing at
                this moment. Some processors may then show the new count before they show the outcomes. On these, the
                outcomes that have been written since the last call are left for the next call.
        """
        written = self._numbers[_WRITTEN]
        if not (asked or _IN_ORDER):
            written, self._seen = max(self._seen, self._read), written
        size = written - self._read
        if not 0 <= size <= ROOM:
            return _IMPOSSIBLE
        at = self._read % ROOM
        found = bytes(self._outcomes[at : at + size])
        found += self._outcomes[: size - len(found)]
        self._numbers[_READ] = self._read = written
        return found


def frame_of_ends(body: bytes) -> list[Buffer]:
    """Return the OUTCOMES frame that sends outcomes of batched calls to the client.

    `body` is what `SharedBatch.ended` has returned. The frame is two buffers, to be written one after the other. The
    second is `body` itself.
    """
    return [encode(Kind.OUTCOMES, {}, len(body)), body]
