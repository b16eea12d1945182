"""`GangRunner`: runs calls as gangs. `GangFuture` is the future of such a call.

The processes of a gang start together. When one fails, the others are stopped, and the gang may run again as a whole.
The number of a process in its gang is its rank. `skypool.gangs` decides what happens; this module does it.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar, cast

from skypool.calls.arguments import payload_of
from skypool.calls.call import ComputeFunction
from skypool.calls.callbacks import Callbacks
from skypool.calls.effects import Effects
from skypool.calls.futures import CallFuture, JoinedFuture, Returned, results_of
from skypool.calls.gang_steps import StepAgreements
from skypool.calls.node_queue import NodeQueue
from skypool.calls.options import Options
from skypool.calls.pending_calls import NO_CALL, Code, Packed, PendingCall, UserCall
from skypool.calls.placement import Placement
from skypool.calls.roster import Roster
from skypool.calls.tally import CallTally, Parts, text_of_error
from skypool.errors import (
    CallTimeout,
    ConnectionLost,
    NodeInterrupted,
    SkypoolError,
    WorkerDied,
)
from skypool.gangs import step
from skypool.gangs.environment import Member
from skypool.gangs.ports import free_ports, ports_of
from skypool.gangs.states import (
    SETTLING,
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
    Gangs,
    Hold,
    How,
    NodeGone,
    NodeIdle,
    NodeLeaving,
    NodeUp,
    Order,
    Place,
    Run,
    Set,
    Start,
    Stop,
    Timer,
    Unset,
    Verdict,
)
from skypool.wire.error_text import annotate, notes_of, text_of
from skypool.wire.exceptions import STOPPED_IN
from skypool.wire.frames import Buffer

T = TypeVar("T")

_PORTS = 2
"""The number of free ports of the first node that a gang gets: one for torch, one for JAX."""
_TAIL = 2000
"""The number of characters of a rank's output that are kept, to show them if the rank fails."""
_MOST_HIDDEN = 10_000
"""The most ids of ended ranks that are remembered, to hide output of them that arrives after their end."""
_MOST_STACKS = 8
"""The number of different stacks that an error about a timeout shows."""
_TAIL_LINES = 10
"""The number of lines of a rank's output that an error shows."""
_ASK_AGAIN = 1.0
"""Seconds until a node that did not answer the empty call may be asked again."""
_LONGEST_NOTICE = 600.0
"""The most seconds for which a machine goes on after a notice, whatever its node says."""
_PROBE_TIMEOUT = 60.0
"""The longest time in seconds that a node may take for the empty call before a run."""


class GangFuture(JoinedFuture[T]):
    """The future of a call that runs as a gang.

    If `every` is True, its result is the list of values by rank, as for `call @ pool`. Otherwise, it is the value of
    rank 0, as for `call >> pool`. The attribute `parts` has the futures of the ranks of the present run, by rank.
    """

    def __init__(self, name: str, every: bool, callbacks: Callbacks) -> None:
        super().__init__(name, callbacks=callbacks)
        self._every = every

    wait_stopped = CallFuture.wait_stopped  # not when the ranks of one run have stopped, as the gang may run again

    def _joined(self) -> T:
        return cast(T, results_of(self.parts) if self._every else self.parts[0].result())


@dataclass(frozen=True, slots=True)
class GangFailure:
    """The failure of one run of a gang.

    Attributes:
        call: the name of the function.
        error: the error of the rank that failed first.
        others: the errors of other ranks that came before the gang was stopped.
        rank, node: the rank that failed first, and the number of its node.
        attempt: the number of the run, from 1.
        again: True if the gang runs again.
    """

    call: str
    error: BaseException
    others: Sequence[BaseException]
    rank: int
    node: int
    attempt: int
    again: bool


@dataclass(slots=True, eq=False)
class _Call:
    """A call that runs as a gang, from its submission to its end.

    Attributes:
        code, payload, options: the function, its pickled arguments, and the options of the call.
        order: the nodes, processes and retries that the user has asked for.
        timers: the running timers of the gang, by what they are for.
        pending: the calls of the present run, one for each rank.
        ends: the value or error of each rank that has ended, by rank.
        texts: the text of each of these errors, for records and notes.
        tails: the last characters that each rank has printed, by rank.
        ports: the free ports of each node that has answered before this run.
        asked: the future of the latest empty call to each node, which asks if the node can run the gang.
        note: the note that was added to the error of the last failure.
        whole: the call as it is counted for the user; `NO_CALL` for a check of skypool's own, which does not count.
        began: when the present run began, by `time.monotonic()`.
        notices: the times at which providers take machines of the present run back, by node, in seconds since 1970.
    """

    code: Code
    payload: Sequence[Buffer]
    options: Options
    future: GangFuture[Any]
    order: Order
    pending: list[PendingCall] = field(default_factory=list)
    ends: dict[int, BaseException | Returned] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    tails: dict[int, str] = field(default_factory=dict)
    ports: dict[int, list[int]] = field(default_factory=dict)
    asked: dict[int, CallFuture[list[int]]] = field(default_factory=dict)
    timers: dict[Timer, threading.Timer] = field(default_factory=dict)
    note: str = ""
    whole: UserCall | None = None
    began: float = 0.0
    notices: dict[int, float] = field(default_factory=dict)

    @property
    def rank_options(self) -> Options:
        """The options with which the call of a single rank is sent: without retries, as the gang itself is retried."""
        return self.options.but({"retries": 0, "retry_on": (), "node": None})


_PROBE = ComputeFunction[[int], list[int]](free_ports, Options())
"""The empty call that a node answers before each run of a gang."""


class Sender(Protocol):
    """A protocol for the `Dispatch` that owns a `GangRunner`: the members that the runner uses."""

    node_queues: dict[int, NodeQueue]
    roster: Roster
    placement: Placement
    parts: Parts
    ids: Iterator[int]
    callbacks: Callbacks
    tally: CallTally
    effects: Effects

    def act(self) -> None:
        """Perform the waiting effects, unless the calling thread holds the lock."""
        ...

    def stop(self, pending: PendingCall) -> None:
        """Stop a call that is running."""
        ...


class GangRunner:
    """The gangs of one pool. It performs the actions of the state machine `skypool.gangs`, and reports events to it.

    The methods take the lock of the dispatch where they need it, and may be called while it is held.

    Args:
        sender: the dispatch. This object shares its lock and its effects.
        wait: seconds for which a gang that runs again waits for nodes in place of lost ones.
        on_failed: called with each failure of a run, with the lock held.
        notice: called with a sentence for the user, with the lock held.

    Attributes:
        agreements: lets ranks hear of a notice at one step.
    """

    def __init__(
        self,
        pool: str,
        sender: Sender,
        wait: float,
        on_failed: Callable[[GangFailure], None],
        notice: Callable[[str], None],
    ) -> None:
        self._pool = pool
        self._sender = sender
        self._lock = sender.roster.lock
        self._effects = sender.effects
        self._wait = wait
        self._on_failed = on_failed
        self._notice = notice
        self._state = Gangs()
        self._calls: dict[int, _Call] = {}
        self._ranks: dict[int, tuple[_Call, int]] = {}
        self.agreements = StepAgreements(self._lock, self._ranks, lambda: sender.node_queues, self._after, notice)
        self._hidden: dict[int, None] = {}  # ids of calls whose output is not shown, the latest last
        self._numbers = itertools.count(1)
        self._name = f"{pool}-{secrets.token_hex(3)}"  # another client of this pool counts from 1, too
        self._events: deque[Event] = deque()
        self._is_stepping = False

    @property
    def unfinished(self) -> int:
        """The number of gangs that wait or run."""
        return len(self._calls)

    @property
    def present(self) -> tuple[int, int]:
        """The number of gangs of the user that run, and of those that wait for their nodes."""
        gangs = [each for number, each in self._state.gangs.items() if self._calls[number].whole is not NO_CALL]
        waiting = sum(gang.phase in ("waiting", "asking") for gang in gangs)
        return len(gangs) - waiting, waiting

    @property
    def lacks_nodes(self) -> bool:
        """True if a gang waits that needs more nodes than the pool has."""
        usable = sum(not node.leaving for node in self._state.nodes.values())
        return any(gang.phase == "waiting" and gang.order.count > usable for gang in self._state.gangs.values())

    # --- calls in --------------------------------------------------------------------------------------------

    def submit(
        self,
        call: Packed[Any],
        count: int,
        among: frozenset[int] | None,
        every: bool,
        is_own: bool = False,
    ) -> GangFuture[Any]:
        """Submit a gang, and return its future at once. Raises PoolClosed if the pool has ended.

        Args:
            count: the number of nodes that the gang runs on, if the option `min_nodes` does not permit fewer.
            among: the only nodes that may run the gang; None for any.
            every: True if the result is the list of the values of all ranks, False for the value of rank 0.
            is_own: True for a check of skypool's own, which does not count as a call of the user.
        """
        code, options = call.code, call.options
        with self._lock:
            if self._sender.roster.closed is not None:
                raise self._sender.roster.too_late(code.name)
            number = next(self._numbers)
            future: GangFuture[Any] = GangFuture(code.name, every, self._sender.callbacks)
            order = Order(
                number,
                count,
                least=min(count, options.min_nodes or count),
                procs=options.procs if isinstance(options.procs, int) else None,
                among=among,
                retries=options.retries,
                grace=options.grace,
                wait=self._wait,
            )
            whole = NO_CALL if is_own else UserCall(code.name, 0)
            self._calls[number] = _Call(code, call.payload, options, future, order, whole=whole)
            future.on_cancel(partial(self._apply, Cancelled(number)))
            self._apply(Asked(order))
            self._tell_of_former(number)
        self._sender.act()
        return future

    def _tell_of_former(self, number: int) -> None:
        """Tell the user if the gang with this number waits for calls of a former client, not of this program."""
        gang = self._state.gangs.get(number)
        if gang is None or gang.phase != "waiting" or self._calls[number].whole is NO_CALL:
            return
        held = [node for node, each in self._state.nodes.items() if each.gang == number]
        if words := self._sender.roster.occupants(held, former=True):
            self._notice(f"{self._calls[number].code.name} waits for other calls to end: {words}")

    # --- what happens to nodes -------------------------------------------------------------------------------

    def node_up(self, node: int, devices: int) -> None:
        """Note that a node can run gangs. `devices` is the number of its devices (accelerators)."""
        self._apply(NodeUp(node, devices))

    def node_leaving(self, node: int) -> None:
        """Note that a node gets no new calls, because it was retired, is unhealthy, or its machine is taken back."""
        self._apply(NodeLeaving(node))

    def node_gone(self, node: int) -> None:
        """Note that a node is lost or was ended. Call this only after the calls that ran there got their errors."""
        self._apply(NodeGone(node))

    def node_changed(self, node: int) -> None:
        """Note that calls of a node have ended, or that its connection broke or is back. Fast if no gang waits."""
        known = self._state.nodes.get(node)
        is_changed = known is not None and self._is_idle(node) != known.idle
        if is_changed and any(gang.phase in ("waiting", "asking") for gang in self._state.gangs.values()):
            self._apply()

    def coming(self, count: int) -> None:
        """Note the number of nodes that are being rented or set up. Gangs that need more nodes wait for them."""
        with self._lock:
            if count != self._state.coming:
                self._apply(Coming(count))

    def interrupted(self, node: int, at: float) -> None:
        """Tell the ranks on other nodes that the machine of this node is taken back. Ranks on the node know it already.

        `at` is when the provider takes the machine, in seconds since 1970.
        """
        with self._lock:
            for call in self._calls.values():
                if any(pending.at == node for pending in call.pending):
                    call.notices.setdefault(node, at)
                    for other in {pending.at for pending in call.pending} - {node}:
                        self._notify(call, other)

    def resumed(self, node: int) -> None:
        """Tell the ranks on a reconnected node again if a machine of their gang is taken back: they may not know."""
        with self._lock:
            for call in self._calls.values():
                self._notify(call, node)
            self.node_changed(node)

    def _notify(self, call: _Call, node: int) -> None:
        """If the machine of another node of a gang is taken back, tell the ranks of that gang on this node."""
        at = min((at for other, at in call.notices.items() if other != node), default=None)
        ids = [pending.id for pending in call.pending if pending.at == node and not pending.ended]
        if at is not None and ids and node in self._sender.node_queues:
            self._sender.node_queues[node].notice(ids, at)

    def heard(self, id_: int, text: str) -> bool:
        """Keep the end of what a rank prints, for its error. Return True if the text is to be shown to the user.

        `id_` is the id of the rank's call. With `output="rank0"`, only the text of rank 0 is shown. The text of a call
        that belongs to no gang is always shown, and not kept.
        """
        found = self._ranks.get(id_)
        if found is not None:
            call, rank = found
            call.tails[rank] = (call.tails.get(rank, "") + text)[-_TAIL:]
        return id_ not in self._hidden

    def close(self, error: BaseException) -> None:
        """End all gangs with `error`, because the pool has ended. Nothing is sent to nodes."""
        with self._lock:
            calls = list(self._calls.values())
            self._calls.clear()
            self._ranks.clear()
            self._state = Gangs()
            self._events.clear()
            for call in calls:
                if call.whole is not NO_CALL:
                    self._sender.tally.gang_closed()
        for call in calls:
            self._forget_timers(call)
            self._effects.ends.append(partial(call.future.finish, error))

    # --- the state machine -----------------------------------------------------------------------------------

    def _apply(self, *events: Event) -> None:
        """Pass events to the state machine, and perform its actions. Events that come meanwhile are handled later."""
        with self._lock:
            self._events.extend(events)
            if self._is_stepping:
                return
            self._is_stepping = True
            try:
                # before each event, the state machine learns which nodes have become idle or busy
                while (changed := self._changed_node()) or self._events:
                    self._step(NodeIdle(*changed) if changed else self._events.popleft())
            finally:
                self._is_stepping = False
        self._sender.act()

    def _step(self, event: Event) -> None:
        self._state, actions = step(self._state, event)
        for action in actions:
            self._perform(action)

    def _changed_node(self) -> tuple[int, bool] | None:
        """Return (node, is_idle) of a node that became idle or busy since the last event; None if there is none."""
        for number, node in self._state.nodes.items():
            idle = self._is_idle(number)
            if idle != node.idle:
                return number, idle
        return None

    def _is_idle(self, node: int) -> bool:
        """Return True if a node is connected and has no call under way on the slots that gangs use (its first lane)."""
        node_queue = self._sender.node_queues.get(node)
        return node_queue is not None and node_queue.is_reachable and not node_queue.lanes[0].underway

    def _perform(self, action: Action) -> None:
        match action:
            case Hold(node, gang):
                self._hold(node, gang)
            case Free(node):
                self._free(node)
            case Ask(gang, attempt, nodes):
                for node in nodes:
                    self._ask(gang, attempt, node)
            case Start(gang, run):
                self._start(gang, run)
            case Stop(gang, ranks):
                call = self._calls[gang]
                for rank in ranks:
                    self._sender.stop(call.pending[rank])
            case Set(gang, timer, seconds):
                self._set_timer(gang, timer, seconds)
            case Unset(gang, timer):
                running = self._calls[gang].timers.pop(timer, None)
                if running is not None:
                    running.cancel()
            case Again(gang, failure):
                self._sender.tally.retried()
                self._tell_failure(self._calls[gang], failure, again=True)
            case Finish(gang, verdict):
                self._finish(gang, verdict)

    def _hold(self, node: int, gang: int) -> None:
        node_queue = self._sender.node_queues.get(node)
        if node_queue is not None:
            lane = node_queue.lanes[0]
            lane.held = gang
            if lane.underway:
                node_queue.recall(lane, len(lane.underway))

    def _free(self, node: int) -> None:
        node_queue = self._sender.node_queues.get(node)
        if node_queue is not None:
            node_queue.lanes[0].held = None
            self._sender.placement.fill(node_queue)

    def _ask(self, gang: int, attempt: int, node: int) -> None:
        """Send a node an empty call. The node's answer becomes an event, and so does a failure of the call."""
        node_queue = self._sender.node_queues.get(node)
        if node_queue is None or not node_queue.is_up:
            self._events.append(Answered(gang, attempt, node, ok=False))
            return
        answer: CallFuture[list[int]] = CallFuture(_PROBE.name)
        self._calls[gang].asked[node] = answer
        answer.add_done_callback(partial(self._on_answer, gang, attempt, node))
        payload, _ = payload_of(_PROBE, (_PORTS,), {})
        options = Options(timeout=_PROBE_TIMEOUT, output="silent")
        pending = PendingCall(_PROBE.code(), payload, answer, options, node=node, gang=gang, part_of=NO_CALL)
        pending.id = next(self._sender.ids)
        self._sender.parts.add(pending)
        node_queue.send([pending])

    def _on_answer(self, gang: int, attempt: int, node: int, answer: Future[list[int]]) -> None:
        try:
            ports = ports_of(answer.result(), _PORTS)
        except Exception:  # noqa: BLE001 - a node that fails here is lost soon, or is asked again
            ports = None
        with self._lock:
            call = self._calls.get(gang)
            if call is None or call.asked.get(node) is not answer:
                return
            if ports is None:
                self._apply(Answered(gang, attempt, node, ok=False))
                self._after(_ASK_AGAIN, partial(self._ask_again, node))
            else:
                call.ports[node] = ports
                self._apply(Answered(gang, attempt, node))

    def _ask_again(self, node: int) -> None:
        """Allow gangs to use a node that failed to answer before, if it is idle now."""
        with self._lock:
            node_queue = self._sender.node_queues.get(node)
            if node_queue is not None and node_queue.is_reachable and not node_queue.lanes[0].underway:
                self._apply(NodeIdle(node, True))

    def _start(self, gang: int, run: Run) -> None:
        call = self._calls[gang]
        self._forget_ranks(call)
        call.ends.clear()
        call.texts.clear()
        call.tails.clear()
        call.notices.clear()
        call.began = time.monotonic()
        queues = self._sender.node_queues
        hosts = [(queues[node].host, queues[node].address) if node in queues else ("", "") for node in run.nodes]
        addresses = [address for _, address in hosts]
        master = addresses[0] or ("127.0.0.1" if len(addresses) == 1 else "")
        port, jax_port = call.ports.get(run.nodes[0], [0] * _PORTS)
        local_sizes: dict[int, int] = {}
        for place in run.places:
            local_sizes[place.node] = local_sizes.get(place.node, 0) + 1
        outlets: list[CallFuture[Any]] = []
        call.pending = []
        options = call.rank_options
        for place in run.places:
            on_end = partial(self._on_end, gang, run.attempt, place.rank, call.options)
            outlet: CallFuture[Any] = CallFuture(call.code.name, on_end, self._sender.callbacks)
            member = Member(
                rank=place.rank,
                size=len(run.places),
                local=place.local,
                of=local_sizes[place.node],
                attempt=run.attempt,
                position=place.position,
                nodes=len(run.nodes),
                changed=run.changed,
                gang=f"{self._name}-{gang}",
                master=master,
                port=port,
                jax_port=jax_port,
                hosts=tuple(hosts) if len(hosts) > 1 else (),
            )
            world = (place.position, addresses)
            pending = PendingCall(
                call.code,
                call.payload,
                outlet,
                options,
                place.node,
                world,
                gang=gang,
                member=member,
                part_of=call.whole,
            )
            pending.id = next(self._sender.ids)
            self._sender.parts.add(pending)
            self._ranks[pending.id] = (call, place.rank)
            if call.options.output == "rank0" and place.rank:
                self._hidden[pending.id] = None
            outlets.append(outlet)
            call.pending.append(pending)
        for old in list(self._hidden)[:-_MOST_HIDDEN]:
            del self._hidden[old]
        call.future.parts = outlets
        if run.changed:
            self._notice(
                f"{call.code.name} runs again as {len(run.places)} processes on {_nodes(len(run.nodes))}: its world "
                "has another size than before"
            )
        for node in run.nodes:
            mine = [pending for pending in call.pending if pending.node == node]
            if node in queues:
                queues[node].send(mine)
            else:
                for pending in mine:
                    pending.finish(ConnectionLost(f"{pending.name} was lost with node {node}", node))

    def _on_end(self, gang: int, attempt: int, rank: int, options: Options, end: BaseException | Returned) -> None:
        call = self._calls.get(gang)
        if call is None:
            return
        text = text_of_error(end) if isinstance(end, BaseException) else ""
        # an error of a lost or stopped rank may come with the lock held, and `retry_on` may run code of the user
        own = isinstance(end, ConnectionLost) or any(each.stopped for each in call.pending[rank : rank + 1])
        again = not own and bool(options.retry_on) and isinstance(end, options.retry_on)
        with self._lock:
            call = self._calls.get(gang)
            if call is None or rank >= len(call.pending):
                return
            pending = call.pending[rank]
            if pending.member is None or pending.member.attempt != attempt:
                return
            call.ends[rank] = end
            call.texts[rank] = text
            has_timeout = options.timeout is not None
            self._apply(Ended(gang, attempt, rank, _how(end, pending.stopped, has_timeout), again, seconds_left(end)))

    def _set_timer(self, gang: int, timer: Timer, seconds: float) -> None:
        call = self._calls[gang]
        running = call.timers.pop(timer, None)
        if running is not None:
            running.cancel()
        call.timers[timer] = self._after(seconds, partial(self._on_timer, gang, timer))

    def _after(self, seconds: float, function: Callable[[], None]) -> threading.Timer:
        """Start a timer that calls a function in a thread of its own, and return it. It does not keep Python alive."""

        def work() -> None:
            function()
            self._sender.act()

        timer = threading.Timer(seconds, work)
        timer.daemon = True
        timer.start()
        return timer

    def _on_timer(self, gang: int, timer: Timer) -> None:
        with self._lock:
            call = self._calls.get(gang)
            if call is None or call.timers.get(timer) is not threading.current_thread():
                return
            del call.timers[timer]
            if timer == "settle" and self._awaits_a_node(call):
                self._set_timer(gang, timer, SETTLING)
            else:
                self._apply(Fired(gang, timer))

    def _awaits_a_node(self, call: _Call) -> bool:
        """Return True if a node of a gang is not connected. Its loss may be the reason why another rank failed."""
        # such a node reconnects or is given up within the pool's `liveness`
        left = {pending.at for pending in call.pending if not pending.ended}
        queues = self._sender.node_queues
        return any(node in queues and not queues[node].is_reachable for node in left)

    # --- ends ------------------------------------------------------------------------------------------------

    def _finish(self, gang: int, verdict: Verdict) -> None:
        call = self._calls.pop(gang)
        self._forget_timers(call)
        self._forget_ranks(call)
        name = call.code.name
        end: BaseException | Returned
        match verdict.kind:
            case "returned":
                end = Returned(())
            case "failed":
                end = self._tell_failure(call, verdict, again=False)
            case "timeout":
                end = self._timed_out(call, verdict)
            case "cancelled":
                end = SkypoolError(f"{name} was cancelled")
            case "no nodes":
                end = ConnectionLost(f"{name} was not run: {self._shortage(call.order)}")
        self._effects.ends.append(partial(call.future.finish, end))
        if call.whole is not NO_CALL:
            nodes = verdict.run.nodes if verdict.run is not None else ()
            seconds = time.monotonic() - call.began if call.began else None
            error = None
            if isinstance(end, BaseException):
                rank = next((rank for rank, each in call.ends.items() if each is end), None)
                error = text_of_error(end) if rank is None else call.texts[rank]
            node = next(iter(nodes), -1)
            if verdict.run is not None and verdict.rank is not None:
                node = verdict.run.places[verdict.rank].node
            stopped = verdict.kind == "cancelled"
            self._sender.tally.ended(name, nodes, seconds, error, stopped=stopped, node=node)

    def _shortage(self, order: Order) -> str:
        if order.among is not None:
            return (
                f"pool {self._pool!r} no longer has all nodes that the call named "
                f"({', '.join(map(str, sorted(order.among)))}); pool.nodes has those that are left"
            )
        left = sum(not node.leaving for node in self._state.nodes.values())
        return (
            f"it needs {_nodes(order.count)} at once, but pool {self._pool!r} has {left} and rents no more; send the "
            f"call again after pool.resize({max(1, left)}) to run it on the nodes that are left, or after "
            f"pool.resize({order.count}) to have as many as before"
        )

    def _timed_out(self, call: _Call, verdict: Verdict) -> CallTimeout:
        run = verdict.run
        assert run is not None
        left = [_words(run.places[rank], self._devices(run.places[rank].node)) for rank in verdict.others]
        shown = "; ".join(left[:8]) + (f"; and {len(left) - 8} more" if len(left) > 8 else "")
        error = CallTimeout(
            f"{call.code.name} ran longer than its timeout of {call.options.timeout:g} s (imports do not count) as a "
            f"gang of {len(run.places)} processes and was stopped (timeout= allows more). These had not ended: {shown}"
        )
        error.stacks = {rank: _stack_of(call.ends.get(rank)) for rank in verdict.others}
        error.add_note(_told_together(error.stacks))
        for rank in verdict.others:
            for note in notes_of(call.ends.get(rank)):
                if not note.startswith(STOPPED_IN):
                    error.add_note(note if len(run.places) == 1 else f"rank {rank}: {note}")
        return error

    def _tell_failure(self, call: _Call, verdict: Verdict, again: bool) -> BaseException:
        """Report the failure of a run. Return the error of the rank that failed first, with a note about the others."""
        run = verdict.run
        assert run is not None
        assert verdict.rank is not None
        place = run.places[verdict.rank]
        name = call.code.name
        end = call.ends.get(verdict.rank)
        if isinstance(end, NodeInterrupted):  # an error of its own, which gets its own note
            end = NodeInterrupted(text_of(end), place.node)
        elif not isinstance(end, BaseException):
            end = ConnectionLost(f"{name} was lost with node {place.node}", place.node)
        others = [each for rank in verdict.others if isinstance(each := call.ends.get(rank), BaseException)]
        note = self._note(call, run, verdict)
        rest = [each for each in others if each is not end]
        # the last note is of the same failure, when the gang was to run again
        annotate(end, note, {"rank": place.rank, "node": place.node, "others": rest}, instead_of=call.note)
        call.note = note
        self._on_failed(GangFailure(name, end, others, place.rank, place.node, run.attempt, again))
        return end

    def _note(self, call: _Call, run: Run, verdict: Verdict) -> str:
        """Return the note for a gang's error: the rank that failed first, its last output, and the other ranks."""
        assert verdict.rank is not None
        name = call.code.name
        first = _words(run.places[verdict.rank], self._devices(run.places[verdict.rank].node))
        lines = [f"{name} failed first on {first}, one of {len(run.places)} processes of this gang"]
        also = [
            f"{_words(run.places[rank], self._devices(run.places[rank].node))}: {call.texts[rank]}"
            for rank in verdict.others
            if call.texts.get(rank)
        ]
        if also:
            more = f"; and {len(also) - 4} more" if len(also) > 4 else ""
            lines[0] += f"; then on {'; '.join(each.splitlines()[0] for each in also[:4])}{more}"
        if run.attempt > 1:
            lines.append(f"this was run {run.attempt} of the gang")
        if verdict.lacking:
            why = (
                "the pool has no machines in place of the lost ones"
                if call.order.among is None
                else "the call names nodes that are gone, and other nodes do not replace them"
            )
            lines.append(f"the gang was not run again, because {why}; it ran on {_nodes(len(run.nodes))}")
            if call.order.least > 1:
                lines[-1] += ". @compute(min_nodes=…) lets it run again with fewer"
        tail = call.tails.get(verdict.rank, "").strip().splitlines()[-_TAIL_LINES:]
        if tail and not isinstance(call.ends.get(verdict.rank), WorkerDied):  # whose message has it already
            lines += [f"last output of rank {verdict.rank}:", *(f"  {line}" for line in tail)]
        return "\n".join(lines)

    def _devices(self, node: int) -> int:
        known = self._state.nodes.get(node)
        return 0 if known is None else known.devices

    def _forget_ranks(self, call: _Call) -> None:
        for pending in call.pending:
            self._ranks.pop(pending.id, None)

    def _forget_timers(self, call: _Call) -> None:
        for timer in call.timers.values():
            timer.cancel()
        call.timers.clear()


def _how(end: BaseException | Returned, stopped: bool, has_timeout: bool) -> How:
    """Return how a rank's process ended. `stopped` is True if the gang stopped it, as after another rank's failure."""
    if isinstance(end, Returned):
        return "returned"
    if stopped:
        return "stopped"
    if isinstance(end, NodeInterrupted):
        return "interrupted"
    if isinstance(end, ConnectionLost):
        return "lost"
    if has_timeout and isinstance(end, CallTimeout):
        return "overran"
    return "died" if isinstance(end, WorkerDied) else "raised"


def seconds_left(end: object) -> float:
    """Return the seconds for which the machine of a rank goes on that has ended as it was told to; otherwise 0.

    The node has sent them, so that they may be anything. More than `_LONGEST_NOTICE` (600) count as so many.
    """
    said: object = getattr(end, "left", 0.0) if isinstance(end, NodeInterrupted) else 0.0
    if not isinstance(said, (int, float)) or not said > 0:  # NaN is not, either
        return 0.0
    return float(min(said, _LONGEST_NOTICE))


def _stack_of(end: BaseException | Returned | None) -> str:
    """Return the stack of a process when it was stopped, the innermost call first; "" if it is not known."""
    return next((note.removeprefix(STOPPED_IN) for note in notes_of(end) if note.startswith(STOPPED_IN)), "")


def _told_together(stacks: Mapping[int, str]) -> str:
    """Return a note with the stacks of the ranks of a gang. Ranks with the same stack are named together."""
    alike: dict[str, list[int]] = {}
    for rank, stack in stacks.items():
        alike.setdefault(stack, []).append(rank)
    lines = ["what the processes were doing when they were stopped, the innermost call first:"]
    for stack, ranks in list(alike.items())[:_MOST_STACKS]:
        lines.append(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}:")
        lines += [f"  {line}" for line in (stack or "not known: the node did not say it in time").splitlines()]
    if len(alike) > _MOST_STACKS:
        lines.append(f"and {len(alike) - _MOST_STACKS} more; the attribute `stacks` of this error has all")
    return "\n".join(lines)


def _nodes(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"


def _words(place: Place, devices: int) -> str:
    """Return a text that names a rank, such as "rank 5 (node 2, device 1)"."""
    where = f"node {place.node}, device {place.local}" if devices > 1 else f"node {place.node}"
    if devices <= 1 and place.local:
        where += f", process {place.local}"
    return f"rank {place.rank} ({where})"
