"""The values of the state machine for gangs: events that come in, actions that go out, and the state in between.

A gang is one call that runs as several processes on one or more nodes. A rank is the number of a process in its gang,
from 0. The processes of a gang start together, and when one of them fails, the others are stopped. A gang may then run
again as a whole. A node runs the processes of at most one gang at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

How = Literal["returned", "raised", "overran", "died", "lost", "interrupted", "stopped"]
"""How the process of a rank ended.

- "returned": the function returned a value.
- "raised": the function raised an exception.
- "overran": the function took longer than the timeout of the gang, and its node has ended it.
- "died": the process ended without a value or an exception, as by a signal.
- "lost": its node was lost.
- "interrupted": the provider took the machine of its node back.
- "stopped": the process ended because it was stopped for the gang's sake.
"""

Timer = Literal["settle", "stop", "wait", "shortage"]
"""The timers of a gang.

- "settle": the time after the first failure in which further failures are collected before one is blamed.
- "stop": the time in which stopped processes must end.
- "wait": the time in which the gang waits for nodes that replace lost ones.
- "shortage": the time in which a gang that has never run waits although the pool has too few nodes for it, and rents no
  more.
"""

SETTLING = 0.8
"""Seconds between the first failure and the decision which rank is to blame.

When a process is killed, its peers often report a broken connection some 10 to 50 ms before its death is known.
"""
SHORTAGE = 5.0
"""Seconds until a gang that has never run gives up if the pool has too few nodes for it and rents no more.

In this time a pool begins to replace a node, or to grow because calls wait.
"""
STOPPING = 1.0
"""Seconds that stopped processes may take in addition to the gang's `grace`."""


@dataclass(frozen=True, slots=True)
class Order:
    """The needs of a gang, as the user asked for it.

    Attributes:
        gang: the number of the gang. Gangs that were submitted earlier have smaller numbers.
        count: the number of nodes.
        least: the number of nodes with which a re-run may begin if no more can be had in time. Equal to `count` unless
            the user set `min_nodes`.
        procs: the number of processes on each node; None for one process per device, and one on a node without devices.
        among: the only nodes that may run the gang; None for any.
        retries: how often the gang may run again after a failure. Interruptions use up none.
        grace: seconds between SIGTERM and SIGKILL for stopped processes.
        wait: seconds for which a re-run waits for nodes that replace lost ones.
    """

    gang: int
    count: int
    least: int
    procs: int | None = None
    among: frozenset[int] | None = None
    retries: int = 0
    grace: float = 5.0
    wait: float = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a rank: where one process of a gang runs.

    Attributes:
        rank: the number of the process in the gang, from 0.
        node: the number of its node in the pool.
        local: the number of the process on its node, from 0.
        position: the position of its node among the gang's nodes, from 0.
    """

    rank: int
    node: int
    local: int
    position: int


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a gang.

    Attributes:
        attempt: the number of the run, from 1.
        places: the place of each rank, by rank.
        changed: True if the world has another size than in the run before.
    """

    attempt: int
    places: tuple[Place, ...]
    changed: bool = False

    @property
    def nodes(self) -> tuple[int, ...]:
        """The numbers of the gang's nodes, in the order of their ranks."""
        return tuple(place.node for place in self.places if place.local == 0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a gang: if it returned, failed or was given up, and which ranks are to blame.

    Attributes:
        kind: "returned" if all ranks returned, "failed" if a rank failed, "timeout" if a run took too long, "cancelled"
            if the user cancelled the gang, and "no nodes" if the nodes that it needs cannot be had.
        run: the last run; None if the gang never began to run.
        rank: the rank that failed first. None unless `kind` is "failed".
        others: the ranks that failed too before the gang was stopped, in the order in which their failures came. For
            "timeout", the rank that took too long first, and those that had not ended, by rank.
        lacking: for "failed", True if the gang would have run again, but its nodes could not be had.
    """

    kind: Literal["returned", "failed", "timeout", "cancelled", "no nodes"]
    run: Run | None = None
    rank: int | None = None
    others: tuple[int, ...] = ()
    lacking: bool = False


# --- events ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeUp:
    """An event: a node can run gangs. `devices` is the number of its devices."""

    node: int
    devices: int = 0


@dataclass(frozen=True, slots=True)
class NodeLeaving:
    """An event: the provider takes the machine of a node back soon, so no new run may use it. Runs there go on."""

    node: int


@dataclass(frozen=True, slots=True)
class NodeGone:
    """An event: a node is lost or was ended. The ends of ranks that ran there follow as `Ended` events."""

    node: int


@dataclass(frozen=True, slots=True)
class NodeIdle:
    """An event: whether a node runs calls that belong to no gang has changed. Held nodes get no new ones."""

    node: int
    idle: bool


@dataclass(frozen=True, slots=True)
class Coming:
    """An event: the number of nodes that are being rented or set up has changed.

    A gang that waits may give up when this is 0. So the `NodeUp` of a node comes before the `Coming` that no longer
    counts it, and the `Coming` that counts a replacement comes before the `NodeGone` of the node that it replaces.
    """

    count: int


@dataclass(frozen=True, slots=True)
class Asked:
    """An event: a gang was submitted."""

    order: Order


@dataclass(frozen=True, slots=True)
class Answered:
    """An event: a node has answered the empty call that precedes each run, or has failed to.

    Attributes:
        ok: False if the node did not answer. A NodeGone event usually follows.
    """

    gang: int
    attempt: int
    node: int
    ok: bool = True


@dataclass(frozen=True, slots=True)
class Ended:
    """An event: the process of a rank has ended.

    Attributes:
        again: True if the user's `retry_on` names the exception that was raised. Counts for "raised" only.
    """

    gang: int
    attempt: int
    rank: int
    how: How
    again: bool = False


@dataclass(frozen=True, slots=True)
class Fired:
    """An event: a timer of a gang has run out."""

    gang: int
    timer: Timer


@dataclass(frozen=True, slots=True)
class Cancelled:
    """An event: the user has cancelled a gang."""

    gang: int


Event = NodeUp | NodeLeaving | NodeGone | NodeIdle | Coming | Asked | Answered | Ended | Fired | Cancelled


# --- actions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hold:
    """An action: send a node no calls except those of this gang, and take back the calls that it has not begun."""

    node: int
    gang: int


@dataclass(frozen=True, slots=True)
class Free:
    """An action: a node may run other calls again. Not sent for a node that is gone."""

    node: int


@dataclass(frozen=True, slots=True)
class Ask:
    """An action: send an empty call to each of these nodes, and report each answer as an `Answered` event."""

    gang: int
    attempt: int
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """An action: start the processes of a gang."""

    gang: int
    run: Run


@dataclass(frozen=True, slots=True)
class Stop:
    """An action: stop the processes of these ranks, by SIGTERM and, after `grace`, by SIGKILL."""

    gang: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Set:
    """An action: start a timer of a gang. A timer of the same name that still runs is replaced."""

    gang: int
    timer: Timer
    seconds: float


@dataclass(frozen=True, slots=True)
class Unset:
    """An action: stop a timer of a gang, if it runs."""

    gang: int
    timer: Timer


@dataclass(frozen=True, slots=True)
class Again:
    """An action: tell the user that a gang runs again after this failure, as soon as it has its nodes."""

    gang: int
    failure: Verdict


@dataclass(frozen=True, slots=True)
class Finish:
    """An action: give the caller of a gang its result. The gang is forgotten."""

    gang: int
    verdict: Verdict


Action = Hold | Free | Ask | Start | Stop | Set | Unset | Again | Finish


# --- state -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Node:
    """A node, as the state machine knows it.

    Attributes:
        devices: the number of its devices.
        idle: True if it runs no call that belongs to no gang.
        leaving: True if the provider takes its machine back.
        silent: True if it has not answered an empty call, or if a process was lost with it. No gang may use it until
            it is up anew or reported as idle.
        gang: the gang that holds it, waiting or running; None if no gang does.
    """

    devices: int = 0
    idle: bool = True
    leaving: bool = False
    silent: bool = False
    gang: int | None = None


@dataclass(frozen=True, slots=True)
class Gang:
    """The state of one gang.

    Attributes:
        order: what it needs.
        phase: "waiting" for nodes, "asking" each node for an answer, "running", "settling" after the first failure, or
            "stopping" the processes that are left.
        run: the present run, or the last one while the gang waits; None before the first.
        answered: the nodes that have answered, while the gang asks.
        ended: how each rank ended that has ended, in the order in which the ends came.
        presumed: the ranks that count as lost because their node is gone, and whose own end has not been reported.
        again: the ranks whose exception is one of the user's `retry_on`.
        retried: how many retries are used up.
        end: why the gang stops, once that is decided: "failed", "timeout" or "cancelled".
        blamed: the rank that failed first, once that is decided.
        failed: the ranks that had failed when the blame was decided, in the order in which their failures came.
            For "timeout", as in `Verdict.others`.
        late: True once the time for which a re-run waits for more nodes than `Order.least` is over.
        last: the failure after which the gang waits to run again; None in its first run.
    """

    order: Order
    phase: Literal["waiting", "asking", "running", "settling", "stopping"] = "waiting"
    run: Run | None = None
    answered: frozenset[int] = frozenset()
    ended: Mapping[int, How] = field(default_factory=dict[int, How])
    presumed: frozenset[int] = frozenset()
    again: frozenset[int] = frozenset()
    retried: int = 0
    end: Literal["failed", "timeout", "cancelled"] | None = None
    blamed: int | None = None
    failed: tuple[int, ...] = ()
    late: bool = False
    last: Verdict | None = None


@dataclass(frozen=True, slots=True)
class Gangs:
    """The state of all gangs of a pool, and of its nodes.

    Attributes:
        nodes: the nodes by number.
        gangs: the gangs that have not ended, by number, in the order in which they were submitted.
        coming: the number of nodes that are being rented or set up.
    """

    nodes: Mapping[int, Node] = field(default_factory=dict[int, Node])
    gangs: Mapping[int, Gang] = field(default_factory=dict[int, Gang])
    coming: int = 0
