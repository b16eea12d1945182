"""Use a Dask cluster on a pool of this machine, and print as JSON what came of it.

python dask_pool.py
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import dask.array
import dask.dataframe
import numpy as np
import pandas as pd
from distributed import Client, Security, wait

import skypool as sky


def until(found: Callable[[], Any], what: str, within: float = 60) -> None:
    """Poll until something is true; raise after so many seconds."""
    end = time.monotonic() + within
    while not found():
        if time.monotonic() > end:
            raise TimeoutError(what)
        time.sleep(0.05)


def chance(client: Client) -> Any:
    """Return an array of 36 parts that is in memory. A part that is computed again has other numbers.

    The numbers are whole ones, so their sum is exact. That of floats depends on where the parts lie in memory.
    """

    def new(part: Any) -> Any:
        return np.random.default_rng().integers(0, 1 << 20, part.shape)

    data = client.persist(dask.array.zeros((600, 600), chunks=(100, 100), dtype=np.int64).map_blocks(new))
    wait(data)
    return data


def in_memory(client: Any) -> int:
    """Return how many tasks have their results in the memory of a worker."""
    return client.run_on_scheduler(
        lambda dask_scheduler: sum(each.state == "memory" for each in dask_scheduler.tasks.values())
    )


def ready(pool: sky.ComputePool) -> list[int]:
    return [node for node, state in pool.nodes.items() if state == "ready"]


def computed(client: Any) -> dict[str, Any]:
    """Return results of arrays and frames beside those of numpy and pandas."""
    numbers = np.arange(10_000.0).reshape(100, 100)
    blocks = dask.array.from_array(numbers, chunks=(25, 40))
    frame = pd.DataFrame({"key": [n % 7 for n in range(1000)], "value": range(1000)})
    parts = dask.dataframe.from_pandas(frame, npartitions=5)
    return {
        "array": bool(np.allclose((blocks @ blocks.T).cumsum(0).compute(), (numbers @ numbers.T).cumsum(0))),
        "frame": parts.groupby("key").value.mean().compute().sort_index().to_dict()
        == frame.groupby("key").value.mean().to_dict(),
        "sum": client.submit(sum, [1, 2, 3]).result(),
        "processes": len({os.getpid(), *client.run(os.getpid).values()}),
    }


def refused(address: str) -> dict[str, bool]:
    """Return if a scheduler refuses clients without a key, and those with another key."""
    host, port = address.removeprefix("tls://").rsplit(":", 1)
    with socket.create_connection((host, int(port)), 10) as plain:
        plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
        try:
            answer = plain.recv(100)
        except ConnectionResetError:
            answer = b""
    try:
        Client(address, security=Security.temporary(), timeout=2).close()
    except OSError:
        return {"plain": answer == b"" or answer[:1] == b"\x15", "other": True}  # 0x15: an alert of TLS
    return {"plain": answer == b"", "other": False}


def main() -> dict[str, Any]:
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    shown: dict[str, Any] = {}
    with sky.ComputePool(nodes=2, slots=1, console="off") as pool:
        with sky.dask.cluster(pool, nthreads=1) as cluster, Client(cluster) as client:
            shown["workers"] = len(client.scheduler_info(n_workers=-1)["workers"])
            shown |= computed(client)
            shown["dashboard"] = urllib.request.urlopen(cluster.dashboard_link, timeout=30).status
            shown["widget"] = cluster.dashboard_link in cluster._repr_html_()
            shown["refused"] = refused(cluster.scheduler.address)
            shown["services"] = sorted(each.name for each in pool.services)
            try:
                sky.dask.cluster(pool)
            except sky.UsageError as e:
                shown["second"] = str(e)

            cluster.scale(3)
            client.wait_for_workers(3, 60)
            shown["grown"] = ready(pool)
            data = chance(client)
            before = int(data.sum().compute())
            cluster.scale(1)
            until(lambda: len(ready(pool)) == 1, "the end of two nodes")
            shown["shrunk"] = ready(pool)
            shown["kept"] = [in_memory(client), int(data.sum().compute()) == before]
            del data

            ((address, process),) = client.run(os.getpid).items()
            os.kill(process, signal.SIGKILL)
            until(lambda: cluster.scheduler_info["workers"].keys() - {address}, "a new worker process")
            shown["after a kill"] = client.submit(sum, [4, 5]).result()

            cluster.adapt(minimum=1, maximum=3, interval="100ms", wait_count=5, target_duration="1s")
            sleeps = client.map(lambda n: time.sleep(0.2) or n, range(40))
            until(lambda: len(ready(pool)) == 3, "a pool that grows with the load")
            shown["adapted"] = sum(client.gather(sleeps))
            del sleeps
            until(lambda: len(cluster.scheduler_info["workers"]) == 1, "workers that are retired without load")
            until(lambda: len(ready(pool)) <= 2, "nodes that end without load")
        shown["services left"] = [each.name for each in pool.services]
        shown["phase"] = pool.phase
    shown["files"] = [each for each in os.listdir(tempfile.gettempdir()) if "dask" in each]
    return {"shown": shown}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # what workers print
        done = main()
    print(json.dumps(done))
