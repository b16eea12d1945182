"""A worker's side of the packets that pass between it and the agent, large values included."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable
from typing import Any

from skypool.agent import value_storage
from skypool.agent.packets import CLOEXEC, PACKET, SPACE, descriptors, rights
from skypool.wire.frames import INLINE, Buffer, Frame, Kind, cut, encode, pad, parse_frame

_STEP = 4 << 20
"""Bytes of a large value that are written before the agent is told."""
_LOOK = 50
"""Milliseconds after which a thread that waits for a packet looks whether another one has taken it in."""


class WorkerChannel:
    """Packets to and from the agent, of one worker alone.

    Args:
        slot: which slot the worker fills.
        agent: the packet socket.
        folder: where values go that are too large for memory.
        spool_memory: bytes of the largest value kept in memory, None for half of what is free.
        on_drop: called with the key of a value of `pool.put` that is to be forgotten.

    Attributes:
        call: the call that runs, 0 for none. Packets of other calls are thrown away.
        arrived: packets that nobody has taken yet, with their file descriptors.
    """

    def __init__(
        self, slot: int, agent: socket.socket, folder: str, spool_memory: int | None, on_drop: Callable[[str], object]
    ) -> None:
        self.socket = agent
        self.call = 0
        self.arrived: list[tuple[Frame, list[int]]] = []
        self._slot = slot
        self._folder = folder
        self._spool_memory = spool_memory
        self._on_drop = on_drop
        self._buffer = bytearray(PACKET)
        self._reading = threading.Lock()
        self._waiting = select.poll()
        self._waiting.register(agent, select.POLLIN)

    def send(self, kind: Kind, header: dict[str, Any], buffers: list[Buffer]) -> None:
        """Send a packet; what is too large for one is written to a file that the agent reads, before the packet.

        Raises:
            SpoolFull: there is no room for such a file.
        """
        padded, total = pad(buffers)
        if total <= INLINE:
            self.socket.sendmsg([encode(kind, header, total), *padded])
            return
        self._write(header["id"], header.get("seq", 0), buffers, total)
        self.socket.sendmsg([encode(kind, {**header, "blob": total})])

    def _write(self, call: int, seq: int, buffers: list[Buffer], total: int) -> None:
        """Write a large value where the agent reads it, and sends on what is there while the rest is written."""
        fd = value_storage.create_storage(total, self._folder, self._spool_memory, self._used_memory)
        first = rights([fd])
        at = 0
        try:
            for piece in cut(buffers, _STEP):
                value_storage.write_all(fd, piece)
                at += sum(map(len, piece))
                self.socket.sendmsg([encode(Kind.BLOB, {"id": call, "seq": seq, "at": at, "size": total})], first)
                first = []
        except OSError as e:
            if isinstance(e, (BrokenPipeError, ConnectionResetError)):
                raise
            raise value_storage.full(total, self._folder, e) from e
        finally:
            os.close(fd)

    def _used_memory(self, size: int) -> int | None:
        if size < value_storage.WORTH_KEEPING:
            return None
        _, fds = self.fetch("memory", str(size))
        return fds[0] if fds else None

    def receive(self, wanted: Callable[[Frame], bool]) -> tuple[Frame, list[int]]:
        """Return the next packet from the agent that is `wanted`; any thread may wait for one."""
        while True:
            with self._reading:
                for index, (arrived, fds) in enumerate(self.arrived):
                    if wanted(arrived):
                        del self.arrived[index]
                        return arrived, fds
                if self._waiting.poll(_LOOK):
                    self._take_in()

    def drain(self) -> None:
        """Take in what the agent sent and nobody waited for."""
        with self._reading:
            while self._waiting.poll(0):
                self._take_in()

    def forget_arrived(self) -> None:
        """Throw away what arrived for a call that has ended."""
        while self.arrived:
            for fd in self.arrived.pop()[1]:
                os.close(fd)

    def _take_in(self) -> None:
        n, ancillary, _, _ = self.socket.recvmsg_into([self._buffer], SPACE, CLOEXEC)
        if not n:
            os._exit(0)  # the agent is gone
        packet = parse_frame(memoryview(self._buffer)[:n])
        if packet.kind == Kind.DROP:
            self._on_drop(packet.header["key"])
        elif packet.kind == Kind.FETCH or packet.header["id"] == self.call:
            # the next packet overwrites the buffer
            self.arrived.append((packet._replace(body=memoryview(bytearray(packet.body))), descriptors(ancillary)))

    def fetch(self, what: str, key: str) -> tuple[Frame, list[int]]:
        """Ask the agent for something of the node: "function", "object", "module" or "memory"."""
        self.send(Kind.FETCH, {"what": what, "key": key, "slot": self._slot}, [])
        return self.receive(lambda f: f.kind == Kind.FETCH and f.header["what"] == what and f.header["key"] == key)
