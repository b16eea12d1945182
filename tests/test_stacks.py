"""What the processes of a pool are doing: `skypool stack`, and the errors of calls that ran too long."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import skypool as sky
from skypool import cli
from skypool.agent import stacks
from skypool.observers import pool_sockets
from skypool.observers import stacks as observed
from skypool.observers.stacks import Stacks
from tests.conftest import eventually, memory
from tests.stack_work import hang

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(name="doing", slots=1, console="off", grace=1) as made:
        eventually(lambda: "doing" in pool_sockets.pools(), 30, "the socket")
        yield made


def asked(*args: str) -> str:
    done = CliRunner().invoke(cli.build(), ["stack", "doing", *args])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.slow
def test_a_gang_that_runs_too_long_says_where_each_rank_was(pool: sky.ComputePool) -> None:
    with pytest.raises(sky.CallTimeout) as caught:
        hang("barrier").with_options(procs=3, timeout=10) >> pool
    told = caught.value.stacks
    assert all("in barrier" in told[rank] for rank in range(3))
    assert ["in late" in told[rank] for rank in range(3)] == [False, False, True]
    (note,) = [each for each in caught.value.__notes__ if "rank 2:\n" in each]  # others may tell how ranks ended
    assert 'stack_work.py", line' in note
    assert "skypool/agent" not in note


def test_a_call_that_runs_too_long_says_where_it_was(pool: sky.ComputePool) -> None:
    with pytest.raises(sky.CallTimeout) as caught:
        pool.submit(sky.compute(time.sleep).with_options(timeout=0.5), 600).result()
    assert not caught.value.stacks


HANGS = """
import sys, threading, time

def wait_for_more(seconds):
    time.sleep(seconds)

threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
open(sys.argv[1], "w").close()
wait_for_more(600)
"""


@pytest.fixture
def hangs(tmp_path: Path) -> Path:
    (tmp_path / "hangs.py").write_text(HANGS)
    return tmp_path / "hangs.py"


def test_a_program_that_runs_too_long_says_where_it_was(pool: sky.ComputePool, hangs: Path) -> None:
    started = str(hangs.with_name("started"))
    with pytest.raises(sky.CallTimeout) as caught:
        sky.cmd("python3", str(hangs), started).with_options(timeout=4) >> pool
    (note,) = caught.value.__notes__
    assert note.startswith(f"it was stopped in:\npython3 {hangs} {started}:\nFile ")
    assert note.endswith(f'File "{hangs}", line 5 in wait_for_more\nFile "{hangs}", line 9 in <module>')
    with pytest.raises(sky.CallTimeout) as caught:
        sky.cmd("sleep", "600").with_options(timeout=0.5) >> pool
    assert caught.value.__notes__[0].startswith("it was stopped in:\nsleep 600: sleeps")


SLOW_TO_ANSWER = """
import os, signal, sys, time

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # of the child, which is told to stop, too
parent = os.getpid()
if os.fork() == 0:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    while True:
        with open(f"/proc/{parent}/status") as file:
            pending = next(line for line in file if line.startswith("ShdPnd"))
        if int(pending.split()[1], 16) >> (signal.SIGRTMIN + 8) & 1:
            break
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(parent, signal.SIGCONT)
    os._exit(0)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
os.kill(parent, signal.SIGSTOP)
time.sleep(600)
"""


def test_a_program_has_time_to_say_where_it_was(pool: sky.ComputePool, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_TO_ANSWER)
    with pytest.raises(sky.CallTimeout) as caught:
        sky.cmd("python3", str(tmp_path / "slow.py")).with_options(timeout=2) >> pool
    assert "slow.py:\nFile" in caught.value.__notes__[0]


def test_programs_of_a_gang_are_shown_with_their_ranks_and_before_the_processes_that_wait(
    pool: sky.ComputePool, hangs: Path
) -> None:
    shell = f"exec python3 {hangs} {hangs.with_name('started-')}$RANK"
    gang = sky.cmd("bash", "-c", f"echo $RANK; {shell}").with_options(procs=2)
    running = pool.send(gang)
    eventually(lambda: str(pool.stack()).count("in wait_for_more") == 1, 60, "both programs, whose stacks are alike")
    said = str(pool.stack()).splitlines()
    running.cancel()
    headings = [line for line in said if line.startswith("node")]
    assert [heading.split(", ")[1] for heading in headings[:2]] == ["rank 0", "rank 1"]
    assert all("hangs.py" in heading for heading in headings[:2])
    assert sorted(heading.rpartition(": ")[2] for heading in headings[2:]) == ["idle", *["waits for its program"] * 2]
    with pytest.raises(sky.CallTimeout) as caught:
        gang.with_options(timeout=4) >> pool
    assert all("in wait_for_more" in caught.value.stacks[rank] for rank in range(2))
    assert not any("skypool" in stack.replace("skypool-", "") for stack in caught.value.stacks.values())


def test_what_py_spy_says_is_read_like_what_processes_write() -> None:
    said = """Thread 78 (idle): "loader"
    wait (threading.py:324)
Thread 77 (active+gil): "MainThread"
    step (/opt/my (old) code/train.py:12)
    <module> (train.py:99)
"""
    assert stacks._spied(said) == [
        ['File "/opt/my (old) code/train.py", line 12 in step', 'File "train.py", line 99 in <module>'],
        ['File "threading.py", line 324 in wait'],
    ]


def test_skypool_stack_shows_gangs_services_and_idle_workers(pool: sky.ComputePool) -> None:
    running = pool.submit(hang, "native")
    service = pool.service(sky.cmd("sleep", "600"), name="web")
    try:
        alike = re.compile(r"node 0, rank 0, process \d+\nnode 0, rank 1, process \d+\n  File .*, line \d+ in native")
        eventually(lambda: alike.search(asked()) and "sleep 600" in asked(), 60, "both ranks and the service")
        said = asked()
        assert ": idle" in said
        assert "sleep 600, process" in said
        found = [json.loads(line) for line in asked("--json", "--node", "0").splitlines()]
        assert {each["state"] for each in found if each["name"].startswith("rank ")} == {"running"}
    finally:
        running.cancel()
        service.close()


def test_a_pool_returns_what_its_processes_do(pool: sky.ComputePool) -> None:
    running = pool.submit(hang, "native")
    try:
        found = pool.stack(0)

        def both() -> bool:
            nonlocal found
            found = pool.stack(0)
            return sum("in native" in str(each) for each in found.nodes[0]) == 2

        eventually(both, 60, "both ranks")
        ranks = {each.name: each for each in found.nodes[0] if each.name.startswith("rank ")}
        assert {each.state for each in ranks.values()} == {"running"}
        assert all("in native" in "\n".join(each.stacks[0]) for each in ranks.values())
        assert not any(each.native for each in found.nodes[0])
        assert not found.errors
        assert {name: each.rank for name, each in ranks.items()} == {"rank 0": 0, "rank 1": 1}
        assert str(ranks["rank 1"]).startswith(f"node 0, rank 1, process {ranks['rank 1'].pid}\n  File")
    finally:
        running.cancel()
    with pytest.raises(sky.UsageError, match="7"):
        pool.stack(7)


@pytest.mark.slow
def test_a_pool_returns_native_calls_or_why_there_are_none(pool: sky.ComputePool) -> None:
    running = pool.submit(hang, "native")
    try:
        eventually(lambda: str(pool.stack()).count("rank ") == 2, 60, "both ranks")
        ranks = [each for each in pool.stack(native=True).nodes[0] if each.name.startswith("rank ")]
        assert len(ranks) == 2
        for each in ranks:
            assert each.stacks
            if os.geteuid() == 0:  # root may install py-spy on the node, and trace any process
                assert not each.problem
            assert ("read (libc" in each.native) != bool(each.problem)
    finally:
        running.cancel()


def test_an_answer_that_came_late_is_not_shown_beside_the_next_one() -> None:
    thread = 'Thread 0x{}0 (most recent call first):\n  File "train.py", line {} in {}\n'
    late = thread.format(1, 7, "load") + thread.format(2, 3, "main") + "\n"
    now = thread.format(1, 8, "step") + thread.format(2, 3, "main")
    assert stacks.threads_of(late + now, 0x20) == [
        ['File "train.py", line 3 in main'],
        ['File "train.py", line 8 in step'],
    ]
    assert stacks.threads_of(late, 0x20) == [['File "train.py", line 3 in main'], ['File "train.py", line 7 in load']]


def test_a_pool_that_was_not_started_or_has_ended_has_no_stacks() -> None:
    pool = sky.ComputePool(name="undone", slots=1, console="off")
    assert pool.stack() == Stacks({})
    pool.start()
    pool.stop()
    with pytest.raises(sky.PoolClosed):
        pool.stack()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("echo '\033[2Jno python' >&2; exit 3", "no python"),
        ("echo '{'", "no valid answer"),
        ("echo '[1]'", "no valid answer"),
        ("""echo '[{"pid": 1e999}]'""", "no valid answer"),
        ("""echo '[{"pid": -1}]'""", "no valid answer"),
        ("""echo '[{"pid": 1, "stacks": "abc"}]'""", "no valid answer"),
        ("""echo '[{"pid": 1, "name": []}]'""", "no valid answer"),
        ("yes", "said more than 4 MiB"),
        ("yes >&2", "cannot be asked what it does: y"),
        ("sleep 60", "did not say within 1 s"),
    ],
)
def test_a_node_that_answers_with_nonsense_is_an_error(answer: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed, "_PATIENCE", 1.0)
    found = observed.ask("strange", [3], False, lambda *_: ["sh", "-c", answer])
    assert not found.nodes
    assert why in str(found.errors[3])
    assert "\033" not in str(found)


def test_a_strange_node_cannot_send_control_sequences_to_the_terminal() -> None:
    said = [{"name": "x", "pid": 7, "command": "a\033]0;b\007c", "state": "S\033[2J", "stacks": [["\033[31mf"]]}]
    found = observed.ask("strange", [0], False, lambda *_: ["echo", json.dumps(said)])
    assert str(found) == "node 0, ac, process 7: S\n  f"


def test_a_strange_node_cannot_write_lines_that_look_like_those_of_another_node() -> None:
    fake = "\nnode 1, worker 0, process 9"
    said = [{"pid": 7, "native": f"frame{fake}\r{fake[1:]}", "stacks": [[f"f{fake}"]]}]
    said[0] |= dict.fromkeys(("name", "command", "state", "problem"), f"x{fake}\u2028{fake[1:]}")
    found = observed.ask("strange", [0], True, lambda *_: ["echo", json.dumps(said)])
    assert [line for line in str(found).splitlines() if not line.startswith(" ")] == [
        "node 0, x node 1, worker 0, process 9 node 1, worker 0, process 9, process 7: "
        "x node 1, worker 0, process 9 node 1, worker 0, process 9"
    ]


@pytest.mark.parametrize("what", ["[{}" + ",{}" * (5 << 20), "[" * (4 << 20), '{"stacks":[' + "[]," * (1 << 20)])
def test_a_strange_node_costs_little_and_hides_no_other_node(what: str, tmp_path: Path) -> None:
    (tmp_path / "0").write_text(what)
    (tmp_path / "1").write_text('[{"pid": 7, "name": "x", "state": "running", "stacks": [["f"]]}]')
    began, before = time.process_time(), memory()
    found = observed.ask("strange", [0, 1, 2], False, lambda node, _: ["cat", str(tmp_path / f"{node}")])
    assert time.process_time() - began < 1
    assert memory() - before < 50 << 20
    assert str(found.nodes[1][0]) == "node 1, x, process 7\n  f"
    assert sorted(found.errors) == [0, 2]


def test_a_node_for_which_no_command_can_be_made_hides_no_other_node() -> None:
    ways = {1: ["echo", "[]"]}
    found = observed.ask("strange", [0, 1], False, lambda node, _: ways[node])
    assert found.nodes == {1: ()}
    assert "KeyError: 0" in str(found.errors[0])


def test_a_pool_that_does_not_run_has_no_stacks() -> None:
    done = CliRunner().invoke(cli.build(), ["stack", "nobody"])
    assert isinstance(done.exception, sky.UsageError)
    assert "does not exist" in str(done.exception)


def test_a_process_that_does_not_expect_the_signal_is_not_disturbed() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert stacks.ask(process.pid) is None
        assert process.poll() is None
        process.communicate(b"\n")
    assert process.returncode == 0


def test_a_machine_without_the_right_to_trace_says_so(tmp_path: Path) -> None:
    spy = tmp_path / "py-spy"
    spy.write_text(
        "#!/bin/sh\necho 'Error: Permission Denied: Try running again with elevated permissions' >&2\nexit 1\n"
    )
    spy.chmod(0o755)
    text, problem = stacks._dump([str(spy)], 1, native=True)
    assert text == ""
    assert "SYS_PTRACE" in problem


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("runs", "ways"), [(10, ["--how", "barrier"]), (4, [])], ids=["in a barrier", "in random ways"]
)
def test_gangs_that_hang_say_where_each_rank_was(runs: int, ways: list[str]) -> None:
    argv = [sys.executable, "-m", "tests.soak.stacks", "--runs", str(runs), "--seed", "7", *ways]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
