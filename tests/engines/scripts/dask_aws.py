"""Use a Dask cluster on two spot machines of AWS, one of which is taken back meanwhile; print as JSON what came of it.

python dask_aws.py PACKAGES

PACKAGES is a folder with boto3, which the environment of Dask does not have.
What this program prints after "@" is for the program that has started it, which has the AWS.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

import distributed
from dask_lab import host
from dask_pool import until
from distributed import Client, wait
from lab_program import ask, ready

import skypool as sky

WITHIN = 200.0


def square(n: int) -> int:
    time.sleep(0.05)
    return n * n


def main() -> None:
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    version = distributed.__version__
    image = sky.Image(pip=[f"dask=={version}", f"distributed=={version}"])
    shown: dict[str, Any] = {}
    pool = sky.ComputePool(
        sky.AWS(region="us-east-1", ssh_from="0.0.0.0/0"),
        vcpus=2, nodes=2, market="spot", budget=20, slots=1, image=image, console="off",
    )  # fmt: skip
    with pool:
        with sky.dask.cluster(pool, nthreads=2, timeout=100) as cluster, Client(cluster) as client:
            head = host(cluster.scheduler.address)
            (victim,) = [each for each in cluster.scheduler_info["workers"] if host(each) != head]
            kept = client.submit(sum, range(1000), workers=[victim], allow_other_workers=True)
            wait(kept)
            squares = client.map(square, range(400))
            ask({"do": "interrupt", "address": host(victim)})
            until(lambda: victim not in cluster.scheduler_info["workers"], "the end of the worker", WITHIN)
            shown["kept"] = kept.status == "finished" and kept.result(WITHIN) == 499_500
            shown["sum"] = client.submit(sum, squares).result(WITHIN)
            until(
                lambda: len(ready(pool)) == 2 and len(cluster.scheduler_info["workers"]) == 2, "the next worker", WITHIN
            )
            shown["after"] = sum(client.gather(client.map(square, range(100), pure=False)))
        shown["services"] = [each.name for each in pool.services]
    receipt = pool.receipt
    shown["receipt"] = {"usd": receipt.usd, "lines": [[each.place, each.ended, each.usd] for each in receipt.lines]}
    print(f"\n{json.dumps({'shown': shown})}")


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    main()
