"""Calls that damage the process that runs them, beside others: a node loses no other call, and lives on."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import skypool as sky
from tests.conftest import children, eventually, nodes
from tests.damage_work import LIBC, expected, healthy

ROOT = Path(__file__).parent.parent
SEIZE, INTERRUPT = 0x4206, 0x4207
"""Requests of ptrace(2)."""


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(name="damaged", slots=2, console="off", grace=0.3, liveness=5) as made:
        yield made


def agent() -> int:
    (folder,) = nodes("damaged")
    (pid,) = children(json.loads((folder / "keeper.json").read_text())["pid"])
    return pid


@sky.compute
def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@sky.compute
def block() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        LIBC.usleep(50_000)


@pytest.mark.parametrize("call", [stop(), block()], ids=["stopped", "blocks its signals"])
def test_a_call_that_cannot_say_where_it_is_times_out_alone(pool: sky.ComputePool, call: sky.Call[None]) -> None:
    beside = pool.send(healthy(1, 2.0))
    with pytest.raises(sky.CallTimeout):
        call.with_options(timeout=0.5) >> pool
    assert beside.result(60) == expected(1, 2.0)


def test_stacks_are_told_while_a_worker_is_stopped(pool: sky.ComputePool) -> None:
    beside = pool.send(healthy(2, 2.0))
    stopped = pool.send(stop().with_options(timeout=4))
    eventually(lambda: "is stopped" in str(pool.stack()), 30, "the word of the stopped worker")
    with pytest.raises(sky.CallTimeout):
        stopped.result(60)
    assert beside.result(60) == expected(2, 2.0)


def scribble(n: int) -> int:
    """Write once to each file of the worker, and wait for what comes of it."""
    if n == 30:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                os.set_blocking(int(name), False)
                os.write(int(name), b"not for you")
        time.sleep(60)
    return n


def test_a_call_that_writes_to_files_of_its_worker_fails_alone(pool: sky.ComputePool) -> None:
    list(pool.map(scribble, range(30)))  # so that quick calls of the function travel together
    futures = [pool.submit(scribble, n) for n in range(60)]
    errors = [each.exception(60) for each in futures]
    assert isinstance(errors[30], sky.WorkerDied)
    assert "did not open" in str(errors[30])
    assert [n for n, each in enumerate(errors) if each is not None] == [30]


def test_a_worker_that_cannot_be_replaced_at_once_is_replaced_later(pool: sky.ComputePool) -> None:
    beside = pool.send(healthy(3, 2.0))
    limits = resource.prlimit(agent(), resource.RLIMIT_NOFILE)
    resource.prlimit(agent(), resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(sky.WorkerDied):
            sky.compute(os._exit)(7) >> pool
        waiting = [pool.send(healthy(n, 0.1)) for n in range(4)]
        assert beside.result(60) == expected(3, 2.0)
    finally:
        resource.prlimit(agent(), resource.RLIMIT_NOFILE, limits)
    assert [each.result(60) for each in waiting] == [expected(n, 0.1) for n in range(4)]
    eventually(lambda: len(children(agent())) == 2, 30, "both workers")


REMOVES = """
import os, shutil
import skypool as sky

with sky.ComputePool(slots=1, console="off") as pool:
    shutil.rmtree(os.getcwd())
    try:
        sky.compute(os._exit)(7) >> pool
    except sky.WorkerDied as e:
        print(e.exitcode)
    print(sky.compute(os.getcwd)() >> pool)
"""


def test_a_call_that_removes_the_folder_of_calls_leaves_a_node_that_works(tmp_path: Path) -> None:
    place = tmp_path / "work"
    place.mkdir()
    (tmp_path / "removes.py").write_text(REMOVES)
    argv = [sys.executable, str(tmp_path / "removes.py")]
    done = subprocess.run(argv, cwd=place, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.stdout.split("\n") == ["7", str(place), ""], done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_functions_that_damage_their_process_in_random_ways_harm_no_other_call() -> None:
    argv = [sys.executable, "-m", "tests.soak.damage", "--seed", "7", "--runs", "50"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, errors="replace")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


@sky.compute
def be_stopped_by_what_it_leaves() -> None:
    """Leave a process that ignores SIGTERM, traces this one, and stops it while this one ends what was left."""
    parent = os.getpid()
    ready, told = os.pipe()
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        LIBC.ptrace(SEIZE, parent, 0, 0)
        os.write(told, b"1")
        time.sleep(0.3)
        LIBC.ptrace(INTERRUPT, parent, 0, 0)
        time.sleep(60)
        os._exit(0)
    os.read(ready, 1)


@pytest.mark.slow
def test_a_worker_that_is_traced_by_what_a_call_has_left_is_replaced(pool: sky.ComputePool) -> None:
    future = pool.send(be_stopped_by_what_it_leaves())
    assert (healthy(1, 0.1) >> pool) == expected(1, 0.1)
    with pytest.raises(sky.ConnectionLost, match="was stopped"):
        future.result(30)
    assert (healthy(2, 0.1) >> pool) == expected(2, 0.1)
