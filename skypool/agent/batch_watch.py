"""Watches batches of calls. Calls that wait behind a slow call of their batch are taken back from the worker."""

from __future__ import annotations

from collections.abc import Callable

from skypool.agent.call_queue import CallQueue
from skypool.agent.worker_processes import CPU, Slot, Slots

LOOK = 0.005
"""Seconds between two checks of the batches."""
_SLOW = 0.05
"""Seconds that a call may delay later calls of its batch. While a worker is idle, the limit is `LOOK` instead."""


class BatchWatch:
    """Watcher that takes calls back from a worker if they wait behind a slow call of their batch.

    While `alert` is True, a call may be waiting behind another one, and the agent calls `look` every `LOOK` (0.005)
    seconds. `look` calls `hear(slot)` to handle the packets and outcomes that the worker of a slot has sent.
    """

    def __init__(self, slots: Slots, queue: CallQueue, hear: Callable[[Slot], None]) -> None:
        self._slots = slots
        self._queue = queue
        self._hear = hear
        self._any = self.alert = False
        self._looked = 0.0

    def came(self) -> None:
        """Note that a batch has arrived on the node, and set `alert` to True."""
        self._any = self.alert = True

    def ended(self) -> None:
        """Note that a call has ended and was removed from the queue.

        Sets `alert` to True if other calls remain and a batch has arrived since the node last had no calls, otherwise
        to False.
        """
        self._any = self.alert = self._any and bool(self._queue.calls)

    def look(self, now: float) -> None:
        """Send outcomes of batched calls to the client. Take back the calls that wait behind a slow call.

        A call is slow if it has run for more than `_SLOW` (0.05) seconds. If a slot of the same kind is idle, a call is
        slow as soon as a second check finds it still running. The calls that wait behind a slow call are queued again,
        so that other workers can run them.

        Sets `alert` to True if another check is needed, otherwise to False. Does nothing within `LOOK` (0.005) seconds
        of the last check. `now` is the time of the agent's clock, in seconds.
        """
        if now - self._looked < LOOK:
            return
        self._looked = now
        self.alert = False
        calls = self._queue.calls
        running = {slot.number: self._slots.page.running(slot.number)[0] for slot in self._slots.all}
        idle = {slot.kind for slot in self._slots.all if running[slot.number] not in calls}
        if self._slots.spare:
            idle.add(CPU)  # a worker is started as soon as a call waits for one
        for slot in self._slots.all:
            slot.ended += slot.batch.ended(asked=False)
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
            self.alert = True  # check again, because a worker may have taken a batch that it has not begun
