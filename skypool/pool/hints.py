"""`IdleHints`: tells the user that a node with devices is idle, or that a call uses only one of several devices.

Devices are accelerators. The hints are events, which the console shows. Each of the two is given once in a pool.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from skypool import clock, events
from skypool.calls.idle import FRESH, LOW, Idleness
from skypool.link.inbound import Welcome
from skypool.rental.rental import Rental
from skypool.samples.values import NodeSample

IDLE_FOR = 300.0
"""Seconds for which a node with devices must have been idle before the user is told."""
UNUSED_FOR = 120.0
"""Seconds for which a call must have used one of several devices before the user is told."""
_GAP = 0.5
"""Seconds without idle time after which a node counts as idle anew."""


class IdleHints:
    """The hints about idle devices of one pool. Any thread may use them. Reading a price from `rental` may block."""

    def __init__(
        self,
        pool: str,
        welcomes: Mapping[int, Welcome],
        rental: Rental,
        emit: Callable[[events.Event], None],
    ) -> None:
        self._pool = pool
        self._welcomes = welcomes
        self._rental = rental
        self._emit = emit
        self._lock = threading.Lock()
        self._idle: dict[int, Idleness] = {}  # when each node began to be idle without a break
        self._alone: dict[int, tuple[str, float, float]] = {}  # (function, since when, newest reading) of each node
        self._told_idle = self._told_unused = False

    def look(self, idleness: Mapping[int, Idleness]) -> None:
        """Tell the user if a node with devices has been idle for 5 minutes. Blocks to read its price if that is so."""
        if self._told_idle:
            return
        for node, now in idleness.items():
            welcome = self._welcomes.get(node)
            since = self._idle.setdefault(node, now)
            worked = (now.at - since.at) - (now.seconds - since.seconds)
            if worked > _GAP or not now.is_idle:
                self._idle[node] = now
            elif welcome is not None and welcome.devices and now.at - since.at >= IDLE_FOR and not self._told_idle:
                self._told_idle = True
                seconds, price = now.at - since.at, self._price(node)
                self._emit(events.NodeIdle(pool=self._pool, node=node, seconds=seconds, usd_per_hour=price))

    def _price(self, node: int) -> float | None:
        """Return what a node costs, in US dollars per hour; None if that is not known."""
        receipt = self._rental.known_receipt
        lines = () if receipt is None else receipt.lines
        return next((each.usd_per_hour for each in lines if each.node == node and not each.ended), None)

    def arrived(self, node: int, samples: Sequence[NodeSample]) -> None:
        """Tell the user if a call has used one device for two minutes, while its others were under 5 % utilisation."""
        welcome = self._welcomes.get(node)
        if self._told_unused or welcome is None or welcome.devices < 2 or welcome.slots >= welcome.devices:
            return
        now = clock.now()
        with self._lock:
            for sample in samples:
                if sample.devices:
                    self._judge(node, sample, now)

    def _judge(self, node: int, sample: NodeSample, now: float) -> None:
        used = [each.utilization_percent for each in sample.devices]
        names = {each.name for each in sample.calls}
        is_alone = None not in used and sum(each is not None and each >= LOW for each in used) == 1
        if not is_alone or len(used) < 2 or len(names) != 1:
            self._alone.pop(node, None)
            return
        name = names.pop()
        before, since, newest = self._alone.get(node, (name, now, now))
        if before != name or now - newest > FRESH:
            since = now
        self._alone[node] = (name, since, now)
        if now - since >= UNUSED_FOR and not self._told_unused:
            self._told_unused = True
            self._emit(
                events.DevicesUnused(pool=self._pool, node=node, call=name, devices=len(used), seconds=now - since)
            )
