"""Small mistakes in the hand-over, each of which the exploration must find. They are planted around the real steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from skypool.head import states as s
from skypool.head import steps
from tests import handover_world as world
from tests.handover_world import Rules, planted

RULES = Rules()
P = s.ClientPhase


@dataclass(frozen=True)
class Bug:
    """A mistake. `promise` is the one that it breaks, and the bounds are the least that show it."""

    name: str
    rules: Rules
    promise: str
    faults: int = 0
    slips: int = 0
    cancels: int = 0
    has_limit: bool = False


def _client(wrong: Callable[[s.Client, Any], tuple[s.Client, list[Any]] | None]) -> Rules:
    return planted(RULES, client=lambda state, event: wrong(state, event) or steps.client(state, event))


def _agent(wrong: Callable[[s.Agent, Any], tuple[s.Agent, list[Any]] | None]) -> Rules:
    return planted(RULES, agent=lambda state, event: wrong(state, event) or steps.agent(state, event))


def _runner(wrong: Callable[[s.Runner, Any], tuple[s.Runner, list[Any]] | None]) -> Rules:
    return planted(RULES, runner=lambda state, event: wrong(state, event) or steps.runner(state, event))


# --- the client ----------------------------------------------------------------------------------------------


def _tags_are_not_renewed(state: s.Client, event: Any) -> Any:
    if isinstance(event, s.Begin):
        after, actions = steps.client(state, event)
        return steps.client(after, s.TagsRenewed())[0], [actions[0], *steps.client(after, s.TagsRenewed())[1]]
    return None


def _commits_though_the_end_was_given_late(state: s.Client, event: Any) -> Any:
    is_late = isinstance(event, s.Answered) and event.is_late
    return steps.client(state, replace(event, is_late=False)) if is_late else None


def _ends_the_machine_without_asking(state: s.Client, event: Any) -> Any:
    if isinstance(event, s.Overdue) and state.phase is P.COMMITTING:
        return steps._end_unstarted(state)
    return None


def _ends_the_machine_at_ctrl_c(state: s.Client, event: Any) -> Any:
    if isinstance(event, s.Interrupt) and state.phase is P.COMMITTING:
        return steps._end_unstarted(state)
    return None


def _believes_an_old_status(state: s.Client, event: Any) -> Any:
    is_answer = isinstance(event, s.Answered) and event.status.stage is s.Stage.PREPARING
    return steps._end_unstarted(state) if is_answer and state.phase is P.ABANDONING else None


def _says_detached_before_the_answer(state: s.Client, event: Any) -> Any:
    after, actions = steps.client(state, event)
    if any(isinstance(each, s.Send) and isinstance(each.message, s.Commit) for each in actions):
        return replace(after, phase=P.WATCHING), [
            *actions,
            s.WriteLedger(s.Entry(s.Ledger.DETACHED)),
            s.Tell(s.Said.DETACHED),
        ]
    return None


def _never_asks_again(state: s.Client, event: Any) -> Any:
    return (state, []) if isinstance(event, s.Overdue | s.Connected) else None


def _takes_a_lost_machine_for_unstarted(state: s.Client, event: Any) -> Any:
    if isinstance(event, s.MachineGone) and state.acts_as_owner:
        return steps._end_unstarted(state)
    return None


def _says_not_started_of_a_lost_machine(state: s.Client, event: Any) -> Any:
    after, actions = steps.client(state, event)
    if isinstance(event, s.MachineGone):
        return after, [s.Tell(s.Said.NOT_STARTED) if isinstance(each, s.Tell) else each for each in actions]
    return None


def _ends_a_machine_without_its_agent(state: s.Client, event: Any) -> Any:
    is_gone = isinstance(event, s.AgentGone) and state.acts_as_owner
    return steps._end_unstarted(state) if is_gone else None


def _forgets_to_cancel_the_run(state: s.Client, event: Any) -> Any:
    after, _ = steps.client(state, event)
    if state.phase is P.ABANDONING and after.phase is P.CANCELLING:
        return steps._end_unstarted(state)
    return None


def _cancels_the_run_only_once(state: s.Client, event: Any) -> Any:
    is_answer = isinstance(event, s.Answered) and event.status.stage is s.Stage.COMMITTED
    return (state, []) if is_answer and state.phase is P.CANCELLING else None


def _tells_before_it_writes(state: s.Client, event: Any) -> Any:
    after, actions = steps.client(state, event)
    tells = [each for each in actions if isinstance(each, s.Tell)]
    return (after, [*tells, *(each for each in actions if each not in tells)]) if tells else None


def _says_nothing_of_a_machine_that_is_gone(state: s.Client, event: Any) -> Any:
    after, actions = steps.client(state, event)
    is_gone = isinstance(event, s.MachineGone)
    return (after, [each for each in actions if not isinstance(each, s.Tell)]) if is_gone else None


def _ends_the_machine_when_its_pool_ends(state: s.Client, event: Any) -> Any:
    is_over = isinstance(event, s.PoolOver) and state.phase is P.COMMITTING
    return steps._end_unstarted(state) if is_over else None


def _ends_a_machine_that_others_have_taken(state: s.Client, event: Any) -> Any:
    return steps.client(state, s.PoolOver()) if event == s.PoolOver(is_taken=True) else None


def _writes_over_what_others_wrote(_old: s.Entry, new: s.Entry) -> s.Entry:
    return new


# --- the agent -----------------------------------------------------------------------------------------------


def _commits_before_the_runner_stands_by(state: s.Agent, event: Any) -> Any:
    if isinstance(event, s.EndHeld) and state.stage is s.Stage.PREPARING:
        return steps._maybe_ready(replace(state, is_end_held=True, stands_by=True))
    return None


def _commits_before_the_guard_has_the_end(state: s.Agent, event: Any) -> Any:
    if isinstance(event, s.RunnerSaid) and isinstance(event.message, s.StandsBy) and not state.is_committed:
        return steps._maybe_ready(replace(state, is_end_held=True, stands_by=True))
    return None


def _accepts_the_heir_before_the_commit(state: s.Agent, event: Any) -> Any:
    if isinstance(event, s.RunnerSaid) and isinstance(event.message, s.StandsBy) and not state.is_committed:
        after, actions = steps.agent(state, event)
        return replace(after, is_taken=True), [s.Renew(), *actions]
    return None


def _gives_the_heir_to_a_runner_that_stands_by(state: s.Agent, event: Any) -> Any:
    if isinstance(event, s.RunnerSaid) and isinstance(event.message, s.StandsBy) and not state.is_committed:
        after, actions = steps.agent(state, event)
        return after, [*actions, s.TellRunner(state.runner, s.Go(world.HEIR))]
    return None


def _obeys_the_former_client(state: s.Agent, event: Any) -> Any:
    if isinstance(event, s.Heard) and event.party is s.Party.CLIENT:
        return state, [s.Renew()]
    return None


def _renews_for_messages_of_the_former_client(state: s.Agent, event: Any) -> Any:
    if isinstance(event, s.Received) and event.from_owner:
        after, actions = steps.agent(state, event)
        return after, [s.Renew(), *(each for each in actions if each != s.Renew())]
    return None


def _renews_for_whoever_asks(state: s.Agent, event: Any) -> Any:
    after, actions = steps.agent(state, event)
    return (after, [s.Renew(), *actions]) if isinstance(event, s.Received) and not event.from_owner else None


def _renews_for_a_runner_that_stands_still(state: s.Agent, event: Any) -> Any:
    if isinstance(event, s.Heard) and event.party is s.Party.RUNNER:
        return steps.agent(state, replace(event, moves=True))
    return None


def _starts_no_other_runner(state: s.Agent, event: Any) -> Any:
    return (state, []) if isinstance(event, s.RunnerEnded) else None


def _starts_another_runner_at_each_commit(state: s.Agent, event: Any) -> Any:
    if isinstance(event, s.Received) and isinstance(event.message, s.Commit) and state.is_committed:
        return replace(state, runner=state.runner + 1, is_taken=False), [s.StartRunner(state.runner + 1)]
    return None


def _starts_an_attempt_again(state: s.Agent, event: Any) -> Any:
    if isinstance(event, s.RunnerSaid) and isinstance(event.message, s.Starts) and state.is_taken:
        attempt = event.message.attempt
        return replace(state, attempts=attempt, program=s.Program.RUNNING), [s.StartProgram(attempt)]
    return None


def _commits_what_was_abandoned(state: s.Agent, event: Any) -> Any:
    is_commit = isinstance(event, s.Received) and isinstance(event.message, s.Commit)
    if is_commit and state.stage is s.Stage.ABANDONED and state.row is not None:
        return replace(state, stage=s.Stage.READY), [s.WriteRow(state.row)]
    return None


def _says_committed_before_the_row_is_written(state: s.Agent, event: Any) -> Any:
    after, actions = steps.agent(state, event)
    if any(isinstance(each, s.WriteRow) for each in actions):
        return after, [s.Reply(s.Status(world.CLAIM, s.Stage.COMMITTED)), *actions]
    return None


def _abandons_only_what_it_knows(state: s.Agent, event: Any) -> Any:
    is_abandon = isinstance(event, s.Received) and isinstance(event.message, s.Abandon)
    if is_abandon and state.stage is s.Stage.PREPARING:
        return state, [s.Reply(s.Status(world.CLAIM, s.Stage.ABANDONED))]
    return None


def _does_not_heed_drops(state: s.Agent, event: Any) -> Any:
    is_drop = isinstance(event, s.RunnerSaid) and isinstance(event.message, s.Drops)
    return (state, []) if is_drop else None


def _forgets_the_limit(state: s.Agent, event: Any) -> Any:
    is_limit = isinstance(event, s.RunnerSaid) and isinstance(event.message, s.Expires)
    return (state, []) if is_limit else None


def _lets_a_late_runner_be(state: s.Agent, event: Any) -> Any:
    return (state, []) if isinstance(event, s.RunnerLate) else None


# --- the runner ----------------------------------------------------------------------------------------------


def _starts_the_program_when_it_stands_by(state: s.Runner, event: Any) -> Any:
    if isinstance(event, s.GotNeeds):
        return replace(state, phase=s.RunnerPhase.STANDING_BY), [s.Say(s.StandsBy()), s.Say(s.Starts(1))]
    return None


def _obeys_any_runner(state: s.Agent, event: Any) -> Any:
    if isinstance(event, s.RunnerSaid) and isinstance(event.message, s.Starts) and not state.is_committed:
        return replace(state, attempts=1, program=s.Program.RUNNING), [s.StartProgram(1)]
    return None


def _counts_attempts_from_one(state: s.Runner, event: Any) -> Any:
    if isinstance(event, s.AgentSaid) and isinstance(event.message, s.Welcome):
        return steps.runner(state, s.AgentSaid(s.Welcome(0, s.Program.NONE, event.message.is_cancelled)))
    return None


def _retries_without_end(state: s.Runner, event: Any) -> Any:
    _, actions = steps.runner(state, event)
    if actions == [s.Store(s.Outcome.FAILED)]:
        attempt = state.attempt + 1
        return replace(state, phase=s.RunnerPhase.OWNER, attempt=attempt), [s.Say(s.Starts(attempt))]
    return None


def _ends_the_machine_before_the_result_is_stored(state: s.Runner, event: Any) -> Any:
    after, actions = steps.runner(state, event)
    stores = next((each for each in actions if isinstance(each, s.Store)), None)
    return (after, [s.Say(s.RunOver(stores.outcome)), *actions]) if stores else None


def _drops_nothing(state: s.Runner, event: Any) -> Any:
    after, actions = steps.runner(state, event)
    kept = [each for each in actions if not (isinstance(each, s.Say) and isinstance(each.message, s.Drops))]
    return after, kept


def _waits_for_a_store_that_has_failed(state: s.Runner, event: Any) -> Any:
    return (state, []) if isinstance(event, s.NotStored) else None


def _does_not_see_the_limit(state: s.Runner, event: Any) -> Any:
    return (replace(state, is_expired=True), []) if isinstance(event, s.Expired) else None


def _says_the_limit_last(state: s.Runner, event: Any) -> Any:
    after, actions = steps.runner(state, event)
    return (after, [*actions[1:], actions[0]]) if isinstance(event, s.Expired) and actions else None


def _starts_again_after_the_limit(state: s.Runner, event: Any) -> Any:
    if event == s.AgentSaid(s.ProgramOver(state.attempt, s.Program.LOST)) and state.is_expired:
        return steps.runner(replace(state, is_expired=False), event)
    return None


BUGS = (
    Bug("tags are not renewed before", _client(_tags_are_not_renewed), world.NOT_BEFORE, faults=1),
    Bug(
        "the client ends the machine after a time without asking",
        _client(_ends_the_machine_without_asking),
        world.NOT_BEFORE,
        slips=1,
    ),
    Bug(
        "the client ends the machine at Ctrl-C without asking",
        _client(_ends_the_machine_at_ctrl_c),
        world.NOT_BEFORE,
        cancels=1,
    ),
    Bug(
        "the client commits though the end was given late",
        _client(_commits_though_the_end_was_given_late),
        world.READY_FIRST,
        slips=1,
    ),
    Bug("the client believes an old status", _client(_believes_an_old_status), world.NOT_BEFORE, cancels=1),
    Bug("detached is written before the commit is known", _client(_says_detached_before_the_answer), world.AGREE),
    Bug("the client never asks again", _client(_never_asks_again), world.IT_ENDS, slips=1),
    Bug(
        "the client takes a lost machine for one that was not used",
        _client(_takes_a_lost_machine_for_unstarted),
        world.AGREE,
        faults=1,
    ),
    Bug(
        "the client says not started of a lost machine",
        _client(_says_not_started_of_a_lost_machine),
        world.TRUTH,
        faults=1,
    ),
    Bug(
        "the client ends a machine whose agent is gone without reading the row",
        _client(_ends_a_machine_without_its_agent),
        world.NOT_BEFORE,
        faults=1,
    ),
    Bug(
        "the client ends the machine though the commit came first",
        _client(_forgets_to_cancel_the_run),
        world.NOT_BEFORE,
        cancels=1,
    ),
    Bug(
        "the client asks only once to cancel the run",
        planted(_client(_cancels_the_run_only_once), runs_on=True),
        world.IT_ENDS,
        slips=1,
        cancels=1,
    ),
    Bug("the user is told before the ledger", _client(_tells_before_it_writes), world.AGREE),
    Bug(
        "nobody is told that the machine is gone",
        _client(_says_nothing_of_a_machine_that_is_gone),
        world.TRUTH,
        faults=1,
    ),
    Bug("the ledger is written over", planted(RULES, merged=_writes_over_what_others_wrote), world.AGREE, faults=1),
    Bug(
        "the commit comes before the runner stands by", _agent(_commits_before_the_runner_stands_by), world.READY_FIRST
    ),
    Bug(
        "the commit comes before the guard has the end",
        _agent(_commits_before_the_guard_has_the_end),
        world.READY_FIRST,
    ),
    Bug("the heir is accepted before the commit", _agent(_accepts_the_heir_before_the_commit), world.ONE_OWNER),
    Bug("the runner gets the heir too early", _agent(_gives_the_heir_to_a_runner_that_stands_by), world.ONE_OWNER),
    Bug("the former client is not refused", _agent(_obeys_the_former_client), world.ONE_OWNER),
    Bug(
        "messages of the former client extend the lease",
        _agent(_renews_for_messages_of_the_former_client),
        world.ONE_OWNER,
        slips=1,
    ),
    Bug("whoever asks extends the lease", _agent(_renews_for_whoever_asks), world.NOT_ALONE),
    Bug(
        "the lease is extended for a runner that stands still",
        _agent(_renews_for_a_runner_that_stands_still),
        world.NOT_ALONE,
        faults=1,
    ),
    Bug(
        "a second Commit starts a second runner",
        _agent(_starts_another_runner_at_each_commit),
        world.ONE_OWNER,
        slips=1,
    ),
    Bug("what was abandoned is committed", _agent(_commits_what_was_abandoned), world.NOT_BEFORE, slips=1, cancels=1),
    Bug(
        "committed is said before the row is written",
        _agent(_says_committed_before_the_row_is_written),
        world.AGREE,
        faults=1,
    ),
    Bug(
        "the agent says abandoned and goes on",
        _agent(_abandons_only_what_it_knows),
        world.NOT_BEFORE,
        faults=1,
        cancels=1,
    ),
    Bug("the lease is not heeded", planted(RULES, heeds_lease=False), world.READY_FIRST, faults=1),
    Bug("the row is not durable", planted(RULES, has_fsync=False), world.AGREE, faults=1),
    Bug(
        "the program starts when the runner stands by",
        planted(_runner(_starts_the_program_when_it_stands_by), agent=_agent(_obeys_any_runner).agent),
        world.ONE_OWNER,
    ),
    Bug(
        "a runner that was started again starts the attempt again",
        planted(_runner(_counts_attempts_from_one), agent=_agent(_starts_an_attempt_again).agent),
        world.ONE_START,
        faults=1,
    ),
    Bug("retries are not counted", _runner(_retries_without_end), world.ONE_START, faults=2),
    Bug(
        "the machine ends before the result is stored",
        _runner(_ends_the_machine_before_the_result_is_stored),
        world.NOT_BEFORE,
        faults=1,
    ),
    Bug(
        "the client ends the machine when its pool ends, and has asked for the commit",
        _client(_ends_the_machine_when_its_pool_ends),
        world.NOT_BEFORE,
        faults=1,
    ),
    Bug(
        "the client ends a machine that another process has taken",
        _client(_ends_a_machine_that_others_have_taken),
        world.NOT_BEFORE,
        faults=1,
    ),
    Bug("what was not sent is not dropped", _runner(_drops_nothing), world.IT_ENDS, slips=1, cancels=1),
    Bug("the agent does not heed what is dropped", _agent(_does_not_heed_drops), world.IT_ENDS, slips=1, cancels=1),
    Bug(
        "at the limit, what was not sent is not dropped",
        _runner(_drops_nothing),
        world.IT_ENDS,
        slips=1,
        has_limit=True,
    ),
    Bug(
        "a late runner is not killed",
        planted(
            _agent(_lets_a_late_runner_be), may_fail=("the runner", "the dispatch of the runner"), must_complete=True
        ),
        world.COMPLETES,
        faults=1,
    ),
    Bug(
        "the runner waits for a store that has failed",
        _runner(_waits_for_a_store_that_has_failed),
        world.IT_ENDS,
        faults=1,
    ),
    Bug("the agent forgets the limit", _agent(_forgets_the_limit), world.TRUTH, faults=1, has_limit=True),
    Bug("the limit is said after the stop", _runner(_says_the_limit_last), world.TRUTH, faults=1, has_limit=True),
    Bug(
        "a program that is lost after the limit is started again",
        _runner(_starts_again_after_the_limit),
        world.ONE_START,
        faults=1,
        has_limit=True,
    ),
    Bug(
        "the limit does not stop the program",
        planted(_runner(_does_not_see_the_limit), runs_on=True),
        world.IT_ENDS,
        has_limit=True,
    ),
)
