"""What the client has not acknowledged: outcomes, stream items and output, kept and sent again where need be."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from typing import Any

from skypool.agent.connection import Connection, Large
from skypool.agent.value_storage import Blob, SpareMemory
from skypool.wire.frames import Buffer, Kind, frame


class Unacknowledged:
    """What the client must still acknowledge, in the order it was made; sent again after every reconnection."""

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
        """What a worker tells of a large value that it writes; first, it sends the file descriptor along.

        Args:
            wanted: whether nobody has answered the call in its place meanwhile.
        """
        if fds and wanted:
            self.begin(told["id"], told["seq"], Blob(fds[0], told["size"]))
        elif fds:
            os.close(fds[0])
        self.written(told["id"], told["at"])

    def begin(self, call: int, seq: int, blob: Blob) -> None:
        """A worker begins to write the value of an outcome or of stream items: what is written is sent meanwhile."""
        large = Large(call, call if seq == 0 else f"{call}:{seq}", blob, 0, None)
        self._begun[call] = (seq, large)
        self._send(large)

    def written(self, call: int, size: int) -> None:
        """So many bytes of it are there."""
        if call in self._begun:
            self._begun[call][1].written = size

    def add(self, call: int, seq: int, buffers: list[Buffer], whole: bool = False) -> None:
        """Keep and send an outcome (seq 0) or stream items (seq of the last one) of a call.

        Args:
            whole: they refer to the value that was begun. Otherwise that will never be whole.
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
            return  # the call was answered in its worker's place meanwhile
        self._frames[call, seq] = Large(call, "", None, 0, buffers)
        self._send(self._frames[call, seq])

    def _abandon(self, large: Large) -> None:
        if self.connection is not None:
            self.connection.abandon(large)
        assert large.blob is not None
        os.close(large.blob.fd)

    def add_together(self, calls: list[int], buffers: list[Buffer]) -> None:
        """Keep and send the outcomes of several calls, which are in one frame."""
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
        """Keep and send what a call printed."""
        self._next += 1
        buffers = frame(Kind.OUTPUT, {**header, "seq": self._next}, [data])
        self._output.append((self._next, len(data), buffers))
        self._output_size += len(data)
        if self.connection is not None:
            self.connection.send(buffers)

    @property
    def output_size(self) -> int:
        """Bytes of output that the client has not acknowledged."""
        return self._output_size

    def acknowledge(self, calls: list[int], output: int) -> None:
        """Forget the outcomes of these calls, and output up to that number."""
        for call in calls:
            if self._together.pop(call, None) is None:
                self._forget((call, 0))
        while self._output and self._output[0][0] <= output:
            self._output_size -= self._output.popleft()[1]

    def consumed(self, call: int, seq: int) -> None:
        """Forget stream items of a call up to `seq`."""
        for key in [key for key in self._frames if key[0] == call and 0 < key[1] <= seq]:
            self._forget(key)

    def _forget(self, key: tuple[int, int]) -> None:
        large = self._frames.pop(key, None)
        if large is not None and large.blob is not None:
            if self.connection is not None:  # which may be sending it again
                self.connection.abandon(large)
            self._kept.give(large.blob)

    def resend(self, connection: Connection) -> None:
        """Begin again with everything that was not acknowledged."""
        self.connection = connection
        for _, _, buffers in self._output:
            connection.send(buffers)
        for large in [*self._frames.values(), *(large for _, large in self._begun.values())]:
            self._send(large)
        for buffers in {id(each): each for each in self._together.values()}.values():
            connection.send(buffers)

    def knows(self, call: int) -> bool:
        """Whether the outcome of a call waits here."""
        return (call, 0) in self._frames or call in self._together

    def knows_any(self, calls: list[int]) -> bool:
        """Whether the outcome of one of these calls waits here."""
        if not self._together.keys().isdisjoint(calls):
            return True
        return bool(self._frames) and any((call, 0) in self._frames for call in calls)

    @property
    def calls(self) -> list[int]:
        """The calls whose outcomes wait here."""
        return [*(call for call, seq in self._frames if seq == 0), *self._together]
