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
    """A phase in the life of a pool or a node, in the order in which the phases follow each other.

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
    """The state of one node. A ready node that is to leave stays in the phase ready until its calls have ended.

    Attributes:
        instance: the machine; None before the launch.
        error: why the node failed.
        taken: when the provider takes the machine back, in seconds since 1970; None if the provider has not announced
            that.
        host: the position of the node in its slice, from 0.
        waits: True while the node waits for the other hosts of its slice. They become ready together, and they end
            together when the provider takes them back, or when they are retired.
        retiring: True if the user has retired the node, or made the pool smaller. A machine that is still being
            launched is ended when it is there.
        unhealthy: why the node gets no more calls: a device must not be used any more. None for a healthy node.
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
        """The node number of the first host of this node's slice. It may be the number of this node."""
        return self.node - self.host

    @property
    def word(self) -> str:
        """The phase as users see it: a word such as "booting", "ready" or "leaving".

        A ready node that gets no new calls is "unhealthy" if one of its devices is. It is "leaving" if it was retired
        or its provider takes the machine back. Other words are the values of `Phase`.
        """
        if self.unhealthy is not None and self.phase is Phase.READY:
            return "unhealthy"
        return "leaving" if self.is_leaving and self.phase is Phase.READY else self.phase.value

    @property
    def is_leaving(self) -> bool:
        """True if the node will end: the provider takes its machine back, it was retired, or it is unhealthy."""
        return self.taken is not None or self.retiring or self.unhealthy is not None


@dataclass(frozen=True, slots=True)
class Pool:
    """The state of a pool.

    Attributes:
        minimum: the number of slices with which the pool is ready. If fewer are left, lost slices are replaced.
        maximum: the number of slices that the pool may grow to.
        nodes: the nodes by their numbers, including nodes that have ended.
        failures: the number of rented slices that failed before they were ready, by the text of the error. In a text,
            "#" stands for each word that has a digit.
        replaced: the number of slices that replaced failed ones. Replacements of slices that the provider took back, or
            that were retired, do not count.
        hasty: the number of slices in a row that were taken back before they had served `WORTHWHILE` (300) seconds.
        first: the first error with which a rented slice failed before the slice was ready.
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

        Slices that the provider takes back, that were retired or that are unhealthy do not count.
        """
        firsts = (node for node in self.nodes.values() if not node.host)
        return sum(node.phase in phases and not node.is_leaving for node in firsts)

    def instance_of(self, node: int) -> Instance:
        """Return the instance of a node. Raises LookupError if it has none yet, or the pool has no such node."""
        instance = self.nodes[node].instance
        if instance is None:
            raise LookupError(
                f"node {node} has no machine yet, because none was launched for it; this is a bug of skypool, "
                "so please report it"
            )
        return instance

    def slice_of(self, node: int) -> list[Node]:
        """Return all nodes of the slice that a node belongs to, including that node."""
        head = self.nodes[node].head
        return [state for state in self.nodes.values() if state.head == head]


# --- events: reports of the engine ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Start:
    """An event: the user has started the pool, whose slices have `hosts` nodes each. Ignored after the first time."""

    hosts: int = 1


@dataclass(frozen=True, slots=True)
class Launched:
    """An event: a slice was rented. If the pool is ending or has ended, the slice's machines are ended at once.

    `node` and `instance` are those of the first host. The nodes of the `others` are `node` + 1 and so on.
    """

    node: int
    instance: Instance
    others: tuple[Instance, ...] = ()


@dataclass(frozen=True, slots=True)
class Reached:
    """An event: the machine of a node that was booting accepts commands, so that its setup can begin."""

    node: int


@dataclass(frozen=True, slots=True)
class Bootstrapped:
    """An event: a node is set up as the image says, and its hardware is as expected.

    The node gets calls once all nodes of its slice are set up. The event is ignored if the node was not being set up.
    """

    node: int


@dataclass(frozen=True, slots=True)
class Failed:
    """An event: a node could not be launched, reached or set up, or was lost later.

    Its whole slice is ended. The event is ignored if the node is being ended or has ended.
    """

    node: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class Interrupted:
    """An event: the provider has announced that it will take a node's machine back.

    The event is ignored if the node is not ready, if the provider announced this before, or if the pool is ending. `at`
    is when the provider takes the machine, in seconds since 1970. `served` are the seconds for which the node was
    ready.
    """

    node: int
    at: float
    served: float


@dataclass(frozen=True, slots=True)
class Unhealthy:
    """An event: a device of a ready node must not be used any more.

    The node gets no more calls, and its machine is ended when those that run have ended. The event is ignored if the
    node is not ready, leaves already, or if the pool is ending.
    """

    node: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class Drained:
    """An event: no call is left on a leaving node. When none is left on any host of its slice, the slice is ended."""

    node: int


@dataclass(frozen=True, slots=True)
class Pressure:
    """An event: calls have waited for a second, as every slot is busy. A pool that may grow launches a slice."""


@dataclass(frozen=True, slots=True)
class Resize:
    """An event: the user has changed the smallest and largest number of slices that the pool is to have.

    Missing slices are launched, and surplus slices are retired. Before the start, only the numbers are noted. The event
    is ignored if the pool is ending. `load` is the number of calls that run on each node or wait for it: of the ready
    slices, those with the fewest are retired first.
    """

    minimum: int
    maximum: int
    load: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Retire:
    """An event: the user has retired a node, together with its slice.

    The slice ends when its calls have ended, and is not replaced. The event is ignored if the node leaves already, has
    ended or is of the last slice, or if the pool is ending.
    """

    node: int


@dataclass(frozen=True, slots=True)
class Stop:
    """An event: the pool must end, with all its machines. If the pool is ending already, at most its error changes.

    `error` is the reason, which becomes the error of the pool. If the user stopped the pool, `error` is None, and the
    pool keeps the error that it has.
    """

    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Terminated:
    """An event: the provider has confirmed that the machine of a node has ended.

    When the machines of all nodes of an ending pool have ended, the pool has ended.
    """

    node: int


@dataclass(frozen=True, slots=True)
class StillThere:
    """An event: attempts to end a machine have been given up, and its provider has not confirmed the end.

    The node counts as ended all the same. The error becomes the error of the node, and of the pool if the pool has no
    error yet.
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
    """An action of the engine: rent one slice for each number in `nodes`, which becomes the number of its first host.

    The engine reports each slice as `Launched`, or as `Failed` if it could not be rented.
    """

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reach:
    """An action of the engine: connect to the machine of a node. The engine reports `Reached` or `Failed`."""

    node: int


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """An action of the engine: set up a node as the image says. The engine reports `Bootstrapped` or `Failed`."""

    node: int


@dataclass(frozen=True, slots=True)
class Admit:
    """An action of the engine: send calls to a node from now on."""

    node: int


@dataclass(frozen=True, slots=True)
class Drain:
    """An action of the engine: send no more calls to a node: it was retired, is taken back or is unhealthy.

    The calls that run on the node go on. When they have ended, the engine reports `Drained`. `at` is when the provider
    takes the machine back, in seconds since 1970; None if it does not. `unhealthy` is what is wrong with the node; None
    for a healthy one.
    """

    node: int
    at: float | None
    unhealthy: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Dismiss:
    """An action of the engine: send no more calls to a slice, as `node` failed or has drained; `error` says why.

    The slice's calls that have not ended run on other nodes, or fail. `others` are the other hosts of the slice.
    """

    node: int
    error: BaseException
    others: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Terminate:
    """An action of the engine: end the machines of these nodes.

    The engine tries until the provider confirms the end, and reports each node as `Terminated`. An attempt that begins
    while the pool is ending is the last. If the end of a machine is not confirmed then, its node is reported as
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
