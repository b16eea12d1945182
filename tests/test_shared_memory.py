"""Semaphores and shared memory of Python's `multiprocessing` do not stay on a node when the processes are killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

import skypool as sky
from tests.conftest import eventually

SHARED = Path("/dev/shm")


def made(names: str) -> None:
    """Make a semaphore and shared memory, as the workers of a data loader do, and write their names to a file."""
    from multiprocessing import get_context
    from multiprocessing.shared_memory import SharedMemory

    lock = get_context("spawn").Lock()
    memory = SharedMemory(create=True, size=4096)
    text = f"sem.{lock._semlock.name.strip('/')}\n{memory.name}\n"  # type: ignore[attr-defined]
    part = Path(f"{names}.part")
    part.write_text(text)
    part.rename(names)
    globals()["kept"] = lock, memory  # until the process ends


@sky.compute
def forever(names: str) -> None:
    """Make them, and never return. SIGTERM and a cancellation are ignored, so that the process must be killed."""
    made(names)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        try:
            time.sleep(60)
        except BaseException:  # noqa: BLE001 - also what asks this call to end
            continue


@sky.compute
def die(names: str) -> None:
    made(names)
    os.kill(os.getpid(), signal.SIGKILL)


def there(names: Path) -> list[bool]:
    """Return whether each of what was made is still in /dev/shm."""
    return [(SHARED / name).exists() for name in names.read_text().split()]


@pytest.fixture
def names(tmp_path: Path) -> Path:
    return tmp_path / "names"


def all_removed(names: Path) -> None:
    eventually(lambda: there(names) == [False, False], 30, "removed semaphore and memory")


def test_service_that_is_killed(names: Path) -> None:
    with sky.ComputePool(console="off", slots=1) as pool:
        service = pool.service(forever(str(names)))
        eventually(names.exists, 20, "names")
        assert there(names) == [True, True]
        service.close(grace=0.1)
        all_removed(names)


def test_call_that_is_killed_after_its_time(names: Path) -> None:
    with sky.ComputePool(console="off", slots=1) as pool:
        future = forever(str(names)).with_options(timeout=1, grace=0.1) > pool
        with pytest.raises(sky.SkypoolError):
            future.result()
        all_removed(names)


def test_worker_that_dies(names: Path) -> None:
    with sky.ComputePool(console="off", slots=1) as pool:
        with pytest.raises(sky.WorkerDied):
            die(str(names)) >> pool
        all_removed(names)


def test_pool_that_ends_while_a_call_runs(names: Path) -> None:
    pool = sky.ComputePool(console="off", slots=1)
    with pytest.raises(KeyboardInterrupt), pool:
        _ = forever(str(names)) > pool
        eventually(names.exists, 20, "names")
        raise KeyboardInterrupt
    all_removed(names)


def test_agent_that_is_killed(names: Path) -> None:
    with sky.ComputePool(console="off", slots=1) as pool:
        agent = sky.compute(os.getppid)() >> pool
        future = forever(str(names)) > pool
        eventually(names.exists, 20, "names")
        os.kill(agent, signal.SIGKILL)
        with pytest.raises(sky.SkypoolError):
            future.result()
        all_removed(names)
