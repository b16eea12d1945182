"""The rules by which all ranks of a gang hear a notice at one step, in worlds with late, lost and doubled messages."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from skypool.gangs import agreement
from skypool.gangs.agreement import MOST_STEP, PATIENCE, ROUND, SETTLE, Agreement, Answer, Offer, offer_of, turn

# --- a rank ------------------------------------------------------------------------------------------------------


def test_a_rank_acts_exactly_once_it_passes_the_decided_step_and_waits_only_there() -> None:
    """All small cases."""
    for before, step, at, decided, waited in product(range(-1, 6), range(6), range(6), (False, True), (0.0, PATIENCE)):
        if step <= before:
            continue
        said = turn(before, step, Offer(at, decided), waited)
        reaches = step == at if before < 0 else before < at <= step
        wanted = "go on" if not reaches else "act" if decided else "wait" if not waited else "go on"
        assert said == wanted, (before, step, at, decided, waited)
    assert turn(3, 4, None, 0.0) == "go on"


def test_an_offer_is_one_number_which_is_never_that_for_none() -> None:
    for step, decided in product((0, 1, 2, 1000, MOST_STEP), (False, True)):
        offer = Offer(step, decided)
        assert 0 < offer.word < 1 << 64
        assert offer_of(offer.word) == offer
    assert offer_of(0) is None


# --- a node ------------------------------------------------------------------------------------------------------


def test_a_node_acknowledges_a_step_that_none_of_its_ranks_has_begun() -> None:
    for told in product(range(-1, 4), repeat=3):
        for step in range(5):
            said = agreement.answer(7, Offer(step), told, 2.0)
            assert said == Answer(7, max(told), 2.0, all(each < step for each in told))
    assert agreement.answer(1, Offer(3, decided=True), [9]).decided == 3
    assert not agreement.answer(1, None, [1]).ok


def test_a_node_obeys_no_older_round_and_keeps_a_decision() -> None:
    assert agreement.accepted(3, Offer(9), 3, Offer(9))
    assert not agreement.accepted(3, Offer(9), 2, Offer(8))
    assert agreement.accepted(3, Offer(9), 2, Offer(8, decided=True))
    assert not agreement.accepted(3, Offer(9, decided=True), 4, None)


# --- the owner ---------------------------------------------------------------------------------------------------


def test_a_step_that_somebody_has_passed_is_followed_by_a_later_one() -> None:
    state = Agreement(frozenset({0, 1}))
    state = agreement.heard(state, 0, Answer(1, 10, 4.0), 0.1)
    assert state.offer is None
    state = agreement.heard(state, 1, Answer(1, 12, 5.0), 0.2)
    assert (state.round, state.offer) == (2, Offer(17))
    state = agreement.heard(state, 0, Answer(2, 12, 4.0, ok=True), 0.3)
    state = agreement.heard(state, 1, Answer(2, 17, 5.0, ok=False), 0.4)
    assert (state.round, state.offer) == (3, Offer(27))
    for node in (0, 1):
        state = agreement.heard(state, node, Answer(3, 18, 5.0, ok=True), 0.5)
    assert state.offer == Offer(27, decided=True)
    later = agreement.heard(state, 0, Answer(3, 30, 5.0, ok=False), 0.6)
    assert later.offer == state.offer, "a decision stays"
    for node in (0, 1):
        state = agreement.heard(state, node, Answer(3, 27, 5.0, decided=27), 0.7)
    assert state.is_over


def test_slow_steps_are_agreed_at_the_next_one() -> None:
    state = agreement.heard(Agreement(frozenset({0})), 0, Answer(1, 4, 0.1), 0.1)
    assert state.offer == Offer(5)


def test_nothing_is_proposed_before_a_rank_has_told_a_step() -> None:
    state = agreement.heard(Agreement(frozenset({0})), 0, Answer(1), 0.1)
    assert state.offer is None
    again = agreement.waited(state, ROUND)
    assert again is not None
    assert (again.round, again.offer) == (2, None)


def test_a_node_without_ranks_holds_up_nobody() -> None:
    state = agreement.heard(Agreement(frozenset({0, 1})), 0, Answer(1, 4), 0.1)
    state = agreement.without(state, 1, 0.2)
    assert state.offer == Offer(5)
    state = agreement.heard(state, 0, Answer(2, 4, ok=True), 0.3)
    assert state.offer == Offer(5, decided=True)


def test_a_decision_that_the_owner_has_not_made_is_not_believed() -> None:
    state = agreement.heard(Agreement(frozenset({0, 1})), 1, Answer(1, 8, decided=9), 0.1)
    assert (state.offer, state.confirmed) == (None, frozenset())
    for node in (0, 1):
        state = agreement.heard(state, node, Answer(1, 8), 0.2)
    for node in (0, 1):
        state = agreement.heard(state, node, Answer(2, 8, ok=True), 0.3)
    assert state.offer == Offer(9, decided=True)
    assert not agreement.heard(state, 1, Answer(2, 8, decided=8), 0.4).confirmed


def test_answers_that_are_read_after_a_long_sleep_decide_nothing() -> None:
    state = Agreement(frozenset({0, 1}))
    for node in (0, 1):
        state = agreement.heard(state, node, Answer(1, 8), 0.2)
    assert (state.round, state.offer) == (2, Offer(9))
    for node in (0, 1):
        state = agreement.heard(state, node, Answer(2, 8, ok=True), 0.2 + ROUND + 0.1)
    assert (state.round, state.offer) == (3, Offer(11)), "the ranks may have given up meanwhile"
    asleep = agreement.heard(state, 0, Answer(3, 8, ok=True), 1.5)
    asleep = agreement.without(asleep, 1, 60.0)
    assert asleep.offer is not None
    assert not asleep.offer.decided


# --- whole gangs -------------------------------------------------------------------------------------------------


@dataclass
class Rank:
    """A rank: how it goes, and what it did."""

    node: int
    pace: float
    first: int
    ends: float
    step: int = -1  # the one that it has begun; it tells the one before while it waits
    told: int = -1
    next_at: float = 0.0
    waits_since: float | None = None
    is_told: bool = False  # it has told the next step, and looks at the offer later
    gives_up: bool = False
    longest: float = 0.0
    acted: int | None = None

    def go(self, offer: Offer | None, now: float) -> None:
        """Do what is due: tell a step, or look at the offer for it."""
        if self.acted is not None or now >= self.ends or now < self.next_at:
            return
        step = self.first if self.step < 0 else self.step + 1
        if not self.is_told and self.waits_since is None:
            self.is_told, self.told = True, step
            return
        since = now if self.waits_since is None else self.waits_since
        if not self.gives_up:
            self.longest = max(self.longest, now - since)
        match turn(self.step, step, offer, now - since):
            case "act":
                self.acted, self.told = step, self.step
            case "wait":
                self.waits_since = since
                self.told = self.step
            case _ if now - since >= PATIENCE and not self.gives_up:
                self.gives_up, self.told = True, step
                self.next_at = now + SETTLE
            case _:
                self.waits_since, self.is_told, self.gives_up = None, False, False
                self.step = self.told = step
                self.next_at = now + self.pace


@dataclass
class Node:
    offer: Offer | None = None
    round: int = 0
    due: float | None = None


@dataclass
class World:
    """Nodes with ranks, an owner, and messages that come late, twice or never."""

    chance: random.Random
    ranks: list[Rank]
    late: float
    loss: float
    knows_rate: bool = True
    nodes: dict[int, Node] = field(default_factory=dict)
    mail: list[tuple[float, int, int, Offer | Answer | None]] = field(default_factory=list)
    decided: set[int] = field(default_factory=set)

    TICK = 0.05

    def post(self, now: float, to: int, about: int, said: Offer | Answer | None) -> None:
        """Post what the owner says in a round, or to the owner, -1, what a node answers."""
        for _ in range(self.chance.choice((1, 1, 1, 2))):
            if self.chance.random() >= self.loss:
                self.mail.append((now + self.chance.uniform(0, self.late), to, about, said))

    def live(self, notice: float, until: float) -> None:
        self.nodes = {each.node: Node() for each in self.ranks}
        owner = Agreement(frozenset(self.nodes), began=notice)
        now, began = 0.0, False

        def tell() -> None:
            for node in owner.nodes:
                self.post(now, node, owner.round, owner.offer)
            if owner.offer is not None and owner.offer.decided:
                self.decided.add(owner.offer.step)

        while now < until:
            now += self.TICK
            if now >= notice and not began:
                began = True
                tell()
            due = [each for each in self.mail if each[0] <= now]
            self.mail = [each for each in self.mail if each[0] > now]
            for _, to, about, said in due:
                before = owner
                if isinstance(said, Answer):
                    owner = agreement.heard(owner, about, said, now)
                else:
                    there = self.nodes[to]
                    if agreement.accepted(there.round, there.offer, about, said):
                        there.round, there.offer = max(there.round, about), said
                        there.due = now + self.TICK
                if (owner.round, owner.offer) != (before.round, before.offer):
                    tell()
            for rank in self.chance.sample(self.ranks, len(self.ranks)):
                rank.go(self.nodes[rank.node].offer, now)
            for number, there in self.nodes.items():
                if there.due is not None and now >= there.due:
                    there.due = None
                    told = [each.told for each in self.ranks if each.node == number and now < each.ends]
                    rate = 1 / min(each.pace for each in self.ranks) if self.knows_rate else 0.0
                    self.post(now, -1, number, agreement.answer(there.round, there.offer, told, rate))
            if began:
                for node in owner.nodes:
                    if all(now >= each.ends for each in self.ranks if each.node == node):
                        before, owner = owner, agreement.without(owner, node, now)
                        if (owner.round, owner.offer) != (before.round, before.offer):
                            tell()
                if not owner.is_over and (later := agreement.waited(owner, now)) is not None:
                    owner = later
                    tell()


WORLDS = st.builds(
    lambda seed, places, paces, firsts, late, loss, ends: World(
        random.Random(seed),
        [Rank(place, pace, first, end) for place, pace, first, end in zip(places, paces, firsts, ends, strict=False)],
        late,
        loss,
    ),
    st.integers(0, 1 << 30),
    st.lists(st.integers(0, 3), min_size=2, max_size=6),
    st.lists(st.sampled_from([0.05, 0.1, 0.3, 1.0, 4.0]), min_size=6, max_size=6),
    st.lists(st.sampled_from([0, 0, 0, 3, 40]), min_size=6, max_size=6),
    st.sampled_from([0.05, 0.3, 1.5, 5.0]),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.lists(st.sampled_from([1e9, 1e9, 1e9, 3.0, 12.0]), min_size=6, max_size=6),
)


@settings(max_examples=300, deadline=None)
@given(WORLDS)
def test_no_two_ranks_act_at_different_steps_and_none_waits_for_long(world: World) -> None:
    world.live(notice=2.0, until=25.0)
    assert len({each.acted for each in world.ranks if each.acted is not None}) <= 1
    assert len(world.decided) <= 1
    assert all(each.acted in world.decided for each in world.ranks if each.acted is not None)
    assert max(each.longest for each in world.ranks) <= PATIENCE + 2 * World.TICK


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 1 << 30),
    st.integers(1, 4),
    st.sampled_from([0.05, 0.1, 0.5, 2.0]),
    st.sampled_from([0.05, 0.4]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_where_messages_come_all_ranks_that_live_act_soon(
    seed: int, nodes: int, pace: float, late: float, knows_rate: bool, one_dies: bool, one_is_silent: bool
) -> None:
    ranks = [Rank(node, pace, 100, 1e9) for node in range(nodes) for _ in range(2)]
    if one_dies:
        ranks[0] = replace(ranks[0], ends=2.5)
    if one_is_silent:  # it never asks, as one that only loads data
        ranks[-1] = replace(ranks[-1], next_at=1e9)
    world = World(random.Random(seed), ranks, late=late, loss=0.0, knows_rate=knows_rate)
    world.live(notice=2.0, until=20.0)
    acting = [each for each in ranks if each.ends > 20 and each.next_at < 1e9]
    assert all(each.acted is not None for each in acting)
    assert len({each.acted for each in acting}) == min(1, len(acting))
