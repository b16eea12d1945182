"""Reports to the client how the node is: its calls, a notice that the machine is taken back, and measurements."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from skypool.agent.call_queue import CallQueue
from skypool.agent.client_session import Client
from skypool.agent.slot_plan import NodePlan
from skypool.agent.worker_processes import CPU, SERVICE, Slots
from skypool.wire.frames import Kind

if TYPE_CHECKING:
    from skypool.agent import monitor

_UNMEASURED = 0.5
"""Seconds after the start of the loop in which nothing is measured on a node without devices."""


class Status:
    """The part of the agent that measures the node and reports its state. `done` counts the calls that have ended."""

    def __init__(
        self,
        plan: NodePlan,
        slots: Slots,
        queue: CallQueue,
        client: Client,
        watch: Callable[[int, int, Callable[[], None]], None],
    ) -> None:
        self._cwd = plan.config.cwd
        self._measured = plan.health.devices if plan.health.monitored else ()
        self._slots = slots
        self._page = slots.page
        self._calls = queue.calls
        self._client = client
        self._watch = watch
        self._measures_at: float | None = None
        self._monitor: monitor.Monitor | None = None
        self.done = self._seen_done = 0

    def works(self) -> bool:
        """Return True if a call waits or runs, or has ended since the last call of this method.

        Idle services and generators that wait for their client do not count.
        """
        done, self._seen_done = self._seen_done, self.done
        stalled = self._stalled()
        return self.done > done or any(call.busy and id_ not in stalled for id_, call in self._calls.items())

    def _stalled(self) -> list[int]:
        """Return the ids of generators that wait until their client takes items."""
        return [id_ for slot in self._slots.all if (id_ := self._page.stalled(slot.number)) in self._calls]

    def measure(self, now: float) -> None:
        """Let the monitor measure the node, if a measurement is due.

        The first calls make the monitor, because its modules take long to import and must not delay the node's start.
        `now` is the time of the agent's clock, in seconds.
        """
        if self._measures_at is None:
            self._measures_at = now if self._measured else now + _UNMEASURED
        if self._monitor is None and now >= self._measures_at:
            from skypool.agent.monitor import Monitor

            self._monitor = Monitor(self._measured, self._cwd, self._watch, self._running, self.send)
        if self._monitor is not None:
            self._monitor.tick(now)

    def resume(self) -> None:
        """Send again what may have been lost with an earlier connection: measurements, and a notice."""
        if self._monitor is not None:
            self._monitor.rewind()
        if self._page.interruption:
            self.send()

    def send(self) -> None:
        """Send the client a PONG with the status of the node."""
        self._client.send(Kind.PONG, self._report())

    def interrupt(self, at: float) -> None:
        """Tell the workers and the client of a notice that the provider takes the machine back.

        `at` is the announced time, in seconds since 1970. Each later PONG contains the notice again, because the first
        one may be lost.
        """
        self._slots.interrupt(at)
        self.send()

    def _report(self) -> dict[str, Any]:
        """Return the header of a PONG: the status of the node. Services do not count as busy or running."""
        taken = [call for id_ in self._slots.taken() if (call := self._calls.get(id_)) is not None]
        running = [call for call in taken if call.kind != SERVICE]
        return {
            "busy": len(running),
            "cpu_busy": sum(call.kind == CPU for call in running),
            "running": [call.name for call in running[:8]],
            "waiting": len(self._calls) - len(taken),
            "done": self.done,
            "interruption": self._page.interruption or None,
            **({"stalled": stalled} if (stalled := self._stalled()) else {}),
            **self._samples(),
        }

    def _samples(self) -> dict[str, Any]:
        """Return the samples that the client does not have, as part of a PONG; {} if there are none or no client."""
        samples = self._monitor.taken() if self._monitor is not None and self._client.is_connected else []
        return {"samples": samples} if samples else {}

    def _running(self) -> Iterator[tuple[int, str, int, int, float]]:
        """Yield (id, function name, slot, process id, seconds so far) for each running call."""
        now = time.monotonic()
        for slot in self._slots.all:
            id_, began = self._page.running(slot.number)
            call = self._calls.get(id_) if id_ else None
            if call is not None and slot.pid:
                yield id_, call.name, slot.number, slot.pid, now - began
