"""Batches: many small calls that arrive in one frame (message). One worker process runs them one after the other.

The calls of a batch remain separate. At any time, the agent (the node's main process) can take back the calls that the
worker has not begun. A worker sends the outcome of a call (its result or error) before it begins the next one. So the
calls do not affect each other if the worker dies, or if one of them is cancelled or slow.
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
from skypool.errors import protocol_violation
from skypool.wire.frames import TOGETHER, Buffer, Frame, Kind, encode

LARGEST_END = select.PIPE_BUF
"""The greatest size in bytes of one outcome (result or error) in a pipe. Up to this size, one write is never split."""
_ID = struct.Struct("Q")
_ALL = 64 << 10
"""The greatest number of bytes that are read from a pipe at once. A pipe holds no more than that."""


class Batch:
    """Several calls that arrived in one frame (message).

    The agent (the node's main process) handles the batch like one call until one of these calls is needed alone (see
    `single`). Calls of a batch have no large arguments, send no items and have not been asked to stop.

    Args:
        f: the frame, of kind CALLS. Its bytes are copied.
        name: the name of the function that all calls of the batch run.
        kind: the kind of slot (place for one call) that the calls need: CPU for slots without devices, otherwise MAIN.

    Attributes:
        kind: the argument `kind`.
        packet: the bytes of the frame, as received.
        name: the argument `name`.
        fn: the key by which the node stores the function.
        ids: the ids of the calls, in their order.
        timeout: seconds that each call may run; None for no limit.
        silent: True if output of the calls is not sent to the client.
        offered: True if the batch is in a queue of the worker processes, or a worker has taken it.

    Raises:
        ProtocolError: the frame's ids or lengths are not valid, or it has no calls or more than `TOGETHER` (512). Also
            raised for calls that need a worker of their own each.
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
        """Return a new record of one call of this batch (several calls), as if the call had arrived alone.

        The call's id stays in `ids`. When `offered` of the batch is set later, `offered` of the record is set, too.

        Args:
            id_: the call's id, one of `ids`.

        Raises:
            ValueError: the batch has no call with this id.
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


class Pipes:
    """Two pipes that a worker process shares with the agent (the node's main process), for batches of small calls.

    The agent creates the pipes before it forks the worker.

    The first pipe contains the ids of the calls that have not begun. The worker reads an id before it begins that call.
    To give these calls to other workers, the agent reads all ids that are left. An id can be read only once, so no call
    runs twice.

    The second pipe contains the outcomes (results or errors) of calls. The agent reads this pipe when the worker asks
    for that, at regular checks, and after the worker's death.
    """

    def __init__(self) -> None:
        flags = os.O_CLOEXEC | os.O_NONBLOCK
        self._claims, self._claim = os.pipe2(flags)
        self._ended, self._end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._ended, False)

    def leave(self) -> set[int]:
        """Return the three file descriptors of these pipes that the worker process must leave open.

        Nothing is closed here. After the fork, the worker closes all file descriptors that it does not need.
        """
        return {self._claims, self._claim, self._end}

    def keep(self) -> None:
        """Close the ends of the pipes that only the worker process needs: those for writing.

        Called in the agent (the node's main process), once, after it has forked the worker.
        """
        os.close(self._claim)
        os.close(self._end)

    def close(self) -> None:
        """Close the agent's ends of the pipes, which are for reading.

        Called in the agent (the node's main process), once, when the worker process has died.
        """
        os.close(self._claims)
        os.close(self._ended)

    # --- in the worker ---------------------------------------------------------------------------------------

    def hold(self, ids: list[int]) -> None:
        """Write the ids of a batch's calls to the pipe for calls that have not begun.

        Called in the worker process that runs the batch (several small calls). The pipe must be empty: each call of the
        previous batch was claimed or taken back.

        Args:
            ids: the ids, at most 512, in the order in which the worker process runs the calls.
        """
        os.write(self._claim, struct.pack(f"{len(ids)}Q", *ids))

    def claim(self) -> bool:
        """Claim the next call of the batch (several small calls) for the worker, by reading its id from a pipe.

        Called in the worker process. Returns True if the worker process may begin that call. Returns False if no id is
        left, for example because the agent (the node's main process) has taken back the rest of the batch. Does not
        wait.
        """
        try:
            return bool(os.read(self._claims, _ID.size))
        except BlockingIOError:
            return False

    def end(self, end: bytes) -> None:
        """Write the outcome (result or error) of a call to the pipe of outcomes. Called in the worker process.

        Waits if the pipe is full, until the agent (the node's main process) reads from it.

        Args:
            end: the outcome in the form that `frames.end_of` makes, at most `LARGEST_END` (4096) bytes.

        Raises:
            BrokenPipeError: the agent is gone.
        """
        os.write(self._end, end)

    # --- in the agent ----------------------------------------------------------------------------------------

    def take_back(self) -> list[int]:
        """Remove from the pipe the ids of the batch's calls that have not begun, and return them in order.

        A batch is several small calls that one worker process runs. The worker will not begin the removed calls.
        Returns an empty list if there are none, also after the worker's death. Does not wait. Called in the agent (the
        node's main process).
        """
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._claims, _ALL)
            whole = len(data) - len(data) % _ID.size  # a call may have written to a file that it did not open
            return [id_ for (id_,) in _ID.iter_unpack(data[:whole])]
        return []

    def ended(self) -> bytes:
        """Read outcomes (results or errors) that the worker process has written, at most 64 KiB, and return them.

        Each outcome is returned once. The result is one byte string, which `frames.ends_in` splits; b"" if there are
        none. Does not wait. Called in the agent (the node's main process).
        """
        with contextlib.suppress(BlockingIOError):
            return os.read(self._ended, _ALL)
        return b""


def frame_of_ends(body: bytes) -> list[Buffer]:
    """Return the OUTCOMES frame (message) that sends the outcomes (results or errors) of calls to the client.

    Args:
        body: the serialized outcomes, in the form that `Pipes.ended` returns.

    Returns:
        the frame as two buffers, to be written one after the other. The second is `body` itself.
    """
    return [encode(Kind.OUTCOMES, {}, len(body)), body]
