"""Use a Ray cluster on machines that are broken meanwhile, and say as lines of JSON what came of it.

python ray_lab.py SETTINGS

SETTINGS is JSON: the seed, the private key, the Python of the machines, the machines as pairs of address and host key,
and the steps. tests/soak/ray.py starts this program.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lab_program import NODES, Told, ask, main, ready

import skypool as sky
from tests.engines import ray_work

WITHIN = 100.0
"""Seconds within which anything must have happened. Dozens of processes start at once on a computer with two cores."""
PATIENT = 120.0
"""Seconds within which all nodes of a new cluster must have joined."""


class Steps:
    """What is done to one cluster, in any order but for `head`, which comes last. Each leaves it with four nodes."""

    def __init__(self, pool: sky.ComputePool, chance: random.Random) -> None:
        self.pool = pool
        self.chance = chance
        self.told = Told()
        logging.getLogger("skypool").addHandler(self.told)
        self.threads = ThreadPoolExecutor()
        self.start()

    def start(self) -> None:
        self.cluster = sky.ray.cluster(self.pool, cpus=2, object_store=100 << 20, timeout=PATIENT)

    def close(self) -> None:
        self.cluster.close()
        self.threads.shutdown()
        assert not [each for each in threading.enumerate() if each.name.endswith("-ray")]

    # --- what it has -----------------------------------------------------------------------------------------

    def address(self, node: int) -> str:
        found: str = where().with_options(node=node) >> self.pool
        return found

    def names(self, nodes: list[int]) -> set[str]:
        return {f"{self.pool.name}-{node}" for node in nodes}

    def alive(self) -> set[str]:
        return {name for name, state in self.cluster.nodes().items() if state == "ALIVE"}

    def until_nodes(self, count: int = NODES) -> None:
        """Wait until the pool has so many nodes, and Ray has the same."""
        self.until(
            lambda: len(found := ready(self.pool)) == count and self.alive() == self.names(found), f"{count} nodes"
        )

    def until(self, found: Callable[[], Any], what: str) -> None:
        end = time.monotonic() + WITHIN
        while not found():
            if time.monotonic() > end:
                services = [repr(each) for each in self.pool.services]
                raise TimeoutError(f"{what}: {self.pool.nodes} {self.cluster!r} {services} {self.told.lines}")
            time.sleep(0.1)

    def other(self) -> int:
        """Return a node that is not the head's."""
        return self.chance.choice([node for node in ready(self.pool) if node != self.cluster.head])

    def started(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Start a function on the head in a thread here."""
        return self.threads.submit(self.cluster.run, function, *args)

    def on_all(self) -> None:
        """A task runs on each node."""
        addresses = sorted(self.address(node) for node in ready(self.pool))
        assert self.cluster.run(ray_work.where) == addresses

    def runs_on_all(self) -> bool:
        """Return True if a task runs on each node. Ray may still count a node that was killed beside the new one."""
        try:
            self.on_all()
        except (sky.SkypoolError, AssertionError):
            return False
        return True

    # --- the steps -------------------------------------------------------------------------------------------

    def tasks(self) -> None:
        """Tasks run on all machines, an actor keeps its state, and a job runs."""
        self.on_all()
        assert self.cluster.run(ray_work.count, 7) == 7
        program = Path("job.py")
        program.write_text("import ray\nray.init()\nassert ray.get(ray.remote(lambda: 6).remote()) == 6\n")
        self.cluster.submit(program)

    def kill(self) -> None:
        """The daemon of a node is killed while tasks run there: it comes back, and the tasks run again."""
        node = self.other()
        address = self.address(node)
        values = self.started(ray_work.slow_squares, 24, 1.0)
        ask({"do": "until task", "address": address, "task": "ray::slow_square"})
        ask({"do": "kill daemon", "address": address, "daemon": "raylet/raylet", "returns": True})
        assert values.result(WITHIN) == [n * n for n in range(24)]
        self.until(self.runs_on_all, "a task on each of four nodes")
        self.until_nodes()

    def notice(self) -> None:
        """A machine is taken back with a notice: its task ends where it began, and there are four nodes again."""
        node, before = self.other(), ready(self.pool)
        address = self.address(node)
        place = self.started(ray_work.sleep_at, address, 8.0)
        ask({"do": "until task", "address": address, "task": "ray::sleepy"})
        ask({"do": "notice", "address": address, "seconds": 30})
        assert place.result(WITHIN) == (address, 1)
        self.until(lambda: f"{self.pool.name}-{node}" not in self.alive(), "the end of a node with a notice")
        ask({"do": "check gone", "address": address})  # before its machine ends, which this ends then
        self.until(lambda: ready(self.pool) != before, "the next machine")
        self.until_nodes()
        ask({"do": "boot", "address": address})

    def lose(self) -> None:
        """A machine loses its power while tasks run there: Ray is on the next machine, and the tasks run again."""
        node, before = self.other(), ready(self.pool)
        address = self.address(node)
        values = self.started(ray_work.slow_squares, 24, 1.0)
        ask({"do": "until task", "address": address, "task": "ray::slow_square"})
        ask({"do": "power", "address": address})
        self.until(lambda: len(ready(self.pool)) == NODES and ready(self.pool) != before, "the next machine")
        self.until_nodes()
        assert values.result(WITHIN) == [n * n for n in range(24)]
        ask({"do": "boot", "address": address})

    def resize(self) -> None:
        """Machines end when their tasks have ended, tasks that wait are shown, and machines are rented for them."""
        values = self.started(ray_work.slow_squares, 12, 1.5)
        ask({"do": "until task", "address": self.address(self.other()), "task": "ray::slow_square"})
        self.cluster.resize(2)
        self.until_nodes(2)
        assert values.result(WITHIN) == [n * n for n in range(12)]
        values = self.started(ray_work.slow_squares, 30, 1.0)
        self.until(self.cluster.demands, "demands of tasks that wait")
        (demand,) = self.cluster.demands()
        assert demand.resources == {"CPU": 1.0}, demand
        self.cluster.resize(NODES)
        self.cluster.wait_ready(NODES, WITHIN)
        self.until_nodes()
        assert values.result(WITHIN) == [n * n for n in range(30)]
        self.until(lambda: self.cluster.demands() == [], "no demands")

    def head(self) -> None:
        """The head is killed, or its machine loses its power: the user is told, nothing goes on, a new one works."""
        self.on_all()
        waiting = self.started(ray_work.slow_squares, 4, 3600.0)
        address, whole = self.address(self.cluster.head), self.chance.random() < 0.5
        ask({"do": "until task", "address": address, "task": "ray::slow_square"})
        if whole:
            ask({"do": "power", "address": address})
        else:
            ask({"do": "kill daemon", "address": address, "daemon": "gcs_server", "returns": False})
        told = f"Ray's head on node {self.cluster.head}"
        error = waiting.exception(WITHIN)
        assert isinstance(error, sky.SkypoolError), repr(error)
        assert told in str(error), repr(error)
        self.until(lambda: any(told in each for each in self.told.lines), "a warning")
        assert len([each for each in self.told.lines if told in each]) == 1, self.told.lines
        try:
            self.cluster.run(ray_work.where)
        except sky.SkypoolError as e:
            assert told in str(e), e
        else:
            raise AssertionError("a function ran on a cluster without a head")
        self.until(lambda: self.pool.services == [], "the end of the services")
        ask({"do": "check cluster gone"})
        self.cluster.close()
        self.until(lambda: len(ready(self.pool)) == NODES, "four machines")
        self.start()
        assert self.cluster.run(ray_work.count, 3) == 3
        if whole:
            ask({"do": "boot", "address": address})


@sky.compute(devices=0)
def where() -> str:
    return sky.instance_info().address


if __name__ == "__main__":
    main(Steps, json.loads(sys.argv[1]))
