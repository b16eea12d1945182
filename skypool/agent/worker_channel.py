"""Sends and receives a worker's packets to and from the agent.

A large value is not in a packet. The value is in memory or in a file, whose file descriptor is sent with a packet.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from skypool.agent import value_storage
from skypool.agent.packets import CLOEXEC, PACKET, SPACE, descriptors, rights
from skypool.agent.shared_page import SharedPage
from skypool.wire.frames import INLINE, Buffer, Frame, Kind, cut, encode, pad, parse_frame

_STEP = 4 << 20
"""The number of bytes of a large value after which the agent is told how much of it is written."""
_LOOK = 50
"""Milliseconds after which a waiting thread checks whether another thread has received its packet."""
_TO_BE_KILLED = 15.0
"""Seconds in which the keeper has killed all that writes files, when the agent has ended."""


def await_end(page: SharedPage) -> None:
    """Wait for the keeper to kill this process, whose agent is gone, if the mover must know first what it writes."""
    if page.mover:
        time.sleep(_TO_BE_KILLED)


class WorkerChannel:
    """A worker's end of its connection to the agent. Several threads may share it.

    Args:
        slot: the number of the worker's slot on the node.
        agent: the packet socket to the agent.
        page: tells whether files are saved.
        folder: the folder for files of values that are too large for memory.
        spool_memory: the largest size in bytes of a value in memory; None for half of the available memory.
        on_drop: called with the key of a `pool.put()` value that must be forgotten.

    Attributes:
        call: the id of the running call, 0 for none. Packets for other calls are dropped, except answers to `fetch`.
        arrived: packets that no thread has taken yet, with their file descriptors.
    """

    def __init__(
        self,
        slot: int,
        agent: socket.socket,
        page: SharedPage,
        folder: str,
        spool_memory: int | None,
        on_drop: Callable[[str], object],
    ) -> None:
        self.socket = agent
        self.call = 0
        self.arrived: list[tuple[Frame, list[int]]] = []
        self._slot = slot
        self._page = page
        self._folder = folder
        self._spool_memory = spool_memory
        self._on_drop = on_drop
        self._buffer = bytearray(PACKET)
        self._reading = threading.Lock()
        self._waiting = select.poll()
        self._waiting.register(agent, select.POLLIN)

    def send(self, kind: Kind, header: dict[str, Any], buffers: list[Buffer]) -> None:
        """Send a packet to the agent. Waits while the socket is full.

        If the buffers exceed `INLINE` (64 Ki) bytes together, they are first written to memory or to a file. The packet
        then has their size in place of a body, and its header must have the call's "id".

        Raises:
            SpoolFull: there is no room for a large value.
            BrokenPipeError, ConnectionResetError: the agent is gone.
        """
        padded, total = pad(buffers)
        if total <= INLINE:
            self._send([encode(kind, header, total), *padded])
            return
        self._write(header["id"], header.get("seq", 0), buffers, total)
        self._send([encode(kind, {**header, "blob": total})])

    def _send(self, buffers: list[Buffer], fds: Collection[int] = ()) -> None:
        try:
            self.socket.sendmsg(buffers, rights([*fds]))
        except (BrokenPipeError, ConnectionResetError):
            await_end(self._page)  # an error would have the call close its files
            raise

    def _write(self, call: int, seq: int, buffers: list[Buffer], total: int) -> None:
        """Write a large value to storage. After each `_STEP` bytes, tell the agent, which sends them meanwhile."""
        fd = value_storage.create_storage(total, self._folder, self._spool_memory, self._used_memory)
        first = [fd]
        at = 0
        try:
            for piece in cut(buffers, _STEP):
                value_storage.write_all(fd, piece)
                at += sum(map(len, piece))
                self._send([encode(Kind.BLOB, {"id": call, "seq": seq, "at": at, "size": total})], first)
                first = []
        except OSError as e:
            if isinstance(e, (BrokenPipeError, ConnectionResetError)):
                raise
            raise value_storage.full(total, self._folder, e) from e
        finally:
            os.close(fd)

    def _used_memory(self, size: int) -> int | None:
        """Ask the agent for memory of an earlier value. Return its file descriptor; None if none fits `size` bytes."""
        if size < value_storage.WORTH_KEEPING:
            return None
        _, fds = self.fetch("memory", str(size))
        return fds[0] if fds else None

    def receive(self, wanted: Callable[[Frame], bool]) -> tuple[Frame, list[int]]:
        """Wait for a packet from the agent that `wanted` accepts. Return the packet and its file descriptors.

        There is no time limit. Several threads may wait at the same time; packets that are not accepted are kept for
        the others. The process ends with status 0 if the agent is gone.
        """
        while True:
            with self._reading:
                for index, (arrived, fds) in enumerate(self.arrived):
                    if wanted(arrived):
                        del self.arrived[index]
                        return arrived, fds
                if self._waiting.poll(_LOOK):
                    self._take_in()

    def drain(self) -> None:
        """Receive the packets that have arrived, without waiting for more, and keep them for `receive`.

        Values of `pool.put()` that must be forgotten are passed to `on_drop`. The process ends if the agent is gone.
        """
        with self._reading:
            while self._waiting.poll(0):
                self._take_in()

    def forget_arrived(self) -> None:
        """Drop the packets that no thread has taken, and close their file descriptors."""
        while self.arrived:
            for fd in self.arrived.pop()[1]:
                os.close(fd)

    def _take_in(self) -> None:
        """Wait for one packet, and keep it unless it is for another call. The caller must hold the lock `_reading`."""
        n, ancillary, _, _ = self.socket.recvmsg_into([self._buffer], SPACE, CLOEXEC)
        if not n:
            await_end(self._page)
            os._exit(0)  # the agent is gone
        packet = parse_frame(memoryview(self._buffer)[:n])
        if packet.kind == Kind.DROP:
            self._on_drop(packet.header["key"])
        elif packet.kind == Kind.FETCH or packet.header["id"] == self.call:
            # copied, because the next packet overwrites the buffer
            self.arrived.append((packet._replace(body=memoryview(bytearray(packet.body))), descriptors(ancillary)))
            return
        for fd in descriptors(ancillary):  # of a call that is over
            os.close(fd)

    def fetch(self, what: str, key: str) -> tuple[Frame, list[int]]:
        """Ask the agent for a function, object, module or memory. Wait for the answer: its packet and file descriptors.

        If the node lacks a function, object or module, the packet's header has `"found": False`. If it lacks memory,
        there is no file descriptor. The process ends if the agent is gone.

        Args:
            what: "function", "object", "module" or "memory" (of an earlier large value, to be used again).
            key: the key of the function or object; "NAME VERSION" of the module; or the bytes of memory, as text.
        """
        self.send(Kind.FETCH, {"what": what, "key": key, "slot": self._slot}, [])
        return self.receive(lambda f: f.kind == Kind.FETCH and f.header["what"] == what and f.header["key"] == key)
