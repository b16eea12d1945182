"""What the processes of a pool are doing: `skypool stack`, and the errors of calls that ran too long."""

from __future__ import annotations

import json
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
from skypool.observers import place
from tests.conftest import eventually
from tests.stack_work import hang

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.ComputePool]:
    with sky.ComputePool(name="doing", slots=1, console="off", grace=1) as made:
        eventually(lambda: "doing" in place.pools(), 30, "the socket")
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
    (note,) = caught.value.__notes__
    assert "rank 2:\n" in note
    assert 'stack_work.py", line' in note
    assert "skypool/agent" not in note


def test_a_call_that_runs_too_long_says_where_it_was(pool: sky.ComputePool) -> None:
    with pytest.raises(sky.CallTimeout) as caught:
        pool.submit(sky.compute(time.sleep).with_options(timeout=0.5), 600).result()
    assert not caught.value.stacks


def test_skypool_stack_shows_gangs_services_and_idle_workers(pool: sky.ComputePool) -> None:
    running = pool.submit(hang, "native")
    service = pool.service(sky.cmd("sleep", "600"), name="web")
    try:
        eventually(lambda: asked().count("in native") == 2 and "sleep 600" in asked(), 60, "both ranks and the service")
        said = asked()
        assert "node 0, rank 0, process" in said
        assert "node 0, rank 1, process" in said
        assert ": idle" in said
        assert "sleep 600, process" in said
        found = [json.loads(line) for line in asked("--json", "--node", "0").splitlines()]
        assert {each["state"] for each in found if each["name"].startswith("skypool-rank-")} == {"running"}
    finally:
        running.cancel()
        service.close()


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
    text, problem = stacks._dump([str(spy)], 1)
    assert text == ""
    assert "SYS_PTRACE" in problem


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_gangs_that_hang_in_random_ways_say_where_each_rank_was() -> None:
    argv = [sys.executable, "-m", "tests.soak.stacks", "--runs", "10", "--seed", "7"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
