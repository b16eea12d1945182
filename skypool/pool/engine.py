"""`PoolEngine`: runs a pool. It rents, connects, sets up, replaces and ends nodes, as `lifecycle` decides.

`lifecycle` is a pure state machine: it gets events, and returns actions. The engine performs the actions in the
thread of `skypool.event_loop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from skypool import events, tracebacks
from skypool.calls.dispatch import Dispatch
from skypool.calls.futures import CallFuture
from skypool.calls.pending import PendingCall
from skypool.calls.upstream import Feeder
from skypool.errors import (
    ConnectionLost,
    LaunchError,
    LedgerError,
    NodeUnhealthy,
    PoolClosed,
    SkypoolError,
    StillRunning,
    TakenOver,
    UsageError,
    not_ended,
    retired,
    together,
)
from skypool.event_loop import Loop, beside
from skypool.link.inbound import Welcome
from skypool.link.reports import NodeReports
from skypool.logs.files import limits
from skypool.logs.writer import LogWriter
from skypool.model import Instance, Trust
from skypool.offers.need import hosts_alike
from skypool.pool import closing, lifecycle, shutdown, states
from skypool.pool.connector import Connector
from skypool.pool.forwards import Forwards
from skypool.pool.health import HealthWatch
from skypool.pool.hints import IdleHints
from skypool.pool.history import HistoryWatch
from skypool.pool.idle import IdleWatch
from skypool.pool.limits import LOOK, PLANNED, Limits
from skypool.pool.linger import LingerWatch
from skypool.pool.metering import Metering
from skypool.pool.node_listener import NodeListener
from skypool.pool.observed import Observed
from skypool.pool.replacement import LIVING, alike
from skypool.pool.resizing import check_retirement
from skypool.pool.services import Services
from skypool.pool.spot import Departures
from skypool.pool.states import Phase
from skypool.pool.trust_levels import TrustLevels
from skypool.rental.launch import Rented
from skypool.rental.receipt import Receipt
from skypool.rental.rental import Rental
from skypool.rental.request import Terms
from skypool.safety import descriptors
from skypool.safety.quota import Quota
from skypool.samples.journal import Journal
from skypool.samples.session_file import path_of
from skypool.samples.store import SampleStore
from skypool.samples.values import NodeSample
from skypool.wire import blame
from skypool.wire.frames import Kind, frame

if TYPE_CHECKING:
    from skypool.calls.gangs import GangFailure
    from skypool.metrics.exporter import Exporter
    from skypool.observers.server import ObserverServer
    from skypool.pool.network import NetworkCheck

_AGAIN = 5.0
"""Seconds between two attempts to end machines whose end is not confirmed."""
_SAY_EVERY = 1.0
"""Seconds between two events about the packing of files."""
_CALLED = {"cuda": "GPUs", "rocm": "GPUs", "tpu": "TPU chips"}
"""The names of devices in messages, by the kind of the device."""
_LONGEST_OTHER = 1000
"""The most characters of the error of each further rank of a gang in an event."""
_GROW_AGAIN = 5.0
"""Seconds until a pool that could not grow tries again. The pause doubles with every failure."""
_LOOK_ABANDONED = 0.2
"""Seconds between two checks whether the calls of a pool have ended that its user cannot end any more."""
_TO_CLOSE = 8.0
"""The most seconds for which the end of a pool waits for what watches it, when its machines have ended."""
_TO_RECORD = 5.0
"""The most seconds for which the end of machines waits until their idle time is recorded."""
_TO_END_CALLS = 5.0
"""The most seconds for which the end of machines waits for what the user's callbacks do with the ends of calls."""
_TO_CLEAN_UP = 5.0
"""The most seconds for which the end of a pool waits for generators that are stopped."""
_GROW_AGAIN_AT_MOST = 300.0
"""The longest pause between two attempts to grow, in seconds."""


class PoolEngine:
    """The engine of one pool: it performs the actions of the state machine `lifecycle`, and reports the results back.

    A method runs in the thread of `skypool.event_loop` unless its description says otherwise.

    Args:
        stream: receives the events for the user.
        exporters: send the metrics of the pool to monitoring systems.

    Attributes:
        departures: follows each node whose provider has announced that it takes the machine back, until it is gone.
        inherited: the futures of the calls of a former client, after an attach; otherwise empty.
        figures: returns costs and newest samples for the live view. Any thread may call it.
        info: returns the state of the pool and its nodes as values for JSON. Any thread may call it.
    """

    def __init__(self, terms: Terms, stream: events.EventStream, exporters: Sequence[Exporter] = ()) -> None:
        self.terms = terms
        self.emit = stream.emit
        self.state = self._performed = states.Pool(terms.minimum, terms.maximum)
        self.dispatch = Dispatch(
            terms.name,
            self._on_failed,
            self._on_retry,
            self._on_feed,
            self._on_drained,
            self._on_gang_failed,
            self._notice,
            terms.wait,
        )
        self.rental = Rental(terms, stream.emit)
        self._settle = stream.settle
        self._trust_levels = TrustLevels(terms.trust, terms.allow_results, self._notice)
        quota = Quota(self._trust_levels.is_known_stranger, self._notice)
        self._log = LogWriter(terms.name, limits(), self._notice, quota)
        self._unlisten = stream.follow(self._keep)
        self._reports = NodeReports(
            terms.name,
            self._report,
            self.dispatch.roster.acknowledge,
            self._trust_levels.is_stranger,
            lambda node, call: self.services.name_of(node, call),
            self._counted,
        )
        self.departures = Departures(lambda: self.state, self.rental.driver_of, self.apply)
        self.health = HealthWatch(
            terms.name,
            SampleStore(lambda: path_of(self.rental.session), quota),
            self._trust_levels.is_stranger,
            self.emit,
            self._on_unhealthy,
        )
        self.inherited: list[CallFuture[object]] = []
        self._connector = Connector(
            terms,
            self.rental,
            self._trust_levels,
            self.emit,
            state=lambda: self.state,
            apply=self.apply,
            listener_of=self._listener_of,
            awaited=self.dispatch.roster.awaited,
            health=self.health,
            linger=lambda: self.linger.told(),
        )
        self.linger = LingerWatch(terms, self.dispatch, self.rental, lambda: self.state, self._end_idle)
        self._links = self._connector.links
        self._limits = Limits(terms, self.rental, self.linger, self._links)
        self._welcomes = self._connector.welcomes
        hints = IdleHints(terms.name, self._welcomes, lambda: self.rental.known_receipt, self.emit)
        self.idle = IdleWatch(self.dispatch, self.rental, lambda: self.state, hints)
        self.rental.before_prices = self.idle.record
        self.history = HistoryWatch(
            terms.name,
            Journal(lambda: path_of(self.rental.session), quota),
            self.dispatch,
            self.rental,
            self._welcomes,
            self._trust_levels.is_stranger,
            self.emit,
            quota,
        )
        self._paid: Receipt | None = None  # when machines were ended last
        self._closing: asyncio.Task[None] | None = None
        self._lost_early: ConnectionLost | None = None
        self._given_away: frozenset[int] | None = None  # nodes of a new owner; None while this process is the owner
        self._tasks: set[asyncio.Task[None]] = set()
        self._clearing: set[int] = set()  # nodes that leave, whose services were stopped
        self._reaching: dict[int, asyncio.Task[None]] = {}
        self._heard: dict[int, float] = {}
        self._changed = asyncio.Event()
        self._advised = False
        self._told_of_stopped_parts = False
        self._told: set[str] = set()
        self._grow_pause = _GROW_AGAIN
        self._grow_from = -math.inf
        self._no_growth = ""
        self._watching: asyncio.Task[None] | None = None
        self._feeders: dict[tuple[int, int], Feeder] = {}
        self.forwards = Forwards(self._connector.ways, self._notice)
        self.services = Services(terms.name, self.dispatch, stream, self._trust_levels.is_stranger)
        self._observers: ObserverServer | None = None
        self._observed = Observed(
            terms,
            stream,
            lambda: self._performed,
            self.words,
            self._welcomes,
            self._connector.ways,
            self.rental,
            self.dispatch,
            self.forwards,
            self.health,
        )
        self.figures = self._observed.figures
        self.info = self._observed.info
        self.command = self._observed.command
        self.metering = Metering(
            terms,
            exporters,
            state=lambda: self._performed,
            words=self.words,
            welcomes=self._welcomes,
            dispatch=self.dispatch,
            rental=self.rental,
            idle=self.idle,
            health=self.health,
            is_stranger=self._trust_levels.is_known_stranger,
            notice=self._notice,
        )
        self._network: NetworkCheck | None = None
        self._network_lock = threading.Lock()

    def is_stranger(self, node: int) -> bool:
        """Return True if the results of a node are not unpickled, but read as plain data. Any thread may call this."""
        return self._trust_levels.is_stranger(node)

    def devices(self) -> dict[int, int]:
        """Return the number of accelerators of each node that was reached, by its number. Any thread may call this."""
        return {node: welcome.devices for node, welcome in sorted(self._welcomes.copy().items())}

    def words(self) -> dict[int, str]:
        """Return the state of each node by its number, as a word such as "ready". Any thread may call this.

        A ready node whose connection is down is "unreachable since" a time of day. Nodes that have ended are included.
        """
        return {node: self._word(state) for node, state in sorted(self._performed.nodes.items())}

    def trusts(self) -> set[Trust]:
        """Return "full", "data" or both: the trust in results of the nodes known so far. Any thread may call this."""
        return self._trust_levels.trusts()

    def _word(self, node: states.Node) -> str:
        link = self._links.get(node.node)
        if node.word != "ready" or link is None or link.is_up:
            return node.word
        return f"unreachable since {time.strftime('%H:%M:%S', time.localtime(link.heard_at))}"

    # --- start and end ---------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Rent the machines and set them up, or take over those of another process. Return when the pool is ready.

        If this is cancelled, rented machines are ended before CancelledError is raised. Machines that were to be taken
        over keep running.

        Raises:
            SkypoolError: the pool could not become ready. Rented machines were ended; if the end of some is not
                confirmed, the error has a note. Machines that were to be taken over keep running.
        """
        descriptors.keep(self)
        if self.metering.exporters:
            await asyncio.to_thread(self.metering.open)
        if self.terms.attach:
            await self._adopt()
            self._open_files()
            self._begin_tasks()
        else:
            await asyncio.to_thread(self._connector.pack, self._packing())
            plan = await self.rental.look_out(self._pause)
            await asyncio.to_thread(self.rental.begin, self.state.minimum)
            self._open_files()
            if self.state.phase is Phase.ENDED:  # it was stopped before the ledger was open
                await self._close()
            try:
                self._begin_tasks()
                self.apply(states.Start(plan.offers[0].hosts))
                await self._until(Phase.READY, Phase.ENDED)
                if self.state.phase is Phase.READY and self.terms.need.private_network:
                    await self._check_network()
            except BaseException:
                await asyncio.shield(self.stop())
                raise
            if self.state.phase is Phase.ENDED:
                raise await self._why_it_ended()
        self._watch()

    def _begin_tasks(self) -> None:
        closing.prepare()
        self._spawn(self._serve_observers(), "the service for other terminals")
        self._spawn(self._tend())
        self._spawn(self._keep_limits())
        self._spawn(self._limits.watch_pauses())
        self._spawn(self.health.keep(), "the record of measurements")
        self._spawn(self.idle.keep(), "the record of idle time")
        self._spawn(self.linger.keep())
        self._spawn(self.history.keep(), "the history of the pool")

    def _open_files(self) -> None:
        """Begin to keep logs and history. If that fails, tell the user; the pool goes on."""
        for open_ in (partial(self._log.open, self.rental.session), self.history.open):
            try:
                open_(self._connector.secrets)
            except Exception as e:  # noqa: BLE001 - what only watches must not keep the pool from working
                self._notice(f"what happens in the pool is not kept in files: {blame.told(e)}")

    @property
    def network(self) -> NetworkCheck:
        """The check that nodes can connect to each other. It remembers which can. Any thread may use this."""
        from skypool.pool.network import NetworkCheck  # imported here: few pools need it, and it would delay each start

        with self._network_lock:
            if self._network is None:
                self._network = NetworkCheck(self.dispatch, self.terms.check, self._network_advice, self._notice)
            return self._network

    async def _check_network(self) -> None:
        """Check that the nodes reach each other. If one is lost, the first call on several nodes checks it instead."""
        with contextlib.suppress(ConnectionLost):
            await asyncio.to_thread(lambda: self.network.ensure(self.dispatch.roster.nodes()))

    def _network_advice(self, node: int) -> str:
        """Return a sentence of advice to the user for the case that other nodes cannot connect to this node."""
        from skypool.pool.network import advice_for

        driver = self.rental.driver_of(self.state.instance_of(node))
        return advice_for(driver, self.terms.need.private_network)

    async def _why_it_ended(self) -> BaseException:
        """End what is left of a pool that ended before it was ready, and return the error that ended it.

        Notes of the error name other failures, and machines whose end is not confirmed.
        """
        error = self.state.error or PoolClosed(f"pool {self.terms.name!r} was stopped while it started")
        nodes = [node for node in self.state.nodes.values() if node.error is not None]
        reasons = {id(node.error) for node in nodes}
        for node in nodes:
            if node.error is None or id(node.error.__cause__) in reasons:
                continue  # the node only ended because another host of its slice failed
            if alike(node.error) != alike(error) and not isinstance(node.error, StillRunning):
                error.add_note(f"node {node.node} failed, too: {type(node.error).__name__}: {node.error}")
        try:
            await self.stop()
        except Exception as left:  # noqa: BLE001 - it becomes a note of the error that is returned
            if left is not error:
                error.add_note(
                    f"it is not confirmed that all machines of pool {self.terms.name!r} have ended; run `skypool down "
                    f"{self.terms.name}` to try again: {type(left).__name__}: {left}"
                )
        return error

    async def stop(self, reason: BaseException | None = None) -> None:
        """End all calls and machines, and wait until the provider confirms that the machines have ended.

        If the pool is ending or has ended already, only wait. `reason` is the error for the calls that have not ended;
        None for a PoolClosed error.

        Raises:
            StillRunning, ErrorGroup: the end of some machines is not confirmed.
        """
        name = self.terms.name
        reason = reason or PoolClosed(f"pool {name!r} was stopped before the call ended")
        descriptors.release()
        await self._end_streams(reason)
        await self._end_calls(self.dispatch.end_calls, reason)
        await self.services.close()
        await self._end_calls(self.dispatch.close, reason)
        self.apply(states.Stop())
        await self._until(Phase.ENDED)
        closing = [self._closing] if self._closing else []
        failed = await asyncio.gather(*closing, return_exceptions=True)
        descriptors.forget(self)
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()
        left = [*self._unproved(), *(e for e in failed if isinstance(e, Exception))]
        if left:
            raise together(
                f"pool {name!r} has ended, but it is not confirmed that each of its machines has; run `skypool "
                f"down {name}` to try again",
                left,
            )

    def close_streams(self, reason: BaseException | None = None) -> list[PendingCall]:
        """Close the streams that have not ended, and return their calls. Tell the user of them. Do not wait.

        Any thread may call this. `reason` is the error that readers of these streams get; None for a PoolClosed error.
        """
        closed = self.dispatch.close_streams(
            reason
            or PoolClosed(
                f"pool {self.terms.name!r} was left before this stream was read to its end; read streams in the `with` "
                "block"
            )
        )
        if closed:
            names = [each.name for each in closed]
            told = ", ".join(f"{name} ({n} times)" if (n := names.count(name)) > 1 else name for name in {*names})
            self._notice(
                f"the pool ends, so generators that have not ended are stopped, and the rest of their items is "
                f"discarded: {told}. Read a stream to its end before, or close it"
            )
        return closed

    async def _end_streams(self, reason: BaseException) -> None:
        """Close the streams that have not ended, and wait until their generators have cleaned up, at most 5 s."""
        closed = self.close_streams(reason)
        until = time.monotonic() + _TO_CLEAN_UP
        while any(map(self.dispatch.roster.runs, closed)) and time.monotonic() < until:
            await asyncio.sleep(0.01)

    async def _end_calls(self, end: Callable[[BaseException], None], reason: BaseException) -> None:
        """Call `end(reason)` in another thread, as it runs callbacks of the user. Wait for its return, at most 5 s."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TO_END_CALLS):
                await beside(partial(end, reason), "skypool end of calls")

    async def leave(self, seconds: float) -> None:
        """End all calls and services, and leave the ready nodes for `seconds` to a process that takes the pool over.

        A separate process ends their machines when the time is over. Budget and lifetime may end them earlier. The
        machines of nodes that are not ready, or cannot be told to stay, end now. If no machine can stay, or the pool is
        ending already, this does the same as `stop`.

        Raises:
            StillRunning, ErrorGroup: the end of some machines is not confirmed.
        """
        name = self.terms.name
        if self.state.phase is not Phase.READY or self._given_away is not None:
            await self.stop()
            return
        for node, link in self._links.items():
            services = {each.id for each in self.dispatch.roster.services_on(node)}
            for call in [each for each in self.dispatch.roster.awaited(node) if each not in services]:
                link.send(frame(Kind.CANCEL, {"id": call, "grace": self.terms.grace}))
            self.dispatch.roster.acknowledge(node)
        reason = PoolClosed(
            f"this process has left pool {name!r}; ComputePool.attach({name!r}) takes its machines over"
        )
        await self._end_calls(self.dispatch.end_calls, reason)
        await self.services.close()
        await self._end_calls(self.dispatch.close, reason)
        await self._record_idle()
        try:
            seconds, notice = await asyncio.to_thread(self.rental.leave, seconds)
        except SkypoolError as e:
            self._notice(str(e))
            await self.stop()
            return
        ready = [each.node for each in self.state.nodes.values() if each.phase is Phase.READY and not each.is_leaving]
        links = {node: self._links[node] for node in ready if node in self._links}
        told = dict(zip(links, await asyncio.gather(*(each.leave(seconds) for each in links.values())), strict=True))
        self._given_away = frozenset(
            node for node in links if all(told.get(each.node) for each in self.state.slice_of(node))
        )
        if not self._given_away:  # otherwise they are closed with the record in the ledger
            self._given_away = None
        else:
            self._notice(notice)
        await self.stop()

    def abandon(self, hush: Callable[[], None] | None) -> None:
        """End a pool, which its user cannot end any more, as soon as its calls have ended. This does not wait.

        Any thread may call this, with any lock held, as it happens while garbage is collected. `hush` is called at the
        end, and stops the output about the pool.
        """
        if (loop := Loop.running()) is not None:
            loop.call_soon_threadsafe(lambda: self._spawn(self._end_abandoned(hush)))

    async def _end_abandoned(self, hush: Callable[[], None] | None) -> None:
        """Wait until all calls have ended, and stop the pool. Errors become notices, as there is no caller to tell."""
        if not self._is_ending:
            self._notice(
                f"pool {self.terms.name!r} was never stopped, and the program cannot use it any more: it ends when its "
                "calls have ended"
            )
        while self.dispatch.unfinished and not self._is_ending:
            await asyncio.sleep(_LOOK_ABANDONED)
        try:
            await self.stop()
        except Exception as e:  # noqa: BLE001 - there is no caller who could be told
            self._notice(blame.told(e))
        shutdown.forget(self)
        if hush is not None:
            await beside(hush, "skypool closing")

    def _unproved(self) -> list[StillRunning]:
        """Return the errors of machines whose end is not confirmed. An error that several machines share comes once."""
        errors = [node.error for node in self.state.nodes.values()]
        return list({id(e): e for e in errors if isinstance(e, StillRunning)}.values())

    def end_now(self) -> None:
        """End every machine from the calling thread, and block until the provider confirms that all have ended.

        This is used at the interpreter's exit, when no thread can be started. Any thread may call this.

        Raises:
            StillRunning: the end of one or more machines is not confirmed.
            ErrorGroup: the same, at several providers; or the machines have ended, but resources of the pool are left.
        """
        descriptors.release()
        if self._given_away is not None:
            return
        for link in self._links.values():
            link.bid_farewell()
        closing.close_all([("the record of idle time", self.idle.record)], _TO_RECORD)
        failed = self.rental.terminate(self.rental.there)  # of which the engine's thread may not have heard yet
        self.rental.close(self.state.error, proved=not failed)
        if failed:
            raise together(
                f"it is not confirmed that each machine of pool {self.terms.name!r} has ended; run `skypool down "
                f"{self.terms.name}` to try again",
                failed.values(),
            )

    def hand_over_now(self) -> None:
        """Let a new process end the machines. Raise SkypoolError if it cannot be started. Any thread may call this."""
        self._notice(self.rental.terminate_in_background())

    def close_now(self) -> None:
        """End the calls and close what watches the pool, such as logs and metrics, at the interpreter's exit.

        Any thread may call this.
        """
        error = PoolClosed(f"pool {self.terms.name!r} ended when Python exited")
        closing.close_all([("its calls", partial(self.dispatch.close, error))], _TO_END_CALLS)
        self._close_watchers()

    async def _until(self, *phases: Phase) -> None:
        """Wait until the pool is in one of the given phases. There is no time limit."""
        while self.state.phase not in phases:
            self._changed.clear()
            await self._changed.wait()

    # --- size ------------------------------------------------------------------------------------------------

    def resize(self, minimum: int, maximum: int) -> None:
        """Change how many nodes (or slices) the pool must have, and how many it may grow to. This does not wait.

        Any thread may call this.

        Raises:
            UsageError: the pool was taken over from another process and lacks the requirements of new nodes, or its
                accelerators have different numbers of hosts.
            BudgetExceeded: the new nodes cost more in their first hour than is left of the budget.
        """
        hosts_alike(self.terms.need.accelerators, maximum)
        state = self.state
        living = state.count(*LIVING)
        if not self.terms.replaces:
            if minimum > living:
                raise UsageError(
                    f"pool {self.terms.name!r} has {living} nodes and cannot grow to {minimum}, because it was taken "
                    "over without the requirements of new nodes: pass accelerator= or image= to ComputePool.attach()"
                )
            minimum = 0
        elif state.phase is not Phase.PLANNED:
            self.rental.check_budget(minimum - living)
        self._soon(self._resize, minimum, maximum)

    def _resize(self, minimum: int, maximum: int) -> None:
        self.apply(states.Resize(minimum, maximum, self.dispatch.roster.load))
        if self.state.phase is Phase.READY:
            self._watch()

    def retire(self, node: int) -> None:
        """Retire a node, with all hosts of its slice. Do not wait for its end.

        Any thread may call this. When it returns, no new call is sent to the node, and a further `retire` or `resize`
        counts the node as gone.

        Raises:
            UsageError: the pool has no such node, it is a later host of a slice, or no other node would be left.
        """
        Loop.shared().call(lambda: self._retire(node))

    def _retire(self, node: int) -> None:
        check_retirement(self.state, self.terms.name, node)
        self.apply(states.Retire(node))

    async def wait_ready(self, count: int | None, timeout: float | None) -> None:
        """Wait until this many nodes (or slices) are ready; None for the smallest number that the pool must have.

        Args:
            timeout: seconds to wait at most; None for no limit.

        Raises:
            TimeoutError: the time is over.
            UsageError: the pool may not have so many nodes.
            LaunchError: nodes are missing, and no more are being launched in their place.
            SkypoolError: the error that ended the pool.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while not self._has(count):
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(self._missing(count, f"after {timeout:g} s"))
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)

    def _has(self, count: int | None) -> bool:
        """Return True if this many nodes (or slices) are ready. If they never will be, raise as `wait_ready` does."""
        state = self.state
        if state.phase in (Phase.DRAINING, Phase.ENDED):
            raise state.error or PoolClosed(f"pool {self.terms.name!r} has ended")
        wanted = state.minimum if count is None else count
        if wanted > state.maximum:
            raise UsageError(
                f"pool {self.terms.name!r} has at most {state.maximum} nodes, so {wanted} are never ready: make it "
                f"larger with pool.resize({wanted})"
            )
        grows = self._may_grow and wanted > state.minimum
        if state.phase is not Phase.PLANNED and state.count(*LIVING) < wanted and not grows:
            errors = [each.error for _, each in sorted(state.nodes.items()) if each.error is not None]
            why = f": {errors[-1]}" if errors else ""
            raise LaunchError(
                self._missing(count, f"and no more are launched; pool.resize({state.minimum}) tries again{why}"),
                is_short=bool(errors) and getattr(errors[-1], "is_short", False),
            ) from (errors[-1] if errors else None)
        return state.count(Phase.READY) >= wanted

    @property
    def _whole(self) -> int:
        """The number of nodes that the pool is to have, at least 1."""
        return max(1, self.state.minimum * self.state.hosts)

    def check_least(self, name: str, least: int | None, named: int | None) -> None:
        """Raise UsageError if a call named `name` cannot run on `least` nodes (its option `min_nodes`).

        `named` is the number of nodes that the call names; None for all nodes of the pool. Any thread may call this.
        """
        most = max(self._whole, len(self.dispatch.roster.nodes())) if named is None else named
        if least is not None and least > most:
            raise UsageError(f"min_nodes={least} is more than the {most} nodes on which {name} is to run")

    def await_nodes(self, name: str, least: int | None, every: bool = True) -> None:
        """Wait until the pool has as many nodes for calls as it is to have. Any thread but the engine's may call this.

        Args:
            name: the name of the call that needs them, for messages.
            least: the number of nodes that is enough when the pool's `wait` is over, or if no more are being launched.
                None for all.
            every: False if `least` nodes are enough at once.

        Raises:
            LaunchError: nodes are missing, and no more are being launched in their place.
            PoolClosed: the pool has ended.
            SkypoolError: the error that ended the pool.
        """
        if len(self.dispatch.roster.nodes()) < (self._whole if every else least or 1):
            Loop.shared().run(self._await_nodes(name, least, every))

    async def _await_nodes(self, name: str, least: int | None, every: bool) -> None:
        until = time.monotonic() + (self.terms.wait if every else 0.0)
        is_told = False
        while (there := len(self.dispatch.roster.nodes())) < self._whole:
            is_enough = least is not None and there >= least
            left = until - time.monotonic()
            try:
                self._has(None)
            except LaunchError as e:
                if not is_enough:
                    rest = f"; pool.resize({self.state.count(Phase.READY)}) does without the others" if there else ""
                    words = f"{name} needs {self._whole} nodes and was not run on {there}{rest}: {e}"
                    raise LaunchError(words, is_short=e.is_short) from e
                left = 0.0
            if is_enough and left <= 0:
                if every:
                    self._notice(f"{name} runs on {there} of {self._whole} nodes (min_nodes={least})")
                return
            coming = self._coming()
            if coming and not is_told:
                is_told = True
                self._notice(f"{name} waits for {self._whole - there} of {self._whole} nodes: {', '.join(coming)}")
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left if is_enough else None)

    def _coming(self) -> list[str]:
        """Return a text for each node that is being launched or set up, such as "node 3 is booting"."""
        nodes = sorted(self.state.nodes.items())
        return [f"node {node} is {each.word}" for node, each in nodes if each.phase in LIVING[:-1]]

    def _missing(self, count: int | None, why: str) -> str:
        state = self.state
        wanted = state.minimum if count is None else count
        coming = self._coming()
        rest = f" ({', '.join(coming)})" if coming else ""
        return f"pool {self.terms.name!r} has {state.count(Phase.READY)} of {wanted} nodes ready {why}{rest}"

    # --- decisions and actions -------------------------------------------------------------------------------

    def apply(self, event: states.Event) -> None:
        """Pass an event to the state machine, and perform the actions that follow. Tell the user of changed phases.

        This does not wait: actions that take time run as tasks.
        """
        before = self.state
        self.state, actions = lifecycle.step(self.state, event)
        self._tell_phases(before, self.state)
        coming = self.state.count(Phase.LAUNCHING, Phase.BOOTING, Phase.BOOTSTRAPPING)
        # A gang must know of a replacement before it hears that a node is lost, and of a new node before it hears that
        # no more are coming.
        self.dispatch.coming(max(coming, before.count(Phase.LAUNCHING, Phase.BOOTING, Phase.BOOTSTRAPPING)))
        for action in actions:
            self._perform(action)
        self.dispatch.coming(coming)
        self._performed = self.state  # who reads that a node is ready may send it calls
        self._changed.set()

    def _tell_phases(self, before: states.Pool, after: states.Pool) -> None:
        for node, state in after.nodes.items():
            old = before.nodes.get(node)
            if old is None or old.phase is not state.phase:
                detail = blame.cut(str(state.error)) if state.error else ""
                welcome = self._welcomes.get(node)
                phase = events.NodePhase(
                    pool=self.terms.name,
                    node=node,
                    phase=state.phase.value,
                    detail=detail,
                    slots=welcome.slots if welcome else 0,
                    devices=welcome.devices if welcome else 0,
                    cpu_slots=welcome.cpu_slots if welcome else 0,
                    hosts=after.hosts if state.phase is Phase.LAUNCHING else 1,
                )
                self.emit(phase)

    def _perform(self, action: states.Action) -> None:
        """Perform an action of the state machine, or start a task that performs it, without waiting for the task."""
        match action:
            case states.Launch(nodes):
                self._spawn(self._launch(nodes))
            case states.Reach(node):
                self._reaching[node] = self._spawn(self._connector.reach(node))
            case states.Bootstrap(node):
                self._reaching[node] = self._spawn(self._connector.bootstrap(node))
            case states.Admit(node):
                self.departures.admitted(node)
                self.dispatch.add(node, self._welcomes[node], self._links[node])
                self.services.admitted(node)
                self._trust_levels.announce()
                if (found := self.health.of(node)) is not None and found.state == "unhealthy":  # since it was set up
                    self._soon(self._on_unhealthy, node, self.health.error_of(node))
            case states.Drain(node, None, error) if error is not None:
                sick = error if isinstance(error, NodeUnhealthy) else NodeUnhealthy(str(error), node)
                self.dispatch.drain(node, unhealthy=sick)
            case states.Drain(node, None):
                self.emit(events.NodeRetirement(pool=self.terms.name, node=node))
                self.dispatch.drain(node, retired=True)
            case states.Drain(node, float(at)):
                self.emit(events.NodeInterruption(pool=self.terms.name, node=node, at=at))
                self.dispatch.drain(node)
                self.services.leaving(node)
                link = self._links[node]
                self._spawn(self.departures.follow(node, at, lambda: link.is_up))
            case states.Dismiss(node, error, others):
                self.dispatch.lose(node, error, others)
                close = partial(self.forwards.close, node, *others)
                self._spawn(beside(close, "skypool forwards"), "the end of forwards")
                if not self.dispatch.node_queues and self.state.phase is Phase.ENDED:
                    self.dispatch.close(error)
            case states.Terminate(nodes):
                self._spawn(self._terminate(nodes))
            case states.Announce(phase):
                detail = blame.cut(str(self.state.error)) if self.state.error else ""
                paid = self._paid if phase is Phase.ENDED else None
                usd, idle_usd = (None, None) if paid is None else (paid.usd, paid.idle_usd)
                staying = len(self._given_away or ()) if phase is Phase.ENDED else 0
                name = self.terms.name
                self.emit(
                    events.PoolPhase(
                        pool=name, phase=phase.value, detail=detail, usd=usd, idle_usd=idle_usd, staying=staying
                    )
                )
                if phase in (Phase.DRAINING, Phase.ENDED):
                    self.rental.stopping.set()
                    error = self.state.error or PoolClosed(f"pool {self.terms.name!r} has ended")
                    self._spawn(self._end_all_calls(error))
                if phase is Phase.ENDED:
                    self._closing = self._spawn(self._close())

    async def _end_all_calls(self, error: BaseException) -> None:
        def end(error: BaseException) -> None:
            self.services.end(error)
            self.dispatch.close(error)

        await self._end_calls(end, error)

    def advise_map(self, on_cpu: bool) -> None:
        """Tell the user, once per pool, that `slots="per-device"` would let `map` run more calls at once.

        Do nothing if the user set `slots`, if no node has several devices, for slices of several hosts, or if the
        mapped function needs no device (`on_cpu`). Any thread may call this.
        """
        if self._advised or on_cpu or self.terms.need.slots is not None or self.state.hosts > 1:
            return
        most = max(list(self._welcomes.values()), key=lambda each: each.devices, default=None)
        if most is not None and most.devices > 1:
            devices = most.devices
            kind = next((each.kind for each in most.health.devices), "")
            self._advised = True
            self._notice(
                f"map runs one call at a time on each node, with all {devices} {_CALLED.get(kind, 'devices')}; "
                f'ComputePool(..., slots="per-device") runs {devices} at a time'
            )

    def advise_stopped(self, text: str) -> None:
        """Tell the user, once per pool, that parts of a call were stopped because another part failed.

        Any thread may call this. The text says what was stopped and why, and how to let such parts go on.
        """
        if not self._told_of_stopped_parts:
            self._told_of_stopped_parts = True
            self._notice(text)

    def _packing(self) -> Callable[[int, int], None]:
        """Return a function that is called with (bytes read, bytes in all), and shows them to the user each second."""
        said = time.monotonic()

        def tell(done: int, total: int) -> None:
            nonlocal said
            if done == total or time.monotonic() - said >= _SAY_EVERY:
                said = time.monotonic()
                self.emit(events.FilesProgress(pool=self.terms.name, done=done, total=total))

        return tell

    def _notice(self, text: str) -> None:
        """Emit a message for the user. Any thread may call this."""
        self.emit(events.Notice(pool=self.terms.name, text=text))

    def _spawn(self, work: Coroutine[Any, Any, None], aside: str = "") -> asyncio.Task[None]:
        """Start a coroutine as a task, which `stop` cancels, and return the task.

        `aside` names a task that the pool can do without: the user is told when it fails. If `aside` is "", a failure
        ends the pool, because a node or a call would wait for the task forever.
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
                self._notice(f"{aside} ended, and the pool goes on: {blame.told(error)}")
            else:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End the pool, because a part of the engine has failed. Calls that have not ended get the error."""
        if not isinstance(error, SkypoolError):
            bug = SkypoolError(
                f"pool {self.terms.name!r} ends, because skypool failed: {blame.told(error)}; this is a bug of "
                "skypool, so please report it"
            )
            bug.__cause__ = error
            error = bug
        self.apply(states.Stop(error))

    def _soon(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function soon in the engine's thread. If it fails, the pool ends. Any thread may call this."""

        def work() -> None:
            try:
                function(*arguments)
            except Exception as e:  # noqa: BLE001 - otherwise a node or a call would wait forever
                self._fail(e)

        Loop.shared().loop.call_soon_threadsafe(work)

    # --- launching -------------------------------------------------------------------------------------------

    async def _launch(self, nodes: tuple[int, ...]) -> None:
        try:
            hosts = self.state.hosts if self.state.maximum > 1 else None  # so that nodes do not meet
            rented = await self.rental.rent(nodes, hosts, self._pause, self._is_wanted)
        except Exception as e:  # noqa: BLE001 - lifecycle decides what it means
            rented = Rented((), e)
        for first, *others in rented.slices:
            self.apply(states.Launched(first.node, first, tuple(others)))
        was_ready = self.state.phase is Phase.READY
        for node in sorted(set(nodes) - {instance.node for instance in rented.instances}):
            if rented.error is not None or not self._is_wanted(node):
                self.apply(states.Failed(node, rented.error or retired(node)))
        if was_ready:
            self._note_growth(rented.error)

    def _is_wanted(self, node: int) -> bool:
        """Return False if a node was retired before its machine was rented."""
        return not self.state.nodes[node].retiring

    def _note_growth(self, error: Exception | None) -> None:
        """Note the result of an attempt to launch nodes of a ready pool: its error, or None after a success.

        The next attempt to grow is delayed by 5 s after an error, and by twice as much after each further error, up to
        300 s. The user is told of an error, but not again while it repeats.
        """
        if error is None:
            self._grow_pause = _GROW_AGAIN
            self._no_growth = ""
            return
        pause = self._grow_pause
        self._grow_from = time.monotonic() + self._grow_pause
        self._grow_pause = min(2 * pause, _GROW_AGAIN_AT_MOST)
        words = alike(error)
        if words != self._no_growth:
            self._no_growth = words
            if self._may_grow:
                self._notice(
                    f"the pool cannot grow for now; it uses the nodes it has, and tries again in {pause:g} s: {error}"
                )
            else:
                self._notice(
                    f"no further machine could be rented, so the pool has {self.state.count(*LIVING)} of "
                    f"{self.state.minimum} nodes; pool.resize({self.state.minimum}) tries again: {error}"
                )

    async def _tend(self) -> None:
        """Tell the ledger and the providers regularly that this pool is alive, until it begins to end."""
        while not self._is_ending:
            with self._deciding():
                await asyncio.to_thread(self.rental.tend)
            await self._pause(self.rental.pulse)

    async def _keep_limits(self) -> None:
        """End the pool when its budget is spent or its lifetime is over. No provider is asked."""
        while not self._is_ending:
            pause = LOOK
            with self._deciding():
                pause = await self._limits.check()
            await self._pause(pause)

    async def _end_idle(self, error: PoolClosed) -> None:
        """End the pool, as it has had no work for its linger time. Generators that nobody reads get 5 s to clean up."""
        await self._end_streams(error)
        self.apply(states.Stop(error))

    @contextlib.contextmanager
    def _deciding(self) -> Iterator[None]:
        """Handle errors of the block: a planned end ends the pool. The user is told of others, and the pool goes on.

        The user is told of the same error only once.
        """
        try:
            yield
        except TakenOver as e:
            self._spawn(self._hand_over(e))
        except PLANNED as e:
            self.apply(states.Stop(e))
        except Exception as e:  # noqa: BLE001 - the user is told, and it is tried again
            if (words := alike(e)) not in self._told:
                self._told.add(words)
                self._notice(f"the pool goes on, but could not check its limits: {blame.told(e)}")

    @property
    def _is_ending(self) -> bool:
        return self.state.phase in (Phase.DRAINING, Phase.ENDED)

    # --- what is kept in files -------------------------------------------------------------------------------

    def _keep(self, event: events.Event) -> None:
        """Keep an event in the logs and the history. Printed output goes to the logs only, with its function's name."""
        if isinstance(event, events.Output):
            self._log.hear(event, self.dispatch.roster.function_of(event.node, event.call))
        else:
            self._log.hear(event)
            self.history.hear(event)

    def _close_log(self) -> None:
        """Write to the logs what waits to be written, and close them. Blocks. Any thread may call this."""
        self._unlisten()
        self._log.close()

    async def _serve_observers(self) -> None:
        await beside(self._open_to_observers, "skypool observers")

    def _open_to_observers(self) -> None:
        """Begin to serve observers, unless the pool has ended meanwhile. This runs in a thread of its own."""
        from skypool.observers.server import ObserverServer  # imported here, so that a pool's start need not wait

        self._observers = server = ObserverServer(self.terms.name, self._observed)
        server.open()
        if self.state.phase is Phase.ENDED:  # `_close` may have looked before
            server.close()

    async def _close(self) -> None:
        """Remove keys and other leftovers at the providers. Close the pool's record in the ledger, and its watchers.

        If the end of a machine is not confirmed, the record is left open. Raises StillRunning or ErrorGroup if
        something could not be removed.
        """
        try:
            if self._given_away is None:  # otherwise, what is left is the new owner's
                close = partial(self.rental.close, self.state.error, proved=not self._unproved())
                await beside(partial(copy_context().run, close), "skypool end")
        finally:
            await beside(self._close_watchers, "skypool closing")

    def _close_watchers(self) -> None:
        """Close what watches the pool, and tell the user what failed. Blocks, for at most 24 s.

        The logs have all that is told here. Whoever follows them sees their end in the socket for other terminals.
        """
        parts: list[closing.Part] = [
            ("the forwards", self.forwards.close),
            ("the file of the samples", self.health.flush),
            ("the history of the pool", self.history.flush),
            ("a listener of the pool's events", partial(self._settle, _TO_CLOSE)),
        ]
        if self.metering.exporters:
            parts.append(("the metrics", self.metering.close))
        logs: closing.Part = ("the logs of the pool", self._close_log)
        others: closing.Part = ("the connections of other terminals", self._close_observers)
        for at_once in (parts, [logs], [others]):
            for failure in closing.close_all(at_once, _TO_CLOSE):
                self._notice(f"the pool has ended, but {failure}")

    def close_metrics(self) -> None:
        """Close the exporters of a pool that could not start. Blocks, for at most 8 s. Any thread may call this."""
        for failure in closing.close_all([("the metrics", self.metering.close)], _TO_CLOSE):
            self._notice(f"the pool could not start, and {failure}")

    def _close_observers(self) -> None:
        if self._observers is not None:
            self._observers.close()

    async def _terminate(self, nodes: tuple[int, ...]) -> None:
        """End the machines of these nodes, and report each to the state machine, as `Terminated` or `StillThere`.

        Attempts are repeated every 5 s, until the provider confirms the end of all machines. An attempt that begins
        while the pool is ending is the last. A machine of the user's own that was lost and cannot be reached counts as
        ended; the user is told. Nodes that were given to another process are left running, but reported as
        `Terminated`.
        """
        from tenacity import AsyncRetrying, retry_if_result

        for node in nodes:
            if node in (self._given_away or ()):
                self.apply(states.Terminated(node))
        nodes = tuple(node for node in nodes if node not in (self._given_away or ()))
        if not nodes:
            return
        await self._record_idle()
        await asyncio.gather(*(self._leave(node) for node in nodes), return_exceptions=True)
        left = {node: self.state.instance_of(node) for node in nodes}
        lost = {node for node in nodes if isinstance(self.state.nodes[node].error, ConnectionLost)}
        is_last = False

        async def end() -> Mapping[int, StillRunning]:
            """Try once to end the machines in `left`. Return the errors of those that remain, by node number."""
            nonlocal is_last
            is_last = self.state.phase in (Phase.DRAINING, Phase.ENDED)
            return await self._end(left)

        again = AsyncRetrying(
            stop=lambda _: is_last,
            retry=retry_if_result(bool),
            wait=lambda _: _AGAIN,
            sleep=self._pause,
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else {},
        )
        unproved: Mapping[int, StillRunning] = await again(end)
        for node, error in unproved.items():
            if node in lost and left[node].id in {getattr(each, "id", "") for each in error.unreachable}:
                self._notice(f"node {node} was lost, and skypool's processes there cannot be ended from here: {error}")
                self.rental.note_ended(left[node])
                self.apply(states.Terminated(node))
            else:
                self.apply(states.StillThere(node, error))

    async def _record_idle(self) -> None:
        """Record the idle time of nodes until now. After 5 s or an error, tell the user that this failed, and go on."""
        try:
            async with asyncio.timeout(_TO_RECORD):
                await beside(self.idle.record, "skypool idle time")
        except Exception as e:  # noqa: BLE001 - the machines must end in any case
            self._notice(f"the idle time of nodes was not recorded: {blame.told(e)}")

    async def _end(self, left: dict[int, Instance]) -> Mapping[int, StillRunning]:
        """Try once to end the machines in `left`. Remove those that ended, and return the errors of the rest."""
        now = time.monotonic()
        silent = {node: now - self._heard[node] for node in left if node in self._heard}
        try:
            context, end = copy_context(), partial(self.rental.terminate, list(left.values()), silent)
            unproved = await beside(lambda: context.run(end), "skypool end")
        except Exception as e:  # noqa: BLE001 - whatever it is, the machines may still cost something
            error = not_ended({f"node {node}": blame.told(e) for node in left}, list(left.values()))
            error.__cause__ = e
            unproved = dict.fromkeys(left, error)
        try:
            async with asyncio.timeout(_TO_RECORD):
                self._paid = await beside(lambda: self.rental.known_receipt, "skypool receipt")
        except Exception:  # noqa: BLE001 - what it costs is not known, and the pool's end says so
            self._paid = None
        for node in sorted(left.keys() - unproved.keys()):
            del left[node]
            self.apply(states.Terminated(node))
        return unproved

    async def _leave(self, node: int) -> None:
        self.health.store.forget(node)
        await self._stop_reaching(node)
        link = self._links.pop(node, None)
        if link is not None:
            silence = link.silence
            if silence is not None:
                self._heard[node] = time.monotonic() - silence
            await link.close(bye=True)

    async def _pause(self, seconds: float) -> None:
        """Sleep for this many seconds, but no longer than until the pool begins to end."""
        until = time.monotonic() + seconds
        while not self._is_ending and (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(0.05, left))

    async def _stop_reaching(self, node: int) -> None:
        """Cancel the task that sets a node up, wait for it so that it starts no agent, and close the connection."""
        task = self._reaching.pop(node, None)
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task])
        await self._connector.drop(node)

    async def _adopt(self) -> None:
        """Connect to the nodes of a pool that another process started, and take them over. The pool is then ready.

        If one node cannot be taken over, none is: the links are closed, and all nodes keep running. If all are taken
        over, running calls of generator functions are cancelled, because only the former process could read the items.
        """
        instances = await asyncio.to_thread(self.rental.adopt)
        try:
            for instance in instances:
                access = await asyncio.to_thread(self.rental.driver_of(instance).access, instance)
                await self._connector.open(instance, access, access.python or "", attach=True)
                if self._lost_early is not None:
                    raise self._lost_early
        except BaseException as e:
            self.dispatch.close(e)
            await self._give_back()
            raise
        slices = Rented(tuple(instances)).slices
        nodes: dict[int, states.Node] = {}
        for hosts in slices:
            for instance in hosts:
                host = instance.node - hosts[0].node
                nodes[instance.node] = states.Node(instance.node, Phase.READY, instance, host=host)
        fewest = len(slices) if self.terms.replaces else 0
        most = max(len(slices), self.terms.maximum) if self.terms.replaces else len(slices)
        self.state = self._performed = states.Pool(fewest, most, Phase.READY, nodes, hosts=max(map(len, slices)))
        self._trust_levels.announce()
        for node, link in self._links.items():
            for call in self._welcomes[node].streams:
                link.send(frame(Kind.CANCEL, {"id": call, "grace": self.terms.grace}))

    async def _give_back(self) -> None:
        """Give nodes back, as the pool could not be taken over: they end when they would have ended without this."""
        try:
            seconds = await asyncio.to_thread(self.rental.give_back)
        except SkypoolError as e:
            self._notice(blame.told(e))
            seconds = None
        for link in self._links.values():
            if seconds is None:
                await link.close(bye=False)
            else:
                await link.leave(seconds)

    def _on_welcome(self, node: int, welcome: Welcome) -> None:
        """At the first connection to a node of a pool that is taken over, take over the calls of the former process."""
        if self.terms.attach and node not in self.dispatch.node_queues:
            self.inherited += self.dispatch.inherit(node, welcome, self._links[node])
            self.services.inherit(node)

    @property
    def _may_grow(self) -> bool:
        return self.terms.replaces and self.state.maximum > self.state.minimum

    def _watch(self) -> None:
        """Start the task that makes the pool grow while calls wait, unless it runs already."""
        if self._watching is None or self._watching.done():
            self._watching = self._spawn(self._watch_pressure())

    async def _watch_pressure(self) -> None:
        """Let a pool that may grow do so while calls wait: report `Pressure` after each second of waiting.

        Nothing is reported during the pause after a failed attempt to grow.
        """
        waited = 0
        while self.state.phase is Phase.READY and self._may_grow:
            await asyncio.sleep(0.25)
            waited = waited + 1 if self.dispatch.pressed else 0
            if waited >= 4 and time.monotonic() >= self._grow_from:
                waited = 0
                self.apply(states.Pressure())

    # --- messages from nodes ---------------------------------------------------------------------------------

    def _listener_of(self, node: int) -> NodeListener:
        return NodeListener(
            node,
            self.terms.name,
            self.dispatch,
            self._reports,
            self._connector.links,
            self._connector.lenders,
            self.emit,
            self._on_welcome,
            self._on_notice,
            self._on_lost,
            self._on_samples,
            lambda: self._limits.is_due,
        )

    def _on_samples(self, node: int, samples: Sequence[NodeSample]) -> None:
        """Pass measurements of a node to the watches of health and idle time. Any thread may call this."""
        try:
            self.health.arrived(node, samples)
            self.idle.arrived(node, samples)
        except Exception as e:  # noqa: BLE001 - otherwise the link would give the node up
            if (words := alike(e)) not in self._told:
                self._told.add(words)
                self._notice(f"samples of node {node} cannot be kept: {blame.told(e)}")

    def _on_notice(self, node: int, at: float) -> None:
        """Handle a node's notice that its provider takes the machine back at `at`, in seconds since 1970.

        Any thread may call this. From then on, all hosts of the node's slice get no more calls. The engine's thread
        reports the notice to the state machine later. While the pool is being taken over, do nothing: the node repeats
        the notice.
        """
        if node not in self.state.nodes:
            return
        self.dispatch.expect(1)  # a gang must not give up before it is decided if the node is replaced
        self._soon(self._on_noticed, node, at)  # before it is drained
        for each in self.state.slice_of(node):
            self.dispatch.drain(each.node)
            if self.dispatch.gangs is not None:
                self.dispatch.gangs.interrupted(each.node, at)

    def _on_noticed(self, node: int, at: float) -> None:
        self.departures.noticed(node, at)
        self.dispatch.expect(-1)

    def _on_unhealthy(self, node: int, error: NodeUnhealthy) -> None:
        """Stop sending calls to an unhealthy node, and let its driver avoid the machine from now on.

        Do nothing during the node's setup: the setup has a health check of its own.
        """
        state = self.state.nodes.get(node)
        if state is None or state.phase is not Phase.READY or state.is_leaving:
            return
        self.apply(states.Unhealthy(node, error))
        instance = self.state.instance_of(node)
        self._spawn(asyncio.to_thread(self.rental.rejected, instance, error), "the report of an unhealthy machine")

    def _on_failed(self, pending: PendingCall, error: BaseException, node: int) -> None:
        """Tell the user that a call ended with an error. Do nothing for a service. Any thread may call this."""
        if pending.service:
            return
        name = self.terms.name
        self.emit(events.CallFailed(pool=name, node=node, call=pending.name, error=blame.told(error)))

    def _report(self, event: events.Event) -> None:
        """Emit an event of a node. For errors of gangs, also keep the end of what their processes print.

        Output that the user is not to see, as with `output="rank0"`, is only kept in files. Any thread may call this.
        """
        gangs = self.dispatch.gangs
        if gangs is None or not isinstance(event, events.Output) or gangs.heard(event.call, event.text):
            self.emit(event)
        else:
            self._keep(event)

    def _counted(self, status: events.NodeStatus) -> events.NodeStatus:
        """Return a node's status with the numbers of calls that this process counts. Any thread may call this."""
        counts = self.dispatch.tally.on(status.node)
        return replace(
            status,
            busy=sum(each.busy for each in counts.slots),
            cpu_busy=sum(each.busy for each in counts.slots if each.on_cpu),
            waiting=counts.waiting,
            done=counts.done,
            running=counts.names,
        )

    def _on_gang_failed(self, failure: GangFailure) -> None:
        """Tell the user that a gang has failed, and if it runs again. Any thread may call this."""
        event = events.GangFailed(
            pool=self.terms.name,
            node=failure.node,
            call=failure.call,
            rank=failure.rank,
            error=blame.told(failure.error),
            others=tuple(blame.told(each, _LONGEST_OTHER) for each in failure.others),
            attempt=failure.attempt,
            again=failure.again,
        )
        self.emit(event)

    def _on_retry(self, pending: PendingCall, error: BaseException, node: int, attempt: int) -> None:
        """Tell the user that a call runs again because of `error`. Any thread may call this."""
        name = self.terms.name
        self.emit(
            events.CallRetried(
                pool=name,
                node=node,
                call=pending.name,
                attempt=attempt,
                reason=blame.cut(blame.text_of(error)),
            )
        )

    def _on_lost(self, node: int, error: ConnectionLost) -> None:
        """Start a task that handles the loss of a node, which its link has given up. Do not wait for the task."""
        self._spawn(self._lose(node, error))

    async def _lose(self, node: int, error: ConnectionLost) -> None:
        """Report a lost node to the state machine. But if the loss is part of a planned end of the pool, end the pool.

        If another process has taken the pool over, give the pool up. A node that reports this is believed only if it is
        trusted: a stranger's machine could claim it to be left running.
        """
        if node not in self.state.nodes:  # `_adopt` has not taken over all nodes yet
            self._lost_early = error
            return
        try:
            if isinstance(error, TakenOver) and not self._trust_levels.is_stranger(node):
                raise error
            await self._limits.check_loss()
        except TakenOver as e:
            await self._hand_over(e)
        except PLANNED as e:
            self.apply(states.Stop(e))
        except LedgerError:  # whether the end was planned is not known
            await self.departures.lost(node, error)
        else:
            await self.departures.lost(node, error)

    async def _hand_over(self, error: TakenOver) -> None:
        """Give the pool up, because another process owns it now. Ready nodes are left alone, and keep running.

        Machines that are still being set up are ended, as the new owner does not have them. Calls get the error. Does
        nothing if the pool is ending or has ended.
        """
        if self._given_away is not None or self.state.phase in (Phase.DRAINING, Phase.ENDED):
            return
        self._given_away = frozenset(n.node for n in self.state.nodes.values() if n.phase is Phase.READY)
        self.dispatch.close(error)
        self._notice(f"this process gives the pool up, and leaves its machines to the new owner: {error}")
        for node in self._given_away:
            link = self._links.pop(node, None)
            if link is not None:
                await link.close(bye=False)
        self.apply(states.Stop(error))

    def _on_drained(self, node: int) -> None:
        self._soon(self._drained, node)

    def _drained(self, node: int) -> None:
        """Report a leaving node that has no call left as `Drained`. If services run on it, stop them before."""
        if self.dispatch.roster.services_on(node):
            if node not in self._clearing:
                self._clearing.add(node)
                self._spawn(self._clear(node))
        else:
            self.apply(states.Drained(node))

    async def _clear(self, node: int) -> None:
        await self.services.leave(node)
        self.apply(states.Drained(node))

    def _on_feed(self, pending: PendingCall, arg: int, n: int) -> None:
        """Let a thread send item `n` (from 1) of an iterator to the node that asked for it. This does not wait.

        `arg` is the index of the iterator among the call's iterator arguments, from 0.
        """
        feeder = self._feeders.get((pending.id, arg))
        if feeder is None:
            for key in [key for key, known in self._feeders.items() if known.is_over]:
                del self._feeders[key]
            feeder = self._feeders[pending.id, arg] = Feeder(self.dispatch, pending, arg)
        feeder.want(n)
