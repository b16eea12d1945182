"""Stores functions, `pool.put()` objects and user modules in the agent, and sends them to workers on request."""

from __future__ import annotations

import os
from typing import Any

from skypool.agent import value_storage
from skypool.agent.packages import Packages
from skypool.agent.value_storage import Blob, SpareMemory
from skypool.agent.worker_processes import Slot, Slots
from skypool.errors import SpoolFull, protocol_violation
from skypool.wire.frames import Buffer, Frame, Kind, encode, frame

Shelf = dict[str, tuple[dict[str, Any], bytes | Blob]]


class Arrivals:
    """Large values that arrive from the client in pieces. Each piece is written to its storage at once.

    Args:
        folder: the folder for files of values that are too large for memory.
        memory: the largest size in bytes of a value in memory; None for half of the available memory.
        kept: memory of an earlier value, which is used again if it fits.
    """

    def __init__(self, folder: str, memory: int | None, kept: SpareMemory) -> None:
        self._folder = folder
        self._memory = memory
        self._kept = kept
        self._blobs: dict[int | str, tuple[Blob | SpoolFull, int]] = {}

    def add(self, f: Frame) -> None:
        """Write one piece of a large value, a BLOB frame, to its storage. The first piece creates the storage.

        If there is no room for the value, nothing is raised: the pieces are dropped, and `take` returns a SpoolFull
        error later. Raises ProtocolError if the piece does not follow those before it or exceeds the value's size, or
        if the value is empty.
        """
        key = f.header["key"]
        at = f.header["at"]
        size = f.header["size"]
        if at == 0:
            if size <= 0 or key in self._blobs:
                fault = f"the large value {key!r} twice" if key in self._blobs else f"a large value of {size} bytes"
                raise protocol_violation(f"the client began to send {fault}")
            self._blobs[key] = (self._room(size), 0)
        blob, arrived = self._blobs.get(key, (None, -1))
        if blob is None or at != arrived or at + len(f.body) > size:
            raise protocol_violation(
                f"the client sent {len(f.body)} bytes of the large value {key!r} of {size} bytes at byte {at} instead "
                f"of byte {max(arrived, 0)}"
            )
        if isinstance(blob, Blob):
            try:
                value_storage.write_all(blob.fd, [f.body])
            except OSError as e:
                os.close(blob.fd)
                blob = value_storage.full(size, self._folder, e)
        self._blobs[key] = (blob, arrived + len(f.body))

    def _room(self, size: int) -> Blob | SpoolFull:
        """Return storage for a value of `size` bytes. If there is no room, return (not raise) the SpoolFull error."""
        try:
            return Blob(value_storage.create_storage(size, self._folder, self._memory, self._kept.take), size)
        except SpoolFull as e:
            return e

    def take(self, key: int | str) -> Blob | SpoolFull:
        """Remove and return a value that has arrived completely. The caller must close its file descriptor.

        If there was no room for the value, a SpoolFull error is returned, not raised. Raises ProtocolError if the value
        has not arrived completely, or was taken before.
        """
        blob, arrived = self._blobs.pop(key, (None, 0))
        if blob is None or (isinstance(blob, Blob) and arrived != blob.size):
            raise protocol_violation(
                f"the client sent a message that refers to the large value {key!r}, of which only {arrived} bytes have "
                "arrived"
            )
        return blob

    def take_of(self, f: Frame) -> Blob | SpoolFull | None:
        """Remove and return the large value that a frame refers to; None if it refers to none.

        The frame must not be a CALL. If there was no room for the value, a SpoolFull error is returned, not raised.
        Raises ProtocolError if the value has not arrived completely.
        """
        return self.take(f.header["key"]) if "blob" in f.header else None

    def discard(self, f: Frame) -> None:
        """Forget the large value that a frame refers to, if any, and close its storage.

        Raises ProtocolError if the value has not arrived completely.
        """
        if "blob" in f.header:
            # the key of a call's arguments is the call's id
            blob = self.take(f.header["key" if "key" in f.header else "id"])
            if isinstance(blob, Blob):
                os.close(blob.fd)

    def clear(self) -> None:
        """Drop all values that no frame has referred to yet, complete or not, and close their storage.

        Used when the connection has ended. On the next one, the client sends these values again from the start.
        """
        for blob, _ in self._blobs.values():
            if isinstance(blob, Blob):
                os.close(blob.fd)
        self._blobs.clear()


class Store:
    """Functions, `pool.put()` objects and user modules of a node, which its workers request.

    Attributes:
        functions: the functions by key, each as (header of the frame in which it came, pickle).
        objects: the `pool.put()` objects in the same form.
        packages: the user's modules.
    """

    def __init__(
        self,
        packages: Packages,
        slots: Slots,
        arrivals: Arrivals,
        kept: SpareMemory,
    ) -> None:
        self.packages = packages
        self._slots = slots
        self._arrivals = arrivals
        self._kept = kept
        self.functions: Shelf = {}
        self.objects: Shelf = {}
        self._coming: dict[tuple[str, str], dict[str, Any]] = {}
        self._wanted: dict[tuple[str, str], list[Slot]] = {}

    def keep(self, what: str, f: Frame) -> None:
        """Store a value from the client, and send it to the workers that wait for it.

        `what` is "function" or "object". A frame with "coming" in its header only announces a large value, whose pieces
        follow. A value that is stored already is dropped. If there was no room for a large value, workers get a
        SpoolFull error in its place. Raises ProtocolError if a large value has not arrived completely.
        """
        shelf = self._shelf(what)
        key = f.header["key"]
        if f.header.get("coming"):
            self._coming[what, key] = f.header
            return
        self._coming.pop((what, key), None)
        if key in shelf:
            self._arrivals.discard(f)
            return
        value: bytes | Blob = bytes(f.body)
        header = {**f.header, "found": True}
        if "blob" in header:
            arrived = self._arrivals.take(key)
            if isinstance(arrived, SpoolFull):
                header = {k: v for k, v in header.items() if k != "blob"} | {"full": str(arrived), "lens": []}
            else:
                value = arrived
        shelf[key] = (header, value)
        for slot in self._wanted.pop((what, key), []):
            self._give(slot, what, key)

    def _shelf(self, what: str) -> Shelf:
        return self.functions if what == "function" else self.objects

    def name(self, key: str) -> str:
        """Return the name of a function. Raises ProtocolError if the client never sent or announced it."""
        header = self.functions[key][0] if key in self.functions else self._coming.get(("function", key))
        if header is None:
            raise protocol_violation(f"the client sent a call of the function {key!r}, but never sent that function")
        return str(header["name"])

    def drop(self, key: str) -> None:
        """Forget the `pool.put()` object with this key, on the node and in all workers, if there is one.

        Workers forget it when they next receive packets.
        """
        _, value = self.objects.pop(key, ({}, b""))
        if isinstance(value, Blob):
            os.close(value.fd)
        for slot in self._slots.all:
            self._slots.tell(slot, frame(Kind.DROP, {"key": key}), [])
        self._slots.page.drops += 1

    def fetch(self, slot: Slot, what: str, key: str) -> None:
        """Answer a worker's request at once, or later when the client has sent what the worker needs. Does not wait.

        If a function or object is neither stored nor announced, the worker is told so at once. The answer to "memory"
        has the file descriptor of the memory, or none if no suitable memory is kept.

        Args:
            what: "function", "object", "module" or "memory" (of an earlier large value, to be used again).
            key: the key of the function or object; "NAME VERSION" of the module; or the bytes of memory, as text.
        """
        if what == "memory":
            fds = [] if (fd := self._kept.take(int(key))) is None else [fd]
            self._slots.tell(slot, frame(Kind.FETCH, {"what": what, "key": key}), fds, give=True)
        elif what == "module":
            name, _, version = key.partition(" ")
            self.packages.want(name, version, lambda answer: self._give_module(slot, key, answer))
        elif key in self._shelf(what):
            self._give(slot, what, key)
        elif (what, key) not in self._coming:
            self._miss(slot, what, key)
        else:
            self._wanted.setdefault((what, key), []).append(slot)

    def ask_again(self) -> None:
        """Ask the client again, after a reconnection, for the modules that workers wait for.

        The client sends functions and objects again by itself.
        """
        self.packages.ask_again()

    def wait_no_more(self) -> None:
        """Tell waiting workers that the functions and objects which a former client was sending will not arrive.

        Call this when another client has replaced the former one. Modules are requested from the new client instead.
        """
        never = self._coming
        self._coming = {}
        for what, key in never:
            for slot in self._wanted.pop((what, key), []):
                self._miss(slot, what, key)

    def _miss(self, slot: Slot, what: str, key: str) -> None:
        """Tell a worker that the node lacks the function or object (`what` says which) with this key."""
        self._slots.tell(slot, frame(Kind.FETCH, {"what": what, "key": key, "found": False}), [])

    def forget_worker(self, slot: Slot) -> None:
        """Forget the requests of a worker that has died. The next worker of the slot sends its own."""
        for waiting in self._wanted.values():
            while slot in waiting:
                waiting.remove(slot)

    def _give(self, slot: Slot, what: str, key: str) -> None:
        """Send a worker the stored function or object, or the error that there was no room for it."""
        header, value = self._shelf(what)[key]
        header = {**header, "what": what}
        packet: list[Buffer] = [encode(Kind.FETCH, header)]
        if isinstance(value, bytes):
            packet = [encode(Kind.FETCH, header, len(value)), value]
        self._slots.tell(slot, packet, [value.fd] if isinstance(value, Blob) else [])

    def _give_module(self, slot: Slot, key: str, answer: dict[str, Any]) -> None:
        self._slots.tell(slot, frame(Kind.FETCH, {**answer, "what": "module", "key": key}), [])
