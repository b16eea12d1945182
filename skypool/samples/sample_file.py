"""`SampleFile`: writes the samples of a pool's nodes to disk, for reports and `pool.samples`."""

from __future__ import annotations

from typing import ClassVar

from skypool.pool.watch import PoolFacts, Watch
from skypool.samples.session_file import path_of
from skypool.samples.store import SampleStore


class SampleFile(Watch):
    """The writer of one pool's samples: it writes what is measured on the nodes to a file."""

    name = "the file of the samples"
    hears = ()
    every: ClassVar[float | None] = 5.0

    def begin(self, facts: PoolFacts) -> None:
        self._facts = facts
        self._store = SampleStore(lambda: path_of(facts.session), facts.quota)

    def tick(self) -> None:
        """Write the new samples to the file. If that fails, they are lost, and the user is told once."""
        try:
            if rows := self._facts.health.samples.take():
                self._store.write(rows)
        except Exception as e:  # noqa: BLE001 - there may be room later
            self.tell_failure(self._facts, "measurements of nodes cannot be kept", e)

    def close(self) -> None:
        self.tick()
