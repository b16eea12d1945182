"""The values of the state machine for gangs: events that come in, actions that go out, and the state in between.

The processes of a gang start together, and when one of them fails, the others are stopped. It may then run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from skypool.wire.save_orders import TO_LOOK

How = Literal["returned", "raised", "overran", "died", "lost", "interrupted", "stopped"]
"""How the process of a rank ended.

- "returned": the function returned a value.
- "raised": the function raised an exception.
- "overran": the function took longer than the timeout of the gang, and its node has ended it.
- "died": the process ended without a value or an exception, as by a signal.
- "lost": its node was lost.
- "interrupted": the provider took the machine of its node back.
- "stopped": the process was stopped because the gang failed elsewhere, was cancelled or took too long.
"""

Timer = Literal["settle", "stop", "wait", "shortage"]
"""The timers of a gang.

- "settle": the time after the first failure in which further failures are collected before one is blamed. After ranks
  that have ended as their machines end soon, it is the time in which others may save.
- "stop": the time in which stopped processes must end.
- "wait": the time in which a gang that runs again waits for nodes that replace lost ones.
- "shortage": the time in which a gang that has never run still waits, although the pool has too few nodes for it and
  rents no more.
"""

SETTLING = 0.8
"""Seconds between the first failure and the decision which rank is to blame.

When a process is killed, its peers often report a broken connection some 10 to 50 ms before its death is known.
"""
SPARE = 5.0
"""Seconds before the end of a machine in which no rank may save any more."""
SHORTAGE = 5.0
"""Seconds until a gang that has never run gives up if the pool has too few nodes for it and rents no more.

In this time a pool begins to replace a node, or to grow because calls wait.
"""
STOPPING = 3.0 + 2 * TO_LOOK
"""The most seconds that stopped processes take in addition to the gang's `grace`.

Before a node asks them to stop, it has their stacks written, which takes 2 seconds at most. If it saves folders, it
looks which files they write before it asks them, and again before it kills them. A second is for all else.
"""


@dataclass(frozen=True, slots=True)
class Order:
    """Order of a gang: the nodes, processes and retries that the user has asked for.

    Attributes:
        gang: the number of the gang. Gangs that were submitted earlier have smaller numbers.
        count: the number of nodes.
        least: the number of nodes with which a re-run may begin if no more can be had in time. It is the user's option
            `min_nodes`, or else `count`.
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
    """Place of a rank: where one process of a gang runs.

    `node` is the number of the node in the pool. `local` is the number of the process on this node, and `position` the
    number of this node among the gang's nodes. Both count from 0.
    """

    rank: int
    node: int
    local: int
    position: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a gang.

    Attributes:
        attempt: the number of the run, from 1.
        places: the place of each rank, in the order of ranks.
        changed: True if the gang has another number of processes than in the run before.
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
    """End of a gang: if it returned, failed or was given up, and which ranks are to blame.

    Attributes:
        kind: "returned" if all ranks returned, "failed" if a rank failed, "timeout" if a run took too long, "cancelled"
            if the user cancelled the gang, and "no nodes" if the nodes that it needs cannot be had.
        run: the last run; None if the gang never began to run.
        rank: the rank that failed first. None unless `kind` is "failed".
        others: for "failed", the other ranks that failed before the gang was stopped, in the order of their failures.
            For "timeout", the first rank that took too long and all ranks that had not ended, sorted.
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
    """An event: a node is lost or was ended. `Ended` events of its ranks may come before it, after it, or never."""

    node: int


@dataclass(frozen=True, slots=True)
class NodeIdle:
    """An event: the last call that belongs to no gang has ended on a node (`idle` is True), or such a call runs now.

    Nodes that a gang holds get no new such calls.
    """

    node: int
    idle: bool


@dataclass(frozen=True, slots=True)
class Coming:
    """An event: the number of nodes that are being rented or set up has changed.

    A gang that waits may give up when `count` is 0. So the `NodeUp` of a node comes before the `Coming` that no longer
    counts it. And the `Coming` that counts a replacement comes before the `NodeGone` of the node that is replaced.
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
        attempt: the number of that run, from 1.
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
        attempt: the number of the run that the process belongs to, from 1.
        how: how it has ended.
        again: True if the user's `retry_on` names the exception that was raised. Used only if `how` is "raised".
        left: seconds for which its machine goes on, if the rank has ended by itself because that ends soon; 0.0
            otherwise. The others may save meanwhile.
    """

    gang: int
    attempt: int
    rank: int
    how: How
    again: bool = False
    left: float = 0.0


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
    """An action: send an empty call to each of these nodes, and report each answer as an `Answered` event.

    `attempt` is the number of the run that follows if all nodes answer.
    """

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
    """An action: stop the processes of these ranks, by SIGTERM and, after `Order.grace` seconds, by SIGKILL."""

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
    """An action: tell the user at once that a gang has failed, and will run again as soon as it has enough nodes."""

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
    """State of one node.

    Attributes:
        devices: the number of its devices.
        idle: True if all calls that it runs belong to gangs.
        leaving: True if the provider takes its machine back.
        silent: True if it failed to answer an empty call, or if a process was lost with it. No gang may use it until
            `NodeUp` comes again, or `NodeIdle` reports it as idle.
        gang: the number of the gang that holds it or runs on it; None if there is none.
    """

    devices: int = 0
    idle: bool = True
    leaving: bool = False
    silent: bool = False
    gang: int | None = None


@dataclass(frozen=True, slots=True)
class Gang:
    """State of one gang.

    Attributes:
        phase: "waiting" for nodes, "asking" each node for an answer, "running", "settling" after the first failure, or
            "stopping" the processes that are left.
        run: the present run, or the last one while the gang waits; None before the first.
        answered: the nodes that have answered, while the gang asks.
        ended: how each rank ended that has ended, in the order in which the ends came.
        presumed: the ranks in `ended` that count as lost or interrupted only because their node is gone. The client has
            not reported their ends yet.
        again: the ranks whose exception is one of the user's `retry_on`.
        saves: True while no rank has failed but those that have ended because their machines end soon.
        retried: how many retries are used up.
        end: why the gang stops, once that is decided: "failed", "timeout" or "cancelled".
        blamed: the rank that failed first, once that is decided.
        failed: the ranks that had failed when the blame was decided, in the order in which their failures came. If
            `end` is "timeout", the first rank that took too long and all ranks that had not ended, sorted.
        late: True if a re-run no longer waits for `Order.count` nodes, but begins with `Order.least` or more.
        last: the failure after which the gang waits to run again; None in its first run.
    """

    order: Order
    phase: Literal["waiting", "asking", "running", "settling", "stopping"] = "waiting"
    run: Run | None = None
    answered: frozenset[int] = frozenset()
    ended: Mapping[int, How] = field(default_factory=dict[int, How])
    presumed: frozenset[int] = frozenset()
    again: frozenset[int] = frozenset()
    saves: bool = False
    retried: int = 0
    end: Literal["failed", "timeout", "cancelled"] | None = None
    blamed: int | None = None
    failed: tuple[int, ...] = ()
    late: bool = False
    last: Verdict | None = None


@dataclass(frozen=True, slots=True)
class Gangs:
    """State of all gangs of a pool, and of its nodes.

    Attributes:
        nodes: the nodes that can run gangs, by number.
        gangs: the gangs that have not finished, by number, in the order of submission.
        coming: the number of nodes that are being rented or set up.
    """

    nodes: Mapping[int, Node] = field(default_factory=dict[int, Node])
    gangs: Mapping[int, Gang] = field(default_factory=dict[int, Gang])
    coming: int = 0
