"""A Dask cluster on the nodes of a pool, whose `scale` and `adapt` rent machines and end them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import skypool as sky
from skypool.engines import _pools

if TYPE_CHECKING:
    from skypool.engines._dask_cluster import Seats, SkypoolCluster

__all__ = ["cluster"]

_MOVING = 30.0
"""Seconds in which the data of a worker that ends may be copied to others, unless the user says otherwise."""


def cluster(
    pool: sky.ComputePool,
    *,
    workers: int | None = None,
    workers_per_node: int | Literal["per-device"] = "per-device",
    nthreads: int | None = None,
    memory_limit: str | int | float = "auto",
    resources: Mapping[str, float] | None = None,
    moving: float = _MOVING,
    timeout: float = 60.0,
) -> SkypoolCluster:
    """Start a Dask cluster on a pool, and return it when its workers are connected.

        with sky.ComputePool(sky.AWS(), nodes=4, image=sky.Image(pip=["distributed==2026.8.0"])) as pool:
            with sky.dask.cluster(pool) as cluster, Client(cluster) as client:
                print(client.submit(sum, [1, 2, 3]).result())

    A node has one worker for each of its accelerators, or one if it has none. Each of several workers sees its own
    accelerator only (by `CUDA_VISIBLE_DEVICES` and similar variables).

    The scheduler and the workers are services of the pool (long-lived calls that take no slot). The scheduler is on the
    node with the lowest number. This computer reaches it, and its dashboard, through ports on 127.0.0.1. All other
    connections need the cluster's own TLS key, which is made here and is in memory only.

    `cluster.scale(n)` and `cluster.adapt(…)` change the number of workers and nodes: machines are rented, or ended once
    their workers were retired. Leaving the block ends the cluster, but not the pool. If the pool was not started, this
    function starts it, and stops it again if it raises an error.

    Args:
        pool: the pool.
        workers: the number of workers at the start. Default None: as many as fit on the nodes that are ready.
        workers_per_node: the number of workers on each node. They share its accelerators evenly: with 1, a worker sees
            all of them. Default "per-device": one worker for each accelerator, and one on a node without.
        nthreads: the number of threads of a worker. Default None: the CPUs of its node, divided by its workers.
        memory_limit: the memory of a worker, as in `distributed.Nanny`. Default "auto": the memory of its node, divided
            by the workers of the node.
        resources: abstract resources of a worker, such as {"GPU": 1}, as in `distributed.Nanny`. Default None.
        moving: the most seconds in which the data of a worker that ends is copied to other workers. Default 30. If the
            provider takes a machine back, the copying also stops in time for the worker to end before the machine.
        timeout: the seconds within which the workers on nodes that are ready must be connected. Default 60.

    Raises:
        UsageError: Dask is not installed; the image, or a node, has another version of distributed, dask or
            cloudpickle than this process; a machine of the pool belongs to a stranger; the ports of a node would be
            open to others; or the pool has a Dask cluster already.
        SkypoolError: the pool or the cluster could not become ready.
    """
    if find_spec("distributed") is None or find_spec("cryptography") is None:
        raise sky.UsageError('Dask is not installed on this computer: pip install "skypool[dask]"')
    for name, value, least in (("workers", workers, 0), ("nthreads", nthreads, 1)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise sky.UsageError(f"{name} must be a whole number from {least}, or None, not {value!r}")
    if workers_per_node != "per-device" and (
        isinstance(workers_per_node, bool) or not isinstance(workers_per_node, int) or workers_per_node < 1
    ):
        raise sky.UsageError(
            f'workers_per_node must be a whole number from 1, or "per-device", not {workers_per_node!r}'
        )
    from skypool.engines import _dask_cluster

    with _pools.started(pool, "Dask", _dask_cluster.EQUAL, _dask_cluster.SCHEDULER):
        options: dict[str, Any] = {"nthreads": nthreads, "memory_limit": memory_limit}
        if resources is not None:
            options["resources"] = dict(resources)
        seats = _dask_cluster.Seats(pool, workers_per_node)
        return _connected(seats, seats.places if workers is None else workers, options, moving, timeout)


def _connected(seats: Seats, workers: int, options: dict[str, Any], moving: float, timeout: float) -> SkypoolCluster:
    """Make a cluster, and return it when the workers on nodes that are ready now are connected."""
    # at most `timeout` seconds
    from distributed.deploy.cluster import WorkerStartTimeoutError  # pyright: ignore[reportMissingImports]

    from skypool.engines._dask_cluster import SkypoolCluster

    pool = seats.pool
    awaited = min(workers, seats.places)
    try:
        made = SkypoolCluster(seats, workers, moving, options)
    except RuntimeError as e:
        if isinstance(e.__cause__, sky.SkypoolError):
            raise e.__cause__ from None
        raise
    try:
        if awaited:
            made.wait_for_workers(awaited, timeout=timeout)
    except WorkerStartTimeoutError as e:
        said = "\n".join(each.output[-1000:] for each in pool.services if each.name.startswith("dask-"))
        made.close()
        raise sky.SkypoolError(
            f"{e.available_workers} of {awaited} Dask workers of pool {pool.name!r} were connected within "
            f"{timeout:g} s; see whether the nodes reach each other with skypool's network check\n{said}"
        ) from None
    except BaseException:
        made.close()
        raise
    return made
