"""The state of a pool and its nodes, the events that change it, and the actions that follow. All are plain values.

A slice is one machine, or several hosts that a provider rents out only together. A node is the number of a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from skypool.model import Instance


class Phase(Enum):
    """A phase in the life of a pool or a node, in the order they follow."""

    PLANNED = "planned"
    LAUNCHING = "launching"
    BOOTING = "booting"
    BOOTSTRAPPING = "bootstrapping"
    READY = "ready"
    DRAINING = "draining"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Node:
    """The state of one node.

    Attributes:
        node: the number of the node.
        phase: the phase of its life.
        instance: the machine that the driver launched; None before that.
        error: why the node failed; None if it did not.
        taken: when the provider takes the machine back, in seconds since 1970; None if it has not announced that. The
            node stays ready for the calls that it runs already.
        host: the position of the node in its slice, from 0.
        waits: True if the node waits for the other hosts of its slice, to become ready or to leave together.
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
        """The number of the first host of the same slice."""
        return self.node - self.host

    @property
    def word(self) -> str:
        """The phase as users see it: "leaving" for a ready node whose machine is taken back, else the phase's name."""
        return "leaving" if self.taken is not None and self.phase is Phase.READY else self.phase.value


@dataclass(frozen=True, slots=True)
class Pool:
    """The state of a pool.

    Attributes:
        minimum: the number of slices that make the pool ready, and that are kept by replacement.
        maximum: the number of slices that the pool may grow to.
        phase: the phase of its life.
        nodes: the nodes by number, also those that have ended.
        failures: how often each kind of failure ended a rented node before it was ready, by the text of the failure.
        replaced: the number of slices that replaced failed ones. Those that replaced a machine which was taken back do
            not count.
        hasty: the number of slices in a row that were taken back before they had served `WORTHWHILE` seconds.
        first: the first failure that ended a rented node before it was ready. Later failures may follow from it.
        error: the error that ended the pool; None if there is none.
        hosts: the number of nodes of each slice, as expected before it is launched.
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
        """Return the number of slices in any of these phases, without those that are being taken back."""
        firsts = (node for node in self.nodes.values() if not node.host)
        return sum(node.phase in phases and node.taken is None for node in firsts)

    def instance_of(self, node: int) -> Instance:
        """Return the instance of a node.

        Raises:
            LookupError: the node has not been launched yet.
        """
        instance = self.nodes[node].instance
        if instance is None:
            raise LookupError(f"node {node} has no instance yet")
        return instance

    def slice_of(self, node: int) -> list[Node]:
        """Return all nodes of the slice that a node belongs to, itself included."""
        head = self.nodes[node].head
        return [state for state in self.nodes.values() if state.head == head]


# --- events: reports of the engine ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """The request to start the pool.

    Attributes:
        hosts: the number of nodes of each slice.
    """

    hosts: int = 1


@dataclass(frozen=True, slots=True)
class Launched:
    """The report that a slice was rented.

    Attributes:
        node: the number of its first host.
        instance: the machine of the first host.
        others: the machines of the other hosts. Their numbers follow `node`.
    """

    node: int
    instance: Instance
    others: tuple[Instance, ...] = ()


@dataclass(frozen=True, slots=True)
class Reached:
    """The report that the machine of node `node` answers, so that its setup can begin."""

    node: int


@dataclass(frozen=True, slots=True)
class Bootstrapped:
    """The report that node `node` is set up as the image says, and that its hardware is as expected."""

    node: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The report that node `node` could not be launched, reached or set up, or was lost later. `error` tells why."""

    node: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The notice that the provider will take a node's machine back.

    Attributes:
        node: the number of the node.
        at: when the machine goes, in seconds since 1970.
        served: the seconds for which the node was ready.
    """

    node: int
    at: float
    served: float


@dataclass(frozen=True, slots=True)
class Drained:
    """The report that no call is left on node `node`, whose machine is being taken back."""

    node: int


@dataclass(frozen=True, slots=True)
class Pressure:
    """The report that calls have been waiting for a while because every slot is busy."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The request to end the pool. `error` is the reason; None if the user asked for it."""

    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Terminated:
    """The report that the provider confirms the end of the machine of node `node`."""

    node: int


@dataclass(frozen=True, slots=True)
class StillThere:
    """The report that the end of the machine of node `node` is not confirmed. `error` tells why."""

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


# --- actions: orders to the engine ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """The order to rent one slice for each of `nodes`, the numbers of their first hosts."""

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reach:
    """The order to connect to the machine of node `node`."""

    node: int


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """The order to set up node `node` as the image says."""

    node: int


@dataclass(frozen=True, slots=True)
class Admit:
    """The order to give node `node` calls from now on."""

    node: int


@dataclass(frozen=True, slots=True)
class Drain:
    """The order to give a node no more calls, because its machine is taken back.

    Attributes:
        node: the number of the node.
        at: when the machine goes, in seconds since 1970. It is ended earlier if its calls have ended.
    """

    node: int
    at: float


@dataclass(frozen=True, slots=True)
class Dismiss:
    """The order to remove a slice from the dispatch of calls. Its calls run elsewhere or fail.

    Attributes:
        node: the number of the node that failed.
        error: why it failed.
        others: the numbers of the other hosts of the slice, which are removed at the same time.
    """

    node: int
    error: BaseException
    others: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Terminate:
    """The order to end the machines of the nodes `nodes`, and to have the provider confirm it."""

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Announce:
    """The order to tell the user that the pool has reached `phase`."""

    phase: Phase


Action = Launch | Reach | Bootstrap | Admit | Drain | Dismiss | Terminate | Announce
