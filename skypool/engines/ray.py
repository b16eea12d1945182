"""A Ray cluster on the nodes of a pool, with Ray's daemons as services and token authentication."""

from __future__ import annotations

from typing import TYPE_CHECKING

import skypool as sky
from skypool.engines import _pools

if TYPE_CHECKING:
    from skypool.engines._ray_cluster import RayCluster

__all__ = ["cluster"]


def cluster(
    pool: sky.ComputePool,
    *,
    cpus: int | None = None,
    object_store: int | None = None,
    drain: float = 30.0,
    firewalled: bool = False,
    timeout: float = 120.0,
) -> RayCluster:
    """Start a Ray cluster on a pool, with one Ray node on each node of the pool, and return it when all have joined.

        with sky.ComputePool(sky.AWS(), accelerator="H100:8", image=sky.Image(pip=["ray[default]==2.60.0"])) as pool:
            with sky.ray.cluster(pool) as r:
                r.submit("train.py", "--epochs", "3")

    Ray's head is on the node with the lowest number. Ray's daemons are services of the pool (long-lived calls that take
    no slot). They need a token that is made here, and is in memory only. Leaving the block ends Ray, but not the pool.
    If the pool was not started, this function starts it, and stops it again if it raises an error. Ray need not be
    installed on this computer.

    Args:
        pool: the pool.
        cpus: the number of CPUs of each node that Ray's tasks use. Default None: all.
        object_store: the bytes of each node's object store. Default None: 30 % of its memory, or nearly all of /dev/shm
            if that is less.
        drain: the most seconds for which running tasks may go on when their node leaves the cluster. Default 30.
        firewalled: True if your firewall keeps others from the ports of nodes with public addresses. Default False:
            such nodes are refused, because Ray's ports are open at all addresses of a node.
        timeout: the seconds within which the nodes that are ready must have joined. Default 120.

    Raises:
        UsageError: the image, or a node, has another version of Ray than this process, or none; a machine of the pool
            belongs to a stranger; the ports of a node would be open to others; or the pool has a Ray cluster already.
        TimeoutError: the nodes have not joined within `timeout` seconds.
        SkypoolError: the pool or the cluster could not become ready.
    """
    for name, value in (("cpus", cpus), ("object_store", object_store)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise sky.UsageError(f"{name} must be a whole number from 0, or None, not {value!r}")
    for name, limit in (("drain", drain), ("timeout", timeout)):
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 <= limit < 1e6:
            raise sky.UsageError(f"{name} must be a number of seconds, not {limit!r}")
    from skypool.engines import _ray_cluster

    with _pools.started(pool, "Ray", ("ray",), _ray_cluster.HEAD):
        made = _ray_cluster.RayCluster(pool, cpus, object_store, drain, firewalled)
        try:
            made.start(timeout)
        except BaseException:
            made.close()
            raise
        return made
