"""Programs that use Ray, for tests. They run on the node of Ray's head."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from typing import Any

import skypool as sky


def imported(name: str) -> Any:
    """Return a module of Ray, which is not installed where types are checked."""
    return importlib.import_module(name)


def where() -> list[str]:
    """Return the addresses of Ray's nodes, each as told by a task there."""
    ray, strategies = imported("ray"), imported("ray.util.scheduling_strategies")
    ray.init(log_to_driver=False)

    def address() -> str:
        return str(imported("ray").util.get_node_ip_address())

    nodes = [each["NodeID"] for each in ray.nodes() if each["Alive"]]
    places = [strategies.NodeAffinitySchedulingStrategy(each, soft=False) for each in nodes]
    tasks = [ray.remote(address).options(scheduling_strategy=each).remote() for each in places]
    return sorted(ray.get(tasks))


def count(times: int) -> int:
    """Return how often an actor was called."""
    ray = imported("ray")

    ray.init(log_to_driver=False)

    @ray.remote
    class Counter:
        def __init__(self) -> None:
            self.value = 0

        def add(self) -> int:
            self.value += 1
            return self.value

    actor: Any = Counter
    counter = actor.remote()
    return int(max(ray.get([counter.add.remote() for _ in range(times)])))


def data() -> int:
    """Return a sum of squares that Ray Data has computed."""
    ray = imported("ray")

    ray.init(log_to_driver=False)
    squares = ray.data.range(1000, override_num_blocks=2).map(lambda row: {"square": row["id"] ** 2})
    return int(squares.sum("square"))


def tune() -> int:
    """Return the number that Ray Tune has found to be the best."""
    ray, tuning = imported("ray"), imported("ray.tune")

    ray.init(log_to_driver=False)
    tuner = tuning.Tuner(
        lambda config: {"loss": (config["x"] - 3) ** 2}, param_space={"x": tuning.grid_search([1, 2, 3, 4])}
    )
    return int(tuner.fit().get_best_result("loss", "min").config["x"])


def train() -> list[int]:
    """Return the ranks of two workers of Ray Train, as they have written them into a shared actor."""
    ray, training = imported("ray"), imported("ray.train")
    trainers = imported("ray.train.v2.api.data_parallel_trainer")

    ray.init(log_to_driver=False)

    @ray.remote
    class Ranks:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def add(self, rank: int) -> None:
            self.seen.append(rank)

        def all(self) -> list[int]:
            return sorted(self.seen)

    actor: Any = Ranks
    ranks = actor.remote()

    def loop(config: dict[str, Any]) -> None:
        context = imported("ray.train").get_context()
        imported("ray").get(config["ranks"].add.remote(context.get_world_rank()))

    workers = training.ScalingConfig(num_workers=2)
    trainers.DataParallelTrainer(loop, train_loop_config={"ranks": ranks}, scaling_config=workers).fit()
    found: list[int] = ray.get(ranks.all.remote())
    return found


def slow_squares(count: int, seconds: float) -> list[int]:
    """Return squares of numbers, each from a task that takes some time.

    Args:
        count: how many numbers there are.
        seconds: how long each task takes.
    """
    ray = imported("ray")

    ray.init(log_to_driver=False)

    def slow_square(number: int) -> int:
        time.sleep(seconds)
        return number * number

    task = ray.remote(max_retries=-1)(slow_square)
    found: list[int] = ray.get([task.remote(number) for number in range(count)])
    return found


def sleep_at(address: str, seconds: float) -> tuple[str, int]:
    """Return where a task that takes some time has ended, and how often it has begun.

    Args:
        address: the address of the node that it is sent to.
        seconds: how long it takes.
    """
    ray, strategies = imported("ray"), imported("ray.util.scheduling_strategies")
    ray.init(log_to_driver=False)

    @ray.remote(num_cpus=0)
    class Begun:
        def __init__(self) -> None:
            self.times = 0

        def add(self) -> int:
            self.times += 1
            return self.times

        def ready(self) -> None:
            pass

    def sleepy(begun: Any) -> tuple[str, int]:
        times = imported("ray").get(begun.add.remote())
        time.sleep(seconds)
        return str(imported("ray").util.get_node_ip_address()), times

    ids = {each["NodeManagerAddress"]: each["NodeID"] for each in ray.nodes() if each["Alive"]}
    here = strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    there = strategies.NodeAffinitySchedulingStrategy(ids[address], soft=False)
    actor: Any = Begun
    task = ray.remote(max_retries=0)(sleepy)
    begun = actor.options(scheduling_strategy=here).remote()
    ray.get(begun.ready.remote())  # its process starts before the task does
    found: tuple[str, int] = ray.get(task.options(scheduling_strategy=there).remote(begun))
    return found


@sky.compute(devices=0)
def own_address() -> str:
    """Return the address at which other nodes reach this one."""
    return sky.instance_info().address


@sky.compute(devices=0)
def refused(environment: dict[str, str]) -> str:
    """Return what Ray says to a program with these variables."""
    program = "import ray; ray.init(); print('let in')"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True, timeout=90
    )
    return done.stdout + done.stderr
