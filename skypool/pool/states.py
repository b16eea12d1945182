"""The state of a pool and its nodes, the events that change it, and the actions that follow. All are plain values.

`lifecycle` is the state machine that uses them, and the engine performs the actions. A slice is one machine, or several
hosts that a provider rents out only together. Each host is a node, and a field called `node` has the number of a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from skypool.model import Instance


class Phase(Enum):
    """A phase in the life of a pool or a node, in the order they follow.

    A pool has no booting or bootstrapping phase: it is launching until it is ready.
    """

    PLANNED = "planned"
    LAUNCHING = "launching"
    BOOTING = "booting"
    BOOTSTRAPPING = "bootstrapping"
    READY = "ready"
    DRAINING = "draining"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Node:
    """The state of one node (a rented machine, or one host of a slice).

    Attributes:
        node: the number of the node.
        phase: the phase of its life.
        instance: the machine that the driver launched; None before that.
        error: why the node failed; None if it did not.
        taken: when the provider takes the machine back, in seconds since 1970; None if it has not announced that. The
            node stays ready for the calls that it runs already.
        host: the position of the node in its slice (hosts that are rented together), from 0.
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
        """The number of the first host of the same slice (hosts that are rented together).

        For the first host, and for a machine of its own, that is the node's own number.
        """
        return self.node - self.host

    @property
    def word(self) -> str:
        """The phase as users see it: "leaving" for a ready node whose machine is taken back, else the phase's value.

        The value is a word such as "booting" or "ready".
        """
        return "leaving" if self.taken is not None and self.phase is Phase.READY else self.phase.value


@dataclass(frozen=True, slots=True)
class Pool:
    """The state of a pool. A slice is one machine, or several hosts that a provider rents out only together.

    Attributes:
        minimum: the number of slices that make the pool ready, and that are kept by replacement.
        maximum: the number of slices that the pool may grow to.
        phase: the phase of its life.
        nodes: the nodes by number, also those that have ended.
        failures: how often each kind of failure ended a rented node before it was ready, by the text of the failure.
        replaced: the number of slices that replaced failed ones. Those that replaced a machine which was taken back do
            not count.
        hasty: the number of slices in a row that were taken back before they had served `WORTHWHILE` (300) seconds.
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
        """Return the number of slices whose first host is in any of these phases.

        Slices that their provider is taking back do not count.
        """
        firsts = (node for node in self.nodes.values() if not node.host)
        return sum(node.phase in phases and node.taken is None for node in firsts)

    def instance_of(self, node: int) -> Instance:
        """Return the instance (the rented machine) of a node.

        Raises:
            LookupError: the pool has no such node, or the node has not been launched yet.
        """
        instance = self.nodes[node].instance
        if instance is None:
            raise LookupError(
                f"node {node} has no machine yet, because none was launched for it; this is a bug of skypool, "
                "so please report it"
            )
        return instance

    def slice_of(self, node: int) -> list[Node]:
        """Return all nodes of the slice (hosts that are rented together) that a node belongs to, itself included.

        A machine of its own is a list of one.

        Raises:
            KeyError: the pool has no such node.
        """
        head = self.nodes[node].head
        return [state for state in self.nodes.values() if state.head == head]


# --- events: reports of the engine ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """An event: the user has started the pool. It is ignored if the pool was started before.

    Attributes:
        hosts: the number of nodes of each slice: 1, or more if the provider rents out several hosts only together.
    """

    hosts: int = 1


@dataclass(frozen=True, slots=True)
class Launched:
    """An event: a slice was rented: one machine, or several hosts that are rented only together.

    If the pool is ending, its machines are ended at once.

    Attributes:
        node: the number of its first host.
        instance: the machine of the first host.
        others: the machines of the other hosts; () for one machine. Their numbers are `node` + 1 and so on.
    """

    node: int
    instance: Instance
    others: tuple[Instance, ...] = ()


@dataclass(frozen=True, slots=True)
class Reached:
    """An event: the machine of the node with the number `node` accepts commands, so that its setup can begin.

    It is ignored if the node is not booting.
    """

    node: int


@dataclass(frozen=True, slots=True)
class Bootstrapped:
    """An event: the node with the number `node` is set up as the image says, and its hardware is as expected.

    The node gets calls once all nodes of its slice (hosts that are rented together) are set up.
    """

    node: int


@dataclass(frozen=True, slots=True)
class Failed:
    """An event: a node could not be launched, reached or set up, or was lost later.

    Its machine is ended, with all hosts that are rented together with it. It is ignored if the node is being ended or
    has ended.

    Attributes:
        node: the number of the node.
        error: why it failed.
    """

    node: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class Interrupted:
    """An event: the provider has announced that it will take a node's machine back.

    It is ignored if the node is not ready, or if its provider announced that before.

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
    """An event: no call is left on the node with the number `node`, whose machine is being taken back.

    The machine is then ended, once that is so for all hosts that are rented together with it.
    """

    node: int


@dataclass(frozen=True, slots=True)
class Pressure:
    """An event: calls have been waiting for a while, because every slot (place where one call runs) is busy.

    A pool that may grow then launches one more slice: one machine, or several hosts that are rented only together.
    """


@dataclass(frozen=True, slots=True)
class Stop:
    """An event: the pool must end, with all its machines.

    If it is ending already, only the error of the pool is replaced.

    Attributes:
        error: the reason; None if the user stopped the pool, which keeps the error that the pool has.
    """

    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Terminated:
    """An event: the provider has confirmed that the machine of the node with the number `node` has ended.

    When that is so for all nodes of an ending pool, the pool has ended.
    """

    node: int


@dataclass(frozen=True, slots=True)
class StillThere:
    """An event: an attempt to end a machine is over, but its provider has not confirmed the end.

    The node counts as ended all the same, with this error. It also becomes the error of the pool if the pool has none.

    Attributes:
        node: the number of its node.
        error: why the end is not confirmed.
    """

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
    """An action of the engine: rent one slice for each number in `nodes`, which becomes that of its first host.

    A slice is one machine, or several hosts that a provider rents out only together. The engine reports each as
    `Launched`, and each that it could not rent as `Failed`.
    """

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reach:
    """An action of the engine: connect to the machine of the node with the number `node`.

    The engine reports the result as `Reached` or `Failed`.
    """

    node: int


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """An action of the engine: set up the node with the number `node` as the image says.

    The engine reports the result as `Bootstrapped` or `Failed`.
    """

    node: int


@dataclass(frozen=True, slots=True)
class Admit:
    """An action of the engine: send calls to the node with the number `node` from now on."""

    node: int


@dataclass(frozen=True, slots=True)
class Drain:
    """An action of the engine: send no more calls to a node, because the provider takes its machine back.

    The calls that run there go on, and the machine is ended once they have ended.

    Attributes:
        node: the number of the node.
        at: when the provider takes the machine, in seconds since 1970.
    """

    node: int
    at: float


@dataclass(frozen=True, slots=True)
class Dismiss:
    """An action of the engine: send no more calls to a slice that failed. Its calls run on other nodes or fail.

    A slice is one machine, or several hosts that a provider rents out only together.

    Attributes:
        node: the number of the node that failed.
        error: why it failed.
        others: the numbers of the other hosts of the slice, which are removed at the same time; () for one machine.
    """

    node: int
    error: BaseException
    others: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Terminate:
    """An action of the engine: end the machines of the nodes with the numbers in `nodes`.

    The engine tries until the provider confirms that, and reports each as `Terminated`. When the pool is ending it
    gives up after one more attempt, and reports what is not confirmed as `StillThere`.
    """

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Announce:
    """An action of the engine: tell the user that the pool has reached `phase`.

    For the phases draining and ended, the engine also rents nothing more and ends all calls.
    """

    phase: Phase


Action = Launch | Reach | Bootstrap | Admit | Drain | Dismiss | Terminate | Announce
