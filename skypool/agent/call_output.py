"""Matches printed output to the call that printed it, limits its amount, and sends it to the client."""

from __future__ import annotations

import contextlib
import os

from skypool.agent.call import NodeCall
from skypool.agent.call_queue import CallQueue
from skypool.agent.capture import captured
from skypool.agent.client_session import OUTPUT_WINDOW, Client
from skypool.agent.worker_processes import SERVICE, TAIL, Slot, Slots

_OUTPUT_LIMIT = 10 << 20
"""The greatest number of bytes of one call's output that are sent to the client."""


class CallOutput:
    """Handler of the text that the workers of this node print.

    Attributes:
        apart: keys of functions that write directly to file descriptor 1 or 2, not through `sys.stdout` or
            `sys.stderr`. Calls of these functions must not be batched: their output does not show which call wrote it.
    """

    def __init__(self, slots: Slots, queue: CallQueue, client: Client) -> None:
        self._slots = slots
        self._queue = queue
        self._client = client
        self.apart: set[str] = set()

    def read(self, slot: Slot, fd: int) -> None:
        """Handle output that a worker or its children wrote directly to file descriptor 1 or 2.

        Reads at most 64 KiB, and does not wait. The function of the running call is added to `apart`, so that its later
        calls are not batched. When the worker has closed its end of the pipe, the event loop no longer watches it.
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

        One limit is 10 MiB for each call, except services. The other is 4 MiB for the output of all calls together
        that the client has not acknowledged yet. Bytes beyond the limits are dropped, and counted in `call.dropped`.
        After that, all output of the call is dropped until there is room for 2 MiB. So gaps are few, and `end_gap`
        reports each one. Output of a silent call is not sent, but its last bytes are kept.

        `id_` is 0 if no call was running, and `fd` is 1 for stdout or 2 for stderr.
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
        """Tell the client how much output of a call was dropped, and send it the last of the dropped bytes.

        Does nothing if no output was dropped. First a message on stderr says how many bytes stay dropped. Then follow
        the last bytes that were dropped of stdout and of stderr, at most `TAIL` (4096) each. `call.dropped` becomes 0.
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
        """Return the end of a call's output, decoded from its last `TAIL` (4096) bytes; "" if another call has printed.

        For a call with `output="capture"`, it is taken from the file in memory that has the captured output.
        """
        if printed := captured(slot.printed, TAIL):
            return printed
        return slot.tail[-TAIL:].decode("utf-8", "replace") if slot.tail_of == call.id else ""

    @staticmethod
    def last_line(slot: Slot) -> str:
        """Return why workers of a slot end right after their start: their last line of output, or a general text."""
        text = slot.tail.decode("utf-8", "replace") if not slot.tail_of else ""
        return (text.strip().splitlines() or ["its processes end at once"])[-1]


def _shortened(call: NodeCall, fd: int, data: bytes, room: int) -> bytes:
    """Return the lines of `data` that fit into `room` bytes. Count the others as dropped, and keep the last bytes."""
    stop = data.rfind(b"\n", 0, room) + 1
    call.dropped += len(data) - stop
    _append(call.ends.setdefault(fd, bytearray()), data[stop:])
    return data[:stop]


def _append(tail: bytearray, data: bytes) -> None:
    """Append output to `tail`, the kept end of a call's output. At least its last `TAIL` bytes stay."""
    tail += data
    if len(tail) > 4 * TAIL:
        del tail[:-TAIL]


def _last_lines(tail: bytes | bytearray) -> bytes:
    """Return the last `TAIL` bytes, from the beginning of a line if there is one."""
    last = bytes(tail[-TAIL:])
    return last if len(tail) < TAIL else last.partition(b"\n")[2] or last


def _header(slot: Slot, id_: int, fd: int) -> dict[str, object]:
    """Return the header of an OUTPUT frame, without the frame's number. `id_` is 0 if no call was running."""
    header: dict[str, object] = {"id": id_, "fd": fd, "slot": slot.number}
    if slot.member is not None:
        header |= {"rank": slot.member.rank, "label": slot.label}
    return header
