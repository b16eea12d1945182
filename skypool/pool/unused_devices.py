"""`Hints`: tells the user that a node with devices is idle, or that a call uses only one of several devices.

Devices are accelerators. The hints are events, which the console shows. Each of the two is given once in a pool.
"""

from __future__ import annotations

from typing import ClassVar

from skypool import clock, events
from skypool.calls.idle_time import FRESH, LOW, Idleness
from skypool.devices.sample import NodeSample
from skypool.pool.watch import PoolFacts, Watch

IDLE_FOR = 300.0
"""Seconds for which a node with devices must have been idle before the user is told."""
UNUSED_FOR = 120.0
"""Seconds for which a call must have used one of several devices before the user is told."""
_GAP = 0.5
"""If a node works for more than this many seconds, its idle time is counted from 0 again."""


class Hints(Watch):
    """A watch that gives the user hints about idle devices of one pool."""

    name = "the hints about idle devices"
    hears = ()
    every: ClassVar[float | None] = 2.0

    def begin(self, facts: PoolFacts) -> None:
        self._facts = facts
        self._idle: dict[int, Idleness] = {}  # when each node began to be idle without a break
        self._alone: dict[int, tuple[str, float, float]] = {}  # (function, since when, newest reading) of each node
        self._seen: dict[int, float] = {}  # the time of the newest sample of each node
        self._told_idle = self._told_unused = False

    def tick(self) -> None:
        if not self._told_idle:
            self._look_for_idle()
        if not self._told_unused:
            self._look_for_unused()

    def _look_for_idle(self) -> None:
        """Tell the user if a node with devices has been idle for 5 minutes."""
        facts, welcomes = self._facts, self._facts.welcomes
        for node, now in facts.idleness.items():
            if not facts.takes_calls(node):
                continue
            since = self._idle.setdefault(node, now)
            worked = (now.at - since.at) - (now.seconds - since.seconds)
            if worked > _GAP or not now.is_idle:
                self._idle[node] = now
            elif node in welcomes and welcomes[node].devices and now.at - since.at >= IDLE_FOR and not self._told_idle:
                self._told_idle = True
                seconds, price = now.at - since.at, self._price(node)
                facts.emit(events.NodeIdle(pool=facts.pool, node=node, seconds=seconds, usd_per_hour=price))

    def _price(self, node: int) -> float | None:
        """Return what a node costs, in US dollars per hour; None if that is not known."""
        receipt = self._facts.receipt()
        lines = () if receipt is None else receipt.lines
        return next((each.usd_per_hour for each in lines if each.node == node and not each.ended), None)

    def _look_for_unused(self) -> None:
        """Tell the user if a call has used one device for two minutes, while its others were under 5 % utilisation."""
        welcomes = self._facts.welcomes
        for node, sample in list(self._facts.health.samples.newest.items()):
            welcome = welcomes.get(node)
            if welcome is None or welcome.devices < 2 or welcome.slots >= welcome.devices:
                continue
            if sample.devices and self._seen.get(node) != sample.time:
                self._seen[node] = sample.time
                self._judge(node, sample, clock.now())

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
            pool = self._facts.pool
            self._facts.emit(
                events.DevicesUnused(pool=pool, node=node, call=name, devices=len(used), seconds=now - since)
            )
