"""The hand-over of a run to its head: each rule alone, then every order of events, then mistakes that must be found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skypool.head import steps
from skypool.head.states import (
    Abandon,
    Agent,
    AgentGone,
    AgentSaid,
    Answered,
    Ask,
    Begin,
    Cancel,
    CancelRun,
    Claim,
    Client,
    ClientPhase,
    Commit,
    Drops,
    EndHeld,
    EndMachine,
    EndSooner,
    Entry,
    Expired,
    Expires,
    GiveEnd,
    Go,
    GotNeeds,
    Heard,
    Interrupt,
    KillRunner,
    Ledger,
    MachineGone,
    NotStored,
    Outcome,
    Overdue,
    Party,
    PoolOver,
    Prepare,
    Program,
    ProgramEnded,
    ProgramOver,
    Received,
    Renew,
    RenewTags,
    Reply,
    Row,
    RowFailed,
    RowWritten,
    Runner,
    RunnerEnded,
    RunnerLate,
    RunnerPhase,
    RunnerSaid,
    RunnerSilent,
    RunOver,
    Said,
    Say,
    Send,
    Stage,
    StandsBy,
    StartProgram,
    StartRunner,
    Starts,
    Status,
    StopMachine,
    StopProgram,
    Stops,
    Store,
    Stored,
    TagsFailed,
    TagsRenewed,
    Takes,
    Tell,
    TellRunner,
    Welcome,
    WriteLedger,
    WriteRow,
)
from tests.handover_bugs import BUGS, Bug
from tests.handover_search import Found, explore, simulate
from tests.handover_world import IT_ENDS, Rules

CLAIM = Claim("train-7")
PREPARE = Prepare(CLAIM, 3600.0, "heir")
ROW = Row(CLAIM, 3600.0, "heir")
END_UNSTARTED = [EndMachine(), WriteLedger(Entry(Ledger.ENDED, Outcome.NOT_STARTED)), Tell(Said.NOT_STARTED)]


def client(phase: ClientPhase) -> Client:
    return Client(CLAIM, 3600.0, "heir", phase)


def heard(phase: ClientPhase, stage: Stage, *, is_late: bool = False, **more: Any) -> tuple[ClientPhase, list[Any]]:
    """Return what a client in this phase does when it hears of this stage."""
    after, actions = steps.client(client(phase), Answered(Status(CLAIM, stage, **more), is_late))
    return after.phase, actions


def agent(*events: Any) -> tuple[Agent, list[Any]]:
    """Return the state of an agent after these events, and what it did at the last one."""
    state, actions = Agent(), list[Any]()
    for event in events:
        state, actions = steps.agent(state, event)
    return state, actions


READY = (Received(PREPARE), RunnerSaid(1, StandsBy()), EndHeld())
COMMITTED = (*READY, Received(Commit(CLAIM)), RowWritten())
OWNED = (*COMMITTED, RunnerSaid(1, Takes("heir")))
RUNNING = (*OWNED, RunnerSaid(1, Starts(1)))


def owner(attempt: int = 1, *, retries: int = 0) -> Runner:
    return Runner(retries, RunnerPhase.OWNER, attempt)


# --- the client ----------------------------------------------------------------------------------------------


def test_the_client_marks_ledger_and_tags_before_it_asks_for_anything() -> None:
    state, actions = steps.client(client(ClientPhase.OWNER), Begin())
    assert actions == [WriteLedger(Entry(Ledger.DETACHING)), RenewTags(3600.0)]
    assert steps.client(state, TagsRenewed()) == (client(ClientPhase.PREPARING), [Send(PREPARE)])
    assert steps.client(state, TagsFailed()) == (client(ClientPhase.OVER), END_UNSTARTED)


def test_the_client_asks_for_the_commit_when_all_is_ready_and_then_leaves_the_machine_to_its_runner() -> None:
    assert heard(ClientPhase.PREPARING, Stage.PREPARING) == (ClientPhase.PREPARING, [])
    assert heard(ClientPhase.PREPARING, Stage.READY) == (ClientPhase.COMMITTING, [Send(Commit(CLAIM))])
    told = [WriteLedger(Entry(Ledger.DETACHED)), Tell(Said.DETACHED)]
    assert heard(ClientPhase.COMMITTING, Stage.COMMITTED) == (ClientPhase.WATCHING, told)
    assert heard(ClientPhase.COMMITTING, Stage.OVER) == (ClientPhase.OVER, told)


def test_the_client_has_an_end_that_was_given_late_corrected_before_it_asks_for_the_commit() -> None:
    sooner = (ClientPhase.PREPARING, [Send(EndSooner(CLAIM, 3600.0))])
    assert heard(ClientPhase.PREPARING, Stage.READY, is_late=True) == sooner
    again = (ClientPhase.COMMITTING, [Send(Commit(CLAIM))])  # the guard's end has come no later since it was asked for
    assert heard(ClientPhase.COMMITTING, Stage.READY, is_late=True) == again


def test_a_client_without_an_answer_asks_and_repeats_what_did_not_arrive() -> None:
    for phase in (ClientPhase.PREPARING, ClientPhase.COMMITTING, ClientPhase.ABANDONING, ClientPhase.CANCELLING):
        assert steps.client(client(phase), Overdue()) == (client(phase), [Send(Ask(CLAIM))])
    assert heard(ClientPhase.PREPARING, Stage.NOTHING) == (ClientPhase.PREPARING, [Send(PREPARE)])
    assert heard(ClientPhase.COMMITTING, Stage.READY) == (ClientPhase.COMMITTING, [Send(Commit(CLAIM))])
    assert heard(ClientPhase.ABANDONING, Stage.READY) == (ClientPhase.ABANDONING, [Send(Abandon(CLAIM))])
    assert heard(ClientPhase.CANCELLING, Stage.COMMITTED) == (ClientPhase.CANCELLING, [Send(CancelRun(CLAIM))])
    assert heard(ClientPhase.CANCELLING, Stage.COMMITTED, is_cancelled=True) == (ClientPhase.CANCELLING, [])


def test_the_client_ends_the_machine_at_once_only_before_it_has_asked_for_the_commit() -> None:
    over = client(ClientPhase.OVER)
    for phase in (ClientPhase.OWNER, ClientPhase.MARKING, ClientPhase.PREPARING):
        assert steps.client(client(phase), Interrupt()) == (over, END_UNSTARTED)
    abandoning = (client(ClientPhase.ABANDONING), [Send(Abandon(CLAIM))])
    assert steps.client(client(ClientPhase.COMMITTING), Interrupt()) == abandoning
    assert heard(ClientPhase.ABANDONING, Stage.ABANDONED) == (ClientPhase.OVER, END_UNSTARTED)
    after, actions = heard(ClientPhase.ABANDONING, Stage.COMMITTED)  # it was too late: the runner is asked
    assert (after, actions[-1]) == (ClientPhase.CANCELLING, Send(CancelRun(CLAIM)))


def test_a_client_that_finds_no_agent_reads_the_row() -> None:
    committing = client(ClientPhase.COMMITTING)
    assert steps.client(committing, AgentGone(False))[1] == END_UNSTARTED
    cut_off = [WriteLedger(Entry(Ledger.DETACHED, Outcome.INTERRUPTED)), Tell(Said.INTERRUPTED)]
    assert steps.client(committing, AgentGone(True))[1] == cut_off
    done = [WriteLedger(Entry(Ledger.DETACHED, Outcome.ENDED)), Tell(Said.DETACHED)]
    assert steps.client(committing, AgentGone(True, Outcome.ENDED))[1] == done


def test_a_client_that_finds_no_machine_says_only_what_is_known() -> None:
    def says(phase: ClientPhase, stored: Outcome | None = None) -> list[Any]:
        return steps.client(client(phase), MachineGone(stored))[1]

    unstarted = [WriteLedger(Entry(Ledger.ENDED, Outcome.NOT_STARTED)), Tell(Said.NOT_STARTED)]
    assert says(ClientPhase.PREPARING) == unstarted
    assert says(ClientPhase.COMMITTING) == [WriteLedger(Entry(Ledger.ENDED, Outcome.LOST)), Tell(Said.UNKNOWN)]
    ended = WriteLedger(Entry(Ledger.ENDED, Outcome.ENDED))
    assert says(ClientPhase.COMMITTING, Outcome.ENDED) == [ended, Tell(Said.DETACHED)]
    assert says(ClientPhase.WATCHING, Outcome.ENDED) == [ended]


def test_a_client_leaves_a_machine_alone_that_another_run_has() -> None:
    for phase in (ClientPhase.PREPARING, ClientPhase.COMMITTING, ClientPhase.ABANDONING):
        assert heard(phase, Stage.OTHER) == (ClientPhase.OVER, [Tell(Said.NOT_STARTED)])


def test_a_client_whose_pool_ends_before_it_has_asked_for_the_commit_ends_the_machine_unless_others_have_it() -> None:
    over = client(ClientPhase.OVER)
    for phase in (ClientPhase.OWNER, ClientPhase.MARKING, ClientPhase.PREPARING):
        assert steps.client(client(phase), PoolOver()) == (over, END_UNSTARTED)
        assert steps.client(client(phase), PoolOver(is_taken=True)) == (over, [Tell(Said.NOT_STARTED)])
    for phase in (ClientPhase.COMMITTING, ClientPhase.ABANDONING, ClientPhase.WATCHING, ClientPhase.CANCELLING):
        assert steps.client(client(phase), PoolOver()) == (client(phase), [])


def test_answers_about_other_runs_are_ignored() -> None:
    state = client(ClientPhase.COMMITTING)
    assert steps.client(state, Answered(Status(Claim("train-8"), Stage.FAILED))) == (state, [])


# --- the ledger ----------------------------------------------------------------------------------------------


def test_the_ledger_never_goes_back_and_keeps_what_is_known() -> None:
    detached, ended = Entry(Ledger.DETACHED), Entry(Ledger.ENDED, Outcome.ENDED)
    assert steps.merged(Entry(Ledger.DETACHING), detached) == detached
    assert steps.merged(ended, detached) == ended
    assert steps.merged(ended, Entry(Ledger.ENDED, Outcome.NOT_STARTED)) == ended
    cut_off = Entry(Ledger.DETACHED, Outcome.INTERRUPTED)
    assert steps.merged(cut_off, Entry(Ledger.ENDED, Outcome.LOST)) == Entry(Ledger.ENDED, Outcome.INTERRUPTED)
    assert steps.merged(cut_off, ended) == ended
    assert steps.merged(Entry(Ledger.ENDED, Outcome.LOST), ended) == ended


def test_another_command_writes_only_what_stays_true() -> None:
    detaching = Entry(Ledger.DETACHING)
    assert steps.seen(detaching, is_committed=False) == detaching
    assert steps.seen(detaching, is_committed=True) == Entry(Ledger.DETACHED)
    assert steps.seen_cut_off(detaching, has_row=False, stored=None) == detaching
    assert steps.seen_cut_off(detaching, True, None) == Entry(Ledger.DETACHED, Outcome.INTERRUPTED)
    assert steps.seen_ended(detaching, None) == Entry(Ledger.ENDED, Outcome.LOST)
    assert steps.seen_ended(detaching, Outcome.ENDED) == Entry(Ledger.ENDED, Outcome.ENDED)
    assert steps.seen_ended(Entry(Ledger.LIVE), None) == Entry(Ledger.ENDED, Outcome.NOT_STARTED)


# --- the agent -----------------------------------------------------------------------------------------------


def test_the_agent_starts_a_runner_and_is_ready_when_that_stands_by_and_the_guard_has_the_end() -> None:
    preparing = Reply(Status(CLAIM, Stage.PREPARING))
    assert agent(Received(PREPARE))[1] == [Renew(), GiveEnd(3600.0, "heir"), StartRunner(1), preparing]
    assert agent(Received(PREPARE), Received(PREPARE))[1] == [Renew(), preparing]
    ready = [Reply(Status(CLAIM, Stage.READY))]
    assert agent(*READY)[1] == ready
    assert agent(Received(PREPARE), EndHeld())[1] == []
    assert agent(Received(PREPARE), EndHeld(), RunnerSaid(1, StandsBy()))[1] == ready


def test_the_agent_is_ready_again_when_the_guard_has_the_earlier_end() -> None:
    sooner = Received(EndSooner(CLAIM, 3500.0))
    preparing = Reply(Status(CLAIM, Stage.PREPARING))
    assert agent(*READY, sooner)[1] == [Renew(), GiveEnd(3500.0, "heir"), preparing]
    assert agent(*READY, sooner, Received(Commit(CLAIM)))[1] == [Renew(), preparing]
    assert agent(*READY, sooner, EndHeld())[1] == [Reply(Status(CLAIM, Stage.READY))]
    assert agent(*COMMITTED, sooner)[1] == [Reply(Status(CLAIM, Stage.COMMITTED))]
    assert agent(sooner)[1] == [Renew(), Reply(Status(CLAIM, Stage.NOTHING))]


def test_the_row_makes_the_runner_the_owner_and_a_second_commit_changes_nothing() -> None:
    assert agent(*READY, Received(Commit(CLAIM)))[1] == [Renew(), WriteRow(ROW)]
    state, actions = agent(*COMMITTED)
    assert state.owner is Party.RUNNER
    assert actions == [TellRunner(1, Go("heir")), Reply(Status(CLAIM, Stage.COMMITTED))]
    assert agent(*COMMITTED, Received(Commit(CLAIM))) == (state, [Reply(Status(CLAIM, Stage.COMMITTED))])
    assert agent(Received(PREPARE), Received(Commit(CLAIM)))[1] == [Renew(), Reply(Status(CLAIM, Stage.PREPARING))]


def test_a_row_that_cannot_be_written_is_no_commit() -> None:
    state, actions = agent(*READY, Received(Commit(CLAIM)), RowFailed("the disk is full"))
    assert state.owner is Party.CLIENT
    assert actions == [KillRunner(1), Reply(Status(CLAIM, Stage.FAILED, "the disk is full"))]


def test_others_may_ask_but_neither_decide_nor_extend_the_lease() -> None:
    state, _ = agent(*READY)
    for message in (PREPARE, Commit(CLAIM), Abandon(CLAIM), Ask(CLAIM), CancelRun(CLAIM)):
        told = [Reply(Status(CLAIM, Stage.READY))]
        assert steps.agent(state, Received(message, from_owner=False)) == (state, told)
    assert steps.agent(Agent(), Received(PREPARE, from_owner=False)) == (
        Agent(),
        [Reply(Status(CLAIM, Stage.NOTHING))],
    )


def test_the_agent_obeys_the_owner_alone() -> None:
    client_frame, runner_frame = Heard(Party.CLIENT), Heard(Party.RUNNER, 1)
    assert agent(*READY, client_frame)[1] == [Renew()]
    assert agent(*READY, runner_frame)[1] == []
    assert agent(*OWNED, client_frame)[1] == [Reply(Status(CLAIM, Stage.COMMITTED))]
    assert agent(*OWNED, runner_frame)[1] == [Renew()]
    assert agent(*READY, RunnerSaid(1, Takes("heir")))[1] == []
    assert agent(*COMMITTED, RunnerSaid(1, Takes("guess")))[1] == []
    assert agent(*COMMITTED, RunnerSaid(1, Starts(1)))[1] == []  # it has not taken the machine


def test_what_was_abandoned_is_never_committed_even_if_it_is_asked_for_first_later() -> None:
    abandoned = Reply(Status(CLAIM, Stage.ABANDONED))
    assert agent(*READY, Received(Abandon(CLAIM)))[1] == [Renew(), KillRunner(1), abandoned]
    assert agent(*READY, Received(Abandon(CLAIM)), Received(Commit(CLAIM)))[1] == [Renew(), abandoned]
    assert agent(Received(Abandon(CLAIM)), Received(PREPARE))[1] == [Renew(), abandoned]
    assert agent(*COMMITTED, Received(Abandon(CLAIM)))[1] == [Reply(Status(CLAIM, Stage.COMMITTED))]


def test_an_attempt_is_started_once_and_a_runner_that_comes_later_is_told_of_it() -> None:
    state, actions = agent(*RUNNING)
    assert actions == [StartProgram(1)]
    assert steps.agent(state, RunnerSaid(1, Starts(1))) == (state, [])
    assert steps.agent(state, RunnerSaid(1, Starts(2))) == (state, [])
    started = (*RUNNING, RunnerEnded(1))
    assert agent(*started)[1] == [StartRunner(2), Reply(Status(CLAIM, Stage.COMMITTED))]
    assert agent(*started, RunnerSaid(1, Starts(2)))[1] == []  # of the runner before
    assert agent(*started, RunnerSaid(2, StandsBy()))[1] == [TellRunner(2, Go("heir"))]
    again = (*started, ProgramEnded(1, Program.LOST), RunnerSaid(2, StandsBy()), RunnerSaid(2, Takes("heir")))
    assert agent(*again)[1] == [Renew(), TellRunner(2, Welcome(1, Program.LOST, is_cancelled=False))]
    assert agent(*again, RunnerSaid(2, Starts(2)))[1] == [StartProgram(2)]


def test_a_runner_that_is_silent_or_stands_still_is_killed_and_does_not_extend_the_lease() -> None:
    assert agent(*RUNNING, RunnerSilent(1))[1] == [KillRunner(1)]
    assert agent(*RUNNING, Heard(Party.RUNNER, 1, moves=False))[1] == [KillRunner(1)]
    assert agent(Received(PREPARE), RunnerSilent(1))[1] == [KillRunner(1)]


def test_a_runner_that_was_told_of_the_commit_and_does_not_take_the_machine_is_killed() -> None:
    assert agent(*COMMITTED, RunnerLate(1))[1] == [KillRunner(1)]
    again = [StartRunner(2), Reply(Status(CLAIM, Stage.COMMITTED))]
    assert agent(*COMMITTED, RunnerLate(1), RunnerEnded(1))[1] == again
    assert agent(*OWNED, RunnerLate(1))[1] == []
    assert agent(*READY, RunnerLate(1))[1] == []
    assert agent(*COMMITTED, RunnerEnded(1), RunnerLate(1))[1] == []  # of the runner before


def test_the_hand_over_fails_if_two_runners_end_before_the_commit() -> None:
    assert agent(*READY, RunnerEnded(1))[1] == [StartRunner(2), Reply(Status(CLAIM, Stage.PREPARING))]
    why = "2 runners have ended before the commit"
    assert agent(*READY, RunnerEnded(1), RunnerEnded(2))[1] == [Reply(Status(CLAIM, Stage.FAILED, why))]


def test_a_run_is_cancelled_by_its_runner_and_only_after_the_commit() -> None:
    assert agent(*READY, Received(CancelRun(CLAIM)))[1] == [Renew(), Reply(Status(CLAIM, Stage.READY))]
    cancelled = Reply(Status(CLAIM, Stage.COMMITTED, is_cancelled=True))
    assert agent(*RUNNING, Received(CancelRun(CLAIM)))[1] == [TellRunner(1, Cancel()), cancelled]
    assert agent(*RUNNING, Received(CancelRun(CLAIM)), Received(CancelRun(CLAIM)))[1] == [cancelled]
    assert agent(*RUNNING, RunnerSaid(1, Stops(1)))[1] == [StopProgram(1)]
    over = Reply(Status(CLAIM, Stage.OVER, outcome=Outcome.ENDED))
    assert agent(*RUNNING, RunnerSaid(1, RunOver(Outcome.ENDED)))[1] == [over, StopMachine(Outcome.ENDED)]


def test_an_attempt_that_is_dropped_before_it_was_started_is_over_and_never_started() -> None:
    state, actions = agent(*OWNED, RunnerSaid(1, Drops(1)))
    assert actions == [TellRunner(1, ProgramOver(1, Program.STOPPED))]
    assert steps.agent(state, RunnerSaid(1, Starts(1))) == (state, [])
    running, _ = agent(*RUNNING)
    assert steps.agent(running, RunnerSaid(1, Drops(1))) == (running, [])  # it is stopped, and its end follows
    runner, actions = steps.runner(owner(), AgentSaid(Cancel()))
    assert actions == [Say(Stops(1)), Say(Drops(1))]
    assert steps.runner(runner, AgentSaid(ProgramOver(1, Program.STOPPED)))[1] == [Store(Outcome.CANCELLED)]


def test_the_limit_stops_the_program_and_no_runner_that_comes_later_starts_it_again() -> None:
    expired, actions = steps.runner(owner(), Expired())
    assert actions == [Say(Expires()), Say(Stops(1)), Say(Drops(1))]
    assert steps.runner(expired, Expired()) == (expired, [])
    assert steps.runner(expired, AgentSaid(ProgramOver(1, Program.LOST)))[1] == [Store(Outcome.CANCELLED)]
    later = [RunnerSaid(1, Expires()), ProgramEnded(1, Program.LOST), RunnerEnded(1), RunnerSaid(2, StandsBy())]
    _, told = agent(*RUNNING, *later, RunnerSaid(2, Takes("heir")))
    welcome = Welcome(1, Program.LOST, is_cancelled=False, is_expired=True)
    assert told == [Renew(), TellRunner(2, welcome)]
    state, actions = steps.runner(Runner(1, RunnerPhase.TAKING), AgentSaid(welcome))
    assert (state.is_expired, actions) == (True, [Store(Outcome.CANCELLED)])
    running = Welcome(1, Program.RUNNING, is_cancelled=False, is_expired=True)
    assert steps.runner(Runner(1, RunnerPhase.TAKING), AgentSaid(running))[1] == [Say(Stops(1))]


def test_a_run_that_a_user_has_cancelled_was_not_stopped_by_its_limit() -> None:
    cancelled, _ = steps.runner(owner(), AgentSaid(Cancel()))
    assert steps.runner(cancelled, Expired()) == (cancelled, [])


def test_a_message_of_another_generation_is_refused_and_changes_nothing() -> None:
    state, _ = agent(*COMMITTED)
    later = Claim("train-7", 2)
    for message in (replace(PREPARE, claim=later), Commit(later), Abandon(later), CancelRun(later), Ask(later)):
        why = "this machine is of generation 1 of run train-7"
        assert steps.agent(state, Received(message)) == (state, [Reply(Status(later, Stage.OTHER, why))])


# --- the runner ----------------------------------------------------------------------------------------------


def test_a_runner_stands_by_takes_the_machine_after_the_commit_and_starts_the_program() -> None:
    state, actions = steps.runner(Runner(0), GotNeeds())
    assert actions == [Say(StandsBy())]
    state, actions = steps.runner(state, AgentSaid(Go("heir")))
    assert actions == [Say(Takes("heir"))]
    state, actions = steps.runner(state, AgentSaid(Welcome(0, Program.NONE, is_cancelled=False)))
    assert (state, actions) == (owner(), [Say(Starts(1))])
    state, actions = steps.runner(state, AgentSaid(ProgramOver(1, Program.ENDED)))
    assert actions == [Store(Outcome.ENDED)]
    assert steps.runner(state, Stored(Outcome.ENDED))[1] == [Say(RunOver(Outcome.ENDED))]


@pytest.mark.parametrize(
    ("attempts", "program", "is_cancelled", "does"),
    [
        (1, Program.RUNNING, False, []),
        (1, Program.RUNNING, True, [Say(Stops(1))]),
        (1, Program.ENDED, False, [Store(Outcome.ENDED)]),
        (1, Program.ENDED, True, [Store(Outcome.ENDED)]),
        (1, Program.STOPPED, True, [Store(Outcome.CANCELLED)]),
        (1, Program.LOST, False, [Say(Starts(2))]),
        (1, Program.LOST, True, [Store(Outcome.CANCELLED)]),
        (2, Program.LOST, False, [Store(Outcome.FAILED)]),
        (0, Program.NONE, True, [Store(Outcome.CANCELLED)]),
    ],
)
def test_a_runner_that_was_started_again_goes_on_where_the_one_before_was(
    attempts: int, program: Program, is_cancelled: bool, does: list[Any]
) -> None:
    welcome = AgentSaid(Welcome(attempts, program, is_cancelled))
    assert steps.runner(Runner(1, RunnerPhase.TAKING), welcome)[1] == does


def test_a_runner_says_the_outcome_that_an_earlier_one_has_stored() -> None:
    storing = Runner(0, RunnerPhase.STORING, 1)
    assert steps.runner(storing, Stored(Outcome.FAILED))[1] == [Say(RunOver(Outcome.FAILED))]


def test_a_run_is_over_whose_end_cannot_be_stored() -> None:
    storing = Runner(0, RunnerPhase.STORING, 1)
    over = RunOver(Outcome.ENDED, "the disk is full")
    assert steps.runner(storing, NotStored(Outcome.ENDED, "the disk is full"))[1] == [Say(over)]
    told = Reply(Status(CLAIM, Stage.OVER, "the disk is full", outcome=Outcome.ENDED))
    assert agent(*RUNNING, ProgramEnded(1, Program.ENDED), RunnerSaid(1, over))[1] == [
        told,
        StopMachine(Outcome.ENDED),
    ]


@pytest.mark.parametrize(
    ("how", "outcome"),
    [
        (Program.NONE, Outcome.FAILED),
        (Program.ENDED, Outcome.ENDED),
        (Program.STOPPED, Outcome.CANCELLED),
        (Program.LOST, Outcome.FAILED),
    ],
)
def test_runners_that_end_while_the_program_does_not_run_are_not_started_for_ever(
    how: Program, outcome: Outcome
) -> None:
    events: list[Any] = [*OWNED] if how is Program.NONE else [*RUNNING, ProgramEnded(1, how)]
    for runner in (1, 2, 3):
        events += [RunnerEnded(runner), RunnerSaid(runner + 1, StandsBy())]
        assert agent(*events)[1] == [TellRunner(runner + 1, Go("heir"))]
        events += [RunnerSaid(runner + 1, Takes("heir"))]
    what = "started the program" if how is Program.NONE else "stored how the run has ended"
    why = f"4 runners have ended before they had {what}"
    told = Reply(Status(CLAIM, Stage.OVER, why, outcome=outcome))
    assert agent(*events, RunnerEnded(4))[1] == [told, StopMachine(outcome)]
    cancelled = agent(*events, Received(CancelRun(CLAIM), from_owner=False), RunnerEnded(4))[1][-1]
    assert cancelled == StopMachine(Outcome.ENDED if how is Program.ENDED else Outcome.CANCELLED)
    again = (*events, RunnerSaid(4, Starts(1 if how is Program.NONE else 2)), RunnerEnded(4))
    assert agent(*again)[1] == [StartRunner(5), Reply(Status(CLAIM, Stage.COMMITTED))]


# --- every order of events -----------------------------------------------------------------------------------


def explored(faults: int, slips: int, cancels: int, *may_fail: str, has_limit: bool = False) -> Found:
    """Return what was found up to a bound. With `may_fail`, only faults happen whose texts begin so."""
    rules = Rules(may_fail=may_fail or ("",))
    found = explore(rules, faults=faults, slips=slips, cancels=cancels, has_limit=has_limit)
    bound = f"{faults} faults, {slips} slips, {cancels} cancels{', a limit' * has_limit}"
    print(f"{bound}: {found.worlds:,} worlds, {found.moves:,} moves")
    assert found.broken is None, "\n".join([str(found.broken), *found.trace])
    return found


def test_without_faults_each_run_completes_though_messages_are_lost_late_or_twice() -> None:
    assert explored(0, 3, 0).ends.keys() == {("the run is over: ended", "committed", "ended", "detached")}


def test_a_run_that_is_cancelled_at_any_moment_ends_before_or_after_its_commit_and_says_so() -> None:
    ends = {end[:3] for end in explored(0, 1, 1).ends}
    assert ends == {
        ("the run is over: ended", "committed", "ended"),
        ("the run is over: cancelled", "committed", "cancelled"),
        ("ended by the client", "not committed", "not started"),
    }


def test_a_run_that_is_handed_over_completes_whatever_becomes_of_the_client_and_its_connection() -> None:
    ends = explored(2, 1, 0, "the client", "the connection", "a message", "the agent receives", "another command").ends
    assert {end[0] for end in ends if end[1] == "committed"} == {"the run is over: ended"}
    assert {end[0] for end in ends if end[1] == "not committed"} >= {"its lease was over", "ended by gc"}
    assert {end[3] for end in ends if end[1] == "committed"} == {"detached", ""}


def test_ctrl_c_ends_a_program_that_never_ends_though_messages_are_lost_and_connections_break() -> None:
    may_fail = ("a message", "the connection", "the runner", "the agent receives", "the program")
    rules = Rules(runs_on=True, may_fail=may_fail)
    found = explore(rules, faults=1, slips=1, cancels=1)
    assert found.broken is None, "\n".join([str(found.broken), *found.trace])
    assert {end[:3] for end in found.ends} == {
        ("the run is over: cancelled", "committed", "cancelled"),
        ("ended by the client", "not committed", "not started"),
        ("its lease was over", "not committed", "not started"),
        ("its lease was over", "not committed", "lost"),
    }


def test_one_fault_of_the_runner_costs_no_run_and_a_program_that_is_killed_is_retried() -> None:
    completes = ("the run is over: ended", "committed", "ended", "detached")
    assert explored(1, 0, 0, "the runner", "the dispatch").ends.keys() == {completes}
    assert explored(1, 0, 0, "the program").ends.keys() == {completes}
    failed = ("the run is over: failed", "committed", "failed", "detached")
    assert explored(2, 0, 0, "the program").ends.keys() == {completes, failed}


def test_a_limit_ends_a_program_that_never_ends_whatever_becomes_of_its_runner() -> None:
    may_fail = ("the runner", "the dispatch", "the program", "a message")
    found = explore(Rules(runs_on=True, may_fail=may_fail), faults=1, slips=1, cancels=0, has_limit=True)
    assert found.broken is None, "\n".join([str(found.broken), *found.trace])
    assert {end[:3] for end in found.ends} == {("the run is over: cancelled", "committed", "cancelled")}


def test_every_order_of_events_with_a_limit_keeps_the_promises() -> None:
    explored(1, 0, 1, has_limit=True)
    explored(0, 2, 0, has_limit=True)


@pytest.mark.slow
def test_every_order_of_more_events_with_a_limit_keeps_the_promises() -> None:
    explored(2, 0, 0, has_limit=True)
    explored(1, 1, 0, has_limit=True)


def test_one_fault_of_the_runner_never_lets_a_lease_end_its_machine() -> None:
    rules = Rules(may_fail=("the runner", "the dispatch"), must_complete=True)
    assert explore(rules, faults=1, slips=0, cancels=0).broken is None


@pytest.mark.parametrize(("faults", "slips", "cancels"), [(2, 0, 0), (1, 1, 0), (1, 0, 1)])
def test_every_order_of_events_keeps_the_promises(faults: int, slips: int, cancels: int) -> None:
    explored(faults, slips, cancels)


@pytest.mark.slow
@pytest.mark.parametrize(("faults", "slips", "cancels"), [(2, 1, 1), (3, 0, 0), (1, 2, 0)])
def test_every_order_of_more_events_keeps_the_promises(faults: int, slips: int, cancels: int) -> None:
    ends = explored(faults, slips, cancels).ends
    assert {end[0] for end in ends} >= {"its lease was over", "its written end has come", "ended by the client"}
    assert {end[2] for end in ends} >= {"ended", "interrupted", "lost", "not started"}
    assert {end[3] for end in ends} == {"detached", "not started", "interrupted", "not known", ""}


@pytest.mark.parametrize("seeds", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_worlds_in_which_much_fails_come_to_an_end(seeds: int) -> None:
    ends = set()
    for seed in range(seeds):
        end, _ = simulate(seed, faults=seed % 9, slips=seed % 7, cancels=seed % 2, has_limit=seed % 3 == 0)
        ends.add(end.machine)
    assert {"the run is over: ended", "its lease was over", "ended by the client"} <= ends


# --- mistakes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_mistake_is_found(bug: Bug) -> None:
    found = explore(bug.rules, faults=bug.faults, slips=bug.slips, cancels=bug.cancels, has_limit=bug.has_limit)
    print(*found.trace, found.broken, sep="\n")
    assert found.broken is not None
    assert found.broken.promise == bug.promise
    assert len(found.trace) < 60
    assert found.trace or found.broken.promise == IT_ENDS  # nothing leads to an end from the beginning


def test_the_trace_of_a_mistake_can_be_read() -> None:
    bug = next(each for each in BUGS if each.name == "the client ends the machine at Ctrl-C without asking")
    found = explore(bug.rules, faults=0, slips=0, cancels=1)
    assert found.trace[15:] == [
        "client: Send (Commit)",
        "the agent receives: Commit",
        "agent: WriteRow",
        "agent: TellRunner (1, Go)",
        "agent: Reply (Status (committed))",
        "the user presses Ctrl-C",
    ]
    assert str(found.broken) == (
        "no machine ends before its time: the client ends the machine, and the run on it is committed and not over"
    )
