"""Keeps outcomes, stream items and output until the client acknowledges them. Sends them again after a reconnection.

This runs in the agent, the main process of a node. An outcome is the result or error of a call. Stream items are what a
generator call yields.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from typing import Any

from skypool.agent.connection import Connection, Large
from skypool.agent.value_storage import Blob, SpareMemory
from skypool.wire.frames import Buffer, Kind, frame


class Unacknowledged:
    """A store of the outcomes (results or errors), stream items and output that the client has not acknowledged.

    If a client is connected, everything that is added is also sent at once.

    Args:
        kept: takes over the memory of large values that were acknowledged, to use it again.

    Attributes:
        connection: the connection of the present client; None if there is none.
    """

    def __init__(self, kept: SpareMemory) -> None:
        self._kept = kept
        self._frames: dict[tuple[int, int], Large] = {}
        self._begun: dict[int, tuple[int, Large]] = {}
        self._together: dict[int, list[Buffer]] = {}
        self._output: deque[tuple[int, int, list[Buffer]]] = deque()
        self._output_size = 0
        self._next = 0
        self.connection: Connection | None = None

    def on_written(self, told: dict[str, Any], fds: list[int], wanted: bool) -> None:
        """Note how much of a large value a worker process has written, so that this part can be sent.

        When the first packet (message) about a value comes from the worker process, the sending of that value begins.

        Args:
            told: the header of the worker's packet: the call's id, the item's number, the bytes written and the size.
            fds: the file descriptor of the value, in the first packet about it; later an empty list.
            wanted: False if the agent (the node's main process) itself has ended the call meanwhile. The file
                descriptor is then closed, and the value is dropped.
        """
        if fds and wanted:
            self.begin(told["id"], told["seq"], Blob(fds[0], told["size"]))
        elif fds:
            os.close(fds[0])
        self.written(told["id"], told["at"])

    def begin(self, call: int, seq: int, blob: Blob) -> None:
        """Start to send a large value to the client while a worker process is still writing it.

        The value is an outcome (result or error) of a call, or items of its stream. Nothing of the value is sent before
        `written` was called with the number of bytes that can be sent.

        Args:
            call: the call's id.
            seq: 0 for an outcome, else the number of the last item.
            blob: the value. Its file descriptor is closed here once it is no longer needed.
        """
        large = Large(call, call if seq == 0 else f"{call}:{seq}", blob, 0, None)
        self._begun[call] = (seq, large)
        self._send(large)

    def written(self, call: int, size: int) -> None:
        """Note that a worker process has written the first `size` bytes of a call's large value. They can be sent now.

        Does nothing if `begin` was not called for a value of this call.
        """
        if call in self._begun:
            self._begun[call][1].written = size

    def add(self, call: int, seq: int, buffers: list[Buffer], whole: bool = False) -> None:
        """Keep and send an outcome (result or error) or stream items of a call.

        The outcome or items are kept until the client acknowledges them.

        Args:
            call: the call's id.
            seq: 0 for an outcome, else the number of the last item.
            buffers: the frame (message).
            whole: True if the frame refers to the large value that `begin` got. The frame is then sent after that
                value; without such a value, the frame is dropped. If False, a value that `begin` got is dropped,
                because its worker process will not finish it.
        """
        begun, large = self._begun.pop(call, (None, None))
        if large is not None and whole and begun == seq:
            assert large.blob is not None
            large.written = large.blob.size
            large.then = buffers
            self._frames[call, seq] = large
            return
        if large is not None:
            self._abandon(large)
        if whole:
            return  # the agent has answered the call itself meanwhile
        self._frames[call, seq] = Large(call, "", None, 0, buffers)
        self._send(self._frames[call, seq])

    def _abandon(self, large: Large) -> None:
        if self.connection is not None:
            self.connection.abandon(large)
        assert large.blob is not None
        os.close(large.blob.fd)

    def add_together(self, calls: list[int], buffers: list[Buffer]) -> None:
        """Keep and send the outcomes (results or errors) of several calls.

        Each outcome is kept until the client acknowledges it.

        Args:
            calls: the ids of the calls.
            buffers: the one frame (message) that has all these outcomes.
        """
        self._together.update(dict.fromkeys(calls, buffers))
        if self.connection is not None:
            self.connection.send(buffers)

    def _send(self, large: Large) -> None:
        if self.connection is None:
            return
        if large.blob is None and large.then is not None:
            self.connection.send(large.then, large.call)
        else:
            self.connection.send_large(large)

    def add_output(self, header: Mapping[str, object], data: bytes) -> None:
        """Keep output of a call until it is acknowledged, and send it.

        Args:
            header: the header of its OUTPUT frame (message), which is not changed. The frame also gets a number, by
                which the client acknowledges it.
            data: the output.
        """
        self._next += 1
        buffers = frame(Kind.OUTPUT, {**header, "seq": self._next}, [data])
        self._output.append((self._next, len(data), buffers))
        self._output_size += len(data)
        if self.connection is not None:
            self.connection.send(buffers)

    @property
    def output_size(self) -> int:
        """The number of bytes of output that the client has not acknowledged."""
        return self._output_size

    def acknowledge(self, calls: list[int], output: int) -> None:
        """Forget outcomes (results or errors) and output that the client has received. Unknown ids are ignored.

        Args:
            calls: the ids of the calls whose outcomes the client has.
            output: the number of the last piece of output that the client has; 0 for none.
        """
        for call in calls:
            if self._together.pop(call, None) is None:
                self._forget((call, 0))
        while self._output and self._output[0][0] <= output:
            self._output_size -= self._output.popleft()[1]

    def consumed(self, call: int, seq: int) -> None:
        """Forget the items of a call's stream up to and including number `seq`, because the client has taken them."""
        for key in [key for key in self._frames if key[0] == call and 0 < key[1] <= seq]:
            self._forget(key)

    def _forget(self, key: tuple[int, int]) -> None:
        large = self._frames.pop(key, None)
        if large is not None and large.blob is not None:
            if self.connection is not None:  # the connection may be sending it again
                self.connection.abandon(large)
            self._kept.give(large.blob)

    def resend(self, connection: Connection) -> None:
        """Use a new connection from now on, and send everything that was not acknowledged over this connection.

        Printed output is sent first. A large value that a worker process still writes is sent again from its beginning.
        """
        self.connection = connection
        for _, _, buffers in self._output:
            connection.send(buffers)
        for large in [*self._frames.values(), *(large for _, large in self._begun.values())]:
            self._send(large)
        for buffers in {id(each): each for each in self._together.values()}.values():
            connection.send(buffers)

    def knows(self, call: int) -> bool:
        """Return True if the outcome (result or error) of a call was added here and the client has not acknowledged it.

        Stream items of a call, and a large value that is still being written, do not count.
        """
        return (call, 0) in self._frames or call in self._together

    def knows_any(self, calls: list[int]) -> bool:
        """Return True if the outcome (result or error) of at least one of these calls is kept here.

        Returns False for an empty list.
        """
        if not self._together.keys().isdisjoint(calls):
            return True
        return bool(self._frames) and any((call, 0) in self._frames for call in calls)

    @property
    def calls(self) -> list[int]:
        """The ids of the calls whose outcomes (results or errors) are kept here, as a new list.

        The list is empty if the client has acknowledged all outcomes.
        """
        return [*(call for call, seq in self._frames if seq == 0), *self._together]
