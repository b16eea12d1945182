"""Sends and receives a worker's packets (messages) to and from the agent, the main process of a node.

A large value is not in a packet. The value is in memory or in a file, and the file descriptor of the memory or file is
sent with a packet.
"""

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
"""The number of bytes of a large value that are written before the agent is told."""
_LOOK = 50
"""Milliseconds after which a waiting thread checks whether another thread has received its packet."""


class WorkerChannel:
    """A worker's end of its connection to the agent (the node's main process). Several threads may share it.

    Args:
        slot: the number of the worker's slot (place where one call runs at a time).
        agent: the packet socket to and from the agent.
        folder: the folder for values that are too large for memory.
        spool_memory: the size in bytes of the largest value kept in memory; None for half of the free memory.
        on_drop: called with the key of a `pool.put()` value that must be forgotten.

    Attributes:
        socket: the packet socket.
        call: the id of the running call, 0 for none. Packets for other calls are dropped, except answers to `fetch`.
        arrived: packets (messages) that no thread has taken yet, with their file descriptors.
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
        """Send a packet (message) to the agent (the node's main process). Waits while the socket is full.

        If the buffers exceed `INLINE` (64 Ki) bytes together, they are first written to memory or to a file. The packet
        then has their size in place of a body.

        Args:
            kind: the kind of the packet.
            header: its header. It is not changed. For a large value it must have the call's "id".
            buffers: its body, which may be empty.

        Raises:
            SpoolFull: there is no room for a large value.
            BrokenPipeError, ConnectionResetError: the agent is gone.
        """
        padded, total = pad(buffers)
        if total <= INLINE:
            self.socket.sendmsg([encode(kind, header, total), *padded])
            return
        self._write(header["id"], header.get("seq", 0), buffers, total)
        self.socket.sendmsg([encode(kind, {**header, "blob": total})])

    def _write(self, call: int, seq: int, buffers: list[Buffer], total: int) -> None:
        """Write a large value to memory or to a file. After each 4 MiB (`_STEP`), tell the agent how much is written.

        Meanwhile the agent (the node's main process) sends what is written to the client. Returns when all is written.

        Args:
            call: the id of the call that the value belongs to.
            seq: 0 for the call's outcome (result or error), else the number of the stream item.
            buffers: the value.
            total: the size of the value in bytes, with padding.

        Raises:
            SpoolFull: there is no room for the value. The agent may have part of it already.
            BrokenPipeError, ConnectionResetError: the agent is gone.
        """
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
        """Ask the agent for memory of an earlier value, wait for the answer, and return the memory's file descriptor.

        Returns None if the agent (the node's main process) has no memory that fits. If `size` is below `WORTH_KEEPING`
        (4 Mi) bytes, returns None without asking.
        """
        if size < value_storage.WORTH_KEEPING:
            return None
        _, fds = self.fetch("memory", str(size))
        return fds[0] if fds else None

    def receive(self, wanted: Callable[[Frame], bool]) -> tuple[Frame, list[int]]:
        """Wait for a packet (message) from the agent that `wanted` accepts. Return the packet and its file descriptors.

        There is no time limit. Several threads may wait at the same time. The process ends with status 0 if the agent
        (the node's main process) is gone.

        Args:
            wanted: called with a packet, maybe more than once for the same packet. Returns True to accept the packet.
                Packets that it does not accept are kept for other threads.
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
        """Receive the packets (messages) that have arrived, without waiting for more, and keep them for `receive`.

        Keys of `pool.put()` values that must be forgotten are passed to `on_drop`. The process ends if the agent (the
        node's main process) is gone.
        """
        with self._reading:
            while self._waiting.poll(0):
                self._take_in()

    def forget_arrived(self) -> None:
        """Drop the packets (messages) that no thread has taken, and close their file descriptors."""
        while self.arrived:
            for fd in self.arrived.pop()[1]:
                os.close(fd)

    def _take_in(self) -> None:
        """Wait for one packet (message), and keep it in `arrived` unless it is for another call.

        A packet that names a `pool.put()` value to forget is passed to `on_drop`. The process ends with status 0 if the
        agent (the node's main process) is gone. The caller must hold the lock `_reading`.
        """
        n, ancillary, _, _ = self.socket.recvmsg_into([self._buffer], SPACE, CLOEXEC)
        if not n:
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
        """Ask the agent for a function, object, module or memory. Return the answer: its packet and file descriptors.

        Waits for the answer. If the agent (the node's main process) lacks the function, object or module, the packet's
        header has `"found": False`. If it lacks memory, the list of file descriptors is empty. The process ends if the
        agent is gone.

        Args:
            what: "function", "object" (a value of `pool.put()`), "module" or "memory" (of an earlier large value).
            key: the key of the function or object, the name of the module, or the number of bytes of memory, as text.
        """
        self.send(Kind.FETCH, {"what": what, "key": key, "slot": self._slot}, [])
        return self.receive(lambda f: f.kind == Kind.FETCH and f.header["what"] == what and f.header["key"] == key)
