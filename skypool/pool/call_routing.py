"""Sends calls to the nodes of a pool: to one node, to each of several, or as a gang."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from skypool.calls.broadcast import ListFuture, StreamParts
from skypool.calls.call import Call, ComputeFunction, packed
from skypool.calls.dispatch import Dispatch
from skypool.calls.futures import CallFuture, Items, ResultCell, Stream
from skypool.calls.map import Map, map_of_gangs
from skypool.calls.options import NamedNodes, Options
from skypool.calls.pending_calls import Packed, PendingCall, UserCall
from skypool.errors import ConnectionLost, UsageError
from skypool.event_loop import Loop
from skypool.pool.engine import PoolEngine
from skypool.pool.service import Service

if TYPE_CHECKING:
    from skypool.calls.gangs import GangFuture
    from skypool.files.transfer import NodeEnd

T = TypeVar("T")
V = TypeVar("V")
Outlet = CallFuture[Any] | Items[Any] | ResultCell[Any]
"""The types of objects that get the result of a call."""


class CallSender:
    """The sender of a pool's calls.

    Each method gets the nodes that a call may use, so that a view can restrict them to its own nodes.

    Args:
        working: returns the pool's engine. It starts a pool that was not started, and raises if the pool has ended.
        checks_network: True to check that nodes reach each other before a call runs on several of them.
        functions: the `ComputeFunction` objects that were made of plain functions so far, by the plain function.
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

    # --- by the options of a call ----------------------------------------------------------------------------

    def run(self, call: Packed[T], nodes: NamedNodes) -> T:
        """Run a call as its options say, and return its value: on one of these nodes, on each of them, or as a gang.

        `nodes` is the number of a node, a tuple of several, "all", or None for any node with room.
        """
        options = call.options
        if options.procs is not None:
            return cast(T, _result_of(self._send_gang(call, nodes, options.is_broadcast)))
        if options.is_broadcast:
            return cast(T, self._run_each(call, nodes))
        return self._run_on_one(call, nodes)

    def run_all(self, call: Packed[T], nodes: NamedNodes) -> list[T]:
        """Run a call on each of these nodes (None: every node), and return the list of its values."""
        if call.options.procs is not None:
            return cast(list[T], _result_of(self._send_gang(call, nodes, True)))
        return self._run_each(call, nodes)

    def send(self, call: Packed[T], nodes: NamedNodes, every: bool) -> CallFuture[T] | CallFuture[list[T]]:
        """Send a call to one of these nodes, or to each of them (`every`), and return its future."""
        if call.options.procs is not None:
            return self._send_gang(call, nodes, every)
        _refuse_generator(call)
        return self._send_each(call, nodes) if every else self._submit(call, _future, nodes)[0]

    # --- to one node -----------------------------------------------------------------------------------------

    def _run_on_one(self, call: Packed[T], nodes: NamedNodes) -> T:
        """Run a call on one of these nodes, and return its value, or a `Stream` for a generator."""
        if call.is_generator:
            return cast(T, self._submit(call, _stream, nodes)[0])
        cell, pending, dispatch = self._submit(call, _cell, nodes)
        try:
            if not pending.feeds:
                dispatch.roster.drive(pending)
            value: T = cell.result(call.code.name)
            return value
        except BaseException:
            dispatch.stop(pending)
            raise

    def _submit(
        self, call: Packed[Any], outlet_of: Callable[[str], tuple[V, Outlet]], named: NamedNodes
    ) -> tuple[V, PendingCall, Dispatch]:
        """Queue a call for one of these nodes. Return (value, the queued call, the dispatch)."""
        # `outlet_of` gets the call's name, and returns (value, the object that gets the call's result)
        dispatch = self.working().dispatch
        value, outlet = outlet_of(call.code.name)
        node = named[0] if isinstance(named, tuple) and len(named) == 1 else None if named == "all" else named
        pending = PendingCall(call.code, call.payload, outlet, call.options, node=node, feeds=call.feeds)
        dispatch.submit(pending)
        return value, pending, dispatch

    def map(
        self,
        function: ComputeFunction[..., T],
        named: NamedNodes,
        iterables: Sequence[Iterable[object]],
        chunksize: int | None,
        buffersize: int | None,
        until: float | None,
    ) -> Iterator[T]:
        """Send a call of the function for each item, and return an iterator of the results, in the order of the items.

        Args:
            named: the number of a node, a tuple of several, or None or "all" for any node.
            iterables: the items. The function gets one argument from each iterable.
            chunksize: the number of calls that are sent together. None: it depends on how long the calls take.
            buffersize: how many items may be read before their results are taken from the iterator. None: all are read.
            until: the time of `time.monotonic()` at which the iterator raises TimeoutError; None for no limit.
        """
        engine = self.working()
        if isinstance(named, tuple):
            engine.dispatch.roster.nodes(named)  # raises UsageError for a node that does not exist
        items = zip(*iterables, strict=False)
        if function.options.procs is not None:
            gangs = (packed(Call(function, args, {}, function.options)) for args in items)
            return map_of_gangs(partial(self._send_gang, named=named, every=False), gangs, buffersize, until)
        engine.advice.on_map(function.options.on_cpu)
        at_hand = all(type(each) in (list, tuple, range, dict, set, str) for each in iterables)
        calls = Map(engine.dispatch, function, None if named == "all" else named, chunksize, at_hand)
        calls.send(itertools.islice(items, buffersize))
        return calls.results(items, until)

    # --- to each of several nodes ----------------------------------------------------------------------------

    def _run_each(self, call: Packed[T], named: NamedNodes) -> list[T]:
        """Run a call on each of the named nodes (None: every node), and return the values, or `Stream` objects."""
        if call.is_generator:
            return cast(list[T], self._on_several(call, named, self._streams_of))
        return _result_of(self._send_each(call, named))

    def _send_each(self, call: Packed[T], named: NamedNodes) -> ListFuture[T]:
        """Send a call to the named nodes (None: every node), and return the future of the list of values."""
        return self._on_several(call, named, self._future_of)

    def _future_of(self, call: Packed[T], nodes: Sequence[int]) -> tuple[ListFuture[T], Sequence[CallFuture[T]]]:
        engine = self.working()
        future: ListFuture[T] = ListFuture(
            call.name, nodes, call.options, engine.advice.on_stopped, engine.dispatch.callbacks
        )
        return future, future.parts

    def _streams_of(self, call: Packed[Any], nodes: Sequence[int]) -> tuple[list[Stream[Any]], Sequence[Items[Any]]]:
        items = StreamParts[Any](call.name, nodes, call.options, self.working().advice.on_stopped).items
        later = Loop.shared().loop.call_soon_threadsafe
        return [Stream(each, later) for each in items], items

    def _on_several(
        self,
        call: Packed[T],
        named: NamedNodes,
        outlets_of: Callable[[Packed[T], Sequence[int]], tuple[V, Sequence[Outlet]]],
    ) -> V:
        """Send a call to each of the named nodes (None: every node). Return the value that `outlets_of` makes."""
        # `outlets_of` gets the call and the nodes, and returns (value, an object for each node that gets the result)
        while True:
            there = self._chosen(call.name, named, check=self._check_network)
            addresses = list(there.values())
            value, outlets = outlets_of(call, [*there])
            whole = UserCall(call.name, len(there))
            parts = [
                PendingCall(
                    call.code,
                    call.payload,
                    outlet,
                    call.options,
                    node=node,
                    world=(place, addresses),
                    feeds=call.feeds,
                    part_of=whole,
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
        self, call: Packed[T], named: NamedNodes, again: int, name: str | None, busy: bool
    ) -> list[Service[T]]:
        """Start a service on each of the named nodes (None: every node), and return the services.

        If one cannot be started, stop those that were started, and raise the error.

        Args:
            again: how often each service may start again after it has ended.
            name: the name of the service in messages; None for that of the function.
            busy: True if the service counts as work, so that its node is not idle.
        """
        engine = self.working()
        started: list[Service[T]] = []
        try:
            there = self._chosen(call.name, named, check=self._check_network)
            for place, each in enumerate(there):
                world = (place, list(there.values()))
                started.append(engine.services.start(call, each, again, name, world, busy))
        except BaseException:
            for service in started:
                engine.services.stop(service)
            raise
        return started

    # --- as a gang -------------------------------------------------------------------------------------------

    def _send_gang(self, call: Packed[Any], named: NamedNodes, every: bool, is_own: bool = False) -> GangFuture[Any]:
        """Send a call with the option `procs`, which runs as several processes, and return its future."""
        # `every`: on all named nodes, with the values of all ranks. `is_own`: a check of skypool's own.
        name, least = call.name, call.options.min_nodes
        if call.feeds:
            raise UsageError(
                f"{name} has an iterator among its arguments, which the processes of a gang cannot share: pass a list"
            )
        if every:
            self.working().node_count.check_least(name, least, len(named) if isinstance(named, tuple) else None)
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
        return engine.dispatch.gang_runner().submit(call, count, among, every, is_own)

    def _check_gang(self, nodes: Sequence[int]) -> None:
        """Check that the nodes of a gang reach each other. For `check="nccl"`, measure an all-reduce the first time."""
        network = self.working().network
        network.ensure(nodes)
        if not network.begin_measuring():
            return
        from skypool.gangs.all_reduce import all_reduce  # imported here, as few pools measure
        from skypool.pool.network import MEASURING

        try:
            measure = packed(ComputeFunction(all_reduce, MEASURING)())
            network.tell_bandwidth(_result_of(self._send_gang(measure, tuple(nodes), every=True, is_own=True)))
        except Exception as e:
            e.add_note('this is the all-reduce of check="nccl" before the first gang; check="network" leaves it out')
            raise

    # --- the nodes of a call ---------------------------------------------------------------------------------

    def _check_network(self, nodes: Sequence[int]) -> None:
        if self._checks_network:
            self.working().network.ensure(nodes)

    @contextlib.contextmanager
    def transfer(self, name: str, named: NamedNodes) -> Iterator[list[NodeEnd]]:
        """Yield how a transfer of files, which is the block, reaches each of these nodes. It counts as their work.

        If none is named, wait for all nodes first.
        """
        from skypool.files.transfer import end_of  # imported here because most programs send no files

        numbers = self._chosen(name, named)
        engine = self.working()
        with engine.dispatch.transferring([*numbers]):
            yield [end_of(node, *engine.connections.ways[node], engine.terms.spares) for node in numbers]

    @property
    def patience(self) -> float:
        """Seconds without a sign of a node after which it is given up."""
        return self.working().terms.liveness

    def _chosen(
        self,
        name: str,
        named: NamedNodes,
        least: int | None = None,
        check: Callable[[Sequence[int]], None] | None = None,
        every: bool = True,
    ) -> dict[int, str]:
        """Return the address of each node that a call runs on, by number. If it names no node, wait for all nodes."""
        # `least`: the nodes that are enough after the pool's `wait`; None: all. `every=False`: one is enough at once.
        numbers = (named,) if isinstance(named, int) else named if isinstance(named, tuple) else None
        while True:
            engine = self.working()
            if numbers is None:
                engine.node_count.await_nodes(name, least if every else 1, every)
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


def _cell(_: str) -> tuple[ResultCell[Any], Outlet]:
    cell: ResultCell[Any] = ResultCell()
    return cell, cell


def _future(name: str) -> tuple[CallFuture[Any], Outlet]:
    future: CallFuture[Any] = CallFuture(name)
    return future, future


def _stream(name: str) -> tuple[Stream[Any], Outlet]:
    items: Items[Any] = Items(name)
    return Stream(items, Loop.shared().loop.call_soon_threadsafe), items


def _result_of(future: Future[V]) -> V:
    """Wait for the result of a future. Cancel its calls if the wait is interrupted, as by Ctrl-C."""
    try:
        return future.result()
    except BaseException:
        future.cancel()  # a future that is done is not changed
        raise


def _refuse_generator(call: Packed[Any]) -> None:
    if call.is_generator:
        raise UsageError(
            f"{call.name} is a generator function: decorate it with @sky.compute and iterate over "
            f"`{call.name}(…) >> pool`, which yields its items as they arrive"
        )
