"""`Observers`: lets other processes of the user look into a pool while it runs."""

from __future__ import annotations

from skypool.pool.watch import PoolFacts, Watch


class Observers(Watch):
    """The server for observers of one pool. It is closed after the pool's logs, so that readers see the logs' end."""

    name = "the connections of other terminals"
    hears = ()
    closes = 2

    def begin(self, facts: PoolFacts) -> None:
        from skypool.observers.observed import Observed  # imported here, so that a pool's start need not wait
        from skypool.observers.server import ObserverServer

        self._server = ObserverServer(facts.pool, Observed(facts))
        self._server.open()

    def close(self) -> None:
        self._server.close()
