"""`Facts`: what a pool shows to its watches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from skypool import events
from skypool.calls.dispatch import Dispatch
from skypool.calls.idle_time import Idleness
from skypool.calls.tally import PoolCounts
from skypool.link.agent_messages import Welcome
from skypool.model import Access
from skypool.offers.ranking import Plan
from skypool.pool import states
from skypool.pool.health import HealthWatch
from skypool.pool.idle_accounting import IdleWatch
from skypool.pool.life import Life
from skypool.pool.open_forwards import Forwards
from skypool.pool.saving import Saving
from skypool.pool.trust_levels import TrustLevels
from skypool.provision.setup_payload import NodeSetup
from skypool.rental.orders import OrderKey
from skypool.rental.pool_account import Rental
from skypool.rental.pool_terms import Terms
from skypool.rental.receipt import Receipt
from skypool.rental.supply import Supply
from skypool.safety.received_data_limit import Quota
from skypool.wire.save_orders import FolderState


class Parts(Protocol):
    """A protocol for the engine: the parts of a pool that `Facts` reads."""

    terms: Terms
    dispatch: Dispatch
    rental: Rental
    supply: Supply | None
    life: Life
    health: HealthWatch
    idle: IdleWatch
    trust_levels: TrustLevels
    node_setup: NodeSetup
    forwards: Forwards
    saving: Saving


class Facts:
    """What one pool shows to its watches: its state, its calls, its health and its costs. Any thread may use it."""

    def __init__(self, engine: Parts, stream: events.EventStream, quota: Quota) -> None:
        budget = engine.terms.budget
        self.pool = engine.terms.name
        self.max_usd = budget.max_usd if budget else None
        self.quota = quota
        self.health = engine.health
        self.forwards = engine.forwards
        self.emit = stream.emit
        self.listen = stream.follow
        self.notice = engine.life.notice
        self.is_stranger = engine.trust_levels.is_known_stranger
        self.words = engine.life.words
        self.ended_calls = engine.dispatch.tally.take
        self._dispatch = engine.dispatch
        self._life = engine.life
        self._rental = engine.rental
        self._supply = engine.supply
        self._idle = engine.idle
        self._setup = engine.node_setup
        self._saving = engine.saving

    @property
    def session(self) -> str:
        return self._rental.session

    @property
    def folders(self) -> Mapping[tuple[int, str], FolderState]:
        return self._saving.states()

    @property
    def secrets(self) -> Mapping[str, str]:
        return self._setup.secrets

    @property
    def state(self) -> states.Pool:
        return self._life.performed

    @property
    def welcomes(self) -> Mapping[int, Welcome]:
        return self._life.connections.welcomes.copy()

    @property
    def counts(self) -> PoolCounts:
        return self._dispatch.tally.now()

    @property
    def idleness(self) -> Mapping[int, Idleness]:
        return self._dispatch.roster.idleness()

    @property
    def plan(self) -> Plan | None:
        return None if self._supply is None else self._supply.plan

    @property
    def attempts(self) -> Sequence[str]:
        attempts = [] if self._supply is None else list(self._supply.attempts)
        return [f"tried {offer.provider} {offer.instance_type}: {error}" for offer, error in attempts]

    @property
    def launches(self) -> Mapping[OrderKey, int]:
        return {} if self._supply is None else self._supply.orders.counts.copy()

    def takes_calls(self, node: int) -> bool:
        return node in self._dispatch.node_queues

    def receipt(self, *, until_now: bool = False) -> Receipt | None:
        if until_now:
            self._idle.record()
        return self._rental.known_receipt

    def way(self, node: int) -> tuple[Access, str]:
        self._dispatch.roster.nodes([node])  # raises UsageError for a node that does not exist
        return self._life.connections.ways[node]
