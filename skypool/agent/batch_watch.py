"""Watches batches of calls, and takes back those that wait behind a slow call of the same batch."""

from __future__ import annotations

from collections.abc import Callable

from skypool.agent.call_queue import CallQueue
from skypool.agent.slots import CPU, Slot, Slots

LOOK = 0.005
"""Seconds between two looks at batches."""
_SLOW = 0.05
"""How long a call may keep others waiting that came with it while no worker is idle; if one is, `LOOK` is enough."""


class BatchWatch:
    """Looks every `LOOK` seconds, while there is a reason, how calls that came together get on.

    Args:
        hear: takes in what a worker has sent.

    Attributes:
        alert: whether there is a reason to look.
    """

    def __init__(self, slots: Slots, queue: CallQueue, hear: Callable[[Slot], None]) -> None:
        self._slots = slots
        self._queue = queue
        self._hear = hear
        self._any = self.alert = False
        self._looked = 0.0

    def came(self) -> None:
        """Some calls came together."""
        self._any = self.alert = True

    def ended(self) -> None:
        """A call has ended: its worker may take up some that came together now."""
        self._any = self.alert = self._any and bool(self._queue.calls)

    def look(self, now: float) -> None:
        """Learn how some ended, and take back those that wait for a slow one among them."""
        if now - self._looked < LOOK:
            return
        self._looked = now
        self.alert = False
        calls = self._queue.calls
        running = {slot.number: self._slots.page.running(slot.number)[0] for slot in self._slots.all}
        idle = {slot.kind for slot in self._slots.all if running[slot.number] not in calls}
        if self._slots.spare:
            idle.add(CPU)  # its worker is started as soon as a call waits for one
        for slot in self._slots.all:
            slot.ended += slot.pipes.ended()
            if slot.ended:
                self._hear(slot)
            id_ = running[slot.number]
            if slot.seen[0] != id_:
                slot.seen = (id_, now)
            elif id_ in calls and (slot.kind in idle or now - slot.seen[1] > _SLOW):
                self._queue.take_back_from([slot])
            self.alert = self.alert or now - slot.seen[1] <= _SLOW
        self._queue.pump()
        begun = set(running.values())
        if idle and any(call.kind in idle and id_ not in begun for id_, call in calls.items()):
            self.alert = True  # a worker is about to take some, or has not begun any of them yet
