"""`Samples`: the user's object for the measurements of a pool."""

from __future__ import annotations

from skypool.devices.health import NodeHealth
from skypool.devices.sample import NodeSample
from skypool.pool.engine import PoolEngine
from skypool.samples import store
from skypool.samples.sample_file import SampleFile
from skypool.samples.session_file import path_of


class Samples:
    """The measurements of a pool's nodes, devices and running calls, as `pool.samples`. Any thread may use it.

    Args:
        engine: the object that runs the pool; None before the pool is started.
    """

    def __init__(self, engine: PoolEngine | None) -> None:
        self._engine = engine

    def latest(self) -> dict[int, NodeSample]:
        """Return the newest sample of each node, by the node's number. Nodes that were not measured yet are left out.

        A node is first measured about a second after its start. After that, it is measured each second if it has
        devices, otherwise every 5 s.
        """
        return {} if self._engine is None else dict(sorted(self._engine.health.samples.newest.items()))

    def history(self, node: int | None = None, since: float = 0.0, until: float | None = None) -> list[NodeSample]:
        """Return samples of this run of the pool, ordered by time. Those older than an hour are thinned out.

        Args:
            node: the number of a node. Default None: all nodes.
            since: the earliest time, in seconds since 1970. Default: the start of the pool.
            until: the latest time. Default None: now.

        Raises:
            sqlite3.Error: the file of the samples is damaged.
        """
        engine = self._engine
        if engine is None:
            return []
        engine.watches.settle(SampleFile)
        return list(store.history(path_of(engine.rental.session), node, since, until))

    def health(self) -> dict[int, NodeHealth]:
        """Return the health of each node that has devices, by the node's number, as far as it is known."""
        return {} if self._engine is None else dict(sorted(self._engine.health.known.items()))
