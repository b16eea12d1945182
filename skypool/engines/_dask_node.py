"""Functions that run on the nodes of a pool: Dask's scheduler, its workers, and a report of the node."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import skypool as sky

PREFIX = "skypool-dask-"
"""The prefix of the names of all folders with Dask's files on a node."""
CLOSING = "skypool-closing"
"""A key of the scheduler's metadata that is set once the whole cluster is being closed."""
_LOCAL = "127.0.0.1"
_RESERVE = 8.0
"""The last seconds of a spot notice, in which the worker's processes end. Data is not copied in them."""
_ENDING = 3.0
"""Seconds that a worker's process has to end before it is killed."""
_ANSWER = 5.0
"""Seconds to wait for an answer of the scheduler."""
_LOOK = 0.2
"""Seconds between two checks for a spot notice."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """The facts of a node that the cluster needs.

    Attributes:
        address: the address at which other nodes reach the node; "" if it is not known.
        threads: the number of CPUs of the node that may be used.
        ports: TCP ports that are free at the address, and at 127.0.0.1.
    """

    address: str
    threads: int
    ports: tuple[int, int]


def report() -> NodeReport:
    """Return the facts that the cluster needs about the node on which this function runs."""
    address = sky.instance_info().address
    with socket.socket(_family(address)) as one, socket.socket() as other:
        one.bind((address or _LOCAL, 0))
        other.bind((_LOCAL, 0))
        ports = one.getsockname()[1], other.getsockname()[1]
    return NodeReport(address, len(os.sched_getaffinity(0)), ports)


def memory() -> int:
    """Return the memory of this node that may be used, in bytes."""
    from distributed.system import MEMORY_LIMIT  # pyright: ignore[reportMissingImports]

    return int(MEMORY_LIMIT)


def node_of(worker: Any) -> str:
    """Return a text that is the same for all workers of a node, for `worker_key` of `distributed.Adaptive`.

    It is taken from the path of the worker's folder.
    """
    return next((part.rsplit("-", 2)[0] for part in Path(worker.local_directory).parts if part.startswith(PREFIX)), "")


def share(devices: Sequence[sky.devices.Device], place: int, places: int) -> Sequence[sky.devices.Device]:
    """Return the devices for the worker with the number `place` (from 0) among `places` workers on a node.

    Each worker has about as many devices as the others. If there are more workers than devices, workers share devices.
    """
    if places > len(devices) > 0:
        return devices[place % len(devices) :][:1]
    return devices[place * len(devices) // places : (place + 1) * len(devices) // places]


def run_scheduler(port: int, dashboard: int, keys: dict[str, str]) -> None:
    """Run Dask's scheduler as a service, until SIGTERM or until a client ends it.

    Clients and workers reach it at `port`, with TLS only. `dashboard` is a port that is open on 127.0.0.1 only. `keys`
    are the arguments of `distributed.Security`.
    """
    with _folder():
        import distributed  # noqa: F401  # pyright: ignore[reportMissingImports] - it sets levels of loggers

        # The test whether the port is open is no TLS, and would be shown as a warning.
        logging.getLogger("distributed.comm.tcp").setLevel(logging.ERROR)
        asyncio.run(_scheduler(port, dashboard, keys))


async def _scheduler(port: int, dashboard: int, keys: dict[str, str]) -> None:
    from distributed import Scheduler, Security  # pyright: ignore[reportMissingImports]

    stop = _stop_event()
    async with Scheduler(
        protocol="tls",
        host=_host(),
        port=port,
        dashboard_address=f"{_LOCAL}:{dashboard}",
        security=Security(require_encryption=True, **keys),
        plugins=[_own_workers_last()],
    ) as scheduler:
        await _either(stop.wait(), scheduler.finished())


def _own_workers_last() -> Any:
    """Return a plugin for Dask's scheduler that ends the workers on the scheduler's own node last: that node stays."""
    from distributed import SchedulerPlugin  # pyright: ignore[reportMissingImports]

    class OwnWorkersLast(SchedulerPlugin):  # type: ignore[misc]  # Dask is not there where types are checked
        name = f"{PREFIX}own-workers-last"

        def valid_workers_downscaling(self, scheduler: Any, workers: list[Any]) -> list[Any]:
            """Return the workers that Dask may end: idle ones of other nodes, or all of `workers` if there are none."""
            kept = {_host(), *(each.host for each in workers if each.processing)}
            return [each for each in workers if each.host not in kept] or workers

    return OwnWorkersLast()


def run_worker(
    scheduler: str, name: int, keys: dict[str, str], moving: float, seat: tuple[int, int], options: dict[str, Any]
) -> None:
    """Run a worker of Dask as a service, in a process that a nanny starts again when it dies.

    At SIGTERM, or when the provider announces that it takes the machine back, the worker ends. Data that only this
    worker has in memory is first copied to others, within the time that the announcement leaves.

    Args:
        scheduler: the address of the scheduler.
        name: the number of the worker.
        keys: the arguments of `distributed.Security`: the TLS keys and certificates.
        moving: the seconds that the copying may take.
        seat: the number of this worker among those of the node, from 0, and the number of workers of the node. The
            worker sees its share of the node's devices.
        options: further arguments of the worker, such as `nthreads`.
    """
    info = sky.instance_info()
    os.environ.update(sky.devices.pinned(share(info.accelerators, *seat)))
    prefix = f"{PREFIX}{info.pool}-{info.node}-{name}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):  # of a run of this worker that was killed
        shutil.rmtree(left, ignore_errors=True)
    with _folder(prefix) as folder:
        asyncio.run(_worker(scheduler, name, keys, moving, seat[1], {**options, "local_directory": folder}))


async def _worker(
    scheduler: str, name: int, keys: dict[str, str], moving: float, places: int, options: dict[str, Any]
) -> None:
    from distributed import Nanny, Security, Status  # pyright: ignore[reportMissingImports]

    stop = _stop_event()
    if options["nthreads"] is None:
        options["nthreads"] = max(1, len(os.sched_getaffinity(0)) // places)
    if options["memory_limit"] == "auto":
        options["memory_limit"] = memory() // places
    nanny = Nanny(
        scheduler,
        name=name,
        protocol="tls",
        host=_host(),
        dashboard_address=f"{_LOCAL}:0",
        security=Security(require_encryption=True, **keys),
        **options,
    )
    try:
        starting = asyncio.ensure_future(nanny)  # it waits without end for a scheduler that is not there
        await _either(asyncio.wait([starting]), stop.wait())
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
            return
        starting.result()  # raises why it could not start
        await _either(stop.wait(), _notice(), nanny.finished())
        if nanny.status is Status.running and nanny.worker_address is not None:
            await _move(nanny, moving)
    finally:
        await nanny.close(timeout=_ENDING)


async def _notice() -> None:
    """Wait until the provider has said that it takes this machine back."""
    while sky.interruption() is None:
        await asyncio.sleep(_LOOK)


async def _move(nanny: Any, moving: float) -> None:
    """Have the scheduler copy data that only this worker has to other workers, unless the whole cluster ends."""
    notice = sky.interruption()
    if notice is not None:
        moving = min(moving, notice.left - _RESERVE)
    if moving <= 0:
        return
    try:
        async with asyncio.timeout(min(moving, _ANSWER)):
            if await nanny.scheduler.get_metadata(keys=[CLOSING], default=False):
                return
        async with asyncio.timeout(moving):
            await nanny.scheduler.retire_workers(workers=[nanny.worker_address])
    except (OSError, TimeoutError) as e:
        print(f"what only this worker has in memory was not copied: {type(e).__name__} {e}".rstrip(), flush=True)


@contextlib.contextmanager
def _folder(prefix: str = PREFIX) -> Iterator[str]:
    """Yield a new folder for Dask's files, and remove it at the end or at SIGTERM. Enter it before importing Dask."""
    signal.signal(signal.SIGTERM, _exit)  # until an event loop handles it
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        os.environ["DASK_TEMPORARY_DIRECTORY"] = folder
        os.environ["DASK_LOGGING__DISTRIBUTED"] = "warning"
        try:
            yield folder
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so that the folder is removed


def _exit(*_: object) -> None:
    raise SystemExit(0)


def _host() -> str:
    """Return the address at which Dask listens on this node: that in the node's own network, not all addresses."""
    return sky.instance_info().address or _LOCAL


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _stop_event() -> asyncio.Event:
    """Return an event that SIGTERM sets from now on."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(*_: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)

    # The loop would remove a handler of `loop.add_signal_handler` when it closes. SIGTERM would then kill the process
    # before `_folder` removes its folder.
    signal.signal(signal.SIGTERM, on_signal)
    return stop


async def _either(*waits: Any) -> None:
    """Wait until one of these awaitables is done, and cancel the others."""
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
