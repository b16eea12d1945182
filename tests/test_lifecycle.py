"""The life of a pool: events in, actions out. And whatever the order of events, nothing leaks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from skypool.errors import (
    BootstrapError,
    CapacityError,
    ConnectionLost,
    LaunchError,
    NodeInterrupted,
    NodeRetired,
    PythonMismatch,
    StillRunning,
    UsageError,
)
from skypool.model import Instance
from skypool.pool.lifecycle import step
from skypool.pool.replacement import LIVING, REPLACEMENTS, WORTHWHILE
from skypool.pool.shrinking import check_retirement
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
)


def machine(name: str) -> Instance:
    """What a driver launched."""
    return Instance("fake", name, "p", 0)


class Life:
    """A pool and everything that was to be done about it."""

    def __init__(self, minimum: int = 1, maximum: int | None = None) -> None:
        self.pool = Pool(minimum, maximum or minimum)
        self.actions: list[Action] = []

    def __call__(self, *events: Event) -> list[Action]:
        """Let events happen; the actions they cause."""
        done: list[Action] = []
        for event in events:
            self.pool, actions = step(self.pool, event)
            done += actions
        self.actions += done
        return done

    def ready(self, *nodes: int) -> list[Action]:
        done: list[Action] = []
        for node in nodes:
            done += self(Launched(node, machine(f"i-{node}")), Reached(node), Bootstrapped(node))
        return done

    def slice_ready(self, head: int, hosts: int) -> list[Action]:
        done = self(
            Launched(head, machine(f"i-{head}"), tuple(machine(f"i-{node}") for node in range(head + 1, head + hosts)))
        )
        for node in range(head, head + hosts):
            done += self(Reached(node), Bootstrapped(node))
        return done

    @property
    def terminated(self) -> list[int]:
        return [node for action in self.actions if isinstance(action, Terminate) for node in action.nodes]


def started(minimum: int = 1, maximum: int | None = None) -> Life:
    life = Life(minimum, maximum)
    life(Start())
    return life


def serving(minimum: int = 1, maximum: int | None = None) -> Life:
    life = started(minimum, maximum)
    life.ready(*range(minimum))
    assert life.pool.phase is Phase.READY
    return life


LOST = ConnectionLost("it fell silent")


# --- one life ------------------------------------------------------------------------------------------------


def test_a_happy_life_goes_through_every_phase_in_order() -> None:
    life = Life(2)
    assert life(Start()) == [Announce(Phase.LAUNCHING), Launch((0, 1))]
    assert life(Launched(0, machine("a"))) == [Reach(0)]
    assert life(Launched(1, machine("b"))) == [Reach(1)]
    assert life(Reached(0)) == [Bootstrap(0)]
    assert life(Bootstrapped(0)) == [Admit(0)]
    assert life.pool.count(Phase.READY) == 1
    assert life(Reached(1)) == [Bootstrap(1)]
    assert life(Bootstrapped(1)) == [Admit(1), Announce(Phase.READY)]
    assert life(Pressure()) == []
    assert life(Stop()) == [Announce(Phase.DRAINING), Terminate((0, 1))]
    assert life(Terminated(1)) == []
    assert life(Terminated(0)) == [Announce(Phase.ENDED)]
    assert life.pool.phase is Phase.ENDED
    assert life.pool.error is None
    assert {node.phase for node in life.pool.nodes.values()} == {Phase.ENDED}


def test_a_second_start_does_nothing() -> None:
    life = started()
    assert life(Start()) == []


def test_a_second_stop_does_nothing() -> None:
    life = serving()
    life(Stop())
    assert life(Stop()) == []
    life(Terminated(0))
    assert life(Stop(), Start()) == []


def test_a_pool_that_never_started_ends_at_once() -> None:
    life = Life(3)
    assert life(Stop()) == [Announce(Phase.DRAINING), Announce(Phase.ENDED)]
    assert life(Start()) == []


def test_events_leave_the_state_before_them_as_it_was() -> None:
    before = serving(2).pool
    nodes = dict(before.nodes)
    step(before, Stop())
    step(before, Failed(0, LOST))
    assert before.nodes == nodes
    assert before.phase is Phase.READY


# --- launching -----------------------------------------------------------------------------------------------


def test_a_launch_that_fails_ends_the_pool_with_its_error() -> None:
    life, error = started(2), LaunchError("none left")
    assert life(Failed(0, error)) == [Announce(Phase.DRAINING)]
    assert life(Failed(1, error)) == [Announce(Phase.ENDED)]
    assert life.pool.error is error
    assert life.terminated == []


def test_a_launch_that_fails_for_one_node_ends_the_others() -> None:
    life, error = started(3), LaunchError("none left")
    life.ready(0)
    life(Launched(1, machine("b")))
    assert life(Failed(2, error)) == [Announce(Phase.DRAINING), Terminate((0, 1))]
    assert life(Terminated(0), Terminated(1)) == [Announce(Phase.ENDED)]
    assert life.pool.error is error


def test_what_arrives_after_a_stop_is_ended_and_never_reached() -> None:
    life = started(2)
    life(Launched(0, machine("a")))
    assert life(Stop()) == [Announce(Phase.DRAINING), Terminate((0,))]
    assert life(Terminated(0)) == []
    assert life(Launched(1, machine("b"))) == [Terminate((1,))]
    assert life(Reached(1), Bootstrapped(1)) == []
    assert life(Terminated(1)) == [Announce(Phase.ENDED)]


def test_a_launch_that_fails_after_a_stop_ends_the_pool_without_an_error() -> None:
    life = started()
    life(Stop())
    assert life(Failed(0, LaunchError("none left"))) == [Announce(Phase.ENDED)]
    assert life.pool.error is None


def test_reports_about_a_node_that_is_being_ended_are_ignored() -> None:
    life = started()
    life(Launched(0, machine("a")), Stop())
    assert life(Reached(0), Bootstrapped(0), Failed(0, LOST)) == []
    assert life(Terminated(0)) == [Announce(Phase.ENDED)]


# --- losing nodes --------------------------------------------------------------------------------------------


def test_a_node_lost_in_ready_is_dismissed_ended_and_replaced() -> None:
    life = serving(2)
    assert life(Failed(1, LOST)) == [Dismiss(1, LOST), Terminate((1,)), Launch((2,))]
    assert life.pool.phase is Phase.READY
    assert life(Terminated(1)) == []
    assert life.ready(2) == [Reach(2), Bootstrap(2), Admit(2)]
    assert life.pool.count(Phase.READY) == 2


def test_a_node_that_fails_before_it_is_ready_is_ended_and_replaced() -> None:
    life = started()
    life(Launched(0, machine("a")), Reached(0))
    assert life(Failed(0, BootstrapError("pip", step="packages"))) == [Terminate((0,)), Launch((1,))]
    assert Announce(Phase.READY) in life.ready(1)


@pytest.mark.parametrize("reached", [True, False])
def test_the_same_failure_on_two_machines_ends_the_pool_with_it(reached: bool) -> None:
    life = started()
    for node in (0, 1):
        life(Launched(node, machine(f"i-{node}")), *([Reached(node)] if reached else []))
        error = BootstrapError(f"step packages failed on node {node} (i-0{node}af): no package called nunpy")
        actions = life(Failed(node, error))
    assert actions == [Terminate((1,)), Announce(Phase.DRAINING)]
    assert life.pool.error is error
    assert not any(isinstance(action, Launch) and action.nodes == (2,) for action in life.actions)
    assert life(Terminated(0), Terminated(1)) == [Announce(Phase.ENDED)]


def test_machines_that_their_provider_cannot_give_say_nothing_of_the_next_one() -> None:
    """Strangers' machines often fail in the same way; so many are tried as may be replaced."""
    life, error = started(), CapacityError("its container did not start: OCI runtime create failed")
    for node in range(REPLACEMENTS):
        assert life(Launched(node, machine(f"i-{node}")), Failed(node, error))[-1] == Launch((node + 1,))
    life(Launched(REPLACEMENTS, machine("last")), Failed(REPLACEMENTS, error))
    assert life.pool.error is error


def test_a_failure_that_every_node_would_have_ends_the_pool_at_once() -> None:
    life, error = started(2), PythonMismatch("node 0 runs Python 3.8")
    life.ready(1)
    life(Launched(0, machine("a")))
    assert life(Failed(0, error)) == [Terminate((0,)), Announce(Phase.DRAINING), Terminate((1,))]
    assert life.pool.error is error


def test_different_failures_are_not_counted_together() -> None:
    life = started()
    life(Launched(0, machine("a")), Failed(0, BootstrapError("no package")))
    assert life(Launched(1, machine("b")), Failed(1, BootstrapError("no driver"))) == [
        Reach(1),
        Terminate((1,)),
        Launch((2,)),
    ]


def test_machines_that_do_not_come_after_all_are_no_failure_in_the_same_words_but_not_without_end() -> None:
    life = started()
    for node in range(REPLACEMENTS):
        actions = life(
            Launched(node, machine("i")), Failed(node, CapacityError("it was accepted before there was none"))
        )
        assert actions == [Reach(node), Terminate((node,)), Launch((node + 1,))]
    life(
        Launched(REPLACEMENTS, machine("i")),
        Failed(REPLACEMENTS, CapacityError("it was accepted before there was none")),
    )
    assert life.pool.phase is Phase.DRAINING


def test_failures_that_are_all_different_end_the_pool_too() -> None:
    life = started()
    for node in range(REPLACEMENTS + 1):
        assert life.pool.phase is Phase.LAUNCHING
        error = BootstrapError("so it goes " + "x" * node)
        life(Launched(node, machine("i")), Failed(node, error))
    assert life.pool.phase is Phase.DRAINING
    assert life.pool.error is error


def test_a_pool_whose_last_node_is_lost_and_not_replaced_ends_and_does_not_wait_for_ever() -> None:
    life = serving()
    for node in range(REPLACEMENTS):
        life(Failed(node, LOST), Terminated(node))
        life.ready(node + 1)
        assert life.pool.phase is Phase.READY
    life(Failed(REPLACEMENTS, LOST))
    assert life.pool.phase is Phase.DRAINING
    assert life.pool.error is LOST


def test_a_pool_with_a_node_left_goes_on_when_no_more_are_replaced() -> None:
    life = serving(2)
    lost = 0
    while life(Failed(max(life.pool.nodes), LOST))[-1] == Launch((max(life.pool.nodes),)):
        life.ready(max(life.pool.nodes))
        lost += 1
    assert lost == REPLACEMENTS * 2
    assert life.pool.phase is Phase.READY
    assert life.pool.count(Phase.READY) == 1


def test_a_replacement_that_cannot_be_had_leaves_the_others_at_work() -> None:
    life = serving(2)
    life(Failed(1, LOST))
    assert life(Failed(2, CapacityError("none left"))) == []
    assert life.pool.phase is Phase.READY


def test_a_replacement_that_cannot_be_had_ends_a_pool_with_no_other_node() -> None:
    life, error = serving(), LaunchError("none left")
    life(Failed(0, LOST))
    assert life(Failed(1, error)) == [Announce(Phase.DRAINING)]
    assert life(Terminated(0)) == [Announce(Phase.ENDED)]
    assert life.pool.error is error


def test_a_pool_that_never_was_ready_ends_with_the_first_failure_and_not_with_what_came_of_it() -> None:
    life, error = started(1), BootstrapError("no such package")
    life(Launched(0, machine("i")), Reached(0), Failed(0, error))
    life(Failed(1, LaunchError("the only machine is still in use")), Terminated(0))
    assert life.pool.phase is Phase.ENDED
    assert life.pool.error is error


# --- when a provider takes machines back ---------------------------------------------------------------------

AT = 1_800_000_000.0


def test_a_node_with_notice_is_drained_and_replaced_at_once() -> None:
    life = serving(2)
    assert life(Interrupted(1, AT, 900)) == [Drain(1, AT), Launch((2,))]
    assert (life.pool.nodes[1].word, life.pool.nodes[1].taken) == ("leaving", AT)
    assert life(Interrupted(1, AT + 1, 901)) == []
    assert Admit(2) in life.ready(2)
    dismissed, terminated = life(Drained(1))
    assert isinstance(dismissed, Dismiss)
    assert isinstance(dismissed.error, NodeInterrupted)
    assert terminated == Terminate((1,))
    assert life(Drained(1), Failed(1, LOST), Interrupted(1, AT, 902), Terminated(1)) == []
    assert life.pool.count(Phase.READY) == 2
    assert life.pool.replaced == 0


def test_a_node_with_notice_that_goes_before_its_calls_have_ended_was_taken_back() -> None:
    life = serving()
    life(Interrupted(0, AT, 900))
    dismissed, terminated = life(Failed(0, LOST))
    assert terminated == Terminate((0,))
    assert isinstance(dismissed, Dismiss)
    assert isinstance(dismissed.error, NodeInterrupted)
    assert str(dismissed.error) == "the provider took node 0 back"
    assert dismissed.error.__cause__ is LOST
    assert life.pool.nodes[0].error is dismissed.error


def test_a_node_above_the_minimum_is_drained_and_not_replaced() -> None:
    life = serving(1, 2)
    life(Pressure())
    life.ready(1)
    assert life(Interrupted(0, AT, 900)) == [Drain(0, AT)]
    assert life(Pressure()) == [Launch((2,))]


def test_a_node_with_notice_works_on_when_no_other_can_be_had_and_another_is_tried_when_it_goes() -> None:
    life, error = serving(), LaunchError("none left")
    life(Interrupted(0, AT, 900))
    assert life(Failed(1, error)) == []
    assert life.pool.phase is Phase.READY
    assert life(Failed(0, LOST))[-2:] == [Terminate((0,)), Launch((2,))]
    assert life(Failed(2, error), Terminated(0)) == [Announce(Phase.DRAINING), Announce(Phase.ENDED)]
    assert life.pool.error is error


def test_interruptions_after_worthwhile_service_never_end_a_pool() -> None:
    life = serving()
    for node in range(20):
        assert life(Interrupted(node, AT, WORTHWHILE))[-1] == Launch((node + 1,))
        life.ready(node + 1)
        life(Drained(node), Terminated(node))
    assert life.pool.phase is Phase.READY


def test_a_market_that_gives_machines_only_to_take_them_back_ends_the_pool() -> None:
    life = serving()
    for node in range(REPLACEMENTS):
        life(Interrupted(node, AT, 5))
        life.ready(node + 1)
        life(Drained(node), Terminated(node))
    assert life(Interrupted(REPLACEMENTS, AT, 5)) == [Drain(REPLACEMENTS, AT)]
    assert life(Drained(REPLACEMENTS), Terminated(REPLACEMENTS))[-1] == Announce(Phase.ENDED)
    assert isinstance(life.pool.error, NodeInterrupted)
    assert len([action for action in life.actions if isinstance(action, Launch)]) == 1 + REPLACEMENTS


def test_a_growing_pool_buys_no_more_on_such_a_market() -> None:
    life, bought = serving(1, 2), 0
    while life(Pressure()):
        bought += 1
        life.ready(bought)
        life(Interrupted(bought, AT, 5), Drained(bought), Terminated(bought))
    assert bought == REPLACEMENTS * 2 + 1
    assert life.pool.phase is Phase.READY


def test_a_node_taken_back_while_others_still_start_is_replaced_at_once() -> None:
    life = started(2)
    life.ready(0)
    drained, dismissed, *rest = life(Interrupted(0, AT, 5))
    assert drained == Drain(0, AT)
    assert isinstance(dismissed, Dismiss)
    assert rest == [Terminate((0,)), Launch((2,))]
    assert Announce(Phase.READY) in life.ready(1, 2)


@pytest.mark.parametrize("event", [Interrupted(0, AT, 5), Drained(0)])
def test_a_notice_of_a_node_that_is_not_ready_or_of_an_ending_pool_changes_nothing(event: Event) -> None:
    assert started()(event) == []
    life = serving()
    life(Stop())
    assert life(event) == []


def test_a_stop_ends_a_node_with_notice_once() -> None:
    life = serving(2)
    life(Interrupted(0, AT, 900), Launched(2, machine("c")))
    assert life(Stop()) == [Announce(Phase.DRAINING), Terminate((0, 1, 2))]
    life(Drained(0), Terminated(0), Terminated(1), Terminated(2))
    assert life.pool.phase is Phase.ENDED
    assert sorted(life.terminated) == [0, 1, 2]


# --- slices --------------------------------------------------------------------------------------------------


def slices(minimum: int = 1, maximum: int | None = None, hosts: int = 2) -> Life:
    """A pool that serves, of slices of so many hosts."""
    life = Life(minimum, maximum)
    life(Start(hosts))
    for head in range(0, minimum * hosts, hosts):
        life.slice_ready(head, hosts)
    assert life.pool.phase is Phase.READY
    return life


def test_a_slice_is_launched_once_and_ready_when_all_its_hosts_are() -> None:
    life = Life(2)
    assert life(Start(2)) == [Announce(Phase.LAUNCHING), Launch((0, 2))]
    assert life(Launched(0, machine("a"), (machine("b"),))) == [Reach(0), Reach(1)]
    assert life(Launched(2, machine("c"), (machine("d"),))) == [Reach(2), Reach(3)]
    assert life(*[Reached(node) for node in range(4)]) == [Bootstrap(node) for node in range(4)]
    assert life(Bootstrapped(1)) == []
    assert life(Bootstrapped(2)) == []
    assert life.pool.count(Phase.READY) == 0
    assert life(Bootstrapped(0)) == [Admit(0), Admit(1)]
    assert life(Bootstrapped(3)) == [Admit(2), Admit(3), Announce(Phase.READY)]
    assert life.pool.count(Phase.READY) == 2
    assert life(Stop()) == [Announce(Phase.DRAINING), Terminate((0, 1, 2, 3))]
    assert life(*[Terminated(node) for node in range(4)]) == [Announce(Phase.ENDED)]


def test_a_slice_that_loses_a_host_goes_and_is_replaced_once() -> None:
    life = slices(2)
    assert life(Failed(1, LOST)) == [Dismiss(1, LOST, (0,)), Terminate((0, 1)), Launch((4,))]
    assert life(Failed(0, LOST), Reached(0)) == []
    assert str(life.pool.nodes[0].error) == (
        "node 0 was ended because node 1 of the same slice (machines rented together) was lost: it fell silent"
    )
    assert life.pool.replaced == 1
    assert life(Terminated(0), Terminated(1)) == []
    assert life.slice_ready(4, 2)[-2:] == [Admit(4), Admit(5)]
    assert life.pool.count(Phase.READY) == 2


def test_a_slice_of_which_one_host_fails_before_it_is_ready_is_ended_whole() -> None:
    life = Life()
    life(Start(2), Launched(0, machine("a"), (machine("b"),)), Reached(0), Reached(1), Bootstrapped(1))
    assert life(Failed(0, BootstrapError("no device"))) == [Terminate((0, 1)), Launch((2,))]
    assert life(Launched(2, machine("c"), (machine("d"),)), Failed(2, BootstrapError("no device")))[-2:] == [
        Terminate((2, 3)),
        Announce(Phase.DRAINING),
    ]


def test_a_slice_with_notice_drains_and_goes_when_no_host_has_a_call_left() -> None:
    life = slices()
    assert life(Interrupted(1, AT, 900)) == [Drain(0, AT), Drain(1, AT), Launch((2,))]
    assert life(Interrupted(0, AT, 900), Drained(1), Drained(1)) == []
    dismissed, terminated = life(Drained(0))
    assert isinstance(dismissed, Dismiss)
    assert isinstance(dismissed.error, NodeInterrupted)
    assert (dismissed.node, dismissed.others, terminated) == (0, (1,), Terminate((0, 1)))
    assert isinstance(life.pool.nodes[1].error, NodeInterrupted)
    assert life.pool.hasty == 0


def test_a_slice_that_arrives_late_is_ended_whole() -> None:
    life = Life()
    life(Start(2), Stop())
    assert life(Launched(0, machine("a"), (machine("b"),))) == [Terminate((0, 1))]
    assert life(Terminated(0), Terminated(1)) == [Announce(Phase.ENDED)]


def test_slices_never_share_ranks() -> None:
    life = slices(2, 3)
    assert life(Failed(0, LOST), Failed(4, LaunchError("none left")), Pressure())[-1] == Launch((6,))


def test_a_pool_grows_by_slices() -> None:
    life = slices(1, 2)
    assert life(Pressure()) == [Launch((2,))]
    life.slice_ready(2, 2)
    assert life(Pressure()) == []


# --- growing -------------------------------------------------------------------------------------------------


def test_pressure_grows_a_pool_one_node_at_a_time_up_to_its_maximum() -> None:
    life = serving(1, 3)
    assert life(Pressure()) == [Launch((1,))]
    assert life(Pressure()) == []
    life.ready(1)
    assert life(Pressure()) == [Launch((2,))]
    life.ready(2)
    assert life(Pressure()) == []


@pytest.mark.parametrize("life", [Life(1, 2), started(1, 2)], ids=["planned", "launching"])
def test_a_pool_that_is_not_ready_does_not_grow(life: Life) -> None:
    assert life(Pressure()) == []


def test_a_stopped_pool_does_not_grow() -> None:
    life = serving(1, 2)
    life(Stop())
    assert life(Pressure()) == []


def test_a_node_above_the_minimum_is_not_replaced() -> None:
    life = serving(1, 2)
    life(Pressure())
    life.ready(1)
    assert life(Failed(1, LOST)) == [Dismiss(1, LOST), Terminate((1,))]


def test_growing_ends_when_new_nodes_fail_in_the_same_way() -> None:
    life = serving(1, 9)
    for node in (1, 2):
        assert life(Pressure()) == [Launch((node,))]
        life(Launched(node, machine("i")), Failed(node, BootstrapError(f"disk full on node {node}")), Terminated(node))
    assert life(Pressure()) == []
    assert life.pool.phase is Phase.READY


def test_growing_ends_when_new_nodes_keep_failing_in_different_ways() -> None:
    life, bought = serving(1, 2), 0
    while life(Pressure()):
        bought += 1
        error = BootstrapError("so it goes " + "x" * bought)
        life(Launched(bought, machine("i")), Failed(bought, error), Terminated(bought))
    assert bought == REPLACEMENTS * 2 + 1
    assert life.pool.phase is Phase.READY


# --- a new size ----------------------------------------------------------------------------------------------


def words(life: Life) -> dict[int, str]:
    return {node: state.word for node, state in sorted(life.pool.nodes.items())}


def test_a_larger_size_launches_the_missing_nodes_at_once() -> None:
    life = serving(2)
    assert life(Resize(4, 4)) == [Launch((2, 3))]
    assert life(Resize(4, 4)) == []
    assert life.ready(2, 3)[-1] == Admit(3)
    assert life.pool.count(Phase.READY) == 4
    assert life(Failed(3, LOST))[-1] == Launch((4,))


def test_a_smaller_size_retires_the_nodes_with_the_fewest_calls_and_then_the_highest_numbers() -> None:
    life = serving(4)
    assert life(Resize(2, 2, {0: 1, 1: 3, 3: 2})) == [Drain(2, None), Drain(0, None)]
    assert words(life) == {0: "leaving", 1: "ready", 2: "leaving", 3: "ready"}
    dismissed, terminated = life(Drained(0))
    assert isinstance(dismissed, Dismiss)
    assert isinstance(dismissed.error, NodeRetired)
    assert terminated == Terminate((0,))
    assert life(Drained(0), Terminated(0)) == []
    assert life.pool.nodes[0].error is None
    assert life.pool.phase is Phase.READY
    assert life(Failed(1, LOST))[-1] == Launch((4,))
    other = serving(3)
    assert other(Resize(1, 1)) == [Drain(2, None), Drain(1, None)]


def test_nodes_that_are_not_ready_are_retired_before_ready_ones_and_end_at_once() -> None:
    life = serving(1)
    life(Resize(4, 4), Launched(1, machine("b")), Launched(2, machine("c")), Reached(2))
    assert life(Resize(1, 1)) == [Terminate((1,)), Terminate((2,))]
    assert words(life) == {0: "ready", 1: "draining", 2: "draining", 3: "launching"}
    assert life(Reached(1), Bootstrapped(2), Failed(1, LOST)) == []
    assert life(Launched(3, machine("d"))) == [Terminate((3,))]
    life(*[Terminated(node) for node in (1, 2, 3)])
    assert words(life) == {0: "ready", 1: "ended", 2: "ended", 3: "ended"}
    assert not any(node.error for node in life.pool.nodes.values())


def test_a_launch_that_fails_after_its_node_was_retired_is_no_failure() -> None:
    life = started(2)
    assert life(Resize(1, 1)) == []
    assert life(Failed(1, LaunchError("none left"))) == []
    assert life.pool.phase is Phase.LAUNCHING
    assert Announce(Phase.READY) in life.ready(0)
    assert life.pool.error is None


def test_a_launching_pool_that_is_made_smaller_is_ready_when_enough_nodes_are() -> None:
    life = started(3)
    life.ready(0)
    life(Launched(1, machine("b")))
    assert life(Resize(1, 1)) == [Terminate((1,)), Announce(Phase.READY)]
    assert life(Launched(2, machine("c"))) == [Terminate((2,))]


def test_a_launching_pool_that_is_made_larger_waits_for_all() -> None:
    life = started(1)
    assert life(Resize(2, 3)) == [Launch((1,))]
    assert Announce(Phase.READY) not in life.ready(0)
    assert Announce(Phase.READY) in life.ready(1)
    assert life(Pressure()) == [Launch((2,))]


def test_a_size_that_is_set_before_the_start_is_the_number_that_is_launched() -> None:
    life = Life(1)
    assert life(Resize(3, 3)) == []
    assert life(Start()) == [Announce(Phase.LAUNCHING), Launch((0, 1, 2))]


@pytest.mark.parametrize("event", [Resize(5, 5), Resize(1, 1), Retire(0)])
def test_an_ending_pool_keeps_its_size(event: Event) -> None:
    life = serving(2)
    life(Stop())
    assert life(event) == []


def test_nodes_that_could_not_be_had_are_tried_again_when_the_size_is_set_again() -> None:
    life = serving(1)
    life(Resize(2, 2))
    assert life(Failed(1, CapacityError("none left"))) == []
    assert life.pool.phase is Phase.READY
    assert life(Resize(2, 2)) == [Launch((2,))]


def test_a_pool_that_was_fixed_grows_under_pressure_once_it_has_a_range() -> None:
    life = serving(1)
    assert life(Pressure()) == []
    assert life(Resize(1, 2)) == []
    assert life(Pressure()) == [Launch((1,))]
    life.ready(1)
    assert life(Resize(1, 1)) == [Drain(1, None)]


def test_a_retired_node_drains_and_is_not_replaced() -> None:
    life = serving(3)
    assert life(Retire(1)) == [Drain(1, None)]
    assert (life.pool.minimum, life.pool.maximum) == (2, 2)
    assert life(Retire(1)) == []
    assert life(Drained(1))[-1] == Terminate((1,))
    assert life(Retire(1), Terminated(1)) == []
    assert (life.pool.minimum, life.pool.maximum) == (2, 2)
    assert life(Resize(2, 2)) == []


def test_a_retired_node_of_a_growing_pool_leaves_the_range_unless_too_few_are_left() -> None:
    life = serving(1, 3)
    life(Pressure())
    life.ready(1)
    life(Retire(0))
    assert (life.pool.minimum, life.pool.maximum) == (1, 3)
    assert life(Pressure()) == [Launch((2,))]
    small = serving(2, 3)
    small(Retire(0))
    assert (small.pool.minimum, small.pool.maximum) == (1, 3)


def test_a_retired_node_that_is_lost_while_its_calls_run_is_not_replaced() -> None:
    life = serving(2)
    life(Retire(1))
    assert life(Failed(1, LOST)) == [Dismiss(1, LOST), Terminate((1,))]
    assert life.pool.nodes[1].error is LOST
    assert life.pool.replaced == 0


def test_a_retired_node_that_its_provider_takes_back_has_its_calls_moved_and_is_not_replaced() -> None:
    life = serving(2)
    life(Retire(1))
    assert life(Interrupted(1, AT, 5)) == [Drain(1, AT)]
    dismissed, terminated = life(Failed(1, LOST))
    assert isinstance(dismissed, Dismiss)
    assert isinstance(dismissed.error, NodeInterrupted)
    assert terminated == Terminate((1,))
    assert life.pool.hasty == 0


def test_a_node_that_its_provider_takes_back_leaves_already_and_is_not_retired() -> None:
    life = serving(2)
    life(Interrupted(1, AT, 900))
    assert life(Retire(1)) == []
    assert (life.pool.minimum, life.pool.maximum) == (2, 2)
    life.ready(2)
    assert life(Resize(1, 1)) == [Drain(2, None)]


def test_a_pool_does_not_wait_for_ever_when_its_last_node_was_retired_and_no_other_can_be_had() -> None:
    life = serving(1)
    for node in range(REPLACEMENTS):
        life(Failed(node, LOST), Terminated(node))
        life.ready(node + 1)
    life(Resize(2, 2))
    life(Launched(4, machine("e")))
    life(Retire(3))
    error = BootstrapError("disk full")
    assert life(Reached(4), Failed(4, error)) == [Bootstrap(4), Terminate((4,))]  # too many were replaced before
    assert life.pool.phase is Phase.READY
    assert life(Drained(3))[-2:] == [Terminate((3,)), Announce(Phase.DRAINING)]
    assert life.pool.error is error


def test_a_stop_ends_a_retired_node_once() -> None:
    life = serving(3)
    life(Resize(1, 1))
    life(Drained(2))
    assert life(Stop()) == [Announce(Phase.DRAINING), Terminate((0, 1))]
    assert life(Drained(1), Terminated(0), Terminated(1), Terminated(2)) == [Announce(Phase.ENDED)]
    assert sorted(life.terminated) == [0, 1, 2]


def test_a_new_size_is_a_number_of_slices_and_slices_go_as_a_whole() -> None:
    life = slices(2)
    assert life(Resize(3, 3)) == [Launch((4,))]
    life.slice_ready(4, 2)
    assert life(Resize(2, 2, {1: 2, 2: 1, 4: 5, 5: 1})) == [Drain(2, None), Drain(3, None)]
    assert life(Drained(3)) == []
    assert life(Drained(2))[-1] == Terminate((2, 3))
    assert life(Retire(5)) == [Drain(4, None), Drain(5, None)]


def test_only_a_node_that_exists_and_is_not_the_last_or_a_part_of_a_slice_can_be_retired() -> None:
    life = serving(2)
    check_retirement(life.pool, "p", 0)
    with pytest.raises(UsageError, match=r"node 7 of pool 'p' does not exist; its nodes are \[0, 1\]"):
        check_retirement(life.pool, "p", 7)
    life(Retire(0))
    check_retirement(life.pool, "p", 0)
    with pytest.raises(UsageError, match=r"node 1 is the last one of pool 'p', so it cannot be retired: pool\.stop"):
        check_retirement(life.pool, "p", 1)
    life(Drained(0), Terminated(0))
    with pytest.raises(UsageError, match=r"node 0 of pool 'p' has ended already; its nodes are \[1\]"):
        check_retirement(life.pool, "p", 0)
    with pytest.raises(UsageError, match=r"node 3 is one of the nodes 2 to 3, which .*: pool\.retire\(2\) retires all"):
        check_retirement(slices(2).pool, "p", 3)


# --- the end -------------------------------------------------------------------------------------------------


def test_an_end_that_cannot_be_proved_is_kept_as_the_error() -> None:
    life, error = serving(2), StillRunning("i-0 is still there", ["i-0"])
    life(Stop())
    assert life(StillThere(0, error)) == []
    assert life(Terminated(1)) == [Announce(Phase.ENDED)]
    assert life.pool.error is error
    assert life.pool.nodes[0].error is error


def test_an_unproved_end_does_not_hide_the_error_that_ended_the_pool() -> None:
    life, first = started(2), LaunchError("none left")
    life(Launched(0, machine("a")), Failed(1, first))
    error = StillRunning("i-0 is still there", ["i-0"])
    assert life(StillThere(0, error)) == [Announce(Phase.ENDED)]
    assert life.pool.error is first
    assert life.pool.nodes[0].error is error


def test_a_node_lost_before_the_stop_is_not_ended_twice() -> None:
    life = serving(2)
    life(Failed(0, LOST))
    assert life(Stop()) == [Announce(Phase.DRAINING), Terminate((1,))]
    life(Launched(2, machine("c")), Terminated(0), Terminated(1))
    assert life.pool.phase is Phase.DRAINING
    assert life(Terminated(2)) == [Announce(Phase.ENDED)]
    assert sorted(life.terminated) == [0, 1, 2]


# --- any life ------------------------------------------------------------------------------------------------


class AnyLife(RuleBasedStateMachine):
    """Plays the engine and the clouds: reports on what was asked, in any order, each once."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(1, 1)
        self.asked: set[int] = set()
        self.rented: set[int] = set()
        self.ended: list[int] = []
        self.ending: set[int] = set()
        self.reaching: set[int] = set()
        self.bootstrapping: set[int] = set()
        self.admitted: set[int] = set()
        self.announced: list[Phase] = []
        self.bought: list[int] = []
        self.grown = self.interrupted = self.retired = 0
        self.most = 1
        self.draining: set[int] = set()
        self.hosts = 1
        self.slices: dict[int, set[int]] = {}

    @initialize(minimum=st.integers(1, 3), more=st.integers(0, 2), hosts=st.integers(1, 3))
    def begin(self, minimum: int, more: int, hosts: int) -> None:
        self.pool = Pool(minimum, minimum + more)
        self.most = minimum + more
        self.first = minimum
        self.hosts = hosts

    def happens(self, event: Event) -> None:
        phase = self.pool.phase
        self.pool, actions = step(self.pool, event)
        for action in actions:
            self.obey(action, phase)

    def obey(self, action: Action, before: Phase) -> None:
        match action:
            case Launch(nodes):
                assert before not in (Phase.DRAINING, Phase.ENDED), "launched while draining"
                assert not self.asked.intersection(nodes)
                assert not self.rented.intersection(nodes)
                self.asked.update(nodes)
                self.bought += nodes
            case Reach(node):
                assert node in self.rented
                self.reaching.add(node)
            case Bootstrap(node):
                self.bootstrapping.add(node)
            case Admit(node):
                self.admitted.add(node)
            case Drain(node, at):
                assert node in self.admitted
                self.draining.add(node)
                self.interrupted += node in self.slices and at is not None
            case Dismiss(node, _, others):
                assert {node, *others} == self.slice_of(node)
                assert self.admitted.issuperset((node, *others))
                self.admitted -= {node, *others}
                self.draining -= {node, *others}
            case Terminate(nodes):
                assert self.rented.issuperset(nodes), "ended what was never rented"
                assert set(nodes) == set().union(*map(self.slice_of, nodes)), "ended a part of a slice"
                self.ended += nodes
                self.ending.update(nodes)
            case Announce(phase):
                self.announced.append(phase)

    def slice_of(self, node: int) -> set[int]:
        return next(nodes for nodes in self.slices.values() if node in nodes)

    @rule()
    def start(self) -> None:
        self.happens(Start(self.hosts))

    @rule()
    def pressure(self) -> None:
        before = len(self.bought)
        self.happens(Pressure())
        self.grown += len(self.bought) - before

    @rule(minimum=st.integers(1, 3), more=st.integers(0, 2), load=st.dictionaries(st.integers(0, 9), st.integers(0, 3)))
    @precondition(lambda self: self.most > 1)  # otherwise its slices may have different sizes
    def resize(self, minimum: int, more: int, load: dict[int, int]) -> None:
        before = len(self.bought)
        self.most = max(self.most, minimum + more)
        if self.pool.phase is Phase.PLANNED:
            self.first = minimum
        self.happens(Resize(minimum, minimum + more, load))
        self.grown += len(self.bought) - before

    @rule(data=st.data())
    @precondition(lambda self: self.pool.nodes)
    def retire(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(sorted(self.pool.nodes)))
        try:
            check_retirement(self.pool, "p", node)
        except UsageError:
            return
        before = len(self.bought)
        self.happens(Retire(node))
        assert len(self.bought) == before
        self.retired += 1

    @rule(dice=st.integers(0, 9))
    def stop(self, dice: int) -> None:
        if dice == 7:  # seldom: most lives should be long
            self.happens(Stop())

    @rule(data=st.data(), size=st.integers(1, 3))
    @precondition(lambda self: self.asked)
    def launched(self, data: st.DataObject, size: int) -> None:
        node = self.drawn(data, self.asked)
        self.arrives(node, size if self.most == 1 else self.hosts)

    def arrives(self, node: int, hosts: int) -> None:
        nodes = range(node, node + hosts)
        assert self.rented.isdisjoint(nodes), "two slices share a node"
        self.slices[node] = set(nodes)
        self.rented.update(nodes)
        self.happens(Launched(node, machine(f"i-{node}"), tuple(machine(f"i-{each}") for each in nodes[1:])))

    @rule(data=st.data(), words=st.sampled_from(["out of stock", "quota"]))
    @precondition(lambda self: self.asked)
    def not_launched(self, data: st.DataObject, words: str) -> None:
        self.happens(Failed(self.drawn(data, self.asked), LaunchError(words)))

    @rule(data=st.data())
    @precondition(lambda self: self.reaching)
    def reached(self, data: st.DataObject) -> None:
        self.happens(Reached(self.drawn(data, self.reaching)))

    @rule(data=st.data())
    @precondition(lambda self: self.bootstrapping)
    def bootstrapped(self, data: st.DataObject) -> None:
        self.happens(Bootstrapped(self.drawn(data, self.bootstrapping)))

    @rule(data=st.data(), words=st.text("abc", max_size=2))
    @precondition(lambda self: self.rented)
    def lost(self, data: st.DataObject, words: str) -> None:
        node = data.draw(st.sampled_from(sorted(self.rented)))
        self.happens(Failed(node, ConnectionLost(words, node)))

    @rule(data=st.data(), served=st.sampled_from([5.0, 5000.0]))
    @precondition(lambda self: self.rented)
    def interrupted_by_its_provider(self, data: st.DataObject, served: float) -> None:
        node = data.draw(st.sampled_from(sorted(self.rented)))
        self.happens(Interrupted(node, AT, served))

    @rule(data=st.data())
    @precondition(lambda self: self.draining)
    def drained(self, data: st.DataObject) -> None:
        self.happens(Drained(data.draw(st.sampled_from(sorted(self.draining)))))

    @rule(data=st.data())
    @precondition(lambda self: self.ending)
    def terminated(self, data: st.DataObject) -> None:
        self.happens(Terminated(self.drawn(data, self.ending)))

    @rule(data=st.data())
    @precondition(lambda self: self.ending)
    def still_there(self, data: st.DataObject) -> None:
        self.happens(StillThere(self.drawn(data, self.ending), StillRunning("still there")))

    def drawn(self, data: st.DataObject, nodes: set[int]) -> int:
        node = data.draw(st.sampled_from(sorted(nodes)))
        nodes.remove(node)
        return int(node)

    @invariant()
    def nothing_is_ended_twice(self) -> None:
        assert len(self.ended) == len(set(self.ended))

    @invariant()
    def slices_work_as_a_whole_or_not_at_all(self) -> None:
        for nodes in self.slices.values():
            assert not nodes & self.admitted or nodes <= self.admitted

    @invariant()
    def an_ended_pool_has_ended_all_it_rented(self) -> None:
        if self.pool.phase is Phase.ENDED:
            assert sorted(self.ended) == sorted(self.rented)
            assert not self.asked
            assert not self.ending

    @invariant()
    def a_living_pool_is_of_use_or_waits_for_something(self) -> None:
        if self.pool.phase in (Phase.LAUNCHING, Phase.READY):
            assert self.asked or self.reaching or self.bootstrapping or self.admitted, "waits for nothing"
            assert self.admitted or self.pool.count(*LIVING), "waits for machines that it will end"
        if self.pool.phase is Phase.LAUNCHING:
            living = self.pool.count(Phase.LAUNCHING, Phase.BOOTING, Phase.BOOTSTRAPPING, Phase.READY)
            assert living >= self.pool.minimum, "can never become ready"

    @invariant()
    def machines_bought_are_bounded(self) -> None:
        replaced = len(self.bought) - self.grown - self.first
        assert replaced <= REPLACEMENTS * self.most + 2 * self.interrupted + self.retired
        assert len(self.bought) == len(set(self.bought))

    @invariant()
    def phases_only_go_forward(self) -> None:
        order = list(Phase)
        assert self.announced == sorted(self.announced, key=order.index)
        assert len(self.announced) == len(set(self.announced))

    def teardown(self) -> None:
        """Whatever happened: stop, let every outstanding report come in, and the pool has ended."""
        self.happens(Stop())
        for node in sorted(self.asked):
            self.arrives(node, self.hosts)
        self.asked.clear()
        for node in sorted(self.reaching | self.bootstrapping):
            self.happens(Failed(node, ConnectionLost("cut off")))
        while self.ending:
            self.happens(Terminated(self.ending.pop()))
        assert self.pool.phase is Phase.ENDED
        assert sorted(self.ended) == sorted(self.rented)


AnyLife.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestAnyLife: Any = AnyLife.TestCase
