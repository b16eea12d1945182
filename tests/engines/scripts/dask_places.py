"""Use Dask clusters with several workers on each node of a fake cloud, and with none; print as JSON what came of it.

python dask_places.py FOLDER
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

from dask_pool import ready, until
from distributed import Client
from distributed.system import MEMORY_LIMIT

import skypool as sky
from skypool.testing import FakeCloud, Stock


def seen(dask_worker: Any) -> tuple[str | None, int, int]:
    """Return the devices that a worker sees, its threads and its memory."""
    limit = dask_worker.memory_manager.memory_limit
    return os.environ.get("CUDA_VISIBLE_DEVICES"), dask_worker.state.nthreads, limit


def refusal(pool: sky.ComputePool, **options: Any) -> str:
    try:
        sky.dask.cluster(pool, **options)
    except sky.UsageError as e:
        return str(e)
    return ""


async def used_async(cluster: Any) -> tuple[str, int]:
    """Return what `async with` says, and what a client in this event loop computes."""
    try:
        async with cluster:
            refused = ""
    except sky.UsageError as e:
        refused = str(e)
    async with Client(cluster.scheduler_address, security=cluster.security, asynchronous=True) as client:
        return refused, await client.submit(sum, [1, 2, 3])


def main(folder: Path) -> dict[str, Any]:
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    shown: dict[str, Any] = {}
    cloud = FakeCloud(folder, [Stock("two", 10.0, "H100:2")])
    strange = sky.ComputePool(cloud, accelerator="H100:2", trust="data", console="off")
    shown["stranger"] = [refusal(strange), strange.phase]
    with sky.ComputePool(cloud, accelerator="H100:2", console="off") as pool:
        shown["devices"] = pool.devices
        shown["wrong"] = refusal(pool, workers_per_node=0)
        with sky.dask.cluster(pool, memory_limit="1 GiB") as cluster, Client(cluster) as client:
            shown["per-device"] = sorted(client.run(seen).values())
            cluster.scale(4)  # one more machine
            client.wait_for_workers(4, 60)
            shown["four"] = [ready(pool), sorted(each[0] for each in client.run(seen).values())]
            cluster.scale(2)
            until(lambda: len(ready(pool)) == 1 and len(cluster.scheduler_info["workers"]) == 2, "the end of a machine")
            cluster.scale(memory="2.5 GiB")
            client.wait_for_workers(3, 60)
            shown["by memory"] = [len(cluster.worker_spec), len(ready(pool))]
            threads = client.nthreads().popitem()[1]
            cluster.scale(cores=threads + 1)
            until(lambda: len(ready(pool)) == 1 and len(cluster.scheduler_info["workers"]) == 2, "the end of a machine")
            shown["by cores"] = len(cluster.worker_spec)
            shown["async"] = asyncio.run(used_async(cluster))
        with sky.dask.cluster(pool, workers_per_node=1, nthreads=1) as cluster, Client(cluster) as client:
            ((devices, threads, memory),) = client.run(seen).values()
            shown["one"] = [devices, threads, memory == MEMORY_LIMIT]
        with sky.dask.cluster(pool, workers_per_node=4) as cluster, Client(cluster) as client:
            workers = client.run(seen).values()
            shown["shared"] = sorted(each[0] for each in workers)
            shown["all memory"] = 0.99 * MEMORY_LIMIT < sum(each[2] for each in workers) <= MEMORY_LIMIT
        with sky.dask.cluster(pool, workers=0) as cluster:
            cluster.scale(memory=MEMORY_LIMIT // 2 + 1)  # no worker has told its memory yet
            shown["memory without a worker"] = len(cluster.worker_spec)
    return {"shown": shown}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # what workers print
        done = main(Path(sys.argv[1]))
    print(json.dumps(done))
