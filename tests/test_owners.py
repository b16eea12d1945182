"""A pool has one owner: one that was taken over while it was suspended does not get its nodes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import skypool as sky
from skypool.rental.ledger import Ledger
from tests.conftest import eventually, nodes
from tests.work import add

FIRST = """
    import sys, time
    import skypool as sky
    from tests.work import add
    with sky.ComputePool(name="moved", nodes=2, slots=1, lease="60s", liveness=5, console="off") as pool:
        assert list(pool.map(add, range(4))) == [1, 2, 3, 4]
        pool.events.listen(lambda event: print(type(event).__name__, getattr(event, "text", ""), flush=True))
        print("ready", flush=True)
        try:
            while True:
                pool.submit(add, 1).result()
                time.sleep(0.1)
        except sky.SkypoolError as e:
            print(f"{type(e).__name__}: {e}", flush=True)
    print("over", flush=True)
"""
SECOND = """
    import time
    import skypool as sky
    from tests.work import add
    pool = sky.ComputePool.attach("moved", sky.Local(), console="off", liveness=5)
    assert list(pool.map(add, range(4))) == [1, 2, 3, 4]
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def started() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def owner(stack: ExitStack, program: str, state: Path) -> subprocess.Popen[str]:
    """Start an owner with a ledger of its own, as one on another computer has it, and wait until it works."""
    env = {**os.environ, "XDG_STATE_HOME": str(state)}
    argv = [sys.executable, "-c", textwrap.dedent(program)]
    process = stack.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=env))
    stack.callback(process.kill)
    assert process.stdout is not None
    while (line := process.stdout.readline()) != "ready\n":
        assert line
    return process


def taken_over(stack: ExitStack, program: str, state: Path) -> subprocess.Popen[str]:
    """Start an owner that takes the pool over, as soon as the nodes allow it."""
    found: list[subprocess.Popen[str]] = []

    def works() -> bool:
        try:
            found.append(owner(stack, program, state))
        except AssertionError:
            return False
        return True

    eventually(works, 60, "the second owner")
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("second_is_killed", [False, True])
def test_an_owner_that_wakes_up_gives_the_pool_to_the_one_that_took_it_over(
    started: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second_is_killed: bool
) -> None:
    first = owner(started, FIRST, tmp_path / "a")
    there = nodes("moved")
    assert len(there) == 2
    first.send_signal(signal.SIGSTOP)
    second = taken_over(started, SECOND, tmp_path / "b")
    if second_is_killed:  # nobody is connected, and still it is not the first one's pool
        second.kill()
        second.wait()
    first.send_signal(signal.SIGCONT)
    said, _ = first.communicate(timeout=60)
    assert first.returncode == 0
    assert "TakenOver: " in said
    assert "has a new owner: another process has taken the pool over with ComputePool.attach" in said
    assert said.count("this process gives the pool up, and leaves its machines to the new owner") == 1
    assert said.endswith("over\n")
    assert nodes("moved") == there
    if not second_is_killed:
        assert second.poll() is None
        second.kill()
        second.wait()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "c"))
    third: list[sky.ComputePool] = []

    def attached() -> bool:
        try:
            third.append(sky.ComputePool.attach("moved", sky.Local(), console="off"))
        except sky.ConnectionLost as e:
            assert "is used by another client" in str(e)
            return False
        return True

    eventually(attached, 60, "the third owner")
    with third[0] as pool:
        assert list(pool.map(add, range(4))) == [1, 2, 3, 4]
    assert nodes("moved") == []


def test_an_owner_that_reads_in_the_ledger_that_it_was_replaced_ends_nothing(tmp_path: Path) -> None:
    pool = sky.ComputePool(name="replaced", lease="3s", slots=1, console="off").start()
    engine = pool._begun
    assert engine is not None
    there = nodes("replaced")
    ledger = Ledger.here()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
        ledger._note(("UPDATE pools SET pid = ? WHERE session = ?", (other.pid, engine.rental.session)))
        with pytest.raises(sky.SkypoolError, match=rf"was taken over by process {other.pid} on .* go on there") as e:
            eventually(lambda: pool.submit(add, 1).result(60) is None, 30, "the end of the pool")
        assert type(e.value).__name__ == "TakenOver"
        pool.stop()
        assert nodes("replaced") == there
        record = ledger.record(engine.rental.session)
        assert record is not None
        assert (record.ended, record.client.pid) == (None, other.pid)
        other.kill()
    with sky.ComputePool.attach("replaced", console="off") as mine:
        assert mine.submit(add, 1).result() == 2
    assert nodes("replaced") == []
