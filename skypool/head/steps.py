"""The three state machines of a hand-over: (state, event) -> (state, actions). They use no clock, network or thread.

Each function is pure. Whoever calls one performs the actions in their order, before the next event of the same party.
An event that no longer matters leaves the state unchanged, with no actions.

Why nobody is fooled by messages that are lost, late or come twice:

- The row alone decides who is the owner. The agent knows at each moment whether it has written it.
- A client that has asked for the commit ends the machine only after the agent has said that nothing will be committed.
- ABANDONED and FAILED are final at the agent, so a late `Commit` finds nothing to commit.
- An attempt has a number, and the agent starts only the next one.
- Only what can never become untrue again is written into the ledger: a commit, and the end of a machine.
"""

from __future__ import annotations

from dataclasses import replace

from skypool.head.states import (
    ENDINGS,
    TRIES,
    Abandon,
    Agent,
    AgentAction,
    AgentEvent,
    AgentGone,
    AgentSaid,
    Answered,
    Ask,
    Begin,
    Cancel,
    CancelRun,
    Claim,
    Client,
    ClientAction,
    ClientEvent,
    ClientPhase,
    Commit,
    Connected,
    Drops,
    EndHeld,
    EndMachine,
    EndRefused,
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
    RunnerAction,
    RunnerEnded,
    RunnerEvent,
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
    ToAgent,
    Welcome,
    WriteLedger,
    WriteRow,
)

# --- the client ----------------------------------------------------------------------------------------------

UNASKED = (ClientPhase.OWNER, ClientPhase.MARKING, ClientPhase.PREPARING)
"""The phases in which the client has not asked for the commit, so that there is none."""
_UNDECIDED = (ClientPhase.COMMITTING, ClientPhase.ABANDONING)
"""The phases in which there may be a commit of which the client has not heard."""
_ASKED = (ClientPhase.PREPARING, *_UNDECIDED, ClientPhase.WATCHING, ClientPhase.CANCELLING)
"""The phases in which the client asks again if there is no answer."""


def client(state: Client, event: ClientEvent) -> tuple[Client, list[ClientAction]]:
    """Decide what the client does after an event: return its next state, and its actions in order."""
    phase = state.phase
    match event:
        case Begin() if phase is ClientPhase.OWNER:
            marks: list[ClientAction] = [WriteLedger(Entry(Ledger.DETACHING)), RenewTags(state.end)]
            return replace(state, phase=ClientPhase.MARKING), marks
        case TagsRenewed() if phase is ClientPhase.MARKING:
            return replace(state, phase=ClientPhase.PREPARING), [Send(_prepare(state))]
        case TagsFailed() if phase is ClientPhase.MARKING:
            return _end_unstarted(state)
        case Answered(status, is_late) if status.claim == state.claim:
            return _answered(state, status, is_late)
        case Connected() | Overdue() if phase in _ASKED:
            return state, [Send(Ask(state.claim))]
        case Interrupt():
            return _interrupt(state)
        case PoolOver(is_taken) if phase in UNASKED:
            return _not_owner(state) if is_taken else _end_unstarted(state)
        case AgentGone(has_row, stored) if phase is not ClientPhase.OVER:
            return _agent_gone(state, has_row, stored)
        case MachineGone(stored) if phase is not ClientPhase.OVER:
            return _machine_gone(state, stored)
    return state, []


def _prepare(state: Client) -> Prepare:
    return Prepare(state.claim, state.end, state.heir)


def _answered(state: Client, status: Status, is_late: bool) -> tuple[Client, list[ClientAction]]:
    """Act on what the agent says. It may be outdated, but COMMITTED, OVER, ABANDONED and FAILED never become untrue."""
    phase, stage = state.phase, status.stage
    if phase in (ClientPhase.WATCHING, ClientPhase.CANCELLING):
        if stage is Stage.OVER:
            return replace(state, phase=ClientPhase.OVER), []
        if stage is Stage.COMMITTED and phase is ClientPhase.CANCELLING and not status.is_cancelled:
            return state, [Send(CancelRun(state.claim))]
        return state, []
    if phase is not ClientPhase.PREPARING and phase not in _UNDECIDED:
        return state, []
    if stage in (Stage.ABANDONED, Stage.FAILED):
        return _end_unstarted(state)
    if stage in (Stage.COMMITTED, Stage.OVER):
        return _detached(state, status)
    if stage is Stage.OTHER:
        return _not_owner(state)
    if phase is ClientPhase.ABANDONING:
        return state, [Send(Abandon(state.claim))]
    if stage is Stage.READY and is_late and phase is ClientPhase.PREPARING:
        return state, [Send(EndSooner(state.claim, state.end))]
    if stage is Stage.READY:
        return replace(state, phase=ClientPhase.COMMITTING), [Send(Commit(state.claim))]
    if stage is Stage.NOTHING and phase is ClientPhase.PREPARING:
        return state, [Send(_prepare(state))]
    return state, []


def _detached(state: Client, status: Status) -> tuple[Client, list[ClientAction]]:
    """Leave the machine to its runner. If the user has cancelled meanwhile, ask the runner to cancel the run."""
    actions: list[ClientAction] = [WriteLedger(Entry(Ledger.DETACHED)), Tell(Said.DETACHED)]
    if status.stage is Stage.OVER:
        return replace(state, phase=ClientPhase.OVER), actions
    if state.phase is ClientPhase.ABANDONING:
        return replace(state, phase=ClientPhase.CANCELLING), [*actions, Send(CancelRun(state.claim))]
    return replace(state, phase=ClientPhase.WATCHING), actions


def _end_unstarted(state: Client) -> tuple[Client, list[ClientAction]]:
    """End the machine, because it is sure that nothing was or will be committed."""
    ended = Entry(Ledger.ENDED, Outcome.NOT_STARTED)
    return replace(state, phase=ClientPhase.OVER), [EndMachine(), WriteLedger(ended), Tell(Said.NOT_STARTED)]


def _not_owner(state: Client) -> tuple[Client, list[ClientAction]]:
    """Leave the machine alone, as it is not this client's any more."""
    return replace(state, phase=ClientPhase.OVER), [Tell(Said.NOT_STARTED)]


def _interrupt(state: Client) -> tuple[Client, list[ClientAction]]:
    """Cancel the run: end the machine if no commit was asked for, or else ask the agent first."""
    match state.phase:
        case phase if phase in UNASKED:
            return _end_unstarted(state)
        case ClientPhase.COMMITTING:
            return replace(state, phase=ClientPhase.ABANDONING), [Send(Abandon(state.claim))]
        case ClientPhase.WATCHING:
            return replace(state, phase=ClientPhase.CANCELLING), [Send(CancelRun(state.claim))]
        case _:
            return state, []


def _agent_gone(state: Client, has_row: bool, stored: Outcome | None) -> tuple[Client, list[ClientAction]]:
    """End the machine if there is no row. Otherwise leave it to the guard: what the run has saved may still be sent."""
    over = replace(state, phase=ClientPhase.OVER)
    if not state.acts_as_owner:
        return over, []
    if not has_row:
        return _end_unstarted(state)
    write = WriteLedger(Entry(Ledger.DETACHED, stored or Outcome.INTERRUPTED))
    return over, [write, Tell(Said.DETACHED if stored else Said.INTERRUPTED)]


def _machine_gone(state: Client, stored: Outcome | None) -> tuple[Client, list[ClientAction]]:
    """Write down how the run has ended, so far as that is known."""
    over = replace(state, phase=ClientPhase.OVER)
    if state.acts_as_owner and state.phase not in _UNDECIDED:
        return over, [WriteLedger(Entry(Ledger.ENDED, Outcome.NOT_STARTED)), Tell(Said.NOT_STARTED)]
    write = WriteLedger(Entry(Ledger.ENDED, stored or Outcome.LOST))
    if not state.acts_as_owner:
        return over, [write]
    return over, [write, Tell(Said.DETACHED if stored else Said.UNKNOWN)]


# --- the ledger, and whoever looks in ------------------------------------------------------------------------

_ORDER = tuple(Ledger)


def merged(old: Entry, new: Entry) -> Entry:
    """Return the entry that the ledger has after `new` was written over `old`.

    Several processes write, each of what it knows. The state never goes back, and LOST replaces no outcome.
    """
    state = max(old.state, new.state, key=_ORDER.index)
    if new.outcome is None or (new.outcome is Outcome.LOST and old.outcome is not None):
        return Entry(state, old.outcome)
    if old.state is Ledger.ENDED and old.outcome is not Outcome.LOST:
        return old
    return Entry(state, new.outcome)


def seen(entry: Entry, is_committed: bool) -> Entry:
    """Return the entry of a run after another command has asked its agent, which says whether it is committed.

    One that is not changes nothing: its client may still be at it, or else the lease ends the machine.
    """
    return merged(entry, Entry(Ledger.DETACHED)) if is_committed else entry


def seen_cut_off(entry: Entry, has_row: bool, stored: Outcome | None) -> Entry:
    """Return the entry of a run after another command has found its machine without an agent, with or without the row.

    `stored` is the outcome that the run has stored; None if there is none.
    """
    return merged(entry, Entry(Ledger.DETACHED, stored or Outcome.INTERRUPTED)) if has_row else entry


def seen_ended(entry: Entry, stored: Outcome | None) -> Entry:
    """Return the entry of a run whose machine has ended. `stored` is the outcome that the run has stored, if any."""
    unknown = Outcome.NOT_STARTED if entry.state is Ledger.LIVE else Outcome.LOST
    return merged(entry, Entry(Ledger.ENDED, stored or unknown))


# --- the agent -----------------------------------------------------------------------------------------------

_OUTCOMES = {
    Program.NONE: Outcome.FAILED,
    Program.ENDED: Outcome.ENDED,
    Program.STOPPED: Outcome.CANCELLED,
    Program.LOST: Outcome.FAILED,
}
"""The outcome of a run whose runners end while its program does not run, by what has become of that."""
_OPEN = (Stage.PREPARING, Stage.READY)
"""The stages in which a hand-over may still be committed or not."""


def agent(state: Agent, event: AgentEvent) -> tuple[Agent, list[AgentAction]]:
    """Decide what the agent does after an event: return its next state, and its actions in order."""
    match event:
        case Received(message, from_owner):
            after, actions = _received(state, message, from_owner)
            return after, [Renew(), *actions] if from_owner and state.owner is Party.CLIENT else actions
        case EndHeld() if state.stage is Stage.PREPARING:
            return _maybe_ready(replace(state, is_end_held=True))
        case EndRefused() if state.stage is Stage.PREPARING:
            return _fail(state, "the guard has not taken the end of the run")
        case RowWritten() if state.stage is Stage.READY:
            assert state.row is not None
            go, state = Go(state.row.heir), replace(state, stage=Stage.COMMITTED)
            return state, [TellRunner(state.runner, go), _reply(state)]
        case RowFailed(why) if state.stage is Stage.READY:
            return _fail(state, why)
        case RunnerSaid(runner, said) if runner == state.runner:
            return _runner_said(state, said)
        case RunnerEnded(runner) if runner == state.runner:
            return _runner_ended(state)
        case RunnerSilent(runner) if runner == state.runner and state.stage in (*_OPEN, Stage.COMMITTED):
            return state, [KillRunner(runner)]
        case RunnerLate(runner) if runner == state.runner and state.stage is Stage.COMMITTED and not state.is_taken:
            return state, [KillRunner(runner)]
        case ProgramEnded(attempt, how) if attempt == state.attempts and state.program is Program.RUNNING:
            told: list[AgentAction] = [TellRunner(state.runner, ProgramOver(attempt, how))] if state.is_taken else []
            return replace(state, program=how), told
        case Heard(party, runner, moves):
            return _heard(state, party, runner, moves)
    return state, []


def _reply(state: Agent, claim: Claim | None = None) -> Reply:
    """Return the answer with the state of the hand-over, to a message about a claim."""
    if claim is not None and state.claim is not None and claim != state.claim:
        why = f"this machine is of generation {state.claim.generation} of run {state.claim.run}"
        return Reply(Status(claim, Stage.OTHER, why))
    claim = state.claim or claim
    assert claim is not None
    return Reply(Status(claim, state.stage, state.why, state.is_cancelled, state.outcome))


def _received(state: Agent, message: ToAgent, from_owner: bool) -> tuple[Agent, list[AgentAction]]:
    """Obey a message about the hand-over, and answer with the state."""
    actions: list[AgentAction] = []
    if message.claim == (state.claim or message.claim) and (from_owner or isinstance(message, CancelRun)):
        match message:
            case Prepare(claim, end, heir) if state.stage is Stage.NOTHING:
                row = Row(claim, end, heir)
                state = replace(state, claim=claim, stage=Stage.PREPARING, row=row, runner=1, tries=1)
                actions = [GiveEnd(end, heir), StartRunner(1)]
            case EndSooner(_, end) if state.stage in _OPEN:
                assert state.row is not None
                actions = [GiveEnd(end, state.row.heir)]
                state = replace(state, stage=Stage.PREPARING, is_end_held=False)
            case Commit() if state.stage is Stage.READY:
                assert state.row is not None
                return state, [WriteRow(state.row)]  # the answer follows
            case Abandon(claim) if state.stage in (Stage.NOTHING, *_OPEN):
                kills = state.stage in _OPEN
                state = replace(state, claim=claim, stage=Stage.ABANDONED)
                actions = [KillRunner(state.runner)] if kills else []
            case CancelRun() if state.stage is Stage.COMMITTED:
                if state.is_taken and not state.is_cancelled:
                    actions = [TellRunner(state.runner, Cancel())]
                state = replace(state, is_cancelled=True)
            case _:
                pass
    return state, [*actions, _reply(state, message.claim)]


def _maybe_ready(state: Agent) -> tuple[Agent, list[AgentAction]]:
    if not (state.is_end_held and state.stands_by):
        return state, []
    state = replace(state, stage=Stage.READY)
    return state, [_reply(state)]


def _fail(state: Agent, why: str) -> tuple[Agent, list[AgentAction]]:
    """Give the hand-over up for good. The client hears of it, and ends the machine."""
    failed = replace(state, stage=Stage.FAILED, why=why)
    return failed, [KillRunner(state.runner), _reply(failed)]


def _runner_said(state: Agent, said: object) -> tuple[Agent, list[AgentAction]]:
    assert state.row is not None
    heir = state.row.heir
    match said:
        case StandsBy() if state.stage is Stage.PREPARING:
            return _maybe_ready(replace(state, stands_by=True))
        case StandsBy() if state.stage is Stage.COMMITTED:
            return replace(state, stands_by=True), [TellRunner(state.runner, Go(heir))]
        case Takes(word) if state.stage is Stage.COMMITTED and word == heir:
            welcome = Welcome(state.attempts, state.program, state.is_cancelled, is_expired=state.is_expired)
            return replace(state, is_taken=True), [Renew(), TellRunner(state.runner, welcome)]
        case _ if not state.is_taken or state.stage is not Stage.COMMITTED:
            return state, []
        case Starts(attempt) if attempt == state.attempts + 1 and state.program is not Program.RUNNING:
            return replace(state, attempts=attempt, program=Program.RUNNING, endings=0), [StartProgram(attempt)]
        case Stops(attempt) if attempt == state.attempts and state.program is Program.RUNNING:
            return state, [StopProgram(attempt)]
        case Drops(attempt) if attempt == state.attempts + 1 and state.program is not Program.RUNNING:
            state = replace(state, attempts=attempt, program=Program.STOPPED)  # so that it is never started
            return state, [TellRunner(state.runner, ProgramOver(attempt, Program.STOPPED))]
        case Expires():
            return replace(state, is_expired=True), []
        case RunOver(outcome, why):
            return _over(state, outcome, why)
    return state, []


def _over(state: Agent, outcome: Outcome, why: str) -> tuple[Agent, list[AgentAction]]:
    state = replace(state, stage=Stage.OVER, outcome=outcome, why=why)
    return state, [_reply(state), StopMachine(outcome)]


def _runner_ended(state: Agent) -> tuple[Agent, list[AgentAction]]:
    """Start another runner, unless several have ended before the commit, or while the program did not run.

    Each one that takes the machine extends its lease, and may end where the one before has, as on a full disk.
    """
    if state.stage not in (*_OPEN, Stage.COMMITTED):
        return state, []
    endings = state.endings + (state.is_taken and state.program in _OUTCOMES)
    state = replace(state, stands_by=False, is_taken=False, endings=endings)
    if endings >= ENDINGS:
        what = "started the program" if state.program is Program.NONE else "stored how the run has ended"
        why = f"{endings} runners have ended before they had {what}"
        is_stopped = (state.is_cancelled or state.is_expired) and state.program is not Program.ENDED
        return _over(state, Outcome.CANCELLED if is_stopped else _OUTCOMES[state.program], why)
    if state.stage is not Stage.COMMITTED:
        if state.tries >= TRIES:
            failed = replace(state, stage=Stage.FAILED, why=f"{state.tries} runners have ended before the commit")
            return failed, [_reply(failed)]
        state = replace(state, stage=Stage.PREPARING, tries=state.tries + 1)
    state = replace(state, runner=state.runner + 1)
    return state, [StartRunner(state.runner), _reply(state)]


def _heard(state: Agent, party: Party, runner: int, moves: bool) -> tuple[Agent, list[AgentAction]]:
    """Extend the lease for the owner. Tell the former client whose the machine is, and kill a runner that is stuck."""
    if state.owner is Party.CLIENT:
        return state, [Renew()] if party is Party.CLIENT else []
    if party is Party.CLIENT:
        return state, [_reply(state)]
    if runner != state.runner or not state.is_taken or state.stage is not Stage.COMMITTED:
        return state, []
    return state, [Renew() if moves else KillRunner(runner)]


# --- the runner ----------------------------------------------------------------------------------------------


def runner(state: Runner, event: RunnerEvent) -> tuple[Runner, list[RunnerAction]]:
    """Decide what the runner does after an event: return its next state, and its actions in order."""
    match event:
        case GotNeeds() if state.phase is RunnerPhase.STARTING:
            return replace(state, phase=RunnerPhase.STANDING_BY), [Say(StandsBy())]
        case AgentSaid(Go(heir)) if state.phase is RunnerPhase.STANDING_BY:
            return replace(state, phase=RunnerPhase.TAKING), [Say(Takes(heir))]
        case AgentSaid(Welcome() as welcome) if state.phase is RunnerPhase.TAKING:
            state = replace(
                state,
                phase=RunnerPhase.OWNER,
                attempt=welcome.attempts,
                is_cancelled=welcome.is_cancelled,
                is_expired=welcome.is_expired,
            )
            return _go_on(state, welcome.program)
        case AgentSaid(ProgramOver(attempt, program)) if state.phase is RunnerPhase.OWNER:
            return _go_on(state, program) if attempt == state.attempt else (state, [])
        case AgentSaid(Cancel()) if state.phase is RunnerPhase.OWNER and not state.is_cancelled:
            return replace(state, is_cancelled=True), [Say(Stops(state.attempt)), Say(Drops(state.attempt))]
        case Expired() if state.phase is RunnerPhase.OWNER and not (state.is_cancelled or state.is_expired):
            says: list[RunnerAction] = [Say(Expires()), Say(Stops(state.attempt)), Say(Drops(state.attempt))]
            return replace(state, is_expired=True), says
        case Stored(outcome) if state.phase is RunnerPhase.STORING:
            return replace(state, phase=RunnerPhase.OVER), [Say(RunOver(outcome))]
        case NotStored(outcome, why) if state.phase is RunnerPhase.STORING:
            return replace(state, phase=RunnerPhase.OVER), [Say(RunOver(outcome, why))]
    return state, []


def _go_on(state: Runner, program: Program) -> tuple[Runner, list[RunnerAction]]:
    """Start the program, wait for it, or end the run, by what became of its last attempt."""
    match program:
        case Program.RUNNING:
            return state, [Say(Stops(state.attempt))] if state.is_cancelled or state.is_expired else []
        case Program.ENDED:
            return _store(state, Outcome.ENDED)
        case Program.STOPPED:
            return _store(state, Outcome.CANCELLED)
    if state.is_cancelled or state.is_expired:
        return _store(state, Outcome.CANCELLED)
    if state.attempt > state.retries:
        return _store(state, Outcome.FAILED)
    state = replace(state, attempt=state.attempt + 1)
    return state, [Say(Starts(state.attempt))]


def _store(state: Runner, outcome: Outcome) -> tuple[Runner, list[RunnerAction]]:
    return replace(state, phase=RunnerPhase.STORING), [Store(outcome)]
