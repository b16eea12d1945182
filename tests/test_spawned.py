"""A pool in a process that multiprocessing started anew: the user's script is called `__mp_main__` there."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

SCRIPT = """
import multiprocessing
import sys
from dataclasses import dataclass
from enum import Enum

import skypool as sky

FACTOR = 3


class Colour(Enum):
    RED = 1


@dataclass
class Point:
    x: int
    colour: Colour = Colour.RED


class Wrong(Exception):
    pass


def scaled(x):
    return FACTOR * x


@sky.compute
def decorated(point):
    print("scaled", flush=True)
    return Point(scaled(point.x), Colour.RED)


def plain(point):
    return Point(scaled(point.x), point.colour)


@sky.compute
def refuse():
    raise Wrong("no")


def client(queue, trust):
    with sky.ComputePool(console="off", slots=1, trust=trust) as pool:
        found = [decorated(Point(1)) >> pool, pool.submit(plain, Point(2)).result(), *pool.map(plain, [Point(3)])]
        try:
            refuse() >> pool
        except Wrong as e:
            found.append(e.args)
    same = all(type(each) is Point and each.colour is Colour.RED for each in found[:3])
    queue.put(([each.x for each in found[:3]], same, found[3]))


if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    child = context.Process(target=client, args=(queue, sys.argv[2]))
    child.start()
    child.join(120)
    print(queue.get(timeout=10) if child.exitcode == 0 else child.exitcode)
"""


@pytest.mark.parametrize("trust", ["full", "data"])
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_scripts_own_functions_run_in_a_pool_of_a_spawned_child(tmp_path: Path, method: str, trust: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    argv = [sys.executable, str(script), method, trust]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    told: Any = ast.literal_eval(done.stdout.splitlines()[-1])
    assert told == ([3, 6, 9], True, ("no",)), done.stderr
