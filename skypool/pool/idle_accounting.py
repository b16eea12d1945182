"""`IdleWatch`: records in the ledger for how long the nodes of a pool are idle, so that other processes know it, too.

A node is idle while no call runs on it, or while all of its devices are under 5 % utilisation. The dispatch measures
the idle time of each node.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from skypool.calls.dispatch import Dispatch
from skypool.calls.idle_time import LOW, Idleness
from skypool.devices.sample import NodeSample
from skypool.pool.life import Life
from skypool.rental.pool_account import Rental
from skypool.rental.receipt import IdleSpan

_EVERY = 2.0
"""Seconds between two looks at the idle time of the nodes."""
_DRIFT = 0.2
"""Seconds by which the idle time may differ from what the ledger's last record implies, before it is recorded anew."""


class IdleWatch:
    """Records the idle time of a pool's nodes in the ledger. Any thread may use it."""

    def __init__(self, dispatch: Dispatch, rental: Rental, life: Life) -> None:
        self._dispatch = dispatch
        self._rental = rental
        self._life = life
        self._lock = threading.Lock()
        self._recorded: dict[int, Idleness] = {}

    def arrived(self, node: int, samples: Sequence[NodeSample]) -> None:
        """Note the newest reading of a node's devices. Do nothing if none of the samples has devices."""
        read = [each for each in samples if each.devices]
        if read:
            self._dispatch.roster.measured(node, is_low(read[-1]))

    async def keep(self) -> None:
        """Call `record` every 2 s, for as long as the task runs, if the last records are no longer right."""
        while True:
            await asyncio.sleep(_EVERY)
            idleness = self._dispatch.roster.idleness()
            if any(self._differs(node, now, _DRIFT) for node, now in idleness.items()):
                await asyncio.to_thread(self.record)

    def record(self) -> None:
        """Record the idle time of each node until now, unless it follows from the node's last record.

        A record says whether the node is idle from then on. While that does not change, no further record is needed.
        """
        with self._rental.telling_later(), self._lock:
            state = self._life.state
            spans: dict[tuple[str, str], IdleSpan] = {}
            for node, now in self._dispatch.roster.idleness().items():
                before = self._recorded.get(node)
                instance = state.nodes[node].instance if node in state.nodes else None
                if instance is None or not self._differs(node, now, 0.001):
                    continue
                self._recorded[node] = now
                since, seconds = (now.began, 0.0) if before is None else (before.at, before.seconds)
                spans[instance.provider, instance.id] = IdleSpan(since, now.at, now.seconds - seconds, now.is_idle)
            self._rental.idle(spans)

    def _differs(self, node: int, now: Idleness, most: float) -> bool:
        """Return True if a node's idle time differs by more than `most` seconds from what its last record implies."""
        before = self._recorded.get(node)
        if before is None:
            return True
        more = now.at - before.at
        implied = before.seconds + (more if before.is_idle else 0.0)
        return abs(now.seconds - implied) > most or (now.is_idle is not before.is_idle and more > most)


def is_low(sample: NodeSample) -> bool:
    """Return True if all devices in a sample are known to be under 5 % utilisation."""
    return all(
        each.utilization_percent is not None and each.utilization_percent < LOW and not each.lost
        for each in sample.devices
    )
