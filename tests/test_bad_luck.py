"""What goes wrong, and what the user is told: processes that die, stop, flood, fill disks; links that break."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import skypool as sky
from skypool import events
from skypool.agent import agent
from skypool.calls.roster import Roster
from skypool.link import link
from skypool.shipping import package_zip
from tests.conftest import children, descendants, eventually, home, nodes, processes_of
from tests.work import add, nap


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(slots=2, console="off", grace=1.0) as shared:
        yield shared


def keeper_of(pool: sky.ComputePool, node: int = 0) -> int:
    """The keeper's pid of one node."""
    import json

    (folder,) = home().glob(f"{pool.name}.{node}.*")
    return int(json.loads((folder / "keeper.json").read_text())["pid"])


def agent_of(pool: sky.ComputePool, node: int = 0) -> int:
    """The agent is the keeper's only child."""
    (agent,) = children(keeper_of(pool, node))
    return agent


def holders() -> list[int]:
    """The transports' processes: children of this one that run the loader."""
    return [pid for pid in children(os.getpid()) if b"take(8)" in _command(pid)]


def is_alive(pid: int) -> bool:
    """False also for a process that has ended and was not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


# --- exceptions ----------------------------------------------------------------------------------------------


class Custom(Exception):
    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(f"{code}: {why}")
        self.code, self.why = code, why


def test_an_exception_keeps_its_type_cause_notes_and_remote_traceback(pool: sky.ComputePool) -> None:
    @sky.compute
    def fail() -> None:
        try:
            {"a": 1}["missing"]
        except KeyError as e:
            error = Custom(7, why="no key")
            error.add_note("look here")
            raise error from e

    with pytest.raises(Custom) as caught:
        fail() >> pool
    error = caught.value
    assert (error.code, error.why, error.__notes__) == (7, "no key", ["look here"])
    assert isinstance(error.__cause__, KeyError)
    shown = "".join(traceback.format_exception(error))
    assert "error = Custom(7" in shown or "in fail" in shown
    assert "fail() >> pool" in shown


def leaves(status: Any) -> None:
    sys.exit(status)


async def leaves_while_it_waits(status: Any) -> None:
    await asyncio.sleep(0)
    sys.exit(status)


def leaves_in_the_middle(status: Any) -> Iterator[int]:
    yield 1
    sys.exit(status)


@pytest.mark.parametrize("status", [0, None, False])
def test_a_function_that_exits_with_success_returns_none(pool: sky.ComputePool, status: object) -> None:
    for function in (leaves, leaves_while_it_waits):
        call: Any = sky.compute(function)(status)
        assert call >> pool is None
        assert call.with_options(procs=2) @ pool == [None, None]
        assert call.with_options(output="capture") >> pool == sky.Captured(None, "")
    assert list(sky.compute(leaves_in_the_middle)(status) >> pool) == [1]


@pytest.mark.parametrize(("status", "told"), [(3, "3"), (True, "True"), ("no data", "no data")])
def test_a_function_that_exits_with_another_status_fails_with_it(pool: sky.ComputePool, status: Any, told: str) -> None:
    for function in (leaves, leaves_while_it_waits):
        call: Any = sky.compute(function)(status)
        with pytest.raises(sky.RemoteError, match=f"SystemExit: {told}"):
            call >> pool
    with pytest.raises(sky.RemoteError, match=f"SystemExit: {told}"):
        list(sky.compute(leaves_in_the_middle)(status) >> pool)


def test_sys_exit_and_keyboard_interrupt_there_do_not_end_the_program_here(pool: sky.ComputePool) -> None:
    @sky.compute
    def leave() -> None:
        sys.exit(3)

    @sky.compute
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(sky.RemoteError) as caught:
        leave() >> pool
    assert (caught.value.type_name, caught.value.text) == ("SystemExit", "3")
    with pytest.raises(sky.RemoteError, match="KeyboardInterrupt"):
        interrupt() >> pool


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text today")


def test_an_exception_whose_text_cannot_be_had_is_raised_in_its_turn_and_harms_no_other(pool: sky.ComputePool) -> None:
    @sky.compute
    def some_fail(n: int) -> int:
        if n % 2:
            raise Unspeakable(n)
        return n

    results = pool.map(some_fail, range(20))
    assert next(results) == 0
    with pytest.raises(Unspeakable) as caught:
        next(results)
    assert caught.value.args == (1,)
    futures = [some_fail(n) > pool for n in range(20)]
    assert [type(future.exception(timeout=60)) for future in futures] == [type(None), Unspeakable] * 10


def test_an_exception_class_that_exists_only_there_is_told_by_name_and_text(pool: sky.ComputePool) -> None:
    @sky.compute
    def fail() -> None:
        import sys
        import types

        module = types.ModuleType("only_there")
        exec("class Odd(Exception): pass", module.__dict__)
        sys.modules["only_there"] = module
        raise module.Odd("very odd")

    with pytest.raises(sky.RemoteError, match=r"only_there\.Odd: very odd"):
        fail() >> pool


def test_endless_recursion_comes_back_as_recursion_error(pool: sky.ComputePool) -> None:
    @sky.compute
    def down(n: int) -> int:
        def go(n: int) -> int:
            return go(n + 1)

        return go(n)

    with pytest.raises(RecursionError):
        down(0) >> pool
    assert add(1) >> pool == 2


@pytest.mark.slow
def test_what_never_comes_back_from_c_ends_by_its_timeout_and_by_a_cancel(pool: sky.ComputePool) -> None:
    @sky.compute(timeout=1.0, grace=0.5)
    def never() -> None:
        import collections
        import itertools

        collections.deque(itertools.repeat(0), maxlen=0)  # looks at no signal

    with pytest.raises(sky.CallTimeout, match="never ran longer than its timeout"):
        never() >> pool
    future = pool.submit(never.with_options(timeout=None))
    time.sleep(1)  # it runs by then; a call that was cancelled before that ends as well
    assert future.cancel()
    assert future.wait_stopped(30)
    assert [add(1) >> pool for _ in range(8)] == [2] * 8


def test_what_cannot_travel_is_named_at_the_callers_line(pool: sky.ComputePool) -> None:
    lock = threading.Lock()

    @sky.compute
    def locked() -> bool:
        return lock.locked()

    with pytest.raises(sky.PickleError, match=r"locked\.<closure>\.lock") as caught:
        locked() >> pool
    assert any("locked() >> pool" in (f.line or "") for f in traceback.extract_tb(caught.value.__traceback__))
    with open(__file__) as file, pytest.raises(sky.PickleError, match=r"add\(a=…\)"):
        add(file) >> pool  # type: ignore[arg-type]  # the point

    @sky.compute
    def give_file() -> Any:
        return {"log": open(os.devnull)}

    with pytest.raises(sky.PickleError, match=r"the result of .*give_file\['log'\]"):
        give_file() >> pool
    assert add(1) >> pool == 2


def test_several_failures_of_a_broadcast_are_a_group_and_one_is_itself() -> None:
    with sky.ComputePool(nodes=2, slots=1, console="off") as mine:

        @sky.compute
        def fail(on: int) -> int:
            if sky.instance_info().node >= on:
                raise ValueError(f"node {sky.instance_info().node}")
            return 1

        with pytest.raises(ValueError, match="node 1"):
            fail(1) @ mine
        with pytest.raises(ExceptionGroup, match="2 of 2 calls failed"):
            fail.with_options(independent=True)(0) @ mine


def test_a_result_that_cannot_be_rebuilt_here_says_so(pool: sky.ComputePool) -> None:
    @sky.compute
    def odd() -> Any:
        import sys
        import types

        module = types.ModuleType("only_there_too")
        exec("class Thing:\n pass", module.__dict__)
        sys.modules["only_there_too"] = module
        return module.Thing()

    with pytest.raises(sky.PickleError, match="cannot be unpickled here: ModuleNotFoundError"):
        odd() >> pool


# --- workers that die ----------------------------------------------------------------------------------------


def test_a_worker_that_dies_fails_its_call_with_how_and_its_last_lines(pool: sky.ComputePool) -> None:
    @sky.compute
    def die(how: str) -> None:
        print("one last line")
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, how))

    with pytest.raises(sky.WorkerDied) as caught:
        die("exit") >> pool
    assert (caught.value.exitcode, caught.value.signal) == (3, None)
    for name in ("SIGSEGV", "SIGKILL", "SIGABRT"):
        with pytest.raises(sky.WorkerDied, match=f"killed by {name}") as caught:
            die(name) >> pool
        assert caught.value.signal == getattr(signal, name)
        assert "one last line" in caught.value.tail
    assert "memory" in str(_died(pool, die("SIGKILL")))
    assert list(pool.map(add, range(50))) == list(range(1, 51))


def test_all_that_a_worker_printed_before_it_died_is_shown(
    pool: sky.ComputePool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The agent reads so many packets of a worker at a time; here it finds three times as many, and the worker dead."""

    @sky.compute
    def talk_and_die(lines: int) -> None:
        agent = os.getppid()
        os.kill(agent, signal.SIGSTOP)
        subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -CONT {agent}"])
        for n in range(lines):
            print(f"<{n}>", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    many = 3 * agent._PACKETS_AT_ONCE
    error = _died(pool, talk_and_die(many))
    shown = capsys.readouterr().out
    assert [n for n in range(many) if f"<{n}>" not in shown] == []
    assert f"<{many - 1}>" in error.tail


def _died(pool: sky.ComputePool, call: Any) -> sky.WorkerDied:
    with pytest.raises(sky.WorkerDied) as caught:
        call >> pool
    return caught.value


def test_only_the_call_of_the_dead_worker_fails(pool: sky.ComputePool) -> None:
    @sky.compute
    def fragile(n: int) -> int:
        if n == 37:
            os._exit(1)
        return n

    futures = [fragile(n) > pool for n in range(200)]
    failed = [n for n, f in enumerate(futures) if f.exception(timeout=60) is not None]
    assert failed == [37]


def test_a_call_is_run_again_only_if_asked_and_it_is_told(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute
    def third_time_lucky(path: str) -> int:
        with open(path, "a") as file:
            file.write("x")
        if os.path.getsize(path) < 3:
            os._exit(1)
        return os.path.getsize(path)

    once = tmp_path / "once"
    with pytest.raises(sky.WorkerDied):
        third_time_lucky(str(once)) >> pool
    assert once.read_text() == "x"
    told: list[events.CallRetried] = []
    hush = pool.events.listen(lambda e: told.append(e) if isinstance(e, events.CallRetried) else None)
    again = tmp_path / "again"
    assert third_time_lucky(str(again)).with_options(retries=2) >> pool == 3
    hush()
    assert [e.attempt for e in told] == [2, 3]


def test_exceptions_of_its_own_are_retried_when_retry_on_names_them(pool: sky.ComputePool, tmp_path: Path) -> None:
    @sky.compute(retries=3, retry_on=OSError)
    def flaky(path: str) -> int:
        with open(path, "a") as file:
            file.write("x")
        if os.path.getsize(path) < 2:
            raise ConnectionResetError("try again")
        return os.path.getsize(path)

    assert flaky(str(tmp_path / "n")) >> pool == 2


def test_a_stopped_worker_is_noticed_within_liveness() -> None:
    with sky.ComputePool(slots=2, console="off", liveness=4) as mine:

        @sky.compute
        def stop_myself() -> None:
            os.kill(os.getpid(), signal.SIGSTOP)

        began = time.monotonic()
        with pytest.raises(sky.ConnectionLost, match=r"was stopped .* longer than liveness=4 s"):
            stop_myself() >> mine
        assert time.monotonic() - began < 30
        assert add(1) >> mine == 2


# --- what a call leaves behind, and when it has ended --------------------------------------------------------


@sky.compute
def hold(started: str, ended: str) -> Iterator[int]:
    """Take a while to clean up."""
    try:
        Path(started).touch()
        yield 1
        time.sleep(60)
    finally:
        time.sleep(0.5)
        Path(ended).touch()


@sky.compute
def hold_on(started: str, ended: str) -> None:
    try:
        Path(started).touch()
        time.sleep(60)
    finally:
        time.sleep(0.5)
        Path(ended).touch()


def test_a_cancelled_call_tells_when_its_finally_is_through(tmp_path: Path) -> None:
    with sky.ComputePool(slots=1, console="off") as mine:
        future = hold_on.with_options(grace=60)(f"{tmp_path}/started", f"{tmp_path}/ended") > mine
        waiting = hold_on(f"{tmp_path}/never", f"{tmp_path}/never") > mine
        eventually((tmp_path / "started").exists)
        assert not future.wait_stopped(0.01)
        assert waiting.cancel()
        assert waiting.wait_stopped(60)  # it never begins
        assert future.cancel()
        assert future.wait_stopped(60)
        assert (tmp_path / "ended").exists()
        ended = add(1) > mine
        assert ended.result(60) == 2
        assert ended.wait_stopped(60)
    assert not (tmp_path / "never").exists()


def test_a_closed_stream_tells_when_its_finally_is_through(tmp_path: Path) -> None:
    with sky.ComputePool(slots=1, console="off") as mine:
        patient = hold.with_options(grace=60)  # the default of 5 s bounds the cleanup, and a machine may stall
        stream: Any = patient(f"{tmp_path}/started", f"{tmp_path}/ended") >> mine
        assert next(stream) == 1
        began = time.monotonic()
        stream.close()
        assert stream.wait_stopped(60)
        assert (tmp_path / "ended").exists(), f"stopped after {time.monotonic() - began:.3f} s"


@sky.compute(grace=60)
def hold_unheard(started: str, ended: str) -> None:
    """Sleep in the main thread while another thread gets all SIGTERM, which does not end the sleep."""
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        Path(started).touch()
        time.sleep(600)
    finally:
        Path(ended).touch()


class Garbage:
    """Touches a file and computes for two seconds when it is collected."""

    def __init__(self, started: str) -> None:
        self.started = started

    def __del__(self) -> None:
        until = time.monotonic() + 2
        Path(self.started).touch()
        while time.monotonic() < until:
            pass


@sky.compute(grace=60)
def hold_garbage(started: str, ended: str) -> None:
    try:
        Garbage(started)
        time.sleep(600)
    finally:
        Path(ended).touch()


@pytest.mark.parametrize(
    "held",
    [
        pytest.param(hold_unheard, id="it does not end a sleep", marks=pytest.mark.slow),
        pytest.param(hold_garbage, id="it arrives in __del__"),
    ],
)
def test_a_stop_is_heard_all_the_same(held: Any, tmp_path: Path) -> None:
    with sky.ComputePool(slots=1, console="off") as mine:
        future = held(f"{tmp_path}/started", f"{tmp_path}/ended") > mine
        eventually((tmp_path / "started").exists)
        assert future.cancel()
        assert future.wait_stopped(30), "its grace is longer"
        assert (tmp_path / "ended").exists()


def test_a_call_that_is_lost_after_it_was_cancelled_has_stopped() -> None:
    with sky.ComputePool(slots=1, console="off") as mine:
        future = nap(60) > mine
        eventually(lambda: processes_busy(mine))
        agent = agent_of(mine)
        os.kill(agent, signal.SIGSTOP)
        assert future.cancel()
        assert not future.wait_stopped(0.2)
        os.kill(agent, signal.SIGKILL)
        assert future.wait_stopped(60)


@sky.compute
def initialise() -> int:
    """As `torch.distributed.init_process_group` does: once in a process."""
    import decimal

    if getattr(decimal, "group", None):
        raise RuntimeError("trying to initialize the default process group twice!")
    decimal.group = True  # type: ignore[attr-defined]
    raise ValueError("and then the training failed")


def test_a_fresh_call_finds_no_state_of_another_and_leaves_none() -> None:
    with sky.ComputePool(slots=1, console="off") as mine:
        for _ in range(2):
            with pytest.raises(ValueError, match="training failed"):
                initialise.with_options(fresh=True)() >> mine
        with pytest.raises(ValueError, match="training failed"):
            initialise() >> mine
        with pytest.raises(RuntimeError, match="twice"):
            initialise() >> mine
        with pytest.raises(ValueError, match="training failed"):
            initialise.with_options(fresh=True)() >> mine


@sky.compute
def set_up(name: str, fails: bool) -> int:
    """Initialise a stand-in for a library that can be initialised once in a process, and perhaps fail."""
    module = sys.modules.setdefault(name, ModuleType(name))
    if getattr(module, "is_initialized", bool)():
        raise RuntimeError("trying to initialize the default process group twice!")
    module.is_initialized = lambda: True  # type: ignore[attr-defined]
    if fails:
        raise ValueError("and then the training failed")
    return os.getpid()


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torch.distributed", "jax.distributed"])
def test_a_worker_is_replaced_after_a_failed_call_that_left_a_library_initialised(library: str) -> None:
    with sky.ComputePool(slots=1, console="off") as mine:
        for _ in range(2):
            with pytest.raises(ValueError, match="training failed"):
                set_up(library, True) >> mine
        pid = set_up(library, False) >> mine
        assert sky.compute(os.getpid)() >> mine == pid  # a call that returned may leave it for the next one
        with pytest.raises(RuntimeError, match="twice"):
            set_up(library, False) >> mine
        assert set_up(library, False) >> mine != pid


def test_every_fresh_call_has_a_process_of_its_own() -> None:
    with sky.ComputePool(slots=2, console="off") as mine:
        pid = sky.compute(fresh=True)(lambda _: os.getpid())
        pids = list(mine.map(pid, range(20)))
        assert len(set(pids)) == 20
        assert list(mine.map(add, range(100))) == list(range(1, 101))


@pytest.mark.parametrize("together", [1, 50])
def test_a_worker_whose_modules_were_removed_is_replaced(together: int) -> None:
    def vandalise(n: int) -> int:
        if n == 0:
            for name in list(sys.modules):
                if name.partition(".")[0] in ("json", "skypool", "pickle", "threading"):
                    del sys.modules[name]
        return n

    def replace_module(n: int) -> int:
        if n == 0:
            sys.modules["json"] = None  # type: ignore[assignment]
            raise ValueError("vandal")
        import json

        return int(json.loads(str(n)))

    with sky.ComputePool(slots=1, console="off") as mine:
        assert list(mine.map(vandalise, range(together), chunksize=together)) == list(range(together))
        futures = [mine.submit(replace_module, n) for n in range(together + 1)]
        assert isinstance(futures[0].exception(60), ValueError)
        assert [future.result(60) for future in futures[1:]] == list(range(1, together + 1))


def test_a_failed_call_that_harms_nobody_keeps_its_worker(pool: sky.ComputePool) -> None:
    def fail(n: int) -> None:
        raise ValueError(os.getpid())

    pids = {future.exception(60).args[0] for future in [pool.submit(fail, n) for n in range(50)]}  # type: ignore[union-attr]
    assert len(pids) <= 2


def test_a_function_that_forks_and_returns_twice_answers_once(pool: sky.ComputePool) -> None:
    @sky.compute
    def fork() -> int:
        if os.fork() == 0:
            return 666
        return 1

    assert [fork() >> pool for _ in range(5)] == [1] * 5
    assert list(pool.map(add, range(20))) == list(range(1, 21))


def test_threads_and_multiprocessing_work_inside_a_function(pool: sky.ComputePool) -> None:
    @sky.compute
    def nested() -> list[int]:
        from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

        with ThreadPoolExecutor(2) as threads, ProcessPoolExecutor(2) as processes:
            return [*threads.map(int, "12"), *processes.map(int, "34")]

    assert nested() >> pool == [1, 2, 3, 4]


def test_what_a_call_has_started_ends_when_the_agent_is_killed(tmp_path: Path) -> None:
    @sky.compute
    def start(file: str) -> None:
        Path(file).write_text(str(subprocess.Popen(["sleep", "987"], start_new_session=True).pid))
        time.sleep(987)

    with sky.ComputePool(slots=1, console="off") as mine:
        future = start(str(tmp_path / "pid")) > mine
        eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), what="the process")
        os.kill(agent_of(mine), signal.SIGKILL)
        assert isinstance(future.exception(60), sky.ConnectionLost)
        pid = int((tmp_path / "pid").read_text())
        eventually(lambda: not is_alive(pid), what="the end of the process")


# --- agents and links ----------------------------------------------------------------------------------------


def test_a_killed_agent_loses_its_calls_by_name_and_is_replaced() -> None:
    with sky.ComputePool(slots=1, console="off") as mine:
        future = nap(60) > mine
        eventually(lambda: processes_busy(mine))
        os.kill(agent_of(mine), signal.SIGKILL)
        with pytest.raises(sky.ConnectionLost, match=r"nap was lost with node 0") as caught:
            future.result(timeout=60)
        assert caught.value.node == 0
        eventually(lambda: "ready" in mine.nodes.values(), what="a new node")
        assert add(1) >> mine == 2


def test_a_part_of_the_engine_that_fails_ends_the_pool_and_no_call_waits_forever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with sky.ComputePool(slots=1, console="off") as mine:
        engine: Any = mine._engine
        future = nap(60) > mine
        monkeypatch.setattr(engine.departures, "lost", lambda node, error: {}[node])
        os.kill(agent_of(mine), signal.SIGKILL)
        with pytest.raises(sky.SkypoolError, match=r"skypool failed: KeyError: 0; this is a bug of skypool") as caught:
            future.result(timeout=60)
        assert isinstance(caught.value.__cause__, KeyError)
        eventually(lambda: mine.phase == "ended")


def test_a_callback_of_the_engine_that_fails_ends_the_pool_and_no_call_waits_forever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with sky.ComputePool(slots=1, console="off") as mine:
        engine: Any = mine._engine
        future = nap(60) > mine
        monkeypatch.setattr(engine.departures, "noticed", lambda node, at: {}[node])
        engine.departures.on_notice(0, time.time() + 60)
        with pytest.raises(sky.SkypoolError, match=r"skypool failed: KeyError: 0; this is a bug of skypool"):
            future.result(timeout=60)


def test_what_a_pool_can_do_without_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    mine = sky.ComputePool(slots=1, console="off")
    mine.events.listen(lambda e: said.append(e.text) if isinstance(e, events.Notice) else None)
    monkeypatch.setattr("skypool.pool.idle_accounting.IdleWatch._differs", lambda *_: 1 // 0)
    monkeypatch.setattr("skypool.pool.idle_accounting._EVERY", 0.1)
    with mine:
        eventually(lambda: any("the record of idle time ended, and the pool goes on" in each for each in said))
        assert add(1) >> mine == 2


def processes_busy(pool: sky.ComputePool) -> bool:
    engine: Any = pool._engine
    return any(lane.underway for each in engine.dispatch.node_queues.values() for lane in each.lanes)


def test_calls_of_a_killed_node_run_elsewhere_if_retries_allow() -> None:
    with sky.ComputePool(nodes=2, slots=1, console="off") as mine:
        futures = [nap(0.5).with_options(retries=1) > mine for _ in range(6)]
        time.sleep(0.2)
        os.kill(agent_of(mine, 0), signal.SIGKILL)
        assert [f.result(timeout=60) for f in futures] == [0.5] * 6


@pytest.mark.parametrize(("says", "ends"), [("", ""), ("echo a hint >&2; ", "; its end .* printed: a hint")])
def test_a_node_that_takes_too_long_to_answer_is_told_with_what_it_printed(
    monkeypatch: pytest.MonkeyPatch, says: str, ends: str
) -> None:
    monkeypatch.setattr(package_zip, "agent_starter", lambda python, home: f"{says}cat >/dev/null")
    monkeypatch.setattr(link, "_START", 0.5)
    pool = sky.ComputePool(slots=1, console="off", liveness=1)
    with pytest.raises(sky.ConnectionLost, match=f"cannot be reached: the node did not answer within 1 s{ends}$"):
        pool.start()


def test_a_node_may_start_more_slowly_than_its_later_silence_is_borne(monkeypatch: pytest.MonkeyPatch) -> None:
    starter = package_zip.agent_starter
    monkeypatch.setattr(package_zip, "agent_starter", lambda python, home: f"sleep 6; {starter(python, home)}")
    with sky.ComputePool(slots=1, console="off", liveness=4) as mine:
        assert add(1) >> mine == 2


def test_a_stopped_agent_is_noticed_within_liveness() -> None:
    with sky.ComputePool(slots=1, console="off", liveness=4) as mine:
        add(1) >> mine
        future = nap(60) > mine
        agent = agent_of(mine)
        os.kill(agent, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(sky.ConnectionLost, match=r"silent for .* \(the limit is liveness=4 s\)"):
            future.result(timeout=60)
        assert time.monotonic() - began < 30


def test_a_node_whose_link_is_down_is_told_as_unreachable_since_its_last_sign_of_life() -> None:
    with sky.ComputePool(slots=1, console="off") as mine:
        assert dict(mine.nodes) == {0: "ready"}
        agent = agent_of(mine)
        os.kill(agent, signal.SIGSTOP)  # so that the link cannot come back
        link = mine._engine.connections.links[0]  # type: ignore[union-attr]  # it has started
        link._loop.call_soon_threadsafe(link._break, "cut by the test", link._stream)
        eventually(lambda: mine.nodes[0].startswith("unreachable since"), what="the word for a broken link")
        told = mine.nodes[0]
        hour, minute, second = map(int, told.removeprefix("unreachable since ").split(":"))
        now = time.localtime()
        ago = (now.tm_hour - hour) * 3600 + (now.tm_min - minute) * 60 + now.tm_sec - second
        assert 0 <= ago % 86400 < 60
        assert mine.nodes[0] == told
        os.kill(agent, signal.SIGCONT)
        eventually(lambda: dict(mine.nodes) == {0: "ready"}, what="the link")
        assert add(1) >> mine == 2


def test_a_link_that_breaks_comes_back_and_nothing_is_lost_or_run_twice(tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    @sky.compute
    def note(n: int, path: str) -> int:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(fd, f"{n}\n".encode())
        os.close(fd)
        time.sleep(0.005)
        return n

    @sky.compute
    def stream() -> Iterator[int]:
        for n in range(300):
            yield n
            time.sleep(0.005)

    with sky.ComputePool(slots=2, console="off", liveness=20) as mine:
        heard: list[str] = []
        mine.events.listen(lambda e: heard.append(type(e).__name__))
        items = stream() >> mine
        futures = [note(n, str(ran)) > mine for n in range(300)]
        for _ in range(4):
            time.sleep(0.2)
            for pid in holders():
                os.kill(pid, signal.SIGKILL)
            engine: Any = mine._engine
            if (broken := engine.connections.links[0]._stream) is not None:
                broken.socket.shutdown(2)
        assert [f.result(timeout=60) for f in futures] == list(range(300))
        assert list(items) == list(range(300))
        assert heard.count("LinkUp") >= 1
    lines = [int(line) for line in ran.read_text().split()]
    assert sorted(lines) == list(range(300))


def test_an_iterator_argument_survives_a_broken_link() -> None:
    @sky.compute
    def total(numbers: Iterator[int]) -> int:
        return sum(numbers)

    def slowly() -> Iterator[int]:
        for n in range(100):
            time.sleep(0.01)
            yield n

    with sky.ComputePool(slots=1, console="off", liveness=20) as mine:
        future = total(slowly()) > mine
        for _ in range(3):
            time.sleep(0.2)
            engine: Any = mine._engine
            link = engine.connections.links[0]
            link._loop.call_soon_threadsafe(link._break, "cut by the test", link._stream)
        assert future.result(timeout=60) == 4950


def test_an_item_of_an_iterator_argument_that_comes_twice_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a reconnection, when the item is on its way and is asked for again."""
    send = Roster.item

    def twice(roster: Roster, *item: Any) -> None:
        send(roster, *item)
        send(roster, *item)

    monkeypatch.setattr(Roster, "item", twice)

    @sky.compute
    def items(numbers: Iterator[int]) -> list[int]:
        return list(numbers)

    with sky.ComputePool(slots=1, console="off") as mine:
        assert items(iter(range(50))) >> mine == list(range(50))


def test_everything_of_a_node_killed_at_once_is_told_and_not_waited_for() -> None:
    with sky.ComputePool(slots=1, console="off") as mine:
        future = nap(60) > mine
        eventually(lambda: processes_busy(mine))
        keeper = keeper_of(mine)
        for pid in [keeper, *descendants(keeper)]:
            with contextlib.suppress(ProcessLookupError):  # it has noticed the death of another one
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(sky.ConnectionLost, match="nap was lost with node 0"):
            future.result(timeout=60)
        eventually(lambda: "ready" in mine.nodes.values(), what="a new node")
        assert add(1) >> mine == 2


def test_a_node_whose_keeper_is_killed_ends_itself() -> None:
    with sky.ComputePool(slots=1, console="off") as mine:
        future = nap(60) > mine
        eventually(lambda: processes_busy(mine))
        below = descendants(keeper_of(mine))
        os.kill(keeper_of(mine), signal.SIGKILL)
        with pytest.raises(sky.ConnectionLost):
            future.result(timeout=60)
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), what="the end of its processes")


def test_answers_of_broadcasts_and_calls_in_between_are_never_mixed_up() -> None:
    @sky.compute
    def tag(x: int) -> tuple[int, int]:
        return x, sky.instance_info().node

    with sky.ComputePool(nodes=2, slots=2, console="off") as mine:
        futures = {n: tag(n) > mine for n in range(1000, 1200)}
        for n in range(50):
            assert tag(n) @ mine == [(n, 0), (n, 1)]
        assert all(future.result()[0] == n for n, future in futures.items())


@pytest.mark.slow
def test_large_values_survive_a_broken_link() -> None:
    with sky.ComputePool(slots=1, console="off", liveness=20) as mine:

        @sky.compute
        def back(x: Any) -> Any:
            return x + 1

        array = np.arange(20_000_000)
        future = back(array) > mine
        for _ in range(3):
            time.sleep(0.15)
            engine: Any = mine._engine
            engine.dispatch.node_queues[0].link._loop.call_soon_threadsafe(
                engine.connections.links[0]._break, "cut by the test", engine.connections.links[0]._stream
            )
        assert np.array_equal(future.result(timeout=60), array + 1)


def test_garbage_on_the_agents_socket_closes_that_link_and_harms_nobody() -> None:
    import socket

    with sky.ComputePool(slots=1, console="off") as mine:
        add(1) >> mine
        (folder,) = home().glob(f"{mine.name}.*")
        for garbage in (
            b"GET / HTTP/1.1\r\n\r\n",
            os.urandom(500),
            b"sk\x01\x06" + b"\xff" * 12,
            b"sk\x01\x01\0\0\0\2",
        ):
            ours, theirs = socket.socketpair()
            with socket.socket(socket.AF_UNIX) as agent, ours, theirs:
                cwd = os.getcwd()
                os.chdir(folder)
                agent.connect("agent.sock")
                os.chdir(cwd)
                socket.send_fds(agent, [b"skypool"], [theirs.fileno(), theirs.fileno()])
                theirs.close()
                ours.sendall(garbage)
                ours.shutdown(socket.SHUT_WR)
                ours.settimeout(10)
                assert ours.recv(100) == b""
        assert add(1) >> mine == 2
        assert "not a message of skypool" in (folder / "agent.log").read_text()


def test_the_agents_socket_is_the_users_alone() -> None:
    with sky.ComputePool(slots=1, console="off") as mine:
        (folder,) = home().glob(f"{mine.name}.*")
        assert (folder / "agent.sock").stat().st_mode & 0o777 == 0o600
        assert folder.stat().st_mode & 0o077 == 0


def test_another_minor_version_of_python_is_refused_before_anything_is_sent() -> None:
    other = _other_python()
    if other is None:
        pytest.skip("this machine has no Python of another minor version")
    with pytest.raises(sky.PythonMismatch, match="Functions travel as"):
        sky.ComputePool(sky.Local(python=other), console="off").start()


def _other_python() -> str | None:
    ours = f"{sys.version_info[0]}.{sys.version_info[1]}"
    found = [*sorted(Path.home().glob(".pyenv/versions/3.*/bin/python")), Path("/usr/bin/python3")]
    for path in found:
        if path.exists():
            said = subprocess.run(
                [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True
            )
            if said.returncode == 0 and said.stdout.decode().strip() != ours:
                return str(path)
    return None


def test_a_pool_whose_interpreter_does_not_exist_says_so_and_leaves_nothing() -> None:
    with pytest.raises(
        sky.UsageError, match="python='/no/such/python' was not found on this machine; without python=, nodes use "
    ):
        sky.ComputePool(sky.Local(python="/no/such/python"), console="off").start()


# --- the client dies -----------------------------------------------------------------------------------------


def _client(body: str, **popen: Any) -> subprocess.Popen[str]:
    script = textwrap.dedent(
        """
        import os, sys, time
        import skypool as sky
        from tests.work import stay
        @sky.compute
        def nap(seconds):
            time.sleep(seconds)
            return seconds
        """
    ) + textwrap.dedent(body)
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, **popen)


def test_kill_minus_nine_of_the_client_leaves_nothing_once_the_lease_is_over() -> None:
    client = _client(
        """
        with sky.ComputePool(name="doomed", nodes=2, slots=2, lease=4, console="off") as pool:
            results = pool.map(nap, [0.05] * 10_000)
            next(results)
            print("busy", flush=True)
            list(results)
        """
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "busy\n"
    there = [int(p) for folder in nodes("doomed") for p in [_json(folder / "keeper.json")["pid"]]]
    below = [pid for keeper in there for pid in [keeper, *descendants(keeper)]]
    assert len(below) >= 2 * (1 + 1 + 2)
    client.kill()
    client.wait()
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), what="the end of the lease")
    eventually(lambda: not nodes("doomed"), what="the removal of the folders")


def _json(path: Path) -> Any:
    import json

    return json.loads(path.read_text())


@pytest.mark.slow
def test_a_frozen_agent_whose_client_is_gone_is_ended_by_its_keeper() -> None:
    client = _client(
        """
        pool = sky.ComputePool(name="frozen", slots=1, lease=3, console="off").start()
        print("ready", flush=True)
        time.sleep(60)
        """
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "ready\n"
    (folder,) = nodes("frozen")
    keeper = int(_json(folder / "keeper.json")["pid"])
    (agent,) = children(keeper)
    os.kill(agent, signal.SIGSTOP)
    client.kill()
    client.wait()
    eventually(lambda: not Path(f"/proc/{keeper}").exists(), what="the keeper's end")
    assert not folder.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_during_a_map_end_everything_within_five_seconds(number: signal.Signals) -> None:
    client = _client(
        """
        with sky.ComputePool(name="interrupted", slots=2, console="off") as pool:
            results = pool.map(nap, [0.05] * 10_000)
            next(results)
            print("busy", flush=True)
            list(results)
        """,
        stderr=subprocess.PIPE,
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "busy\n"
    began = time.monotonic()
    client.send_signal(number)
    _, said = client.communicate(timeout=60)
    assert time.monotonic() - began < 5
    assert client.returncode != 0
    assert not nodes("interrupted")
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_arrives_in_the_callback_of_a_weak_reference_is_not_lost(number: signal.Signals) -> None:
    client = _client(
        f"""
        import weakref

        class Weak:
            pass

        with sky.ComputePool(name="garbage", slots=1, console="off") as pool:
            one = Weak()
            there = weakref.ref(one, lambda _: os.kill(os.getpid(), {number:d}))
            del one
            time.sleep(60)
        """,
        stderr=subprocess.PIPE,
    )
    _, said = client.communicate(timeout=50)
    assert client.returncode == (-signal.SIGINT if number == signal.SIGINT else 128 + number), said
    assert "ignored" not in said
    assert not nodes("garbage")


def test_other_errors_in_the_callback_of_a_weak_reference_are_printed_as_always() -> None:
    client = _client(
        """
        import weakref

        class Weak:
            def __del__(self):
                sys.exit(5)

        with sky.ComputePool(name="first", slots=1, console="off"):
            pass
        earlier = sys.unraisablehook
        sys.unraisablehook = lambda lost: earlier(lost)  # as a library has it that shows more of the error
        with sky.ComputePool(name="trash", slots=1, console="off") as pool:
            one = Weak()
            there = weakref.ref(one, lambda _: 1 // 0)
            del one
        """,
        stderr=subprocess.PIPE,
    )
    _, said = client.communicate(timeout=50)
    assert client.returncode == 0
    assert said.count("Exception ignored in") == 2
    assert "ZeroDivisionError" in said
    assert "SystemExit: 5" in said


def test_a_second_ctrl_c_while_a_node_is_slow_to_end_says_no_more_than_that() -> None:
    client = _client(
        """
        with sky.ComputePool(name="slow-end", slots=1, console="plain") as pool:
            nap(0) >> pool
            print("busy", flush=True)
            stay()
        """,
        stderr=subprocess.PIPE,
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "busy\n"
    (folder,) = home().glob("slow-end.0.*")
    os.kill(int(_json(folder / "keeper.json")["pid"]), signal.SIGSTOP)
    client.send_signal(signal.SIGINT)
    time.sleep(0.5)  # it ends the node by now, or will be told not to
    client.send_signal(signal.SIGINT)
    _, said = client.communicate(timeout=60)
    assert said.endswith("KeyboardInterrupt\n"), said
    eventually(lambda: not nodes("slow-end"), 60)


def test_a_forked_child_is_refused_the_pool_of_its_parent_and_ends_nothing_of_it() -> None:
    client = _client(
        """
        pool = sky.ComputePool(name="forked", slots=1, console="plain", liveness=20).start()
        assert nap(0) >> pool == 0
        with pool:
            slow = nap(2) > pool
            child = os.fork()
            if child == 0:
                try:
                    nap(0) >> pool
                except sky.PoolClosed as e:
                    print(e, flush=True)
                sys.exit(7)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), slow.result(), nap(0) >> pool)
        """
    )
    try:
        out, _ = client.communicate(timeout=60)
    finally:
        client.kill()
    assert out.splitlines() == [
        "pool 'forked' belongs to the process that this one was forked from: send calls there, or make a new "
        "ComputePool here",
        "7 2 0",
    ]
    assert not nodes("forked")


def test_multiprocessing_inside_a_call_takes_what_the_script_defines() -> None:
    client = _client(
        """
        import dataclasses, multiprocessing
        from concurrent.futures import ProcessPoolExecutor
        @dataclasses.dataclass
        class Point:
            x: int
        def point(x):
            return Point(-x)
        @sky.compute
        def points(way):
            context = multiprocessing.get_context(way)
            with context.Pool(1) as children, ProcessPoolExecutor(1, context) as others:
                made = [*children.map(point, [1, 2]), *others.map(point, [3])]
            return [made, all(type(each) is Point for each in made)]
        with sky.ComputePool(slots=1, console="off") as pool:
            print(points("fork") >> pool, points("spawn") >> pool)
        """
    )
    out, _ = client.communicate(timeout=120)
    said = "[[Point(x=-1), Point(x=-2), Point(x=-3)], True]"
    assert out == f"{said} {said}\n"


def test_a_pool_inside_a_call_shows_what_it_does(pool: sky.ComputePool) -> None:
    @sky.compute(output="capture")
    def nested() -> Any:
        with sky.ComputePool(slots=1, name="nested") as inner:
            return inner.submit(abs, -3).result(60)

    captured: Any = nested() >> pool
    assert captured.value == 3
    assert "nested  ready after" in captured.output


def test_a_script_that_forgets_to_stop_its_pool_leaves_nothing() -> None:
    client = _client(
        """
        pool = sky.ComputePool(name="forgotten", slots=1, console="off").start()
        print(nap(0) >> pool)
        """
    )
    out, _ = client.communicate(timeout=60)
    assert out == "0\n"
    assert not nodes("forgotten")


def test_a_pool_lives_on_without_its_client_and_another_attaches_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = _client(
        f"""
        def write(name):
            open({str(tmp_path)!r} + "/" + name, "w").close()
        def wait(name):
            while not os.path.exists({str(tmp_path)!r} + "/" + name):
                time.sleep(0.01)
        @sky.compute
        def late():
            write("late began")
            wait("attached")
            return "all of it"
        @sky.compute
        def early():
            write("early began")
            wait("orphaned")
            write("early ends")
            return 0.125
        @sky.compute
        def endless():
            while True:
                yield 1
        pool = sky.ComputePool(name="orphan", slots=3, lease=20, console="off").start()
        futures = [late() > pool, early() > pool]
        items = endless() >> pool
        next(items)
        wait("late began")
        wait("early began")
        print("sent", flush=True)
        time.sleep(60)
        """
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "sent\n"
    with pytest.raises(sky.UsageError, match=rf"still run by process {client.pid} on .*; end that process before"):
        sky.ComputePool.attach("orphan", console="off")
    with monkeypatch.context() as elsewhere:  # whose ledger knows nothing of it
        elsewhere.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        with pytest.raises(sky.ConnectionLost, match="is used by another client"):
            sky.ComputePool.attach("orphan", sky.Local(), console="off")
    assert nodes("orphan"), "a refused client must not end what is not its own"
    client.kill()
    client.wait()
    (tmp_path / "orphaned").touch()
    eventually((tmp_path / "early ends").exists, what="the end of a call without a client")
    pool = sky.ComputePool.attach("orphan", console="off")
    assert [future.name for future in pool.inherited] == ["late", "early"]
    (tmp_path / "attached").touch()
    assert [future.result(timeout=60) for future in pool.inherited] == ["all of it", 0.125]
    assert add(1) >> pool == 2
    pool.stop()
    assert not nodes("orphan")


def test_attaching_to_a_pool_that_does_not_exist_says_so() -> None:
    with pytest.raises(sky.SkypoolError, match="no pool called 'nobody'"):
        sky.ComputePool.attach("nobody", console="off")


def test_max_lifetime_ends_a_pool_however_busy_its_client() -> None:
    with (  # on a busy machine, it may be over before the pool is ready
        pytest.raises(sky.SkypoolError, match="max_lifetime"),
        sky.ComputePool(slots=1, console="off", max_lifetime=1.0) as mine,
    ):
        nap(60) >> mine


# --- floods and limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("megabytes", [30, pytest.param(100, marks=pytest.mark.slow)])
def test_a_flood_of_prints_loses_no_result_and_fills_nothing(pool: sky.ComputePool, megabytes: int) -> None:
    @sky.compute
    def flood() -> str:
        line = "x" * 99
        for _ in range(megabytes * 10_000):
            print(line)
        print("an error", file=sys.stderr)
        print("the very last line")
        return "result"

    text: dict[int, list[str]] = {1: [], 2: []}
    hush = pool.events.listen(lambda e: text[e.stream].append(e.text) if isinstance(e, events.Output) else None)
    began = time.monotonic()
    assert flood() >> pool == "result"
    took = time.monotonic() - began
    told = r"\n\[skypool\] .* printed too much, too fast: ([\d,]+) bytes dropped here\n"
    eventually(lambda: {"dropped", "error"} <= set("".join(text[2]).split()) and text[1][-1].endswith("line\n"))
    hush()
    out, err = ("".join(text[stream]) for stream in (1, 2))
    assert re.sub(told, "", err).strip() == "an error"
    *lines, last, empty = out.split("\n")
    assert (set(lines), last, empty) == ({"x" * 99}, "the very last line", "")
    dropped = 100 * (megabytes * 10_000 - len(lines))
    assert sum(int(count.replace(",", "")) for count in re.findall(told, err)) == pytest.approx(dropped, abs=10)
    agent = agent_of(pool)
    assert _rss(agent) < 80 << 20, f"the agent holds {_rss(agent) >> 20} MiB"
    assert took < 60


def _rss(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


@pytest.mark.slow
def test_an_argument_of_more_than_a_gigabyte_travels_and_nobody_holds_it_twice(pool: sky.ComputePool) -> None:
    size = 1_200_000_000
    data = np.ones(size, dtype=np.uint8)

    @sky.compute
    def total(x: Any) -> int:
        return int(x.sum(dtype=np.int64))

    before, peak_before = _rss(agent_of(pool)), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert total(data) >> pool == size
    assert _rss(agent_of(pool)) - before < size // 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - peak_before < size // 2


@pytest.mark.slow
def test_a_large_argument_does_not_stop_another_calls_result(pool: sky.ComputePool) -> None:
    data = np.ones(400_000_000, dtype=np.uint8)

    @sky.compute
    def size(x: Any) -> int:
        return len(x)

    large = size(data) > pool
    quick = [add(n) >> pool for n in range(5)]
    assert quick == [1, 2, 3, 4, 5]
    assert large.result() == len(data)


@pytest.mark.needs("root")
def test_a_full_disk_in_the_spool_fails_the_call_and_not_the_pool(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", small], check=True)
    try:
        with sky.ComputePool(sky.Local(spool=str(small), spool_memory=0), slots=1, console="off") as mine:

            @sky.compute
            def size(x: Any) -> int:
                return len(x)

            @sky.compute
            def make(n: int) -> Any:
                return np.ones(n, dtype=np.uint8)

            assert size(np.ones(1_000_000, dtype=np.uint8)) >> mine == 1_000_000
            with pytest.raises(sky.SpoolFull, match=r"no room for a value of 19\.1 MiB"):
                size(np.ones(20_000_000, dtype=np.uint8)) >> mine
            with pytest.raises(sky.SpoolFull, match="no room"):
                make(20_000_000) >> mine
            assert len(make(2_000_000) >> mine) == 2_000_000
    finally:
        subprocess.run(["umount", small], check=True)


# --- the user's own modules ----------------------------------------------------------------------------------


def test_the_users_modules_travel_and_a_change_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mine_only"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "core.py").write_text("from mine_only.sub import deep\nVALUE = 1\ndef value(): return VALUE + deep()\n")
    (package / "sub.py").write_text("def deep():\n    from mine_only import lazy\n    return lazy.X\n")
    (package / "lazy.py").write_text("X = 10\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import importlib

    core = importlib.import_module("mine_only.core")
    with sky.ComputePool(slots=1, console="off") as mine:
        assert mine.submit(core.value).result() == 11
        (package / "core.py").write_text(
            "from mine_only.sub import deep\nVALUE = 2000\ndef value(): return VALUE + deep()\n"
        )
        importlib.reload(core)
        assert mine.submit(core.value).result() == 2010

        @sky.compute
        def where() -> str:
            import importlib

            return str(importlib.import_module("mine_only.core").__file__)

        assert str(tmp_path) not in where() >> mine
        shown = _error_of(mine, _fails_in(core))
        assert "core.py" in shown
    for name in [name for name in sys.modules if name.startswith("mine_only")]:
        del sys.modules[name]


def _fails_in(core: Any) -> Any:
    @sky.compute
    def fails() -> None:
        import importlib

        core: Any = importlib.import_module("mine_only.core")
        core.VALUE = None
        core.value()

    return fails()


def _error_of(pool: sky.ComputePool, call: Any) -> str:
    with pytest.raises(TypeError) as caught:
        call >> pool
    out = io.StringIO()
    traceback.print_exception(caught.value, file=out)
    return out.getvalue()


def test_a_module_that_exists_nowhere_raises_module_not_found(pool: sky.ComputePool) -> None:
    @sky.compute
    def missing() -> None:
        import importlib

        importlib.import_module("no_such_module_anywhere")

    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        missing() >> pool


def test_nothing_of_a_test_run_is_left_in_the_process_table() -> None:
    place = os.environ["XDG_RUNTIME_DIR"]
    mine = {os.getpid(), *descendants(os.getpid())}
    keepers = {keeper for folder in nodes() for keeper in [_json(folder / "keeper.json")["pid"]]}
    allowed = mine | keepers | {pid for keeper in keepers for pid in descendants(keeper)}
    assert not [pid for pid in processes_of(place) if pid not in allowed]


@pytest.mark.slow
def test_a_pool_stopped_at_any_moment_of_its_start_leaves_nothing() -> None:
    for delay in (0.0, 0.01, 0.03, 0.06, 0.09, 0.12, 0.15, 0.2, 0.3):
        mine = sky.ComputePool(nodes=2, slots=1, console="off", lease=30)
        starter = threading.Thread(target=_start_quietly, args=(mine,))
        starter.start()
        time.sleep(delay)
        engine: Any = next(iter(_living()), None)
        if engine is not None:
            from skypool.event_loop import Loop

            Loop.shared().run(engine.stop())
        starter.join(20)
        mine.stop()
        assert not nodes(mine.name), f"stopped after {delay} s"
        time.sleep(0.1)
        assert not nodes(mine.name), f"came back after it was stopped after {delay} s"


def _living() -> set[Any]:
    from skypool.pool import interpreter_exit

    living: set[Any] = set(interpreter_exit._living)
    return {engine for engine in living if engine.state.phase.value in ("launching", "ready")}


def _start_quietly(pool: sky.ComputePool) -> None:
    try:
        pool.start()
    except sky.PoolClosed:
        return
