"""Start Dask clusters on machines by turns with skypool and with SSHCluster, and print as JSON how long it took.

python dask_start.py SETTINGS
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from distributed import Client, SSHCluster
from idle import alone

import skypool as sky


def main(settings: dict[str, Any]) -> None:
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    machines, times = settings["machines"], settings["times"]
    hosts = [sky.Host(address, host_key=key) for address, key in machines]
    driver = sky.SSH(hosts=hosts, user="root", identity=settings["identity"], python=settings["python"])
    connect = {
        "username": "root",
        "client_keys": [settings["identity"]],
        "known_hosts": settings["known_hosts"],
        "config": None,
    }
    took: dict[str, list[float]] = {"ours": [], "theirs": []}
    with sky.ComputePool(driver, nodes=len(machines), slots=1, console="off") as pool:
        for turn in range(times + 1):  # the first one warms both up
            with alone(keep=turn == 0):
                began = time.monotonic()
                with sky.dask.cluster(pool, nthreads=1) as cluster:
                    seconds = time.monotonic() - began
                    check(cluster, len(machines))
            if turn:
                took["ours"].append(seconds)
            with alone():
                began = time.monotonic()
                with SSHCluster(
                    [machines[0][0], *(address for address, _ in machines)],
                    connect_options=connect,
                    worker_options={"nthreads": 1},
                    scheduler_options={"port": 0, "dashboard_address": "127.0.0.1:0"},
                    remote_python=settings["python"],
                ) as cluster:
                    cluster.wait_for_workers(len(machines), 60)
                    seconds = time.monotonic() - began
                    check(cluster, len(machines))
            if turn:
                took["theirs"].append(seconds)
    print(json.dumps(took))


def check(cluster: Any, workers: int) -> None:
    with Client(cluster) as client:
        assert client.submit(sum, [1, 2, 3]).result() == 6
        assert len(client.nthreads()) == workers


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
