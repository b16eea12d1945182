"""The calls of a node that have not ended: in line, where workers take them, or in the hands of one."""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable, Iterable

from skypool.agent.batch import Batch
from skypool.agent.call import Call
from skypool.agent.slots import Slot, Slots
from skypool.agent.spool import Kept


class Line:
    """Puts calls where workers take them, as many as fit there, and takes back what has not begun.

    Args:
        slots: whose workers run them.
        watch: watch(fd, events, callback) for the agent's loop; events 0 to stop.
        kept: takes the memory of arguments that nobody needs any more.

    Attributes:
        calls: by id; those that came together share one `Batch` until somebody asks for one of them.
        suspects: calls to look at again, by id: they are to stop, or may have died with a worker.
    """

    def __init__(self, slots: Slots, watch: Callable[[int, int, Callable[[], None]], None], kept: Kept) -> None:
        self._slots, self._watch, self._kept = slots, watch, kept
        self._waiting: deque[Call | Batch] = deque()
        self._full = False
        self.calls: dict[int, Call | Batch] = {}
        self.suspects: dict[int, Call] = {}

    def add(self, call: Call | Batch) -> None:
        """A call, or several that came together, at the end of the line."""
        if isinstance(call, Batch):
            self.calls.update(dict.fromkeys(call.ids, call))
        else:
            self.calls[call.id] = call
        self._waiting.append(call)
        if not self._full:  # if it is, the loop pumps as soon as there is room
            self.pump()

    def get(self, id_: int) -> Call | None:
        """A call by itself, None when it has ended."""
        call = self.calls.get(id_)
        if isinstance(call, Batch):
            call = self.calls[id_] = call.single(id_)
        return call

    def forget(self, id_: int, done: bool = False) -> None:
        """A call has ended, or is no longer ours.

        Args:
            done: its worker has let go of its arguments.
        """
        call = self.calls.pop(id_, None)
        self.suspects.pop(id_, None)
        if not isinstance(call, Call) or call.blob is None:
            return
        if done and not call.again:
            self._kept.give(call.blob)
        else:
            os.close(call.blob.fd)

    def pump(self) -> None:
        """Put calls where workers take them, as many as fit."""
        while self._waiting:
            call = self._waiting[0]
            try:
                self._slots.offer([call.packet], [call.blob.fd] if call.blob else [])
            except BlockingIOError:
                if not self._full:
                    self._full = True
                    self._watch(self._slots.queue.fileno(), select.EPOLLOUT, self.pump)
                return
            call.offered = True
            self._waiting.popleft()
        if self._full:
            self._full = False
            self._watch(self._slots.queue.fileno(), 0, self.pump)

    def again(self, ids: Iterable[int]) -> None:
        """Calls that were offered and have not begun go back to the front of the line, in this order."""
        calls = [call for id_ in ids if (call := self.get(id_)) is not None and call.offered]
        for call in calls:
            call.offered, call.again, call.missing = False, True, None
        self._waiting.extendleft(reversed(calls))

    def take_back(self) -> None:
        """Bring the calls that no worker has taken back to the front of the line."""
        back: list[int] = []
        for f, fds in self._slots.take_back():
            for fd in fds:
                os.close(fd)
            back += f.header["ids"] if "ids" in f.header else [f.header["id"]]
        self.again(back)

    def take_back_from(self, slots: Iterable[Slot]) -> None:
        """Bring the calls that these workers took with others and have not begun back to the front of the line."""
        self.again([id_ for slot in slots for id_ in slot.pipes.take_back()])

    def give_back(self, n: int) -> list[int]:
        """Let go of up to `n` calls that have not begun, the last ones first."""
        calls = self._apart()
        if n > len(calls):
            self._waiting = deque(calls)
            self.take_back()
            self.take_back_from(self._slots.all)
            calls = self._apart()
        kept = max(0, len(calls) - n)
        self._waiting = deque(calls[:kept])
        back = [call.id for call in reversed(calls[kept:])]
        for id_ in back:
            self.forget(id_)
        return back

    def doomed(self) -> list[Call]:
        """Take the calls that are to stop and have not begun out of the line."""
        self.take_back()
        self.take_back_from(self._slots.all)
        calls = self._apart()
        self._waiting = deque(call for call in calls if not call.doomed)
        return [call for call in calls if call.doomed]

    def _apart(self) -> list[Call]:
        """The calls in the line, each by itself."""
        ids = (id_ for call in self._waiting for id_ in (call.ids if isinstance(call, Batch) else [call.id]))
        return [call for id_ in ids if (call := self.get(id_)) is not None]
