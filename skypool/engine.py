"""The engine performs what `lifecycle` decides: the only place that starts threads and tasks."""

from __future__ import annotations

import asyncio
import codecs
import os
import secrets
import threading
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from skypool import codec, events, usercode
from skypool import lifecycle as life
from skypool.dispatch import Dispatch
from skypool.driver import Driver
from skypool.errors import (
    CapacityError,
    ConnectionLost,
    CredentialsError,
    LaunchError,
    NoOffers,
    OfferGone,
    PoolClosed,
    ProviderError,
    QuotaError,
    SkypoolError,
    StillRunning,
)
from skypool.futures import CallFuture
from skypool.lifecycle import Phase
from skypool.link import Arrival, Link
from skypool.model import Instance, Offer, Order
from skypool.plan import Plan, plan
from skypool.terms import Terms
from skypool.tickets import Ticket
from skypool.wire import Kind, frame

T = TypeVar("T")
_OFFERS_TIMEOUT = 30.0
_ACK_OUTPUT = 256 << 10
_OUTCOME = Kind.OUTCOME


class Engine:
    """One thread with one event loop, for all pools of this process."""

    _shared: Engine | None = None
    _making = threading.Lock()

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="skypool-engine", daemon=True)
        self._thread.start()

    @classmethod
    def shared(cls) -> Engine:
        """The engine of this process, started when it is first needed."""
        with cls._making:
            if cls._shared is None:
                cls._shared = cls()
            return cls._shared

    @classmethod
    def forget(cls) -> None:
        """A forked child has no engine thread: it starts its own when it needs one."""
        cls._shared, cls._making = None, threading.Lock()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the engine and wait for it; cancelled if the waiting thread is interrupted."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


os.register_at_fork(after_in_child=Engine.forget)


class _Ear:
    """Hears one node's link and says which node it was."""

    def __init__(self, crew: Crew, rank: int) -> None:
        self._crew, self._rank = crew, rank

    def on_arrivals(self, arrivals: list[Arrival]) -> None:
        self._crew.on_arrivals(self._rank, arrivals)

    def on_welcome(self, welcome: dict[str, Any]) -> None:
        self._crew.on_welcome(self._rank, welcome)

    def on_down(self, reason: str) -> None:
        self._crew.dispatch.pause(self._rank)
        self._crew.emit(events.LinkDown(pool=self._crew.terms.name, node=self._rank, reason=reason))

    def on_up(self, welcome: dict[str, Any]) -> None:
        self._crew.emit(events.LinkUp(pool=self._crew.terms.name, node=self._rank))
        self._crew.dispatch.resume(self._rank, welcome)

    def on_lost(self, error: ConnectionLost) -> None:
        self._crew.apply(life.Failed(self._rank, error))


class Crew:
    """A pool at work: its nodes, their links, and the calls on them.

    Everything but `start`, `stop` and `end_now` happens in the engine's thread.
    """

    def __init__(self, terms: Terms, stream: events.Stream) -> None:
        self.terms, self.emit = terms, stream.emit
        self.state = life.Pool(terms.minimum, terms.maximum)
        self.dispatch = Dispatch(terms.name, self._on_failed, self._on_retry, self._on_feed)
        self.plan: Plan | None = None
        self.inherited: list[CallFuture[Any]] = []
        self.attempts: list[tuple[Offer, ProviderError]] = []
        self._session = secrets.token_hex(8)
        self._links: dict[int, Link] = {}
        self._welcomes: dict[int, dict[str, Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._reaching: dict[int, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._outputs: dict[int, int] = {}
        self._unread: dict[int, int] = {}
        self._decoders: dict[tuple[int, int, int], codecs.IncrementalDecoder] = {}
        self._feeders: dict[tuple[int, int], _Feeder] = {}

    # --- from the caller's thread ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Rent and connect; comes back when the pool is ready.

        Raises:
            SkypoolError: why it cannot be. Nothing is left running then.
        """
        if self.terms.attach:
            await self._adopt(await asyncio.to_thread(self._find))
            self._spawn(self._watch_pressure())
            return
        try:
            self.apply(life.Start())
            await self._until(Phase.READY, Phase.ENDED)
        except BaseException:
            await asyncio.shield(self.stop())
            raise
        if self.state.phase is Phase.ENDED:
            raise self.state.error or PoolClosed(f"pool {self.terms.name!r} was stopped while it started")
        self._spawn(self._watch_pressure())

    async def stop(self, reason: BaseException | None = None) -> None:
        """End everything and prove it.

        Raises:
            StillRunning, ExceptionGroup: what could not be ended.
        """
        name = self.terms.name
        self.dispatch.close(reason or PoolClosed(f"pool {name!r} was stopped before the call ended"))
        self.apply(life.Stop())
        if self.state.phase is Phase.PLANNED:
            return
        await self._until(Phase.ENDED)
        for task in list(self._tasks):
            if task is not asyncio.current_task():
                task.cancel()
        left = [n.error for n in self.state.nodes.values() if isinstance(n.error, (StillRunning, ExceptionGroup))]
        if len(left) == 1:
            raise left[0]
        if left:
            raise ExceptionGroup(f"pool {name!r}: machines that could not be proved ended", left)

    def end_now(self) -> None:
        """End every instance from this very thread: for the interpreter's exit, when no thread can be started."""
        for link in self._links.values():
            link.bid_farewell()
        instances = [n.instance for n in self.state.nodes.values() if n.instance and n.phase is not Phase.ENDED]
        for driver in self.terms.drivers:
            driver.terminate([i for i in instances if i.provider == driver.name])

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
                slots = self._welcomes.get(rank, {}).get("slots", 0)
                phase = events.NodePhase(
                    pool=self.terms.name, node=rank, phase=node.phase.value, detail=detail, slots=slots
                )
                self.emit(phase)

    def _perform(self, action: life.Action) -> None:
        match action:
            case life.Launch(ranks):
                self._spawn(self._launch(ranks))
            case life.Reach(rank):
                self._reaching[rank] = self._spawn(self._reach(rank))
            case life.Bootstrap(rank):
                self.apply(life.Bootstrapped(rank))
            case life.Admit(rank):
                self.dispatch.add(rank, self._welcomes[rank]["slots"], self._links[rank])
            case life.Dismiss(rank, error):
                self.dispatch.lose(rank, error)
                if not self.dispatch.desks and self.state.phase is Phase.ENDED:
                    self.dispatch.close(error)
            case life.Terminate(ranks):
                for rank in ranks:
                    self._spawn(self._terminate(rank))
            case life.Announce(phase):
                detail = str(self.state.error) if self.state.error else ""
                self.emit(events.PoolPhase(pool=self.terms.name, phase=phase.value, detail=detail))
                if phase in (Phase.DRAINING, Phase.ENDED):
                    self.dispatch.close(self.state.error or PoolClosed(f"pool {self.terms.name!r} has ended"))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- launching -------------------------------------------------------------------------------------------

    async def _launch(self, ranks: tuple[int, ...]) -> None:
        try:
            if self.plan is None:
                self.plan = await self._make_plan()
            instances = await asyncio.to_thread(self._launch_best, self.plan, ranks)
        except Exception as e:  # noqa: BLE001 - lifecycle decides what it means
            for rank in ranks:
                self.apply(life.Failed(rank, e))
            return
        for instance in instances:
            self.apply(life.Launched(instance.rank, instance))

    async def _make_plan(self) -> Plan:
        """Ask every provider at once, each with its own time limit; one that fails does not stop the others."""

        async def ask(driver: Driver) -> list[Offer]:
            async with asyncio.timeout(_OFFERS_TIMEOUT):
                return list(await asyncio.to_thread(driver.offers, self.terms.need))

        answers = await asyncio.gather(*map(ask, self.terms.drivers), return_exceptions=True)
        offers: list[Offer] = []
        failures: dict[str, BaseException] = {}
        for driver, answer in zip(self.terms.drivers, answers, strict=True):
            if isinstance(answer, BaseException):
                failures[driver.name] = answer
            else:
                offers += answer
        made = plan(offers, self.terms.need, failures=failures)
        if not made.offers:
            if len(failures) == len(self.terms.drivers) == 1:
                raise next(iter(failures.values()))
            raise NoOffers(f"no provider sells what pool {self.terms.name!r} needs:\n{made.explain()}", made)
        return made

    def _launch_best(self, made: Plan, ranks: tuple[int, ...]) -> list[Instance]:
        """The best offer first; the next when it is out of stock. Blocks."""
        drivers = {driver.name: driver for driver in self.terms.drivers}
        without: set[str] = set()
        for offer in made.offers:
            if offer.provider in without:
                continue
            token = f"{self._session}-{'-'.join(map(str, ranks))}"
            order = Order(pool=self.terms.name, token=token, ranks=ranks, need=self.terms.need)
            try:
                return drivers[offer.provider].launch(offer, order)
            except (CapacityError, OfferGone) as e:
                self.attempts.append((offer, e))
            except (QuotaError, CredentialsError) as e:
                self.attempts.append((offer, e))
                without.add(offer.provider)
        tried = "\n".join(f"  {o.provider} {o.instance_type} {o.region}: {e}" for o, e in self.attempts)
        raise LaunchError(f"none of {len(made.offers)} offers could be launched:\n{tried}")

    async def _reach(self, rank: int) -> None:
        try:
            await self._open(self.state.nodes[rank].instance)
        except Exception as e:  # noqa: BLE001 - lifecycle decides what it means
            self.apply(life.Failed(rank, e))
            return
        self.apply(life.Reached(rank))

    async def _open(self, instance: Instance, attach: bool = False) -> None:
        """Connect to an instance, and start its agent unless one must be there."""
        access = await asyncio.to_thread(self._driver_of(instance).access, instance)
        config = {
            "folder": access.folder,
            "pool": self.terms.name,
            "rank": instance.rank,
            "nodes": max(len(self.state.nodes), self.terms.minimum),
            "slots": access.slots if access.slots is not None else self.terms.need.slots,
            "lease": self.terms.lease,
            "lifetime": self.terms.lifetime,
            "liveness": self.terms.liveness,
            "grace": self.terms.grace,
            "spool": access.spool,
            "cwd": access.cwd or access.folder,
            "spool_memory": access.spool_memory,
            "env": {**access.env, **self.terms.env},
        }
        link = Link(
            access.transport,
            config,
            _Ear(self, instance.rank),
            session=self._session,
            python=access.python,
            liveness=self.terms.liveness,
        )
        self._links[instance.rank] = link
        self._welcomes[instance.rank] = await link.open(start=not attach)

    def _driver_of(self, instance: Instance) -> Driver:
        return next(d for d in self.terms.drivers if d.name == instance.provider)

    async def _terminate(self, rank: int) -> None:
        instance = self.state.nodes[rank].instance
        try:
            await self._stop_reaching(rank)
            link = self._links.pop(rank, None)
            if link is not None:
                await link.close(bye=True)
            await asyncio.to_thread(self._driver_of(instance).terminate, [instance])
        except Exception as e:  # noqa: BLE001 - it is raised by stop(), with the instance still running
            self.apply(life.StillThere(rank, e))
            return
        self.apply(life.Terminated(rank))

    async def _stop_reaching(self, rank: int) -> None:
        """Who still connects might start an agent after its machine was said to have ended."""
        task = self._reaching.pop(rank, None)
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task])

    def _find(self) -> list[Instance]:
        found = [i for d in self.terms.drivers for i in d.instances(pool=self.terms.name)]
        if not found:
            raise SkypoolError(f"no pool called {self.terms.name!r} runs on {[d.name for d in self.terms.drivers]}")
        return found

    async def _adopt(self, instances: Sequence[Instance]) -> None:
        """Take over the nodes of a pool that another process started: all, or none and nothing is ended."""
        try:
            for instance in instances:
                await self._open(instance, attach=True)
        except BaseException:
            for link in self._links.values():
                await link.close(bye=False)
            raise
        nodes = {i.rank: life.Node(i.rank, Phase.READY, i) for i in instances}
        self.state = life.Pool(len(nodes), max(len(nodes), self.terms.maximum), Phase.READY, nodes)
        for rank, link in self._links.items():
            for call in self._welcomes[rank]["streams"]:
                link.send(frame(Kind.CANCEL, {"id": call, "grace": self.terms.grace}))

    def on_welcome(self, rank: int, welcome: dict[str, Any]) -> None:
        """A node let this client in, for the first time or again."""
        if self.terms.attach and rank not in self.dispatch.desks:
            self.inherited += self.dispatch.inherit(rank, welcome, self._links[rank])

    async def _watch_pressure(self) -> None:
        """Where the pool may grow: say so when calls keep waiting."""
        waited = 0
        while self.state.phase is Phase.READY and self.terms.maximum > self.terms.minimum:
            await asyncio.sleep(0.25)
            waited = waited + 1 if self.dispatch.pressed else 0
            if waited >= 4:
                waited = 0
                self.apply(life.Pressure())

    # --- what nodes say --------------------------------------------------------------------------------------

    def on_arrivals(self, rank: int, arrivals: list[Arrival]) -> None:
        """Frames came from a node; in the engine's thread or in one that waits for a call."""
        about_calls = []
        for arrival in arrivals:
            if arrival.kind is _OUTCOME:
                about_calls.append(arrival)
            elif arrival.kind == Kind.OUTPUT:
                self._on_output(rank, arrival)
            elif arrival.kind == Kind.PONG:
                self._on_pong(rank, arrival.header)
            elif arrival.kind == Kind.MODULE:
                header, source = usercode.find(arrival.header["name"])
                self._links[rank].send(frame(Kind.MODULE, header, [source]))
            else:
                about_calls.append(arrival)
        if about_calls:
            self.dispatch.arrived(rank, about_calls)

    def _on_output(self, rank: int, arrival: Arrival) -> None:
        seq = arrival.header["seq"]
        if seq <= self._outputs.get(rank, 0):
            return
        self._outputs[rank] = seq
        data = b"".join(arrival.buffers)
        self._unread[rank] = self._unread.get(rank, 0) + len(data)
        if self._unread[rank] > _ACK_OUTPUT:
            self._unread[rank] = 0
            self.dispatch.acknowledge(rank, seq)
        h = arrival.header
        source = (rank, h["slot"], h["fd"])
        decoder = self._decoders.get(source)
        if decoder is None:
            decoder = self._decoders[source] = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(data)  # a character may arrive in two pieces
        self.emit(
            events.Output(pool=self.terms.name, node=rank, slot=h["slot"], call=h["id"], stream=h["fd"], text=text)
        )

    def _on_pong(self, rank: int, h: dict[str, Any]) -> None:
        self.dispatch.acknowledge(rank, self._outputs.get(rank, 0))
        status = events.NodeStatus(
            pool=self.terms.name,
            node=rank,
            busy=h["busy"],
            waiting=h["waiting"],
            done=h["done"],
            running=tuple(h["running"]),
        )
        self.emit(status)

    def _on_failed(self, ticket: Ticket, error: BaseException) -> None:
        name = self.terms.name
        words = f"{type(error).__name__}: {error}"
        self.emit(events.CallFailed(pool=name, node=ticket.at, call=ticket.name, error=words))

    def _on_retry(self, ticket: Ticket, error: BaseException) -> None:
        name = self.terms.name
        self.emit(
            events.CallRetried(pool=name, node=ticket.at, call=ticket.name, attempt=ticket.attempt, reason=str(error))
        )

    def _on_feed(self, ticket: Ticket, arg: int, n: int) -> None:
        feeder = self._feeders.get((ticket.id, arg))
        if feeder is None:
            feeder = self._feeders[ticket.id, arg] = _Feeder(self.dispatch, ticket, arg)
        feeder.want(n)


class _Feeder:
    """Pulls one iterator argument, in a thread of its own: the user's iterator may block."""

    def __init__(self, dispatch: Dispatch, ticket: Ticket, arg: int) -> None:
        self._dispatch, self._ticket, self._arg = dispatch, ticket, arg
        self._items: Iterator[Any] = ticket.feeds[arg]
        self._wanted = 0
        self._last: tuple[int, dict[str, Any], list[Any]] = (0, {}, [])
        self._more = threading.Condition()
        threading.Thread(target=self._run, name="skypool-feed", daemon=True).start()

    def want(self, n: int) -> None:
        """Item `n`, from 1, is wanted; the last one again after a reconnection."""
        with self._more:
            if n == self._last[0]:
                self._dispatch.item(self._ticket, self._last[1], self._last[2])
            self._wanted = n
            self._more.notify()

    def _run(self) -> None:
        while True:
            with self._more:
                while self._wanted <= self._last[0]:
                    self._more.wait(1.0)
                    if self._ticket.ended:
                        return
                n = self._wanted
            header: dict[str, Any] = {"arg": self._arg, "n": n}
            buffers: list[Any] = []
            try:
                buffers = codec.dumps(next(self._items), f"item {n} of an iterator argument of {self._ticket.name}")
            except StopIteration:
                header["end"] = True
            except Exception as e:  # noqa: BLE001 - raised in the function, where the item was asked for
                header |= {"end": True, "error": True}
                buffers = codec.dump_error(e)
            with self._more:
                self._last = (n, header, buffers)
            self._dispatch.item(self._ticket, header, buffers)
            if "end" in header:
                return
