"""Random orders of events for the state machine of gangs, played against a simulated world.

    python -m tests.soak.gangs --orders 100000 --seed 1

A gang is one call that runs as several processes (ranks) on one or more nodes. Each order of events comes from a
world of its own. Its nodes come, leave and go; its processes end in every way; timers fire in any order that is
possible; users cancel. The world performs the actions of the state machine. It knows what really happened, so it can
tell after each event whether the rules are kept, and whether the right rank is blamed. At the end it grants all that
gangs may wait for, and each gang must finish.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from skypool.gangs.lifecycle import step
from skypool.gangs.states import (
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
    Gangs,
    Hold,
    How,
    NodeGone,
    NodeIdle,
    NodeLeaving,
    NodeUp,
    Order,
    Run,
    Set,
    Start,
    Stop,
    Timer,
    Unset,
    Verdict,
)

MOVES = (20, 90)
"""The least and the most moves of an order of events, before everything is granted."""
ROUNDS = 100
"""In so many rounds, in which everything is granted, each gang must finish."""


@dataclass
class Outcome:
    """What became of all orders of events."""

    orders: int = 0
    events: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Play the orders of events; 1 if a rule was broken in one of them."""
    parser = argparse.ArgumentParser(prog="tests.soak.gangs", description="Random orders of events for gangs.")
    parser.add_argument("--orders", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first order, to see one again")
    asked = parser.parse_args(argv)
    began = time.monotonic()
    done = soak(asked.orders, asked.seed, first=asked.first)
    for each in done.failures:
        print(each)
    seen = ", ".join(f"{name} {n}" for name, n in sorted(done.seen.items()))
    print(f"gangs: {done.orders} orders with {done.events} events (seed {asked.seed}; {seen}),")
    print(f"  {len(done.failures)} failed, {time.monotonic() - began:.0f} s")
    return 1 if done.failures else 0


def soak(orders: int, seed: int, *, first: int = 0, most_failures: int = 5) -> Outcome:
    """Play so many orders of events; stop early after `most_failures` failures."""
    done = Outcome()
    for n in range(first, first + orders):
        world = World(random.Random(f"{seed}-{n}"))
        try:
            world.play()
        except Exception:  # noqa: BLE001 - it is what a run reports
            events = "\n".join(f"  {each}" for each in world.log)
            done.failures.append(f"seed {seed}, order {n}:\n{events}\n{traceback.format_exc()}")
            if len(done.failures) == most_failures:
                break
        done.orders += 1
        done.events += world.events
        done.seen += world.seen
    return done


# --- what the world knows ------------------------------------------------------------------------------------


@dataclass
class _Node:
    idle: bool = True
    leaving: bool = False
    silent: bool = False


@dataclass
class _Rank:
    """A process. `is_dead`: it has died, and this is not reported yet."""

    node: int
    is_dead: bool = False
    is_gone: bool = False
    is_stopped: bool = False
    has_ended: bool = False


@dataclass
class _Gang:
    """What the world knows of a gang.

    `known` has the ends that the state machine can know; `own` the ranks that failed by themselves, not because another
    one had. `presumed` ranks went with their node, and their ends are not reported.
    """

    order: Order
    asked: tuple[int, ...] = ()
    answers: set[int] = field(default_factory=set[int])
    run: Run | None = None
    is_running: bool = False
    ranks: dict[int, _Rank] = field(default_factory=dict[int, _Rank])
    known: dict[int, How] = field(default_factory=dict[int, How])
    own: set[int] = field(default_factory=set[int])
    presumed: set[int] = field(default_factory=set[int])
    again: set[int] = field(default_factory=set[int])
    is_stopping: bool = False
    was_cancelled: bool = False
    unfinished: tuple[int, ...] | None = None
    decided: tuple[int, tuple[int, ...], bool] | None = None
    retried: int = 0
    last: Verdict | None = None
    has_waited: bool = False
    has_settled: bool = False
    verdict: Verdict | None = None

    @property
    def attempt(self) -> int:
        return self.run.attempt if self.run else 0

    @property
    def is_active(self) -> bool:
        return bool(self.asked) or self.is_running

    @property
    def left(self) -> list[int]:
        """The ranks whose processes may still do something."""
        if not self.is_running:
            return []
        return [n for n, each in self.ranks.items() if not (each.is_dead or each.is_gone or each.has_ended)]

    def decide(self) -> None:
        """Note which rank must be blamed, now that the state machine has decided."""
        if self.decided is not None:
            return
        assert self.has_settled or (len(self.known) == len(self.ranks) and not self.presumed), "decided too early"
        failed = [rank for rank, how in self.known.items() if how != "returned"]
        mine = [rank for rank in failed if rank in self.own]
        rank = next((rank for rank in mine if self.known[rank] not in ("raised", "overran")), mine[0])
        how = self.known[rank]
        may = self.retried < self.order.retries and (how != "raised" or rank in self.again)
        self.decided = rank, tuple(each for each in failed if each != rank), how == "interrupted" or may


class World:
    """A world with nodes and processes. It performs the actions of the state machine, and checks them."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.state = Gangs()
        self.nodes: dict[int, _Node] = {}
        self.held: dict[int, int] = {}
        self.gangs: dict[int, _Gang] = {}
        self.most_gangs = chance.choice((1, 2, 3, 8))
        self.timers: set[tuple[int, Timer]] = set()
        self.coming = 0
        self.next_node = 0
        self.later: list[Event] = []
        self.old: list[Event] = []
        self.log: list[object] = []
        self.events = 0
        self.seen: Counter[str] = Counter()

    def play(self) -> None:
        """Let things happen at random, then grant everything that gangs wait for, and see that all of them finish."""
        for _ in range(self.chance.randrange(6)):
            self.up()
        self.submit()
        moves = [move for move, weight in self._weights() for _ in range(weight)]
        for _ in range(self.chance.randint(*MOVES)):
            self.chance.choice(moves)()
        for _ in range(ROUNDS):
            if not self.open:
                break
            self.grant()
        assert not self.open, f"gangs did not finish: {sorted(self.state.gangs.items())}"
        assert not self.held, f"nodes are held by no gang: {self.held}"
        assert not self.timers, f"timers run for no gang: {self.timers}"
        assert all(each.verdict is not None for each in self.gangs.values())

    def _weights(self) -> list[tuple[Callable[[], object], int]]:
        return [
            (self.submit, 3),
            (self.come, 3),
            (self.leave, 1),
            (self.go, 2),
            (self.turn, 2),
            (self.answer, 12),
            (self.end, 16),
            (self.fire, 6),
            (self.cancel, 1),
            (self.report, 5),
            (self.repeat, 2),
        ]

    @property
    def open(self) -> list[_Gang]:
        return [each for each in self.gangs.values() if each.verdict is None]

    # --- moves -----------------------------------------------------------------------------------------------

    def submit(self) -> None:
        chance, number = self.chance, len(self.gangs)
        if number == self.most_gangs:
            return
        count = chance.choice((1, 2, 2, 3))
        among = None
        if self.nodes and chance.random() < 0.15:
            named = chance.randint(min(count, len(self.nodes)), len(self.nodes))
            among = frozenset(chance.sample(sorted(self.nodes), named))
        order = Order(
            gang=number,
            count=count,
            least=chance.choice((count, chance.randint(1, count))),
            procs=chance.choice((None, 1, 2)),
            among=among,
            retries=chance.randrange(4),
            wait=chance.choice((0.0, 5.0)),
        )
        self.gangs[number] = _Gang(order)
        self.happen(Asked(order))

    def come(self) -> None:
        """A node is rented, or comes up, or is not to be had."""
        fate = self.chance.random()
        if self.coming == 0 or fate < 0.3:
            self.coming += 1
        else:
            if fate < 0.9:
                self.up()
            self.coming -= 1
        self.happen(Coming(self.coming))

    def up(self) -> None:
        self.nodes[self.next_node] = _Node()
        self.next_node += 1
        self.happen(NodeUp(self.next_node - 1, self.chance.randrange(3)))

    def leave(self) -> None:
        if self.nodes:
            node = self.chance.choice(list(self.nodes))
            self.nodes[node].leaving = True
            self.happen(NodeLeaving(node))

    def go(self) -> None:
        """A node goes, with the processes that run there. Their ends are reported in any order with it, or later."""
        if not self.nodes:
            return
        node = self.chance.choice(list(self.nodes))
        leaving = [n for n, each in self.nodes.items() if each.leaving]
        if leaving and self.chance.random() < 0.7:
            node = self.chance.choice(leaving)
        how: How = "interrupted" if self.nodes[node].leaving or self.chance.random() < 0.3 else "lost"
        reports: list[Event] = [NodeGone(node)]
        gang = self.gangs.get(self.held.get(node, -1))
        if gang is not None and gang.is_running:
            for n, rank in gang.ranks.items():
                if rank.node == node and not rank.has_ended:
                    rank.is_gone, rank.is_dead = True, False
                    if n not in gang.known and not rank.is_stopped:
                        gang.own.add(n)
                    left = self.chance.choice((0.0, 60.0)) if how == "interrupted" else 0.0
                    report = Ended(gang.order.gang, gang.attempt, n, how, left=left)
                    fate = self.chance.random()
                    if fate < 0.6:
                        reports.append(report)
                    elif fate < 0.8:
                        self.later.append(report)
        self.chance.shuffle(reports)
        for each in reports:
            self.happen(each)

    def turn(self) -> None:
        """A node gets other calls, or ends its last one, or is up anew. Nodes that are held get no more calls."""
        if not self.nodes:
            return
        number = self.chance.choice(list(self.nodes))
        node = self.nodes[number]
        if node.silent and self.chance.random() < 0.5:
            node.idle, node.silent, node.leaving = True, False, False
            self.happen(NodeUp(number, self.chance.randrange(3)))
            return
        if node.idle and number in self.held:
            return
        node.idle = not node.idle
        node.silent = node.silent and not node.idle
        self.happen(NodeIdle(number, node.idle))

    def answer(self) -> None:
        """A node answers an empty call, or fails to."""
        waiting = [(each, n) for each in self.open for n in each.asked if n not in each.answers]
        if not waiting:
            return
        gang, node = self.chance.choice(waiting)
        ok = self.chance.random() < 0.9
        if ok:
            gang.answers.add(node)
        else:
            self.nodes[node].silent = True
            gang.asked = ()
        self.happen(Answered(gang.order.gang, gang.attempt + 1, node, ok))

    def end(self) -> None:
        """A process ends: by itself, because another one did, or because it was stopped."""
        gangs = [each for each in self.open if each.left]
        if not gangs:
            return
        gang = self.chance.choice(gangs)
        number = self.chance.choice(gang.left)
        rank = gang.ranks[number]
        fate = self.chance.random()
        if rank.is_stopped:
            hows: tuple[How, ...] = ("stopped", "stopped", "raised", "overran", "died", "returned")
            self.ended(gang, number, self.chance.choice(hows))
        elif gang.own:  # what happens to the others is that they report a broken connection, or return
            if fate < 0.5:
                how: How = "raised" if fate < 0.4 else "returned" if fate < 0.46 else "overran"
                self.ended(gang, number, how, again=fate < 0.2)
        elif fate < 0.4:
            self.ended(gang, number, "returned")
        elif fate < 0.65:
            gang.own.add(number)
            self.ended(gang, number, "raised", again=fate < 0.55)
        elif fate < 0.75:
            gang.own.add(number)
            self.ended(gang, number, "died")
        elif fate < 0.8:
            self.ended(gang, number, "overran")
        else:  # its death is known later, after its peers may have raised errors because of it
            gang.own.add(number)
            rank.is_dead = True

    def ended(self, gang: _Gang, rank: int, how: How, again: bool = False) -> None:
        if gang.is_running:
            self.happen(Ended(gang.order.gang, gang.attempt, rank, how, again))

    def report(self) -> None:
        """A death becomes known, or the end of a process whose node is gone."""
        if self.later and self.chance.random() < 0.5:
            self.happen(self.later.pop(self.chance.randrange(len(self.later))))
        for gang in self.open:
            dead = [n for n, rank in gang.ranks.items() if rank.is_dead]
            if dead:
                self.ended(gang, self.chance.choice(dead), "died")
                return

    def fire(self) -> None:
        """A timer fires. A death is known before the time to settle is over."""
        ready = sorted(each for each in self.timers if not (each[1] == "settle" and self._has_dead(each[0])))
        if ready:
            gang, timer = self.chance.choice(ready)
            self.timers.remove((gang, timer))
            self.happen(Fired(gang, timer))

    def _has_dead(self, gang: int) -> bool:
        return any(rank.is_dead for rank in self.gangs[gang].ranks.values())

    def cancel(self) -> None:
        if self.open and self.chance.random() < 0.4:
            gang = self.chance.choice(self.open)
            gang.was_cancelled = True
            self.happen(Cancelled(gang.order.gang))

    def repeat(self) -> None:
        """An event comes again, or one of a finished gang, an earlier run or an unknown node. It must not matter."""
        event = self.chance.choice([*self.old, NodeGone(-1), NodeLeaving(-1), NodeIdle(-1, True), Cancelled(-1)])
        if isinstance(event, Answered):
            gang = self.gangs[event.gang]
            if gang.verdict is None and event.attempt > gang.attempt:
                return
        elif isinstance(event, Fired) and self.gangs[event.gang].verdict is None:
            return
        assert step(self.state, event) == (self.state, []), f"{event} matters"

    def grant(self) -> None:
        """Grant what gangs may wait for: nodes that come up, answer and become idle; processes that end; timers."""
        self.coming = 0
        self.happen(Coming(0))
        useful = [n for n, node in self.nodes.items() if not node.leaving]
        for n in useful:
            if not self.nodes[n].idle or self.nodes[n].silent:
                self.nodes[n].idle, self.nodes[n].silent = True, False
                self.happen(NodeIdle(n, True))
        for _ in range(3 - len(useful)):
            self.up()
        for gang in self.open:
            for n in [n for n in gang.asked if n not in gang.answers]:
                if n in gang.asked:
                    gang.answers.add(n)
                    self.happen(Answered(gang.order.gang, gang.attempt + 1, n))
            for n, rank in list(gang.ranks.items()):
                if gang.is_running and gang.ranks[n] is rank and not rank.is_gone and not rank.has_ended:
                    how: How = "stopped" if rank.is_stopped else "died" if rank.is_dead else "returned"
                    self.ended(gang, n, how)
        for each in sorted(self.timers):
            if each in self.timers and not (each[1] == "settle" and self._has_dead(each[0])):
                self.timers.remove(each)
                self.happen(Fired(*each))

    # --- what happens, and what follows ----------------------------------------------------------------------

    def happen(self, event: Event) -> None:
        """Let an event happen, perform the actions that follow, and check the state."""
        self._note(event)
        self.log.append(event)
        self.events += 1
        self.old.append(event) if isinstance(event, (Answered, Ended, Fired)) else None
        self.state, actions = step(self.state, event)
        for gang in self.open:
            self._hasten(gang)
        for action in actions:
            self.log.append(f"  -> {action}")
            self._perform(action)
        self._check()

    def _note(self, event: Event) -> None:
        """Note what the state machine can know from an event."""
        match event:
            case NodeGone(node):
                leaving = self.nodes.pop(node).leaving
                gang = self.gangs.get(self.held.pop(node, -1))
                if gang is None:
                    return
                if node in gang.asked:
                    gang.asked = ()
                for n, rank in gang.ranks.items() if gang.is_running else ():
                    if rank.node == node and n not in gang.known:
                        gang.known[n] = "interrupted" if leaving else "lost"
                        gang.presumed.add(n)
            case NodeLeaving(node):
                for gang in self.open:
                    if node in gang.asked:
                        gang.asked = ()
            case Ended(number, attempt, rank, how, again):
                gang = self.gangs[number]
                if not gang.is_running or attempt != gang.attempt:
                    return
                is_first = not gang.is_stopping and all(each == "returned" for each in gang.known.values())
                if how == "overran" and is_first:
                    gang.unfinished = tuple(n for n in gang.ranks if n not in gang.known)
                gang.ranks[rank].has_ended, gang.ranks[rank].is_dead = True, False
                node = gang.ranks[rank].node
                if rank in gang.presumed:
                    if not gang.is_stopping and how == "interrupted":
                        gang.known[rank] = how
                elif rank not in gang.known:
                    gang.known[rank] = how
                if how in ("lost", "interrupted") and node in self.nodes:
                    self.nodes[node].silent = True
                if how == "raised" and again:
                    gang.again.add(rank)
                gang.presumed.discard(rank)
            case Fired(number, "settle"):
                self.gangs[number].has_settled = True
            case Fired(number, "wait"):
                self.gangs[number].has_waited = True
            case _:
                pass

    def _perform(self, action: Action) -> None:
        self.seen[type(action).__name__.lower()] += 1
        if not isinstance(action, Free):
            assert self.gangs[action.gang].verdict is None, f"{action} for a finished gang"
        match action:
            case Hold(node, number):
                owner = self.held.get(node)
                assert node in self.nodes
                assert not self.nodes[node].leaving
                assert owner is None or self.gangs[owner].verdict is not None or not self.gangs[owner].is_active
                self.held[node] = number
            case Free(node):
                assert node in self.nodes
                assert node in self.held
                del self.held[node]
            case Ask(number, attempt, nodes):
                self._ask(self.gangs[number], attempt, nodes)
            case Start(number, run):
                self._start(self.gangs[number], run)
            case Stop(number, ranks):
                self._stop(self.gangs[number], ranks)
            case Set(number, timer, seconds):
                assert seconds >= 0
                self.timers.add((number, timer))
            case Unset(number, timer):
                self.timers.discard((number, timer))
            case Again(number, verdict):
                gang = self.gangs[number]
                gang.decide()
                assert gang.decided is not None
                assert gang.decided[2]
                assert not gang.was_cancelled
                self._failed_rightly(gang, verdict)
                gang.retried += gang.known[gang.decided[0]] != "interrupted"
                gang.last, gang.has_waited = verdict, False
                self._end_run(gang)
                self._hasten(gang)
            case Finish(number, verdict):
                self._finish(self.gangs[number], verdict)

    def _ask(self, gang: _Gang, attempt: int, nodes: tuple[int, ...]) -> None:
        assert not gang.is_active
        assert attempt == gang.attempt + 1
        self._may_run_on(gang, nodes)
        for earlier in self.open:  # else it could have begun on these nodes
            if earlier.order.gang < gang.order.gang and not earlier.is_active:
                among = earlier.order.among
                assert sum(among is None or n in among for n in nodes) < earlier.order.count, "a later gang is first"
        gang.asked, gang.answers = nodes, set()

    def _may_run_on(self, gang: _Gang, nodes: tuple[int, ...]) -> None:
        order, number = gang.order, gang.order.gang
        assert nodes
        assert set(nodes) == {n for n, owner in self.held.items() if owner == number}
        assert all(self.nodes[n].idle and not self.nodes[n].leaving and not self.nodes[n].silent for n in nodes)
        assert order.among is None or order.among.issuperset(nodes)
        assert order.least <= len(nodes) <= order.count
        if len(nodes) < order.count:
            assert gang.last is not None, "a first run needs all its nodes"
            assert gang.has_waited, "a re-run waits before it begins with fewer nodes"
            self.seen["shrunk"] += 1

    def _start(self, gang: _Gang, run: Run) -> None:
        self._may_run_on(gang, tuple(sorted(run.nodes)))
        assert gang.asked
        assert gang.answers.issuperset(run.nodes)
        assert run.attempt == gang.attempt + 1
        assert [place.rank for place in run.places] == list(range(len(run.places)))
        assert [place.position for place in run.places] == sorted(place.position for place in run.places)
        assert {place.position for place in run.places} == set(range(len(run.nodes)))
        before = gang.run.nodes if gang.run else ()
        for position, n in enumerate(before[: len(run.nodes)]):
            assert n not in run.nodes or run.nodes[position] == n, "a node has lost its position"
        if not before:
            assert list(run.nodes) == sorted(run.nodes)
        assert run.changed == (gang.run is not None and len(gang.run.places) != len(run.places))
        if gang.run and len(run.nodes) > len(gang.run.nodes):
            self.seen["grown"] += 1
        gang.run, gang.asked, gang.is_running = run, (), True
        gang.ranks = {place.rank: _Rank(place.node) for place in run.places}
        gang.known, gang.own, gang.presumed, gang.again = {}, set(), set(), set()
        gang.decided, gang.unfinished, gang.is_stopping, gang.has_settled = None, None, False, False

    def _stop(self, gang: _Gang, ranks: tuple[int, ...]) -> None:
        assert gang.is_running
        assert not gang.is_stopping
        assert ranks
        assert ranks == tuple(n for n in gang.ranks if n not in gang.known)
        if not gang.was_cancelled and gang.unfinished is None:
            gang.decide()
        gang.is_stopping = True
        for n in ranks:
            gang.ranks[n].is_stopped = True

    def _failed_rightly(self, gang: _Gang, verdict: Verdict) -> None:
        assert gang.decided is not None
        assert verdict.rank is not None
        assert verdict.kind == "failed"
        assert verdict.run == gang.run
        assert (verdict.rank, verdict.others) == gang.decided[:2], f"{verdict} instead of {gang.decided}"
        assert verdict.rank in gang.own
        assert not any(gang.ranks[n].is_stopped for n in (verdict.rank, *verdict.others))
        self.seen[f"blamed {gang.known[verdict.rank]}"] += 1

    def _finish(self, gang: _Gang, verdict: Verdict) -> None:
        order = gang.order
        match verdict.kind:
            case "returned":
                assert set(gang.known.values()) == {"returned"}
                assert len(gang.known) == len(gang.ranks)
            case "cancelled":
                assert gang.was_cancelled
            case "timeout":
                assert gang.unfinished == verdict.others
                assert verdict.others
            case "no nodes":
                staying = {n for n, node in self.nodes.items() if not node.leaving}
                assert gang.run is None
                assert len(staying if order.among is None else order.among & staying) < order.count
                assert order.among is not None or self.coming == 0
            case "failed" if verdict.lacking:
                assert gang.last is not None
                assert not gang.is_active
                assert (verdict.rank, verdict.others, verdict.run) == (gang.last.rank, gang.last.others, gang.run)
                assert self.coming == 0 or order.among is not None
                usable = {n for n, node in self.nodes.items() if not node.leaving and not (node.silent and node.idle)}
                assert len(usable if order.among is None else usable & order.among) < order.least
                self.seen["lacking"] += 1
            case "failed":
                gang.decide()
                self._failed_rightly(gang, verdict)
                assert gang.decided is not None
                assert not gang.decided[2]
                assert not gang.was_cancelled
        assert verdict.run == gang.run
        assert not any(number == order.gang for number, _ in self.timers), f"timers run on: {self.timers}"
        self.seen[verdict.kind] += 1
        gang.verdict = verdict
        self._end_run(gang)

    def _end_run(self, gang: _Gang) -> None:
        gang.asked, gang.is_running, gang.ranks = (), False, {}

    def _hasten(self, gang: _Gang) -> None:
        """Note that a gang need not wait any longer, as nodes that it names do not stay."""
        staying = {n for n, node in self.nodes.items() if not node.leaving}
        if gang.last and not gang.is_active and gang.order.among and len(gang.order.among & staying) < gang.order.count:
            gang.has_waited = True

    def _check(self) -> None:
        assert self.state.nodes.keys() == self.nodes.keys()
        assert {n: node.gang for n, node in self.state.nodes.items() if node.gang is not None} == self.held
        assert list(self.state.gangs) == [each.order.gang for each in self.open]
        free = {n for n, node in self.nodes.items() if n not in self.held and not node.leaving and not node.silent}
        for gang in self.open:
            if not gang.is_active:
                self._check_waiting(gang, free)
            number = gang.order.gang
            mine = self.state.gangs[number]
            assert (mine.phase in ("running", "settling", "stopping")) == gang.is_running
            assert (mine.phase == "asking") == bool(gang.asked)
            assert mine.retried == gang.retried
            if gang.is_running and gang.run:
                for n in gang.run.nodes:
                    assert n not in self.nodes or self.held.get(n) == number, "a gang runs on a node of another one"
            running = {timer for owner, timer in self.timers if owner == number}
            assert ("settle" in running) == (mine.phase == "settling")
            assert ("stop" in running) == (mine.phase == "stopping")

    def _check_waiting(self, gang: _Gang, free: set[int]) -> None:
        """Check that a gang that waits has good reason to."""
        order, number = gang.order, gang.order.gang
        held = [n for n, owner in self.held.items() if owner == number]
        assert len(held) <= order.count
        if len(held) < order.count:
            assert not (free if order.among is None else free & order.among), "it does not hold what it can"
        needed = order.least if gang.has_waited else order.count
        assert len(held) < needed or not all(self.nodes[n].idle for n in held), "it has what it needs"
        waits = gang.last is not None and not gang.has_waited and len(held) < order.count
        assert ((number, "wait") in self.timers) == waits
        staying = {n for n, node in self.nodes.items() if not node.leaving}
        is_short = gang.last is None and order.among is None and len(staying) < order.count and self.coming == 0
        assert ((number, "shortage") in self.timers) == is_short
        usable = {n for n, node in self.nodes.items() if not node.leaving and not (node.silent and node.idle)}
        may_come = self.coming > 0 and order.among is None
        if gang.has_waited and len(usable if order.among is None else usable & order.among) < order.least:
            assert may_come, "it waits for nodes that cannot come"


if __name__ == "__main__":
    sys.exit(main())
