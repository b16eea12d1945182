"""`HandOver`: the agent's part in handing a run over from its client to a runner on this machine.

`skypool.head.steps` decides what happens; this module performs it.
"""

from __future__ import annotations

import hmac
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from skypool.agent.call import NodeCall
from skypool.agent.call_queue import CallQueue
from skypool.agent.client_session import Client
from skypool.agent.connection import Connection
from skypool.agent.failed_calls import Answers
from skypool.agent.guard import Asking, Guard
from skypool.agent.lease import Lease
from skypool.agent.messages import cancel_in, member_in, recall_in
from skypool.agent.runner_watch import RunnerWatch
from skypool.agent.stops import Stops as CallStops
from skypool.agent.store import Arrivals
from skypool.clock import RunningClock, elapsed
from skypool.errors import SkypoolError, protocol_violation
from skypool.head import messages, rows, steps
from skypool.head.states import (
    Agent,
    AgentAction,
    AgentEvent,
    EndHeld,
    EndRefused,
    GiveEnd,
    Heard,
    KillRunner,
    Party,
    Prepare,
    Program,
    ProgramEnded,
    Received,
    Renew,
    Reply,
    RowFailed,
    RowWritten,
    RunnerEnded,
    RunnerSaid,
    Stage,
    StartProgram,
    StartRunner,
    Starts,
    Status,
    StopMachine,
    StopProgram,
    Stops,
    Takes,
    TellRunner,
    Welcome,
    WriteRow,
)
from skypool.safety import private
from skypool.wire.frames import Frame, Kind, frame

Told = TypeVar("Told", Status, Welcome)
_TO_TELL = 3.0
"""The least seconds that the agent stays after the end of a run, in which others hear of it."""
_ENDS = {"": Program.ENDED, "timeout": Program.ENDED, "cancel": Program.STOPPED}
"""What has become of a program, by the reason for which the agent has ended its call. For other reasons it is lost."""


class _Attempt:
    """A start of the program, of one call for each process.

    Attributes:
        calls: the calls by id. What has become of a call stands in its record; None for one that never ran.
        locals: the processes whose calls have come, by their numbers on this node.
        processes: the number of processes; 0 before the first call.
        grace: seconds for which the calls may go on when they are stopped.
        is_torn: True if its runner has ended before it had sent all calls, so that it is stopped.
        is_stopped: True if its runner has it stopped.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls: dict[int, NodeCall | None] = {}
        self.locals: set[int] = set()
        self.processes = 0
        self.grace = 0.0
        self.is_torn = False
        self.is_stopped = False

    @property
    def is_closed(self) -> bool:
        """True if no more calls may come."""
        return self.is_torn or self.is_stopped or 0 < self.processes == len(self.calls)

    def how(self) -> Program:
        """Return what has become of it, when all calls have ended."""
        found = {Program.LOST if each is None else _ENDS.get(each.doomed, Program.LOST) for each in self.calls.values()}
        if self.is_torn or Program.LOST in found:
            return Program.LOST
        return Program.STOPPED if Program.STOPPED in found else Program.ENDED


class HandOver:
    """The state of the hand-over, and all that the agent does about it. Before the first message, this does nothing.

    Args:
        watch: has the agent's loop call a function on events of a file descriptor.
        clock: the agent's clock.
        client: the connection to the client.
        lease: the lease of the node.
        handlers: handles each kind of frame of the accepted client. At the hand-over, this object takes some kinds.
        queue, stops, answers, arrivals: the calls of the node, what stops them, what answers them in place of a worker,
            and their large arguments.
        guard: what ends the machine.
        runner: what is started as the runner, as `RunnerWatch` takes it.
        reserve: returns the seconds that the node needs to save what is left of folders before it ends.
    """

    def __init__(
        self,
        watch: Callable[[int, int, Callable[[], None]], None],
        clock: RunningClock,
        client: Client,
        lease: Lease,
        handlers: dict[Kind, Callable[[Frame], None]],
        queue: CallQueue,
        stops: CallStops,
        answers: Answers,
        arrivals: Arrivals,
        guard: Guard,
        runner: list[str] | None = None,
        reserve: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._watch, self._clock, self._client, self._lease = watch, clock, client, lease
        self._handlers = handlers
        self._queue, self._stops, self._answers, self._arrivals = queue, stops, answers, arrivals
        self._guard, self._reserve = guard, reserve
        self._runner = RunnerWatch(watch, self._step, clock, runner)
        self._state = Agent()
        self._events: deque[tuple[AgentEvent, Connection | None]] = deque()
        self._is_stepping = False
        self._place = messages.Place("")
        self._until = math.inf  # the end that the guard holds, by `clock.elapsed`
        self._asker: Connection | None = None
        self._watchers: list[Connection] = []
        self._former: Connection | None = None
        self._renewed = 0.0
        self._usual: dict[Kind, Callable[[Frame], None]] = {}
        self._attempt: _Attempt | None = None
        self._asking: Asking | None = None  # for the end
        self._stopping: Asking | None = None

    # --- what the agent asks ---------------------------------------------------------------------------------

    def heard(self, client: float) -> float:
        """Return the last sign of life of the owner. `client` is that of the accepted client. By the agent's clock."""
        return self._renewed if self._state.is_committed else client

    def refusal(self, hello: Mapping[str, Any]) -> dict[str, object] | None:
        """Return the header of the TAKEN for a client that is not the owner; None if it may be accepted."""
        state = self._state
        if not state.is_committed:
            return {"silent": 0.0, "why": "its run was not handed over"} if "heir" in hello else None
        assert state.row is not None
        heir = str(hello.get("heir", ""))
        if (
            state.stage is Stage.COMMITTED
            and state.stands_by
            and hmac.compare_digest(heir.encode(), state.row.heir.encode())
        ):
            return None
        return {"silent": 0.0, "former": True, "handover": messages.to_json(self._told(self._status()))}

    def on_accepted(self, hello: Mapping[str, Any]) -> None:
        """Note that a client was accepted. If it is the runner, it is the owner from now on."""
        if "heir" in hello:
            self._step(RunnerSaid(self._state.runner, Takes(str(hello["heir"]))))

    def tick(self, now: float) -> None:
        """Do what no file descriptor reports. `now` is the time of the agent's clock."""
        if self._state.claim is None:
            return
        self._runner.tick(now)
        attempt = self._attempt
        is_running = attempt is not None and self._state.program is Program.RUNNING and attempt.is_closed
        if attempt is not None and is_running and all(self._queue.get(id_) is None for id_ in attempt.calls):
            self._step(ProgramEnded(attempt.number, attempt.how()))
        self._look_at_guard()
        if self._stopping is not None and self._stopping.look() is not None:
            self._stopping = None

    # --- frames ----------------------------------------------------------------------------------------------

    def on_frame(self, f: Frame) -> None:
        """Handle a HANDOVER frame of the accepted client. Raises ProtocolError if it is invalid."""
        message = messages.to_agent(f.header)
        if isinstance(message, Prepare) and self._state.stage is Stage.NOTHING:
            self._place = messages.place(f.header, message.claim)
            self._runner.give(bytes(f.body))
        self._step(Received(message, from_owner=self._state.owner is Party.CLIENT), self._client.connection)

    def on_other(self, f: Frame, connection: Connection) -> bool:
        """Handle a frame of a connection that is not the accepted client's. Return False if it must not send that."""
        if f.kind is Kind.HANDOVER:
            message = messages.to_agent(f.header)
            self._watchers = [each for each in self._watchers if each is not connection and self._client.is_open(each)]
            self._watchers.append(connection)
            self._step(Received(message, from_owner=False), connection)
        elif connection is not self._former:
            return False
        elif f.kind is not Kind.BYE:
            self._step(Heard(Party.CLIENT), connection)
        return True

    def _on_call(self, f: Frame) -> None:
        """Pass on a call of the runner. One of the program must be of the attempt that is allowed."""
        number = f.header.get("attempt", 0)
        if not number:
            self._usual[Kind.CALL](f)
            return
        id_ = f.header["id"]
        if self._attempt is not None and id_ in self._attempt.calls:
            self._arrivals.discard(f)  # it came twice
            return
        if type(number) is not int:
            raise protocol_violation(f"the runner sent a call of the attempt {number!r}")
        member = member_in(f)
        self._step(RunnerSaid(self._state.runner, Starts(number)))
        attempt = self._attempt
        local, processes = (0, 1) if member is None else (member.local, member.of)
        is_allowed = (
            attempt is not None
            and number == attempt.number
            and self._state.program is Program.RUNNING
            and not attempt.is_closed
            and local not in attempt.locals
        )
        if attempt is None or not is_allowed:
            self._arrivals.discard(f)
            error = SkypoolError(f"attempt {number} of the program was started before, or is not the next one")
            self._answers.fail(id_, error)
            return
        attempt.processes = processes
        attempt.locals.add(local)
        attempt.calls[id_] = None
        self._usual[Kind.CALL](f)
        attempt.calls[id_] = self._queue.get(id_)

    def _on_calls(self, f: Frame) -> None:
        if f.header.get("attempt"):
            raise protocol_violation("the runner sent the program as one of several calls in a frame")
        self._usual[Kind.CALLS](f)

    def _on_recall(self, f: Frame) -> None:
        """Give no calls back while the program is there: one that was given back would look as if it had ended."""
        if self._state.program is Program.RUNNING:
            self._client.send(Kind.RECALLED, {"calls": [], "cpu": recall_in(f).on_cpu})
        else:
            self._usual[Kind.RECALL](f)

    def _on_cancel(self, f: Frame) -> None:
        """Stop all calls of the program if one of them is cancelled."""
        id_, grace = cancel_in(f)
        attempt = self._attempt
        if attempt is None or id_ not in attempt.calls:
            self._usual[Kind.CANCEL](f)
            return
        attempt.grace = grace
        self._step(RunnerSaid(self._state.runner, Stops(attempt.number)))

    # --- events and actions ----------------------------------------------------------------------------------

    def _step(self, event: AgentEvent, asker: Connection | None = None) -> None:
        """Handle an event, and those that follow from it, in order."""
        self._events.append((event, asker))
        if self._is_stepping:
            return
        self._is_stepping = True
        try:
            while self._events:
                event, self._asker = self._events.popleft()
                was = self._state
                self._state, actions = steps.agent(was, event)
                if self._state.is_committed and not was.is_committed:
                    self._on_commit()
                for action in actions:
                    self._perform(action)
                if isinstance(event, RunnerEnded):
                    self._on_runner_end()
        finally:
            self._is_stepping = False

    def _perform(self, action: AgentAction) -> None:
        match action:
            case Reply(status):
                self._reply(status)
            case Renew():
                self._renewed = self._clock()
            case GiveEnd(end, heir):
                self._give_end(end, heir)
            case StartRunner(number):
                self._runner.start(number)
            case KillRunner(number):
                self._runner.kill(number)
            case TellRunner(number, message):
                self._runner.tell(number, self._told(message) if isinstance(message, Welcome) else message)
            case WriteRow():
                self._write_row()
            case StartProgram(number):
                self._attempt = _Attempt(number)
            case StopProgram():
                assert self._attempt is not None
                self._attempt.is_stopped = True
                for id_ in self._attempt.calls:
                    self._stops.cancel(id_, self._attempt.grace)
            case StopMachine():
                if self._state.why:
                    print(f"the run is over: {self._state.why}", file=sys.stderr, flush=True)
                self._stop_machine()

    def _status(self) -> Status:
        state = self._state
        assert state.claim is not None
        return Status(state.claim, state.stage, state.why, state.is_cancelled, state.outcome)

    def _told(self, message: Told) -> Told:
        """Return a message as it is told now: with the seconds until the end that the guard holds."""
        return replace(message, left=self._left) if self._state.is_end_held else message

    @property
    def _left(self) -> float:
        return max(0.0, self._until - elapsed())

    def _reply(self, status: Status) -> None:
        """Answer whoever has asked; without one, tell all who have asked before, and the client."""
        header = messages.to_json(self._told(status))
        to = [self._asker]
        if self._asker is None:
            to = [*self._watchers, *([] if self._state.is_committed else [self._client.connection])]
        for each in to:
            if each is not None:
                self._client.reply(each, frame(Kind.HANDED, header))

    def _on_commit(self) -> None:
        """Obey the runner from now on, and not the client any more."""
        self._former = self._client.give_up()
        if self._former is not None:
            self._watchers.append(self._former)
        self._usual = dict(self._handlers)
        self._handlers |= {
            Kind.CALL: self._on_call,
            Kind.CALLS: self._on_calls,
            Kind.CANCEL: self._on_cancel,
            Kind.RECALL: self._on_recall,
            Kind.BYE: lambda f: self._client.leave(),  # the run ends otherwise
        }

    def _on_runner_end(self) -> None:
        """Close the connection of a runner that has ended. Stop an attempt of which it has not sent all calls."""
        if not self._state.is_committed:
            return
        self._client.leave()
        attempt = self._attempt
        if attempt is not None and self._state.program is Program.RUNNING and not attempt.is_closed:
            attempt.is_torn = True
            for id_ in attempt.calls:
                self._stops.cancel(id_, attempt.grace)

    def _write_row(self) -> None:
        """Write the row, if the lease still holds for long enough."""
        row = self._state.row
        assert row is not None
        why = self._lease.take(time.monotonic())
        if not why:
            digest = messages.heir_digest(row.heir)
            try:
                folder = private.folder(os.path.expanduser(self._place.folder))
                rows.write(str(folder), rows.WrittenRow(row.claim, time.time() + self._left, digest, time.time()))
            except FileExistsError:
                why = (
                    f"generation {row.claim.generation} of run {row.claim.run} was handed over to this machine before; "
                    f"use another name, or remove {self._place.folder} there"
                )
            except (OSError, SkypoolError) as e:
                why = f"the machine cannot write down that it has the run: {e}"
        self._events.appendleft((RowFailed(why) if why else RowWritten(), None))  # told to all

    # --- the guard -------------------------------------------------------------------------------------------

    def _give_end(self, end: float, heir: str) -> None:
        """Let the machine end in `end` seconds in any case."""
        self._until = min(self._until, elapsed() + end)
        self._lease.end_by(end)
        self._asking = self._guard.ask_end(end, messages.heir_digest(heir))

    def _look_at_guard(self) -> None:
        """Hear whether the guard has taken the end, when it has answered."""
        if self._asking is not None and (is_held := self._asking.look()) is not None:
            self._asking = None
            self._step(EndHeld() if is_held else EndRefused())

    def _stop_machine(self) -> None:
        """Let the machine end, when it was kept for as long as the user wants. An answer is not needed any more.

        What is left of folders is saved after that, if no runner has had it saved before.
        """
        keep = max(self._place.keep, _TO_TELL)
        self._lease.stay(keep)
        self._stopping = self._guard.ask_stop(keep + self._reserve())
