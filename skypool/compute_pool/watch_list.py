"""`watches_of`: the watches that each pool has."""

from __future__ import annotations

from collections.abc import Sequence

from skypool.logs.writer import LogWriter
from skypool.metrics.exporter import Exporter
from skypool.metrics.metering import Metering
from skypool.observers.watch import Observers
from skypool.pool.unused_devices import Hints
from skypool.pool.watch import Watch
from skypool.report.history import History
from skypool.samples.sample_file import SampleFile


def watches_of(exporters: Sequence[Exporter] = ()) -> list[Watch]:
    """Return new watches for a pool. `exporters` send its metrics to monitoring systems."""
    metering = [Metering(exporters)] if exporters else []
    return [LogWriter(), History(), SampleFile(), Hints(), *metering, Observers()]
