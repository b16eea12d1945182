"""Output of calls in the agent: matches it to the call that printed it, limits it, and sends it to the client."""

from __future__ import annotations

import contextlib
import os

from skypool.agent.call import NodeCall
from skypool.agent.call_queue import CallQueue
from skypool.agent.client import OUTPUT_WINDOW, Client
from skypool.agent.slots import TAIL, Slot, Slots

_OUTPUT_LIMIT = 10 << 20
"""Bytes of output of one call that are sent on."""


class CallOutput:
    """Takes in what workers print.

    Attributes:
        apart: keys of functions that write to their file descriptors: their calls must run one by one, for nothing in
            such data says which of several calls wrote it.
    """

    def __init__(self, slots: Slots, queue: CallQueue, client: Client) -> None:
        self._slots = slots
        self._queue = queue
        self._client = client
        self.apart: set[str] = set()

    def read(self, slot: Slot, fd: int) -> None:
        """Take in what a worker's process, or a child of it, wrote straight to its file descriptor 1 or 2."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(slot.outputs[fd], 64 << 10)
            if not data:
                self._slots.ignore(slot.outputs[fd])
                return
            id_ = self._slots.page.running(slot.number)[0]
            if (call := self._queue.get(id_)) is not None:
                self.apart.add(call.fn)
            self.add(slot, id_, fd, data)

    def add(self, slot: Slot, id_: int, fd: int, data: bytes) -> None:
        """What a call printed, 0 for none of them."""
        if slot.tail_of != id_:
            slot.tail_of = id_
            slot.tail.clear()
        slot.tail += data
        if len(slot.tail) > 4 * TAIL:
            del slot.tail[:-TAIL]
        call = self._queue.get(id_)
        unread = self._client.unacknowledged.output_size
        if call is not None and call.silent:
            return
        if call is not None:
            room = max(0, min(_OUTPUT_LIMIT - call.printed, OUTPUT_WINDOW - unread))
            call.dropped += max(0, len(data) - room)
            data = data[:room]
            call.printed += len(data)
        elif unread > OUTPUT_WINDOW:
            return
        if data:
            self._client.unacknowledged.add_output({"id": id_, "fd": fd, "slot": slot.number}, data)

    def end(self, slot: Slot, call: NodeCall) -> None:
        """Say what the limit withheld, and show the end of it."""
        if call.dropped:
            last = bytes(slot.tail[-min(TAIL, call.dropped) :]) if slot.tail_of == call.id else b""
            withheld = call.dropped - len(last)
            line = f"\n[skypool] {call.name} printed too much, too fast: {withheld:,} bytes dropped here\n"
            self._client.unacknowledged.add_output({"id": call.id, "fd": 2, "slot": slot.number}, line.encode() + last)
            call.dropped = 0

    @staticmethod
    def tail(slot: Slot, call: NodeCall) -> str:
        """The last lines that a call printed."""
        return slot.tail[-TAIL:].decode("utf-8", "replace") if slot.tail_of == call.id else ""
