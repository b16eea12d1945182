"""The functions that run on the nodes (machines) of a pool for Dask: its scheduler, its workers, and a report."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import skypool as sky

_LOCAL = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A node, as far as a cluster must know it.

    Attributes:
        address: the address at which other nodes reach the node; "" if it is not known.
        threads: the number of CPUs that a worker may use.
        memory: the memory that a worker may use, in bytes.
        ports: TCP ports that are free at the address, and at 127.0.0.1.
    """

    address: str
    threads: int
    memory: int
    ports: tuple[int, int]


def report() -> NodeReport:
    """Return what a cluster must know of the node that this runs on."""
    from distributed.system import MEMORY_LIMIT  # pyright: ignore[reportMissingImports]

    address = sky.instance_info().address
    with socket.socket(_family(address)) as one, socket.socket() as other:
        one.bind((address or _LOCAL, 0))
        other.bind((_LOCAL, 0))
        ports = one.getsockname()[1], other.getsockname()[1]
    return NodeReport(address, len(os.sched_getaffinity(0)), int(MEMORY_LIMIT), ports)


def run_scheduler(port: int, dashboard: int, keys: dict[str, str]) -> None:
    """Run Dask's scheduler as a service, until SIGTERM or until a client ends it.

    Args:
        port: the port at which the clients and the workers reach the scheduler, with TLS only.
        dashboard: the port of the dashboard. It is open on 127.0.0.1 only.
        keys: the arguments of `distributed.Security`.
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
    ) as scheduler:
        await _either(stop.wait(), scheduler.finished())


def run_worker(scheduler: str, name: int, keys: dict[str, str], moving: float, options: dict[str, Any]) -> None:
    """Run a worker of Dask as a service, in a process that a nanny starts again when it dies.

    At SIGTERM, the scheduler first copies to other workers what only this one has in memory.

    Args:
        scheduler: the address of the scheduler.
        name: the name of the worker.
        keys: the arguments of `distributed.Security`.
        moving: the seconds that the copying may take.
        options: further arguments of the worker, such as `nthreads`.
    """
    with _folder() as folder:
        asyncio.run(_worker(scheduler, name, keys, moving, {**options, "local_directory": folder}))


async def _worker(scheduler: str, name: int, keys: dict[str, str], moving: float, options: dict[str, Any]) -> None:
    from distributed import Nanny, Security  # pyright: ignore[reportMissingImports]

    stop = _stop_event()
    async with Nanny(
        scheduler,
        name=name,
        protocol="tls",
        host=_host(),
        dashboard_address=f"{_LOCAL}:0",
        security=Security(require_encryption=True, **keys),
        **options,
    ) as nanny:
        await _either(stop.wait(), nanny.finished())
        if stop.is_set() and nanny.worker_address is not None:
            with contextlib.suppress(OSError, TimeoutError):  # a scheduler that is gone has nothing to copy
                await asyncio.wait_for(nanny.scheduler.retire_workers(workers=[nanny.worker_address]), moving)


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """Yield a folder for Dask's files, which is removed at the end, and let Dask print warnings only.

    Dask must not have been imported before, because it reads the environment then.
    """
    with tempfile.TemporaryDirectory(prefix="skypool-dask-") as folder:
        os.environ["DASK_TEMPORARY_DIRECTORY"] = folder
        os.environ["DASK_LOGGING__DISTRIBUTED"] = "warning"
        yield folder


def _host() -> str:
    """Return the address at which this node listens for other nodes: the address in its own network only."""
    return sky.instance_info().address or _LOCAL


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _stop_event() -> asyncio.Event:
    """Return an event that SIGTERM sets from now on."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    return stop


async def _either(*waits: Any) -> None:
    """Wait until one of these awaitables is done, and cancel the others."""
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
