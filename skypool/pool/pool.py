"""`ComputePool`: the object that a user starts, sends calls to, and stops."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from types import BuiltinFunctionType, FunctionType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec, TypeVar, Unpack, cast, overload

from skypool import events, tracebacks
from skypool.calls import call as calls
from skypool.calls.arguments import Ref
from skypool.calls.call import Call, ComputeFunction, Group, call_asked
from skypool.calls.dispatch import Dispatch
from skypool.calls.futures import CallFuture, Items, ListFuture, ResultCell, Stream, as_they_end, in_order, results_of
from skypool.calls.map import Map
from skypool.calls.options import NamedNodes, NodesAsked, Options, node_asked
from skypool.calls.pending import PendingCall, World
from skypool.checks import Duration, number, seconds, whole
from skypool.drivers.contract import Driver
from skypool.errors import PoolClosed, UsageError
from skypool.event_loop import Loop
from skypool.model import SlotsAsked, Trust
from skypool.offers.need import NodeTerms, bases_asked, drivers_asked, image_asked, need_asked, nodes_asked, order_asked
from skypool.offers.ordering import OrderBy
from skypool.pool import shutdown
from skypool.pool.engine import PoolEngine
from skypool.pool.states import Phase
from skypool.rental.budget import Budget, Receipt
from skypool.rental.ledger import Ledger
from skypool.rental.request import Terms, budget_asked, pool_name, trust_asked
from skypool.wire import codec

if TYPE_CHECKING:
    from skypool.offers.need import AcceleratorAsked
    from skypool_images import Image

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
ConsoleMode = Literal["auto", "live", "plain", "off"]


tracebacks.install()


class PoolOptions(NodeTerms, total=False):
    """Arguments of a `ComputePool` beside its provider and its name."""

    accelerator: AcceleratorAsked
    image: Image | None
    nodes: int | tuple[int, int]
    slots: SlotsAsked
    lease: Duration
    max_lifetime: Duration | None
    liveness: Duration
    grace: Duration
    wait: Duration | None
    console: ConsoleMode
    order_by: OrderBy
    budget: Budget | float | None
    trust: Trust | None
    allow_results: Sequence[str | type]


class ComputePool(Executor):
    """Machines that run your functions and then disappear.

        with ComputePool(provider=AWS(), accelerator="H100:8") as pool:
            result = train(10) >> pool

    It is a `concurrent.futures.Executor`, too, and starts at first use when it is not entered.

    Args:
        provider: where from: a driver, its name, or several of which any will do. None is this machine.
        accelerator: what each node must have: an object, a spelling such as "H100:8", or several of which any will do.
        image: what is on a node.
        nodes: how many, or (fewest, most): it starts with the fewest and grows while calls wait. Of an accelerator that
            is a slice of several hosts, how many slices; each host is a node.
        slots: how many calls a node runs at once, with its devices dealt out among them; "per-device" for one for each
            device; None for one that has all of them. Beside these, a node with devices has a slot for each CPU, on
            which functions marked `@compute(devices=0)` run. A node without devices has one for each CPU unless a
            number says otherwise. See docs/slots.md.
        name: names the pool to `attach`, in logs and in tags.
        lease: how long a node lives on without a word from this process; seconds, or "10m".
        max_lifetime: when every node ends, whatever happens; None for no such limit.
        liveness: seconds of silence after which a node is given up and its calls raise ConnectionLost.
        grace: seconds a stopped call has to clean up.
        wait: how long to ask again while all that serves is out of stock, when it starts and when a node is replaced;
            seconds, or "2h". None gives up at once.
        order_by: which offer is best: "cheapest", or the cheapest "per-device", "per-tflop" (dense BF16) or "per-gb" of
            the devices' memory.
        budget: US dollars that the pool may cost: when they are spent, it ends with BudgetExceeded.
        trust: "full" unpickles what nodes send, which may run code here; "data" makes data of it, and what is among
            `allow_results`: the default where machines are strangers'. See docs/trust.md.
        node: what else each node must have: `market` ("on-demand", "spot", "spot-if-available" or "cheapest"),
            `max_usd_per_hour` of one node or slice, `region` (any of, "eu-*" too), `vcpus`, `memory`, `disk` (GiB, or
            "64GB"), `arch`, and `private_network=True` where the nodes must reach each other: all in one place then.
        console: "live" view, "plain" lines, "off", or "auto": live on a terminal, plain elsewhere. "off" silences
            skypool's own lines only: what functions print still goes to stdout and stderr.

    Raises:
        UsageError: an argument that cannot be meant, with the nearest right spelling.
    """

    def __init__(
        self,
        provider: Driver | str | Sequence[Driver | str] | None = None,
        *,
        accelerator: AcceleratorAsked = None,
        image: Image | None = None,
        nodes: int | tuple[int, int] = 1,
        slots: SlotsAsked = None,
        name: str | None = None,
        lease: Duration = "10m",
        max_lifetime: Duration | None = None,
        liveness: Duration = 90.0,
        grace: Duration = 5.0,
        wait: Duration | None = None,
        console: ConsoleMode = "auto",
        order_by: OrderBy = "cheapest",
        budget: Budget | float | None = None,
        trust: Trust | None = None,
        allow_results: Sequence[str | type] = (),
        **node: Unpack[NodeTerms],
    ) -> None:
        minimum, maximum = nodes_asked(nodes)
        if console not in ("auto", "live", "plain", "off"):
            raise UsageError(f"console must be 'auto', 'live', 'plain' or 'off', not {console!r}")
        image_ = image_asked(image)
        drivers = drivers_asked(provider)
        self.name = pool_name(name)
        self.events = events.EventStream()
        self._console: ConsoleMode = console
        self._terms = Terms(
            name=self.name,
            drivers=drivers,
            need=need_asked(ComputePool.__init__, accelerator, slots, bases_asked(image_, drivers), node),
            order_by=order_asked(order_by, node),
            budget=budget_asked(budget),
            **trust_asked(trust, allow_results),
            minimum=minimum,
            maximum=maximum,
            lease=seconds("lease", lease),
            lifetime=None if max_lifetime is None else seconds("max_lifetime", max_lifetime),
            liveness=seconds("liveness", liveness),
            grace=seconds("grace", grace),
            wait=0.0 if wait is None else seconds("wait", wait),
            image=image_,
        )
        self._begun: PoolEngine | None = None
        self._engine: PoolEngine | None = None
        self._starting = threading.Lock()
        self._ended = False
        self._functions: dict[Any, ComputeFunction[..., Any]] = {}
        self._hush: Callable[[], None] | None = None

    # --- its life --------------------------------------------------------------------------------------------

    def start(self) -> ComputePool:
        """Rent, connect and make ready; comes back when the pool is ready, and at once if it is already.

        Raises:
            PoolClosed: it has ended; make a new one.
        """
        with self._starting:
            if self._ended:
                raise PoolClosed(f"pool {self.name!r} has ended; make a new ComputePool")
            if self._engine is None:
                self._begin()
        return self

    def _begin(self) -> None:
        from skypool import console

        self._begun = engine = PoolEngine(self._terms, self.events)
        self._hush = console.attach(self.events, self._console)
        shutdown.watch(engine)
        try:
            Loop.shared().run(engine.start())
        except BaseException as e:
            self._ended = True
            if isinstance(e, Exception) or self._terms.attach:  # the engine has ended all, or taken nothing over
                shutdown.forget(engine)
                self._quiet()
            else:  # Ctrl-C, or SIGTERM
                self._end(engine)
            raise
        self._engine = engine

    @classmethod
    def attach(
        cls, name: str, provider: Driver | str | Sequence[Driver | str] | None = None, **options: Unpack[PoolOptions]
    ) -> ComputePool:
        """Take over a pool that another process started and left, by its name; its calls are in `inherited`.

        Args:
            provider: where it is; None asks the ledger of this machine.
            options: of a `ComputePool`. With `accelerator` or `image` nodes that are lost are replaced; without them
                nobody knows by what.

        Raises:
            SkypoolError: no such pool runs there. UsageError, ConnectionLost: its client is still there.
        """
        if provider is None:
            provider = Ledger.here().drivers_of(pool_name(name))
        pool = cls(provider, name=name, **options)
        pool._terms = replace(pool._terms, attach=True, replaces=bool({"accelerator", "image"} & options.keys()))
        return pool.start()

    def stop(self) -> None:
        """End every call and every machine now, and prove it. Quiet if it has ended already.

        Interrupted, it leaves that to a process of its own, which goes on until it is proved.

        Raises:
            StillRunning: naming the machines whose end could not be proved.
        """
        begun = self._begun
        is_starting = begun is not None and self._starting.locked() and not self._terms.attach
        if begun is not None and is_starting and not shutdown.is_elsewhere(begun):
            self._end(begun)  # another thread starts it, which may wait for long
        with self._starting:
            engine = self._engine
            self._engine = None
            self._ended = True
        if engine is not None and not shutdown.is_elsewhere(engine):
            self._end(engine)

    def _end(self, engine: PoolEngine) -> None:
        try:
            Loop.shared().run(engine.stop())
        except (KeyboardInterrupt, SystemExit):
            self.events.emit(events.Notice(pool=self.name, text=engine.rental.terminate_in_background()))
            raise
        finally:
            shutdown.forget(engine)
            self._quiet()

    def _quiet(self) -> None:
        hush = self._hush
        self._hush = None
        if hush is not None:
            hush()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the pool as an Executor does: when its calls have ended, or at once with `cancel_futures`.

        `wait=False` still waits: a machine that costs money is not left to itself.
        """
        engine = self._engine
        if engine is not None and not cancel_futures and not shutdown.is_elsewhere(engine):
            while engine.dispatch.unfinished:
                threading.Event().wait(0.02)
        self.stop()

    def __enter__(self) -> ComputePool:
        self.start()
        calls.current.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self in calls.current:
            calls.current.remove(self)
        self.shutdown(cancel_futures=kind is not None)

    async def __aenter__(self) -> ComputePool:
        try:
            await asyncio.to_thread(self.start)
        except asyncio.CancelledError:
            await asyncio.to_thread(self.stop)  # the thread of `start` would go on
            raise
        calls.current.append(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self in calls.current:
            calls.current.remove(self)
        await asyncio.to_thread(self.shutdown, cancel_futures=kind is not None)

    def _working(self) -> PoolEngine:
        """The engine; started if it was not."""
        if self._engine is None:
            self.start()
        engine = self._engine
        if engine is None:
            raise PoolClosed(f"pool {self.name!r} has ended; make a new ComputePool")
        if shutdown.is_elsewhere(engine):
            raise PoolClosed(
                f"pool {self.name!r} is held by the process that this one was forked from: send calls there, or make "
                f"a ComputePool of your own here"
            )
        if engine.state.phase in (Phase.DRAINING, Phase.ENDED) and engine.state.error is not None:
            raise engine.state.error  # what ends the pool, from the moment it begins to end
        return engine

    # --- calls -----------------------------------------------------------------------------------------------

    @overload
    def send(
        self, call: Call[T], *, node: Literal["all"] | Sequence[int], world: World | None = None
    ) -> CallFuture[list[T]]: ...
    @overload
    def send(self, call: Call[T], *, node: int | None = None, world: World | None = None) -> CallFuture[T]: ...
    def send(
        self, call: Call[T], *, node: NodesAsked = None, world: World | None = None
    ) -> CallFuture[T] | CallFuture[list[T]]:
        """Send a call; its future. What `call > pool` does.

        Args:
            node: the number of the node that runs it, in place of the call's own `node`. "all" or a list of numbers
                sends it to each of these nodes, and the future gives a list by node.

        Raises:
            PickleError: here and now, naming what cannot travel. UsageError: it streams, or the pool has no such node.
        """
        call_asked(call).sent = True  # also where it is refused here, which is told
        if call.function.is_generator:
            raise UsageError(
                f"{call.function.name} yields items: decorated with @sky.compute, `{call.function.name}(…) >> pool` "
                f"gives them as they come"
            )
        named: NamedNodes = call.options.node if node is None else node_asked(node)
        if isinstance(named, (str, tuple)):
            parts = [self.send(call, node=number, world=part) for number, part in self._worlds(named).items()]
            return ListFuture(call.function.name, parts)
        future: CallFuture[T] = CallFuture(call.function.name)
        self._submit(call, future, named, world)
        return future

    def _submit(
        self,
        call: Call[Any],
        outlet: CallFuture[Any] | Items[Any] | ResultCell[Any],
        node: int | None,
        world: World | None = None,
    ) -> tuple[PendingCall, Dispatch]:
        payload, feeds = call.payload()
        options = call.options
        pending = PendingCall(
            call.function.code(),
            payload,
            outlet,
            options,
            node=node,
            world=world,
            feeds=feeds,
        )
        dispatch = self._working().dispatch
        dispatch.submit(pending)
        return pending, dispatch

    def run(self, call: Call[T]) -> T:
        """Run a call on one node; its value, or for a generator its items. What `call >> pool` does.

        A call whose `node` is "all" or a list of numbers runs on each of these nodes, and gives a list.
        """
        options = call_asked(call).options
        if options.is_broadcast:
            return cast(T, self.run_all(call))
        if call.function.is_generator:
            return cast(T, self._stream(call, options.pinned, None))
        cell: ResultCell[T] = ResultCell()
        pending, dispatch = self._submit(call, cell, options.pinned)
        try:
            if not pending.feeds:
                dispatch.drive(pending)
            return cell.result(call.function.name)
        except BaseException:
            dispatch.stop(pending)
            raise

    def _stream(self, call: Call[Any], node: int | None, world: World | None) -> Stream[Any]:
        items: Items[Any] = Items(call.function.name)
        self._submit(call, items, node, world)
        return Stream(items, Loop.shared().loop.call_soon_threadsafe)

    def run_all(self, call: Call[T]) -> list[T]:
        """Run a call on every node; its values by node number. What `call @ pool` does.

        A call whose `node` is a number or a list of them runs on these nodes only.

        Raises:
            ExceptionGroup: several nodes raised; one alone is raised as it is.
            UsageError: the call names a node that the pool does not have.
        """
        worlds = self._worlds(call_asked(call).options.node)
        if call.function.is_generator:
            return [cast(T, self._stream(call, node, world)) for node, world in worlds.items()]
        return results_of([self.send(call, node=node, world=world) for node, world in worlds.items()])

    def _worlds(self, named: NamedNodes) -> dict[int, World]:
        """Return what each part of a call knows of the others, by the number of its node.

        While all nodes are just being replaced, it waits for the first that is there.
        """
        numbers: tuple[int, ...] | None = None
        if isinstance(named, int):
            numbers = (named,)
        elif isinstance(named, tuple):
            numbers = named
        there = self._working().dispatch.nodes(numbers)
        while not there:
            threading.Event().wait(0.02)
            there = self._working().dispatch.nodes(numbers)
        addresses = list(there.values())
        return {node: (place, addresses) for place, node in enumerate(there)}

    def run_group(self, group: Group[R]) -> R:
        """Run several calls at once; a tuple of their values, or an iterator of them."""
        if not isinstance(group, Group):
            raise UsageError(f"run_group() takes what gather() or & made of calls, not {group!r:.80}")
        futures = [self.send(call) for call in group.calls]
        if not group.stream:
            return cast(R, tuple(results_of(futures)))
        return cast(R, in_order(futures) if group.ordered else as_they_end(futures))

    @overload
    def submit(self, fn: ComputeFunction[P, T], /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[T]: ...
    @overload
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[T]: ...
    def submit(self, fn: ComputeFunction[P, T] | Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> CallFuture[T]:
        """Run `fn(*args, **kwargs)` on one node; a future. `fn` need not be decorated."""
        function = self._function(fn)
        return self.send(Call(function, args, kwargs, function.options))

    @overload
    def map(
        self,
        fn: ComputeFunction[..., T],
        *iterables: Iterable[object],
        timeout: float | None = None,
        chunksize: int | None = None,
        buffersize: int | None = None,
    ) -> Iterator[T]: ...
    @overload
    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[object],
        timeout: float | None = None,
        chunksize: int | None = None,
        buffersize: int | None = None,
    ) -> Iterator[T]: ...
    def map(
        self,
        fn: ComputeFunction[..., T] | Callable[..., T],
        *iterables: Iterable[object],
        timeout: float | None = None,
        chunksize: int | None = None,
        buffersize: int | None = None,
    ) -> Iterator[T]:
        """`fn` of each item, in order.

        A node runs as many calls at once as it has slots: one at a time where a slot has all of its devices. Of a
        function whose `node` is a number or a list of them, such as `f.with_options(node=[0, 2])`, these nodes alone
        run the calls.

        Args:
            timeout: seconds from now until which all results must be there.
            chunksize: send so many calls at a time, to run one after the other unless one of them takes long; None for
                as many as suits: quick calls travel together, each with its own end, and slow ones alone.
            buffersize: read so many items ahead of the results taken; None reads all at once.

        Raises:
            TimeoutError: from the iterator, when `timeout` is over.
        """
        number("timeout", timeout, "seconds until all results must be there", optional=True)
        if buffersize is not None:
            whole("buffersize", buffersize, "items read ahead", least=1)
        if chunksize is not None:
            whole("chunksize", chunksize, "calls sent at a time", least=1)
        until = None if timeout is None else time.monotonic() + min(timeout, 1e8)
        at_hand = all(type(each) in (list, tuple, range, dict, set, str) for each in iterables)
        function = self._function(fn)
        engine = self._working()
        if isinstance(function.options.node, tuple):
            engine.dispatch.nodes(function.options.node)  # raises for one that is not there
        engine.advise_map(function.options.on_cpu)
        calls_ = Map(engine.dispatch, function, chunksize, at_hand)
        items = zip(*iterables, strict=False)
        calls_.send(itertools.islice(items, buffersize))
        return calls_.results(items, until)

    def _function(self, fn: ComputeFunction[..., T] | Callable[..., T]) -> ComputeFunction[..., T]:
        if isinstance(fn, ComputeFunction):
            return fn
        if isinstance(fn, Call):
            raise UsageError(f"{fn!r} is a call already: send it with `>>`")
        if not callable(fn):
            raise UsageError(f"a pool runs functions, and {fn!r} is none")
        if not isinstance(fn, (FunctionType, BuiltinFunctionType, type)):
            return ComputeFunction(fn, Options())  # such as a bound method, whose object must not live on for this
        known = self._functions.get(fn)
        if known is None:
            if len(self._functions) > 256:
                self._functions.clear()
            known = self._functions[fn] = ComputeFunction(fn, Options())
        return known

    def put(self, value: T) -> Ref[T]:
        """Send a value to every node once; the reference stands for it in arguments, and arrives as the value."""
        buffers = codec.dumps(value, "the value of put()")
        digest = hashlib.sha256()
        for buffer in buffers:
            digest.update(buffer)
        ref: Ref[T] = Ref(digest.hexdigest()[:16], self)
        self._working().dispatch.put(ref.key, buffers)
        return ref

    def drop(self, ref: Ref[T]) -> None:
        """Let the nodes forget a value of `put`."""
        if not isinstance(ref, Ref):
            raise UsageError(f"drop() takes what put() gave, not {ref!r:.80}")
        if self._engine is not None:
            self._engine.dispatch.drop(ref.key)

    # --- what is no call -------------------------------------------------------------------------------------

    __array_ufunc__ = None  # so that numpy, too, leaves `array @ pool` to us

    def __rrshift__(self, value: object) -> NoReturn:
        raise calls.no_call(value, ">>")

    def __rmatmul__(self, value: object) -> NoReturn:
        raise calls.no_call(value, "@")

    def __lt__(self, value: object) -> NoReturn:
        raise calls.no_call(value, ">")

    def __rand__(self, value: object) -> NoReturn:
        raise calls.no_call(value, "&")

    # --- looking ---------------------------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        """Where the pool is in its life: planned, launching, ready, draining, ended."""
        if self._engine is not None:
            return self._engine.state.phase.value
        return "ended" if self._ended else "planned"

    @property
    def nodes(self) -> Mapping[int, str]:
        """The phase of each node, by number. A slice is one until it is there.

        Of nodes that are ready, "leaving" means that the provider takes it back, and "reconnecting" that its link is
        down: its calls go on there, and it gets no new ones.
        """
        return {} if self._engine is None else self._engine.words()

    @property
    def inherited(self) -> list[CallFuture[object]]:
        """After `attach`: the calls that the former client had under way, as futures; `future.name` says which."""
        return [] if self._engine is None else list(self._engine.inherited)

    def explain(self) -> str:
        """What was considered and tried, and why."""
        rental = self._begun.rental if self._begun else None
        if rental is None or rental.plan is None:
            return f"pool {self.name!r} has not planned anything yet"
        tried = [f"tried {o.provider} {o.instance_type}: {e}" for o, e in rental.attempts]
        return "\n".join([rental.plan.explain(), *tried])

    @property
    def receipt(self) -> Receipt:
        """What each machine cost: until its end, or until now."""
        return Receipt(self.name, (), time.time()) if self._begun is None else self._begun.rental.receipt

    def __repr__(self) -> str:
        return f"<ComputePool {self.name!r} {self.phase}>"

    def __reduce__(self) -> Any:
        raise TypeError("a ComputePool lives where it was made; send calls to it, not it to calls")
