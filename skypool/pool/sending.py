"""Sends calls to the nodes of a pool: to one node, to each of several, or as a gang."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from skypool.calls.call import Call, ComputeFunction
from skypool.calls.dispatch import Dispatch
from skypool.calls.futures import CallFuture, Items, ResultCell, Stream
from skypool.calls.map import Map, map_of_gangs
from skypool.calls.options import NamedNodes, Options
from skypool.calls.parts import ListFuture, StreamParts
from skypool.calls.pending import PendingCall, UserCall
from skypool.errors import ConnectionLost, UsageError
from skypool.event_loop import Loop
from skypool.pool.engine import PoolEngine
from skypool.pool.service import Service

if TYPE_CHECKING:
    from skypool.calls.gangs import GangFuture

T = TypeVar("T")
V = TypeVar("V")
Outlet = CallFuture[Any] | Items[Any] | ResultCell[Any]
"""The types of objects that get the result of a call."""
OneOf = int | tuple[int, ...] | None
"""The nodes that may run a call: one, any of several, or any node of the pool (None)."""


class CallSender:
    """The sender of a pool's calls.

    Each method gets the nodes that a call may use, so that a view can restrict them to its own nodes.

    Args:
        working: returns the pool's engine. It starts a pool that was not started, and raises if the pool has ended.
        checks_network: True to check that nodes reach each other before a call runs on several of them.
        functions: the plain functions that were made `ComputeFunction` objects before.
    """

    def __init__(
        self,
        working: Callable[[], PoolEngine],
        checks_network: bool,
        functions: dict[Any, ComputeFunction[..., Any]],
    ) -> None:
        self.working = working
        self._checks_network = checks_network
        self._functions = functions

    def function(self, fn: ComputeFunction[..., T] | Callable[..., T]) -> ComputeFunction[..., T]:
        """Return a function as a `ComputeFunction`: unchanged if it is decorated, otherwise with default options.

        The results for plain functions are remembered (at most 257), so that each is pickled once. Those for bound
        methods and other callable objects are not. Raises UsageError for a call, and for what is not callable.
        """
        if isinstance(fn, ComputeFunction):
            return fn
        if isinstance(fn, Call):
            raise UsageError(
                f"{fn!r} is a call, not a function: pass the function without its arguments, or send the call with "
                "`call >> pool`"
            )
        if not callable(fn):
            raise UsageError(
                f"a pool runs functions, but {fn!r} is not callable; pass a function, followed by its arguments"
            )
        if not isinstance(fn, (FunctionType, BuiltinFunctionType, type)):
            return ComputeFunction(fn, Options())  # do not keep objects alive, such as that of a bound method
        known = self._functions.get(fn)
        if known is None:
            if len(self._functions) > 256:
                self._functions.clear()
            known = self._functions[fn] = ComputeFunction(fn, Options())
        return known

    # --- to one node -----------------------------------------------------------------------------------------

    def run(self, call: Call[T], nodes: OneOf) -> T:
        """Run a call on one of these nodes, and return its value, or a `Stream` for a generator."""
        if call.function.is_generator:
            items: Items[Any] = Items(call.function.name)
            self._submit(call, items, nodes)
            return cast(T, Stream(items, Loop.shared().loop.call_soon_threadsafe))
        cell: ResultCell[T] = ResultCell()
        pending, dispatch = self._submit(call, cell, nodes)
        try:
            if not pending.feeds:
                dispatch.roster.drive(pending)
            return cell.result(call.function.name)
        except BaseException:
            dispatch.stop(pending)
            raise

    def send(self, call: Call[T], nodes: OneOf) -> CallFuture[T]:
        """Send a call to one of these nodes, and return its future."""
        _refuse_generator(call)
        future: CallFuture[T] = CallFuture(call.function.name)
        self._submit(call, future, nodes)
        return future

    def _submit(self, call: Call[Any], outlet: Outlet, nodes: OneOf) -> tuple[PendingCall, Dispatch]:
        """Pickle a call, and queue it to run on one of these nodes. `outlet` gets the result later."""
        payload, feeds = call.payload()
        pending = PendingCall(call.function.code(), payload, outlet, call.options, node=nodes, feeds=feeds)
        dispatch = self.working().dispatch
        dispatch.submit(pending)
        return pending, dispatch

    def map(
        self,
        function: ComputeFunction[..., T],
        named: NamedNodes,
        iterables: Sequence[Iterable[object]],
        chunksize: int | None,
        buffersize: int | None,
        until: float | None,
    ) -> Iterator[T]:
        """Send a call of the function for each item, and return an iterator of the results.

        `until` is a time of `time.monotonic()`; None for no limit. See `ComputePool.map` for the rest.
        """
        engine = self.working()
        if isinstance(named, tuple):
            engine.dispatch.roster.nodes(named)  # raises UsageError for a node that does not exist
        items = zip(*iterables, strict=False)
        if function.options.procs is not None:
            sent = partial(self.send_gang, named=named, every=False)
            return map_of_gangs(sent, (Call(function, args, {}, function.options) for args in items), buffersize, until)
        engine.advice.on_map(function.options.on_cpu)
        at_hand = all(type(each) in (list, tuple, range, dict, set, str) for each in iterables)
        calls = Map(engine.dispatch, function, None if named == "all" else named, chunksize, at_hand)
        calls.send(itertools.islice(items, buffersize))
        return calls.results(items, until)

    # --- to each of several nodes ----------------------------------------------------------------------------

    def run_each(self, call: Call[T], named: NamedNodes) -> list[T]:
        """Run a call on each of the named nodes (None: every node), and return the values, or `Stream` objects."""
        if call.function.is_generator:
            return cast(list[T], self._streams(call, named))
        return _result_of(self.send_each(call, named))

    def send_each(self, call: Call[T], named: NamedNodes) -> ListFuture[T]:
        """Send a call to the named nodes (None: every node), and return the future of the list of values.

        Raises LaunchError if nodes are missing and no more are being launched. Nodes that already got the call then
        stop it.
        """
        _refuse_generator(call)
        engine = self.working()

        def future_of(nodes: Sequence[int]) -> tuple[ListFuture[T], Sequence[CallFuture[T]]]:
            future: ListFuture[T] = ListFuture(
                call.function.name, nodes, call.options, engine.advice.on_stopped, engine.dispatch.callbacks
            )
            return future, future.parts

        return self._on_several(call, named, future_of)

    def _streams(self, call: Call[Any], named: NamedNodes) -> list[Stream[Any]]:
        """Send a call of a generator function to several nodes, and return the streams of its items at once."""
        name, advise = call.function.name, self.working().advice.on_stopped

        def items_of(nodes: Sequence[int]) -> tuple[Sequence[Items[Any]], Sequence[Items[Any]]]:
            items = StreamParts[Any](name, nodes, call.options, advise).items
            return items, items

        later = Loop.shared().loop.call_soon_threadsafe
        return [Stream(items, later) for items in self._on_several(call, named, items_of)]

    def _on_several(
        self, call: Call[Any], named: NamedNodes, outlets_of: Callable[[Sequence[int]], tuple[V, Sequence[Outlet]]]
    ) -> V:
        """Send a call to several nodes. `outlets_of` gets their numbers, and returns (the value to return, outlets)."""
        payload, feeds = call.payload()
        code, options = call.function.code(), call.options
        while True:
            there = self._chosen(call.function.name, named, check=self._check_network)
            addresses = list(there.values())
            value, outlets = outlets_of([*there])
            whole = UserCall(call.function.name, len(there))
            parts = [
                PendingCall(
                    code, payload, outlet, options, node=node, world=(place, addresses), feeds=feeds, part_of=whole
                )
                for place, (node, outlet) in enumerate(zip(there, outlets, strict=True))
            ]
            dispatch = self.working().dispatch
            if named not in (None, "all"):
                try:
                    dispatch.submit(*parts)
                except BaseException:
                    for part in parts:
                        dispatch.stop(part)
                    raise
                return value
            # if a node leaves before the call is sent, nodes are chosen again
            if dispatch.submit_together(parts):
                return value

    def start_services(
        self, call: Call[T], named: NamedNodes, again: int, name: str | None, busy: bool
    ) -> list[Service[T]]:
        """Start a service on each of the named nodes. If one cannot be started, stop those before it, and raise."""
        engine = self.working()
        started: list[Service[T]] = []
        try:
            there = self._chosen(call.function.name, named, check=self._check_network)
            for place, each in enumerate(there):
                world = (place, list(there.values()))
                started.append(engine.services.start(call, each, again, name, world, busy))
        except BaseException:
            for service in started:
                engine.services.stop(service)
            raise
        return started

    # --- as a gang -------------------------------------------------------------------------------------------

    def run_gang(self, call: Call[Any], named: NamedNodes, every: bool, is_own: bool = False) -> Any:
        """Run a call as a gang (see `send_gang`), and return its result. Stop the gang if the wait is interrupted."""
        return _result_of(self.send_gang(call, named, every, is_own))

    def send_gang(self, call: Call[Any], named: NamedNodes, every: bool, is_own: bool = False) -> GangFuture[Any]:
        """Send a call with the option `procs`, which runs as several processes, and return its future.

        With `every`, the gang runs on all named nodes, and the result is the list of values by rank. Otherwise it runs
        on one of them, and the result is the value of rank 0. `is_own` is True for a check of skypool's own, which
        does not count as a call of the user. Raises UsageError if a node is not trusted, an argument is an iterator, or
        `min_nodes` is too large.
        """
        name, least = call.function.name, call.options.min_nodes
        payload, feeds = call.payload()
        if feeds:
            raise UsageError(
                f"{name} has an iterator among its arguments, which the processes of a gang cannot share: pass a list"
            )
        if every:
            self.working().sizing.check_least(name, least, len(named) if isinstance(named, tuple) else None)
        nodes = [*self._chosen(name, named, least, self._check_gang if every else None, every=every)]
        engine = self.working()
        strangers = [node for node in nodes if engine.trust_levels.is_stranger(node)]
        if strangers:
            raise UsageError(
                f"{name} cannot run as a gang on node {strangers[0]}, whose results are read as data only "
                '(trust="data"): leave procs= out, or rent machines of a provider that you trust'
            )
        count = len(nodes) if every else 1
        among = None if named in (None, "all") else frozenset(nodes)
        code = call.function.code()
        runner = engine.dispatch.gang_runner(code.name)
        return runner.submit(code, payload, call.options, count, among, every, is_own)

    def _check_gang(self, nodes: Sequence[int]) -> None:
        """Check that the nodes of a gang reach each other. With `check="nccl"`, once measure an all-reduce."""
        network = self.working().network
        network.ensure(nodes)
        if not network.begin_measuring():
            return
        from skypool.gangs.all_reduce import all_reduce  # imported here, as few pools measure
        from skypool.pool.network import MEASURING

        try:
            network.tell_bandwidth(
                self.run_gang(ComputeFunction(all_reduce, MEASURING)(), tuple(nodes), every=True, is_own=True)
            )
        except Exception as e:
            e.add_note('this is the all-reduce of check="nccl" before the first gang; check="network" leaves it out')
            raise

    # --- the nodes of a call ---------------------------------------------------------------------------------

    def _check_network(self, nodes: Sequence[int]) -> None:
        if self._checks_network:
            self.working().network.ensure(nodes)

    def _chosen(
        self,
        name: str,
        named: NamedNodes,
        least: int | None = None,
        check: Callable[[Sequence[int]], None] | None = None,
        every: bool = True,
    ) -> dict[int, str]:
        """Return the addresses of the nodes that a call runs on, by node number. If it names none, wait for all."""
        # `least`: the nodes that are enough after the pool's `wait`; None: all. `every=False`: one is enough at once.
        numbers = (named,) if isinstance(named, int) else named if isinstance(named, tuple) else None
        while True:
            engine = self.working()
            if numbers is None:
                engine.sizing.await_nodes(name, least if every else 1, every)
            there = engine.dispatch.roster.nodes(numbers)
            try:
                if check is not None:
                    check([*there])
            except (UsageError, ConnectionLost):
                if numbers is None and engine.dispatch.roster.nodes().keys() != there.keys():
                    continue  # a node left during the check
                raise
            if there and (numbers is not None or engine.dispatch.roster.nodes().keys() >= there.keys()):
                return there


def _result_of(future: CallFuture[V]) -> V:
    """Wait for the result of a future. Cancel its calls if the wait is interrupted, as by Ctrl-C."""
    try:
        return future.result()
    except BaseException:
        future.cancel()  # a future that is done is not changed
        raise


def _refuse_generator(call: Call[Any]) -> None:
    if call.function.is_generator:
        raise UsageError(
            f"{call.function.name} is a generator function: decorate it with @sky.compute and iterate over "
            f"`{call.function.name}(…) >> pool`, which yields its items as they arrive"
        )
