"""Use a Dask cluster on spot machines of a fake cloud, one of which is taken back; print as JSON what came of it.

python dask_notice.py FOLDER
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import dask.array
from dask_pool import in_memory, ready, until
from distributed import Client, wait

import skypool as sky
from skypool.testing import FakeCloud, Stock


def main(folder: Path) -> None:
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    shown: dict[str, Any] = {}
    cloud = FakeCloud(folder, [Stock("small", usd_per_hour=1.0)])
    with sky.ComputePool(cloud, nodes=2, slots=1, console="off") as pool:
        with sky.dask.cluster(pool) as cluster, Client(cluster) as client:
            data = client.persist(dask.array.random.random((600, 600), chunks=(100, 100)))
            wait(data)
            before = float(data.sum().compute())
            (machine,) = [each for each in cloud.instances(pool=pool.name) if each.node == 1]
            cloud.control.interrupt(machine, 60.0)
            began = time.monotonic()
            until(lambda: pool.nodes[1] == "ended", "the end of the machine")
            shown["seconds"] = time.monotonic() - began
            shown["kept"] = [in_memory(client), float(data.sum().compute()) == before]
            until(lambda: ready(pool) == [0, 2] and len(cluster.scheduler_info["workers"]) == 2, "the next worker")
            shown["sum"] = client.submit(sum, [1, 2, 3]).result()
            pool.retire(2)
            until(lambda: len(cluster.worker_spec) == 1, "a cluster that knows of a node that was retired")
            shown["kept after a retirement"] = float(data.sum().compute()) == before
    print(json.dumps({"shown": shown}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
