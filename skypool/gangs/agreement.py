"""The rules by which all ranks of a gang hear a notice at one agreed step. Values in, values out: no clock, no I/O.

A rank tells each step that it begins. When a machine of the gang ends soon, the owner proposes a step that no rank has
begun. Nodes acknowledge it if none of their ranks has. If all nodes do, the owner decides, and each rank acts when it
begins that step. Otherwise the owner proposes a later one. A rank that begins a proposed step waits for the decision.

Only the owner decides, at most once, and a decision is never taken back. A rank that has gone on past a step never acts
at it. So no two ranks act at different steps, however late messages come. Answers that come later than `ROUND` count as
a refusal, as ranks may have waited long enough meanwhile. A rank tells a step before it looks at the offer, also when
it gives up; it then looks once more `SETTLE` seconds later. The owner is the client; for a gang on a
single node it is the node's agent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

PATIENCE = 2.0
"""The most seconds for which a rank waits, at the beginning of a proposed step, for the decision."""
ROUND = 1.0
"""Seconds after which the owner gives a proposal up that not all nodes have acknowledged, or asks or tells again.

It is less than `PATIENCE`, so that a decision still has time to come before a rank has waited long enough.
"""
SETTLE = 0.05
"""Seconds between a write into the page and the look at what the other side has written by then."""
_AHEAD = 1.0
"""Seconds of work by which the first proposal is ahead. Each later proposal is twice as far ahead as the one before."""
_MOST_DOUBLED = 4
"""How often that is doubled at most."""
MOST_STEP = (1 << 62) - 2
"""The greatest step."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A step that the owner has proposed to a rank, or decided."""

    step: int
    decided: bool = False

    @property
    def word(self) -> int:
        """The offer as one number of the page of shared memory; 0 means no offer."""
        return 2 * (self.step + 1) + self.decided


def offer_of(word: int) -> Offer | None:
    """Return the offer that a number of the page stands for; None for none."""
    return Offer((word >> 1) - 1, bool(word & 1)) if word else None


# --- a rank ------------------------------------------------------------------------------------------------------


def turn(before: int, step: int, offer: Offer | None, waited: float) -> Literal["go on", "wait", "act"]:
    """Return what a rank does at the beginning of a step.

    A rank may leave steps out, as long as all ranks do: it acts at the first step that is not before the agreed one.

    Args:
        before: the step that it began last, and went on; -1 for none. A rank that tells its first step late has perhaps
            not counted like the others, and acts only at the agreed step itself.
        step: the step.
        offer: what is offered to it now.
        waited: for how many seconds it has waited at this step.
    """
    if offer is None or not (before < offer.step <= step if before >= 0 else offer.step == step):
        return "go on"
    if offer.decided:
        return "act"
    return "wait" if waited < PATIENCE else "go on"


# --- a node ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a node about its ranks of one gang.

    Attributes:
        round: the round of the owner that it answers; 0 if it was not asked.
        highest: the greatest step that one of its ranks has told; -1 if none has told any.
        rate: the steps in a second, of the fastest rank.
        ok: True if none of its ranks has begun, and gone past, the step that is proposed or decided.
        decided: the step that was decided, as this node knows it; -1 for none.
    """

    round: int
    highest: int = -1
    rate: float = 0.0
    ok: bool = False
    decided: int = -1


def answer(round_: int, offer: Offer | None, told: Iterable[int], rate: float = 0.0) -> Answer:
    """Return the answer of a node.

    Args:
        offer: what this node has offered to its ranks.
        told: the step that each of its ranks has told; -1 for one that has told none, which holds up nobody.
        rate: the steps in a second, of the fastest rank.
    """
    highest = max(told, default=-1)
    decided = offer.step if offer is not None and offer.decided else -1
    return Answer(round_, highest, rate, offer is not None and highest < offer.step, decided)


def accepted(known: int, present: Offer | None, round_: int, offer: Offer | None) -> bool:
    """Return True if a node obeys what the owner says in a round.

    Args:
        known: the greatest round of which the node has heard.
        present: what it offers to its ranks now. A decision stays.
    """
    if present is not None and present.decided:
        return False
    return round_ >= known or (offer is not None and offer.decided)


# --- the owner ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Agreement:
    """The state of the owner for one run of a gang.

    Attributes:
        nodes: the nodes with ranks of the gang.
        round: the number of the present round, from 1. What it says to nodes is `round` and `offer`.
        offer: what is proposed or decided; None while it asks how far the ranks are.
        began: when the round began, or was repeated, in seconds of any clock that does not go back.
        failed: how many proposals have failed.
        answers: the last answer of each node.
        confirmed: the nodes that know of the decision.
    """

    nodes: frozenset[int]
    round: int = 1
    offer: Offer | None = None
    began: float = 0.0
    failed: int = 0
    answers: Mapping[int, Answer] = field(default_factory=dict[int, Answer])
    confirmed: frozenset[int] = frozenset()

    @property
    def is_over(self) -> bool:
        """True if all nodes know of the decision."""
        return self.offer is not None and self.offer.decided and self.confirmed >= self.nodes


def heard(state: Agreement, node: int, said: Answer, now: float) -> Agreement:
    """Return the state after the answer of a node. If `round` or `offer` has changed, tell all nodes."""
    if node not in state.nodes:
        return state
    state = replace(state, answers={**state.answers, node: said})
    if said.decided >= 0:  # only this owner decides
        is_so = state.offer == Offer(said.decided, True)
        return replace(state, confirmed=state.confirmed | {node}) if is_so else state
    if said.round != state.round or (state.offer is not None and state.offer.decided):
        return state
    if state.offer is not None and not said.ok:
        return _next(replace(state, failed=state.failed + 1), _proposal(state, state.failed + 1), now)
    return _judged(state, now)


def without(state: Agreement, node: int, now: float) -> Agreement:
    """Return the state after the last rank of a node has ended. If `round` or `offer` has changed, tell all nodes."""
    left = state.nodes - {node}
    answers = {each: said for each, said in state.answers.items() if each != node}
    return _judged(replace(state, nodes=left, answers=answers, confirmed=state.confirmed & left), now)


def waited(state: Agreement, now: float) -> Agreement | None:
    """Return the state if a round has lasted long enough: all nodes are then told what it says. None otherwise."""
    if now - state.began < ROUND:
        return None
    if state.offer is not None and state.offer.decided:
        return replace(state, began=now)
    return _next(replace(state, failed=state.failed + (state.offer is not None)), None, now)


def _judged(state: Agreement, now: float) -> Agreement:
    """Propose or decide if all nodes have answered in this round."""
    said = [state.answers.get(node) for node in state.nodes]
    if not said or not all(each is not None and each.round == state.round for each in said):
        return state
    if state.offer is None:
        proposal = _proposal(state, state.failed)
        return state if proposal is None else _next(state, proposal, now)
    if state.offer.decided or not all(each is not None and each.ok for each in said):
        return state
    if now - state.began > ROUND:  # as when the owner has slept; ranks may have given up since they answered
        return _next(replace(state, failed=state.failed + 1), _proposal(state, state.failed + 1), now)
    return replace(state, offer=replace(state.offer, decided=True), began=now)


def _proposal(state: Agreement, failed: int) -> Offer | None:
    """Return a step that no rank has begun, as far as it is known; None if none has told any."""
    highest = max((each.highest for each in state.answers.values()), default=-1)
    if highest < 0:
        return None
    rate = max(each.rate for each in state.answers.values())
    ahead = max(1, math.ceil(rate * _AHEAD)) * 2 ** min(failed, _MOST_DOUBLED)
    if state.offer is not None:
        highest = max(highest, state.offer.step)
    return Offer(min(highest + ahead, MOST_STEP))


def _next(state: Agreement, offer: Offer | None, now: float) -> Agreement:
    return replace(state, round=state.round + 1, offer=offer, began=now)
