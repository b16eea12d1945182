"""Use a Dask cluster on spot machines of a fake cloud, one of which is taken back; print as JSON what came of it.

python dask_notice.py FOLDER
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from dask_pool import chance, in_memory, ready, until
from distributed import Client, wait

import skypool as sky
from skypool import events
from skypool.testing import FakeCloud, Stock

NOTICE = 30.0
"""Seconds between a notice and the end of the machine: as long as Google says, and as data may be copied."""


def main(folder: Path) -> dict[str, Any]:
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    shown: dict[str, Any] = {}
    cloud = FakeCloud(folder, [Stock("small", usd_per_hour=1.0)])
    with sky.ComputePool(cloud, nodes=2, slots=1, console="off") as pool:
        with sky.dask.cluster(pool) as cluster, Client(cluster) as client:
            data = chance(client)
            before = int(data.sum().compute())
            (machine,) = [each for each in cloud.instances(pool=pool.name) if each.node == 1]
            cloud.control.interrupt(machine, 60.0)
            began = time.monotonic()
            until(lambda: pool.nodes[1] == "ended", "the end of the machine")
            shown["seconds"] = time.monotonic() - began
            shown["kept"] = [in_memory(client), int(data.sum().compute()) == before]
            until(lambda: ready(pool) == [0, 2] and len(cluster.scheduler_info["workers"]) == 2, "the next worker")
            shown["sum"] = client.submit(sum, [1, 2, 3]).result()
            pool.retire(2)
            until(lambda: len(cluster.worker_spec) == 1, "a cluster that knows of a node that was retired")
            shown["kept after a retirement"] = int(data.sum().compute()) == before
        shown["slow data"] = slow_data(cloud, pool)
    return {"shown": shown}


class Slow:
    """A value whose copying takes longer than any notice."""

    def __reduce__(self) -> Any:
        time.sleep(600)
        return Slow, ()


def slow_data(cloud: FakeCloud, pool: sky.ComputePool) -> dict[str, Any]:
    """Take a machine back whose data cannot be copied in time. Return how its worker ended, and if another one came."""
    pool.resize(2)
    until(lambda: len(ready(pool)) == 2, "a second node")
    (node,) = [each for each in ready(pool) if each != 0]
    ended: list[float] = []

    def hear(event: events.Event) -> None:
        if isinstance(event, events.ServiceEnded) and event.node == node:
            ended.append(time.monotonic())

    unlisten = pool.events.listen(hear)
    with sky.dask.cluster(pool, moving=30) as cluster, Client(cluster) as client:
        names = {each.node: int(each.name.rpartition("-")[2]) for each in pool.services if "worker" in each.name}
        workers = cluster.scheduler_info["workers"]
        (there,) = [address for address, each in workers.items() if each["name"] == names[node]]
        held = client.submit(Slow, workers=[there], allow_other_workers=False)
        wait(held)
        (machine,) = [each for each in cloud.instances(pool=pool.name) if each.node == node]
        at = time.monotonic() + NOTICE
        cloud.control.interrupt(machine, NOTICE)
        until(lambda: ended, "the end of the worker")
        until(lambda: len(cluster.scheduler_info["workers"]) == 2 and len(ready(pool)) == 2, "the next worker")
        result = client.submit(sum, [1, 2, 3], pure=False).result()
    unlisten()
    return {"left": at - ended[0], "sum": result}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # what workers print
        done = main(Path(sys.argv[1]))
    print(json.dumps(done))
