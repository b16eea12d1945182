"""State of a pool and its nodes, the events that change it, and the actions that follow. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from skypool.model import Instance


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
        instance: what the driver launched, None before that.
        error: why it went, if it did.
        taken: when its provider takes the machine back, in seconds since 1970; None as long as nobody says so. Until
            it goes it is ready, for the calls that it runs already.
        host: which host of its slice it is, from 0.
        waits: it is through, and waits for the other hosts of its slice: to be ready, or to leave.
    """

    node: int
    phase: Phase = Phase.PLANNED
    instance: Instance | None = None
    error: BaseException | None = None
    taken: float | None = None
    host: int = 0
    waits: bool = False

    @property
    def head(self) -> int:
        """The number of the first host of its slice."""
        return self.node - self.host

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

    def instance_of(self, node: int) -> Instance:
        """Return the instance of a node, which must have been launched."""
        instance = self.nodes[node].instance
        if instance is None:
            raise LookupError(f"node {node} has no instance yet")
        return instance

    def slice_of(self, node: int) -> list[Node]:
        """The hosts of the slice that this node is one of."""
        head = self.nodes[node].head
        return [state for state in self.nodes.values() if state.head == head]


# --- events: what the engine reports -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """Somebody wants the pool; so many nodes will come of each slice."""

    hosts: int = 1


@dataclass(frozen=True, slots=True)
class Launched:
    """An instance was rented for this node, with the other hosts of its slice for those that follow."""

    node: int
    instance: Instance
    others: tuple[Instance, ...] = ()


@dataclass(frozen=True, slots=True)
class Reached:
    """The instance of this node answers."""

    node: int


@dataclass(frozen=True, slots=True)
class Bootstrapped:
    """The node has all that the image asks for."""

    node: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A node could not be launched, reached or made ready; or it was lost later."""

    node: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The provider takes the machine of this node back at `at`; the node had `served` for so many seconds."""

    node: int
    at: float
    served: float


@dataclass(frozen=True, slots=True)
class Drained:
    """No call is left on the node, which gets no more."""

    node: int


@dataclass(frozen=True, slots=True)
class Pressure:
    """Calls have been waiting for a while and every slot is busy."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Somebody wants the end; `error` is why, if it is not the user's own wish."""

    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Terminated:
    """The provider says that the instance of this node has ended."""

    node: int


@dataclass(frozen=True, slots=True)
class StillThere:
    """The end of this node's instance could not be proved."""

    node: int
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
    """Rent a slice for each of these nodes, which is that of its first host."""

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reach:
    """Connect to the instance of this node."""

    node: int


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Make the node what the image says."""

    node: int


@dataclass(frozen=True, slots=True)
class Admit:
    """Give the node work."""

    node: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Give the node no more work: its machine goes at `at`, or before when its calls have ended."""

    node: int
    at: float


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Take the node out of the pool: its calls fail with `error` or run elsewhere.

    The other hosts of its slice go with it, at the same time.
    """

    node: int
    error: BaseException
    others: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Terminate:
    """End these nodes' instances and prove it."""

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Announce:
    """The pool has reached this phase."""

    phase: Phase


Action = Launch | Reach | Bootstrap | Admit | Drain | Dismiss | Terminate | Announce
