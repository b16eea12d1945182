"""Runs a pool: rents, connects and sets up nodes, feeds calls to them, and replaces them, as `lifecycle` decides.

All of it happens in the thread of `skypool.event_loop`.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from skypool import events
from skypool.calls.dispatch import Dispatch
from skypool.calls.futures import CallFuture
from skypool.calls.pending import PendingCall
from skypool.calls.upstream import Feeder
from skypool.errors import BootstrapError, BudgetExceeded, ConnectionLost, PoolClosed, StillRunning, together
from skypool.event_loop import Loop
from skypool.link.connection import Arrival, Link
from skypool.link.inbound import ModuleAsked, Pong, Printed, Welcome
from skypool.link.reports import NodeReports
from skypool.model import Access, Instance
from skypool.pool import lifecycle as life
from skypool.pool.lifecycle import Phase
from skypool.pool.spot import Departures
from skypool.pool.trust_levels import TrustLevels
from skypool.provision import health_check
from skypool.provision.agent_config import AgentConfig, SlicePlace
from skypool.provision.bootstrap import SetupBundle, bootstrap, reach
from skypool.provision.node_setup import NodeSetup
from skypool.rental.launch import Rented
from skypool.rental.rental import Rental
from skypool.rental.request import Terms
from skypool.shipping import bundle, user_modules
from skypool.wire import codec
from skypool.wire.frames import Kind, frame
from skypool.wire.transport import Stream

_AGAIN = 5.0
_SAY_EVERY = 1.0
"""Seconds between two events about files that are packed."""
_CALLED = {"cuda": "GPUs", "rocm": "GPUs", "tpu": "TPU chips"}
"""What devices of a kind are called in a notice."""
_GROW_AGAIN = (5.0, 300.0)
"""Seconds, at first and at most, until a pool that could not grow tries to again; doubled with every failure."""
_NOTICED_AGAIN = 0.1
"""Seconds between two times that the same node is heard to say that its machine is taken back."""


class _Ear:
    """Hears one node's link and says which node it was."""

    def __init__(self, engine: PoolEngine, rank: int) -> None:
        self._engine, self._rank = engine, rank
        self.on_arrivals = partial(engine.on_arrivals, rank)

    def on_welcome(self, welcome: Welcome) -> None:
        self._engine.on_welcome(self._rank, welcome)

    def on_down(self, reason: str) -> None:
        self._engine.dispatch.pause(self._rank)
        self._engine.emit(events.LinkDown(pool=self._engine.terms.name, node=self._rank, reason=reason))

    def on_up(self, welcome: Welcome) -> None:
        self._engine.emit(events.LinkUp(pool=self._engine.terms.name, node=self._rank))
        self._engine.dispatch.resume(self._rank, welcome)

    def on_lost(self, error: ConnectionLost) -> None:
        self._engine.on_lost(self._rank, error)


class PoolEngine:
    """A pool at work: its nodes, their links, and the calls on them.

    Everything but `start`, `stop` and `end_now` happens in the engine's thread.
    """

    def __init__(self, terms: Terms, stream: events.Stream) -> None:
        self.terms, self.emit = terms, stream.emit
        self.state = life.Pool(terms.minimum, terms.maximum)
        self.dispatch = Dispatch(terms.name, self._on_failed, self._on_retry, self._on_feed, self._on_drained)
        self.rental = Rental(terms, stream.emit)
        self._trust_levels = TrustLevels(terms.trust, terms.allow_results, self._notice)
        self._reports = NodeReports(terms.name, self.emit, self.dispatch.acknowledge, self._trust_levels.is_stranger)
        self.departures = Departures(lambda rank: self.state.nodes[rank], self.rental.driver_of, self.apply)
        self.inherited: list[CallFuture[Any]] = []
        self._session = secrets.token_hex(8)
        self._closing: asyncio.Task[None] | None = None
        self._node_setup = NodeSetup(terms)
        self._links: dict[int, Link] = {}
        self._welcomes: dict[int, Welcome] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._reaching: dict[int, asyncio.Task[None]] = {}
        self._reached: dict[int, tuple[Access, SetupBundle | None, Stream | None]] = {}
        self._came: dict[str, asyncio.Event] = {}
        self._heard: dict[int, float] = {}
        self._changed = asyncio.Event()
        self._noticed: dict[int, float] = {}
        self._lenders: dict[int, user_modules.Lender] = {}
        self._advised = False
        self._grow_pause, self._grow_from = _GROW_AGAIN[0], -math.inf
        self._no_growth = ""
        self._feeders: dict[tuple[int, int], Feeder] = {}

    def words(self) -> dict[int, str]:
        """Return what `ComputePool.nodes` says of each node. From any thread."""
        return {rank: self._word(node) for rank, node in sorted(self.state.nodes.items())}

    def _word(self, node: life.Node) -> str:
        link = self._links.get(node.rank)
        is_down = link is not None and not link.is_up
        return "reconnecting" if node.word == "ready" and is_down else node.word

    # --- from the caller's thread ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Rent and connect; comes back when the pool is ready.

        Raises:
            SkypoolError: why it cannot be. Nothing is left running then.
        """
        if self.terms.attach:
            await self._adopt()
            self._spawn(self._tend())
        else:
            await asyncio.to_thread(self._node_setup.pack, self._packing())
            plan = await self.rental.look_out(self._pause)
            await asyncio.to_thread(self.rental.begin)
            if self.state.phase is Phase.ENDED:  # just now, with no ledger open yet
                await self._close()
            try:
                self._spawn(self._tend())
                self.apply(life.Start(plan.offers[0].hosts))
                await self._until(Phase.READY, Phase.ENDED)
            except BaseException:
                await asyncio.shield(self.stop())
                raise
            if self.state.phase is Phase.ENDED:
                raise await self._why_it_ended()
        self._spawn(self._watch_pressure())

    async def _why_it_ended(self) -> BaseException:
        """What ended a pool before it was ready, with what went wrong before that as notes; and what may be left."""
        error = self.state.error or PoolClosed(f"pool {self.terms.name!r} was stopped while it started")
        nodes = [node for node in self.state.nodes.values() if node.error is not None]
        reasons = {id(node.error) for node in nodes}
        for node in nodes:
            if node.error is None or id(node.error.__cause__) in reasons:
                continue  # it went with its slice
            if life.alike(node.error) != life.alike(error) and not isinstance(node.error, StillRunning):
                error.add_note(f"node {node.rank} failed, too: {type(node.error).__name__}: {node.error}")
        try:
            await self.stop()
        except Exception as left:  # noqa: BLE001 - both are told
            if left is not error:
                error.add_note(f"nor is it proved that all of it has ended: {type(left).__name__}: {left}")
        return error

    async def stop(self, reason: BaseException | None = None) -> None:
        """End everything and prove it.

        Raises:
            StillRunning, ErrorGroup: what could not be ended.
        """
        name = self.terms.name
        self.dispatch.close(reason or PoolClosed(f"pool {name!r} was stopped before the call ended"))
        self.apply(life.Stop())
        await self._until(Phase.ENDED)
        failed = await asyncio.gather(*([self._closing] if self._closing else []), return_exceptions=True)
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()
        left = [*self._unproved(), *(e for e in failed if isinstance(e, Exception))]
        if left:
            raise together(f"pool {name!r}: machines that could not be proved ended", left)

    def _unproved(self) -> list[StillRunning]:
        """Why the end of some instance could not be proved; each reason once."""
        errors = [node.error for node in self.state.nodes.values()]
        return list({id(e): e for e in errors if isinstance(e, StillRunning)}.values())

    def end_now(self) -> None:
        """End every instance from this very thread: for the interpreter's exit, when no thread can be started."""
        for link in self._links.values():
            link.bid_farewell()
        failed = self.rental.terminate(self.rental.there)  # of which the engine's thread may not have heard yet
        self.rental.close(self.state.error, proved=not failed)
        if failed:
            raise next(iter(failed.values()))

    async def _until(self, *phases: Phase) -> None:
        while self.state.phase not in phases:
            self._changed.clear()
            await self._changed.wait()

    # --- decisions and actions -------------------------------------------------------------------------------

    def apply(self, event: life.Event) -> None:
        """Let `lifecycle` decide about an event, and do what it says."""
        before = self.state
        self.state, actions = life.step(self.state, event)
        self._tell_phases(before, self.state)
        for action in actions:
            self._perform(action)
        self._changed.set()

    def _tell_phases(self, before: life.Pool, after: life.Pool) -> None:
        for rank, node in after.nodes.items():
            old = before.nodes.get(rank)
            if old is None or old.phase is not node.phase:
                detail = str(node.error) if node.error else ""
                welcome = self._welcomes.get(rank)
                phase = events.NodePhase(
                    pool=self.terms.name,
                    node=rank,
                    phase=node.phase.value,
                    detail=detail,
                    slots=welcome.slots if welcome else 0,
                    devices=welcome.devices if welcome else 0,
                    cpu_slots=welcome.cpu_slots if welcome else 0,
                    hosts=after.hosts if node.phase is Phase.LAUNCHING else 1,
                )
                self.emit(phase)

    def _perform(self, action: life.Action) -> None:
        match action:
            case life.Launch(ranks):
                self._spawn(self._launch(ranks))
            case life.Reach(rank):
                self._reaching[rank] = self._spawn(self._reach(rank))
            case life.Bootstrap(rank):
                self._reaching[rank] = self._spawn(self._bootstrap(rank))
            case life.Admit(rank):
                self.departures.admitted(rank)
                self.dispatch.add(rank, self._welcomes[rank], self._links[rank])
                self._trust_levels.announce()
            case life.Drain(rank, at):
                self.emit(events.Interruption(pool=self.terms.name, node=rank, at=at))
                self.dispatch.drain(rank)
                link = self._links[rank]
                self._spawn(self.departures.follow(rank, at, lambda: link.is_up))
            case life.Dismiss(rank, error, others):
                self.dispatch.lose(rank, error, others)
                if not self.dispatch.node_queues and self.state.phase is Phase.ENDED:
                    self.dispatch.close(error)
            case life.Terminate(ranks):
                self._spawn(self._terminate(ranks))
            case life.Announce(phase):
                detail = str(self.state.error) if self.state.error else ""
                self.emit(events.PoolPhase(pool=self.terms.name, phase=phase.value, detail=detail))
                if phase in (Phase.DRAINING, Phase.ENDED):
                    self.rental.stopping.set()
                    self.dispatch.close(self.state.error or PoolClosed(f"pool {self.terms.name!r} has ended"))
                if phase is Phase.ENDED:
                    self._closing = self._spawn(self._close())

    def advise_map(self, on_cpu: bool) -> None:
        """Say once how to split a node's devices, where `map` has one slot a node and the user did not ask for that.

        Args:
            on_cpu: whether the mapped function needs no device.
        """
        if self._advised or on_cpu or self.terms.need.slots is not None or self.state.hosts > 1:
            return
        most = max(list(self._welcomes.values()), key=lambda each: each.devices, default=None)
        if most is not None and (devices := most.devices) > 1:
            kind = next((each.kind for each in most.health.devices), "")
            self._advised = True
            self._notice(
                f"map runs one call at a time on each node, with all {devices} {_CALLED.get(kind, 'devices')}; "
                f'ComputePool(..., slots="per-device") runs {devices}'
            )

    def _packing(self) -> Callable[[int, int], None]:
        """Return what tells of the image's files while they are packed, about once a second and at their end."""
        said = time.monotonic()

        def tell(done: int, total: int) -> None:
            nonlocal said
            if done == total or time.monotonic() - said >= _SAY_EVERY:
                said = time.monotonic()
                self.emit(events.FilesProgress(pool=self.terms.name, done=done, total=total))

        return tell

    def _notice(self, text: str) -> None:
        self.emit(events.Notice(pool=self.terms.name, text=text))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- launching -------------------------------------------------------------------------------------------

    async def _launch(self, ranks: tuple[int, ...]) -> None:
        try:
            hosts = self.state.hosts if self.state.maximum > 1 else None  # so that ranks do not meet
            rented = await self.rental.rent(ranks, hosts, self._pause)
        except Exception as e:  # noqa: BLE001 - lifecycle decides what it means
            rented = Rented((), e)
        for first, *others in rented.slices:
            self.apply(life.Launched(first.rank, first, tuple(others)))
        if self.state.phase is Phase.READY:
            self._note_growth(rented.error)
        if rented.error is not None:
            for rank in sorted(set(ranks) - {instance.rank for instance in rented.instances}):
                self.apply(life.Failed(rank, rented.error))

    def _note_growth(self, error: Exception | None) -> None:
        """Note how an attempt to rent more for a ready pool ended. After a failure the next one waits, ever longer."""
        if error is None:
            self._grow_pause, self._no_growth = _GROW_AGAIN[0], ""
            return
        pause, self._grow_from = self._grow_pause, time.monotonic() + self._grow_pause
        self._grow_pause = min(2 * pause, _GROW_AGAIN[1])
        if (words := life.alike(error)) != self._no_growth:
            self._no_growth = words
            self._notice(f"the pool cannot grow; it goes on with its nodes, and tries again in {pause:g} s: {error}")

    async def _tend(self) -> None:
        """Say from time to time that this pool is alive, and end it when its budget is spent."""
        while self.state.phase not in (Phase.DRAINING, Phase.ENDED):
            try:
                left = await asyncio.to_thread(self.rental.tend)
            except (BudgetExceeded, PoolClosed) as e:
                self.apply(life.Stop(e))
                return
            for link in self._links.values() if left < math.inf else ():
                link.allow(left)
            await self._pause(min(left, self.rental.pulse))

    async def _close(self) -> None:
        await asyncio.to_thread(self.rental.close, self.state.error, proved=not self._unproved())

    # --- making ready ----------------------------------------------------------------------------------------

    async def _reach(self, rank: int) -> None:
        instance = self.state.nodes[rank].instance
        try:
            access = await self._access(rank)
            await asyncio.to_thread(self.rental.runs, instance)
            if access.notice:
                self._notice(access.notice)
            setup = await asyncio.to_thread(self._node_setup.bundle_for, access, instance)
            stream = await reach(access, setup, rank) if setup else None
        except Exception as e:  # noqa: BLE001 - lifecycle decides what it means
            await self._give_up(instance, e)
            return
        self._reached[rank] = access, setup, stream
        self.apply(life.Reached(rank))

    async def _access(self, rank: int) -> Access:
        """The first host of a slice is asked for before the others: one thread waits for all of it."""
        node = self.state.nodes[rank]
        came = self._came.setdefault(node.instance.slice or str(rank), asyncio.Event())
        if node.host:
            await came.wait()
        try:
            return await asyncio.to_thread(self.rental.driver_of(node.instance).access, node.instance)
        finally:
            came.set()

    async def _bootstrap(self, rank: int) -> None:
        access, setup, stream = self._reached.pop(rank)
        instance, name = self.state.nodes[rank].instance, self.terms.name
        try:
            python = access.python or ""
            if setup is not None and stream is not None:
                python = await bootstrap(stream, setup, name, rank, self.terms.liveness, self.emit)
            welcome = await self._open(instance, access, python, stream)
            bought = instance.offer.accelerator if instance.offer else None
            faults = health_check.faults(bought, welcome.health, time.time())
            if faults:
                raise BootstrapError(f"node {rank} is not what was asked for: {'; '.join(faults)}", step="health")
        except Exception as e:  # noqa: BLE001 - lifecycle decides what it means
            await self._give_up(instance, e)
            return
        self.apply(life.Bootstrapped(rank))

    async def _give_up(self, instance: Instance, error: Exception) -> None:
        await asyncio.to_thread(self.rental.rejected, instance, error)
        self.apply(life.Failed(instance.rank, error))

    async def _open(
        self, instance: Instance, access: Access, python: str, stream: Stream | None = None, attach: bool = False
    ) -> Welcome:
        """Connect to an instance's agent, started there unless one must be there; its WELCOME."""
        config = AgentConfig(
            folder=access.folder,
            pool=self.terms.name,
            rank=instance.rank,
            nodes=max(len(self.state.nodes), self.terms.minimum * self.state.hosts),
            place=self._place(instance),
            slots=access.slots if access.slots is not None else self.terms.need.slots,
            lease=self.terms.lease,
            lifetime=self.terms.lifetime,
            guard=access.guard,
            rented=bool(access.guard) and not access.owned,
            liveness=self.terms.liveness,
            grace=self.terms.grace,
            spool=access.spool,
            watch=access.watch,
            cwd=access.cwd or access.folder,
            spool_memory=access.spool_memory,
            allow=sorted(self.terms.allow_results),
            trust=await asyncio.to_thread(self._trust_levels.judge, instance, self.rental.driver_of(instance)),
            env={**access.env, **dict(self.terms.image.spec.env), **self._node_setup.secrets},
            keep=[9] if access.exclusive else [],
        )
        direct = stream is None and bool(python)
        link = Link(
            access.transport,
            config.wire(),
            _Ear(self, instance.rank),
            session=self._session,
            command=[python, "-c", bundle.LOADER] if direct else bundle.STAGE,
            preamble=b"" if direct else bundle.staged(bundle.agent_starter(python, access.home)),
            liveness=self.terms.liveness,
        )
        link.reader = self._trust_levels.reader(instance.rank)
        self._links[instance.rank] = link
        self._lenders[instance.rank] = user_modules.Lender()
        self._welcomes[instance.rank] = welcome = await link.open(stream, start=not attach)
        return welcome

    def _place(self, instance: Instance) -> SlicePlace:
        """Return which host of its slice a node is, for `runtime.InstanceInfo`."""
        has = instance.offer.accelerator if instance.offer else None
        kind = has.slice if has else None
        node = self.state.nodes.get(instance.rank)
        return SlicePlace(
            host=node.host if node else None,
            hosts=len(self.state.slice_of(node.rank)) if node else None,
            chips=kind.chips_per_vm if kind else None,
            slice_chips=kind.chips if kind else None,
        )

    async def _terminate(self, ranks: tuple[int, ...]) -> None:
        """End these ranks' instances, all of a provider at once; asked again until once after the pool was to end."""
        from tenacity import AsyncRetrying, retry_if_result

        await asyncio.gather(*(self._leave(rank) for rank in ranks))
        left = {rank: self.state.nodes[rank].instance for rank in ranks}
        lost = {rank for rank in ranks if isinstance(self.state.nodes[rank].error, ConnectionLost)}
        is_last = False

        async def end() -> Mapping[int, StillRunning]:
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
        for rank, error in unproved.items():
            if rank in lost and left[rank].id in {getattr(each, "id", "") for each in error.unreachable}:
                self._notice(
                    f"node {rank} was lost, and its machine cannot be asked to end what is left of it: {error}"
                )
                self.rental.note_ended(left[rank])
                self.apply(life.Terminated(rank))
            else:
                self.apply(life.StillThere(rank, error))

    async def _end(self, left: dict[int, Instance]) -> Mapping[int, StillRunning]:
        """End instances; those whose end is proved leave `left`. The others come back."""
        now = time.monotonic()
        silent = {rank: now - self._heard[rank] for rank in left if rank in self._heard}
        unproved = await asyncio.to_thread(self.rental.terminate, list(left.values()), silent)
        for rank in sorted(left.keys() - unproved.keys()):
            del left[rank]
            self.apply(life.Terminated(rank))
        return unproved

    async def _leave(self, rank: int) -> None:
        await self._stop_reaching(rank)
        link = self._links.pop(rank, None)
        if link is not None:
            if link.heard:
                self._heard[rank] = link.heard
            await link.close(bye=True)

    async def _pause(self, seconds: float) -> None:
        """Sleep, but no longer than until the pool is to end."""
        until = time.monotonic() + seconds
        while self.state.phase not in (Phase.DRAINING, Phase.ENDED) and time.monotonic() < until:
            await asyncio.sleep(0.05)

    async def _stop_reaching(self, rank: int) -> None:
        """Who still connects might start an agent after its machine was said to have ended."""
        task = self._reaching.pop(rank, None)
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task])
        _, _, stream = self._reached.pop(rank, (None, None, None))
        if stream is not None:
            await asyncio.to_thread(stream.close)

    async def _adopt(self) -> None:
        """Take over the nodes of a pool that another process started: all, or none and nothing is ended."""
        instances = await asyncio.to_thread(self.rental.adopt)
        try:
            for instance in instances:
                access = await asyncio.to_thread(self.rental.driver_of(instance).access, instance)
                await self._open(instance, access, access.python or "", attach=True)
        except BaseException:
            for link in self._links.values():
                await link.close(bye=False)
            raise
        slices = Rented(tuple(instances)).slices
        nodes = {i.rank: life.Node(i.rank, Phase.READY, i, host=i.rank - s[0].rank) for s in slices for i in s}
        fewest, most = (len(slices), max(len(slices), self.terms.maximum)) if self.terms.replaces else (0, len(slices))
        self.state = life.Pool(fewest, most, Phase.READY, nodes, hosts=max(map(len, slices)))
        self._trust_levels.announce()
        for rank, link in self._links.items():
            for call in self._welcomes[rank].streams:
                link.send(frame(Kind.CANCEL, {"id": call, "grace": self.terms.grace}))

    def on_welcome(self, rank: int, welcome: Welcome) -> None:
        """A node let this client in, for the first time or again."""
        if self.terms.attach and rank not in self.dispatch.node_queues:
            self.inherited += self.dispatch.inherit(rank, welcome, self._links[rank])

    async def _watch_pressure(self) -> None:
        """Where the pool may grow: say so when calls keep waiting."""
        waited = 0
        while self.state.phase is Phase.READY and self.terms.maximum > self.terms.minimum:
            await asyncio.sleep(0.25)
            waited = waited + 1 if self.dispatch.pressed else 0
            if waited >= 4 and time.monotonic() >= self._grow_from:
                waited = 0
                self.apply(life.Pressure())

    # --- what nodes say --------------------------------------------------------------------------------------

    def on_arrivals(self, rank: int, arrivals: list[Arrival]) -> None:
        """Frames came from a node; in the engine's thread or in one that waits for a call."""
        about_calls = []
        for arrival in arrivals:
            said = arrival.said
            if isinstance(said, Printed):
                self._reports.printed(rank, said, arrival.buffers[0])
            elif isinstance(said, Pong):
                self._on_pong(rank, said)
            elif isinstance(said, ModuleAsked):
                header, source = self._lenders[rank].find(said.name)
                self._links[rank].reply(frame(Kind.MODULE, header, [source]))
            else:
                about_calls.append(arrival)
        if about_calls:
            self.dispatch.arrived(rank, about_calls)

    def _on_pong(self, rank: int, said: Pong) -> None:
        """Hear how a node is.

        A node that its provider takes back gets no more calls from here on: its calls may end because of the notice,
        and whoever waited for one may send the next before the engine's thread has heard of it.
        """
        at, now = said.interruption, time.monotonic()
        if at is not None and now - self._noticed.get(rank, -math.inf) > _NOTICED_AGAIN:
            self._noticed[rank] = now
            Loop.shared().loop.call_soon_threadsafe(self.departures.noticed, rank, at)  # before it is drained
            for each in self.state.slice_of(rank):
                self.dispatch.drain(each.rank)
        self._reports.reported(rank, said)

    def _on_failed(self, pending: PendingCall, error: BaseException) -> None:
        name = self.terms.name
        words = f"{type(error).__name__}: {codec.text_of(error)}"
        self.emit(events.CallFailed(pool=name, node=pending.at, call=pending.name, error=words))

    def _on_retry(self, pending: PendingCall, error: BaseException) -> None:
        name = self.terms.name
        self.emit(
            events.CallRetried(
                pool=name, node=pending.at, call=pending.name, attempt=pending.attempt, reason=codec.text_of(error)
            )
        )

    def on_lost(self, rank: int, error: ConnectionLost) -> None:
        """A node was given up."""
        self._spawn(self.departures.lost(rank, error))

    def _on_drained(self, rank: int) -> None:
        Loop.shared().loop.call_soon_threadsafe(self.apply, life.Drained(rank))

    def _on_feed(self, pending: PendingCall, arg: int, n: int) -> None:
        feeder = self._feeders.get((pending.id, arg))
        if feeder is None:
            feeder = self._feeders[pending.id, arg] = Feeder(self.dispatch, pending, arg)
        feeder.want(n)
