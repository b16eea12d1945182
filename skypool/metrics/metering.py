"""`Metering`: reads the metrics of a pool, which its exporters send to monitoring systems such as Prometheus."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from skypool.calls.tally import NodeCounts
from skypool.devices.sample import NodeSample
from skypool.metrics import calls_and_costs, devices
from skypool.metrics.exporter import Exporter, Source
from skypool.metrics.values import Attributes, Measurement
from skypool.pool.states import Node
from skypool.pool.watch import PoolFacts, Watch


class Metering(Watch):
    """The metering of one pool. It reads metrics only when an exporter asks for them, in a thread of the exporter."""

    name = "the metrics"
    hears = ()
    must_begin = True

    def __init__(self, exporters: Sequence[Exporter]) -> None:
        self._exporters = exporters
        self._ends: list[Callable[[], None]] = []

    def begin(self, facts: PoolFacts) -> None:
        """Begin to export the metrics of a pool.

        If an exporter cannot work, for example because its port is in use, all exporters are closed, and UsageError is
        raised.
        """
        self._facts = facts
        source = Source(facts.pool, time.time(), self.read, facts.notice)
        try:
            for each in self._exporters:
                self._ends.append(each._begin(source))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Export the last values, and end all exporters, even if one fails."""
        ends, self._ends = self._ends, []
        with contextlib.ExitStack() as stack:
            for end in ends:
                stack.callback(end)

    def read(self) -> list[Measurement]:
        """Return all metrics of the pool, as they are now. Any thread may call this. It may wait for the disk."""
        pool: Attributes = {"skypool.pool": self._facts.pool}
        words, counts, state = self._facts.words(), self._facts.counts, self._facts.state
        found = [
            *calls_and_costs.state_measurements(words, pool),
            *calls_and_costs.call_measurements(counts, pool),
            *calls_and_costs.launch_measurements(self._facts.launches, pool),
            *self._costs(pool),
        ]
        for node, word in words.items():
            attributes = self._attributes(node, state.nodes.get(node), pool)
            found += calls_and_costs.slot_measurements(counts.nodes.get(node, NodeCounts()), attributes)
            found += self._measured(node, word, attributes)
        gone = ("unreachable", "ended")
        for (node, _), folder in self._facts.folders.items():
            if not folder.is_data and calls_and_costs.state_of(words.get(node, "ended")) not in gone:
                found += calls_and_costs.folder_measurements(
                    folder, self._attributes(node, state.nodes.get(node), pool)
                )
        return found

    def _costs(self, pool: Attributes) -> list[Measurement]:
        """Return the metrics of the pool's costs; [] if the ledger cannot be read or written."""
        receipt = self._facts.receipt(until_now=True)
        return (
            [] if receipt is None else list(calls_and_costs.cost_measurements(receipt.lines, self._facts.max_usd, pool))
        )

    def _attributes(self, node: int, state: Node | None, pool: Attributes) -> Attributes:
        instance = state.instance if state is not None else None
        if instance is None:
            return calls_and_costs.node_attributes(pool, node, "", "")
        offer = instance.offer.instance_type if instance.offer else instance.instance_type
        attributes = calls_and_costs.node_attributes(pool, node, instance.provider, offer)
        return {**attributes, "skypool.claimed": True} if self._facts.is_stranger(node) else attributes

    def _measured(self, node: int, word: str, attributes: Attributes) -> list[Measurement]:
        """Return the metrics of a node and its devices. If the node is unreachable or ended, only its device errors."""
        welcome, health = self._facts.welcomes.get(node), self._facts.health
        models = {(each.kind, each.index): each.name for each in welcome.health.devices} if welcome else {}
        sample = health.samples.newest.get(node)
        if sample is None or calls_and_costs.state_of(word) in ("unreachable", "ended"):
            sample = NodeSample()
        return [
            *devices.node_measurements(sample, attributes),
            *devices.device_measurements(sample, health.of(node), attributes, models),
            *devices.xid_measurements(sample, health.xids.get(node, {}).copy(), attributes, models),
        ]
