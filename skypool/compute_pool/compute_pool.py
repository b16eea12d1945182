"""`ComputePool`: a group of rented machines, which a user starts, sends calls to, and stops.

A call is a Python function with its arguments, which a node (one of the machines) runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack

from skypool import events, tracebacks
from skypool.buckets.bucket import Bucket
from skypool.calls import entered
from skypool.calls.arguments import Ref
from skypool.calls.call import ComputeFunction
from skypool.calls.options import NamedNodes
from skypool.checks import Duration, seconds, texts, whole
from skypool.compute_pool.shown import ShownPool
from skypool.data.data_asked import data_asked
from skypool.data.save_asked import save_asked
from skypool.drivers.contract import Driver
from skypool.errors import PoolClosed, UsageError
from skypool.event_loop import Loop
from skypool.metrics.exporter import Exporter, exporters_asked
from skypool.model import SlotsAsked, Trust
from skypool.offers.need import (
    NOBODY,
    NodeTerms,
    bases_asked,
    drivers_asked,
    image_asked,
    need_asked,
    nodes_asked,
    order_asked,
)
from skypool.offers.sort_keys import OrderBy
from skypool.pool import interpreter_exit
from skypool.pool.call_routing import CallSender
from skypool.pool.engine import PoolEngine
from skypool.pool.idle_shutdown import IN_NOTEBOOK, NOTEBOOK_NOTICE, in_notebook, linger_asked
from skypool.pool.service import Service
from skypool.pool.states import Phase
from skypool.pool.surface import CallSurface
from skypool.pool.views import PoolView, selection_asked
from skypool.rental.budget import Budget
from skypool.rental.handover import Handover
from skypool.rental.ledger import Ledger
from skypool.rental.pool_terms import Check, Terms, budget_asked, check_asked, pool_name, trust_asked
from skypool.wire import codec
from skypool.wire.save_orders import MOST_DRAIN

if TYPE_CHECKING:
    from skypool.console import Mode
    from skypool.offers.need import AcceleratorAsked
    from skypool_images import Image

T = TypeVar("T")
ConsoleMode = Literal["auto", "live", "plain", "off"]
_LOOK_FOR_STREAMS = 0.5
"""Seconds between two searches for new streams to close, while the end of a pool waits for its calls."""


tracebacks.install()


class PoolOptions(NodeTerms, total=False):
    """The keyword arguments of `ComputePool` except `provider` and `name`. `ComputePool` describes each argument.

    Each argument may be left out.
    """

    accelerator: AcceleratorAsked
    image: Image | None
    nodes: int | tuple[int, int]
    slots: SlotsAsked
    lease: Duration
    max_lifetime: Duration | None
    linger: Duration | None
    liveness: Duration
    grace: Duration
    wait: Duration | None
    console: ConsoleMode
    order_by: OrderBy
    budget: Budget | float | None
    trust: Trust | None
    allow_results: Sequence[str | type]
    check: Check | None
    metrics: Exporter | Sequence[Exporter] | None
    save: Mapping[str, str | Bucket] | None
    data: Mapping[str, str | Bucket] | None
    complete: Sequence[str]
    drain: Duration


class ComputePool(ShownPool, CallSurface, Executor):
    """A group of rented machines that run Python functions and are ended afterwards.

        with ComputePool(provider=AWS(), accelerator="H100:8") as pool:
            result = train(10) >> pool

    Making the object rents nothing. The pool starts when it is entered with `with` or `async with`, by `start`, or
    when the first call is sent to it. Leaving the `with` block waits for the calls and then ends every machine. If the
    block raised, the calls are ended at once. Streams of generator functions that were not read to their end are closed
    in any case. A pool that has ended cannot be started again. A pool that is garbage-collected before it was stopped
    gives a ResourceWarning, and ends when its calls have ended.

    A pool is also a `concurrent.futures.Executor`. Any thread may call its methods.

    Durations are seconds, or strings such as "90s", "10m" and "1h30m", or `timedelta` objects.

    Args:
        provider: the provider to rent from: a driver such as `AWS()`, the name of a driver, or a list of these. From a
            list, the best offer of all providers is rented. Default None: the nodes are processes on this machine.
        accelerator: the accelerators of each node: an object such as `accelerators.H100(count=8)`, a string such as
            "H100:8", or a list of alternatives. Default None: none.
        image: the packages, files and settings of each node. Default None: an empty `Image()`.
        nodes: the number of nodes, or a pair of the smallest and the largest number. A pool starts with the smallest
            number, and adds nodes while calls wait. Default 1. If the accelerator is a TPU slice (several hosts rented
            together), this is the number of slices, and each host is a node.
        slots: the number of calls that a node runs at once with its devices (accelerators). The devices are divided
            among the calls. Default None: one call with all devices. "per-device": one call for each device. A node
            with devices also runs one call for each CPU at once, of functions marked `@compute(devices=0)`. A node
            without devices runs one call for each CPU, unless `slots` is a number. See docs/slots.md.
        name: the name of the pool in logs, in the tags of its machines, and for `attach`. It has 1 to 40 letters,
            digits, "-", "_" and ".". It is changed to the form that clouds accept: lower case, with "-" for "_" and
            ".". So `my_pool` becomes `my-pool`, also in the attribute `name`. Default None: a random name.
        lease: the time after which a node ends itself if no message from this process arrives. Default "10m".
        max_lifetime: the time after which the pool ends with all of its machines, also while calls run. It begins when
            the first machine is billed. Calls that have not ended raise LifetimeExceeded. Each machine also ends itself
            at that time, even if this process is gone. Default None: no limit.
        linger: the time after which the pool ends itself if it has had no work: no call that waits or runs, and no
            service with `busy=True`. After a `with` block, the machines stay (and cost) for the same time, so that
            `attach` can take them over. If this process is killed, each node ends itself that long after its last work,
            or when its lease is over if that is sooner. Default None: machines end at once after a `with` block, and an
            open pool has no such limit, except one hour in a notebook.
        liveness: the time without any message from a node after which the node is given up. The node's calls then raise
            ConnectionLost, unless the calls may run again on another node. The first answer of a node may take 30 s, if
            that is longer. Default 90 s.
        grace: the time between SIGTERM and SIGKILL for a call that exceeded its `timeout` and has no `grace` of its
            own. Default 5 s.
        wait: the time to keep asking while every suitable offer is out of stock. The time counts anew for each launch
            of nodes. Default None: give up at once.
        console: the form of the output about the pool. "live" is a view that updates itself, "plain" is lines, and
            "off" is nothing. Default "auto": live on a terminal, otherwise plain. The output of functions is shown
            in any case.
        order_by: which offer is best. "cheapest" (the default) compares prices. "per-device", "per-tflop" and "per-gb"
            compare the price divided by the number of devices, dense BF16 TFLOPs and GB of device memory.
        budget: the US dollars that the pool may cost, or a `Budget`. When they are spent, every machine ends, and the
            remaining calls raise BudgetExceeded. Default None: no limit.
        trust: "full" unpickles the results of nodes, so a malicious machine could run code here. "data" accepts plain
            data and the classes of `allow_results` only. Default None: "data" for machines that the provider rents out
            for strangers, "full" for all others. See docs/trust.md.
        allow_results: classes that results may contain with `trust="data"`: classes, or names such as "mypkg.Point" and
            "mypkg.*". Default (): none.
        check: the check that nodes reach each other. It runs when a pool with `private_network=True` starts, and before
            the first gang (a call with the option `procs`). "network" (the default) makes a TCP connection from each
            node to each other one. "nccl" also measures an all-reduce of 64 MB among the GPUs of the first gang's
            nodes, and is experimental. None checks nothing.
        metrics: exports the pool's metrics to a monitoring system: `Prometheus()`, `OTLP("http://…")` or a list of
            such objects. See docs/guides/metrics.md. Default None: they are not exported.
        save: folders of the nodes that are kept in buckets, such as {"out": "s3://models/runs/x"}: each is brought back
            before the node gets calls, and saved while it has any. A relative path begins in the folder in which calls
            run. See docs/save.md. Default None: none.
        data: folders of the nodes that are filled from buckets before the node gets calls, such as
            {"/data": "s3://models/shards"}, and are only read. See docs/data.md. Default None: none.
        complete: patterns of the file that is written last into the folder of a checkpoint, as paths below the folder
            of `save`, such as "step-*/done". Default (): what the usual libraries write last.
        drain: the most time to save what is left when nodes end. Default "2m".
        node: further requirements for each node, as keywords:
            `market`: "on-demand" (the default), "spot" (machines that the provider may take back), "spot-if-available"
                (spot offers are tried first) or "cheapest" (both kinds, by price).
            `max_usd_per_hour`: the highest price of one node (or TPU slice), in US dollars. Default None: no limit.
            `region`: a provider's name of a region, a pattern such as "eu-*", or a list. Default None: any.
            `vcpus`: the least number of CPUs. Default None: any.
            `memory`, `disk`: the least size, in GiB or as a string such as "64GB". Default None: any.
            `arch`: "x86_64" or "arm64". Default None: either.
            `private_network`: True rents all nodes in one place, with a network among them. Default False.

    Attributes:
        name: the name of the pool.
        events: the stream of events, such as changed phases and printed output; see `skypool.events`.

    Raises:
        UsageError: an argument is not valid. For a misspelt one, the message suggests the nearest valid spelling.
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
        linger: Duration | None = None,
        liveness: Duration = 90.0,
        grace: Duration = 5.0,
        wait: Duration | None = None,
        console: ConsoleMode = "auto",
        order_by: OrderBy = "cheapest",
        budget: Budget | float | None = None,
        trust: Trust | None = None,
        allow_results: Sequence[str | type] = (),
        check: Check | None = "network",
        metrics: Exporter | Sequence[Exporter] | None = None,
        save: Mapping[str, str | Bucket] | None = None,
        data: Mapping[str, str | Bucket] | None = None,
        complete: Sequence[str] = (),
        drain: Duration = "2m",
        **node: Unpack[NodeTerms],
    ) -> None:
        minimum, maximum = nodes_asked(nodes)
        if console not in ("auto", "live", "plain", "off"):
            raise UsageError(f"console must be 'auto', 'live', 'plain' or 'off', not {console!r}")
        image_ = image_asked(image)
        self._drivers = drivers = drivers_asked(provider)
        self.name = pool_name(name)
        self.events = events.EventStream()
        self._console: Mode = console
        saved = save_asked({} if save is None else save)
        self._terms = Terms(
            name=self.name,
            need=need_asked(ComputePool.__init__, accelerator, slots, bases_asked(image_, drivers), node),
            order_by=order_asked(order_by),
            budget=budget_asked(budget),
            **trust_asked(trust, allow_results),
            minimum=minimum,
            maximum=maximum,
            lease=seconds("lease", lease),
            lifetime=None if max_lifetime is None else seconds("max_lifetime", max_lifetime),
            stay=linger_asked(linger) or 0.0,
            linger=IN_NOTEBOOK if linger is None and in_notebook() else linger_asked(linger),
            liveness=seconds("liveness", liveness),
            grace=seconds("grace", grace),
            wait=0.0 if wait is None else seconds("wait", wait),
            image=image_,
            check=check_asked(check),
            save=tuple(saved),
            data=tuple(data_asked({} if data is None else data, saved)),
            complete=tuple(texts("complete", complete)),
            drain=_drain(drain),
        )
        self._tells_linger = linger is None and self._terms.linger is not None
        self._exporters = exporters_asked(metrics)
        self._handover: Handover | None = None
        self._begun: PoolEngine | None = None
        self._engine: PoolEngine | None = None
        self._starting = threading.Lock()
        self._sizing = threading.Lock()  # guards the numbers of nodes in _terms until _begun is set
        self._ended = False
        self._functions: dict[Any, ComputeFunction[..., Any]] = {}
        self._hush: Callable[[], None] | None = None
        self._entries: list[entered.Entry] = []

    # --- its life --------------------------------------------------------------------------------------------

    def start(self) -> ComputePool:
        """Rent the machines, set them up, and return this pool when it is ready for calls.

        Blocks until then: a pool with `nodes=(2, 8)` is ready when 2 nodes are. Returns at once if the pool was started
        before. If the wait is interrupted, as by Ctrl-C, the machines are ended.

        Raises:
            PoolClosed: the pool has ended. Make a new pool.
            UsageError: `metrics` cannot be exported, for example because a port is in use. Nothing was rented.
            SkypoolError: the pool could not become ready, for example NoOffers, LaunchError or BootstrapError. Its
                machines have been ended then, and the pool cannot be started again.
        """
        with self._starting:
            if self._ended:
                raise PoolClosed(f"pool {self.name!r} has ended; make a new ComputePool")
            if self._engine is None:
                self._begin()
        return self

    def _begin(self) -> None:
        """Make the engine, and wait until the pool is ready. After an error or Ctrl-C, end everything and raise it."""
        from skypool import console  # imported here, as the others: nothing of it is needed before a pool starts
        from skypool.compute_pool.watch_list import watches_of
        from skypool.observers.observed import Observed

        with self._sizing:
            self._begun = engine = PoolEngine(
                self._terms, self._drivers, self.events, watches_of(self._exporters), self._handover
            )
        self._hush = console.attach(self.events, self._console, Observed(engine.facts).figures)
        interpreter_exit.watch(engine)
        try:
            with tracebacks.heard_by(engine.rental.tell):
                Loop.shared().run(engine.start())
        except BaseException as e:
            self._ended = True
            if self._terms.attach and not isinstance(e, Exception):
                Loop.shared().run(engine.takeover.settled())  # a process that exits now would leave it half done
            if isinstance(e, Exception) or self._terms.attach:  # the engine has ended all, or taken nothing over
                interpreter_exit.forget(engine)
                engine.close_watches()
                self._quiet()
            else:  # Ctrl-C, or SIGTERM
                self._end(engine)
            raise
        self._engine = engine
        if self._tells_linger:
            self.events.emit(events.Notice(pool=self.name, text=NOTEBOOK_NOTICE))

    @classmethod
    def attach(
        cls, name: str, provider: Driver | str | Sequence[Driver | str] | None = None, **options: Unpack[PoolOptions]
    ) -> ComputePool:
        """Take over a running pool whose former process is gone, and return the pool when it is ready.

        The property `inherited` has the futures of the calls that the former process sent. If the pool cannot be taken
        over, its machines keep running.

        Args:
            name: the name of the pool.
            provider: the provider of the pool's machines: a driver, the name of a driver, or a list of these. Default
                None: the provider that is recorded in the ledger, the local database of rented machines.
            options: further arguments of `ComputePool`. If `accelerator` or `image` is given, nodes that are lost are
                replaced; otherwise they are not.

        Raises:
            UsageError: the ledger does not know the pool, an argument is not valid, or the former process still runs.
            ConnectionLost: a node cannot be reached, or the former process is still connected to it. Also raised if a
                machine is about to end itself and cannot be stopped any more. In each case, the other machines end when
                they would have ended without this call.
            SkypoolError: the provider has no machine of that pool.
        """
        if provider is None:
            provider = Ledger.here().drivers_of(pool_name(name))
        pool = cls(provider, name=name, **options)
        pool._terms = replace(pool._terms, attach=True, replaces=bool({"accelerator", "image"} & options.keys()))
        pool.start()
        engine = pool._begun
        if engine is not None and (
            words := engine.dispatch.roster.occupants(list(engine.dispatch.node_queues), former=True)
        ):
            pool.events.emit(events.Notice(pool=pool.name, text=f"these calls still run: {words}"))
        return pool

    def _handed_over(self) -> Handover:
        """Return the data with which another process can own this pool without an account. It is passed to `_held`."""
        return Loop.shared().run(self._running(self._begun).takeover.handover())

    @classmethod
    def _held(cls, handover: Handover, **options: Unpack[PoolOptions]) -> ComputePool:
        """Take over the nodes that another process hands over, and return the pool when it is ready."""
        record = handover.record
        # it cannot grow or replace nodes; agents end its machines; its budget counts the last known prices
        pool = cls(NOBODY, name=record.pool, **options)
        pool._handover = handover
        pool._terms = replace(pool._terms, attach=True, lease=record.lease)
        return pool.start()

    def stop(self) -> None:
        """End every call and every machine now, and wait until the provider confirms that the machines have ended.

        Calls that have not ended raise PoolClosed. A pool that was not started cannot be started afterwards. Does
        nothing if the pool has ended already. In a forked child process, the machines of the parent are not ended. If
        this is interrupted, as by Ctrl-C, a separate process goes on ending the machines.

        Raises:
            StillRunning: the end of some machines is not confirmed, so they may still cost money. The message names
                these machines.
            ErrorGroup: there are several such errors.
        """
        begun = self._begun
        is_starting = begun is not None and self._starting.locked() and not self._terms.attach
        if begun is not None and is_starting and not interpreter_exit.is_elsewhere(begun):
            self._end(begun)  # another thread is in `start`, and holds the lock for as long as that takes
        with self._starting:
            engine = self._engine
            self._engine = None
            self._ended = True
        if engine is not None and not interpreter_exit.is_elsewhere(engine):
            self._end(engine)

    def _end(self, engine: PoolEngine) -> None:
        """Stop an engine, and wait until its machines have ended. If interrupted, let another process end them."""
        self._run_out(engine, engine.stop())

    def _run_out(self, engine: PoolEngine, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which stops or leaves the engine. If interrupted, let another process end the machines."""
        is_interrupted = False
        try:
            with tracebacks.heard_by(engine.rental.tell):
                Loop.shared().run(work)
        except (KeyboardInterrupt, SystemExit):
            is_interrupted = True
            with interpreter_exit.undisturbed():
                engine.hand_over_now()
                is_interrupted = False
            raise
        finally:
            if not is_interrupted:  # otherwise its machines are ended when Python exits
                interpreter_exit.forget(engine)
            self._quiet()
        engine.dispatch.callbacks.wait()

    def _quiet(self) -> None:
        """Stop the output about this pool on the terminal, if there is any."""
        hush = self._hush
        self._hush = None
        if hush is not None:
            hush()

    def __del__(self) -> None:
        """If the pool was started and not stopped, give a ResourceWarning, and end the pool when its calls have ended.

        This does not wait.
        """
        engine = getattr(self, "_engine", None)
        if engine is None or interpreter_exit.is_over() or interpreter_exit.is_elsewhere(engine):
            return
        engine.abandon(self._hush)
        if engine.state.phase is Phase.ENDED:
            return
        tracebacks.warn(
            f"pool {self.name!r} was never stopped, and nothing refers to it any more: its machines end when its calls "
            "have ended. Use it in a `with` block, or call its stop()",
            ResourceWarning,
            self,
        )

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait until all calls have ended, then end the pool and wait until its machines have ended.

        Streams that were not read to their end are closed: their generators stop, and the rest of their items is
        discarded. Reading such a stream further raises PoolClosed.

        This is `concurrent.futures.Executor.shutdown`. Does nothing if the pool has ended already. A pool that was not
        started cannot be started afterwards.

        Args:
            wait: has no effect. `wait=False` waits too, because machines that cost money are not left alone.
            cancel_futures: True ends the calls at once instead of waiting for them; they raise PoolClosed. Default
                False.

        Raises:
            StillRunning, ErrorGroup: the end of some machines is not confirmed, so they may still cost money.
        """
        engine = self._engine
        try:
            if engine is not None and not cancel_futures and not interpreter_exit.is_elsewhere(engine):
                self._await_calls(engine)
        finally:  # also after Ctrl-C: the program may go on, and nobody else ends the pool
            self.stop()

    @staticmethod
    def _await_calls(engine: PoolEngine) -> None:
        """Close the streams that were not read to their end, and wait until all calls have ended."""
        engine.call_ends.close_streams()
        while not engine.dispatch.wait_done(_LOOK_FOR_STREAMS):
            engine.call_ends.close_streams()

    def __enter__(self) -> ComputePool:
        """Start the pool, wait until it is ready, and return it.

        Inside the `with` block, `await call` sends the call to this pool.

        Raises:
            PoolClosed: the pool has ended. Make a new pool.
            SkypoolError: the pool could not become ready. Its machines have been ended then.
        """
        self.start()
        try:
            self._entries.append(entered.enter(self, everywhere=True))
        except BaseException:  # Ctrl-C just now: the block is not entered, so nothing would leave it
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the calls, then end the pool. If the `with` block raised, end the calls at once.

        Streams that were not read to their end are closed. An exception of the block is not suppressed. If the pool has
        `linger=`, its machines stay for that time, except after Ctrl-C and SystemExit.

        Raises:
            StillRunning, ErrorGroup: the end of some machines is not confirmed, so they may still cost money.
        """
        self._left()
        self._leave(kind)

    def _left(self) -> None:
        """Note that the `with` block of this pool was left, so that `await call` no longer uses the pool."""
        if self._entries:
            entered.leave(self._entries.pop())

    def _leave(self, kind: type[BaseException] | None) -> None:
        """End the pool, or leave its machines for the time `linger=`. `kind` is the type of the block's exception."""
        engine = self._engine
        stays = engine is not None and self._terms.stay and (kind is None or issubclass(kind, Exception))
        if engine is None or not stays or interpreter_exit.is_elsewhere(engine):
            self.shutdown(cancel_futures=kind is not None)
            return
        if kind is None:
            try:
                self._await_calls(engine)
            except BaseException:  # Ctrl-C or SIGTERM, after which nothing stays
                self.stop()
                raise
        with self._starting:
            is_ours, self._engine, self._ended = self._engine is engine, None, True
        if is_ours:
            self._run_out(engine, engine.leave(self._terms.stay))

    async def __aenter__(self) -> ComputePool:
        """Start the pool in another thread, wait until it is ready, and return it. The event loop is not blocked.

        If the task is cancelled meanwhile, end the pool and raise CancelledError.

        Raises:
            PoolClosed: the pool has ended. Make a new pool.
            SkypoolError: the pool could not become ready. Its machines have been ended then.
        """
        try:
            await asyncio.to_thread(self.start)
        except asyncio.CancelledError:
            await asyncio.to_thread(self.stop)  # otherwise the thread that runs `start` would go on
            raise
        self._entries.append(entered.enter(self, everywhere=False))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for the calls, then end the pool. If the `async with` block raised, end the calls at once.

        Another thread does this, so that the event loop is not blocked. An exception of the block is not suppressed.
        If the task is cancelled while it waits for the calls, end them and the pool at once.

        Raises:
            StillRunning, ErrorGroup: the end of some machines is not confirmed.
        """
        self._left()
        leaving = asyncio.ensure_future(asyncio.to_thread(self._leave, kind))
        try:
            await asyncio.shield(leaving)
        except asyncio.CancelledError:
            await asyncio.to_thread(self.stop)  # otherwise the thread would wait for the calls
            await leaving
            raise

    def _working(self) -> PoolEngine:
        """Return the engine; start the pool first if needed. Raises PoolClosed, or the error that ended the pool."""
        if self._engine is None:
            self.start()
        engine = self._engine
        if engine is None:
            raise PoolClosed(f"pool {self.name!r} has ended; make a new ComputePool")
        if interpreter_exit.is_elsewhere(engine):
            raise PoolClosed(
                f"pool {self.name!r} belongs to the process that this one was forked from: send calls there, "
                "or make a new ComputePool here"
            )
        state = engine.life.state
        if state.error is not None and state.phase in (Phase.DRAINING, Phase.ENDED):
            raise state.error  # what ends the pool, from the moment it begins to end
        return engine

    # --- calls -----------------------------------------------------------------------------------------------

    @property
    def _sender(self) -> CallSender:
        """A new object that sends calls to this pool."""
        # it refers to the pool, so the pool must not keep it: a pool that nothing refers to ends
        return CallSender(self._working, self._terms.need.private_network, self._functions)

    def _narrowed(self, asked: NamedNodes, asker: object) -> NamedNodes:
        return asked

    def put(self, value: T) -> Ref[T]:
        """Send a value to every node once, and return a reference to it, without waiting for the nodes.

        Pass the reference as an argument of calls: the function gets the value. Nodes that join later get the value,
        too. Use this for a large value that many calls need. `drop` frees the value. If the pool was not started, this
        starts it first.

        Each call gets its own copy of a value of up to about 32 KiB. A larger value is shared by the calls of a worker
        process: its arrays are read-only, and no call should change the rest of it either.

        Raises:
            PickleError: the value cannot be pickled.
            PoolClosed: the pool has ended.
        """
        buffers = codec.dumps(value, "the value of put()")
        digest = hashlib.sha256()
        for buffer in buffers:
            digest.update(buffer)
        ref: Ref[T] = Ref(digest.hexdigest()[:16], self)
        self._working().dispatch.values.put(ref.key, buffers)
        return ref

    def drop(self, ref: Ref[T]) -> None:
        """Free a value that `put` has sent, on all nodes. Calls must not use its reference afterwards.

        This does not wait for the nodes. Does nothing if the pool has ended or the value was freed before.

        Raises:
            UsageError: the argument is not a reference that `put` returned.
        """
        if not isinstance(ref, Ref):
            raise UsageError(f"drop() takes a reference returned by put(), not {ref!r:.80}")
        if self._engine is not None:
            self._engine.dispatch.values.drop(ref.key)

    # --- services --------------------------------------------------------------------------------------------

    @property
    def services(self) -> list[Service[object]]:
        """The services that have not ended, as a new list; [] until `start` has returned and after the pool ended.

        Services of a former process are among them if the pool was taken over with `attach`. They cannot start again.
        """
        return [] if self._engine is None else list(self._engine.services.there)

    # --- the number of nodes ---------------------------------------------------------------------------------

    def resize(self, nodes: int | tuple[int, int]) -> None:
        """Change the number of nodes of the pool, without waiting for new nodes. `wait_ready` waits for them.

        The pool then keeps the new number, as if it had been made with it. Missing nodes are rented like those at the
        start, within the budget. Surplus nodes get no new calls, and end when their calls have ended (see `retire`).
        Nodes that are not ready yet are chosen first, then those with the fewest calls, and of these the ones with the
        highest numbers.

        If some nodes cannot be rented, the pool goes on with those that it has, and tells the user. Calling this again,
        also with the same number, tries again. A pool that was not started yet starts with the new number.

        Args:
            nodes: the number of nodes, or a pair of the smallest and the largest number. If the accelerator is a TPU
                slice, slices are counted.

        Raises:
            UsageError: `nodes` is not valid, or the alternatives of the accelerator have different numbers of hosts.
                Also raised if the pool was taken over by `attach` without the requirements of new nodes.
            BudgetExceeded: the first 20 minutes of the new nodes cost more than is left of the budget.
            PoolClosed: the pool has ended.
        """
        minimum, maximum = nodes_asked(nodes)
        with self._sizing:
            engine = self._begun
            if engine is None and not self._ended:
                self._terms = replace(self._terms, minimum=minimum, maximum=maximum)
                return
        self._running(engine).node_count.resize(minimum, maximum)

    def retire(self, node: int) -> None:
        """Let a node end once its calls have ended, and do without it from now on. This does not wait for its end.

        The node gets no new calls. Calls that it has not begun run on other nodes; those that only this node may run
        raise NodeRetired. When no call runs on the node any more, its machine is ended, and the provider must confirm
        that. `pool.nodes` shows "leaving", then "draining" and "ended".

        A pool with a fixed number of nodes has one less afterwards. A pool that grows while calls wait may grow again.
        Does nothing if the node leaves already.

        Args:
            node: the number of the node. For a TPU slice, the number of its first host; the whole slice ends.

        Raises:
            UsageError: the pool has no such node, the node is a later host of a slice, or the node is the last one.
            PoolClosed: the pool has ended.
        """
        whole("node", node, "the number of a node", least=0)
        if self._begun is None and not self._ended:
            raise UsageError(f"pool {self.name!r} was not started, so it has no node {node}")
        self._running(self._begun).node_count.retire(node)

    def wait_ready(self, n: int | None = None, timeout: Duration | None = None) -> None:
        """Wait until at least `n` nodes are ready for calls. If the pool was not started, start it first.

        Args:
            n: the number of nodes. If the accelerator is a TPU slice, slices are counted. Default None: the number that
                the pool is to have, or the smallest number of a pair.
            timeout: the time to wait at most, in seconds or as a duration such as "10m". Default None: no limit. If the
                pool was not started, the time counts from the end of its start.

        Raises:
            TimeoutError: the time is over. The message has the state of the nodes that are not ready.
            UsageError: an argument is not valid, or `n` is more than the pool may have.
            LaunchError: too few nodes are left, and no more are being rented, because renting them failed.
            PoolClosed: the pool has ended.
            SkypoolError: the error that ended the pool.
        """
        if n is not None:
            whole("n", n, "how many nodes", least=1)
        left = None if timeout is None else seconds("timeout", timeout)
        if self._begun is None:
            self.start()
        Loop.shared().run(self._running(self._begun).node_count.wait_ready(n, left))

    def _running(self, engine: PoolEngine | None) -> PoolEngine:
        """Return the engine of a pool that runs or starts. Raises PoolClosed, or the error that ended the pool."""
        if engine is not None and interpreter_exit.is_elsewhere(engine):
            raise PoolClosed(f"pool {self.name!r} belongs to the process that this one was forked from")
        if (
            engine is not None
            and engine.state.phase in (Phase.DRAINING, Phase.ENDED)
            and engine.state.error is not None
        ):
            raise engine.state.error
        if engine is None or self._ended or engine.state.phase in (Phase.DRAINING, Phase.ENDED):
            raise PoolClosed(f"pool {self.name!r} has ended; make a new ComputePool")
        return engine

    # --- some of the nodes -----------------------------------------------------------------------------------

    def __getitem__(self, key: int | slice | Sequence[int]) -> PoolView:
        """Return a view of some nodes: `pool[0]`, `pool[0:4]` or `pool[[0, 2]]`. Calls can be sent to the view.

        The numbers are those of `pool.nodes`. Whether the pool has the nodes is checked when the view is used.

        Raises:
            UsageError: the key is not a number, a range or a list of numbers, or has a negative number.
        """
        return PoolView(self, selection_asked(self.name, key))

    __iter__ = None  # otherwise Python would iterate over a pool by `__getitem__`, without an end

    def _node_numbers(self, named: Sequence[int] | None = None) -> tuple[int, ...]:
        """Return the numbers of the named nodes (None: all that get calls), ascending. Start the pool if needed."""
        return tuple(self._working().dispatch.roster.nodes(named))

    def __repr__(self) -> str:
        return f"<ComputePool {self.name!r} {self.phase}>"

    def __reduce__(self) -> Any:
        """Raise a TypeError, because a pool cannot be pickled."""
        raise TypeError(
            f"pool {self.name!r} can be used only in the process that made it: do not use the pool in a function "
            "that runs on nodes, nor pass it as an argument"
        )


def _drain(said: Duration) -> float:
    """Return the argument `drain`, in seconds. Raises UsageError if it is not valid."""
    found = seconds("drain", said)
    if found > MOST_DRAIN:
        raise UsageError(f"drain must be at most {MOST_DRAIN / 3600:g} h, not {found / 3600:g} h")
    return found
