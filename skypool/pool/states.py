"""The state of a pool and its nodes, the events that change it, and the actions that follow. All are plain values.

`lifecycle` is the state machine that uses them, and the engine performs the actions. A slice is one machine, or several
hosts that a provider rents out only together. Each host is a node. A field called `node` is the number of a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from skypool.model import Instance


class Phase(Enum):
    """A phase in the life of a pool or a node. The phases are listed in the order in which they follow each other.

    A pool has no booting or bootstrapping phase: a pool is launching until it is ready. "draining" means that the
    machines are being ended.
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
        phase: the phase of the node's life.
        instance: the machine that the driver launched; None before the launch.
        error: why the node failed; None if it did not.
        taken: when the provider takes the machine back, in seconds since 1970; None if the provider has not announced
            that. After the announcement, the phase stays ready while calls still run on the node.
        host: the position of the node in its slice (hosts that are rented together), from 0.
        waits: True if the node waits for the other hosts of its slice. The hosts become ready together. When the
            provider takes them back, or when they are retired, they also end together.
        retiring: True if the user has retired the node, or made the pool smaller. The phase stays ready while calls
            still run on the node. A machine that is still being launched is ended when it is there.
        unhealthy: why the node gets no more calls, although it is ready: a device must not be used any more. None for a
            healthy node. The phase stays ready while calls still run on the node.
    """

    node: int
    phase: Phase = Phase.PLANNED
    instance: Instance | None = None
    error: BaseException | None = None
    taken: float | None = None
    host: int = 0
    waits: bool = False
    retiring: bool = False
    unhealthy: BaseException | None = None

    @property
    def head(self) -> int:
        """The node number of the first host of this node's slice (hosts that are rented together).

        For the first host, and for a machine that is rented alone, that is the node's own number.
        """
        return self.node - self.host

    @property
    def word(self) -> str:
        """The phase as users see it: a word such as "booting", "ready" or "leaving".

        "leaving" is a ready node that gets no new calls, because the provider takes its machine back or because it was
        retired. "unhealthy" is one that gets none because of a device. Other words are the values of `Phase`.
        """
        if self.unhealthy is not None and self.phase is Phase.READY:
            return "unhealthy"
        return "leaving" if self.is_leaving and self.phase is Phase.READY else self.phase.value

    @property
    def is_leaving(self) -> bool:
        """True if the provider takes the machine back, or the node was retired or is unhealthy. It ends soon."""
        return self.taken is not None or self.retiring or self.unhealthy is not None


@dataclass(frozen=True, slots=True)
class Pool:
    """The state of a pool. A slice is one machine, or several hosts that a provider rents out only together.

    Attributes:
        minimum: the number of slices with which the pool is ready. If fewer are left, lost slices are replaced.
        maximum: the number of slices that the pool may grow to.
        phase: the phase of the pool's life.
        nodes: a dict from node numbers to the nodes, including nodes that have ended.
        failures: a dict from error texts to the number of rented slices that failed with that text before they were
            ready. In a text, "#" stands for each word that has a digit.
        replaced: the number of slices that replaced failed ones. Replacements of slices that the provider took back, or
            that were retired, do not count.
        hasty: the number of slices in a row that were taken back before they had served `WORTHWHILE` (300) seconds.
        first: the first error with which a rented slice failed before the slice was ready; None if there was no such
            error.
        error: the error that ended the pool; None if the pool goes on, or was ended without an error.
        hosts: the number of nodes that each slice is expected to have.
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
        """Return the number of slices whose first host is in one of the given phases.

        Slices that their provider is taking back, and slices that were retired, do not count.
        """
        firsts = (node for node in self.nodes.values() if not node.host)
        return sum(node.phase in phases and not node.is_leaving for node in firsts)

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
        """Return all nodes of the slice (hosts that are rented together) that a node belongs to, also that node.

        For a machine that is rented alone, the list has only its node.

        Raises:
            KeyError: the pool has no such node.
        """
        head = self.nodes[node].head
        return [state for state in self.nodes.values() if state.head == head]


# --- events: reports of the engine ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """An event: the user has started the pool. The event is ignored if the pool was started before.

    Attributes:
        hosts: the number of nodes of each slice: 1, or more if the provider rents out several hosts only together.
    """

    hosts: int = 1


@dataclass(frozen=True, slots=True)
class Launched:
    """An event: a slice was rented, which is one machine, or several hosts that are rented only together.

    If the pool is ending or has ended, the machines of the slice are ended at once.

    Attributes:
        node: the node number of the first host.
        instance: the machine of the first host.
        others: the machines of the other hosts; () for one machine. The numbers of these nodes follow `node`: `node` +
            1 and so on.
    """

    node: int
    instance: Instance
    others: tuple[Instance, ...] = ()


@dataclass(frozen=True, slots=True)
class Reached:
    """An event: the machine of the node with the number `node` accepts commands, so that its setup can begin.

    The event is ignored if the node is not booting.
    """

    node: int


@dataclass(frozen=True, slots=True)
class Bootstrapped:
    """An event: the node with the number `node` is set up as the image says, and its hardware is as expected.

    The node gets calls once all nodes of its slice (hosts that are rented together) are set up. The event is ignored if
    the node was not being set up.
    """

    node: int


@dataclass(frozen=True, slots=True)
class Failed:
    """An event: a node could not be launched, reached or set up, or was lost later.

    The machine is ended, together with all hosts of the same slice (hosts that are rented together). The event is
    ignored if the node is being ended or has ended.

    Attributes:
        node: the number of the node.
        error: why the node failed.
    """

    node: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class Interrupted:
    """An event: the provider has announced that it will take a node's machine back.

    The event is ignored if the node is not ready, if the provider announced this before, or if the pool is ending.

    Attributes:
        node: the number of the node.
        at: when the provider takes the machine, in seconds since 1970.
        served: the seconds for which the node was ready.
    """

    node: int
    at: float
    served: float


@dataclass(frozen=True, slots=True)
class Unhealthy:
    """An event: a device of a ready node must not be used any more.

    The node gets no more calls, and its machine is ended when those that run have ended. The event is ignored if the
    node is not ready, leaves already, or if the pool is ending.

    Attributes:
        node: the number of the node.
        error: what is wrong.
    """

    node: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class Drained:
    """An event: no call is left on the node with the number `node`, which is being taken back or was retired.

    The machine is ended when no call is left on any host of the machine's slice (hosts that are rented together).
    """

    node: int


@dataclass(frozen=True, slots=True)
class Pressure:
    """An event: calls have been waiting for about a second, because every slot (place where one call runs) is busy.

    A pool that may grow then launches one more slice: one machine, or several hosts that are rented only together.
    """


@dataclass(frozen=True, slots=True)
class Resize:
    """An event: the user has changed the number of nodes that the pool is to have.

    Missing slices are launched, and surplus slices are retired. A slice is one machine, or several hosts that are
    rented only together. Before the start, only the numbers are noted. The event is ignored if the pool is ending.

    Attributes:
        minimum: the new `Pool.minimum`: the number of slices that the pool must have.
        maximum: the new `Pool.maximum`: the number of slices that the pool may grow to.
        load: a dict from node numbers to the number of calls that run on the node or wait for it. Of the slices that
            are ready, those with the fewest calls are retired first. Nodes that are missing here have no calls.
    """

    minimum: int
    maximum: int
    load: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Retire:
    """An event: the user has retired the node with the number `node`, together with its slice.

    A slice is one machine, or several hosts that are rented only together. It ends when its calls have ended, and is
    not replaced. The event is ignored if the node leaves already, has ended or is the last one, or if the pool is
    ending.
    """

    node: int


@dataclass(frozen=True, slots=True)
class Stop:
    """An event: the pool must end, with all its machines.

    If the pool is ending or has ended already, at most the error of the pool changes.

    Attributes:
        error: the reason, which becomes the error of the pool. None if the user stopped the pool: then the pool keeps
            the error that it has.
    """

    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Terminated:
    """An event: the provider has confirmed that the machine of the node with the number `node` has ended.

    When the machines of all nodes of an ending pool have ended, the pool has ended.
    """

    node: int


@dataclass(frozen=True, slots=True)
class StillThere:
    """An event: attempts to end a machine have been given up, and its provider has not confirmed the end.

    The node counts as ended all the same. The error becomes the error of the node, and of the pool if the pool has no
    error yet.

    Attributes:
        node: the number of the machine's node.
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
    | Unhealthy
    | Drained
    | Pressure
    | Resize
    | Retire
    | Stop
    | Terminated
    | StillThere
)


# --- actions: orders to the engine ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """An action of the engine: rent one slice for each number in `nodes`.

    A slice is one machine, or several hosts that a provider rents out only together. The number becomes the node number
    of the slice's first host. The engine reports each rented slice as `Launched`. It reports each slice that could not
    be rented as `Failed`.
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
    """An action of the engine: send no more calls to a node: it was retired, is taken back or is unhealthy.

    The calls that run on the node go on. When they have ended, the engine reports `Drained`.

    Attributes:
        node: the number of the node.
        at: when the provider takes the machine, in seconds since 1970. None if the node was retired or is unhealthy.
        unhealthy: what is wrong with the node; None if it was retired or is taken back.
    """

    node: int
    at: float | None
    unhealthy: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Dismiss:
    """An action of the engine: send no more calls to a slice, because one of its nodes failed or has drained.

    A slice is one machine, or several hosts that a provider rents out only together. The slice's calls that have not
    ended run on other nodes, or fail.

    Attributes:
        node: the number of the node that failed or has drained.
        error: why the node failed or ends.
        others: the numbers of the other hosts of the slice, which are removed at the same time; () for one machine.
    """

    node: int
    error: BaseException
    others: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Terminate:
    """An action of the engine: end the machines of the nodes with the numbers in `nodes`.

    The engine tries until the provider confirms the end, and reports each node as `Terminated`. Once the pool is
    ending, only one attempt follows. If the end of a machine is not confirmed then, its node is reported as
    `StillThere`.
    """

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Announce:
    """An action of the engine: tell the user that the pool has reached `phase`.

    For the phases draining and ended, the engine also rents nothing more and ends all calls.
    """

    phase: Phase


Action = Launch | Reach | Bootstrap | Admit | Drain | Dismiss | Terminate | Announce
