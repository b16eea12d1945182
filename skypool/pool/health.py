"""`HealthWatch`: takes the samples (measurements) of a pool's nodes, and finds unhealthy nodes by them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from skypool import events
from skypool.devices.health import HealthOfNode, NodeHealth
from skypool.devices.sample import DeviceSample, NodeSample
from skypool.errors import NodeUnhealthy
from skypool.event_loop import Loop
from skypool.pool.new_samples import NewSamples
from skypool.safety.received_data_limit import Quota

FIRST = 15.0
"""Seconds to wait for the first sample of a node's devices before it gets calls. Without one, health is unknown."""
XidKey = tuple[str, int, str, int]
"""The kind, the index and the uuid of a device, and an XID code."""
_MOST_CODES = 256
"""The most pairs of a device and an XID code that are counted for one node. A stranger's node may claim any number."""
_MOST_DEVICES = 128
"""The most devices of one node, by kind, index and uuid. Monitoring systems keep a time series of each."""
_MOST_CAUSES = 32
"""The most causes of lower clocks of one node. Monitoring systems keep a time series of each of them, too."""
_MOST_REASONS = 16
"""The most reasons that an event or an error has."""


class HealthWatch:
    """The health of a pool's nodes. Samples may come from any thread.

    Args:
        quota: limits the bytes that are kept of each node.
        is_stranger: returns True for a node that is not trusted.
        emit: called with an event when the health of a node changes.
        on_unhealthy: called as (node, error) in the engine's thread when a node becomes unhealthy.

    Attributes:
        samples: the newest samples, and those that wait to be written.
        known: the health of each node whose devices were read, by the node's number.
        xids: how often NVIDIA's driver has reported each error (XID code) of each device since the pool's start, by the
            node's number.
    """

    def __init__(
        self,
        pool: str,
        quota: Quota,
        is_stranger: Callable[[int], bool],
        emit: Callable[[events.Event], None],
        on_unhealthy: Callable[[int, NodeUnhealthy], None],
    ) -> None:
        self.samples = NewSamples(quota)
        self._pool = pool
        self._is_stranger = is_stranger
        self._emit = emit
        self._on_unhealthy = on_unhealthy
        self._lock = threading.RLock()
        self._judges: dict[int, HealthOfNode] = {}
        self._identities: dict[int, _Identities] = {}
        self.known: dict[int, NodeHealth] = {}
        self.xids: dict[int, dict[XidKey, int]] = {}
        self._codes: dict[int, set[int]] = {}
        self._first: dict[int, asyncio.Event] = {}

    def arrived(self, node: int, samples: Sequence[NodeSample]) -> None:
        """Take samples of a node, and judge its devices by them. Any thread may call this."""
        claimed = self._is_stranger(node)
        with self._lock:
            known = self._identities.setdefault(node, _Identities())
            kept = [known.only(replace(one, node=node, claimed=claimed)) for one in samples]
        for each in self.samples.add(kept):
            if each.devices:
                self._judge(each)

    def _judge(self, sample: NodeSample) -> None:
        node = sample.node
        with self._lock:
            judge = self._judges.setdefault(node, HealthOfNode())
            before = self.known.get(node)
            now = self.known[node] = judge.judge(sample)
            for each in sample.devices:
                self._count(node, each)
        is_same = before is not None and before.devices == now.devices  # as usual; to list the reasons takes long
        if before is None or (not is_same and (before.state, before.reasons) != (now.state, now.reasons)):
            self._emit(
                events.HealthChanged(
                    pool=self._pool,
                    node=node,
                    state=now.state,
                    reasons=now.reasons[:_MOST_REASONS],
                    claimed=now.claimed,
                )
            )
        if before is None or (now.state == "unhealthy" and before.state != "unhealthy"):
            Loop.shared().loop.call_soon_threadsafe(self._tell, node)

    def _count(self, node: int, device: DeviceSample) -> None:
        """Count errors of NVIDIA's driver. Ignore new (device, code) pairs of a node that has sent 256 of them."""
        counts = self.xids.setdefault(node, {})
        codes = self._codes.setdefault(node, set())
        if len(counts) >= _MOST_CODES and codes.isdisjoint(device.xids):
            return
        for code in device.xids:
            key = (device.kind, device.index, device.uuid, code)
            if key in counts or len(counts) < _MOST_CODES:
                counts[key] = counts.get(key, 0) + 1
                codes.add(code)

    def _tell(self, node: int) -> None:
        self._first.setdefault(node, asyncio.Event()).set()
        if self.known[node].state == "unhealthy":
            self._on_unhealthy(node, self.error_of(node))

    def error_of(self, node: int) -> NodeUnhealthy:
        """Return (do not raise) the error for an unhealthy node."""
        return NodeUnhealthy(f"node {node} is unhealthy: {'; '.join(self.known[node].reasons[:_MOST_REASONS])}", node)

    async def first(self, node: int) -> NodeHealth:
        """Wait for the first reading of a node's devices, at most 15 s, and return the health of the node.

        Without a reading, the health is "unknown". Runs in the engine's thread.
        """
        event = self._first.setdefault(node, asyncio.Event())
        try:
            async with asyncio.timeout(FIRST):
                await event.wait()
        except TimeoutError:
            return NodeHealth(node, "unknown")
        return self.known[node]

    def of(self, node: int) -> NodeHealth | None:
        """Return a node's health; None if it has no devices, or before they were read. Any thread may call this."""
        return self.known.get(node)


class _Identities:
    """The devices, and the causes of lower clocks, that a node has named. A stranger may not add any number of them."""

    def __init__(self) -> None:
        self._devices: set[tuple[str, int, str]] = set()
        self._causes: set[str] = set()

    def only(self, sample: NodeSample) -> NodeSample:
        """Return a sample without devices that would exceed the limits on devices or on causes of lower clocks."""
        if all(map(self._is_known, sample.devices)):  # as usual
            return sample
        return replace(sample, devices=tuple(filter(self._can_be_added, sample.devices)))

    def _is_known(self, device: DeviceSample) -> bool:
        is_known = (device.kind, device.index, device.uuid) in self._devices
        return is_known and (not device.throttled or self._causes.issuperset(device.throttled))

    def _can_be_added(self, device: DeviceSample) -> bool:
        """Add a device and its causes of lower clocks, and return True. Return False if the limits do not allow it."""
        identity = (device.kind, device.index, device.uuid)
        causes = self._causes.union(device.throttled or ())
        if (identity not in self._devices and len(self._devices) >= _MOST_DEVICES) or len(causes) > _MOST_CAUSES:
            return False
        self._devices.add(identity)
        self._causes = causes
        return True
