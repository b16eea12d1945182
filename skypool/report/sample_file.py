"""`SampleFile`: writes the samples of a pool's nodes to disk, for reports and `pool.samples`."""

from __future__ import annotations

from typing import ClassVar

from skypool.pool.watch import PoolFacts, Watch


class SampleFile(Watch):
    """The writer of one pool's samples."""

    name = "the file of the samples"
    hears = ()
    every: ClassVar[float | None] = 5.0

    def begin(self, facts: PoolFacts) -> None:
        self._facts = facts
        self._no_room = ""

    def tick(self) -> None:
        if self._facts.health.store.newest:
            self._write()

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        """Write samples to the file now. If that fails, tell the user once, and try again later."""
        try:
            self._facts.health.store.flush()
        except Exception as e:  # noqa: BLE001 - there may be room later
            if str(e) != self._no_room:
                self._no_room = str(e)
                self._facts.notice(f"measurements of nodes cannot be kept: {e}")
