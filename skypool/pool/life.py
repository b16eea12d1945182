"""`Life`: the state of one pool. It passes events to `lifecycle`, and has the actions performed that follow."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from skypool import events, tracebacks
from skypool.calls.dispatch import Dispatch
from skypool.errors import SkypoolError
from skypool.event_loop import Loop
from skypool.pool import lifecycle, states
from skypool.pool.connections import Connections
from skypool.pool.states import Phase
from skypool.rental.pool_account import Rental
from skypool.rental.pool_terms import Terms
from skypool.wire import error_text


class Performer(Protocol):
    """A protocol for the object that performs the actions of `lifecycle`: the engine."""

    def perform(self, action: states.Action) -> None:
        """Perform an action, or start a task that performs it, without waiting for the task."""


class Life:
    """The state of one pool, and the tasks that work on it. A task that fails ends the pool.

    A method runs in the engine's thread unless its description says otherwise.

    Attributes:
        rental: the account of the pool.
        connections: how each node is reached.
        state: the state now.
        performed: the last state whose actions were all performed. Other threads read this one: when a node is ready in
            it, calls can be sent to the node.
        given_away: the nodes that another process owns now; None while this process owns the pool.
        is_undecided: True if `given_away` has nodes of which it is not known whether they have another owner.
    """

    def __init__(
        self,
        terms: Terms,
        emit: Callable[[events.Event], None],
        rental: Rental,
        dispatch: Dispatch,
        connections: Connections,
        performer: Performer,
    ) -> None:
        self.pool = terms.name
        self.emit = emit
        self.rental = rental
        self._dispatch = dispatch
        self.connections = connections
        self._performer = performer
        self.state = self.performed = states.Pool(terms.minimum, terms.maximum)
        self.given_away: frozenset[int] | None = None
        self.is_undecided = False
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # --- its state -------------------------------------------------------------------------------------------

    def apply(self, event: states.Event) -> None:
        """Pass an event to the state machine, and have the actions performed that follow from it.

        The user is told of each node that enters another phase.
        This does not wait: actions that take time run as tasks.
        """
        before = self.state
        self.state, actions = lifecycle.step(self.state, event)
        self._tell_phases(before, self.state)
        coming = self.state.count(Phase.LAUNCHING, Phase.BOOTING, Phase.BOOTSTRAPPING)
        # A gang must know of a replacement before it hears that a node is lost, and of a new node before it hears that
        # no more are coming.
        self._dispatch.coming(max(coming, before.count(Phase.LAUNCHING, Phase.BOOTING, Phase.BOOTSTRAPPING)))
        for action in actions:
            self._performer.perform(action)
        self._dispatch.coming(coming)
        self.performed = self.state
        self._changed.set()

    def _tell_phases(self, before: states.Pool, after: states.Pool) -> None:
        for node, state in after.nodes.items():
            old = before.nodes.get(node)
            if old is None or old.phase is not state.phase:
                detail = error_text.cut(str(state.error)) if state.error else ""
                welcome = self.connections.welcomes.get(node)
                phase = events.NodePhase(
                    pool=self.pool,
                    node=node,
                    phase=state.phase.value,
                    detail=detail,
                    slots=welcome.slots if welcome else 0,
                    devices=welcome.devices if welcome else 0,
                    cpu_slots=welcome.cpu_slots if welcome else 0,
                    hosts=after.hosts if state.phase is Phase.LAUNCHING else 1,
                )
                self.emit(phase)

    def begin_as(self, state: states.Pool) -> None:
        """Begin with a state in which nodes exist already, as of a pool that is taken over. No action follows."""
        self.state = self.performed = state

    @property
    def is_ending(self) -> bool:
        """True if the pool is being ended, or has ended. Any thread may read it."""
        return self.state.phase in (Phase.DRAINING, Phase.ENDED)

    def words(self) -> dict[int, str]:
        """Return the state of each node by its number, as a word such as "ready". Any thread may call this.

        A ready node whose connection is down is "unreachable since" a time of day. Nodes that have ended are included.
        """
        return self.connections.words(self.performed)

    async def until(self, *phases: Phase) -> None:
        """Wait until the pool is in one of the given phases. There is no time limit."""
        while self.state.phase not in phases:
            await self.change()

    async def change(self, timeout: float | None = None) -> None:
        """Wait until an event was applied, or `timeout` seconds are over. None waits without a limit."""
        self._changed.clear()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout)

    async def pause(self, seconds: float) -> None:
        """Sleep for this many seconds, but no longer than until the pool begins to end."""
        until = time.monotonic() + seconds
        while not self.is_ending and (left := until - time.monotonic()) > 0:
            await self.change(left)

    # --- its tasks -------------------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, None], aside: str = "") -> asyncio.Task[None]:
        """Start a coroutine as a task, and return the task. `cancel_tasks` cancels it.

        If the task fails and `aside` is "", the pool ends, because a node or a call would wait for the task forever.
        For a task that the pool can do without, `aside` is its name: the user is told of the failure, and the pool goes
        on.
        """
        with tracebacks.heard_by(self.rental.tell):
            task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._on_task_end, aside))
        return task

    def _on_task_end(self, aside: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            if aside:
                self.notice(f"{aside} ended, and the pool goes on: {error_text.told(error)}")
            else:
                self._fail(error)

    def cancel_tasks(self) -> None:
        """Cancel all tasks but the one that calls this."""
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()

    def soon(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function soon in the engine's thread. If it fails, the pool ends. Any thread may call this."""

        def work() -> None:
            try:
                function(*arguments)
            except Exception as e:  # noqa: BLE001 - otherwise a node or a call would wait forever
                self._fail(e)

        Loop.shared().loop.call_soon_threadsafe(work)

    def _fail(self, error: Exception) -> None:
        """End the pool, because one of its tasks or functions has failed. Calls that have not ended get the error."""
        if not isinstance(error, SkypoolError):
            bug = SkypoolError(
                f"pool {self.pool!r} ends, because skypool failed: {error_text.told(error)}; this is a bug of "
                "skypool, so please report it"
            )
            bug.__cause__ = error
            error = bug
        self.apply(states.Stop(error))

    def notice(self, text: str) -> None:
        """Emit a message for the user. Any thread may call this."""
        self.emit(events.Notice(pool=self.pool, text=text))
