"""Follows the worlds of `handover_world`: all of them up to a bound, or one of many by chance."""

from __future__ import annotations

import itertools
import random
from array import array
from dataclasses import dataclass, field
from enum import Enum

from tests.handover_world import (
    IT_ENDS,
    THINGS,
    Broken,
    Label,
    Rules,
    World,
    check,
    check_end,
    is_over,
    moves,
    new,
)

_MOST = 4000
"""The most moves of a world that is followed by chance."""


@dataclass
class Found:
    """What an exploration has found.

    Attributes:
        worlds: the number of different worlds.
        moves: the number of moves between them.
        broken: the first promise that was broken; None if all are kept.
        trace: the shortest way there, a line for each move.
        ends: how often each end was reached: machine, stored outcome, what the ledger and the client say.
    """

    worlds: int = 0
    moves: int = 0
    broken: Broken | None = None
    trace: list[str] = field(default_factory=list)
    ends: dict[tuple[str, ...], int] = field(default_factory=dict)


def explore(rules: Rules | None = None, *, faults: int, slips: int, cancels: int, has_limit: bool = False) -> Found:
    """Follow every order of events, breadth first, and return what was found. Stop at the first broken promise."""
    rules = rules or Rules()
    first = new(faults, slips, cancels, has_limit)
    numbers = {first: 0}
    worlds = [first]
    parents = array("i", [-1])
    forwards, ends_at = array("i"), array("i")  # where each world leads without a fault or a wake, one after the other
    found = Found()
    last: Label | None = None
    at = 0
    try:
        while at < len(worlds):
            for kind, last, after in moves(worlds[at], rules):
                if kind == "fault" and not last[0].startswith(rules.may_fail):
                    continue
                found.moves += 1
                number = numbers.get(after)
                if number is None:
                    number = numbers[after] = len(worlds)
                    worlds.append(after)
                    parents.append(at)
                    check(after)
                    if is_over(after):
                        check_end(after)
                if kind == "step":
                    forwards.append(number)
                last = None
            ends_at.append(len(forwards))
            at += 1
    except Broken as e:
        found.broken = e
        found.trace = _trace(worlds, parents, at, rules)
        if last is not None:  # a world was made that breaks it
            found.trace.append(_told(last))
    found.worlds = len(worlds)
    if found.broken is None:
        endless = _endless(found, worlds, forwards, ends_at)
        if endless >= 0:
            found.broken = Broken(IT_ENDS, "nothing leads to an end from here without another fault")
            found.trace = _trace(worlds, parents, endless, rules)
    return found


def _endless(found: Found, worlds: list[World], forwards: array[int], ends_at: array[int]) -> int:
    """Return the number of the first world from which nothing leads to an end; -1 if there is none. Count the ends."""
    reaches = bytearray(len(worlds))
    for number, world in enumerate(worlds):
        if is_over(world):
            reaches[number] = 1
            key = _end_of(world)
            found.ends[key] = found.ends.get(key, 0) + 1
    is_changed = True
    while is_changed:
        is_changed = False
        stop = len(forwards)
        for number in range(len(worlds) - 1, -1, -1):
            start = ends_at[number - 1] if number else 0
            if not reaches[number] and any(reaches[each] for each in forwards[start:stop]):
                reaches[number] = is_changed = True
            stop = start
    return reaches.find(0)


def _end_of(w: World) -> tuple[str, ...]:
    said = THINGS[w.said].value if w.said >= 0 else ""
    outcome = THINGS[w.entry].outcome
    return w.machine, "committed" if w.row else "not committed", outcome.value if outcome else "", said


def _trace(worlds: list[World], parents: array[int], at: int, rules: Rules) -> list[str]:
    """Return the moves that lead from the first world to one."""
    way = []
    while at >= 0:
        way.append(worlds[at])
        at = parents[at]
    way.reverse()
    told = []
    for before, after in itertools.pairwise(way):
        told.append(next(_told(label) for _, label, each in moves(before, rules) if each == after))
    return told


def _told(label: Label) -> str:
    """Return what happens as a line."""
    what, detail = label
    if detail is None:
        return what
    name = type(detail).__name__
    fields = []
    for key in getattr(detail, "__dataclass_fields__", {}):
        value = getattr(detail, key)
        if key in ("claim", "end", "heir", "row") or value in ("", None, False):
            continue
        is_value = hasattr(value, "__dataclass_fields__")
        fields.append(_told(("", value)).strip() if is_value else str(getattr(value, "value", value)))
    inside = f" ({', '.join(fields)})" if fields else ""
    if isinstance(detail, Enum):
        return f"{what}: {detail.value}"
    return f"{what}: {name}{inside}" if what else f"{name}{inside}"


def simulate(
    seed: int, rules: Rules | None = None, *, faults: int, slips: int, cancels: int, has_limit: bool = False
) -> tuple[World, list[str]]:
    """Let one world run to its end by chance, with faults only at first. Return the end and the trace.

    Raises Broken with the trace as a note.
    """
    rules = rules or Rules()
    chance = random.Random(seed)
    world = new(faults, slips, cancels, has_limit)
    trace: list[str] = []
    calm = chance.randrange(400)  # moves after which nothing fails any more, and what hangs hangs for good
    try:
        for number in range(_MOST):
            if is_over(world):
                check_end(world)
                return world, trace
            found = [each for each in moves(world, rules) if number < calm or each[0] == "step"]
            weights = [
                0.3 if kind == "fault" else 0.1 if label[0] == "half a lease passes" else 1.0
                for kind, label, _ in found
            ]
            if not found:
                raise Broken(IT_ENDS, "nothing can happen any more")
            _, label, world = chance.choices(found, weights)[0]
            trace.append(_told(label))
            check(world)
        raise Broken(IT_ENDS, "it goes on for ever")
    except Broken as e:
        e.add_note("\n".join(trace))
        raise
