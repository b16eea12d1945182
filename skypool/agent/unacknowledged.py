"""Keeps outcomes, stream items and output until the client acknowledges them. Sends them again after a reconnection.

Stream items are what a generator call yields.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping

from skypool.agent.connection import Connection, Large
from skypool.agent.messages import Written
from skypool.agent.value_storage import Blob, SpareMemory
from skypool.wire.frames import Buffer, Kind, frame


class Unacknowledged:
    """Outcomes, stream items and output that the client has not acknowledged.

    Everything that is added is also sent at once, if a client is connected. `connection` is the connection to it, or
    None. `kept` takes over the memory of large values that were acknowledged.
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

    def on_written(self, told: Written, fds: list[int], wanted: bool) -> None:
        """Note how much of a large value a worker has written, so that this part can be sent.

        Args:
            told: what the worker has said.
            fds: the file descriptors that came with that: the value's in the first packet about it, later none.
            wanted: False if the agent itself has ended the call. The file descriptor is then closed.
        """
        if fds and wanted:
            self.begin(told.id, told.seq, Blob(fds[0], told.size))
        elif fds:
            os.close(fds[0])
        self.written(told.id, told.at)

    def begin(self, call: int, seq: int, blob: Blob) -> None:
        """Start to send a large value to the client while a worker is still writing it.

        Only the part that `written` has announced is sent. `seq` is 0 for an outcome, else the number of the stream
        item. This object closes the file of `blob` later.
        """
        large = Large(call, call if seq == 0 else f"{call}:{seq}", blob, 0, None)
        self._begun[call] = (seq, large)
        self._send(large)

    def written(self, call: int, size: int) -> None:
        """Note that a worker has written the first `size` bytes of a call's large value, which can be sent now.

        Does nothing if `begin` was not called for a value of this call.
        """
        if call in self._begun:
            self._begun[call][1].written = size

    def add(self, call: int, seq: int, buffers: list[Buffer], whole: bool = False) -> None:
        """Keep and send a frame with an outcome or stream items of a call.

        Args:
            seq: 0 for an outcome, else the number of the last item.
            buffers: the frame.
            whole: True if the frame refers to the large value that `begin` got, which is complete now. The frame is
                sent after that value, or dropped if there is none. If False, such a value is dropped, because its
                worker will not finish it.
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
        """Send one frame with the outcomes of these calls, and keep it until the client has acknowledged them all."""
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
        """Keep and send output of a call. The OUTPUT frame gets a number, by which the client acknowledges it."""
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
        """Forget the outcomes of these calls, and output up to the number `output`, because the client has them.

        The number is that of an OUTPUT frame; 0 for none. Unknown ids are ignored.
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
        """Use a new connection from now on, and send everything that was not acknowledged over it.

        Printed output is sent first. A large value that a worker still writes is sent again from its beginning.
        """
        self.connection = connection
        for _, _, buffers in self._output:
            connection.send(buffers)
        for large in [*self._frames.values(), *(large for _, large in self._begun.values())]:
            self._send(large)
        for buffers in {id(each): each for each in self._together.values()}.values():
            connection.send(buffers)

    def knows(self, call: int) -> bool:
        """Return True if the outcome of a call was added here and the client has not acknowledged it.

        Stream items do not count, and neither does a large value that is still being written.
        """
        return (call, 0) in self._frames or call in self._together

    def knows_any(self, calls: list[int]) -> bool:
        """Return True if the outcome of at least one of these calls is kept here."""
        if not self._together.keys().isdisjoint(calls):
            return True
        return bool(self._frames) and any((call, 0) in self._frames for call in calls)

    @property
    def calls(self) -> list[int]:
        """The ids of the calls whose outcomes are kept here, as a new list."""
        return [*(call for call, seq in self._frames if seq == 0), *self._together]
