"""`HandingOver`: hands a run over from this process, which has rented its machine, to a runner on that machine.

`head.steps` decides what happens next; this module performs it.
"""

from __future__ import annotations

import queue
from dataclasses import replace
from typing import Protocol

from skypool.errors import ConnectionLost, SkypoolError, TakenOver
from skypool.head import steps
from skypool.head.states import (
    AgentGone,
    Answered,
    Begin,
    Claim,
    Client,
    ClientAction,
    ClientEvent,
    ClientPhase,
    Commit,
    EndMachine,
    Entry,
    Interrupt,
    MachineGone,
    Overdue,
    PoolOver,
    RenewTags,
    Said,
    Send,
    Stage,
    TagsFailed,
    TagsRenewed,
    Tell,
    ToAgent,
    WriteLedger,
)
from skypool.runs.own_thread import in_thread
from skypool.runs.program_run import await_end

_PATIENCE = 5.0
"""Seconds after which an agent that has not answered is asked again."""
_LATE = 20.0
"""Seconds by which the machine may end later than is written. An answer takes time, in which less of the end is left.
`run_account.ENDING` leaves more time than this."""
_DECIDED = (ClientPhase.WATCHING, ClientPhase.OVER)


class Owned(Protocol):
    """A protocol for what this process has of the machine until it is handed over. The methods block."""

    @property
    def over(self) -> SkypoolError | None:
        """Why the pool has ended in this process, or is ending; None if it is not. It then sends nothing any more."""

    @property
    def left(self) -> float:
        """Seconds until the written end, which ledger and tags have; 0 after it."""
        ...

    def send(self, message: ToAgent) -> None:
        """Send a message to the agent. It is lost without a connection."""

    def write(self, entry: Entry) -> None:
        """Write the entry of the run into the ledger, by the rule of `steps.merged`."""

    def renew_tags(self) -> None:
        """Renew the machine's tags until the written end. Raises if a provider does not take them."""

    def withhold(self) -> None:
        """Let nothing in this process end the machine from now on, as it may have another owner."""

    def own_again(self) -> None:
        """Undo `withhold`, because it is sure that the machine has no other owner."""

    def end(self) -> None:
        """End the machine. Raises if its end cannot be proved."""

    def look(self) -> AgentGone | MachineGone | None:
        """Look what has become of a machine whose connection was given up. Return None if that is not sure."""


class HandingOver:
    """Hands one run over, in a thread of its own, so that a signal never comes between two steps.

    Args:
        end: seconds from now after which the guard is to end the machine.
        heir: the word by which the runner will be known.

    Attributes:
        said: how the hand-over has ended; None before that.
        why: why it has failed; "" if it has not.
    """

    def __init__(self, claim: Claim, end: float, heir: str, owned: Owned) -> None:
        self._state = Client(claim, end, heir)
        self._owned = owned
        self._events: queue.SimpleQueue[ClientEvent | ConnectionLost] = queue.SimpleQueue()
        self._is_cancelled = self._is_cut_off = False
        self.said: Said | None = None
        self.why = ""
        self._done = in_thread(self._work, "skypool-hand-over")  # before a signal may come between start and wait

    def hear(self, event: ClientEvent | ConnectionLost) -> None:
        """Handle what has happened, soon: an event, or that the machine is lost. Any thread may call this."""
        self._events.put(event)

    def run(self) -> Said:
        """Hand the run over, and return when it is decided. The first signal cancels the run.

        Raises:
            KeyboardInterrupt, SystemExit: a signal came. The machine has ended, or its runner has cancelled the run.
                After a second signal, the machine is left to its runner, or else to its lease.
            SkypoolError: the machine was to be ended, and its end is not proved; or it is not known whether the run was
                cancelled.
        """
        try:
            self.hear(Begin())
            await_end(self._done)
        except (KeyboardInterrupt, SystemExit):
            self.hear(Interrupt())
            await_end(self._done)
            self._done.result()  # raises what has failed
            if self._is_cut_off:
                raise SkypoolError(
                    f"it is not known whether the run was cancelled, which belongs to its machine: {self.why}; "
                    "`skypool down` ends the machine"
                ) from None
            if self._is_cancelled:  # otherwise the signal came too late
                raise
        return self._done.result()

    def _work(self) -> Said:
        while self._state.phase not in _DECIDED and self.said is not Said.UNKNOWN and not self._is_cut_off:
            try:
                event: ClientEvent | SkypoolError = self._events.get(timeout=_PATIENCE)
            except queue.Empty:
                event = Overdue()
            over = self._owned.over
            if over is not None and (self._state.phase in steps.UNASKED or isinstance(event, Overdue)):
                self._is_cancelled |= isinstance(event, Interrupt)
                event = over
            if isinstance(event, SkypoolError):
                self._lose(event)
            else:
                self._step(event)
        assert self.said is not None
        return self.said

    def _lose(self, error: SkypoolError) -> None:
        """Cancel the run if it is sure that there is no commit. Otherwise look, or leave the machine to its owner."""
        self.why = str(error)
        if self._state.phase in steps.UNASKED:
            self._apply(PoolOver(isinstance(error, TakenOver)))
        elif (found := self._owned.look()) is not None:
            self._step(found)
        elif self.said is None:
            self.said = Said.UNKNOWN
        else:
            self._is_cut_off = True

    def _step(self, event: ClientEvent) -> None:
        if isinstance(event, Answered) and event.status.stage in (Stage.FAILED, Stage.OTHER):
            self.why = event.status.why
        if isinstance(event, Answered) and event.status.stage is Stage.READY:
            left = event.status.left
            event = replace(event, is_late=left is None or left > self._owned.left + _LATE)
        self._is_cancelled |= isinstance(event, Interrupt)
        self._apply(event)

    def _apply(self, event: ClientEvent) -> None:
        self._state, actions = steps.client(self._state, event)
        for action in actions:
            self._perform(action)

    def _perform(self, action: ClientAction) -> None:
        owned = self._owned
        match action:
            case WriteLedger(entry):
                owned.write(entry)
            case RenewTags():
                try:
                    owned.renew_tags()
                except Exception as e:  # noqa: BLE001 - whatever it is, the tags would let `gc` end the machine
                    self.why = f"the tags of the machine could not be renewed: {e}"
                    self.hear(TagsFailed())
                else:
                    self.hear(TagsRenewed())
            case Send(message):
                if isinstance(message, Commit):
                    owned.withhold()
                owned.send(message)
            case EndMachine():
                owned.own_again()
                owned.end()
            case Tell(said):
                self.said = said
