"""`Observers`: lets other processes of the user look into a pool while it runs."""

from __future__ import annotations

from skypool.pool.watch import PoolFacts, Watch


class Observers(Watch):
    """The door of one pool for observers. Whoever follows the pool's logs sees their end when it closes."""

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
