"""The classes of a Dask cluster whose scheduler and workers are services on the nodes of a pool."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from dask.utils import parse_bytes  # pyright: ignore[reportMissingImports]
from distributed import Adaptive, Security, SpecCluster, Status  # pyright: ignore[reportMissingImports]
from distributed.deploy.cluster import Cluster, format_dashboard_link  # pyright: ignore[reportMissingImports]
from distributed.deploy.spec import ProcessInterface  # pyright: ignore[reportMissingImports]

import skypool as sky
from skypool import events
from skypool.engines import _dask_node, _pools, _trust, _versions

_LOCAL = "127.0.0.1"
EQUAL = ("distributed", "dask", "cloudpickle")
"""The packages that must have the same version on this computer and on the nodes."""
SCHEDULER = "dask-scheduler"
"""The name of the scheduler's service."""
_WORKER = "dask-worker-"
"""The prefix of the name of a worker's service. The worker's own name follows."""
_STARTING = 60.0
"""Seconds to wait until the scheduler listens."""
_CLOSING = 5.0
"""Seconds that a worker may take to end, beyond the seconds in which its data is copied."""
_TOGETHER = 16
"""The most workers that are started at the same time."""
_LOOK = 0.2
"""Seconds between two checks whether a node has a free place for a worker."""

logger = logging.getLogger(__name__)

Places = int | Literal["per-device"]
"""The number of workers on a node. "per-device" is one for each accelerator, and one on a node without."""

WorkerCall = Callable[[tuple[int, int]], "sky.Call[None]"]
"""A function that makes the call of a worker's service from a pair: the place on the node, and the number of places."""

_Cluster: Any = SpecCluster  # distributed has types in part, and they are not complete enough for subclasses
_Process: Any = ProcessInterface
_Adaptive: Any = Adaptive


class Seats:
    """The places for workers on the nodes of a started pool. Any thread may use this object.

    Attributes:
        head: the number of the node that runs the scheduler.
        reports: the reports of the nodes that were asked so far, by the number of the node.
        is_closing: True once the cluster is being closed. From then on, no node is retired.
    """

    def __init__(self, pool: sky.ComputePool, places: Places) -> None:
        self.pool = pool
        self.is_closing = False
        self._places = places
        self._asking = threading.Lock()  # no node is asked twice
        self._lock = threading.Lock()  # guards what follows
        self._taken: dict[int, tuple[int, int]] = {}
        self._services: dict[int, sky.Service[None]] = {}
        self.reports: dict[int, _dask_node.NodeReport] = {}
        self.head = min(_pools.ready(pool))
        self._check(_pools.ready(pool))

    @property
    def places(self) -> int:
        """The number of places for workers on all nodes that are ready."""
        return sum(self.places_of(node) for node in _pools.ready(self.pool))

    def places_of(self, node: int) -> int:
        """Return the number of places on a node. A node whose devices are unknown yet counts like `head`."""
        if isinstance(self._places, int):
            return self._places
        devices = self.pool.devices
        return max(1, devices.get(node, devices.get(self.head, 1)))

    def _check(self, nodes: Sequence[int]) -> None:
        """Ask nodes for their reports, and store them in `reports`. Raise UsageError if Dask must not run on one."""
        asked = sky.compute(_dask_node.report).with_options(devices=0)
        futures = {node: self.pool.send(asked(), node=node) for node in nodes}
        _versions.check_nodes(self.pool, EQUAL, nodes)
        for node, future in futures.items():
            report = future.result()
            _trust.refuse_public_address(self.pool, node, report.address, "Dask")
            self.reports[node] = report

    def grow(self, workers: int) -> None:
        """Rent machines if the nodes of the pool have fewer places than `workers`. Do not wait for them.

        Raises:
            BudgetExceeded: the first 20 minutes of the new nodes cost more than is left of the budget.
            UsageError, PoolClosed: the pool cannot have this size, or has ended.
        """
        gone = ("leaving", "draining", "ended")
        with self._lock:
            there = [node for node, state in self.pool.nodes.items() if state not in gone]
            missing = workers - sum(self.places_of(node) for node in there)
            if missing > 0 and not self.is_closing:
                self.pool.resize(len(there) + math.ceil(missing / self.places_of(self.head)))

    def take(self, worker: int) -> tuple[int, int] | None:
        """Reserve a free place on a ready node for a worker, and return (node, place); None if no place is free.

        The place is a number from 0 to `places_of(node)` - 1.

        Raises:
            UsageError: a new node has another version of a package, or its ports would be open to others.
        """
        with self._asking:
            self._check([node for node in _pools.ready(self.pool) if node not in self.reports])
        with self._lock:
            for name, service in self._services.items():
                self._taken[name] = service.node, self._taken[name][1]  # a service moves when its node is lost
            taken = set(self._taken.values())
            ready = [node for node in _pools.ready(self.pool) if node in self.reports]
            free = ((node, place) for node in ready for place in range(self.places_of(node)))
            seat = next((each for each in free if each not in taken), None)
            if seat is not None:
                self._taken[worker] = seat
            return seat

    def give_back(self, worker: int) -> None:
        """Free the place of a worker whose service could not start."""
        with self._lock:
            self._taken.pop(worker, None)

    def begin(self, worker: int, call: WorkerCall) -> sky.Service[None] | None:
        """Start a worker's service on a node with a free place, and return it. Return None if no place is free now.

        `call` gets (place, number of places on the node), and returns the call of the service. Raises UsageError if a
        new node has another version of a package, or its ports would be open to others.
        """
        try:
            seat = self.take(worker)
            if seat is None:
                return None
            node, place = seat
            made = call((place, self.places_of(node)))
            service = self.pool.service(made, node=node, restart=True, name=f"{_WORKER}{worker}", busy=True)
        except (sky.NodeInterrupted, sky.NodeRetired, sky.ConnectionLost):
            self.give_back(worker)
            return None
        with self._lock:
            self._services[worker] = service
        return service

    def service_of(self, worker: int) -> sky.Service[None] | None:
        """Return the service of a worker; None if it has none yet."""
        with self._lock:
            return self._services.get(worker)

    def close_rest(self, grace: float) -> None:
        """Close the services of all workers that still have one, with `grace` seconds between SIGTERM and SIGKILL."""
        with self._lock:
            left = list(self._services.values())
        for service in left:
            service.close(grace)

    def node_of(self, worker: int) -> int:
        """Return the number of the node of a worker; -1 if the worker has no node yet."""
        with self._lock:
            service = self._services.get(worker)
            return -1 if service is None else service.node

    def leave(self, worker: int) -> None:
        """Free the place of a worker, and retire the worker's node if no other worker runs there.

        The scheduler's node is never retired, and no node is retired while `is_closing` is True.
        """
        with self._lock:
            service = self._services.pop(worker, None)
            self._taken.pop(worker, None)
            if service is None or self.is_closing or service.node == self.head:
                return
            shared = service.node in {each.node for each in self._services.values()}
            if shared or service.node not in _pools.ready(self.pool):
                return
            with contextlib.suppress(sky.PoolClosed, sky.UsageError):  # it has gone meanwhile
                self.pool.retire(service.node)


class SchedulerService(_Process):  # type: ignore[misc]  # see `_Process`
    """The scheduler of a cluster: a service on one node, and forwards to its port and to its dashboard.

    Args:
        keys: the arguments of `distributed.Security`: the TLS keys and certificates.
        begin_workers: starts the workers. It is called with the scheduler's address while the scheduler still starts,
            so that all processes load their modules at the same time.

    Attributes:
        address: the address at which workers reach the scheduler.
        external_address: the address at which this computer reaches the scheduler.
        dashboard: the port of this computer that leads to the dashboard.
    """

    def __init__(self, seats: Seats, keys: dict[str, str], begin_workers: Callable[[str], None]) -> None:
        super().__init__()
        self._begin_workers = begin_workers
        self._seats = seats
        self._keys = keys
        self._ends = contextlib.ExitStack()
        self.dashboard = 0

    async def start(self) -> None:
        """Start the service, and wait until the scheduler listens."""
        await asyncio.to_thread(self._start)
        await super().start()

    def _start(self) -> None:
        pool, node = self._seats.pool, self._seats.head
        host = self._seats.reports[node].address or _LOCAL
        port, dashboard = self._seats.reports[node].ports
        self.address = f"tls://[{host}]:{port}" if ":" in host else f"tls://{host}:{port}"
        call = sky.compute(_dask_node.run_scheduler).with_options(devices=0)(port, dashboard, self._keys)
        service = self._ends.enter_context(pool.service(call, node=node, name=SCHEDULER, busy=True))
        with ThreadPoolExecutor(3) as threads:
            here = threads.submit(self._forward, port, host)
            board = threads.submit(self._forward, dashboard, _LOCAL)
            begun = threads.submit(self._begin_workers, self.address)
            service.wait_ready(port, _STARTING)
        begun.result()
        self.dashboard = board.result()
        self.external_address = f"tls://{_LOCAL}:{here.result()}"

    def _forward(self, port: int, host: str) -> int:
        """Forward a port at the address `host` of the scheduler's node to this computer. Return the port here."""
        return self._ends.enter_context(self._seats.pool.forward(port, self._seats.head, host=host)).port

    async def close(self) -> None:
        """Close the workers that still run, the scheduler, and the forwards. Wait until all have ended."""
        await asyncio.to_thread(self._seats.close_rest, _CLOSING)
        await asyncio.to_thread(self._ends.close)
        await super().close()


def worker_call(scheduler: str, name: int, keys: dict[str, str], moving: float, options: dict[str, Any]) -> WorkerCall:
    """Return a function that makes the call of a worker's service from (place, number of places on the node).

    Args:
        scheduler: the address at which nodes reach the scheduler.
        name: the number of the worker.
        keys: the arguments of `distributed.Security`: the TLS keys and certificates.
        moving: the seconds in which the data of a worker that ends may be copied to others.
        options: further arguments of the worker.
    """
    function = sky.compute(_dask_node.run_worker).with_options(grace=moving + _CLOSING)
    return lambda seat: function(scheduler, name, keys, moving, seat, options)


class WorkerService(_Process):  # type: ignore[misc]  # see `_Process`
    """A worker of a cluster: a service on a node, which starts again when it dies or its node is replaced.

    Args:
        scheduler: the address at which nodes reach the scheduler.
        keys: the arguments of `distributed.Security`: the TLS keys and certificates.
        moving: the seconds in which the data of a worker that ends may be copied to others.
        on_refusal: called with a message for the user if the worker cannot start.
        options: further arguments of the worker.
    """

    def __init__(
        self,
        scheduler: str,
        *,
        name: int,
        seats: Seats,
        keys: dict[str, str],
        moving: float,
        on_refusal: Callable[[str], None],
        options: dict[str, Any],
    ) -> None:
        super().__init__(scheduler=scheduler, name=name)
        self.name = name
        self._seats = seats
        self._moving = moving
        self._on_refusal = on_refusal
        self._call = worker_call(scheduler, name, keys, moving, options)
        self._placing: asyncio.Task[None] | None = None
        self._service: sky.Service[None] | None = None

    async def start(self) -> None:
        """Start the worker if a ready node has a free place. Otherwise look for a place in the background, and return.

        This method does not wait for a place, because a machine may have to be rented first.
        """
        if not await self._place():
            self._placing = asyncio.ensure_future(self._wait_for_node())
        await super().start()

    async def _wait_for_node(self) -> None:
        try:
            while not await self._place():
                await asyncio.sleep(_LOOK)
        except sky.SkypoolError as e:
            self._on_refusal(f"worker {self.name} cannot start: {e}")

    async def _place(self) -> bool:
        """Start the service on a node with a free place. Return False if there is no such node now."""
        # A task that is cancelled here must not leave a service behind that nobody knows.
        begun = asyncio.ensure_future(asyncio.to_thread(self._begin))
        try:
            return await asyncio.shield(begun)
        except asyncio.CancelledError:
            await begun
            raise

    def _begin(self) -> bool:
        service = self._seats.service_of(self.name)  # it was begun with the scheduler
        if service is None:
            service = self._seats.begin(self.name, self._call)
        self._service = service
        return service is not None

    async def leaving(self) -> None:
        """Prevent restarts of the service, because the scheduler retires the worker next."""
        if self._placing is not None:
            self._placing.cancel()
            with contextlib.suppress(asyncio.CancelledError, sky.SkypoolError):
                await self._placing
        if self._service is not None:
            self._service.restart = 0

    async def close(self) -> None:
        """End the service, wait until it is gone, and retire its node if no other worker runs there."""
        await self.leaving()
        if self._service is not None:
            await asyncio.to_thread(self._service.close, self._moving + _CLOSING)
        await asyncio.to_thread(self._seats.leave, self.name)
        await super().close()


class _Adaptation(_Adaptive):  # type: ignore[misc]  # see `_Cluster`
    """Dask's adaptive scaling. Workers that it retires are not restarted."""

    async def scale_down(self, workers: Any) -> None:
        """Retire and end the workers with these names."""
        known: dict[int, WorkerService] = self.cluster.workers
        await asyncio.gather(*(known[name].leaving() for name in workers if name in known))
        await super().scale_down(workers)


class SkypoolCluster(_Cluster):  # type: ignore[misc]  # see `_Cluster`
    """A Dask cluster on the nodes of a pool. `sky.dask.cluster` makes one.

    It has the methods and attributes of `distributed.SpecCluster`. `scale` and `adapt` also change the number of nodes
    of the pool. The constructor raises SkypoolError if the scheduler did not start.

    Args:
        seats: the places for workers on the nodes of the started pool.
        workers: the number of workers at the start.
        moving: the seconds in which the data of a worker that ends may be copied to others.
        options: further arguments of each worker.
    """

    def __init__(self, seats: Seats, workers: int, moving: float, options: dict[str, Any]) -> None:
        pool = seats.pool
        self._seats = seats
        self._seats.grow(workers)
        self._nthreads = options["nthreads"]
        self._ended = ""  # why the cluster has ended by itself
        security = Security.temporary()
        ca = security.tls_ca_file
        keys = {"tls_ca_file": ca}
        for role in ("scheduler", "worker", "client"):
            keys |= {f"tls_{role}_{part}": getattr(security, f"tls_{role}_{part}") for part in ("key", "cert")}
        worker = {
            "cls": WorkerService,
            "options": {
                "seats": self._seats,
                "keys": keys,
                "moving": moving,
                "on_refusal": self._tell,
                "options": options,
            },
        }

        def begin(name: int, address: str) -> None:
            seats.begin(name, worker_call(address, name, keys, moving, options))

        def begin_workers(address: str) -> None:
            names = range(min(workers, seats.places))
            with ThreadPoolExecutor(_TOGETHER) as threads:
                for each in [threads.submit(begin, name, address) for name in names]:
                    each.result()

        self._unlisten = pool.events.listen(self._hear)
        try:
            super().__init__(
                workers=dict.fromkeys(range(workers), worker),
                scheduler={
                    "cls": SchedulerService,
                    "options": {"seats": self._seats, "keys": keys, "begin_workers": begin_workers},
                },
                worker=worker,
                security=security,
                name=f"skypool-{pool.name}",
            )
        except BaseException:
            self._unlisten()
            raise

    @property
    def dashboard_link(self) -> str:
        """The address of the dashboard on this computer; "" if bokeh is not installed on the node."""
        if "dashboard" not in self.scheduler_info.get("services", {}):
            return ""
        link: str = format_dashboard_link("127.0.0.1", self.scheduler.dashboard)
        return link

    def scale(self, n: int = 0, memory: int | str | None = None, cores: int | None = None) -> Any:
        """Change the number of workers, and of nodes, without waiting; `wait_for_workers` waits for new workers.

        Surplus workers are retired: data that only they have in memory is first copied to other workers. Then their
        machines end.

        Args:
            n: the least number of workers. `memory` and `cores` may ask for more.
            memory: the least memory of all workers together, in bytes or as "100 GiB".
            cores: the least number of threads of all workers together.

        Raises:
            BudgetExceeded: the first 20 minutes of the new nodes cost more than is left of the budget.
            UsageError, PoolClosed: the pool cannot have this size, or has ended.
        """
        self._refuse_if_ended()
        if memory is not None:
            n = max(n, math.ceil(parse_bytes(memory) / self._memory_per_worker()))
        if cores is not None:
            n = max(n, math.ceil(cores / self._threads_per_worker()))
        if not self._is_in_loop():
            self._seats.grow(n)  # from the loop, `_correct_state_internal` does it
        # The last ones of this dict end first: those of the highest nodes, so that whole nodes become free, and at last
        # those of the scheduler's node, which stays.
        specs: dict[int, Any] = self.worker_spec  # type: ignore[has-type]  # see `_Cluster`
        self.worker_spec = dict(sorted(specs.items(), key=lambda item: self._order(item[0])))
        return super().scale(n)

    def _order(self, worker: int) -> tuple[bool, bool, int, int]:
        node = self._seats.node_of(worker)
        return node == -1, node != self._seats.head, node, worker

    def adapt(self, **options: Any) -> Any:
        """Let the number of workers, and of nodes, follow the load, as in `distributed.SpecCluster.adapt`.

        The `options` are those of that method. Unless they have a `worker_key`, workers of one node end together, so
        that the node can end. Those of the scheduler's node end last, because that node stays.
        """
        self._refuse_if_ended()
        return super().adapt(**{"Adaptive": _Adaptation, "worker_key": _dask_node.node_of, **options})

    def wait_for_workers(self, n_workers: int, timeout: float | None = None) -> None:
        """Wait until at least `n_workers` workers are connected.

        Args:
            timeout: the most seconds to wait. Default None: no limit.

        Raises:
            TimeoutError: fewer workers were connected in time.
            SkypoolError: the cluster has ended, because the machine of its scheduler is gone.
        """
        self._refuse_if_ended()
        super().wait_for_workers(n_workers, timeout)

    def _refuse_if_ended(self) -> None:
        if self._ended and not self._is_in_loop():
            raise sky.SkypoolError(f"this Dask cluster of pool {self._seats.pool.name!r} has ended: {self._ended}")

    async def __aenter__(self) -> Any:
        """Wait until the cluster has started, and return it, as its base class does.

        Raises UsageError for `async with` in a program: the cluster has an event loop of its own.
        """
        if self._is_in_loop():  # `with` comes here, too
            return await super().__aenter__()
        raise sky.UsageError(
            "a Dask cluster on a pool blocks while it starts and ends, so it has no `async with`: make it with "
            "`cluster = await asyncio.to_thread(sky.dask.cluster, pool)`, connect with "
            "`Client(cluster.scheduler_address, security=cluster.security, asynchronous=True)`, and end it with "
            "`await asyncio.to_thread(cluster.close)`"
        )

    def _is_in_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self.loop.asyncio_loop
        except RuntimeError:
            return False

    def _threads_per_worker(self) -> int:
        for each in self.scheduler_info["workers"].values():
            return int(each["nthreads"])
        head = self._seats.head
        return self._nthreads or max(1, self._seats.reports[head].threads // self._seats.places_of(head))

    def _memory_per_worker(self) -> int:
        for each in self.scheduler_info["workers"].values():
            if each["memory_limit"]:
                return int(each["memory_limit"])
        head = self._seats.head
        call = sky.compute(_dask_node.memory).with_options(devices=0)
        return self._seats.pool.send(call(), node=head).result() // self._seats.places_of(head)

    async def _correct_state_internal(self) -> None:
        surplus = set(self.workers) - set(self.worker_spec)
        await asyncio.gather(*(self.workers[name].leaving() for name in surplus))
        if not self._seats.is_closing:
            try:
                await asyncio.to_thread(self._seats.grow, len(self.worker_spec))
            except sky.SkypoolError as e:
                self._tell(f"the pool cannot have {len(self.worker_spec)} nodes: {e}")
        await super()._correct_state_internal()

    def _update_worker_status(self, op: str, msg: Any) -> None:
        # SpecCluster forgets a worker that is away for 15 s. Here its service starts again, also on another node.
        Cluster._update_worker_status(self, op, msg)

    def _hear(self, event: events.Event) -> None:
        """Handle an event, in the pool's thread: end the cluster when the pool or the scheduler has ended."""
        # a worker whose service has ended for good is removed
        if self._seats.is_closing:
            return
        if isinstance(event, events.PoolPhase) and event.phase in ("draining", "ended"):
            self.loop.add_callback(self._end, f"its pool has ended {event.detail}".rstrip())
        if not isinstance(event, events.ServiceEnded) or event.restarts:
            return
        if event.service == SCHEDULER:
            why = f"the scheduler on node {event.node} has ended, so make a new cluster: {event.error}"
            self._tell(why)
            self.loop.add_callback(self._end, why)
        elif event.service.startswith(_WORKER):
            name = int(event.service.removeprefix(_WORKER))
            self.loop.add_callback(self._forget, name)

    async def _end(self, why: str) -> None:
        """End the workers and the forwards, because the scheduler has ended for the reason `why`."""
        if self._seats.is_closing:
            return
        self._seats.is_closing = True
        self._ended = why
        if isinstance(self.scheduler, SchedulerService):
            self.shutdown_scheduler = False  # it is gone, and would be waited for
            await self.scheduler.close()
        await self._close()

    def _forget(self, name: int) -> None:
        """Remove a worker whose service has ended for good, although this cluster did not end it."""
        if name in self.worker_spec:
            del self.worker_spec[name]
            self._correct_state()

    def _tell(self, text: str) -> None:
        self._log(text)
        logger.warning("%s: %s", self._seats.pool.name, text)

    async def _close(self) -> None:
        self._seats.is_closing = True
        if not self._ended and self.status is Status.running:
            with contextlib.suppress(OSError, TimeoutError):  # a scheduler that does not answer tells no worker either
                telling = self.scheduler_comm.set_metadata(keys=[_dask_node.CLOSING], value=True)
                await asyncio.wait_for(telling, _CLOSING)
        await super()._close()
        self._unlisten()
