"""Matches printed output to the call that printed it, limits its amount, and sends it to the client.

This runs in the agent, the main process of a node.
"""

from __future__ import annotations

import contextlib
import os

from skypool.agent.call import NodeCall
from skypool.agent.call_queue import CallQueue
from skypool.agent.capture import captured
from skypool.agent.client import OUTPUT_WINDOW, Client
from skypool.agent.slots import SERVICE, TAIL, Slot, Slots

_OUTPUT_LIMIT = 10 << 20
"""The greatest number of bytes of one call's output that are sent to the client."""


class CallOutput:
    """A handler of the text that the worker processes of this node print.

    Args:
        slots: the slots (places where one call runs at a time) and their workers.
        queue: the calls that have not ended.
        client: sends the output to the user's process.

    Attributes:
        apart: keys of functions that write directly to file descriptor 1 or 2, not through `sys.stdout` or
            `sys.stderr`. Calls of these functions must not be batched (several calls in one message): their output does
            not show which call wrote it.
    """

    def __init__(self, slots: Slots, queue: CallQueue, client: Client) -> None:
        self._slots = slots
        self._queue = queue
        self._client = client
        self.apart: set[str] = set()

    def read(self, slot: Slot, fd: int) -> None:
        """Handle output that a worker's process or its children wrote directly to a file descriptor.

        Reads at most 64 KiB, and does not wait. The function of the running call is added to `apart`, so that its later
        calls are not batched. When the output has ended, the agent's loop no longer watches the file descriptor.

        Args:
            slot: the worker's slot (the place where it runs calls).
            fd: 1 for stdout, 2 for stderr.
        """
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
        """Send a call's output to the client, up to two limits, and keep the last bytes of the output in the slot.

        The limits are 10 MiB for each call, and 4 MiB of all calls' output that the client has not acknowledged. The
        first one does not apply to services. Bytes beyond the limits are dropped, and counted in the call's `dropped`.
        Once bytes were dropped, all others are, until there is room for 2 MiB. So gaps are few, and each one is told
        where it is. Output of a silent call is not sent, but its last bytes are kept.

        Args:
            slot: the slot that the output comes from.
            id_: the id of the call that printed it; 0 if no call was running.
            fd: 1 for stdout, 2 for stderr.
            data: the output.
        """
        if slot.tail_of != id_:
            slot.tail_of = id_
            slot.tail.clear()
        _append(slot.tail, data)
        call = self._queue.get(id_)
        unread = self._client.unacknowledged.output_size
        if call is not None and call.silent:
            return
        if call is not None:
            room = OUTPUT_WINDOW - unread
            if call.kind != SERVICE:
                room = min(room, _OUTPUT_LIMIT - call.printed)
            if call.dropped and room >= OUTPUT_WINDOW // 2:
                self.end_gap(slot, call)
            if call.dropped or len(data) > room:
                data = _shortened(call, fd, data, 0 if call.dropped else max(0, room))
            call.printed += len(data)
        elif unread > OUTPUT_WINDOW:
            return
        if data:
            self._client.unacknowledged.add_output(_header(slot, id_, fd), data)

    def end_gap(self, slot: Slot, call: NodeCall) -> None:
        """Tell the client that output of a call was dropped, and send it the last of the dropped bytes.

        A message on stderr says how many bytes stay dropped. At most `TAIL` (4096) of the bytes that were dropped of
        stdout follow, and as many of stderr, each as what they were. Then `call.dropped` is 0. Does nothing if no bytes
        were dropped.
        """
        if call.dropped:
            lasts = {fd: _last_lines(end) for fd, end in sorted(call.ends.items())}
            withheld = call.dropped - sum(map(len, lasts.values()))
            line = f"\n[skypool] {call.name} printed too much, too fast: {withheld:,} bytes dropped here\n"
            self._client.unacknowledged.add_output(_header(slot, call.id, 2), line.encode())
            for fd, last in lasts.items():
                self._client.unacknowledged.add_output(_header(slot, call.id, fd), last)
            call.dropped = 0
            call.ends.clear()

    @staticmethod
    def tail(slot: Slot, call: NodeCall) -> str:
        """Return the end of a call's output, decoded from its last `TAIL` (4096) bytes. Invalid UTF-8 is replaced.

        Returns "" if the call has printed nothing, or if another call on the same slot has printed since. What a call
        with `output="capture"` has printed is taken from its file.
        """
        if printed := captured(slot.printed, TAIL):
            return printed
        return slot.tail[-TAIL:].decode("utf-8", "replace") if slot.tail_of == call.id else ""

    @staticmethod
    def last_line(slot: Slot) -> str:
        """Return the last line that was printed on a slot while no call ran, or a general reason if there is none."""
        text = slot.tail.decode("utf-8", "replace") if not slot.tail_of else ""
        return (text.strip().splitlines() or ["its processes end at once"])[-1]


def _shortened(call: NodeCall, fd: int, data: bytes, room: int) -> bytes:
    """Return the lines of a call's output for which there is room, and note what is dropped after them."""
    stop = data.rfind(b"\n", 0, room) + 1
    call.dropped += len(data) - stop
    _append(call.ends.setdefault(fd, bytearray()), data[stop:])
    return data[:stop]


def _append(tail: bytearray, data: bytes) -> None:
    """Append output to the end of a call's output that is kept, of which at least `TAIL` (4096) bytes stay."""
    tail += data
    if len(tail) > 4 * TAIL:
        del tail[:-TAIL]


def _last_lines(tail: bytes | bytearray) -> bytes:
    """Return the last `TAIL` (4096) bytes, from the beginning of a line if there is one, so that no line is halved."""
    last = bytes(tail[-TAIL:])
    return last if len(tail) < TAIL else last.partition(b"\n")[2] or last


def _header(slot: Slot, id_: int, fd: int) -> dict[str, object]:
    """Return the header of the OUTPUT frame (message) for output of a call, without the frame's number.

    Args:
        slot: the slot that the output comes from.
        id_: the id of the call; 0 if no call was running.
        fd: 1 for stdout, 2 for stderr.
    """
    header: dict[str, object] = {"id": id_, "fd": fd, "slot": slot.number}
    if slot.member is not None:
        header |= {"rank": slot.member.rank, "label": slot.label}
    return header
