"""The state machine of a pool: (state, event) -> (state, actions). It uses no clock, no network and no asyncio.

It decides when to launch, replace, drain and end nodes. It does so also when a provider takes a machine back, or when
the user makes the pool smaller.

    planned → launching → booting → bootstrapping → ready → draining → ended

These are the phases of a node. A pool has the same phases, except booting and bootstrapping. `engine` performs the
actions, and reports the results as events.

The state machine launches, replaces and counts slices. A slice is one machine, or several hosts that a provider rents
out only together. Each host is a node. The node number of the first host identifies the slice. A slice is ready when
all its hosts are ready, and ends as a whole. A pool becomes ready when `minimum` of its slices are ready.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from skypool.errors import CapacityError, ConnectionLost, NodeRetired, gone_with, retired, taken_back
from skypool.model import Instance
from skypool.pool.replacement import (
    CERTAIN,
    LIVING,
    WORTHWHILE,
    alike,
    can_go_on,
    is_churning,
    is_hopeless,
    may_replace,
)
from skypool.pool.shrinking import surplus
from skypool.pool.states import (
    Action,
    Admit,
    Announce,
    Bootstrap,
    Bootstrapped,
    Dismiss,
    Drain,
    Drained,
    Event,
    Failed,
    Interrupted,
    Launch,
    Launched,
    Node,
    Phase,
    Pool,
    Pressure,
    Reach,
    Reached,
    Resize,
    Retire,
    Start,
    StillThere,
    Stop,
    Terminate,
    Terminated,
    Unhealthy,
)


def step(pool: Pool, event: Event) -> tuple[Pool, list[Action]]:
    """Decide what follows from an event: return the new state, and the actions that the engine must perform, in order.

    For an event that no longer matters, the state is unchanged and there are no actions. An exception is a `Stop` with
    an error, which always replaces the error of the pool. Raises KeyError if the pool does not have the node of the
    event, except for `Launched` and `StillThere`, which add the node.
    """
    match event:
        case Start(hosts):
            return _start(pool, hosts)
        case Launched(node, instance, others):
            return _launched(pool, node, (instance, *others))
        case Reached(node):
            if pool.nodes[node].phase is not Phase.BOOTING:
                return pool, []
            return _with(pool, node, phase=Phase.BOOTSTRAPPING), [Bootstrap(node)]
        case Bootstrapped(node):
            return _bootstrapped(pool, node)
        case Failed(node, error):
            return _failed(pool, node, error)
        case Interrupted(node, at, served):
            return _interrupted(pool, node, at, served)
        case Unhealthy(node, error):
            return _unhealthy(pool, node, error)
        case Drained(node):
            return _drained(pool, node)
        case Pressure():
            return _grow(pool)
        case Resize(minimum, maximum, load):
            return _resize(replace(pool, minimum=minimum, maximum=maximum), load)
        case Retire(node):
            return _retire(pool, node)
        case Stop(error):
            return _stop(pool if error is None else replace(pool, error=error))
        case Terminated(node):
            return _terminated(pool, node, None)
        case StillThere(node, error):
            return _terminated(pool, node, error)


def _with(pool: Pool, node: int, **changes: Any) -> Pool:
    state = replace(pool.nodes.get(node, Node(node)), **changes)
    return replace(pool, nodes={**pool.nodes, node: state})


def _start(pool: Pool, hosts: int) -> tuple[Pool, list[Action]]:
    """Launch the first `pool.minimum` slices. Do nothing if the pool was started before."""
    if pool.phase is not Phase.PLANNED:
        return pool, []
    numbers = tuple(range(0, pool.minimum * hosts, hosts))
    nodes = {node: Node(node, Phase.LAUNCHING) for node in numbers}
    pool = replace(pool, phase=Phase.LAUNCHING, nodes=nodes, hosts=hosts)
    return pool, [Announce(Phase.LAUNCHING), Launch(numbers)]


def _launched(pool: Pool, head: int, instances: Sequence[Instance]) -> tuple[Pool, list[Action]]:
    """Connect to the machines of a rented slice, whose first node is `head`. End them if they are not needed now."""
    is_late = pool.phase in (Phase.DRAINING, Phase.ENDED) or (head in pool.nodes and pool.nodes[head].retiring)
    phase = Phase.DRAINING if is_late else Phase.BOOTING
    nodes = tuple(range(head, head + len(instances)))
    for host, instance in enumerate(instances):
        pool = _with(pool, head + host, phase=phase, instance=instance, host=host)
    return pool, [Terminate(nodes)] if is_late else [Reach(node) for node in nodes]


def _bootstrapped(pool: Pool, node: int) -> tuple[Pool, list[Action]]:
    """Mark a node as set up. When all hosts of its slice are set up, they become ready and get calls."""
    if pool.nodes[node].phase is not Phase.BOOTSTRAPPING:
        return pool, []
    pool = _with(pool, node, waits=True)
    hosts = pool.slice_of(node)
    if not all(state.waits for state in hosts):
        return pool, []
    for state in hosts:
        pool = _with(pool, state.node, phase=Phase.READY, waits=False)
    pool, announcing = _complete(pool)
    return pool, [*(Admit(state.node) for state in hosts), *announcing]


def _complete(pool: Pool) -> tuple[Pool, list[Action]]:
    """Mark a launching pool as ready if `minimum` of its slices are ready. Otherwise return it unchanged."""
    if pool.phase is Phase.LAUNCHING and pool.count(Phase.READY) >= pool.minimum:
        return replace(pool, phase=Phase.READY), [Announce(Phase.READY)]
    return pool, []


def _failed(pool: Pool, node: int, error: BaseException) -> tuple[Pool, list[Action]]:
    """End the slice of a node that failed or has drained. If needed, launch another slice, or end the pool."""
    state = pool.nodes[node]
    hosts = pool.slice_of(node)
    if state.phase in (Phase.DRAINING, Phase.ENDED):
        return pool, []
    if state.retiring and state.instance is None:  # it was retired before it was rented: nothing is lost
        return _closed(_with(pool, node, phase=Phase.ENDED))
    if state.taken is not None and isinstance(error, ConnectionLost):
        error = taken_back(node, error)
    rented = state.instance is not None
    others = tuple(each.node for each in hosts if each is not state)
    actions: list[Action] = [Dismiss(node, error, others)] if state.phase is Phase.READY else []
    if rented:
        actions.append(Terminate(tuple(each.node for each in hosts)))
    has_failed = not isinstance(error, NodeRetired)  # a retired node has drained
    for each in hosts:
        why = None if not has_failed else error if each is state else gone_with(node, each.node, error)
        pool = _with(pool, each.node, phase=Phase.DRAINING if rented else Phase.ENDED, error=why)
    if pool.phase is Phase.DRAINING:
        pool, closing = _closed(pool)
        return pool, [*actions, *closing]
    hopeless = not rented or isinstance(error, CERTAIN)
    is_lack = isinstance(error, CapacityError)  # another place may have it
    if rented and state.phase is not Phase.READY and not is_lack:
        words = alike(error)
        failures = {**pool.failures, words: pool.failures.get(words, 0) + 1}
        pool = replace(pool, failures=failures, first=pool.first or error)
        hopeless = hopeless or is_hopeless(pool)
    if not hopeless and pool.count(*LIVING) < pool.minimum and may_replace(pool, state):
        pool, launching = _more(replace(pool, replaced=pool.replaced + (not state.is_leaving)))
        return pool, [*actions, *launching]
    if can_go_on(pool, hopeless):
        return pool, actions
    if not has_failed:  # it was the last node of a pool that could not have others
        error = next((each.error for _, each in sorted(pool.nodes.items(), reverse=True) if each.error), error)
    if not rented and pool.phase is Phase.LAUNCHING and pool.first is not None:
        error = pool.first  # the first failure is the cause; that no other machine can be rented only followed
    pool, stopping = _stop(replace(pool, error=error))
    return pool, [*actions, *stopping]


def _interrupted(pool: Pool, node: int, at: float, served: float) -> tuple[Pool, list[Action]]:
    """Give no more calls to a slice that its provider takes back. Launch another if the pool then has too few."""
    state = pool.nodes[node]
    if state.phase is not Phase.READY or state.taken is not None or pool.phase in (Phase.DRAINING, Phase.ENDED):
        return pool, []
    actions: list[Action] = []
    for each in pool.slice_of(node):
        pool = _with(pool, each.node, taken=at)
        actions.append(Drain(each.node, at))
    if state.retiring:  # the pool does without it already
        return pool, actions
    # `served`: the seconds for which the node was ready
    pool = replace(pool, hasty=0 if served >= WORTHWHILE else pool.hasty + 1)
    if pool.phase is Phase.LAUNCHING:  # no call runs yet: there is nothing to wait for
        pool, failing = _failed(pool, node, taken_back(node))
        return pool, [*actions, *failing]
    if pool.count(*LIVING) < pool.minimum and may_replace(pool, pool.nodes[node]):
        pool, launching = _more(pool)
        actions += launching
    return pool, actions


def _unhealthy(pool: Pool, node: int, error: BaseException) -> tuple[Pool, list[Action]]:
    """Give no more calls to the slice of an unhealthy node. Launch another if the pool then has too few."""
    state = pool.nodes[node]
    if state.phase is not Phase.READY or state.is_leaving or pool.phase in (Phase.DRAINING, Phase.ENDED):
        return pool, []
    if pool.phase is Phase.LAUNCHING:  # no call runs yet: there is nothing to wait for
        return _failed(pool, node, error)
    actions: list[Action] = []
    for each in pool.slice_of(node):
        pool = _with(pool, each.node, unhealthy=error)
        actions.append(Drain(each.node, None, error))
    if pool.count(*LIVING) < pool.minimum and may_replace(pool, pool.nodes[node]):
        pool, launching = _more(replace(pool, replaced=pool.replaced + 1))
        actions += launching
    return pool, actions


def _drained(pool: Pool, node: int) -> tuple[Pool, list[Action]]:
    """Note that no call is left on a leaving node. When none is left on any host of its slice, end the slice."""
    state = pool.nodes[node]
    if not state.is_leaving:
        return pool, []
    pool = _with(pool, node, waits=True)
    if not all(state.waits for state in pool.slice_of(node)):
        return pool, []
    sick = next((each.unhealthy for each in pool.slice_of(node) if each.unhealthy is not None), None)
    if sick is not None:
        return _failed(pool, node, sick)
    return _failed(pool, node, retired(node) if state.taken is None else taken_back(node))


def _resize(pool: Pool, load: Mapping[int, int]) -> tuple[Pool, list[Action]]:
    """Launch the slices that a pool lacks after its size was changed, or retire its surplus slices."""
    if pool.phase not in (Phase.LAUNCHING, Phase.READY):
        return pool, []
    actions: list[Action] = []
    for head in surplus(pool, load):
        pool, leaving = _leave(pool, head)
        actions += leaving
    pool, launching = _more(pool, pool.minimum - pool.count(*LIVING))
    pool, announcing = _complete(pool)
    return pool, [*actions, *launching, *announcing]


def _retire(pool: Pool, node: int) -> tuple[Pool, list[Action]]:
    """Retire the slice of a node, unless it is the last one. The pool then needs fewer slices: `minimum` may fall."""
    state = pool.nodes[node]
    if state.is_leaving or state.phase not in LIVING or pool.phase not in (Phase.LAUNCHING, Phase.READY):
        return pool, []
    left = pool.count(*LIVING) - 1
    if left < 1:
        return pool, []
    pool, leaving = _leave(pool, state.head)
    if pool.minimum == pool.maximum:
        fewer = max(1, pool.minimum - 1)
        pool = replace(pool, minimum=fewer, maximum=fewer)
    else:
        pool = replace(pool, minimum=min(pool.minimum, left))
    pool, announcing = _complete(pool)
    return pool, [*leaving, *announcing]


def _leave(pool: Pool, head: int) -> tuple[Pool, list[Action]]:
    """Begin to retire the slice whose first host is node `head`: drain it if it is ready, otherwise end it."""
    hosts = pool.slice_of(head)
    for each in hosts:
        pool = _with(pool, each.node, retiring=True, waits=False)
    phase = pool.nodes[head].phase
    if phase is Phase.LAUNCHING:  # it is ended when `Launched` reports it
        return pool, []
    if phase is Phase.READY:
        return pool, [Drain(each.node, None) for each in hosts]
    for each in hosts:
        pool = _with(pool, each.node, phase=Phase.DRAINING)
    return pool, [Terminate(tuple(each.node for each in hosts))]


def _more(pool: Pool, count: int = 1) -> tuple[Pool, list[Action]]:
    """Launch `count` further slices. Do nothing if `count` is 0 or less."""
    if count < 1:
        return pool, []
    first = 1 + max(state.node + (pool.hosts - 1 if state.instance is None else 0) for state in pool.nodes.values())
    heads = tuple(range(first, first + count * pool.hosts, pool.hosts))
    for head in heads:
        pool = _with(pool, head, phase=Phase.LAUNCHING)
    return pool, [Launch(heads)]


def _grow(pool: Pool) -> tuple[Pool, list[Action]]:
    """Launch one more slice for a ready pool, unless one is being launched, or a new one would probably fail."""
    if pool.phase is not Phase.READY or pool.count(Phase.LAUNCHING, Phase.BOOTING, Phase.BOOTSTRAPPING):
        return pool, []
    if pool.count(Phase.READY) >= pool.maximum or is_hopeless(pool) or is_churning(pool):
        return pool, []
    return _more(pool)


def _stop(pool: Pool) -> tuple[Pool, list[Action]]:
    """Begin to end the pool: end the machines of all nodes. If none has a machine, the pool has ended at once."""
    if pool.phase in (Phase.DRAINING, Phase.ENDED):
        return pool, []
    pool = replace(pool, phase=Phase.DRAINING)
    ending = tuple(
        node
        for node, state in sorted(pool.nodes.items())
        # without an instance, it is ended when `Launched` reports it
        if state.instance is not None and state.phase not in (Phase.DRAINING, Phase.ENDED)
    )
    for node in ending:
        pool = _with(pool, node, phase=Phase.DRAINING)
    actions: list[Action] = [Announce(Phase.DRAINING)]
    if ending:
        actions.append(Terminate(ending))
    pool, closing = _closed(pool)
    return pool, [*actions, *closing]


def _terminated(pool: Pool, node: int, error: BaseException | None) -> tuple[Pool, list[Action]]:
    pool = _with(pool, node, phase=Phase.ENDED, error=error or pool.nodes[node].error)
    if error is not None and pool.error is None:
        pool = replace(pool, error=error)
    return _closed(pool)


def _closed(pool: Pool) -> tuple[Pool, list[Action]]:
    """Mark an ending pool as ended if all its nodes have ended. Otherwise return the pool unchanged, and no actions."""
    if pool.phase is Phase.DRAINING and all(n.phase is Phase.ENDED for n in pool.nodes.values()):
        return replace(pool, phase=Phase.ENDED), [Announce(Phase.ENDED)]
    return pool, []
