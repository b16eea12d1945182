"""Parts of a pool that are stopped for a second under its calls. For longer pauses see tests.soak.pauses."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest

import skypool as sky
from skypool.clock import RunningClock
from tests.conftest import eventually
from tests.lab.machines import Lab
from tests.soak import pauses
from tests.test_bad_luck import keeper_of
from tests.work import nap


@pytest.mark.parametrize("part", [name for name in pauses.PARTS if name not in ("machine", "node")])
def test_a_stop_for_a_second_loses_no_call(part: str) -> None:
    assert pauses.run(pauses.PARTS[part], 1.0, random.Random(7)).troubles == []


@pytest.mark.lab
def test_a_node_that_is_frozen_for_a_second_loses_no_call() -> None:
    assert pauses.run(pauses.PARTS["node"], 1.0, random.Random(7)).troubles == []


@pytest.mark.slow
def test_a_machine_that_is_frozen_for_a_second_loses_no_call(lab: Lab) -> None:
    machine = lab.machine(keys=[lab.public_key])
    try:
        assert pauses.run(pauses.PARTS["machine"], 1.0, random.Random(7), machine).troubles == []
    finally:
        machine.destroy()


@pytest.mark.slow
def test_a_keeper_that_is_stopped_several_times_keeps_its_node() -> None:
    with sky.ComputePool(slots=1, console="off") as pool:
        keeper = keeper_of(pool)
        call = nap(4.0) > pool
        for _ in range(3):
            os.kill(keeper, signal.SIGSTOP)
            time.sleep(0.6)  # longer than the keeper waits for signals at a time
            os.kill(keeper, signal.SIGCONT)
        assert call.result(60) == 4.0
        assert keeper_of(pool) == keeper


def test_a_keeper_that_is_told_to_end_ends_its_node() -> None:
    with sky.ComputePool(slots=1, console="off") as pool:
        keeper = keeper_of(pool)
        call = nap(60.0) > pool
        os.kill(keeper, signal.SIGTERM)
        with pytest.raises(sky.ConnectionLost):
            call.result(60)
        eventually(lambda: not os.path.exists(f"/proc/{keeper}"), what="the keeper's end")


def test_the_running_clock_leaves_out_gaps_between_its_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: reading)
    running = RunningClock()
    for reading in (100.5, 101.5, 161.5, 162.0):  # noqa: B007 - the clock reads it
        told = running()
    assert told == 102.0
    assert running.paused == 60.0


def test_the_running_clock_of_a_stopped_process_stands_still() -> None:
    script = """
from skypool.clock import RunningClock
import time
clock = RunningClock()
began, real = clock(), time.monotonic()
print("running", flush=True)
while time.monotonic() < real + 5:
    time.sleep(0.1)
    clock()
print(clock() - began)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(4)
        os.kill(process.pid, signal.SIGCONT)
        assert float(process.stdout.readline()) < 3
