"""`Exporter`: the base class of objects that export the measurements of pools to a monitoring system."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skypool.errors import UsageError
from skypool.metrics.values import Measurement

MISSING = "the package {} is not installed: pip install 'skypool[metrics]'"
"""The text of the UsageError for a missing package, with {} in place of the package's name."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A pool as an exporter sees it.

    Attributes:
        began: the time from which counters count, in seconds since 1970.
        read: returns the present measurements of the pool. Any thread may call it. It may block while it reads files.
        notice: shows a sentence to the user.
    """

    pool: str
    began: float
    read: Callable[[], list[Measurement]]
    notice: Callable[[str], None]


class Exporter(ABC):
    """Base class of objects that export the measurements of pools to a monitoring system.

    One exporter may serve several pools, at the same time or one after the other.
    """

    @abstractmethod
    def _begin(self, source: Source) -> Callable[[], None]:
        """Begin to export a pool. This may block. Return a function that ends it within seconds, and never raises."""
        # raises UsageError if nothing can be exported, for example because a port is in use


def exporters_asked(metrics: Exporter | Sequence[Exporter] | None) -> tuple[Exporter, ...]:
    """Return the exporters in the argument `metrics` of a pool. Raise UsageError if it has anything else."""
    if metrics is None:
        return ()
    found = (metrics,) if isinstance(metrics, Exporter) else metrics
    if not isinstance(found, (list, tuple)) or not all(isinstance(each, Exporter) for each in found):
        raise UsageError(f"metrics must be sky.Prometheus(…), sky.OTLP(…) or a list of these, not {metrics!r}")
    return tuple(dict.fromkeys(found))
