"""The client in a hand-over: what `HandingOver` performs, with the agent's own state machine at the other end."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from skypool.errors import BudgetExceeded, ConnectionLost, LedgerError, SkypoolError, StillRunning, TakenOver
from skypool.head import steps
from skypool.head.states import (
    Abandon,
    Agent,
    AgentEvent,
    AgentGone,
    Answered,
    Claim,
    Commit,
    EndHeld,
    EndRefused,
    Entry,
    GiveEnd,
    Ledger,
    MachineGone,
    Outcome,
    Prepare,
    Received,
    Reply,
    RowFailed,
    RowWritten,
    RunnerSaid,
    Said,
    Stage,
    StandsBy,
    StartRunner,
    Status,
    ToAgent,
    WriteRow,
)
from skypool.runs.handing_over import HandingOver

RUN = Claim("run-1")


class Machine:
    """A machine with an agent, its guard, its disk and its runner. It is what the client owns.

    Args:
        lost: the messages that are lost at their first try.
        fails: what fails: "guard", "disk", "tags", "end" or "ledger".
        loses: the client loses the connection when it sends such a message.
        waits: the agent does not answer such a message.
        delay: seconds after which the first message with an end arrives.
    """

    def __init__(
        self,
        *,
        lost: tuple[type, ...] = (),
        fails: str = "",
        loses: type | None = None,
        waits: type | None = None,
        delay: float = 0.0,
    ) -> None:
        self.agent = Agent()
        self.written: list[Entry] = []
        self.did: list[str] = []
        self.asked = threading.Event()
        self.entry = Entry(Ledger.LIVE)
        self.on_commit: Callable[[], None] | None = None
        self.found: AgentGone | MachineGone | None = None
        self.left = 60.0
        self.over: SkypoolError | None = None
        self.held = math.inf
        self._delay = delay
        self._lost, self._fails, self._loses, self._waits = [*lost], fails, loses, waits
        self.handing = HandingOver(RUN, 60.0, "word", self)

    def send(self, message: ToAgent) -> None:
        self.did.append(type(message).__name__)
        if isinstance(message, Commit) and self.on_commit is not None:
            self.on_commit()
            return
        if type(message) in self._lost:
            self._lost.remove(type(message))
            return
        if self._waits is not None and isinstance(message, self._waits):
            self.asked.set()
            return
        if self._loses is not None and isinstance(message, self._loses):
            self.handing.hear(ConnectionLost("it is lost"))
            return
        self._tell(Received(message))

    def _tell(self, event: AgentEvent) -> None:
        self.agent, actions = steps.agent(self.agent, event)
        for action in actions:
            match action:
                case GiveEnd(end):
                    self.held = min(self.held, end + self._delay)
                    self._delay = 0.0
                    self._tell(EndRefused() if self._fails == "guard" else EndHeld())
                case StartRunner(runner):
                    self._tell(RunnerSaid(runner, StandsBy()))
                case WriteRow():
                    self._tell(RowFailed("the disk is full") if self._fails == "disk" else RowWritten())
                case Reply(status):
                    self.handing.hear(Answered(replace(status, left=self.held)))
                case _:
                    pass

    def write(self, entry: Entry) -> None:
        if self._fails == "ledger":
            raise LedgerError("the disk is full")
        self.entry = steps.merged(self.entry, entry)

    def renew_tags(self) -> None:
        if self._fails == "tags":
            raise OSError("no network")

    def withhold(self) -> None:
        self.did.append("withhold")

    def own_again(self) -> None:
        self.did.append("own again")

    def look(self) -> AgentGone | MachineGone | None:
        return self.found

    def end(self) -> None:
        self.did.append("end")
        if self._fails == "end":
            raise StillRunning("it may run", [])


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skypool.runs.handing_over._PATIENCE", 0.05)


@pytest.mark.parametrize("lost", [(), (Prepare,), (Commit,), (Prepare, Commit)])
def test_a_run_is_handed_over_also_if_messages_are_lost(lost: tuple[type, ...]) -> None:
    machine = Machine(lost=lost)
    assert machine.handing.run() is Said.DETACHED
    assert machine.agent.stage is Stage.COMMITTED
    assert machine.entry == Entry(Ledger.DETACHED)
    assert "end" not in machine.did
    first = machine.did.index("Commit")
    assert machine.did[first - 1] == "withhold", "before the commit is asked for, nothing else may end the machine"


@pytest.mark.parametrize(
    ("fails", "why"),
    [("guard", "the guard has not taken"), ("disk", "the disk is full"), ("tags", "could not be renewed: no network")],
)
def test_a_machine_is_ended_if_it_is_sure_that_nothing_was_committed(fails: str, why: str) -> None:
    machine = Machine(fails=fails)
    assert machine.handing.run() is Said.NOT_STARTED
    assert why in machine.handing.why
    assert machine.did[-2:] == ["own again", "end"]
    assert machine.entry == Entry(Ledger.ENDED, Outcome.NOT_STARTED)


@pytest.mark.parametrize(("delay", "asks"), [(600.0, ["Prepare", "EndSooner"]), (10.0, ["Prepare"])])
def test_nothing_is_committed_before_the_machine_ends_when_ledger_and_tags_say_so(
    delay: float, asks: list[str]
) -> None:
    machine = Machine(delay=delay)
    assert machine.handing.run() is Said.DETACHED
    assert machine.did == [*asks, "withhold", "Commit"]
    assert machine.held <= machine.left + 20


@pytest.mark.parametrize(
    ("waits", "over", "said", "ends"),
    [
        (Prepare, BudgetExceeded("it is spent"), Said.NOT_STARTED, True),
        (Prepare, TakenOver("it is another's"), Said.NOT_STARTED, False),
        (Commit, BudgetExceeded("it is spent"), Said.UNKNOWN, False),
    ],
)
def test_a_client_hears_that_its_pool_has_ended_for_another_reason(
    waits: type, over: SkypoolError, said: Said, ends: bool
) -> None:
    machine = Machine(waits=waits)

    def end() -> None:
        machine.asked.wait()
        machine.over = over

    threading.Thread(target=end).start()
    assert machine.handing.run() is said
    assert machine.handing.why == str(over)
    assert ("end" in machine.did) is ends
    assert machine.entry == (Entry(Ledger.ENDED, Outcome.NOT_STARTED) if ends else Entry(Ledger.DETACHING))


def test_a_pool_that_ends_while_its_run_is_being_cancelled_is_told() -> None:
    machine = Machine(waits=Abandon)

    def interrupt() -> None:
        machine.asked.wait()
        machine.handing.hear(Answered(Status(RUN, Stage.COMMITTED)))
        machine.over = BudgetExceeded("it is spent")

    machine.on_commit = lambda: os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt).start()
    with pytest.raises(SkypoolError, match=r"not known whether the run was cancelled.*it is spent"):
        machine.handing.run()
    assert machine.entry == Entry(Ledger.DETACHED)


def test_a_ledger_that_cannot_be_written_stops_it_before_the_agent_hears_of_it() -> None:
    machine = Machine(fails="ledger")
    with pytest.raises(LedgerError):
        machine.handing.run()
    assert machine.did == []


@pytest.mark.parametrize(("loses", "said"), [(Prepare, Said.NOT_STARTED), (Commit, Said.UNKNOWN)])
def test_a_machine_that_is_lost_is_ended_only_before_the_commit_was_asked_for(loses: type, said: Said) -> None:
    machine = Machine(loses=loses)
    assert machine.handing.run() is said
    assert machine.handing.why == "it is lost"
    assert ("end" in machine.did) is (said is Said.NOT_STARTED)


@pytest.mark.parametrize(
    ("left", "said", "entry"),
    [
        (AgentGone(has_row=False), Said.NOT_STARTED, Entry(Ledger.ENDED, Outcome.NOT_STARTED)),
        (AgentGone(has_row=True), Said.INTERRUPTED, Entry(Ledger.DETACHED, Outcome.INTERRUPTED)),
        (AgentGone(has_row=True, stored=Outcome.ENDED), Said.DETACHED, Entry(Ledger.DETACHED, Outcome.ENDED)),
        (MachineGone(), Said.UNKNOWN, Entry(Ledger.ENDED, Outcome.LOST)),
    ],
)
def test_what_is_left_of_a_lost_machine_tells_whether_there_was_a_commit(
    left: AgentGone | MachineGone, said: Said, entry: Entry
) -> None:
    machine = Machine(loses=Commit)
    machine.found = left
    assert machine.handing.run() is said
    assert machine.entry == entry
    assert ("end" in machine.did) is (said is Said.NOT_STARTED)


@pytest.mark.parametrize(("waits", "end"), [(Prepare, "end"), (Commit, "Abandon")])
def test_a_signal_cancels_the_run(waits: type, end: str) -> None:
    """At first at once; when the commit was asked for, only when the agent has said that there is none."""
    machine = Machine(waits=waits)

    def interrupt() -> None:
        machine.asked.wait()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        machine.handing.run()
    assert machine.handing.said is Said.NOT_STARTED
    assert machine.did[-1] == "end"
    assert end in machine.did
    assert machine.agent.stage is (Stage.NOTHING if waits is Prepare else Stage.ABANDONED)


def test_an_end_that_is_not_proved_is_told_and_not_written() -> None:
    machine = Machine(fails="end")
    machine.agent = replace(machine.agent, claim=RUN, stage=Stage.FAILED, why="no guard")
    with pytest.raises(StillRunning):
        machine.handing.run()
    assert machine.entry == Entry(Ledger.DETACHING)


def test_a_signal_that_comes_when_the_run_was_just_committed_has_its_runner_cancel_it() -> None:
    machine = Machine(waits=Abandon)

    def interrupt() -> None:
        machine.asked.wait()
        machine.handing.hear(Answered(Status(RUN, Stage.COMMITTED)))
        machine.handing.hear(Answered(Status(RUN, Stage.OVER, is_cancelled=True, outcome=Outcome.CANCELLED)))

    machine.on_commit = lambda: os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        machine.handing.run()
    assert machine.handing.said is Said.DETACHED
    assert machine.entry == Entry(Ledger.DETACHED)
    assert machine.did[-2:] == ["Abandon", "CancelRun"]
