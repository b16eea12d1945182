"""`Metering`: reads the metrics of a pool, which its exporters send to monitoring systems such as Prometheus."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from skypool.calls.dispatch import Dispatch
from skypool.calls.tally import NodeCounts
from skypool.errors import LedgerError
from skypool.metrics import devices, pools
from skypool.metrics.exporter import Exporter, Source
from skypool.metrics.values import Attributes, Measurement
from skypool.pool import states
from skypool.pool.health import HealthWatch
from skypool.pool.idle import IdleWatch
from skypool.pool.life import Life
from skypool.rental.rental import Rental
from skypool.rental.request import Terms
from skypool.rental.supply import Supply
from skypool.samples.values import NodeSample


class Metering:
    """The metering of one pool. It has no thread, and reads metrics only when an exporter asks for them.

    Args:
        is_stranger: returns True for a node that is not trusted.
    """

    def __init__(
        self,
        terms: Terms,
        exporters: Sequence[Exporter],
        *,
        life: Life,
        dispatch: Dispatch,
        rental: Rental,
        supply: Supply | None,
        idle: IdleWatch,
        health: HealthWatch,
        is_stranger: Callable[[int], bool],
    ) -> None:
        self._terms = terms
        self.exporters = exporters
        self._life = life
        self._dispatch = dispatch
        self._rental = rental
        self._supply = supply
        self._idle = idle
        self._health = health
        self._is_stranger = is_stranger
        self._lock = threading.Lock()
        self._ends: list[Callable[[], None]] = []

    def open(self) -> None:
        """Begin to export. Blocks. Any thread may call this.

        Raises UsageError if an exporter cannot work, for example because its port is in use. All exporters are closed
        then.
        """
        source = Source(self._terms.name, time.time(), self.read, self._life.notice)
        try:
            for each in self.exporters:
                end = each._begin(source)
                with self._lock:
                    self._ends.append(end)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Export the last values, and end all exporters, even if one fails. Blocks. Any thread may call this."""
        with self._lock:
            ends, self._ends = self._ends, []
        with contextlib.ExitStack() as stack:
            for end in ends:
                stack.callback(end)

    def read(self) -> list[Measurement]:
        """Return all metrics of the pool, as they are now. Any thread may call this. It may wait for the disk."""
        pool: Attributes = {"skypool.pool": self._terms.name}
        words = self._life.words()
        counts = self._dispatch.tally.now()
        state = self._life.performed
        found = [
            *pools.state_measurements(words, pool),
            *pools.call_measurements(counts, pool),
            *pools.launch_measurements({} if self._supply is None else self._supply.orders.counts.copy(), pool),
            *self._costs(pool),
        ]
        for node, word in words.items():
            attributes = self._attributes(node, state.nodes.get(node), pool)
            found += pools.slot_measurements(counts.nodes.get(node, NodeCounts()), attributes)
            found += self._measured(node, word, attributes)
        return found

    def _costs(self, pool: Attributes) -> list[Measurement]:
        """Return the metrics of the pool's costs; [] if the ledger cannot be read or written."""
        budget = self._terms.budget.max_usd if self._terms.budget else None
        try:
            self._idle.record()
            return list(pools.cost_measurements(self._rental.receipt.lines, budget, pool))
        except LedgerError:
            return []

    def _attributes(self, node: int, state: states.Node | None, pool: Attributes) -> Attributes:
        instance = state.instance if state is not None else None
        if instance is None:
            return pools.node_attributes(pool, node, "", "")
        offer = instance.offer.instance_type if instance.offer else instance.instance_type
        attributes = pools.node_attributes(pool, node, instance.provider, offer)
        return {**attributes, "skypool.claimed": True} if self._is_stranger(node) else attributes

    def _measured(self, node: int, word: str, attributes: Attributes) -> list[Measurement]:
        """Return the metrics of a node and its devices. For an unreachable or ended node, only errors of devices."""
        welcome = self._life.connections.welcomes.get(node)
        models = {(each.kind, each.index): each.name for each in welcome.health.devices} if welcome else {}
        sample = self._health.store.newest.get(node)
        if sample is None or pools.state_of(word) in ("unreachable", "ended"):
            sample = NodeSample()
        return [
            *devices.node_measurements(sample, attributes),
            *devices.device_measurements(sample, self._health.of(node), attributes, models),
            *devices.xid_measurements(sample, self._health.xids.get(node, {}).copy(), attributes, models),
        ]
