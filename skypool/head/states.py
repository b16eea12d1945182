"""The states of client, agent and runner in a hand-over, their events, their actions, and the messages between them.

`steps` has the state machines that use these values. All values are immutable and can be compared and hashed.

Messages between client and agent may be lost, come twice, late or in another order: each one may be sent again, and is
answered by the whole state (`Status`). Messages between agent and runner come once and in order while the runner lives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

TRIES = 2
"""The number of times that a runner is started before the commit. If none of them stands by, the hand-over fails."""


ENDINGS = 4
"""The number of runners that may end while the program does not run, with the machine taken. The run is then over."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The run that a message is about. A run that is resumed on another machine has a higher generation."""

    run: str
    generation: int = 1


class Stage(Enum):
    """The progress of a hand-over, as its agent sees it.

    ABANDONED and FAILED are final: nothing is ever committed after them. OVER follows COMMITTED when the run is over.
    OTHER is said to whoever asks about another run or generation than the one that the machine is of.
    """

    NOTHING = "nothing"
    PREPARING = "preparing"
    READY = "ready"
    COMMITTED = "committed"
    OVER = "over"
    ABANDONED = "abandoned"
    FAILED = "failed"
    OTHER = "other"


class Outcome(Enum):
    """The end of a run.

    Attributes:
        ENDED: the program has ended by itself; its exit status is stored with the result.
        FAILED: the program was lost, and no retry is left.
        CANCELLED: a user has cancelled the run.
        INTERRUPTED: the agent has ended, or the head was rebooted, while the run was going on.
        LOST: the machine has ended, and nothing says what the run did.
        NOT_STARTED: the hand-over was not committed, so the program was never started.
    """

    ENDED = "ended"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    LOST = "lost"
    NOT_STARTED = "not started"


class Program(Enum):
    """The last attempt, as the agent sees it: "stopped" if the runner had it stopped, "lost" if it was killed."""

    NONE = "none"
    RUNNING = "running"
    ENDED = "ended"
    STOPPED = "stopped"
    LOST = "lost"


# --- the ledger ----------------------------------------------------------------------------------------------


class Ledger(Enum):
    """The state of a run in its client's ledger. The states follow each other in this order."""

    LIVE = "live"
    DETACHING = "detaching"
    DETACHED = "detached"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Entry:
    """The ledger's entry of a run. `outcome` is None as long as it is not known."""

    state: Ledger
    outcome: Outcome | None = None


# --- messages between client and agent -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepare:
    """A message of the client: prepare the hand-over. All that the runner needs travels with it.

    Attributes:
        end: seconds from now after which the guard is to end the machine.
        heir: the word by which the runner will be known.
    """

    claim: Claim
    end: float
    heir: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class EndSooner:
    """A message of the client: the end of `Prepare` came too late, so the machine would end later than ledger and tags
    say. If nothing is committed, the guard is to take the end after `end` seconds from now, and keeps the earlier one.
    """

    claim: Claim
    end: float


@dataclass(frozen=True, slots=True)
class Commit:
    """A message of the client: commit the hand-over if it is ready. A client that has sent it asks before it ends
    the machine."""

    claim: Claim


@dataclass(frozen=True, slots=True)
class Abandon:
    """A message of the client: give the hand-over up if it is not committed. Later messages cannot revive it."""

    claim: Claim


@dataclass(frozen=True, slots=True)
class Ask:
    """A message of anybody who may log in: how far is the hand-over?"""

    claim: Claim


@dataclass(frozen=True, slots=True)
class CancelRun:
    """A message of anybody who may log in: cancel the run, which was handed over."""

    claim: Claim


@dataclass(frozen=True, slots=True)
class Status:
    """The answer of the agent to each message, which it also sends when the stage changes.

    Attributes:
        why: why the hand-over has failed, which run has the machine, or why the end of the run is not stored.
        is_cancelled: True if the run is being cancelled.
        outcome: how the run has ended, in the stage OVER.
        left: seconds until the end that the guard holds, when this was said. None if it holds none, and in the steps,
            which have no clock.
    """

    claim: Claim
    stage: Stage
    why: str = ""
    is_cancelled: bool = False
    outcome: Outcome | None = None
    left: float | None = None


ToAgent = Prepare | EndSooner | Commit | Abandon | Ask | CancelRun


# --- messages between agent and runner -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StandsBy:
    """A message of the runner: it has all that it needs, and waits."""


@dataclass(frozen=True, slots=True)
class Go:
    """A message of the agent to a runner that stands by: the hand-over is committed. `heir` makes it the owner."""

    heir: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Takes:
    """A message of the runner: it takes the machine as its owner."""

    heir: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Welcome:
    """A message of the agent to its new owner: what became of the attempts so far.

    `left` is as in `Status`. `is_expired` is True if a former runner has said `Expires`.
    """

    attempts: int
    program: Program
    is_cancelled: bool
    left: float | None = None
    is_expired: bool = False


@dataclass(frozen=True, slots=True)
class Starts:
    """A message of the runner: start the program. An attempt that was started before is not started again."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Stops:
    """A message of the runner: stop the program."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Drops:
    """A message of the runner, after `Stops`: what it has not sent of an attempt will not come.

    Some attempts are stopped before their calls were sent, such as those of a gang that waits for its node.
    """

    attempt: int


@dataclass(frozen=True, slots=True)
class Expires:
    """A message of the runner, before `Stops`: budget or lifetime are over, so no attempt is to be started any more.

    The agent keeps it for the runners that come later.
    """


@dataclass(frozen=True, slots=True)
class ProgramOver:
    """A message of the agent: the program has ended."""

    attempt: int
    program: Program


@dataclass(frozen=True, slots=True)
class Cancel:
    """A message of the agent: a user cancels the run."""


@dataclass(frozen=True, slots=True)
class RunOver:
    """A message of the runner: the machine is to end, as the result is stored. If it is not, `why` says why."""

    outcome: Outcome
    why: str = ""


FromRunner = StandsBy | Takes | Starts | Stops | Drops | Expires | RunOver
ToRunner = Go | Welcome | ProgramOver | Cancel


# --- the client ----------------------------------------------------------------------------------------------


class ClientPhase(Enum):
    """A phase of the client.

    Attributes:
        OWNER: it owns the machine, and has not begun the hand-over.
        MARKING: it writes into the ledger and renews the tags.
        PREPARING: it waits until the hand-over is ready. It has not asked for the commit, so it may end the machine.
        COMMITTING: it has asked for the commit, and must not end the machine before it has heard that there is none.
        ABANDONING: the user has cancelled; the client waits to hear whether there is a commit.
        WATCHING: the hand-over is committed, and the client only watches.
        CANCELLING: the same, and the client has the run cancelled.
        OVER: there is nothing left to do.
    """

    OWNER = "owner"
    MARKING = "marking"
    PREPARING = "preparing"
    COMMITTING = "committing"
    ABANDONING = "abandoning"
    WATCHING = "watching"
    CANCELLING = "cancelling"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Client:
    """The state of the client."""

    claim: Claim
    end: float
    heir: str = field(repr=False)
    phase: ClientPhase = ClientPhase.OWNER

    @property
    def acts_as_owner(self) -> bool:
        """True if it sends calls and signs of life as the machine's owner, because it has not heard of a commit."""
        return self.phase not in (ClientPhase.WATCHING, ClientPhase.CANCELLING, ClientPhase.OVER)


class Said(Enum):
    """The words that the client has for its user at the end of a hand-over."""

    DETACHED = "detached"
    NOT_STARTED = "not started"
    INTERRUPTED = "interrupted"
    UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class Begin:
    """An event of the client: hand the run over."""


@dataclass(frozen=True, slots=True)
class TagsRenewed:
    """An event of the client: the provider has taken the new tags."""


@dataclass(frozen=True, slots=True)
class TagsFailed:
    """An event of the client: the provider has not taken the new tags."""


@dataclass(frozen=True, slots=True)
class Answered:
    """An event of the client: the agent has sent its state.

    `is_late` is True if the end that the guard holds may be later than the one that ledger and tags have.
    """

    status: Status
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class Connected:
    """An event of the client: the connection to the agent was made again."""


@dataclass(frozen=True, slots=True)
class Overdue:
    """An event of the client: the agent has not answered for some seconds."""


@dataclass(frozen=True, slots=True)
class Interrupt:
    """An event of the client: the user has cancelled the run, as by Ctrl-C."""


@dataclass(frozen=True, slots=True)
class AgentGone:
    """An event of the client: it has logged in to the machine, and no agent runs there any more.

    An agent that only does not answer is not gone.

    Attributes:
        has_row: True if the row is on the machine's disk. It was looked for after it was sure that no agent runs.
        stored: the outcome that the run has stored; None if there is none.
    """

    has_row: bool
    stored: Outcome | None = None


@dataclass(frozen=True, slots=True)
class MachineGone:
    """An event of the client: the provider says that the machine has ended.

    `stored` is the outcome that the run has stored, looked for after the end; None if there is none, or nobody knows.
    """

    stored: Outcome | None = None


@dataclass(frozen=True, slots=True)
class PoolOver:
    """An event of the client: its pool has ended in this process, as its budget is spent, or its machine is lost.

    `is_taken` is True if another process has taken the machine over.
    """

    is_taken: bool = False


ClientEvent = (
    Begin | TagsRenewed | TagsFailed | Answered | Connected | Overdue | Interrupt | AgentGone | MachineGone | PoolOver
)


@dataclass(frozen=True, slots=True)
class WriteLedger:
    """An action of the client: write an entry into the ledger, by the rule of `steps.merged`."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class RenewTags:
    """An action of the client: renew the machine's tags to the written end. `TagsRenewed` or `TagsFailed` follows."""

    end: float


@dataclass(frozen=True, slots=True)
class Send:
    """An action of the client: send a message to the agent, which is lost if there is no connection."""

    message: ToAgent


@dataclass(frozen=True, slots=True)
class EndMachine:
    """An action of the client: end the machine. If its end cannot be proved, the actions after this are left out."""


@dataclass(frozen=True, slots=True)
class Tell:
    """An action of the client: tell the user how the hand-over has ended."""

    said: Said


ClientAction = WriteLedger | RenewTags | Send | EndMachine | Tell


# --- the agent -----------------------------------------------------------------------------------------------


class Party(Enum):
    """The two parties that may own the machine."""

    CLIENT = "client"
    RUNNER = "runner"


@dataclass(frozen=True, slots=True)
class Row:
    """The commit: a run belongs to its head. Whoever looks in later reads it, also when the agent has ended."""

    claim: Claim
    end: float
    heir: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Agent:
    """The state of the agent. It is in memory; only the row outlives the agent.

    Attributes:
        claim: the claim of its only hand-over; None before the first message about one.
        row: the row that it has written, or will write.
        runner: the number of the runner's process, counted from 1 by its starts.
        tries: the number of runners that were started before the commit.
        stands_by: True if the present runner stands by.
        is_end_held: True if the guard has taken the end.
        is_taken: True if the present runner has taken the machine.
        attempts: the number of times that the program was started.
        endings: the number of runners that had taken the machine and ended, since the program ran last.
        is_cancelled: True if a user has cancelled the run.
        is_expired: True if the program was stopped because budget or lifetime were over.
    """

    claim: Claim | None = None
    stage: Stage = Stage.NOTHING
    why: str = ""
    row: Row | None = None
    runner: int = 0
    tries: int = 0
    stands_by: bool = False
    is_end_held: bool = False
    is_taken: bool = False
    attempts: int = 0
    program: Program = Program.NONE
    endings: int = 0
    is_cancelled: bool = False
    is_expired: bool = False
    outcome: Outcome | None = None

    @property
    def is_committed(self) -> bool:
        return self.stage in (Stage.COMMITTED, Stage.OVER)

    @property
    def owner(self) -> Party:
        """The party whose frames are obeyed, and extend the lease."""
        return Party.RUNNER if self.is_committed else Party.CLIENT


@dataclass(frozen=True, slots=True)
class Received:
    """An event of the agent: a message about a hand-over came from outside of the machine.

    `from_owner` is False if it came over another connection than that of the accepted client. It then extends no lease,
    and only `Ask` and `CancelRun` are obeyed.
    """

    message: ToAgent
    from_owner: bool = True


@dataclass(frozen=True, slots=True)
class EndHeld:
    """An event of the agent: the guard has taken the end and the heir."""


@dataclass(frozen=True, slots=True)
class EndRefused:
    """An event of the agent: the guard has not taken the end."""


@dataclass(frozen=True, slots=True)
class RowWritten:
    """An event of the agent: the row is on the disk, and stays there through a loss of power."""


@dataclass(frozen=True, slots=True)
class RowFailed:
    """An event of the agent: the row could not be written, and nothing is left of it."""

    why: str


@dataclass(frozen=True, slots=True)
class RunnerSaid:
    """An event of the agent: a message came from a runner."""

    runner: int
    message: FromRunner


@dataclass(frozen=True, slots=True)
class RunnerEnded:
    """An event of the agent: a runner has ended. All that it had said was heard before."""

    runner: int


@dataclass(frozen=True, slots=True)
class RunnerSilent:
    """An event of the agent: a runner has sent nothing for 60 s. Pauses of the whole machine do not count."""

    runner: int


@dataclass(frozen=True, slots=True)
class RunnerLate:
    """An event of the agent: a runner has not taken the machine 60 s after it was told of the commit.

    Pauses of the whole machine do not count.
    """

    runner: int


@dataclass(frozen=True, slots=True)
class ProgramEnded:
    """An event of the agent: the processes of an attempt have ended."""

    attempt: int
    program: Program


@dataclass(frozen=True, slots=True)
class Heard:
    """An event of the agent: an owner's frame came, such as a call or a sign of life.

    Attributes:
        runner: the number of the runner that has sent it; 0 for the client.
        moves: False if the counter of the runner's dispatch has stood still for 60 s.
    """

    party: Party
    runner: int = 0
    moves: bool = True


AgentEvent = (
    Received
    | EndHeld
    | EndRefused
    | RowWritten
    | RowFailed
    | RunnerSaid
    | RunnerEnded
    | RunnerSilent
    | RunnerLate
    | ProgramEnded
    | Heard
)


@dataclass(frozen=True, slots=True)
class GiveEnd:
    """An action of the agent: give the guard the end and the heir. `EndHeld` or `EndRefused` follows."""

    end: float
    heir: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class StartRunner:
    """An action of the agent: start a runner, and give it all that it needs over its stdin."""

    runner: int


@dataclass(frozen=True, slots=True)
class KillRunner:
    """An action of the agent: kill a runner. `RunnerEnded` follows when its process is gone."""

    runner: int


@dataclass(frozen=True, slots=True)
class TellRunner:
    """An action of the agent: send a message to a runner. It is dropped if that one has ended."""

    runner: int
    message: ToRunner


@dataclass(frozen=True, slots=True)
class WriteRow:
    """An action of the agent: write the row, with fsync of the file and its folder.

    `RowWritten` or `RowFailed` is the next event. It is written under another name first, so it is whole or absent.
    It is not written if the guard may end the machine before it hears of the extended lease. The run would be lost.
    """

    row: Row


@dataclass(frozen=True, slots=True)
class Reply:
    """An action of the agent: send its state to whoever has asked, or else to the client if that is connected."""

    status: Status


@dataclass(frozen=True, slots=True)
class Renew:
    """An action of the agent: extend the machine's lease."""


@dataclass(frozen=True, slots=True)
class StartProgram:
    """An action of the agent: start the program's processes."""

    attempt: int


@dataclass(frozen=True, slots=True)
class StopProgram:
    """An action of the agent: stop the program's processes. `ProgramEnded` follows."""

    attempt: int


@dataclass(frozen=True, slots=True)
class StopMachine:
    """An action of the agent: have the guard end the machine now, or after the time for which the user keeps it."""

    outcome: Outcome


AgentAction = (
    GiveEnd
    | StartRunner
    | KillRunner
    | TellRunner
    | WriteRow
    | Reply
    | Renew
    | StartProgram
    | StopProgram
    | StopMachine
)


# --- the runner ----------------------------------------------------------------------------------------------


class RunnerPhase(Enum):
    """A phase of a runner.

    Attributes:
        STARTING: it has not got all that it needs.
        STANDING_BY: it waits for the commit.
        TAKING: it waits for the agent's welcome.
        OWNER: it owns the machine, and the program runs.
        STORING: the program is over, and the result is being stored.
        OVER: it has said that the run is over.
    """

    STARTING = "starting"
    STANDING_BY = "standing by"
    TAKING = "taking"
    OWNER = "owner"
    STORING = "storing"
    OVER = "over"


@dataclass(frozen=True, slots=True)
class Runner:
    """The state of one runner's process.

    Attributes:
        retries: the number of times that the program may be started again after it was lost.
        attempt: the last attempt that it knows of.
        is_cancelled: True if a user has cancelled the run.
        is_expired: True if the program is stopped because budget or lifetime are over.
    """

    retries: int
    phase: RunnerPhase = RunnerPhase.STARTING
    attempt: int = 0
    is_cancelled: bool = False
    is_expired: bool = False

    @property
    def acts_as_owner(self) -> bool:
        """True if it sends calls and signs of life as the machine's owner."""
        return self.phase in (RunnerPhase.OWNER, RunnerPhase.STORING)


@dataclass(frozen=True, slots=True)
class GotNeeds:
    """An event of the runner: it has read all that it needs: project, modules, function, options and secrets."""


@dataclass(frozen=True, slots=True)
class AgentSaid:
    """An event of the runner: a message came from the agent."""

    message: ToRunner


@dataclass(frozen=True, slots=True)
class Expired:
    """An event of the runner: budget or lifetime are over, but for the seconds in which its end is stored."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An event of the runner: an outcome is stored. It is an earlier one if a former runner had stored that."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class NotStored:
    """An event of the runner: an outcome could not be stored, in several tries."""

    outcome: Outcome
    why: str


RunnerEvent = GotNeeds | AgentSaid | Expired | Stored | NotStored


@dataclass(frozen=True, slots=True)
class Say:
    """An action of the runner: send a message to the agent."""

    message: FromRunner


@dataclass(frozen=True, slots=True)
class Store:
    """An action of the runner: save what is left, and store status, result and receipt, unless they are stored.

    `Stored` or `NotStored` follows.
    """

    outcome: Outcome


RunnerAction = Say | Store
