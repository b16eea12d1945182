"""A small world for the hand-over of a run: client, agent, runner, network, guard, program, ledger, and what may fail.

`moves` lists all that may happen next in a world, and `handover_search` follows it. A world is a tuple of numbers and
words: values of `skypool.head.states` have numbers in `CODES`, so that worlds are hashed fast. Time passes in ticks of
half a lease. Promises are checked by the moves that could break them, and by `check` in each world.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from skypool.head import states as s
from skypool.head import steps

CLAIM = s.Claim("train-7")
END, HEIR = 3600.0, "heir"
LATE_END = 3700.0
"""The end of a message that has come late, if that counts from its arrival."""
RETRIES = 1
LEASE = 2
"""Ticks."""
ROOM = 2
"""The most messages on their way in each direction between client and agent; others are lost."""

TAKEN = "another process has taken it"
"""What has become of a machine that another process has taken over as its owner, before any commit."""
UP, HUNG, STUCK, DEAD = "up", "hung", "stuck", "dead"
"""What a process is: stuck is a runner that sends signs of life, and whose dispatch stands still."""


class Codes:
    """Numbers for values, so that equal values have the same number."""

    def __init__(self) -> None:
        self.things: list[Any] = []
        self._codes: dict[tuple[type, Hashable], int] = {}

    def __call__(self, thing: Hashable) -> int:
        key = (type(thing), thing)
        code = self._codes.get(key)
        if code is None:
            code = self._codes[key] = len(self.things)
            self.things.append(thing)
        return code


CODES = Codes()
THINGS = CODES.things
RENEW = CODES(s.Renew())
ASK = CODES(s.Ask(CLAIM))
FINAL = (s.Stage.COMMITTED, s.Stage.OVER, s.Stage.ABANDONED, s.Stage.FAILED)
LATER = {
    s.ClientPhase.COMMITTING: (s.ClientPhase.ABANDONING,),
    s.ClientPhase.WATCHING: (s.ClientPhase.CANCELLING,),
    s.ClientPhase.CANCELLING: (),
    s.ClientPhase.OVER: (),
}
"""The phases in which a client may still read old messages, after Ctrl-C."""


class Broken(Exception):
    """A promise that was broken."""

    def __init__(self, promise: str, how: str) -> None:
        super().__init__(f"{promise}: {how}")
        self.promise = promise


ONE_OWNER = "one owner at a time"
ONE_START = "an attempt starts once, and each other one is a counted retry"
READY_FIRST = "a commit is the last step"
NOT_ALONE = "a machine without an owner does not outlive its lease"
NOT_BEFORE = "no machine ends before its time"
TRUTH = "the client tells the truth"
AGREE = "ledger and head agree"
COMPLETES = "a run whose runner fails once completes"
IT_ENDS = "everything comes to an end"


class World(NamedTuple):
    """All there is. What a party still has to do is a tuple of the codes of its actions.

    Attributes:
        runner: the code of the state of the last runner; -1 before the first one.
        number: the number of the last runner.
        c2a, a2c: codes of messages on their way, in no order. a2r, r2a: the same in order.
        lease: ticks until the guard ends the machine. alone: ticks since its owner was heard.
        machine: "up", or why it has ended.
        guard: whether it holds the end: "", "asked", "held".
        late: True if that is later than ledger and tags have.
        row: whether it is on the disk: "", "cached" before a real fsync, "synced".
        attempts: how often the program was started. program: what became of the last attempt.
        stored: the code of the stored outcome; -1 for none.
        is_full: True if no outcome can be stored.
        limit: whether budget or lifetime are over: "" if they never are, "ahead", "come", or "told" to the agent.
        entry: the code of the ledger's entry. looker: that of the one that another command will write; -1 for none.
        said: the code of what the client has told its user; -1 for nothing yet.
        faults, slips, cancels: how many may still happen. A slip is a message that is lost or comes twice.
    """

    client: int
    client_todo: tuple[int, ...]
    client_is: str
    agent: int
    agent_todo: tuple[int, ...]
    agent_is: str
    runner: int
    runner_todo: tuple[int, ...]
    runner_is: str
    number: int
    link: bool
    c2a: tuple[int, ...]
    a2c: tuple[int, ...]
    a2r: tuple[int, ...]
    r2a: tuple[int, ...]
    lease: int
    alone: int
    machine: str
    guard: str
    late: bool
    row: str
    stood_by: bool
    tags: str
    attempts: int
    program: s.Program
    stored: int
    is_full: bool
    limit: str
    entry: int
    looker: int
    said: int
    faults: int
    slips: int
    cancels: int


@dataclass(frozen=True)
class Rules:
    """How the parties behave, and what may happen to them. Planted bugs change the rules.

    Attributes:
        merged: how the ledger merges what is written into it.
        has_fsync: False if a written row is lost by a reboot.
        heeds_lease: False if a row is written though the lease is over.
        may_fail: how the texts of the faults begin that may happen.
        runs_on: True if the program never ends by itself, so that its users or its limit must stop it in the end.
        must_complete: True if no lease may end a machine after the commit.
    """

    client: Callable[[s.Client, Any], tuple[s.Client, list[Any]]] = steps.client
    agent: Callable[[s.Agent, Any], tuple[s.Agent, list[Any]]] = steps.agent
    runner: Callable[[s.Runner, Any], tuple[s.Runner, list[Any]]] = steps.runner
    merged: Callable[[s.Entry, s.Entry], s.Entry] = steps.merged
    has_fsync: bool = True
    heeds_lease: bool = True
    may_fail: tuple[str, ...] = ("",)
    runs_on: bool = False
    must_complete: bool = False
    memo: dict[Any, Any] = field(default_factory=dict, compare=False)

    def step(self, party: str, state: int, event: Hashable) -> tuple[int, tuple[int, ...]]:
        """Return the codes of the next state and of the actions of a party."""
        key = (party, state, event)
        found = self.memo.get(key)
        if found is None:
            after, actions = getattr(self, party)(THINGS[state], event)
            found = self.memo[key] = CODES(after), tuple(map(CODES, actions))
        return found


Label = tuple[str, Hashable]
Move = tuple[str, Label, World]
"""A kind, what happens, and the world after it. Kinds are "step", "fault" and "wake"."""


def new(faults: int, slips: int, cancels: int, has_limit: bool = False) -> World:
    """Return the world at the beginning, with so many faults, slips and cancels to come, and perhaps a limit."""
    return World(
        client=CODES(s.Client(CLAIM, END, HEIR)),
        client_todo=(),
        client_is=UP,
        agent=CODES(s.Agent()),
        agent_todo=(),
        agent_is=UP,
        runner=-1,
        runner_todo=(),
        runner_is=DEAD,
        number=0,
        link=True,
        c2a=(),
        a2c=(),
        a2r=(),
        r2a=(),
        lease=LEASE,
        alone=0,
        machine=UP,
        guard="",
        late=False,
        row="",
        stood_by=False,
        tags="short",
        attempts=0,
        program=s.Program.NONE,
        stored=-1,
        is_full=False,
        limit="ahead" if has_limit else "",
        entry=CODES(s.Entry(s.Ledger.LIVE)),
        looker=-1,
        said=-1,
        faults=faults,
        slips=slips,
        cancels=cancels,
    )


# --- what happens --------------------------------------------------------------------------------------------


def _client_event(w: World, rules: Rules, event: Hashable) -> World:
    """Let the client decide. Messages that it will ignore are left out, which keeps the number of worlds small."""
    state, actions = rules.step("client", w.client, event)
    a2c = w.a2c
    if a2c and state != w.client:
        a2c = tuple(code for code in a2c if not _is_ignored(w._replace(client=state), rules, THINGS[code]))
    return w._replace(client=state, client_todo=w.client_todo + actions, a2c=a2c)


def _agent_event(w: World, rules: Rules, event: Hashable) -> World:
    """Let the agent decide. A lease counts from the moment at which a frame was heard, so it is extended at once."""
    state, actions = rules.step("agent", w.agent, event)
    if RENEW in actions:
        actions = tuple(each for each in actions if each != RENEW)
        w = _renewed(w, event)
    c2a = w.c2a
    if c2a and state != w.agent:
        c2a = tuple(sorted({_plain(state, w.client_is, rules, code) for code in c2a} - {-1}))
    return w._replace(agent=state, agent_todo=w.agent_todo + actions, c2a=c2a)


def _plain(agent: int, client_is: str, rules: Rules, code: int) -> int:
    """Return the code of a message that the agent answers in the same way now and later; -1 if nothing follows from it.

    So late messages that are only answered count as one, which keeps the number of worlds small.
    """
    stage = THINGS[agent].stage
    is_settled = stage in FINAL or (stage is not s.Stage.NOTHING and isinstance(THINGS[code], s.Prepare))
    if not is_settled or rules.step("agent", agent, s.Received(THINGS[code])) != rules.step(
        "agent", agent, s.Received(THINGS[ASK])
    ):
        return code
    return -1 if client_is == DEAD and THINGS[agent].is_committed else ASK


def _renewed(w: World, event: Hashable) -> World:
    """Return the world after the agent has extended the lease for a frame. Raises Broken if no owner has sent it."""
    is_client = isinstance(event, s.Received) or (isinstance(event, s.Heard) and event.party is s.Party.CLIENT)
    if is_client == bool(w.row):
        which = "former client after" if w.row else "runner before"
        raise Broken(ONE_OWNER, f"the agent obeys the {which} the commit")
    return w._replace(lease=LEASE) if w.lease else w


def _runner_event(w: World, rules: Rules, event: Hashable) -> World:
    state, actions = rules.step("runner", w.runner, event)
    return w._replace(runner=state, runner_todo=w.runner_todo + actions)


def _ended(w: World, why: str) -> World:
    """Return the world after its machine has ended. What was on it does not matter any more."""
    return w._replace(
        machine=why,
        agent=-1,
        agent_todo=(),
        agent_is=DEAD,
        runner=-1,
        runner_todo=(),
        runner_is=DEAD,
        number=0,
        link=False,
        c2a=(),
        a2r=(),
        r2a=(),
        lease=0,
        alone=0,
        guard="",
        late=False,
        program=s.Program.NONE,
        attempts=0,
        stood_by=False,
        tags="",
    )


def _node_dies(w: World) -> World:
    """The agent has ended, and the keeper has killed everything else. Or the head was rebooted."""
    return w._replace(
        agent=-1,
        agent_todo=(),
        agent_is=DEAD,
        runner=-1,
        runner_todo=(),
        runner_is=DEAD,
        link=False,
        c2a=(),
        a2r=(),
        r2a=(),
        program=s.Program.NONE,
    )


def _end_early(w: World, who: str) -> World:
    if w.row and w.stored < 0:
        raise Broken(NOT_BEFORE, f"{who} ends the machine, and the run on it is committed and not over")
    return _ended(w, f"ended by {who}")


def _perform_client(w: World, rules: Rules, is_fault: bool = False) -> World:
    action = THINGS[w.client_todo[0]]
    w = w._replace(client_todo=w.client_todo[1:])
    match action:
        case s.WriteLedger(entry):
            return _write(w, rules, entry)
        case s.RenewTags():
            if is_fault:
                return _client_event(w, rules, s.TagsFailed())
            w = w._replace(tags="end") if w.machine == UP else w
            return _client_event(w, rules, s.TagsRenewed())
        case s.Send(message):
            if not w.link or w.agent_is == DEAD:
                return w
            return w._replace(c2a=_with(w.c2a, _plain(w.agent, w.client_is, rules, CODES(message))))
        case s.EndMachine():
            if w.machine == TAKEN:
                raise Broken(NOT_BEFORE, "the client ends the machine, and another process has taken it")
            return _end_early(w, "the client") if w.machine == UP else w
        case s.Tell(said):
            return w._replace(said=CODES(said))
    raise AssertionError(action)


def _write(w: World, rules: Rules, entry: s.Entry) -> World:
    old = THINGS[w.entry]
    after = rules.merged(old, entry)
    if list(s.Ledger).index(after.state) < list(s.Ledger).index(old.state):
        raise Broken(AGREE, f"the ledger goes back from {old.state.value} to {after.state.value}")
    return w._replace(entry=CODES(after))


def _is_ignored(w: World, rules: Rules, status: s.Status) -> bool:
    """True if the client ignores a message now and later, so that it need not be on its way any more."""
    state: s.Client = THINGS[w.client]
    phases = LATER.get(state.phase)
    if phases is None:
        return False
    codes = [w.client, *(CODES(replace(state, phase=each)) for each in (phases if w.cancels else ()))]
    return all(rules.step("client", code, _answer(status)) == (code, ()) for code in codes)


def _answer(status: s.Status) -> s.Answered:
    return s.Answered(status, is_late=status.left == LATE_END)


def _with(bag: tuple[int, ...], code: int) -> tuple[int, ...]:
    """Return the messages on their way with another one, if there is room."""
    return bag if code in bag or len(bag) >= ROOM else tuple(sorted((*bag, code)))


def _got(w: World, code: int) -> World:
    """Return the world after a message has arrived, or is lost."""
    if code in w.c2a:
        return w._replace(c2a=tuple(each for each in w.c2a if each != code))
    return w._replace(a2c=tuple(each for each in w.a2c if each != code))


def _slip(w: World) -> World:
    return w._replace(slips=w.slips - 1)


def _perform_agent(w: World, rules: Rules, is_fault: bool = False) -> World:
    action = THINGS[w.agent_todo[0]]
    w = w._replace(agent_todo=w.agent_todo[1:])
    match action:
        case s.GiveEnd(end):
            return w._replace(guard="asked", late=end > END and (w.late or not w.guard))
        case s.StartRunner(number):
            if w.runner_is != DEAD:
                raise Broken(ONE_OWNER, "a second runner is started beside the first one")
            fresh = CODES(s.Runner(RETRIES))
            return w._replace(runner=fresh, runner_todo=(), runner_is=UP, number=number, a2r=(), r2a=())
        case s.KillRunner(number):
            return _runner_dies(w) if number == w.number else w
        case s.TellRunner(number, message):
            if isinstance(message, s.Go) and not w.row:
                raise Broken(ONE_OWNER, "the runner gets the heir before the commit")
            return w._replace(a2r=(*w.a2r, CODES(message))) if number == w.number and w.runner_is != DEAD else w
        case s.WriteRow():
            if is_fault:
                return _agent_event(w, rules, s.RowFailed("the disk is full"))
            if not w.lease and rules.heeds_lease:
                return _agent_event(w, rules, s.RowFailed("the machine is about to end"))
            if not w.lease:
                raise Broken(READY_FIRST, "the row is written, and the guard is about to end the machine")
            if w.guard != "held" or not w.stood_by:
                lacks = "the guard does not hold the end" if w.guard != "held" else "no runner has stood by"
                raise Broken(READY_FIRST, f"the row is written, and {lacks}")
            if w.late:
                raise Broken(READY_FIRST, "the row is written, and the guard holds a later end than the ledger")
            w = w._replace(row="synced" if rules.has_fsync else "cached")
            return _agent_event(w, rules, s.RowWritten())
        case s.Reply(status):
            if status.stage is s.Stage.READY:
                status = replace(status, left=LATE_END if w.late else END)
            if not w.link or w.client_is == DEAD or _is_ignored(w, rules, status):
                return w
            return w._replace(a2c=_with(w.a2c, CODES(status)))
        case s.StartProgram(attempt):
            if w.limit == "told":
                raise Broken(ONE_START, f"attempt {attempt} starts, and budget or lifetime are over")
            return _start_program(w, attempt)
        case s.StopProgram():
            return w._replace(program=s.Program.STOPPED) if w.program is s.Program.RUNNING else w
        case s.StopMachine(outcome):
            if w.stored < 0 and not w.is_full and THINGS[w.agent].endings < s.ENDINGS:
                raise Broken(NOT_BEFORE, "the guard is told to end the machine, and no result is stored")
            return _ended(w, f"the run is over: {outcome.value}")
    raise AssertionError(action)


def _start_program(w: World, attempt: int) -> World:
    if not w.row:
        raise Broken(ONE_OWNER, "the program starts before the commit")
    if w.program is s.Program.RUNNING:
        raise Broken(ONE_START, f"attempt {attempt} starts while attempt {w.attempts} runs")
    if attempt <= w.attempts:
        raise Broken(ONE_START, f"attempt {attempt} starts a second time")
    if attempt > w.attempts + 1 or attempt > 1 + RETRIES:
        raise Broken(ONE_START, f"attempt {attempt} is no counted retry")
    return w._replace(program=s.Program.RUNNING, attempts=attempt)


def _runner_dies(w: World) -> World:
    return w._replace(runner_is=DEAD, runner_todo=(), a2r=())


def _perform_runner(w: World, rules: Rules) -> World:
    action = THINGS[w.runner_todo[0]]
    w = w._replace(runner_todo=w.runner_todo[1:])
    match action:
        case s.Say(message):
            is_ready = isinstance(message, s.StandsBy)
            return w._replace(r2a=(*w.r2a, CODES(message)), stood_by=w.stood_by or is_ready)
        case s.Store(outcome):
            if (outcome is s.Outcome.ENDED) != (w.program is s.Program.ENDED) or w.program is s.Program.RUNNING:
                raise Broken(TRUTH, f"{outcome.value!r} is stored, and the program is {w.program.value}")
            state: s.Runner = THINGS[w.runner]
            if outcome is s.Outcome.CANCELLED and not state.is_cancelled and not state.is_expired:
                raise Broken(TRUTH, "a run was stopped, and its runner does not know why")
            if w.is_full and w.stored < 0:
                return _runner_event(w, rules, s.NotStored(outcome, "the disk is full"))
            stored = w.stored if w.stored >= 0 else CODES(outcome)
            return _runner_event(w._replace(stored=stored), rules, s.Stored(THINGS[stored]))
    raise AssertionError(action)


def _receive(w: World, rules: Rules, message: s.ToAgent) -> World:
    """Let the agent receive a message of the client. If that is the owner, it was heard."""
    if not w.row:
        w = w._replace(alone=0)
    return _agent_event(w, rules, s.Received(message))


def _tick(w: World, rules: Rules) -> World:
    """Let half a lease pass. Owners that live and are connected send frames all the time."""
    client_sends = w.client_is == UP and w.link and THINGS[w.client].acts_as_owner
    runner_sends = w.runner_is in (UP, STUCK) and THINGS[w.runner].acts_as_owner
    works = w.agent_is == UP and (runner_sends and w.runner_is == UP if w.row else client_sends)
    alone = 0 if works else w.alone + 1
    left = w.lease - 1
    w = w._replace(lease=-1, alone=alone)  # until it is extended
    if w.agent_is == UP:
        if client_sends:
            w = _agent_event(w, rules, s.Heard(s.Party.CLIENT))
        if runner_sends:
            w = _agent_event(w, rules, s.Heard(s.Party.RUNNER, w.number, moves=w.runner_is == UP))
        elif w.runner_is == HUNG:
            w = _agent_event(w, rules, s.RunnerSilent(w.number))
        elif w.runner_is == STUCK:
            w = _agent_event(w, rules, s.Heard(s.Party.RUNNER, w.number, moves=False))
            w = _agent_event(w, rules, s.RunnerLate(w.number))
    if w.lease < 0:
        w = w._replace(lease=left)
    if works and w.lease < LEASE:
        raise Broken(NOT_BEFORE, "the owner works and is heard, and the lease is not extended")
    if alone > LEASE:
        raise Broken(NOT_ALONE, f"{alone} ticks without its owner, and the lease of {LEASE} is not over")
    return w


def _look(w: World, rules: Rules) -> int:
    """Return the code of the entry that another command writes after it has looked at the machine; -1 for none."""
    entry: s.Entry = THINGS[w.entry]
    if w.machine != UP:
        found = steps.seen_ended(entry, THINGS[w.stored] if w.stored >= 0 else None)
    elif entry.state is s.Ledger.LIVE:
        return -1
    elif w.agent_is == UP:
        _, actions = rules.step("agent", w.agent, s.Received(s.Ask(CLAIM), from_owner=False))
        if RENEW in actions:
            raise Broken(NOT_ALONE, "a question of another command extends the lease")
        found = steps.seen(entry, THINGS[w.agent].is_committed)
    elif w.agent_is == DEAD:
        found = steps.seen_cut_off(entry, bool(w.row), THINGS[w.stored] if w.stored >= 0 else None)
    else:
        return -1
    return -1 if found == entry else CODES(found)


# --- all that may happen next --------------------------------------------------------------------------------


def moves(w: World, rules: Rules) -> Iterator[Move]:
    """Yield all that may happen next. Raises Broken if a promise is broken then.

    A process performs its actions one after the other, before anything else happens, unless it dies or hangs between
    two of them.
    """
    if w.client_todo and w.client_is == UP:
        yield from _client_acts(w, rules)
        return
    if w.agent_todo and w.agent_is == UP:
        yield from _agent_acts(w, rules)
        return
    if w.runner_todo and w.runner_is == UP:
        yield from _runner_acts(w, rules)
        return
    yield from _client_moves(w, rules)
    if w.machine == UP:
        yield from _agent_moves(w, rules)
        yield from _runner_moves(w, rules)
        yield from _machine_moves(w, rules)
    if w.looker >= 0:
        after = _write(w._replace(looker=-1), rules, THINGS[w.looker])
        yield "step", ("another command writes the ledger", THINGS[w.looker]), after
    elif (found := _look(w, rules)) >= 0:
        yield "step", ("another command looks in, and writes", THINGS[found]), _write(w, rules, THINGS[found])
        if w.slips:
            slow = _slip(w)._replace(looker=found)
            yield "fault", ("another command looks in, and will write later", THINGS[found]), slow


def _client_acts(w: World, rules: Rules) -> Iterator[Move]:
    action = THINGS[w.client_todo[0]]
    yield "step", ("client", action), _perform_client(w, rules)
    if w.faults:
        yield from _client_faults(w)
        if isinstance(action, s.RenewTags):
            yield "fault", ("the provider refuses", action), _perform_client(_spend(w), rules, is_fault=True)


def _client_dies(w: World) -> World:
    """What it has sent may still arrive. Nothing follows from a question any more."""
    if ASK in w.c2a and w.agent >= 0 and THINGS[w.agent].is_committed:
        w = _got(w, ASK)
    return w._replace(client=-1, client_todo=(), client_is=DEAD, link=False, a2c=())


def _client_faults(w: World) -> Iterator[Move]:
    yield "fault", ("the client dies", None), _client_dies(_spend(w))
    yield "fault", ("the client hangs", None), _spend(w)._replace(client_is=HUNG)


def _agent_acts(w: World, rules: Rules) -> Iterator[Move]:
    action = THINGS[w.agent_todo[0]]
    yield "step", ("agent", action), _perform_agent(w, rules)
    if w.faults:
        yield from _agent_faults(w)
        if isinstance(action, s.WriteRow):
            yield "fault", ("the disk refuses", action), _perform_agent(_spend(w), rules, is_fault=True)


def _agent_faults(w: World) -> Iterator[Move]:
    yield "fault", ("the agent dies, and all processes of the node", None), _node_dies(_spend(w))
    if w.row == "cached":
        yield "fault", ("the head reboots", None), _node_dies(_spend(w))._replace(row="")
    if w.agent_is == UP:
        yield "fault", ("the agent hangs", None), _spend(w)._replace(agent_is=HUNG)


def _runner_acts(w: World, rules: Rules) -> Iterator[Move]:
    action = THINGS[w.runner_todo[0]]
    yield "step", ("runner", action), _perform_runner(w, rules)
    if w.faults and isinstance(action, s.Store):
        yield "fault", ("the disk is full", None), _perform_runner(_spend(w)._replace(is_full=True), rules)
    if w.slips and isinstance(action, s.Say) and isinstance(action.message, s.Stops):
        unsent = tuple(code for code in w.r2a if not isinstance(THINGS[code], s.Starts))
        if unsent != w.r2a:
            after = _perform_runner(_slip(w)._replace(r2a=unsent), rules)
            yield "fault", ("the runner stops what it has not sent", None), after
    if w.faults:
        yield from _runner_faults(w)


def _runner_faults(w: World) -> Iterator[Move]:
    yield "fault", ("the runner dies", None), _runner_dies(_spend(w))
    if w.runner_is == UP:
        yield "fault", ("the runner hangs", None), _spend(w)._replace(runner_is=HUNG)
        if THINGS[w.runner].acts_as_owner or THINGS[w.runner].phase is s.RunnerPhase.TAKING:
            yield "fault", ("the dispatch of the runner stands still", None), _spend(w)._replace(runner_is=STUCK)


def _client_moves(w: World, rules: Rules) -> Iterator[Move]:
    if w.client_is == HUNG:
        yield "wake", ("the client goes on", None), w._replace(client_is=UP)
    if w.client_is != UP:
        return
    state: s.Client = THINGS[w.client]
    if state.phase is s.ClientPhase.OWNER:
        yield "step", ("the client begins", None), _client_event(w, rules, s.Begin())
    for code in w.a2c:
        status = THINGS[code]
        yield "step", ("the client hears", status), _client_event(_got(w, code), rules, _answer(status))
        if w.slips:
            after = _client_event(_slip(w), rules, _answer(status))
            yield "fault", ("the client hears for the first of two times", status), after
    if state.phase is not s.ClientPhase.OVER:
        yield from _client_waits(w, rules)
        if w.cancels:
            after = _client_event(w._replace(cancels=w.cancels - 1), rules, s.Interrupt())
            yield "step" if rules.runs_on else "fault", ("the user presses Ctrl-C", None), after
    if state.phase in (s.ClientPhase.WATCHING, s.ClientPhase.OVER):
        yield "step", ("the client leaves", None), _client_dies(w)
    elif w.faults:
        yield from _client_faults(w)
        if state.phase in (s.ClientPhase.MARKING, s.ClientPhase.PREPARING):
            taken = _ended(_spend(w), TAKEN)
            yield (
                "fault",
                ("another process takes the pool", None),
                _client_event(taken, rules, s.PoolOver(is_taken=True)),
            )
        if state.acts_as_owner:
            yield "fault", ("the client's pool ends", None), _client_event(_spend(w), rules, s.PoolOver())


def _client_waits(w: World, rules: Rules) -> Iterator[Move]:
    """Yield what a client may find that waits for an answer."""
    stored = THINGS[w.stored] if w.stored >= 0 else None
    if w.machine != UP:
        yield "step", ("the client finds no machine", stored), _client_event(w, rules, s.MachineGone(stored))
    elif w.agent_is == DEAD:
        gone = s.AgentGone(bool(w.row), stored)
        yield "step", ("the client finds no agent", gone), _client_event(w, rules, gone)
    elif not w.link:
        if w.agent_is == UP:
            after = _client_event(w._replace(link=True), rules, s.Connected())
            yield "step", ("the client connects again", None), after
    elif not w.c2a and not w.a2c:
        after = _client_event(w, rules, s.Overdue())
        if after != w:
            yield "step", ("the client waits too long", None), after
    elif w.slips:
        after = _client_event(_slip(w), rules, s.Overdue())
        yield "fault", ("the client does not wait any longer", None), after


def _spend(w: World) -> World:
    return w._replace(faults=w.faults - 1)


def _agent_moves(w: World, rules: Rules) -> Iterator[Move]:
    if w.agent_is == HUNG:
        yield "wake", ("the agent goes on", None), w._replace(agent_is=UP)
    if w.faults and w.agent_is != DEAD:
        yield from _agent_faults(w)
    if w.agent_is != UP:
        return
    for code in w.c2a:
        message = THINGS[code]
        yield "step", ("the agent receives", message), _receive(_got(w, code), rules, message)
        if w.slips:
            after = _receive(_slip(w), rules, message)
            yield "fault", ("the agent receives for the first of two times", message), after
            if isinstance(message, s.Prepare | s.EndSooner):
                after = _receive(_slip(_got(w, code)), rules, replace(message, end=LATE_END))
                yield "fault", ("the agent receives late", message), after
    state: s.Agent = THINGS[w.agent]
    if w.guard == "held" and state.stage is s.Stage.PREPARING and not state.is_end_held:
        yield "step", ("the agent hears that the guard holds the end", None), _agent_event(w, rules, s.EndHeld())
    if w.guard == "asked" and w.faults and state.stage is s.Stage.PREPARING:
        yield "fault", ("the guard refuses the end", None), _agent_event(_spend(w), rules, s.EndRefused())
    if w.r2a:
        said = s.RunnerSaid(w.number, THINGS[w.r2a[0]])
        yield "step", ("the agent hears from the runner", said.message), _said(w._replace(r2a=w.r2a[1:]), rules, said)
    elif w.runner_is == DEAD and state.runner == w.number > 0 and w.runner >= 0:
        after = _agent_event(w._replace(runner=-1), rules, s.RunnerEnded(w.number))
        yield "step", ("the agent sees that the runner has ended", None), after
    if state.program is s.Program.RUNNING and w.program is not s.Program.RUNNING:
        after = _agent_event(w, rules, s.ProgramEnded(w.attempts, w.program))
        yield "step", ("the agent sees that the program has ended", w.program), after
    if w.cancels and state.is_committed and w.client_is != UP:
        after = _agent_event(w._replace(cancels=w.cancels - 1), rules, s.Received(s.CancelRun(CLAIM), False))
        yield "step" if rules.runs_on else "fault", ("another command cancels the run", None), after


def _said(w: World, rules: Rules, said: s.RunnerSaid) -> World:
    """Let the agent hear a message of the runner. If that takes the machine, it is the owner from then on."""
    w = _agent_event(w, rules, said)
    if isinstance(said.message, s.Expires):
        w = w._replace(limit="told")
    return w._replace(alone=0) if isinstance(said.message, s.Takes) and THINGS[w.agent].is_taken else w


def _runner_moves(w: World, rules: Rules) -> Iterator[Move]:
    if w.runner_is in (HUNG, STUCK):
        yield "wake", ("the runner goes on", None), w._replace(runner_is=UP)
    if w.faults and w.runner_is != DEAD:
        yield from _runner_faults(w)
    if w.runner_is != UP:
        return
    state: s.Runner = THINGS[w.runner]
    if state.phase is s.RunnerPhase.STARTING:
        yield "step", ("the runner has all that it needs", None), _runner_event(w, rules, s.GotNeeds())
    if w.limit == "ahead" and w.row:
        yield "step" if rules.runs_on else "fault", ("the limit comes", None), w._replace(limit="come")
    if _has_expired(w):
        yield "step", ("the runner sees that the limit has come", None), _runner_event(w, rules, s.Expired())
    if w.a2r:
        said = s.AgentSaid(THINGS[w.a2r[0]])
        after = _runner_event(w._replace(a2r=w.a2r[1:]), rules, said)
        yield "step", ("the runner hears", said.message), after


def _has_expired(w: World) -> bool:
    """True if the runner sees that the limit has come, of which it does not know yet."""
    state: s.Runner = THINGS[w.runner]
    is_new = state.phase is s.RunnerPhase.OWNER and not state.is_expired and not state.is_cancelled
    return is_new and w.limit in ("come", "told")


def _machine_moves(w: World, rules: Rules) -> Iterator[Move]:
    """Yield what the network, the guard, the program and other computers do."""
    if w.slips:
        for code in (*w.c2a, *w.a2c):
            yield "fault", ("a message is lost", THINGS[code]), _slip(_got(w, code))
    if w.faults and w.link and w.client_is != DEAD:
        yield "fault", ("the connection breaks", None), _spend(w)._replace(link=False, c2a=(), a2c=())
        if w.c2a:
            late = _spend(w)._replace(link=False, a2c=())
            yield "fault", ("the connection breaks, and what was sent to the agent arrives later", None), late
    if w.guard == "asked":
        yield "step", ("the guard takes the end", None), w._replace(guard="held")
    if w.program is s.Program.RUNNING:
        if not rules.runs_on:
            yield "step", ("the program ends", None), w._replace(program=s.Program.ENDED)
        if w.faults:
            yield "fault", ("the program is killed", None), _spend(w)._replace(program=s.Program.LOST)
    if w.lease == 0:
        if rules.must_complete and w.row:
            raise Broken(COMPLETES, "the lease ends a machine, and its run is not over")
        yield "step", ("the guard ends the machine, as its lease is over", None), _ended(w, "its lease was over")
    elif not _is_busy(w):
        yield "step", ("half a lease passes", None), _tick(w, rules)
    if w.faults and w.row and w.guard == "held":
        yield "fault", ("the written end comes", None), _ended(_spend(w), "its written end has come")
    renews = w.client_is == UP and THINGS[w.client].acts_as_owner
    if w.tags == "short" and not renews:
        yield "step", ("gc of another computer finds old tags", None), _end_early(w, "gc")


def _is_busy(w: World) -> bool:
    """True if a process that runs has something to do on its own machine, which takes much less than half a lease."""
    if w.runner_is == UP and (w.a2r or THINGS[w.runner].phase is s.RunnerPhase.STARTING or _has_expired(w)):
        return True
    if w.agent_is != UP:
        return False
    state: s.Agent = THINGS[w.agent]
    is_untold = state.runner == w.number > 0 and w.runner >= 0 and w.runner_is == DEAD
    is_end_untold = bool(w.guard) and state.stage is s.Stage.PREPARING and not state.is_end_held
    is_over_untold = state.program is s.Program.RUNNING and w.program is not s.Program.RUNNING
    return bool(w.r2a) or is_untold or is_end_untold or is_over_untold


# --- the promises --------------------------------------------------------------------------------------------


def check(w: World) -> None:
    """Raise Broken if a world breaks a promise."""
    entry: s.Entry = THINGS[w.entry]
    if w.said >= 0 and w.machine != TAKEN:  # another process writes the ledger then
        said = THINGS[w.said]
        if said is s.Said.NOT_STARTED and w.row:
            raise Broken(TRUTH, "it says that nothing was started, and there is a commit")
        if said in (s.Said.DETACHED, s.Said.INTERRUPTED) and not w.row:
            raise Broken(TRUTH, f"it says {said.value!r}, and there is no commit")
        is_left = said in (s.Said.DETACHED, s.Said.INTERRUPTED)
        if entry.state not in ((s.Ledger.DETACHED, s.Ledger.ENDED) if is_left else (s.Ledger.ENDED,)):
            raise Broken(AGREE, f"the client says {said.value!r}, and the ledger {entry.state.value!r}")
    elif (
        w.said < 0
        and w.client_is == UP
        and not w.client_todo
        and THINGS[w.client].phase in (s.ClientPhase.WATCHING, s.ClientPhase.OVER)
    ):
        raise Broken(TRUTH, "it ends without a word")
    if entry.state is s.Ledger.DETACHED and not w.row:
        raise Broken(AGREE, "the ledger says that the run is detached, and there is no commit")
    if entry.outcome is s.Outcome.NOT_STARTED and w.row:
        raise Broken(AGREE, "the ledger says that the run was not started, and there is a commit")
    if entry.state is s.Ledger.ENDED and w.machine == UP:
        raise Broken(AGREE, "the ledger says that the machine has ended, and it runs")


def is_over(w: World) -> bool:
    """True if the machine has ended, the ledger says so, and a client that lives has said how it is."""
    if w.machine == UP or THINGS[w.entry].state is not s.Ledger.ENDED:
        return False
    is_done = w.client_is == DEAD or (THINGS[w.client].phase is s.ClientPhase.OVER and not w.client_todo)
    return is_done or w.client_is == HUNG


def check_end(w: World) -> None:
    """Raise Broken if the ledger does not say in the end how it was."""
    outcome = THINGS[w.entry].outcome
    if w.stored >= 0:
        right = {THINGS[w.stored]}
    elif w.row:
        right = {s.Outcome.LOST, s.Outcome.INTERRUPTED}
    else:
        right = {s.Outcome.LOST, s.Outcome.NOT_STARTED}
    if outcome not in right:
        said = None if outcome is None else outcome.value
        raise Broken(AGREE, f"in the end the ledger says {said!r}, not {' or '.join(each.value for each in right)}")


def planted(rules: Rules, **changes: Any) -> Rules:
    """Return rules of which some are changed."""
    return replace(rules, memo={}, **changes)
