"""Facts of a pool that does not exist, for tests of what watches one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import skypool as sky
from skypool import events
from skypool.calls.idle_time import Idleness
from skypool.calls.tally import EndedCall, PoolCounts
from skypool.devices.sample import NodeSample
from skypool.link.agent_messages import Welcome
from skypool.metrics.metering import Metering
from skypool.metrics.values import Measurement
from skypool.model import Access
from skypool.offers.ranking import Plan
from skypool.pool.new_samples import NewSamples
from skypool.pool.states import Pool
from skypool.pool.watch import Watch, Watches
from skypool.rental.orders import OrderKey
from skypool.rental.receipt import Receipt
from skypool.safety.received_data_limit import Quota
from skypool.samples.store import SampleStore
from skypool.wire.save_orders import FolderState


@dataclass
class Given:
    """The facts as a test gives them. `told` has the events and the notices of watches. `costs` is None if unknown."""

    pool: str = "mine"
    session: str = "5e55"
    max_usd: float | None = None
    secrets: Mapping[str, str] = field(default_factory=dict)
    quota: Quota = field(default_factory=lambda: Quota(lambda node: False))
    state: Pool = field(default_factory=lambda: Pool(1, 1))
    welcomes: dict[int, Welcome] = field(default_factory=dict)
    counts: PoolCounts = field(default_factory=PoolCounts)
    idleness: dict[int, Idleness] = field(default_factory=dict)
    plan: Plan | None = None
    attempts: Sequence[str] = ()
    launches: Mapping[OrderKey, int] = field(default_factory=dict)
    samples: dict[int, NodeSample] = field(default_factory=dict)
    costs: Receipt | None = None
    calls: list[EndedCall] = field(default_factory=list)
    told: list[events.Event] = field(default_factory=list)
    forwards: Any = None
    folders: dict[tuple[int, str], FolderState] = field(default_factory=dict)

    @property
    def health(self) -> Any:
        return SimpleNamespace(samples=SimpleNamespace(newest=self.samples, take=list), of={}.get, xids={})

    @property
    def notices(self) -> list[str]:
        return [each.text for each in self.told if isinstance(each, events.Notice)]

    def words(self) -> Mapping[int, str]:
        return {node: each.word for node, each in self.state.nodes.items()}

    def takes_calls(self, node: int) -> bool:
        return node in self.idleness

    def ended_calls(self) -> Sequence[EndedCall]:
        calls, self.calls = self.calls, []
        return calls

    def receipt(self, *, until_now: bool = False) -> Receipt | None:
        return self.costs

    def is_stranger(self, node: int) -> bool:
        return False

    def way(self, node: int) -> tuple[Access, str]:
        raise AssertionError("there is no node")

    def listen(self, hear: Callable[[events.Event], None]) -> Callable[[], None]:
        return lambda: None

    def emit(self, event: events.Event) -> None:
        self.told.append(event)

    def notice(self, text: str) -> None:
        self.emit(events.Notice(pool=self.pool, text=text))


class Kept:
    """The samples of a pool that does not exist, and their file.

    Attributes:
        new: the samples that are not written yet.
    """

    def __init__(self, file: Path, quota: Quota | None = None) -> None:
        quota = quota or Quota(lambda node: False)
        self.new = NewSamples(quota)
        self._store = SampleStore(lambda: file, quota)

    def write(self, samples: Sequence[NodeSample] = ()) -> list[NodeSample]:
        """Write samples to the file, and return those that are new."""
        new = self.new.add(samples)
        self._store.write(self.new.take())
        return new


def watching(watch: Watch, given: Given) -> Watches:
    """Return the watches of a pool, which are this one. They have begun."""
    watches = Watches([watch], given.quota, given.notice)
    watches.begin(given)
    return watches


def measured(engine: Any) -> list[Measurement]:
    """Return the measurements of a pool for monitoring systems."""
    metering = Metering(())
    metering.begin(engine.facts)
    return metering.read()


W = TypeVar("W", bound=Watch)


def watch_of(pool: sky.ComputePool, kind: type[W]) -> W:
    """Return a watch of a pool that was started."""
    assert pool._begun is not None
    return next(each.watch for each in pool._begun.watches._runners if isinstance(each.watch, kind))
