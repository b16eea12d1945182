"""The state machine for gangs: (state, event) -> (state, actions). It uses no clock, no network and no asyncio.

It decides which nodes a gang gets, when its processes start, which rank is to blame for a failure, and if the gang runs
again. A gang goes through these phases:

    waiting → asking → running → settling → stopping → waiting or finished

A gang in the phase "waiting" holds nodes for its next run: they get no other calls. In all other phases a gang is
active, and its nodes are locked: no other gang can take them. "asking" sends each node an empty call, and "settling"
waits for more failures after the first one. The client performs the actions, and reports the results as events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from skypool.gangs.states import (
    SETTLING,
    SHORTAGE,
    SPARE,
    STOPPING,
    Action,
    Again,
    Answered,
    Ask,
    Asked,
    Cancelled,
    Coming,
    Ended,
    Event,
    Finish,
    Fired,
    Free,
    Gang,
    Gangs,
    Hold,
    How,
    Node,
    NodeGone,
    NodeIdle,
    NodeLeaving,
    NodeUp,
    Order,
    Place,
    Run,
    Set,
    Start,
    Stop,
    Timer,
    Unset,
    Verdict,
)


def step(state: Gangs, event: Event) -> tuple[Gangs, list[Action]]:
    """Return the state after an event, and the actions that the client must perform, in order.

    The function is pure. Events that no longer matter are ignored: those of a gang that has finished, of an earlier
    run, and of a node that is not known.
    """
    before = state
    state, actions = _happened(state, event)
    state, ends = _assigned(state)
    state, begins = _begun(state)
    unset, waits = _waits(before, state, event)
    return state, [*unset, *actions, *ends, *waits, *_moves(before, state), *begins]


def _happened(state: Gangs, event: Event) -> tuple[Gangs, list[Action]]:
    """Return the state and the actions that follow from the event alone, before gangs get nodes or begin to run."""
    match event:
        case NodeUp(node, devices):
            known = state.nodes.get(node)
            return _with_node(state, node, Node(devices, gang=known.gang if known else None)), []
        case NodeLeaving(node) if node in state.nodes:
            state = _with_node(state, node, replace(state.nodes[node], leaving=True))
            return _not_answered(state, state.nodes[node].gang), []
        case NodeGone(node) if node in state.nodes:
            return _gone(state, node)
        case NodeIdle(node, idle) if node in state.nodes:
            known = state.nodes[node]
            return _with_node(state, node, replace(known, idle=idle, silent=known.silent and not idle)), []
        case Coming(count):
            return replace(state, coming=count), []
        case Asked(order) if order.gang not in state.gangs:
            return _with(state, Gang(order)), []
        case Answered(number, attempt, node, ok) if number in state.gangs:
            return _answered(state, state.gangs[number], attempt, node, ok), []
        case Ended(number) if number in state.gangs:
            return _ended(state, state.gangs[number], event)
        case Fired(number, timer) if number in state.gangs:
            return _fired(state, state.gangs[number], timer)
        case Cancelled(number) if number in state.gangs:
            return _cancelled(state, state.gangs[number])
        case _:
            return state, []


# --- nodes for gangs -----------------------------------------------------------------------------------------


def _assigned(state: Gangs) -> tuple[Gangs, list[Action]]:
    """Choose anew which nodes each waiting gang holds, and finish the gangs that cannot get enough nodes."""
    actions: list[Action] = []
    taken = {n: node.gang for n, node in state.nodes.items() if not _is_waiting(state, node.gang)}
    # in the order of submission, so an earlier gang may take a node from a later one
    for number, gang in state.gangs.items():
        if gang.phase != "waiting":
            continue
        gang = _hastened(state, gang)
        verdict = _lacking(state, gang)
        if verdict is not None:
            state, ending = _finished(state, gang, verdict)
            actions += ending
            continue
        free = [n for n in _usable(state, gang.order) if taken.get(n) is None]
        # Idle nodes come first. Otherwise a later gang could start first, on nodes that became idle while an earlier
        # one holds busy nodes. Among idle nodes, and among busy ones, those that the gang holds already come first.
        free.sort(key=lambda n: (not state.nodes[n].idle, state.nodes[n].gang != number, n))
        taken.update(dict.fromkeys(free[: gang.order.count], number))
        state = _with(state, gang)
    nodes = {n: replace(node, gang=taken.get(n)) for n, node in state.nodes.items()}
    return replace(state, nodes=nodes), actions


def _hastened(state: Gangs, gang: Gang) -> Gang:
    """Let a gang run again with fewer nodes at once if nodes that its user chose are gone: nobody replaces them."""
    if gang.last is None or gang.order.among is None or len(_possible(state, gang.order)) >= gang.order.count:
        return gang
    return replace(gang, late=True)


def _lacking(state: Gangs, gang: Gang) -> Verdict | None:
    """Return the verdict, the end of a waiting gang that cannot get enough nodes; None if it may still get them."""
    order = gang.order
    if gang.last is None:
        is_lacking = order.among is not None and len(_possible(state, order)) < order.count
        return Verdict("no nodes") if is_lacking else None
    if order.among is not None and len(_possible(state, order)) < order.least:
        return replace(gang.last, lacking=True)
    may_come = state.coming > 0 and order.among is None
    # with nodes of other gangs, because those gangs end, and silent busy nodes: they answer later, or are replaced
    nodes = [state.nodes[n] for n in _possible(state, order)]
    if gang.late and not may_come and sum(not (node.silent and node.idle) for node in nodes) < order.least:
        return replace(gang.last, lacking=True)
    return None


def _begun(state: Gangs) -> tuple[Gangs, list[Action]]:
    """Ask the nodes of each gang that has enough of them. Start the gangs whose nodes have all answered."""
    actions: list[Action] = []
    for number, gang in state.gangs.items():
        held = _held(state, number)
        if not all(state.nodes[n].idle for n in held):
            continue
        if gang.phase == "waiting" and len(held) >= (gang.order.least if gang.late else gang.order.count):
            state = _with(state, replace(gang, phase="asking", answered=frozenset()))
            actions.append(Ask(number, _next(gang), held))
        elif gang.phase == "asking" and gang.answered.issuperset(held):
            run = _placed(state, gang, held)
            state = _with(state, replace(gang, phase="running", run=run, answered=frozenset()))
            actions.append(Start(number, run))
    return state, actions


def _placed(state: Gangs, gang: Gang, held: tuple[int, ...]) -> Run:
    """Return the next run of a gang, on the nodes `held`. Nodes of its last run keep their positions if possible."""
    before = gang.run.nodes if gang.run is not None else ()
    nodes = [n if n in held else None for n in before[: len(held)]]
    nodes += [None] * (len(held) - len(nodes))
    # gaps are filled with nodes of the last run whose position no longer exists, then with new nodes by number
    rest = iter([n for n in before[len(held) :] if n in held] + [n for n in held if n not in before])
    ordered = [next(rest) if n is None else n for n in nodes]
    places: list[Place] = []
    for position, n in enumerate(ordered):
        procs = gang.order.procs if gang.order.procs is not None else max(1, state.nodes[n].devices)
        places += [Place(len(places) + local, n, local, position) for local in range(procs)]
    changed = gang.run is not None and len(gang.run.places) != len(places)
    return Run(_next(gang), tuple(places), changed)


def _waits(before: Gangs, after: Gangs, event: Event) -> tuple[list[Action], list[Action]]:
    """Return the actions that stop timers of gangs that lacked nodes `before`, and those that start timers now."""
    unset: list[Action] = []
    set_: list[Action] = []
    for number, gang in {**before.gangs, **after.gangs}.items():
        # each timer runs exactly while its function is true of the gang
        timers: tuple[tuple[Timer, float, Callable[[Gangs, int], bool]], ...] = (
            ("wait", gang.order.wait, _lacks_some),
            ("shortage", SHORTAGE, _is_short),
        )
        for timer, seconds, runs in timers:
            ran, now = runs(before, number), runs(after, number)
            if ran and not now and event != Fired(number, timer):
                unset.append(Unset(number, timer))
            elif now and not ran:
                set_.append(Set(number, timer, seconds))
    return unset, set_


def _lacks_some(state: Gangs, number: int) -> bool:
    """Return True if a gang waits to run again, holds fewer nodes than it asked for, and still waits for more."""
    gang = state.gangs.get(number)
    if gang is None or gang.phase != "waiting" or gang.last is None or gang.late:
        return False
    return len(_held(state, number)) < gang.order.count


def _is_short(state: Gangs, number: int) -> bool:
    """Return True if a gang waits for its first run, the pool has too few nodes for it, and no more are coming."""
    gang = state.gangs.get(number)
    if gang is None or gang.phase != "waiting" or gang.last is not None or state.coming:
        return False
    return len(_possible(state, gang.order)) < gang.order.count


def _moves(before: Gangs, after: Gangs) -> list[Action]:
    """Return a `Hold` for each node that another gang holds now, and a `Free` for each that no gang holds any more."""
    freed: list[Action] = []
    held: list[Action] = []
    for n, node in sorted(after.nodes.items()):
        was = before.nodes[n].gang if n in before.nodes else None
        if node.gang is None and was is not None:
            freed.append(Free(n))
        elif node.gang is not None and node.gang != was:
            held.append(Hold(n, node.gang))
    return [*freed, *held]


# --- answers and ends ----------------------------------------------------------------------------------------


def _answered(state: Gangs, gang: Gang, attempt: int, node: int, ok: bool) -> Gangs:
    """Note that a node has answered. If `ok` is False, mark the node as silent, and let its gang wait for another."""
    known = state.nodes.get(node)
    is_expected = gang.phase in ("waiting", "asking") and attempt == _next(gang)
    if known is None or known.gang != gang.order.gang or not is_expected:
        return state
    if not ok:
        return _not_answered(_with_node(state, node, replace(known, silent=True)), gang.order.gang)
    return _with(state, replace(gang, answered=gang.answered | {node})) if gang.phase == "asking" else state


def _not_answered(state: Gangs, number: int | None) -> Gangs:
    """Put a gang that is in the phase "asking" back to "waiting", because it cannot use one of its nodes."""
    gang = state.gangs.get(number) if number is not None else None
    if gang is None or gang.phase != "asking":
        return state
    return _with(state, replace(gang, phase="waiting", answered=frozenset()))


def _gone(state: Gangs, node: int) -> tuple[Gangs, list[Action]]:
    """Forget a node, and count the ranks that still run there as ended."""
    known = state.nodes[node]
    state = replace(state, nodes={n: each for n, each in state.nodes.items() if n != node})
    if known.gang is None:
        return state, []
    state = _not_answered(state, known.gang)
    gang = state.gangs[known.gang]
    if gang.phase == "waiting" or gang.run is None:
        return state, []
    ranks = frozenset(place.rank for place in gang.run.places if place.node == node) - gang.ended.keys()
    # The client reports the ends of these ranks, too: before or after this event, or never. Until then, the ranks count
    # as lost, or as interrupted if the node was leaving. So they are blamed before ranks that fail later. While no rank
    # is blamed yet, a report of "interrupted" replaces "lost", as the client may know that the machine was taken back.
    # A gang whose ranks have all ended waits for such reports until the "settle" timer fires.
    how: How = "interrupted" if known.leaving else "lost"
    ended = {**gang.ended, **dict.fromkeys(sorted(ranks), how)}
    return _judged(state, replace(gang, ended=ended, presumed=gang.presumed | ranks))


def _ended(state: Gangs, gang: Gang, event: Ended) -> tuple[Gangs, list[Action]]:
    """Record how a rank has ended. Ignore an end that is known already, or that belongs to another run."""
    run, rank, how = gang.run, event.rank, event.how
    if gang.phase in ("waiting", "asking") or run is None or event.attempt != run.attempt:
        return state, []
    if rank not in range(len(run.places)) or (rank in gang.ended and rank not in gang.presumed):
        return state, []
    if rank in gang.presumed:
        if gang.phase == "stopping":
            return state, []  # the rank counted as ended when its node was gone
        how = "interrupted" if "interrupted" in (how, gang.ended[rank]) else "lost"
    node = state.nodes.get(run.places[rank].node)
    if how in ("lost", "interrupted") and node is not None and node.gang == gang.order.gang:
        how = "interrupted" if node.leaving else how
        state = _with_node(state, run.places[rank].node, replace(node, silent=True))  # NodeGone follows
    again = gang.again | {rank} if how == "raised" and event.again else gang.again
    is_first, may_save = not _failures(gang), event.left > SPARE
    gang = replace(gang, ended={**gang.ended, rank: how}, again=again, presumed=gang.presumed - {rank})
    if how == "overran" and gang.phase == "running":
        return _stopped(state, replace(gang, end="timeout", failed=tuple(sorted({rank, *_left(gang)}))))
    if may_save and is_first and gang.phase == "running" and _left(gang):
        gang = replace(gang, phase="settling", saves=True)
        return _with(state, gang), [Set(gang.order.gang, "settle", event.left - SPARE)]
    return _judged(state, gang, how == "returned" or may_save)


def _judged(state: Gangs, gang: Gang, may_save: bool = False) -> tuple[Gangs, list[Action]]:
    """Decide what follows from the ends of ranks so far: go on, wait for more failures, stop ranks, or finish.

    Args:
        may_save: True if what has happened is no reason to stop ranks that may still save.
    """
    number = gang.order.gang
    is_over = not _left(gang)
    if gang.phase == "stopping":
        if not is_over:
            return _with(state, gang), []
        state, actions = _over(state, gang)
        return state, [Unset(number, "stop"), *actions]
    if not _failures(gang):
        if not is_over:
            return _with(state, gang), []
        return _finished(state, gang, Verdict("returned", gang.run))
    if is_over and not gang.presumed:
        return _blamed(state, gang, *([Unset(number, "settle")] if gang.phase == "settling" else []))
    if gang.phase == "settling" and (may_save or not gang.saves):
        return _with(state, gang), []
    return _with(state, replace(gang, phase="settling", saves=False)), [Set(number, "settle", SETTLING)]


def _blamed(state: Gangs, gang: Gang, *before: Action) -> tuple[Gangs, list[Action]]:
    """Decide which rank failed first, and stop the others. The actions `before` come first."""
    failed = _failures(gang)
    # A rank that was killed or lost comes before ranks that raised an exception or took too long: when a process dies,
    # its peers often raise an exception about it before its death is known.
    rank = next((each for each in failed if gang.ended[each] not in ("raised", "overran")), failed[0])
    return _stopped(state, replace(gang, end="failed", blamed=rank, failed=failed), *before)


def _stopped(state: Gangs, gang: Gang, *before: Action) -> tuple[Gangs, list[Action]]:
    """Stop the ranks of a gang that have not ended. If all have, end the run, for the reason `gang.end`."""
    left = _left(gang)
    if not left:
        state, actions = _over(state, gang)
        return state, [*before, *actions]
    number = gang.order.gang
    stopping: list[Action] = [Stop(number, left), Set(number, "stop", gang.order.grace + STOPPING)]
    return _with(state, replace(gang, phase="stopping")), [*before, *stopping]


def _over(state: Gangs, gang: Gang) -> tuple[Gangs, list[Action]]:
    """End a run that was stopped: the gang finishes, or waits to run again."""
    if gang.end == "cancelled":
        return _finished(state, gang, Verdict("cancelled", gang.run))
    if gang.end == "timeout" or gang.blamed is None:
        return _finished(state, gang, Verdict("timeout", gang.run, others=gang.failed))
    others = tuple(rank for rank in gang.failed if rank != gang.blamed)
    verdict = Verdict("failed", gang.run, gang.blamed, others)
    how = gang.ended[gang.blamed]
    was_interrupted = how == "interrupted"
    may_retry = gang.retried < gang.order.retries and (how != "raised" or gang.blamed in gang.again)
    if not was_interrupted and not may_retry:
        return _finished(state, gang, verdict)
    retried = gang.retried if was_interrupted else gang.retried + 1
    state = _with(state, Gang(gang.order, run=gang.run, retried=retried, last=verdict))
    return state, [Again(gang.order.gang, verdict)]


def _finished(state: Gangs, gang: Gang, verdict: Verdict, *before: Action) -> tuple[Gangs, list[Action]]:
    """Forget a gang, free its nodes, and give its caller the result. The actions `before` come first."""
    number = gang.order.gang
    nodes = {n: replace(node, gang=None) if node.gang == number else node for n, node in state.nodes.items()}
    gangs = {each: other for each, other in state.gangs.items() if each != number}
    return replace(state, nodes=nodes, gangs=gangs), [*before, Finish(number, verdict)]


def _fired(state: Gangs, gang: Gang, timer: Timer) -> tuple[Gangs, list[Action]]:
    """Decide what follows when a timer of a gang has run out. Does nothing if the timer no longer matters."""
    match timer, gang.phase:
        case "settle", "settling":
            return _blamed(state, gang)
        case "stop", "stopping":
            return _over(state, gang)  # a rank that has not ended in time counts as ended
        case "wait", "waiting" if _lacks_some(state, gang.order.gang):
            return _with(state, replace(gang, late=True)), []
        case "shortage", "waiting" if _is_short(state, gang.order.gang):
            return _finished(state, gang, Verdict("no nodes"))
        case _:
            return state, []


def _cancelled(state: Gangs, gang: Gang) -> tuple[Gangs, list[Action]]:
    """Finish a cancelled gang. If it has processes, stop them first, and finish the gang when they have ended."""
    cancelled = replace(gang, end="cancelled", blamed=None, failed=())
    match gang.phase:
        case "waiting" | "asking":  # empty calls that still run do no harm
            return _finished(state, gang, Verdict("cancelled", gang.run))
        case "running":
            return _stopped(state, cancelled)
        case "settling":
            return _stopped(state, cancelled, Unset(gang.order.gang, "settle"))
        case "stopping":
            return _with(state, cancelled), []


# --- what is asked about a state -----------------------------------------------------------------------------


def _is_waiting(state: Gangs, number: int | None) -> bool:
    return number is not None and number in state.gangs and state.gangs[number].phase == "waiting"


def _possible(state: Gangs, order: Order) -> list[int]:
    """Return the nodes that may run a gang, now or later: allowed by its order, and not being taken back."""
    return [n for n, node in state.nodes.items() if not node.leaving and (order.among is None or n in order.among)]


def _usable(state: Gangs, order: Order) -> list[int]:
    """Return the nodes that may run a gang, without those that have failed to answer. Other gangs may hold them."""
    return [n for n in _possible(state, order) if not state.nodes[n].silent]


def _held(state: Gangs, number: int) -> tuple[int, ...]:
    """Return the nodes that a gang holds, by number."""
    return tuple(sorted(n for n, node in state.nodes.items() if node.gang == number))


def _next(gang: Gang) -> int:
    """Return the number of the next run of a gang."""
    return 1 if gang.run is None else gang.run.attempt + 1


def _left(gang: Gang) -> tuple[int, ...]:
    """Return the ranks that have not ended."""
    return tuple(p.rank for p in gang.run.places if p.rank not in gang.ended) if gang.run is not None else ()


def _failures(gang: Gang) -> tuple[int, ...]:
    """Return the ranks that have failed, in the order in which their failures came."""
    return tuple(rank for rank, how in gang.ended.items() if how != "returned")


def _with(state: Gangs, gang: Gang) -> Gangs:
    return replace(state, gangs={**state.gangs, gang.order.gang: gang})


def _with_node(state: Gangs, number: int, node: Node) -> Gangs:
    return replace(state, nodes={**state.nodes, number: node})
