"""`PoolEngine`: runs a pool. It rents, connects, sets up, replaces and ends nodes, as `lifecycle` decides.

`lifecycle` is a pure state machine: it gets events, and returns actions. The engine performs the actions in the
thread of `skypool.event_loop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from skypool import events
from skypool.calls.call_events import CallEvents
from skypool.calls.dispatch import Dispatch
from skypool.calls.pending_calls import PendingCall
from skypool.calls.upstream import Feeder
from skypool.devices.sample import NodeSample
from skypool.drivers.contract import Driver
from skypool.errors import ConnectionLost, NodeUnhealthy, PoolClosed, SkypoolError, StillRunning, together
from skypool.event_loop import Loop, beside
from skypool.head.states import Status
from skypool.link.agent_messages import Welcome
from skypool.link.reports import NodeReports
from skypool.pool import interpreter_exit, states, watch_closing
from skypool.pool.agents import Agents
from skypool.pool.call_advice import Advice
from skypool.pool.call_ends import CallEnds
from skypool.pool.connections import Connections
from skypool.pool.departures import Departures
from skypool.pool.facts import Facts
from skypool.pool.growth import Launches
from skypool.pool.health import HealthWatch
from skypool.pool.idle_accounting import IdleWatch
from skypool.pool.idle_shutdown import SLACK, LingerWatch
from skypool.pool.life import Life
from skypool.pool.limits import Limits
from skypool.pool.node_count import NodeCount
from skypool.pool.node_listener import NodeListener
from skypool.pool.node_startup import NodeStartup
from skypool.pool.open_forwards import Forwards
from skypool.pool.replacement import alike
from skypool.pool.saving import Saving, check_plan
from skypool.pool.service_supervisor import Services
from skypool.pool.states import Phase
from skypool.pool.takeover import Takeover
from skypool.pool.tending import Tending
from skypool.pool.terminations import Terminations
from skypool.pool.trust_levels import TrustLevels
from skypool.pool.watch import Watch, Watches
from skypool.provision.setup_payload import NodeSetup
from skypool.rental.handover import Handover, NoSupply
from skypool.rental.pool_account import Rental
from skypool.rental.pool_terms import Terms
from skypool.rental.supply import Supply
from skypool.safety import descriptors
from skypool.safety.received_data_limit import Quota
from skypool.wire import error_text
from skypool.wire.frames import Kind, frame
from skypool.wire.save_orders import FolderState

if TYPE_CHECKING:
    from skypool.pool.network import NetworkCheck

_LOOK_ABANDONED = 0.2
"""Seconds between two checks whether the calls have ended of a pool whose user has lost the pool object."""
_TO_CLOSE = 8.0
"""The most seconds for which a pool whose machines have ended waits for watches that close at the same time."""


class PoolEngine:
    """The engine of one pool: it performs the actions of the state machine `lifecycle`, and reports the results back.

    A method runs in the thread of `skypool.event_loop` unless its description says otherwise.

    Args:
        stream: receives the events for the user.
        drivers: the drivers of the pool's providers; () for a pool without an account of a provider.
        watches: the watches of the pool: objects that observe it, such as its logs.
        handover: the data of a pool that another process hands over to this one; None for any other pool.

    Attributes:
        life: the state of the pool.
        departures: handles the loss of nodes.
        takeover: takes the pool over from another process, or gives it up.
        node_count: changes the number of nodes, and waits for them.
        call_ends: ends calls, streams and services.
        saving: has nodes save folders to buckets.
        facts: what the pool shows to its watches.
        watches: runs the watches.
    """

    def __init__(
        self,
        terms: Terms,
        drivers: Sequence[Driver],
        stream: events.EventStream,
        watches: Sequence[Watch] = (),
        handover: Handover | None = None,
    ) -> None:
        self.terms = terms
        self.emit = stream.emit
        self._settle = stream.settle
        told = CallEvents(terms.name, stream.emit)
        self.dispatch = Dispatch(terms.name, told, self._on_feed, self._on_drained, terms.wait)
        self.rental = Rental(terms, stream.emit)
        self.supply = Supply(drivers, terms, self.rental) if drivers else None
        self._handover = handover
        self.connections = Connections()
        self.life = Life(terms, stream.emit, self.rental, self.dispatch, self.connections, self)
        self.trust_levels = TrustLevels(terms.trust, terms.allow_results, self.life.notice)
        tell = partial(self.life.soon, self.life.notice)  # later, as a quota is taken while events are heard one by one
        quota = Quota(self.trust_levels.is_known_stranger, tell)
        self.watches = Watches(watches, quota, self.life.notice)
        self._unlisten = stream.follow(self.watches.hear)
        self.services = Services(terms.name, self.dispatch, stream, self.trust_levels.is_stranger)
        self._reports = NodeReports(
            terms.name,
            self._report,
            self.dispatch.roster.acknowledge,
            self.trust_levels.is_stranger,
            self.services.name_of,
            self.dispatch.roster.function_of,
            self._counted,
        )
        self.health = HealthWatch(
            terms.name,
            quota,
            self.trust_levels.is_stranger,
            self.emit,
            self._on_unhealthy,
        )
        self.call_ends = CallEnds(self.life, self.dispatch, self.services)
        self.linger = LingerWatch(terms, self.dispatch, self.rental, self.life, self.call_ends)
        self.limits = Limits(terms, self.rental, self.linger, self.connections.links, lambda: self.saving.reserve)
        self.node_setup = NodeSetup(terms)
        agents = Agents(terms, self.node_setup, self.life, self.trust_levels, self.limits, self)
        self.saving = Saving(
            self.life, self.connections, self.trust_levels, terms.liveness, lambda: self.rental.session
        )
        self._node_startup: NodeStartup | None = None
        if self.supply is not None:
            self._node_startup = NodeStartup(
                terms, self.node_setup, self.life, self.supply, agents, self.health, self.saving
            )
        self.idle = IdleWatch(self.dispatch, self.rental, self.life)
        self.takeover = Takeover(terms, self.life, self.supply, agents, self.dispatch, self.services)
        self.departures = Departures(self.life, self.supply, self.dispatch, self.services, self.limits, self.takeover)
        self._launches = Launches(terms, self.life, self.supply, self.dispatch)
        self.node_count = NodeCount(terms, self.life, self.supply, self.dispatch, self._launches)
        self._terminations = Terminations(self.life, self.supply, self._node_startup, self.idle, self.saving)
        self._tending = Tending(self.life, self.supply, self.idle, self.limits, self.takeover)
        self.advice = Advice(terms, self.life)
        self.forwards = Forwards(self.connections.ways, self.life.notice)
        self.facts = Facts(self, stream, quota)
        self._closing: asyncio.Task[None] | None = None
        self._told: set[str] = set()
        self._feeders: dict[tuple[int, int], Feeder] = {}
        self._network: NetworkCheck | None = None
        self._network_lock = threading.Lock()

    @property
    def state(self) -> states.Pool:
        """The state of the pool now. Any thread may read it."""
        return self.life.state

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
        if self.watches.some_needed:
            await asyncio.to_thread(self.watches.begin_needed, self.facts)
        if self.terms.attach:
            if self._node_startup is not None:  # for nodes that replace others
                await asyncio.to_thread(self._node_startup.check_places)
            await self.takeover.take(self._handover)
            self.trust_levels.announce()
            self.watches.begin(self.facts)
            self._begin_tasks()
        elif self.supply is None or self._node_startup is None:
            raise NoSupply(self.terms.name, "rent its nodes")
        else:
            await asyncio.to_thread(self._node_startup.pack)
            await asyncio.to_thread(self._node_startup.check_places)
            plan = await self.supply.look_out(self.life.pause)
            check_plan(self.terms, plan, self.supply.drivers, self._node_startup.data)
            self._node_startup.tell_of_data(plan.offers)
            await asyncio.to_thread(self.supply.begin, self.state.minimum)
            self.watches.begin(self.facts)
            if self.state.phase is Phase.ENDED:  # it was stopped before the ledger was open
                await self._close()
            try:
                self._begin_tasks()
                self.life.apply(states.Start(plan.offers[0].hosts))
                await self.life.until(Phase.READY, Phase.ENDED)
                if self.state.phase is Phase.READY and self.terms.need.private_network:
                    await self._check_network()
            except BaseException:
                await asyncio.shield(self.stop())
                raise
            if self.state.phase is Phase.ENDED:
                raise await self._why_it_ended()
        self._launches.watch()

    def _begin_tasks(self) -> None:
        watch_closing.prepare()
        self.life.spawn(self._tending.keep_lease())
        self.life.spawn(self._tending.keep_limits())
        self.life.spawn(self.limits.watch_pauses())
        self.life.spawn(self.idle.keep(), "the record of idle time")
        self.life.spawn(self.linger.keep())

    @property
    def network(self) -> NetworkCheck:
        """The check that nodes can connect to each other. It remembers which can. Any thread may use this."""
        from skypool.pool.network import NetworkCheck  # imported here: few pools need it, and it would delay each start

        with self._network_lock:
            if self._network is None:
                self._network = NetworkCheck(self.dispatch, self.terms.check, self._network_advice, self.life.notice)
            return self._network

    async def _check_network(self) -> None:
        """Check that the nodes reach each other. If one is lost, the first call on several nodes checks it instead."""
        with contextlib.suppress(ConnectionLost):
            await asyncio.to_thread(lambda: self.network.ensure(self.dispatch.roster.nodes()))

    def _network_advice(self, node: int) -> str:
        """Return a sentence of advice to the user for the case that other nodes cannot connect to this node."""
        from skypool.pool.network import advice_for

        driver = None if self.supply is None else self.supply.driver_of(self.state.instance_of(node))
        return advice_for(driver, self.terms.need.private_network)

    async def _why_it_ended(self) -> BaseException:
        """End what is left of a pool that could not become ready. Return its error, with notes on further errors."""
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
        await self.call_ends.end_streams(reason)
        await self.call_ends.end(reason)
        self.life.apply(states.Stop())
        await self.life.until(Phase.ENDED)
        closing = [self._closing] if self._closing else []
        failed = await asyncio.gather(*closing, return_exceptions=True)
        descriptors.forget(self)
        self.life.cancel_tasks()
        left = [*self._terminations.unproved(), *(e for e in failed if isinstance(e, Exception))]
        if left:
            raise together(
                f"pool {name!r} has ended, but it is not confirmed that each of its machines has; run `skypool "
                f"down {name}` to try again",
                left,
            )

    async def leave(self, seconds: float) -> None:
        """End all calls and services, and leave the ready nodes for `seconds` to a process that takes the pool over.

        A separate process ends their machines when the time is over. Budget and lifetime may end them earlier. The
        machines of nodes that are not ready, or cannot be told to stay, end now. If no machine can stay, or the pool is
        ending already, all machines end now.

        Raises:
            StillRunning, ErrorGroup: the end of some machines is not confirmed.
        """
        name = self.terms.name
        supply = self.supply
        if self.state.phase is not Phase.READY or self.life.given_away is not None or supply is None:
            await self.stop()
            return
        for node, link in self.connections.links.items():
            services = {each.id for each in self.dispatch.roster.services_on(node)}
            for call in [each for each in self.dispatch.roster.awaited(node) if each not in services]:
                link.send(frame(Kind.CANCEL, {"id": call, "grace": self.terms.grace}))
            self.dispatch.roster.acknowledge(node)
        reason = PoolClosed(
            f"this process has left pool {name!r}; ComputePool.attach({name!r}) takes its machines over"
        )
        await self.call_ends.end(reason)
        await self._terminations.record_idle()
        try:
            seconds, notice = await asyncio.to_thread(supply.leave, seconds)
        except SkypoolError as e:
            self.life.notice(str(e))
            await self.stop()
            return
        ready = [each.node for each in self.state.nodes.values() if each.phase is Phase.READY and not each.is_leaving]
        links = {node: self.connections.links[node] for node in ready if node in self.connections.links}
        parted = await asyncio.gather(*(each.leave(seconds + SLACK) for each in links.values()))
        told = dict(zip(links, parted, strict=True))
        self.life.given_away = frozenset(
            node for node in links if all(told.get(each.node) for each in self.state.slice_of(node))
        )
        if not self.life.given_away:  # otherwise they are closed with the record in the ledger
            self.life.given_away = None
        else:
            self.life.notice(notice)
        await self.stop()

    def abandon(self, hush: Callable[[], None] | None) -> None:
        """End the pool as soon as its calls have ended, because its user has lost the pool object. Do not wait.

        Any thread may call this, with any lock held, because it is called while garbage is collected. `hush` is called
        at the end, and stops the output about the pool.
        """
        if (loop := Loop.running()) is not None:
            loop.call_soon_threadsafe(lambda: self.life.spawn(self._end_abandoned(hush)))

    async def _end_abandoned(self, hush: Callable[[], None] | None) -> None:
        """Wait until all calls have ended, and stop the pool. Errors become notices, as there is no caller to tell."""
        if not self.life.is_ending:
            self.life.notice(
                f"pool {self.terms.name!r} was never stopped, and the program cannot use it any more: it ends when its "
                "calls have ended"
            )
        while self.dispatch.unfinished and not self.life.is_ending:
            await asyncio.sleep(_LOOK_ABANDONED)
        try:
            await self.stop()
        except Exception as e:  # noqa: BLE001 - there is no caller who could be told
            self.life.notice(error_text.told(e))
        interpreter_exit.forget(self)
        if hush is not None:
            await beside(hush, "skypool closing")

    def end_now(self) -> None:
        """End every machine in the calling thread, and wait for the proof, as at the interpreter's exit.

        Any thread may call this. Raises StillRunning or ErrorGroup if an end is not confirmed.
        """
        descriptors.release()
        self._terminations.end_now()

    def hand_over_now(self) -> None:
        """Let a new process end the machines. Any thread may call this.

        Raises SkypoolError if the process cannot be started.
        """
        self._terminations.hand_over_now()

    def close_now(self) -> None:
        """End the calls and close the watches of the pool, such as logs and metrics, at the interpreter's exit.

        Any thread may call this.
        """
        self.call_ends.end_now()
        self.close_watches()

    @property
    def _setup(self) -> NodeStartup:
        """The setup of rented machines. Raises NoSupply if nothing can be rented."""
        if self._node_startup is None:
            raise NoSupply(self.terms.name, "set up a machine")
        return self._node_startup

    # --- actions ---------------------------------------------------------------------------------------------

    def perform(self, action: states.Action) -> None:
        """Perform an action of the state machine, or start a task that performs it, without waiting for the task."""
        match action:
            case states.Launch(nodes):
                self.life.spawn(self._launches.launch(nodes))
            case states.Reach(node):
                self._setup.begin_reach(node)
            case states.Bootstrap(node):
                self._setup.begin_bootstrap(node)
            case states.Admit(node):
                self.departures.admitted(node)
                self.dispatch.add(node, self.connections.welcomes[node], self.connections.links[node])
                self.services.admitted(node)
                self.trust_levels.announce()
                if (found := self.health.of(node)) is not None and found.state == "unhealthy":  # since it was set up
                    self.life.soon(self.departures.unhealthy, node, self.health.error_of(node))
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
                link = self.connections.links[node]
                self.life.spawn(self.departures.follow(node, at, lambda: link.is_up))
            case states.Dismiss(node, error, others):
                self.dispatch.lose(node, error, others)
                close = partial(self.forwards.close, node, *others)
                self.life.spawn(beside(close, "skypool forwards"), "the end of forwards")
                if not self.dispatch.node_queues and self.state.phase is Phase.ENDED:
                    self.dispatch.close(error)
            case states.Terminate(nodes):
                for node in nodes:
                    self.health.samples.forget(node)
                self.life.spawn(self._terminations.terminate(nodes))
            case states.Announce(phase):
                detail = error_text.cut(str(self.state.error)) if self.state.error else ""
                paid = self._terminations.paid if phase is Phase.ENDED else None
                usd, idle_usd = (None, None) if paid is None else (paid.usd, paid.idle_usd)
                staying = len(self.life.given_away or ()) if phase is Phase.ENDED else 0
                name = self.terms.name
                self.emit(
                    events.PoolPhase(
                        pool=name, phase=phase.value, detail=detail, usd=usd, idle_usd=idle_usd, staying=staying
                    )
                )
                if phase in (Phase.DRAINING, Phase.ENDED):
                    if self.supply is not None:
                        self.supply.stopping.set()
                    error = self.state.error or PoolClosed(f"pool {self.terms.name!r} has ended")
                    self.life.spawn(self.call_ends.cut_off(error))
                if phase is Phase.ENDED:
                    self._closing = self.life.spawn(self._close())

    async def _close(self) -> None:
        """Remove leftovers at the providers, and close the record in the ledger and the watches."""
        try:
            await self._terminations.close()
        finally:
            await beside(self.close_watches, "skypool closing")

    def close_watches(self) -> None:
        """Close the watches of the pool, and tell the user what failed. Blocks at most 24 s.

        Any thread may call this.
        """
        others: list[watch_closing.Part] = [
            ("the forwards", self.forwards.close),
            ("a listener of the pool's events", partial(self._settle, _TO_CLOSE)),
        ]
        self.watches.close(_TO_CLOSE, others)
        self._unlisten()

    # --- messages from nodes ---------------------------------------------------------------------------------

    def listener_of(self, node: int) -> NodeListener:
        """Return a new listener for the link to a node."""
        return NodeListener(node, self.dispatch, self._reports, self.life, self)

    @property
    def is_due(self) -> bool:
        """True if the budget or lifetime ends the pool within 2 s. Broken connections are then part of that end."""
        return self.limits.is_due

    def on_welcome(self, node: int, welcome: Welcome) -> None:
        self.takeover.on_welcome(node, welcome)

    def on_notice(self, node: int, at: float) -> None:
        self.departures.on_notice(node, at)

    def on_handed(self, status: Status) -> None:
        self.takeover.on_handed(status)

    def on_lost(self, node: int, error: ConnectionLost) -> None:
        self.takeover.on_lost(error)
        self.departures.on_lost(node, error)

    def _on_unhealthy(self, node: int, error: NodeUnhealthy) -> None:
        self.departures.unhealthy(node, error)

    def _on_drained(self, node: int) -> None:
        self.departures.on_drained(node)

    def on_samples(self, node: int, samples: Sequence[NodeSample]) -> None:
        """Pass measurements of a node to the objects that judge its health and its idle time.

        Any thread may call this.
        """
        try:
            self.health.arrived(node, samples)
            self.idle.arrived(node, samples)
        except Exception as e:  # noqa: BLE001 - otherwise the link would give the node up
            if (words := alike(e)) not in self._told:
                self._told.add(words)
                self.life.notice(f"samples of node {node} cannot be kept: {error_text.told(e)}")

    def on_saved(self, node: int, folders: Sequence[FolderState]) -> None:
        self.saving.heard(node, folders)

    def _report(self, event: events.Event) -> None:
        """Emit an event of a node, in any thread. Output that the user is not to see is only written to files."""
        gangs = self.dispatch.gangs  # they keep the end of what their processes print, for error messages
        if gangs is None or not isinstance(event, events.Output) or gangs.heard(event.call, event.text):
            self.emit(event)
        else:
            self.watches.hear(event, is_hidden=True)

    def _counted(self, status: events.NodeStatus) -> events.NodeStatus:
        """Return a copy of a node's status report, with the numbers of calls as this process has counted them."""
        counts = self.dispatch.tally.on(status.node)
        return replace(
            status,
            busy=sum(each.busy for each in counts.slots),
            cpu_busy=sum(each.busy for each in counts.slots if each.on_cpu),
            waiting=counts.waiting,
            done=counts.done,
            running=counts.names,
        )

    def _on_feed(self, pending: PendingCall, arg: int, n: int) -> None:
        """Have a thread send item `n` (from 1) of iterator argument `arg` (from 0) to a call's node. Do not wait."""
        feeder = self._feeders.get((pending.id, arg))
        if feeder is None:
            for key in [key for key, known in self._feeders.items() if known.is_over]:
                del self._feeders[key]
            feeder = self._feeders[pending.id, arg] = Feeder(self.dispatch, pending, arg)
        feeder.want(n)
