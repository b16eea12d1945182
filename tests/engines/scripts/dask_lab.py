"""Use a Dask cluster on machines that are broken meanwhile, and say as lines of JSON what came of it.

python dask_lab.py SETTINGS

SETTINGS is JSON: the seed, the private key, the Python of the machines, the machines as pairs of address and host key,
and the steps. What this program prints after "@" is for the program that has started it, which breaks machines when it
is asked to and then answers with a line. tests/soak/dask.py is that program.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import dask.array
import dask.dataframe
import numpy as np
import pandas as pd
from dask_pool import until
from distributed import Client, wait
from lab_program import NODES, Told, ask, main, ready, say

import skypool as sky

WITHIN = 100.0
"""Seconds within which anything must have happened. Eight processes start at once on a computer with two cores."""
PATIENT = 120.0
"""Seconds within which all workers of a new cluster must be connected."""


class Steps:
    """What is done to one cluster, in any order but for `head`, which comes last. Each leaves it with four workers."""

    def __init__(self, pool: sky.ComputePool, chance: random.Random) -> None:
        self.pool = pool
        self.chance = chance
        self.told = Told()
        logging.getLogger("skypool").addHandler(self.told)
        self.start()

    def start(self) -> None:
        self.cluster: Any = sky.dask.cluster(self.pool, nthreads=1, timeout=PATIENT)
        self.client: Any = Client(self.cluster)

    def close(self) -> None:
        self.client.close()
        self.cluster.close()

    # --- what it has -----------------------------------------------------------------------------------------

    def workers(self) -> list[str]:
        return sorted(self.cluster.scheduler_info["workers"])

    def until_workers(self, count: int = NODES) -> None:
        self.until(lambda: len(self.workers()) == count and len(ready(self.pool)) == count, f"{count} workers")

    def until(self, found: Callable[[], Any], what: str) -> None:
        try:
            until(found, what, WITHIN)
        except TimeoutError as e:
            services = [repr(each) for each in self.pool.services]
            raise TimeoutError(f"{what}: {self.pool.nodes} {self.workers()} {services} {self.told.lines}") from e

    def others(self) -> list[str]:
        """Return the workers that do not run beside the scheduler."""
        head = host(self.cluster.scheduler.address)
        return [each for each in self.workers() if host(each) != head]

    def data(self) -> tuple[Any, float]:
        """Return an array of random numbers on all workers, and its sum."""
        made = self.client.persist(dask.array.random.default_rng(7).random((400, 400), chunks=(50, 100)))
        wait(made)
        return made, float(made.sum().compute())

    def same(self, made: Any, total: float) -> None:
        now = float(made.sum().compute())
        assert now == total, f"{now} is not {total}"

    # --- the steps -------------------------------------------------------------------------------------------

    def tasks(self) -> None:
        """Tasks run on all machines, and arrays and frames have the values of numpy and pandas."""
        at = self.client.map(lambda n: (time.sleep(0.1), os.uname().nodename)[1], range(8 * NODES))
        assert len(set(self.client.gather(at))) == NODES
        numbers = np.random.default_rng(3).random((300, 200))
        blocks = dask.array.from_array(numbers, chunks=(70, 90))
        assert np.allclose((blocks @ blocks.T).cumsum(0).compute(), (numbers @ numbers.T).cumsum(0))
        assert np.allclose(np.linalg.svd(numbers)[1], dask.array.linalg.svd(blocks.rechunk((70, 200)))[1].compute())
        frame = pd.DataFrame({"key": np.arange(5000) % 13, "value": np.arange(5000.0)})
        parts = dask.dataframe.from_pandas(frame, npartitions=7)
        pd.testing.assert_frame_equal(
            parts.groupby("key").agg(["mean", "max", "count"]).compute().sort_index(),
            frame.groupby("key").agg(["mean", "max", "count"]),
            check_dtype=False,
        )
        joined = parts.merge(parts, on="value", how="inner").compute().sort_values("value").reset_index(drop=True)
        pd.testing.assert_frame_equal(joined, frame.merge(frame, on="value"), check_dtype=False)

    def kill(self) -> None:
        """A worker's process, or that of its service, is killed: the worker comes back, and data is computed again."""
        made, total = self.data()
        victim = self.chance.choice(self.workers())
        whole = self.chance.random() < 0.5
        pid = self.client.run(os.getppid if whole else os.getpid, workers=[victim])[victim]
        ask({"do": "kill", "address": host(victim), "inside": pid})
        self.until(lambda: victim not in self.workers(), "the end of a worker that was killed")
        self.until_workers()
        self.same(made, total)

    def notice(self) -> None:
        """A machine is taken back with a notice: what only its worker had survives, and there are four again."""
        victim = self.chance.choice(self.others())
        (only,) = self.client.scatter([np.arange(100_000)], workers=[victim], broadcast=False)
        held = self.client.who_has([only])
        assert [list(each) for each in held.values()] == [[victim]], held
        before = ready(self.pool)
        ask({"do": "notice", "address": host(victim), "seconds": 30})
        self.until(lambda: victim not in self.workers(), "the end of a worker with a notice")
        ask({"do": "check gone", "address": host(victim)})  # before its machine ends, which this ends then
        assert int(self.client.submit(lambda x: x.sum(), only).result(WITHIN)) == 4_999_950_000
        self.until(lambda: len(ready(self.pool)) == NODES and ready(self.pool) != before, "the next machine")
        self.until_workers()
        ask({"do": "boot", "address": host(victim)})

    def lose(self) -> None:
        """A machine loses its power: another takes its place, and its worker is on that. Data is computed again."""
        made, total = self.data()
        victim = self.chance.choice(self.others())
        before = ready(self.pool)
        ask({"do": "power", "address": host(victim)})
        self.until(lambda: len(ready(self.pool)) == NODES and ready(self.pool) != before, "the next machine")
        self.until_workers()
        self.same(made, total)
        ask({"do": "boot", "address": host(victim)})

    def scale(self) -> None:
        """Machines end and are rented with the number of workers, and nothing is lost."""
        made, total = self.data()
        self.cluster.scale(1)
        self.until_workers(1)
        self.same(made, total)
        self.cluster.scale(NODES)
        self.client.wait_for_workers(NODES, WITHIN)
        self.until_workers()
        self.same(made, total)

    def adapt(self) -> None:
        """Machines end without load, and are rented with it."""
        self.cluster.adapt(minimum=1, maximum=NODES, interval="200ms", wait_count=5, target_duration="1s")
        self.until_workers(1)
        sleeps = self.client.map(lambda n: (time.sleep(0.5), n)[1], range(150), pure=False)
        self.until_workers()
        assert sum(self.client.gather(sleeps)) == sum(range(150))
        del sleeps
        self.until_workers(1)
        self.cluster.adapt(minimum=NODES, maximum=NODES, interval="200ms")
        self.until_workers()
        self.cluster._adaptive.stop()

    def head(self) -> None:
        """The machine of the scheduler loses its power: the user is told, nothing goes on, and a new cluster works."""
        future = self.client.submit(time.sleep, 3600)
        address = host(self.cluster.scheduler.address)
        ask({"do": "power", "address": address})
        self.until(lambda: self.cluster.status.name == "closed", "the end of the cluster")
        (line,) = [each for each in self.told.lines if "make a new cluster" in each]
        assert "the scheduler on node" in line
        assert "lost" in line, line
        try:
            self.cluster.scale(3)
        except sky.SkypoolError as e:
            assert "the scheduler on node" in str(e)
        else:
            raise AssertionError("a cluster without a scheduler was made larger")
        try:
            future.result(WITHIN)
        except TimeoutError:
            raise AssertionError("a future of a cluster that has ended is waited for") from None
        except Exception as e:  # noqa: BLE001 - it is Dask's, and shown
            say({"a future raises": f"{type(e).__name__}: {e}"})
        assert self.pool.services == []
        ask({"do": "check cluster gone"})
        # A client that was just trying to connect again may raise what tornado says of a port that is closed at once.
        with contextlib.suppress(ValueError):
            self.client.close()
        self.cluster.close()
        self.until(lambda: len(ready(self.pool)) == NODES, "the next machine")
        self.start()
        assert self.client.submit(sum, [1, 2, 3]).result() == 6
        ask({"do": "boot", "address": address})


def host(address: str) -> str:
    return address.removeprefix("tls://").rpartition(":")[0]


if __name__ == "__main__":
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    main(Steps, json.loads(sys.argv[1]))
