"""The decisions about gangs: events in, actions out. Each rule alone, then random orders of events."""

from __future__ import annotations

import pytest

from skypool.agent import stops
from skypool.calls import broadcast
from skypool.gangs import Gangs, Order, Verdict, step
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
    Hold,
    How,
    NodeGone,
    NodeIdle,
    NodeLeaving,
    NodeUp,
    Place,
    Run,
    Set,
    Start,
    Stop,
    Timer,
    Unset,
)
from skypool.wire import save_orders
from tests.soak.gangs import soak


class Play:
    """The state of gangs, everything that was decided, and the timers that run."""

    def __init__(self, *nodes: int, devices: int = 0) -> None:
        self.state = Gangs()
        self.actions: list[Action] = []
        self.timers: set[Timer] = set()
        for node in nodes:
            self(NodeUp(node, devices))

    def __call__(self, *events: Event) -> list[Action]:
        """Let events happen; the actions they cause."""
        done: list[Action] = []
        for event in events:
            if isinstance(event, Fired):
                self.timers.discard(event.timer)
            self.state, actions = step(self.state, event)
            for each in actions:
                if isinstance(each, Set):
                    self.timers.add(each.timer)
                elif isinstance(each, Unset):
                    self.timers.discard(each.timer)
            done += actions
        self.actions += done
        return done

    def run(self, gang: int = 0) -> Run:
        """Let the nodes that a gang asks answer; the run that starts."""
        ask = next(each for each in reversed(self.actions) if isinstance(each, Ask) and each.gang == gang)
        done = self(*(Answered(gang, ask.attempt, node) for node in ask.nodes))
        return next(each.run for each in done if isinstance(each, Start))

    @property
    def verdicts(self) -> list[Verdict]:
        return [each.verdict for each in self.actions if isinstance(each, Finish)]


def two(**options: int) -> Order:
    """A gang of two nodes."""
    return Order(0, 2, options.pop("least", 2), **options)  # type: ignore[arg-type]  # all of them are numbers


def running(order: Order, *nodes: int) -> Play:
    """A gang whose first run has started."""
    play = Play(*nodes)
    play(Asked(order))
    play.run()
    return play


# --- nodes for gangs -----------------------------------------------------------------------------------------


def test_a_gang_holds_its_nodes_asks_them_and_starts_when_all_have_answered() -> None:
    play = Play(3, 1, devices=2)
    assert play(Asked(two())) == [Hold(1, 0), Hold(3, 0), Ask(0, 1, (1, 3))]
    assert play(Answered(0, 1, 3)) == []
    places = (Place(0, 1, 0, 0), Place(1, 1, 1, 0), Place(2, 3, 0, 1), Place(3, 3, 1, 1))
    assert play(Answered(0, 1, 1)) == [Start(0, Run(1, places))]


def test_a_node_without_devices_runs_one_process_unless_the_user_says_how_many() -> None:
    assert len(running(two(), 0, 1).state.gangs[0].run.places) == 2  # type: ignore[union-attr]  # it has started
    assert len(running(two(procs=3), 0, 1).state.gangs[0].run.places) == 6  # type: ignore[union-attr]  # so has this


def test_a_gang_holds_what_there_is_until_it_has_all_nodes_that_it_needs() -> None:
    play = Play(0)
    play(Coming(1))
    assert play(Asked(two())) == [Hold(0, 0)]
    assert play(NodeUp(1)) == [Hold(1, 0), Ask(0, 1, (0, 1))]


def test_a_gang_waits_until_the_calls_on_its_nodes_have_ended() -> None:
    play = Play(0)
    play(NodeIdle(0, False))
    assert play(Asked(Order(0, 1, 1))) == [Hold(0, 0)]
    assert play(NodeIdle(0, True)) == [Ask(0, 1, (0,))]


def test_idle_nodes_are_taken_before_busy_ones_and_lower_numbers_before_higher_ones() -> None:
    play = Play(0, 1, 2)
    play(NodeIdle(0, False))
    assert play(Asked(Order(0, 1, 1))) == [Hold(1, 0), Ask(0, 1, (1,))]


def test_a_gang_that_holds_a_busy_node_takes_an_idle_one_in_its_place() -> None:
    play = Play(0)
    play(NodeIdle(0, False), Asked(Order(0, 1, 1)))
    assert play(NodeUp(1)) == [Free(0), Hold(1, 0), Ask(0, 1, (1,))]


def test_a_leaving_node_is_taken_by_no_gang_and_one_that_is_held_is_freed() -> None:
    play = Play(0)
    play(Coming(2), Asked(two()))
    assert play(NodeLeaving(0)) == [Free(0)]
    assert play(NodeUp(1), NodeUp(2)) == [Hold(1, 0), Hold(2, 0), Ask(0, 1, (1, 2))]


def test_a_gang_runs_only_on_the_nodes_that_it_names() -> None:
    play = Play(0, 1)
    assert play(Asked(Order(0, 1, 1, among=frozenset({1})))) == [Hold(1, 0), Ask(0, 1, (1,))]


def test_an_earlier_gang_takes_a_node_from_a_later_one_that_waits() -> None:
    play = Play(0)
    play(Asked(Order(0, 1, 1)))
    play.run()
    play(Asked(Order(1, 1, 1, retries=1)), Asked(Order(2, 2, 2)))
    play(NodeUp(1))
    play.run(1)
    assert play(NodeUp(2)) == [Hold(2, 2)]
    assert play(NodeGone(1), Fired(1, "settle")) == [
        Set(1, "settle", SETTLING),
        Again(1, Verdict("failed", Run(1, (Place(0, 1, 0, 0),)), 0)),
        Hold(2, 1),
        Ask(1, 2, (2,)),
    ]


def test_a_later_gang_does_not_pass_an_earlier_one_that_waits_for_more_nodes() -> None:
    play = Play(0)
    play(Coming(2))
    assert play(Asked(two()), Asked(Order(1, 1, 1))) == [Hold(0, 0)]
    assert play(NodeUp(1), NodeUp(2)) == [Hold(1, 0), Ask(0, 1, (0, 1)), Hold(2, 1), Ask(1, 1, (2,))]


def test_nodes_of_a_gang_that_has_returned_go_straight_to_the_next() -> None:
    play = running(two(), 0, 1)
    play(Asked(Order(1, 1, 1)))
    done = play(Ended(0, 1, 0, "returned"), Ended(0, 1, 1, "returned"))
    assert [type(each) for each in done] == [Finish, Free, Hold, Ask]
    assert done[1:] == [Free(1), Hold(0, 1), Ask(1, 1, (0,))]


def test_a_node_that_does_not_answer_is_not_used_until_it_is_known_to_be_idle() -> None:
    play = Play(0, 1)
    play(Asked(two(retries=0)))
    assert play(Answered(0, 1, 1, ok=False)) == [Free(1)]
    assert play(Answered(0, 1, 0)) == []
    assert play(NodeIdle(1, True)) == [Hold(1, 0), Ask(0, 1, (0, 1))]


def test_a_node_that_does_not_answer_is_replaced_at_once_and_uses_up_no_retry() -> None:
    play = Play(0, 1, 2)
    play(Asked(two()))
    assert play(Answered(0, 1, 0, ok=False)) == [Free(0), Hold(2, 0), Ask(0, 1, (1, 2))]
    assert play.run() == Run(1, (Place(0, 1, 0, 0), Place(1, 2, 0, 1)))


@pytest.mark.parametrize("event", [NodeGone(1), NodeLeaving(1)])
def test_a_gang_whose_node_goes_while_it_asks_waits_for_another(event: Event) -> None:
    play = Play(0, 1)
    play(Asked(two()))
    short = Set(0, "shortage", SHORTAGE)
    assert play(event) == ([short] if isinstance(event, NodeGone) else [short, Free(1)])
    assert play(NodeUp(2)) == [Unset(0, "shortage"), Hold(2, 0), Ask(0, 1, (0, 2))]


def test_a_node_that_is_gone_is_not_freed() -> None:
    play = Play(0)
    play(Asked(two()))
    assert play(NodeGone(0)) == []


def test_a_gang_that_names_too_few_nodes_that_stay_finishes_before_its_first_run() -> None:
    play = Play(0, 1)
    play(NodeIdle(0, False), Asked(Order(0, 2, 2, among=frozenset({0, 1}))))
    assert play(NodeGone(1)) == [Finish(0, Verdict("no nodes")), Free(0)]


def test_a_first_run_waits_as_long_as_nodes_are_coming() -> None:
    play = Play(0)
    play(Coming(1))
    assert play(Asked(two())) == [Hold(0, 0)]
    assert play(Fired(0, "shortage")) == []
    assert play(Coming(0)) == [Set(0, "shortage", SHORTAGE)]
    assert play(Coming(1)) == [Unset(0, "shortage")]


def test_a_first_run_gives_up_if_the_pool_has_too_few_nodes_and_rents_no_more() -> None:
    play = Play(0, 1)
    play(NodeIdle(0, False), Asked(two()))
    assert play(NodeLeaving(1)) == [Set(0, "shortage", SHORTAGE), Free(1)]
    assert play(Fired(0, "shortage")) == [Finish(0, Verdict("no nodes")), Free(0)]


# --- a run ---------------------------------------------------------------------------------------------------


def test_a_gang_whose_ranks_have_all_returned_finishes_and_frees_its_nodes() -> None:
    play = running(two(), 0, 1)
    assert play(Ended(0, 1, 1, "returned")) == []
    run = play.state.gangs[0].run
    assert play(Ended(0, 1, 0, "returned")) == [
        Finish(0, Verdict("returned", run)),
        Free(0),
        Free(1),
    ]


def test_after_a_failure_the_others_are_stopped_once_the_time_to_settle_is_over() -> None:
    play = running(two(), 0, 1)
    run = play.state.gangs[0].run
    assert play(Ended(0, 1, 1, "raised")) == [Set(0, "settle", SETTLING)]
    assert play(Fired(0, "settle")) == [Stop(0, (0,)), Set(0, "stop", 5.0 + STOPPING)]
    assert play(Ended(0, 1, 0, "stopped")) == [
        Unset(0, "stop"),
        Finish(0, Verdict("failed", run, 1)),
        Free(0),
        Free(1),
    ]


def test_the_time_to_stop_is_as_long_as_a_node_may_take_to_stop_its_processes() -> None:
    of_mover = 2 * save_orders.TO_LOOK  # before they are asked, and before they are killed
    assert of_mover + stops._WRITING < STOPPING
    assert of_mover < broadcast._STOPPING


def test_after_a_rank_that_has_saved_the_others_have_the_time_until_the_machine_ends() -> None:
    play = running(two(), 0, 1)
    run = play.state.gangs[0].run
    assert play(Ended(0, 1, 1, "interrupted", left=60.0)) == [Set(0, "settle", 60.0 - SPARE)]
    assert play(Ended(0, 1, 0, "interrupted", left=50.0))[:2] == [
        Unset(0, "settle"),
        Again(0, Verdict("failed", run, 1, (0,))),
    ]


def test_a_failure_after_a_rank_that_has_saved_is_decided_soon() -> None:
    play = running(two(procs=2), 0, 1)
    play(Ended(0, 1, 1, "interrupted", left=60.0))
    assert play(Ended(0, 1, 2, "returned"), Ended(0, 1, 3, "interrupted", left=60.0)) == []
    assert play.state.gangs[0].phase == "settling"
    late = running(two(procs=2), 0, 1)
    late(Ended(0, 1, 1, "interrupted", left=60.0))
    assert late(Ended(0, 1, 2, "died")) == [Set(0, "settle", SETTLING)]
    assert late(Fired(0, "settle"))[0] == Stop(0, (0, 3))


def test_a_failure_is_decided_at_once_when_no_rank_is_left() -> None:
    play = running(two(), 0, 1)
    run = play.state.gangs[0].run
    play(Ended(0, 1, 1, "raised"))
    done = play(Ended(0, 1, 0, "returned"))
    assert done[:2] == [Unset(0, "settle"), Finish(0, Verdict("failed", run, 1))]
    assert play.timers == set()


def test_a_rank_that_died_is_blamed_before_one_that_raised_earlier() -> None:
    play = running(two(procs=2), 0, 1)
    play(Ended(0, 1, 2, "raised"), Ended(0, 1, 1, "died"), Ended(0, 1, 3, "raised"), Ended(0, 1, 0, "raised"))
    (verdict,) = play.verdicts
    assert (verdict.rank, verdict.others) == (1, (2, 3, 0))


@pytest.mark.parametrize("how", ["raised", "died"])
def test_of_ranks_that_failed_alike_the_earliest_is_blamed(how: How) -> None:
    play = running(two(procs=2), 0, 1)
    play(Ended(0, 1, 2, how), Ended(0, 1, 1, how), Fired(0, "settle"), Fired(0, "stop"))
    (verdict,) = play.verdicts
    assert (verdict.rank, verdict.others) == (2, (1,))


def test_ranks_that_end_because_they_were_stopped_are_not_failures() -> None:
    play = running(two(procs=2), 0, 1)
    play(Ended(0, 1, 2, "raised"), Fired(0, "settle"))
    play(Ended(0, 1, 0, "died"), Ended(0, 1, 1, "raised"), Ended(0, 1, 3, "returned"))
    (verdict,) = play.verdicts
    assert (verdict.rank, verdict.others) == (2, ())


def test_a_rank_that_does_not_end_in_time_counts_as_ended_and_its_end_is_ignored() -> None:
    play = running(two(), 0, 1)
    play(Ended(0, 1, 1, "died"), Fired(0, "settle"), Fired(0, "stop"))
    assert len(play.verdicts) == 1
    assert play(Ended(0, 1, 0, "stopped")) == []


def test_a_rank_ends_once() -> None:
    play = running(two(), 0, 1)
    play(Ended(0, 1, 1, "returned"), Ended(0, 1, 1, "died"), Ended(0, 1, 0, "returned"))
    assert [each.kind for each in play.verdicts] == ["returned"]


def test_events_of_an_earlier_run_are_ignored() -> None:
    play = running(two(retries=1), 0, 1)
    play(Ended(0, 1, 1, "died"), Fired(0, "settle"), Fired(0, "stop"))
    assert play.run().attempt == 2
    assert play(Ended(0, 1, 0, "died"), Answered(0, 1, 0, ok=False)) == []


def test_a_gang_that_takes_too_long_is_stopped_and_not_run_again() -> None:
    play = running(two(retries=3), 0, 1)
    run = play.state.gangs[0].run
    assert play(Ended(0, 1, 1, "overran")) == [Stop(0, (0,)), Set(0, "stop", 5.0 + STOPPING)]
    assert play(Ended(0, 1, 0, "overran"))[1] == Finish(0, Verdict("timeout", run, others=(0, 1)))


def test_a_rank_that_returned_before_the_timeout_of_its_gang_is_not_named() -> None:
    play = running(two(), 0, 1)
    run = play.state.gangs[0].run
    play(Ended(0, 1, 0, "returned"))
    assert play(Ended(0, 1, 1, "overran"))[0] == Finish(0, Verdict("timeout", run, others=(1,)))


def test_a_timeout_after_the_first_failure_changes_nothing() -> None:
    play = running(two(), 0, 1)
    play(Ended(0, 1, 1, "raised"))
    play(Ended(0, 1, 0, "overran"))
    assert play.verdicts[0].rank == 1
    play(Fired(0, "settle"), Fired(0, "stop"))
    assert [each.kind for each in play.verdicts] == ["failed"]


@pytest.mark.parametrize("asks", [False, True])
def test_a_gang_without_processes_that_is_cancelled_finishes_at_once(asks: bool) -> None:
    play = Play(0, 1) if asks else Play(0)
    play(Coming(1), Asked(two()))
    assert play(Cancelled(0)) == [Finish(0, Verdict("cancelled")), Free(0), *([Free(1)] if asks else [])]


def test_a_running_gang_that_is_cancelled_is_stopped_first() -> None:
    play = running(two(), 0, 1)
    run = play.state.gangs[0].run
    assert play(Cancelled(0)) == [Stop(0, (0, 1)), Set(0, "stop", 5.0 + STOPPING)]
    assert play(Cancelled(0), Ended(0, 1, 0, "stopped")) == []
    assert play(Ended(0, 1, 1, "stopped"))[1] == Finish(0, Verdict("cancelled", run))


def test_a_gang_that_is_cancelled_after_a_failure_does_not_run_again() -> None:
    for steps in ([], [Fired(0, "settle")]):
        play = running(two(retries=5), 0, 1)
        play(Ended(0, 1, 0, "died"), *steps, Cancelled(0), Ended(0, 1, 1, "stopped"))
        assert [each.kind for each in play.verdicts] == ["cancelled"]
        assert play.timers == set()


# --- nodes that are lost -------------------------------------------------------------------------------------


def test_a_gang_goes_on_when_one_of_its_nodes_is_about_to_leave() -> None:
    assert running(two(), 0, 1)(NodeLeaving(0)) == []


LOST = Ended(0, 1, 1, "lost")


@pytest.mark.parametrize("events", [[NodeGone(1), LOST], [LOST, NodeGone(1)], [NodeGone(1)]])
def test_a_rank_on_a_lost_node_is_lost_in_whichever_order_this_is_reported(events: list[Event]) -> None:
    play = running(two(), 0, 1)
    play(*events)
    play(Ended(0, 1, 0, "raised"), Fired(0, "settle"))
    (verdict,) = play.verdicts
    assert (verdict.rank, verdict.others) == (1, (0,))


def test_a_gang_whose_only_node_is_gone_waits_for_the_reports_of_its_ranks() -> None:
    play = running(Order(0, 1, 1), 0)
    assert play(NodeGone(0)) == [Set(0, "settle", SETTLING)]
    done = play(Ended(0, 1, 0, "interrupted"))
    assert [type(each) for each in done] == [Unset, Again, Set]


@pytest.mark.parametrize("events", [[NodeLeaving(1), NodeGone(1)], [NodeLeaving(1), LOST]])
def test_a_rank_that_is_lost_with_a_node_that_was_leaving_is_interrupted(events: list[Event]) -> None:
    play = running(two(), 0, 1)
    play(*events, Fired(0, "settle"), Fired(0, "stop"))
    assert any(isinstance(each, Again) for each in play.actions)


def test_a_node_is_not_used_between_the_report_of_a_lost_rank_and_its_own() -> None:
    play = running(two(retries=1), 0, 1)
    assert play(LOST, Ended(0, 1, 0, "raised"))[-2:] == [Set(0, "wait", 0.0), Free(1)]
    assert play(NodeGone(1), NodeUp(2))[-1] == Ask(0, 2, (0, 2))


def test_a_node_that_goes_after_its_ranks_have_returned_does_not_stop_the_gang() -> None:
    play = running(two(), 0, 1)
    assert play(Ended(0, 1, 1, "returned"), NodeGone(1)) == []


def test_a_node_that_goes_while_the_gang_is_stopped_counts_as_the_end_of_its_ranks() -> None:
    play = running(two(), 0, 1)
    play(Ended(0, 1, 0, "raised"), Fired(0, "settle"))
    assert play(NodeGone(1))[0] == Unset(0, "stop")
    assert play.verdicts[0].rank == 0


# --- run again -----------------------------------------------------------------------------------------------


def test_a_gang_whose_rank_died_runs_again_on_its_nodes_as_often_as_it_has_retries() -> None:
    play = running(two(retries=1), 0, 1)
    run = play.state.gangs[0].run
    play(Ended(0, 1, 0, "died"), Ended(0, 1, 1, "raised"))
    assert play.actions[-2:] == [Again(0, Verdict("failed", run, 0, (1,))), Ask(0, 2, (0, 1))]
    again = play.run()
    assert (again.attempt, again.changed) == (2, False)
    play(Ended(0, 2, 0, "died"), Ended(0, 2, 1, "raised"))
    assert play.verdicts == [Verdict("failed", again, 0, (1,))]


def test_an_interruption_uses_up_no_retry() -> None:
    play = running(Order(0, 1, 1, wait=30), 0)
    for attempt in (1, 2, 3):
        play(NodeLeaving(attempt - 1), NodeGone(attempt - 1), Ended(0, attempt, 0, "interrupted"), NodeUp(attempt))
        assert play.run().attempt == attempt + 1
    assert play.state.gangs[0].retried == 0


@pytest.mark.parametrize("again", [False, True])
def test_a_gang_whose_rank_raised_runs_again_only_for_errors_of_retry_on(again: bool) -> None:
    play = running(two(retries=1), 0, 1)
    play(Ended(0, 1, 0, "raised", again=again), Ended(0, 1, 1, "raised", again=not again))
    assert any(isinstance(each, Again) for each in play.actions) is again


def shrinking(order: Order) -> Play:
    """A gang on the nodes 0, 1 and 2 that has lost node 1."""
    play = running(order, 0, 1, 2)
    play(NodeGone(1), Ended(0, 1, 1, "lost"), Fired(0, "settle"))
    play(Ended(0, 1, 0, "stopped"), Ended(0, 1, 2, "stopped"))
    return play


THREE = Order(0, 3, 2, retries=5, wait=30)


def test_a_replacement_takes_the_position_of_the_node_that_was_lost() -> None:
    play = shrinking(THREE)
    assert Set(0, "wait", 30) in play.actions
    assert play(NodeUp(7)) == [Unset(0, "wait"), Hold(7, 0), Ask(0, 2, (0, 2, 7))]
    run = play.run()
    assert run.nodes == (0, 7, 2)
    assert not run.changed


def test_no_time_is_waited_if_all_nodes_are_there() -> None:
    play = running(THREE, 0, 1, 2, 3)
    play(NodeGone(1), Ended(0, 1, 1, "lost"), Fired(0, "settle"), Fired(0, "stop"))
    assert play.run().nodes == (0, 3, 2)
    assert "wait" not in play.timers


def test_a_gang_that_has_waited_runs_with_fewer_nodes_and_grows_again_later() -> None:
    play = shrinking(THREE)
    assert play(Fired(0, "wait")) == [Ask(0, 2, (0, 2))]
    run = play.run()
    assert (run.nodes, run.changed) == ((0, 2), True)
    assert play(NodeUp(4), NodeUp(5)) == []
    play(Ended(0, 2, 1, "died"), Ended(0, 2, 0, "raised"))
    run = play.run()
    assert (run.nodes, run.changed) == ((0, 2, 4), True)


def test_a_gang_that_has_waited_takes_as_many_nodes_as_it_can_get() -> None:
    play = shrinking(Order(0, 3, 1, retries=5))
    play(NodeIdle(0, False))
    assert play(Fired(0, "wait")) == []
    assert play(NodeIdle(0, True)) == [Ask(0, 2, (0, 2))]


def test_a_gang_that_has_waited_and_has_too_few_nodes_finishes_if_no_node_comes() -> None:
    play = shrinking(Order(0, 3, 3, retries=5))
    last = play.state.gangs[0].last
    assert last is not None
    play(Coming(1))
    assert play(Fired(0, "wait")) == []
    assert play(Coming(0))[0] == Finish(0, Verdict("failed", last.run, 1, lacking=True))


def test_a_gang_that_has_waited_goes_on_waiting_for_nodes_that_come() -> None:
    play = shrinking(Order(0, 3, 3, retries=5))
    play(Coming(1), Fired(0, "wait"))
    assert play(NodeUp(3), Coming(0)) == [Hold(3, 0), Ask(0, 2, (0, 2, 3))]


def test_a_gang_that_has_waited_does_not_give_up_while_another_gang_uses_its_nodes() -> None:
    play = Play(0, 1)
    play(Asked(Order(0, 1, 1, retries=1)), Asked(Order(1, 1, 1, retries=1)))
    play.run(0)
    play.run(1)
    play(NodeGone(0), Fired(0, "settle"), Ended(1, 1, 0, "died"))
    assert play.run(0).nodes == (1,)
    assert play(Fired(1, "wait")) == []
    assert play(Ended(0, 2, 0, "returned"))[1:] == [Hold(1, 1), Ask(1, 2, (1,))]


def test_a_gang_that_has_waited_does_not_give_up_while_a_node_is_not_connected() -> None:
    play = shrinking(Order(0, 3, 2, retries=5))
    assert play(NodeIdle(2, False), Fired(0, "wait")) == []
    assert play(NodeIdle(2, True)) == [Ask(0, 2, (0, 2))]
    assert not play(NodeIdle(2, False), Answered(0, 2, 2, ok=False))[1:], "it may be replaced"
    last = play.state.gangs[0].last
    assert last is not None
    assert play(NodeGone(2))[0] == Finish(0, Verdict("failed", last.run, 1, lacking=True))


def test_a_gang_whose_named_nodes_are_gone_does_not_wait_for_others() -> None:
    named = frozenset({0, 1, 2})
    play = shrinking(Order(0, 3, 2, retries=5, wait=30, among=named))
    assert play.actions[-1] == Ask(0, 2, (0, 2))
    assert "wait" not in play.timers
    play = shrinking(Order(0, 3, 3, retries=5, wait=30, among=named))
    assert [each.lacking for each in play.verdicts] == [True]


def test_a_gang_that_waits_to_run_again_can_be_cancelled() -> None:
    play = shrinking(THREE)
    run = play.state.gangs[0].run
    assert play(Cancelled(0)) == [Unset(0, "wait"), Finish(0, Verdict("cancelled", run)), Free(0), Free(2)]


# --- whatever happens ----------------------------------------------------------------------------------------


def test_events_leave_the_state_before_them_as_it_was() -> None:
    play = running(two(), 0, 1)
    before, text = play.state, repr(play.state)
    play(Ended(0, 1, 0, "raised"), NodeGone(1), NodeUp(2), Fired(0, "settle"))
    assert repr(before) == text


@pytest.mark.slow
def test_random_orders_of_events_break_no_rule() -> None:
    done = soak(2000, seed=1)
    assert done.failures == []
    assert done.orders == 2000
    kinds = ("returned", "failed", "timeout", "cancelled", "no nodes", "lacking", "shrunk", "stop", "again")
    assert min(done.seen[kind] for kind in kinds) > 10, done.seen


@pytest.mark.slow
def test_many_more_random_orders_of_events_break_no_rule() -> None:
    assert soak(10_000, seed=2026).failures == []
