"""The classes of a Dask cluster whose scheduler and workers are services on the nodes (machines) of a pool."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from dask.utils import parse_bytes  # pyright: ignore[reportMissingImports]
from distributed import Security, SpecCluster  # pyright: ignore[reportMissingImports]
from distributed.deploy.cluster import Cluster, format_dashboard_link  # pyright: ignore[reportMissingImports]
from distributed.deploy.spec import ProcessInterface  # pyright: ignore[reportMissingImports]

import skypool as sky
from skypool import events
from skypool.engines import _dask_node, _trust, _versions

EQUAL = ("distributed", "dask", "cloudpickle")
"""The packages whose versions must be equal on the client and on the nodes."""
SCHEDULER = "dask-scheduler"
"""The name of the service that is the scheduler."""
_WORKER = "dask-worker-"
"""The name of a worker's service begins so. The worker's own name follows."""
_STARTING = 60.0
"""Seconds within which the scheduler must listen."""
_CLOSING = 5.0
"""Seconds that a worker may take to end, beyond the seconds in which its data is copied."""
_LOOK = 0.2
"""Seconds between two looks at the pool's nodes for one without a worker."""

logger = logging.getLogger(__name__)

_Cluster: Any = SpecCluster  # distributed has types in part, and they are not complete enough for subclasses
_Process: Any = ProcessInterface


class Seats:
    """The nodes of a pool on which workers run: one worker a node. Any thread may use this.

    Args:
        pool: the pool, which was started.

    Attributes:
        head: the number of the node that runs the scheduler.
        reports: what the nodes that were asked have said, by their number.
        is_closing: True once the cluster ends. No node is retired then.
    """

    def __init__(self, pool: sky.ComputePool) -> None:
        self.pool = pool
        self.is_closing = False
        self._lock = threading.Lock()  # guards what follows
        self._taken: dict[int, int] = {}
        self._services: dict[int, sky.Service[None]] = {}
        self.reports: dict[int, _dask_node.NodeReport] = {}
        self.head = min(self.ready())
        self.check(self.ready())

    def ready(self) -> list[int]:
        """Return the numbers of the nodes that are ready."""
        return [node for node, state in self.pool.nodes.items() if state == "ready"]

    def check(self, nodes: Sequence[int]) -> None:
        """Ask nodes for versions and addresses, and keep their reports.

        Raises:
            UsageError: a package has another version there than here, or the ports there would be open to others.
        """
        _versions.check_nodes(self.pool, EQUAL, nodes)
        asked = sky.compute(_dask_node.report).with_options(devices=0)
        futures = {node: self.pool.send(asked(), node=node) for node in nodes}
        for node, future in futures.items():
            report = future.result()
            _trust.refuse_public_address(self.pool, node, report.address, "Dask")
            self.reports[node] = report

    def grow(self, workers: int) -> None:
        """Have the pool rent machines if it has fewer nodes than there are to be workers.

        Raises:
            BudgetExceeded, UsageError, PoolClosed: as `pool.resize`.
        """
        gone = ("leaving", "draining", "ended")
        with self._lock:
            there = [node for node, state in self.pool.nodes.items() if state not in gone]
            if len(there) < workers and not self.is_closing:
                self.pool.resize(workers)

    def take(self, worker: int) -> int | None:
        """Return the number of a ready node that has no worker yet, and keep it for this worker; None if none is."""
        with self._lock:
            for name, service in self._services.items():
                self._taken[name] = service.node  # a service moves when its node is lost
            free = [node for node in self.ready() if node not in self._taken.values()]
            if not free:
                return None
            self._taken[worker] = free[0]
            return free[0]

    def occupy(self, worker: int, service: sky.Service[None]) -> None:
        """Note the service that a worker is."""
        with self._lock:
            self._services[worker] = service

    def leave(self, worker: int) -> None:
        """Give up the node of a worker, and retire the node unless it runs the scheduler or the cluster ends."""
        with self._lock:
            service = self._services.pop(worker, None)
            node = self._taken.pop(worker, None)
        if service is None or node is None or self.is_closing:
            return
        if service.node != self.head and service.node in self.ready():
            with contextlib.suppress(sky.PoolClosed, sky.UsageError):  # it has gone meanwhile
                self.pool.retire(service.node)


class SchedulerService(_Process):  # type: ignore[misc]  # see `_Process`
    """The scheduler of a cluster: a service on one node, and two forwards (ports of this computer that lead there).

    Args:
        seats: the nodes of the cluster.
        keys: the arguments of `distributed.Security`.

    Attributes:
        address: the address at which workers reach the scheduler.
        external_address: the address at which this computer reaches it.
        dashboard: the port of this computer that leads to the dashboard.
    """

    def __init__(self, seats: Seats, keys: dict[str, str]) -> None:
        super().__init__()
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
        host = self._seats.reports[node].address or "127.0.0.1"
        port, dashboard = self._seats.reports[node].ports
        call = sky.compute(_dask_node.run_scheduler).with_options(devices=0)(port, dashboard, self._keys)
        service = self._ends.enter_context(pool.service(call, node=node, name=SCHEDULER))
        service.wait_ready(port, _STARTING)
        here = self._ends.enter_context(pool.forward(port, node, host=host))
        self.dashboard = self._ends.enter_context(pool.forward(dashboard, node, host="127.0.0.1")).port
        self.address = f"tls://[{host}]:{port}" if ":" in host else f"tls://{host}:{port}"
        self.external_address = f"tls://{here.address}"

    async def close(self) -> None:
        """Close the forwards, and wait until the service is gone."""
        await asyncio.to_thread(self._ends.close)
        await super().close()


class WorkerService(_Process):  # type: ignore[misc]  # see `_Process`
    """A worker of a cluster: a service on a node of its own, which starts again when it dies or its node is replaced.

    Args:
        scheduler: the address of the scheduler, as nodes reach it.
        name: the name of the worker, a number.
        seats: the nodes of the cluster.
        keys: the arguments of `distributed.Security`.
        moving: the seconds in which the data of a worker that ends may be copied to others.
        on_refusal: called with a sentence for the user if the worker cannot start.
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
        function = sky.compute(_dask_node.run_worker).with_options(grace=moving + _CLOSING)
        self._call: Callable[[], sky.Call[None]] = lambda: function(scheduler, name, keys, moving, options)
        self._placing: asyncio.Task[None] | None = None
        self._service: sky.Service[None] | None = None

    async def start(self) -> None:
        """Start to look for a node. This does not wait until the worker runs, because a machine may have to be rented.

        A node that is ready now gets the worker before this returns.
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
        """Start the service on a node that has no worker. Return False if there is no such node now."""
        node = self._seats.take(self.name)
        if node is None:
            return False
        # A task that is cancelled here must not leave a service behind that nobody knows.
        begun = asyncio.ensure_future(asyncio.to_thread(self._begin, node))
        try:
            return await asyncio.shield(begun)
        except asyncio.CancelledError:
            await begun
            raise

    def _begin(self, node: int) -> bool:
        try:
            if node not in self._seats.reports:
                self._seats.check([node])
            service = self._seats.pool.service(self._call(), node=node, restart=True, name=f"{_WORKER}{self.name}")
        except (sky.NodeInterrupted, sky.NodeRetired):
            return False
        self._seats.occupy(self.name, service)
        self._service = service
        return True

    async def leaving(self) -> None:
        """Let the service end without a further start: the scheduler retires the worker next."""
        if self._placing is not None:
            self._placing.cancel()
            with contextlib.suppress(asyncio.CancelledError, sky.SkypoolError):
                await self._placing
        if self._service is not None:
            self._service.restart = 0

    async def close(self) -> None:
        """Wait until the service is gone, and retire its node."""
        await self.leaving()
        if self._service is not None:
            await asyncio.to_thread(self._service.close, self._moving + _CLOSING)
        await asyncio.to_thread(self._seats.leave, self.name)
        await super().close()


class SkypoolCluster(_Cluster):  # type: ignore[misc]  # see `_Cluster`
    """A Dask cluster on the nodes of a pool. `sky.dask.cluster` makes one.

    Methods and attributes are those of `distributed.SpecCluster`. `scale` and `adapt` also change the number of nodes
    of the pool: there is one worker on each.

    Args:
        pool: the pool, which was started.
        workers: the number of workers.
        moving: the seconds in which the data of a worker that ends may be copied to others.
        options: further arguments of each worker.

    Raises:
        UsageError: a node has other versions than this process, or its ports would be open to others.
        SkypoolError: the scheduler did not start.
    """

    def __init__(self, pool: sky.ComputePool, workers: int, moving: float, options: dict[str, Any]) -> None:
        self._seats = Seats(pool)
        self._seats.grow(workers)
        self._nthreads = options.get("nthreads")
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
        self._unlisten = pool.events.listen(self._hear)
        try:
            super().__init__(
                workers=dict.fromkeys(range(workers), worker),
                scheduler={"cls": SchedulerService, "options": {"seats": self._seats, "keys": keys}},
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
        """Change the number of workers, and of nodes. Return at once; `wait_for_workers` waits for new ones.

        Surplus workers are retired: what only they have in memory is copied first. Their machines end after that.

        Args:
            n: the number of workers.
            memory: the memory in bytes, or as "100 GiB", that all workers have together at least.
            cores: the threads that all workers have together at least.

        Raises:
            BudgetExceeded: the first hour of the new nodes costs more than is left of the budget.
            UsageError, PoolClosed: the pool cannot have this size, or has ended.
        """
        if memory is not None:
            n = max(n, math.ceil(parse_bytes(memory) / self._memory_per_worker()))
        if cores is not None:
            n = max(n, math.ceil(cores / self._threads_per_worker()))
        if not self._is_in_loop():
            self._seats.grow(n)  # from the loop, `_correct_state_internal` does it
        return super().scale(n)

    def _is_in_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self.loop.asyncio_loop
        except RuntimeError:
            return False

    def _threads_per_worker(self) -> int:
        return self._nthreads or self._seats.reports[self._seats.head].threads

    def _memory_per_worker(self) -> int:
        return self._seats.reports[self._seats.head].memory

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
        """Hear that a service has ended for good. Runs in the pool's thread."""
        if not isinstance(event, events.ServiceEnded) or event.restarts or self._seats.is_closing:
            return
        if event.service == SCHEDULER:
            self._tell(f"the scheduler on node {event.node} has ended, so make a new cluster: {event.error}")
        elif event.service.startswith(_WORKER):
            name = int(event.service.removeprefix(_WORKER))
            self.loop.add_callback(self._forget, name)

    def _forget(self, name: int) -> None:
        """Do without a worker whose node was retired by somebody else than this cluster."""
        if name in self.worker_spec:
            del self.worker_spec[name]
            self._correct_state()

    def _tell(self, text: str) -> None:
        self._log(text)
        logger.warning("%s: %s", self._seats.pool.name, text)

    async def _close(self) -> None:
        self._seats.is_closing = True
        await super()._close()
        self._unlisten()
