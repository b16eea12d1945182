"""What a call has started ends with the call, wherever it has gone, except for what libraries keep for later calls."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import skypool as sky
from tests.conftest import eventually


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(name="leaving", slots=1, console="off", grace=0.3) as made:
        yield made


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def pid_in(file: Path) -> int:
    return int(file.read_text() or 0) if file.exists() else 0


SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]
DEAF = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(1000)",
]


def child() -> int:
    return subprocess.Popen(SLEEP).pid


def session() -> int:
    return subprocess.Popen(SLEEP, start_new_session=True).pid


def deaf() -> int:
    started = subprocess.Popen(DEAF, start_new_session=True, stdout=subprocess.PIPE)
    assert started.stdout is not None
    started.stdout.readline()
    return started.pid


def stopped() -> int:
    pid = session()
    os.kill(pid, signal.SIGSTOP)
    return pid


def daemon() -> int:
    """Start a process as daemons start: forked twice, in a session of its own, without files and environment."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(write, str(os.getpid()).encode())
            os.closerange(0, 64)
            ctypes.CDLL(None).clearenv()
            time.sleep(1000)
        os._exit(0)
    os.wait()
    return int(os.read(read, 20))


WAYS = {each.__name__: each for each in (child, session, deaf, stopped, daemon)}


@sky.compute
def leave(way: str, end: str, file: str) -> int:
    """Leave a process and end in some way. Its pid is in the file."""
    pid = WAYS[way]()
    Path(file).write_text(str(pid))
    if end == "raise":
        raise ValueError("and then it failed")
    if end == "hang":
        time.sleep(1000)
    if end == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "exit":
        os._exit(0)
    return os.getpid()


@pytest.mark.parametrize("procs", [None, 1], ids=["call", "gang"])
@pytest.mark.parametrize("way", WAYS)
def test_no_process_of_a_call_survives_it(pool: sky.ComputePool, way: str, procs: int | None, tmp_path: Path) -> None:
    """A call returns, raises, is cancelled, takes too long, or its worker dies: what it has started is gone then."""
    for end in ("return", "raise", "die", "exit", "cancel", "timeout"):
        file = tmp_path / end
        call = leave(way, "hang" if end in ("cancel", "timeout") else end, str(file)).with_options(procs=procs)
        future = pool.send(call.with_options(timeout=1.5 if end == "timeout" else None))
        if end == "cancel":
            eventually(partial(pid_in, file), 30, "the process")
            future.cancel()
        else:
            error = future.exception(60)
            assert (type(error).__name__, end) in {
                ("NoneType", "return"), ("ValueError", "raise"), ("WorkerDied", "die"), ("WorkerDied", "exit"),
                ("CallTimeout", "timeout"),
            }  # fmt: skip
        pid = pid_in(file)
        if end == "cancel" or procs:  # its end is told as soon as it is known
            eventually(partial(is_gone, pid), 30, "the end of the process")
        assert is_gone(pid), end


def test_a_worker_that_had_processes_is_replaced_and_others_are_kept(pool: sky.ComputePool, tmp_path: Path) -> None:
    pid = sky.compute(os.getpid)() >> pool
    assert sky.compute(subprocess.call)(["true"]) >> pool == 0
    assert sky.compute(os.getpid)() >> pool == pid
    assert leave("session", "return", str(tmp_path / "pid")) >> pool == pid
    assert sky.compute(os.getpid)() >> pool != pid


kept: object = None


@sky.compute
def share() -> tuple[int, list[str]]:
    """Use what multiprocessing has a helper process for, and keep it, as a data loader may."""
    import multiprocessing

    global kept
    kept = multiprocessing.get_context("spawn").Lock()
    return os.getpid(), [each for each in os.listdir("/dev/shm") if each.startswith("sem.mp-")]


def test_what_multiprocessing_keeps_for_later_calls_stays(pool: sky.ComputePool) -> None:
    (pid, _), (again, _) = share() >> pool, share() >> pool
    assert pid == again


@sky.compute
def parallel() -> tuple[int, list[int]]:
    from joblib import Parallel, delayed

    pids: Any = Parallel(n_jobs=2, backend="loky")(delayed(os.getpid)() for _ in range(20))
    return os.getpid(), pids


def test_joblib_in_a_call_leaves_neither_processes_nor_semaphores() -> None:
    before = set(os.listdir("/dev/shm"))
    with sky.ComputePool(slots=1, console="off") as mine:
        workers = set()
        for _ in range(3):
            worker, processes = parallel() >> mine
            assert worker not in processes
            assert all(map(is_gone, processes))
            workers.add(worker)
        assert len(workers) == 1
    eventually(lambda: set(os.listdir("/dev/shm")) <= before, 30, "the end of the semaphores")


def ended_children(rounds: int) -> list[int | None]:
    """Start processes that wait for a semaphore, and end each within 3 ms. Return their exit codes."""
    context = multiprocessing.get_context("fork")
    codes = []
    for n in range(rounds):
        waiting = context.Process(target=context.Semaphore(0).acquire)
        waiting.start()
        busy_until = time.perf_counter() + 0.003 * n / rounds
        while time.perf_counter() < busy_until:
            pass
        waiting.terminate()
        waiting.join(2)
        codes.append(waiting.exitcode)
        waiting.kill()
        waiting.join()
    return codes


def test_sigterm_ends_a_forked_child_whatever_it_waits_for(pool: sky.ComputePool) -> None:
    assert sky.compute(ended_children)(200) >> pool == [-signal.SIGTERM] * 200


def test_a_forked_child_keeps_the_handler_of_the_call_and_its_signal_mask(pool: sky.ComputePool) -> None:
    def work() -> tuple[int | None, bool]:
        def end(*_: object) -> None:
            os._exit(7)

        signal.signal(signal.SIGTERM, end)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        child.terminate()
        child.join(10)
        code = child.exitcode
        child.kill()
        return code, signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before

    assert sky.compute(work)() >> pool == (7, True)


def test_a_handler_in_a_forked_child_can_call_the_one_that_it_replaced(pool: sky.ComputePool) -> None:
    def work() -> int | None:
        before: Any = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda number, stack: before(number, stack))
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        time.sleep(0.2)
        child.terminate()
        child.join(10)
        code = child.exitcode
        child.kill()
        return code

    assert sky.compute(work)() >> pool == 128 + signal.SIGTERM
