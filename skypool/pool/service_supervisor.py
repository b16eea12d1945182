"""`Services`: starts the services of one pool, starts them again after they ended, and closes them with the pool."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from skypool import events
from skypool.calls.call import Call, ComputeFunction, packed
from skypool.calls.dispatch import Dispatch
from skypool.calls.futures import CallFuture, Returned
from skypool.calls.options import Options
from skypool.calls.pending_calls import Packed, PendingCall, World
from skypool.calls.program import await_port
from skypool.errors import NodeInterrupted, NodeRetired, PoolClosed, UsageError
from skypool.event_loop import Loop, beside
from skypool.pool.service import Run, Service
from skypool.wire import error_text

T = TypeVar("T")
ALWAYS = 1 << 62
"""The number of restarts of a service with `restart=True`."""
_FIRST_PAUSE = 0.5
"""Seconds between the end of a service and its next start. The pause doubles if the service ends again soon."""
_LONGEST_PAUSE = 30.0
"""The longest pause in seconds between the end of a service and its next start."""
_LONG = 60.0
"""Seconds that a run must have lasted so that the next pause is the first one again."""
_LATE = 2.0
"""Seconds that a node may take beyond the `grace` of its services when the pool ends."""
_LOCALHOST = "localhost"


def check_service(call: Call[Any]) -> None:
    """Raise UsageError if a call cannot be a service, because of its options or because it is a generator."""
    options = call.options
    if call.function.is_generator:
        raise UsageError(
            f"{call.function.name} is a generator function, and a service cannot yield items: send it as a call"
        )
    if options.retries or options.retry_on:
        raise UsageError("a service has no retries= and retry_on=; pool.service(restart=…) starts it again")
    if options.procs is not None:
        raise UsageError(
            "a service has no procs=, as it is one process; with torchrun it can be one that starts others"
        )
    if options.output == "capture":
        raise UsageError('a service cannot have output="capture"; its attribute `output` has the end of its output')


def restarts_asked(restart: object) -> int:
    """Return how often a service may start again, by its argument `restart`. Raise UsageError if that is not valid."""
    if isinstance(restart, bool):
        return ALWAYS if restart else 0
    if not isinstance(restart, int) or restart < 0:
        raise UsageError(f"restart must be True, False, or how often the service may start again, not {restart!r}")
    return restart


class Services:
    """The services of one pool. Any thread may use this.

    A service that may start again does so on its node, after a pause. If its node is lost, it waits for a node to join
    the pool. All services of a lost node move to the same new node. If several nodes are lost, the next new node gets
    the services of the node that was lost first. Services of a retired node end. `is_stranger` returns True for the
    number of a node that is not trusted.
    """

    def __init__(
        self, pool: str, dispatch: Dispatch, stream: events.EventStream, is_stranger: Callable[[int], bool]
    ) -> None:
        self._pool = pool
        self._dispatch = dispatch
        self._stream = stream
        self._is_stranger = is_stranger
        self._lock = threading.Lock()  # guards _all
        self._all: list[Service[Any]] = []
        self._homeless: dict[int, list[Service[Any]]] = {}
        self._leaving: list[int] = []
        self._successors: dict[int, int] = {}
        self._left: dict[Run, BaseException] = {}  # runs that were stopped because their node leaves, and why it does
        self._ending = False
        self._unlisten: Callable[[], None] | None = None
        self._await_port: ComputeFunction[[int, tuple[str, ...], float], bool] = ComputeFunction(await_port, Options())

    @property
    def there(self) -> list[Service[Any]]:
        """The services that run or wait to start again, in the order in which they were started."""
        with self._lock:
            self._all = [each for each in self._all if not each._future.done()]
            return list(self._all)

    def _add(self, service: Service[Any]) -> None:
        with self._lock:
            self._all.append(service)

    # --- starting --------------------------------------------------------------------------------------------

    def start(
        self,
        call: Packed[T],
        node: int,
        restart: int,
        name: str | None = None,
        world: World | None = None,
        busy: bool = False,
    ) -> Service[T]:
        """Start a service on a node, and return it. This does not wait until its process runs.

        Args:
            call: the call, checked by `check_service`.
            restart: how often the service may start again.
            name: the name of the service; None for that of the function.
            world: for one of several services that were started together: its position, and the addresses of their
                nodes.
            busy: True if the service counts as work.

        Raises:
            UsageError: the pool does not have the node, the node is not trusted, or an argument is an iterator.
            NodeInterrupted, NodeRetired, PoolClosed: the node gets no new calls, or the pool has ended.
        """
        self._dispatch.roster.nodes([node])  # raises UsageError for a node that does not exist
        if self._is_stranger(node):
            raise UsageError(
                f'node {node} is not trusted (trust="data"), and services run on trusted nodes only; make the pool '
                'with trust="full" if you trust its machines'
            )
        if call.feeds:
            raise UsageError(f"a service cannot have an iterator as an argument; pass {call.name} a list")
        first = PendingCall(
            call.code, call.payload, CallFuture(), call.options, node=node, world=world, service=True, busy=busy
        )
        service: Service[T] = Service(name or call.name, node, restart, first, self)
        self._listen()
        self._begin(service)
        self._add(service)
        return service

    def _begin(self, service: Service[Any]) -> None:
        """Send a service to its node, for a first or further run. Do nothing if it is being closed."""
        pending = replace(service._call, outlet=Run(service, self._on_end), node=service._node)
        with service._changed:
            if service._closing:
                return
            service._running = pending
            service._changed.notify_all()
        try:
            self._dispatch.start_service(pending)
        except BaseException:
            with service._changed:
                service._running = None
            raise

    def _listen(self) -> None:
        """Begin to collect the output of services, unless that was done before."""
        if self._unlisten is None:
            self._unlisten = self._stream.follow(self._hear)

    def _hear(self, event: events.Event) -> None:
        if isinstance(event, events.Output) and event.service:
            service = self._service_of(event.node, event.call)
            if service is not None:
                service._printed(event.text)

    def _service_of(self, node: int, call: int) -> Service[Any] | None:
        """Return the service whose process on a node has this call id; None if there is none."""
        pending = self._dispatch.roster.service(node, call)
        return pending.outlet.service if pending is not None and isinstance(pending.outlet, Run) else None

    def name_of(self, node: int, call: int) -> str:
        """Return the name of the service whose process on a node has this call id; "" if there is none."""
        service = self._service_of(node, call)
        return "" if service is None else service.name

    def inherit(self, node: int) -> None:
        """Make `Service` objects for services that a former client started on a node. They cannot start again."""
        for pending in self._dispatch.roster.services_on(node):
            service: Service[Any] = Service(pending.name, node, 0, pending, self)
            pending.outlet = Run(service, self._on_end)
            service._running = pending
            self._listen()
            self._add(service)

    def address(self, node: int) -> str:
        """Return the address of a node; "" if it is not known, or if the pool does not have the node."""
        node_queue = self._dispatch.node_queues.get(node)
        return "" if node_queue is None else node_queue.address

    def test_port(self, node: int, port: int, timeout: float) -> CallFuture[bool]:
        """Have a node wait until this port of it accepts connections, and return the future of the result at once.

        The result is True when the port does, and False after `timeout` seconds. The test takes no slot. If it cannot
        start, the future has the error.
        """
        address = self.address(node)
        hosts = (_LOCALHOST, address) if address else (_LOCALHOST,)
        call = packed(self._await_port(port, hosts, timeout))
        future: CallFuture[bool] = CallFuture(call.name)
        options = Options(output="silent", devices=0)
        pending = PendingCall(call.code, call.payload, future, options, node=node, service=True)
        try:
            self._dispatch.start_service(pending)
        except (UsageError, NodeInterrupted, NodeRetired, PoolClosed) as e:
            future.finish(e)
        return future

    # --- ends and restarts -----------------------------------------------------------------------------------

    def _on_end(self, run: Run, end: BaseException | Returned) -> None:
        """Let a service whose process has ended start again, or end for good. The dispatch's lock may be held."""
        service = run.service
        end = self._left.pop(run, end)
        with service._changed:
            if not isinstance(service._running, PendingCall) or service._running.outlet is not run:
                return
            service._running = None
            closing = service._closing or self._ending
            restarts = not closing and not isinstance(end, NodeRetired) and service.restarts < service.restart
            if restarts:
                long = time.monotonic() - run.began >= _LONG
                service._pauses = 0 if long else service._pauses + 1
            service._changed.notify_all()
        node = service._node
        if not restarts:
            if not closing:
                self._tell(service, node, end)
            self._finish(service, end)
            return
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** max(0, service._pauses - 1))
        target = self._successor(node)
        self._tell(service, node, end, restarts=True, delay=None if target is None else pause)
        loop = Loop.shared().loop
        if target is None:
            loop.call_soon_threadsafe(self._await_node, service)
        else:
            loop.call_soon_threadsafe(loop.call_later, pause, self._again, service, target)

    def _successor(self, node: int) -> int | None:
        """Return the node where services of this node start again: itself or its replacement; None if neither can."""
        for each in (node, self._successors.get(node, node)):
            if self._dispatch.roster.can_start_on(each):
                return each
        return None

    def _again(self, service: Service[Any], node: int) -> None:
        """Start a service again on a node. If that node is gone, wait for a new one. Runs in the engine's thread."""
        if service._future.done():
            return
        self._move(service, node)
        try:
            service.restarts += 1
            self._begin(service)
        except (UsageError, NodeInterrupted, NodeRetired):
            service.restarts -= 1
            self._await_node(service)
        except PoolClosed as e:
            self._finish(service, e)

    def _move(self, service: Service[Any], node: int) -> None:
        """Record the node on which a service runs next."""
        if node == service._node:
            return
        service._node = node
        if service._call.world is not None:
            place, addresses = service._call.world
            addresses = [*addresses[:place], self.address(node), *addresses[place + 1 :]]
            service._call = replace(service._call, world=(place, addresses))

    def _await_node(self, service: Service[Any]) -> None:
        """Start a service of a lost node on the node that replaces it, when that has joined. In the engine's thread."""
        node = self._successor(service._node)
        if node is not None:
            self._again(service, node)
        else:
            self._homeless.setdefault(service._node, []).append(service)

    def admitted(self, node: int) -> None:
        """Start the services of a lost node on `node`, which has joined the pool. Runs in the engine's thread.

        If no service waits, `node` is reserved for the services of a node that its provider takes back.
        """
        lost = next(iter(self._homeless), None)
        served = {service.node for service in self.there}
        self._leaving = [each for each in self._leaving if each in served]
        if lost is not None:
            self._successors[lost] = node
            for service in self._homeless.pop(lost):
                self._again(service, node)
        elif self._leaving:
            self._successors[self._leaving.pop(0)] = node

    def leaving(self, node: int) -> None:
        """Note that the provider takes the machine of a node back. Runs in the engine's thread."""
        self._leaving.append(node)

    async def leave(self, node: int) -> None:
        """Stop the services of a leaving node that has no call left, and wait until they are gone.

        This waits at most 2 s longer than the longest `grace` of them. Services that may start again do so on the node
        that joins in place of this one, unless this node was retired.
        """
        runs: list[Run] = []
        patience = _LATE
        for pending in self._dispatch.roster.services_on(node):
            if isinstance(pending.outlet, Run):  # not a test of a port
                self._left.setdefault(pending.outlet, self._dispatch.roster.why_leaving(node))
                self._dispatch.stop(pending)
                runs.append(pending.outlet)
                patience = max(patience, pending.options.grace + _LATE)
        if runs:
            await beside(partial(wait, runs, patience), "skypool services")

    def _tell(
        self,
        service: Service[Any],
        node: int,
        end: BaseException | Returned,
        restarts: bool = False,
        delay: float | None = None,
    ) -> None:
        error = error_text.told(end) if isinstance(end, BaseException) else ""
        self._stream.emit(
            events.ServiceEnded(
                pool=self._pool, node=node, service=service.name, error=error, restarts=restarts, delay=delay
            )
        )

    @staticmethod
    def _finish(service: Service[Any], end: BaseException | Returned) -> None:
        if service._future.done():
            return
        if service._closing:
            service._future.cancel()
        else:
            service._future.finish(end)
        with service._changed:
            service._changed.notify_all()

    # --- closing ---------------------------------------------------------------------------------------------

    def stop(self, service: Service[Any], grace: float | None = None) -> None:
        """Stop a service for good, without waiting for its end. Do nothing if it has ended or is being stopped.

        `grace` is the number of seconds between SIGTERM and SIGKILL; None for the option `grace` of its call.
        """
        with service._changed:
            service._closing = True
            pending = service._running
        if pending is None:
            self._finish(service, PoolClosed(f"service {service.name!r} was closed"))
            return
        if grace is not None and not pending.stopped:
            pending.options = pending.options.but({"grace": grace})
        self._dispatch.stop(pending)

    async def close(self) -> None:
        """Stop all services, and wait until they are gone, at most 2 s longer than the longest `grace` of them."""
        self._ending = True
        ending = self.there
        for service in ending:
            self.stop(service)
        if ending:
            patience = max(each._call.options.grace for each in ending) + _LATE
            ends = [each._future for each in ending]
            await beside(partial(wait, ends, patience), "skypool services")
        if self._unlisten is not None:
            self._unlisten()
            self._unlisten = None

    def end(self, error: BaseException) -> None:
        """End the services that wait to start again, and let none start again, because the pool ends.

        This does not stop services that run: they end when the dispatch is closed, and their processes with their
        nodes.
        """
        self._ending = True
        for service in self.there:
            if not service.is_running:
                self._finish(service, error)
