"""State machine of a pool: (state, event) -> (state, actions). No clock, no network, no asyncio.

It decides when to launch, replace, drain and end nodes, also after a spot notice.

    planned → launching → booting → bootstrapping → ready → draining → ended

`engine` performs the actions and reports back with events. A pool is ready when `minimum` of its slices are.

What is launched, replaced and counted is a slice: one machine, or several hosts that are only had together. Each host
is a node, and the rank of the first one stands for the slice. It is ready when all hosts are, and it goes as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from skypool.errors import (
    CapacityError,
    ConnectionLost,
    CredentialsError,
    HostKeyMismatch,
    PythonMismatch,
    UsageError,
    gone_with,
    taken_back,
)


class Phase(Enum):
    """Where a pool or a node is in its life."""

    PLANNED = "planned"
    LAUNCHING = "launching"
    BOOTING = "booting"
    BOOTSTRAPPING = "bootstrapping"
    READY = "ready"
    DRAINING = "draining"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Node:
    """One node's state.

    Attributes:
        instance: what the driver launched; error: why it went, if it did.
        taken: when its provider takes the machine back, in seconds since 1970; None as long as nobody says so. Until
            it goes it is ready, for the calls that it runs already.
        host: which host of its slice it is, from 0.
        waits: it is through, and waits for the other hosts of its slice: to be ready, or to leave.
    """

    rank: int
    phase: Phase = Phase.PLANNED
    instance: Any = None
    error: BaseException | None = None
    taken: float | None = None
    host: int = 0
    waits: bool = False

    @property
    def head(self) -> int:
        """The rank of the first host of its slice."""
        return self.rank - self.host

    @property
    def word(self) -> str:
        """Its phase as a person is told."""
        return "leaving" if self.taken is not None and self.phase is Phase.READY else self.phase.value


@dataclass(frozen=True, slots=True)
class Pool:
    """A pool's state.

    Attributes:
        minimum: slices needed to be ready; maximum: slices it may grow to.
        failures: how often each kind of failure ended a rented node before it was ready, by its words.
        replaced: how many slices were launched in the place of lost ones; those taken back do not count.
        hasty: how many slices in a row were taken back before they had served for `WORTHWHILE`.
        first: the first failure that ended a rented node before it was ready; later ones may come of it.
        error: what ended the pool, if something did.
        hosts: how many nodes come of a slice, as far as that is known before it is launched.
    """

    minimum: int
    maximum: int
    phase: Phase = Phase.PLANNED
    nodes: Mapping[int, Node] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    replaced: int = 0
    hasty: int = 0
    first: BaseException | None = None
    error: BaseException | None = None
    hosts: int = 1

    def count(self, *phases: Phase) -> int:
        """How many slices are in any of these phases, without those that are taken back."""
        firsts = (node for node in self.nodes.values() if not node.host)
        return sum(node.phase in phases and node.taken is None for node in firsts)

    def slice_of(self, rank: int) -> list[Node]:
        """The hosts of the slice that this node is one of."""
        head = self.nodes[rank].head
        return [node for node in self.nodes.values() if node.head == head]


# --- events: what the engine reports -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Somebody wants the pool; so many nodes will come of each slice."""

    hosts: int = 1


@dataclass(frozen=True, slots=True)
class Launched:
    """An instance was rented for this rank, with the other hosts of its slice for those that follow."""

    rank: int
    instance: Any
    others: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Reached:
    """The instance of this rank answers."""

    rank: int


@dataclass(frozen=True, slots=True)
class Bootstrapped:
    """The node of this rank has all that the image asks for."""

    rank: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A node could not be launched, reached or made ready; or it was lost later."""

    rank: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The provider takes the machine of this rank back at `at`; the node had `served` for so many seconds."""

    rank: int
    at: float
    served: float


@dataclass(frozen=True, slots=True)
class Drained:
    """No call is left on the node of this rank, which gets no more."""

    rank: int


@dataclass(frozen=True, slots=True)
class Pressure:
    """Calls have been waiting for a while and every slot is busy."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Somebody wants the end; `error` is why, if it is not the user's own wish."""

    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Terminated:
    """The provider says that the instance of this rank has ended."""

    rank: int


@dataclass(frozen=True, slots=True)
class StillThere:
    """The end of this rank's instance could not be proved."""

    rank: int
    error: BaseException


Event = (
    Start
    | Launched
    | Reached
    | Bootstrapped
    | Failed
    | Interrupted
    | Drained
    | Pressure
    | Stop
    | Terminated
    | StillThere
)


# --- actions: what the engine does ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """Rent a slice for each of these ranks, which is that of its first host."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reach:
    """Connect to the instance of this rank."""

    rank: int


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Make the node of this rank what the image says."""

    rank: int


@dataclass(frozen=True, slots=True)
class Admit:
    """Give the node of this rank work."""

    rank: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Give the node of this rank no more work: its machine goes at `at`, or before when its calls have ended."""

    rank: int
    at: float


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Take the node of this rank out of the pool: its calls fail with `error` or run elsewhere.

    The other hosts of its slice go with it, at the same time.
    """

    rank: int
    error: BaseException
    others: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Terminate:
    """End these ranks' instances and prove it."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Announce:
    """The pool has reached this phase."""

    phase: Phase


Action = Launch | Reach | Bootstrap | Admit | Drain | Dismiss | Terminate | Announce

CERTAIN = (PythonMismatch, UsageError, CredentialsError, HostKeyMismatch)
"""Failures that every other node would have, too, or that nobody should try to go around."""

SAME_FAILURE_LIMIT = 2
"""A failure that ends two slices in the same words would end every other one too: the pool ends with it."""

REPLACEMENTS = 3
"""How many slices are launched in the place of lost ones, for each slice that the pool may have."""

WORTHWHILE = 300.0
"""Seconds of service after which an interruption is what a spot market is: a node replaced for it does not count.
Nodes taken back sooner count while they follow each other, as a market that gives none for long is none to rent on."""

_LIVING = (Phase.LAUNCHING, Phase.BOOTING, Phase.BOOTSTRAPPING, Phase.READY)


def step(pool: Pool, event: Event) -> tuple[Pool, list[Action]]:
    """What `event` makes of the pool, and what is to be done about it."""
    match event:
        case Start(hosts):
            return _start(pool, hosts)
        case Launched(rank, instance, others):
            return _launched(pool, rank, (instance, *others))
        case Reached(rank):
            if pool.nodes[rank].phase is not Phase.BOOTING:
                return pool, []
            return _with(pool, rank, phase=Phase.BOOTSTRAPPING), [Bootstrap(rank)]
        case Bootstrapped(rank):
            return _bootstrapped(pool, rank)
        case Failed(rank, error):
            return _failed(pool, rank, error)
        case Interrupted(rank, at, served):
            return _interrupted(pool, rank, at, served)
        case Drained(rank):
            return _drained(pool, rank)
        case Pressure():
            return _grow(pool)
        case Stop(error):
            return _stop(pool if error is None else replace(pool, error=error))
        case Terminated(rank):
            return _terminated(pool, rank, None)
        case StillThere(rank, error):
            return _terminated(pool, rank, error)


def _with(pool: Pool, rank: int, **changes: Any) -> Pool:
    node = replace(pool.nodes.get(rank, Node(rank)), **changes)
    return replace(pool, nodes={**pool.nodes, rank: node})


def _start(pool: Pool, hosts: int) -> tuple[Pool, list[Action]]:
    if pool.phase is not Phase.PLANNED:
        return pool, []
    ranks = tuple(range(0, pool.minimum * hosts, hosts))
    nodes = {rank: Node(rank, Phase.LAUNCHING) for rank in ranks}
    pool = replace(pool, phase=Phase.LAUNCHING, nodes=nodes, hosts=hosts)
    return pool, [Announce(Phase.LAUNCHING), Launch(ranks)]


def _launched(pool: Pool, head: int, instances: Sequence[Any]) -> tuple[Pool, list[Action]]:
    is_late = pool.phase in (Phase.DRAINING, Phase.ENDED)
    phase = Phase.DRAINING if is_late else Phase.BOOTING
    ranks = tuple(range(head, head + len(instances)))
    for host, instance in enumerate(instances):
        pool = _with(pool, head + host, phase=phase, instance=instance, host=host)
    return pool, [Terminate(ranks)] if is_late else [Reach(rank) for rank in ranks]


def _bootstrapped(pool: Pool, rank: int) -> tuple[Pool, list[Action]]:
    """A node is through; when all hosts of its slice are, they get work."""
    if pool.nodes[rank].phase is not Phase.BOOTSTRAPPING:
        return pool, []
    pool = _with(pool, rank, waits=True)
    hosts = pool.slice_of(rank)
    if not all(node.waits for node in hosts):
        return pool, []
    for node in hosts:
        pool = _with(pool, node.rank, phase=Phase.READY, waits=False)
    actions: list[Action] = [Admit(node.rank) for node in hosts]
    if pool.phase is Phase.LAUNCHING and pool.count(Phase.READY) >= pool.minimum:
        pool = replace(pool, phase=Phase.READY)
        actions.append(Announce(Phase.READY))
    return pool, actions


def _failed(pool: Pool, rank: int, error: BaseException) -> tuple[Pool, list[Action]]:
    """A node is gone: end what is left of its slice, and launch another in its place unless that is hopeless."""
    node = pool.nodes[rank]
    hosts = pool.slice_of(rank)
    if node.phase in (Phase.DRAINING, Phase.ENDED):
        return pool, []
    if node.taken is not None and isinstance(error, ConnectionLost):
        error = taken_back(rank, error)
    rented = node.instance is not None
    others = tuple(each.rank for each in hosts if each is not node)
    actions: list[Action] = [Dismiss(rank, error, others)] if node.phase is Phase.READY else []
    if rented:
        actions.append(Terminate(tuple(each.rank for each in hosts)))
    for each in hosts:
        why = error if each is node else gone_with(rank, each.rank, error)
        pool = _with(pool, each.rank, phase=Phase.DRAINING if rented else Phase.ENDED, error=why)
    if pool.phase is Phase.DRAINING:
        pool, closing = _closed(pool)
        return pool, [*actions, *closing]
    hopeless = not rented or isinstance(error, CERTAIN)
    is_lack = isinstance(error, CapacityError)  # another place may have it
    if rented and node.phase is not Phase.READY and not is_lack:
        words = alike(error)
        failures = {**pool.failures, words: pool.failures.get(words, 0) + 1}
        pool = replace(pool, failures=failures, first=pool.first or error)
        hopeless = hopeless or _is_hopeless(pool)
    if not hopeless and pool.count(*_LIVING) < pool.minimum and _may_replace(pool, node):
        pool, launching = _one_more(replace(pool, replaced=pool.replaced + (node.taken is None)))
        return pool, [*actions, *launching]
    if _can_go_on(pool, hopeless):
        return pool, actions
    if not rented and pool.phase is Phase.LAUNCHING and pool.first is not None:
        error = pool.first  # that no other machine can be had is only what came of it
    pool, stopping = _stop(replace(pool, error=error))
    return pool, [*actions, *stopping]


def _interrupted(pool: Pool, rank: int, at: float, served: float) -> tuple[Pool, list[Action]]:
    """A node will go, and all of its slice: let it end what it runs, and launch another in its place."""
    node = pool.nodes[rank]
    if node.phase is not Phase.READY or node.taken is not None or pool.phase in (Phase.DRAINING, Phase.ENDED):
        return pool, []
    actions: list[Action] = []
    for each in pool.slice_of(rank):
        pool = _with(pool, each.rank, taken=at)
        actions.append(Drain(each.rank, at))
    pool = replace(pool, hasty=0 if served >= WORTHWHILE else pool.hasty + 1)
    if pool.phase is Phase.LAUNCHING:  # no call runs yet: there is nothing to wait for
        pool, failing = _failed(pool, rank, taken_back(rank))
        return pool, [*actions, *failing]
    if pool.count(*_LIVING) < pool.minimum and _may_replace(pool, pool.nodes[rank]):
        pool, launching = _one_more(pool)
        actions += launching
    return pool, actions


def _drained(pool: Pool, rank: int) -> tuple[Pool, list[Action]]:
    """No call is left on a node that leaves; its slice goes when none is left on any of its hosts."""
    if pool.nodes[rank].taken is None:
        return pool, []
    pool = _with(pool, rank, waits=True)
    if not all(node.waits for node in pool.slice_of(rank)):
        return pool, []
    return _failed(pool, rank, taken_back(rank))


def _may_replace(pool: Pool, lost: Node) -> bool:
    """Whether so few were replaced that one more may be."""
    return not _is_churning(pool) if lost.taken is not None else pool.replaced < REPLACEMENTS * pool.maximum


def _is_churning(pool: Pool) -> bool:
    """Whether the provider gives machines only to take them back."""
    return pool.hasty > REPLACEMENTS * pool.maximum


def _one_more(pool: Pool) -> tuple[Pool, list[Action]]:
    rank = 1 + max(node.rank + (pool.hosts - 1 if node.instance is None else 0) for node in pool.nodes.values())
    return _with(pool, rank, phase=Phase.LAUNCHING), [Launch((rank,))]


def alike(error: BaseException) -> str:
    """What a failure says, without the names and numbers that differ from machine to machine."""
    return re.sub(r"\S*\d\S*", "#", f"{type(error).__name__}: {error}")


def _is_hopeless(pool: Pool) -> bool:
    """Whether one more machine would end as those before it did."""
    times = pool.failures.values()
    return max(times, default=0) >= SAME_FAILURE_LIMIT or sum(times) > REPLACEMENTS * pool.maximum


def _can_go_on(pool: Pool, hopeless: bool) -> bool:
    """Whether a pool that lost a slice, and launches none in its place, still is of use or can become so."""
    if pool.phase is Phase.READY and any(node.phase is Phase.READY for node in pool.nodes.values()):
        return True
    return not hopeless and pool.count(*_LIVING) >= (1 if pool.phase is Phase.READY else pool.minimum)


def _grow(pool: Pool) -> tuple[Pool, list[Action]]:
    if pool.phase is not Phase.READY or pool.count(Phase.LAUNCHING, Phase.BOOTING, Phase.BOOTSTRAPPING):
        return pool, []
    if pool.count(Phase.READY) >= pool.maximum or _is_hopeless(pool) or _is_churning(pool):
        return pool, []
    return _one_more(pool)


def _stop(pool: Pool) -> tuple[Pool, list[Action]]:
    """End every node that has an instance; those still being launched are ended when they arrive."""
    if pool.phase in (Phase.DRAINING, Phase.ENDED):
        return pool, []
    pool = replace(pool, phase=Phase.DRAINING)
    ending = tuple(
        rank
        for rank, node in sorted(pool.nodes.items())
        if node.instance is not None and node.phase not in (Phase.DRAINING, Phase.ENDED)
    )
    for rank in ending:
        pool = _with(pool, rank, phase=Phase.DRAINING)
    actions: list[Action] = [Announce(Phase.DRAINING)]
    if ending:
        actions.append(Terminate(ending))
    pool, closing = _closed(pool)
    return pool, [*actions, *closing]


def _terminated(pool: Pool, rank: int, error: BaseException | None) -> tuple[Pool, list[Action]]:
    pool = _with(pool, rank, phase=Phase.ENDED, error=error or pool.nodes[rank].error)
    if error is not None and pool.error is None:
        pool = replace(pool, error=error)
    return _closed(pool)


def _closed(pool: Pool) -> tuple[Pool, list[Action]]:
    """The pool has ended when it drains and no node is left."""
    if pool.phase is Phase.DRAINING and all(n.phase is Phase.ENDED for n in pool.nodes.values()):
        return replace(pool, phase=Phase.ENDED), [Announce(Phase.ENDED)]
    return pool, []
